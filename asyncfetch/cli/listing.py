"""``asyncfetch ls``: what is in a directory, and the entries of a collection of videos."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import typer

from asyncfetch.cli.source import KindOption, StartOption, StopOption, VideoOption, find_source, names_videos
from asyncfetch.cli.terminal import CaFile, Recursive, format_bytes
from asyncfetch.config import FetchConfig
from asyncfetch.errors import redact_url
from asyncfetch.fetch import Fetcher
from asyncfetch.videos import Videos

if TYPE_CHECKING:
    from asyncfetch.ranges import ObjectInfo
    from asyncfetch.videos.entry_table import Entries


def ls(
    url: Annotated[
        str, typer.Argument(help="A directory: local, s3://, hf:// or one of fsspec's; or a tar or table of videos.")
    ],
    recursive: Recursive = False,
    kind: KindOption = None,
    video: VideoOption = None,
    start: StartOption = None,
    stop: StopOption = None,
    ca_file: CaFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, with bytes as numbers.")] = False,
) -> None:
    """List a directory, or the videos in tars, a table or what else --kind says: the size and the URL of each entry."""
    if kind is not None or names_videos(url):
        videos = find_source(url, FetchConfig(ca_file=ca_file), kind, video=video, start=start, stop=stop)
        if isinstance(videos, Videos):
            _list_videos(videos, FetchConfig(ca_file=ca_file), as_json=as_json)
            return
    entries = anyio.run(_list, url, FetchConfig(ca_file=ca_file), recursive)
    if as_json:
        typer.echo(json.dumps({"entries": [{"url": entry.url, "bytes": entry.size} for entry in entries]}))
        return
    for entry in entries:
        size = "" if entry.url.endswith("/") else format_bytes(entry.size)
        typer.echo(f"{size:>10}  {entry.url}")


async def _list(url: str, config: FetchConfig, recursive: bool) -> list[ObjectInfo]:
    async with Fetcher(config) as fetcher:
        return await fetcher.listdir(url, recursive=recursive)


def _list_videos(videos: Videos, config: FetchConfig, *, as_json: bool) -> None:
    """Print the entries of a collection: where each lies, what it spans, and what lies beside it."""
    entries = anyio.run(_entries, videos, config)
    if as_json:
        typer.echo(json.dumps({"entries": [_as_dict(entries, entry) for entry in range(len(entries))]}))
        return
    for entry in range(len(entries)):
        place = entries.place(entry)
        size = "" if place.size is None else format_bytes(place.size)
        start, stop = entries.span(entry)
        span = "" if start is None and stop is None else f" {shown_span((start, stop))} s"
        at = f" at {place.offset:,}" if place.offset else ""
        beside = [name for name in entries.members if entries.member(entry, name) is not None]
        typer.echo(f"{size:>10}  {redact_url(place.url)}{at}{span}{' with ' * bool(beside)}{', '.join(beside)}")


async def _entries(videos: Videos, config: FetchConfig) -> Entries:
    async with Fetcher(config) as fetcher:
        return await videos.read(fetcher)


def _as_dict(entries: Entries, entry: int) -> dict[str, Any]:
    place, (start, stop) = entries.place(entry), entries.span(entry)
    beside = {name: where for name in entries.members if (where := entries.member(entry, name)) is not None}
    return {
        "url": redact_url(place.url),
        "offset": place.offset,
        "bytes": place.size,
        "start": start,
        "stop": stop,
        "beside": {
            name: {"url": redact_url(where.url), "offset": where.offset, "bytes": where.size}
            for name, where in beside.items()
        },
    }


def shown_span(span: tuple[float | None, float | None]) -> str:
    """The seconds that an entry means, for a user."""
    start, stop = span
    return f"[{0 if start is None else start:g}, {'its end' if stop is None else f'{stop:g}'})"
