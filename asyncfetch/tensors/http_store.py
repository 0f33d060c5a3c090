"""Shards on tensor servers, through the engine: its connections, limits, retries and checks."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import TYPE_CHECKING

import anyio
import numpy as np

from asyncfetch.config.checks import is_whole_number
from asyncfetch.errors import FetchError, InvalidResponse, NotFound, ObjectChanged, RangeNotSatisfiable, TensorError
from asyncfetch.fetch import ask_server
from asyncfetch.runtime.single_flight import AsyncCache, CachedValue
from asyncfetch.runtime.threads import run_in_thread, run_sync
from asyncfetch.tensors.buffer import Shard
from asyncfetch.tensors.server import etag_of, pieces, shards_url
from asyncfetch.tensors.storage import SHARED_FROM_BYTES, find_shared, read_shared
from asyncfetch.tensors.wire import (
    MAX_HEADER_BYTES,
    Header,
    check_payload,
    describe,
    parse_header,
    split_frames,
    to_native,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from asyncfetch.fetch import Fetcher
    from asyncfetch.runtime.memory_pool import MemoryPool
    from asyncfetch.tensors.remote import RemoteTensor

EXPECT_FROM_BYTES = 1024 * 1024
"""An upload of this size first asks whether it will be accepted. That takes one round trip."""
ASK_AGAIN_SECONDS = 60.0
"""Seconds until a server is asked again about its shared memory; it may have been restarted."""
_OURS = frozenset({400, 409, 411, 413, 507})
"""Statuses of a tensor server's own refusals."""


class HttpStore:
    """Shards over HTTP, and over shared memory if a server is on this machine.

    The methods are those of RayStore, too. All can be cancelled, and raise FetchError if there is no answer.
    """

    def __init__(self, fetcher: Fetcher, memory: MemoryPool, *, shared_memory: bool) -> None:
        self._fetcher = fetcher
        self._memory = memory
        self._looks_for_shared = shared_memory
        self._shared: AsyncCache[str, Path | None] = AsyncCache(time.monotonic)
        # One thread: several would take the GIL from each other at every system call.
        self._shared_reader = anyio.CapacityLimiter(1)
        self.shared_reads = 0
        """Shards that came through shared memory."""

    async def store(
        self, server: str, shard_id: str, dtype: str, shape: tuple[int, ...], data: NDArray[np.uint8]
    ) -> None:
        """Send a frame; TensorError if the server refuses it. A retry does no harm, since the id is its own."""
        header = await run_in_thread(len(data), partial(describe, shard_id, dtype, shape, data))
        head = header.encode()
        headers = {"Content-Length": str(header.frame_bytes), "Content-Type": "application/octet-stream"}
        if header.frame_bytes >= EXPECT_FROM_BYTES:
            headers["Expect"] = "100-continue"
        url = shards_url(server, [shard_id])
        body = partial(pieces, [memoryview(head), data.data.toreadonly()], 0, header.frame_bytes)
        try:
            response = await ask_server(self._fetcher, "PUT", url, headers=headers, body=body)
        except FetchError as error:
            if error.status in _OURS:
                raise TensorError(
                    f"{server} doesn't store a tensor of {header.frame_bytes} bytes: {error}. Clear what isn't needed"
                    " any more, raise its limit, or store less",
                    shard_ids=[shard_id],
                ) from error
            raise
        if response.headers.get("ETag") != etag_of(shard_id):
            what = "it doesn't say that the tensor is stored: no tensor server's answer, or one's of an older version"
            raise InvalidResponse(what, url=server, status=response.status)

    async def fetch(self, batch: Sequence[RemoteTensor]) -> dict[str, Shard]:
        """The shards of a batch of ``plan_batches`` that exist, by id: from shared memory, the others by one request.

        TensorError for a wrong answer: too few shards, too many, of another shape, damaged.
        """
        found = await self._read_shared(batch) if self._looks_for_shared else {}
        self.shared_reads += len(found)
        rest = [remote for remote in batch if remote.shard_id not in found]
        if rest:
            found |= await (self._fetch_one(rest[0]) if len(rest) == 1 else self._fetch_several(rest))
        return found

    async def delete(self, server: str, shard_ids: Sequence[str]) -> int:
        """Have the server forget them; returns how many it had. After a lost answer, a retry counts fewer."""
        response = await ask_server(self._fetcher, "DELETE", shards_url(server, shard_ids))
        deleted = _whole_number(response.body, "deleted", server)
        path = self._shared.peek(server)
        if deleted < len(shard_ids) and path is not None:  # the shared memory may be a killed server's
            self._shared.forget(server, path)
        return deleted

    async def _fetch_one(self, remote: RemoteTensor) -> dict[str, Shard]:
        url = shards_url(remote.server, [remote.shard_id])
        try:
            frame = await self._fetcher.fetch(url, 0, remote.frame_bytes)
        except NotFound:
            return {}
        except RangeNotSatisfiable as error:
            raise mismatch(remote, f"{error.size} bytes") from error
        open_frame = partial(_open_frame, remote, np.frombuffer(frame, np.uint8))
        return {remote.shard_id: await run_in_thread(len(frame), open_frame)}

    async def _fetch_several(self, batch: Sequence[RemoteTensor]) -> dict[str, Shard]:
        url = shards_url(batch[0].server, [remote.shard_id for remote in batch])
        expected = sum(remote.frame_bytes for remote in batch)
        try:
            info, body = await self._fetcher.fetch_head(url, expected)
        except ObjectChanged:  # its size changed when a shard was cleared; by now the engine has forgotten the old one
            info, body = await self._fetcher.fetch_head(url, expected)
        if info.size > expected:
            raise TensorError(
                f"{len(batch)} shards of {expected} bytes were asked for, {info.size} bytes are the response"
            )
        return await run_in_thread(len(body), partial(_open_batch, batch, body, self._memory))

    async def _read_shared(self, batch: Sequence[RemoteTensor]) -> dict[str, Shard]:
        larger = [remote for remote in batch if remote.frame_bytes >= SHARED_FROM_BYTES]
        if not larger:
            return {}
        server = larger[0].server
        path = await self._shared.get(server, partial(self._find_shared, server))
        if path is None:
            return {}
        shards, still_there = await run_sync(_open_shared, path, larger, limiter=self._shared_reader)
        if not still_there:
            self._shared.forget(server, path)
        return shards

    async def _find_shared(self, server: str) -> CachedValue[Path | None]:
        try:
            answer = json.loads((await ask_server(self._fetcher, "GET", f"{server}/shared")).body)
            name, proof = str(answer["name"]), str(answer["proof"])
        except (FetchError, ValueError, KeyError, TypeError, RecursionError):
            # If anything is wrong, the request for the shard itself will raise.
            return CachedValue(None, ASK_AGAIN_SECONDS)
        return CachedValue(await run_sync(find_shared, name, proof), ASK_AGAIN_SECONDS)


def _open_shared(path: Path, remotes: Sequence[RemoteTensor]) -> tuple[dict[str, Shard], bool]:
    """The shards that exist, and whether the directory does."""
    shards = {}
    for remote in remotes:
        frame = read_shared(path, remote.shard_id, remote.frame_bytes)
        if frame is not None:
            shards[remote.shard_id] = _open_frame(remote, frame)
    return shards, len(shards) == len(remotes) or path.is_dir()


def _open_frame(remote: RemoteTensor, frame: NDArray[np.uint8]) -> Shard:
    """The shard of a frame, on the frame's memory."""
    header = parse_header(frame[:MAX_HEADER_BYTES].data, max_bytes=len(frame))
    return open_payload(remote, header, frame[header.header_bytes :])


def _open_batch(batch: Sequence[RemoteTensor], body: memoryview, memory: MemoryPool) -> dict[str, Shard]:
    """The shards of a response, each in memory of its own, so that one doesn't keep the others' alive."""
    shards = {}
    frames = split_frames(body, [remote.shard_id for remote in batch])
    for remote, (header, payload) in zip(batch, frames, strict=True):
        if not header.missing:
            array = memory.take(len(payload))
            array.data[:] = payload  # numpy would release the GIL for so little, and wait to get it back
            shards[remote.shard_id] = open_payload(remote, header, array)
    return shards


def open_payload(remote: RemoteTensor, header: Header, payload: NDArray[np.uint8]) -> Shard:
    """The shard, on the payload's memory if possible; TensorError if it is another shard's, or damaged."""
    if (header.shard_id, header.dtype, header.shape) != (remote.shard_id, remote.dtype_name, remote.shape):
        raise mismatch(remote, f"shard {header.shard_id} of shape {header.shape} and dtype {header.dtype}")
    check_payload(header, payload)
    return Shard(to_native(header, payload), header.dtype, header.shape)


def mismatch(remote: RemoteTensor, came: str) -> TensorError:
    """The error for a shard that doesn't match its remote tensor."""
    return TensorError(
        f"asked {remote.server} for shard {remote.shard_id} of shape {remote.shape} and dtype {remote.dtype_name},"
        f" which is {remote.frame_bytes} bytes; it has {came}",
        shard_ids=[remote.shard_id],
    )


def _whole_number(body: bytes, name: str, server: str) -> int:
    try:
        value: int = json.loads(body)[name]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidResponse(f"the answer isn't a tensor server's: no {name!r} in it", url=server) from error
    if not is_whole_number(value) or value < 0:
        raise InvalidResponse(f"the answer isn't a tensor server's: {name} is {value!r}", url=server)
    return value
