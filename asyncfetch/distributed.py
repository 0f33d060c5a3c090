"""A merge's work on a cluster: the same pieces, the same bytes.

Both ways, Ray's tasks and steps of datatrove's pipelines, need a destination on S3 or on a file system that all nodes
share, and sources that all nodes can read.

datatrove gives each task a rank and starts tasks anywhere and at any time, so no process can hand out pieces. The plan
is made first and travels with the steps. Task r of n writes files r, r + n, r + 2n ... and notes each in the journal; a
last task finds the files there, like a resumed merge. The steps implement datatrove's interface without importing it.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

import anyio

from asyncfetch.config import FetchConfig
from asyncfetch.errors import AsyncFetchError, ConfigError, StateMismatch, WorkerError
from asyncfetch.fetch import Fetcher
from asyncfetch.merge.apply import (
    DATA_FILE_MAX_BYTES,
    FILES_PER_CHUNK,
    VIDEO_FILE_MAX_BYTES,
    report_on,
    selections_of,
)
from asyncfetch.merge.destination import destination_of
from asyncfetch.merge.executor import InProcess, WorkerSetup
from asyncfetch.merge.job import ProgressCounter, carry_out, carry_out_share, check_free, plan_job
from asyncfetch.merge.plan import Limits
from asyncfetch.runtime.threads import run_sync
from asyncfetch.tensors.ray_store import import_ray

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from asyncfetch.merge.executor import Piece, WorkerPool
    from asyncfetch.merge.job import MergeJob
    from asyncfetch.merge.sources import Selection

__all__ = ["RayExecutor", "merge_steps"]

_END_SECONDS = 30.0
"""Longest wait for a cancelled task's end, after its worker was killed."""


class RayExecutor:
    """An Executor of ``merge_datasets``: its pieces are tasks of the Ray cluster that this process is connected to.

    Each takes one of the cluster's processors, and waits for one, so a Ray task that merges should itself have
    ``num_cpus=0``. ``workers`` None means all of them. The destination must be a prefix of S3 or a directory that all
    nodes share. ``fetch`` and the sources' urls travel without their secrets: give credentials to the nodes by their
    environment.

    Raises:
        ConfigError: When a merge begins, Ray isn't initialised, or a source's url has a password or a signature.
        MissingDependency: Ray isn't installed.
        WorkerError: Ray lost a task, and its retries too.
    """

    @asynccontextmanager
    async def open(
        self, fetch: FetchConfig, workers: int | None, wrote: Callable[[str, int], object]
    ) -> AsyncIterator[_RayPool]:
        """Open the workers for one merge. Progress counts whole files."""
        ray = await run_sync(import_ray, "Ray isn't installed")
        if not ray.is_initialized():
            raise ConfigError("Ray isn't initialised: call ray.init() before the merge")
        if workers is None:
            resources = await run_sync(ray.cluster_resources)
            workers = max(1, int(resources.get("CPU", 1)))
        async with Fetcher(fetch) as fetcher:
            yield _RayPool(ray, fetch, workers, fetcher)


class _RayPool:
    def __init__(self, ray: Any, fetch: FetchConfig, workers: int, fetcher: Fetcher) -> None:  # noqa: ANN401 - a module
        self.workers = workers
        self.fetcher = fetcher
        self._ray = ray
        self._fetch = ray.put(fetch)
        self._task = ray.remote(num_cpus=1)(_perform)

    def expect(self, seconds: float) -> None:
        """Does nothing: Ray's processes run already."""

    async def run(self, piece: Piece, *arguments: Any) -> Any:  # noqa: ANN401
        value = await run_sync(self._task.remote, self._fetch, piece, *arguments)
        try:
            return await asyncio.wrap_future(value.future())
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, AsyncFetchError | OSError):
                raise error.cause from None  # the piece's own error, with its fields
            raise
        except self._ray.exceptions.RayError as error:
            raise WorkerError(f"Ray couldn't end a piece of the merge: {error}") from error
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True):  # it can't write into a resumed merge
                await run_sync(partial(self._ray.cancel, value, force=True))
                with anyio.move_on_after(_END_SECONDS):
                    (stopped,), _ = await asyncio.wait([asyncio.wrap_future(value.future())])
                    stopped.exception()  # else asyncio logs that it was never retrieved
            raise


def _perform(fetch: FetchConfig, piece: Piece, *arguments: Any) -> Any:  # noqa: ANN401
    """Run the piece in its task, and return its value."""

    async def work() -> Any:  # noqa: ANN401
        async with Fetcher(fetch) as fetcher:
            return await piece(WorkerSetup(fetcher, lambda _path, _nbytes: None), *arguments)

    return anyio.run(work)


T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

_JOB_FORMAT = 4
"""Raised with each change of a job's fields."""


def merge_steps(
    sources: Sequence[str | os.PathLike[str] | Selection],
    destination: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    data_file_max_bytes: int = DATA_FILE_MAX_BYTES,
    video_file_max_bytes: int = VIDEO_FILE_MAX_BYTES,
    files_per_chunk: int = FILES_PER_CHUNK,
    fetch: FetchConfig | None = None,
) -> tuple[WriteStep, FinishStep]:
    """Read, check and plan now; the steps write what ``merge_datasets`` would, byte for byte.

        write, finish = merge_steps(["a", "b"], "out")
        written = LocalPipelineExecutor([write], tasks=16, workers=4)
        LocalPipelineExecutor([finish], tasks=1, depends=written).run()

    All nodes must share the destination's file system, unless it is a prefix of S3, and see the sources' files in the
    planned versions: a step raises ObjectChanged for another version. Steps pickled by another version of asyncfetch
    may raise StateMismatch. ``fetch`` travels without its secrets, and a url with secrets is refused: give credentials
    to the nodes by their environment. A step that is run again resumes where it stopped; once the dataset is published,
    it raises MergeError.

    Args: Those of ``merge_datasets``.

    Raises:
        ConfigError: An argument is invalid.
        MergeError: The destination is taken, or the sources can't be read or disagree; lists every reason.
    """
    limits = Limits(data_file_max_bytes, video_file_max_bytes, files_per_chunk)
    selections, target = selections_of(sources), destination_of(destination)
    if private := [selection.url for selection in selections if selection.url.has_secrets]:
        raise ConfigError(
            f"the steps would carry the secrets of {private[0]!r} into datatrove's logs: name the dataset without "
            "them, and give each node the login by its ~/.netrc, or keys by its environment"
        )
    config = fetch or FetchConfig()

    async def plan() -> MergeJob:
        async with InProcess().open(config, None, ProgressCounter(None).wrote) as pool:
            return await plan_job(pool, selections, target, limits, overwrite=overwrite)

    job = _run(plan)
    return WriteStep(job, config), FinishStep(job, config)


def _run(function: Callable[[*Arguments], Awaitable[T]], *arguments: *Arguments) -> T:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return anyio.run(function, *arguments)
    raise ConfigError("planning and running steps of a merge block: in a coroutine, call them by asyncio.to_thread")


class _MergeStep(ABC):
    """The interface of datatrove's steps."""

    name: str
    type = "asyncfetch merge"

    def __init__(self, job: MergeJob, fetch: FetchConfig) -> None:
        self.job = job
        self.fetch = fetch
        self.job_format = _JOB_FORMAT

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state.get("job_format") != _JOB_FORMAT:
            raise StateMismatch(
                f"this step, {self!r}, was planned by another version of asyncfetch: make it anew by merge_steps"
            )
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"{self.type}: {self.name}"

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Any:  # noqa: ANN401 - datatrove's
        """Do a task's part, and pass ``data`` on."""
        _run(self._run, rank, world_size)
        return data

    __call__ = run

    @asynccontextmanager
    async def _pool(self, counter: ProgressCounter) -> AsyncIterator[WorkerPool]:
        """Workers, if the destination is free."""
        async with InProcess().open(self.fetch, None, counter.wrote) as pool:
            sources, overwrite = self.job.plan.sources, self.job.overwrite
            await check_free(pool, self.job.destination, sources, overwrite=overwrite)
            yield pool

    @abstractmethod
    async def _run(self, rank: int, world_size: int) -> None:
        """The part of task ``rank`` of ``world_size``."""


class WriteStep(_MergeStep):
    """Writes a task's share of the files; for any number of tasks."""

    name = "write files"

    async def _run(self, rank: int, world_size: int) -> None:
        async with self._pool(ProgressCounter(None)) as pool:
            await carry_out_share(self.job, pool, rank, world_size)


class FinishStep(_MergeStep):
    """Writes the metadata and missing files, and publishes the dataset; for one task, after the others."""

    name = "finish"

    async def _run(self, rank: int, world_size: int) -> None:
        if rank:
            return  # only the first of several tasks does anything
        started, counter = time.monotonic(), ProgressCounter(None)
        async with self._pool(counter) as pool:
            [(files, nbytes)] = await carry_out([self.job], pool, counter)
        report_on(self.job, files, nbytes, time.monotonic() - started)
