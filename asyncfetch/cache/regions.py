"""Memory that one process fills and others map, in pieces, each of which goes back to the system by itself.

Pieces are placed one after the other in files without a name, and no place is used twice: a piece that isn't used any
more is punched out of its file. So the bytes that a process sees never change, and however the processes end, nothing
is left.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asyncfetch.errors import CacheError
from asyncfetch.runtime.shared_memory import ViewEnd, lend

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

REGION_BYTES = 256 * 1024 * 1024
"""Address space of a region: a page takes memory from its first touch on."""


class RegionPlace(NamedTuple):
    """A piece's place, for another process."""

    region: int
    """Its number."""
    descriptor: int
    """Of its file, in the process that fills it."""
    region_bytes: int
    start: int
    stop: int


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Region:
    number: int
    descriptor: int
    map: mmap.mmap
    memory: NDArray[np.uint8]
    used_bytes: int = 0

    @classmethod
    def of(cls, number: int, descriptor: int, nbytes: int) -> _Region:
        mapped = mmap.mmap(descriptor, nbytes)
        return cls(number, descriptor, mapped, np.frombuffer(mapped, np.uint8))


class Regions:
    """The regions that this process fills. Bound to its loop; views may be dropped in any thread."""

    def __init__(self) -> None:
        self._made = 0
        self._current: _Region | None = None
        self._lent: dict[int, tuple[ViewEnd, _Region, int, int]] = {}
        """Region, start and stop of each piece, by its address."""
        self._gone: deque[ViewEnd] = deque()
        self._ends: weakref.WeakKeyDictionary[_Region, Callable[[], object]] = weakref.WeakKeyDictionary()
        """Close the files of regions that are in use."""

    def allocate(self, size_bytes: int) -> memoryview:
        """Writable bytes. CacheError if the system has no memory for so many."""
        self.sweep()
        nbytes = -(-max(size_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        region = self._current
        if region is None or region.used_bytes + nbytes > region.memory.nbytes:
            region = self._renew(nbytes)
        start = region.used_bytes
        region.used_bytes += nbytes
        address = region.memory.ctypes.data + start
        view, end = lend(region.memory[start : start + size_bytes], region, address, self._gone)
        self._lent[address] = end, region, start, start + nbytes
        return view.data

    def _renew(self, nbytes: int) -> _Region:
        self._made += 1
        nbytes = max(REGION_BYTES, nbytes)
        try:
            descriptor = os.memfd_create("asyncfetch-clips", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, nbytes)
            region = self._current = _Region.of(self._made, descriptor, nbytes)
        except OSError as error:
            raise CacheError(f"the system has no {nbytes:,} bytes of shared memory: {error}") from error
        self._ends[region] = weakref.finalize(region, os.close, descriptor)
        return region

    def place_of(self, view: memoryview) -> RegionPlace | None:
        """The place of a view of a whole piece; None if it isn't in a region."""
        found = self._lent.get(np.frombuffer(view, np.uint8).ctypes.data) if view else None
        if found is None:
            return None
        _, region, start, _ = found
        return RegionPlace(region.number, region.descriptor, region.memory.nbytes, start, start + view.nbytes)

    def sweep(self) -> None:
        """Free pieces of which this process has no view. The caller must know that no other process has one."""
        while self._gone:
            _, region, start, stop = self._lent.pop(self._gone.popleft().name)
            region.map.madvise(mmap.MADV_REMOVE, start, stop - start)

    def close(self) -> None:
        """Let no process map them any more; existing mappings stay, here and elsewhere."""
        for end in list(self._ends.values()):
            end()
        self._lent, self._current = {}, None


class MappedRegions:
    """Regions that another process fills, mapped in this one. Bound to its loop; views may be dropped in any thread."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._regions: weakref.WeakValueDictionary[int, _Region] = weakref.WeakValueDictionary()
        self._lent: dict[int, ViewEnd] = {}
        self._gone: deque[ViewEnd] = deque()

    def view(self, place: RegionPlace, name: int) -> memoryview:
        """The bytes there, writable; OSError if the other process has ended. ``gone`` names it when no view is left."""
        region = self._regions.get(place.region)
        if region is None:
            descriptor = os.open(f"/proc/{self._pid}/fd/{place.descriptor}", os.O_RDWR | os.O_CLOEXEC)
            try:
                region = self._regions[place.region] = _Region.of(place.region, descriptor, place.region_bytes)
            finally:
                os.close(descriptor)
        view, self._lent[name] = lend(region.memory[place.start : place.stop], region, name, self._gone)
        return view.data

    def gone(self) -> list[int]:
        """The names of pieces without a view, each once."""
        names = []
        while self._gone:
            names.append(self._gone.popleft().name)
            del self._lent[names[-1]]
        return names
