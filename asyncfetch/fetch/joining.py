"""Ranges that are asked for in one turn of the loop share requests, though those who ask know nothing of each other.

A reader of small records calls ``fetch`` for each of them, all at once; only together do they show that a few requests
bring them all. So a call waits until all tasks that were ready with it have run, which takes microseconds, and then
whoever runs first plans for all that were asked for meanwhile, by the rules of ``fetch_many``.

What differs from a batch is that each range has somebody of its own who waits for it, and may stop to. And read-ahead
shares with read-ahead alone: it would hold up what somebody waits for, or overtake what somebody else does.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from asyncfetch.fetch.gate import Caller, calling, running_caller
from asyncfetch.fetch.parts import Company
from asyncfetch.runtime.relay import Relay

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from asyncfetch.fetch.scatter import Scatter
    from asyncfetch.ranges import ByteRange, ObjectInfo, Request

__all__ = ["MAX_SHARED_BYTES", "Ask", "Joining"]

MAX_SHARED_BYTES = 512 * 1024
"""Longest request that calls share. In a longer one they would wait for each other's bytes, 0.1 s at 4 MiB/s, for
longer than a request of their own takes to its first byte."""
MAX_PLANNED = 1000
"""Ranges planned at a time: it takes about 2 us each, on the loop."""


class Read(Protocol):
    """Reads what a request serves."""

    def __call__(self, request: Request, company: Company) -> Awaitable[tuple[ObjectInfo, Scatter]]:
        """The object, and what came of it."""
        ...


@dataclass(frozen=True, slots=True)
class Shared:
    """A request that brings what several calls asked for."""

    request: Request
    body: Relay[tuple[ObjectInfo, Scatter]]
    """It is made in the task of one of them, and by another one where that is cancelled; with the last one it ends."""


class Ask:
    """A range that somebody asks for, and what its turn made of it."""

    __slots__ = ("caller", "company", "range", "shared")

    def __init__(self, one: ByteRange) -> None:
        self.range = one
        self.caller = running_caller()
        self.company: Company | None = None
        """The requests that bring all that was asked for in the turn; None before its end."""
        self.shared: Shared | None = None
        """What brings it; None where that is a request of its own."""


class Joining:
    """Brings together what is asked for in one turn of the loop.

    Args:
        plan: Gives the requests that bring all of some ranges.
        read: Reads what a request serves; also told which requests are about to be made, as ``company``.
    """

    def __init__(self, plan: Callable[[Sequence[ByteRange]], list[Request]], read: Read) -> None:
        self._plan = plan
        self._read = read
        self._asks: dict[Ask, None] = {}

    async def ask(self, one: ByteRange) -> tuple[Shared | None, Company]:
        """What a closed range is brought by, at the end of the running turn: see Ask.shared and Ask.company."""
        if len(self._asks) >= MAX_PLANNED:
            self._end()
        ask = Ask(one)
        self._asks[ask] = None
        try:
            await asyncio.sleep(0)  # to the end of this turn, once; anyio's checkpoint costs a range 3 us more
        except BaseException:
            self._asks.pop(ask, None)
            raise
        if ask.company is None:
            self._end()
        assert ask.company is not None
        return ask.shared, ask.company

    def _end(self) -> None:
        asks, self._asks = self._asks, {}
        # What holds where planning fails: only the current caller hears of that, the others make requests of their own.
        for place, ask in enumerate(asks):
            ask.company = Company(len(asks), place)
        if len(asks) == 1:
            return
        urgent = [ask for ask in asks if ask.caller is None or ask.caller.urgent]
        ahead = [ask for ask in asks if ask.caller is not None and not ask.caller.urgent]
        plans = [(group, self._requests(group)) for group in (urgent, ahead)]
        total, before = sum(len(requests) or len(group) for group, requests in plans), 0
        for group, requests in plans:
            for place, ask in enumerate(group, before):
                ask.company = Company(total, place)
            if len(requests) < len(group) > 1:
                self._share(group, requests, total, before)
            before += len(requests) or len(group)

    def _requests(self, asks: Sequence[Ask]) -> list[Request]:
        """What brings all of them; none where one is by itself."""
        return self._plan([ask.range for ask in asks]) if len(asks) > 1 else []

    def _share(self, asks: Iterable[Ask], requests: Sequence[Request], total: int, before: int) -> None:
        by_range: dict[ByteRange, list[Ask]] = {}
        for ask in asks:
            by_range.setdefault(ask.range, []).append(ask)
        for place, request in enumerate(requests, before):
            served = [ask for one in request.serves for ask in by_range[one]]
            company = Company(total, place)
            for ask in served:
                ask.company = company
            if len(served) > 1:
                read = partial(self._bring, request, _caller_for(served), company)
                shared = Shared(request, Relay(read))
                for ask in served:
                    ask.shared = shared

    async def _bring(self, request: Request, caller: Caller, company: Company) -> tuple[ObjectInfo, Scatter]:
        with calling(caller):
            return await self._read(request, company)


def _caller_for(served: Sequence[Ask]) -> Caller:
    """On whose behalf a shared request is made: in the line of the first, and urgent once one of them is."""
    first = served[0].caller
    if first is None or first.urgent:
        return first or Caller()
    carrier = Caller(urgent=False, behind=first)
    for ask in served:
        if ask.caller is not None:
            ask.caller.carried_by(carrier)
    return carrier
