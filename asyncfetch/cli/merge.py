"""``asyncfetch merge``: LeRobot datasets joined to one."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import anyio
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

from asyncfetch.cli.sizes import format_bytes, parse_bytes
from asyncfetch.merge import merge_datasets

__all__ = ["merge"]


def merge(
    paths: Annotated[
        list[str],
        typer.Argument(help="The datasets, directories or urls, then the directory or s3:// prefix to write."),
    ],
    workers: Annotated[
        int | None, typer.Option(help="Files written at a time. [default: one a processor]", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and plan only.")] = False,
    data_file_max_bytes: Annotated[str, typer.Option(help="Length of a file of rows, such as 100MiB.")] = "100MiB",
    video_file_max_bytes: Annotated[str, typer.Option(help="Length of a video, such as 200MiB.")] = "200MiB",
    files_per_chunk: Annotated[int, typer.Option(help="Files in a chunk directory.")] = 1000,
) -> None:
    """Join LeRobot v3 datasets to one: checked first, every file written once, videos copied as they are."""
    if len(paths) < 2:
        raise typer.BadParameter("give at least one dataset, then the directory to write")
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("merge", total=None)
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
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
        report = anyio.run(call)
    print(
        f"{report.destination}: {report.episodes:,} episodes, {report.frames:,} frames, {report.tasks:,} tasks in "
        f"{report.files:,} files, {format_bytes(report.bytes)}, {report.seconds:.1f} s"
        + (" (nothing written)" if report.is_dry_run else "")
    )
