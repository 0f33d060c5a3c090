from __future__ import annotations

import anyio
import pytest

from asyncfetch.errors import FormatError
from asyncfetch.runtime.concurrently import gather
from asyncfetch.runtime.single_flight import LRUPart, SharedLRU
from tests.conftest import all_others_wait


class Block:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class Loader:
    """Loads blocks of 10 bytes, counts, and fails or waits on demand."""

    def __init__(self) -> None:
        self.calls = 0
        self.error: Exception | None = None
        self.limiter: anyio.Event | None = None

    async def __call__(self) -> Block:
        self.calls += 1
        if self.limiter is not None:
            await self.limiter.wait()
        if self.error is not None:
            raise self.error
        return Block(10)


async def test_least_recently_used_goes_first() -> None:
    shared: SharedLRU[int, Block] = SharedLRU(30)
    load = Loader()
    for key in (0, 1, 2, 0, 3, 0, 1):
        await shared.get(key, load)
        assert shared.nbytes <= 30
    assert load.calls == 5  # 0 1 2 3, and 1 again


async def test_too_heavy_value_is_not_kept() -> None:
    shared: SharedLRU[int, Block] = SharedLRU(9)
    load = Loader()
    assert (await shared.get(0, load)).nbytes == 10
    assert (await shared.get(0, load)).nbytes == 10
    assert (load.calls, shared.nbytes) == (2, 0)


async def test_many_askers_one_load() -> None:
    shared: SharedLRU[int, Block] = SharedLRU(100)
    load = Loader()
    load.limiter = anyio.Event()
    blocks: list[Block] = []

    async def ask() -> None:
        blocks.append(await shared.get(0, load))

    async with anyio.create_task_group() as tasks:
        for _ in range(50):
            tasks.start_soon(ask)
        await all_others_wait()
        load.limiter.set()
    assert len(blocks) == 50
    assert len(set(map(id, blocks))) == 1
    assert load.calls == 1


async def test_an_error_reaches_all_and_is_not_kept() -> None:
    shared: SharedLRU[int, Block] = SharedLRU(100)
    load = Loader()
    load.limiter, load.error = anyio.Event(), FormatError("broken")
    errors: list[FormatError] = []

    async def ask() -> None:
        with pytest.raises(FormatError, match="broken") as caught:
            await shared.get(0, load)
        errors.append(caught.value)

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(ask)
        await all_others_wait()
        load.limiter.set()
    assert len(set(map(id, errors))) == 3
    assert load.calls == 1
    load.error = None
    assert (await shared.get(0, load)).nbytes == 10


async def test_a_cancelled_loader_leaves_nothing_behind() -> None:
    shared: SharedLRU[int, Block] = SharedLRU(100)
    load = Loader()
    load.limiter = anyio.Event()
    with anyio.move_on_after(0.01):
        await shared.get(0, load)
    load.limiter.set()
    assert (await shared.get(0, load)).nbytes == 10
    assert repr(shared) == "<SharedLRU 1 kept, 10 of 100 bytes>"


async def test_value_loaded_during_a_clear_is_not_kept() -> None:
    shared: SharedLRU[int, Block] = SharedLRU(100)
    load = Loader()
    await shared.get(0, load)
    load.limiter = anyio.Event()
    blocks: list[Block] = []

    async def ask() -> None:
        blocks.append(await shared.get(1, load))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await all_others_wait()
        shared.clear()
        tasks.start_soon(ask)  # not content with what began before the clear
        await all_others_wait()
        load.limiter.set()
    assert (load.calls, shared.nbytes) == (3, 10)
    assert await shared.get(1, load) is blocks[1]


async def test_gather_keeps_the_order_of_its_arguments() -> None:
    done = anyio.Event()

    async def slow() -> int:
        await done.wait()
        return 1

    async def fast() -> int:
        done.set()
        return 2

    assert await gather(slow, fast) == [1, 2]


async def test_gather_raises_one_error_and_cancels_the_rest() -> None:
    cause = OSError("disk")
    ended: list[str] = []

    async def stuck() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("stuck")

    async def broken() -> None:
        raise FormatError("broken") from cause

    with pytest.raises(FormatError, match="broken") as caught:
        await gather(stuck, broken)
    assert caught.value.__cause__ is cause
    assert ended == ["stuck"]


async def test_parts_share_the_bound_and_nothing_else() -> None:
    shared: SharedLRU[tuple[int, int], Block] = SharedLRU(30)
    one, two = LRUPart(shared, 1), LRUPart(shared, 2)
    load = Loader()
    first = await one.get(0, load)
    assert await two.get(0, load) is not first
    assert await one.get(0, load) is first
    assert (len(one), one.nbytes, len(two), shared.nbytes) == (1, 10, 1, 20)
    await two.get(1, load)
    await two.get(2, load)  # drops what was used longest ago, of whichever part
    assert (len(one), len(two)) == (1, 2)
    load.limiter = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.get, 5, load)
        await all_others_wait()
        one.clear()
        load.limiter.set()
    assert (len(one), len(two), shared.nbytes) == (0, 2, 20)
    assert one.get_nowait(0) is None


async def test_a_failure_is_none_of_those_who_ask_after_a_clear() -> None:
    shared: SharedLRU[int, Block] = SharedLRU(100)
    old, new = Loader(), Loader()
    old.limiter, old.error = anyio.Event(), FormatError("of the first attempt")

    async def ask_first() -> None:
        with pytest.raises(FormatError):
            await shared.get(0, old)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask_first)
        await all_others_wait()
        shared.clear()
        value = await shared.get(0, new)
        old.limiter.set()
    assert await shared.get(0, old) is value
    assert (old.calls, new.calls) == (1, 1)
