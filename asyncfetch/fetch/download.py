"""One range on its way, over as many attempts as it takes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from asyncfetch.errors import FetchError, InvalidResponse, ObjectChanged
from asyncfetch.fetch.answer import ExpectedAnswer
from asyncfetch.fetch.objects import strong_etag, strong_tag
from asyncfetch.fetch.responses import WantedRange
from asyncfetch.fetch.retry import AttemptFailed, RetryVerdict

if TYPE_CHECKING:
    from asyncfetch.fetch.buffers import Target, Views
    from asyncfetch.fetch.hosts import Host
    from asyncfetch.fetch.objects import ObjectMemory
    from asyncfetch.fetch.responses import AcceptedBody
    from asyncfetch.ranges import ObjectInfo
    from asyncfetch.runtime.memory_pool import MemoryPool

OTHERWISE = frozenset({200, 416, 501})
"""Statuses of answers to a range that say nothing of other ways to ask for it."""
OTHERWISE_OF_ENDS = OTHERWISE | {400, 500}
"""The same where the range ends with the object: Azure's store refuses those, twisted fails at short objects."""


def memory_for(nbytes: int, memory: MemoryPool) -> memoryview:
    """Memory for a range, to be written to; AttemptFailed where there is none."""
    try:
        return memory.take(nbytes).data
    except MemoryError as error:
        message = f"there is no memory for its {nbytes} bytes: ask for a shorter range"
        raise AttemptFailed(FetchError, message, RetryVerdict.FATAL) from error


class Download:
    """A call's range: what was asked, what is known of the object, where its bytes land and how many have.

    Bytes of two answers are joined only under one strong ETag; without one a broken body starts over.
    """

    __slots__ = (
        "_buffer", "_expected", "_is_part", "_memory", "_objects", "_remembered", "_span", "asked", "attempts", "host",
        "info", "is_first", "landed_bytes", "lost_suffix", "needs_size", "timeouts", "url", "wanted",
    )  # fmt: skip

    def __init__(
        self,
        url: str,
        wanted: WantedRange,
        objects: ObjectMemory,
        memory: MemoryPool,
        buffer: Target | None = None,
        *,
        asked: WantedRange | None = None,
        part_of: ObjectInfo | None = None,
    ) -> None:
        """Take what is known at first.

        Args:
            url: The object.
            wanted: The range to ask for.
            objects: The versions seen first, also of this object once it is seen.
            memory: Gives a buffer where there is none.
            buffer: Memory for the bytes, of just the range's length.
            asked: The caller's range, which errors name; None where that is ``wanted``.
            part_of: The only version of the object, with a strong ETag, whose bytes may go beside those of the other
                parts; None where ``wanted`` isn't a part of a range.
        """
        self.attempts = self.timeouts = 0
        """Made so far; number of those that took too long, where that counts."""
        self.url = url
        self.wanted = wanted
        self.asked = asked or wanted
        self._is_part = part_of is not None
        self._objects = objects
        self._memory = memory
        self._buffer = buffer
        self._span: tuple[int, int] | None = None
        self._expected: ObjectInfo | None = None
        self._remembered: ObjectInfo | None = None
        self.info = part_of
        self.host: Host | None = None
        """The host that the bytes came from; None where a transport doesn't say."""
        self.landed_bytes = 0
        self.lost_suffix = False
        """True if the server has refused a suffix range without a word on the size."""
        self.needs_size = False
        """True if the next request is to ask by the first and the last byte, for which the size must be known."""
        self.is_first = True
        """True if nothing was known of the object before it."""

    @property
    def known(self) -> ObjectInfo | None:
        """The object as an earlier answer described it."""
        if self.info is not None:
            return self.info
        self._remembered = self._objects.get(self.url)
        return self._remembered

    def next_request(self) -> WantedRange:
        """Return what the next attempt has to ask for: the rest of it."""
        if self._span is None:
            return self.wanted
        start, stop = self._span
        return WantedRange(start + self.landed_bytes, stop)

    @property
    def expected_bytes(self) -> int:
        """Length of the next attempt's body, or more; 0 where that isn't known."""
        wanted = self.next_request()
        if wanted.stop is not None:
            return wanted.stop - wanted.start
        if wanted.start < 0:
            return -wanted.start
        known = self.known
        return 0 if known is None else max(0, known.size - wanted.start)

    def ask(self, etag: str | None) -> tuple[str | None, str | None, ExpectedAnswer | None]:
        """Return what the next attempt's request says of the bytes, and the answer that may be expected to it.

        Returns the value of Range, None for none; that of If-Match, None where no version is insisted on; and the only
        answer whose body may land in ``room`` before it is accepted, None where too little is known. ``etag`` is the
        object's version where the answers' own tags don't count.
        """
        info = self.info
        if info is None:  # as ObjectMemory.get, for each range
            infos = self._objects.infos
            info = self._remembered = infos.get(self.url)
            self.is_first = info is None
            if info is not None:
                infos.move_to_end(self.url)
        if self._span is None:
            start, stop = self.wanted.start, self.wanted.stop
        else:
            start, stop = self._span[0] + self.landed_bytes, self._span[1]
        tag = None if info is None else strong_tag(info.etag)
        if stop is None or self.wanted.plain:
            return self.next_request().header(), tag if etag is None else None, None
        expected = None
        if info is not None and tag is not None and stop <= info.size and (etag is None or etag == info.etag):
            self._expected = info
            expected = ExpectedAnswer(start, stop, info.size, tag if etag is None else None)
        return f"bytes={start}-{stop - 1}", tag if etag is None else None, expected

    def room(self) -> Views | None:
        """Return the writable memory for what the expected answer brings; None where there is none."""
        if self._buffer is None:
            assert self.wanted.stop is not None
            try:
                self._buffer = self._memory.take(self.wanted.stop - self.wanted.start).data
            except MemoryError:
                return None
        try:
            return self._buffer[self.landed_bytes :]
        except FetchError:  # of a SplitBuffer, which takes its memory now
            return None

    def landed(self, count: int) -> None:
        """Note that so many bytes have landed, of the answer that was accepted or of the expected one."""
        if self._span is None:
            assert self.wanted.stop is not None
            self._span, self.info = (self.wanted.start, self.wanted.stop), self._expected
        self.landed_bytes += count

    def size_request(self) -> Download:
        """Return what asks for the object's size by a range that every server knows."""
        return Download(self.url, WantedRange(0, 1, clamp=True), self._objects, self._memory, asked=self.asked)

    def ask_within(self, size: int) -> None:
        """Asks for the range of an object of so many bytes by its first and last one; an empty object for itself."""
        start, stop = self.wanted.span_in(size)
        self.needs_size = False
        self.wanted = WantedRange(start, stop) if start < stop else replace(self.wanted, plain=True)

    def asks_otherwise(self, failure: AttemptFailed) -> bool:
        """Return whether the next request asks in another way than the one that the server failed at; told just once.

        Servers have ways of their own with suffix ranges, and with ranges of empty objects. Which bytes are meant is
        known from the size: where the answer doesn't tell it, that to a range of one byte does, and of an empty object,
        all of whose ranges may be refused, that to a request without one.
        """
        wanted = self.wanted
        statuses = OTHERWISE_OF_ENDS if wanted.stop is None else OTHERWISE
        if self._span is not None or wanted.is_closed or failure.status not in statuses:
            return False
        if failure.status == 400 and (wanted.start >= 0 or "X-Error-Code" in failure.headers):  # of something else
            return False
        size = None if failure.told is None else failure.told.size
        if size and max(wanted.start, 0) < size:
            self.ask_within(size)
            return True
        if wanted.plain or failure.status == 200:
            return False
        if wanted.start < 0 or (failure.status == 416 and (wanted.stop or 0) > 1):
            self.lost_suffix, self.needs_size = wanted.start < 0, True
        elif failure.status == 416:
            self.wanted = replace(wanted, plain=True)
        else:
            return False
        return True

    def accept(self, delivery: AcceptedBody) -> Views:
        """Pins the object's version and gives the writable memory for just this delivery's bytes."""
        if (self._is_part or self.landed_bytes) and delivery.info.etag != strong_etag(self.info):
            self.landed_bytes = 0
            message = (
                "a part of the range, or the rest of a broken body, came without the ETag of what was there before"
            )
            raise AttemptFailed(InvalidResponse, message, RetryVerdict.ONCE)
        if self._span is None or self._buffer is None:
            self._span = delivery.start, delivery.stop
            if self._buffer is None:
                self._buffer = memory_for(delivery.stop - delivery.start, self._memory)
            self.info = delivery.info
        return self._buffer[self.landed_bytes :]

    def remember(self) -> None:
        """Lets later reads of the object insist on this version."""
        if self.info is not None and self.info is not self._remembered:
            self._objects.remember(self.info)

    def keep_landed(self, failure: AttemptFailed) -> int:
        """Return how many bytes are kept after an attempt that failed: all where the rest can be asked for safely.

        Else it starts over. Of an object that changed nothing is remembered, so that the next call starts afresh.
        """
        if failure.kind is ObjectChanged:
            self._objects.forget(self.url)
        # All landed and yet broken: the end of the body was wrong, so no byte of it is trusted.
        whole = self._buffer is not None and self.landed_bytes == len(self._buffer)
        if whole or strong_etag(self.info) is None:
            self.landed_bytes = 0
        return self.landed_bytes

    def result(self) -> tuple[ObjectInfo, memoryview]:
        """The object and its bytes, read-only, where they are in one view. Only after the whole range has landed."""
        if self.info is None or self._buffer is None or self.landed_bytes != len(self._buffer):
            raise AssertionError("a transport returned before the range was whole")
        return self.info, self._buffer.toreadonly()
