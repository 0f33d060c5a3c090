"""The memory that the body of a request for several ranges lands in: each long one in its own, from the socket.

Received into one block and copied out of it, a byte lands twice, and the block takes as much memory again as what it
holds. But where a range's memory ends, so does a read of the socket, and for a short one another read costs more than
the copy. So short ranges, and unwanted bytes between ranges, land in blocks together, and the short ones are
copied. So are ranges that overlap: their bytes come once, and each has its own.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

from asyncfetch.errors import FetchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncfetch.ranges import ByteRange, Request
    from asyncfetch.runtime.memory_pool import MemoryPool

LONG_BYTES = 256 * 1024
"""Shorter ranges are copied. Not to copy took 9-15 % of the CPU off joined ranges of 256 KiB over TLS, and 12-18 % off
those of 512 KiB and 1 MiB. Over plain HTTP on loopback, where a read brings 0.3 MiB at a time, it took 17 % off to 4 %
more at 256 KiB, 7 % off to 1 % more at 512 KiB, and 16-29 % off at 1 MiB; but 0-13 % more at 128 KiB, 8-11 % at 64."""
_EMPTY = memoryview(b"")


class ChainedBuffer:
    """Writable memory in several views, one behind the other. For who writes to it, what a memoryview is."""

    __slots__ = ("_stops", "views")

    def __init__(self, views: Sequence[memoryview]) -> None:
        """None of ``views`` is empty."""
        self.views = views
        self._stops = list(accumulate(map(len, views)))

    def __len__(self) -> int:
        return self._stops[-1] if self._stops else 0

    def __getitem__(self, part: slice) -> ChainedBuffer:
        start, stop, _ = part.indices(len(self))
        views = []
        number = bisect_right(self._stops, start)
        while start < stop:
            view, end = self.views[number], self._stops[number]
            first = end - len(view)
            views.append(view[start - first : stop - first])
            start, number = end, number + 1
        return ChainedBuffer(views)

    def __setitem__(self, part: slice, content: bytes | memoryview) -> None:
        place, rest = self[part], memoryview(content)
        if len(place) != len(rest):
            raise ValueError(f"{len(rest)} bytes for a place of {len(place)}")
        for view in place.views:
            view[:], rest = rest[: len(view)], rest[len(view) :]

    def toreadonly(self) -> memoryview:
        """Nothing: all of it is in no one view."""
        return _EMPTY


class SplitBuffer:
    """The memory of a request that serves several ranges: to be written to first, then that of each range.

    It is taken when the first byte is about to land. FetchError where there is none.
    """

    __slots__ = ("_memory", "_own", "_request", "_target")

    def __init__(self, request: Request, memory: MemoryPool) -> None:
        """Take a request of closed ranges that aren't empty, and where to take memory from."""
        self._request = request
        self._memory = memory
        self._own: dict[ByteRange, memoryview] = {}
        self._target: Views | None = None

    def __len__(self) -> int:
        return _length(self._request.range)

    def __getitem__(self, part: slice) -> Views:
        if self._target is None:
            try:
                self._target = self._take()
            except MemoryError as error:
                raise _no_memory(self._request.range) from error
        return self._target[part]

    def __setitem__(self, part: slice, content: bytes | memoryview) -> None:
        self[part][:] = content

    def toreadonly(self) -> memoryview:
        """Nothing: it may be in several views."""
        return _EMPTY

    def cut(self, one: ByteRange) -> memoryview:
        """The bytes of one of the ranges, which keep others' as well. Only after all have landed."""
        assert self._target is not None
        part = self._target[self._request.part(one)]
        return part.views[0] if isinstance(part, ChainedBuffer) else part

    def piece(self, one: ByteRange) -> memoryview:
        """The bytes of one of the ranges, read-only, in memory that keeps nothing else. Only after all have landed."""
        if self._own and one in self._own:
            return self._own[one].toreadonly()
        part = self.cut(one)
        try:
            view = self._memory.take(len(part)).data
        except MemoryError as error:
            raise _no_memory(one) from error
        view[:] = part
        return view.toreadonly()

    def _take(self) -> Views:
        span, views = self._request.range, []
        at = span.start
        for one in apart(self._request):
            if at < one.start:
                views.append(self._memory.take(one.start - at).data)
            self._own[one] = self._memory.take(_length(one)).data
            views.append(self._own[one])
            at = one.start + _length(one)
        rest = span.start + _length(span) - at
        if rest:
            views.append(self._memory.take(rest).data)
        return ChainedBuffer(views) if len(views) > 1 else views[0]


Views: TypeAlias = "memoryview | ChainedBuffer"
"""Writable memory, in one view or several."""
Target: TypeAlias = "Views | SplitBuffer"
"""The memory that bytes land in."""


def apart(request: Request) -> list[ByteRange]:
    """Return those of the ranges that a request serves which are to land in memory of their own, by their places."""
    if len(request.serves) == 1:
        return [*request.serves]
    if _length(request.range) < LONG_BYTES or all(_length(one) < LONG_BYTES for one in request.serves):
        return []
    ordered = sorted(request.serves, key=lambda one: one.start)
    found = []
    reached = 0
    for one, following in zip(ordered, [*ordered[1:], None], strict=True):
        stop = one.start + _length(one)
        overlaps = one.start < reached or (following is not None and following.start < stop)
        if not overlaps and stop - one.start >= LONG_BYTES:
            found.append(one)
        reached = max(reached, stop)
    return found


def _no_memory(one: ByteRange) -> FetchError:
    message = f"there is no memory for its {_length(one)} bytes: ask for fewer ranges at once, or for shorter ones"
    return FetchError(message, url=one.url, start=one.start, stop=one.stop)


def _length(one: ByteRange) -> int:
    assert one.stop is not None
    return one.stop - one.start
