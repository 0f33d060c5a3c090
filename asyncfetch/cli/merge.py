"""``asyncfetch merge``: LeRobot datasets joined to one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, TypeVar

import anyio
import typer

from asyncfetch.cli.files import CaFile, fetch_config
from asyncfetch.cli.terminal import format_bytes, parse_bytes, progress
from asyncfetch.merge import merge_datasets

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncfetch.merge import MergeProgress, MergeReport

__all__ = ["merge", "print_report", "run_with_bar"]

T = TypeVar("T")


def merge(
    paths: Annotated[
        list[str],
        typer.Argument(help="The datasets, directories or urls, then the directory or s3:// prefix to write."),
    ],
    workers: Annotated[
        int | None, typer.Option(help="Pieces of work at a time. [default: one a processor]", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, plan and print the plan only.")] = False,
    data_file_max_bytes: Annotated[str, typer.Option(help="Length of a file of rows, such as 100MiB.")] = "100MiB",
    video_file_max_bytes: Annotated[str, typer.Option(help="Length of a video, such as 200MiB.")] = "200MiB",
    files_per_chunk: Annotated[int, typer.Option(help="Files in a chunk directory, at most 1000.")] = 1000,
    ca_file: CaFile = None,
) -> None:
    """Join LeRobot v3 datasets to one: checked first, every file written once, videos copied as they are."""
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
        fetch=fetch_config(ca_file),
    )
    print_report(run_with_bar(call))


def run_with_bar(call: Callable[..., Awaitable[T]]) -> T:
    """Return what the call gives; how far it is, is shown meanwhile."""
    with progress("written") as show:

        def tell(now: MergeProgress) -> None:
            if now.bytes_total:
                show("written", now.bytes_done / now.bytes_total, f"{now.files_done}/{now.files_total} files")

        return anyio.run(partial(call, progress=tell))


def print_report(report: MergeReport) -> None:
    """The plan, where it is no more than that, what isn't carried over, and the sums."""
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
