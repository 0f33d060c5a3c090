"""Equal calls at a time as one, on behalf of all who make them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from asyncfetch.fetch.gate import Caller, calling, current_caller
from asyncfetch.runtime.single_flight import SingleFlight

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable

    from anyio.abc import TaskGroup

__all__ = ["SharedCalls"]

T = TypeVar("T")


class SharedCalls:
    """Concurrent calls of one key share one execution, as SingleFlight says, which ends with the task group.

    It waits at gates in the line of the first who called, and is urgent as soon as one of them is.
    """

    def __init__(self, task_group: TaskGroup) -> None:
        self._flights: SingleFlight[Hashable, Any] = SingleFlight(task_group)
        self._carriers: WeakValueDictionary[Hashable, Caller] = WeakValueDictionary()

    def __contains__(self, key: Hashable) -> bool:
        """Whether a call of this key would share one that is under way."""
        return key in self._flights

    async def run(self, key: Hashable, work: Callable[[], Awaitable[T]]) -> T:
        """The value of ``work()``, or of the call for ``key`` that is already under way."""
        asking = current_caller()
        carrier = self._carriers.get(key) if key in self._flights else None  # that of a call that is over may be about
        if carrier is None:
            carrier = self._carriers[key] = Caller(urgent=asking.urgent, behind=asking)
        elif asking.urgent:
            carrier.promote()
        asking.carried_by(carrier)
        with calling(carrier):
            result: T = await self._flights.run(key, work)
        return result
