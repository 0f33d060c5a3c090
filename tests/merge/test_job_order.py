"""The order of the work: what doesn't depend on it, how many sums wait, and how many pieces run at a time."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio.lowlevel
import pytest

from asyncfetch.errors import MergeError
from asyncfetch.merge import merge_datasets, summaries, tasks
from asyncfetch.merge.executor import InProcess
from asyncfetch.merge.summaries import Summary, summarise
from asyncfetch.merge.tasks import write
from tests.merge.test_job import all_files

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from asyncfetch.config import FetchConfig
    from asyncfetch.merge.executor import Executor, Piece, WorkerPool
    from tests.lerobot.serving import Library

    Run = Callable[..., Awaitable[Any]]


def around(call: Callable[..., Awaitable[Any]]) -> Executor:
    """An executor of this process that runs each piece by ``call(run, piece, *arguments)``."""

    class Around:
        @asynccontextmanager
        async def open(
            self, fetch: FetchConfig, workers: int | None, wrote: Callable[[str, int], object]
        ) -> AsyncIterator[WorkerPool]:
            async with InProcess().open(fetch, workers, wrote) as pool:
                pool.run = partial(call, pool.run)  # type: ignore[assignment, method-assign]
                yield pool

    return Around()


@pytest.mark.parametrize("workers", [1, 2])
async def test_no_more_pieces_run_than_there_are_workers(library: Library, tmp_path: Path, workers: int) -> None:
    running = most = 0

    async def count(run: Run, *piece: Any) -> Any:  # noqa: ANN401
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            return await run(*piece)
        finally:
            running -= 1

    options: dict[str, Any] = {"video_file_max_bytes": 1, "data_file_max_bytes": 1}
    roots = [library(episodes=(9, 4, 5)).root, library(episodes=(5, 6)).root]
    await merge_datasets(roots, tmp_path / "out", workers=workers, executor=around(count), **options)
    assert (most, running) == (workers, 0)
    await merge_datasets(roots, tmp_path / "alone", workers=1, **options)
    assert all_files(tmp_path / "out") == all_files(tmp_path / "alone")


async def test_parts_that_end_in_any_order_give_the_same(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each is added to another before more are made than there are workers, and one."""
    monkeypatch.setattr(tasks, "_PART_ROWS", 3)
    monkeypatch.setattr(summaries, "_FEW_ROWS", 0)
    roots = [library(episodes=(3, 4) * 6, cameras=()).root, library(episodes=(5,) * 8, cameras=()).root]
    draws, alive, most = random.Random(0), 0, 0

    async def dawdle(run: Run, piece: Piece, *arguments: Any) -> Any:  # noqa: ANN401
        nonlocal alive, most
        value = await run(piece, *arguments)
        for _ in range(draws.randrange(30)):
            await anyio.lowlevel.checkpoint()
        alive += piece is summarise
        most = max(most, alive)
        return value

    def add(one: Summary, other: Summary) -> Summary:
        nonlocal alive
        alive -= 1
        return sum_of(one, other)

    sum_of = Summary.__add__
    monkeypatch.setattr(Summary, "__add__", add)
    for workers in (1, 3):
        alive = most = 0
        await merge_datasets(roots, tmp_path / f"by-{workers}", workers=workers, executor=around(dawdle))
        assert 2 <= most <= workers + 4  # of each of three rounds before, one sum is left
    assert all_files(tmp_path / "by-1") == all_files(tmp_path / "by-3")


async def test_the_first_error_ends_the_rest(library: Library, tmp_path: Path) -> None:
    begun = ended = 0

    async def refuse(run: Run, piece: Piece, *arguments: Any) -> Any:  # noqa: ANN401
        nonlocal begun, ended
        if piece is not write:
            return await run(piece, *arguments)
        begun += 1
        if begun > 1:
            raise MergeError("no")
        try:
            return await run(piece, *arguments)
        finally:
            ended += 1

    with pytest.raises(MergeError, match="no"):
        await merge_datasets(
            [library(episodes=(9, 4, 5)).root],
            tmp_path / "out",
            workers=2,
            executor=around(refuse),
            video_file_max_bytes=1,
            data_file_max_bytes=1,
        )
    assert begun > ended == 1
