"""A connection of ours to a host, which carries one request at a time; the answer to it is an ``Answer``.

    new, or idle --send--> an answer comes --release--> idle, where another request may follow
         |                      |               +-----> closed, where none may
         +---- abort, a limit that has passed, the other end's end ---> closed

A body of which all is known beforehand, as of nearly every range of an object that was read before, lands in its buffer
as it comes, behind one future. Of another one the head is told first, and the body waits for ``receive``.

The logger of this module says each step at DEBUG, of connections that are made while that is switched on.
"""

from __future__ import annotations

import asyncio
import logging
import select
from contextlib import suppress
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING

import anyio
from typing_extensions import override

from asyncfetch.errors import ConnectionFailed
from asyncfetch.fetch.answer import Answer, Phase, no_place
from asyncfetch.fetch.refusals import broken, too_slow
from asyncfetch.fetch.retry import AttemptFailed
from asyncfetch.runtime.cancellation import Deadline
from asyncfetch.runtime.sockets import abort

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncfetch.config import TimeoutConfig
    from asyncfetch.fetch.answer import ExpectedAnswer, Head
    from asyncfetch.fetch.bandwidth import Allowance
    from asyncfetch.fetch.buffers import Views
    from asyncfetch.runtime.cancellation import Deadlines

SCRATCH_BYTES = 80 * 1024
"""Bytes of an answer that are read at a time while its own memory isn't known, into memory that all connections of a
loop share. A range of 64 KiB comes with its head, and is copied, which costs as much as another turn of the loop's TLS;
and uvloop's loses what that has read and not given out when the peer resets the connection just then."""
DRAIN_LIMIT_BYTES = 64 * 1024
"""A longer unwanted body costs more to read than a new connection."""
DRAIN_LIMIT_SECONDS = 1.0
"""A body that takes longer costs more than a new connection: a handshake takes less than this nearly everywhere."""
LOOP_LAG_SECONDS = 1.0
"""A timer that fires later than this says that the loop was blocked, and nothing about the server."""

Peer = tuple[str, int]
"""Address and port."""

_log = logging.getLogger(__name__)
_AWAITING_HEAD, _HELD, _RECEIVING, _ENDED = Phase  # a look-up each saves, at every read of a socket


class PooledConnectionDied(AttemptFailed):
    """The server had closed the idle connection: the request never reached it, so repeating it is free."""


class Connection(asyncio.BufferedProtocol, Deadline):
    """One connection.

    The sender of a request awaits the future that ``send`` returns, and then looks: the body has landed
    (``answer.is_whole``), or the head is there (``head``; None where it is no strict one), or the answer is late
    (``is_late``). Each wait has a limit; beyond it the future raises AttemptFailed. A request that is given up leaves
    the connection unusable: ``abort`` it.

    Belongs to one loop; not thread-safe. ``host`` is ``host:port``. ``idle`` are the idle connections of that, which
    it joins by ``release`` and leaves with its end. In ``scratch`` all answers of the loop begin; nothing stays there.
    """

    __slots__ = (
        "_allowance", "_deadlines", "_has_ended", "_host", "_idle", "_is_logged", "_keepalive_seconds", "_loop",
        "_patience_seconds", "_poll", "_scratch", "_since", "_step_bytes", "_stepped_at", "_timeouts", "_waiter",
        "answer", "due", "first_byte_at", "is_late", "is_reused", "peer", "sent_at", "transport",
    )  # fmt: skip

    transport: asyncio.Transport
    due: float

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
        self._scratch = scratch
        self._poll: select.poll | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._allowance: Allowance | None = None
        self._patience_seconds = inf
        self._stepped_at = 0  # bytes of the body that had come when it last moved by a step
        self._has_ended = False
        self._is_logged = _log.isEnabledFor(logging.DEBUG)  # asked once, so that it costs nothing where it isn't
        self.answer = Answer(self._scratch)
        """The answer to the latest request."""
        self.answer.stop()
        self.is_late = False
        """True if the answer was late when this was last waited for."""
        self.peer: Peer | None = None
        """The peer that it leads to."""
        self.is_reused = False
        """True if an earlier request has had an answer on it."""
        self.sent_at = self.first_byte_at = 0.0
        """Times at which the request went out and its answer's head was there, by ``time.perf_counter``."""

    def __repr__(self) -> str:
        answer = self.answer
        state = "closed" if self._has_ended else "idle" if self in self._idle else answer.phase.name.lower()
        return f"<Connection to {self._host} at {self.peer}: {state}, {answer.received_bytes} bytes of a body came>"

    @property
    def head(self) -> Head | None:
        """The head of the answer; None until it is there, and where it is no strict one."""
        return self.answer.head

    # --- what is done with it, in order

    def send(
        self,
        request: bytes,
        expected: ExpectedAnswer | None = None,
        place: Callable[[], Views | None] = no_place,
        *,
        patience_seconds: float = inf,
    ) -> asyncio.Future[None]:
        """Send the head of a request; the future is done when there is something to look at.

        ``expected`` and ``place`` are Answer's. After ``patience_seconds`` the answer is late.
        """
        self.answer = Answer(self._scratch, expected, place, self.answer.pattern)
        self._patience_seconds, self.is_late, self._stepped_at = patience_seconds, False, 0
        self._since = self._deadlines.time()
        before, self.due = self.due, self._since + min(self._timeouts.first_byte_seconds, patience_seconds)
        if self.due < before:
            self._deadlines.watch(self)
        if self._is_logged:
            _log.debug("%r sends %d bytes", self, len(request))
        self.sent_at = perf_counter()
        self.transport.write(request)
        waiter = self._waiter = self._loop.create_future()
        return waiter

    def wait(self) -> asyncio.Future[None]:
        """Wait on for the head of a late answer, as ``send`` does."""
        self.is_late = False
        waiter = self._waiter = self._loop.create_future()
        if self.answer.phase is not _AWAITING_HEAD:
            waiter.set_result(None)
        elif self._has_ended:
            self._fail(self._lost(None))
        return waiter

    async def receive(self, view: Views, allowance: Allowance | None = None) -> None:
        """Fill ``view`` with the first bytes of the body, in order; ``answer.is_whole`` says whether those were all.

        After a failure (AttemptFailed where the body broke, or took too long) or a cancellation nothing writes to
        ``view``, and the connection is of no use. Where ``allowance`` is spent, nothing is read until there is more.
        """
        answer = self.answer
        answer.take(view)
        if allowance is not None:
            allowance.came(answer.received_bytes)
        if answer.phase is _ENDED:
            return
        self._begin_body()
        self._allowance = allowance
        try:
            while answer.phase is not _ENDED:
                waiter = self._waiter = self._loop.create_future()
                if self._has_ended:
                    self._fail(self._lost(None))
                elif allowance is not None and not allowance.left_bytes and (seconds := allowance.more()):
                    # Not in ``buffer_updated``: what a TLS transport has read by then it would keep.
                    self.transport.pause_reading()
                    self._since = self._deadlines.time() + seconds  # it isn't the server that stalls
                    await asyncio.wait((waiter,), timeout=seconds)
                    if not self.transport.is_closing():
                        self.transport.resume_reading()
                await waiter
        finally:
            self._allowance = None
            answer.stop()

    async def drain(self) -> bytes:
        """Read a body that wasn't asked for where that is cheap, so that the connection can be used again.

        What came of it has the words that a server explains a refusal in. Empty where it is long, or read already.
        """
        assert self.head is not None
        length_bytes = self.head.length_bytes
        if self.answer.phase is not _HELD or length_bytes is None or length_bytes > DRAIN_LIMIT_BYTES:
            return b""
        body = bytearray(length_bytes)
        with anyio.move_on_after(DRAIN_LIMIT_SECONDS), suppress(AttemptFailed):  # the head has said all that matters
            await self.receive(memoryview(body))
        return bytes(body[: self.answer.received_bytes])

    def release(self) -> None:
        """Join the idle connections of the host where another request may follow; else close."""
        answer = self.answer
        if not answer.is_whole or answer.has_surplus or answer.closes or self._has_ended:
            self.abort()
            return
        self.is_reused = True
        # It is due when its answer was, at the latest: those that come sooner, thousands, need no call each.
        self._since = self._deadlines.time()
        self._idle[self] = None
        if self._is_logged:
            _log.debug("%r", self)

    @property
    def idle_since(self) -> float | None:
        """Time since which it is one of its host's idle ones; None where it isn't."""
        return self._since if self in self._idle else None

    def is_spoilt(self) -> bool:
        """Return whether an idle one is of no use: something unasked has come, or waits in its socket, or its end."""
        if self.answer.has_surplus or self._has_ended or self.transport.is_closing():
            return True
        if self._deadlines.time() >= self._since + self._keepalive_seconds:
            return True
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self.transport.get_extra_info("socket"), select.POLLIN)
        return bool(self._poll.poll(0))

    def abort(self) -> None:
        """Close it at once; closing a TLS connection gracefully would wait for a server that may never answer."""
        if self._is_logged and not self.transport.is_closing():
            _log.debug("%r is closed here", self)
        self.answer.stop()
        self._deadlines.leave(self)
        abort(self.transport)
        self._wake()

    def forget(self) -> None:
        """Leave it to be collected, which closes its socket: for a loop that can't."""
        self._idle.pop(self, None)

    # --- what asyncio tells it

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        peer = transport.get_extra_info("peername")
        self.peer = (str(peer[0]), int(peer[1])) if peer else None
        self._since, self.due = self._deadlines.time(), inf
        self._deadlines.watch(self)

    @override
    def get_buffer(self, sizehint: int) -> memoryview:
        if self.answer.phase is _AWAITING_HEAD:
            return memoryview(self._scratch)
        room = self.answer.room()
        # Of what has left the socket already all is taken, paid for or not.
        return room if self._allowance is None else room[: self._allowance.left_bytes or None]

    @override
    def buffer_updated(self, nbytes: int) -> None:
        answer = self.answer
        before, phase = answer.received_bytes, answer.phase
        is_news = answer.came(nbytes)
        if phase is _AWAITING_HEAD and answer.phase is not _AWAITING_HEAD:
            self.first_byte_at = perf_counter()
            if answer.phase is _RECEIVING:
                self._begin_body()
            if self._is_logged:
                _log.debug("%r has the head of a %s", self, answer.head and answer.head.status)
        elif phase is _RECEIVING:
            # A body moves by steps of what it must bring in the time that it may be silent.
            if answer.received_bytes - self._stepped_at >= self._step_bytes:
                self._stepped_at = answer.received_bytes
                self._since = self._deadlines.time()
            if self._allowance is not None:
                self._allowance.came(answer.received_bytes - before)
                is_news = is_news or not self._allowance.left_bytes
        if is_news:
            waiter, self._waiter = self._waiter, None
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    @override
    def eof_received(self) -> None:
        self._end(None)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc)
        self._idle.pop(self, None)
        self._deadlines.leave(self)

    @override
    def pause_writing(self) -> None:
        """Writers never wait: a request is short, and its connection has nothing else to do."""

    @override
    def resume_writing(self) -> None:
        pass

    # --- its limits of time

    @override
    def is_due(self, now: float) -> None:
        # Progress only notes the time: setting a timer with every chunk would cost a tenth of the whole fetch.
        if now - self.due > LOOP_LAG_SECONDS:
            self._since = now
        phase, timeouts = self.answer.phase, self._timeouts
        if phase is _AWAITING_HEAD:
            limit_seconds = timeouts.first_byte_seconds
            if now >= self._since + limit_seconds:
                self._time_out("waiting for the first byte", limit_seconds)
                return
            if now >= self._since + self._patience_seconds:
                self._patience_seconds, self.is_late = inf, True
                self.answer.hold()
                self._wake()
            self.due = self._since + min(limit_seconds, self._patience_seconds)
        elif phase is _RECEIVING:
            limit_seconds = timeouts.stall_seconds
            if now >= self._since + limit_seconds:
                self._time_out("waiting for the next bytes of the body", limit_seconds)
                return
            self.due = self._since + limit_seconds
        elif self in self._idle:
            self.due = self._since + self._keepalive_seconds
            if now >= self.due:
                del self._idle[self]
                self.abort()
        else:
            self.due = now + self._keepalive_seconds

    def _begin_body(self) -> None:
        self._since = self._deadlines.time()
        due = self._since + self._timeouts.stall_seconds
        if due < self.due:
            self.due = due
            self._deadlines.watch(self)

    # --- its end, and that of a wait

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
        came, step = self.answer.received_bytes - self._stepped_at, self._step_bytes
        failure = too_slow(phase, limit_seconds, self._host, came_bytes=came, step_bytes=step)
        failure.status, failure.address = None if self.head is None else self.head.status, self.peer
        self._fail(failure)

    def _end(self, error: Exception | None) -> None:
        if self._is_logged and not self._has_ended:
            _log.debug("%r has ended: %s", self, error)
        self._has_ended = True
        if self.answer.phase is _AWAITING_HEAD or self.answer.phase is _RECEIVING:
            self._fail(self._lost(error))

    def _lost(self, error: Exception | None) -> AttemptFailed:
        answer, head = self.answer, self.head
        if head is None:
            failure = broken(self._host, error or "it was closed in place of an answer")
            if self.is_reused and not answer.has_begun:
                return PooledConnectionDied(failure.kind, failure.message)
            failure.address = self.peer
            return failure
        cause = f" ({error})" if error else ""
        message = (
            f"the body from {self._host} broke off: it ended after {answer.received_bytes} of {head.length_bytes} bytes"
        )
        return AttemptFailed(ConnectionFailed, message + cause, status=head.status, address=self.peer)
