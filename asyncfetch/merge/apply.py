"""``merge_datasets``: read and check the sources, write each file once beside the destination, and rename."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from asyncfetch.config import FetchConfig
from asyncfetch.config.checks import whole_number
from asyncfetch.errors import ConfigError
from asyncfetch.merge.destination import destination_of
from asyncfetch.merge.executor import OnThisMachine
from asyncfetch.merge.info import differences
from asyncfetch.merge.job import ProgressCounter, carry_out, plan_job
from asyncfetch.merge.plan import Limits
from asyncfetch.merge.sources import Selection
from asyncfetch.runtime.fork import running_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from asyncfetch.merge.executor import Executor
    from asyncfetch.merge.job import MergeJob, MergeProgress


def selections_of(sources: Sequence[str | os.PathLike[str] | Selection] | str) -> list[Selection]:
    """The sources, at least one; relative paths become absolute, since other processes may read them."""
    if isinstance(sources, str) or not sources:
        raise ConfigError(f"sources must be a list of at least one dataset, not {sources!r}")
    selections = [source if isinstance(source, Selection) else Selection(source) for source in sources]
    return [replace(one, source=os.path.abspath(one.url)) if _is_relative(one.url) else one for one in selections]


def _is_relative(url: str) -> bool:
    return bool(url) and "://" not in url and not os.path.isabs(url)


DATA_FILE_MAX_BYTES = 100 * 1024 * 1024
VIDEO_FILE_MAX_BYTES = 200 * 1024 * 1024
FILES_PER_CHUNK = 1000
"""LeRobot's defaults (0.6)."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file of rows or a video of a merged dataset."""

    path: str
    """Path in the destination."""
    episodes: int
    bytes: int
    """Bytes of the file, about."""


@dataclass(frozen=True, slots=True)
class MergeReport:
    """Report of a merge, or of a dry run."""

    destination: Path | str
    """A path, or a url on S3."""
    episodes: int
    frames: int
    tasks: int
    files: int
    """Files of rows and videos, and, once written, of metadata."""
    bytes: int
    """Bytes of these files; an estimate for a dry run."""
    seconds: float
    is_dry_run: bool
    planned: tuple[PlannedFile, ...]
    """The files of rows, then the videos."""
    dropped: tuple[str, ...]
    """Urls of files in the sources' ``meta`` that aren't carried over, for sources that can be listed. A directory's
    ends in "/"."""
    differences: tuple[str, ...] = ()
    """Entries of info.json that aren't carried over, because some sources lack them or have other values, in words."""


async def merge_datasets(
    sources: Sequence[str | os.PathLike[str] | Selection],
    destination: str | os.PathLike[str],
    *,
    workers: int | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    data_file_max_bytes: int = DATA_FILE_MAX_BYTES,
    video_file_max_bytes: int = VIDEO_FILE_MAX_BYTES,
    files_per_chunk: int = FILES_PER_CHUNK,
    fetch: FetchConfig | None = None,
    executor: Executor | None = None,
    progress: Callable[[MergeProgress], object] | None = None,
) -> MergeReport:
    """Join LeRobot datasets to one of v3, their episodes one after the other in the order of the sources.

    Everything is read and checked before anything is written; then every file is written once, in a hidden folder
    beside the destination, which takes its place at the end. Until then the destination is unchanged. Coded pictures
    are copied without re-encoding. The result doesn't depend on ``workers`` or ``executor``, and merging merged
    datasets gives the same as merging all at once.

    A failed fetch, a cancellation or a kill leaves that folder if a file in it is finished. The same call resumes from
    there; if the destination is complete already, it reports that as if it had just been written. A call for the same
    destination with other sources or limits removes the folder.

    On S3 nothing is renamed. A file is written in a temporary folder (``TMPDIR``), put when it is complete, and removed
    there, so there are no more of them than workers; ``meta/info.json`` comes last. An interrupted merge leaves the
    files that it has put, without a valid dataset, even if one was to be replaced; the same call resumes from there, on
    any machine. Never run two merges into one destination at a time: on S3 that isn't noticed.

    Not carried over: rows and videos that no episode refers to, files in ``meta`` that LeRobot doesn't know, sound.

    Args:
        sources: Directories or urls of at least one dataset, of v3, v2.1 or v2.0, or selections of some of their
            episodes. They are only read.
        destination: A local directory or an ``s3://bucket/prefix`` that is empty or doesn't exist yet.
        workers: Pieces of work at a time; None for the number of processors. Work of more than some seconds is done in
            processes, gone when this returns; less in threads.
        overwrite: Replace all that is there.
        dry_run: Read, check and plan only.
        data_file_max_bytes: Bound on a file of rows; a single episode may exceed it.
        video_file_max_bytes: Bound on a video, likewise.
        files_per_chunk: Files in a chunk directory, at most 1000: LeRobot reads them in the order of their names.
        fetch: Configuration for reading the sources and writing to S3.
        executor: Runs the work; None means this machine.
        progress: Called after each write.

    Raises:
        ConfigError: An argument is invalid.
        MergeError: The destination is taken, too small, being built by another merge or not writable, or the sources
            can't be read or disagree; lists every reason.
        FetchError: A source could not be read while it was being copied, or the destination could not be written;
            ObjectChanged if a source was replaced after it was read and checked.
        DatasetError: A source's rows contradict its metadata.
        WorkerError: A process that worked for it has died.
        MissingDependency: pyarrow isn't installed.
    """
    [report] = await merge_several(
        [(sources, destination)],
        workers=workers,
        overwrite=overwrite,
        dry_run=dry_run,
        data_file_max_bytes=data_file_max_bytes,
        video_file_max_bytes=video_file_max_bytes,
        files_per_chunk=files_per_chunk,
        fetch=fetch,
        executor=executor,
        progress=progress,
    )
    return report


async def merge_several(
    merges: Sequence[tuple[Sequence[str | os.PathLike[str] | Selection], str | os.PathLike[str]]],
    *,
    workers: int | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    data_file_max_bytes: int = DATA_FILE_MAX_BYTES,
    video_file_max_bytes: int = VIDEO_FILE_MAX_BYTES,
    files_per_chunk: int = FILES_PER_CHUNK,
    fetch: FetchConfig | None = None,
    executor: Executor | None = None,
    progress: Callable[[MergeProgress], object] | None = None,
) -> list[MergeReport]:
    """Several merges, each of sources and a destination: all are planned, then all written, then all published.

    The other arguments and all errors are those of ``merge_datasets``.
    """
    running_loop("a merge")
    limits = Limits(data_file_max_bytes, video_file_max_bytes, files_per_chunk)
    if workers is not None:
        workers = whole_number("workers, which may be None for one a processor,", workers, least=1)
    named = [(selections_of(sources), destination_of(destination)) for sources, destination in merges]
    counter = ProgressCounter(progress)
    started = time.monotonic()
    async with (executor or OnThisMachine()).open(fetch or FetchConfig(), workers, counter.wrote) as pool:
        jobs = [await plan_job(pool, selections, target, limits, overwrite=overwrite) for selections, target in named]
        written = [(len(job.units), job.nbytes) for job in jobs] if dry_run else await carry_out(jobs, pool, counter)
    seconds = time.monotonic() - started
    return [report_on(job, *one, seconds, is_dry_run=dry_run) for job, one in zip(jobs, written, strict=True)]


def report_on(job: MergeJob, files: int, nbytes: int, seconds: float, *, is_dry_run: bool = False) -> MergeReport:
    """The report, which is logged too."""
    episodes, frames = len(job.plan.episodes), job.plan.num_frames
    logger.info(
        "%s %d datasets into %s: %d episodes, %d frames, %d files, %d bytes, %.1f s",
        *("would merge" if is_dry_run else "merged", len(job.plan.sources), job.destination.name),
        *(episodes, frames, files, nbytes, seconds),
    )
    return MergeReport(
        destination=job.destination.name,
        episodes=episodes,
        frames=frames,
        tasks=len(job.plan.tasks),
        files=files,
        bytes=nbytes,
        seconds=seconds,
        is_dry_run=is_dry_run,
        planned=tuple(PlannedFile(unit.path, unit.num_episodes, unit.nbytes) for unit in job.units),
        dropped=tuple(dict.fromkeys(url for source in job.plan.sources for url in source.dropped)),
        differences=tuple(differences(job.plan)),
    )
