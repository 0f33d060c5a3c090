"""Ranges over http and https: one attempt at a time, over redirects, by a connection of ours or by aiohttp's session.

A ranged GET goes out on a connection of ours, which reads plain answers. Where there is a proxy, or the host's latest
answer wasn't plain, it goes by the session; and what isn't plain is asked for once more that way, at once and within
the same attempt. Everything else (listings, puts, questions) is the session's.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.lowlevel
from multidict import CIMultiDict

from asyncfetch.config.checks import HEADER_CONTROL
from asyncfetch.errors import ConfigError, InvalidResponse, redact_url
from asyncfetch.fetch.bandwidth import Allowance, Bandwidth
from asyncfetch.fetch.connection import PooledConnectionDied
from asyncfetch.fetch.connector import Connector
from asyncfetch.fetch.environment import Environment, read_environment
from asyncfetch.fetch.hosts import Permit
from asyncfetch.fetch.refusals import LengthUnread, circumstances
from asyncfetch.fetch.request import HttpRequest, Redirect, WebUrls, web_address
from asyncfetch.fetch.responses import MISDIRECTED, refusal
from asyncfetch.fetch.retry import AttemptFailed, RetryVerdict, pause_seconds, retried, spent_quota_seconds
from asyncfetch.fetch.transports.session import COMMON_HEADERS, AiohttpSessions
from asyncfetch.fetch.urls import REDIRECTS, Route, host_name, next_url, origin_of, static_headers
from asyncfetch.runtime.threads import run_sync

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator, Mapping

    from yarl import URL

    from asyncfetch.config import FetchConfig
    from asyncfetch.fetch.answer import Head
    from asyncfetch.fetch.buffers import Views
    from asyncfetch.fetch.connection import Connection
    from asyncfetch.fetch.download import Download
    from asyncfetch.fetch.hosts import Host, Hosts
    from asyncfetch.fetch.request import AddressBook
    from asyncfetch.fetch.responses import AcceptedBody
    from asyncfetch.fetch.retry import Clock
    from asyncfetch.fetch.transports.session import Exchange
    from asyncfetch.fetch.urls import Address
    from asyncfetch.ranges import ObjectInfo

log = logging.getLogger("asyncfetch")

MAX_RESPONSE_BYTES = 16 * 1024 * 1024
"""Bound of a page of text. A listing's page of 1,000 entries takes 1 MiB at most."""
MAX_ADDRESSES_PER_ATTEMPT = 3
"""The first one may be signed for the wrong region, the second may have expired meanwhile."""
MAX_MOVED = 1024
"""Urls that were moved for good and are remembered, about 1 KiB each. A forgotten one costs a round trip."""
MAX_REQUEST_HEADS = 1024
"""Heads of requests that are kept but for their range, about 0.5 KiB each."""
WEB_URLS = WebUrls()

Body = Callable[[], "Iterable[bytes | memoryview]"]
"""Gives the pieces of a request's body, from the first one again for each time that it is sent."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Response:
    """An answer that isn't an object's bytes, with a status below 400."""

    url: URL = field(repr=False)
    """The url that it answers, after redirects."""
    status: int
    headers: Mapping[str, str] = field(repr=False)
    """Found by names of any case."""
    body: bytes = field(default=b"", repr=False)
    target: URL | None = field(default=None, repr=False)
    """The url that it redirects to, of another origin; None where it doesn't."""

    @contextmanager
    def is_judged(self) -> Iterator[None]:
        """Let an attempt that fails in this block fail for what the answer says: host and status are the answer's."""
        try:
            yield
        except AttemptFailed as failure:
            failure.host, failure.status = host_name(self.url), self.status
            raise


class HttpTransport:
    """Fills downloads from web servers. Belongs to the loop that opened it; its owner checks that."""

    def __init__(
        self,
        config: FetchConfig,
        hosts: Hosts,
        clock: Clock,
        connector: Connector,
        session: AiohttpSessions,
        environment: Environment,
        *,
        by_session: bool = False,
    ) -> None:
        """Takes over ``connector`` and ``session``; use ``open`` to get one that is set up right."""
        self._config = config
        self._hosts = hosts
        self._clock = clock
        self._connector = connector
        self._session = session
        weakref.finalize(self, session.let_go).atexit = False
        self._environment = environment
        self._by_session = by_session
        self._bandwidth = Bandwidth.of(config.max_bytes_per_second)
        self._moved: OrderedDict[str, URL] = OrderedDict()
        self._request_heads: OrderedDict[tuple[str, str | None], tuple[Address, Host, URL, bytes]] = OrderedDict()

    @classmethod
    async def open(cls, config: FetchConfig, hosts: Hosts, clock: Clock, *, by_session: bool) -> HttpTransport:
        """Return a transport on the running loop; ConfigError where a file that is named can't be read."""
        environment = Environment()
        if config.trust_env:
            environment = await run_sync(read_environment, dict(os.environ))
        connector = await Connector.open(config)
        session = AiohttpSessions(config, connector)
        return cls(config, hosts, clock, connector, session, environment, by_session=by_session)

    async def aclose(self) -> None:
        """Close every connection, without waiting for any server. No attempt may be under way."""
        await self._session.aclose()

    async def listdir(self, url: str) -> list[ObjectInfo]:
        """Plain web servers have no way to ask."""
        message = f"web servers can't list {redact_url(url)!r}: listdir takes s3://, hf:// and file:// urls and paths"
        raise ConfigError(message)

    async def attempt(self, download: Download, failure: AttemptFailed | None, book: AddressBook = WEB_URLS) -> None:
        """Bring what the download lacks from the object's address; from a new one where that is worn out.

        ``failure`` is how the attempt before this one ended; None for the first one.
        """
        needs_new_connection = failure is not None and (
            failure.status is None
            or failure.address is not None
            or failure.kind is InvalidResponse
            or failure.status == MISDIRECTED
        )
        addresses_left = MAX_ADDRESSES_PER_ATTEMPT - 1
        download.attempts += 1
        while True:
            address = web_address(download.url) if book is WEB_URLS else await book.resolve(download.url)
            moved_to = self._moved.get(download.url)
            url = moved_to or address.url
            redirects: list[Redirect] = []
            try:
                while True:
                    host = self._hosts.get(origin_of(url), self._route, url)
                    if failure is not None and not redirects:
                        host.counts.retries += 1
                    if download.needs_size or (host.lacks_suffixes and download.wanted.is_suffix):
                        await self._ask_size_first(download, book)
                    request = HttpRequest(url, host, address, book, download)
                    redirect = await self._get(request, needs_new_connection=needs_new_connection)
                    if redirect is None:
                        if download.lost_suffix and download.landed_bytes:
                            host.lacks_suffixes = True
                        if redirects and book is WEB_URLS:  # what another finds is its own to remember
                            self._note_moved(download.url, redirects)
                        return
                    host.counts.redirects += 1
                    redirects.append(redirect)
                    url = redirect.target
                    if len(redirects) > self._config.max_redirects:
                        sets_cookie = any(one.sets_cookie for one in redirects)
                        raise self._too_many_redirects(url, redirect.status, sets_cookie=sets_cookie)
            except AttemptFailed as refused:
                if download.asks_otherwise(refused) and refused.verdict is not RetryVerdict.AGAIN:
                    continue
                # Where the url itself leads now is asked at once in place of a refusal, else by the next attempt.
                self._moved.pop(download.url, None)
                was_refused = (
                    moved_to is not None and refused.verdict is RetryVerdict.FATAL and (refused.status or 0) >= 400
                )
                if not addresses_left or not (was_refused or book.reject(download.url, address, refused)):
                    raise
                addresses_left -= 1

    async def _ask_size_first(self, download: Download, book: AddressBook) -> None:
        """Has the download ask for the last bytes by their places in the object."""
        info = download.known
        if info is None:
            sizing, span = download.size_request(), (download.asked.start, download.asked.stop)
            attempt = partial(self.attempt, sizing, book=book)
            await retried(self._config.retry, self._clock, sizing.url, attempt, sizing.keep_landed, span=span)
            info, _ = sizing.result()
        download.ask_within(info.size)

    async def _get(self, request: HttpRequest, *, needs_new_connection: bool) -> Redirect | None:
        """Sends one request, within its host's limit, and takes its bytes; or tells where it is redirected to."""
        host = request.host
        permit = Permit(host)
        if not permit.enter_nowait():
            await permit.enter()
        if permit.tracer is not None:
            asked = request.download.asked
            permit.details = {"start": asked.start, "stop": asked.stop, "attempt": request.download.attempts}
        succeeded = False
        allowance = None if self._bandwidth is None else Allowance(self._bandwidth)
        try:
            if allowance is not None:
                await self._clock.sleep(allowance.begin(request.download.expected_bytes))
                permit.held_back()
            by_session = self._by_session or not host.answers_plainly or host.route.proxy is not None
            if by_session:
                try:
                    redirect = await self._get_by_session(request, permit, allowance, needs_new_connection)
                except LengthUnread:
                    if host.route.proxy is not None:
                        raise
                    by_session, needs_new_connection = False, True
            if not by_session:
                connection = None if needs_new_connection else host.take_idle_connection()
                if connection is None:
                    connection = await self._connector.connect(host, request.url, is_retry=needs_new_connection)
                try:
                    redirect = await self._get_by_connection(request, permit, allowance, connection)
                except PooledConnectionDied:
                    connection = await self._connector.connect(host, request.url, is_retry=needs_new_connection)
                    redirect = await self._get_by_connection(request, permit, allowance, connection)
            succeeded = True
        except AttemptFailed as failure:
            self._add_circumstances(failure, host, request.url, request.address)
            if failure.address is not None:
                self._connector.resolver.set_aside([failure.address])
            permit.failed(failure)
            raise
        finally:
            permit.leave(succeeded=succeeded)
            if allowance is not None:
                allowance.close()
        return redirect

    async def _get_by_connection(
        self, request: HttpRequest, permit: Permit, allowance: Allowance | None, connection: Connection
    ) -> Redirect | None:
        """Sends one request on a connection of ours, which is taken over."""
        host, download = request.host, request.download
        host.counts.requests += 1
        byte_range, etag, expected = download.ask(request.address.etag)
        if allowance is not None or request.address.version_header is not None:
            expected = None
        hedging = host.hedging
        patience_seconds = hedging.patience_seconds if hedging.may_hedge else None
        sent = self._request_head(request, etag, byte_range)
        try:
            try:
                await connection.send(
                    sent,
                    expected,
                    download.room,
                    patience_seconds=inf if patience_seconds is None else patience_seconds,
                )
            finally:
                answer = connection.answer
                if answer.received_bytes:  # of the expected one
                    permit.answered(206, connection.sent_at, connection.first_byte_at)
                    permit.landed(answer.received_bytes)
                    download.landed(answer.received_bytes)
                    if answer.is_whole:
                        download.host = host
                        permit.body_seconds = host.now() - connection.first_byte_at
            if connection.answer.is_whole:
                return None
            if connection.is_late:
                connection = await self._hedge(request, permit, connection, sent)
            head = connection.head
            if head is not None and (head.length_bytes is not None or _says_all(head)):
                self._note_head(permit, head, connection)
                return await self._take(request, permit, _OwnAnswer(connection, head, allowance))
        finally:
            connection.release()
        host.answers_plainly = head is not None and head.status >= 300
        return await self._get_by_session(request, permit, allowance, needs_new_connection=False)

    async def _get_by_session(
        self, request: HttpRequest, permit: Permit, allowance: Allowance | None, needs_new_connection: bool
    ) -> Redirect | None:
        """Sends one request by the session."""
        host = request.host
        byte_range, etag, _ = request.download.ask(request.address.etag)
        headers = request.headers(etag)
        if byte_range is not None:
            headers["Range"] = byte_range
        host.counts.requests += 1
        async with self._session.exchange(
            host, "GET", request.url, headers, needs_new_connection=needs_new_connection, allowance=allowance
        ) as exchange:
            self._note_head(permit, exchange, exchange)
            is_good = exchange.status < 400 and exchange.status not in REDIRECTS
            if is_good and not self._by_session and host.route.proxy is None:
                host.answers_plainly = exchange.is_plain
            return await self._take(request, permit, exchange)

    async def _take(self, request: HttpRequest, permit: Permit, answer: Exchange | _OwnAnswer) -> Redirect | None:
        """Judges an answer by its head, and takes its body."""
        host, download, status, headers = request.host, request.download, answer.status, answer.headers
        if status in REDIRECTS or status >= 400:
            headers = request.book.explain(status, headers, await answer.drain())
        whole: bytes | bytearray | None = None
        try:
            delivery = request.judge(status, headers)
            if isinstance(delivery, Redirect):
                return delivery
            if delivery.is_counted:  # by its head alone it can't be told what it holds
                remedy = "and doesn't say how long it is: raise max_unsized_bytes, or use a server that does"
                length = headers.get("Content-Length")
                max_bytes = self._config.max_unsized_bytes if length is None else int(length)
                whole = await answer.read_all(max_bytes, remedy)
                delivery = request.count(headers, whole)
        except AttemptFailed as failure:
            self._note_answer(failure, status, headers)
            raise
        view = download.accept(delivery)
        download.remember()

        def landed(count: int) -> None:
            download.landed(count)
            permit.landed(count)

        if whole is not None:
            view[:] = memoryview(whole)[delivery.start : delivery.stop]
            download.landed(len(view))
            permit.landed(len(whole))
        elif delivery.start < delivery.stop or status == 206:  # its body may say something else
            await answer.receive(delivery, view, landed)
        else:
            await answer.drain()
            return None
        download.host = host
        permit.body_seconds = host.now() - answer.first_byte_at
        return None

    async def _hedge(self, request: HttpRequest, permit: Permit, first: Connection, sent: bytes) -> Connection:
        """Makes a late request a second time; the connection of the answer that comes first and fits.

        The other request is cancelled and awaited, and its connection closed. The memory for the body is handed out
        only after that, so a loser has nowhere to write to. What it was answered counts nevertheless: a refusal is one,
        whoever wins.
        """
        host, hedging = request.host, request.host.hedging
        waiting = first.wait()
        await anyio.lowlevel.checkpoint()  # an answer that lay there already when the loop found it late ends it here
        urgent = None if waiting.done() or not hedging.may_hedge else host.enter_nowait()
        if urgent is None:
            await waiting
            return first
        hedging.hedged()
        host.counts.hedges += 1
        log.debug("%s: an answer is late; asking %s a second time", redact_url(request.download.url), host.name)
        second: Connection | None = None
        failure: AttemptFailed | None = None
        scope = anyio.CancelScope()

        async def ask_again() -> None:
            nonlocal second
            with scope:
                connection: Connection | None = None
                try:
                    connection = host.take_idle_connection()
                    connection = connection or await self._connector.connect(host, request.url, is_retry=False)
                    host.counts.requests += 1
                    await connection.send(sent)
                    if request.fits(connection.head):
                        second = connection
                        first.abort()  # which ends the wait for it
                    else:
                        permit.failed(self._refusal(connection.head))
                except AttemptFailed as error:
                    permit.failed(error)
                finally:
                    if connection is not None and second is None:
                        connection.abort()

        try:
            try:
                async with anyio.create_task_group() as group:
                    group.start_soon(ask_again, name="second request")
                    try:
                        await waiting
                    except AttemptFailed as error:  # the second one may do better
                        failure = error.with_traceback(None)  # with it, a cycle
                    if second is None and request.fits(first.head):
                        scope.cancel()
                    elif first.head is not None and first.head.status < 300:
                        first.abort()  # its body is of no use, and comes whether it is read or not
            except BaseException:
                if second is not None:  # cancelled when it had won
                    second.abort()
                raise
            if second is None:
                if failure is not None:
                    raise failure
                return first
            host.counts.hedge_wins += 1
            hedging.answered(host.now() - first.sent_at)
            if failure is not None:
                permit.failed(failure)
            elif first.first_byte_at >= first.sent_at:  # it was answered
                permit.failed(self._refusal(first.head))
            return second
        finally:
            hedging.ended(won=second is not None)
            host.leave(urgent=urgent)
            failure = None  # else failure -> traceback -> this frame -> failure is a cycle

    async def persist(self, url: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return what ``attempt()`` returns, over as many attempts as the policy allows, else FetchError."""
        return await retried(self._config.retry, self._clock, url, lambda _: attempt())

    async def ask(self, method: str, address: Address, book: AddressBook, *, body: Body | None = None) -> Response:
        """Send one request that isn't for an object's bytes: a listing, where an object is. It isn't repeated.

        Redirects are followed within the address's origin; one that leads elsewhere is the answer. The length of a
        ``body`` stands in the address's headers. ``book`` explains refusals.

        Raises:
            AttemptFailed: No answer, one of 400 or above, or one of more than MAX_RESPONSE_BYTES.
        """
        url = address.url
        for _ in range(self._config.max_redirects + 1):
            host = self._hosts.get(origin_of(url), self._route, url)
            headers = host.route.headers_for(host.origin, address)
            allowance = None if self._bandwidth is None else Allowance(self._bandwidth)
            async with host.permit() as permit:
                host.counts.requests += 1
                try:
                    if allowance is not None:  # the answer is small, as text is, and paid for as it comes
                        await self._clock.sleep(allowance.begin(1))
                    async with self._session.exchange(
                        host, method, url, headers, body=None if body is None else body(), allowance=allowance
                    ) as exchange:
                        self._note_head(permit, exchange, exchange)
                        response = await self._response(url, exchange, book)
                except AttemptFailed as failure:
                    self._add_circumstances(failure, host, url, address)
                    raise
                finally:
                    if allowance is not None:
                        allowance.close()
            if response.target is None or origin_of(response.target) != origin_of(url):
                return response
            url = response.target
            host.counts.redirects += 1
        raise self._too_many_redirects(url, response.status, sets_cookie="Set-Cookie" in response.headers)

    async def _response(self, url: URL, exchange: Exchange, book: AddressBook) -> Response:
        status, headers = exchange.status, exchange.headers
        if status not in REDIRECTS and status < 400:
            return Response(url, status, headers, await exchange.read_all(MAX_RESPONSE_BYTES))
        headers = book.explain(status, headers, await exchange.drain())
        try:
            if status >= 400:
                raise refusal(status, headers)
            return Response(url, status, headers, target=next_url(url, headers.get("Location")))
        except AttemptFailed as failure:
            self._note_answer(failure, status, headers)
            raise

    def _add_circumstances(self, failure: AttemptFailed, host: Host, url: URL, address: Address) -> None:
        """Add to the message what was sent with the request that failed, and who may have answered."""
        proxy, sent = host.route.proxy, host.route.headers_for(host.origin, address)
        is_configured = any(name in self._config.tokens for name in (url.host, host.name))
        withheld = is_configured and url.scheme == "http" and "Authorization" not in sent
        via = None if proxy is None else host_name(proxy)
        failure.message += circumstances(failure, url, sent, proxy=via, withheld=withheld)

    def _refusal(self, head: Head | None) -> AttemptFailed:
        """The failure that an answer is of which nothing is taken."""
        if head is None or head.status < 400:
            return AttemptFailed(InvalidResponse, "the answer doesn't fit")
        failure = refusal(head.status, head.headers)
        self._note_answer(failure, head.status, head.headers)
        return failure

    def _note_answer(self, failure: AttemptFailed, status: int, headers: Mapping[str, str]) -> None:
        """Adds to the failure what the server said beside the status."""
        failure.status, failure.headers = failure.status or status, headers
        if status >= 400:
            failure.retry_after = pause_seconds(headers, wall_now=self._clock.wall())
        word = headers.get("X-Error-Code")
        if word is not None:
            failure.message += f" ({word[:160]})"

    def _note_head(self, permit: Permit, head: Head | Exchange, times: Connection | Exchange) -> None:
        """Notes that the head of an answer is there."""
        permit.answered(head.status, times.sent_at, times.first_byte_at)
        if "RateLimit" in head.headers and head.status < 400:
            spent_seconds = spent_quota_seconds(head.headers)
            if spent_seconds is not None:
                permit.host.pause(spent_seconds)

    def _request_head(self, request: HttpRequest, etag: str | None, byte_range: str | None) -> bytes:
        """The head of a request; all but its last line is the same for all ranges of an object."""
        key = request.download.url, etag
        address, host, url, head = self._request_heads.get(key, _NO_HEAD)
        if address is not request.address or host is not request.host or url is not request.url:
            head = self._new_request_head(request, etag)
            self._request_heads[key] = request.address, request.host, request.url, head
            if len(self._request_heads) > MAX_REQUEST_HEADS:
                self._request_heads.popitem(last=False)
        return head + (b"\r\n" if byte_range is None else b"Range: %b\r\n\r\n" % byte_range.encode())

    def _note_moved(self, url: str, redirects: list[Redirect]) -> None:
        """Remembers where the user's url was moved to for good: by the redirects in front of one that isn't."""
        for redirect in takewhile(attrgetter("is_permanent"), redirects):
            self._moved[url] = redirect.target
        if len(self._moved) > MAX_MOVED:
            self._moved.popitem(last=False)

    def _new_request_head(self, request: HttpRequest, etag: str | None) -> bytes:
        fields = CIMultiDict(COMMON_HEADERS)
        fields.update(request.headers(etag))
        lines = [f"GET {request.url.raw_path_qs} HTTP/1.1", f"Host: {request.url.host_port_subcomponent}"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        if HEADER_CONTROL.search("".join(lines)):
            raise ConfigError(
                f"a request to {request.host.name} can't be made from this url or these headers: one holds a control"
                " character"
            )
        return "\r\n".join([*lines, ""]).encode()

    def _too_many_redirects(self, url: URL, status: int, *, sets_cookie: bool) -> AttemptFailed:
        limit, last = self._config.max_redirects, host_name(url)
        message = f"more than max_redirects={limit} redirects, the last one to {last}"
        if sets_cookie:
            message += (
                "; they set a cookie, and may go on until it comes back, but none is kept here: if so, send it by"
                " FetchConfig(headers={host: {'Cookie': ...}})"
            )
        return AttemptFailed(InvalidResponse, message, RetryVerdict.FATAL, status, host=last)

    def _route(self, url: URL) -> Route:
        headers, redirected_headers = (
            static_headers(
                url,
                is_named=is_named,
                headers=self._config.headers,
                tokens=self._config.tokens,
                login=self._environment.login_for(url),
            )
            for is_named in (True, False)
        )
        proxy = self._environment.proxy_for(url)
        if proxy is None:
            return Route(headers, redirected_headers)
        if url.scheme == "http":  # no tunnel: the proxy reads the request itself, and takes its own header out
            return Route({**headers, **proxy.headers}, {**redirected_headers, **proxy.headers}, proxy.url)
        return Route(headers, redirected_headers, proxy.url, proxy.headers)


def _says_all(head: Head) -> bool:
    """Return whether an answer's head says all that matters, however its body comes."""
    status = head.status
    return head.is_ambiguous or status == 429 or status >= 500 or (status < 400 and status not in {200, 206})


class _OwnAnswer:
    """An answer on a connection of ours, whose head is there; to who takes it, what an Exchange is."""

    def __init__(self, connection: Connection, head: Head, allowance: Allowance | None) -> None:
        self._connection = connection
        self._allowance = allowance
        self._length_bytes = head.length_bytes or 0
        self.status = head.status
        self.headers: Mapping[str, str] = head.headers
        self.first_byte_at = connection.first_byte_at
        self.drain = connection.drain

    async def receive(self, delivery: AcceptedBody, view: Views, landed: Callable[[int], None]) -> None:
        if delivery.skip_bytes or delivery.cut:
            body = memoryview(bytearray(delivery.skip_bytes + len(view)))
            await self._connection.receive(body, self._allowance)
            view[:] = body[delivery.skip_bytes :]
            landed(len(view))
            return
        try:
            await self._connection.receive(view, self._allowance)
        finally:
            landed(self._connection.answer.received_bytes)

    async def read_all(self, _: int, __: str) -> bytearray:
        body = bytearray(self._length_bytes)
        if body:
            await self._connection.receive(memoryview(body), self._allowance)
        return body


_NO_HEAD = (None, None, None, b"")
