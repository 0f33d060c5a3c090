"""A server that is stopped and started again in the middle of something: all of it comes, each sample once."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from contextlib import AsyncExitStack, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import anyio
import pytest
import torch
from aiohttp import web
from torch.utils.data import DataLoader

import asyncfetch as af
from asyncfetch.merge import merge_datasets
from asyncfetch.runtime.sockets import Sockets
from asyncfetch.tensors import TensorClient
from asyncfetch.tensors.server import make_application
from asyncfetch.tensors.storage import ShardStorage
from asyncfetch.torch import StreamDataset
from tests.end_to_end.conftest import Served, unbatch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

    from asyncfetch.testing import DatasetTruth

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
    pytest.mark.slow,
    pytest.mark.usefixtures("programs_are_warm"),
]

AWAY_SECONDS = 2.0
CONFIG = af.StreamConfig(pool_segments=2, prefetch_segments=1, fetch=af.FetchConfig(trust_env=False))
SERVER = """
import os, signal, sys, threading
from asyncfetch.testing import Fault, RangeServer

root, port, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
seen = 0

def fault(request):
    global seen
    if ".mp4" not in request.path:
        return None
    seen += 1
    if seen != last:
        return None
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return Fault.stall(500)

with RangeServer(root, port=port, tls=False, fault=fault) as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


@contextmanager
def held_port() -> Iterator[int]:
    """A port that a server may listen at and that refuses others: while none does, no one else is given it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


class RestartedServer:
    """A process that dies within the answer to a request for a video; another one takes its place, a while later."""

    def __init__(self, root: Path, *, last: int) -> None:
        self._root, self._last = root, last
        self._thread = threading.Thread(target=self._restart)
        self._stack = ExitStack()

    def _start(self, last: int) -> None:
        command = [sys.executable, "-c", SERVER, str(self._root), str(self._port), str(last)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()

    def _restart(self) -> None:
        with self._process:
            self._process.wait()
        time.sleep(AWAY_SECONDS)
        self._start(0)

    def __enter__(self) -> Self:
        self._port = self._stack.enter_context(held_port())
        self._start(self._last)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._thread.is_alive():
            self._process.kill()
        self._thread.join()
        with self._process, self._stack:
            self._process.kill()


@pytest.fixture
def restarted(truth: DatasetTruth) -> Iterator[RestartedServer]:
    with RestartedServer(truth.root, last=6) as server:
        yield server


def test_a_stream(served: Served, restarted: RestartedServer) -> None:
    stream = af.Stream(restarted.url, seed=0, config=CONFIG)
    assert sorted(served.check(stream)) == served.keys
    assert stream.report().statistics.fetch.outages == 1


def test_loader_workers(served: Served, restarted: RestartedServer) -> None:
    dataset = StreamDataset(af.Stream(restarted.url, seed=0, config=CONFIG), batch_size=4)
    keys = served.check_batches(DataLoader(dataset, batch_size=None, num_workers=2))
    assert sorted(keys) == served.keys


def test_served_samples(served: Served, restarted: RestartedServer) -> None:
    with af.serve_samples(af.Stream(restarted.url, seed=0, config=CONFIG), batch_size=4) as batches:
        keys = [key for batch in batches for key in served.check(unbatch(batch))]
    assert sorted(keys) == served.keys


def test_the_disk_cache(served: Served, restarted: RestartedServer, tmp_path: Path) -> None:
    config = af.StreamConfig(pool_segments=2, prefetch_segments=1, disk_cache_dir=tmp_path, fetch=CONFIG.fetch)
    for _ in range(2):
        assert sorted(served.check(af.Stream(restarted.url, seed=0, config=config))) == served.keys


def test_a_merge(truth: DatasetTruth, tmp_path: Path) -> None:
    with RestartedServer(truth.root, last=1) as server:
        anyio.run(lambda: merge_datasets([server.url, server.url], tmp_path / "out", fetch=CONFIG.fetch))
        anyio.run(lambda: merge_datasets([truth.root, truth.root], tmp_path / "same"))
    for file in (tmp_path / "same").rglob("*.[pjm]*"):
        assert (tmp_path / "out" / file.relative_to(tmp_path / "same")).read_bytes() == file.read_bytes()


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as number:
        yield number


async def test_remote_tensors(port: int) -> None:
    storage = ShardStorage(max_bytes=2**20)
    tensors = [torch.full((1000,), float(number)) for number in range(8)]
    url = f"http://127.0.0.1:{port}"
    client = TensorClient(backend="http", fetch=CONFIG.fetch, shared_memory=False)  # not Ray, where that is initialised
    async with AsyncExitStack() as stack, client:

        async def start() -> None:
            runner = web.AppRunner(make_application(storage, None, None))
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            assert runner.server is not None
            sockets = Sockets()
            stack.callback((await sockets.serve(runner.server, "127.0.0.1", port, None)).close)
            stack.push_async_callback(sockets.aclose)

        async def start_later() -> None:
            await anyio.sleep(AWAY_SECONDS)
            await start()

        async def while_away(work: Callable[[], Awaitable[list[Any]]]) -> list[Any]:
            await stack.aclose()
            began = time.monotonic()
            async with anyio.create_task_group() as group:
                group.start_soon(start_later)
                found = await work()
                assert time.monotonic() - began > AWAY_SECONDS / 2
            return found

        await start()
        stored: list[Any] = await client.remotize(tensors[:4], url)
        stored += await while_away(partial(client.remotize, tensors[4:], url))
        for tensor, found in zip(tensors, await while_away(partial(client.localize, stored)), strict=True):
            assert torch.equal(tensor, found)
