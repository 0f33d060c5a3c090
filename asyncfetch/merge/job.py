"""A merge that is planned and can be carried out: by whom, and in how many attempts, is open."""

from __future__ import annotations

import logging
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from asyncfetch.errors import DatasetError, FetchError
from asyncfetch.merge.arguments import check_space
from asyncfetch.merge.build import build_dataset, write_files
from asyncfetch.merge.folder import build_folder, open_folder, share_folder
from asyncfetch.merge.kernel import Schedule
from asyncfetch.merge.plan import plan_merge
from asyncfetch.merge.sources import Source, load_source
from asyncfetch.merge.units import file_units
from asyncfetch.merge.validate import refuse
from asyncfetch.runtime.concurrently import gather, ungrouped

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from asyncfetch.merge.folder import BuildFolder
    from asyncfetch.merge.kernel import Pool, Workplace
    from asyncfetch.merge.plan import Limits, MergePlan
    from asyncfetch.merge.progress import Progress
    from asyncfetch.merge.units import FileUnit

__all__ = ["MergeJob", "carry_out", "carry_out_share", "plan_job"]

logger = logging.getLogger(__name__)

_SOURCES_AT_ONCE = 16
"""Sources whose metadata a worker reads side by side."""


@dataclass(frozen=True, slots=True, repr=False)
class MergeJob:
    """All that will be done. Plain data, which pickles."""

    plan: MergePlan
    units: tuple[FileUnit, ...]
    """Its files of rows and videos."""
    target: Path

    def __repr__(self) -> str:
        return f"<MergeJob of {len(self.plan.sources)} datasets into {self.target}, {len(self.units)} files>"

    @property
    def folder(self) -> BuildFolder:
        """Where it is built."""
        return build_folder(self.target, self.plan.fingerprint())

    @property
    def nbytes(self) -> int:
        """About, of the rows and videos."""
        return sum(unit.nbytes for unit in self.units)


async def plan_job(pool: Pool, urls: Sequence[str], target: Path, limits: Limits) -> MergeJob:
    """Read and check the sources, and plan.

    Raises:
        MergeError: They can't be read or disagree; lists every reason.
    """
    different = list(dict.fromkeys(urls))
    shares = [different[number :: pool.workers] for number in range(min(pool.workers, len(different)))]
    with ungrouped():
        async with anyio.create_task_group() as tasks:
            schedule = Schedule(tasks, pool)
            pending = [schedule.submit(load_sources, share) for share in shares]
            loaded: dict[str, Source | DatasetError | FetchError] = {}
            for share, one in zip(shares, pending, strict=True):
                loaded |= zip(share, await schedule.get(one), strict=True)
    errors = [error for url in urls if not isinstance(error := loaded[url], Source)]
    refuse([str(error) for error in errors], errors[0] if errors else None)
    sources = [source for url in urls if isinstance(source := loaded[url], Source)]
    return await anyio.to_thread.run_sync(_plan, sources, limits, target)


async def load_sources(place: Workplace, urls: Sequence[str]) -> list[Source | DatasetError | FetchError]:
    """Each, or why it can't be read."""
    limiter = anyio.CapacityLimiter(_SOURCES_AT_ONCE)

    async def load(url: str) -> Source | DatasetError | FetchError:
        async with limiter:
            try:
                return await load_source(place.reader, url, run=anyio.to_thread.run_sync)
            except (DatasetError, FetchError) as error:
                return error

    return await gather(*(partial(load, url) for url in urls))


def _plan(sources: Sequence[Source], limits: Limits, target: Path) -> MergeJob:
    plan = plan_merge(sources, limits)
    return MergeJob(plan, tuple(file_units(plan)), target)


async def carry_out(job: MergeJob, pool: Pool, progress: Progress, *, overwrite: bool) -> tuple[int, int]:
    """Write what isn't written yet and let it take its place: (number of files, their bytes).

    Raises:
        MergeError: There is no room, or the target is being built or was filled by somebody else.
        FetchError: A source could not be read.
        DatasetError: A source isn't what its metadata say.
    """
    async with _opened(job) as folder:
        await build_dataset(pool, job.plan, job.units, folder, progress)
        files, nbytes = await anyio.to_thread.run_sync(folder.measure)
        await anyio.to_thread.run_sync(partial(folder.publish, job.target, overwrite=overwrite))
    return files, nbytes


async def carry_out_share(job: MergeJob, pool: Pool, rank: int, world_size: int) -> None:
    """Write every ``world_size``-th file, from the one numbered ``rank`` on, for somebody's ``carry_out`` to find.

    Raises:
        MergeError: Somebody has the folder for himself, or there is no room.
        FetchError, DatasetError: See ``carry_out``.
    """
    with ExitStack() as stack:
        await anyio.to_thread.run_sync(stack.enter_context, share_folder(job.folder, job.target))
        await anyio.to_thread.run_sync(_check_room, job, job.folder)
        await write_files(pool, job.units[rank::world_size], job.folder)


@asynccontextmanager
async def _opened(job: MergeJob) -> AsyncIterator[BuildFolder]:
    """The job's folder. On an error it stays for the next attempt, if that can have anything of it."""
    folder = job.folder
    with ExitStack() as stack:
        await anyio.to_thread.run_sync(stack.enter_context, open_folder(folder, job.target))
        try:
            await anyio.to_thread.run_sync(_check_room, job, folder)
            yield folder
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                if isinstance(error, DatasetError):  # the next attempt would meet it too
                    await anyio.to_thread.run_sync(folder.remove)
                elif kept := await anyio.to_thread.run_sync(folder.keep_finished):
                    logger.warning("%d finished files stay in %s: the same merge goes on from there", kept, folder.root)
            raise


def _check_room(job: MergeJob, folder: BuildFolder) -> None:
    check_space(job.target, job.nbytes - folder.measure()[1])
