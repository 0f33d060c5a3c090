"""Shards in Ray's object store: ``ray.put`` and ``ray.get``, and one actor with all references.

Ray frees an object when its last reference is gone, and in no other way. So one actor a cluster keeps the references,
by shard id: remote tensors stay small values that pickle anywhere, and a clear from any process drops the reference.
The bytes belong to the process that stored them: when it dies they are lost, like any object of Ray's.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from asyncfetch.errors import ConfigError, ConnectionFailed, FetchTimeout, MissingDependency, install_command
from asyncfetch.runtime.threads import run_sync
from asyncfetch.tensors.http_store import open_payload
from asyncfetch.tensors.wire import describe, parse_header

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from asyncfetch.runtime.memory_pool import MemoryPool
    from asyncfetch.tensors.buffer import Shard
    from asyncfetch.tensors.remote import RemoteTensor

RAY = "ray"
"""The word in place of the server's url."""
NAME, NAMESPACE = "tensors", "asyncfetch"
ANSWER_SECONDS = 60.0
"""Longest wait for the actor, or for an object. Ray itself waits for ever, and fetches a GiB from another node within
some seconds."""


class ShardDirectory:
    """The actor: references by shard id. They come in lists, because Ray would pass the object itself."""

    def __init__(self) -> None:
        self._references: dict[str, Any] = {}

    def add(self, shard_id: str, references: list[Any]) -> None:
        """Keep the object alive under this id."""
        self._references[shard_id] = references[0]

    def find(self, shard_ids: list[str]) -> dict[str, Any]:
        """The references of these shards, without missing ones."""
        return {shard_id: self._references[shard_id] for shard_id in shard_ids if shard_id in self._references}

    def remove(self, shard_ids: list[str]) -> int:
        """Drop them; returns how many there were."""
        return sum(self._references.pop(shard_id, None) is not None for shard_id in set(shard_ids))


class RayStore:
    """Shards on the Ray cluster that this process is connected to. All of it is one node, "ray"."""

    def __init__(self, memory: MemoryPool) -> None:
        self._ray = import_ray("tensors in Ray need ray")
        self._memory = memory
        self._actor: Any = None

    async def store(
        self, server: str, shard_id: str, dtype: str, shape: tuple[int, ...], data: NDArray[np.uint8]
    ) -> None:
        """Copy the tensor into the object store."""
        with self._mapped():
            reference = await run_sync(partial(self._put, shard_id, dtype, shape, data))
            await self._answer((await self._directory()).add.remote(shard_id, [reference]))

    async def fetch(self, batch: Sequence[RemoteTensor]) -> dict[str, Shard]:
        """Copies of the shards: a write to the object store's own memory, possible in torch, would reach all."""
        ids = [remote.shard_id for remote in batch]
        with self._mapped():
            references = await self._answer((await self._directory()).find.remote(ids))
            frames = {shard_id: await self._object(one) for shard_id, one in references.items()}
        return {
            remote.shard_id: await run_sync(self._open, remote, frame)
            for remote in batch
            if (frame := frames.get(remote.shard_id)) is not None
        }

    async def delete(self, server: str, shard_ids: Sequence[str]) -> int:
        """Drop the references."""
        with self._mapped():
            count: int = await self._answer((await self._directory()).remove.remote(list(shard_ids)))
        return count

    def _put(self, shard_id: str, dtype: str, shape: tuple[int, ...], data: NDArray[np.uint8]) -> Any:  # noqa: ANN401
        return self._ray.put((describe(shard_id, dtype, shape, data).encode(), data))

    def _open(self, remote: RemoteTensor, frame: tuple[bytes, NDArray[np.uint8]]) -> Shard:
        head, data = frame
        array = self._memory.take(len(data))
        array[:] = data
        return open_payload(remote, parse_header(head, max_bytes=len(data)), array)

    async def _directory(self) -> Any:  # noqa: ANN401 - an actor's handle
        if self._actor is None:
            self._actor = await run_sync(self._find_actor)
        return self._actor

    def _find_actor(self) -> Any:  # noqa: ANN401
        # Detached: it must not die with the worker that made it.
        options = {"name": NAME, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True, "num_cpus": 0}
        options["enable_task_events"] = False  # Ray's control store keeps 4 KB of each of the last 100,000 calls
        return self._ray.remote(ShardDirectory).options(**options).remote()

    async def _object(self, reference: Any) -> Any:  # noqa: ANN401
        try:
            return await self._answer(reference)
        except self._ray.exceptions.ObjectLostError:
            return None  # its owner died

    async def _answer(self, reference: Any) -> Any:  # noqa: ANN401
        with anyio.fail_after(ANSWER_SECONDS):
            return await asyncio.wrap_future(reference.future())

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        if not self._ray.is_initialized():  # the first call would start a cluster, in which there is nothing
            self._actor = None
            raise ConfigError("these tensors are in Ray, which isn't initialised here: call ray.init() first")
        try:
            yield
        except TimeoutError as error:
            raise FetchTimeout(f"Ray gave no answer within {ANSWER_SECONDS:g} s: is the cluster up?") from error
        except self._ray.exceptions.RayError as error:
            if isinstance(error, self._ray.exceptions.ActorDiedError):
                self._actor = None  # its references are lost; the next call finds or makes another one
            raise ConnectionFailed(f"Ray can't keep or give tensors now: {error}") from error


def ray_runs() -> bool:
    """Return whether this process is connected to a Ray cluster; imports nothing."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def import_ray(without: str) -> Any:  # noqa: ANN401 - a module
    """The ray module; MissingDependency that begins so without it."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise MissingDependency(f"{without}: {install_command('ray')}") from error
