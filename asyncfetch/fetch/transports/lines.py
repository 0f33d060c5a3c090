"""Sessions on several loops, so that large bodies come in on more than one core.

What a byte costs is the kernel's copy and the decryption, and Python's lock is free during both. So a body may land
in its buffer from any thread. What decides (gate, retries, redirects, addresses) stays on the caller's loop, and so
do small bodies, because going to another loop and coming back costs 0.1-0.25 ms.

Each further loop has a session of its own, and so connections of its own: none is ever used by two loops. The session
is closed on its loop, whatever ends that: ``aclose``, the interpreter's exit, an error in the loop itself.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
from anyio import to_thread

from asyncfetch.errors import ClosedError, ConnectionFailed
from asyncfetch.fetch.retry import AttemptFailed
from asyncfetch.fetch.transports.rehearsal import is_as_expected
from asyncfetch.fetch.transports.requests import Requests
from asyncfetch.fetch.transports.resolver import Resolver
from asyncfetch.fetch.transports.session import TwinConnector, open_session
from asyncfetch.fetch.transports.session_requests import SessionRequests
from asyncfetch.runtime.loop_thread import LoopThread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import aiohttp

    from asyncfetch.config import FetchConfig

__all__ = ["SMALL_BYTES", "Line", "Lines"]

SMALL_BYTES = 4 * 1024 * 1024
"""Shorter bodies stay on the caller's loop. Where client and server had a core each, bodies of 1 MiB on two loops cost
15-46 % more CPU and came more slowly, those of 2 MiB now more slowly and now faster; those of 4 MiB cost 8-12 % more
and came 17 % faster over plain HTTP."""
CLOSE_SECONDS = 2.0
"""Longest wait for a loop to close its connections, which takes a few rounds of it."""

T = TypeVar("T")


class Line:
    """One loop's session, and the way there. This one is the caller's own loop."""

    session: aiohttp.ClientSession
    requests: SessionRequests
    resolver: Resolver
    has_ended = False
    """Whether its loop has, and nothing can run there any more."""

    def __init__(self, number: int = 0) -> None:
        """``number`` tells a transport's lines apart; 0 is the caller's."""
        self.number = number
        self.bytes_under_way = 0

    async def open(self, config: FetchConfig) -> None:
        """Makes the session; ConfigError where ``ca_file`` can't be read."""
        works = await is_as_expected()
        self.resolver = Resolver()
        if works:
            self.session = await open_session(config, self.resolver)
            self.requests = Requests(self.session, directly=config.direct_bodies)
        else:
            self.session = await open_session(config, self.resolver, connector=TwinConnector)
            self.requests = SessionRequests(self.session)

    async def run(self, body_bytes: int, exchange: Callable[..., Awaitable[T]], *args: Any) -> T:  # noqa: ANN401
        """What ``exchange(*args)`` returns or raises, run on the line's loop. Cancelled, it is seen off over there.

        Args:
            body_bytes: Expected length of its body.
            exchange: Uses the line's requests.
            args: For ``exchange``.

        Raises:
            AttemptFailed: Also where the line's loop has ended.
        """
        # Each coroutine on the way to a request is one more object in flight, so this one is all that there is.
        self.bytes_under_way += body_bytes
        try:
            return await exchange(*args)
        except AttemptFailed as failure:
            self._note(failure)
            raise
        finally:
            self.bytes_under_way -= body_bytes

    def _note(self, failure: AttemptFailed) -> None:
        """Lets the resolver know, which is on the line's loop."""
        if failure.address is not None:
            self.resolver.set_aside([failure.address])

    async def aclose(self) -> None:
        """Closes the session. Nothing may be under way."""
        self.requests.close()
        await self.session.close()


class _OtherLine(Line):
    """A loop in a thread of its own."""

    def __init__(self, number: int) -> None:
        """Starts the thread, and waits for that; ClosedError where none can be had."""
        super().__init__(number)
        codecs.lookup("idna")  # else imported for the first handshake, and a second loop's waits for that import
        self._thread = LoopThread(name=f"asyncfetch bodies {number}")
        self._holding = self._thread.start(self._hold)

    async def open(self, config: FetchConfig) -> None:
        await self._thread.acall(super().open, config)

    async def run(self, body_bytes: int, exchange: Callable[..., Awaitable[T]], *args: Any) -> T:  # noqa: ANN401
        self.bytes_under_way += body_bytes
        try:
            return await self._thread.acall(self._run_there, exchange, *args)
        except ClosedError as error:
            self.has_ended = True
            message = "the thread that was to receive the body has ended; the log says why"
            raise AttemptFailed(ConnectionFailed, message) from error
        finally:
            self.bytes_under_way -= body_bytes

    async def _run_there(self, exchange: Callable[..., Awaitable[T]], *args: Any) -> T:  # noqa: ANN401
        try:
            return await exchange(*args)
        except AttemptFailed as failure:
            self._note(failure)
            raise

    async def aclose(self) -> None:
        """Closes the session and ends the thread, also where it wasn't opened."""
        await to_thread.run_sync(self._close, limiter=anyio.CapacityLimiter(1))

    def _close(self) -> None:
        self._holding.cancel()
        self._holding.wait(CLOSE_SECONDS)
        self._thread.close()

    async def _hold(self) -> None:
        """Runs as long as the loop, and closes the session when that ends."""
        try:
            await anyio.sleep_forever()
        finally:
            if hasattr(self, "session"):
                with anyio.CancelScope(shield=True):
                    await super().aclose()


class Lines:
    """All loops of one transport. Belongs to the loop that opened it."""

    def __init__(self) -> None:
        """Use ``open``."""
        self._lines: list[Line] = []

    @classmethod
    async def open(cls, config: FetchConfig) -> Lines:
        """As many as ``config.loops``, the running one included.

        Raises:
            ConfigError: ``ca_file`` can't be read.
            ClosedError: There is no thread for a loop.
        """
        lines = cls()
        try:
            home = Line()
            await home.open(config)
            lines._lines.append(home)
            for number in range(1, config.loops):
                other = await to_thread.run_sync(_OtherLine, number, limiter=anyio.CapacityLimiter(1))
                lines._lines.append(other)
                await other.open(config)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await lines.aclose()
            raise
        return lines

    def choose(self, body_bytes: int) -> Line:
        """The line for a body of so many bytes: the one with the fewest under way, the caller's own if it is small."""
        if body_bytes < SMALL_BYTES or len(self._lines) == 1:
            return self._lines[0]
        return min((line for line in self._lines if not line.has_ended), key=lambda line: line.bytes_under_way)

    async def aclose(self) -> None:
        """Closes every connection and ends the threads. Nothing may be under way."""
        for line in self._lines:
            await line.aclose()
