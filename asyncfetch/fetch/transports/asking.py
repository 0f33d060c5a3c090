"""One request to one host: through its gate, over a connection, and what is made of the answer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import anyio

from asyncfetch.errors import InvalidResponse
from asyncfetch.fetch.bandwidth import Allowance, Bandwidth
from asyncfetch.fetch.quota import spent_quota_seconds
from asyncfetch.fetch.redirects import REDIRECTS, host_name, next_url
from asyncfetch.fetch.responses import Delivery, refusal
from asyncfetch.fetch.retry import AttemptFailed, cause_of, pause_seconds
from asyncfetch.fetch.transports.exchange import Exchange, PooledConnectionDied, receive_body
from asyncfetch.fetch.transports.faults import FOREIGN, as_failure
from asyncfetch.fetch.transports.hedging import Overtaken, race_where_useful

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Mapping

    import aiohttp
    from yarl import URL

    from asyncfetch.config import FetchConfig
    from asyncfetch.fetch.addresses import AddressBook
    from asyncfetch.fetch.hosts import Host, Turn
    from asyncfetch.fetch.retry import Clock
    from asyncfetch.fetch.transports.direct import Answer
    from asyncfetch.fetch.transports.hedging import Race
    from asyncfetch.fetch.transports.lines import Lines
    from asyncfetch.fetch.transports.session_requests import SessionRequests
    from asyncfetch.fetch.transports.visit import Visit

__all__ = ["Asking", "Body", "Question", "Reply"]

T = TypeVar("T")

Body = Callable[[], "Iterable[bytes | memoryview]"]
"""Gives the pieces of a request's body, from the first one again for each time that it is sent."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that isn't an object's bytes, with a status below 400."""

    url: URL = field(repr=False)
    """What it answers, after redirects."""
    status: int
    headers: Mapping[str, str] = field(repr=False)
    """Found by names of any case."""
    body: bytes = field(default=b"", repr=False)
    target: URL | None = field(default=None, repr=False)
    """Where it redirects to: another origin; None where it doesn't."""

    @contextmanager
    def is_judged(self) -> Iterator[None]:
        """An attempt that fails in this block fails for what the answer says: host and status are the answer's."""
        try:
            yield
        except AttemptFailed as failure:
            failure.host, failure.status = host_name(self.url), self.status
            raise


@dataclass(slots=True)  # not frozen: that takes a call for each field, and a request makes one of these
class Question(Generic[T]):
    """One request, and what is made of its answer."""

    url: URL
    headers: Mapping[str, str]
    take: Callable[[Question[T], Turn, Exchange, Answer | aiohttp.ClientResponse], Awaitable[T]]
    byte_range: str | None = None
    """The value of its Range header, which ``headers`` lack; with one, the answer may be read from the socket."""
    method: str = "GET"
    body: Body | None = None
    answer_bytes: int = 0
    """Expected length of the answer's body; 0 where that isn't known."""
    visit: Visit | None = None
    """For an object's bytes; None where something else is asked."""
    may_race: bool = True
    """Whether a second request for an object's bytes may be made when the answer is late."""

    def fits(self, response: Answer | aiohttp.ClientResponse) -> bool:
        """Whether an answer brings an object's bytes, by its head alone."""
        assert self.visit is not None
        try:
            self.visit.judge(self.url, response.status, response.headers)
        except AttemptFailed:
            return False
        return True


class Asking:
    """Asks hosts questions, each once but for a pooled connection that had died. Everything above it repeats."""

    def __init__(self, config: FetchConfig, clock: Clock, lines: Lines) -> None:
        self._config = config
        self._clock = clock
        self._lines = lines
        self._bandwidth = Bandwidth.of(config.max_bytes_per_second)

    async def ask(self, host: Host, question: Question[T], *, needs_new_connection: bool = False) -> T:
        """One request, through its host's gate, and what is made of its answer; on the loop with least to do."""
        async with host.turn() as turn:
            line = self._lines.choose(question.answer_bytes)
            if line.number != 0:
                turn.tally = host.tally(line.number)
                question = replace(question, may_race=False)  # the host's budget of second requests is its loop's
            exchange = self._exchange if self._bandwidth is None else self._paced
            size_bytes, requests = question.answer_bytes, line.requests
            try:
                try:
                    return await line.run(size_bytes, exchange, requests, turn, question, needs_new_connection)
                except PooledConnectionDied:
                    return await line.run(size_bytes, exchange, requests, turn, question, True)
            except AttemptFailed as failure:
                failure.host = host.name
                turn.failed(failure)
                raise

    async def _paced(
        self, requests: SessionRequests, turn: Turn, question: Question[T], needs_new_connection: bool
    ) -> T:
        """An exchange whose body comes no faster than the process may receive."""
        assert self._bandwidth is not None
        allowance = Allowance(self._bandwidth)
        try:
            await anyio.sleep(allowance.begin(question.answer_bytes))
            return await self._exchange(requests, turn, question, needs_new_connection, allowance)
        finally:
            allowance.close()

    async def _exchange(
        self,
        requests: SessionRequests,
        turn: Turn,
        question: Question[T],
        needs_new_connection: bool,
        allowance: Allowance | None = None,
        overtaking: Race[T] | None = None,
    ) -> T:
        """One request and its answer, the second one of a race where it is ``overtaking``.

        Runs on the loop of ``requests`` and the turn's tally.
        """
        host, name = turn.host, turn.host.name
        race: Race[T] | None = None
        if question.visit is not None and question.may_race and overtaking is None:
            second = partial(self._overtake, requests, question, allowance)
            race = race_where_useful(turn, question.fits, second)
        exchange = Exchange(
            self._config.timeouts,
            name,
            needs_new_connection=needs_new_connection,
            now=host.now,
            deadlines=requests.deadlines,
            allowance=allowance,
            race=race,
            is_second=overtaking is not None,
        )
        with exchange:
            turn.tally.counts.requests += 1
            try:
                response = await requests.send(
                    question.method,
                    question.url,
                    question.headers,
                    byte_range=question.byte_range,
                    data=None if question.body is None else _told(question.body(), exchange),
                    proxy=host.route.proxy,
                    proxy_headers=host.route.proxy_headers,
                )
            except Overtaken:
                assert race is not None
                host.hedging.answered(exchange.waited())
                self._count_first(race, turn, name)
                return race.outcome()
            except FOREIGN as error:
                proxy = host.route.proxy
                failure = as_failure(error, name, None if proxy is None else host_name(proxy))
                if exchange.died_idle(error):
                    raise PooledConnectionDied(failure.kind, failure.message) from error
                raise failure from cause_of(error)
            turn.answered(exchange.answered(response), is_refusal=response.status >= 400)
            if response.status < 400 and (spent := spent_quota_seconds(response.headers)) is not None:
                turn.spent_quota(spent)
            if response.status in REDIRECTS:
                turn.tally.counts.redirects += 1
            if overtaking is not None:
                if response.status >= 400:
                    raise self._refusal(response.status, response.headers)
                await overtaking.claim(response)
            return await question.take(question, turn, exchange, response)

    def _overtake(
        self, requests: SessionRequests, question: Question[T], allowance: Allowance | None, turn: Turn, race: Race[T]
    ) -> Awaitable[T]:
        """The second request of a race."""
        return self._exchange(requests, turn, question, False, allowance, race)

    def _count_first(self, race: Race[T], turn: Turn, name: str) -> None:
        """Counts the failure of a first request that the second one made good."""
        if race.first_failure is not None:
            turn.failed(as_failure(race.first_failure, name))
        elif race.first_answer is not None:
            status, headers = race.first_answer
            unfit = AttemptFailed(InvalidResponse, "the answer to the first request doesn't fit")
            turn.failed(self._refusal(status, headers) if status >= 400 else unfit)

    async def take_bytes(
        self, question: Question[URL | None], turn: Turn, exchange: Exchange, response: Answer | aiohttp.ClientResponse
    ) -> URL | None:
        """Checks the answer and takes its bytes; None when they have landed, else the url that it redirects to."""
        visit = question.visit
        assert visit is not None
        download = visit.download
        status = response.status
        headers: Mapping[str, str] = response.headers
        if status in REDIRECTS or status >= 400:
            headers = visit.book.explain(status, headers, await exchange.drain())
        try:
            delivery = visit.judge(question.url, status, headers)
        except AttemptFailed as failure:
            self._note_answer(failure, status, headers)
            raise
        if not isinstance(delivery, Delivery):
            visit.redirected(delivery, status, headers)
            return delivery
        view = download.accept(delivery)
        download.remember()
        if delivery.start == delivery.stop and status != 206:  # then a body may say something else
            await exchange.drain()
            return None

        def landed(count: int) -> None:
            download.landed_bytes += count
            turn.landed(count)

        def ended() -> None:
            download.host = host
            turn.received(len(view), host.now() - since)
            turn.over()

        host = turn.host
        since = host.now()
        await receive_body(exchange, delivery, view, landed, ended)
        return None

    async def take_reply(
        self,
        book: AddressBook,
        max_bytes: int,
        question: Question[Reply],
        _: Turn,
        exchange: Exchange,
        response: Answer | aiohttp.ClientResponse,
    ) -> Reply:
        """Takes an answer that isn't an object's bytes; at most ``max_bytes`` of it."""
        url, status = question.url, response.status
        headers: Mapping[str, str] = response.headers
        if status not in REDIRECTS and status < 400:
            return Reply(url, status, headers, await exchange.read_all(max_bytes))
        headers = book.explain(status, headers, await exchange.drain())
        try:
            if status >= 400:
                raise refusal(status, headers)
            return Reply(url, status, headers, target=next_url(url, headers.get("Location")))
        except AttemptFailed as failure:
            self._note_answer(failure, status, headers)
            raise

    def _refusal(self, status: int, headers: Mapping[str, str]) -> AttemptFailed:
        failure = refusal(status, headers)
        self._note_answer(failure, status, headers)
        return failure

    def _note_answer(self, failure: AttemptFailed, status: int, headers: Mapping[str, str]) -> None:
        """Adds to the failure what the server said beside the status."""
        failure.status, failure.headers = failure.status or status, headers
        if status >= 400:
            failure.retry_after = pause_seconds(headers, wall_now=self._clock.wall())
        word = headers.get("X-Error-Code")
        if word is not None:
            failure.message += f" ({word[:80]})"


async def _told(pieces: Iterable[bytes | memoryview], exchange: Exchange) -> AsyncIterator[bytes | memoryview]:
    """The pieces, of which the exchange is told as they go out: the answer is waited for from the last one on."""
    for piece in pieces:
        yield piece
        exchange.moved()
