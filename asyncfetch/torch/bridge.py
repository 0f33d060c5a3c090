"""Any async iterator as an IterableDataset."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from typing import Any, Generic, TypeVar

from torch.utils.data import IterableDataset

from asyncfetch.config.checks import whole_number
from asyncfetch.errors import ConfigError
from asyncfetch.runtime import LoopThread, iterate

T = TypeVar("T")

Factory = Callable[[], "AsyncIterable[T] | AbstractAsyncContextManager[AsyncIterable[T]]"]


class AsyncIterableDataset(IterableDataset[T], Generic[T]):
    """Bridges an async iterator of your own to torch's ``DataLoader``.

    Each ``iter()`` calls the factory on an event loop in a thread of its own, in whichever process it happens: nothing
    is shared across a fork, and a factory that pickles works with spawn. In a loader's worker use
    ``torch.utils.data.get_worker_info()`` inside of the factory to choose a share.

    Items come in order, at most ``max_ahead`` of them ahead. An exception of the iterator, of whatever type, is raised
    to the consumer after the items before it. An early ``break`` cancels the iterator and waits for its end, for
    0.8 s at most.

    Args:
        factory: Returns an async iterator, or an async context manager that gives one.
        max_ahead: Items made ahead of the consumer, at least 1.
    """

    def __init__(self, factory: Factory[T], *, max_ahead: int = 16) -> None:
        if not callable(factory):
            raise ConfigError(f"factory must be a function that returns an async iterator, not {factory!r}")
        self.factory = factory
        self.max_ahead = whole_number("max_ahead", max_ahead, least=1)

    def __iter__(self) -> Iterator[T]:
        thread = LoopThread(name="asyncfetch bridge")
        yield from iterate(thread, lambda: _batches(self.factory), max_batches=self.max_ahead, ends_thread=True)


@asynccontextmanager
async def _batches(factory: Factory[T]) -> AsyncIterator[AsyncIterator[tuple[T]]]:
    """The factory's iterator in batches of one, entered and left in one task."""
    async with AsyncExitStack() as stack:
        made: Any = factory()
        if isinstance(made, AbstractAsyncContextManager):
            made = await stack.enter_async_context(made)
        if not isinstance(made, AsyncIterable):
            if isinstance(made, Coroutine):
                made.close()  # of an async function without a yield; else Python warns that it was never awaited
            message = f"the factory must return an async iterator, or a context manager of one, not {made!r}"
            raise ConfigError(message)
        iterator = aiter(made)
        if isinstance(iterator, AsyncGenerator):
            stack.push_async_callback(iterator.aclose)
        yield await stack.enter_async_context(aclosing((item,) async for item in iterator))
