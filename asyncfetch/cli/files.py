"""``asyncfetch ls`` and ``cp``: files of any url that the engine reads."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from asyncfetch.cli.terminal import LineProgress, format_bytes
from asyncfetch.config import FetchConfig
from asyncfetch.errors import ConfigError, NotFound
from asyncfetch.fetch import Fetcher

if TYPE_CHECKING:
    from asyncfetch.ranges import ObjectInfo

__all__ = ["CaFile", "cp", "fetch_config", "ls"]

COPIED_AT_ONCE = 8
"""Files, each of which is read in parts side by side."""

CaFile = Annotated[
    str | None, typer.Option(help="PEM file of the authorities to trust. [default: the system's]", show_default=False)
]
Recursive = Annotated[bool, typer.Option("--recursive", "-r", help="Go into directories.")]


def fetch_config(ca_file: str | None) -> FetchConfig:
    """Return what a command asks by."""
    return FetchConfig(ca_file=ca_file)


def ls(
    url: Annotated[str, typer.Argument(help="A directory or prefix of s3://, hf://, a disk, or fsspec.")],
    recursive: Recursive = False,
    ca_file: CaFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, with bytes as numbers.")] = False,
) -> None:
    """List a directory: the size and the url of each entry."""
    entries = anyio.run(_list, url, fetch_config(ca_file), recursive)
    if as_json:
        typer.echo(json.dumps({"entries": [{"url": entry.url, "bytes": entry.size} for entry in entries]}))
        return
    for entry in entries:
        size = "" if entry.url.endswith("/") else format_bytes(entry.size)
        typer.echo(f"{size:>10}  {entry.url}")


async def _list(url: str, config: FetchConfig, recursive: bool) -> list[ObjectInfo]:
    async with Fetcher(config) as fetcher:
        return await fetcher.listdir(url, recursive=recursive)


def cp(
    source: Annotated[str, typer.Argument(help="The file, or with -r the directory, to read: any url.")],
    destination: Annotated[str, typer.Argument(help="The file or directory, local or s3://, to write.")],
    recursive: Recursive = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Copy what is there with the same size, too.")] = False,
    ca_file: CaFile = None,
) -> None:
    """Copy files, each whole or not at all. Called again, it goes on after those that are there."""
    copied, kept = anyio.run(
        partial(_copy, recursive=recursive, overwrite=overwrite), source, destination, fetch_config(ca_file)
    )
    told = f", {kept:,} were there" if kept else ""
    typer.echo(f"{destination}: {len(copied):,} files, {format_bytes(sum(file.size for file in copied))}{told}")


async def _copy(
    source: str, destination: str, config: FetchConfig, *, recursive: bool, overwrite: bool
) -> tuple[list[ObjectInfo], int]:
    async with Fetcher(config) as fetcher:
        if recursive:
            files = await fetcher.listdir(source, recursive=True)
            root = source.rstrip("/") + "/"
            places = [f"{destination.rstrip('/')}/{_below(file.url, root)}" for file in files]
        else:
            files = [await fetcher.stat(source)]
            name = source.partition("?")[0].rstrip("/").rpartition("/")[2]
            places = [destination + name if destination.endswith("/") else destination]
        copied: list[ObjectInfo] = []
        kept, done_bytes, all_bytes = 0, 0, sum(file.size for file in files)
        tenths, limiter = LineProgress(), anyio.CapacityLimiter(COPIED_AT_ONCE)

        async def copy(file: ObjectInfo, place: str) -> None:
            nonlocal kept, done_bytes
            async with limiter:
                if not overwrite and await _has(fetcher, place, file.size):
                    kept += 1
                else:
                    copied.append(await fetcher.download(file.url, place))
                done_bytes += file.size
                tenths.say("copied", done_bytes / max(1, all_bytes), f"{len(copied) + kept}/{len(files)} files")

        async with anyio.create_task_group() as group:
            for file, place in zip(files, places, strict=True):
                group.start_soon(copy, file, place)
        return copied, kept


def _below(url: str, root: str) -> str:
    below = url.removeprefix(root)
    if below == url or ".." in below.split("/"):
        raise ConfigError(f"the listing names {url!r}, which isn't below {root!r}: nothing was copied")
    return below


async def _has(fetcher: Fetcher, place: str, size: int) -> bool:
    try:
        return (await fetcher.stat(place)).size == size
    except NotFound:
        return False
