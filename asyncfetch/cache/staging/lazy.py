"""Handles: a file that is requested now and consumed later."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from numbers import Real
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import anyio

from asyncfetch.cache.staging.stores import StoredFile, ValueStore, add_source_info
from asyncfetch.errors import CacheError, ConfigError, FetchTimeout
from asyncfetch.runtime.fork import running_loop
from asyncfetch.runtime.single_flight import SharedFuture
from asyncfetch.runtime.threads import call_on, run_sync

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import Self

    from asyncfetch.cache.staging.engine import StagingClaim, StagingEngine
    from asyncfetch.cache.staging.stores import Binding, FileStore, SourceInfo

T = TypeVar("T")

MAX_SECONDS: Final = 10**9
"""Longest wait that can be set, 32 years: the system's own limit is finite, too."""


class Lazy(Generic[T]):
    """A value that is picked up once and then held. Made by a pool.

    Handles of one name and one store object are equal; one from ``to_cache`` equals only itself. A copy of a handle is
    the handle. It can't be pickled, because its entry belongs to this process.

    Thread-safe; threads that get the same handle at the same time may decode it twice, but read it once. Without
    staging, in a NoCachePool or after the pool's close, they may read it twice, too; all get the first value.

    Attributes:
        pool: The pool that made it.
        store: The file's store; None for one from ``to_cache``.
        name: The file's name in the store, or the name given to ``to_cache``.
    """

    __slots__ = ("__weakref__", "_picked", "_read", "name", "pool", "store")

    def __init__(
        self, pool: object, store: FileStore[T] | None, name: str, read: Callable[[], tuple[T, SourceInfo | None]]
    ) -> None:
        self.pool = pool
        self.store = store
        self.name = name
        self._read = read
        self._picked: tuple[T, SourceInfo | None] | None = None

    def get(self, sample: object = None, *, timeout_seconds: float | None = None) -> T:
        """The value; from a thread, not on an event loop. Every call returns the same object.

        Args:
            sample: The source is added to its sources, at every call.
            timeout_seconds: Longest wait for a read; None means the pool's.

        Raises:
            ConfigError: ``timeout_seconds`` isn't a finite number.
            FetchTimeout: The read took longer; another call waits again for the same one.
            CacheError: A value given to ``to_cache`` is gone.
            Exception: An error of the store's read or of decoding. Every handle that shared a read gets its error,
                once: another call reads again.
        """
        deadline = self._deadline(timeout_seconds)
        future: SharedFuture[StoredFile] | None = None
        while (future := self._advance(future)) is not None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not concurrent.futures.wait([future], left).done:
                raise self._timed_out()
        return self._picked_up(sample)

    async def aget(self, sample: object = None, *, timeout_seconds: float | None = None) -> T:
        """``get`` for coroutines of any loop, which is not blocked. Cancelled, it leaves the handle as it was."""
        running_loop("awaiting a handle")  # even without a need to wait
        deadline = self._deadline(timeout_seconds)
        future: SharedFuture[StoredFile] | None = None
        while self._picked is None and (future := await run_sync(self._advance, future)) is not None:
            with anyio.move_on_after(None if deadline is None else deadline - time.monotonic()):
                await _ended(future)
            if not future.done():
                raise self._timed_out()
        return self._picked_up(sample)

    def __await__(self) -> Generator[Any, None, T]:
        return self.aget().__await__()

    def _advance(self, awaited: SharedFuture[StoredFile] | None = None) -> SharedFuture[StoredFile] | None:
        """A future to wait for and to pass to the next call; None once the value is there. Does I/O, so in a thread."""
        if self._picked is None:
            self._keep(*self._read())
        return None

    def _deadline(self, timeout_seconds: float | None) -> float | None:
        require_seconds("timeout_seconds", timeout_seconds)
        return None if timeout_seconds is None else time.monotonic() + timeout_seconds

    def _timed_out(self) -> FetchTimeout:
        return FetchTimeout(
            f"{self.name!r} wasn't read in time: its store hangs, or is slower than timeout_seconds",
            url=getattr(self.store, "path", None),
        )

    def _keep(self, value: T, source: SourceInfo | None) -> None:
        if self._picked is None:  # of two threads, the first one's counts
            self._picked = value, source

    def _picked_up(self, sample: object) -> T:
        assert self._picked is not None
        value, source = self._picked
        if sample is not None and source is not None:
            add_source_info(sample, source)
        return value

    def _identity(self) -> tuple[int, str]:
        return id(self if self.store is None else self.store), self.name

    def __hash__(self) -> int:
        return hash(self._identity())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lazy) and self._identity() == other._identity()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> Any:  # noqa: ANN401
        raise CacheError(f"{self!r} belongs to its process and can't be pickled: send what its get() returns")

    def __repr__(self) -> str:
        where = "" if self.store is None else f" of {self.store.path}"
        return f"<Lazy {self.name!r}{where}{'' if self._picked is None else ', picked up'}>"


class StagedLazy(Lazy[T]):
    """A reference to an entry of a pool's engine, given back when the value is picked up or the handle collected.

    ``engine_here`` returns the engine in the calling process.
    """

    __slots__ = ("_binding", "_claim", "_engine", "_engine_here", "_timeout_seconds")

    def __init__(
        self,
        pool: object,
        binding: Binding,
        claim: StagingClaim,
        engine_here: Callable[[], StagingEngine],
        timeout_seconds: float | None,
    ) -> None:
        store = None if isinstance(binding.store, ValueStore) else binding.store
        super().__init__(pool, store, binding.name, binding.read_value)
        self._binding = binding
        self._engine_here = engine_here
        self._engine = engine_here()
        self._claim: StagingClaim | None = claim
        self._timeout_seconds = timeout_seconds

    def __del__(self) -> None:
        # It may run anywhere, even while this thread holds the engine's lock.
        claim: StagingClaim | None = getattr(self, "_claim", None)
        if claim is not None and claim.is_counted and not self._engine.is_closed:
            self._engine.dropped.put(claim)

    def _deadline(self, timeout_seconds: float | None) -> float | None:
        return super()._deadline(self._timeout_seconds if timeout_seconds is None else timeout_seconds)

    def _advance(self, awaited: SharedFuture[StoredFile] | None = None) -> SharedFuture[StoredFile] | None:
        engine, claim = self._here()
        found = awaited or (None if claim is None else engine.join(claim))
        while self._picked is None:  # a thread that gets the same handle may be quicker
            if found is None or claim is None:
                super()._advance()  # the pool was closed
            elif not isinstance(found, SharedFuture):
                if (stored := found.read()) is not None:
                    self._keep(self._binding.value(stored), stored.source)
                elif self._picked is None:
                    found = engine.distrust(claim, found)
            elif not found.done():
                return found
            else:
                try:
                    stored = found.result()
                except BaseException:
                    engine.ask_anew(claim, found)
                    raise
                self._keep(self._binding.value(stored), stored.source)
        claim, self._claim = self._claim, None
        if claim is not None:
            engine.release(claim)
        return None

    def _here(self) -> tuple[StagingEngine, StagingClaim | None]:
        """The engine and the claim to use; in a forked child, new ones."""
        engine = self._engine_here()
        if engine is not self._engine:
            claim = None if engine.is_closed else engine.request(self._binding)
            if engine is not self._engine:
                self._engine, self._claim = engine, claim
            elif claim is not None:  # another thread was quicker
                engine.release(claim)
        return engine, self._claim


def require_seconds(name: str, seconds: Any) -> None:  # noqa: ANN401 - what a user gave
    """ConfigError unless it is None, or a number that threads can wait for; a negative one ends at once."""
    is_number = isinstance(seconds, Real) and not isinstance(seconds, bool)
    if seconds is not None and not (is_number and abs(seconds) <= MAX_SECONDS):
        raise ConfigError(f"{name} must be a number of seconds, at most {MAX_SECONDS}, or None, not {seconds!r}")


async def _ended(future: SharedFuture[StoredFile]) -> None:
    """Wait for a future of threads. Cancelled, it leaves the future alone."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    future.add_done_callback(lambda _: call_on(loop, ended.set))
    await ended.wait()
