"""A merge that is planned and can be carried out, by whom, and in how many attempts, is open; and carrying it out.

Every file is written once, and what is known of the rows reduced. What is reduced in a tree is what grows with the
rows: statistics, and the tasks of each episode. Two passes aren't, the plan and ``write_metadata``: in which file an
episode lies depends on all before it. They take 0.1 ms an episode (one camera).
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import anyio

from asyncfetch.errors import DatasetError, FetchError
from asyncfetch.merge.destination import Needed, system_errors
from asyncfetch.merge.plan import disagreements, plan_merge, refuse
from asyncfetch.merge.quantiles import QuantileSearch
from asyncfetch.merge.scheduler import Schedule
from asyncfetch.merge.sources import MergeSource, load_source
from asyncfetch.merge.summaries import Summary, add, count_prefixes_again, quantile_ranks, summarise
from asyncfetch.merge.tasks import RowsTask, file_units, write, write_metadata
from asyncfetch.runtime.concurrently import gather, ungrouped
from asyncfetch.runtime.threads import run_sync

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from asyncfetch.merge.destination import Build, Destination, WrittenFile
    from asyncfetch.merge.plan import Limits, MergePlan
    from asyncfetch.merge.scheduler import PendingTask, TaskPool, WorkerSetup
    from asyncfetch.merge.sources import Selection
    from asyncfetch.merge.summaries import Statistics, SummaryTask
    from asyncfetch.merge.tasks import FileUnit


@dataclass(frozen=True, slots=True)
class MergeProgress:
    """The part that is written of the rows and videos."""

    bytes_done: int
    bytes_total: int
    """About; at least what is done."""
    files_done: int
    files_total: int


class ProgressCounter:
    """Adds up what was written, and tells.

    Args:
        tell: Called with each change; None: nobody.
    """

    def __init__(self, tell: Callable[[MergeProgress], object] | None) -> None:
        self._tell = tell
        self._bytes: dict[str, int] = {}
        self._bytes_done = self._bytes_total = self._files_done = self._files_total = 0

    def expect(self, files: int, nbytes: int) -> None:
        """Take how many files of rows and videos there will be, and about how many bytes."""
        self._files_total, self._bytes_total = files, nbytes

    def wrote(self, url: str, nbytes: int) -> None:
        """The file has this many bytes so far."""
        self._bytes_done += nbytes - self._bytes.get(url, 0)
        self._bytes[url] = nbytes
        if self._tell is not None:
            total = max(self._bytes_total, self._bytes_done)
            self._tell(MergeProgress(self._bytes_done, total, self._files_done, self._files_total))

    def finished(self, url: str, nbytes: int) -> None:
        """The file is whole."""
        self._files_done += 1
        self.wrote(url, nbytes)


async def write_files(pool: TaskPool, units: Sequence[FileUnit], build: Build) -> None:
    """Write some of a plan's files, and nothing else. What is finished stays.

    Raises:
        FetchError: A source could not be read, or the destination not be written.
        DatasetError: A source isn't what its metadata say.
    """
    with ungrouped():
        async with anyio.create_task_group() as tasks:
            schedule = Schedule(tasks, pool)
            for unit in units:
                schedule.submit(write, build, unit)


async def write_and_summarise(
    pool: TaskPool, units: Sequence[FileUnit], build: Build, progress: ProgressCounter
) -> tuple[list[WrittenFile], Summary, dict[str, Statistics]]:
    """Write all of a plan's files. What is finished stays.

    Few rows are read back once, many twice or more, since quantiles are searched for in rounds: see ``quantiles``.

    Args:
        pool: Does the work.
        units: The files; those of rows first, since more waits for them.
        build: Which nobody else writes to.
        progress: Told of each file.

    Returns:
        Which files they are, what is known of the rows, and the statistics of numeric features over all of them.

    Raises:
        FetchError, DatasetError: See ``write_files``.
    """
    files: list[WrittenFile] = []

    async def finished(file: WrittenFile) -> None:
        files.append(file)
        progress.finished(build.url(file.path), file.nbytes)

    with ungrouped():
        async with anyio.create_task_group() as tasks:
            schedule = Schedule(tasks, pool)
            parts: list[tuple[PendingTask, SummaryTask]] = []
            for unit in units:
                written = schedule.submit(write, build, unit)
                schedule.then(written, finished)
                if isinstance(unit, RowsTask):
                    parts += [(written, part) for part in unit.parts()]
            summary, numbers = await _summarise(schedule, build, parts)
    return files, summary, numbers


async def _summarise(
    schedule: Schedule, build: Build, parts: Sequence[tuple[PendingTask, SummaryTask]]
) -> tuple[Summary, dict[str, Statistics]]:
    """Return what is known of the rows of all parts, and their statistics."""
    count = sum(sum(part.lengths) for _, part in parts)
    if not count:
        return Summary(), {}
    search = QuantileSearch(count, quantile_ranks(count))
    leaves = [schedule.submit(summarise, build, written, part, search.shift) for written, part in parts]
    root = schedule.reduce(add, leaves)
    leaves.clear()  # who still needs one has it
    summary: Summary = await schedule.get(root)
    search.learn(summary.counted)
    while search.wanted:
        leaves += [
            schedule.submit(count_prefixes_again, build, written, part, search.wanted, search.shift)
            for written, part in parts
        ]
        root = schedule.reduce(add, leaves)
        leaves.clear()
        search.learn(await schedule.get(root))
    numbers = {}
    for key, moments in summary.moments.items():
        ordered = search.values(key).reshape(*moments.mean.shape, -1)
        numbers[key] = moments.statistics(ordered)
    return summary, numbers


_SOURCES_AT_ONCE = 16
"""Sources whose metadata a worker reads side by side."""
_SOURCE_SECONDS = 0.03
"""Seconds that a processor takes for the metadata of a source with a video of each camera."""
_ANYWHERE = frozenset({"file", "http", "https", "s3", "hf"})
"""Schemes that another process reads as this one does; one of fsspec's may name this process's own memory."""


@dataclass(frozen=True, slots=True, repr=False)
class MergeJob:
    """All that will be done. Plain data, which pickles."""

    plan: MergePlan
    units: tuple[FileUnit, ...]
    """Its files of rows and videos."""
    destination: Destination
    overwrite: bool

    def __repr__(self) -> str:
        return f"<MergeJob of {len(self.plan.sources)} datasets into {self.destination.name}, {len(self.units)} files>"

    @property
    def build(self) -> Build:
        """The build that it is made in."""
        return self.destination.build(self.plan.fingerprint())

    @property
    def nbytes(self) -> int:
        """About, of the rows and videos."""
        return sum(unit.nbytes for unit in self.units)

    @property
    def seconds(self) -> float:
        """Seconds that a processor takes to write the files and to summarise them, about; 0 for this process alone."""
        return sum(unit.seconds for unit in self.units) if _are_anywhere(self.plan.sources) else 0

    def needed(self, workers: int) -> Needed:
        """Return the bytes that so many workers need."""
        return Needed(self.nbytes, sum(sorted(unit.nbytes for unit in self.units)[-workers:]))


async def plan_job(
    pool: TaskPool, selections: Sequence[Selection], destination: Destination, limits: Limits, *, overwrite: bool
) -> MergeJob:
    """Look whether the destination is free, read and check the sources, and plan.

    Raises:
        MergeError: It isn't, or they can't be read or disagree; lists every reason.
    """
    await check_free(pool, destination, selections, overwrite=overwrite)
    different = list(dict.fromkeys(selections))
    shares = [different[number :: pool.workers] for number in range(min(pool.workers, len(different)))]
    pool.expect(_SOURCE_SECONDS * len(different) if _are_anywhere(different) else 0)
    with ungrouped():
        async with anyio.create_task_group() as tasks:
            schedule = Schedule(tasks, pool)
            pending = [schedule.submit(load_sources, share) for share in shares]
            loaded: dict[Selection, MergeSource | DatasetError | FetchError] = {}
            for share, one in zip(shares, pending, strict=True):
                loaded |= zip(share, await schedule.get(one), strict=True)
    sources = [source for one in selections if isinstance(source := loaded[one], MergeSource)]
    if errors := [error for one in different if not isinstance(error := loaded[one], MergeSource)]:
        others = await run_sync(disagreements, sources) if sources else []
        refuse([*map(str, errors), *others], errors[0])
    plan = await run_sync(plan_merge, sources, limits)
    units = await run_sync(file_units, plan)
    return MergeJob(plan, tuple(units), destination, overwrite)


async def check_free(
    pool: TaskPool, destination: Destination, sources: Sequence[Selection | MergeSource], *, overwrite: bool
) -> None:
    """MergeError unless a dataset of these can be written there."""
    with system_errors([destination.name]):
        await destination.check(pool.fetcher, [source.url for source in sources], overwrite=overwrite)


async def load_sources(
    place: WorkerSetup, selections: Sequence[Selection]
) -> list[MergeSource | DatasetError | FetchError]:
    """Each, or why it can't be read."""
    limiter = anyio.CapacityLimiter(_SOURCES_AT_ONCE)

    async def load(selection: Selection) -> MergeSource | DatasetError | FetchError:
        async with limiter:
            try:
                return await load_source(place.fetcher, selection, run=run_sync)
            except (DatasetError, FetchError) as error:
                return error

    return await gather(*(partial(load, selection) for selection in selections))


async def carry_out(jobs: Sequence[MergeJob], pool: TaskPool, progress: ProgressCounter) -> list[tuple[int, int]]:
    """Write what isn't written yet: number of files and their bytes, by job.

    When all of it is written, the datasets take their places one right after the other: what ends earlier leaves none,
    and all of it is gone on with. What was killed after that is told like what is written now.

    Raises:
        MergeError: There is no room or no leave to write, or the destination is being built or was filled by somebody
            else.
        FetchError: A source could not be read, or the destination not be written.
        DatasetError: A source isn't what its metadata say.
    """
    progress.expect(sum(len(job.units) for job in jobs), sum(job.nbytes for job in jobs))
    with system_errors(job.destination.name for job in jobs):
        return await _carry_out(jobs, pool, progress)


async def _carry_out(jobs: Sequence[MergeJob], pool: TaskPool, progress: ProgressCounter) -> list[tuple[int, int]]:
    finished = [await job.build.finished(pool.fetcher) for job in jobs]
    async with AsyncExitStack() as stack:
        for job, files in zip(jobs, finished, strict=True):
            if files is None:
                needed = job.needed(pool.workers)
                await stack.enter_async_context(job.build.open(pool.fetcher, needed, overwrite=job.overwrite))
        publications: list[Callable[[], Awaitable[None]]] = []
        written = []
        pool.expect(sum(job.seconds for job, files in zip(jobs, finished, strict=True) if files is None))
        for job, there in zip(jobs, finished, strict=True):
            if there is not None:
                _tell_of(job, there, progress)
                written.append((len(there), sum(file.nbytes for file in there)))
                continue
            files, summary, numbers = await write_and_summarise(pool, job.units, job.build, progress)
            room = await stack.enter_async_context(job.build.room())
            metadata = await run_sync(write_metadata, job.plan, summary, numbers, room)
            nbytes = await run_sync(_measure, room, metadata)
            publications.append(
                partial(job.build.publish, pool.fetcher, room, files, metadata, overwrite=job.overwrite)
            )
            written.append((len(files) + len(metadata), sum(file.nbytes for file in files) + nbytes))
        for publish in publications:
            await publish()
        for job in jobs:
            await job.build.forget(pool.fetcher)
    return written


def _tell_of(job: MergeJob, files: Sequence[WrittenFile], progress: ProgressCounter) -> None:
    paths = {unit.path for unit in job.units}
    for file in files:
        if file.path in paths:
            progress.finished(job.build.url(file.path), file.nbytes)


async def carry_out_share(job: MergeJob, pool: TaskPool, rank: int, world_size: int) -> None:
    """Write every ``world_size``-th file, from the one numbered ``rank`` on, for somebody's ``carry_out`` to find.

    Raises:
        MergeError: Somebody has the build for himself, or there is no room.
        FetchError, DatasetError: See ``carry_out``.
    """
    with system_errors([job.destination.name]):
        if await job.build.finished(pool.fetcher) is not None:
            return
        async with job.build.share(pool.fetcher, job.needed(pool.workers), overwrite=job.overwrite):
            await write_files(pool, job.units[rank::world_size], job.build)


def _are_anywhere(sources: Sequence[MergeSource | Selection]) -> bool:
    schemes = (source.url.partition("://") for source in sources)
    return all(not separator or scheme.lower() in _ANYWHERE for scheme, separator, _ in schemes)


def _measure(root: Path, paths: Sequence[str]) -> int:
    return sum((root / path).stat().st_size for path in paths)
