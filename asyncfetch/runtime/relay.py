"""One call for several tasks, without an owner of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["Relay"]

T = TypeVar("T")


class Relay(Generic[T]):
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
        """What the call returned, or the error that it raised, without a traceback: not raised, as it is shared."""
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
