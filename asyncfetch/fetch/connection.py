"""A connection that reads plain answers to ranged GETs, each straight into the memory that it is meant for.

A plain answer is one of HTTP/1.1 with a status of 200 or above, a strict head of known length and a body whose length
that head states. Of any other answer a Connection tells no more than its head, or nothing; somebody else asks again.
So it needs no leniency: what is strange is read by a parser that has seen everything.

A body of which all is known beforehand, as of nearly every range of an object that was read before, lands in its buffer
as it comes, behind one future. Of another one the head is told first, and the body waits for ``receive``.
"""

from __future__ import annotations

import asyncio
import re
import select
from contextlib import suppress
from enum import Enum, auto
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING

import anyio
from multidict import CIMultiDict

from asyncfetch.errors import ConnectionFailed, FetchTimeout
from asyncfetch.fetch.buffers import ChainedBuffer
from asyncfetch.fetch.refusals import broken
from asyncfetch.fetch.retry import AttemptFailed, RetryVerdict
from asyncfetch.runtime.sockets import abort

if TYPE_CHECKING:
    from asyncfetch.config import TimeoutConfig
    from asyncfetch.fetch.bandwidth import RateLimit
    from asyncfetch.fetch.buffers import Views
    from asyncfetch.fetch.responses import ExpectedAnswer
    from asyncfetch.runtime.cancellation import Deadlines

__all__ = ["Connection", "Head", "Peer", "PooledConnectionDied", "parse_head"]

SCRATCH_BYTES = 80 * 1024
"""Bytes of an answer that are read at a time while its own memory isn't known, into memory that all connections of a
loop share. A range of 64 KiB comes with its head, and is copied, which costs as much as another turn of the loop's TLS;
and uvloop's loses what that has read and not given out when the peer resets the connection just then."""
MAX_HEAD_BYTES = 16 * 1024
"""A longer head isn't plain. nginx, Apache and aiohttp bound theirs at 8 KiB a line."""
DRAIN_LIMIT_BYTES = 64 * 1024
"""A longer body that nobody wants costs more to read than a new connection."""
DRAIN_LIMIT_SECONDS = 1.0
"""A body that takes longer costs more than a new connection: a handshake takes less than this nearly everywhere."""
LOOP_LAG_SECONDS = 1.0
"""A timer that fires later than this says that the loop was blocked, and nothing about the server."""

Peer = tuple[str, int]
"""Address and port."""

_SURPLUS = memoryview(bytearray(4096))
"""Takes what comes after a body's end; nobody looks at it."""
_NAME = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_HEAD = re.compile(rf"HTTP/1\.1 ([2-5][0-9][0-9])(?: [ -~]*)?\r\n(?:{_NAME}:[ -~\t]*\r\n)+\r\n".encode())
_FIELD = re.compile(rf"({_NAME}):[ \t]*([^\r]*)\r")
_CONNECTION = frozenset({"keep-alive", "close"})
_LENGTH = re.compile("[0-9]{1,18}")
_START = b"HTTP/1.1 "


class PooledConnectionDied(AttemptFailed):
    """The server had closed the idle connection: the request never reached it, so repeating it is free."""


class Head:
    """The head of an answer."""

    __slots__ = ("closes", "headers", "length_bytes", "status")

    def __init__(self, status: int, headers: CIMultiDict[str]) -> None:
        self.status = status
        self.headers = headers
        """Found by names of any case."""
        lengths = headers.getall("Content-Length", [])
        connections = headers.getall("Connection", [])
        self.closes = bool(connections) and connections[0].lower() == "close"
        """True if the server closes the connection after the body."""
        is_plain = (
            len(lengths) == 1
            and _LENGTH.fullmatch(lengths[0]) is not None
            and "Transfer-Encoding" not in headers
            and (not connections or (len(connections) == 1 and connections[0].lower() in _CONNECTION))
            and status not in {204, 304}
        )
        self.length_bytes = int(lengths[0]) if is_plain else None
        """Length of the body; None where the answer isn't plain."""


def is_strict(raw: bytes) -> bool:
    """Return whether ``raw``, which ends with an empty line, is a head that every parser reads alike."""
    return _HEAD.fullmatch(raw) is not None and b" \r" not in raw and b"\t\r" not in raw


def parse_head(raw: bytes) -> Head | None:
    """Return the head that ``raw``, which ends with an empty line, is; None where it is no strict one."""
    if not is_strict(raw):
        return None
    return Head(int(raw[9:12]), CIMultiDict(_FIELD.findall(raw.decode("ascii"))))


class _Phase(Enum):
    IDLE = auto()
    """Nothing was asked for, and nothing may come."""
    AWAITING_HEAD = auto()
    HELD = auto()
    """The head is there; where the body belongs isn't known yet."""
    RECEIVING = auto()
    ENDED = auto()
    """Nothing more is wanted; what comes makes the connection unusable."""


class Connection(asyncio.BufferedProtocol):
    """One connection to a host, which carries one request at a time.

    Whoever sends a request awaits the future that ``send`` returns, and then looks: the body has landed (``is_whole``),
    or the head is there (``head``; None where it is no strict one), or the answer is late (``is_late``). Each wait has
    a limit; beyond it the future raises AttemptFailed. A request that is given up leaves the connection unusable:
    ``abort`` it.

    Belongs to one loop; not thread-safe.

    Args:
        host: ``host:port``, for errors.
        idle: The idle connections of its host, which it joins by ``release`` and leaves with its end.
        timeouts: Limits of the phases of a request.
        keepalive_seconds: An idle connection is closed after this.
        deadlines: Those of the running loop.
        scratch: What answers begin in, shared by all connections of the loop: nothing stays there.
    """

    __slots__ = (
        "_deadlines", "_expected", "_has_ended", "_has_surplus", "_head", "_held", "_host", "_idle",
        "_keepalive_seconds", "_later", "_left_bytes", "_loop", "_missing_bytes", "_patience_seconds", "_phase",
        "_poll", "_rate_limit", "_raw_head", "_scratch", "_scratch_view", "_since", "_step_bytes", "_stepped_bytes",
        "_timeouts", "_view", "_waiter", "due", "first_byte_at", "is_late", "is_reused", "is_whole", "peer",
        "received_bytes", "sent_at", "transport",
    )  # fmt: skip

    transport: asyncio.Transport
    _head: Head | None
    _expected: ExpectedAnswer | None
    _rate_limit: RateLimit | None
    _held: bytearray
    _later: list[memoryview]
    _left_bytes: int

    def __init__(
        self,
        host: str,
        idle: dict[Connection, None],
        *,
        timeouts: TimeoutConfig,
        keepalive_seconds: float,
        deadlines: Deadlines,
        scratch: bytearray,
    ) -> None:
        self._host = host
        self._idle = idle
        self._timeouts = timeouts
        self._keepalive_seconds = keepalive_seconds
        self._deadlines = deadlines
        self._loop = asyncio.get_running_loop()
        self._step_bytes = timeouts.min_bytes_per_second * timeouts.stall_seconds
        self._phase = _Phase.IDLE
        self._scratch, self._scratch_view = scratch, memoryview(scratch)
        self._poll: select.poll | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._has_ended = self._has_surplus = False
        self.is_late = False
        """True if the answer was late when this was last waited for."""
        self.is_whole = False
        """True if the whole body has landed."""
        self.received_bytes = 0
        """Bytes of the body that are in its memory."""
        self._clear()
        self.peer: Peer | None = None
        """The peer that it leads to."""
        self.is_reused = False
        """True if an earlier request has had an answer on it."""
        self.sent_at = self.first_byte_at = 0.0
        """Times at which the request went out and its answer's head was there, by ``time.perf_counter``."""

    @property
    def head(self) -> Head | None:
        """The head of the answer; None until it is there, and where it is no strict one."""
        if self._head is None and self._raw_head:
            self._head = parse_head(self._raw_head)
        return self._head

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self.transport = transport  # type: ignore[assignment]
        peer = transport.get_extra_info("peername")
        self.peer = (str(peer[0]), int(peer[1])) if peer else None
        self._since, self.due = self._deadlines.time(), inf
        self._deadlines.watch(self)

    def send(
        self,
        request: bytes,
        expected: ExpectedAnswer | None = None,
        view: Views | None = None,
        *,
        patience_seconds: float = inf,
    ) -> asyncio.Future[None]:
        """Send a request; the future is done when there is something to look at.

        Args:
            request: Its head.
            expected: The answer of which the body may land in ``view`` at once; None where its head is told first.
            view: Writable, of just the expected body's length.
            patience_seconds: After which the answer is late.
        """
        self._clear()
        self._phase = _Phase.AWAITING_HEAD
        self._expected, self._patience_seconds = expected, patience_seconds
        if view is not None:
            self._aim(view)
        self._since = self._deadlines.time()
        before, self.due = self.due, self._since + min(self._timeouts.first_byte_seconds, patience_seconds)
        if self.due < before:
            self._deadlines.watch(self)
        self.sent_at = perf_counter()
        self.transport.write(request)
        waiter = self._waiter = self._loop.create_future()
        return waiter

    def wait(self) -> asyncio.Future[None]:
        """Wait on for the head of a late answer, as ``send`` does."""
        self.is_late = False
        waiter = self._waiter = self._loop.create_future()
        if self._phase is not _Phase.AWAITING_HEAD:
            waiter.set_result(None)
        elif self._has_ended:
            self._fail(self._lost(None))
        return waiter

    async def receive(self, view: Views, rate_limit: RateLimit | None = None) -> None:
        """Fill ``view`` with the first bytes of the body, in order; ``is_whole`` says whether those were all.

        After a failure or a cancellation nothing writes to ``view``, and the connection is of no use.

        Args:
            view: Writable, at most as long as the body.
            rate_limit: How fast it may come; None where that has no bound.

        Raises:
            AttemptFailed: The body broke, or took too long.
        """
        assert self._phase is _Phase.HELD
        self._aim(view)
        self._left_bytes -= len(view)
        self._rate_limit = rate_limit
        held, self._held = self._held, bytearray()
        self._begin_body(memoryview(held))
        if self.is_received:
            return
        waiter = self._waiter = self._loop.create_future()
        if self._has_ended:
            self._fail(self._lost(None))
        elif rate_limit is not None:
            rate_limit.begin(self.transport)
        try:
            await waiter
        finally:
            if not self.is_received:
                self._stop()

    @property
    def is_received(self) -> bool:
        """True if nothing is missing of what the body is to bring."""
        return self._phase is not _Phase.RECEIVING

    async def drain(self) -> bytes:
        """Read a body that wasn't asked for where that is cheap, so that the connection can be used again.

        Returns:
            What came of it, for the words that a server explains a refusal in; empty where it is long, or read already.
        """
        assert self.head is not None
        length_bytes = self.head.length_bytes
        if self._phase is not _Phase.HELD or length_bytes is None or length_bytes > DRAIN_LIMIT_BYTES:
            return b""
        body = bytearray(length_bytes)
        with anyio.move_on_after(DRAIN_LIMIT_SECONDS), suppress(AttemptFailed):  # the head has said all that matters
            await self.receive(memoryview(body))
        return bytes(body[: self.received_bytes])

    def release(self) -> None:
        """Join the idle connections of the host where another request may follow; else close."""
        closes = self._head is not None and self._head.closes  # of an expected answer it was seen that it doesn't
        if not self.is_whole or self._has_surplus or self._has_ended or closes:
            self.abort()
            return
        self._phase = _Phase.IDLE
        self.is_reused = True
        # It is due when its answer was, at the latest: nobody is told for each of thousands that comes sooner.
        self._since = self._deadlines.time()
        self._idle[self] = None

    @property
    def idle_since(self) -> float | None:
        """Time since which it is one of its host's idle ones; None where it isn't."""
        return self._since if self in self._idle else None

    def is_spoilt(self) -> bool:
        """Return whether an idle one is of no use: something unasked has come, or waits in its socket, or its end."""
        if self._has_surplus or self._has_ended or self.transport.is_closing():
            return True
        if self._deadlines.time() >= self._since + self._keepalive_seconds:
            return True
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self.transport.get_extra_info("socket"), select.POLLIN)
        return bool(self._poll.poll(0))

    def abort(self) -> None:
        """Close it at once; closing a TLS connection gracefully would wait for a server that may never answer."""
        self._stop()
        self._deadlines.leave(self)
        abort(self.transport)
        self._wake()

    def forget(self) -> None:
        """Leave it to be collected, which closes its socket: for a loop that can't."""
        self._idle.pop(self, None)

    def is_due(self, now: float) -> None:
        """See Watched."""
        # Progress only notes the time: setting a timer with every chunk would cost a tenth of the whole fetch.
        if now - self.due > LOOP_LAG_SECONDS:
            self._since = now
        timeouts = self._timeouts
        match self._phase:
            case _Phase.AWAITING_HEAD:
                limit_seconds = timeouts.first_byte_seconds
                if now >= self._since + limit_seconds:
                    self._time_out("waiting for the first byte", limit_seconds)
                    return
                if now >= self._since + self._patience_seconds:
                    self._patience_seconds, self._expected, self.is_late = inf, None, True
                    self._wake()
                self.due = self._since + min(limit_seconds, self._patience_seconds)
            case _Phase.RECEIVING:
                limit_seconds = timeouts.stall_seconds
                if now >= self._since + limit_seconds:
                    self._time_out("waiting for the next bytes of the body", limit_seconds)
                    return
                self.due = self._since + limit_seconds
            case _Phase.IDLE if now >= self._since + self._keepalive_seconds and self in self._idle:
                del self._idle[self]
                self.abort()
            case _Phase.IDLE:
                self.due = self._since + self._keepalive_seconds
            case _:
                self.due = now + self._keepalive_seconds

    def paused(self, seconds: float) -> None:
        """Count no silence for so long: it isn't the server that stalls."""
        self._since = self._deadlines.time() + seconds

    def get_buffer(self, sizehint: int) -> memoryview:
        """See asyncio."""
        match self._phase:
            case _Phase.RECEIVING:
                rest = self._view[-self._missing_bytes :]
                return rest if self._rate_limit is None else self._rate_limit.room(rest)
            case _Phase.AWAITING_HEAD:
                return self._scratch_view
            case _Phase.HELD if len(self._held) < self._left_bytes:
                return self._scratch_view[: self._left_bytes - len(self._held)]
        return _SURPLUS

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio."""
        match self._phase:
            case _Phase.RECEIVING:
                self._landed(nbytes)
            case _Phase.AWAITING_HEAD:
                self._look_for_head(nbytes)
            case _Phase.HELD if len(self._held) < self._left_bytes:
                self._held += self._scratch_view[:nbytes]
            case _:
                self._has_surplus = True

    def eof_received(self) -> None:
        """See asyncio."""
        self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._end(exc)
        self._idle.pop(self, None)
        self._deadlines.leave(self)

    def pause_writing(self) -> None:
        """See asyncio. Nobody waits to write: a request is short, and its connection has nothing else to do."""

    def resume_writing(self) -> None:
        """See ``pause_writing``."""

    def _clear(self) -> None:
        self._head = None
        self._raw_head = b""
        self._expected = self._rate_limit = None
        self._held = bytearray()  # what came and was not looked at yet: a part of a head, or the body behind it
        self.is_late = self.is_whole = False
        self._view, self._later = _SURPLUS, []
        self.received_bytes = self._missing_bytes = self._left_bytes = self._stepped_bytes = 0
        self._patience_seconds = inf

    def _aim(self, view: Views) -> None:
        if isinstance(view, ChainedBuffer):
            self._view, *self._later = view.views
        else:
            self._view = view
        self._missing_bytes = len(self._view)

    def _look_for_head(self, nbytes: int) -> None:
        if self._held:
            self._held += self._scratch_view[:nbytes]
            received, nbytes = self._held, len(self._held)
        else:
            received = self._scratch
        end = received.find(b"\r\n\r\n", 0, min(nbytes, MAX_HEAD_BYTES)) + 4
        if end < 4:
            start = bytes(received[: min(nbytes, len(_START))])
            if nbytes < MAX_HEAD_BYTES and _START.startswith(start):
                self._held = received if self._held else received[:nbytes]
                return
            end = 0
        self.first_byte_at = perf_counter()
        raw = self._raw_head = bytes(received[:end])
        expected = self._expected
        if expected is not None and expected.is_met_by(raw) and is_strict(raw):
            with memoryview(received) as view:
                self._begin_body(view[end:nbytes])
            return
        self._phase = _Phase.HELD
        if self.head is None or self.head.length_bytes is None:
            self._phase = _Phase.ENDED
        else:
            self._left_bytes = self.head.length_bytes
            self._held = received[end : min(nbytes, end + self._left_bytes)]
            self._has_surplus = self._has_surplus or nbytes > end + self._left_bytes
        self._wake()

    def _begin_body(self, received: memoryview) -> None:
        """Copies what has come of the body to where it belongs, and lets the rest land there."""
        self._since = self._deadlines.time()
        due = self._since + self._timeouts.stall_seconds
        if due < self.due:
            self.due = due
            self._deadlines.watch(self)
        self._phase = _Phase.RECEIVING
        at, stop = 0, len(received)
        while self._phase is _Phase.RECEIVING:
            count = min(self._missing_bytes, stop - at)
            place = len(self._view) - self._missing_bytes
            self._view[place : place + count] = received[at : at + count]
            self._landed(count)
            at += count
            if at == stop:
                return
        self._has_surplus = self._has_surplus or stop - at > self._left_bytes

    def _landed(self, nbytes: int) -> None:
        self._missing_bytes -= nbytes
        self.received_bytes += nbytes
        # A body moves by steps of what it must bring in the time that it may be silent.
        self._stepped_bytes += nbytes
        if self._stepped_bytes >= self._step_bytes:
            self._stepped_bytes = 0
            self._since = self._deadlines.time()
        if self._rate_limit is not None:
            self._rate_limit.came(nbytes)
        if not self._missing_bytes:
            if self._later:
                self._view = self._later.pop(0)
                self._missing_bytes = len(self._view)
                return
            self.is_whole = self._left_bytes == 0
            self._stop()
            self._wake()

    def _stop(self) -> None:
        """No more of the body is wanted."""
        self._phase, self._view, self._later, self._expected = _Phase.ENDED, _SURPLUS, [], None
        rate_limit, self._rate_limit = self._rate_limit, None
        if rate_limit is not None:
            rate_limit.end()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _fail(self, failure: AttemptFailed) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_exception(failure)
        self.abort()

    def _time_out(self, phase: str, limit_seconds: float) -> None:
        message = f"{phase} took longer than {limit_seconds:g} s: is {self._host} up? Or raise the timeout"
        if self._stepped_bytes:
            message += f", or lower min_bytes_per_second: {self._stepped_bytes} of {self._step_bytes:.0f} came"
        status = None if self.head is None else self.head.status
        self._fail(AttemptFailed(FetchTimeout, message, RetryVerdict.AGAIN, status, address=self.peer))

    def _end(self, error: Exception | None) -> None:
        self._has_ended = True
        if self._phase is _Phase.AWAITING_HEAD or self._phase is _Phase.RECEIVING:
            self._fail(self._lost(error))

    def _lost(self, error: Exception | None) -> AttemptFailed:
        if self._phase is _Phase.AWAITING_HEAD:
            message = broken(self._host, error or "it was closed in place of an answer")
            if self.is_reused and not self._held:
                return PooledConnectionDied(ConnectionFailed, message)
            return AttemptFailed(ConnectionFailed, message, address=self.peer)
        assert self.head is not None
        total_bytes = self.received_bytes + self._missing_bytes + sum(map(len, self._later)) + self._left_bytes
        cause = f" ({error})" if error else ""
        message = f"the body from {self._host} broke off: it ended after {self.received_bytes} of {total_bytes} bytes"
        return AttemptFailed(ConnectionFailed, message + cause, status=self.head.status, address=self.peer)
