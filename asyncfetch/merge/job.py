"""A planned merge, and carrying it out, by any number of processes and in any number of attempts.

Every file is written once. Statistics, and the tasks of each episode, are added up in pairs. The plan and
``write_metadata`` are serial, because an episode's file depends on all episodes before it. They take 0.1 ms an episode
(one camera).
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import anyio

from asyncfetch.errors import DatasetError, FetchError
from asyncfetch.fetch.batch import for_each
from asyncfetch.merge.destination import SpaceNeed, system_errors
from asyncfetch.merge.pairwise import PairwiseSum
from asyncfetch.merge.plan import disagreements, plan_merge, refuse
from asyncfetch.merge.quantiles import QuantileSearch
from asyncfetch.merge.sources import MergeSource, load_source
from asyncfetch.merge.summaries import Summary, add, count_prefixes_again, quantile_ranks, summarise
from asyncfetch.merge.tasks import RowsTask, file_units, write, write_metadata
from asyncfetch.runtime.concurrently import gather
from asyncfetch.runtime.threads import run_sync

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from asyncfetch.merge.destination import Build, Destination, WrittenFile
    from asyncfetch.merge.executor import Piece, WorkerPool, WorkerSetup
    from asyncfetch.merge.plan import Limits, MergePlan
    from asyncfetch.merge.sources import Selection
    from asyncfetch.merge.summaries import Statistics
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
    """Adds up written bytes and files.

    Args:
        report: Called after each change; None reports nothing.
    """

    def __init__(self, report: Callable[[MergeProgress], object] | None) -> None:
        self._report = report
        self._bytes: dict[str, int] = {}
        self._bytes_done = self._bytes_total = self._files_done = self._files_total = 0

    def expect(self, files: int, nbytes: int) -> None:
        """Note the expected number of files of rows and videos, and about how many bytes they have."""
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


class FileWork:
    """Writes all of a plan's files and summarises their rows, as many pieces at a time as the pool has workers.

    Few rows are read back once, many twice or more, since quantiles are searched for in rounds: see ``quantiles``.

    Args:
        pool: Runs the pieces.
        build: Held by this merge alone.
        units: The files.
        progress: Counts each of them.
    """

    def __init__(self, pool: WorkerPool, build: Build, units: Sequence[FileUnit], progress: ProgressCounter) -> None:
        self.files: list[WrittenFile] = []
        """Finished files."""
        self.summary = Summary()
        """Of all rows."""
        self.numbers: dict[str, Statistics] = {}
        """Statistics of numeric features over all rows."""
        self._pool = pool
        self._build = build
        self._rows = [unit for unit in units if isinstance(unit, RowsTask)]
        self._videos = [unit for unit in units if not isinstance(unit, RowsTask)]
        self._parts = [part for unit in self._rows for part in unit.parts()]
        self._progress = progress
        self._workers = anyio.CapacityLimiter(pool.workers)

    async def do(self) -> None:
        """Write and summarise all files. Finished files stay, whatever happens.

        Raises:
            FetchError: A source could not be read, or the destination could not be written.
            DatasetError: A source contradicts its metadata.
        """
        workers = self._pool.workers
        await gather(self._write_and_summarise, partial(for_each, self._videos, self._write, workers=workers))

    async def _write(self, unit: FileUnit) -> None:
        async with self._workers:
            file = await self._pool.get(await self._pool.run(write, self._build, unit))
        self.files.append(file)
        self._progress.finished(self._build.url(file.path), file.nbytes)

    async def _write_and_summarise(self) -> None:
        """Write the files of rows, summarise each while it is in the page cache, and search for quantiles."""
        count = sum(sum(part.lengths) for part in self._parts)
        search = QuantileSearch(count, quantile_ranks(count))
        sums = self._begin_sum()
        numbers = defaultdict[str, list[int]](list)
        for number, part in enumerate(self._parts):
            numbers[part.path].append(number)

        async def write_one(unit: FileUnit) -> None:
            await self._write(unit)
            await gather(*(partial(self._add, sums, one, summarise, (search.shift,)) for one in numbers[unit.path]))

        await for_each(self._rows, write_one, workers=self._pool.workers)
        if not self._parts:
            return
        self.summary = await self._pool.get(sums.total)
        search.learn(self.summary.counted)
        while search.wanted:
            sums = self._begin_sum()
            look = partial(self._add, sums, piece=count_prefixes_again, more=(search.wanted, search.shift))
            await gather(*(partial(look, number) for number in range(len(self._parts))))
            search.learn(await self._pool.get(sums.total))
        for key, moments in self.summary.moments.items():
            ordered = search.values(key).reshape(*moments.mean.shape, -1)
            self.numbers[key] = moments.statistics(ordered)

    def _begin_sum(self) -> PairwiseSum:
        return PairwiseSum(len(self._parts), partial(self._pool.run, add))

    async def _add(self, sums: PairwiseSum, number: int, piece: Piece, more: tuple[object, ...]) -> None:
        """Run a piece on a part, and add its value."""
        async with self._workers:  # until it is added, so that few sums wait
            await sums.put(number, await self._pool.run(piece, self._build, self._parts[number], *more))


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
    def build(self) -> Build:
        """The build at the destination."""
        return self.destination.build(self.plan.fingerprint())

    @property
    def nbytes(self) -> int:
        """Bytes of the rows and videos, about."""
        return sum(unit.nbytes for unit in self.units)

    @property
    def seconds(self) -> float:
        """Seconds of a processor for all files, about; 0 if only this process can read the sources."""
        return sum(unit.seconds for unit in self.units) if _are_anywhere(self.plan.sources) else 0

    def needed(self, workers: int) -> SpaceNeed:
        """The bytes that so many workers need."""
        return SpaceNeed(self.nbytes, sum(sorted(unit.nbytes for unit in self.units)[-workers:]))


async def plan_job(
    pool: WorkerPool, selections: Sequence[Selection], destination: Destination, limits: Limits, *, overwrite: bool
) -> MergeJob:
    """Check the destination, read and check the sources, and plan.

    Raises:
        MergeError: It isn't free, or they can't be read or disagree; lists every reason.
    """
    await check_free(pool, destination, selections, overwrite=overwrite)
    different = list(dict.fromkeys(selections))
    shares = [different[number :: pool.workers] for number in range(min(pool.workers, len(different)))]
    pool.expect(_SOURCE_SECONDS * len(different) if _are_anywhere(different) else 0)
    loaded: dict[Selection, MergeSource | DatasetError | FetchError] = {}
    values = await gather(*(partial(pool.run, load_sources, share) for share in shares))
    for share, value in zip(shares, values, strict=True):
        loaded |= zip(share, await pool.get(value), strict=True)
    sources = [source for one in selections if isinstance(source := loaded[one], MergeSource)]
    if errors := [error for one in different if not isinstance(error := loaded[one], MergeSource)]:
        others = await run_sync(disagreements, sources) if sources else []
        refuse([*map(str, errors), *others], errors[0])
    plan = await run_sync(plan_merge, sources, limits)
    units = await run_sync(file_units, plan)
    return MergeJob(plan, tuple(units), destination, overwrite)


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
    limiter = anyio.CapacityLimiter(_SOURCES_AT_ONCE)

    async def load(selection: Selection) -> MergeSource | DatasetError | FetchError:
        async with limiter:
            try:
                return await load_source(setup.fetcher, selection, run=run_sync)
            except (DatasetError, FetchError) as error:
                return error

    return await gather(*(partial(load, selection) for selection in selections))


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
    with system_errors(job.destination.name for job in jobs):
        return await _carry_out(jobs, pool, progress)


async def _carry_out(jobs: Sequence[MergeJob], pool: WorkerPool, progress: ProgressCounter) -> list[tuple[int, int]]:
    finished = [await job.build.finished(pool.fetcher) for job in jobs]
    pool.expect(sum(job.seconds for job, files in zip(jobs, finished, strict=True) if files is None))
    async with AsyncExitStack() as stack:
        for job, files in zip(jobs, finished, strict=True):
            if files is None:
                needed = job.needed(pool.workers)
                await stack.enter_async_context(job.build.open(pool.fetcher, needed, overwrite=job.overwrite))
        written, publications = [], []
        for job, files in zip(jobs, finished, strict=True):
            if files is not None:
                _count_finished(job, files, progress)
                written.append((len(files), sum(file.nbytes for file in files)))
            else:
                room = await stack.enter_async_context(job.build.room())
                own, metadata, nbytes = await _write(job, pool, progress, room)
                written.append((len(own) + len(metadata), nbytes))
                publish = partial(job.build.publish, pool.fetcher, room, own, metadata)
                publications.append(partial(publish, overwrite=job.overwrite))
        for publish in publications:
            await publish()
        for job in jobs:
            await job.build.forget(pool.fetcher)
    return written


async def _write(
    job: MergeJob, pool: WorkerPool, progress: ProgressCounter, room: Path
) -> tuple[list[WrittenFile], list[str], int]:
    """The files of rows and videos, the paths of those of metadata in the room, and the bytes of all."""
    work = FileWork(pool, job.build, job.units, progress)
    await work.do()
    metadata = await run_sync(write_metadata, job.plan, work.summary, work.numbers, room)
    nbytes = await run_sync(_measure, room, metadata)
    return work.files, metadata, sum(file.nbytes for file in work.files) + nbytes


def _count_finished(job: MergeJob, files: Sequence[WrittenFile], progress: ProgressCounter) -> None:
    paths = {unit.path for unit in job.units}
    for file in files:
        if file.path in paths:
            progress.finished(job.build.url(file.path), file.nbytes)


async def carry_out_share(job: MergeJob, pool: WorkerPool, rank: int, world_size: int) -> None:
    """Write every ``world_size``-th file, from the one numbered ``rank`` on; ``carry_out`` finds them.

    Raises:
        MergeError: Another merge holds the build alone, or there is no room.
        FetchError, DatasetError: As of ``carry_out``.
    """

    async def write_file(unit: FileUnit) -> None:
        await pool.run(write, job.build, unit)

    with system_errors([job.destination.name]):
        if await job.build.finished(pool.fetcher) is not None:
            return
        needed = job.needed(pool.workers)
        async with job.build.open(pool.fetcher, needed, overwrite=job.overwrite, shared=True):
            await for_each(job.units[rank::world_size], write_file, workers=pool.workers)


def _are_anywhere(sources: Sequence[MergeSource | Selection]) -> bool:
    schemes = (source.url.partition("://") for source in sources)
    return all(not separator or scheme.lower() in _ANYWHERE for scheme, separator, _ in schemes)


def _measure(root: Path, paths: Sequence[str]) -> int:
    return sum((root / path).stat().st_size for path in paths)
