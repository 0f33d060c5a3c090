"""Blocks are used again when their last view is gone, and never before."""

from __future__ import annotations

import gc
import os
import re
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfetch.runtime.memory_pool import HUGE_BYTES, SMALL_BYTES, MemoryPool, allocate, block_bytes, fresh_memory

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1024 * 1024


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def flags_of(array: np.ndarray) -> list[str]:
    """What Linux was told of the mapping that has the array."""
    is_its = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start, stop = (int(edge, 16) for edge in match.groups())
            is_its = start <= address(array) < stop
        elif is_its and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise LookupError(hex(address(array)))


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no huge pages")
@pytest.mark.parametrize(
    "take",
    [fresh_memory, MemoryPool(MIB).take, lambda nbytes: np.frombuffer(allocate(nbytes), np.uint8)],
    ids=["fresh", "pool", "cache"],
)
def test_large_memory_may_come_in_huge_pages(take: Callable[[int], np.ndarray]) -> None:
    assert "hg" in flags_of(take(HUGE_BYTES))


@given(st.integers(0, 1 << 40))
def test_a_block_is_at_most_an_eighth_larger_than_asked(nbytes: int) -> None:
    assert nbytes <= block_bytes(nbytes) <= nbytes + nbytes // 8
    assert block_bytes(block_bytes(nbytes)) == block_bytes(nbytes)


@pytest.mark.parametrize(("sizes_recur", "more"), [(False, True), (True, False)])
def test_blocks_of_recurring_sizes_are_no_larger_than_asked(sizes_recur: bool, more: bool) -> None:
    pool = MemoryPool(9 * MIB, sizes_recur=sizes_recur)
    for _ in range(2):
        assert pool.take(5 * MIB + 3).nbytes == 5 * MIB + 3
    assert (pool.statistics().idle_bytes > 5 * MIB + 3) == more
    assert pool.statistics().reused == 1


def test_idle_blocks_make_room_for_recurring_other_sizes() -> None:
    pool = MemoryPool(9 * MIB, sizes_recur=True)
    small, large = [pool.take(MIB) for _ in range(4)], pool.take(3 * MIB)
    del small, large
    for size, idle in ((2, 5), (3, 4)):
        block = pool.take(size * MIB)
        assert pool.statistics().idle_bytes == idle * MIB
        assert pool.statistics().idle_bytes + block.nbytes <= 7 * MIB
        del block
    assert pool.statistics().reused == 1


@pytest.mark.parametrize("nbytes", [0, 1, SMALL_BYTES - 1, SMALL_BYTES, 5 * MIB + 3])
def test_a_block_is_writable_and_as_long_as_asked(nbytes: int) -> None:
    block = MemoryPool(MIB).take(nbytes)
    block[:] = 7
    assert block.dtype == np.uint8
    assert (block.shape, int(block.sum())) == ((nbytes,), 7 * nbytes)


def test_memory_is_used_again_when_nobody_refers_to_it() -> None:
    pool = MemoryPool(4 * MIB)
    block = pool.take(MIB)
    first = address(block)
    del block
    assert pool.statistics().idle_bytes == MIB
    again = pool.take(MIB - 100)  # of the same size of block
    assert address(again) == first
    now = pool.statistics()
    assert (now.idle_bytes, now.taken, now.reused) == (0, 2, 1)


@pytest.mark.parametrize(
    "view",
    [
        lambda block: block[10:20],
        lambda block: memoryview(block)[10:20].toreadonly(),
        lambda block: np.frombuffer(memoryview(block), np.uint16),
        lambda block: block.reshape(1024, -1).T,
        lambda block: __import__("torch").from_numpy(block)[5],
    ],
    ids=["slice", "memoryview", "frombuffer", "transpose", "tensor"],
)
def test_a_view_keeps_the_block(view: object) -> None:
    pool = MemoryPool(4 * MIB)
    block = pool.take(MIB)
    kept = view(block)  # type: ignore[operator]
    del block
    assert pool.statistics().idle_bytes == 0
    assert pool.take(MIB) is not None
    assert pool.statistics().reused == 0
    del kept
    assert pool.statistics().idle_bytes == 2 * MIB


def test_no_more_than_the_bound_is_kept() -> None:
    pool = MemoryPool(2 * MIB)
    blocks = [pool.take(MIB) for _ in range(5)]
    blocks.clear()
    assert pool.statistics().idle_bytes == 2 * MIB


def test_a_closed_pool_keeps_nothing_and_blocks_in_use_stay() -> None:
    pool = MemoryPool(4 * MIB)
    idle, used = pool.take(MIB), pool.take(MIB)
    used[:] = 3
    del idle
    pool.close()
    assert pool.statistics().idle_bytes == 0
    assert int(used.sum()) == 3 * MIB
    del used
    assert pool.statistics().idle_bytes == 0


def test_block_collected_while_the_pool_is_locked_is_freed() -> None:
    pool = MemoryPool(4 * MIB)
    block = pool.take(MIB)
    with pool._lock:  # as in a collection that starts within take
        del block
    assert pool.statistics().idle_bytes == 0
    assert pool.take(MIB) is not None


def test_a_block_in_a_cycle_comes_back_with_the_collection() -> None:
    pool = MemoryPool(4 * MIB)
    cycle: list[object] = [pool.take(MIB)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert pool.statistics().idle_bytes == MIB


def test_threads_never_share_a_block() -> None:
    pool = MemoryPool(8 * MIB)
    wrong: list[int] = []

    def work(mark: int) -> None:
        for _ in range(300):
            block = pool.take(100_000)
            block[:] = mark
            if int(block.min()) != mark or int(block.max()) != mark:
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pool.statistics().reused > 0


def test_a_forked_child_has_its_own_copy() -> None:
    block = MemoryPool(MIB).take(MIB)
    block[:] = 1
    child = os.fork()
    if not child:
        block[:] = 2
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert int(block.max()) == 1


def test_the_pool_goes_with_its_last_block() -> None:
    pool = MemoryPool(MIB)
    block, gone = pool.take(MIB), weakref.ref(pool)
    del pool
    assert gone() is not None
    del block
    gc.collect()
    assert gone() is None


def test_memory_that_is_used_again_is_not_zero_filled() -> None:
    """Which would cost as much as what is written there."""
    pool = MemoryPool(8 * MIB)
    block = pool.take(MIB)
    block[:] = 7
    del block
    assert (pool.take(MIB) == 7).all()
