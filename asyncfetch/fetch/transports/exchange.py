"""One request and its answer on one connection, with a limit on each phase."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Self

import aiohttp
import anyio

from asyncfetch.errors import ConnectionFailed, FetchTimeout, InvalidResponse
from asyncfetch.fetch.retry import AttemptFailed, Verdict
from asyncfetch.fetch.transports.connecting import current_user, peer_of
from asyncfetch.fetch.transports.direct import Answer
from asyncfetch.fetch.transports.faults import FOREIGN, as_failure
from asyncfetch.fetch.transports.paced import AllowedPace
from asyncfetch.runtime.cancellation import Interrupt
from asyncfetch.runtime.sockets import abort

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from contextvars import Token
    from types import TracebackType

    from asyncfetch.config import TimeoutConfig
    from asyncfetch.fetch.bandwidth import Allowance
    from asyncfetch.fetch.responses import Delivery
    from asyncfetch.fetch.scatter import Views
    from asyncfetch.fetch.transports.connecting import Connecting, ConnectionUser
    from asyncfetch.fetch.transports.hedging import Race
    from asyncfetch.runtime.deadlines import Deadlines

__all__ = ["Exchange", "PooledConnectionDied", "receive_body"]

DRAIN_LIMIT_BYTES = 64 * 1024
"""A longer body that nobody wants costs more to read than a new connection."""
DRAIN_LIMIT_SECONDS = 1.0
"""As above: a handshake takes less than this nearly everywhere."""
LOOP_LAG_SECONDS = 1.0
"""A timer that fires later than this says that the loop was blocked, and nothing about the server."""


class PooledConnectionDied(AttemptFailed):
    """The server had closed the idle connection: the request never reached it, so repeating it is free."""


class Exchange:
    """What a request waits for, for how long, and on which connection.

    Entered around the request and its body. A phase that takes too long ends the block with AttemptFailed. The
    connection returns to the pool only by way of its body's last byte; leaving earlier, however, aborts it: closing a
    TLS connection gracefully would wait for a server that may never answer.

    Args:
        timeouts: The limits of its phases.
        host: ``host:port`` that it is with.
        needs_new_connection: Whether a pooled connection won't do.
        now: Seconds since some point.
        deadlines: Those of the running loop.
        race: Told when the answer is late; None where nobody wants to know.
        is_second: Whether it is made beside another one, on a connection of its own.
    """

    connecting: Connecting | None = None
    """See ConnectionUser."""

    def __init__(
        self,
        timeouts: TimeoutConfig,
        host: str,
        *,
        needs_new_connection: bool,
        now: Callable[[], float],
        deadlines: Deadlines,
        allowance: Allowance | None = None,
        race: Race[Any] | None = None,
        is_second: bool = False,
    ) -> None:
        """``allowance`` is what the body may bring; None where that has no bound."""
        self.needs_new_connection = needs_new_connection
        self.is_second = is_second
        self.race = race
        self.reused = False
        self.response: Answer | aiohttp.ClientResponse | None = None
        self._timeouts = timeouts
        self._now = now
        self._host = host
        self._allowance = allowance
        self.transport: asyncio.BaseTransport | None = None
        self._deadlines = deadlines
        self._clock = deadlines.time
        self._scope = Interrupt()
        self._step_bytes = timeouts.min_bytes_per_second * timeouts.stall_seconds
        self._stepped_bytes = 0
        self._status: int | None = None

    def __enter__(self) -> Self:
        self._token: Token[ConnectionUser] = current_user.set(self)
        self._scope.__enter__()
        self._phase, self._seconds, self._since = "connecting", self._timeouts.connect_seconds, self._clock()
        self._patience_seconds = math.inf
        self.due = self._since + self._seconds
        if self.race is not None:
            self.race.give_up_first = self.abandon
        self._deadlines.watch(self)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        self._deadlines.leave(self)
        current_user.reset(self._token)
        self._abort_unless_ended()
        # A host that drops what we send keeps dropping it, and each try costs the whole limit.
        verdict = Verdict.AGAIN if self.transport else Verdict.ONCE
        address = peer_of(self.transport) if exc is not None and self.transport else None
        self._let_go()
        swallowed = self._scope.__exit__(exc_type, exc, traceback)
        if self._scope.cancelled_caught:
            message = f"{self._phase} took longer than {self._seconds:g} s: is {self._host} up? Or raise the timeout"
            if self._stepped_bytes:
                message += f", or lower min_bytes_per_second: {self._stepped_bytes} of {self._step_bytes:.0f} came"
            raise AttemptFailed(FetchTimeout, message, verdict, self._status, address=address)
        if isinstance(exc, AttemptFailed) and exc.status is None:
            exc.address = exc.address or address
            exc.status = self._status
        return swallowed

    def connected(self, transport: asyncio.Transport | None, *, reused: bool) -> None:
        """The connection is there; what is waited for now is the answer's first byte."""
        self.transport, self.reused = transport, reused
        self._asked_at = self._now()
        if self.race is not None:
            self._patience_seconds = self.race.patience_seconds
        self._begin("waiting for the first byte", self._timeouts.first_byte_seconds)

    def answered(self, response: Answer | aiohttp.ClientResponse) -> float:
        """The head is there; what is waited for now is the body, chunk after chunk.

        Returns:
            The seconds that the answer took from ``connected`` on, or from the request's last byte, by ``now``.
        """
        self.response, self._status = response, response.status
        self._patience_seconds = math.inf
        self._begin("waiting for the next bytes of the body", self._timeouts.stall_seconds)
        return self.waited()

    def waited(self) -> float:
        """The seconds since ``connected``, or since the request's last byte, by ``now``."""
        return self._now() - self._asked_at

    def abandon(self) -> None:
        """Closes the connection; nothing is waited for any more, so nothing can take too long."""
        self._deadlines.leave(self)
        if self.transport is not None:
            abort(self.transport)

    def moved(self) -> None:
        """Some of the request's body went out: the answer is waited for from now on."""
        self._since = self._clock()
        self._asked_at = self._now()

    def died_idle(self, error: Exception) -> bool:
        """Whether ``error``, in place of an answer, only says that the pooled connection was closed meanwhile."""
        return self.reused and isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)

    async def next_chunk(self) -> bytes:
        """Some bytes of the body, as many as have come; empty at its end. AttemptFailed where it broke."""
        if self._allowance is not None and self._allowance.left_bytes <= 0:
            seconds = self._allowance.more()
            self._pausing(seconds)
            await anyio.sleep(seconds)
        try:
            chunk = await self._read_some()
        except FOREIGN as error:
            raise as_failure(error, self._host) from error
        self._came(len(chunk))
        return chunk

    async def receive_directly(
        self, answer: Answer, view: Views, landed: Callable[[int], None], ended: Callable[[], None]
    ) -> None:
        """The whole body into ``view``, past aiohttp's reader. AttemptFailed where it broke."""
        # Not in closures: what is in flight costs the garbage collector's time, too.
        self._landed, self._ended = landed, ended
        try:
            pace = None if self._allowance is None else AllowedPace(self._allowance, self._pausing)
            await answer.receive(view, self._moved_on, pace, self._over)
        except FOREIGN as error:
            raise as_failure(error, self._host) from error
        finally:
            del self._landed, self._ended

    def _moved_on(self, count: int) -> None:
        self._came(count)
        self._landed(count)

    def _over(self) -> None:
        self._deadlines.leave(self)
        self._ended()

    async def drain(self) -> bytes:
        """Reads a body that wasn't asked for where that is cheap, so that its connection can be used again.

        Returns:
            What came of it, for the words that a server explains a refusal in.
        """
        assert isinstance(self.response, aiohttp.ClientResponse)
        body = b""
        if (self.response.content_length or 0) > DRAIN_LIMIT_BYTES:
            return body
        self._since = self._clock() + DRAIN_LIMIT_SECONDS  # this wait has its own limit, and no error
        with anyio.move_on_after(DRAIN_LIMIT_SECONDS):
            try:
                while len(body) <= DRAIN_LIMIT_BYTES and (chunk := await self._read_some()):
                    body += chunk
            except FOREIGN:
                pass  # the head has said all that matters
        return body

    async def read_all(self, max_bytes: int) -> bytes:
        """The whole body; AttemptFailed where it breaks or is longer than ``max_bytes``."""
        assert self.response is not None
        body = bytearray()
        while chunk := await self.next_chunk():
            body += chunk
            if len(body) > max_bytes:
                message = f"{self._host} answers with more than {max_bytes} bytes where a page of text was asked for"
                raise AttemptFailed(InvalidResponse, message, Verdict.ONCE, self.response.status)
        return bytes(body)

    def _came(self, count: int) -> None:
        # A body moves by steps of what it must bring in the time that it may be silent.
        self._stepped_bytes += count
        if self._stepped_bytes >= self._step_bytes:
            self._stepped_bytes = 0
            self._since = self._clock()
        if self._allowance is not None:
            self._allowance.came(count)

    def _pausing(self, seconds: float) -> None:
        self._since = self._clock() + seconds  # it isn't the server that stalls

    async def _read_some(self) -> bytes:
        assert isinstance(self.response, aiohttp.ClientResponse)
        try:
            return await self.response.content.readany()
        except RuntimeError as error:
            # aiohttp closes a connection whose chunks can't be parsed, and the reader is told nothing of it.
            raise aiohttp.ClientPayloadError("the connection was closed") from error

    def _begin(self, phase: str, seconds: float) -> None:
        self._phase, self._seconds, self._since = phase, seconds, self._clock()
        before, self.due = self.due, self._since + min(seconds, self._patience_seconds)
        if self.due < before:
            self._deadlines.watch(self)

    def is_due(self, now: float) -> None:
        """See Watched."""
        # Progress only notes the time: setting a timer with every chunk would cost a tenth of the whole fetch.
        if now - self.due > LOOP_LAG_SECONDS:
            self._since = now
        if now >= self._since + self._seconds:
            self._deadlines.leave(self)
            self._scope.cancel()
            return
        if self.race is not None and now >= self._since + self._patience_seconds:
            self._patience_seconds = math.inf
            self.race.is_late()
        self.due = self._since + min(self._seconds, self._patience_seconds)

    def _abort_unless_ended(self) -> None:
        if self.response is not None:
            if self.response.connection is None:
                return  # at the body's end aiohttp gave it back; it may be another request's by now
            self.transport = self.response.connection.transport
            self.response.close()
        if self.transport is not None:
            abort(self.transport)

    def _let_go(self) -> None:
        # The contexts of the connection's callbacks refer to this exchange, some long after its end. With the answer
        # still hanging on it, every request would leave cycles that only the garbage collector frees.
        del self._token
        self.response = self.transport = self.race = None


async def receive_body(
    exchange: Exchange, delivery: Delivery, view: Views, landed: Callable[[int], None], ended: Callable[[], None]
) -> None:
    """Brings the body's wanted bytes into ``view``, in order; returns when the body has ended as declared.

    Args:
        exchange: An answered one.
        delivery: What its body holds.
        view: Writable, of just the delivery's length.
        landed: Called with the number of bytes that were just added to ``view``.
        ended: Called when the body has ended as declared and its connection is free, which may be before this returns.

    Raises:
        AttemptFailed: The body broke, ended early or went on too long.
    """
    if isinstance(exchange.response, Answer):
        await exchange.receive_directly(exchange.response, view, landed, ended)
        return
    skip_bytes = delivery.skip_bytes
    filled = 0
    while filled < len(view):
        chunk = await exchange.next_chunk()
        if not chunk:
            raise AttemptFailed(ConnectionFailed, f"the body ended after {filled} of {len(view)} bytes")
        if skip_bytes:
            skipped = min(skip_bytes, len(chunk))
            skip_bytes -= skipped
            chunk = chunk[skipped:]
        count = min(len(chunk), len(view) - filled)
        view[filled : filled + count] = chunk if count == len(chunk) else chunk[:count]
        filled += count
        landed(count)
        if count < len(chunk) and not delivery.cut:
            raise _surplus(view)
    if not delivery.cut and await exchange.next_chunk():
        raise _surplus(view)
    ended()


def _surplus(view: Views) -> AttemptFailed:
    return AttemptFailed(InvalidResponse, f"the body goes on after its {len(view)} bytes", Verdict.ONCE)
