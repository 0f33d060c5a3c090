"""Ranges of objects, by as few requests as bring them about as soon as can be: shared, in parts, or each by its own.

A long range comes in parts, side by side; how fast a host's streams have been says into how many it is best cut.

Ranges that are asked for in one turn of the loop share requests, though those who ask know nothing of each other.

A reader of small records calls ``fetch`` for each of them, all at once; only together do they show that a few requests
bring them all. So a call waits until all tasks that were ready with it have run, which takes microseconds, and then
the first to run plans for all that were asked for meanwhile, by the rules of ``fetch_many``.

What differs from a batch is that each range has a caller of its own, who may stop waiting. And read-ahead shares with
read-ahead alone: it would hold up what a consumer waits for, or overtake it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import anyio.lowlevel

from asyncfetch.errors import FetchError, InvalidResponse, RangeNotSatisfiable, about_range
from asyncfetch.fetch.batch import WORKERS_PER_REQUEST, for_each, plan_batch, server_of
from asyncfetch.fetch.buffers import SplitBuffer
from asyncfetch.fetch.download import memory_for
from asyncfetch.fetch.hosts import MIN_TELLING_BYTES
from asyncfetch.fetch.limiter import Caller, calling, current_caller, running_caller
from asyncfetch.fetch.objects import strong_etag
from asyncfetch.fetch.responses import WantedRange
from asyncfetch.fetch.retry import AttemptFailed
from asyncfetch.ranges import ObjectInfo, choose_part_bytes, lie_apart, split_range
from asyncfetch.runtime.concurrently import copied
from asyncfetch.runtime.single_flight import SharedCall

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence

    from asyncfetch.config import FetchConfig
    from asyncfetch.fetch.buffers import Target
    from asyncfetch.fetch.hosts import Host
    from asyncfetch.fetch.objects import ObjectMemory
    from asyncfetch.ranges import ByteRange, Request
    from asyncfetch.runtime.memory_pool import MemoryPool

UNKNOWN_RATE_PARTS = 2
"""Number of parts where a far host had no telling body yet: half of what a slow stream would take, for one request
more. Of what is asked for in one turn those that come first are cut, about as many as can be in flight at once: what is
needed first then comes early, and what is needed last hardly later."""
FAR_SECONDS = 0.02
"""Seconds to the first byte of a far host. So far away TCP takes several rounds until a stream has its rate, which a
cold start waits for."""
SOON_FACTOR = 1.1
"""Multiple of the fastest way's time that an urgent range may take, if that saves requests."""
AHEAD_FACTOR = 4.0
"""Such a multiple for what is read ahead: it has the time that the episodes before it take, and a request costs CPU."""
MAX_SERVERS = 256
"""Servers whose hosts are remembered, about 200 bytes each."""


class RequestGroup(NamedTuple):
    """The requests that are about to be made in one turn of the loop, as one of them sees them."""

    requests: int = 1
    """All of them, this one included: they share what is free."""
    ahead: int = 0
    """Number of those that were asked for before this one, or are more urgent."""


ALONE = RequestGroup()


class PartSizes:
    """Chooses how long the parts of ranges are.

    What is asked of a server may come from another host (a redirect, a signed url), so that one has to be told.
    Bounded: the server used least recently is forgotten.
    """

    def __init__(self, config: FetchConfig) -> None:
        self._config = config
        self._hosts: OrderedDict[str, Host] = OrderedDict()

    def came_from(self, url: str, host: Host, length: int) -> None:
        """Takes notice of the host that had so many bytes of ``url``; of the first short body, too."""
        server = server_of(url)
        if length < MIN_TELLING_BYTES and server in self._hosts:
            return  # what is short may come from elsewhere, as on the Hub
        self._hosts[server] = host
        self._hosts.move_to_end(server)
        if len(self._hosts) > MAX_SERVERS:
            self._hosts.popitem(last=False)

    def choose(self, url: str, length: int, group: RequestGroup) -> int:
        """The longest part that a range of ``length`` bytes, at least 1, is fetched in: at most ``part_bytes``."""
        config = self._config
        host = self._hosts.get(server_of(url)) if length >= 2 * config.min_part_bytes else None
        if host is None:
            return config.part_bytes
        host.settle()
        rate = host.rate.bytes_per_second
        first_byte_seconds = host.counts.first_byte.median_seconds
        if rate is None:
            in_front = host.waiting + group.ahead
            is_cut = first_byte_seconds >= FAR_SECONDS and in_front + UNKNOWN_RATE_PARTS <= host.limit
            return min(config.part_bytes, -(-length // UNKNOWN_RATE_PARTS) if is_cut else length)
        return choose_part_bytes(
            length,
            bytes_per_second=rate,
            first_byte_seconds=first_byte_seconds,
            free=host.free // group.requests,
            in_flight=host.in_flight,
            part_bytes=config.part_bytes,
            min_part_bytes=min(config.min_part_bytes, config.part_bytes),
            soon_factor=SOON_FACTOR if current_caller().urgent else AHEAD_FACTOR,
        )


MAX_SHARED_BYTES = 512 * 1024
"""Longest request that calls share. In a longer one they would wait for each other's bytes, 0.1 s at 4 MiB/s, for
longer than a request of their own takes to its first byte."""
MAX_PLANNED = 1000
"""Ranges planned at a time: it takes about 2 us each, on the loop."""


class _EndOfTurn:
    """The end of the running turn of the loop: what asyncio.sleep(0) awaits, without a coroutine for each range."""

    def __await__(self) -> Generator[None, None, None]:
        return iter((None,))  # type: ignore[return-value]  # all that a task wants of it


_END_OF_TURN = _EndOfTurn()


class RangeRequest:
    """A range that was asked for, and what its turn made of it."""

    __slots__ = ("ahead", "caller", "range", "requests", "shared")

    def __init__(self, one: ByteRange) -> None:
        self.range = one
        self.caller = running_caller()
        self.shared: tuple[Request, SharedCall[tuple[ObjectInfo, SplitBuffer]]] | None = None
        """The request that brings it with others' ranges, and the call for that; None where it has one of its own.

        It is made in the task of one of them, and by another one where that is cancelled; with the last one it ends."""
        self.requests = self.ahead = 0
        """The figures of its group; no requests until the end of the turn."""

    @property
    def group(self) -> RequestGroup:
        """The requests that bring all that was asked for in the turn; only after its end."""
        return RequestGroup(self.requests, self.ahead)


class Coalescer:
    """Brings together what is asked for in one turn of the loop.

    ``plan`` gives the requests that bring all of some ranges, none where each range is best by itself. ``read`` reads
    what a request serves, given the group of those that are about to be made.
    """

    def __init__(
        self,
        plan: Callable[[Sequence[ByteRange]], list[Request]],
        read: Callable[[Request, RequestGroup], Awaitable[tuple[ObjectInfo, SplitBuffer]]],
    ) -> None:
        self._plan = plan
        self._read = read
        self._asks: list[RangeRequest] = []

    def ask(self, one: ByteRange) -> RangeRequest:
        """Note that a closed range is asked for in the running turn; at its end ``settle`` that, or ``withdraw`` it."""
        if len(self._asks) >= MAX_PLANNED:
            self.settle()
        ask = RangeRequest(one)
        self._asks.append(ask)
        return ask

    def withdraw(self, ask: RangeRequest) -> None:
        """Ask no more for a range that isn't planned yet."""
        if not ask.requests:
            self._asks.remove(ask)

    def settle(self) -> None:
        """Plan all that was asked for in the turn."""
        asks, self._asks = self._asks, []
        # What holds where planning fails: only the current caller hears of that, the others make requests of their own.
        for place, ask in enumerate(asks):
            ask.requests, ask.ahead = len(asks), place
        if len(asks) == 1:
            return
        urgent = [ask for ask in asks if ask.caller is None or ask.caller.urgent]
        ahead = [ask for ask in asks if ask.caller is not None and not ask.caller.urgent]
        plans = [(group, self._plan([ask.range for ask in group]) if group[1:] else []) for group in (urgent, ahead)]
        total, before = sum(len(requests) or len(group) for group, requests in plans), 0
        for group, requests in plans:
            for place, ask in enumerate(group, before):
                ask.requests, ask.ahead = total, place
            if 0 < len(requests) < len(group):
                self._share(group, requests, total, before)
            before += len(requests) or len(group)

    def _share(self, asks: Iterable[RangeRequest], requests: Sequence[Request], total: int, before: int) -> None:
        by_range: dict[ByteRange, list[RangeRequest]] = {}
        for ask in asks:
            by_range.setdefault(ask.range, []).append(ask)
        for place, request in enumerate(requests, before):
            served = [ask for one in request.serves for ask in by_range[one]]
            group = RequestGroup(total, place)
            for ask in served:
                ask.requests, ask.ahead = total, place
            if len(served) > 1:
                shared = SharedCall(partial(self._bring, request, _caller_for(served), group))
                for ask in served:
                    ask.shared = request, shared

    async def _bring(self, request: Request, caller: Caller, group: RequestGroup) -> tuple[ObjectInfo, SplitBuffer]:
        with calling(caller):
            return await self._read(request, group)


def _caller_for(served: Sequence[RangeRequest]) -> Caller:
    """Return the caller to make a shared request for: in the line of the first, and urgent once one of them is."""
    first = served[0].caller
    if first is None or first.urgent:
        return first or Caller()
    carrier = Caller(urgent=False, behind=first)
    for ask in served:
        if ask.caller is not None:
            ask.caller.carried_by(carrier)
    return carrier


PIECES_A_TURN = 100
"""Ranges that are cut out of a request's bytes in one turn of the loop: 0.4 ms."""


class RangeAssembler:
    """Brings ranges that aren't empty, by as few requests as bring them about as soon as can be.

    ``read`` reads one range of an object by one request and its repeats: the object and the bytes, where those are in
    one view. Its arguments are those of ``Fetcher._read``.
    """

    def __init__(
        self,
        config: FetchConfig,
        objects: ObjectMemory,
        memory: MemoryPool,
        read: Callable[..., Awaitable[tuple[ObjectInfo, memoryview]]],
    ) -> None:
        self._config = config
        self._objects = objects
        self._memory = memory
        self._read = read
        self.parts = PartSizes(config)
        self._undivided_bytes = min(2 * config.min_part_bytes, config.part_bytes + 1)
        self._workers = WORKERS_PER_REQUEST * config.max_requests_per_host
        self._apart = 0
        shared = replace(config, max_span_bytes=min(config.max_span_bytes, MAX_SHARED_BYTES))
        self._joining = Coalescer(partial(_plan_shared, config=shared), self._fetch_shared)

    async def fetch(self, wanted: ByteRange, buffer: Target | None = None) -> tuple[ObjectInfo, memoryview]:
        """A range that isn't empty, by one request with others that are asked for just now where that saves one.

        The bytes are not among what is returned where they land in several places.
        """
        if wanted.stop is None or not self._config.max_span_bytes:
            return await self.fetch_alone(wanted, buffer)
        ask = self._joining.ask(wanted)
        try:
            await _END_OF_TURN
        except BaseException:
            self._joining.withdraw(ask)
            raise
        if not ask.requests:
            self._joining.settle()
        shared = ask.shared
        if shared is None:
            if wanted.stop - wanted.start < self._undivided_bytes:
                return await self._read(wanted.url, WantedRange(wanted.start, wanted.stop), buffer)
            return await self.fetch_alone(wanted, buffer, group=ask.group)
        request, outcome = shared[0], await shared[1].outcome()
        if isinstance(outcome, tuple):
            info, split = outcome
            if buffer is None:
                return info, split.piece(wanted)
            buffer[:] = split.cut(wanted)
            return info, buffer.toreadonly()
        if not isinstance(outcome, FetchError):
            raise copied(outcome)  # a name for what is raised would be a cycle
        if len(request.serves) == 1 or not concerns_some(outcome):
            raise about_range(outcome, wanted.start, wanted.stop) from outcome.__cause__
        return await self.fetch_alone(wanted, buffer, group=ask.group)

    async def fetch_all(self, request: Request) -> dict[ByteRange, memoryview]:
        """All ranges that a request serves, which are several, each in memory of its own."""
        split = SplitBuffer(request, self._memory)
        await self.fetch(request.range, split)
        pieces: dict[ByteRange, memoryview] = {}
        for one in request.serves:
            pieces[one] = split.piece(one)
            if len(pieces) % PIECES_A_TURN == 0:  # threads for this, of several requests, would keep the loop waiting
                await anyio.lowlevel.checkpoint()
        return pieces

    async def fetch_apart(self, request: Request) -> dict[ByteRange, memoryview]:
        """The same by requests of their own, side by side: an error is then about one range."""
        views: dict[ByteRange, memoryview] = {}
        requests = len(request.serves)

        async def work(item: tuple[int, ByteRange]) -> None:
            ahead, one = item
            _, views[one] = await self.fetch_alone(one, group=RequestGroup(requests, ahead))

        self._apart += 1
        try:
            # A batch has as many workers, each of which may get here: all together they have about as many again.
            workers = max(1, self._workers // self._apart)
            await for_each(enumerate(request.serves), work, key=lambda item: item[1].url, workers=workers)
        finally:
            self._apart -= 1
        return views

    async def _fetch_shared(self, request: Request, group: RequestGroup) -> tuple[ObjectInfo, SplitBuffer]:
        """Return what a request for several calls brings."""
        split = SplitBuffer(request, self._memory)
        info, _ = await self.fetch_alone(request.range, split, group=group)
        return info, split

    async def fetch_alone(
        self, wanted: ByteRange, buffer: Target | None = None, *, group: RequestGroup = ALONE
    ) -> tuple[ObjectInfo, memoryview]:
        """A range that isn't empty, by requests of its own: several where that is sooner."""
        if wanted.stop is not None:
            length = wanted.stop - wanted.start
            part_bytes = self.parts.choose(wanted.url, length, group)
            info = await self._divisible(wanted) if length > part_bytes else None
            if info is not None:
                try:
                    return info, await self._fetch_parts(wanted, info, buffer, part_bytes)
                except InvalidResponse as error:
                    if not error.ignores_range:
                        raise
                    self._objects.note_whole(wanted.url)
        return await self._read(wanted.url, WantedRange(wanted.start, wanted.stop), buffer)

    async def fetch_version(self, wanted: ByteRange, version: ObjectInfo, buffer: memoryview) -> None:
        """A closed range of just this version of its object into ``buffer``."""
        length = len(buffer)
        whole = self._objects.comes_whole(wanted.url)
        part_bytes = length if whole else self.parts.choose(wanted.url, length, ALONE)
        await self._fetch_parts(wanted, version, buffer, part_bytes)

    async def _divisible(self, wanted: ByteRange) -> ObjectInfo | None:
        """The version of the object that a range's parts can be taken from; None where it must come in one piece."""
        assert wanted.stop is not None
        info = self._objects.get(wanted.url)
        if info is None and wanted.stop - wanted.start > self._config.part_bytes:
            asked = WantedRange(wanted.start, wanted.stop)
            info, _ = await self._read(wanted.url, WantedRange(0, 1, clamp=True), asked=asked)
        if info is None or strong_etag(info) is None or wanted.stop > info.size:
            return None
        if self._objects.comes_whole(wanted.url):
            return None
        return info

    async def _fetch_parts(
        self, wanted: ByteRange, info: ObjectInfo, buffer: Target | None, part_bytes: int
    ) -> memoryview:
        """A range that lies within this version of its object, by several requests at once."""
        assert wanted.stop is not None
        asked = WantedRange(wanted.start, wanted.stop)
        view = self._take(wanted) if buffer is None else buffer

        async def work(part: tuple[int, int]) -> None:
            start, stop = part
            place = view[start - wanted.start : stop - wanted.start]
            await self._read(wanted.url, WantedRange(start, stop), place, asked=asked, part_of=info)

        parts = split_range(wanted, part_bytes)
        await for_each(parts, work, key=lambda _: wanted.url, workers=self._workers)
        return view.toreadonly()

    def _take(self, wanted: ByteRange) -> memoryview:
        assert wanted.stop is not None
        nbytes = wanted.stop - wanted.start
        try:
            return memory_for(nbytes, self._memory)
        except AttemptFailed as failure:
            raise failure.error(url=wanted.url, start=wanted.start, stop=wanted.stop, attempts=0) from failure.__cause__


def _plan_shared(ranges: Sequence[ByteRange], config: FetchConfig) -> list[Request]:
    """The requests that bring all ranges; none where no two could share one, as is most often so."""
    return [] if lie_apart(ranges, config.max_gap_bytes) else plan_batch(ranges, config)


def concerns_some(error: FetchError) -> bool:
    """Return whether an error of a request for several ranges may not be one for each of them."""
    return isinstance(error, RangeNotSatisfiable) or (isinstance(error, InvalidResponse) and error.ignores_range)
