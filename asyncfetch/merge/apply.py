"""``merge_datasets``: read all that matters, check it, write it once beside the destination, and rename it."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio.to_thread

from asyncfetch.config import FetchConfig
from asyncfetch.merge.arguments import check_destination, check_limits, check_paths, check_workers
from asyncfetch.merge.folder import restore_target
from asyncfetch.merge.here import InProcess
from asyncfetch.merge.job import carry_out, plan_job
from asyncfetch.merge.plan import Limits
from asyncfetch.merge.progress import Progress

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from asyncfetch.merge.job import MergeJob
    from asyncfetch.merge.kernel import Executor
    from asyncfetch.merge.progress import MergeProgress

__all__ = ["MergeReport", "PlannedFile", "merge_datasets"]

DATA_FILE_MAX_BYTES = 100 * 1024 * 1024
VIDEO_FILE_MAX_BYTES = 200 * 1024 * 1024
FILES_PER_CHUNK = 1000
"""LeRobot's defaults (0.6)."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file of rows or a video of a merged dataset."""

    path: str
    """In the destination."""
    episodes: int
    bytes: int
    """About."""


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What a merge wrote, or would."""

    destination: Path
    episodes: int
    frames: int
    tasks: int
    files: int
    """Files of rows and videos, and when they are written those of metadata."""
    bytes: int
    """Of these files; before they are written, about."""
    seconds: float
    is_dry_run: bool
    planned: tuple[PlannedFile, ...]
    """The files of rows, then the videos."""
    dropped: tuple[str, ...]
    """Urls of what lies in the sources' ``meta`` and isn't carried over, of sources that can be listed. A directory's
    ends in "/"."""


async def merge_datasets(
    sources: Sequence[str | os.PathLike[str]],
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
    """Join LeRobot v3 datasets to one, their episodes one after the other in the order of the sources.

    Everything is read and checked before anything is written; then every file is written once, in a hidden folder
    beside the destination, which takes its place at the end. Until then the destination is as it was. The coded
    pictures are copied as they are. The result doesn't depend on ``workers`` or ``executor``, and merging merged
    datasets gives what merging all at once does.

    A fetch that fails, a cancellation or a kill leaves that folder where a file in it is finished. The same call goes
    on from there; one for the same destination with other sources or limits removes it.

    Not carried over: rows and videos that no episode names, files in ``meta`` that LeRobot doesn't know, sound.

    Args:
        sources: Directories or urls of at least one dataset. They are only read.
        destination: A local directory that is empty or doesn't exist yet.
        workers: Pieces of work at a time; None: as many as there are processors.
        overwrite: Replace what is there.
        dry_run: Read, check and plan only.
        data_file_max_bytes: A file of rows ends with the last episode that keeps it within this; one always fits.
        video_file_max_bytes: Likewise for a video.
        files_per_chunk: Files in a chunk directory.
        fetch: How the sources are read.
        executor: Where the work is done; None: in this process.
        progress: Called whenever something was written.

    Raises:
        ConfigError: An argument can't be meant.
        MergeError: The destination is taken, too small or being built by somebody else, or the sources can't be read
            or disagree; lists every reason.
        FetchError: A source could not be read while it was being copied.
        DatasetError: A source's rows aren't what its metadata say.
        MissingDependency: pyarrow isn't installed.
    """
    started = time.monotonic()
    check_workers(workers)
    limits = Limits(data_file_max_bytes, video_file_max_bytes, files_per_chunk)
    check_limits(limits)
    urls, target = check_paths(sources, destination)
    await anyio.to_thread.run_sync(prepare_target, target, urls, overwrite)
    told = Progress(progress)
    async with (executor or InProcess()).open(fetch or FetchConfig(), workers, told.wrote) as pool:
        job = await plan_job(pool, urls, target, limits)
        if dry_run:
            return report_on(job, len(job.units), job.nbytes, time.monotonic() - started, is_dry_run=True)
        told.expect(len(job.units), job.nbytes)
        files, nbytes = await carry_out(job, pool, told, overwrite=overwrite)
    return report_on(job, files, nbytes, time.monotonic() - started)


def prepare_target(target: Path, urls: Sequence[str], overwrite: bool) -> None:
    """Put right what a killed merge left at the target, and refuse one that isn't free. Blocks."""
    restore_target(target)
    check_destination(target, urls, overwrite)


def report_on(job: MergeJob, files: int, nbytes: int, seconds: float, *, is_dry_run: bool = False) -> MergeReport:
    """The report, which is logged too."""
    episodes, frames = len(job.plan.episodes), job.plan.num_frames
    logger.info(
        "%s %d datasets into %s: %d episodes, %d frames, %d files, %d bytes, %.1f s",
        *("would merge" if is_dry_run else "merged", len(job.plan.sources), job.target),
        *(episodes, frames, files, nbytes, seconds),
    )
    return MergeReport(
        destination=job.target,
        episodes=episodes,
        frames=frames,
        tasks=len(job.plan.tasks),
        files=files,
        bytes=nbytes,
        seconds=seconds,
        is_dry_run=is_dry_run,
        planned=tuple(PlannedFile(unit.path, unit.num_episodes, unit.nbytes) for unit in job.units),
        dropped=tuple(dict.fromkeys(url for source in job.plan.sources for url in source.dropped)),
    )
