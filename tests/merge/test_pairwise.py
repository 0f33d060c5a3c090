"""The order of the work: what is added to what, how deep, how much is held, and how many pieces run at a time."""

from __future__ import annotations

import math
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest

from asyncfetch.errors import MergeError
from asyncfetch.merge import merge_datasets
from asyncfetch.merge.local_executor import InProcess
from asyncfetch.merge.pairwise import PairwiseSum
from asyncfetch.merge.tasks import write
from tests.merge.test_job import all_files

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from asyncfetch.config import FetchConfig
    from asyncfetch.merge.executor import Executor, Piece, WorkerPool
    from tests.lerobot.serving import Library


async def join(left: tuple[str, int], right: tuple[str, int]) -> tuple[str, int]:
    """Text, and the depth of the additions that it comes from."""
    return left[0] + right[0], max(left[1], right[1]) + 1


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 64])
async def test_values_are_added_in_order_no_deeper_than_a_tree(count: int) -> None:
    names = [chr(0x4E00 + number) for number in range(count)]
    for seed in range(5):
        sums, order = PairwiseSum(count, join), list(enumerate(names))
        random.Random(seed).shuffle(order)
        for number, name in order:
            await sums.put(number, (name, 0))
        assert sums.total == ("".join(names), math.ceil(math.log2(count)))


async def test_the_same_values_are_added_whatever_comes_first() -> None:
    """Else rounding would differ."""

    async def bracket(left: str, right: str) -> str:
        return f"({left}{right})"

    for order in ("abcdefg", "gfedcba", "dgabfce"):
        sums = PairwiseSum(7, bracket)
        for name in order:
            await sums.put("abcdefg".index(name), name)
        assert sums.total == "(((ab)(cd))((ef)g))"


async def test_a_late_value_delays_its_own_sums_only() -> None:
    made: list[str] = []

    async def note(left: str, right: str) -> str:
        made.append(left + right)
        return left + right

    sums = PairwiseSum(8, note)
    for name in "abdefgh":
        await sums.put("abcdefgh".index(name), name)
    assert set(made) == {"ab", "ef", "gh", "efgh"}
    await sums.put(2, "c")
    assert made[-3:] == ["cd", "abcd", "abcdefgh"]
    assert sums.total == "abcdefgh"


@pytest.mark.parametrize("workers", [1, 2, 4])
async def test_values_are_added_before_more_are_made(workers: int) -> None:
    """Else there would be as many at a time as there are values."""
    alive = most = 0

    async def add(left: str, right: str) -> str:
        nonlocal alive
        await anyio.lowlevel.checkpoint()
        alive -= 1
        return left + right

    async def make(number: int) -> None:
        nonlocal alive, most
        async with limiter:
            alive, most = alive + 1, max(most, alive + 1)
            await sums.put(number, str(number))

    sums, limiter = PairwiseSum(128, add), anyio.CapacityLimiter(workers)
    async with anyio.create_task_group() as tasks:
        for number in range(128):
            tasks.start_soon(make, number)
    assert alive == 1
    assert most <= 2 * workers + math.log2(128)


def watched(before: Callable[[Piece], None], after: Callable[[Piece], None]) -> Executor:
    """An executor of this process that calls these around each piece."""

    class Deadline:
        @asynccontextmanager
        async def open(
            self, fetch: FetchConfig, workers: int | None, wrote: Callable[[str, int], object]
        ) -> AsyncIterator[WorkerPool]:
            async with InProcess().open(fetch, workers, wrote) as pool:
                run = pool.run

                async def watch(piece: Piece, *arguments: Any) -> Any:  # noqa: ANN401
                    before(piece)
                    try:
                        return await run(piece, *arguments)
                    finally:
                        after(piece)

                pool.run = watch  # type: ignore[method-assign]
                yield pool

    return Deadline()


@pytest.mark.parametrize("workers", [1, 2])
async def test_no_more_pieces_run_than_there_are_workers(library: Library, tmp_path: Path, workers: int) -> None:
    running: list[Piece] = []
    most = 0

    def begin(piece: Piece) -> None:
        nonlocal most
        running.append(piece)
        most = max(most, len(running))

    options: dict[str, Any] = {"video_file_max_bytes": 1, "data_file_max_bytes": 1}
    roots = [library(episodes=(9, 4, 5)).root, library(episodes=(5, 6)).root]
    executor = watched(begin, running.remove)
    await merge_datasets(roots, tmp_path / "out", workers=workers, executor=executor, **options)
    assert most == workers
    assert not running
    await merge_datasets(roots, tmp_path / "alone", workers=1, **options)
    assert all_files(tmp_path / "out") == all_files(tmp_path / "alone")


async def test_the_first_error_ends_the_rest(library: Library, tmp_path: Path) -> None:
    begun: list[Piece] = []
    ended: list[Piece] = []

    def begin(piece: Piece) -> None:
        begun.append(piece)
        if begun.count(write) == 2:
            begun.pop()
            raise MergeError("no")

    with pytest.raises(MergeError, match="no"):
        await merge_datasets(
            [library(episodes=(9, 4, 5)).root],
            tmp_path / "out",
            workers=2,
            executor=watched(begin, ended.append),
            video_file_max_bytes=1,
            data_file_max_bytes=1,
        )
    assert begun.count(write) == ended.count(write) == 1
