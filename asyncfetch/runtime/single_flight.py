"""Calls of several who ask for the same at a time, made once: by an owner, by one of them, or into a bounded LRU.

SingleFlight, SharedCall and SharedLRU are for tasks of one loop, SharedFuture is for threads.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import anyio

from asyncfetch.errors import AsyncFetchError, ClosedError
from asyncfetch.runtime.cancellation import was_cancelled
from asyncfetch.runtime.concurrently import copied, kept

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable
    from types import TracebackType

    from anyio.abc import TaskGroup

K = TypeVar("K", bound="Hashable")
V = TypeVar("V")

_NOTHING: Any = object()


class _Flight(Generic[V]):
    """One execution and those who wait for it."""

    def __init__(self) -> None:
        self.waiters = 1
        self.scope = anyio.CancelScope()
        self.landed = anyio.Event()
        self.value: V = _NOTHING
        self.error: Exception | None = None
        self.traceback: TracebackType | None = None

    def outcome(self) -> V:
        """The value, or an error of one's own with the frames of the work, which those who wait share."""
        if self.error is not None:
            raise copied(self.error).with_traceback(self.traceback)
        if self.value is _NOTHING:
            raise ClosedError("what would have answered this call was closed before the answer came")
        return self.value


class SingleFlight(Generic[K, V]):
    """Concurrent callers of one key share one execution.

    The execution is a child of the owner's task group, not of any caller: a caller that is cancelled, the first one
    included, costs the others nothing, and a flight never outlives its owner. An error never reaches the task group.

    Not thread-safe: all calls come from the task group's loop.

    Args:
        task_group: The owner of all flights, entered.
    """

    def __init__(self, task_group: TaskGroup) -> None:
        self._task_group = task_group
        self._flights: dict[K, _Flight[V]] = {}

    def __contains__(self, key: K) -> bool:
        """Return whether a call for this key would join a flight."""
        return key in self._flights

    def __len__(self) -> int:
        """Flights that a call could join."""
        return len(self._flights)

    async def run(self, key: K, work: Callable[[], Awaitable[V]]) -> V:
        """The value of ``work()``, or of the flight for ``key`` that is already under way.

        An error of the work is raised in every caller of that flight, and the next call tries again. When the last
        caller is cancelled, the work is cancelled and awaited; a call that comes meanwhile starts a new flight.

        Raises:
            ClosedError: The owner's task group ended, or was cancelled, before the answer came.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = self._launch(key, work)
        else:
            flight.waiters += 1
        try:
            await flight.landed.wait()
        except BaseException:
            flight.waiters -= 1
            if not flight.waiters:
                await self._abandon(key, flight)
            raise
        try:
            return flight.outcome()
        finally:
            del flight  # else error -> traceback -> this frame -> flight -> error is a cycle that holds buffers

    def _launch(self, key: K, work: Callable[[], Awaitable[V]]) -> _Flight[V]:
        flight = self._flights[key] = _Flight()
        try:
            self._task_group.start_soon(self._fly, key, flight, work)
        except RuntimeError as error:
            self._forget(key, flight)
            raise ClosedError("what should answer this call is closed") from error
        return flight

    async def _fly(self, key: K, flight: _Flight[V], work: Callable[[], Awaitable[V]]) -> None:
        try:
            with flight.scope:
                flight.value = await work()
        except asyncio.CancelledError:
            # From a future that the work awaited and somebody cancelled; let out, it would cancel the whole task group.
            if was_cancelled():
                raise
        except Exception as error:  # noqa: BLE001 - it goes to the waiters, whatever it is
            flight.error = error
            flight.traceback = error.__traceback__
        finally:
            self._forget(key, flight)
            flight.landed.set()
            del flight  # as above

    async def _abandon(self, key: K, flight: _Flight[V]) -> None:
        """Cancel a flight that nobody waits for any more, and see it off."""
        self._forget(key, flight)
        flight.scope.cancel()
        with anyio.CancelScope(shield=True):
            await flight.landed.wait()

    def _forget(self, key: K, flight: _Flight[V]) -> None:
        # By identity: an abandoned flight must not take away the newer one of the same key.
        if self._flights.get(key) is flight:
            del self._flights[key]


T = TypeVar("T")


class SharedCall(Generic[T]):
    """A call whose outcome several tasks want, made in the task of one of them.

    Who asks first makes it. When that task is cancelled, so is the call, and the next of those who wait makes it anew.
    So it never outlives those who want it, and none of them has to live as long as the others; SingleFlight, which
    carries on with the same call, needs a task group that does.

    Not thread-safe: all who ask run on one loop.

    Args:
        work: The call.
    """

    __slots__ = ("_outcome", "_runner_left", "_work")

    def __init__(self, work: Callable[[], Awaitable[T]]) -> None:
        self._work = work
        self._runner_left: anyio.Event | None = None
        self._outcome: list[T | Exception] = []

    async def outcome(self) -> T | Exception:
        """Return what the call did, or the error that it raised, without a traceback: not raised, as it is shared."""
        while not self._outcome:
            if self._runner_left is None:
                await self._run()
            else:
                await self._runner_left.wait()
        return self._outcome[0]

    async def _run(self) -> None:
        left = self._runner_left = anyio.Event()
        try:
            self._outcome.append(await self._work())
        except Exception as error:  # noqa: BLE001 - whatever it is, all who ask get it
            # Its traceback ends in this frame, which refers to the outcome: a cycle that would hold buffers.
            self._outcome.append(error.with_traceback(None))
        finally:
            self._runner_left = None
            left.set()


class SharedFuture(Future[T]):
    """A future that several threads wait for. Each gets an error of its own."""

    def fail(self, error: BaseException) -> None:
        """End it by an error, of which a copy is kept that no frame hangs on."""
        self.set_exception(kept(error))

    def result(self, timeout: float | None = None) -> T:
        """Wait for what it brings and return that, or raise its error."""
        error = self.exception(timeout)
        if error is not None:
            raise copied(error)
        return super().result()


class Weighed(Protocol):
    """Knows its own weight."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it holds."""
        ...


W = TypeVar("W", bound=Weighed)


class _Load(Generic[W]):
    """A load under way.

    No SharedCall: who loads gets the error as it was raised, and one that isn't ours is told to nobody else.
    """

    __slots__ = ("error", "landed", "value")

    def __init__(self) -> None:
        self.landed = anyio.Event()
        self.value: W | None = None
        self.error: AsyncFetchError | None = None


class SharedLRU(Generic[K, W]):
    """Values by key, the least recently used dropped first, each loaded once however many ask at the same time.

    The first who asks loads in its own task, so this needs no owner and leaves nothing going. An error of ours reaches
    all who wait, each its own copy, and the next call tries again. Where the loading task is cancelled, one of those
    who wait starts over. A value heavier than the whole bound is handed out and not kept. For one loop; not
    thread-safe.

    A LeasedLRU counts what callers hold and what is on its way, too. What is only to be bounded in number, and not
    loaded, is an OrderedDict where it is used: it takes two lines.

    Args:
        max_bytes: Bound on the weight of what is kept. What callers hold or load isn't counted.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._kept: OrderedDict[K, W] = OrderedDict()
        self._loads: dict[K, _Load[W]] = {}

    def __repr__(self) -> str:
        loading = f", {len(self._loads)} loading" if self._loads else ""
        return f"<SharedLRU {len(self._kept)} kept, {self.nbytes} of {self.max_bytes} bytes{loading}>"

    def __len__(self) -> int:
        """Values kept."""
        return len(self._kept)

    def get_nowait(self, key: K) -> W | None:
        """The value of the key, if it is kept."""
        value = self._kept.get(key)
        if value is not None:
            self._kept.move_to_end(key)
        return value

    async def get(self, key: K, load: Callable[[], Awaitable[W]]) -> W:
        """The value of the key: kept, being loaded, or loaded now."""
        while True:
            value = self.get_nowait(key)
            if value is not None:
                return value
            load_ = self._loads.get(key)
            if load_ is None:
                return await self._load(key, load)
            await load_.landed.wait()
            if load_.error is not None:
                raise copied(load_.error)
            if load_.value is not None:
                return load_.value

    def clear(self, of: Callable[[K], bool] = lambda _: True) -> None:
        """Forget all values of such keys; those being loaded go to who waits for them, but aren't kept."""
        for key in [key for key in self._kept if of(key)]:
            self.nbytes -= self._kept.pop(key).nbytes
        for key in [key for key in self._loads if of(key)]:
            del self._loads[key]

    def kept(self, of: Callable[[K], bool]) -> list[W]:
        """The values of such keys."""
        return [value for key, value in self._kept.items() if of(key)]

    async def _load(self, key: K, load: Callable[[], Awaitable[W]]) -> W:
        load_ = self._loads[key] = _Load()
        try:
            value = load_.value = await load()
            if self._loads.get(key) is load_:
                self._keep(key, value)
        except AsyncFetchError as error:
            load_.error = kept(error)
            raise
        finally:
            if self._loads.get(key) is load_:  # not the one that came after a clear()
                del self._loads[key]
            load_.landed.set()
        return value

    def _keep(self, key: K, value: W) -> None:
        if value.nbytes > self.max_bytes:
            return
        self._kept[key] = value
        self.nbytes += value.nbytes
        while self.nbytes > self.max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self.nbytes -= dropped.nbytes


class LRUPart(Generic[K, W]):
    """One user's part of a SharedLRU that several have: its keys are its own, the bound is that of all together.

    Args:
        lru: Shared by all.
        number: The user's.
    """

    def __init__(self, lru: SharedLRU[tuple[int, K], W], number: int) -> None:
        self._lru = lru
        self._number = number

    def __repr__(self) -> str:
        return f"<part {self._number} of {self._lru!r}>"

    def __len__(self) -> int:
        """Values kept."""
        return len(self._lru.kept(self._is_own))

    @property
    def nbytes(self) -> int:
        """Bytes that the values take."""
        return sum(value.nbytes for value in self._lru.kept(self._is_own))

    def get_nowait(self, key: K) -> W | None:
        """See SharedLRU, as for the others."""
        return self._lru.get_nowait((self._number, key))

    async def get(self, key: K, load: Callable[[], Awaitable[W]]) -> W:
        """The value of the key: kept, being loaded, or loaded now."""
        return await self._lru.get((self._number, key), load)

    def clear(self, of: Callable[[K], bool] = lambda _: True) -> None:
        """Forget this part's values of such keys."""
        self._lru.clear(lambda key: self._is_own(key) and of(key[1]))

    def _is_own(self, key: tuple[int, K]) -> bool:
        return key[0] == self._number
