"""A merge as steps of datatrove pipelines.

datatrove gives each task a rank and starts tasks where and when it likes, so nobody is there to hand out pieces. The
plan is made beforehand and travels with the steps. Task r of n writes files r, r + n, r + 2n ... and notes each in the
journal; a task behind all of them finds the files there, as a merge does that goes on after an interruption.

The steps have what datatrove asks of one, and don't import it.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

import anyio

from asyncfetch.config import FetchConfig
from asyncfetch.errors import ConfigError, StateMismatch
from asyncfetch.merge.apply import (
    DATA_FILE_MAX_BYTES,
    FILES_PER_CHUNK,
    VIDEO_FILE_MAX_BYTES,
    destination_of,
    report_on,
    selections_of,
)
from asyncfetch.merge.job import ProgressCounter, carry_out, carry_out_share, check_free, plan_job
from asyncfetch.merge.local_executor import InProcess
from asyncfetch.merge.plan import Limits

if TYPE_CHECKING:
    import os
    from collections.abc import Awaitable, Callable, Sequence

    from asyncfetch.merge.job import MergeJob
    from asyncfetch.merge.scheduler import TaskPool
    from asyncfetch.merge.sources import Selection

__all__ = ["FinishStep", "WriteStep", "merge_steps"]

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

_JOB_FORMAT = 2
"""Counted up with what a job holds."""


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

    All nodes must share the destination's file system, unless it is a prefix of S3, and find the sources' files as they
    were when they were planned: of one that was replaced since, or that is another one there, a step raises
    ObjectChanged. Steps that another version of asyncfetch has pickled may be refused, by StateMismatch. ``fetch``
    travels without its secrets, and a url that has some is refused: give credentials to the nodes by their environment.
    Whatever of it is run again goes on where it stopped; once the dataset is there, it is a MergeError.

    Args: Those of ``merge_datasets``.

    Raises:
        ConfigError: An argument can't be meant.
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
    """Interface that datatrove asks of a step."""

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
        """Does a task's part, and gives ``data`` on as it is."""
        _run(self._run, rank, world_size)
        return data

    __call__ = run

    async def _check_free(self, pool: TaskPool) -> None:
        await check_free(pool, self.job.destination, self.job.plan.sources, overwrite=self.job.overwrite)

    @abstractmethod
    async def _run(self, rank: int, world_size: int) -> None:
        """The part of task ``rank`` of ``world_size``."""


class WriteStep(_MergeStep):
    """Writes a task's share of the files; for any number of tasks."""

    name = "write files"

    async def _run(self, rank: int, world_size: int) -> None:
        async with InProcess().open(self.fetch, None, ProgressCounter(None).wrote) as pool:
            await self._check_free(pool)
            await carry_out_share(self.job, pool, rank, world_size)


class FinishStep(_MergeStep):
    """Writes the metadata and what is missing, and lets the dataset take its place; for one task, behind the others."""

    name = "finish"

    async def _run(self, rank: int, world_size: int) -> None:
        if rank:
            return  # of several tasks only the first does anything
        started, told = time.monotonic(), ProgressCounter(None)
        async with InProcess().open(self.fetch, None, told.wrote) as pool:
            await self._check_free(pool)
            [(files, nbytes)] = await carry_out([self.job], pool, told)
        report_on(self.job, files, nbytes, time.monotonic() - started)
