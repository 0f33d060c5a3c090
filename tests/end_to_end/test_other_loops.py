"""Coroutines of ours where asyncio doesn't run: each says so, and what to do."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import trio

import asyncfetch as af
from asyncfetch.tensors import TensorClient, TensorServer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path


def without_a_loop(work: Callable[[], Coroutine[Any, Any, object]]) -> None:
    work().send(None)


def on_trio_as_a_guest_of_asyncio(work: Callable[[], Awaitable[object]]) -> None:
    async def host() -> None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Any] = loop.create_future()
        trio.lowlevel.start_guest_run(
            work, run_sync_soon_threadsafe=loop.call_soon_threadsafe, done_callback=ended.set_result
        )
        (await ended).unwrap()

    asyncio.run(host())


NOT_ASYNCIO = [trio.run, functools.partial(anyio.run, backend="trio"), on_trio_as_a_guest_of_asyncio, without_a_loop]


async def enter(manager: AbstractAsyncContextManager[object]) -> None:
    await manager.__aenter__()


async def picks_up(pool: af.CachePool | af.NoCachePool) -> None:
    await pool.get_lazy(af.DirectoryStore("tests/data"), "h264/meta/info.json")


DATASET = "tests/data/h264"
ENTRIES: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
    "Fetcher": lambda: enter(af.Fetcher()),
    "ByteCache": lambda: enter(af.ByteCache(af.Fetcher(), max_bytes=100)),
    "disk cache": lambda: enter(af.ByteCache(af.Fetcher(), max_bytes=100, disk=af.DiskTier("nowhere", max_bytes=100))),
    "dataset": lambda: enter(af.open_dataset(DATASET)),
    "pass": lambda: enter(af.Stream(DATASET).samples()),
    "mixture": lambda: enter(af.Mixture([af.Stream(DATASET)], weights=[1]).samples()),
    "TensorServer": lambda: enter(TensorServer(max_bytes=100)),
    "TensorClient": lambda: enter(TensorClient()),
    "ahead": lambda: enter(TensorClient().ahead([])),
    "merge": lambda: af.merge_datasets([DATASET], "nowhere"),
    "select": lambda: af.select_episodes(DATASET, "nowhere", [0]),
    "split": lambda: af.split_dataset(DATASET, {"all": [0]}, "nowhere"),
    "convert": lambda: af.convert_dataset(DATASET, "nowhere"),
    "NoCachePool": lambda: picks_up(af.NoCachePool()),
    "RangeServer": lambda: enter(af.testing.RangeServer({})),
}


@pytest.mark.parametrize("run", NOT_ASYNCIO, ids=["trio", "anyio", "guest", "nothing"])
@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_coroutines_on_other_loops_say_that_they_need_asyncio(
    entry: Callable[[], Coroutine[Any, Any, object]], run: Callable[[Any], object]
) -> None:
    with pytest.raises(af.ConfigError, match=r"needs asyncio, which doesn't run here: .* asyncio\.run\(\.\.\.\)"):
        run(entry)


@pytest.mark.parametrize("run", NOT_ASYNCIO, ids=["trio", "anyio", "guest", "nothing"])
def test_calls_in_threads_say_that_they_need_asyncio(run: Callable[[Any], object], tmp_path: Path) -> None:
    client = TensorClient()
    with client, af.CachePool(tmp_path, workers=1, max_bytes=2**20, method="raw") as pool:
        for work in (lambda: picks_up(pool), lambda: client.localize([])):
            with pytest.raises(af.ConfigError, match="needs asyncio"):
                run(work)


async def test_a_guest_of_asyncio_is_told_of_what_asyncio_has_entered() -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Any] = loop.create_future()
    async with af.open_dataset(DATASET) as dataset:
        trio.lowlevel.start_guest_run(
            enter,
            af.Stream(dataset).samples(),
            run_sync_soon_threadsafe=loop.call_soon_threadsafe,
            done_callback=ended.set_result,
        )
        with pytest.raises(af.ConfigError, match="needs asyncio"):
            (await ended).unwrap()


async def test_fetcher_that_trio_could_not_enter_works_in_asyncio() -> None:
    fetcher = af.Fetcher()
    with pytest.raises(af.ConfigError, match="needs asyncio"):
        await asyncio.to_thread(trio.run, fetcher.__aenter__)
    async with fetcher:
        assert len(await fetcher.fetch("LICENSE", 0, 9)) == 9
