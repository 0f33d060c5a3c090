"""``merge_datasets``: read all that matters, check it, write it once, and let the destination have it."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from asyncfetch.config import FetchConfig
from asyncfetch.errors import ConfigError, DatasetError, FetchError
from asyncfetch.fetch import Fetcher
from asyncfetch.merge.build import build_dataset
from asyncfetch.merge.destination import Room, destination_of
from asyncfetch.merge.plan import Limits, plan_merge
from asyncfetch.merge.sources import Selection, Source, load_source
from asyncfetch.merge.validate import refuse
from asyncfetch.runtime.concurrently import gather

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from asyncfetch.fetch.reader import RangeReader
    from asyncfetch.merge.plan import MergePlan

__all__ = ["MergeReport", "merge_datasets"]

DATA_FILE_MAX_BYTES = 100 * 1024 * 1024
VIDEO_FILE_MAX_BYTES = 200 * 1024 * 1024
FILES_PER_CHUNK = 1000
"""LeRobot's defaults (0.6)."""

_SOURCES_AT_ONCE = 16
"""Sources whose metadata are read side by side."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What a merge wrote, or would."""

    destination: Path | str
    """A url where it isn't local."""
    episodes: int
    frames: int
    tasks: int
    files: int
    """Files of rows and videos, and when they are written those of metadata."""
    bytes: int
    """Of these files; before they are written, about."""
    seconds: float
    is_dry_run: bool


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
    progress: Callable[[int, int], object] | None = None,
) -> MergeReport:
    """Join LeRobot datasets to one of v3, their episodes one after the other in the order of the sources.

    Everything is read and checked before anything is written; then every file is written once, in a folder beside the
    destination which takes its place at the end. Where it fails or is cancelled, the folder is removed and the
    destination is as it was. The coded pictures are copied as they are. The result doesn't depend on ``workers``, and
    merging merged datasets gives what merging all at once does.

    On S3 nothing is renamed: a file is built in a temporary folder (``TMPDIR``), put when it is whole, and removed,
    so that there are no more of them than workers; ``meta/info.json`` comes last. Where that fails, what was put stays
    and is no dataset, nor is what it was to replace.

    Not carried over: rows and videos that no episode names, files in ``meta`` that LeRobot doesn't know, sound.

    Args:
        sources: Directories or urls of at least one dataset, of v3, v2.1 or v2.0, or selections of some of their
            episodes. They are only read.
        destination: A local directory or an ``s3://bucket/prefix`` that is empty or doesn't exist yet.
        workers: Files written at a time; None: as many as there are processors.
        overwrite: Replace all that is there.
        dry_run: Read, check and plan only.
        data_file_max_bytes: A file of rows ends with the last episode that keeps it within this; one always fits.
        video_file_max_bytes: Likewise for a video.
        files_per_chunk: Files in a chunk directory.
        fetch: How the sources are read, and the destination is written.
        progress: Called with the bytes written and about how many there will be.

    Raises:
        ConfigError: An argument can't be meant.
        MergeError: The destination is taken or too small, or the sources can't be read or disagree; lists every reason.
        FetchError: A source could not be read while it was being copied.
        DatasetError: A source's rows aren't what its metadata say.
        MissingDependency: pyarrow isn't installed.
    """
    started = time.monotonic()
    workers = _check_workers(workers)
    limits = Limits(data_file_max_bytes, video_file_max_bytes, files_per_chunk)
    selections = _check_sources(sources)
    urls = [selection.url for selection in selections]
    _check_limits(limits)
    async with Fetcher(fetch if fetch is not None else FetchConfig()) as fetcher:
        target = destination_of(destination, fetcher)
        await target.check(urls, overwrite=overwrite)
        loaded = await _load(fetcher, selections)
        plan = await anyio.to_thread.run_sync(plan_merge, loaded, limits)
        expected_bytes = _expected_bytes(plan)
        files, nbytes = len(plan.videos) + len(plan.data_files()), expected_bytes
        if not dry_run:
            async with target.open(Room(expected_bytes, _most_bytes_at_once(plan, workers))) as folder:
                counted = partial(_Counter(expected_bytes, progress).add)
                files, nbytes = await build_dataset(
                    fetcher, plan, folder, workers=workers, wrote=counted, place=target.place
                )
                await target.finish()
    report = MergeReport(
        destination=target.name,
        episodes=len(plan.episodes),
        frames=plan.num_frames,
        tasks=len(plan.tasks),
        files=files,
        bytes=nbytes,
        seconds=time.monotonic() - started,
        is_dry_run=dry_run,
    )
    logger.info(
        "merged %d datasets into %s: %d episodes, %d frames, %d files, %d bytes, %.1f s",
        *(len(urls), target.name, report.episodes, report.frames, files, nbytes, report.seconds),
    )
    return report


class _Counter:
    """Adds up what was written."""

    def __init__(self, expected_bytes: int, progress: Callable[[int, int], object] | None) -> None:
        self._expected_bytes = expected_bytes
        self._progress = progress
        self._done_bytes = 0

    def add(self, nbytes: int) -> None:
        self._done_bytes += nbytes
        if self._progress is not None:
            self._progress(self._done_bytes, max(self._expected_bytes, self._done_bytes))


def _check_workers(workers: object) -> int:
    if workers is None:
        return os.cpu_count() or 1
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ConfigError(f"workers must be a whole number of at least 1, or None for one a processor, not {workers!r}")
    return workers


def _check_limits(limits: Limits) -> None:
    for name in ("data_file_max_bytes", "video_file_max_bytes", "files_per_chunk"):
        value = getattr(limits, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")


def _check_sources(sources: Sequence[str | os.PathLike[str] | Selection] | str) -> list[Selection]:
    if isinstance(sources, str) or not sources:
        raise ConfigError(f"sources must be a list of at least one dataset, not {sources!r}")
    return [source if isinstance(source, Selection) else Selection(source) for source in sources]


async def _load(reader: RangeReader, selections: Sequence[Selection]) -> list[Source]:
    """All sources, or every reason why not."""
    limiter = anyio.CapacityLimiter(_SOURCES_AT_ONCE)

    async def load(selection: Selection) -> Source | DatasetError | FetchError:
        async with limiter:
            try:
                return await load_source(reader, selection, run=anyio.to_thread.run_sync)
            except (DatasetError, FetchError) as error:
                return error

    loaded = await gather(*(partial(load, selection) for selection in selections))
    errors = [one for one in loaded if not isinstance(one, Source)]
    refuse([str(error) for error in errors], errors[0] if errors else None)
    return [one for one in loaded if isinstance(one, Source)]


def _expected_bytes(plan: MergePlan) -> int:
    videos = sum(segment.nbytes for video in plan.videos for segment in video.segments)
    return videos + sum(map(plan.row_bytes, plan.episodes))


def _most_bytes_at_once(plan: MergePlan, workers: int) -> int:
    """Of the files that so many workers have under way."""
    lengths = [sum(segment.nbytes for segment in video.segments) for video in plan.videos]
    lengths += [sum(map(plan.row_bytes, episodes)) for episodes in plan.data_files()]
    return sum(sorted(lengths)[-workers:])
