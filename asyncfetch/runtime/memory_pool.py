"""Blocks of memory that are used again: a fresh page costs more than writing to it.

The system provides each page at its first touch, by one fault and one clearing at a time: measured, 0.5-0.8 ms per MiB,
ten times the cost of copying a MiB; 0.07 ms in pages of 2 MiB. And memory that many threads allocate and free by the
megabyte leaves holes in their heaps that the C library keeps. So buffers for bodies and clips come from here: mappings
of our own, in huge pages, used again while there is demand, and returned to the system whole.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncfetch.errors import CacheError

if TYPE_CHECKING:
    from numpy.typing import NDArray

SMALL_BYTES = 64 * 1024
"""Below this the C library reuses memory well by itself, and a mapping would cost more than it saves."""
HUGE_BYTES = 1024 * 1024
"""Size from which on memory comes in huge pages: shorter mappings seldom contain one, and a cache would have so many
that Linux refuses more (65,530)."""
_HUGE_PAGES: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux
MAX_IDLE_BUFFER_BYTES = 128 * 1024 * 1024
"""Memory of bodies that a fetcher keeps for the next ones: fresh pages cost more than all the rest of a fetch over
plain HTTP. A ByteCache over the fetcher doesn't count it; streams and datasets keep none."""
STEPS = 8
"""Sizes of blocks between two powers of two, so that a block is at most an eighth larger than requested."""


@lru_cache(maxsize=1024)
def block_bytes(nbytes: int) -> int:
    """Memory that a block for ``nbytes`` takes: the same, or up to an eighth more. Cached, since sizes recur."""
    if nbytes < SMALL_BYTES:
        return nbytes
    step = (1 << (nbytes - 1).bit_length() - 1) // STEPS
    return -(-nbytes // step) * step


@dataclass(frozen=True, slots=True)
class MemoryPoolStatistics:
    """A snapshot."""

    idle_bytes: int
    """Bytes of blocks that wait for their next use."""
    max_idle_bytes: int
    taken: int
    """Blocks handed out, small ones not counted."""
    reused: int
    """Number of these that had been used before."""


class _Memory(NamedTuple):
    """A mapping."""

    array: NDArray[np.uint8]
    interface: dict[str, Any]
    """The array's, kept because reading it takes as long as making the rest of a block."""


class _Mapping:
    """The object that every view of a block refers to in the end; with it the memory goes back."""

    __slots__ = ("__array_interface__", "_memory", "_pool")

    def __init__(self, pool: MemoryPool, memory: _Memory, nbytes: int) -> None:
        self._pool, self._memory = pool, memory
        # One dict for each use of the memory: another would be one more object that the garbage collector goes through.
        memory.interface["shape"] = (nbytes,)
        self.__array_interface__ = memory.interface

    def __del__(self) -> None:
        # It may run in any thread at any point, in the middle of ``take`` too. If the lock is taken, the memory goes to
        # the system.
        pool, memory = self._pool, self._memory
        if not pool._lock.acquire(blocking=False):
            return
        try:
            nbytes = memory.array.nbytes
            if pool._idle_bytes + nbytes <= pool._max_idle_bytes:
                pool._idle.setdefault(nbytes, []).append(memory)
                pool._idle_bytes += nbytes
        finally:
            pool._lock.release()


class MemoryPool:
    """Hands out blocks of bytes, and takes each back when the last view of it is gone. Safe to use from any thread.

    Args:
        max_idle_bytes: Most that is kept for reuse; the rest goes to the system.
        sizes_recur: Whether blocks come in a few sizes. Then no block is larger than requested, and a new one takes the
            place of idle ones of other sizes: all together never take more than the most that was in use at a time.
    """

    def __init__(self, max_idle_bytes: int, *, sizes_recur: bool = False) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._sizes_recur = sizes_recur
        self._idle: dict[int, list[_Memory]] = {}
        self._idle_bytes = self._taken = self._reused = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """A writable array (nbytes,) with undefined content; MemoryError without memory for it.

        Its memory is used again as soon as neither it nor any view of it is referenced: arrays, memoryviews and
        tensors made of it all count.
        """
        if nbytes < SMALL_BYTES:
            return np.empty(nbytes, np.uint8)
        size = nbytes if self._sizes_recur else block_bytes(nbytes)
        memory, replaced = None, []
        with self._lock:
            self._taken += 1
            if blocks := self._idle.get(size):
                memory = blocks.pop()  # the one used last: some of it may still be in the processor's caches
                self._idle_bytes -= size
                self._reused += 1
            elif self._sizes_recur:
                replaced = self._pop_idle(size)
        del replaced  # unmapped here, outside of the lock
        if memory is None:
            array = fresh_memory(size)
            memory = _Memory(array, array.__array_interface__)
        return np.asarray(_Mapping(self, memory, nbytes))

    def _pop_idle(self, nbytes: int) -> list[_Memory]:
        """Idle blocks of any size, ``nbytes`` of them or all."""
        popped: list[_Memory] = []
        left = nbytes
        while left > 0 and (size := next((size for size, blocks in self._idle.items() if blocks), 0)):
            popped.append(self._idle[size].pop())
            self._idle_bytes -= size
            left -= size
        return popped

    def close(self) -> None:
        """Give the idle blocks to the system, and keep none from now on. Blocks in use stay what they are."""
        with self._lock:
            self._max_idle_bytes = self._idle_bytes = 0
            idle, self._idle = self._idle, {}
        del idle  # unmapped here, outside of the lock

    def statistics(self) -> MemoryPoolStatistics:
        """A snapshot."""
        return MemoryPoolStatistics(self._idle_bytes, self._max_idle_bytes, self._taken, self._reused)


def fresh_memory(nbytes: int) -> NDArray[np.uint8]:
    """A writable array (nbytes,), at least one byte, in a mapping of its own, which goes with its last view.

    Neighbouring mappings are one to Linux, so huge pages fit even if each is too short for them.
    """
    # Private, because Python's default is shared: a forked child would write into its parent's samples.
    try:
        mapping: Any = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"no memory for {nbytes} bytes") from error
    if _HUGE_PAGES is not None and nbytes >= HUGE_BYTES:
        with suppress(OSError):  # a kernel without them
            mapping.madvise(_HUGE_PAGES)
    return np.frombuffer(mapping, np.uint8)


def allocate(size_bytes: int) -> memoryview:
    """Writable bytes with undefined content; CacheError without memory for them."""
    try:
        return (np.empty(size_bytes, np.uint8) if size_bytes < HUGE_BYTES else fresh_memory(size_bytes)).data
    except (MemoryError, OverflowError, ValueError) as error:  # numpy has a limit of its own on sizes
        raise CacheError(f"no memory for a range of {size_bytes} bytes: ask for a smaller one") from error


@cache
def _malloc_trim() -> Any:  # noqa: ANN401
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):  # not glibc
        return None
    trim.argtypes = [ctypes.c_size_t]
    return trim


def trim_heap() -> None:
    """Let glibc return the free pages inside of its heaps; does nothing with another C library.

    glibc keeps a heap for each thread and returns only free memory at a heap's end. When several threads allocate and
    free large blocks in turn, the holes add up, above all with small blocks between them: 8,000 videos opened and
    closed by two threads held 450 MiB, of which 145 were in use. It takes milliseconds, without the GIL, but blocks
    every allocation meanwhile: not for the loop's thread.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)
