"""Many askers, one execution."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio

from asyncfetch.errors import ClosedError
from asyncfetch.runtime.cancellation import was_cancelled
from asyncfetch.runtime.failures import copied

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable
    from types import TracebackType

    from anyio.abc import TaskGroup

__all__ = ["SingleFlight"]

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
        """Whether a call for this key would join a flight."""
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
