"""Clips of real videos, decoded, against the whole file decoded by PyAV."""

from __future__ import annotations

import importlib
import io
import itertools
import random
import struct
import sys
from typing import TYPE_CHECKING, Any

import av
import numpy as np
import pytest

from asyncfetch.errors import FormatError
from asyncfetch.media.clip import ClipTables, Timing, TrackFormat, build_header
from asyncfetch.media.samples import MAX_OFFSET, ByteRuns
from tests.media.conftest import (
    EDIT_LISTS,
    TICKS,
    Video,
    clip_of,
    decode,
    encode,
    remux,
    rewrite,
    samples_of,
    with_edits,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from asyncfetch.media import ClipPlan

FPS = 30


def stretches(count: int, *, seed: int) -> Iterator[tuple[int, int]]:
    """Some (first frame, number of frames): all, the ends, past the end, and random ones."""
    yield from [(0, count), (0, 1), (max(0, count - 1), 1), (max(0, count - 2), 5)]
    rng = random.Random(seed)
    for _ in range(12):
        first = rng.randrange(count)
        yield first, rng.randint(1, min(20, count - first))


def cut(data: bytes, plan: ClipPlan) -> bytearray:
    return bytearray(plan.header) + data[plan.start : plan.stop]


def pyav_frames(data: bytes | bytearray) -> dict[int, NDArray[np.uint8]]:
    container: Any
    with av.open(io.BytesIO(data)) as container:
        return {frame.pts: frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)}


@pytest.fixture(scope="session")
def open_torchcodec() -> Callable[[bytearray], Any]:
    torch = pytest.importorskip("torch")
    try:
        decoders: Any = importlib.import_module("torchcodec.decoders")
    except (ImportError, RuntimeError, OSError) as error:  # RuntimeError: it finds no FFmpeg libraries
        pytest.skip(f"torchcodec can't be loaded: {error}")

    def open_decoder(data: bytearray) -> object:
        tensor = torch.frombuffer(data, dtype=torch.uint8)
        return decoders.VideoDecoder(tensor, seek_mode="exact", num_ffmpeg_threads=1, dimension_order="NHWC")

    return open_decoder


def test_pyav_shows_the_asked_frames_at_the_planned_times(video: Video) -> None:
    index, end = video.index(), max(video.truth) + 1
    for first, count in stretches(end, seed=1):
        plan = clip_of(index, first, count, fps=FPS)
        shown = pyav_frames(cut(video.data, plan)) if plan.num_samples else {}
        for frame, pts in zip(range(first, first + count), plan.pts.tolist(), strict=True):
            if frame in video.truth:
                np.testing.assert_array_equal(shown[pts], video.truth[frame], f"{frame} of {first}+{count}")
            else:
                assert pts == -1


def test_torchcodec_finds_the_asked_frames_in_any_order(
    video: Video, open_torchcodec: Callable[[bytearray], Any]
) -> None:
    index, end = video.index(), max(video.truth) + 1
    numbers = sorted(video.truth)
    every = np.stack([video.truth[number] for number in numbers]).astype(np.int16)
    for first, count in stretches(end, seed=2):
        plan = clip_of(index, first, count, fps=FPS)
        decoder: Any = open_torchcodec(cut(video.data, plan)) if plan.num_samples else None
        order = random.Random(first).sample(range(count), count)
        for k in order:
            if first + k not in video.truth:
                assert plan.frame_index[k] == -1
                continue
            frame = decoder.get_frame_at(int(plan.frame_index[k]))
            assert frame.pts_seconds == pytest.approx(plan.pts[k] / plan.timescale, abs=1e-9)
            # Colours are converted by another library: near the truth, and nearer than to any other frame.
            distances = np.abs(every - frame.data.numpy()).mean(axis=(1, 2, 3))
            assert numbers[int(distances.argmin())] == first + k, f"{first + k} of {first}+{count}"
            assert distances.min() < 2


@pytest.mark.parametrize("name", ["h264-g2", "h264-g30", "hevc-open", "hevc-open-adjacent-keys", "hevc-g2"])
def test_a_seek_in_a_clip_lands_at_or_before_the_frame(make_video: Callable[[str], Video], name: str) -> None:
    video = make_video(name)
    plan = clip_of(video.index(), 0, 45, fps=FPS)
    container: Any
    with av.open(io.BytesIO(cut(video.data, plan))) as container:
        stream = container.streams.video[0]
        for k in random.Random(0).sample(range(45), 45):
            container.seek(int(plan.pts[k]), stream=stream)
            frame = next(frame for frame in container.decode(stream) if frame.pts >= plan.pts[k])
            assert frame.pts == plan.pts[k]
            np.testing.assert_array_equal(frame.to_ndarray(format="rgb24"), video.truth[k])


def test_a_clip_takes_the_group_of_pictures_and_no_more(make_video: Callable[[str], Video]) -> None:
    index = make_video("av1-g2").index()
    assert [clip_of(index, first, 2, fps=FPS).num_samples for first in (0, 1, 10, 11)] == [2, 3, 2, 3]
    assert clip_of(make_video("h264-all-key").index(), 20, 1, fps=FPS).num_samples == 1


def test_open_gops_start_a_key_frame_earlier_only_if_needed(
    make_video: Callable[[str], Video],
) -> None:
    index = make_video("hevc-open").index()
    sync = index.samples.sync
    assert sync is not None
    times = (index.samples.presentation_times(0, index.num_samples) - index.edit.shift) // 512
    led = next(i for i in range(1, len(sync)) if times[sync[i] + 1] < times[sync[i]])
    key = int(sync[led])
    assert clip_of(index, int(times[key]), 1, fps=FPS).num_samples == 1
    assert clip_of(index, int(times[key + 1]), 1, fps=FPS).num_samples == key + 2 - int(sync[led - 1])


def test_clip_of_open_h264_starts_earlier_near_its_key_frame(
    make_video: Callable[[str], Video],
) -> None:
    index = make_video("h264-open").index()
    samples, times = index.samples, index.samples.presentation_times(0, index.num_samples)
    assert samples.has_open_gops
    assert samples.sync is not None
    for first in range(30):
        wanted = samples_of(index, first, 20, fps=FPS)
        start = samples.decodable_from(wanted)
        assert clip_of(index, first, 20, fps=FPS).num_samples == wanted.max() + 1 - start
    behind = int(times[samples.sync[2]] - index.edit.shift) // 512 + 1
    (wanted,) = samples_of(index, behind, 1, fps=FPS)
    assert wanted > samples.sync[2]
    assert clip_of(index, behind, 1, fps=FPS).num_samples == wanted + 1 - samples.sync[1]


def test_negative_composition_offsets_make_no_other_clips(make_video: Callable[[str], Video]) -> None:
    usual, negative = make_video("h264-open").index(), make_video("h264-open-negative-ctts").index()
    assert usual.samples.composition_limits[0] >= 0 > negative.samples.composition_limits[0]
    for first, count in itertools.product(range(40), (1, 2, 5, 10)):
        one, other = clip_of(usual, first, count, fps=FPS), clip_of(negative, first, count, fps=FPS)
        assert (one.num_samples, one.pts.tolist()) == (other.num_samples, other.pts.tolist())
        assert len(one.header) == len(other.header), "as many key frames"


def test_open_gops_may_begin_without_a_key_frame(make_video: Callable[[str], Video]) -> None:
    def without_the_first_key(kind: bytes, body: bytes) -> tuple[bytes, bytes]:
        count = int.from_bytes(body[4:8])
        return kind, body if kind != b"stss" else body[:4] + (count - 1).to_bytes(4) + body[12:]

    video = make_video("h264-open")
    data = rewrite(video.data, without_the_first_key)
    plan = clip_of(Video(data, {}).index(), 0, 3, fps=FPS)
    shown = pyav_frames(cut(data, plan))
    assert [(shown[pts] == video.truth[frame]).all() for frame, pts in enumerate(plan.pts.tolist())] == [True] * 3


def test_a_gap_in_time_sends_no_clip_far_back(make_video: Callable[[str], Video]) -> None:
    index = make_video("h264-open-with-a-gap").index()
    assert max(clip_of(index, first, 1, fps=FPS).num_samples for first in range(300, 350)) <= 48 + 10


@pytest.mark.parametrize("name", ["h264-g2", "h264-g30", "h264-negative-ctts", "episodes-h264", "av1-g2"])
def test_closed_gops_start_at_the_nearest_key_frame(make_video: Callable[[str], Video], name: str) -> None:
    video = make_video(name)
    index = video.index()
    assert not index.samples.has_open_gops
    sync = index.samples.sync
    assert sync is not None
    for first, count in itertools.product(range(len(video.truth)), (1, 2, 7)):
        wanted = samples_of(index, first, min(count, len(video.truth) - first), fps=FPS)
        start, stop = sync[sync <= wanted.min()].max(), wanted.max() + 1
        plan = clip_of(index, first, count, fps=FPS)
        assert plan.num_samples == stop - start
        container: Any
        with av.open(io.BytesIO(cut(video.data, plan))) as container:
            marked = [packet.is_keyframe for packet in container.demux(video=0) if packet.size]
        assert np.flatnonzero(marked).tolist() == [key - start for key in sync if start <= key < stop]


@pytest.mark.parametrize("name", ["h264-g30", "hevc-open", "hevc-g2"])
@pytest.mark.parametrize("edits", EDIT_LISTS, ids=str)
def test_an_edit_list_shows_what_ffmpeg_shows_of_the_whole_file(
    make_video: Callable[[str], Video], name: str, edits: list[tuple[int, int]]
) -> None:
    """The clock starts with the first frame shown, wherever between two the edit does. One at its end isn't shown."""
    data = with_edits(make_video(name).data, edits)
    truth = {round(pts / TICKS): pixels for pts, pixels in decode(data).items()}
    index = Video(data, truth).index()
    for first, count in [(0, 60), *((first, 3) for first in range(0, 60, 3))]:
        plan = clip_of(index, first, count, fps=FPS)
        shown = pyav_frames(cut(data, plan)) if plan.num_samples else {}
        for frame, pts in zip(range(first, first + count), plan.pts.tolist(), strict=True):
            assert (pts >= 0) == (frame in truth), frame
            if frame in truth:
                np.testing.assert_array_equal(shown[pts], truth[frame], f"{frame} of {first}+{count}")


@pytest.mark.parametrize("name", ["hevc-open", "h264-g30"])
def test_last_frame_of_hours_leaves_the_others_their_times(
    make_video: Callable[[str], Video], open_torchcodec: Callable[[bytearray], Any], name: str
) -> None:
    durations = struct.pack(">6I", 0, 2, 49, TICKS, 1, 1_000_000_000)
    data = rewrite(make_video(name).data, lambda kind, body: (kind, durations if kind == b"stts" else body))
    plan = clip_of(Video(data, {}).index(), 0, 50, fps=FPS)
    clip = cut(data, plan)
    shown, decoder = pyav_frames(clip), open_torchcodec(clip)
    for frame in (0, 1, 25, 49):
        np.testing.assert_array_equal(shown[int(plan.pts[frame])], make_video(name).truth[frame])
        at = decoder.get_frame_at(int(plan.frame_index[frame])).pts_seconds
        assert at == pytest.approx(plan.pts[frame] / plan.timescale, abs=1e-9)


def test_times_that_ffmpeg_would_ignore_are_refused(make_video: Callable[[str], Video]) -> None:
    far = MAX_OFFSET - TICKS
    tables = {b"ctts": struct.pack(">IIIiIi", 0, 2, 10, -far, 40, far), b"stss": struct.pack(">3I", 0, 1, 1)}

    def spread(kind: bytes, body: bytes) -> tuple[bytes, bytes] | None:
        return None if kind == b"elst" else (kind, tables.get(kind, body))

    index = Video(rewrite(make_video("h264-g30").data, spread), {}).index()
    with pytest.raises(FormatError, match=r"too far apart in time: by up to 536869888 ticks of 1/15360 s"):
        clip_of(index, far // TICKS + 12, 3, fps=FPS)


def matrix(*turn: int) -> bytes:
    return struct.pack(">9i", turn[0] << 16, turn[1] << 16, 0, turn[2] << 16, turn[3] << 16, 0, 0, 0, 1 << 30)


UPRIGHT, LEFT, OVER, MIRRORED = matrix(1, 0, 0, 1), matrix(0, -1, 1, 0), matrix(-1, 0, 0, -1), matrix(-1, 0, 0, 1)


@pytest.mark.parametrize("movie", [UPRIGHT, LEFT, OVER, MIRRORED], ids=["upright", "left", "over", "mirrored"])
@pytest.mark.parametrize("track", [UPRIGHT, LEFT, OVER], ids=["upright", "left", "over"])
def test_a_clip_is_turned_as_the_whole_file(make_video: Callable[[str], Video], movie: bytes, track: bytes) -> None:
    def turn(kind: bytes, body: bytes) -> tuple[bytes, bytes]:
        matrices = {b"mvhd": movie, b"tkhd": track}
        return kind, body.replace(UPRIGHT, matrices[kind]) if kind in matrices else body

    data = rewrite(make_video("h264-g2").data, turn)
    plan = clip_of(Video(data, {}).index(), 4, 2, fps=FPS)
    assert rotation(cut(data, plan)) == rotation(data)


def rotation(data: bytes | bytearray) -> int:
    container: Any
    with av.open(io.BytesIO(data)) as container:
        return int(next(container.decode(video=0)).rotation)


def of_two_encodings(first: bytes, second: bytes) -> tuple[bytes, int]:
    """The videos one after the other, each with the sample description it was encoded with; samples of the first."""
    data = remux([first, second])
    samples, count = Video(data, {}).index().samples, Video(first, {}).index().num_samples
    offset = int(samples.run_offset[0])
    bodies: dict[bytes, bytes] = {}
    rewrite(second, lambda kind, body: (kind, bodies.setdefault(kind, body)))

    def join(kind: bytes, body: bytes) -> tuple[bytes, bytes]:
        if kind == b"stsd":
            body = struct.pack(">II", 0, 2) + body[8:] + bodies[b"stsd"][8:]
        elif kind == b"stsc":
            body = struct.pack(">8I", 0, 2, 1, count, 1, 2, samples.num_samples - count, 2)
        elif kind == b"stco":
            body = struct.pack(">4I", 0, 2, offset, offset + int(samples.sizes[:count].sum()))
        return kind, body

    return rewrite(data, join), count


def test_a_clip_has_the_one_sample_description_of_its_frames(open_torchcodec: Callable[[bytearray], Any]) -> None:
    """FFmpeg tells its decoder of a second one as it comes to it, not where it seeks to: another picture came of it."""
    parts = [
        encode("libx264", numbers=range(20), gop=5),
        encode("libx264", numbers=range(20), gop=5, first_picture=50, x264_params="cqm=jvt"),
    ]
    data, count = of_two_encodings(parts[0], parts[1])
    index = Video(data, {}).index()
    for start, part in zip((0, count), parts, strict=True):
        truth = decode(part)
        plan = clip_of(index, start, 20, fps=FPS)
        decoder = open_torchcodec(cut(data, plan))
        for frame in (12, 3, 19, 4):
            pixels = decoder.get_frame_at(int(plan.frame_index[frame])).data.numpy()
            assert np.abs(truth[frame * TICKS].astype(int) - pixels).mean() < 2, start + frame
    with pytest.raises(FormatError, match=r"its encoding changes in the middle .* encode the video anew"):
        clip_of(index, count - 2, 4, fps=FPS)


def test_the_size_is_that_of_the_frames() -> None:
    data, count = of_two_encodings(encode("libx264", numbers=range(5)), encode("libx264", numbers=range(5)))
    place = data.rindex(struct.pack(">HH", 128, 96), 0, data.rindex(b"avcC"))
    data = data[:place] + struct.pack(">HH", 64, 48) + data[place + 4 :]
    index = Video(data, {}).index()
    assert [(plan.width, plan.height) for plan in (clip_of(index, first, 2, fps=FPS) for first in (0, count))] == [
        (128, 96),
        (64, 48),
    ]


def test_dropped_frames_are_missing_and_their_neighbours_stay(make_video: Callable[[str], Video]) -> None:
    plan = clip_of(make_video("dropped-frames").index(), 5, 6, fps=FPS)
    assert (plan.frame_index == -1).tolist() == [False, False, True, True, False, False]


@pytest.mark.parametrize("stretch", [(0, 40), (18, 1), (15, 7), (17, 2)])
def test_frames_of_equal_time_are_missing_and_neighbours_stay(
    make_video: Callable[[str], Video], stretch: tuple[int, int]
) -> None:
    """A decoder that seeks to their time gives another of them than one that comes past it."""
    durations = struct.pack(">8I", 0, 3, 18, TICKS, 2, 0, 30, TICKS)  # samples 18, 19 and 20, a key frame, at one tick
    data = rewrite(make_video("av1-g2").data, lambda kind, body: (kind, durations if kind == b"stts" else body))
    truth = decode(make_video("av1-g2").data)
    plan = clip_of(Video(data, {}).index(), *stretch, fps=FPS)
    shown = pyav_frames(cut(data, plan)) if plan.num_samples else {}
    for frame, pts in zip(range(stretch[0], sum(stretch)), plan.pts.tolist(), strict=True):
        assert (pts == -1) == (frame == 18)
        if frame != 18:
            np.testing.assert_array_equal(shown[pts], truth[(frame if frame < 18 else frame + 2) * TICKS])


@pytest.mark.parametrize(("first", "count"), [(3, 0), (7, 2), (10_000, 4)])
def test_plan_with_nothing_to_show_is_empty(make_video: Callable[[str], Video], first: int, count: int) -> None:
    plan = clip_of(make_video("dropped-frames").index(), first, count, fps=FPS)
    assert (plan.start, plan.stop, plan.header, plan.num_samples) == (0, 0, b"", 0)
    assert plan.frame_index.tolist() == plan.pts.tolist() == [-1] * count


def test_half_the_rate_takes_the_nearer_of_two_samples(make_video: Callable[[str], Video]) -> None:
    video = make_video("h264-all-key")
    plan = clip_of(video.index(), 0, 10, fps=FPS / 2)
    shown = pyav_frames(cut(video.data, plan))
    for k, pts in enumerate(plan.pts.tolist()):
        np.testing.assert_array_equal(shown[pts], video.truth[2 * k])


def test_twice_the_rate_leaves_every_other_frame_missing(make_video: Callable[[str], Video]) -> None:
    plan = clip_of(make_video("h264-all-key").index(), 0, 10, fps=FPS * 2)
    assert (plan.pts == -1).tolist() == [False, True] * 5


def test_a_header_takes_no_more_calls_for_more_frames() -> None:
    """Of Python's functions: the tables, in which every frame has its place, are numpy's work."""

    def calls(frames: int) -> int:
        numbers = np.arange(frames, dtype=np.int64)
        track = TrackFormat("av01", 64, 64, 15360, b"", b"")
        timing = Timing(512 + numbers % 3, 512 * (numbers % 2), 512, hides=False)  # nothing to tell by runs
        runs = ByteRuns(numbers * 200, numbers * 0 + 100, numbers * 0 + 1, numbers * 0 + 1)
        tables = ClipTables(numbers + 100, timing, numbers[::2], runs)
        called: list[str] = []
        sys.setprofile(lambda frame, event, _: called.append(event) if event.endswith("call") else None)
        try:
            header = build_header(track, tables, start=0, stop=frames * 200)
        finally:
            sys.setprofile(None)
        assert len(header) > 16 * frames
        return len(called)

    assert calls(10_000) == calls(100)


def test_a_time_that_no_video_has_is_no_frames(make_video: Callable[[str], Video]) -> None:
    index = make_video("dropped-frames").index()
    seconds = np.array([float("nan"), float("inf"), -float("inf"), 1e300, -1.0, 2.0**40, 0.0])
    samples, shown = index.samples_at(seconds, within_seconds=0.01)
    assert samples.tolist() == [-1] * 6 + [0]
    np.testing.assert_array_equal(shown, [np.nan] * 6 + [0.0])


def test_a_clip_takes_samples_in_any_order_and_twice(make_video: Callable[[str], Video]) -> None:
    video = make_video("h264-g30")
    index = video.index()
    of_frame = samples_of(index, 0, 50, fps=FPS)
    frames = [41, 33, 33, -1, 35]
    plan = index.clip(np.array([of_frame[frame] if frame >= 0 else -1 for frame in frames]))
    shown = pyav_frames(cut(video.data, plan))
    for frame, pts, rank in zip(frames, plan.pts.tolist(), plan.frame_index.tolist(), strict=True):
        assert (pts < 0) == (rank < 0) == (frame < 0)
        if frame >= 0:
            np.testing.assert_array_equal(shown[pts], video.truth[frame])
