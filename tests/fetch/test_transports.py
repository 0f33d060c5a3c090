"""One suite of checks over everything that the fetcher reads from."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from anyio import to_thread
from botocore.session import get_session
from fsspec.implementations.memory import MemoryFileSystem
from moto.server import ThreadedMotoServer

from asyncfetch.config import FetchConfig, S3Config
from asyncfetch.fetch import Fetcher
from asyncfetch.testing import HubServer, Keys, RangeServer, S3Server, conformance

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from asyncfetch.testing.conformance import Check


@dataclass
class Store:
    fetcher: Fetcher
    write: Callable[[str, bytes], str]
    can_list: bool = True
    can_replace: bool = True

    async def put(self, name: str, content: bytes) -> str:
        return await to_thread.run_sync(self.write, name, content)


@asynccontextmanager
async def web(*, tls: bool, by_session: bool) -> AsyncIterator[Store]:
    objects: dict[str, bytes] = {}

    def write(name: str, content: bytes) -> str:
        objects[name] = content
        return f"{server.url}/{quote(name)}"

    async with RangeServer(objects, tls=tls) as server:
        config = FetchConfig(ca_file=server.ca_file, trust_env=False)
        async with Fetcher(config, _by_session=by_session) as fetcher:
            yield Store(fetcher, write, can_list=False)


@asynccontextmanager
async def s3(*, by_session: bool) -> AsyncIterator[Store]:
    objects: dict[str, bytes] = {}

    def write(name: str, content: bytes) -> str:
        objects[f"bucket/{name}"] = content
        return f"s3://bucket/{name}"

    async with S3Server(objects, page_keys=2) as server:
        s3 = S3Config(endpoint_url=server.url)
        config = FetchConfig(ca_file=server.ca_file, s3=s3)
        async with Fetcher(config, _by_session=by_session) as fetcher:
            yield Store(fetcher, write)


@asynccontextmanager
async def hub(*, by_session: bool) -> AsyncIterator[Store]:
    files: dict[str, bytes] = {}

    def write(name: str, content: bytes) -> str:
        files[name] = content
        server.push("datasets/org/name", files)
        return f"hf://datasets/org/name/{name}"

    async with HubServer(page_entries=2, token="t") as server:
        config = FetchConfig(
            ca_file=server.ca_file,
            hub_endpoint=server.url,
            tokens={"127.0.0.1": "t"},
            trust_env=False,
        )
        async with Fetcher(config, _by_session=by_session) as fetcher:
            yield Store(fetcher, write, can_replace=False)


@asynccontextmanager
async def local(directory: Path) -> AsyncIterator[Store]:
    def write(name: str, content: bytes) -> str:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path.as_uri()

    async with Fetcher() as fetcher:
        yield Store(fetcher, write)


@asynccontextmanager
async def memory() -> AsyncIterator[Store]:
    files = MemoryFileSystem()

    def write(name: str, content: bytes) -> str:
        files.pipe_file(f"/conformance/{name}", content)
        return f"memory://conformance/{name}"

    async with Fetcher() as fetcher:
        yield Store(fetcher, write)
    files.rm("/conformance", recursive=True)


@pytest.fixture(scope="module")
def moto() -> Iterator[tuple[Any, str]]:
    """botocore's client of a server of moto, and a bucket there: a new one, for all servers of a process share them."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"aws_access_key_id": Keys().access_key, "aws_secret_access_key": Keys().secret_key}
    client = get_session().create_client("s3", region_name="us-east-1", endpoint_url=f"http://{host}:{port}", **keys)
    client.create_bucket(Bucket=f"bucket-{port}")
    yield client, f"bucket-{port}"
    client.close()
    server.stop()


@asynccontextmanager
async def s3_of_moto(client: Any, bucket: str) -> AsyncIterator[Store]:  # noqa: ANN401 - botocore makes the class
    """Objects that botocore itself puts there."""

    def write(name: str, content: bytes) -> str:
        client.put_object(Bucket=bucket, Key=name, Body=content)
        return f"s3://{bucket}/{name}"

    async with Fetcher(FetchConfig(s3=S3Config(endpoint_url=client.meta.endpoint_url))) as fetcher:
        yield Store(fetcher, write)


@pytest.fixture
def stores(tmp_path: Path) -> dict[str, Callable[..., AbstractAsyncContextManager[Store]]]:
    """Those with sockets are read in both ways."""
    return {
        "http": partial(web, tls=False, by_session=False),
        "http, session": partial(web, tls=False, by_session=True),
        "https": partial(web, tls=True, by_session=False),
        "https, session": partial(web, tls=True, by_session=True),
        "s3": partial(s3, by_session=False),
        "s3, session": partial(s3, by_session=True),
        "hub": partial(hub, by_session=False),
        "hub, session": partial(hub, by_session=True),
        "file": partial(local, tmp_path),
        "memory": memory,
    }


ON_THE_NET = ["http", "http, session", "https", "https, session", "s3", "s3, session", "hub", "hub, session"]


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", [*ON_THE_NET, "file", "memory"])
async def test_conformance(
    stores: dict[str, Callable[..., AbstractAsyncContextManager[Store]]],
    name: str,
    check: Check,
    aws_keys: None,
) -> None:
    async with stores[name]() as store:
        await check(store)


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
async def test_conformance_of_what_motos_server_serves(moto: tuple[Any, str], check: Check, aws_keys: None) -> None:
    """The API as others understand it, all checks of it. What moto doesn't do is to look at signatures, or at the time
    when they expire: S3Server does, above.
    """
    async with s3_of_moto(*moto) as store:
        await check(store)
