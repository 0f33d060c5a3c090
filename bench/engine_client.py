"""One client of bench.engine in a process of its own, so that its CPU and its memory are its own.

Started by bench.engine as ``python -m bench.engine_client``, with a Case as JSON for its argument. It opens what it
needs, fetches a few ranges so that its connections are there, says so on a line, and then does the case's work once for
each line it reads, answering with a Measured as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import ssl
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import anyio
from anyio import to_thread

from bench.process_memory import forget_peak, peak_bytes, resident_bytes

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

    from obstore.store import ClientConfig

MIB = 1024 * 1024
BUCKET = "bucket"
"""The directory of the server's root that holds the object once more."""
REGION = "us-east-1"
KEYS = {"AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_EC2_METADATA_DISABLED": "true"}
CHECKSUMS = {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}


@dataclass(frozen=True)
class Case:
    """What one process does."""

    client: str
    """A key of CLIENTS."""
    loop: str
    """A key of LOOPS."""
    url: str
    ca_file: str | None
    object_bytes: int
    range_bytes: int
    concurrency: int
    requests: int
    """In one repeat."""

    def starts(self) -> list[int]:
        """Where the ranges begin: the same for every client."""
        places = random.Random(0)
        return [places.randrange(self.object_bytes - self.range_bytes + 1) for _ in range(self.requests)]


@dataclass(frozen=True)
class Measured:
    """One repeat."""

    cpu_seconds: float
    """Of all threads of the process."""
    seconds: float
    peak_bytes: int
    """Resident memory at its highest so far, above what the opened client began with."""


Fetch = Callable[[int], Awaitable[int]]
"""Fetches the range that starts there and tells how many bytes came."""


async def open_asyncfetch(case: Case, stack: AsyncExitStack, *, by_session: bool = False) -> Fetch:
    """This engine."""
    import asyncfetch as af

    config = af.FetchConfig(
        ca_file=case.ca_file,
        max_requests_per_host=case.concurrency,
        learn_limit=False,
        trust_env=False,
    )
    fetcher = await stack.enter_async_context(af.Fetcher(config, _by_session=by_session))

    async def fetch(start: int) -> int:
        return len(await fetcher.fetch(case.url, start, start + case.range_bytes))

    return fetch


async def open_asyncfetch_copying(case: Case, stack: AsyncExitStack) -> Fetch:
    """This engine where the socket doesn't write into the buffers itself."""
    return await open_asyncfetch(case, stack, by_session=True)


async def open_aiohttp(case: Case, stack: AsyncExitStack) -> Fetch:
    """Bare aiohttp, whole bodies by ``read()``; nothing is checked or repeated."""
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0, ssl=_tls(case))
    session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, auto_decompress=False))

    async def fetch(start: int) -> int:
        headers = {"Range": f"bytes={start}-{start + case.range_bytes - 1}"}
        async with session.get(case.url, headers=headers) as response:
            return len(await response.read())

    return fetch


async def open_asyncio(case: Case, stack: AsyncExitStack) -> Fetch:
    """A bare loop, which knows one server, one path and one length, and checks nothing but the status."""
    from bench.slow_link import BareConnection

    url = urlsplit(case.url)
    tls = ssl.create_default_context(cafile=case.ca_file) if case.ca_file else None
    loop = asyncio.get_running_loop()
    idle: list[BareConnection] = []

    def close() -> None:
        for connection in idle:
            connection.transport.abort()

    stack.callback(close)

    async def fetch(start: int) -> int:
        if idle:
            connection = idle.pop()
        else:
            _, connection = await loop.create_connection(
                lambda: BareConnection(url.path, case.range_bytes), url.hostname or "", url.port or 0, ssl=tls
            )
        await connection.ask(start)
        idle.append(connection)
        return case.range_bytes  # what is counted before it is done

    return fetch


async def open_obstore(case: Case, stack: AsyncExitStack) -> Fetch:
    """The asynchronous ``get_range`` of obstore over its HTTP store."""
    import obstore
    from obstore.store import HTTPStore

    # It can't be given an authority to trust. Checking certificates is no part of what a range costs.
    base, _, name = case.url.rpartition("/")
    options: ClientConfig = {"allow_invalid_certificates": True} if case.ca_file else {"allow_http": True}
    store = HTTPStore.from_url(base, client_options=options)

    async def fetch(start: int) -> int:
        return len(await obstore.get_range_async(store, name, start=start, length=case.range_bytes))

    return fetch


async def open_fsspec(case: Case, stack: AsyncExitStack) -> Fetch:
    """The HTTP file system of fsspec on our loop, without its thread."""
    import aiohttp
    from fsspec.implementations.http import HTTPFileSystem

    async def get_client(**_: object) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, ssl=_tls(case)))

    filesystem = HTTPFileSystem(asynchronous=True, get_client=get_client, skip_instance_cache=True)
    session = await filesystem.set_session()
    stack.push_async_callback(session.close)

    async def fetch(start: int) -> int:
        return len(await filesystem._cat_file(case.url, start=start, end=start + case.range_bytes))

    return fetch


# The same bytes as an object of S3, each range signed as that client does it; nginx looks at no signature.


def _endpoint_and_key(case: Case) -> tuple[str, str]:
    os.environ.update(KEYS)
    endpoint, _, key = case.url.rpartition("/")
    return endpoint, key


async def open_asyncfetch_s3(case: Case, stack: AsyncExitStack) -> Fetch:
    """This engine: one signature for all ranges of the object."""
    import asyncfetch as af

    endpoint, key = _endpoint_and_key(case)
    config = af.FetchConfig(
        ca_file=case.ca_file,
        max_requests_per_host=case.concurrency,
        trust_env=False,
        s3=af.S3Config(endpoint_url=endpoint, region=REGION),
    )
    fetcher = await stack.enter_async_context(af.Fetcher(config))

    async def fetch(start: int) -> int:
        return len(await fetcher.fetch(f"s3://{BUCKET}/{key}", start, start + case.range_bytes))

    return fetch


async def open_aiobotocore(case: Case, stack: AsyncExitStack) -> Fetch:
    """``get_object`` and ``read``."""
    from aiobotocore.config import AioConfig
    from aiobotocore.session import get_session

    endpoint, key = _endpoint_and_key(case)
    config = AioConfig(max_pool_connections=case.concurrency, **CHECKSUMS)
    client: Any = await stack.enter_async_context(
        get_session().create_client("s3", region_name=REGION, endpoint_url=endpoint, verify=case.ca_file, config=config)
    )

    async def fetch(start: int) -> int:
        asked = f"bytes={start}-{start + case.range_bytes - 1}"
        answer = await client.get_object(Bucket=BUCKET, Key=key, Range=asked)
        async with answer["Body"] as body:
            return len(await body.read())

    return fetch


async def open_s3fs(case: Case, stack: AsyncExitStack) -> Fetch:
    """The file system s3fs on our loop, without fsspec's thread."""
    from s3fs import S3FileSystem

    endpoint, key = _endpoint_and_key(case)
    filesystem = S3FileSystem(
        asynchronous=True,
        skip_instance_cache=True,
        endpoint_url=endpoint,
        client_kwargs={"region_name": REGION, "verify": case.ca_file},
        config_kwargs={"max_pool_connections": case.concurrency, **CHECKSUMS},
    )
    session = await filesystem.set_session()
    stack.push_async_callback(session.close)

    async def fetch(start: int) -> int:
        return len(await filesystem._cat_file(f"{BUCKET}/{key}", start=start, end=start + case.range_bytes))

    return fetch


async def open_obstore_s3(case: Case, stack: AsyncExitStack) -> Fetch:
    """The asynchronous ``get_range`` of obstore over its S3 store. It trusts no authority of ours, so checks none."""
    import obstore
    from obstore.store import S3Store

    endpoint, key = _endpoint_and_key(case)
    store = S3Store(
        BUCKET,
        endpoint=endpoint,
        region=REGION,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True, "allow_invalid_certificates": True},
    )

    async def fetch(start: int) -> int:
        return len(await obstore.get_range_async(store, key, start=start, length=case.range_bytes))

    return fetch


async def open_s3torchconnector(case: Case, stack: AsyncExitStack) -> Fetch:
    """The client below s3torchconnector, on the AWS runtime; it blocks, so it is asked in threads. Plain HTTP only."""
    from s3torchconnectorclient._mountpoint_s3_client import MountpointS3Client

    endpoint, key = _endpoint_and_key(case)
    client = MountpointS3Client(region=REGION, endpoint=endpoint, force_path_style=True)
    threads = anyio.CapacityLimiter(case.concurrency)

    def get(start: int) -> int:
        stream = client.get_object(BUCKET, key, start=start, end=start + case.range_bytes)
        return len(b"".join(stream))

    async def fetch(start: int) -> int:
        return await to_thread.run_sync(get, start, limiter=threads)

    return fetch


CLIENTS: dict[str, Callable[[Case, AsyncExitStack], Coroutine[None, None, Fetch]]] = {
    "asyncfetch": open_asyncfetch,
    "asyncfetch-copying": open_asyncfetch_copying,
    "obstore": open_obstore,
    "aiohttp": open_aiohttp,
    "asyncio": open_asyncio,
    "fsspec": open_fsspec,
    "asyncfetch-s3": open_asyncfetch_s3,
    "obstore-s3": open_obstore_s3,
    "aiobotocore": open_aiobotocore,
    "s3fs": open_s3fs,
    "s3torchconnector": open_s3torchconnector,
}
"""By name: makes a client; the stack closes it. The name's part in front of "-" is the package it needs."""
PLAIN_ONLY = {"s3torchconnector"}
"""Clients that can't be given an authority to trust, and can't be told to trust everybody."""


def run_asyncio(work: Coroutine[None, None, None]) -> None:
    """The loop of the standard library."""
    asyncio.run(work)


def run_uvloop(work: Coroutine[None, None, None]) -> None:
    """uvloop, if it is installed."""
    import uvloop

    uvloop.run(work)


LOOPS: dict[str, Callable[[Coroutine[None, None, None]], None]] = {
    "asyncio": run_asyncio,
    "uvloop": run_uvloop,
}
"""By name: runs a coroutine."""


def _tls(case: Case) -> ssl.SSLContext | bool:
    return ssl.create_default_context(cafile=case.ca_file) if case.ca_file else True


async def fetch_all(case: Case, starts: Iterable[int], fetch: Fetch) -> None:
    """Every range once, so many at a time; an error where one is short."""
    waiting = iter(starts)

    async def work() -> None:
        for start in waiting:
            length = await fetch(start)
            if length != case.range_bytes:
                raise ValueError(f"{case.client} brought {length} of {case.range_bytes} bytes")

    async with anyio.create_task_group() as group:
        for _ in range(case.concurrency):
            group.start_soon(work)


async def serve(case: Case) -> None:
    """Do the case once for each line of the input."""
    async with AsyncExitStack() as stack:
        fetch = await CLIENTS[case.client](case, stack)
        starts = case.starts()
        before = resident_bytes()
        forget_peak()
        await fetch_all(case, (starts * 2)[: 2 * case.concurrency], fetch)
        print("ready", flush=True)
        while sys.stdin.readline():  # nothing else is to run meanwhile, so it may block the loop
            cpu_seconds, started = time.process_time(), time.perf_counter()
            await fetch_all(case, starts, fetch)
            seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_seconds
            measured = Measured(cpu_seconds, seconds, peak_bytes() - before)
            print(json.dumps(asdict(measured)), flush=True)


if __name__ == "__main__":
    asked = Case(**json.loads(sys.argv[1]))
    LOOPS[asked.loop](serve(asked))
