"""Where shards are: the three methods that make a back end, and the errors that its shards can meet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from asyncfetch.tensors.buffer import Shard
    from asyncfetch.tensors.remote import RemoteTensor

__all__ = ["ShardStore", "plan_batches"]

MAX_BATCH_SHARDS = 128
"""Shards in one request; what the server takes."""
MAX_BATCH_BYTES = 4 * 1024 * 1024
"""Of one request for several shards. Their bytes are copied once more, so it stays in the processor's caches."""
ALONE_FROM_BYTES = 128 * 1024
"""A shard of this size comes by a request of its own, straight into its final memory. A request costs about what
copying 1 MiB does; this many of them side by side share the connections evenly."""


class ShardStore(Protocol):
    """One way to keep shards. Entered on the loop that uses it; every method can be cancelled."""

    async def store(
        self, server: str, shard_id: str, dtype: str, shape: tuple[int, ...], data: NDArray[np.uint8]
    ) -> None:
        """Keep a tensor's bytes under a new id; TensorError or FetchError where that isn't possible."""
        ...

    async def fetch(self, batch: Sequence[RemoteTensor]) -> dict[str, Shard]:
        """The shards of one batch of ``plan_batches``, by id; those that aren't there are left out.

        Raises:
            TensorError: What came isn't what was asked: too few, too many, of another shape, damaged.
            FetchError: Nothing came.
        """
        ...

    async def delete(self, server: str, shard_ids: Sequence[str]) -> int:
        """Forget these shards of one server; how many of them were there. Unknown ids are no error.

        Raises:
            FetchError: None of them may be taken for deleted.
        """
        ...


def plan_batches(remotes: Sequence[RemoteTensor]) -> list[list[RemoteTensor]]:
    """Distinct shards as requests, each of one server, in order: large ones alone, small ones together. Pure."""
    batches: list[list[RemoteTensor]] = []
    open_batches: dict[str, tuple[list[RemoteTensor], int]] = {}
    for remote in remotes:
        size = remote.frame_bytes
        if size >= ALONE_FROM_BYTES:
            batches.append([remote])
            continue
        batch, nbytes = open_batches.get(remote.server, ([], MAX_BATCH_BYTES))
        if nbytes + size > MAX_BATCH_BYTES or len(batch) == MAX_BATCH_SHARDS:
            batch, nbytes = [], 0
            batches.append(batch)
        batch.append(remote)
        open_batches[remote.server] = batch, nbytes + size
    return batches
