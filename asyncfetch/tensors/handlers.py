"""What the server answers. Every refusal says in X-Error-Code which limit or rule it is about, with the figures."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
from aiohttp import web

from asyncfetch.errors import TensorError
from asyncfetch.runtime.cancellation import outlast
from asyncfetch.tensors.off_loop import off_loop
from asyncfetch.tensors.wire import MAX_HEADER_BYTES, MIN_HEADER_BYTES, Header, is_shard_id, missing, parse_header

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncfetch.tensors.shared import SharedDirectory
    from asyncfetch.tensors.storage import ShardStorage, Upload

__all__ = ["MAX_IDS", "ShardHandlers", "etag_of", "refuse"]

REASON = "X-Error-Code"
MAX_IDS = 128
"""Shards in one request. Their ids take 4.2 KB of the request's line, which aiohttp bounds to 8 KiB."""
PIECE_BYTES = 512 * 1024
"""Written at a time. Python 3.11 copies what the socket doesn't take at once."""
STALL_SECONDS = 30.0
"""Longest silence within an upload, the engine's stall_seconds from the other side. Its room is given back then."""
UNDO_SECONDS = 10.0
"""Longest wait for the removal of what came of a broken upload."""


class ShardHandlers:
    """One method for each verb."""

    def __init__(self, storage: ShardStorage, shared: SharedDirectory | None) -> None:
        self._storage = storage
        self._shared = shared

    async def get(self, request: web.Request) -> web.StreamResponse:
        """One shard's frame, or the frames of several in the order asked; ranges of either.

        One that isn't there is 404; in the place of one of several stands a header that says so.
        """
        ids = _ids(request)
        if ids is None:
            return _bad_ids()
        found = [self._storage.get(shard_id) for shard_id in ids]
        if found == [None]:
            return refuse(404, "no such shard")
        parts = [one.frame if one else memoryview(missing(shard_id)) for one, shard_id in zip(found, ids, strict=True)]
        return await _send(request, parts, etag=etag_of(ids[0]) if len(ids) == 1 else None)

    async def put(self, request: web.Request) -> web.StreamResponse:
        """Stores a frame under the id that its header has. The same once more is 200, another one 409."""
        refusal = self.refusal(request)
        if refusal is not None:
            return refusal
        length, shard_id = request.content_length or 0, request.match_info["ids"]
        try:
            head = await _read_exactly(request, min(length, MAX_HEADER_BYTES))
            header = parse_header(head, max_bytes=length)
            _check(header, shard_id, length)
            upload = self._storage.reserve(shard_id, length)
            try:
                return await self._receive(request, upload, header, head)
            finally:
                if upload.is_open:
                    close = partial(off_loop, 0, upload.close, blocks=upload.shared)
                    await outlast(close, seconds=UNDO_SECONDS)
        except TensorError as error:
            return refuse(507 if str(error).startswith("max_bytes") else 409 if error.shard_ids else 400, str(error))
        except TimeoutError:
            return refuse(408, f"nothing came for {STALL_SECONDS:g} s")

    def refusal(self, request: web.Request) -> web.Response | None:
        """Why this upload isn't even read; None where it is."""
        ids, length = _ids(request), request.content_length
        if ids is None or len(ids) != 1:
            return _bad_ids()
        if length is None or length < MIN_HEADER_BYTES:
            return refuse(411, f"Content-Length must be there, and at least {MIN_HEADER_BYTES}")
        if length > self._storage.max_bytes:
            return refuse(413, f"max_bytes={self._storage.max_bytes} is less than the {length} asked")
        return None

    async def delete(self, request: web.Request) -> web.StreamResponse:
        """Forgets shards; those that aren't there are no error."""
        ids = _ids(request)
        if ids is None:
            return _bad_ids()
        deleted = await anyio.to_thread.run_sync(self._storage.delete, ids)
        return web.json_response({"deleted": deleted})

    async def statistics(self, request: web.Request) -> web.StreamResponse:
        """The storage's."""
        return web.json_response(asdict(self._storage.statistics()))

    async def shared(self, request: web.Request) -> web.StreamResponse:
        """Where the larger shards can be read by who is on this machine, and how that is proven."""
        if self._shared is None:
            return web.json_response({})
        return web.json_response({"name": self._shared.path.name, "proof": self._shared.proof})

    async def _receive(self, request: web.Request, upload: Upload, header: Header, head: bytes) -> web.Response:
        shared = self._storage.shares(upload.nbytes)
        memory = await off_loop(upload.nbytes, upload.take_memory, blocks=shared)
        memory[: len(head)] = head
        filled = len(head)
        while filled < len(memory):
            chunk = await _read_some(request)
            if not chunk or filled + len(chunk) > len(memory):
                raise TensorError(f"the body doesn't have the {len(memory)} bytes that Content-Length says")
            memory[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
        del memory
        is_new = await off_loop(upload.nbytes, partial(upload.commit, header), blocks=shared)
        return web.Response(status=201 if is_new else 200, headers={"ETag": etag_of(upload.shard_id)})


def etag_of(shard_id: str) -> str:
    """What an answer bears that gives a shard, or says that it is stored."""
    return f'"{shard_id}"'


def refuse(status: int, reason: str) -> web.Response:
    """A refusal and its reason."""
    return web.Response(status=status, text=reason + "\n", headers={REASON: reason.replace("\n", " ")})


def _bad_ids() -> web.Response:
    return refuse(400, f"ids must be 1 to {MAX_IDS} times 32 hexadecimal digits, with commas")


def _ids(request: web.Request) -> list[str] | None:
    """The shards that the request names; None where it names none or too many."""
    ids = request.match_info["ids"].split(",")
    return ids if len(ids) <= MAX_IDS and all(map(is_shard_id, ids)) else None


def _check(header: Header, shard_id: str, length: int) -> None:
    if header.missing or header.shard_id != shard_id or header.frame_bytes != length:
        raise TensorError(f"the frame is of {header.frame_bytes} bytes and {header.shard_id}, not as its request says")


async def _read_some(request: web.Request) -> bytes:
    with anyio.fail_after(STALL_SECONDS):
        return await request.content.readany()


async def _read_exactly(request: web.Request, length: int) -> bytes:
    head = bytearray()
    while len(head) < length:
        with anyio.fail_after(STALL_SECONDS):
            chunk = await request.content.read(length - len(head))
        if not chunk:
            raise TensorError("the body ends within the header")
        head += chunk
    return bytes(head)


async def _send(request: web.Request, parts: list[memoryview], *, etag: str | None) -> web.StreamResponse:
    """The asked range of the parts one after the other."""
    size = sum(map(len, parts))
    try:
        asked = request.http_range
        start, stop, _ = slice(asked.start, asked.stop).indices(size)
    except ValueError:
        start, stop = 0, 0
    if start >= stop:
        return web.Response(status=416, headers={"Content-Range": f"bytes */{size}"})
    headers = {"Content-Length": str(stop - start), "Content-Type": "application/octet-stream"}
    if etag is not None:
        headers["ETag"] = etag
    ranged = "Range" in request.headers
    if ranged:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    response = web.StreamResponse(status=206 if ranged else 200, headers=headers)
    with suppress(ConnectionError):  # who asked is gone, which aiohttp would log as an error of ours
        await response.prepare(request)
        for piece in _pieces(parts, start, stop):
            await response.write(piece)
        await response.write_eof()
    return response


def _pieces(parts: list[memoryview], start: int, stop: int) -> Iterator[memoryview]:
    """Bytes [start, stop) of the parts together, at most PIECE_BYTES at a time."""
    at = 0
    for part in parts:
        first, last = max(0, start - at), min(len(part), stop - at)
        for begin in range(first, last, PIECE_BYTES):
            yield part[begin : min(last, begin + PIECE_BYTES)]
        at += len(part)
