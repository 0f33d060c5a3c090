"""Finding and parsing the index: where it lies, what is refused, and that no bytes can make it misbehave."""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfetch.errors import FormatError
from asyncfetch.media import Mp4Index, locate_moov, parse_moov, parse_tracks
from asyncfetch.media.boxes import MAX_MOOV_BYTES, PROBE_BYTES, TAIL_BYTES
from asyncfetch.media.clip import ClipTables, TrackFormat, build_header, clip_timing
from asyncfetch.media.samples import ByteRuns
from tests.media.conftest import box, clip_of, u32s

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

Video = Any  # conftest's
URL = "https://user:secret@data.example.org/videos/file-000.mp4"


FTYP = box(b"ftyp", b"isom", bytes(4))


def moov_of(data: bytes) -> bytes:
    start, stop = locate_moov(data, size=len(data), url=URL)
    return data[start:stop]


# --- where moov lies ---


class Walk:
    """What a reader of a file asks for, from its first bytes to its index."""

    def __init__(self, data: bytes, head_bytes: int) -> None:
        self.reads = [(0, min(head_bytes, len(data)))]
        while True:
            start, stop = self.reads[-1]
            first, last = locate_moov(data[start:stop], start=start, size=len(data), url=URL)
            if last <= stop:
                self.moov = data[first:last]
                return
            assert first > start or last > stop
            self.reads.append((first, last))


@pytest.mark.parametrize("name", ["h264-faststart", "h264-g30"])
def test_any_length_of_head_leads_to_the_same_index(make_video: Callable[[str], Video], name: str) -> None:
    data = make_video(name).data
    want = moov_of(data)
    for length in {16, 24, 31, 32, 40, 47, 48, 49, 60, 1000, len(data) // 2, len(data) - 9, len(data)}:
        found = Walk(data, length).moov
        assert found == want
        assert parse_moov(found, url=URL).num_samples == 50


def test_a_tail_is_asked_for_without_the_media_data_in_front() -> None:
    data = FTYP + box(b"mdat", bytes(5000)) + box(b"free") + box(b"moov", bytes(100))
    assert locate_moov(data[:64], size=len(data), url=URL) == (len(FTYP) + 5008, len(data))
    assert locate_moov(data, size=len(data), url=URL) == (len(data) - 108, len(data))


FREE = box(b"free", bytes(50_000))
MOOV = box(b"moov", bytes(100))
LONG_MOOV = box(b"moov", bytes(40_000))
MEDIA = box(b"mdat", bytes(TAIL_BYTES + 1000))


@pytest.mark.parametrize(
    ("boxes", "num_probes", "rest"),
    [
        ([MOOV, MEDIA], 0, "nothing"),
        ([LONG_MOOV, MEDIA], 0, "moov"),
        ([MEDIA, LONG_MOOV], 0, "tail"),
        ([MEDIA, MOOV, FREE], 0, "tail"),
        ([FREE, MOOV, MEDIA], 1, "nothing"),
        ([FREE, LONG_MOOV, MEDIA], 1, "moov"),
        ([FREE, FREE.replace(b"free", b"skip"), FREE.replace(b"free", b"uuid"), MOOV, MEDIA], 3, "nothing"),
        ([FREE.replace(b"free", b"wide"), MEDIA, LONG_MOOV], 1, "tail"),
        ([FREE, FREE, LONG_MOOV, MEDIA], 2, "moov"),
        ([MEDIA, MEDIA, LONG_MOOV], 1, "tail"),
        ([MEDIA, FREE, MOOV, MEDIA], 2, "nothing"),
    ],
)
def test_reads_to_find_the_index_are_bounded(boxes: list[bytes], num_probes: int, rest: str) -> None:
    data = FTYP + b"".join(boxes)
    walk = Walk(data, PROBE_BYTES)
    moov = data.index(b"moov") - 4
    assert walk.moov in (MOOV, LONG_MOOV)
    assert data[moov:].startswith(walk.moov)
    lengths = [stop - start for start, stop in walk.reads]
    assert lengths[: 1 + num_probes] == [PROBE_BYTES] * (1 + num_probes)
    last = {"nothing": [], "moov": [(moov, moov + len(walk.moov))], "tail": [(moov, len(data))]}[rest]
    assert walk.reads[1 + num_probes :] == last


def test_an_index_longer_than_any_is_refused() -> None:
    size = MAX_MOOV_BYTES + 10_000
    head = FTYP + struct.pack(">I4s", MAX_MOOV_BYTES + 1, b"moov") + bytes(100)
    with pytest.raises(FormatError, match=f"box 'moov' at byte 16 is {MAX_MOOV_BYTES + 1} bytes long"):
        locate_moov(head, size=size, url=URL)


@given(
    st.lists(st.tuples(st.sampled_from([b"free", b"mdat", b"uuid", b"moov"]), st.integers(0, 300)), max_size=8),
    st.integers(16, 600),
)
def test_a_walk_ends_at_the_first_index_or_in_a_format_error(parts: list[tuple[bytes, int]], head_bytes: int) -> None:
    data = FTYP + b"".join(box(kind, bytes(length)) for kind, length in parts)
    lengths = [length for kind, length in parts if kind == b"moov"]
    if lengths:
        assert Walk(data, head_bytes).moov == box(b"moov", bytes(lengths[0]))
    else:
        with pytest.raises(FormatError, match="no 'moov' box"):
            Walk(data, head_bytes)


def test_a_box_beyond_four_gib_is_stepped_over() -> None:
    large = 5 << 30
    head = FTYP + struct.pack(">I4sQ", 1, b"mdat", large)
    assert locate_moov(head, size=len(FTYP) + large + 1000, url=URL) == (len(FTYP) + large, len(FTYP) + large + 1000)


def test_a_last_box_without_a_size_runs_to_the_end() -> None:
    data = FTYP + struct.pack(">I4s", 0, b"moov") + bytes(100)
    assert locate_moov(data, size=len(data), url=URL) == (len(FTYP), len(data))


@pytest.mark.parametrize(
    ("data", "size", "message"),
    [
        (b"", 0, "empty (0 bytes)"),
        (b"<!DOCTYPE html><html>", 21, "not an MP4: the file of 21 bytes starts with b'<!DOCTYP'"),
        (b"\0\0\0", 3, "the file of 3 bytes ends in the box header at byte 0"),
        (FTYP + box(b"mdat", bytes(500))[:100], 116, "box 'mdat' at byte 16 runs to byte 524, but there are only 116"),
        (FTYP + box(b"mdat", bytes(500))[:100], 400, "box 'mdat' at byte 16 runs to byte 524, but there are only 400"),
        (FTYP + box(b"mdat", bytes(50)), 74, "no 'moov' box in the file of 74 bytes"),
        (FTYP + struct.pack(">I4s", 0, b"mdat") + bytes(50), 74, "no 'moov' box in the file of 74 bytes"),
        (FTYP + struct.pack(">I4s", 5, b"mdat") + bytes(50), 74, "box 'mdat' at byte 16 says that it is 5 bytes"),
        (FTYP + b"\0\0\0", 19, "ends in the box header at byte 16"),
    ],
)
def test_file_that_is_no_whole_mp4_is_refused_by_name(data: bytes, size: int, message: str) -> None:
    with pytest.raises(FormatError, match=re.escape(message)) as caught:
        locate_moov(data, size=size, url=URL)
    assert "https://***@data.example.org/videos/file-000.mp4" in str(caught.value)


# --- what the index says ---


def test_the_index_describes_the_track(make_video: Callable[[str], Video]) -> None:
    names = {"av1-g2": "av01", "h264-g2": "avc1", "hevc-open": "hev1"}
    for name, codec in names.items():
        index = make_video(name).index()
        assert (index.codec, index.width, index.height, index.timescale) == (codec, 128, 96, 15360)
        assert index.num_samples == 50
        assert index.data_stop <= len(make_video(name).data)


def test_co64_and_stco_say_the_same(make_video: Callable[[str], Video]) -> None:
    index = make_video("h264-co64").index()
    assert b"co64" in make_video("h264-co64").data
    assert clip_of(index, 0, 50, fps=30).stop == index.data_stop


def test_an_index_takes_about_eight_bytes_a_frame(make_video: Callable[[str], Video]) -> None:
    index = parse_moov(long_moov(24_000), url=URL)
    assert index.num_samples == 24_000
    assert index.nbytes <= 8.2 * 24_000
    assert make_video("one-frame").index().nbytes < 1000


def long_moov(count: int) -> bytes:
    """The index of a long video with B-frames: sizes over 64 KiB, every second sample a key frame."""
    rng = np.random.default_rng(0)
    decode = np.arange(count, dtype=np.int64) * 512
    tables = tables_of(
        sizes=rng.integers(1000, 100_000, count),
        decode=decode,
        presentation=decode + np.tile([0, 1536, 0, -1024], count // 4),
        sync=np.arange(0, count, 2),
        gaps=np.zeros(count, np.int64),
    )
    track = TrackFormat("avc1", 640, 480, 15360, sample_description(), bytes(52))
    return moov_of(build_header(track, tables, start=0, stop=int(tables.runs.num_bytes.sum())))


def sample_description() -> bytes:
    entry = box(b"avc1", bytes(24), struct.pack(">HH", 640, 480), bytes(50))
    return struct.pack(">II", 0, 1) + entry


def tables_of(sizes: Ints, decode: Ints, presentation: Ints, sync: Ints | None, gaps: Ints) -> ClipTables:
    """Tables of samples that each lie ``gaps`` bytes behind the one before it."""
    offsets = np.cumsum(gaps) + np.cumsum(sizes) - sizes
    ones = np.ones(len(sizes), np.int64)
    runs = ByteRuns(offset=offsets, num_bytes=np.asarray(sizes), num_samples=ones, description=ones)
    return ClipTables(sizes, clip_timing(decode, presentation, sync, last_duration=512), sync, runs)


@given(data=st.data(), count=st.integers(1, 700))
@settings(max_examples=40, deadline=None)
def test_tables_written_are_tables_read(data: st.DataObject, count: int) -> None:
    """Whatever the sizes, times and gaps, beyond 4 GiB too: each sample is found where it lies, when it is shown."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    sizes = rng.integers(0, data.draw(st.sampled_from([2, 300, 100_000])), count)
    gaps = rng.choice([0, 0, 0, 7, data.draw(st.sampled_from([1, 2**31]))], count)
    decode = np.cumsum(rng.integers(0, data.draw(st.sampled_from([1, 600])) + 1, count)).astype(np.int64)
    presentation = decode + rng.integers(0, data.draw(st.sampled_from([1, 3000])), count)
    presentation -= presentation.min()
    start = int(gaps[0])
    tables = tables_of(sizes, decode, presentation, np.zeros(1, np.int64), gaps)
    stop = int((tables.runs.offset + tables.runs.num_bytes).max())

    track = TrackFormat("avc1", 640, 480, 15360, sample_description(), bytes(52))
    header = build_header(track, tables, start=start, stop=stop)
    begin, end = locate_moov(header, size=len(header) + stop - start, url=URL)
    index = parse_moov(header[begin:end], url=URL)

    samples = index.samples
    assert samples.sizes.tolist() == sizes.tolist()
    shown = samples.presentation_times(0, count) - index.edit.shift
    assert shown.tolist() == presentation.tolist()
    first = int(rng.integers(count))
    last = int(rng.integers(first, count)) + 1
    runs = samples.byte_runs(first, last)
    found = []
    sample = first
    for offset, run_samples in zip(runs.offset.tolist(), runs.num_samples.tolist(), strict=True):
        found += [offset + int(sizes[sample:each].sum()) for each in range(sample, sample + run_samples)]
        sample += run_samples
    assert found == (tables.runs.offset[first:last] - start + len(header)).tolist()
    assert runs.num_bytes.sum() == sizes[first:last].sum()
    extents = tables._replace(sizes=sizes[first:last], runs=runs).extents()
    assert extents.tolist() == [
        [offset, offset + int(size)] for offset, size in zip(found, sizes[first:last], strict=True)
    ]


# --- what is refused ---


def altered(moov: bytes, kind: bytes, body: bytes | None) -> bytes:
    """``moov`` with the body of every box of this kind replaced, or the box left out."""
    out, offset = b"", 0
    while offset < len(moov):
        size, name = struct.unpack_from(">I4s", moov, offset)
        inner = moov[offset + 8 : offset + size]
        if name == kind:
            out += b"" if body is None else box(kind, body)
        elif name in {b"moov", b"trak", b"mdia", b"minf", b"stbl", b"edts"}:
            out += box(name, altered(inner, kind, body))
        else:
            out += box(name, inner)
        offset += size
    return out


HUGE = 2**32 - 1


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (b"stts", u32s(0, HUGE), "too short for the 4294967295 entries it declares"),
        (b"stts", u32s(0, 1, HUGE, 512), "describes 4294967295 samples, but there are 50 (stsz)"),
        (b"stts", u32s(0, 1, 49, 512), "describes 49 samples, but there are 50 (stsz)"),
        (b"stts", u32s(0, 1, 50, HUGE), "a sample lasts 4294967295 ticks"),
        (b"stts", None, "has no stts box"),
        (b"ctts", u32s(0, 1, HUGE, 0), "describes 4294967295 samples"),
        (b"ctts", u32s(0, 1, 50, 2**31), "a composition offset is 2147483648 ticks"),
        (b"stsz", u32s(0, 100, HUGE), "4294967295 samples of 100 bytes each"),
        (b"stsz", u32s(0, 0, HUGE), "too short for the 4294967295 entries"),
        (b"stsz", u32s(0, 0, 0), "0 samples"),
        (b"stsz", b"", "too short: 12 needed"),
        (b"stss", u32s(0, 0), "marks no sample as a key frame"),
        (b"stss", u32s(0, 2, 5, 3), "aren't ascending within 1..50"),
        (b"stss", u32s(0, 1, 51), "aren't ascending within 1..50"),
        (b"stsc", u32s(0, 1, 1, HUGE, 1), "samples, but there are 50"),
        (b"stsc", u32s(0, 1, 2, 50, 1), "its chunk numbers aren't ascending from 1"),
        (b"stco", u32s(0, 0), "has 0 chunks"),
        (b"stco", None, "has no co64 box"),
        (b"hdlr", u32s(0, 0) + b"soun" + bytes(13), "no video track ('vide') among its 1 tracks: 'soun'"),
        (b"stsd", u32s(0, 0), "holds 0 sample descriptions, but samples use 1 to 1"),
        (b"stsd", u32s(0, 1) + box(b"avc1", bytes(70)), "'avc1' is no visual sample entry"),
        (b"stsc", u32s(0, 1, 1, 50, 2), "holds 1 sample descriptions, but samples use 2 to 2"),
        (b"mdhd", u32s(0, 0, 0, 0, 0, 0), "time scale 0 isn't within"),
        (b"elst", u32s(0, 2, 10, 0, 0x10000, 10, 512, 0x10000), "shows other than one stretch"),
        (b"elst", u32s(0, 1, 10, 0, 0x20000), "shows other than one stretch"),
    ],
)
def test_tables_that_contradict_each_other_are_refused(
    make_video: Callable[[str], Video], kind: bytes, body: bytes | None, message: str
) -> None:
    moov = moov_of(make_video("h264-g30").data)
    with pytest.raises(FormatError, match=re.escape(message)):
        parse_moov(altered(moov, kind, body), url=URL)


def test_fragmented_files_are_refused_with_the_way_out(make_video: Callable[[str], Video]) -> None:
    data = make_video("fragmented").data
    with pytest.raises(
        FormatError, match=r"fragmented MP4.*media.fragment_reads.*ffmpeg -i IN.mp4 -c copy -movflags faststart OUT.mp4"
    ):
        parse_moov(moov_of(data), url=URL)


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_compact_sizes_are_sizes(make_video: Callable[[str], Video], bits: int) -> None:
    """An odd number of them, which of 4 bits leaves half a byte."""
    sizes = (np.arange(49) * 37 % (1 << bits)).astype(">u2")
    packed = sizes.tobytes() if bits == 16 else sizes.astype(np.uint8).tobytes()
    if bits == 4:
        packed = bytes(high << 4 | low for high, low in zip(packed[::2], [*packed[1::2], 0], strict=True))
    moov = moov_of(make_video("h264-g30").data)
    for kind, body in {
        b"stts": u32s(0, 1, 49, 512),
        b"ctts": None,
        b"stss": u32s(0, 1, 1),
        b"stsc": u32s(0, 1, 1, 49, 1),
        b"stco": u32s(0, 1, 1000),
        b"stsz": b"\0STZ" + u32s(bits, 49) + packed,
    }.items():
        moov = altered(moov, kind, body)
    moov = moov.replace(b"stsz\0STZ", b"stz2\0\0\0\0")
    assert parse_moov(moov, url=URL).samples.sizes.tolist() == sizes.tolist()
    with pytest.raises(FormatError, match="its sizes have 5 bits each"):
        parse_moov(moov.replace(u32s(bits, 49), u32s(5, 49)), url=URL)


def test_compressed_indexes_are_refused_with_the_way_out() -> None:
    with pytest.raises(FormatError, match=r"box 'moov': is compressed \(cmov\).*ffmpeg -i IN -c copy OUT.mp4"):
        parse_moov(box(b"moov", box(b"cmov", box(b"dcom", b"zlib"))), url=URL)


def test_a_tail_without_moov_is_refused() -> None:
    with pytest.raises(FormatError, match=r"no 'moov' box in the 16 bytes where it has to be; found 'free', 'skip'"):
        parse_moov(box(b"free") + box(b"skip"), url=URL)


@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_no_bytes_cause_anything_but_an_index_or_a_format_error(moovs: list[bytes], data: st.DataObject) -> None:
    moov = bytearray(data.draw(st.sampled_from(moovs)))
    interesting = st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]) | st.integers(0, 255)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(moov) - 4))
        for i in range(data.draw(st.sampled_from([1, 4]))):
            moov[position + i] = data.draw(interesting)
    length = data.draw(st.just(len(moov)) | st.integers(0, len(moov)))
    try:
        start, stop = locate_moov(moov[:length], size=length, url=URL)
        video, audio = parse_tracks(moov[start:stop], url=URL)
        check_clips(video)
        video.shown()
        if audio is not None:
            ranges = np.concatenate([audio.clip(first, first + 0.5).ranges for first in (0.0, 1.0)])
            assert ((ranges >= 0) & (ranges <= audio.data_stop)).all()
    except FormatError:
        return


def check_clips(index: Mp4Index) -> None:
    for first, count in ((0, 60), (10, 3), (2**30, 5)):
        plan = clip_of(index, first, count, fps=30)
        assert 0 <= plan.start <= plan.stop
        assert plan.stop <= index.data_stop
        assert ((plan.frame_index >= 0) == (plan.pts >= 0)).all()
        assert (plan.frame_index < plan.num_samples + (plan.num_samples == 0)).all()


@pytest.fixture(scope="module")
def moovs(make_video: Callable[[str], Video]) -> list[bytes]:
    return [moov_of(make_video(name).data) for name in ("h264-g30", "hevc-open", "av1-g2", "h264-audio", "starts-late")]


def test_an_index_of_countless_boxes_is_refused_and_not_walked(make_video: Callable[[str], Video]) -> None:
    moov = moov_of(make_video("h264-g30").data)
    with pytest.raises(FormatError, match="box 'moov': holds more than 1024 boxes"):
        parse_moov(box(b"moov", box(b"free") * 2000, moov[8:]), url=URL)
