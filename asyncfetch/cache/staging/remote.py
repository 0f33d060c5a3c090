"""Files behind urls, for threads: a fetcher on a loop of its own."""

from __future__ import annotations

import os
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncfetch.cache.staging.stores import SourceInfo, SplitStore, check_name
from asyncfetch.config import FetchConfig, PrivateUrl
from asyncfetch.errors import ClosedError, ObjectChanged, redact_url
from asyncfetch.fetch import Fetcher
from asyncfetch.fetch.objects import difference, strong_etag
from asyncfetch.fetch.urls import join_url
from asyncfetch.runtime.failures import copied, kept
from asyncfetch.runtime.loop_thread import BackgroundContext, LoopThread
from asyncfetch.runtime.memory_pool import allocate

if TYPE_CHECKING:
    from collections.abc import Hashable
    from typing import Self

    from asyncfetch.ranges import ObjectInfo

__all__ = ["ThreadFetcher", "UrlStore"]


class ThreadFetcher:
    """A Fetcher for threads. It starts at its first use, in each process anew, and pickles as its configuration.

    ``close``, collection and interpreter exit end it. Thread-safe; not for coroutines, whose loop it would block.
    """

    def __init__(self, config: FetchConfig | None = None) -> None:
        self.config = config or FetchConfig()
        self._closed = False
        # By process: what a child finds of its parent's is a loop without its thread. Adding is atomic.
        self._sessions: dict[int, Future[_RemoteSession]] = {}

    def fetch(self, url: str, start: int = 0, stop: int | None = None) -> memoryview:
        """Do as RangeReader.fetch."""
        session = self._session()
        return session.thread.run(session.fetcher.fetch, url, start, stop)

    def fetch_version(self, version: ObjectInfo, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of this version of an object, read-only; of another one they are ObjectChanged.

        Without a strong ETag it is told by what there is: a weak one or the date, and the size.
        """
        session = self._session()
        return session.thread.run(_fetch_version, session.fetcher, version, start, stop)

    def stat(self, url: str) -> ObjectInfo:
        """Do as RangeReader.stat."""
        session = self._session()
        return session.thread.run(session.fetcher.stat, url)

    def close(self) -> None:
        """End the loop; calls under way raise ClosedError. Idempotent."""
        self._closed = True
        session = self._sessions.pop(os.getpid(), None)
        if session is not None:
            session.result().thread.close()

    def _session(self) -> _RemoteSession:
        if self._closed:
            raise ClosedError("this store is closed: make a new one")
        process = os.getpid()
        mine: Future[_RemoteSession] = Future()
        session = self._sessions.setdefault(process, mine)
        if session is mine:  # the first of the threads starts it
            self._start(process, mine)
        error = session.exception()
        if error is not None:
            raise copied(error)
        return session.result()

    def _start(self, process: int, session: Future[_RemoteSession]) -> None:
        try:
            session.set_result(_RemoteSession(self.config))
        except BaseException as error:  # noqa: BLE001 - it is raised to everybody who waits for it, the caller too
            self._sessions.pop(process, None)
            session.set_exception(kept(error))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.config,)


class _RemoteSession:
    """A loop and an entered fetcher on it. The fetcher is left in order when the loop ends, whatever ends it."""

    def __init__(self, config: FetchConfig) -> None:
        self.thread = LoopThread(name="asyncfetch files")
        try:
            self.fetcher = BackgroundContext(
                self.thread, partial(Fetcher, config), name="the fetcher of these files"
            ).value()
        except BaseException:
            self.thread.close()
            raise


async def _fetch_version(fetcher: Fetcher, version: ObjectInfo, start: int, stop: int) -> memoryview:
    view = allocate(stop - start)
    if view:
        pinned = None if strong_etag(version) is None else version
        seen = await fetcher.read_into(version.url, start, stop, view, version=pinned)
        changed = difference(version, seen)
        if changed is not None:
            message = f"the object was replaced since it was first read, {changed}: read it again from its start"
            raise ObjectChanged(message, url=version.url, start=start, stop=stop)
    return view.toreadonly()


class UrlStore(SplitStore[bytes]):
    """Objects below a url, whole: any url that a Fetcher reads.

    Args:
        root: What names are below; they can't leave it.
        config: How objects are asked for.
        sizes: Lengths in bytes by name, where they are known, from a listing or an index: a pool then sets aside just
            what a read takes. The store doesn't ask for them: that would cost a request a file.

    Raises:
        FetchError, ConfigError: As the verbs of RangeReader do.
    """

    def __init__(self, root: str, config: FetchConfig | None = None, *, sizes: dict[str, int] | None = None) -> None:
        self._root = PrivateUrl(root)
        self._path = redact_url(root)
        self._fetcher = ThreadFetcher(config)
        self._sizes = sizes or {}

    @property
    def path(self) -> str:
        """The root, without its secrets."""
        return self._path

    @property
    def identity(self) -> Hashable:
        """The identity that FileStore asks for: the root with its secrets, and how it is asked."""
        return UrlStore, self._root, self._fetcher.config

    def read_raw(self, name: str) -> tuple[bytes, SourceInfo]:
        """The object's bytes."""
        check_name(name, self.path)
        body = self._fetcher.fetch(join_url(self._root, name))
        return bytes(body), SourceInfo(self.path, name, None, (name,))

    def decode(self, raw: bytes, name: str) -> bytes:
        """The bytes themselves."""
        return raw

    def size(self, name: str) -> int | None:
        """Return what ``sizes`` says."""
        return self._sizes.get(name)

    def close(self) -> None:
        """End its connections and its thread."""
        self._fetcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
