"""Files behind urls, and members of tar archives, for threads: a fetcher on a loop of its own."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from asyncfetch.cache.staging.stores import BytesStore, SourceInfo, check_name
from asyncfetch.config import FetchConfig, PrivateUrl
from asyncfetch.errors import ClosedError, ConfigError, FormatError, NotFound, ObjectChanged, redact_url
from asyncfetch.fetch import Fetcher
from asyncfetch.fetch.objects import difference, strong_etag
from asyncfetch.fetch.urls import hidden, join_url
from asyncfetch.media.tar import walk_tar
from asyncfetch.runtime.loop_thread import BackgroundContext, LoopThread
from asyncfetch.runtime.memory_pool import allocate
from asyncfetch.runtime.single_flight import call_once

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Iterable
    from typing import Self

    from asyncfetch.media.tar import TarredFile
    from asyncfetch.ranges import ObjectInfo
    from asyncfetch.runtime.single_flight import SharedFuture

T = TypeVar("T")


class _RemoteSession:
    """A loop and an entered fetcher on it. The end of the loop, however it comes, leaves the fetcher properly."""

    def __init__(self, config: FetchConfig) -> None:
        self.thread = LoopThread(name="asyncfetch files")
        try:
            self.fetcher = BackgroundContext(
                self.thread, partial(Fetcher, config), name="the fetcher of these files"
            ).value()
        except BaseException:
            self.thread.close()
            raise


class RemoteStore(BytesStore):
    """A store with a fetcher of its own, which starts at its first use, in each process anew; a ``with`` closes it.

    Collection and interpreter exit end it, too. For threads, not for coroutines, whose loop it would block.
    """

    def __init__(self, config: FetchConfig | None) -> None:
        self._config = config or FetchConfig()
        self._closed = False
        # By process: in a child, the parent's loop has no thread. Adding is atomic.
        self._sessions: dict[int, SharedFuture[_RemoteSession]] = {}

    def close(self) -> None:
        """End its connections and its thread; calls under way raise ClosedError. Idempotent."""
        self._closed = True
        session = self._sessions.pop(os.getpid(), None)
        if session is not None:
            session.result().thread.close()

    def _run(self, verb: Callable[..., Awaitable[T]], *arguments: object) -> T:
        if self._closed:
            raise ClosedError("this store is closed: make a new one")
        session = call_once(self._sessions, os.getpid(), partial(_RemoteSession, self._config), keeps=True)
        return session.thread.run(verb, session.fetcher, *arguments)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_closed": False, "_sessions": {}}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


async def fetch_version(fetcher: Fetcher, version: ObjectInfo, start: int, stop: int) -> memoryview:
    """Bytes [start, stop) of this version of an object, read-only; ObjectChanged if it has another one.

    Without a strong ETag, versions are compared by a weak one or the date, and the size.
    """
    view = allocate(stop - start)
    if view:
        pinned = None if strong_etag(version) is None else version
        seen = await fetcher.read_into(version.url, start, stop, view, version=pinned)
        changed = difference(version, seen)
        if changed is not None:
            message = f"the object was replaced since it was first read, {changed}: read it again from its start"
            raise ObjectChanged(message, url=version.url, start=start, stop=stop)
    return view.toreadonly()


class UrlStore(RemoteStore):
    """Objects below a url, whole: any url that a Fetcher reads.

    Args:
        root: The url that names are below; they can't leave it.
        config: The fetcher's.
        sizes: Lengths in bytes by name, if known from a listing or an index: a pool then reserves exactly the room for
            a read. The store doesn't request them, which would cost a request for each file.

    Raises:
        FetchError, ConfigError: As the verbs of RangeReader do.
    """

    def __init__(self, root: str, config: FetchConfig | None = None, *, sizes: dict[str, int] | None = None) -> None:
        super().__init__(config)
        self._root = PrivateUrl(root)
        self._path = redact_url(root)
        self._sizes = sizes or {}

    @property
    def path(self) -> str:
        """The root, without its secrets."""
        return self._path

    @property
    def identity(self) -> Hashable:
        """The root with its secrets, and the configuration."""
        return UrlStore, self._root, self._config

    def read_raw(self, name: str) -> tuple[bytes, SourceInfo]:
        """The object's bytes."""
        check_name(name, self.path)
        body = self._run(Fetcher.fetch, join_url(self._root, name))
        return bytes(body), SourceInfo(self.path, name, None, (name,))

    def size(self, name: str) -> int | None:
        """The length in ``sizes``."""
        return self._sizes.get(name)


MAX_LOOK_BYTES = 8 * 1024 * 1024
"""Most bytes read at a header after many small members: as part_bytes, the advice of S3's guide."""
ARCHIVES_AT_ONCE = 16
"""Number of archives whose headers are read side by side; each asks for one range at a time."""


class TarMember(NamedTuple):
    """The place of a file in an archive, of the version that was indexed."""

    archive: ObjectInfo
    start: int
    stop: int


class TarStore(RemoteStore):
    """The files in one or more uncompressed tar archives.

    The first use reads the archives' headers, 16 archives at a time, and keeps the index; a forked or pickled store
    takes it along. That takes a request for each large member, or for many small ones, one after the other within an
    archive. If an archive was replaced since, a read raises ObjectChanged, once, and the next use makes a new index.

    A member's name is its path in the archive; if several archives have it, "shard.tar/path". Within an archive the
    last member of one name counts, as in tar. Links and sparse members are left out.

    Args:
        urls: The archives: any urls that a Fetcher reads, plain paths too.
        config: The fetcher's.

    Raises:
        FormatError: An archive isn't one, is compressed or cut short; or a name is in several. At the first use.
        NotFound: No archive has the name.
        FetchError: As RangeReader's verbs.
    """

    def __init__(self, urls: str | Path | Iterable[str | Path], config: FetchConfig | None = None) -> None:
        self._urls: list[str] = [PrivateUrl(url) for url in ([urls] if isinstance(urls, str | Path) else urls)]
        shards = [_shard_name(url) for url in self._urls]
        if not shards:
            raise ConfigError("a TarStore needs at least one archive")
        if len(set(shards)) < len(shards):
            twice = next(shard for shard in shards if shards.count(shard) > 1)
            raise ConfigError(f"two archives are called {twice!r}: give each a store of its own")
        super().__init__(config)
        self._path = _path(self._urls)
        self._index: _Index | None = None
        # By process: a child's threads can't wait for the parent's. Unlike a session, an index goes along to a child
        # and may be made again, so these end with their search.
        self._searches: dict[int, SharedFuture[_Index]] = {}

    @property
    def path(self) -> str:
        """The archive's url without secrets; for several, the first and a digest of all."""
        return self._path

    @property
    def identity(self) -> Hashable:
        """The urls with their secrets, and the configuration."""
        return TarStore, tuple(self._urls), self._config

    def names(self) -> list[str]:
        """Every file's name, in the archives' order; the long one if it is in several archives."""
        return self._indexed().names()

    def read_raw(self, name: str) -> tuple[bytes, SourceInfo]:
        """The member's bytes."""
        index = self._indexed()
        member = index.find(name, self.path)
        try:
            body = self._run(fetch_version, *member)
        except ObjectChanged:
            if self._index is index:  # another thread may have made a new one
                self._index = None
            raise
        return bytes(body), SourceInfo(self.path, name, _shard_name(member.archive.url), (name,))

    def size(self, name: str) -> int | None:
        """The member's length."""
        member = self._indexed().find(name, self.path)
        return member.stop - member.start

    def _indexed(self) -> _Index:
        return self._index or call_once(self._searches, os.getpid(), self._search, keeps=False)

    def _search(self) -> _Index:
        with ThreadPoolExecutor(
            min(ARCHIVES_AT_ONCE, len(self._urls)), thread_name_prefix="asyncfetch tar index"
        ) as threads:
            found = list(threads.map(partial(_members, self._run), self._urls))
        index = _Index({_shard_name(url): members for url, members in zip(self._urls, found, strict=True)})
        self._index = index
        return index

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_searches": {}}


class _Index:
    """All members, by archive and by path."""

    def __init__(self, shards: dict[str, dict[str, TarMember]]) -> None:
        self._shards = shards
        self._by_path: dict[str, TarMember | None] = {}
        """None for a path in several archives."""
        for members in shards.values():
            for path, member in members.items():
                self._by_path[path] = None if path in self._by_path else member

    def names(self) -> list[str]:
        return [
            f"{shard}/{path}" if self._by_path[path] is None else path
            for shard, members in self._shards.items()
            for path in members
        ]

    def find(self, name: str, store: str) -> TarMember:
        """The member with this name, of either form."""
        shard, _, path = name.partition("/")
        member = self._by_path.get(name) or self._shards.get(shard, {}).get(path)
        if member is not None:
            return member
        if name in self._by_path:
            having = [shard for shard, members in self._shards.items() if name in members]
            raise FormatError(f"{name!r} is in {len(having)} archives of {store}: ask for {having[0]}/{name}, ...")
        raise NotFound(f"no archive has a file {name!r}, of {len(self._by_path)} names", url=store)


def _members(run: Callable[..., Any], url: str) -> dict[str, TarMember]:
    """The regular files of one archive, by path; ``run`` is its store's."""
    version = replace(run(Fetcher.stat, url), url=url)  # a PrivateUrl, for the index may be pickled
    walk = walk_tar(url=url, size=version.size, max_look_bytes=MAX_LOOK_BYTES)
    try:
        wanted = next(walk)
        while True:
            wanted = walk.send(run(fetch_version, version, *wanted))
    except StopIteration as end:
        files: list[TarredFile] = end.value
    return {
        file.name.removeprefix("./"): TarMember(version, file.offset, file.offset + file.size)
        for file in files
        if not file.is_sparse
    }


def _shard_name(url: str) -> str:
    try:
        path = url if "://" not in url else urlsplit(url).path
    except ValueError:  # its message may quote a password
        raise ConfigError(f"{hidden(url)} isn't a url: check its host") from None
    return path.rpartition("/")[2]


def _path(urls: list[str]) -> str:
    shown = [redact_url(url) for url in urls]
    if len(shown) == 1:
        return shown[0]
    digest = hashlib.blake2b("\n".join(shown).encode(), digest_size=8).hexdigest()
    return f"{shown[0]} and {len(shown) - 1} more archives, {digest}"
