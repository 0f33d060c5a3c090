"""Clips beside torchcodec's own samplers, on videos of constant and of variable rate."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

import av
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchcodec import samplers as torchcodec_samplers
from torchcodec.decoders import VideoDecoder  # type: ignore[attr-defined]

from asyncfetch.errors import ConfigError, FrameMissing
from asyncfetch.videos.windows import ClipSampler, draw, frames_within

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from asyncfetch.videos.windows import AtEnd

FRAMES = 61
LAST_DRAW = 1 - 2**-53

samplers: Any = torchcodec_samplers  # without types

Rate = Literal["constant", "variable", "ntsc"]


@dataclass(frozen=True)
class Video:
    decoder: Any
    times: NDArray[np.float64]
    end: float

    def __len__(self) -> int:
        return len(self.times)

    def positions(self, batch: Any) -> list[list[int]]:  # noqa: ANN401 - torchcodec is without types
        """Of the frames that a sampler gave, by their times."""
        found: list[list[int]] = np.searchsorted(self.times, batch.pts_seconds.numpy()).tolist()
        return found

    def clips(self, sampler: ClipSampler, *, draws: tuple[float, ...] = (0.0,)) -> list[list[int]]:
        count = int(sampler.count(seconds=self.end - self.times[0], frames=len(self)))
        return [sampler.window(self.times, self.end, i, draw=d).tolist() for i in range(count) for d in draws]


def encode(ticks: list[int], timescale: int) -> Video:
    data = io.BytesIO()
    with av.open(data, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=30, options={"bf": "2", "g": "12", "threads": "1"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.time_base = stream.codec_context.time_base = Fraction(1, timescale)
        for number, pts in enumerate(ticks):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 4 * number, np.uint8), format="rgb24")
            frame.pts, frame.time_base = pts, Fraction(1, timescale)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    decoder: Any = VideoDecoder(data.getvalue(), device="cpu")
    times = decoder.get_frames_in_range(0, len(decoder)).pts_seconds.numpy()
    assert len(times) == len(ticks)
    return Video(decoder, times, decoder.metadata.end_stream_seconds)


@pytest.fixture(scope="module")
def videos() -> dict[Rate, Video]:
    gaps = np.random.default_rng(0).integers(500, 9000, FRAMES)
    return {
        "constant": encode([3000 * i for i in range(FRAMES)], 90_000),
        "variable": encode(np.cumsum(gaps).tolist(), 90_000),
        "ntsc": encode([1001 * i for i in range(FRAMES)], 30_000),
    }


@pytest.fixture(params=["constant", "variable", "ntsc"])
def video(videos: dict[Rate, Video], request: pytest.FixtureRequest) -> Video:
    return videos[request.param]


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("per_video", [1, 2, 7, 100])
def test_uniform_frames_are_torchcodecs(video: Video, step: int, per_video: int) -> None:
    batch = samplers.clips_at_regular_indices(
        video.decoder, num_clips=per_video, num_frames_per_clip=5, num_indices_between_frames=step
    )
    assert video.clips(ClipSampler(5, step=step, pick="uniform", per_video=per_video)) == video.positions(batch)


@given(st.integers(1, 3000), st.integers(1, 200))
@settings(max_examples=300, deadline=None)
def test_uniform_starts_are_those_of_linspace(frames: int, per_video: int) -> None:
    sampler = ClipSampler(1, pick="uniform", per_video=per_video)
    starts = [int(sampler.window(np.arange(frames) / 30, frames / 30, i)[0]) for i in range(per_video)]
    assert starts == torch.linspace(0, frames - 1, steps=per_video, dtype=torch.int).tolist()


@pytest.mark.parametrize("fps", [4.0, 10.0, 24.0, 60.0])
@pytest.mark.parametrize("every", [0.1, 0.25, 0.7])
def test_every_seconds_is_torchcodecs(video: Video, fps: float, every: float) -> None:
    batch = samplers.clips_at_regular_timestamps(
        video.decoder, seconds_between_clip_starts=every, num_frames_per_clip=5, seconds_between_frames=1 / fps
    )
    assert video.clips(ClipSampler(5, fps=fps, every_seconds=every)) == video.positions(batch)


@pytest.mark.parametrize("per_video", [1, 2, 7])
def test_uniform_times_are_torchcodecs(video: Video, per_video: int) -> None:
    width = video.end - 4 * (1 / 8) - video.times[0]
    batch = samplers.clips_at_regular_timestamps(
        video.decoder,
        seconds_between_clip_starts=width / per_video,
        num_frames_per_clip=5,
        seconds_between_frames=1 / 8,
    )
    assert video.clips(ClipSampler(5, fps=8, pick="uniform", per_video=per_video)) == video.positions(batch)


def test_every_seconds_by_frames_is_torchcodecs(videos: dict[Rate, Video]) -> None:
    """At a constant rate: its step is the mean duration of a frame."""
    video = videos["constant"]
    batch = samplers.clips_at_regular_timestamps(
        video.decoder, seconds_between_clip_starts=0.26, num_frames_per_clip=5, seconds_between_frames=2 / 30
    )
    assert video.clips(ClipSampler(5, step=2, every_seconds=0.26)) == video.positions(batch)


def test_every_seconds_by_frames_stays_inside(video: Video) -> None:
    """At any rate each clip has the frames of its step."""
    clips = video.clips(ClipSampler(5, step=3, every_seconds=0.2, at_end="error"))
    assert len(clips) > 5
    assert (np.diff(clips, axis=1) == 3).all()


@pytest.mark.parametrize("step", [1, 4])
def test_random_frames_start_where_torchcodecs_do(video: Video, step: int) -> None:
    torch.manual_seed(0)
    batch = samplers.clips_at_random_indices(
        video.decoder, num_clips=1500, num_frames_per_clip=5, num_indices_between_frames=step
    )
    starts = FRAMES - 4 * step
    draws = tuple((np.arange(3 * starts) + 0.5) / (3 * starts))
    clips = video.clips(ClipSampler(5, step=step), draws=(0.0, *draws, LAST_DRAW))
    assert {tuple(clip) for clip in clips} == {tuple(clip) for clip in video.positions(batch)}
    assert np.bincount([clip[0] for clip in clips[1:-1]]).tolist() == [3] * starts


def test_random_times_are_torchcodecs(video: Video) -> None:
    torch.manual_seed(1)
    draws = tuple(torch.rand(200, dtype=torch.float64).tolist())
    torch.manual_seed(1)
    batch = samplers.clips_at_random_timestamps(
        video.decoder, num_clips=200, num_frames_per_clip=5, seconds_between_frames=1 / 12
    )
    assert video.clips(ClipSampler(5, fps=12), draws=draws) == video.positions(batch)


def test_played_frames_are_torchcodecs(video: Video) -> None:
    moments = video.times[0] + np.arange(int((video.end - video.times[0]) * 47)) / 47
    due = video.decoder.get_frames_played_at(moments.tolist()).pts_seconds.numpy()
    [clip] = video.clips(ClipSampler(len(moments), fps=47, pick="all"))[:1]
    assert video.times[clip].tolist() == due.tolist()


@pytest.mark.parametrize("at_end", ["repeat_last", "wrap"])
@pytest.mark.parametrize("step", [1, 9])
def test_long_clips_by_frames_are_torchcodecs(video: Video, at_end: AtEnd, step: int) -> None:
    batch = samplers.clips_at_regular_indices(
        video.decoder, num_clips=2, num_frames_per_clip=150, num_indices_between_frames=step, policy=at_end
    )
    sampler = ClipSampler(150, step=step, pick="uniform", per_video=2, at_end=at_end)
    assert video.clips(sampler) == video.positions(batch)
    assert video.clips(replace(sampler, pick="random"), draws=(LAST_DRAW,)) == video.positions(batch)


@pytest.mark.parametrize("at_end", ["repeat_last", "wrap"])
@pytest.mark.parametrize("fps", [5.0, 29.0])
def test_long_clips_by_seconds_start_at_the_first(video: Video, at_end: AtEnd, fps: float) -> None:
    """torchcodec refuses them unless it is told where clips may start: right at the first frame."""
    batch = samplers.clips_at_random_timestamps(
        video.decoder,
        num_frames_per_clip=150,
        seconds_between_frames=1 / fps,
        sampling_range_end=np.nextafter(video.times[0], 9),
        policy=at_end,
    )
    for sampler in (
        ClipSampler(150, fps=fps, at_end=at_end),
        ClipSampler(150, fps=fps, every_seconds=1, at_end=at_end),
    ):
        assert video.clips(sampler, draws=(LAST_DRAW,)) == video.positions(batch)


@pytest.mark.parametrize("words", [{"step": 2}, {"fps": 8}, {"pick": "all"}, {"every_seconds": 1}])
def test_long_clips_can_be_an_error(video: Video, words: dict[str, Any]) -> None:
    with pytest.raises(FrameMissing, match=r"a\.mp4: clip 0 of 150 frames reaches over the end: .*'repeat_last'"):
        ClipSampler(150, at_end="error", **words).window(video.times, video.end, 0, name="a.mp4")


def test_last_of_all_is_filled_up(videos: dict[Rate, Video]) -> None:
    video = videos["variable"]
    assert video.clips(ClipSampler(25, pick="all"))[2] == [*range(50, 61), *[60] * 14]
    assert video.clips(ClipSampler(25, pick="all", at_end="wrap"))[2] == [*range(50, 61), *range(50, 61), 50, 51, 52]


@st.composite
def some_video(draw: st.DrawFn) -> tuple[NDArray[np.float64], float]:
    gaps = draw(st.lists(st.integers(1, 5000), min_size=1, max_size=40))
    begin = draw(st.integers(-5000, 10**9))
    ticks = begin + np.cumsum([0, *gaps])
    return ticks[:-1] / 12_800, float(ticks[-1] / 12_800)


some_way: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.builds(dict, step=st.integers(1, 9)),
    st.builds(dict, fps=st.sampled_from([0.5, 5, 12.5, 24000 / 1001, 25, 30, 240])),
)
some_pick: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.builds(dict, pick=st.sampled_from(["random", "uniform"]), per_video=st.integers(1, 6)),
    st.builds(dict, every_seconds=st.floats(0.01, 3)),
    st.just({"pick": "all"}),
)


@given(some_video(), some_way, some_pick, st.integers(1, 12), st.floats(0, LAST_DRAW))
@settings(max_examples=400, deadline=None)
def test_clips_are_all_there_and_no_more(
    video: tuple[NDArray[np.float64], float],
    way: dict[str, Any],
    pick: dict[str, Any],
    num_frames: int,
    drawn: float,
) -> None:
    times, end = video
    sampler = ClipSampler(num_frames, **way, **pick)
    count = int(sampler.count(seconds=end - times[0], frames=len(times)))
    assert count >= 1
    for number in range(count):
        clip = sampler.window(times, end, number, draw=drawn)
        assert clip.dtype == np.int64
        assert clip.shape == (num_frames,)
        assert clip.min() >= 0
        assert clip.max() < len(times)
        assert (np.diff(clip) >= 0).all()
    with pytest.raises(FrameMissing, match=rf"gives {count} clips"):
        sampler.window(times, end, count)


@given(some_video(), some_way, some_pick, st.integers(1, 12), st.floats(0, LAST_DRAW))
@settings(max_examples=400, deadline=None)
def test_only_longer_clips_reach_over_the_end(
    video: tuple[NDArray[np.float64], float],
    way: dict[str, Any],
    pick: dict[str, Any],
    num_frames: int,
    drawn: float,
) -> None:
    times, end = video
    sampler = ClipSampler(num_frames, at_end="error", **way, **pick)
    count = int(sampler.count(seconds=end - times[0], frames=len(times)))
    fits = (num_frames - 1) / sampler.fps < end - times[0] - 1e-6 if sampler.fps else False
    fits |= sampler.step is not None and (num_frames - 1) * sampler.step < len(times)
    for number in range(count - (sampler.pick == "all") if fits else 0):
        clip = sampler.window(times, end, number, draw=drawn)
        if sampler.step is not None:
            assert (np.diff(clip) == sampler.step).all()


@given(some_video(), st.integers(1, 9), st.integers(1, 12))
def test_pick_all_has_every_step_once(video: tuple[NDArray[np.float64], float], step: int, num_frames: int) -> None:
    times, end = video
    sampler = ClipSampler(num_frames, step=step, pick="all")
    clips = [sampler.window(times, end, i) for i in range(int(sampler.count(frames=len(times))))]
    assert np.unique(np.concatenate(clips)).tolist() == list(range(0, len(times), step))
    assert np.concatenate(clips)[: -(-len(times) // step)].tolist() == list(range(0, len(times), step))


@pytest.mark.parametrize("begin", [0, 4, 7, 1000, 100_003])
@pytest.mark.parametrize("rate", [24, 30, 60])
def test_pick_all_at_the_videos_rate_is_every_frame(begin: int, rate: int) -> None:
    """Though sums of such seconds are off by a bit or two."""
    times = (begin + np.arange(300)) / rate
    sampler = ClipSampler(7, fps=rate, pick="all")
    count = int(sampler.count(seconds=(begin + 300) / rate - times[0]))
    clips = [sampler.window(times, (begin + 300) / rate, number) for number in range(count)]
    assert np.concatenate(clips)[:300].tolist() == list(range(300))
    assert count == 43


def test_counts_are_made_for_many_videos() -> None:
    seconds, frames = np.array([0.0, 1.0, 10.0, 3600.0]), np.array([0, 30, 300, 108_000])
    assert ClipSampler(16, fps=8, pick="all").count(seconds=seconds).tolist() == [0, 1, 5, 1800]
    assert ClipSampler(16, step=2, pick="all").count(frames=frames).tolist() == [0, 1, 10, 3375]
    assert ClipSampler(16, fps=8, every_seconds=2).count(seconds=seconds).tolist() == [0, 1, 5, 1800]
    assert ClipSampler(16, every_seconds=2).count(seconds=seconds, frames=frames).tolist() == [0, 1, 5, 1800]
    assert ClipSampler(16, per_video=4).count(frames=frames).tolist() == [0, 4, 4, 4]
    assert ClipSampler(16).count().shape == ()
    assert ClipSampler(16).count().dtype == np.int64


@pytest.mark.parametrize(
    ("sampler", "known"),
    [
        (ClipSampler(8, pick="all"), {"frames"}),
        (ClipSampler(8, fps=5, pick="all"), {"seconds"}),
        (ClipSampler(8, every_seconds=1), {"seconds", "frames"}),
        (ClipSampler(8, fps=5, every_seconds=1), {"seconds"}),
        (ClipSampler(8, pick="uniform"), set()),
        (ClipSampler(8), set()),
    ],
)
def test_counts_say_what_they_depend_on(sampler: ClipSampler, known: set[str]) -> None:
    assert sampler.depends_on == known
    for missing in known:
        with pytest.raises(ConfigError, match=f"needs the {missing} of each video"):
            sampler.count(**{name: np.ones(2) for name in known - {missing}})
        with pytest.raises(ConfigError, match="must be finite"):
            sampler.count(**{name: np.array([1, np.nan if name == missing else 1]) for name in known})


@pytest.mark.parametrize(
    "sampler", [ClipSampler(8), ClipSampler(8, pick="all"), ClipSampler(8, fps=5, every_seconds=1)]
)
def test_empty_spans_have_no_clip(sampler: ClipSampler) -> None:
    with pytest.raises(FrameMissing, match=r"a\.mp4: it gives 0 clips by its 0 frames"):
        sampler.window(np.zeros(0), 3.0, 0, name="a.mp4")


def test_spans_have_the_frames_that_begin_in_them() -> None:
    times = np.array([0.5, 1.0, 1.5, 2.0])
    assert frames_within(times, 2.5, None, None) == (0, 4, 2.5)
    assert frames_within(times, 2.5, 1.0, 2.0) == (1, 3, 2.0)
    assert frames_within(times, 2.5, 1.01, 2.01) == (2, 4, 2.01)
    assert frames_within(times, 2.5, 0.0, 99.0) == (0, 4, 2.5)
    assert frames_within(times, 2.5, 1.1, 1.4) == (2, 2, 1.4)
    assert frames_within(times, 2.5, 2.0, 1.0) == (3, 3, 1.0)


def test_spans_have_clips_of_their_own_frames(video: Video) -> None:
    first, stop, end = frames_within(video.times, video.end, 0.4, 1.3)
    inside = video.times[first:stop]
    assert ((inside >= 0.4) & (inside < 1.3)).all()
    batch = samplers.clips_at_regular_timestamps(
        video.decoder,
        seconds_between_clip_starts=0.15,
        num_frames_per_clip=5,
        seconds_between_frames=1 / 12,
        sampling_range_start=float(inside[0]),
        sampling_range_end=end - 4 * (1 / 12),
    )
    sampler = ClipSampler(5, fps=12, every_seconds=0.15)
    count = int(sampler.count(seconds=end - inside[0]))
    clips = [(first + sampler.window(inside, end, i)).tolist() for i in range(count)]
    assert clips == video.positions(batch)


def test_draws_are_even_and_for_ever_the_same() -> None:
    draws = np.array([
        draw(7, epoch, entry, number) for epoch in range(4) for entry in range(500) for number in range(5)
    ])
    assert ((draws >= 0) & (draws < 1)).all()
    assert len(np.unique(draws)) == len(draws)
    counts = np.bincount((draws * 100).astype(int), minlength=100)  # 100 expected in each, with a deviation of 10
    assert counts.min() > 60
    assert counts.max() < 140
    assert [draw(0, 0, 0, 0), draw(1, 2, 3, 4)] == [0.6312860406041249, 0.14920049057055562]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"num_frames": 0}, "num_frames must be at least 1, not 0"),
        ({"num_frames": 2.5}, "num_frames must be a whole number, not 2.5"),
        ({"fps": 0}, "fps must be a positive number, not 0"),
        ({"fps": float("nan")}, "fps must be a positive number, not nan"),
        ({"step": 0}, "step must be at least 1, not 0"),
        ({"fps": 8, "step": 2}, "fps=8 and step=2 both say .* give one of them"),
        ({"pick": "first"}, "pick must be 'random' or 'uniform' or 'all' or None, not 'first'"),
        ({"at_end": "loop"}, "at_end must be 'repeat_last' or 'wrap' or 'error', not 'loop'"),
        ({"per_video": 0}, "per_video must be at least 1, not 0"),
        ({"every_seconds": -1.0}, r"every_seconds must be a positive number, not -1\.0"),
        ({"every_seconds": 1.0, "per_video": 2}, "leave out per_video="),
        ({"every_seconds": 1.0, "pick": "random"}, "take pick='uniform', not 'random'"),
        ({"pick": "all", "per_video": 2}, "pick='all' gives as many clips as a video has, not per_video=2"),
    ],
)
def test_words_that_exclude_each_other_are_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClipSampler(**({"num_frames": 8} | words))
