"""The order of the work: what waits for what, how deep it is, and that one error ends it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest

from asyncfetch.errors import MergeError
from asyncfetch.merge.scheduler import Schedule
from asyncfetch.runtime.concurrently import ungrouped
from tests.conftest import all_others_wait

if TYPE_CHECKING:
    from asyncfetch.merge.scheduler import TaskPiece


@dataclass
class Hands:
    """A pool of this loop; notes the depth of each value and how many pieces run at a time."""

    workers: int
    fetcher: Any = None
    most: int = 0
    running: int = 0
    done: list[str] = field(default_factory=list)

    def expect(self, seconds: float) -> None:
        pass

    async def run(self, piece: TaskPiece, *arguments: Any) -> Any:  # noqa: ANN401
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            value = await piece(self, *arguments)
        finally:
            self.running -= 1
        self.done.append(value[0])
        return value

    async def get(self, value: Any) -> Any:  # noqa: ANN401
        return value


async def leaf(_hands: Hands, name: str, ready: anyio.Event) -> tuple[str, int]:
    await ready.wait()
    return name, 0


async def join(_hands: Hands, left: tuple[str, int], right: tuple[str, int]) -> tuple[str, int]:
    return left[0] + right[0], max(left[1], right[1]) + 1


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 64])
async def test_leaves_are_combined_in_their_order_and_no_deeper_than_a_tree(count: int) -> None:
    names = [chr(0x4E00 + number) for number in range(count)]
    async with anyio.create_task_group() as tasks:
        schedule = Schedule(tasks, Hands(3))
        ready = anyio.Event()
        ready.set()
        root = schedule.reduce(join, [schedule.submit(leaf, name, ready) for name in names])
        assert await schedule.get(root) == ("".join(names), math.ceil(math.log2(count)))


async def test_what_is_slow_delays_its_own_ancestors_only() -> None:
    hands = Hands(8)
    ready = [anyio.Event() for _ in range(8)]
    async with anyio.create_task_group() as tasks:
        schedule = Schedule(tasks, hands)
        leaves = [schedule.submit(leaf, name, event) for name, event in zip("abcdefgh", ready, strict=True)]
        root = schedule.reduce(join, leaves)
        for event in ready[:2] + ready[3:]:
            event.set()
        await all_others_wait()
        assert set(hands.done) == {*"abdefgh", "ab", "ef", "gh", "efgh"}
        ready[2].set()
        assert (await schedule.get(root))[0] == "abcdefgh"
    assert hands.done[-4:] == ["c", "cd", "abcd", "abcdefgh"]


@pytest.mark.parametrize("workers", [1, 2])
async def test_no_more_pieces_run_than_there_are_workers(workers: int) -> None:
    hands = Hands(workers)
    ready = anyio.Event()
    async with anyio.create_task_group() as tasks:
        schedule = Schedule(tasks, hands)
        schedule.reduce(join, [schedule.submit(leaf, name, ready) for name in "abcde"])
        await all_others_wait()
        assert hands.running == workers
        ready.set()
    assert hands.most == workers


async def test_the_first_error_ends_the_rest() -> None:
    async def fail(_hands: Hands) -> None:
        raise MergeError("no")

    async def work() -> None:
        with ungrouped():
            async with anyio.create_task_group() as tasks:
                schedule = Schedule(tasks, hands)
                schedule.reduce(join, [schedule.submit(leaf, "a", anyio.Event()), schedule.submit(fail)])

    hands = Hands(2)
    with pytest.raises(MergeError, match="no"):
        await work()
    assert (hands.running, hands.done) == (0, [])


@pytest.mark.parametrize("workers", [1, 2, 4])
async def test_values_are_combined_before_more_are_made(workers: int) -> None:
    """Else there would be as many at a time as there are leaves."""
    alive = most = 0

    async def make(_hands: Hands, name: str) -> tuple[str, int]:
        nonlocal alive, most
        await anyio.lowlevel.checkpoint()
        alive, most = alive + 1, max(most, alive + 1)
        return name, 0

    async def join_two(hands: Hands, left: tuple[str, int], right: tuple[str, int]) -> tuple[str, int]:
        nonlocal alive
        await anyio.lowlevel.checkpoint()
        alive -= 1
        return await join(hands, left, right)

    async with anyio.create_task_group() as tasks:
        schedule = Schedule(tasks, Hands(workers))
        schedule.reduce(join_two, [schedule.submit(make, str(number)) for number in range(128)])
    assert alive == 1
    assert most <= 2 * workers + math.log2(128)
