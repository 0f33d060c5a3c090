"""Ranges over http and https: attempts, redirects, repeats."""

from __future__ import annotations

import os
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import anyio.to_thread

from asyncfetch.errors import ConfigError, InvalidResponse, redact_url
from asyncfetch.fetch.addresses import WebUrls
from asyncfetch.fetch.attempts import Attempts, persist
from asyncfetch.fetch.redirects import Route, host_name, origin_of, static_headers
from asyncfetch.fetch.responses import MISDIRECTED
from asyncfetch.fetch.retry import AttemptFailed, Verdict
from asyncfetch.fetch.transports.asking import Asking, Question, Reply
from asyncfetch.fetch.transports.environment import Environment, read_environment
from asyncfetch.fetch.transports.lines import Lines
from asyncfetch.fetch.transports.visit import Visit, own_headers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from yarl import URL

    from asyncfetch.config import FetchConfig
    from asyncfetch.fetch.addresses import Address, AddressBook
    from asyncfetch.fetch.download import Download
    from asyncfetch.fetch.hosts import Host, Hosts
    from asyncfetch.fetch.retry import Clock
    from asyncfetch.fetch.transports.asking import Body
    from asyncfetch.ranges import ObjectInfo

__all__ = ["HttpTransport"]


MAX_REPLY_BYTES = 16 * 1024 * 1024
"""Bound of a page of text. A listing's page of 1,000 entries takes 1 MiB at most."""
MAX_ADDRESSES_PER_ATTEMPT = 3
"""The first one may be signed for the wrong region, the second may have expired meanwhile."""
MAX_MOVED = 1024
"""Urls that were moved for good and are remembered, about 1 KiB each. A forgotten one costs a round trip."""
WEB_URLS = WebUrls()

T = TypeVar("T")


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
    ) -> None:
        """Takes over ``lines``; use ``open`` to get one that is set up right."""
        self._config = config
        self._hosts = hosts
        self._clock = clock
        self._lines = lines
        self._environment = environment
        self._asking = Asking(config, clock, lines)
        self._moved: OrderedDict[str, URL] = OrderedDict()

    @classmethod
    async def open(cls, config: FetchConfig, hosts: Hosts, clock: Clock) -> HttpTransport:
        """A transport on the running loop; ConfigError where ``ca_file`` or the environment can't be read."""
        environment = Environment()
        if config.trust_env:
            environment = await anyio.to_thread.run_sync(read_environment, dict(os.environ))
        return cls(config, hosts, clock, await Lines.open(config), environment)

    async def aclose(self) -> None:
        """Closes every connection, without waiting for any server. No read may be under way."""
        await self._lines.aclose()

    async def listdir(self, url: str) -> list[ObjectInfo]:
        """Plain web servers have no way to ask."""
        message = f"web servers can't list {redact_url(url)!r}: listdir takes s3://, hf:// and file:// urls and paths"
        raise ConfigError(message)

    async def read(self, download: Download, book: AddressBook = WEB_URLS) -> None:
        """Fills ``download``, over as many attempts as the policy allows; FetchError where that isn't enough."""
        started = self._clock.monotonic()
        attempts: Attempts | None = None
        needs_new_connection = False
        while True:
            before = download.landed_bytes
            try:
                return await self._attempt(
                    download, book, is_retry=attempts is not None, needs_new_connection=needs_new_connection
                )
            except AttemptFailed as failure:
                download.broke(failure)
                attempts = attempts or Attempts(
                    self._config.retry, self._clock, download.url, download.asked, started=started
                )
                delay = attempts.delay_after(failure, progressed=download.landed_bytes > before)
                broke = failure.status is None or failure.address is not None
                needs_new_connection = broke or failure.kind is InvalidResponse or failure.status == MISDIRECTED
            await self._clock.sleep(delay)

    async def _attempt(
        self, download: Download, book: AddressBook, *, is_retry: bool, needs_new_connection: bool
    ) -> None:
        """Takes the bytes from the object's address; from a new one where that is worn out."""
        for addresses_left in reversed(range(MAX_ADDRESSES_PER_ATTEMPT)):
            address = await book.resolve(download.url)
            moved_to = self._moved.get(download.url)
            try:
                visit = Visit(download, book, address)
                start = moved_to or address.url
                await self._follow(visit, start, is_retry=is_retry, needs_new_connection=needs_new_connection)
            except AttemptFailed as failure:
                # Where the url itself leads now is asked at once in place of a refusal, else by the next attempt.
                self._moved.pop(download.url, None)
                was_refused = moved_to is not None and failure.verdict is Verdict.FATAL and (failure.status or 0) >= 400
                if not addresses_left or not (was_refused or book.reject(download.url, address, failure)):
                    raise
            else:
                self._note_moved(visit)
                return

    def _note_moved(self, visit: Visit) -> None:
        """Remembers where the user's url was moved to for good. What an address book finds is its own to remember."""
        if visit.moved_to is not None and visit.book is WEB_URLS:
            self._moved[visit.download.url] = visit.moved_to
            if len(self._moved) > MAX_MOVED:
                self._moved.popitem(last=False)

    async def _follow(self, visit: Visit, url: URL, *, is_retry: bool, needs_new_connection: bool) -> None:
        """Follows redirects from ``url`` to the server that has the bytes, and takes them from it."""
        for hop in range(self._config.max_redirects + 1):
            host = self._host(url)
            host.counts.retries += is_retry and hop == 0
            question = Question(
                url,
                visit.headers(host),
                self._asking.take_bytes,
                byte_range=visit.download.next_request().header(),
                answer_bytes=visit.download.expected_bytes,
                visit=visit,
            )
            target = await self._asking.ask(host, question, needs_new_connection=needs_new_connection)
            if target is None:
                return
            url = target
        raise self._too_many_redirects(url, visit.redirect_status)

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
            take = partial(self._asking.take_reply, book, max_bytes)
            # The answer is small, as text is, and paid for as it comes.
            question: Question[Reply] = Question(
                url, own_headers(host, address), take, method=method, body=body, answer_bytes=1
            )
            reply = await self._asking.ask(host, question)
            if reply.target is None or origin_of(reply.target) != origin_of(url):
                return reply
            url = reply.target
        raise self._too_many_redirects(url, reply.status)

    async def persist(self, url: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """What ``attempt()`` returns, over as many attempts as the policy allows, else FetchError."""
        return await persist(self._config.retry, self._clock, url, lambda _: attempt())

    def _too_many_redirects(self, url: URL, status: int | None) -> AttemptFailed:
        limit, last = self._config.max_redirects, host_name(url)
        message = f"more than max_redirects={limit} redirects, the last one to {last}"
        return AttemptFailed(InvalidResponse, message, Verdict.FATAL, status, host=last)

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
