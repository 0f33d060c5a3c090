"""Videos that can't be cut by ranges: other containers than MP4."""

from __future__ import annotations

import logging
import subprocess
from contextlib import closing
from typing import TYPE_CHECKING, Any

import av
import numpy as np
import pytest

import asyncfetch as af
from asyncfetch.errors import DecodeError
from asyncfetch.testing import RangeServer
from asyncfetch.videos.whole import WholeVideo

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

FORMS = {
    "a.mkv": "-c copy",
    "a.flv": "-c copy",
    "a.ts": "-c copy",
    "a.mpg": "-c:v mpeg2video -bf 2 -c:a mp2",
    "a.avi": "-c:v mpeg4 -bf 2 -c:a mp3",
    "a.wmv": "-c:v wmv2 -c:a wmav2",
}
"""What makes these of front.mp4. torchcodec doesn't find the frames of .ts, .mpg and this .avi by their numbers."""


def made(corpus: Path, name: str, target: Path, options: str) -> Path:
    command = f"ffmpeg -nostdin -v error -i {corpus / name} -t 2 {options} {target}"
    subprocess.run(command.split(), check=True)
    return target


def decoded(path: Path) -> tuple[NDArray[np.float64], list[NDArray[np.uint8]]]:
    """When each frame is shown, and all pictures, as PyAV decodes the file from its begin to its end."""
    container: Any
    with av.open(path) as container:
        frames = [(frame.time, frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    return np.array([time for time, _ in frames]), [picture for _, picture in frames]


@pytest.mark.parametrize("form", FORMS)
def test_frames_are_those_of_the_whole_file(corpus: Path, tmp_path: Path, form: str) -> None:
    path = made(corpus, "front.mp4", tmp_path / form, FORMS[form])
    times, pictures = decoded(path)
    shown: list[float] = []
    for clips in (af.ClipSampler(9, pick="all"), af.ClipSampler(3, fps=5, per_video=2)):
        videos = af.Videos.from_table([{"video": str(path)}])
        with closing(af.Stream(videos, clips=clips, audio_rate=16_000, shuffle=False)) as stream:
            for sample in stream:
                assert sample["audio"].shape[1] > 0
                for seconds, picture in zip(sample["seconds"].tolist(), sample["video"], strict=True):
                    place = int(np.abs(times - seconds).argmin())
                    assert abs(times[place] - seconds) < 1e-6
                    difference = picture.permute(1, 2, 0).numpy().astype(int) - pictures[place]
                    assert np.abs(difference).max() <= 2  # FFmpeg's libraries of two versions
                    shown += [seconds] if clips.pick == "all" else []
    assert sorted(set(shown)) == pytest.approx(sorted(times))


@pytest.mark.parametrize("size", [(40, 60), (60, 40)])
def test_frames_decoded_in_turn_are_brought_to_a_size(corpus: Path, tmp_path: Path, size: tuple[int, int]) -> None:
    path = made(corpus, "front.mp4", tmp_path / "a.ts", "-c copy")
    videos = af.Videos.from_table([{"video": str(path)}])
    with closing(af.Stream(videos, clips=af.ClipSampler(4), size=size)) as stream:
        [sample] = stream
        stream.set_epoch(0)
        [batch] = af.torch.StreamDataset(stream, batch_size=1)
    assert sample["video"].shape == (4, 3, *size)
    assert batch["video"][0].equal(sample["video"])


def test_video_read_whole_is_fetched_once_for_clips_in_a_row(corpus: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = (corpus / "web.webm").read_bytes()
    with RangeServer({"a.webm": data}) as server:
        videos = af.Videos.from_table([{"video": f"{server.url}/a.webm"}])
        config = af.StreamConfig(fetch=af.FetchConfig(ca_file=server.ca_file))
        clips = af.ClipSampler(8, pick="all")
        with caplog.at_level(logging.WARNING), closing(af.Stream(videos, clips=clips, config=config)) as stream:
            assert len(list(stream)) == 12
        assert server.statistics().bytes_sent <= len(data) + 17 * 1024  # the first look at it is in vain
    [warning] = [record.getMessage() for record in caplog.records if "read whole" in record.getMessage()]
    assert warning.startswith(f"{server.url}/a.webm is read whole, all of its {len(data)} bytes for each clip")


def test_a_file_without_pictures_says_so(corpus: Path, tmp_path: Path) -> None:
    for form in ("a.mp4", "a.mka"):
        path = made(corpus, "front.mp4", tmp_path / form, "-vn -c copy")
        with pytest.raises(DecodeError, match=r"it has no video track, and can't be cut: .*; copy the file anew"):
            WholeVideo("it is sound").frames(memoryview(path.read_bytes()), "a file")


@pytest.mark.parametrize("form", ["a.ts", "a.mpg", "a.avi"])
def test_a_damaged_file_gives_no_wrong_frame(corpus: Path, tmp_path: Path, form: str) -> None:
    """FFmpeg would mend the pictures, and say nothing."""
    data = bytearray(made(corpus, "front.mp4", tmp_path / form, FORMS[form]).read_bytes())
    middle = len(data) // 2
    data[middle : middle + 4000] = bytes(4000)
    with pytest.raises(DecodeError, match="copy the file anew"):
        WholeVideo("no MP4").frames(memoryview(data), "a file")
