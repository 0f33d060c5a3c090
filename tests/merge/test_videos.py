"""Where a video is cut, when an episode doesn't begin with a key frame of its own."""

from __future__ import annotations

import io
from fractions import Fraction
from itertools import pairwise
from typing import Any

import av
import numpy as np
import pytest

from asyncfetch.lerobot.episode_table import VideoSpan
from asyncfetch.media import Mp4Index, parse_moov
from asyncfetch.merge.videos import EpisodeSpan, cut_file


def encode(frames: int, *, gop: int, codec: str = "libx264", options: dict[str, str] | None = None) -> Mp4Index:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream(codec, rate=Fraction(30), options={"g": str(gop), **(options or {})})
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        rng = np.random.default_rng(0)
        for _ in range(frames):
            picture = av.VideoFrame.from_ndarray(rng.integers(0, 255, (64, 64, 3), np.uint8), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))
    return parse_moov(file.getvalue(), url="made.mp4")


def span(episode: int, *, first: int, frames: int) -> EpisodeSpan:
    return EpisodeSpan(episode, VideoSpan("made.mp4", first, frames, first / 30))


def test_an_episode_between_key_frames_stays_with_what_it_needs() -> None:
    index = encode(30, gop=10, options={"sc_threshold": "0", "bf": "0"})
    segments = cut_file(
        index, [span(0, first=0, frames=4), span(1, first=4, frames=11), span(2, first=20, frames=10)], fps=30
    )
    assert [(one.first, one.stop, one.places) for one in segments] == [
        (0, 20, ((0, 0, 4), (1, 4, 11))),
        (20, 30, ((2, 0, 10),)),
    ]


def test_groups_that_no_episode_needs_are_left_out() -> None:
    index = encode(40, gop=10, options={"sc_threshold": "0", "bf": "0"})
    (segment,) = cut_file(index, [span(3, first=22, frames=5)], fps=30)
    assert (segment.first, segment.stop, segment.num_frames, segment.places) == (20, 30, 10, ((3, 2, 5),))


@pytest.mark.parametrize("codec", ["libx264", "libx265"])
def test_an_open_group_of_pictures_is_not_cut_off(codec: str) -> None:
    """Its leading pictures are shown before the key frame and refer to those before it."""
    open_gop = {"x264-params": "open-gop=1:scenecut=0"} if codec == "libx264" else {"x265-params": "log-level=none"}
    index = encode(48, gop=12, codec=codec, options=open_gop)
    spans = [span(number, first=12 * number, frames=12) for number in range(4)]
    segments = cut_file(index, spans, fps=30)
    for segment in segments:
        times = index.samples.presentation_times(0, index.num_samples)
        assert times[segment.first] == times[segment.first :].min()
    assert [episode for one in segments for episode, *_ in one.places] == [0, 1, 2, 3]
    assert all(one.stop <= other.first for one, other in pairwise(segments))
