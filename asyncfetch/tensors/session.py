"""What a TensorClient has on its loop: connections, requests under way, and the work of its verbs."""

from __future__ import annotations

import logging
import secrets
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import anyio
import anyio.to_thread
import numpy as np

from asyncfetch.errors import AsyncFetchError, FetchError, ShardNotFound, TensorError
from asyncfetch.fetch import Fetcher
from asyncfetch.fetch.batch import for_each
from asyncfetch.runtime.cancellation import end_tasks
from asyncfetch.runtime.failures import copied
from asyncfetch.runtime.memory_pool import MemoryPool
from asyncfetch.tensors.buffer import Shard
from asyncfetch.tensors.flights import Fetched, Flights
from asyncfetch.tensors.http_store import HttpStore, mismatch
from asyncfetch.tensors.off_loop import off_loop
from asyncfetch.tensors.ray_store import RAY, RayStore
from asyncfetch.tensors.remote import RemoteTensor, bytes_of, import_torch, tensor_on
from asyncfetch.tensors.stores import MAX_BATCH_SHARDS
from asyncfetch.tensors.structure import remotes_in, replace_leaves, unpadded
from asyncfetch.tensors.wire import describe, header_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import torch
    from numpy.typing import NDArray

    from asyncfetch.config import FetchConfig
    from asyncfetch.fetch import FetchStatistics
    from asyncfetch.tensors.buffer import FetchBuffer
    from asyncfetch.tensors.server import TensorServer
    from asyncfetch.tensors.storage import ShardStorage
    from asyncfetch.tensors.stores import ShardStore

__all__ = ["Session"]

_log = logging.getLogger(__name__)

CLEAN_UP_SECONDS = 5.0
"""For deleting what a failed ``remotize`` had stored. What is left then lives until its server's ttl_seconds."""
COPIED_EARLY_BYTES = 256 * 1024
"""Shards from here on are copied as soon as they have come. Smaller ones are copied all together at the end: beside the
loop, a copy of 64 KiB takes less than the turns with the interpreter around it, a fifth of the CPU of such a shard."""
SHOWN_IDS = 16
"""Ids in a message; an error has all of them."""


class Session:
    """Entered and used on one loop. The verbs are those of ``TensorClient``.

    Args:
        config: Of the engine.
        buffer: Where shards are kept.
        own: The server of this process, whose shards need no request.
        shared_memory: Whether to look for servers' shared memory.
        copies: Whether to deliver copies; else tensors on the buffer's own memory.
    """

    def __init__(
        self,
        config: FetchConfig,
        buffer: FetchBuffer,
        *,
        own: TensorServer | None,
        shared_memory: bool,
        copies: bool,
    ) -> None:
        self._memory = MemoryPool(config.max_idle_buffer_bytes)
        self._fetcher = Fetcher(config, _memory=self._memory)  # one pool, so that the bound is on all that waits
        self._workers = config.max_requests_per_host
        self._http = HttpStore(self._fetcher, self._memory, shared_memory=shared_memory)
        self._ray: RayStore | None = None
        self._buffer = buffer
        self._own = own
        self._copies = copies
        self.fetched = self.fetched_bytes = self.stored = self.stored_bytes = 0

    async def __aenter__(self) -> Self:
        await self._fetcher.__aenter__()
        self._tasks = await anyio.create_task_group().__aenter__()
        self._flights = Flights(self._tasks, self._buffer, self._fetch)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await end_tasks(self._tasks)
        await self._fetcher.__aexit__(None, None, None)
        self._memory.close()

    @property
    def shared_reads(self) -> int:
        """Shards that came through shared memory."""
        return self._http.shared_reads

    def statistics(self) -> FetchStatistics:
        """The engine's."""
        return self._fetcher.statistics()

    async def remotize(self, obj: Any, server: str, unpad: bool) -> Any:  # noqa: ANN401
        """``obj`` with its tensors stored; what a failed or cancelled call has stored is deleted again."""
        tensor_type = import_torch().Tensor
        obj = unpadded(obj) if unpad else obj
        tensors: dict[int, torch.Tensor] = {}

        def note(leaf: Any) -> Any:  # noqa: ANN401
            if isinstance(leaf, tensor_type):
                tensors[id(leaf)] = leaf
            return leaf

        replace_leaves(obj, note)
        remotes: dict[int, RemoteTensor] = {}
        tried: list[str] = []

        async def store(tensor: torch.Tensor) -> None:
            shard_id = secrets.token_hex(16)
            tried.append(shard_id)
            remotes[id(tensor)] = await self._store(tensor, server, shard_id)

        try:
            await for_each(list(tensors.values()), store, key=lambda _: server, workers=self._workers)
            return replace_leaves(obj, lambda leaf: remotes.get(id(leaf), leaf))
        except BaseException:
            with anyio.move_on_after(CLEAN_UP_SECONDS, shield=True):
                await self._take_back(server, tried)
            raise

    async def localize(self, obj: Any) -> Any:  # noqa: ANN401
        """``obj`` with its remote tensors fetched; one that is there several times is one tensor."""
        remotes = remotes_in(obj)
        for remote in remotes:
            remote.check()
        wanted = {remote.shard_id: remote for remote in remotes}
        own = {shard_id: remote for shard_id, remote in wanted.items() if self._is_own(remote.server)}
        brought = await self._bring([remote for shard_id, remote in wanted.items() if shard_id not in own])
        shards = self._read_own(own) | brought.shards
        absent = [remote for shard_id, remote in wanted.items() if shard_id not in shards]
        if absent:
            raise _not_found(absent, len(wanted))
        for remote in remotes:  # all of them: two may name one shard, and only one of them be right
            if not (shard := shards[remote.shard_id]).is_of(remote):
                raise mismatch(remote, f"shape {shard.shape} and dtype {shard.dtype}")
        to_copy = (wanted if self._copies else own).keys() - brought.copies.keys()
        copied_bytes = sum(wanted[shard_id].nbytes for shard_id in to_copy)
        deliver = partial(self._deliver, wanted, shards, brought.copies, to_copy)
        tensors = await off_loop(copied_bytes, deliver)
        return replace_leaves(obj, lambda leaf: tensors[leaf.shard_id] if isinstance(leaf, RemoteTensor) else leaf)

    async def delete(self, server: str, shard_ids: Sequence[str]) -> int:
        """Forget shards at their server, and what comes of them until then; TensorError with ids that may be left."""
        try:
            if self._is_own(server):
                return await anyio.to_thread.run_sync(self._storage.delete, shard_ids)
            return await self._delete(server, shard_ids)
        finally:
            self._buffer.clear(shard_ids)

    async def _delete(self, server: str, shard_ids: Sequence[str]) -> int:
        store = self._store_of(server)
        left: list[str] = []
        deleted = 0
        failure: FetchError | None = None
        for start in range(0, len(shard_ids), MAX_BATCH_SHARDS):
            some = shard_ids[start : start + MAX_BATCH_SHARDS]
            try:
                deleted += await store.delete(server, some)
            except FetchError as error:
                failure = error
                left += some
        if failure is not None:
            raise TensorError(
                f"{len(left)} of {len(shard_ids)} shards were dropped here, but may still be on {server}:"
                f" {_shown(left)}; clear them again, or leave them to its ttl_seconds. The last answer: {failure}",
                shard_ids=left,
            ) from failure
        return deleted

    @property
    def _storage(self) -> ShardStorage:
        assert self._own is not None
        return self._own.storage

    def _is_own(self, server: str) -> bool:
        return self._own is not None and server == self._own.url

    def _store_of(self, server: str) -> ShardStore:
        if server != RAY:
            return self._http
        if self._ray is None:
            self._ray = RayStore(self._memory)
        return self._ray

    async def _fetch(self, batch: Sequence[RemoteTensor]) -> Fetched:
        """A batch; with copies of large ones for who asked first: the bytes are still in the processor's caches."""
        shards = await self._store_of(batch[0].server).fetch(batch)
        self.fetched += len(shards)
        self.fetched_bytes += sum(len(shard.array) for shard in shards.values())
        if not self._copies:
            return Fetched(shards, {})
        large = {shard_id: shard for shard_id, shard in shards.items() if len(shard.array) >= COPIED_EARLY_BYTES}
        nbytes = sum(len(shard.array) for shard in large.values())
        return Fetched(shards, await off_loop(nbytes, partial(self._copied, large)))

    async def _bring(self, remotes: Sequence[RemoteTensor]) -> Fetched:
        """The shards that are kept or can be fetched; an error where a request for some failed."""
        found = self._buffer.find([remote.shard_id for remote in remotes])
        for shard_id in [shard_id for shard_id, shard in found.items() if shard.is_spoilt]:
            _log.warning("somebody wrote to the shared tensor of shard %s; it is fetched anew", shard_id)
            self._buffer.clear([shard_id])
            del found[shard_id]
        missing = [remote for remote in remotes if remote.shard_id not in found]
        if not missing:
            return Fetched(found, {})
        fetched, errors = await self._flights.bring(missing)
        if errors:
            raise copied(errors[0])  # its own: all who wait for the request have the same
        return Fetched(found | fetched.shards, fetched.copies)

    def _read_own(self, remotes: dict[str, RemoteTensor]) -> dict[str, Shard]:
        """Those of this process's server that are there, on its memory."""
        stored = {shard_id: self._storage.get(shard_id) for shard_id in remotes}
        return {
            shard_id: Shard(np.frombuffer(one.payload, np.uint8), one.header.dtype, one.header.shape)
            for shard_id, one in stored.items()
            if one is not None
        }

    def _deliver(
        self,
        wanted: dict[str, RemoteTensor],
        shards: dict[str, Shard],
        copies: dict[str, NDArray[np.uint8]],
        to_copy: Collection[str],
    ) -> dict[str, torch.Tensor]:
        """The tensors. Those of the own server are always copies: it owns its bytes."""
        copies = copies | self._copied({shard_id: shards[shard_id] for shard_id in to_copy})
        return {
            shard_id: tensor_on(copies[shard_id], remote)
            if shard_id in copies
            else shards[shard_id].shared_tensor(remote)
            for shard_id, remote in wanted.items()
        }

    def _copied(self, shards: dict[str, Shard]) -> dict[str, NDArray[np.uint8]]:
        return {shard_id: self._copy(shard.array) for shard_id, shard in shards.items()}

    def _copy(self, array: NDArray[np.uint8]) -> NDArray[np.uint8]:
        new = self._memory.take(len(array))
        np.copyto(new, array)
        return new

    async def _store(self, tensor: torch.Tensor, server: str, shard_id: str) -> RemoteTensor:
        dtype, data = await off_loop(_bytes_to_move(tensor), partial(bytes_of, tensor))
        shape = tuple(tensor.shape)
        if self._is_own(server):
            store = partial(self._store_own, shard_id, dtype, shape, data)
            await off_loop(len(data), store, blocks=self._storage.shares(header_bytes(len(shape)) + len(data)))
        else:
            await self._store_of(server).store(server, shard_id, dtype, shape, data)
        self.stored += 1
        self.stored_bytes += len(data)
        return RemoteTensor(server, shard_id, shape, dtype, str(tensor.device))

    def _store_own(self, shard_id: str, dtype: str, shape: tuple[int, ...], data: NDArray[np.uint8]) -> None:
        header = describe(shard_id, dtype, shape, data)
        with self._storage.reserve(shard_id, header.frame_bytes) as upload:
            frame = upload.take_memory()
            frame[: header.header_bytes] = header.encode()
            frame[header.header_bytes :] = data.data
            upload.commit(header)

    async def _take_back(self, server: str, shard_ids: list[str]) -> None:
        try:
            await self.delete(server, shard_ids)
        except AsyncFetchError as error:
            _log.warning("shards of a remotize that failed may be left over: %s", error)


def _bytes_to_move(tensor: torch.Tensor) -> int:
    """Bytes that have to be copied before they can be sent."""
    if import_torch().nn.parameter.is_lazy(tensor):  # it has none
        return 0
    is_here = tensor.device.type == "cpu" and tensor.is_contiguous()
    return 0 if is_here else sys.maxsize


def _not_found(absent: list[RemoteTensor], asked: int) -> ShardNotFound:
    ids = [remote.shard_id for remote in absent]
    servers = ", ".join(dict.fromkeys(remote.server for remote in absent))
    return ShardNotFound(
        f"{len(ids)} of {asked} shards aren't on {servers}: {_shown(ids)}. They were cleared, or not asked for within"
        " ttl_seconds, or the server was started anew: store them again",
        shard_ids=ids,
    )


def _shown(shard_ids: Sequence[str]) -> str:
    more = f" and {len(shard_ids) - SHOWN_IDS} more" if len(shard_ids) > SHOWN_IDS else ""
    return ", ".join(shard_ids[:SHOWN_IDS]) + more
