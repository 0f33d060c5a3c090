"""The frame of each row: that which the video shows at the row's own time, by torchcodec on the whole file."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncfetch as af
from asyncfetch.config import StreamConfig
from asyncfetch.errors import DatasetError, FrameMissing
from asyncfetch.lerobot import frames, open_dataset
from asyncfetch.lerobot.frame_times import own_seconds
from asyncfetch.testing import read_identity
from tests.lerobot.serving import DEPTH, SNAPSHOT, TOP, retimed, serve, shown_after, variable, video_path, write_files

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from asyncfetch.testing import DatasetTruth
    from tests.lerobot.serving import Library

FPS, TICKS = 30, 15360
LENGTHS = (7, 5, 8)


@pytest.fixture(scope="module")
def truth(library: Library) -> DatasetTruth:
    return library(episodes=LENGTHS, cameras=(TOP,), episodes_per_video_file=3, gop=4)


def decoded(video: bytes) -> tuple[NDArray[np.float64], Any]:
    """The times of a file's frames in seconds, and the frames."""
    from torchcodec.decoders import VideoDecoder  # type: ignore[attr-defined]

    decoder = VideoDecoder(video, seek_mode="exact", num_ffmpeg_threads=1)
    every = decoder.get_frames_in_range(0, len(decoder))
    return every.pts_seconds.numpy(), every.data


@st.composite
def gaps(draw: st.DrawFn) -> list[int]:
    """Ticks from each frame to the next: of a steady rate with drops, or of a variable one."""
    steady = st.sampled_from([512] * 6 + [1024, 1536])
    variable = st.integers(150, 2000)
    return draw(st.lists(draw(st.sampled_from([steady, variable])), min_size=19, max_size=19))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
async def test_row_has_the_frame_nearest_to_its_time(
    truth: DatasetTruth, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shown = shown_after(data.draw(gaps(), "gaps"))
    tolerance_seconds = data.draw(st.sampled_from([1e-5, 1e-4, 1e-3, 1.0]), "tolerance")
    within = min(max(tolerance_seconds, 1 / TICKS), 0.25 / FPS)
    off_ticks = st.one_of(
        st.just(0.0), st.floats(-0.5, 0.5), st.sampled_from([-1.0, 1.0]).map(lambda sign: sign * 3 * within * TICKS)
    )
    starts, rows, first = [], [], 0
    for length in LENGTHS:
        # A recorder rounds: by as much as float64's text of 6 digits.
        start = round(shown[first] / TICKS, data.draw(st.sampled_from([6, 9, 15])))
        offs = data.draw(st.lists(off_ticks, min_size=length, max_size=length), "off")
        own = [(ticks + off) / TICKS - start for ticks, off in zip(shown[first : first + length], offs, strict=True)]
        starts.append(start)
        rows.append(np.array(own, np.float32).tolist())
        first += length
    content = retimed(truth, shown, rows, starts)
    times, pictures = decoded(content[video_path(TOP)])
    root = write_files(content, tmp_path_factory.mktemp("retimed"))
    async with open_dataset(str(root), config=StreamConfig(tolerance_seconds=tolerance_seconds)) as dataset:
        for episode, (start, own) in enumerate(zip(starts, rows, strict=True)):
            for frame, time in enumerate(own):
                away = np.abs(times - (start + time))
                nearest = int(away.argmin())
                if abs(away[nearest] - within) < 1e-6 or np.partition(away, 1)[1] - away[nearest] < 1e-6:
                    continue  # either is right
                if away[nearest] > within:
                    with pytest.raises(FrameMissing):
                        await dataset.sample(episode, frame)
                else:
                    sample = await dataset.sample(episode, frame)
                    assert (sample[TOP] == pictures[nearest]).all()


@pytest.mark.parametrize("ends", ["as recorded", "by the rate of frames"])
def test_a_variable_rate_gives_every_row_its_own_frame(truth: DatasetTruth, tmp_path: Path, ends: str) -> None:
    shown, rows, starts = variable(truth)
    stops = [start + length / FPS for start, length in zip(starts, LENGTHS, strict=True)]
    content = retimed(truth, shown, rows, starts, stops=stops if ends == "by the rate of frames" else ())
    root = write_files(content, tmp_path / "variable")
    stream = list(af.Stream(str(root), seed=3))
    of_map_style = af.torch.FrameDataset(str(root))
    for samples in (stream, [of_map_style[number] for number in range(sum(LENGTHS))]):
        assert sorted(int(sample["index"]) for sample in samples) == list(range(sum(LENGTHS)))
        for sample in samples:
            place = int(sample["episode_index"]), int(sample["frame_index"])
            assert read_identity(sample[TOP]) == truth.identity(*place, TOP)


def test_a_dropped_frame_moves_no_row_to_its_neighbour(truth: DatasetTruth, tmp_path: Path) -> None:
    """Of the second of three episodes; the third one's rows are at the rate of frames again."""
    lengths = truth.lengths
    shown = shown_after([512] * 8 + [1024] + [512] * 10)
    rows = [
        [
            shown[truth.first_index(episode) + frame] / TICKS - shown[truth.first_index(episode)] / TICKS
            for frame in range(length)
        ]
        for episode, length in enumerate(lengths)
    ]
    starts = [shown[truth.first_index(episode)] / TICKS for episode in range(3)]
    stops = [start + length / FPS for start, length in zip(starts, lengths, strict=True)]
    for ends in ((), stops):
        root = write_files(retimed(truth, shown, rows, starts, stops=ends), tmp_path / f"gap-{len(ends)}")
        for sample in af.Stream(str(root), windows={TOP: frames(-1, 0, 1)}, seed=1):
            episode, frame = int(sample["episode_index"]), int(sample["frame_index"])
            around = np.clip([frame - 1, frame, frame + 1], 0, lengths[episode] - 1).tolist()
            assert [read_identity(picture) for picture in sample[TOP]] == [
                truth.identity(episode, each, TOP) for each in around
            ]


async def test_a_row_between_two_frames_is_missing(truth: DatasetTruth, tmp_path: Path) -> None:
    """The camera dropped a frame, and the table goes on at its rate."""
    shown = shown_after([512] * 3 + [1024] + [512] * 15)
    starts = [shown[truth.first_index(episode)] / TICKS for episode in range(3)]
    rows = [[frame / FPS for frame in range(length)] for length in LENGTHS]
    root = write_files(retimed(truth, shown, rows, starts), tmp_path / "dropped")
    async with open_dataset(str(root)) as dataset:
        for frame in range(7):
            if frame == 4:
                with pytest.raises(FrameMissing, match=r"no frame 4; it has 6 of 7 frames"):
                    await dataset.sample(0, frame)
            else:
                picture = (await dataset.sample(0, frame))[TOP]
                assert read_identity(picture).frame == frame - (frame > 4)


async def test_a_depth_video_goes_by_the_rows_times(library: Library, tmp_path: Path) -> None:
    truth = library(episodes=LENGTHS, cameras=(TOP,), extras=(DEPTH,), episodes_per_video_file=3)
    root = write_files(retimed(truth, *variable(truth)), tmp_path / "depth")
    async with open_dataset(str(root), depth_unit="m") as dataset:
        for episode, length in enumerate(LENGTHS):
            for frame in range(length):
                sample = await dataset.sample(episode, frame)
                np.testing.assert_allclose(sample[DEPTH][0], truth.depth_metres(episode, frame), atol=1e-4)


def test_a_mixture_and_pictures_in_the_table_go_by_the_rows(library: Library, tmp_path: Path) -> None:
    options: dict[str, Any] = {"cameras": (TOP,), "extras": (SNAPSHOT,), "episodes_per_video_file": 3}
    off, on = library(episodes=LENGTHS, **options), library(episodes=(6, 4), **options)
    root = write_files(retimed(off, *variable(off)), tmp_path / "variable")

    def name(member: int, sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "member": member}

    streams = [
        af.Stream(str(where), seed=1, transform=partial(name, member)) for member, where in enumerate((root, on.root))
    ]
    read = set()
    for sample in af.Mixture(streams, [1, 1], stop_on="all", seed=2):
        truth, episode, frame = (off, on)[sample["member"]], int(sample["episode_index"]), int(sample["frame_index"])
        for camera in (TOP, SNAPSHOT):
            assert read_identity(sample[camera]) == truth.identity(episode, frame, camera)
        read.add((sample["member"], episode, frame))
    assert len(read) == off.num_frames + on.num_frames


async def test_rows_off_the_rate_cost_no_request_more(truth: DatasetTruth) -> None:
    """Where the metadata's ends of episodes say so, their rows are read before their clips are cut."""
    async with serve(retimed(truth, *variable(truth)), joins=False) as served:
        for episode in range(3):
            await served.dataset.ready(episode)
        assert len(served.requests("videos")) == 4  # an index and three clips


async def test_clips_cut_at_the_rate_in_vain_are_few(truth: DatasetTruth) -> None:
    """Nothing says of the first episode that its rows are off the rate; it does of all after it."""
    shown, rows, starts = variable(truth)
    stops = [start + length / FPS for start, length in zip(starts, LENGTHS, strict=True)]
    async with serve(retimed(truth, shown, rows, starts, stops=stops), joins=False) as served:
        for episode in range(3):
            await served.dataset.ready(episode)
        assert 4 <= len(served.requests("videos")) <= 5


async def test_rows_near_the_rate_are_fetched_as_on_it(truth: DatasetTruth) -> None:
    """Their frames are the same, within the tolerance, and so is what is fetched."""
    shown = shown_after([512] * 19)
    starts = [truth.first_index(episode) / FPS for episode in range(3)]
    rows = [[frame / FPS + 5e-5 for frame in range(length)] for length in LENGTHS]
    async with serve(retimed(truth, shown, rows, starts), joins=False) as served:
        for episode, length in enumerate(LENGTHS):
            for frame in range(length):
                picture = (await served.dataset.sample(episode, frame))[TOP]
                assert read_identity(picture) == truth.identity(episode, frame, TOP)
        assert len(served.requests("videos")) == 4


async def test_ends_that_rows_at_the_rate_contradict_are_refused(truth: DatasetTruth) -> None:
    """Whose frames would these be?"""
    shown = shown_after([512] * 19)
    starts = [truth.first_index(episode) / FPS for episode in range(3)]
    rows = [[frame / FPS for frame in range(length)] for length in LENGTHS]
    stops = [starts[0] + 7 / FPS, starts[1] + 7 / FPS, starts[2] + 8 / FPS]
    async with serve(retimed(truth, shown, rows, starts, stops=stops)) as served:
        with pytest.raises(
            DatasetError, match=r"episode 1 has 5 frames, but from 0\.2\d+ s to 0\.4\d+ s of .* are 7 at"
        ):
            await served.dataset.sample(1, 0)
        for episode in (0, 2):
            assert read_identity((await served.dataset.sample(episode, 0))[TOP]).episode == episode


@pytest.mark.parametrize("fps", [30, 29.97, 50, 1, 240])
def test_times_at_the_rate_are_those_of_any_rounding(fps: float) -> None:
    exact = np.arange(5000) / fps
    single = np.arange(5000, dtype=np.float32) / np.float32(fps)
    for stored in (exact, exact.astype(np.float32), single):
        assert own_seconds(stored, fps) is None
    late = exact.astype(np.float32)
    late[7] += np.float32(1e-4)
    own = own_seconds(late, fps)
    assert own is not None
    assert own[7] == late[7]
    np.testing.assert_array_equal(np.delete(own, 7), np.delete(exact, 7))
