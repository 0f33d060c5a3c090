"""A request, and a second one for the same bytes when its answer is late: the first answer that fits is taken.

A request that is answered in time pays for no task and no timer of its own. The timer of its exchange says when it is
late. Then the wait for its head is interrupted, which loses nothing, and taken up again in a task group, beside the
second request. Whichever head comes first and fits wins; the other request is cancelled and awaited, and its connection
closed. The memory for the body is handed out only after that, so a loser has nowhere to write to. What it was answered
counts nevertheless: a refusal is one, whoever wins.

What waits for a head can be cancelled and called again. aiohttp documents nothing of the kind: where its inner parts
can't be relied on, ``session_requests`` has every request that may be overtaken in a task of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import anyio
import anyio.lowlevel

from asyncfetch.errors import AsyncFetchError, InvalidResponse
from asyncfetch.fetch.retry import AttemptFailed
from asyncfetch.fetch.transports.faults import FOREIGN
from asyncfetch.runtime.cancellation import Interrupt

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    import aiohttp

    from asyncfetch.fetch.hosts import Turn
    from asyncfetch.fetch.transports.direct import Answer

__all__ = ["Overtaken", "Race", "race_where_useful"]

FIRST, SECOND = 1, 2

T = TypeVar("T")


class Overtaken(Exception):
    """The second request has won; ``Race.outcome`` has what it brought."""


def race_where_useful(
    turn: Turn,
    fits: Callable[[Answer | aiohttp.ClientResponse], bool],
    second: Callable[[Turn, Race[T]], Awaitable[T]],
) -> Race[T] | None:
    """A race for a request that goes out now, in this turn; None where there would be no second one anyway."""
    hedging = turn.host.hedging
    hedging.sent()
    patience = hedging.patience_seconds
    return Race(turn, patience, fits, second) if patience is not None and hedging.may_hedge() else None


class Race(Generic[T]):
    """One request that may be overtaken by a second one.

    Args:
        turn: The first one's. The second one needs another at its host, and some of the host's budget; it waits for
            neither.
        patience_seconds: After which the first one is late.
        fits: Whether an answer can be taken, by its head.
        second: Makes the second request, for a turn of its own and for this race, and returns what it brought. When its
            head is there it must await ``claim``, and only then may it deliver anything.
    """

    __slots__ = (
        "_failure",
        "_first_scope",
        "_fits",
        "_in_time",
        "_outcome",
        "_second",
        "_turn",
        "_winner",
        "first_answer",
        "first_failure",
        "give_up_first",
        "patience_seconds",
    )

    def __init__(
        self,
        turn: Turn,
        patience_seconds: float,
        fits: Callable[[Answer | aiohttp.ClientResponse], bool],
        second: Callable[[Turn, Race[T]], Awaitable[T]],
    ) -> None:
        self.patience_seconds = patience_seconds
        self.give_up_first: Callable[[], None]
        """Closes the first one's connection; set by its exchange."""
        self.first_answer: tuple[int, Mapping[str, str]] | None = None
        """Status and headers of the first one's answer, where that didn't fit."""
        self.first_failure: Exception | None = None
        """What the first one ended with instead of an answer."""
        self._turn = turn
        self._fits = fits
        self._second = second
        self._in_time = Interrupt()
        self._winner: int | None = None
        self._outcome: T | None = None
        self._failure: AttemptFailed | AsyncFetchError | None = None

    def is_late(self) -> None:
        """Told when the first one has had its time; called on the loop, by no task."""
        self._in_time.cancel()

    async def head(
        self, start: Callable[[], Awaitable[Answer | aiohttp.ClientResponse]]
    ) -> Answer | aiohttp.ClientResponse:
        """What ``start()`` returns: it waits for the first one's head, and may be cancelled and called again.

        Raises:
            Overtaken: The second one's answer came first, or the first one's didn't fit.
        """
        with self._in_time:
            return await start()
        return await self._race(start)

    async def claim(self, response: Answer | aiohttp.ClientResponse) -> None:
        """Makes the second one the winner; where the first one has won already, its cancellation comes instead.

        Raises:
            AttemptFailed: The answer doesn't fit; it may not be taken.
        """
        if self._winner == FIRST:
            await anyio.sleep_forever()
        if not self._fits(response):
            raise AttemptFailed(InvalidResponse, "the answer to the second request doesn't fit")
        self._winner = SECOND
        self._turn.host.counts.hedge_wins += 1
        self.give_up_first()
        self._turn.vacate()
        self._first_scope.cancel()

    def outcome(self) -> T:
        """What the second one brought after its claim, or the failure that it ended with."""
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # else failure -> traceback -> this frame -> failure is a cycle
        return self._outcome  # type: ignore[return-value]  # None may be what it brought

    async def _race(
        self, start: Callable[[], Awaitable[Answer | aiohttp.ClientResponse]]
    ) -> Answer | aiohttp.ClientResponse:
        response: Answer | aiohttp.ClientResponse | None = None
        failure: Exception | None = None
        # The second one has a scope of its own, because anyio's tasks that end cancelled are left in cycles.
        second_scope = anyio.CancelScope()
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._run_second, second_scope, name="second request")
                with anyio.CancelScope() as self._first_scope:
                    try:
                        response = await start()
                    except FOREIGN as error:
                        failure = error  # the second one may do better
                if self._winner is None and response is not None:
                    if self._fits(response):
                        self._winner = FIRST
                        second_scope.cancel()
                    elif response.status < 300:
                        self.give_up_first()  # its body is of no use, and comes whether it is read or not
        finally:
            del self._first_scope, self.give_up_first, self._second  # what they lead to leads here: cycles, too
        if self._winner == SECOND:
            if response is not None:
                self.first_answer = response.status, response.headers
            if failure is not None:
                self.first_failure = failure.with_traceback(None)  # with it, a cycle
            raise Overtaken
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # as above
        assert response is not None
        return response

    async def _run_second(self, scope: anyio.CancelScope) -> None:
        with scope:
            # An answer that lay there already when the loop found it late ends the race here.
            await anyio.lowlevel.checkpoint()
            host = self._turn.host
            turn = host.turn()
            if not (host.hedging.may_hedge() and turn.enter_nowait()):
                return
            host.hedging.hedged()
            host.counts.hedges += 1
            try:
                self._outcome = await self._second(turn, self)
            except (AttemptFailed, AsyncFetchError) as error:
                if self._winner == SECOND:
                    self._failure = error
                elif isinstance(error, AttemptFailed):
                    turn.failed(error)
            finally:
                host.hedging.ended(won=self._winner == SECOND)
                turn.leave(succeeded=self._winner == SECOND and self._failure is None)
