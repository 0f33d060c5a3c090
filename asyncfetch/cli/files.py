"""``asyncfetch ls`` and ``cp``: files of any url that the engine reads, and the entries of a collection of videos."""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import typer

from asyncfetch.cli.source import KindOption, StartOption, StopOption, VideoOption, find_source, names_videos
from asyncfetch.cli.terminal import CaFile, Recursive, format_bytes, progress
from asyncfetch.config import FetchConfig
from asyncfetch.errors import ConfigError, FetchError, NotFound, redact_url
from asyncfetch.fetch import Fetcher
from asyncfetch.fetch.batch import for_each
from asyncfetch.runtime.threads import run_sync
from asyncfetch.videos import Videos

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from asyncfetch.ranges import ObjectInfo
    from asyncfetch.videos.entry_table import Entries

COPIED_AT_ONCE = 8
"""Files copied at a time, each of which is read in parts side by side."""
PIECE_BYTES = 16 * 1024 * 1024
"""Bytes read, and reported as progress, at a time."""


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


def cp(
    source: Annotated[str, typer.Argument(help="The file to read, or with -r the directory: any URL.")],
    destination: Annotated[str, typer.Argument(help="The file or directory to write, local or s3://.")],
    recursive: Recursive = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Copy existing files again.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read and compare both files if the store has no checksum.")
    ] = False,
    ca_file: CaFile = None,
) -> None:
    """Copy files, each whole or not at all. Run it again to continue.

    An existing file is kept if its size is right, and its checksum too if the source's store has one (S3, the Hub) and
    the copy is local. Otherwise it is copied again.
    """
    copying = _Copying(destination, overwrite=overwrite, verify=verify)
    anyio.run(copying.run, source, FetchConfig(ca_file=ca_file), recursive)
    typer.echo(copying.summary())


class _Copying:
    """A command's copies: their counts, and how they were compared."""

    def __init__(self, destination: str, *, overwrite: bool, verify: bool) -> None:
        self._destination, self._overwrite, self._verify = destination, overwrite, verify
        self._copied = self._copied_bytes = self._kept = 0
        self._by_content = 0
        """Files whose content was compared, by a checksum or byte by byte."""
        self._tags_are_checksums = True

    def summary(self) -> str:
        """The result, in a line."""
        files = self._copied + self._kept
        kept = f", {self._kept:,} already there" if self._kept else ""
        by_size = f", {files - self._by_content:,} by size" if files > self._by_content else ""
        return (
            f"{self._destination}: {self._copied:,} file{'s' * (self._copied != 1)} copied, "
            f"{format_bytes(self._copied_bytes)}{kept}; compared {self._by_content:,} by content{by_size}"
        )

    async def run(self, source: str, config: FetchConfig, recursive: bool) -> None:
        """Copy a file, or all files below a directory."""
        with progress("copied") as show:
            async with Fetcher(config) as self._fetcher:
                files, places = await self._pairs(source, recursive=recursive)
                all_bytes, done_bytes = max(1, sum(file.size for file in files)), 0

                def count(nbytes: int) -> None:
                    nonlocal done_bytes
                    done_bytes += nbytes
                    share = min(done_bytes / all_bytes, 0.99)  # 100 % is when the last file is in its place
                    show("copied", share, f"{self._copied + self._kept}/{len(files)} files")

                async def copy(pair: tuple[ObjectInfo, str]) -> None:
                    await self._bring(*pair, count)

                await for_each(zip(files, places, strict=True), copy, workers=COPIED_AT_ONCE)

    async def _pairs(self, source: str, *, recursive: bool) -> tuple[list[ObjectInfo], list[str]]:
        if recursive:
            files = await self._fetcher.listdir(source, recursive=True)
            root, below = source.rstrip("/") + "/", self._destination.rstrip("/")
            return files, [f"{below}/{_below(file.url, root)}" for file in files]
        name = source.partition("?")[0].rstrip("/").rpartition("/")[2]
        place = self._destination + name if self._destination.endswith("/") else self._destination
        return [await self._fetcher.stat(source)], [place]

    async def _bring(self, file: ObjectInfo, place: str, count: Callable[[int], None]) -> None:
        if not self._overwrite and await self._is_there(file, place):
            self._kept += 1
            count(file.size)
            return
        algorithm, due = await self._stored_checksum(file) or ("sha256" if self._verify else "", "")
        digest = _Digest(algorithm, file.size)

        async def pieces() -> AsyncIterator[memoryview]:
            async for piece in self._pieces(file.url, file.size):
                await digest.add(piece)
                yield piece
                count(len(piece))

        await self._fetcher.put(place, pieces())
        if self._verify and await self._digest(place, file.size, algorithm) != digest.text():
            raise FetchError(f"the copy at {redact_url(place)} isn't what was read: copy it again", url=file.url)
        if due and digest.text() != due and not await self._is_no_checksum(file, algorithm, digest.text()):
            message = f"what was read has the {algorithm} {digest.text()}, but the store says {due}: copy it again"
            raise FetchError(message, url=file.url)
        self._copied += 1
        self._copied_bytes += file.size
        self._by_content += bool(algorithm)
        count(0)

    async def _is_no_checksum(self, file: ObjectInfo, algorithm: str, read: str) -> bool:
        """Return whether the store's tag isn't a checksum, as S3's of an object that a KMS key encrypts.

        Then a second reading gives the same digest as the first one.
        """
        if file.url.startswith("s3://") and await self._digest(file.url, file.size, algorithm) == read:
            self._tags_are_checksums = False
        return not self._tags_are_checksums

    async def _is_there(self, file: ObjectInfo, place: str) -> bool:
        try:
            size = (await self._fetcher.stat(place)).size
        except NotFound:
            return False
        if size != file.size:
            return False
        stored = await self._stored_checksum(file)
        if stored is not None and (self._verify or not place.startswith("s3://")):
            same = await self._digest(place, size, stored[0]) == stored[1]
            self._by_content += same
            return same
        if self._verify:
            same = await self._digest(place, size, "sha256") == await self._digest(file.url, size, "sha256")
            self._by_content += same
            return same
        return True

    async def _stored_checksum(self, file: ObjectInfo) -> tuple[str, str] | None:
        """The store's algorithm and checksum, if any, with a request if the listing lacks it."""
        if not self._tags_are_checksums:
            return None
        if file.etag is None and file.url.startswith(("s3://", "hf://")):
            file = await self._fetcher.stat(file.url)
        return _checksum(file)

    async def _digest(self, url: str, size: int, algorithm: str) -> str:
        digest = _Digest(algorithm, size)
        async for piece in self._pieces(url, size):
            await digest.add(piece)
        return digest.text()

    async def _pieces(self, url: str, size: int) -> AsyncIterator[memoryview]:
        for start in range(0, size, PIECE_BYTES):
            yield await self._fetcher.fetch(url, start, min(start + PIECE_BYTES, size))


def _checksum(file: ObjectInfo) -> tuple[str, str] | None:
    """The algorithm and the checksum in an entity tag; None without one.

    S3's is the MD5 of an object that was put by one request, unless a KMS key encrypts it; the Hub's is the SHA-256 of
    a large file, and Git's hash of a small one.
    """
    tag = (file.etag or "").strip('"')
    if not re.fullmatch(r"[0-9a-f]+", tag):
        return None
    if file.url.startswith("s3://") and len(tag) == len(hashlib.md5(usedforsecurity=False).hexdigest()):
        return "md5", tag
    if file.url.startswith("hf://") and not file.url.startswith("hf://buckets/"):
        return {64: ("sha256", tag), 40: ("git", tag)}.get(len(tag))
    return None


class _Digest:
    """A checksum of consecutive pieces; empty without an algorithm."""

    def __init__(self, algorithm: str, size: int) -> None:
        self._hash = None
        if algorithm:
            name = "sha1" if algorithm == "git" else algorithm
            self._hash = hashlib.new(name, b"blob %d\0" % size if algorithm == "git" else b"", usedforsecurity=False)

    async def add(self, piece: memoryview) -> None:
        """Take the next piece, in a thread."""
        if self._hash is not None:
            await run_sync(self._hash.update, piece)

    def text(self) -> str:
        """Return it in hexadecimal digits."""
        return "" if self._hash is None else self._hash.hexdigest()


def _below(url: str, root: str) -> str:
    below = url.removeprefix(root)
    if below == url or ".." in below.split("/"):
        raise ConfigError(f"the listing names {url!r}, which isn't below {root!r}: nothing was copied")
    return below
