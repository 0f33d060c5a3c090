"""``asyncfetch merge``, ``select``, ``split``, ``convert``: LeRobot datasets joined, or rewritten."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Annotated, TypeVar

import anyio
import typer

from asyncfetch.cli.terminal import CaFile, format_bytes, parse_bytes, progress
from asyncfetch.config import FetchConfig
from asyncfetch.errors import ConfigError
from asyncfetch.merge import convert_dataset, merge_datasets, select_episodes, split_dataset

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncfetch.merge import MergeProgress, MergeReport
    from asyncfetch.merge.subsets import Share

T = TypeVar("T")

MAX_EPISODES = 10_000_000
"""Bound on the episodes of a command, which are held as a list of 0.4 GB."""
_RANGE = re.compile(r"\s*(\d{1,18})\s*(?:-\s*(\d{1,18})\s*)?")

Source = Annotated[str, typer.Argument(metavar="URL", help="The dataset: a directory or a URL.")]
Destination = Annotated[str, typer.Argument(help="The directory or s3:// prefix to write.")]
Workers = Annotated[
    int | None, typer.Option(help="Pieces of work at a time. [default: one per processor]", show_default=False)
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing destination.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check, and print the plan; write nothing.")]


def merge(
    paths: Annotated[
        list[str],
        typer.Argument(help="The datasets (directories or URLs), then the directory or s3:// prefix to write."),
    ],
    workers: Workers = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    data_file_max_bytes: Annotated[str, typer.Option(help="Largest file of rows, such as 100MiB.")] = "100MiB",
    video_file_max_bytes: Annotated[str, typer.Option(help="Largest video file, such as 200MiB.")] = "200MiB",
    files_per_chunk: Annotated[int, typer.Option(help="Files in a chunk directory, at most 1000.")] = 1000,
    ca_file: CaFile = None,
) -> None:
    """Merge LeRobot datasets into one of v3. Everything is checked first, and videos aren't encoded again."""
    if len(paths) < 2:
        raise typer.BadParameter("give at least one dataset, then the directory to write")
    call = partial(
        merge_datasets,
        paths[:-1],
        paths[-1],
        workers=workers,
        overwrite=overwrite,
        dry_run=dry_run,
        data_file_max_bytes=parse_bytes(data_file_max_bytes),
        video_file_max_bytes=parse_bytes(video_file_max_bytes),
        files_per_chunk=files_per_chunk,
        fetch=FetchConfig(ca_file=ca_file),
    )
    print_report(run_with_bar(call))


def run_with_bar(call: Callable[..., Awaitable[T]]) -> T:
    """The call's value; shows its progress meanwhile."""
    with progress("written") as show:

        def report(now: MergeProgress) -> None:
            if now.bytes_total:
                show("written", now.bytes_done / now.bytes_total, f"{now.files_done}/{now.files_total} files")

        return anyio.run(partial(call, progress=report))


def print_report(report: MergeReport) -> None:
    """Print the plan of a dry run, entries that aren't carried over, and the sums."""
    if report.is_dry_run:
        for file in report.planned:
            print(f"{file.path}: {file.episodes:,} episodes, about {format_bytes(file.bytes)}")
    for url in report.dropped:
        print(f"not carried over: {url}")
    for line in report.differences:
        print(f"not carried over: {line}")
    print(
        f"{report.destination}: {report.episodes:,} episodes, {report.frames:,} frames, {report.tasks:,} tasks in "
        f"{report.files:,} files, {format_bytes(report.bytes)}, {report.seconds:.1f} s"
        + (" (nothing written)" if report.is_dry_run else "")
    )


def select(
    source: Source,
    destination: Destination,
    episodes: Annotated[str, typer.Option(help="Which episodes, such as 0-9,12 (0 to 9, both included).")],
    workers: Workers = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    ca_file: CaFile = None,
) -> None:
    """Write some of a dataset's episodes as a dataset. Videos aren't encoded again."""
    call = partial(select_episodes, source, destination, parse_episodes(episodes))
    call = partial(call, workers=workers, overwrite=overwrite, dry_run=dry_run, fetch=FetchConfig(ca_file=ca_file))
    print_report(run_with_bar(call))


def split(
    source: Source,
    destination: Destination,
    parts: Annotated[
        list[str], typer.Argument(help="Names and shares: train=0.9 val=0.1, or train=90 val=10, or val=0-9,12.")
    ],
    seed: Annotated[
        int | None, typer.Option(help="Shuffle the episodes with this seed. [default: in order]", show_default=False)
    ] = None,
    workers: Workers = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    ca_file: CaFile = None,
) -> None:
    """Split a dataset into several, each in the directory DESTINATION/NAME."""
    shares = dict(map(parse_share, parts))
    if len(shares) < len(parts):
        raise ConfigError(f"two parts have the same name: {' '.join(parts)}")
    call = partial(split_dataset, source, shares, destination, seed=seed)
    call = partial(call, workers=workers, overwrite=overwrite, dry_run=dry_run, fetch=FetchConfig(ca_file=ca_file))
    for report in run_with_bar(call).values():
        print_report(report)


def convert(
    source: Source,
    destination: Destination,
    workers: Workers = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    ca_file: CaFile = None,
) -> None:
    """Write a LeRobot v2.0 or v2.1 dataset as one of v3. Videos aren't encoded again."""
    call = partial(convert_dataset, source, destination)
    call = partial(call, workers=workers, overwrite=overwrite, dry_run=dry_run, fetch=FetchConfig(ca_file=ca_file))
    print_report(run_with_bar(call))


def parse_episodes(text: str) -> list[int]:
    """The indices in "0-9,12"; ConfigError if it has none, or more than MAX_EPISODES."""
    episodes: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ConfigError(f"{text!r} names no episodes: write indices and ranges, such as 0-9,12")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ConfigError(f"{part.strip()!r} names no episodes: write the lower number first")
        more = range(first, last + 1)
        if len(episodes) + len(more) > MAX_EPISODES:
            raise ConfigError(f"{text!r} names more than {MAX_EPISODES:,} episodes: take fewer at a time")
        episodes += more
    return episodes


def parse_share(text: str) -> tuple[str, Share]:
    """The name and the share in "train=0.9" (a part), "train=90" (a number) or "train=0-9,12" (indices)."""
    name, separator, share = text.partition("=")
    if not separator:
        raise ConfigError(f"{text!r} isn't a part of a split: write a name and a share, such as train=0.9")
    try:
        return name, int(share) if share.isascii() and share.isdigit() else float(share)
    except ValueError:
        return name, parse_episodes(share)
