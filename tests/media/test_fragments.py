"""Fragmented MP4: where its fragments are found, and that their index is what FFmpeg reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfetch.errors import FormatError
from asyncfetch.media import Tracks, fragment_reads, locate_moov
from asyncfetch.media.boxes import PROBE_BYTES
from tests.media.conftest import decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable

URL = "https://user:secret@data.example.org/videos/file-000.mp4"


class Drive:
    """What a reader of a file asks for, from its first bytes to its tracks."""

    def __init__(self, data: bytes, *, head_bytes: int = PROBE_BYTES, audio: bool = False) -> None:
        piece, start = data[:head_bytes], 0
        while True:
            first, last = locate_moov(piece, start=start, size=len(data), url=URL)
            if last <= start + len(piece):
                break
            piece, start = data[first:last], first
        self.rounds: list[list[tuple[int, int]]] = []
        reads = fragment_reads(piece, start=start, size=len(data), url=URL, audio=audio)
        pieces: Any = None
        while True:
            try:
                asked = reads.send(pieces)
            except StopIteration as end:
                self.tracks: Tracks = end.value
                return
            assert all(0 <= low < high <= len(data) for low, high in asked)
            self.rounds.append(asked)
            pieces = [data[low:high] for low, high in asked]


DELAYED = "frag_keyframe+delay_moov+default_base_moof"
FRAGMENTED: dict[str, Callable[[], bytes]] = {
    "empty-moov": lambda: encode("libx264", gop=10, movflags="frag_keyframe+empty_moov"),
    "audio": lambda: encode("libx264", gop=10, audio=True, movflags="frag_keyframe+empty_moov"),
    "implicit-offsets": lambda: encode(
        "libx264", gop=10, audio=True, movflags="frag_keyframe+empty_moov+omit_tfhd_offset"
    ),
    "delayed": lambda: encode("libx264", gop=10, movflags=DELAYED),
    "hybrid": lambda: encode("libx264", gop=10, movflags="frag_keyframe"),
    "listed": lambda: encode("libx264", gop=10, movflags=f"{DELAYED}+global_sidx+dash"),
    "listed-each": lambda: encode("libx264", gop=10, audio=True, movflags=f"{DELAYED}+dash"),
    "negative-offsets": lambda: encode("libx264", gop=10, movflags=f"{DELAYED}+negative_cts_offsets"),
    "unlisted": lambda: encode("libx264", gop=10, movflags=f"{DELAYED}+skip_trailer"),
    "one-group": lambda: encode("libx264", gop=250, movflags=DELAYED),
    "each-frame": lambda: encode("libx264", gop=10, movflags="frag_every_frame+empty_moov"),
    "dropped-frames": lambda: encode(
        "libx264", gop=5, numbers=[n for n in range(50) if n not in (7, 8, 30)], movflags=DELAYED
    ),
    "starts-late": lambda: encode("libx264", gop=10, numbers=range(20, 60), movflags=DELAYED),
    "hevc-open": lambda: encode(
        "libx265", x265_params="log-level=error:scenecut=0:bframes=3:b-adapt=0:keyint=10", movflags=DELAYED
    ),
    "av1": lambda: encode("libsvtav1", gop=10, preset="12", movflags=DELAYED),
    "vp9": lambda: encode("libvpx-vp9", gop=10, movflags=DELAYED, deadline="realtime", cpu_used="8"),
}


@pytest.fixture(scope="session")
def make_fragmented() -> Callable[[str], bytes]:
    """Makes a fragmented file by name, once."""
    made: dict[str, bytes] = {}

    def make(name: str) -> bytes:
        if name not in made:
            made[name] = FRAGMENTED[name]()
        return made[name]

    return make


@pytest.fixture(params=list(FRAGMENTED))
def fragmented(request: pytest.FixtureRequest, make_fragmented: Callable[[str], bytes]) -> bytes:
    return make_fragmented(request.param)


def test_frames_are_those_of_the_whole_file(fragmented: bytes) -> None:
    index = Drive(fragmented).tracks.video
    samples, seconds, _ = index.shown()
    truth = {pts / index.timescale: pixels for pts, pixels in decode(fragmented).items()}
    assert seconds.tolist() == sorted(truth)
    for first in range(0, len(samples), 7):
        plan = index.clip(samples[first : first + 5])
        shown = decode(plan.header + fragmented[plan.start : plan.stop])
        for pts, time in zip(plan.pts.tolist(), seconds[first : first + 5].tolist(), strict=True):
            np.testing.assert_array_equal(shown[pts], truth[time])
            assert time == pytest.approx(plan.start_seconds + pts / index.timescale)


def test_any_length_of_head_leads_to_the_same_frames(fragmented: bytes) -> None:
    want = Drive(fragmented).tracks.video.samples
    least = behind(fragmented, b"moov")
    for head in (least, least + 7, least + 8, least + 100, len(fragmented)):
        found = Drive(fragmented, head_bytes=head).tracks.video.samples
        assert found.sizes.tolist() == want.sizes.tolist()
        assert found.run_offset.tolist() == want.run_offset.tolist()
        assert found.presentation_times(0, 5).tolist() == want.presentation_times(0, 5).tolist()
    assert Drive(fragmented, head_bytes=len(fragmented)).rounds == []


def behind(data: bytes, kind: bytes) -> int:
    """Where the first box of a kind ends."""
    start = data.index(kind) - 4
    return start + int.from_bytes(data[start : start + 4])


@pytest.mark.parametrize(("name", "rounds"), [("listed", 2), ("delayed", 4)])
def test_listed_fragments_are_read_side_by_side(
    make_fragmented: Callable[[str], bytes], monkeypatch: pytest.MonkeyPatch, name: str, rounds: int
) -> None:
    """By a list in front, or one that the end of the file leads to; most heads are longer than first thought."""
    monkeypatch.setattr("asyncfetch.media.fragments.HEAD_BYTES", 100)
    data = make_fragmented(name)
    drive = Drive(data, head_bytes=behind(data, b"sidx" if name == "listed" else b"moov"))
    assert len(drive.rounds) <= rounds
    assert len(drive.rounds[-2]) >= data.count(b"moof")


def test_unlisted_fragments_take_a_request_each(
    make_fragmented: Callable[[str], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncfetch.media.fragments.HEAD_BYTES", 400)
    data = make_fragmented("unlisted")
    drive = Drive(data, head_bytes=behind(data, b"moov"))
    assert len(drive.rounds) == data.count(b"moof")


def test_a_file_with_an_index_asks_for_nothing() -> None:
    drive = Drive(encode("libx264", gop=10))
    assert drive.rounds == []
    assert drive.tracks.video.num_samples == 50
    assert drive.tracks.audio is None


# --- what is damaged ---


def test_a_file_cut_off_in_a_head_loses_that_fragment(make_fragmented: Callable[[str], bytes]) -> None:
    data = make_fragmented("unlisted")
    last = data.rindex(b"moof") - 4
    for size in (last, last + 3, last + 8, last + 50):
        assert Drive(data[:size]).tracks.video.num_samples == 47


def test_a_file_cut_off_in_its_media_data_is_truncated(make_fragmented: Callable[[str], bytes]) -> None:
    data = make_fragmented("unlisted")
    for size in (data.rindex(b"moof") + int.from_bytes(data[data.rindex(b"moof") - 4 :][:4]), len(data) - 1):
        with pytest.raises(FormatError, match=f"truncated: its fragments have samples up to byte {len(data)}"):
            Drive(data[:size])


def test_a_file_without_any_fragment_has_no_frames(make_fragmented: Callable[[str], bytes]) -> None:
    data = make_fragmented("delayed")
    with pytest.raises(FormatError, match="0 samples"):
        Drive(data[: behind(data, b"moov")])


def test_a_list_that_leads_between_boxes_is_refused(make_fragmented: Callable[[str], bytes]) -> None:
    data = bytearray(make_fragmented("listed"))
    sizes = data.index(b"sidx") + 4 + 12 + 16 + 4
    data[sizes + 3] ^= 4
    with pytest.raises(FormatError, match="a box runs to byte"):
        Drive(bytes(data))


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_no_bytes_cause_anything_but_tracks_or_a_format_error(samples: list[bytes], data: st.DataObject) -> None:
    file = bytearray(data.draw(st.sampled_from(samples)))
    kinds = st.sampled_from([b"moof", b"sidx", b"mfra", b"trun", b"tfhd", b"tfdt", b"trex", b"elst", b"traf", b"stsd"])
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(kinds)
        near = file.find(kind) if data.draw(st.booleans()) else file.rfind(kind)
        position = min(max(0, near - 4) + data.draw(st.integers(0, 60)), len(file) - 4)
        for i in range(data.draw(st.sampled_from([1, 4]))):
            file[position + i] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]) | st.integers(0, 255))
    length = data.draw(st.just(len(file)) | st.integers(0, len(file)))
    try:
        tracks = Drive(bytes(file[:length]), head_bytes=data.draw(st.sampled_from([1000, 10_000])), audio=True).tracks
        frames, seconds, _ = tracks.video.shown()
        plan = tracks.video.clip(frames[:20])
        assert 0 <= plan.start <= plan.stop <= length
        assert len(frames) == len(seconds)
        if tracks.audio is not None:
            clip = tracks.audio.clip(0.1, 0.9)
            assert ((clip.ranges >= 0) & (clip.ranges <= length)).all()
    except FormatError:
        return


@pytest.fixture(scope="module")
def samples(make_fragmented: Callable[[str], bytes]) -> list[bytes]:
    return [make_fragmented(name) for name in ("audio", "listed", "listed-each", "delayed", "implicit-offsets")]
