"""Plans of clips: all frames, each once, in few bytes."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncfetch.media import locate_moov, parse_tracks
from asyncfetch.videos.entry_table import Place
from asyncfetch.videos.plan import MAX_GAP_BYTES, plan_audio, plan_clips

if TYPE_CHECKING:
    from pathlib import Path

    from asyncfetch.media import Tracks

any_frames = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15, deadline=None)
OFFSET = 1000
"""Position of the video in its file."""


@pytest.fixture(params=["heavy-30.mp4", "heavy-250.mp4", "open.mp4", "hevc-open.mp4", "movie.mov"])
def video(request: pytest.FixtureRequest, corpus: Path, heavy: dict[str, bytes]) -> tuple[bytes, Tracks]:
    name = request.param
    data = heavy.get(name) or (corpus / name).read_bytes()
    first, stop = locate_moov(data, size=len(data), url=name)
    return data, parse_tracks(data[first:stop], url=name)


@any_frames
@given(data=st.data())
def test_clips_have_each_frame_once_in_few_bytes(video: tuple[bytes, Tracks], data: st.DataObject) -> None:
    index, audio = video[1]
    starts = data.draw(st.lists(st.integers(0, index.num_samples - 1), min_size=1, max_size=6))
    step, length = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 12))
    shown, _, _ = index.shown()
    samples = np.concatenate([shown[np.minimum(np.arange(length) * step + at, len(shown) - 1)] for at in starts])
    clips = plan_clips(index, samples, Place("https://h/a.tar", OFFSET))
    places = np.concatenate([clip.places for clip in clips if clip.places is not None])
    assert sorted(places.tolist()) == list(range(len(samples)))
    for clip in clips:
        assert clip.places is not None
        assert len(clip.plan.frame_index) == len(clip.places)
        assert (clip.plan.frame_index >= 0).all()
        assert clip.start == clip.plan.start + OFFSET
    keys = np.arange(index.num_samples) if index.samples.sync is None else index.samples.sync
    groups = np.unique(np.searchsorted(keys, samples, "right"))
    least = index.group_bytes(samples)
    fetched = sum(clip.stop - clip.start for clip in clips)
    for start, stop in () if audio is None else audio.clip(0, 10, max_gap_bytes=0).ranges.tolist():
        # Sound that lies between the pictures comes with them: movie.mov has more of it than of pictures.
        fetched -= sum(max(0, min(stop, clip.plan.stop) - max(start, clip.plan.start)) for clip in clips)
    assert fetched <= 1.1 * least + MAX_GAP_BYTES * len(groups)


@any_frames
@given(spans=st.lists(st.tuples(st.floats(0, 9.5), st.floats(0.01, 3)), min_size=1, max_size=3))
def test_audio_is_put_together_of_what_is_fetched(
    video: tuple[bytes, Tracks], spans: list[tuple[float, float]]
) -> None:
    file, (index, audio) = video
    if audio is None:
        return
    place = Place("https://h/a.tar", OFFSET)
    shown, seconds, _ = index.shown()
    chosen = [np.flatnonzero((seconds >= start) & (seconds < start + length)) for start, length in spans]
    samples = shown[np.concatenate(chosen)]
    clips = {f"video {n}": clip for n, clip in enumerate(plan_clips(index, samples, place))} if len(samples) else {}
    plans, ranges = plan_audio(audio, [(start, start + length) for start, length in spans], clips, place)
    planned = clips | ranges
    for plan, (start, length) in zip(plans, spans, strict=True):
        found = b""
        for part in plan.parts:
            each = planned[part.name]
            held = file[each.start - OFFSET : each.stop - OFFSET]
            assert 0 <= part.start < part.stop <= len(held)
            found += held[part.start : part.stop]
        whole = audio.clip(start, start + length, max_gap_bytes=0)
        assert found == b"".join(file[first:stop] for first, stop in whole.ranges.tolist())
        assert plan.header == whole.header
    pieces = sorted((each.start, each.stop) for each in ranges.values())
    assert all(late[0] - early[1] > MAX_GAP_BYTES for early, late in pairwise(pieces))
