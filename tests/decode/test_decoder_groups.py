"""Every stretch of a video, cut out by its index and decoded, whatever its groups of pictures are."""

from __future__ import annotations

import struct
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from asyncfetch.decode import open_decoder
from asyncfetch.errors import AsyncFetchError, DecodeError, FormatError
from asyncfetch.formats.clips import PlannedClip
from asyncfetch.media import Mp4Index, locate_moov, parse_moov
from tests.decode.conftest import FRAMES, Video, encode, video_of
from tests.media.conftest import clip_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from asyncfetch.config import DecoderBackend
    from asyncfetch.decode import Clip

pytestmark = pytest.mark.slow

FPS = 30
LENGTHS = (1, 2, 5, 12)
BACKENDS: tuple[DecoderBackend, ...] = ("torchcodec", "pyav")


def av1(gop: int, *options: str) -> tuple[str, str, dict[str, str]]:
    return "libsvtav1", "av01", {"preset": "12", "g": str(gop), "svtav1-params": ":".join(("lp=1", *options))}


def h264(gop: int, *options: str) -> tuple[str, str, dict[str, str]]:
    # Frames as unlike each other as these would all begin a new scene.
    params = ":".join((f"keyint={gop}:min-keyint=1:scenecut=0:b-adapt=0", *options))
    return "libx264", "avc1", {"preset": "medium", "threads": "1", "x264-params": params}


def hevc(gop: int, *options: str) -> tuple[str, str, dict[str, str]]:
    params = ":".join((f"keyint={gop}:min-keyint=1:scenecut=0:b-adapt=0:log-level=none", *options))
    return "libx265", "hev1", {"preset": "fast", "x265-params": params}


CLOSED = {
    "AV1, 2": av1(2),
    "AV1, 10": av1(10),
    "H.264, 2": h264(2, "bframes=3"),
    "H.264, 10": h264(10, "bframes=3"),
    "H.264, 10, no B-frames": h264(10, "bframes=0"),
    "HEVC, 2": hevc(2, "bframes=3:open-gop=0"),
    "HEVC, 10": hevc(10, "bframes=3:open-gop=0"),
}
OPEN = {
    "H.264, 2": h264(2, "open-gop=1:bframes=3"),
    "H.264, 3": h264(3, "open-gop=1:bframes=3"),
    "H.264, 6": h264(6, "open-gop=1:bframes=3"),
    "H.264, 10": h264(10, "open-gop=1:bframes=3"),
    "H.264, 10, no B-pyramid": h264(10, "open-gop=1:bframes=3:b-pyramid=none"),
    "H.264, 14, rows of 8 B-frames": h264(14, "open-gop=1:bframes=8:ref=6"),
    "HEVC, 2": hevc(2, "bframes=3"),
    "HEVC, 10": hevc(10, "bframes=3"),
    "HEVC, 14, rows of 8 B-frames": hevc(14, "bframes=8"),
}


@pytest.fixture(scope="module")
def make(images: list[NDArray[np.uint8]]) -> Callable[[tuple[str, str, dict[str, str]]], Video]:
    made: dict[str, Video] = {}

    def make(encoder: tuple[str, str, dict[str, str]]) -> Video:
        if repr(encoder) not in made:
            name, codec, options = encoder
            data = encode(name, "yuv420p", options, [image[:64, :80] for image in images])
            made[repr(encoder)] = video_of(data, codec)
        return made[repr(encoder)]

    return make


def index_of(video: Video) -> Mp4Index:
    start, stop = locate_moov(video.data, size=len(video.data), url="video.mp4")
    return parse_moov(video.data[start:stop], url="video.mp4")


def cut(video: Video, index: Mp4Index, first: int, count: int) -> Clip:
    plan = clip_of(index, first, count, fps=FPS)
    data = plan.header + video.data[plan.start : plan.stop]
    return PlannedClip("video.mp4", plan).over(memoryview(data), name=f"{count} frames from {first}", depth=None)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("encoder", "is_open"),
    [
        *(pytest.param(encoder, False, id=f"closed: {name}") for name, encoder in CLOSED.items()),
        *(pytest.param(encoder, True, id=f"open: {name}") for name, encoder in OPEN.items()),
    ],
)
def test_every_frame_of_every_stretch(
    make: Callable[[tuple[str, str, dict[str, str]]], Video],
    encoder: tuple[str, str, dict[str, str]],
    is_open: bool,
    backend: DecoderBackend,
) -> None:
    video = make(encoder)
    index = index_of(video)
    assert index.samples.has_open_gops == is_open
    for count in LENGTHS:
        for first in range(FRAMES - count + 1):
            decoder = open_decoder(cut(video, index, first, count), backend=backend)
            # Backwards, so that each is sought; and on to the end from the middle.
            for frames in (*([frame] for frame in reversed(range(count))), range(count // 2, count)):
                pixels = decoder.frames(frames).permute(0, 2, 3, 1).numpy()
                truth = video.frames[first : first + count][frames]
                assert np.abs(pixels.astype(int) - truth).max() <= 2, f"{list(frames)} of {count} from {first}"


def marked(video: Video, numbers: Sequence[int] | None) -> Mp4Index:
    """Its index, with these three frames (from 1, in decode order) for its three key frames; None for every one."""
    stss = struct.pack(">I4s5I", 28, b"stss", 0, 3, 1, 11, 21)
    assert video.data.count(stss) == 1
    other = stss.replace(b"stss", b"free") if numbers is None else struct.pack(">I4s5I", 28, b"stss", 0, 3, *numbers)
    return index_of(replace(video, data=video.data.replace(stss, other)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "encoder",
    [av1(10), h264(10, "bframes=0"), h264(10, "bframes=3"), hevc(10, "bframes=0"), hevc(10, "bframes=3:open-gop=0")],
    ids=["AV1", "H.264", "H.264, B-frames", "HEVC", "HEVC, B-frames"],
)
@pytest.mark.parametrize("numbers", [None, (1, 4, 7), (2, 5, 12), (1, 11, 23), (3, 4, 5), (1, 6, 16)])
def test_falsely_marked_key_frames_give_no_wrong_frame(
    make: Callable[[tuple[str, str, dict[str, str]]], Video],
    encoder: tuple[str, str, dict[str, str]],
    numbers: Sequence[int] | None,
    backend: DecoderBackend,
) -> None:
    video = make(encoder)
    try:
        index = marked(video, numbers)
    except FormatError as error:
        assert "they are shown in another order" in str(error)  # noqa: PT017
        return
    for first in range(0, FRAMES - 5 + 1, 3):
        decoder = None
        for frame in (0, 3, 1, 4, 2):
            with suppress(AsyncFetchError):
                decoder = decoder or open_decoder(cut(video, index, first, 5), backend=backend)
                pixels = decoder.frames([frame]).permute(0, 2, 3, 1).numpy()
                assert np.abs(pixels.astype(int) - video.frames[first + frame]).max() <= 2, f"{frame} from {first}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_key_frame_that_is_none_costs_its_own_group_alone(
    make: Callable[[tuple[str, str, dict[str, str]]], Video], backend: DecoderBackend
) -> None:
    video = make(hevc(10, "bframes=0"))
    decoder = open_decoder(cut(video, marked(video, (1, 6, 21)), 0, FRAMES), backend=backend)
    for frame in (22, 7, 4, 29, 5, 20, 10, 0):
        if 5 <= frame < 20:
            with pytest.raises(DecodeError, match="frame 5 of its clip is marked as a key frame and is none"):
                decoder.frames([frame])
        else:
            pixels = decoder.frames([frame]).permute(0, 2, 3, 1).numpy()
            assert np.abs(pixels.astype(int) - video.frames[frame]).max() <= 2
