"""The collection of videos that ``bench.videos`` makes for itself, once, with FFmpeg.

files/000.mp4 ...    H.264 and H.265 by turns, 30 frames a second, the index behind the frames
files.csv            the same as a table: url, caption
shards/00.tar ...    the same in tar shards: 000.mp4, 000.json, 000.txt
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from rich.progress import track

from asyncfetch.media import parse_tracks
from bench.data import made_once

if TYPE_CHECKING:
    from pathlib import Path

    from asyncfetch.media import Mp4Index

__all__ = ["FPS", "Collection", "index_of", "make_collection"]

FPS = 30
PATTERN_SECONDS = 25
"""Whole groups of pictures of each length below. What is encoded is no longer, and repeats in each video."""
ENCODERS = {
    "libx264": ["-preset", "veryfast", "-sc_threshold", "0"],
    "libx265": ["-preset", "ultrafast", "-tag:v", "hvc1", "-x265-params", "log-level=none:scenecut=0"],
}
KILOBITS = 800
"""A second of 640x360. Cameras take as much at this size."""


@dataclass(frozen=True)
class Collection:
    """What is made, and how large."""

    videos: int = 36
    shards: int = 6
    width: int = 640
    height: int = 360
    groups: tuple[int, ...] = (30, 125, 250)
    """Frames of a group of pictures."""
    repeats: tuple[int, int] = (3, 7)
    """Times that the pattern is in the shortest and in the longest video."""


def make_collection(collection: Collection, root: Path | None = None) -> Path:
    """The directory of a collection, in ``.bench/`` of the checkout or in ``root``; made at the first call."""
    least, most = collection.repeats
    name = f"videos-{collection.videos}-{collection.width}x{collection.height}-{least}-{most}"
    return made_once(name, partial(_write, collection), root)


def index_of(path: Path) -> Mp4Index:
    """The index of a file of it."""
    return parse_tracks(np.memmap(path, np.uint8, mode="r").data, url=str(path)).video


def _write(collection: Collection, root: Path) -> None:
    for part in ("patterns", "files", "shards"):
        (root / part).mkdir(parents=True)
    kinds = list(product(ENCODERS, collection.groups))
    for encoder, group in track(kinds, "encoding", transient=True):
        _encode(collection, encoder, group, _pattern(root, encoder, group))
    repeats = np.linspace(*collection.repeats, collection.videos).astype(int).tolist()
    with open(root / "files.csv", "w", newline="") as table:
        rows = csv.writer(table)
        rows.writerow(["url", "caption"])
        for number, times in enumerate(track(repeats, "writing videos", transient=True)):
            path = root / "files" / f"{number:03d}.mp4"
            # One half has audio: of each kind, and of each length.
            _repeat(_pattern(root, *kinds[number % len(kinds)]), path, times, audio=number // len(kinds) % 2 == 0)
            rows.writerow([f"files/{path.name}", _caption(number)])
    for shard, numbers in enumerate(np.array_split(np.arange(collection.videos), collection.shards)):
        _pack(root, root / "shards" / f"{shard:02d}.tar", numbers.tolist(), repeats)
    shutil.rmtree(root / "patterns")


def _pattern(root: Path, encoder: str, group: int) -> Path:
    return root / "patterns" / f"{encoder}-{group}.mp4"


def _caption(number: int) -> str:
    return f"a test picture that moves, number {number}"


def _encode(collection: Collection, encoder: str, group: int, path: Path) -> None:
    size = f"{collection.width}x{collection.height}"
    rate = KILOBITS * collection.width * collection.height // (640 * 360)
    _ffmpeg(
        *("-f", "lavfi", "-i", f"testsrc2=size={size}:rate={FPS}:duration={PATTERN_SECONDS}"),
        *("-vf", "noise=alls=8:allf=t", "-pix_fmt", "yuv420p", "-c:v", encoder, *ENCODERS[encoder]),
        *("-b:v", f"{rate}k", "-g", str(group), "-keyint_min", str(group), str(path)),
    )


def _repeat(pattern: Path, path: Path, times: int, *, audio: bool) -> None:
    # By a list, which says how long each is: "-stream_loop" leaves a gap of the frames that wait for others.
    again = pattern.with_suffix(".txt")
    again.write_text(f"file '{pattern.name}'\nduration {PATTERN_SECONDS}\n" * times)
    sound = f"sine=frequency=440:sample_rate=48000:duration={times * PATTERN_SECONDS}"
    kept = ["-map", "0:v", "-c:v", "copy"]
    if audio:
        kept = ["-f", "lavfi", "-i", sound, *kept, "-map", "1:a", "-c:a", "aac", "-b:a", "64k"]
    _ffmpeg("-f", "concat", "-i", str(again), *kept, str(path))


def _ffmpeg(*arguments: str) -> None:
    subprocess.run(["ffmpeg", "-v", "error", "-nostdin", *arguments], check=True)


def _pack(root: Path, path: Path, numbers: list[int], repeats: list[int]) -> None:
    with tarfile.open(path, "w") as archive:
        for number in numbers:
            stem = root / "files" / f"{number:03d}"
            archive.add(stem.with_suffix(".mp4"), f"{stem.name}.mp4")
            beside = {
                "json": json.dumps({"number": number, "seconds": repeats[number] * PATTERN_SECONDS}),
                "txt": _caption(number),
            }
            for extension, text in beside.items():
                written = root / "patterns" / f"{stem.name}.{extension}"
                written.write_text(text)
                archive.add(written, written.name)
