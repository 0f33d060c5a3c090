"""Indexes beside tar shards, made by other programs. Pure.

Energon writes ``shard.tar.idx``: the place of each sample's first header as uint64, and at last the archive's end.
DALI's wds2idx writes ``shard.idx``: lines of text, one a sample, with extension, offset, size and name of each file.
wids has one JSON for all shards: their urls, and how many samples each has.

An index may be older than its shard. So an error here is about the index alone, and the shard's own headers count.
"""

from __future__ import annotations

import json
import sys
from array import array
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncfetch.errors import FormatError, redact_url
from asyncfetch.fetch.urls import join_url
from asyncfetch.media.tar import BLOCK_BYTES, TarredFile

if TYPE_CHECKING:
    from asyncfetch.media.boxes import Buffer

WRITE_INDEX_ANEW = "write the index anew, or remove it"


def index_names(url: str) -> list[str]:
    """The urls at which a shard's index may be."""
    return [f"{url}.idx"] + [f"{url.removesuffix('.tar')}.idx"] * url.endswith(".tar")


def parse_index(data: Buffer, *, url: str, size: int) -> array[int] | list[TarredFile]:
    """The places of a shard's samples, as Energon's index has them, or its files, as DALI's has.

    Places are of each sample's first header, in rising order, and one more for the end of the last sample. ``size`` is
    the shard's length in bytes.

    Raises:
        FormatError: It is neither, of an older version, or can't be that shard's.
    """
    text = bytes(data)
    return _parse_wds2idx(text, url, size) if text.startswith(b"v1.") else _parse_energon(text, url, size)


def _parse_energon(data: bytes, url: str, size: int) -> array[int]:
    if len(data) % 8 or len(data) < 16:
        raise _error(url, f"{len(data)} bytes are no offsets of 8 bytes each")
    offsets = array("Q", data)
    if sys.byteorder == "big":
        offsets.byteswap()
    rising = all(first < second for first, second in pairwise(offsets))
    if not rising or offsets[-1] > size or any(offset % BLOCK_BYTES for offset in offsets):
        raise _error(url, f"its offsets are no places of headers in a shard of {size} bytes")
    return offsets


def _parse_wds2idx(data: bytes, url: str, size: int) -> list[TarredFile]:
    first, *lines = data.decode("utf-8", "backslashreplace").removesuffix("\n").split("\n")
    version, _, count = first.partition(" ")
    if version != "v1.2":
        raise _error(url, f"version {version[:20]!r} doesn't have what is needed: only v1.2 has names")
    if count != str(len(lines)):
        raise _error(url, f"it says {count[:20]!r} samples, but has {len(lines)}")
    files = []
    stop = 0
    for line in lines:
        fields = line.split(" ")
        for place in range(0, len(fields), 4):
            _, offset_text, size_text, name = (*fields[place : place + 4], "", "", "")[:4]
            if not (offset_text.isdecimal() and size_text.isdecimal() and name) or "\\" in name:
                raise _error(url, f"sample {line[:80]!r} isn't extension, offset, size and name of each file")
            file = TarredFile(name, int(offset_text), int(size_text))
            if file.offset % BLOCK_BYTES or file.offset < stop + BLOCK_BYTES or file.offset + file.size > size:
                raise _error(url, f"{name!r} can't lie at byte {file.offset} of a shard of {size} bytes")
            stop = -(-(file.offset + file.size) // BLOCK_BYTES) * BLOCK_BYTES
            files.append(file)
    if not files:
        raise _error(url, "it has no samples")
    return files


class CountedShard(NamedTuple):
    """A shard of a wids index."""

    url: str
    samples: int | None
    """Number of its samples by the index; None where that doesn't say."""


def parse_wids(data: Buffer, *, url: str) -> list[CountedShard]:
    """The shards of a wids index; their urls are relative to its own.

    Raises:
        FormatError: It is none.
    """
    try:
        content: Any = json.loads(bytes(data))
        shards = content["shardlist"]
        base = url.rpartition("/")[0]
        found = [CountedShard(_below(base, shard["url"]), shard.get("nsamples")) for shard in shards]
        odd = [samples for _, samples in found if type(samples) not in {int, type(None)}]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _error(url, f"it isn't the JSON of wids: no list of shards with their urls ({error})") from error
    if not found or odd:
        problem = f"it says that a shard has {odd[0]!r} samples" if odd else "it has no shards"
        raise _error(url, problem)
    return found


def _below(base: str, url: str) -> str:
    return url if "://" in url or url.startswith("/") else join_url(base, url)


def _error(url: str, problem: str) -> FormatError:
    return FormatError(f"{redact_url(url)}: no index of the shard: {problem}", remedy=WRITE_INDEX_ANEW)
