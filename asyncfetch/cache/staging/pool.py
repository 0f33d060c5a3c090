"""The pools: files are requested early, read in the background, kept on disk, and deleted once consumed."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, get_args

from asyncfetch.cache.staging.directory import StagingDirectory
from asyncfetch.cache.staging.engine import StagingEngine, StagingRoom
from asyncfetch.cache.staging.lazy import Lazy, StagedLazy, require_seconds
from asyncfetch.cache.staging.stores import Binding, Method, ValueStore, add_source_info
from asyncfetch.config.checks import absolute_directory, whole_number
from asyncfetch.errors import CacheError, ConfigError
from asyncfetch.observe import Figures

if TYPE_CHECKING:
    from typing import Self

    from asyncfetch.cache.staging.stores import FileStore, SourceInfo

T = TypeVar("T")

TIB = 1024**4

CLOSE_SECONDS = 10.0
"""Longest wait for reads under way at the end: a file of 64 MiB at 8 MiB/s gets through."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StagingStatistics(Figures):
    """A snapshot, of this process."""

    _telling = ("count", "bytes", "queued", "waiting", "reads", "write_failures", "damaged")
    _of_moment = ("bytes", "count", "max_bytes", "max_count", "entries", "queued", "waiting")

    bytes: int = 0
    """Room taken on disk, by staged files and those on their way."""
    count: int = 0
    """Number of these files."""
    max_bytes: int | None = None
    max_count: int | None = None
    entries: int = 0
    """Files with at least one handle, wherever they are."""
    queued: int = 0
    """Files whose read hasn't begun."""
    waiting: int = 0
    """Files that wait for room."""
    reads: int = 0
    """Reads of stores."""
    direct_reads: int = 0
    """Reads without room on disk, because a handle waited for them."""
    write_failures: int = 0
    """Files that couldn't be written, and were served from memory or read again."""
    damaged: int = 0
    """Staged files that were missing or damaged, and were read again."""


class _Pool(ABC):
    """The common part of pools with and without a cache. A ``with`` closes it."""

    def get(self, store: FileStore[T], name: str, sample: object = None) -> T:
        """The file's value, read now, past the cache; its source is added to ``sample``.

        Raises:
            CacheError: The pool is closed.
            Exception: The store's.
        """
        value, source = self._read(store, name)
        if sample is not None:
            add_source_info(sample, source)
        return value

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _read(self, store: FileStore[T], name: str) -> tuple[T, SourceInfo]: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class CachePool(_Pool):
    """Stages files on a local disk, from the moment that they are chosen until they are needed.

    A shuffle buffer or a packer holds handles (``get_lazy``) rather than data. The pool reads their files in the
    background, in the order of the requests, and keeps them on disk. A handle's value is picked up once, by ``get`` or
    ``await``; with the last handle of a file, picked up or dropped, the file goes. So it doesn't keep files for reuse,
    only until they are consumed.

    A file is read once for all handles that it has at a time. A pick-up never waits for room, nor for the queue: a
    queued file is read at once, and a read under way is joined. Room is reserved before a read, as much as the store
    says, or as files usually take. Files larger than ``max_bytes`` are read when they are picked up. If there is no
    room for a file that was read for a pick-up, its other handles queue again, at the tail, and it is read once more
    for them, unless they ask while a handle still decodes its bytes. A failed read raises its error in every handle
    that the file has by then; a new handle reads again. When the disk can't be written, data is served all the same,
    with one warning.

    Every process has its own files, threads, figures and bounds: 8 loader workers take up to 8 times ``max_bytes``.
    After a fork the child starts afresh, and its copies of handles read by themselves; nothing of the parent is
    touched. A pickled pool becomes a new one with the same settings.

    The directory is made at the first file, in ``parent_dir``, and removed by ``close``, when the pool is collected,
    and at the interpreter's exit; the next pool in the same place removes those of killed processes.

    Thread-safe; ``get_lazy`` and ``statistics`` may be called on event loops, too.

    Args:
        parent_dir: Where the directory is made, on a local disk; None means the system's for temporary files.
        workers: Threads that stage. Waiting pick-ups have up to 64 more.
        max_bytes: Bound on the bytes of staged files, together with those on their way.
        max_count: Bound on their number.
        method: The staged form. "raw": a file's bytes, decoded when they are picked up; shared by all stores of the
            same path, login and configuration, however they decode. "pickle": the decoded value; shared by handles of
            the same store object.
        timeout_seconds: Longest that a pick-up waits for a read, for stores that hang; None, not infinity, for no
            limit. Five times the limit for retries of our own requests.

    Raises:
        ConfigError: An invalid argument.
    """

    def __init__(
        self,
        parent_dir: str | os.PathLike[str] | None = None,
        workers: int = 8,
        max_bytes: int = TIB,
        max_count: int = 10_000_000,
        method: Method = "raw",
        *,
        timeout_seconds: float | None = 600.0,
    ) -> None:
        workers = whole_number("workers of a cache pool", workers, least=1)
        max_bytes = whole_number("max_bytes of a cache pool", max_bytes, least=1)
        max_count = whole_number("max_count of a cache pool", max_count, least=1)
        if method not in get_args(Method):
            raise ConfigError(f"method of a cache pool must be 'raw' or 'pickle', not {method!r}")
        require_seconds("timeout_seconds", timeout_seconds)
        if timeout_seconds is not None and timeout_seconds <= 0:
            raise ConfigError(f"timeout_seconds must be positive, or None for no limit, not {timeout_seconds}")
        self._parent_dir = parent_dir
        self._parent = None if parent_dir is None else str(absolute_directory(parent_dir))
        self._workers = workers
        self._max_bytes = max_bytes
        self._max_count = max_count
        self._method: Method = method
        self._timeout_seconds = timeout_seconds
        self._closed = False
        # By process, so that a child uses nothing of its parent's, such as a lock held at the fork; adding to a
        # dictionary is atomic.
        self._engines: dict[int, StagingEngine] = {}

    def get_lazy(self, store: FileStore[T], name: str) -> Lazy[T]:
        """A handle for the file's value, which is staged in the background. Returns at once.

        Raises:
            CacheError: The pool is closed.
        """
        self._check_open()
        binding = Binding(store, name, self._method)
        return StagedLazy(self, binding, self._engine().request(binding), self._engine, self._timeout_seconds)

    def to_cache(self, value: T, name: str) -> Lazy[T]:
        """A handle for a value, which is pickled and written now: from a thread, not on an event loop.

        It counts like any staged file. Without room, its pickle stays in memory.

        Raises:
            CacheError: The pool is closed, or the value can't be pickled.
        """
        self._check_open()
        store = ValueStore(value, name)
        binding = Binding(store, name, "raw")
        return StagedLazy(self, binding, self._engine().adopt(binding, store), self._engine, self._timeout_seconds)

    def close(self, *, wait_seconds: float | None = CLOSE_SECONDS) -> None:
        """End the pool; idempotent.

        Queued reads are cancelled and staged files removed, with the directory. Reads under way serve the handles that
        joined them. A handle that isn't picked up yet will read its store itself; one from ``to_cache`` will raise
        CacheError. New handles are refused.

        Args:
            wait_seconds: Longest wait for reads under way to end; None for no limit. A longer one goes on in its
                thread, with a warning, and leaves nothing on disk.

        Raises:
            ConfigError: ``wait_seconds`` isn't a finite number; the pool stays open.
        """
        require_seconds("wait_seconds", wait_seconds)
        self._closed = True
        engine = self._engines.get(os.getpid())
        if engine is not None:
            engine.close(wait_seconds)

    def statistics(self) -> StagingStatistics:
        """A snapshot. Handles dropped before the call don't count; on an event loop, they may for a moment."""
        engine = self._engines.get(os.getpid())
        figures = {} if engine is None else engine.figures()
        return StagingStatistics(max_bytes=self._max_bytes, max_count=self._max_count, **figures)

    @property
    def path(self) -> str | None:
        """This process's directory; None before the first file and after the end."""
        engine = self._engines.get(os.getpid())
        return None if engine is None else engine.directory.path

    def _engine(self) -> StagingEngine:
        process = os.getpid()
        engine = self._engines.get(process)
        if engine is None:
            room = StagingRoom(self._max_bytes, self._max_count)
            fresh = StagingEngine(StagingDirectory(self._parent), room, self._workers, is_closed=self._closed)
            engine = self._engines.setdefault(process, fresh)
            if engine is fresh:
                weakref.finalize(self, engine.dropped.put, None).atexit = False
        return engine

    def _read(self, store: FileStore[T], name: str) -> tuple[T, SourceInfo]:
        self._check_open()
        self._engine().count_direct_read()
        return store[name]

    def _check_open(self) -> None:
        if self._closed:
            raise CacheError("this cache pool is closed: make a new one, or pick up what it has before the end")

    def __reduce__(self) -> tuple[Any, ...]:
        settings = self._parent_dir, self._workers, self._max_bytes, self._max_count, self._method
        return partial(type(self), timeout_seconds=self._timeout_seconds), settings

    def __repr__(self) -> str:
        now = self.statistics()
        closed = " closed" if self._closed else ""
        return (
            f"<CachePool{closed} {now.bytes}/{now.max_bytes} bytes, {now.count}/{now.max_count} files, "
            f"{now.queued} queued, {now.waiting} waiting, {now.reads} reads, {now.direct_reads} direct>"
        )


class NoCachePool(_Pool):
    """A pool that never queues: a handle reads its store when it is picked up."""

    def __init__(self) -> None:
        self._reads = 0

    def get_lazy(self, store: FileStore[T], name: str) -> Lazy[T]:
        """A handle that reads the file when it is picked up."""
        return Lazy(self, store, name, partial(self._read, store, name))

    def to_cache(self, value: T, name: str) -> Lazy[T]:
        """A handle that holds the value itself."""
        return Lazy(self, None, name, lambda: (value, None))

    def close(self, *, wait_seconds: float | None = CLOSE_SECONDS) -> None:
        """Does nothing; handles can still be picked up."""

    @property
    def path(self) -> None:
        """None: it has no files."""

    def statistics(self) -> StagingStatistics:
        """A snapshot, with direct reads only."""
        return StagingStatistics(reads=self._reads, direct_reads=self._reads)

    def _read(self, store: FileStore[T], name: str) -> tuple[T, SourceInfo]:
        self._reads += 1
        return store[name]

    def __repr__(self) -> str:
        return f"<NoCachePool {self._reads} reads>"


StagingPool: TypeAlias = CachePool | NoCachePool
"""A pool of either kind: they have one interface."""
