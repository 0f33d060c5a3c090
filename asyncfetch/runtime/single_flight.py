"""One call for many callers, and cached values.

SingleFlight  calls owned by a task group; fetch's SharedCalls adds the callers' turns at limiters
SharedCall    a call in the task of one of its callers
SharedFuture  for threads
SharedLRU     values by key, bounded in bytes, each made by a SharedCall
AsyncCache    a SharedLRU of values that expire, bounded in number

All but SharedFuture and ``call_once`` are for tasks of one loop, and not thread-safe.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import anyio

from asyncfetch.errors import ClosedError
from asyncfetch.runtime.cancellation import was_cancelled
from asyncfetch.runtime.concurrently import copied, kept

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Mapping

    from anyio.abc import TaskGroup

K = TypeVar("K", bound="Hashable")
V = TypeVar("V")

_NOTHING: Any = object()


class _Flight(Generic[V]):
    """One execution and its waiters."""

    def __init__(self) -> None:
        self.waiters = 0
        self.has_begun = False
        self.scope = anyio.CancelScope()
        self.landed = anyio.Event()
        self.value: V = _NOTHING
        self.error: Exception | None = None

    def outcome(self) -> V:
        """The value, or a copy of the error for this caller, with the frames of the work."""
        if self.error is not None:
            raise copied(self.error).with_traceback(self.error.__traceback__)
        if self.value is _NOTHING:
            raise ClosedError("what would have answered this call was closed before the answer came")
        return self.value

    def kept_outcome(self) -> V | Exception:
        """The value or the error, without frames."""
        try:
            return self.outcome()
        except Exception as error:  # noqa: BLE001 - it is for the caller
            return kept(error)


class SingleFlight(Generic[K, V]):
    """Concurrent callers of one key share one execution.

    The execution is a child of the owner's task group, which is entered, not of any caller: cancelling a caller, even
    the first one, doesn't affect the others, and a flight never outlives its owner. An error never reaches the task
    group.
    """

    def __init__(self, task_group: TaskGroup) -> None:
        self._task_group = task_group
        self._flights: dict[K, _Flight[V]] = {}

    def __contains__(self, key: K) -> bool:
        """Return whether a call for this key would join a flight."""
        return key in self._flights

    def __len__(self) -> int:
        return len(self._flights)

    async def run(self, key: K, work: Callable[[], Awaitable[V]]) -> V:
        """The value of ``work()``, or of the flight for ``key`` that is already under way.

        An error of the work is raised in every caller of that flight, and the next call tries again. When the last
        caller is cancelled, the work is cancelled and awaited; a call that comes meanwhile starts a new flight.

        Raises:
            ClosedError: The owner's task group ended, or was cancelled, before the value came.
        """
        flight = self._join(key, work)
        await self._wait({key: flight})
        try:
            return flight.outcome()
        finally:
            del flight  # else error -> traceback -> this frame -> flight -> error is a cycle that holds buffers

    async def outcomes(self, works: Mapping[K, Callable[[], Awaitable[V]]]) -> list[V | Exception]:
        """What ``run`` gives for each key, once all have ended. Errors are returned, as copies without frames.

        Raises:
            ClosedError: The owner's task group ended before all were begun.
        """
        flights = {key: self._join(key, work) for key, work in works.items()}
        await self._wait(flights)
        return [flight.kept_outcome() for flight in flights.values()]

    def _join(self, key: K, work: Callable[[], Awaitable[V]]) -> _Flight[V]:
        flight = self._flights.get(key) or self._launch(key, work)
        flight.waiters += 1
        return flight

    async def _wait(self, flights: Mapping[K, _Flight[V]]) -> None:
        """Wait for all. Cancelled, it cancels those without another waiter, and waits for their end."""
        try:
            for flight in flights.values():
                await flight.landed.wait()
        except BaseException:
            abandoned = []
            for key, flight in flights.items():
                flight.waiters -= 1
                if not flight.waiters and not flight.landed.is_set():
                    self._forget(key, flight)
                    flight.scope.cancel()
                    if flight.has_begun:  # else its task may be cancelled before its first step, and never land
                        abandoned.append(flight)
            with anyio.CancelScope(shield=True):
                for flight in abandoned:
                    await flight.landed.wait()
            raise

    def _launch(self, key: K, work: Callable[[], Awaitable[V]]) -> _Flight[V]:
        flight = self._flights[key] = _Flight()
        try:
            self._task_group.start_soon(self._fly, key, flight, work)
        except RuntimeError as error:
            self._forget(key, flight)
            raise ClosedError("what should answer this call is closed") from error
        return flight

    async def _fly(self, key: K, flight: _Flight[V], work: Callable[[], Awaitable[V]]) -> None:
        flight.has_begun = True
        try:
            with flight.scope:
                flight.value = await work()
        except asyncio.CancelledError:
            # From a future that the work awaited, cancelled elsewhere; let out, it would cancel the whole task group.
            if was_cancelled():
                raise
        except Exception as error:  # noqa: BLE001 - it goes to the waiters
            flight.error = error
        finally:
            self._forget(key, flight)
            flight.landed.set()
            del flight  # as above

    def _forget(self, key: K, flight: _Flight[V]) -> None:
        # By identity: an abandoned flight must not remove a newer one of the same key.
        if self._flights.get(key) is flight:
            del self._flights[key]


T = TypeVar("T")


class SharedCall(Generic[T]):
    """A call for several tasks, made in the task of one of them.

    The first caller makes it. When that task is cancelled, so is the call, and the next of the waiting tasks makes it
    again. So it never outlives its callers, and needs no owner; SingleFlight carries on with the same call.
    """

    __slots__ = ("_askers", "_error", "_runner_left", "_values", "_work")

    def __init__(self, work: Callable[[], Awaitable[T]]) -> None:
        self._work = work
        self._askers = 0
        self._runner_left: anyio.Event | None = None
        self._values: list[T] = []
        self._error: Exception | None = None

    @property
    def is_over(self) -> bool:
        """True if it has an outcome, or all callers were cancelled."""
        return bool(self._values) or self._error is not None or not self._askers

    async def get(self) -> T:
        """The call's value, or its error: the original in the task that made the call, a copy in others."""
        self._askers += 1
        try:
            while not self._values and self._error is None:
                if self._runner_left is None:
                    return await self._run()
                await self._runner_left.wait()
        finally:
            self._askers -= 1
        if self._error is not None:
            raise copied(self._error)
        return self._values[0]

    async def outcome(self) -> T | Exception:
        """Like ``get``, but returns the error, without a traceback."""
        try:
            return await self.get()
        except Exception as error:  # noqa: BLE001 - all callers get it
            return error.with_traceback(None)

    async def _run(self) -> T:
        left = self._runner_left = anyio.Event()
        try:
            value = await self._work()
        except Exception as error:
            self._error = kept(error)
            raise
        else:
            self._values.append(value)
            return value
        finally:
            self._runner_left = None
            left.set()


class SharedFuture(Future[T]):
    """A future that several threads wait for. Each gets its own copy of an error."""

    def fail(self, error: BaseException) -> None:
        """End it by an error, kept as a copy without frames."""
        self.set_exception(kept(error))

    def result(self, timeout: float | None = None) -> T:
        """Wait for the value and return it, or raise the error."""
        error = self.exception(timeout)
        if error is not None:
            raise copied(error)
        return super().result()


def call_once(futures: dict[K, SharedFuture[T]], key: K, call: Callable[[], T], *, keeps: bool) -> T:
    """The value of ``call()``, made by the first thread that asks for the key; the others wait for it.

    All get its error, and the next thread that asks calls again; without ``keeps``, also after a value.
    """
    mine: SharedFuture[T] = SharedFuture()
    future = futures.setdefault(key, mine)  # atomic
    if future is not mine:
        return future.result()
    try:
        value = call()
    except BaseException as error:
        futures.pop(key, None)  # first: a thread that gets the error may ask again at once
        mine.fail(error)
        raise
    if not keeps:
        futures.pop(key, None)
    mine.set_result(value)
    return value


class SizedValue(Protocol):
    """A value with a size in memory."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it holds."""


W = TypeVar("W", bound=SizedValue)


class SharedLRU(Generic[K, W]):
    """Values by key, the least recently used dropped first, each loaded once for all concurrent callers.

    After an error the next call tries again. A value larger than the whole bound is returned and not kept. No
    LeasedLRU, because that also counts values that callers hold or load.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._kept: OrderedDict[K, W] = OrderedDict()
        self._loads: dict[K, SharedCall[W]] = {}

    def __repr__(self) -> str:
        loading = f", {len(self._loads)} loading" if self._loads else ""
        return f"<SharedLRU {len(self._kept)} kept, {self.nbytes} of {self.max_bytes} bytes{loading}>"

    def __len__(self) -> int:
        return len(self._kept)

    def get_nowait(self, key: K) -> W | None:
        """The value of the key, if it is kept."""
        value = self._kept.get(key)
        if value is not None:
            self._kept.move_to_end(key)
        return value

    async def get(self, key: K, load: Callable[[], Awaitable[W]]) -> W:
        """The value of the key: kept, being loaded, or loaded now."""
        value = self.get_nowait(key)
        return await self.load(key, load) if value is None else value

    async def load(self, key: K, load: Callable[[], Awaitable[W]]) -> W:
        """The value of the key, being loaded or loaded now, in place of one that is kept."""
        call = self._loads.get(key)
        if call is None:
            call = self._loads[key] = SharedCall(load)
        ends = False
        try:
            value = await call.get()
        finally:
            if call.is_over and self._loads.get(key) is call:
                del self._loads[key]
                ends = True
        if ends:
            self._keep(key, value)
        return value

    def drop(self, key: K) -> None:
        """Forget the value of the key, if it is kept."""
        value = self._kept.pop(key, None)
        if value is not None:
            self.nbytes -= value.nbytes

    def clear(self, of: Callable[[K], bool] = lambda _: True) -> None:
        """Forget all values of such keys. Those being loaded still go to their callers, but aren't kept."""
        for key in [key for key in self._kept if of(key)]:
            self.drop(key)
        for key in [key for key in self._loads if of(key)]:
            del self._loads[key]

    def kept(self, of: Callable[[K], bool]) -> list[W]:
        """The values of such keys."""
        return [value for key, value in self._kept.items() if of(key)]

    def _keep(self, key: K, value: W) -> None:
        self.drop(key)
        if value.nbytes > self.max_bytes:
            return
        self._kept[key] = value
        self.nbytes += value.nbytes
        while self.nbytes > self.max_bytes:
            self.drop(next(iter(self._kept)))


class LRUPart(Generic[K, W]):
    """One user's part of a SharedLRU of several users: the keys are its own, the bound is common."""

    def __init__(self, lru: SharedLRU[tuple[int, K], W], number: int) -> None:
        self._lru = lru
        self._number = number

    def __len__(self) -> int:
        return len(self._lru.kept(self._is_own))

    @property
    def nbytes(self) -> int:
        """Bytes that the values take."""
        return sum(value.nbytes for value in self._lru.kept(self._is_own))

    def get_nowait(self, key: K) -> W | None:
        """The value of the key, if it is kept."""
        return self._lru.get_nowait((self._number, key))

    async def get(self, key: K, load: Callable[[], Awaitable[W]]) -> W:
        """The value of the key: kept, being loaded, or loaded now."""
        return await self._lru.get((self._number, key), load)

    def clear(self, of: Callable[[K], bool] = lambda _: True) -> None:
        """Forget this part's values of such keys."""
        self._lru.clear(lambda key: self._is_own(key) and of(key[1]))

    def _is_own(self, key: tuple[int, K]) -> bool:
        return key[0] == self._number


MAX_VALUES = 8192
"""Values that an AsyncCache remembers: an address takes about 2 KiB; a forgotten one costs a signature or a request."""
MARGIN_SECONDS = 60.0
"""A value isn't used in the last 60 s, or the last tenth, of its life: clocks differ, and requests wait."""
MEANT_SECONDS = 1.0
"""A value that is refused this soon after it was found hasn't expired: the refusal is meant."""


class CachedValue(NamedTuple, Generic[V]):
    """A value and the time for which it is valid."""

    value: V
    seconds: float = math.inf
    """Seconds for which it is valid, from when it was found."""


class _CacheEntry(NamedTuple, Generic[V]):
    value: V
    found_at: float
    use_until: float
    nbytes: int = 1  # so that a SharedLRU counts values


class AsyncCache(Generic[K, V]):
    """Values by key, each found once for all callers, and again when it is about to expire or was rejected.

    After an error the next call searches again. Of more than ``maximum`` values the least recently used is forgotten.
    ``now`` gives monotonic seconds.
    """

    def __init__(self, now: Callable[[], float], maximum: int = MAX_VALUES) -> None:
        self._now = now
        self._entries: SharedLRU[K, _CacheEntry[V]] = SharedLRU(maximum)

    def __len__(self) -> int:
        return len(self._entries)

    async def get(self, key: K, find: Callable[[], Awaitable[CachedValue[V]]]) -> V:
        """The value of ``key``: remembered, being searched for, or found now by ``find()``."""
        entry = self._entries.get_nowait(key)
        if entry is None or self._now() >= entry.use_until:
            entry = await self._entries.load(key, partial(self._find, find))
        return entry.value

    async def _find(self, find: Callable[[], Awaitable[CachedValue[V]]]) -> _CacheEntry[V]:
        value, seconds = await find()
        now = self._now()
        return _CacheEntry(value, now, now + max(seconds - MARGIN_SECONDS, seconds * 0.9))

    def peek(self, key: K) -> V | None:
        """The remembered value of ``key``, even an expired one; None without one."""
        entry = self._entries.get_nowait(key)
        return None if entry is None else entry.value

    def reject(self, key: K, value: V) -> bool:
        """Forget ``value`` unless it is brand-new; returns whether the next ``get`` gives another one."""
        entry = self._entries.get_nowait(key)
        if entry is None or entry.value is not value:
            return True  # another caller noticed first
        if self._now() - entry.found_at < MEANT_SECONDS:
            return False
        self._entries.drop(key)
        return True

    def forget(self, key: K, value: V) -> None:
        """Forget ``value``, brand-new or not, unless there is another one already."""
        if self.peek(key) is value:
            self._entries.drop(key)
