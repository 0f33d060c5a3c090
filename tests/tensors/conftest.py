"""Servers of shards that do what a test wants, and every back end behind one face."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from asyncfetch.config import FetchConfig, RetryConfig, TimeoutConfig
from asyncfetch.tensors import TensorClient, TensorServer
from asyncfetch.tensors.server import make_application
from asyncfetch.tensors.storage import ShardStorage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    import torch

    from asyncfetch.tensors import RemoteTensor

MIB = 1024 * 1024
QUICK = FetchConfig(
    timeouts=TimeoutConfig(connect_seconds=2, first_byte_seconds=1, stall_seconds=0.3),
    retry=RetryConfig(attempts=3, initial_seconds=0.01, outage_seconds=0),
    trust_env=False,
)


@dataclass
class Backend:
    """Where shards go, and how to make clients of it."""

    name: str
    server: str
    """What ``remotize`` is given."""

    def client(self, **settings: Any) -> TensorClient:  # noqa: ANN401
        settings.setdefault("fetch", QUICK)
        settings.setdefault("shared_memory", False)
        return TensorClient(backend="ray" if self.name == "ray" else "http", **settings)


http_client = Backend("http", "").client


async def store(client: TensorClient, server: str, *tensors: torch.Tensor) -> list[RemoteTensor]:
    remotes: list[RemoteTensor] = await client.remotize(list(tensors), server)
    return remotes


@pytest.fixture
def server() -> Iterator[TensorServer]:
    """A server with room for 256 MiB, in a thread."""
    with TensorServer(max_bytes=256 * MIB, shared_memory=False) as server:
        yield server


@pytest.fixture(params=["http", pytest.param("ray", marks=pytest.mark.slow)])  # Ray takes its time to start
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each back end in turn."""
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
        return Backend("ray", "ray")
    return Backend("http", request.getfixturevalue("server").url)


@pytest_asyncio.fixture
async def client(backend: Backend) -> AsyncIterator[TensorClient]:
    """A client of the back end."""
    async with backend.client() as client:
        yield client


@dataclass
class ScriptedServer:
    """The real application behind a script: each request takes the next entry, and is honest after the last one."""

    url: str
    storage: ShardStorage
    script: list[Callable[[web.Request], Awaitable[web.StreamResponse | None]]] = field(default_factory=list)
    """None from an entry means the honest answer."""
    always: Callable[[web.Request], Awaitable[web.StreamResponse | None]] | None = None
    requests: list[str] = field(default_factory=list)
    """Method and path."""
    connections: set[int] = field(default_factory=set)

    def will(self, *statuses: int, headers: dict[str, str] | None = None) -> None:
        """Answer the next requests with these statuses."""
        self.script += [partial(_status, status, headers or {}) for status in statuses]


async def _status(status: int, headers: dict[str, str], request: web.Request) -> web.StreamResponse:
    return web.Response(status=status, headers=headers)


@pytest_asyncio.fixture
async def scripted() -> AsyncIterator[ScriptedServer]:
    """A server that can be told how to fail."""
    storage = ShardStorage(256 * MIB)
    there = ScriptedServer("", storage)

    @web.middleware
    async def follow(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        there.requests.append(f"{request.method} {request.path}")
        there.connections.add(id(request.transport))
        entry = there.script.pop(0) if there.script else there.always
        answer = await entry(request) if entry is not None else None
        return answer if answer is not None else await handler(request)

    application = make_application(storage, None, None)
    application.middlewares.insert(0, follow)
    async with TestServer(application) as server:
        there.url = f"http://127.0.0.1:{server.port}"
        yield there
    storage.close()
