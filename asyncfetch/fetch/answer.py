"""An answer to a ranged GET, made of its bytes as they come, each straight in the memory that it is meant for. Pure.

    AWAITING_HEAD --> RECEIVING   the head is the expected one: the body lands where it belongs at once
          |             |    ^
          |             |    +-- HELD    another plain head, until ``take`` says where the body belongs
          |             |          ^
          +-------------|----------+
          |             v
          +---------> ENDED   all that is wanted has come; or the head isn't plain: the caller reads it

``stop`` ends it in any state. What comes where nothing is wanted is a surplus, which spoils the connection.

A plain answer is one of HTTP/1.1 with a status of 200 or above, a strict head of known length and a body whose length
that head states. Of any other one no more than the head is told, or nothing. So there is no need for leniency: what is
strange is read by a parser that has seen everything.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import TYPE_CHECKING

from multidict import CIMultiDict

from asyncfetch.fetch.buffers import ChainedBuffer
from asyncfetch.fetch.responses import stated_length

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncfetch.fetch.buffers import Views

MAX_HEAD_BYTES = 64 * 1024
"""A longer head isn't plain."""

_SURPLUS = memoryview(bytearray(4096))
"""Takes what comes after a body's end, and is never read."""
_NAME = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_HEAD = re.compile(rf"HTTP/1\.1 ([2-5][0-9][0-9])(?: [ -~]*)?\r\n(?:{_NAME}:[ -~\t]*\r\n)+\r\n".encode())
_FIELD = re.compile(rf"({_NAME}):[ \t]*([^\r]*?)[ \t]*\r")
_CONNECTION = frozenset({"keep-alive", "close"})
_REMARKABLE = re.compile(
    rb"\r\n(?:connection:(?! keep-alive\r)|content-encoding:|content-type:[ \t]*m|ratelimit:|transfer-encoding:)"
)
"""Fields, in lower case, that make an answer another one than its range, length and version say, or that say more."""
_START = b"HTTP/1.1 "
_RANGE_FIELD = b"\r\ncontent-range: "
_ODD_END = re.compile(rb"\n\r?\n")
"""Ends a head whose lines don't all end as they should."""


class Head:
    """The head of an answer."""

    __slots__ = ("closes", "headers", "is_ambiguous", "length_bytes", "status")

    def __init__(self, status: int, headers: CIMultiDict[str]) -> None:
        self.status = status
        self.headers = headers
        """Found by names of any case."""
        connections = headers.getall("Connection", [])
        self.closes = bool(connections) and connections[0].lower() == "close"
        """True if the server closes the connection after the body."""
        is_plain = (
            "Transfer-Encoding" not in headers
            and (not connections or (len(connections) == 1 and connections[0].lower() in _CONNECTION))
            and status not in {204, 304}
        )
        self.length_bytes: int | None = None
        """Length of the body; None where the answer isn't plain."""
        self.is_ambiguous = False
        """True if it isn't plain because it states several lengths, or one that is none."""
        if is_plain:
            try:
                self.length_bytes = stated_length(headers)
            except ValueError:
                self.is_ambiguous = True


def parse_head(raw: bytes) -> Head | None:
    """Return the head that ``raw`` is; None where it is none that every parser reads alike."""
    if _HEAD.fullmatch(raw) is None:
        return None
    return Head(int(raw[9:12]), CIMultiDict(_FIELD.findall(raw.decode("ascii"))))


class ExpectedAnswer:
    """The answer to a closed range of a version that is known, of which all that matters is known beforehand."""

    __slots__ = ("etag", "length_bytes", "range")

    def __init__(self, start: int, stop: int, size: int, etag: str | None) -> None:
        """``etag`` None: the answer's own doesn't count."""
        self.range = b"bytes %d-%d/%d\r\n" % (start, stop - 1, size)
        """Its Content-Range, in lower case, and the end of that line."""
        self.length_bytes = stop - start
        self.etag = etag

    def is_met_by(self, head: bytes) -> bool:
        """Return whether a strict head says in so many words that it is this answer, and nothing that matters beside.

        What says the same in other words isn't met: its fields are looked at one by one.
        """
        lower = head.lower()
        tag = None if self.etag is None else b" %b\r\n" % self.etag.encode()
        return (
            head.startswith(b"HTTP/1.1 206")
            and _RANGE_FIELD + self.range in lower
            and b"\r\ncontent-length: %d\r\n" % self.length_bytes in lower
            and lower.count(b"\r\ncontent-length:") == 1 == lower.count(b"\r\ncontent-range:")
            and (tag is None or head.startswith(tag, lower.find(b"\r\netag:") + len("\r\netag:")))
            and _REMARKABLE.search(lower) is None
            and _HEAD.fullmatch(head) is not None
        )


class HeadPattern:
    """An expected head as it came, but for its range: until the clock's next second, the next one says no more."""

    __slots__ = ("_after", "_before", "_etag", "_length_bytes")

    def __init__(self, head: bytes, met: ExpectedAnswer) -> None:
        start = head.lower().index(_RANGE_FIELD) + len(_RANGE_FIELD)
        self._before, self._after = head[:start], head[start + len(met.range) :]
        self._etag, self._length_bytes = met.etag, met.length_bytes

    def head_of(self, expected: ExpectedAnswer) -> bytes | None:
        """Return a head that meets ``expected``; None where that is no answer of this kind."""
        if expected.length_bytes != self._length_bytes or expected.etag != self._etag:
            return None
        return self._before + expected.range + self._after


class Phase(Enum):
    """What an answer waits for."""

    AWAITING_HEAD = auto()
    HELD = auto()
    RECEIVING = auto()
    ENDED = auto()


_AWAITING_HEAD, _HELD, _RECEIVING, _ENDED = Phase  # a look-up each saves, at every read of a socket


def no_place() -> None:
    """No memory: the head is told first."""


class Answer:
    """One answer. Bytes are to be written to ``room``, and then noted by ``came``.

    It begins in ``scratch``, which others may write to between ``came`` and ``room``. The body of the ``expected``
    answer lands at once in what ``place`` gives once its head is there: writable memory of just its length, or None.
    Else the head is looked at first. ``pattern`` is that of the last expected answer on its connection.
    """

    __slots__ = (
        "_expected", "_head", "_held", "_later", "_left_bytes", "_missing_bytes", "_place", "_raw_head", "_scratch",
        "_view", "closes", "has_surplus", "is_whole", "pattern", "phase", "received_bytes",
    )  # fmt: skip

    def __init__(
        self,
        scratch: bytearray,
        expected: ExpectedAnswer | None = None,
        place: Callable[[], Views | None] = no_place,
        pattern: HeadPattern | None = None,
    ) -> None:
        self._scratch = scratch
        self._expected = expected
        self._place = place
        self.pattern = pattern
        """For the next answer on the connection."""
        self._head: Head | None = None
        self._raw_head = b""
        self._held = bytearray()  # what came and was not looked at yet: a part of a head, or the body behind it
        self._left_bytes = 0  # of the body, behind what is to be received
        self.phase = _AWAITING_HEAD
        self.closes = False
        """True if the server closes the connection after it."""
        self.has_surplus = False
        """True if more has come than belongs to it."""
        self.is_whole = False
        """True if the whole body has landed."""
        self.received_bytes = 0
        """Bytes of the body that are in its memory."""
        self._view, self._missing_bytes = _SURPLUS, 0
        self._later: list[memoryview] = []

    @property
    def head(self) -> Head | None:
        """Its head; None until it is there, and where it is no strict one."""
        if self._head is None and self._raw_head:
            self._head = parse_head(self._raw_head)
        return self._head

    @property
    def has_begun(self) -> bool:
        """True if a part of its head has come, or all of it."""
        return self.phase is not _AWAITING_HEAD or bool(self._held)

    def room(self) -> memoryview:
        """Return the memory for what comes next; never empty."""
        phase = self.phase
        if phase is _RECEIVING:
            return self._view[-self._missing_bytes :]
        if phase is _AWAITING_HEAD:
            return memoryview(self._scratch)
        if phase is _HELD and len(self._held) < self._left_bytes:
            return memoryview(self._scratch)[: self._left_bytes - len(self._held)]
        return _SURPLUS

    def came(self, nbytes: int) -> bool:
        """Take the first ``nbytes`` of ``room``; return whether there is news: the head, or all that was wanted."""
        phase = self.phase
        if phase is _RECEIVING:
            return self._landed(nbytes)
        if phase is _AWAITING_HEAD:
            return self._look_for_head(nbytes)
        if phase is _HELD and len(self._held) < self._left_bytes:
            self._held += self._scratch[:nbytes]
        else:
            self.has_surplus = True
        return False

    def hold(self) -> None:
        """Have the body wait for ``take`` whatever the head is."""
        self._expected = None

    def take(self, view: Views) -> None:
        """Have the first bytes of the body land in ``view``, which is at most as long."""
        assert self.phase is _HELD
        self._aim(view)
        self._left_bytes -= len(view)
        held, self._held = self._held, bytearray()
        self._fill(memoryview(held))

    def stop(self) -> None:
        """Want no more of it, and let go of its memory."""
        self.phase, self._view, self._later, self._place = _ENDED, _SURPLUS, [], no_place

    def _aim(self, view: Views) -> None:
        if isinstance(view, ChainedBuffer):
            self._view, *self._later = view.views
        else:
            self._view = view
        self._missing_bytes = len(self._view)

    def _look_for_head(self, nbytes: int) -> bool:
        seen = len(self._held)
        received, stop = self._scratch, nbytes
        expected, pattern = self._expected, self.pattern
        head = None if expected is None or pattern is None or seen else pattern.head_of(expected)
        if head is not None and received.startswith(head, 0, stop):
            is_met, self._raw_head, end = True, head, len(head)
        else:
            if seen:
                self._held += self._scratch[:nbytes]
                received, stop = self._held, seen + nbytes
            start, limit = max(0, seen - 3), min(stop, MAX_HEAD_BYTES)
            end = received.find(b"\r\n\r\n", start, limit) + 4
            if end < 4:
                begins = _START.startswith(bytes(received[: min(stop, len(_START))]))
                if begins and stop < MAX_HEAD_BYTES and _ODD_END.search(received, start, limit) is None:
                    self._held = received if seen else received[:stop]
                    return False
                end = 0
            raw = self._raw_head = bytes(received[:end])
            is_met = expected is not None and expected.is_met_by(raw)
            if expected is not None and is_met:
                self.pattern = HeadPattern(raw, expected)
        place, self._place = self._place, no_place  # it refers to the memory, and the answer stays to the next request
        view = place() if is_met else None
        if view is not None:
            with memoryview(received) as came:
                if isinstance(view, memoryview) and len(view) == stop - end:  # as most ranges of up to 64 KiB
                    view[:] = came[end:stop]
                    self.received_bytes, self.is_whole, self.phase = stop - end, True, _ENDED
                else:
                    self._aim(view)
                    self._fill(came[end:stop])
            return self.phase is _ENDED
        told = self.head
        if told is None or told.length_bytes is None:
            self.stop()
            return True
        self.phase, self._left_bytes, self.closes = _HELD, told.length_bytes, told.closes
        self._held = received[end : min(stop, end + told.length_bytes)]
        self.has_surplus = stop > end + told.length_bytes
        return True

    def _fill(self, received: memoryview) -> None:
        """Copies what has come of the body to where it belongs; the rest is to land there."""
        self.phase = _RECEIVING
        at, stop = 0, len(received)
        while self.phase is _RECEIVING:
            count = min(self._missing_bytes, stop - at)
            place = len(self._view) - self._missing_bytes
            self._view[place : place + count] = received[at : at + count]
            self._landed(count)
            at += count
            if at == stop:
                return
        self.has_surplus = self.has_surplus or stop - at > self._left_bytes

    def _landed(self, nbytes: int) -> bool:
        self._missing_bytes -= nbytes
        self.received_bytes += nbytes
        if self._missing_bytes:
            return False
        if self._later:
            self._view = self._later.pop(0)
            self._missing_bytes = len(self._view)
            return False
        self.is_whole = self._left_bytes == 0
        self.stop()
        return True
