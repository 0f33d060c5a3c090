"""A planned merge, and carrying it out, by any number of processes and in any number of attempts.

Every file is written once. Summaries of rows are added up in any order: what is added are whole numbers. The plan and
``write_metadata`` are serial, because an episode's file depends on all episodes before it. They take 0.1 ms an episode
(one camera).
"""

from __future__ import annotations

import operator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from asyncfetch.errors import DatasetError, FetchError
from asyncfetch.fetch.batch import for_each
from asyncfetch.merge.destination import system_errors
from asyncfetch.merge.plan import disagreements, plan_merge, refuse
from asyncfetch.merge.sources import MergeSource, load_source
from asyncfetch.merge.summaries import (
    QuantileSearch,
    Summary,
    combine_columns,
    quantile_ranks,
    quantiles_between,
    summarise,
)
from asyncfetch.merge.tasks import RowsTask, file_units, write, write_metadata
from asyncfetch.runtime.concurrently import gather
from asyncfetch.runtime.threads import run_sync

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from asyncfetch.merge.destination import Destination
    from asyncfetch.merge.executor import WorkerPool, WorkerSetup
    from asyncfetch.merge.local_folder import WrittenFile
    from asyncfetch.merge.plan import Limits, MergePlan
    from asyncfetch.merge.sources import Selection
    from asyncfetch.merge.summaries import Statistics, SummaryTask
    from asyncfetch.merge.tasks import FileUnit


@dataclass(frozen=True, slots=True)
class MergeProgress:
    """The written part of the rows and videos."""

    bytes_done: int
    bytes_total: int
    """An estimate, at least ``bytes_done``."""
    files_done: int
    files_total: int


class ProgressCounter:
    """Adds up written bytes and files, and reports each change."""

    def __init__(self, report: Callable[[MergeProgress], object] | None) -> None:
        self._report = report
        self._bytes: dict[str, int] = {}
        self._bytes_done = self._bytes_total = self._files_done = self._files_total = 0

    def expect(self, files: int, nbytes: int) -> None:
        """Note how many files of rows and videos there will be, and about how many bytes."""
        self._files_total, self._bytes_total = files, nbytes

    def wrote(self, url: str, nbytes: int) -> None:
        """Note that the file has this many bytes so far."""
        self._bytes_done += nbytes - self._bytes.get(url, 0)
        self._bytes[url] = nbytes
        if self._report is not None:
            total = max(self._bytes_total, self._bytes_done)
            self._report(MergeProgress(self._bytes_done, total, self._files_done, self._files_total))

    def finished(self, url: str, nbytes: int) -> None:
        """Note that the file is complete."""
        self._files_done += 1
        self.wrote(url, nbytes)


_SOURCES_AT_ONCE = 16
"""Sources whose metadata a worker reads side by side."""
_SOURCE_SECONDS = 0.03
"""Seconds that a processor takes for the metadata of a source with a video of each camera."""
_ANYWHERE = frozenset({"file", "http", "https", "s3", "hf"})
"""Schemes that another process reads as this one does; one of fsspec's may name this process's own memory."""


@dataclass(frozen=True, slots=True, repr=False)
class MergeJob:
    """A complete description of a merge. Plain data, which pickles."""

    plan: MergePlan
    units: tuple[FileUnit, ...]
    """Its files of rows and videos."""
    destination: Destination
    overwrite: bool

    def __repr__(self) -> str:
        return f"<MergeJob of {len(self.plan.sources)} datasets into {self.destination.name}, {len(self.units)} files>"

    @property
    def nbytes(self) -> int:
        """Bytes of the rows and videos, about."""
        return sum(unit.nbytes for unit in self.units)

    @property
    def seconds(self) -> float:
        """Seconds of a processor for all files, about; 0 if only this process can read the sources."""
        return sum(unit.seconds for unit in self.units) if _are_anywhere(self.plan.sources) else 0

    def open(self, pool: WorkerPool, *, shared: bool = False) -> AbstractAsyncContextManager[None]:
        """Hold the build for the pool's workers."""
        at_once = sum(sorted(unit.nbytes for unit in self.units)[-pool.workers :])
        return self.destination.open(pool.fetcher, self.nbytes, at_once, overwrite=self.overwrite, shared=shared)


async def plan_job(
    pool: WorkerPool, selections: Sequence[Selection], destination: Destination, limits: Limits, *, overwrite: bool
) -> MergeJob:
    """Check the destination, read and check the sources, and plan; MergeError with every reason not to."""
    await check_free(pool, destination, selections, overwrite=overwrite)
    different = list(dict.fromkeys(selections))
    shares = [share for number in range(pool.workers) if (share := different[number :: pool.workers])]
    pool.expect(_SOURCE_SECONDS * len(different) if _are_anywhere(different) else 0)
    loaded: dict[Selection, MergeSource | DatasetError | FetchError] = {}
    values = await gather(*(partial(pool.run, load_sources, share) for share in shares))
    for share, value in zip(shares, values, strict=True):
        loaded |= zip(share, value, strict=True)
    sources = [source for one in selections if isinstance(source := loaded[one], MergeSource)]
    if errors := [error for one in different if not isinstance(error := loaded[one], MergeSource)]:
        others = await run_sync(disagreements, sources) if sources else []
        refuse([*map(str, errors), *others], errors[0])
    plan = await run_sync(plan_merge, sources, limits)
    units = await run_sync(file_units, plan)
    return MergeJob(plan, tuple(units), destination.build(plan.fingerprint()), overwrite)


async def check_free(
    pool: WorkerPool, destination: Destination, sources: Sequence[Selection | MergeSource], *, overwrite: bool
) -> None:
    """MergeError unless a dataset of these sources can be written there."""
    with system_errors([destination.name]):
        await destination.check(pool.fetcher, [source.url for source in sources], overwrite=overwrite)


async def load_sources(
    setup: WorkerSetup, selections: Sequence[Selection]
) -> list[MergeSource | DatasetError | FetchError]:
    """Each source, or the error of reading it."""

    async def load(selection: Selection) -> MergeSource | DatasetError | FetchError:
        try:
            return await load_source(setup.fetcher, selection)
        except (DatasetError, FetchError) as error:
            return error

    return await for_each(selections, load, workers=_SOURCES_AT_ONCE)


async def carry_out(jobs: Sequence[MergeJob], pool: WorkerPool, progress: ProgressCounter) -> list[tuple[int, int]]:
    """Write the files that aren't written yet; returns the number of files and their bytes, by job.

    Once all are written, the datasets are published one right after the other. A merge that ends before that leaves no
    dataset, and the same call resumes from there. Files that a killed merge had finished are counted, too.

    Raises:
        MergeError: There is no room or no permission to write, or another merge is building the destination, or it was
            filled meanwhile.
        FetchError: A source could not be read, or the destination could not be written.
        DatasetError: A source contradicts its metadata.
    """
    progress.expect(sum(len(job.units) for job in jobs), sum(job.nbytes for job in jobs))
    written, publications = [], []
    with system_errors(job.destination.name for job in jobs):
        finished = [await job.destination.finished(pool.fetcher) for job in jobs]
        unfinished = [job for job, files in zip(jobs, finished, strict=True) if files is None]
        pool.expect(sum(job.seconds for job in unfinished))
        async with AsyncExitStack() as stack:
            for job in unfinished:
                await stack.enter_async_context(job.open(pool))
            for job, files in zip(jobs, finished, strict=True):
                if files is None:
                    room = await stack.enter_async_context(job.destination.room())
                    own, metadata, nbytes = await _write(job, pool, progress, room)
                    written.append((len(own) + len(metadata), nbytes))
                    publish = partial(job.destination.publish, pool.fetcher, room, own, metadata)
                    publications.append(partial(publish, overwrite=job.overwrite))
                else:
                    paths = {unit.path for unit in job.units}
                    for file in files:
                        if file.path in paths:
                            progress.finished(job.destination.url(file.path), file.nbytes)
                    written.append((len(files), sum(file.nbytes for file in files)))
            for publish in publications:
                await publish()
            for job in jobs:
                await job.destination.forget(pool.fetcher)
    return written


async def _write(
    job: MergeJob, pool: WorkerPool, progress: ProgressCounter, room: Path
) -> tuple[list[WrittenFile], list[str], int]:
    """The files of rows and videos, the paths of those of metadata in the room, and the bytes of all.

    Finished files stay, whatever happens.
    """

    async def write_file(unit: FileUnit) -> WrittenFile:
        file: WrittenFile = await pool.run(write, job.destination, unit)
        progress.finished(job.destination.url(file.path), file.nbytes)
        return file

    files = await for_each(job.units, write_file, workers=pool.workers)
    metadata = await run_sync(write_metadata, job.plan, *await _summary_of(job, pool), room)
    nbytes = await run_sync(lambda: sum((room / path).stat().st_size for path in metadata))
    return files, metadata, sum(file.nbytes for file in files) + nbytes


async def _summary_of(job: MergeJob, pool: WorkerPool) -> tuple[Summary, dict[str, Statistics]]:
    """A summary of all rows, and the statistics of numeric features.

    Few rows are read back once, many twice or more, since quantiles are searched for in rounds: see ``QuantileSearch``.
    """
    parts = [part for unit in job.units if isinstance(unit, RowsTask) for part in unit.parts()]
    if not parts:
        return Summary(), {}
    count = job.plan.num_frames
    search = QuantileSearch(count, quantile_ranks(count))

    async def sum_of(*arguments: object) -> Summary:
        sums: list[Summary] = []

        async def add(part: SummaryTask) -> None:
            value = await pool.run(summarise, job.destination, part, *arguments)
            while sums:
                value = await run_sync(operator.add, sums.pop(), value)
            sums.append(value)

        await for_each(parts, add, workers=pool.workers)
        return sums.pop()

    summary = await sum_of(search.shift)
    search.learn(summary.counted)
    while search.wanted:
        search.learn((await sum_of(search.shift, search.wanted)).counted)
    numbers = {key: combine_columns(columns) for key, columns in summary.by_episode().items()}
    for key, own in numbers.items():
        ordered = search.values(key).reshape(*own["min"].shape, -1)
        own |= quantiles_between(ordered, count, own["min"])
    return summary, numbers


async def carry_out_share(job: MergeJob, pool: WorkerPool, rank: int, world_size: int) -> None:
    """Write every ``world_size``-th file, from the one numbered ``rank`` on, for ``carry_out``; with its errors."""
    with system_errors([job.destination.name]):
        if await job.destination.finished(pool.fetcher) is None:
            async with job.open(pool, shared=True):
                write_file = partial(pool.run, write, job.destination)
                await for_each(job.units[rank::world_size], write_file, workers=pool.workers)


def _are_anywhere(sources: Sequence[MergeSource | Selection]) -> bool:
    schemes = (source.url.partition("://") for source in sources)
    return all(not separator or scheme.lower() in _ANYWHERE for scheme, separator, _ in schemes)
