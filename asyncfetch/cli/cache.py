"""``asyncfetch cache``: a disk cache from the outside. Everything here works while others use it."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncfetch.cache.disk import DIRECTORY_VARIABLE, Folder, default_directory, verify
from asyncfetch.cli.terminal import format_bytes, parse_bytes, progress
from asyncfetch.config.checks import absolute_directory

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

WAITING = "waiting for other processes"

commands = typer.Typer(
    help="Manage a disk cache: see, verify and delete what it holds.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

DirectoryOption = Annotated[
    str | None,  # not a Path, for which an empty one is the working directory
    typer.Option(
        "--directory",
        "-d",
        metavar="PATH",
        help=f"The cache's directory. [default: ${DIRECTORY_VARIABLE}, or ~/.cache/asyncfetch/disk]",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object, with bytes as numbers.")]


@commands.command(short_help="Show where the cache is.")
def path(directory: DirectoryOption = None, as_json: JsonOption = False) -> None:
    """Show where the cache is, or would be."""
    where = _resolve(directory)
    if as_json:
        _print_json({"directory": str(where), "exists": where.is_dir()})
    else:
        print(where)


@commands.command()
def stats(directory: DirectoryOption = None, as_json: JsonOption = False) -> None:
    """Show what the cache holds."""
    with _open(directory) as folder:
        with progress(WAITING, hidden=as_json) as show:
            survey = folder.survey(show)
        free_bytes = folder.free_bytes()
        if as_json:
            _print_json({"directory": str(folder.directory), **asdict(survey), "free_bytes": free_bytes})
            return
        _print_table({
            "directory": str(folder.directory),
            "objects": f"{survey.objects:,}",
            "files": f"{survey.files:,}",
            "on disk": format_bytes(survey.cost_bytes),
            "being written": format_bytes(survey.unfinished_bytes),
            "free on that disk": format_bytes(free_bytes),
            "longest unused since": _moment(survey.oldest_use_ns),
            "last used": _moment(survey.newest_use_ns),
        })


@commands.command(name="verify", short_help="Delete damaged files.")
def verify_files(directory: DirectoryOption = None, as_json: JsonOption = False) -> None:
    """Read every file and delete damaged ones. Exits with 1 if there were any."""
    files = read_bytes = damaged = cost_bytes = 0
    with _open(directory) as folder, progress(WAITING, hidden=as_json) as show:
        total_bytes = max(1, folder.used_bytes())
        for file, is_right in verify(folder):
            files, read_bytes, damaged = files + 1, read_bytes + file.piece.size_bytes, damaged + (not is_right)
            cost_bytes += file.cost_bytes
            show("reading", cost_bytes / total_bytes)
        where = str(folder.directory)
    if as_json:
        _print_json({"directory": where, "files": files, "read_bytes": read_bytes, "damaged": damaged})
    else:
        print(f"{files:,} files, {format_bytes(read_bytes)}: {damaged:,} damaged" + (" and deleted" if damaged else ""))
    if damaged:
        raise typer.Exit(1)


@commands.command(short_help="Delete the least recently used files.")
def prune(
    max_bytes: Annotated[str, typer.Option("--max-bytes", help="How much to keep: 10GiB, 500MB or a number of bytes.")],
    directory: DirectoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete the least recently used files until the cache is no larger than that."""
    limit = parse_bytes(max_bytes)
    with _open(directory) as folder:
        _prune(folder, limit, as_json=as_json)


@commands.command()
def clear(directory: DirectoryOption = None, as_json: JsonOption = False) -> None:
    """Delete everything in the cache. Other files in the directory stay."""
    with _open(directory) as folder:
        _prune(folder, 0, as_json=as_json)


def _resolve(directory: str | None) -> Path:
    return default_directory() if directory is None else absolute_directory(directory)


@contextmanager
def _open(directory: str | None) -> Iterator[Folder]:
    folder = Folder(_resolve(directory), create=False)
    try:
        yield folder
    finally:
        folder.close()


def _prune(folder: Folder, max_bytes: int, *, as_json: bool) -> None:
    with progress(WAITING, hidden=as_json) as show:
        removed = folder.prune(max_bytes, show)
    used_bytes = folder.used_bytes()
    if as_json:
        _print_json({"directory": str(folder.directory), **asdict(removed), "used_bytes": used_bytes})
    else:
        print(f"{removed.files:,} files deleted, {format_bytes(removed.cost_bytes)}: {format_bytes(used_bytes)} left")


def _print_table(rows: Mapping[str, str]) -> None:
    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(name, Text(value))  # a directory's name may look like rich's markup
    Console(soft_wrap=True).print(table)


def _print_json(value: Mapping[str, object]) -> None:
    print(json.dumps(value))


def _moment(nanoseconds: int | None) -> str:
    if nanoseconds is None:
        return "-"
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
