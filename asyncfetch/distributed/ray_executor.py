"""A merge's pieces as Ray tasks."""

from __future__ import annotations

import asyncio
import importlib
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from asyncfetch.errors import AsyncFetchError, ConfigError, MissingDependency, WorkerError, install_command
from asyncfetch.fetch import Fetcher
from asyncfetch.merge.scheduler import WorkerSetup

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from asyncfetch.config import FetchConfig
    from asyncfetch.merge.scheduler import TaskPiece

__all__ = ["RayExecutor"]

_END_SECONDS = 30.0
"""Longest wait for a cancelled task's end: its worker is killed."""


class RayExecutor:
    """An Executor of ``merge_datasets``: its pieces are tasks of the Ray cluster that this process is connected to.

    Each takes one of the cluster's processors, and waits for one: so a Ray task that merges should itself have
    ``num_cpus=0``. ``workers`` None means all of them. What is reduced stays in the object store until the end. The
    destination must be a prefix of S3 or a directory that all nodes share. ``fetch`` and the sources' urls travel
    without their secrets: give credentials to the nodes by their environment.

    Raises:
        ConfigError: Ray isn't initialised, when a merge begins, or a source's url has a password or a signature.
        MissingDependency: Ray isn't installed.
        WorkerError: Ray lost a task, and what it tried again too.
    """

    @asynccontextmanager
    async def open(
        self, fetch: FetchConfig, workers: int | None, wrote: Callable[[str, int], object]
    ) -> AsyncIterator[_RayPool]:
        """See ``Executor``. Progress counts whole files."""
        ray = await anyio.to_thread.run_sync(_import_ray)
        if not ray.is_initialized():
            raise ConfigError("Ray isn't initialised: call ray.init() before the merge")
        if workers is None:
            resources = await anyio.to_thread.run_sync(ray.cluster_resources)
            workers = max(1, int(resources.get("CPU", 1)))
        async with Fetcher(fetch) as fetcher:
            yield _RayPool(ray, fetch, workers, fetcher)


class _RayPool:
    """A Pool whose values are references."""

    def __init__(self, ray: Any, fetch: FetchConfig, workers: int, fetcher: Fetcher) -> None:  # noqa: ANN401 - a module
        self.workers = workers
        self.fetcher = fetcher
        self._ray = ray
        self._fetch = ray.put(fetch)
        self._task = ray.remote(num_cpus=1, num_returns=2)(_perform)

    def expect(self, seconds: float) -> None:
        """Ray's processes are there already."""

    async def run(self, piece: TaskPiece, *arguments: Any) -> Any:  # noqa: ANN401
        start = partial(self._task.remote, self._fetch, piece, *arguments)
        ended, value = await anyio.to_thread.run_sync(start)
        try:
            await self._answer(ended)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._stop(ended)
            raise
        return value

    async def get(self, value: Any) -> Any:  # noqa: ANN401
        return await self._answer(value)

    async def _answer(self, reference: Any) -> Any:  # noqa: ANN401
        try:
            return await asyncio.wrap_future(reference.future())
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, AsyncFetchError | OSError):
                raise error.cause from None  # with its fields, as it was raised there
            raise
        except self._ray.exceptions.RayError as error:
            raise WorkerError(f"Ray couldn't end a piece of the merge: {error}") from error

    async def _stop(self, reference: Any) -> None:  # noqa: ANN401
        """Nothing of it runs when this returns; else it would write into what is gone on with."""
        await anyio.to_thread.run_sync(partial(self._ray.cancel, reference, force=True))
        with anyio.move_on_after(_END_SECONDS):
            (ended,), _ = await asyncio.wait([asyncio.wrap_future(reference.future())])
            ended.exception()  # else asyncio logs that nobody asked


def _perform(fetch: FetchConfig, piece: TaskPiece, *arguments: Any) -> tuple[None, Any]:  # noqa: ANN401
    """The task: nothing, which tells that it has ended, and the value, which stays where it is."""

    async def work() -> Any:  # noqa: ANN401
        async with Fetcher(fetch) as fetcher:
            return await piece(WorkerSetup(fetcher, _tell_nobody), *arguments)

    return None, anyio.run(work)


def _tell_nobody(_path: str, _nbytes: int) -> None:
    pass


def _import_ray() -> Any:  # noqa: ANN401 - a module
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise MissingDependency(f"Ray isn't installed: {install_command('ray')}") from error
