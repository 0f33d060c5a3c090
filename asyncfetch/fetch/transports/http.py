"""Ranges over http and https: attempts, redirects, repeats."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import anyio
import anyio.to_thread

from asyncfetch.errors import ConfigError, InvalidResponse, ObjectChanged, redact_url
from asyncfetch.fetch.addresses import WebUrls
from asyncfetch.fetch.bandwidth import Allowance, Bandwidth
from asyncfetch.fetch.hosts import Host, Route, Turn
from asyncfetch.fetch.redirects import REDIRECTS, host_name, next_url, origin_of, static_headers
from asyncfetch.fetch.responses import Delivery, refusal
from asyncfetch.fetch.retry import AttemptFailed, Retries, Verdict, cause_of, giving_up, pause_seconds
from asyncfetch.fetch.transports.direct import is_possible
from asyncfetch.fetch.transports.environment import Environment, read_environment
from asyncfetch.fetch.transports.exchange import Exchange, PooledConnectionDied, receive_body
from asyncfetch.fetch.transports.faults import FOREIGN, as_failure
from asyncfetch.fetch.transports.hedging import Overtaken, race_where_useful
from asyncfetch.fetch.transports.lines import Lines
from asyncfetch.fetch.transports.visit import Visit, own_headers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping

    import aiohttp
    from yarl import URL

    from asyncfetch.config import FetchConfig
    from asyncfetch.fetch.addresses import Address, AddressBook
    from asyncfetch.fetch.download import Download
    from asyncfetch.fetch.hosts import Hosts
    from asyncfetch.fetch.retry import Clock
    from asyncfetch.fetch.transports.hedging import Race
    from asyncfetch.ranges import ObjectInfo

__all__ = ["Body", "HttpTransport", "Reply"]


MAX_REPLY_BYTES = 16 * 1024 * 1024
"""Bound of a page of text. A listing's page of 1,000 entries takes 1 MiB at most."""
MAX_ADDRESSES_PER_ATTEMPT = 3
"""The first one may be signed for the wrong region, the second may have expired meanwhile."""
WEB_URLS = WebUrls()

T = TypeVar("T")

Body = Callable[[], "Iterable[bytes | memoryview]"]
"""Gives the pieces of a request's body, from the first one again for each time that it is sent."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that isn't an object's bytes, with a status below 400."""

    url: URL = field(repr=False)
    """What it answers, after redirects."""
    headers: Mapping[str, str] = field(repr=False)
    """Found by names of any case."""
    body: bytes = field(default=b"", repr=False)
    target: URL | None = field(default=None, repr=False)
    """Where it redirects to: another origin; None where it doesn't."""


@dataclass(frozen=True, slots=True)
class _Question(Generic[T]):
    """One request, and what is made of its answer."""

    url: URL
    headers: Mapping[str, str]
    take: Callable[[Turn, Exchange, aiohttp.ClientResponse], Awaitable[T]]
    method: str = "GET"
    body: Body | None = None
    answer_bytes: int = 0
    """Expected length of the answer's body; 0 where that isn't known."""
    fits: Callable[[aiohttp.ClientResponse], bool] | None = None
    """Says of an answer, by its head, whether it can be taken: then a second request may be made when one is late. None
    where there is to be none."""


class HttpTransport:
    """Fills downloads from web servers. Belongs to the loop that opened it; its owner checks that.

    Everything happens on that loop but an exchange with a large body, which may run on another one: what it touches
    beside the exchange (memory, what is known of objects, its own tally) can be used from any thread.
    """

    def __init__(
        self,
        config: FetchConfig,
        hosts: Hosts,
        clock: Clock,
        lines: Lines,
        environment: Environment,
        *,
        directly: bool,
    ) -> None:
        """Takes over ``lines``; use ``open`` to get one that is set up right."""
        self._config = config
        self._hosts = hosts
        self._clock = clock
        self._lines = lines
        self._bandwidth = Bandwidth.of(config.max_bytes_per_second)
        self._environment = environment
        self._directly = directly

    @classmethod
    async def open(cls, config: FetchConfig, hosts: Hosts, clock: Clock) -> HttpTransport:
        """A transport on the running loop; ConfigError where ``ca_file`` or the environment can't be read."""
        environment = Environment()
        if config.trust_env:
            environment = await anyio.to_thread.run_sync(read_environment, dict(os.environ))
        directly = config.direct_bodies and await is_possible()
        return cls(config, hosts, clock, await Lines.open(config), environment, directly=directly)

    async def aclose(self) -> None:
        """Closes every connection, without waiting for any server. No read may be under way."""
        await self._lines.aclose()

    async def listdir(self, url: str) -> list[ObjectInfo]:
        """Plain web servers have no way to ask."""
        message = f"web servers can't list {redact_url(url)!r}: listdir takes s3://, hf:// and file:// urls and paths"
        raise ConfigError(message)

    async def read(self, download: Download, book: AddressBook = WEB_URLS) -> None:
        """Fills ``download``, over as many attempts as the policy allows; FetchError where that isn't enough."""
        asked = download.asked
        retries = Retries(self._config.retry, now=self._clock.monotonic(), uniform=self._clock.uniform)
        attempts = 0
        needs_new_connection = False
        while True:
            before = download.landed_bytes
            try:
                return await self._attempt(
                    download, book, is_retry=attempts > 0, needs_new_connection=needs_new_connection
                )
            except AttemptFailed as failure:
                attempts += 1
                download.broke()
                if failure.kind is ObjectChanged:
                    download.changed()
                progressed = download.landed_bytes > before
                delay = retries.delay_after(failure, progressed=progressed, now=self._clock.monotonic())
                if delay is None:
                    final = giving_up(failure, self._config.retry)
                    raise final.error(
                        url=download.url, start=asked.start, stop=asked.stop, attempts=attempts
                    ) from failure.__cause__
                needs_new_connection = failure.status is None or failure.kind is InvalidResponse
            await self._clock.sleep(delay)

    async def _attempt(
        self, download: Download, book: AddressBook, *, is_retry: bool, needs_new_connection: bool
    ) -> None:
        """Takes the bytes from the object's address; from a new one where that is worn out."""
        for addresses_left in reversed(range(MAX_ADDRESSES_PER_ATTEMPT)):
            address = await book.resolve(download.url)
            try:
                visit = Visit(download, book, address)
                await self._follow(visit, is_retry=is_retry, needs_new_connection=needs_new_connection)
            except AttemptFailed as failure:
                if not addresses_left or not book.reject(download.url, address, failure):
                    raise
            else:
                return

    async def _follow(self, visit: Visit, *, is_retry: bool, needs_new_connection: bool) -> None:
        """Follows redirects to the server that has the bytes, and takes them from it."""
        url = visit.address.url
        for hop in range(self._config.max_redirects + 1):
            host = self._host(url)
            host.counts.retries += is_retry and hop == 0
            question = _Question(
                url,
                visit.headers(host),
                partial(self._take_bytes, visit, url),
                answer_bytes=visit.download.expected_bytes,
                fits=partial(self._fits, visit, url),
            )
            target = await self._hop(host, question, needs_new_connection=needs_new_connection)
            if target is None:
                return
            url = target
        raise self._too_many_redirects(url)

    async def ask(
        self,
        method: str,
        address: Address,
        book: AddressBook,
        *,
        max_bytes: int = MAX_REPLY_BYTES,
        body: Body | None = None,
    ) -> Reply:
        """One question that isn't for an object's bytes: a listing, where an object is. Not repeated; see ``persist``.

        Redirects are followed within the address's origin; one that leads elsewhere is the answer. A ``body`` is sent
        to each; its length stands in the address's headers.

        Raises:
            AttemptFailed: No answer, one of 400 or above, or one of more than ``max_bytes``.
        """
        url = address.url
        for _ in range(self._config.max_redirects + 1):
            host = self._host(url)
            take = partial(self._take_reply, url, book, max_bytes)
            # The answer is small, as text is, and paid for as it comes.
            question = _Question(url, own_headers(host, address), take, method=method, body=body, answer_bytes=1)
            reply = await self._hop(host, question)
            if reply.target is None or origin_of(reply.target) != origin_of(url):
                return reply
            url = reply.target
        raise self._too_many_redirects(url)

    async def persist(self, url: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """What ``attempt()`` returns, over as many attempts as the policy allows, else FetchError."""
        retries = Retries(self._config.retry, now=self._clock.monotonic(), uniform=self._clock.uniform)
        attempts = 0
        while True:
            try:
                return await attempt()
            except AttemptFailed as failure:
                attempts += 1
                delay = retries.delay_after(failure, progressed=False, now=self._clock.monotonic())
                if delay is None:
                    final = giving_up(failure, self._config.retry)
                    raise final.error(url=url, start=None, stop=None, attempts=attempts) from failure.__cause__
            await self._clock.sleep(delay)

    async def _hop(self, host: Host, question: _Question[T], *, needs_new_connection: bool = False) -> T:
        """One request, through its host's gate, and what is made of its answer; on the loop with least to do."""
        async with host.turn() as turn:
            line = self._lines.choose(question.answer_bytes)
            turn.tally = host.tally(line.number)
            if line.number != 0:
                question = replace(question, fits=None)  # the host's budget of second requests is its loop's
            exchange = partial(self._exchange, line.session, turn, question)
            if self._bandwidth is not None:
                exchange = partial(self._paced, self._bandwidth, question.answer_bytes, exchange)
            try:
                try:
                    return await line.run(question.answer_bytes, exchange, needs_new_connection)
                except PooledConnectionDied:
                    return await line.run(question.answer_bytes, exchange, True)
            except AttemptFailed as failure:
                failure.host = host_name(question.url)
                turn.failed(failure)
                raise

    async def _paced(
        self,
        bandwidth: Bandwidth,
        answer_bytes: int,
        exchange: Callable[[bool, Allowance], Awaitable[T]],
        needs_new_connection: bool,
    ) -> T:
        """An exchange whose body comes no faster than the process may receive."""
        allowance = Allowance(bandwidth)
        try:
            await anyio.sleep(allowance.begin(answer_bytes))
            return await exchange(needs_new_connection, allowance)
        finally:
            allowance.close()

    async def _exchange(
        self,
        session: aiohttp.ClientSession,
        turn: Turn,
        question: _Question[T],
        needs_new_connection: bool,
        allowance: Allowance | None = None,
        overtaking: Race[T] | None = None,
    ) -> T:
        """One request and its answer, the second one of a race where it is ``overtaking``.

        Runs on the loop of ``session`` and the turn's tally.
        """
        host, url, name = turn.host, question.url, host_name(question.url)
        race = None
        if question.fits is not None and overtaking is None:

            def second(turn: Turn, race: Race[T]) -> Awaitable[T]:
                return self._exchange(session, turn, question, False, allowance, race)

            race = race_where_useful(turn, question.fits, second)
        exchange = Exchange(
            self._config.timeouts,
            name,
            needs_new_connection=needs_new_connection,
            now=host.now,
            allowance=allowance,
            race=race,
            is_second=overtaking is not None,
        )
        with exchange:
            turn.tally.counts.requests += 1
            try:
                response = await session.request(
                    question.method,
                    url,
                    headers=question.headers,
                    data=None if question.body is None else _told(question.body(), exchange),
                    allow_redirects=False,
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
            if response.status in REDIRECTS:
                turn.tally.counts.redirects += 1
            if overtaking is not None:
                if response.status >= 400:
                    raise self._refusal(response.status, response.headers)
                await overtaking.claim(response)
            return await question.take(turn, exchange, response)

    def _count_first(self, race: Race[T], turn: Turn, name: str) -> None:
        """Counts the failure of a first request that the second one made good."""
        if race.first_failure is not None:
            turn.failed(as_failure(race.first_failure, name))
        elif race.first_answer is not None:
            status, headers = race.first_answer
            unfit = AttemptFailed(InvalidResponse, "the answer to the first request doesn't fit")
            turn.failed(self._refusal(status, headers) if status >= 400 else unfit)

    async def _take_bytes(
        self, visit: Visit, url: URL, turn: Turn, exchange: Exchange, response: aiohttp.ClientResponse
    ) -> URL | None:
        """Checks the answer and takes its bytes; None when they have landed, else the url that it redirects to."""
        download = visit.download
        status = response.status
        headers: Mapping[str, str] = response.headers
        if status in REDIRECTS or status >= 400:
            headers = visit.book.explain(status, headers, await exchange.drain())
        try:
            delivery = visit.judge(url, status, headers)
        except AttemptFailed as failure:
            self._note_answer(failure, status, headers)
            raise
        if not isinstance(delivery, Delivery):
            return delivery
        view = download.accept(delivery)
        download.remember()
        if delivery.start == delivery.stop:
            await exchange.drain()
            return None

        def landed(count: int) -> None:
            download.landed_bytes += count
            turn.landed(count)

        host = turn.host
        since = host.now()
        await receive_body(exchange, delivery, view, landed, directly=self._directly)
        turn.received(len(view), host.now() - since)
        download.host = host
        return None

    @staticmethod
    def _fits(visit: Visit, url: URL, response: aiohttp.ClientResponse) -> bool:
        """Whether ``_take_bytes`` would take an answer, by its head alone."""
        try:
            visit.judge(url, response.status, response.headers)
        except AttemptFailed:
            return False
        return True

    async def _take_reply(
        self, url: URL, book: AddressBook, max_bytes: int, _: Turn, exchange: Exchange, response: aiohttp.ClientResponse
    ) -> Reply:
        status = response.status
        headers: Mapping[str, str] = response.headers
        if status not in REDIRECTS and status < 400:
            return Reply(url, headers, await exchange.read_all(max_bytes))
        headers = book.explain(status, headers, await exchange.drain())
        try:
            if status >= 400:
                raise refusal(status)
            return Reply(url, headers, target=next_url(url, headers.get("Location")))
        except AttemptFailed as failure:
            self._note_answer(failure, status, headers)
            raise

    def _refusal(self, status: int, headers: Mapping[str, str]) -> AttemptFailed:
        failure = refusal(status)
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

    def _too_many_redirects(self, url: URL) -> AttemptFailed:
        limit, last = self._config.max_redirects, host_name(url)
        message = f"more than max_redirects={limit} redirects, the last one to {last}"
        return AttemptFailed(InvalidResponse, message, Verdict.FATAL, host=last)

    def _host(self, url: URL) -> Host:
        return self._hosts.get(origin_of(url), lambda: self._route(url))

    def _route(self, url: URL) -> Route:
        headers, redirected_headers = (
            static_headers(
                url,
                asked=asked,
                headers=self._config.headers,
                tokens=self._config.tokens,
                login=self._environment.login_for(url),
            )
            for asked in (True, False)
        )
        proxy = self._environment.proxy_for(url)
        if proxy is None:
            return Route(headers, redirected_headers)
        if url.scheme == "http":  # no tunnel: the proxy reads the request itself, and takes its own header out
            return Route({**headers, **proxy.headers}, {**redirected_headers, **proxy.headers}, proxy.url)
        return Route(headers, redirected_headers, proxy.url, proxy.headers)


async def _told(pieces: Iterable[bytes | memoryview], exchange: Exchange) -> AsyncIterator[bytes | memoryview]:
    """The pieces, of which the exchange is told as they go out: the answer is waited for from the last one on."""
    for piece in pieces:
        yield piece
        exchange.moved()
