"""Calls side by side, whose first error comes out alone; and errors that are kept for several receivers or for later.

A traceback keeps its frames, their callers, and everything that their variables refer to: handles with their room,
buffers, a whole stream with its threads. Raised again, an error gathers its receivers' frames, too. So a copy without
frames is kept, and each receiver gets a copy of that.
"""

from __future__ import annotations

import traceback
from contextlib import contextmanager, suppress
from types import BuiltinFunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import anyio

from asyncfetch.errors import AsyncFetchError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

E = TypeVar("E", bound=BaseException)


def copied(error: E) -> E:
    """A copy of the error for one more receiver: with its cause, without frames.

    An error of a type that can't be copied, such as a frozen dataclass, is returned itself.
    """
    try:
        return _copied(error, error.args, error.__cause__)
    except Exception:  # noqa: BLE001 - whatever the type's own methods raise
        return error


def kept(error: E) -> E:
    """A copy to keep, without frames, as are its causes. A note says where a foreign error arose.

    An error that can't be copied is returned itself.
    """
    try:
        again = _bare(error)
    except Exception:  # noqa: BLE001 - as above; or its causes go round in a circle
        return error
    if error.__traceback__ is not None and not isinstance(error, AsyncFetchError):
        again.add_note(f"It was raised here:\n{''.join(traceback.format_tb(error.__traceback__)).rstrip()}")
    return again


def _bare(error: E) -> E:
    args: Sequence[Any] = error.args
    if isinstance(error, BaseExceptionGroup):
        args = error.message, [_bare(one) for one in error.exceptions]
    cause = error.__cause__
    return _copied(error, args, None if cause is None or cause is error else _bare(cause))


def _copied(error: E, args: Sequence[Any], cause: BaseException | None) -> E:
    """A copy without a call of the type's constructor, as ``copy.copy`` makes, whose arguments may not be ``args``."""
    kind = base = type(error)
    while not isinstance(base.__dict__.get("__new__"), BuiltinFunctionType):
        base = base.__base__  # type: ignore[assignment]  # which every type but ``object`` has
    again: E = base.__new__(kind, *args)
    again.args = tuple(args)
    for each in kind.__mro__:
        for name, place in vars(each).items():
            if isinstance(place, MemberDescriptorType | GetSetDescriptorType) and not name.startswith("__"):
                with suppress(AttributeError, TypeError):  # unset, or read-only
                    value = getattr(error, name)
                    if value is not getattr(again, name, again):  # setting errno to None would change an OSError
                        setattr(again, name, value)
    again.__dict__.update(error.__dict__)
    if hasattr(error, "__notes__"):
        again.__notes__ = list(error.__notes__)
    again.__cause__ = cause
    again.__suppress_context__ = error.__suppress_context__
    return again


T = TypeVar("T")


class RunSync(Protocol):
    """Runs a blocking call off the loop, as ``runtime.threads.run_sync`` does."""

    def __call__(self, func: Callable[[], T], /) -> Awaitable[T]:
        """The call's result or error, once it has ended; a cancelled caller waits for that too."""


@contextmanager
def ungrouped() -> Iterator[None]:
    """Let a task group in this block raise its first error alone, not a group."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from error.__cause__


async def gather(*calls: Callable[[], Awaitable[T]]) -> list[T]:
    """The results of all calls, run side by side, in the order of the arguments. The first error cancels the rest."""
    if len(calls) == 1:
        return [await calls[0]()]
    results: dict[int, T] = {}

    async def run(position: int, call: Callable[[], Awaitable[T]]) -> None:
        results[position] = await call()

    with ungrouped():
        async with anyio.create_task_group() as tasks:
            for position, call in enumerate(calls):
                tasks.start_soon(run, position, call)
    return [results[position] for position in range(len(calls))]
