"""Fragmented MP4: where its fragments are found, and that their index is what FFmpeg reads."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfetch.errors import FormatError
from asyncfetch.media import Tracks, fragment_reads, locate_moov
from asyncfetch.media.boxes import PROBE_BYTES
from asyncfetch.media.clip import ClipTables, Timing
from tests.media.conftest import box, decode, encode, u32s

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
    monkeypatch.setattr("asyncfetch.media.boxes.HEAD_BYTES", 100)
    data = make_fragmented(name)
    drive = Drive(data, head_bytes=behind(data, b"sidx" if name == "listed" else b"moov"))
    assert len(drive.rounds) <= rounds
    assert len(drive.rounds[-2]) >= data.count(b"moof")


def test_unlisted_fragments_take_a_request_each(
    make_fragmented: Callable[[str], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncfetch.media.boxes.HEAD_BYTES", 400)
    data = make_fragmented("unlisted")
    drive = Drive(data, head_bytes=behind(data, b"moov"))
    assert len(drive.rounds) == data.count(b"moof")


def test_a_file_with_an_index_asks_for_nothing() -> None:
    drive = Drive(encode("libx264", gop=10))
    assert drive.rounds == []
    assert drive.tracks.video.num_samples == 50
    assert drive.tracks.audio is None


# --- all ways to write them ---

NON_SYNC = 0x10000


def full_box(kind: bytes, version: int, flags: int, *body: bytes) -> bytes:
    return box(kind, struct.pack(">I", version << 24 | flags) + b"".join(body))


@dataclass
class Sample:
    duration: int
    size: int
    flags: int
    composition: int


def track_fragment(rng: random.Random, runs: list[list[Sample]], *, time: int | None, base: int, moof: int) -> bytes:
    """A traf of the samples, whose data begins at ``base`` of the file; its moof at ``moof``.

    What all samples have in common may be said once, or of each sample.
    """
    names = ("duration", "size", "flags")
    everything = [sample for run in runs for sample in run]
    common = {name: {getattr(sample, name) for sample in everything} for name in names}
    once = {name for name in names if len(common[name]) == 1 and rng.random() < 0.7}
    by_moof = rng.random() < 0.5
    place = b"" if by_moof else struct.pack(">Q", base + 5)
    flags = (0x20000 if by_moof else 1) | sum({"duration": 8, "size": 0x10, "flags": 0x20}[name] for name in once)
    tfhd = full_box(b"tfhd", 0, flags, u32s(1), place, *(u32s(*common[name]) for name in names if name in once))
    wide = rng.getrandbits(1)
    tfdt = b"" if time is None else full_box(b"tfdt", wide, 0, struct.pack(">Q" if wide else ">I", time))
    truns = b""
    for number, run in enumerate(runs):
        each = [name for name in names if name not in once]
        flags = sum({"duration": 0x100, "size": 0x200, "flags": 0x400}[name] for name in each)
        composed = any(sample.composition for sample in run) or rng.random() < 0.3
        head = [len(run)]
        if number == 0 or rng.random() < 0.5:
            flags |= 1
            before = sum(sample.size for earlier in runs[:number] for sample in earlier)
            head.append(base + before - moof if by_moof else before - 5)
        rows = [[getattr(sample, name) for name in each] + ([sample.composition] if composed else []) for sample in run]
        numbers = [*head, *(number for row in rows for number in row)]
        truns += full_box(b"trun", rng.getrandbits(1), flags | (0x800 if composed else 0), u32s(*numbers))
    return box(b"traf", tfhd + tfdt + truns)


def sidx(sizes: list[int], first: int, *, wide: bool, nested: bool = False) -> bytes:
    """A list of segments behind it; their sizes."""
    time = struct.pack(">QQ" if wide else ">II", 0, first)
    entries = b"".join(u32s(size | nested << 31, 512, 0x90000000) for size in sizes)
    return full_box(b"sidx", int(wide), 0, u32s(1, 15360), time, struct.pack(">HH", 0, len(sizes)), entries)


def mfra(positions: list[int], *, wide: bool) -> bytes:
    """A list of fragments in front of it."""
    layout = ">QQBBB" if wide else ">IIBBB"
    entries = b"".join(struct.pack(layout, 0, position, 1, 1, 1) for position in positions)
    tfra = full_box(b"tfra", int(wide), 0, u32s(1, 0, len(positions)), entries)
    return box(b"mfra", tfra + full_box(b"mfro", 0, 0, u32s(8 + len(tfra) + 16)))


def listed(segments: list[bytes], kind: str, *, wide: bool) -> list[bytes]:
    """The segments with what lists them in front, in the way of ``kind``."""
    sizes = [len(segment) for segment in segments]
    if kind == "flat":
        return [sidx(sizes, 0, wide=wide), *segments]
    if kind == "nested" and len(segments) > 1:
        half = len(segments) // 2
        groups = [
            [sidx(sizes[:half], 0, wide=wide), *segments[:half]],
            [sidx(sizes[half:], 0, wide=wide), *segments[half:]],
        ]
        return [sidx([sum(map(len, group)) for group in groups], 0, wide=wide, nested=True), *groups[0], *groups[1]]
    if kind == "each":
        return [part for segment in segments for part in (sidx([len(segment)], 0, wide=wide), segment)]
    return segments


@dataclass
class Fragment:
    """A moof and its mdat of random samples, the first one a key frame."""

    rng: random.Random
    time: int | None
    """When it says that it begins."""
    runs: list[list[Sample]]

    def __post_init__(self) -> None:
        self.seed, self.gap = self.rng.random(), self.rng.randrange(30)
        self.samples = [sample for run in self.runs for sample in run]
        self.head_bytes = len(self.head(0, 0))

    def head(self, base: int, position: int) -> bytes:
        traf = track_fragment(random.Random(self.seed), self.runs, time=self.time, base=base, moof=position)
        other = full_box(b"tfhd", 0, 0, u32s(9)) + full_box(b"trun", 0, 0x201, u32s(1, -1, 1))
        return box(b"moof", full_box(b"mfhd", 0, 0, u32s(1)) + traf + box(b"traf", other))

    def extents(self, position: int) -> list[tuple[int, int]]:
        """Where the samples begin and end if it lies there."""
        edges = list(accumulate((s.size for s in self.samples), initial=position + self.head_bytes + 8 + self.gap))
        return list(pairwise(edges))

    def data(self, position: int) -> bytes:
        extents = self.extents(position)
        media = bytes(self.gap + extents[-1][1] - extents[0][0])
        return self.head(extents[0][0], position) + box(b"mdat", media)


def random_runs(rng: random.Random) -> list[list[Sample]]:
    sizes, offsets = rng.choice([[100], [1, 2, 70_000]]), rng.choice([[0], [0, 512, 1024]])
    runs = [
        [
            Sample(rng.choice([512, rng.randint(1, 900)]), rng.choice(sizes), NON_SYNC, rng.choice(offsets))
            for _ in range(rng.randint(1, 5))
        ]
        for _ in range(rng.randint(1, 3))
    ]
    runs[0][0] = Sample(512, sizes[0], 0, 0)
    return runs


@given(seed=st.integers(0, 2**32), how=st.sampled_from(["none", "flat", "nested", "each", "tail"]))
@settings(max_examples=150, deadline=None)
def test_fragments_written_are_samples_read(empty_moov: bytes, seed: int, how: str) -> None:
    """Whatever says how long, how large and when samples are, and whatever lists the fragments."""
    rng = random.Random(seed)
    time, fragments, times = 0, [], []
    for number in range(rng.randint(1, 6)):
        says_time = number == 0 or rng.random() < 0.7
        time += rng.randrange(900) if says_time else 0
        fragment = Fragment(rng, time if says_time else None, random_runs(rng))
        fragments.append(fragment)
        for sample in fragment.samples:
            times.append(time)
            time += sample.duration
    wide = rng.random() < 0.5
    file, starts = empty_moov, []
    left = iter(fragments)
    for part in listed([fragment.data(0) for fragment in fragments], how, wide=wide):
        starts += [len(file)] if part[4:8] == b"moof" else []
        file += next(left).data(len(file)) if part[4:8] == b"moof" else part
    if how == "tail":
        file += mfra(starts[:: rng.randint(1, 2)], wide=wide)

    samples = [sample for fragment in fragments for sample in fragment.samples]
    table = Drive(file, head_bytes=len(empty_moov) + rng.randrange(200)).tracks.video.samples
    assert table.sizes.tolist() == [sample.size for sample in samples]
    assert table.decode_times(0, len(times)).tolist() == times
    assert table.composition.tolist() == [sample.composition for sample in samples]
    keys = [number for number, sample in enumerate(samples) if not sample.flags]
    assert (list(range(len(samples))) if table.sync is None else table.sync.tolist()) == keys
    runs = table.byte_runs(0, len(times))
    tables = ClipTables(table.sizes, Timing(table.durations, table.composition, 0, hides=False), table.sync, runs)
    assert [tuple(extent) for extent in tables.extents().tolist()] == [
        extent for start, fragment in zip(starts, fragments, strict=True) for extent in fragment.extents(start)
    ]


def sequence(head: bytes, fragments: list[Fragment]) -> bytes:
    for fragment in fragments:
        head += fragment.data(len(head))
    return head


@pytest.mark.parametrize(
    ("time", "offset", "message"),
    [
        (1024, 0, "begins at tick 1024, but the sample in front of it at 1024: fragments that overlap"),
        (0, 0, "begins at tick 0, but the sample in front of it at 1024: fragments that overlap"),
        (0xFFFFFFFF, 0, "fragments that overlap in time, or lie too far apart"),
        (1536, -512, "a composition offset of -512 ticks comes up behind the first fragment"),
        (1536, 1 << 29, "a composition offset is 536870912 ticks"),
    ],
)
def test_fragments_that_ffmpeg_shows_otherwise_are_refused(
    empty_moov: bytes, time: int, offset: int, message: str
) -> None:
    first = [[Sample(512, 100, 0, 512), Sample(512, 100, NON_SYNC, 512), Sample(512, 100, NON_SYNC, 512)]]
    second = [[Sample(512, 100, 0, 512), Sample(512, 100, NON_SYNC, offset)]]
    rng = random.Random(1)
    with pytest.raises(FormatError, match=message):
        Drive(sequence(empty_moov, [Fragment(rng, 0, first), Fragment(rng, time, second)]))


def test_samples_without_a_byte_are_refused(empty_moov: bytes) -> None:
    fragments = [Fragment(random.Random(0), 0, [[Sample(512, 0, 0, 0), Sample(512, 3, NON_SYNC, 0)]])]
    with pytest.raises(FormatError, match="a sample of it has no bytes"):
        Drive(sequence(empty_moov, fragments))


def test_countless_samples_of_equal_size_are_refused(empty_moov: bytes) -> None:
    """A run of a few bytes, which says nothing of each sample."""
    tfhd = full_box(b"tfhd", 0, 0x20038, u32s(1, 512, 1, 0))
    moof = box(b"moof", box(b"traf", tfhd + full_box(b"trun", 0, 0, u32s(0xFFFFFFFF))))
    with pytest.raises(FormatError, match="with 4294967295 more samples of equal size there are too many"):
        Drive(empty_moov + moof + box(b"mdat", bytes(100)))


@pytest.fixture(scope="module")
def empty_moov(make_fragmented: Callable[[str], bytes]) -> bytes:
    data = make_fragmented("empty-moov")
    return data[: behind(data, b"moov")]


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


def test_a_list_that_begins_behind_the_file_is_refused(make_fragmented: Callable[[str], bytes]) -> None:
    data = bytearray(make_fragmented("listed"))
    first = data.index(b"sidx") + 4 + 12 + 8
    data[first : first + 8] = b"\xff" * 8
    with pytest.raises(FormatError, match="box 'sidx' begins its list at byte 1844"):
        Drive(bytes(data))


@given(data=st.data())
@settings(max_examples=200, deadline=None)
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
    head = data.draw(st.sampled_from([1000, 10_000]))
    try:
        tracks = Drive(bytes(file[:length]), head_bytes=head, audio=True).tracks
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
