"""Items in a known order, localized ahead of their consumer."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

import anyio

from asyncfetch.config.checks import whole_number
from asyncfetch.errors import AsyncFetchError, ConfigError
from asyncfetch.runtime.cancellation import end_tasks
from asyncfetch.runtime.fork import running_loop
from asyncfetch.tensors.remote import RemoteTensor, leaves_in

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

CHUNK_ITEMS = 64
"""Items localized by one call, so that small shards share requests."""
MAX_BYTES = 256 * 1024 * 1024
"""Default bound on the tensors fetched ahead."""


class Ahead:
    """One pass over items, made by ``TensorClient.ahead``: enter it, then iterate it or get single items.

    Iterating gives the items in order, fetched ahead. ``get`` gives any item, fetched at once if it isn't on its way. A
    consumed item isn't fetched any more. So a consumer that is faster, or jumps, leaves nothing behind that would fill
    the room.

    A failure is raised when the item itself is consumed, after the engine's own retries. Leaving cancels and awaits all
    fetches: nothing of one pass reaches the next. For one task at a time.

    Args:
        localize: Fetches the tensors of a list of items.
        items: Structures with remote tensors.
        order: Indices of ``items``, each once.
        max_bytes: Bound on the tensors fetched ahead; a chunk that is larger by itself is fetched alone.
        chunk_items: Items of one call.
    """

    def __init__(
        self,
        localize: Callable[[Any], Awaitable[Any]],
        items: Sequence[Any],
        order: Iterable[int] | None = None,
        *,
        max_bytes: int = MAX_BYTES,
        chunk_items: int = CHUNK_ITEMS,
    ) -> None:
        self._localize = localize
        self._items = items
        self._order = list(range(len(items)) if order is None else order)
        if unknown := [index for index in self._order if not -len(items) <= index < len(items)]:
            raise ConfigError(f"order must hold indices of the {len(items)} items, not {unknown[0]!r}")
        if len(set(self._order)) != len(self._order):
            raise ConfigError("order must not name an item twice: give each pass over the items its own")
        self._max_bytes = whole_number("max_bytes", max_bytes, least=1)
        self._chunk_items = whole_number("chunk_items", chunk_items, least=1)
        self._wanted = OrderedDict.fromkeys(self._order)  # not consumed yet; a dict is slow to give its first
        self._unasked = iter(self._order)
        self._ready: dict[int, Any] = {}
        self._fetching: set[int] = set()  # by ``get``
        self._coming: dict[int, anyio.Event] = {}
        # No ReservationQueue: only one task waits, and a chunk larger than the bound must have its turn, too.
        self._held_bytes: dict[int, int] = {}
        self._freed = anyio.Event()
        self.chunks = 0
        """Calls made ahead so far."""

    async def __aenter__(self) -> Self:
        running_loop("TensorClient.ahead")
        self._tasks = await anyio.create_task_group().__aenter__()
        self._tasks.start_soon(self._fetch_ahead)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await end_tasks(self._tasks)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:  # noqa: ANN401
        index = next(iter(self._wanted), None)
        if index is None:
            raise StopAsyncIteration
        return await self.get(index)

    async def get(self, index: int) -> Any:  # noqa: ANN401
        """The item with its tensors. It counts as consumed, even after a failure, but not after a cancellation.

        A second call fetches it again.
        """
        coming = self._coming.get(index)
        if coming is not None:
            await coming.wait()
        if index in self._ready:
            self._consumed(index)
            return self._ready.pop(index)
        self._fetching.add(index)
        try:
            item = await self._localize(self._items[index])
        except AsyncFetchError:
            self._consumed(index)
            raise
        finally:
            self._fetching.discard(index)
        self._consumed(index)
        return item

    def _consumed(self, index: int) -> None:
        self._wanted.pop(index, None)
        self._free(index)

    def _is_to_come(self, index: int) -> bool:
        return index in self._wanted and index not in self._fetching

    async def _fetch_ahead(self) -> None:
        while chunk := self._next_chunk():
            sizes = self._sizes(chunk)
            while self._held_bytes and sum(self._held_bytes.values()) + sum(sizes.values()) > self._max_bytes:
                self._freed = anyio.Event()
                await self._freed.wait()
            chunk = [index for index in sizes if self._is_to_come(index)]
            self._held_bytes |= {index: sizes[index] for index in chunk}
            if chunk:
                await self._fetch(chunk)

    def _next_chunk(self) -> list[int]:
        return list(islice(filter(self._is_to_come, self._unasked), self._chunk_items))

    def _sizes(self, chunk: list[int]) -> dict[int, int]:
        """Bytes of each item, without those that can't be fetched, for which ``get`` will raise."""
        sizes = {}
        for index in chunk:
            with suppress(AsyncFetchError):
                remotes = leaves_in(self._items[index], RemoteTensor)
                for remote in remotes:
                    remote.check()
                sizes[index] = sum(remote.nbytes for remote in remotes)
        return sizes

    async def _fetch(self, chunk: list[int]) -> None:
        landed = anyio.Event()
        self._coming = dict.fromkeys(chunk, landed)
        self.chunks += 1
        try:
            items = await self._localize([self._items[index] for index in chunk])
        except AsyncFetchError:
            # ``get`` fetches each alone, and raises the error for the right one.
            for index in chunk:
                self._free(index)
        else:
            self._ready |= dict(zip(chunk, items, strict=True))
        finally:
            self._coming = {}
            landed.set()

    def _free(self, index: int) -> None:
        if self._held_bytes.pop(index, None) is not None:
            self._freed.set()
