"""Every scheme that isn't read natively, through fsspec, in threads.

fsspec promises little: its ``cat_file`` may return the whole object for a range, or fewer bytes than asked. So every
attempt first learns the object's size and version, and is checked against both. A read that broke goes on from the byte
that it reached, if the version is still the same one.

Repeats. Most back ends repeat what failed by themselves, out of our sight, before they raise an error; that error is
then one failed attempt of ours, and repeated by the rules of all (RetryConfig). So the server may be asked our attempts
times theirs, 25 times for 5 and 5. What that costs is bounded, by the total time and by the budget of the host; who
wants one layer alone switches theirs off (FetchConfig(fsspec=...)), or ours (RetryConfig(attempts=1)).

Time limits. A back end doesn't show what it is at: whether it connects, waits or receives. So each call into one, for
the object's size and version, for a piece of READ_STEP_BYTES, or for a listing, may take as long as the three phases of
TimeoutConfig together. A piece that took longer may be too large for a slow link rather than lost: the next attempt
asks for smaller ones.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import anyio

from asyncfetch.errors import FetchError, FetchTimeout, InvalidResponse, redact_url
from asyncfetch.fetch.attempts import Attempts, persist
from asyncfetch.fetch.bandwidth import Bandwidth
from asyncfetch.fetch.batch import server_of
from asyncfetch.fetch.responses import Delivery
from asyncfetch.fetch.retry import AttemptFailed, Verdict, pause_seconds
from asyncfetch.fetch.transports.back_ends import (
    check_version,
    file_system,
    foreign_errors,
    list_directory,
    look,
    scheme_of,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from asyncfetch.config import FetchConfig
    from asyncfetch.fetch.download import Download
    from asyncfetch.fetch.hosts import Hosts, Turn
    from asyncfetch.fetch.retry import Clock
    from asyncfetch.fetch.scatter import Views
    from asyncfetch.ranges import ObjectInfo

__all__ = ["OtherTransport"]

READ_STEP_BYTES = 8 * 1024 * 1024
"""Asked for at once; between two of these a read can be cancelled."""
SLOW_STEP_SHARE, MIN_STEP_BYTES = 8, 64 * 1024
"""After a piece that took too long, the next ones are shorter by this factor, but no shorter than this."""
THREADS = 64
"""Threads that wait for back ends at a time, over all schemes."""

T = TypeVar("T")


class OtherTransport:
    """Fills downloads from fsspec's file systems.

    A read that is cancelled, or takes too long, leaves its thread to end by itself, because a back end that hangs can't
    be stopped; what it still brings is thrown away.
    """

    def __init__(self, config: FetchConfig, hosts: Hosts, clock: Clock) -> None:
        self._config = config
        self._hosts = hosts
        self._clock = clock
        self._bandwidth = Bandwidth.of(config.max_bytes_per_second)
        limits = config.timeouts
        limit_seconds = limits.connect_seconds + limits.first_byte_seconds + limits.stall_seconds
        self._threads = _Threads(THREADS, limit_seconds)

    async def read(self, download: Download) -> None:
        """Fills ``download``, over as many attempts as the policy allows; FetchError where that isn't enough."""
        started = self._clock.monotonic()
        attempts: Attempts | None = None
        step_bytes = READ_STEP_BYTES
        while True:
            before = download.landed_bytes
            take = partial(self._take, download, step_bytes)
            try:
                return await self._ask(download.url, take, is_retry=attempts is not None)
            except AttemptFailed as failure:
                download.broke(failure)
                if failure.kind is FetchTimeout:
                    step_bytes = max(step_bytes // SLOW_STEP_SHARE, MIN_STEP_BYTES)
                attempts = attempts or Attempts(
                    self._config.retry, self._clock, download.url, download.asked, started=started
                )
                delay = attempts.delay_after(failure, progressed=download.landed_bytes > before)
            await self._clock.sleep(delay)

    async def listdir(self, url: str) -> list[ObjectInfo]:
        """The entries of a directory, sorted by url; a directory among them has size 0 and a url that ends in "/"."""

        async def take(turn: Turn) -> list[ObjectInfo]:
            since = turn.host.now()
            entries = await self._threads.call(partial(list_directory, url, self._config.fsspec), scheme_of(url))
            turn.answered(turn.host.now() - since, is_refusal=False)
            return entries

        def attempt(is_retry: bool) -> Awaitable[list[ObjectInfo]]:
            return self._ask(url, take, is_retry=is_retry)

        return await persist(self._config.retry, self._clock, url, attempt)

    async def _ask(self, url: str, take: Callable[[Turn], Awaitable[T]], *, is_retry: bool) -> T:
        """One attempt, in its turn at its host, and counted."""
        host = self._hosts.get(_origin_of(url))
        async with host.turn() as turn:
            host.counts.requests += 1
            host.counts.retries += is_retry
            try:
                return await take(turn)
            except AttemptFailed as failure:
                failure.host = host.name
                failure.retry_after = pause_seconds(failure.headers, wall_now=self._clock.wall())
                turn.failed(failure)
                raise

    async def _take(self, download: Download, step_bytes: int, turn: Turn) -> None:
        """Takes what is missing, piece by piece."""
        host, scheme = turn.host, scheme_of(download.url)
        reading = _Reading(download, self._config.fsspec)
        asked = host.now()
        try:
            await self._threads.call(reading.open, scheme)
            opened = host.now()
            turn.answered(opened - asked, is_refusal=False)
            while (left := reading.left_bytes) > 0:
                count = min(left, step_bytes)
                await self._pay(count)
                await self._threads.call(partial(reading.take, count), scheme)
                turn.landed(count)
            await self._threads.call(reading.check, scheme)
        except BaseException:
            reading.abandon()
            raise
        download.remember()
        turn.received(reading.size_bytes, host.now() - opened)

    async def _pay(self, count: int) -> None:
        """Waits until so many bytes may come."""
        if self._bandwidth is None:
            return
        try:
            await anyio.sleep(self._bandwidth.reserve(count))
        except BaseException:
            self._bandwidth.give_back(count)
            raise


class _Threads:
    """Calls into back ends, each in a thread, which keeps its place among so many until it ends, however late that is.

    A call is overdue when it runs longer than the limit, whether anybody waits for it still. Where all are, no place
    will become free: who waits for one, or comes later, is told so.
    """

    def __init__(self, places: int, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._places = anyio.CapacityLimiter(places)
        self._overdue: set[object] = set()
        self._waiting: set[anyio.CancelScope] = set()

    async def call(self, function: Callable[[], T], scheme: str) -> T:
        """What ``function()`` returns; AttemptFailed where it takes too long. A caller that leaves leaves it behind."""
        loop = asyncio.get_running_loop()
        place = object()
        await self._take_place(place)
        timer = loop.call_later(self._limit_seconds, self._is_late, place)

        def ended(_: object) -> None:
            with suppress(RuntimeError):  # the loop is gone
                loop.call_soon_threadsafe(self._leave, place, timer)

        with anyio.move_on_after(self._limit_seconds):
            return await _in_thread(function, ended)
        message = (
            f"fsspec's back end for {scheme}:// gave no answer within {self._limit_seconds:g} s: is its server up? A"
            " slow one gets longer by FetchConfig(timeouts=...), whose three phases together are this limit"
        )
        raise AttemptFailed(FetchTimeout, message)

    async def _take_place(self, place: object) -> None:
        with anyio.CancelScope() as scope:
            if self._is_stuck:
                scope.cancel()
            self._waiting.add(scope)
            try:
                return await self._places.acquire_on_behalf_of(place)
            finally:
                self._waiting.discard(scope)
        message = (
            f"all {self._places.total_tokens:g} threads wait for back ends of fsspec that don't answer, each since more"
            f" than {self._limit_seconds:g} s: are their servers up?"
        )
        raise AttemptFailed(FetchTimeout, message)

    @property
    def _is_stuck(self) -> bool:
        return len(self._overdue) >= self._places.total_tokens

    def _is_late(self, place: object) -> None:
        self._overdue.add(place)
        if self._is_stuck:
            for scope in self._waiting:
                scope.cancel()

    def _leave(self, place: object, timer: asyncio.TimerHandle) -> None:
        timer.cancel()
        self._overdue.discard(place)
        self._places.release_on_behalf_of(place)


def _in_thread(function: Callable[[], T], when_ended: Callable[[object], None]) -> asyncio.Future[T]:
    """What ``function()`` returns, from a thread of its own; ``when_ended`` is called at its end, there.

    Not from one of anyio's: the interpreter waits for those when it exits, and for one that hangs it would for ever.
    """
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # so that a caller who leaves doesn't cancel it
    outcome.add_done_callback(when_ended)
    thread = threading.Thread(target=_run, args=(outcome, function), name="asyncfetch back end", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        outcome.set_exception(
            AttemptFailed(FetchError, f"no thread can be started ({error}): raise the limit of these")
        )
    return asyncio.wrap_future(outcome)


def _run(outcome: Future[T], function: Callable[[], T]) -> None:
    """In the thread."""
    try:
        outcome.set_result(function())
    except BaseException as error:  # noqa: BLE001 - its caller's
        outcome.set_exception(error)
    finally:
        del outcome, function  # the error's traceback holds this frame, and the outcome the error


class _Reading:
    """One attempt at what a download still lacks. Its calls run in threads, one after the other.

    The last of them may outlive its caller, which then abandons it.
    """

    def __init__(self, download: Download, options: Mapping[str, Mapping[str, object]]) -> None:
        self._download = download
        self._known = download.known
        self._wanted = download.next_request()
        self._options = options
        self._lock = threading.Lock()
        self._abandoned = False
        self._view: Views = memoryview(b"")
        self._landed = 0

    @property
    def size_bytes(self) -> int:
        """What it is about."""
        return len(self._view)

    @property
    def left_bytes(self) -> int:
        """What is still to be taken."""
        return len(self._view) - self._landed

    def abandon(self) -> None:
        """After this, nothing is written any more: the buffer may be somebody else's."""
        with self._lock:  # held for a copy of READ_STEP_BYTES at most
            self._abandoned = True

    def open(self) -> None:
        """Learns size and version; from here on the memory for the bytes is there."""
        url = self._download.url
        self._files, self._path = file_system(url, self._options)
        self._info = look(self._files, self._path, url)
        check_version(self._known, self._info)
        self._start, stop = self._wanted.span_in(self._info.size)
        with self._lock:
            if not self._abandoned:
                self._view = self._download.accept(Delivery(self._info, self._start, stop))

    def take(self, count: int) -> None:
        """Asks for the next so many bytes, and lands them."""
        start = self._start + self._landed
        with foreign_errors(scheme_of(self._download.url)):
            piece = self._files.cat_file(self._path, start=start, end=start + count)
        if len(piece) != count:
            self.check()
            message = f"the back end returned {len(piece)} bytes for [{start}, {start + count})"
            raise AttemptFailed(InvalidResponse, message, Verdict.ONCE)
        with self._lock:
            if not self._abandoned:
                self._view[self._landed : self._landed + count] = piece
                self._landed += count
                self._download.landed_bytes += count

    def check(self) -> None:
        """Back ends don't tell of which version bytes are. If it is the one of before still, they are of it, too."""
        check_version(self._info, look(self._files, self._path, self._download.url))


def _origin_of(url: str) -> str:
    """What its gate and its statistics go by: the server, whoever logs in."""
    return redact_url(server_of(url))
