"""A corpus of small videos of every kind that people have, made by FFmpeg's own program."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_SOUND = "-f lavfi -i sine=f=440:beep_factor=4:r=44100"
# Noise that the decoder makes up comes out otherwise in each place it is begun at.
_AAC = "-c:a aac -ac 2 -b:a 64k -aac_pns 0"
_X264 = "-c:v libx264 -preset veryfast -threads 1"
_X265 = "-c:v libx265 -preset ultrafast -tag:v hvc1 -x265-params log-level=none:pools=1:frame-threads=1:ctu=32"


def _source(size: str = "160x120", rate: str = "30") -> str:
    return f"-f lavfi -i testsrc2=s={size}:r={rate}"


MAKERS: dict[str, str] = {
    "tail.mp4": f"{_source()} {_SOUND} -t 5 {_X264} -g 30 -bf 2 {_AAC}",
    "front.mp4": f"{_source()} {_SOUND} -t 5 {_X264} -g 30 -bf 2 {_AAC} -movflags +faststart",
    "long-groups.mp4": f"{_source()} -t 9 {_X264} -g 250 -bf 3 -movflags +faststart",
    "variable.mp4": f"{_source()} {_SOUND} -t 6 -vf select=not(eq(mod(n\\,7)\\,3)+between(n\\,40\\,61)) "
    f"-vsync vfr {_X264} -g 20 {_AAC}",
    "ntsc.mp4": f"{_source(rate='30000/1001')} {_SOUND} -t 4 {_X264} -g 15 {_AAC} -ar 22050",
    "open.mp4": f"{_source()} -t 4 {_X264} "
    "-x264-params open-gop=1:keyint=10:min-keyint=5:bframes=3:b-adapt=0:scenecut=0",
    "hevc-open.mp4": f"{_source()} -t 4 {_X265}:open-gop=1:keyint=12:bframes=3:b-adapt=0:scenecut=0",
    "rotated.mp4": f"{_source()} -t 3 {_X264} -g 15",
    "large.mp4": f"{_source('208x112')} {_SOUND} -t 4 {_X264} -g 15 {_AAC}",
    "fragments.mp4": f"{_source()} {_SOUND} -t 5 {_X264} -g 30 {_AAC} "
    "-movflags +frag_keyframe+empty_moov+default_base_moof",
    "av1.mp4": f"{_source()} -t 3 -c:v libsvtav1 -preset 8 -g 20 -svtav1-params lp=1",
    "vp9.mp4": f"{_source()} -t 3 -c:v libvpx-vp9 -deadline realtime -cpu-used 8 -g 20",
    "one-frame.mp4": f"{_source()} -frames:v 1 {_X264}",
    "movie.mov": f"{_source()} {_SOUND} -t 3 {_X264} -g 15 -c:a pcm_s16le",
    "web.webm": f"{_source()} {_SOUND} -t 3 -c:v libvpx-vp9 -deadline realtime -cpu-used 8 -g 20 -c:a libopus",
    "old.avi": f"{_source(rate='25')} {_SOUND} -t 3 -c:v mpeg4 -g 12 -bf 0 -c:a mp3 -ar 44100",
}
"""The arguments that make each file."""
SILENT = frozenset({
    "long-groups.mp4",
    "open.mp4",
    "hevc-open.mp4",
    "rotated.mp4",
    "av1.mp4",
    "vp9.mp4",
    "one-frame.mp4",
})
"""Files without audio."""
UNCUT = frozenset({"web.webm", "old.avi"})
"""Files that can't be cut by ranges."""
BROKEN = frozenset({"truncated.mp4", "garbage.mp4"})


def _ffmpeg(arguments: str, path: Path) -> None:
    command = ["ffmpeg", "-nostdin", "-v", "error", "-y", *arguments.split(), str(path)]
    subprocess.run(command, check=True, env=os.environ | {"SVT_LOG": "1"})


def make_corpus(root: Path) -> None:
    """Write all of MAKERS, ``edited.mp4`` with an edit list in the middle of a group, and those of BROKEN."""
    with ThreadPoolExecutor(2) as threads:
        for _ in threads.map(lambda name: _ffmpeg(MAKERS[name], root / name), MAKERS):
            pass
    _ffmpeg(f"-ss 1.37 -i {root / 'tail.mp4'} -c copy -avoid_negative_ts disabled", root / "edited.mp4")
    (root / "upright.mp4").write_bytes((root / "rotated.mp4").read_bytes())
    _ffmpeg(f"-i {root / 'upright.mp4'} -c copy -metadata:s:v rotate=90", root / "rotated.mp4")
    (root / "upright.mp4").unlink()
    whole = (root / "front.mp4").read_bytes()
    (root / "truncated.mp4").write_bytes(whole[: len(whole) * 2 // 3])
    (root / "garbage.mp4").write_bytes(bytes(range(256)) * 100)


HEAVY = (
    f"{_source()} {_SOUND} -t 10 -vf noise=alls=60:allf=t -c:v libx264 -preset ultrafast -qp 20 -sc_threshold 0 {_AAC}"
)
"""Arguments that make a file of 20 kB a frame, so that what lies between its clips is worth leaving out."""


def make_heavy(root: Path) -> None:
    """Write ``heavy-30.mp4`` and ``heavy-250.mp4``, by the most frames from key frame to key frame."""
    for group in (30, 250):
        _ffmpeg(f"{HEAVY} -g {group}", root / f"heavy-{group}.mp4")
