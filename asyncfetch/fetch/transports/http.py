"""Ranges over http and https: attempts, redirects, repeats."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import anyio.to_thread

from asyncfetch.errors import InvalidResponse, ObjectChanged
from asyncfetch.fetch.hosts import Host, Route
from asyncfetch.fetch.objects import strong_etag
from asyncfetch.fetch.redirects import REDIRECTS, host_name, next_url, origin_of, parse_url, static_headers, userinfo
from asyncfetch.fetch.responses import check_response
from asyncfetch.fetch.retry import AttemptFailed, Retries, Verdict, giving_up, retry_after_seconds
from asyncfetch.fetch.transports.direct import is_possible
from asyncfetch.fetch.transports.environment import Environment, read_environment
from asyncfetch.fetch.transports.exchange import Exchange, PooledConnectionDied, receive_body
from asyncfetch.fetch.transports.faults import FOREIGN, as_failure
from asyncfetch.fetch.transports.session import open_session

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

    from asyncfetch.config import FetchConfig
    from asyncfetch.fetch.download import Download
    from asyncfetch.fetch.hosts import Hosts
    from asyncfetch.fetch.retry import Clock

__all__ = ["HttpTransport"]


class HttpTransport:
    """Fills downloads from web servers. Belongs to the loop that made its session; its owner checks that."""

    def __init__(
        self,
        config: FetchConfig,
        hosts: Hosts,
        clock: Clock,
        session: aiohttp.ClientSession,
        environment: Environment,
        *,
        directly: bool,
    ) -> None:
        """Takes over ``session``; use ``open`` to get one that is set up right."""
        self._config = config
        self._hosts = hosts
        self._clock = clock
        self._session = session
        self._environment = environment
        self._directly = directly

    @classmethod
    async def open(cls, config: FetchConfig, hosts: Hosts, clock: Clock) -> HttpTransport:
        """A transport on the running loop; ConfigError where ``ca_file`` or the environment can't be read."""
        environment = Environment()
        if config.trust_env:
            environment = await anyio.to_thread.run_sync(read_environment, dict(os.environ))
        directly = config.direct_bodies and await is_possible()
        return cls(config, hosts, clock, await open_session(config), environment, directly=directly)

    async def aclose(self) -> None:
        """Closes every connection, without waiting for any server. No read may be under way."""
        await self._session.close()

    async def read(self, download: Download) -> None:
        """Fills ``download``, over as many attempts as the policy allows; FetchError where that isn't enough."""
        wanted = download.wanted
        retries = Retries(self._config.retry, now=self._clock.monotonic(), uniform=self._clock.uniform)
        attempts = 0
        needs_new_connection = False
        while True:
            before = download.landed_bytes
            try:
                return await self._attempt(download, is_retry=attempts > 0, needs_new_connection=needs_new_connection)
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
                        url=download.url, start=wanted.start, stop=wanted.stop, attempts=attempts
                    ) from failure.__cause__
                needs_new_connection = failure.status is None or failure.kind is InvalidResponse
            await self._clock.sleep(delay)

    async def _attempt(self, download: Download, *, is_retry: bool, needs_new_connection: bool) -> None:
        """Follows redirects to the server that has the bytes, and takes them from it."""
        url = parse_url(download.url)
        asked_origin, login = origin_of(url), userinfo(url)
        url = url.with_user(None) if login is not None else url
        for hop in range(self._config.max_redirects + 1):
            host = self._hosts.get(origin_of(url), lambda at=url: self._route(at))  # type: ignore[misc]
            host.counts.retries += is_retry and hop == 0
            headers = self._headers(host, download, login, asked=host.origin == asked_origin)
            try:
                target = await self._hop(host, url, headers, download, needs_new_connection=needs_new_connection)
            except AttemptFailed as failure:
                failure.host = host_name(url)
                host.counts.errors += 1
                raise
            if target is None:
                return
            host.counts.redirects += 1
            url = target
        message = f"more than max_redirects={self._config.max_redirects} redirects, the last one to {host_name(url)}"
        raise AttemptFailed(InvalidResponse, message, Verdict.FATAL, host=host_name(url))

    async def _hop(
        self, host: Host, url: URL, headers: dict[str, str], download: Download, *, needs_new_connection: bool
    ) -> URL | None:
        """One request, through its host's gate; the url to go on to, or None where the bytes have landed."""
        async with host:
            try:
                return await self._exchange(host, url, headers, download, needs_new_connection=needs_new_connection)
            except PooledConnectionDied:
                return await self._exchange(host, url, headers, download, needs_new_connection=True)

    async def _exchange(
        self, host: Host, url: URL, headers: dict[str, str], download: Download, *, needs_new_connection: bool
    ) -> URL | None:
        name = host_name(url)
        with Exchange(self._config.timeouts, name, needs_new_connection=needs_new_connection) as exchange:
            host.counts.requests += 1
            try:
                response = await self._session.get(
                    url,
                    headers=headers,
                    allow_redirects=False,
                    proxy=host.route.proxy,
                    proxy_headers=host.route.proxy_headers,
                )
            except FOREIGN as error:
                proxy = host.route.proxy
                failure = as_failure(error, name, None if proxy is None else host_name(proxy))
                if exchange.died_idle(error):
                    raise PooledConnectionDied(failure.kind, failure.message) from error
                raise failure from error
            exchange.answered(response)
            if response.status in REDIRECTS:
                await exchange.drain()
                return next_url(url, response.headers.get("Location"))
            await self._take(exchange, response, host, download)
            return None

    async def _take(self, exchange: Exchange, response: aiohttp.ClientResponse, host: Host, download: Download) -> None:
        """Checks the answer and takes its bytes."""
        try:
            delivery = check_response(
                download.next_request(), response.status, response.headers, url=download.url, known=download.known
            )
        except AttemptFailed as failure:
            if response.status >= 400:
                failure.retry_after = retry_after_seconds(
                    response.headers.get("Retry-After"), wall_now=self._clock.wall()
                )
                await exchange.drain()
            raise
        view = download.accept(delivery)
        download.remember()
        if delivery.start == delivery.stop:
            await exchange.drain()
            return

        def landed(count: int) -> None:
            download.landed_bytes += count
            host.counts.bytes += count

        await receive_body(exchange, delivery, view, landed, directly=self._directly)

    def _headers(self, host: Host, download: Download, login: str | None, *, asked: bool) -> dict[str, str]:
        headers = dict(host.route.headers if asked else host.route.redirected_headers)
        if asked and login is not None:
            headers = {name: value for name, value in headers.items() if name.lower() != "authorization"}
            headers["Authorization"] = login
        headers["Range"] = download.next_request().header()
        # To every hop: a server that redirects must ignore preconditions (RFC 9110, section 13.2.1).
        etag = strong_etag(download.known)
        if etag is not None:
            headers["If-Match"] = etag
        return headers

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
