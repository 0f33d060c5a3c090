"""Clips of audio against the whole file, decoded by torchcodec."""

from __future__ import annotations

import random
import struct
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import av
import numpy as np
import pytest

from asyncfetch.errors import FormatError
from asyncfetch.media import AudioIndex, locate_moov, parse_tracks
from tests.media.conftest import picture, rewrite
from tests.media.test_fragments import Drive

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

RATE = 48_000
SECONDS = 3
OPUS_TOLERANCE = 1e-3


def wave(count: int) -> NDArray[np.float32]:
    """Two channels of tones and noise, of half the full scale at most."""
    time = np.arange(count) / RATE
    noise = np.random.default_rng(0).uniform(-0.1, 0.1, (2, count))
    return (noise + 0.3 * np.sin(2 * np.pi * np.array([[440], [997]]) * time)).astype(np.float32)


def encode_audio(codec: str, *, suffix: str = "mp4", movflags: str = "", **options: str) -> bytes:
    """A file with video and audio of SECONDS each."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / f"file.{suffix}"
        container: Any
        with av.open(path, "w", options={"movflags": movflags} if movflags else {}) as container:
            video: Any = container.add_stream("libx264", rate=30, options={"g": "15"})
            video.width, video.height, video.pix_fmt = 128, 96, "yuv420p"
            audio: Any = container.add_stream(codec, rate=RATE, layout="stereo", options=options)
            sound = wave(SECONDS * RATE)
            for number in range(SECONDS * 30):
                frame = av.VideoFrame.from_ndarray(picture(number), format="rgb24")
                frame.pts, frame.time_base = number, Fraction(1, 30)
                container.mux(video.encode(frame))
                samples = sound[:, number * 1600 : (number + 1) * 1600]
                container.mux(audio.encode(audio_frame(samples, audio.format.name, number * 1600)))
            container.mux(video.encode(None))
            container.mux(audio.encode(None))
        return path.read_bytes()


def audio_frame(samples: NDArray[np.float32], form: str, pts: int) -> av.AudioFrame:
    """The samples in an encoder's format; PyAV brings them into frames of its length."""
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), format="fltp", layout="stereo")
    frame.sample_rate, frame.pts, frame.time_base = RATE, pts, Fraction(1, RATE)
    (converted,) = av.AudioResampler(format=form, layout="stereo", rate=RATE).resample(frame)
    return converted


DELAYED = "frag_keyframe+delay_moov+default_base_moof"
MAKERS: dict[str, Callable[[], bytes]] = {
    "aac": lambda: encode_audio("aac", aac_pns="0"),
    "opus": lambda: encode_audio("libopus"),
    "mp3": lambda: encode_audio("libmp3lame"),
    "flac": lambda: encode_audio("flac"),
    "pcm": lambda: encode_audio("pcm_s16le", suffix="mov"),
    "aac-fragmented": lambda: encode_audio("aac", aac_pns="0", movflags=DELAYED),
    "opus-fragmented": lambda: encode_audio("libopus", movflags=DELAYED),
    "aac-empty-moov": lambda: encode_audio("aac", aac_pns="0", movflags="frag_keyframe+empty_moov"),
}


@pytest.fixture(scope="module")
def make_audio() -> Callable[[str], bytes]:
    """Makes a file by name, once."""
    made: dict[str, bytes] = {}

    def make(name: str) -> bytes:
        if name not in made:
            made[name] = MAKERS[name]()
        return made[name]

    return make


def audio_of(data: bytes) -> AudioIndex:
    audio = Drive(data, audio=True).tracks.audio
    assert audio is not None
    return audio


def decoder(data: bytes, rate: int | None = None) -> Any:  # noqa: ANN401
    """A new one for each range: torchcodec 0.13 gives none where it goes back in MP3 or Opus."""
    decoders: Any = pytest.importorskip("torchcodec.decoders")
    return decoders.AudioDecoder(data, sample_rate=rate)


def heard(data: bytes, start: float, stop: float, rate: int | None = None) -> tuple[NDArray[np.float32], float]:
    """The samples of a range, and when they begin."""
    samples = decoder(data, rate).get_samples_played_in_range(start, stop)
    return samples.data.numpy(), samples.pts_seconds


@pytest.mark.parametrize("max_gap_bytes", [0, 64 * 1024])
@pytest.mark.parametrize("name", [name for name in MAKERS if name != "aac-empty-moov"])  # that has a gap
def test_a_clip_gives_the_samples_of_the_whole_file(
    make_audio: Callable[[str], bytes], name: str, max_gap_bytes: int
) -> None:
    data = make_audio(name)
    audio = audio_of(data)
    whole = decoder(data).get_all_samples()
    truth, begin = whole.data.numpy(), whole.pts_seconds
    rng = random.Random(0)
    spans = [(begin, 0.2), (begin, SECONDS + 1.0), (SECONDS - 0.1, SECONDS + 1.0), (1.0, 1.0 + 1 / RATE)]
    spans += [(start, start + rng.uniform(0.01, 0.6)) for start in (rng.uniform(begin, 2.8) for _ in range(8))]
    for start, stop in spans:
        clip = audio.clip(start, stop, max_gap_bytes=max_gap_bytes)
        assert (clip.ranges[1:, 0] > clip.ranges[:-1, 1] + max_gap_bytes).all()
        cut = clip.header + b"".join(data[low:high] for low, high in clip.ranges.tolist())
        assert len(cut) == clip.nbytes
        have, have_at = heard(cut, start - clip.start_seconds, stop - clip.start_seconds)
        first, last = (round((time - begin) * RATE) for time in (start, stop))
        want = truth[:, first:last]
        assert have_at + clip.start_seconds == pytest.approx(begin + first / RATE, abs=1 / RATE)
        assert abs(have.shape[1] - want.shape[1]) <= 1
        np.testing.assert_allclose(
            have[:, : want.shape[1]], want[:, : have.shape[1]], rtol=0, atol=OPUS_TOLERANCE if "opus" in name else 0
        )


@pytest.mark.parametrize("name", ["aac", "opus", "mp3", "flac", "pcm", "aac-empty-moov"])
@pytest.mark.parametrize("rate", [None, 16_000])
def test_ranges_of_a_clip_are_ranges_of_the_whole_file(
    make_audio: Callable[[str], bytes], name: str, rate: int | None
) -> None:
    """To the sample, as torchcodec rounds and resamples."""
    data = make_audio(name)
    rng = random.Random(1)
    least = 0.1 if name == "aac-empty-moov" else 0.0  # there the file has a gap behind its first frame
    for start in (least, *(rng.uniform(least, 2.8) for _ in range(5))):
        stop = start + rng.uniform(0.01, 0.6)
        clip = audio_of(data).clip(start, stop)
        cut = clip.header + b"".join(data[low:high] for low, high in clip.ranges.tolist())
        want, want_at = heard(data, start, stop, rate)
        have, have_at = heard(cut, start - clip.start_seconds, stop - clip.start_seconds, rate)
        assert have_at + clip.start_seconds == pytest.approx(want_at, abs=1e-9)
        np.testing.assert_allclose(have, want, rtol=0, atol=OPUS_TOLERANCE if name == "opus" else 0)


def test_a_clip_has_little_more_than_its_own_bytes(make_audio: Callable[[str], bytes]) -> None:
    audio = audio_of(make_audio("aac"))
    clip = audio.clip(1.0, 2.0, max_gap_bytes=0)
    assert 1.2 <= clip.num_samples * 1024 / RATE <= 1.4
    assert len(clip.ranges) > 1
    assert clip.nbytes < 0.6 * int(audio.samples.sizes.sum()) + 2000


@pytest.mark.parametrize("span", [(-5.0, -1.0), (3.5, 9.0), (1e300, float("inf")), (2.0, 2.0), (2.0, 1.0)])
def test_a_stretch_without_audio_is_empty(make_audio: Callable[[str], bytes], span: tuple[float, float]) -> None:
    clip = audio_of(make_audio("aac")).clip(*span)
    assert (clip.ranges.shape, clip.header, clip.num_samples) == ((0, 2), b"", 0)


def test_tracks_have_the_audio_only_where_asked_for(make_audio: Callable[[str], bytes]) -> None:
    data = make_audio("aac")
    start, stop = locate_moov(data, size=len(data), url="u")
    moov = data[start:stop]
    assert parse_tracks(moov, url="u", audio=False).audio is None
    tracks = parse_tracks(moov, url="u")
    assert (tracks.video.codec, repr(tracks.audio)) == ("avc1", "AudioIndex('u', 'mp4a', num_samples=142)")


def of_an_hour(data: bytes) -> bytes:
    """The moov of a file, its track of PCM an hour long, a chunk a second."""
    hour = 3600 * RATE
    tables = {
        b"stsz": struct.pack(">III", 0, 4, hour),
        b"stts": struct.pack(">IIII", 0, 1, hour, 1),
        b"stsc": struct.pack(">IIIII", 0, 1, 1, RATE, 1),
        b"stco": struct.pack(">II3600I", 0, 3600, *range(1000, 1000 + 3600 * 500_000, 500_000)),
    }
    start, stop = locate_moov(data, size=len(data), url="u")
    audible = False

    def change(kind: bytes, body: bytes) -> tuple[bytes, bytes] | None:
        nonlocal audible
        if kind == b"elst":
            return None
        audible = b"soun" in body[:16] if kind == b"hdlr" and body[4:8] == b"mhlr" else audible
        return kind, tables.get(kind, body) if audible else body

    return rewrite(data[start:stop], change)


def test_an_hour_of_pcm_takes_little_memory(make_audio: Callable[[str], bytes]) -> None:
    """A sample of it is one value a channel; as many as FFmpeg reads at once count as one."""
    audio = parse_tracks(of_an_hour(make_audio("pcm")), url="u").audio
    assert audio is not None
    assert audio.nbytes < 20 * 3600 * RATE / 1024
    clip = audio.clip(1800.5, 1801.25, max_gap_bytes=0)
    first, second = clip.ranges.tolist()
    assert first[1] == 1000 + 1800 * 500_000 + 4 * RATE
    assert second[0] == 1000 + 1801 * 500_000
    assert clip.start_seconds * RATE == 1800 * RATE + 23 * 1024
    assert second[1] - second[0] == 12 * 1024 * 4


def test_pcm_that_contradicts_itself_is_refused(make_audio: Callable[[str], bytes]) -> None:
    moov = of_an_hour(make_audio("pcm"))
    with pytest.raises(FormatError, match="box 'sowt': frames have 4 bytes, but 2 by stsz"):
        parse_tracks(moov.replace(struct.pack(">III", 0, 4, 3600 * RATE), struct.pack(">III", 0, 2, 9)), url="u")
