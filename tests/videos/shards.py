"""Tar shards as webdataset writes them, and the indexes that other programs write beside them."""

from __future__ import annotations

import io
import re
import struct
import tarfile
from typing import TYPE_CHECKING, Any

import webdataset

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Sample = dict[str, Any]


def samples(count: int, *, video_bytes: int = 100_000, first: int = 0) -> list[Sample]:
    """Samples whose videos all differ."""
    return [
        {
            "__key__": f"{place:06d}",
            "mp4": place.to_bytes(4, "big") * (video_bytes // 4 + place % 3),
            "json": {"place": place},
            "txt": f"caption {place}",
        }
        for place in range(first, first + count)
    ]


def shard(content: Iterable[Mapping[str, Any]], **options: Any) -> bytes:  # noqa: ANN401 - the writer's
    """A shard that webdataset's TarWriter writes."""
    target = io.BytesIO()
    with webdataset.TarWriter(target, **options) as writer:
        for sample in content:
            writer.write(sample)
    return target.getvalue()


def energon_index(data: bytes) -> bytes:
    """The index that ``energon prepare`` writes as ``shard.tar.idx``."""
    offsets, last = [], None
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for info in archive:
            match = re.match(r"^((?:.*/|)[^.]+)[.]([^/]*)$", info.name)
            if info.isreg() and match and match[1] != last:
                offsets.append(info.offset)
                last = match[1]
        offsets.append(archive.offset)
    return struct.pack(f"<{len(offsets)}Q", *offsets)


def dali_index(data: bytes) -> bytes:
    """The index that DALI's wds2idx writes as ``shard.idx``."""
    lines: list[list[str]] = []
    last = None
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for info in archive:
            key, _, extension = info.name.partition(".")
            if key != last:
                lines.append([])
                last = key
            lines[-1].append(f"{extension} {info.offset_data} {info.size} {info.name}")
    return "".join(f"{line}\n" for line in [f"v1.2 {len(lines)}", *map(" ".join, lines)]).encode()
