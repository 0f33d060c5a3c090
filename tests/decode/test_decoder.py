from __future__ import annotations

import contextlib
import gc
import io
import os
import random
import struct
import threading
from typing import TYPE_CHECKING, Any, get_args

import av
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncfetch.config import DecoderBackend
from asyncfetch.decode import Clip, open_decoder
from asyncfetch.decode.decoder import MemoryFile, PyAVDecoder, TorchcodecDecoder
from asyncfetch.errors import DecodeError, FrameMissing, WrongLoop
from tests.decode.conftest import ENCODERS, FRAMES, HEIGHT, WIDTH, encode, video_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tests.decode.conftest import Video

BACKENDS: list[DecoderBackend] = [name for name in get_args(DecoderBackend) if name != "auto"]
each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_video = pytest.mark.parametrize("name", [name for name in ENCODERS if name != "hevc-10bit"])


def pixels(frames: torch.Tensor) -> NDArray[Any]:
    """As (N, height, width, channels)."""
    return frames.permute(0, 2, 3, 1).numpy()


def orders() -> dict[str, Sequence[int]]:
    shuffled = list(range(FRAMES))
    random.Random(3).shuffle(shuffled)
    return {"forward": range(FRAMES), "backward": range(FRAMES)[::-1], "shuffled": shuffled}


@each_backend
@each_video
@pytest.mark.parametrize("order", ["forward", "backward", "shuffled"])
def test_single_frames_are_those_of_a_plain_decode(
    videos: dict[str, Video], name: str, backend: DecoderBackend, order: str
) -> None:
    video = videos[name]
    decoder = open_decoder(video.clip(), backend=backend)
    for frame in orders()[order]:
        decoded = decoder.frames([frame])
        assert decoded.dtype == torch.uint8
        # Measured: the same pixels, by FFmpeg 5.1 under torchcodec and FFmpeg 8 in PyAV. The room is for other builds.
        difference = np.abs(pixels(decoded)[0].astype(int) - video.frames[frame].astype(int))
        assert difference.max() <= 2, f"frame {frame}"


@each_backend
def test_frames_of_ten_bits_are_the_right_ones(videos: dict[str, Video], backend: DecoderBackend) -> None:
    video = videos["hevc-10bit"]
    decoder = open_decoder(video.clip(), backend=backend)
    for frame in orders()["shuffled"]:
        # FFmpeg's versions disagree on colour at its edges, so: which frame is it most like?
        difference = np.abs(pixels(decoder.frames([frame])).astype(int) - video.frames).mean(axis=(1, 2, 3))
        assert difference.argmin() == frame
        assert difference[frame] < 10


@each_backend
@each_video
def test_neighbouring_frames_together_are_the_frames(
    videos: dict[str, Video], name: str, backend: DecoderBackend
) -> None:
    decoder = open_decoder(videos[name].clip(), backend=backend)
    for frames in (range(7, FRAMES - 3), range(FRAMES), range(2, 4)):  # forward, and back again
        together, singly = decoder.frames(frames), decoder.each(frames)
        assert torch.equal(together, torch.stack(singly))
        assert together.stride() == decoder.frames([frames[0], frames[0]]).stride()


@each_backend
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frames=st.lists(st.integers(0, FRAMES - 1), max_size=12))
def test_a_batch_is_its_frames_in_the_asked_order(h264: Video, backend: DecoderBackend, frames: list[int]) -> None:
    decoded = open_decoder(h264.clip(), backend=backend).frames(frames)
    assert decoded.shape == (len(frames), 3, *h264.frames.shape[1:3])
    assert decoded.dtype == torch.uint8
    assert np.array_equal(pixels(decoded), h264.frames[frames])


@each_backend
def test_a_clip_may_name_its_frames_in_any_order_and_some_only(h264: Video, backend: DecoderBackend) -> None:
    index = np.array([20, 4, 4, 11], np.int32)
    decoder = open_decoder(h264.clip(frame_index=index, pts=h264.pts[index]), backend=backend)
    assert np.array_equal(pixels(decoder.frames([3, 0, 1, 2])), h264.frames[[11, 20, 4, 4]])


@each_backend
@pytest.mark.parametrize("frame", [-1, FRAMES, 10**9])
def test_a_frame_outside_the_clip_is_missing(h264: Video, backend: DecoderBackend, frame: int) -> None:
    with pytest.raises(FrameMissing, match=f"episode 7: the video has no frame {frame}; it has 30 of 30"):
        open_decoder(h264.clip(), backend=backend).frames([0, frame])


@each_backend
def test_a_frame_that_the_video_lacks_is_missing(h264: Video, backend: DecoderBackend) -> None:
    index = np.arange(FRAMES, dtype=np.int32)
    index[-2:] = -1
    decoder = open_decoder(h264.clip(frame_index=index), backend=backend)
    with pytest.raises(FrameMissing, match="no frame 28; it has 28 of 30 frames"):
        decoder.frames([28])
    assert len(decoder.frames([27])) == 1


@each_backend
@pytest.mark.parametrize("ticks", [-1, 1, -512 * FRAMES, 512 * FRAMES])
@pytest.mark.parametrize("frames", [[9], [9, 2], [2, 9, 9], [8, 9, 10]])
def test_a_frame_of_another_time_is_missing(
    h264: Video, backend: DecoderBackend, ticks: int, frames: list[int]
) -> None:
    pts = h264.pts.copy()
    pts[9] += ticks
    seconds = pts[9] / h264.timescale
    with pytest.raises(FrameMissing, match=rf"episode 7.*{seconds:.6f} s"):
        open_decoder(h264.clip(pts=pts), backend=backend).frames(frames)


def test_a_neighbour_is_never_given_for_a_frame(h264: Video) -> None:
    index = np.arange(FRAMES, dtype=np.int32) - 1
    index[0] = 0
    with pytest.raises(FrameMissing, match=r"frame 9 should be shown at 0.300000 s, but .* shown at 0.266667 s"):
        open_decoder(h264.clip(frame_index=index), backend="torchcodec").frames([9])


@each_backend
@pytest.mark.parametrize("frames", [[0], [2, 3], [1, 0, 1], [3, 2, 3]])
def test_picture_of_another_size_than_in_the_index_is_refused(
    images: list[NDArray[np.uint8]], backend: DecoderBackend, frames: list[int]
) -> None:
    smaller = [image[:64, :96] for image in images[:4]]
    video = video_of(encode("libx264", "yuv420p", {"preset": "veryfast"}, smaller), "avc1")
    message = r"episode 7: a picture is 64 high and 96 wide; the index of its file says 120 and 160"
    decoder = open_decoder(video.clip(height=120, width=160), backend=backend)
    with pytest.raises(DecodeError, match=message):
        decoder.frames(frames)
    with pytest.raises(DecodeError, match=message):
        decoder.each(frames)


@each_backend
def test_pictures_of_two_sizes_in_one_clip_are_our_error(
    images: list[NDArray[np.uint8]], backend: DecoderBackend
) -> None:
    video = of_two_sizes(images)
    decoder = open_decoder(video, backend=backend)
    assert decoder.frames([0, 1]).shape == (2, 3, HEIGHT, WIDTH)
    for asked in ([2, 3], [4], [4, 0]):
        with pytest.raises(DecodeError, match="episode 7"):
            decoder.frames(asked)
        with pytest.raises(DecodeError, match="episode 7"):
            decoder.each(asked)


@each_backend
@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_a_turned_picture_comes_turned(h264: Video, backend: DecoderBackend, degrees: int) -> None:
    decoder = open_decoder(h264.clip(data=memoryview(turned(h264.data, degrees))), backend=backend)
    expected = np.rot90(h264.frames[3:5], 0 if backend == "pyav-unturned" else degrees // 90, axes=(1, 2))
    assert np.array_equal(pixels(decoder.frames([3, 4])), expected)


@each_backend
def test_a_matrix_of_zeros_turns_nothing(h264: Video, backend: DecoderBackend) -> None:
    decoder = open_decoder(h264.clip(data=memoryview(with_matrix(h264.data, bytes(36)))), backend=backend)
    assert np.array_equal(pixels(decoder.frames([3, 4])), h264.frames[3:5])


def of_two_sizes(images: list[NDArray[np.uint8]]) -> Clip:
    """Three frames, and two of another size behind them, as stream copy joins them."""
    parts = [
        encode("libsvtav1", "yuv420p", {"preset": "12", "svtav1-params": "lp=1"}, part)
        for part in (images[:3], [image[:64, :96] for image in images[3:5]])
    ]
    joined = io.BytesIO()
    output: Any
    source: Any
    with av.open(joined, "w", format="mp4") as output:
        stream, frames = None, 0
        for part in parts:
            with av.open(io.BytesIO(part)) as source:
                stream = stream or output.add_stream_from_template(source.streams.video[0], opaque=True)
                packets = [packet for packet in source.demux(video=0) if packet.size]
                for packet in packets:
                    packet.pts, packet.dts, packet.stream = packet.pts + 512 * frames, packet.dts + 512 * frames, stream
                    output.mux(packet)
            frames += len(packets)
    return Clip(
        data=memoryview(joined.getvalue()),
        frame_index=np.arange(frames, dtype=np.int32),
        pts=np.arange(frames) * 512,
        timescale=15360,
        codec="av01",
        width=WIDTH,
        height=HEIGHT,
        name="https://data.example.org/file-000.mp4, episode 7",
    )


def turned(data: bytes, degrees: int) -> bytes:
    """The video with another matrix in its track header, to be shown turned to the left."""
    sine, cosine = {90: (-1, 0), 180: (0, -1), 270: (1, 0)}[degrees]
    return with_matrix(
        data, struct.pack(">9i", cosine << 16, sine << 16, 0, -sine << 16, cosine << 16, 0, 0, 0, 1 << 30)
    )


def with_matrix(data: bytes, matrix: bytes) -> bytes:
    upright = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    place = data.index(upright, data.index(b"tkhd"))
    return data[:place] + matrix + data[place + len(matrix) :]


@each_backend
@pytest.mark.parametrize("share", [0.3, 0.6, 0.97])
def test_bytes_cut_short_are_never_a_wrong_frame(h264: Video, backend: DecoderBackend, share: float) -> None:
    decoder = open_decoder(h264.clip(data=memoryview(h264.data[: int(len(h264.data) * share)])), backend=backend)
    with pytest.raises(DecodeError, match="episode 7"):
        decoder.frames([FRAMES - 1])
    assert np.array_equal(pixels(decoder.frames([0])), h264.frames[:1])


@each_backend
def test_an_error_leaves_the_decoder_usable(h264: Video, backend: DecoderBackend) -> None:
    cut_short = memoryview(h264.data[: int(len(h264.data) * 0.6)])
    decoder = open_decoder(h264.clip(data=cut_short), backend=backend)
    readable = []
    for frame in [*orders()["shuffled"]] * 2:
        with contextlib.suppress(DecodeError):
            decoded = decoder.frames([frame])
            assert np.array_equal(pixels(decoded)[0], h264.frames[frame]), f"frame {frame}"
            readable.append(frame)
    assert len(readable) % 2 == 0, "an error comes again, a frame too"
    assert set(range(10)) <= set(readable) < set(range(FRAMES))


LONG_GROUPS = {
    "av1": ("libsvtav1", "av01", {"preset": "12", "crf": "30", "g": "15", "svtav1-params": "lp=1"}),
    "h264": ("libx264", "avc1", {"preset": "veryfast", "g": "15", "bf": "0", "threads": "1"}),
    "hevc": ("libx265", "hev1", {"preset": "fast", "x265-params": "keyint=15:bframes=0:log-level=none"}),
}
DAMAGED = 20
"""A frame in the middle of the second group, frames 15 to 29."""


def long_groups(name: str, images: list[NDArray[np.uint8]]) -> Video:
    encoder, codec, options = LONG_GROUPS[name]
    return video_of(encode(encoder, "yuv420p", options, images), codec)


def damage(video: Video, frame: int, *, skipped: int, stopped: int | None = None, zeroed: bool = False) -> memoryview:
    """The video with bytes [skipped, stopped) of a coded frame turned over, or zeroed."""
    with av.open(io.BytesIO(video.data), "r") as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
    start, size = next((packet.pos, packet.size) for packet in packets if packet.pts == video.pts[frame])
    assert start is not None
    data = bytearray(video.data)
    for at in range(start + skipped, start + (size if stopped is None else stopped)):
        data[at] = 0 if zeroed else data[at] ^ 0xFF
    return memoryview(data)


@each_backend
@pytest.mark.parametrize("name", LONG_GROUPS)
@pytest.mark.parametrize("together", [1, 2])
def test_frames_behind_a_damaged_one_of_their_group_are_missing(
    images: list[NDArray[np.uint8]], name: str, backend: DecoderBackend, together: int
) -> None:
    """The decoder itself would go on with the next frame, on the picture before the damaged one."""
    video = long_groups(name, images)
    skipped = 4 if name == "av1" else 0  # its first bytes say what it is: without them it is passed over
    decoder = open_decoder(video.clip(data=damage(video, DAMAGED, skipped=skipped)), backend=backend)
    given: list[int] = []
    for first in range(0, FRAMES, together):
        asked = range(first, first + together)
        with contextlib.suppress(DecodeError):
            assert np.array_equal(pixels(decoder.frames(asked)), video.frames[asked.start : asked.stop]), asked
            given += asked
    assert given == list(range(DAMAGED))
    assert np.array_equal(pixels(decoder.frames([3])), video.frames[3:4]), "other groups are as good as ever"


@pytest.mark.parametrize("name", LONG_GROUPS)
def test_pyav_gives_none_that_leans_on_a_frame_that_did_not_come(images: list[NDArray[np.uint8]], name: str) -> None:
    video = long_groups(name, images)
    clip = video.clip(data=damage(video, DAMAGED, skipped=0, zeroed=True))
    for decoder in (open_decoder(clip, backend="pyav"), open_decoder(clip, backend="pyav")):
        for frame in (DAMAGED + 1, DAMAGED, DAMAGED + 2, FRAMES - 1):
            with pytest.raises((DecodeError, FrameMissing)):
                decoder.frames([frame])
        assert np.array_equal(pixels(decoder.frames(range(DAMAGED))), video.frames[:DAMAGED])


def test_pyav_refuses_the_pictures_of_h264_that_ffmpeg_mended(images: list[NDArray[np.uint8]]) -> None:
    video = long_groups("h264", images)
    decoder = open_decoder(video.clip(data=damage(video, DAMAGED, skipped=60, stopped=90)), backend="pyav")
    assert np.array_equal(pixels(decoder.frames(range(DAMAGED))), video.frames[:DAMAGED])
    for frame in (DAMAGED, DAMAGED + 1, DAMAGED, FRAMES - 1):
        with pytest.raises(DecodeError, match=r"episode 7: the frame at 0\.666667 s is damaged"):
            decoder.frames([frame])
    assert np.array_equal(pixels(decoder.frames([3])), video.frames[3:4])


@each_backend
@pytest.mark.parametrize("data", [b"", bytes(5000), b"\x00\x00\x00\x18ftypisom" * 9], ids=["empty", "zeros", "ftyp"])
def test_bytes_that_are_no_video_are_refused(h264: Video, backend: DecoderBackend, data: bytes) -> None:
    with pytest.raises(DecodeError, match=f"episode 7: .* {len(data)} bytes"):
        open_decoder(h264.clip(data=memoryview(data)), backend=backend)


def test_pyav_refuses_another_clock(h264: Video) -> None:
    with pytest.raises(DecodeError, match="counts time in 1/15360 s, not in 1/90000 s"):
        open_decoder(h264.clip(timescale=90_000), backend="pyav")


@each_backend
def test_threads_share_a_decoder(h264: Video, backend: DecoderBackend) -> None:
    decoder = open_decoder(h264.clip(), backend=backend)
    wrong: list[int] = []

    def decode(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(25):
            frame = draw.randrange(FRAMES)
            if not np.array_equal(pixels(decoder.frames([frame]))[0], h264.frames[frame]):
                wrong.append(frame)

    threads = [threading.Thread(target=decode, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@each_backend
@pytest.mark.parametrize("writable", [False, True])
def test_the_clip_is_read_in_place_and_held(h264: Video, backend: DecoderBackend, writable: bool) -> None:
    block = bytearray(h264.data)
    decoder = open_decoder(
        h264.clip(data=memoryview(block) if writable else memoryview(block).toreadonly()), backend=backend
    )
    with pytest.raises(BufferError):
        block.clear()
    decoder.frames([5])
    del decoder
    block.clear()  # nothing holds it now, and the garbage collector wasn't needed


@each_backend
def test_frames_outlive_their_decoder(h264: Video, backend: DecoderBackend) -> None:
    decoder = open_decoder(h264.clip(), backend=backend)
    one, two = decoder.frames([3]), decoder.frames([4, 3])
    decoder.frames([20])
    del decoder
    gc.collect()
    assert np.array_equal(pixels(one), h264.frames[[3]])
    assert np.array_equal(pixels(two), h264.frames[[4, 3]])


@each_backend
def test_a_decoder_stays_in_its_process(h264: Video, backend: DecoderBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = open_decoder(h264.clip(), backend=backend)
    child = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: child)
    with pytest.raises(WrongLoop, match=f"can't be used in its child {child}"):
        decoder.frames([0])


def test_torch_may_have_another_default_device(h264: Video) -> None:
    with torch.device("meta"):
        decoder = open_decoder(h264.clip(), backend="torchcodec")
        assert decoder.frames([1, 2]).device.type == "cpu"
        assert decoder.frames([]).device.type == "cpu"


def test_the_estimate_counts_pixels_and_depth(videos: dict[str, Video]) -> None:
    small = open_decoder(videos["hevc"].clip(), backend="torchcodec").nbytes
    deep = open_decoder(videos["hevc-10bit"].clip(), backend="torchcodec").nbytes
    assert 256 * 1024 < small < deep < 2 * small
    assert deep == open_decoder(videos["hevc-10bit"].clip(), backend="pyav").nbytes


def test_auto_is_torchcodec(h264: Video) -> None:
    assert isinstance(open_decoder(h264.clip(), backend="auto"), TorchcodecDecoder)
    assert isinstance(open_decoder(h264.clip(), backend="pyav"), PyAVDecoder)


def test_pyav_reads_on_instead_of_seeking(h264: Video, monkeypatch: pytest.MonkeyPatch) -> None:
    seeks: list[int] = []
    seek = PyAVDecoder._seek

    def counted(self: PyAVDecoder, pts: int) -> None:
        seeks.append(pts)
        seek(self, pts)

    monkeypatch.setattr(PyAVDecoder, "_seek", counted)
    decoder = open_decoder(h264.clip(), backend="pyav")
    for frame in range(10):  # one group of pictures
        decoder.frames([frame])
    assert len(seeks) == 1, "the one at opening"
    decoder.frames([9])
    assert len(seeks) == 2, "the same frame again is behind"


@given(data=st.binary(max_size=50), moves=st.lists(st.tuples(st.integers(-60, 60), st.sampled_from([0, 1, 2]))))
def test_the_memory_file_is_a_file(data: bytes, moves: list[tuple[int, int]]) -> None:
    ours, theirs = MemoryFile(data), io.BytesIO(data)
    for offset, whence in moves:
        if whence == 0 and offset < 0:
            continue  # BytesIO raises
        assert ours.seek(offset, whence) == theirs.seek(offset, whence)
        assert ours.read(7) == theirs.read(7)
        assert ours.tell() == theirs.tell()
