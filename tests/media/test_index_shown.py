"""Frames in the order of presentation, with their times, against torchcodec on the whole file."""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from asyncfetch.errors import FormatError
from tests.media.conftest import EDIT_LISTS, MAKERS, TICKS, Video, decode, rewrite, with_edits
from tests.media.test_fragments import FRAGMENTED, Drive

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncfetch.media import Mp4Index


def check(index: Mp4Index, data: bytes, *, by_torchcodec: bool = True) -> None:
    """Each frame that FFmpeg gives, when it gives it, and no other."""
    decoders: Any = pytest.importorskip("torchcodec.decoders")
    decoder = decoders.VideoDecoder(data, seek_mode="exact")
    samples, seconds, end = index.shown()
    assert len(np.unique(samples)) == len(samples) == len(decoder)
    assert seconds.tolist() == [pts / index.timescale for pts in sorted(decode(data))]
    assert end == pytest.approx(decoder.metadata.end_stream_seconds_from_content)
    if by_torchcodec:
        assert seconds.tolist() == [decoder.get_frame_at(i).pts_seconds for i in range(len(decoder))]


@pytest.mark.parametrize("name", list(MAKERS))
def test_frames_are_shown_when_torchcodec_shows_them(make_video: Callable[[str], Video], name: str) -> None:
    video = make_video(name)
    check(video.index(), video.data, by_torchcodec=name != "starts-hidden")


@pytest.mark.parametrize("name", list(FRAGMENTED))
def test_frames_in_fragments_are_shown_when_torchcodec_does(name: str) -> None:
    data = FRAGMENTED[name]()
    check(Drive(data).tracks.video, data)


@pytest.mark.parametrize("name", ["h264-g30", "hevc-open", "hevc-g2", "h264-open-negative-ctts"])
@pytest.mark.parametrize("edits", EDIT_LISTS, ids=str)
def test_an_edit_list_moves_and_hides_as_in_ffmpeg(
    make_video: Callable[[str], Video], name: str, edits: list[tuple[int, int]]
) -> None:
    data = with_edits(make_video(name).data, edits)
    # Where a list begins behind a key frame, torchcodec 0.13 doesn't find the first frames, or gives others.
    check(Video(data, {}).index(), data, by_torchcodec=False)


@pytest.mark.parametrize("name", ["h264-g2", "av1-g30"])
@pytest.mark.parametrize("edges", [[30], [15], [12, 30], [1, 2, 3]], ids=str)
def test_edits_that_follow_each_other_are_one(make_video: Callable[[str], Video], name: str, edges: list[int]) -> None:
    whole = make_video(name).index()
    ends = [TICKS * frame for frame in (0, *edges, 50)]
    lag = int(whole.samples.composition[0])
    edits = [(stop - start, start + lag, 0x10000) for start, stop in pairwise(ends)]
    body = struct.pack(">II", 0, len(edits)) + b"".join(struct.pack(">IiI", *edit) for edit in edits)
    ticks = struct.pack(">I", whole.timescale)

    def change(kind: bytes, old: bytes) -> tuple[bytes, bytes]:
        return kind, {b"elst": body, b"mvhd": old[:12] + ticks + old[16:]}.get(kind, old)

    data = rewrite(make_video(name).data, change)
    # torchcodec 0.13 mistakes frames near an edge, which FFmpeg has twice in its list.
    check(Video(data, {}).index(), data, by_torchcodec=False)


@pytest.mark.parametrize("name", ["h264-g30", "hevc-g2", "av1-g30"])
def test_edits_that_ffmpeg_shows_otherwise_are_refused(make_video: Callable[[str], Video], name: str) -> None:
    """Frames shown in another order than decoded, or an edge between two frames."""
    first = 7 if name == "av1-g30" else 1000
    edits = [(first, 0), (500, first * 15360 // 1000)]
    data = with_edits(make_video(name).data, edits)
    with pytest.raises(FormatError, match="shows other than one stretch"):
        Video(data, {}).index()


def test_frames_of_equal_time_have_no_sample(make_video: Callable[[str], Video]) -> None:
    durations = struct.pack(">8I", 0, 3, 18, TICKS, 2, 0, 30, TICKS)  # samples 18, 19 and 20 at one tick
    data = rewrite(make_video("av1-g2").data, lambda kind, body: (kind, durations if kind == b"stts" else body))
    samples, seconds, _ = Video(data, {}).index().shown()
    assert np.flatnonzero(samples < 0).tolist() == [18, 19, 20]
    assert np.diff(seconds[17:22]).round(6).tolist() == [0.033333, 0, 0, 0.033333]


def test_an_edit_list_may_hide_all(make_video: Callable[[str], Video]) -> None:
    body = struct.pack(">IIIiI", 0, 1, 500, 90 * TICKS, 0x10000)
    data = rewrite(make_video("h264-g30").data, lambda kind, old: (kind, body if kind == b"elst" else old))
    samples, seconds, end = Video(data, {}).index().shown()
    assert (len(samples), len(seconds), end) == (0, 0, 0.0)


def test_order_of_shown_frames_is_made_once(make_video: Callable[[str], Video]) -> None:
    index = make_video("h264-g30").index()
    before = index.nbytes
    samples, _, _ = index.shown()
    assert index.shown()[0] is samples
    assert index.nbytes == before + 16 * 50
    with pytest.raises(ValueError, match="read-only"):
        samples[0] = 1


@pytest.mark.parametrize("name", list(MAKERS))
def test_groups_are_as_long_as_their_clips(make_video: Callable[[str], Video], name: str) -> None:
    """What has to be fetched for the last frame of a group in the order of decoding is all of the group."""
    index = make_video(name).index()
    table = index.samples
    sync = np.arange(table.num_samples) if table.sync is None else table.sync
    ends = np.append(sync[1:], table.num_samples)
    for first, stop in zip(sync.tolist(), ends.tolist(), strict=True):
        if table.has_open_gops:
            assert index.group_bytes(np.arange(first, stop)) >= table.sizes[first:stop].sum(dtype=np.int64)
        else:
            needed, plan = index.group_bytes(np.array([first, stop - 1, -1])), index.clip(np.array([stop - 1]))
            assert needed <= plan.stop - plan.start
            assert needed == plan.stop - plan.start or "audio" in name, "which lies between the frames"


def test_groups_of_frames_that_lead_are_two(make_video: Callable[[str], Video]) -> None:
    index = make_video("hevc-open").index()
    table = index.samples
    assert table.sync is not None
    first, second, third = table.sync[1:4].tolist()
    both = int(table.sizes[first:third].sum(dtype=np.int64))
    assert index.group_bytes(np.array([second])) == both - int(table.sizes[first:second].sum(dtype=np.int64))
    assert index.group_bytes(np.array([second, second + 1])) == both
    assert index.group_bytes(np.array([-1])) == index.group_bytes(np.array([], np.int64)) == 0
