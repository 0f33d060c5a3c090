"""TensorClient: stores tensors and reads them back, by coroutines or by plain calls."""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, get_args

import anyio
import numpy as np

from asyncfetch.config import FetchConfig, Secrets
from asyncfetch.config.checks import require, require_token, whole_number
from asyncfetch.errors import AsyncFetchError, ClosedError, ConfigError, FetchError, ShardNotFound, TensorError
from asyncfetch.fetch import Fetcher
from asyncfetch.fetch.batch import for_each
from asyncfetch.runtime import LoopThread
from asyncfetch.runtime.cancellation import end_tasks
from asyncfetch.runtime.concurrently import copied
from asyncfetch.runtime.fork import ForkGuard, running_loop
from asyncfetch.runtime.loop_thread import BackgroundContext
from asyncfetch.runtime.memory_pool import MAX_IDLE_BUFFER_BYTES, MemoryPool
from asyncfetch.runtime.threads import in_thread, run_in_thread, run_sync
from asyncfetch.tensors.ahead import MAX_BYTES as AHEAD_BYTES
from asyncfetch.tensors.ahead import Ahead
from asyncfetch.tensors.buffer import MAX_BATCH_SHARDS, BufferStatistics, FetchBuffer, FetchedShards, Flights, Shard
from asyncfetch.tensors.http_store import HttpStore, mismatch
from asyncfetch.tensors.ray_store import RAY, RayStore, ray_runs
from asyncfetch.tensors.remote import (
    RemoteTensor,
    bytes_of,
    import_torch,
    leaves_in,
    replace_leaves,
    tensor_on,
    unpadded,
)
from asyncfetch.tensors.server import normal_server
from asyncfetch.tensors.wire import describe, header_bytes, is_shard_id

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    import torch
    from numpy.typing import NDArray

    from asyncfetch.tensors.server import TensorServer
    from asyncfetch.tensors.storage import ShardStorage

_log = logging.getLogger(__name__)

CLEAN_UP_SECONDS = 5.0
"""Seconds for deleting the shards of a failed ``remotize``. The rest lives until its server's ttl_seconds."""
COPIED_EARLY_BYTES = 256 * 1024
"""Shards of at least this size are copied as soon as they have come, smaller ones all together at the end: beside the
loop, a copy of 64 KiB takes less than the wait for the GIL around it, which is a fifth of the CPU of such a shard."""
SHOWN_IDS = 16
"""Ids in a message; an error has all of them."""


class TensorSession:
    """Entered and used on one loop. The verbs are those of ``TensorClient``.

    With ``copies`` it delivers copies, else tensors on the buffer's own memory.
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
        self._memory = MemoryPool(MAX_IDLE_BUFFER_BYTES)
        # One pool, so that the bound is on all idle memory; each object is read once.
        self._fetcher = Fetcher(config, _memory=self._memory, _max_known_objects=1)
        self._workers = config.max_requests_per_host
        self._http = HttpStore(self._fetcher, self._memory, shared_memory=shared_memory)
        self._ray: RayStore | None = None
        self._buffer = buffer
        self._own = own
        self._copies = copies
        self._fetched = self._fetched_bytes = self._stored = self._stored_bytes = 0

    async def __aenter__(self) -> Self:
        await self._fetcher.__aenter__()
        self._tasks = await anyio.create_task_group().__aenter__()
        self._flights = Flights(self._tasks, self._buffer, self._fetch)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await end_tasks(self._tasks)
        await self._fetcher.__aexit__(None, None, None)
        self._memory.close()

    def statistics(self) -> ClientStatistics:
        """A snapshot, from any thread."""
        engine = self._fetcher.statistics()
        return ClientStatistics(
            **asdict(self._buffer.statistics()),
            fetched=self._fetched,
            fetched_bytes=self._fetched_bytes,
            shared_reads=self._http.shared_reads,
            stored=self._stored,
            stored_bytes=self._stored_bytes,
            requests=engine.requests,
            retries=engine.retries,
            connections_used=max((host.peak_in_flight for host in engine.hosts.values()), default=0),
        )

    async def remotize(self, obj: Any, server: str, unpad: bool) -> Any:  # noqa: ANN401
        """``obj`` with its tensors stored; a failed or cancelled call deletes those that it stored."""
        obj = unpadded(obj) if unpad else obj
        tensors = {id(leaf): leaf for leaf in leaves_in(obj, import_torch().Tensor)}
        remotes: dict[int, RemoteTensor] = {}
        tried: list[str] = []

        async def store(tensor: torch.Tensor) -> None:
            shard_id = secrets.token_hex(16)
            tried.append(shard_id)
            remotes[id(tensor)] = await self._store(tensor, server, shard_id)

        try:
            await for_each(tensors.values(), store, workers=self._workers)
            return replace_leaves(obj, lambda leaf: remotes.get(id(leaf), leaf))
        except BaseException:
            with anyio.move_on_after(CLEAN_UP_SECONDS, shield=True):
                await self._take_back(server, tried)
            raise

    async def localize(self, obj: Any) -> Any:  # noqa: ANN401
        """``obj`` with its remote tensors fetched; a repeated one becomes one tensor."""
        remotes = leaves_in(obj, RemoteTensor)
        for remote in remotes:
            remote.check()
        wanted = {remote.shard_id: remote for remote in remotes}
        own = {shard_id: remote for shard_id, remote in wanted.items() if self._is_own(remote.server)}
        brought = await self._bring([remote for shard_id, remote in wanted.items() if shard_id not in own])
        shards = self._read_own(own) | brought.shards
        absent = [remote for shard_id, remote in wanted.items() if shard_id not in shards]
        if absent:
            raise _not_found(absent, len(wanted))
        for remote in remotes:  # all of them: of two for one shard, one may be wrong
            shard = shards[remote.shard_id]
            if (shard.dtype, shard.shape) != (remote.dtype_name, remote.shape):
                raise mismatch(remote, f"shape {shard.shape} and dtype {shard.dtype}")
        to_copy = (wanted if self._copies else own).keys() - brought.copies.keys()
        copied_bytes = sum(wanted[shard_id].nbytes for shard_id in to_copy)
        deliver = partial(self._deliver, wanted, shards, brought.copies, to_copy)
        tensors = await run_in_thread(copied_bytes, deliver)
        return replace_leaves(obj, lambda leaf: tensors[leaf.shard_id] if isinstance(leaf, RemoteTensor) else leaf)

    async def clear(self, server: str, shard_ids: Sequence[str]) -> Cleared:
        """Drop shards here, and those that arrive meanwhile, and delete them at their server."""
        left: list[str] = []
        deleted = 0
        failure: FetchError | None = None
        local = self._buffer.clear(shard_ids)
        try:
            if self._is_own(server):
                return Cleared(local, await run_sync(self._storage.delete, shard_ids))
            store = self._store_of(server)
            for start in range(0, len(shard_ids), MAX_BATCH_SHARDS):
                some = shard_ids[start : start + MAX_BATCH_SHARDS]
                try:
                    deleted += await store.delete(server, some)
                except FetchError as error:
                    failure = error
                    left += some
        finally:
            self._buffer.clear(shard_ids)
        if failure is not None:
            raise TensorError(
                f"{len(left)} of {len(shard_ids)} shards were dropped here, but may still be on {server}:"
                f" {_shown(left)}; clear them again, or leave them to its ttl_seconds. The last answer: {failure}",
                shard_ids=left,
            ) from failure
        return Cleared(local, deleted)

    @property
    def _storage(self) -> ShardStorage:
        assert self._own is not None
        return self._own.storage

    def _is_own(self, server: str) -> bool:
        return self._own is not None and server == self._own.url

    def _store_of(self, server: str) -> HttpStore | RayStore:
        if server != RAY:
            return self._http
        if self._ray is None:
            self._ray = RayStore(self._memory)
        return self._ray

    async def _fetch(self, batch: Sequence[RemoteTensor]) -> FetchedShards:
        """A batch, with copies of large shards for the first caller while they are in the processor's caches."""
        shards = await self._store_of(batch[0].server).fetch(batch)
        self._fetched += len(shards)
        self._fetched_bytes += sum(len(shard.array) for shard in shards.values())
        if not self._copies:
            return FetchedShards(shards, {})
        large = {shard_id: shard for shard_id, shard in shards.items() if len(shard.array) >= COPIED_EARLY_BYTES}
        nbytes = sum(len(shard.array) for shard in large.values())
        return FetchedShards(shards, await run_in_thread(nbytes, partial(self._copied, large)))

    async def _bring(self, remotes: Sequence[RemoteTensor]) -> FetchedShards:
        """The shards that are kept or can be fetched; raises the error of a failed request."""
        found = self._buffer.find([remote.shard_id for remote in remotes])
        for shard_id in [shard_id for shard_id, shard in found.items() if shard.is_spoilt]:
            _log.warning("the shared tensor of shard %s was written to; it is fetched anew", shard_id)
            self._buffer.clear([shard_id])
            del found[shard_id]
        missing = [remote for remote in remotes if remote.shard_id not in found]
        if not missing:
            return FetchedShards(found, {})
        fetched, errors = await self._flights.bring(missing)
        if errors:
            raise copied(errors[0])  # all waiters of the request have the same error
        return FetchedShards(found | fetched.shards, fetched.copies)

    def _read_own(self, remotes: dict[str, RemoteTensor]) -> dict[str, Shard]:
        """The shards of this process's server, on its memory, without missing ones."""
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
        """The tensors; for this process's server, copies, since it owns its bytes."""
        copies = copies | self._copied({shard_id: shards[shard_id] for shard_id in to_copy})
        return {
            shard_id: tensor_on(copies[shard_id], remote)
            if shard_id in copies
            else shards[shard_id].shared_tensor(remote)
            for shard_id, remote in wanted.items()
        }

    def _copied(self, shards: dict[str, Shard]) -> dict[str, NDArray[np.uint8]]:
        copies = {shard_id: self._memory.take(len(shard.array)) for shard_id, shard in shards.items()}
        for shard_id, copy in copies.items():
            np.copyto(copy, shards[shard_id].array)
        return copies

    async def _store(self, tensor: torch.Tensor, server: str, shard_id: str) -> RemoteTensor:
        dtype, data = await run_in_thread(_bytes_to_move(tensor), partial(bytes_of, tensor))
        shape = tuple(tensor.shape)
        if self._is_own(server):
            store = partial(self._store_own, shard_id, dtype, shape, data)
            await run_in_thread(len(data), store, blocks=self._storage.shares(header_bytes(len(shape)) + len(data)))
        else:
            await self._store_of(server).store(server, shard_id, dtype, shape, data)
        self._stored += 1
        self._stored_bytes += len(data)
        return RemoteTensor(server, shard_id, shape, dtype, str(tensor.device))

    def _store_own(self, shard_id: str, dtype: str, shape: tuple[int, ...], data: NDArray[np.uint8]) -> None:
        header = describe(shard_id, dtype, shape, data)
        upload = self._storage.reserve(shard_id, header.frame_bytes)
        try:
            frame = self._storage.take_memory(upload)
            frame[: header.header_bytes] = header.encode()
            frame[header.header_bytes :] = data.data
            self._storage.commit(upload, header)
        finally:
            self._storage.give_back(upload)

    async def _take_back(self, server: str, shard_ids: list[str]) -> None:
        try:
            await self.clear(server, shard_ids)
        except AsyncFetchError as error:
            _log.warning("shards of a remotize that failed may be left over: %s", error)


def _bytes_to_move(tensor: torch.Tensor) -> int:
    """Bytes to copy before the tensor can be sent; ``sys.maxsize`` if they are many or elsewhere."""
    is_lazy = import_torch().nn.parameter.is_lazy(tensor)  # without bytes
    return 0 if is_lazy or (tensor.device.type == "cpu" and tensor.is_contiguous()) else sys.maxsize


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


Backend = Literal["auto", "http", "ray"]
Delivery = Literal["copy", "view"]

MAX_BYTES = 1024**3
"""Default bound of the fetch buffer: shards of a few training steps, and little beside a model."""
WHOLE_BYTES = 2**62
"""More than any shard has, so each comes by one request. Within a data centre one connection is as fast as several."""


class Cleared(NamedTuple):
    """Numbers of shards removed by a clear."""

    local: int
    """Shards in this client's buffer."""
    remote: int
    """Shards on the server."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ClientStatistics(BufferStatistics):
    """A snapshot of a client; counters are since it was entered."""

    _telling = ("entries", "bytes", "hits", "misses", "fetched", "fetched_bytes", "stored", "requests", "retries")

    fetched: int
    """Shards fetched from servers."""
    fetched_bytes: int
    """Bytes of their tensors."""
    shared_reads: int
    """Number of ``fetched`` shards that came through shared memory."""
    stored: int
    """Tensors stored on servers."""
    stored_bytes: int
    """Bytes of these tensors."""
    requests: int
    """Requests over HTTP, retries included."""
    retries: int
    """Number of retries."""
    connections_used: int
    """Most requests that one server ever had in flight, and so its connections."""


class TensorClient:
    """Puts tensors on servers, and fetches them into a buffer that all tasks and threads of this process share.

    ``async with TensorClient() as client`` gives coroutines, for any event loop; ``with TensorClient() as client``
    gives the same verbs as plain calls (``BlockingTensorClient``). Either way the client's own thread does the work.
    Thread-safe. Not fork-safe: a child gets WrongLoop, and makes its own. It can be entered once.

    If Ray is initialised, tensors are stored in its object store, and ``server`` is ignored. Reads go to the server
    that each remote tensor names.

    Args:
        max_bytes: Bound on the buffer, with shards on their way. The least recently used goes first. A shard without
            room is fetched and delivered all the same.
        delivery: "copy": each caller gets tensors of its own. "view": all callers get tensors on the buffer's memory,
            which costs nothing and is for reading only. torch can't enforce that: a write shows in all of them. The
            next ``localize`` notices a write that torch has counted, logs it, and fetches the shard again.
        token: The servers' ``token``; sent to every server that is named.
        backend: Where to store: "http", "ray", or "auto": in Ray if it is initialised.
        own: A running server of this process, whose shards are stored and read without a request.
        shared_memory: Whether to read from the shared memory of servers on this machine.
        fetch: Limits, timeouts, retries and authorities to trust; None means FetchConfig().
    """

    def __init__(
        self,
        *,
        max_bytes: int = MAX_BYTES,
        delivery: Delivery = "copy",
        token: str | None = None,
        backend: Backend = "auto",
        own: TensorServer | None = None,
        shared_memory: bool = True,
        fetch: FetchConfig | None = None,
    ) -> None:
        max_bytes = whole_number("max_bytes", max_bytes, least=0)
        require(delivery in get_args(Delivery), f"delivery must be 'copy' or 'view', not {delivery!r}")
        require(backend in get_args(Backend), f"backend must be 'auto', 'http' or 'ray', not {backend!r}")
        if token is not None:
            require_token("token", token)
        config = _engine_config(fetch or FetchConfig(), token)
        self._guard = ForkGuard("this TensorClient")
        self._backend = backend
        self._buffer = FetchBuffer(max_bytes)
        copies = delivery == "copy"
        self._make = partial(TensorSession, config, self._buffer, own=own, shared_memory=shared_memory, copies=copies)
        self._session: TensorSession | None = None
        self._thread: LoopThread | None = None
        self._closing = ExitStack()

    async def __aenter__(self) -> Self:
        running_loop("a TensorClient")
        await run_sync(self._open)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        with anyio.CancelScope(shield=True):
            await in_thread(self._close)

    def __enter__(self) -> BlockingTensorClient:
        self._open()
        return self.blocking

    def __exit__(self, *exc_info: object) -> None:
        self._close()

    def __repr__(self) -> str:
        kept = self._buffer.statistics()
        return f"<TensorClient {kept.entries} shards, {kept.bytes} of {kept.max_bytes} bytes, {kept.in_flight} coming>"

    @property
    def blocking(self) -> BlockingTensorClient:
        """The same client for callers that aren't coroutines, in any thread but a loop's."""
        return BlockingTensorClient(self)

    async def remotize(self, obj: Any, server: str | None = None, *, unpad: bool = False) -> Any:  # noqa: ANN401
        """``obj`` with every tensor stored on ``server`` and a ``RemoteTensor`` in its place.

        Dicts, lists, tuples and dataclasses are walked; other leaves stay unchanged. A repeated tensor is stored once.
        Gradients aren't stored. Don't write to the tensors until this returns. If it fails or is cancelled, it deletes
        the shards that it stored.

        Args:
            obj: Any structure.
            server: Url of a ``TensorServer``; None only with Ray.
            unpad: Whether to leave out the columns at the end of a batch that no row of its "attention_mask" attends
                to.

        Raises:
            TensorError: The server has no room, or a tensor can't be stored; the message says which limit or dtype.
            FetchError: The server can't be reached, or refuses the token (AccessDenied).
        """
        thread, session = self._opened()
        return await thread.acall(session.remotize, obj, self._target(server), unpad)

    async def localize(self, obj: Any) -> Any:  # noqa: ANN401
        """``obj`` with a tensor on the CPU in place of every ``RemoteTensor``; other leaves stay unchanged.

        Each shard that isn't kept is requested once, from all servers side by side. A repeated remote tensor becomes
        one tensor. A cancellation doesn't affect shards that other calls wait for.

        Raises:
            ShardNotFound: Names every missing shard; the others were fetched, and are kept.
            TensorError: A server's answer is wrong.
            FetchError: A server can't be reached; shards of others were fetched, and are kept.
        """
        thread, session = self._opened()
        return await thread.acall(session.localize, obj)

    async def to_local(self, tensor: Any) -> Any:  # noqa: ANN401
        """The tensor of one ``RemoteTensor``; a tensor is returned as it is."""
        return await self.localize(tensor)

    def ahead(self, items: Sequence[Any], order: Iterable[int] | None = None, *, max_bytes: int = AHEAD_BYTES) -> Ahead:
        """``items`` localized one after the other, ahead of the consumer: ``async with client.ahead(items) as items``.

        Args:
            items: Structures with remote tensors.
            order: Their indices, each once, in the order in which they will be wanted; None means 0, 1, 2 ...
            max_bytes: Bound on the tensors fetched ahead.
        """
        return Ahead(self.localize, items, order, max_bytes=max_bytes)

    async def clear(self, node: str, shard_ids: Iterable[str]) -> Cleared:
        """Drop shards of one server here, then delete them there. Unknown ids are no error.

        Shards on their way meanwhile go to the calls that requested them, and aren't kept: calls after this has
        returned get none of them. A deletion that was retried may count fewer shards than it deleted.

        Args:
            node: The server's url, or "ray"; a key of ``collect_shards``.
            shard_ids: The shards.

        Raises:
            TensorError: They are gone here, but some may still be on the server: the error has their ids.
        """
        thread, session = self._opened()
        return await thread.acall(session.clear, self._node(node), _checked(shard_ids))

    def clear_all(self) -> int:
        """Drop all shards here, and none on servers; returns how many there were. At once, from any thread."""
        self._opened()
        return self._buffer.clear()

    @staticmethod
    def collect_shards(obj: Any) -> dict[str, list[str]]:  # noqa: ANN401
        """The ids of all remote tensors in ``obj`` by server, each once, in order.

        It is small enough to send to every process that may have fetched them, for its ``clear``.
        """
        by_server: dict[str, dict[str, None]] = {}
        for remote in leaves_in(obj, RemoteTensor):
            by_server.setdefault(remote.server, {})[remote.shard_id] = None
        return {server: list(ids) for server, ids in by_server.items()}

    def statistics(self) -> ClientStatistics:
        """A snapshot, from any thread."""
        return self._opened()[1].statistics()

    def _open(self) -> None:
        if self._thread is not None:
            raise ClosedError("a TensorClient can be entered once: make another one")
        with ExitStack() as stack:
            self._thread = stack.enter_context(LoopThread(name="asyncfetch tensors"))
            kept = BackgroundContext(self._thread, self._make, name="this TensorClient")
            self._session = kept.value()
            stack.callback(kept.leave)
            stack.callback(self._buffer.clear)
            self._closing = stack.pop_all()

    def _close(self) -> None:
        if not self._guard.in_child:  # in a child, the buffer's lock may be held for ever
            self._closing.close()

    def _opened(self) -> tuple[LoopThread, TensorSession]:
        self._guard.check()  # before anything that locks: the lock may have been held when the process forked
        if self._thread is None or self._session is None:
            raise ClosedError("this TensorClient isn't open: use it within its with block")
        return self._thread, self._session

    def _target(self, server: str | None) -> str:
        """The server of new tensors, or "ray"."""
        if self._backend == "ray" or (self._backend == "auto" and ray_runs()):
            return RAY
        if server is None:
            raise ConfigError("remotize needs the url of a TensorServer, or an initialised Ray")
        return self._node(server)

    @staticmethod
    def _node(node: str) -> str:
        return RAY if node == RAY else normal_server(node)


class BlockingTensorClient:
    """``TensorClient`` by plain calls, which wait. It belongs to its client, and lives as long.

    Ctrl-C cancels the call. On the thread of an event loop use the coroutines.
    """

    def __init__(self, client: TensorClient) -> None:
        self._client = client
        self.collect_shards = client.collect_shards
        self.clear_all = client.clear_all
        self.statistics = client.statistics

    def remotize(self, obj: Any, server: str | None = None, *, unpad: bool = False) -> Any:  # noqa: ANN401
        """``TensorClient.remotize`` as a plain call."""
        thread, session = self._client._opened()
        return thread.run(session.remotize, obj, self._client._target(server), unpad)

    def localize(self, obj: Any) -> Any:  # noqa: ANN401
        """``TensorClient.localize`` as a plain call."""
        thread, session = self._client._opened()
        return thread.run(session.localize, obj)

    def to_local(self, tensor: Any) -> Any:  # noqa: ANN401
        """``TensorClient.to_local`` as a plain call."""
        return self.localize(tensor)

    def clear(self, node: str, shard_ids: Iterable[str]) -> Cleared:
        """``TensorClient.clear`` as a plain call."""
        thread, session = self._client._opened()
        return thread.run(session.clear, self._client._node(node), _checked(shard_ids))


class _ToEveryHost(Secrets[Mapping[str, str]]):
    """Headers by host, with the token for every host, since the servers are only known from tensors."""

    __slots__ = ("_authorization",)

    def __init__(self, headers: Mapping[str, Mapping[str, str]], authorization: str) -> None:
        super().__init__("headers", headers)
        self._authorization = authorization

    def __getitem__(self, host: str) -> Mapping[str, str]:
        own = super().__getitem__(host) if host in self else {}
        return {**own, "Authorization": self._authorization}


def _engine_config(config: FetchConfig, token: str | None) -> FetchConfig:
    """The engine's configuration for servers of shards: no redirects, no parts."""
    headers = config.headers if token is None else _ToEveryHost(config.headers, f"Bearer {token}")
    return replace(config, headers=headers, max_redirects=0, part_bytes=WHOLE_BYTES)


def _checked(shard_ids: Iterable[str]) -> list[str]:
    ids = list(shard_ids)
    for shard_id in ids:
        if not is_shard_id(shard_id):
            raise ConfigError(f"{shard_id!r} is no shard's id: collect_shards() has them")
    return list(dict.fromkeys(ids))
