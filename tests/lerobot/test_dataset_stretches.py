"""Stretches of an episode: which frames they hold, what is fetched for them, and that samples are the same."""

from __future__ import annotations

import itertools
import shutil
import struct
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchcodec.decoders import VideoDecoder  # type: ignore[attr-defined]

from asyncfetch.config import StreamConfig
from asyncfetch.errors import CacheError, ClosedError, ConfigError, FrameMissing
from asyncfetch.formats import Stretch, reach_of
from asyncfetch.lerobot import frames, open_dataset, reader_of
from asyncfetch.lerobot.samples import clamp
from asyncfetch.runtime.concurrently import gather
from asyncfetch.testing import Quirks, read_identity
from asyncfetch.testing.truth import EXTRAS
from tests.lerobot.serving import (
    DEPTH,
    MIB,
    SNAPSHOT,
    TOP,
    WRIST,
    all_frames,
    check_sample,
    in_memory,
    in_use_bytes,
    retimed,
    serve,
    variable,
    video_path,
)
from tests.merge.version2 import EPISODE_FILE, as_version2

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from asyncfetch.formats import Sample
    from asyncfetch.lerobot import LeRobotDataset, SampleBuilder
    from asyncfetch.testing import DatasetTruth
    from tests.lerobot.serving import Library, Served

LENGTHS = (9, 26)
VIDEOS: dict[str, dict[str, Any]] = {
    "AV1": {"codec": "av1"},
    "AV1, a file each": {"codec": "av1", "episodes_per_video_file": 1},
    "H.264, groups of 2": {"codec": "h264"},
    "H.264 with B-frames": {"codec": "h264", "gop": 12},
    "H.264, one group": {"codec": "h264", "gop": 250},
    "HEVC, open GOPs": {"codec": "hevc", "gop": 6},
    "HEVC, one group": {"codec": "hevc", "gop": 250},
}


# The arithmetic.


@given(st.integers(1, 30), st.data())
def test_a_span_has_what_windows_of_its_samples_show(length: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, length - 1))
    stop = data.draw(st.integers(start + 1, length))
    offsets = np.array(data.draw(st.lists(st.integers(-40, 40), min_size=1)), np.int64)
    stretch = Stretch(0, start, stop, reach_of({TOP: offsets, "action": offsets}, [WRIST, TOP]))
    shown = np.concatenate([clamp(frame, offsets, length)[0] for frame in range(start, stop)])
    assert stretch.span(TOP, length) == (shown.min(), shown.max() + 1)
    assert stretch.span(WRIST, length) == (start, stop)


def test_windows_that_reach_nowhere_leave_stretches_the_same() -> None:
    assert reach_of({TOP: np.array([0]), WRIST: np.array([0, -2])}, [TOP, WRIST]) == ((WRIST, -2, 0),)


@pytest.mark.parametrize("seconds", [0, -1.0, float("inf"), float("nan"), "20"])
def test_a_length_of_segments_that_is_none_is_refused(seconds: Any) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError, match="segment_seconds"):
        StreamConfig(segment_seconds=seconds)


# Their frames.


@pytest.mark.parametrize("options", VIDEOS.values(), ids=list(VIDEOS))
async def test_clips_show_what_the_whole_file_does(library: Library, options: dict[str, Any]) -> None:
    truth = library(episodes=LENGTHS, cameras=(TOP,), **options)
    async with serve(truth) as served:
        spans = {episode: served.dataset.episodes[episode].videos[TOP] for episode in range(len(LENGTHS))}
        files = {span.url: str(next(truth.root.glob(f"**/{span.url[-12:]}"))) for span in spans.values()}
        videos = {url: VideoDecoder(path, seek_mode="exact") for url, path in files.items()}
        for episode, length in enumerate(LENGTHS):
            span = spans[episode]
            for start, count in itertools.product(range(length), (1, 2, 5, length)):
                stretch = Stretch(episode, start, min(start + count, length))
                with await reader_of(served.dataset).hold(stretch) as held:
                    shown = held.frames(TOP, range(stretch.start, stretch.stop))
                expected = videos[span.url].get_frames_in_range(
                    span.first_frame + stretch.start, span.first_frame + stretch.stop
                )
                assert torch.equal(shown, expected.data), stretch


WINDOWS = {
    TOP: frames(-7, -1, 0),
    WRIST: frames(3, -4),
    DEPTH: frames(0, 2),
    SNAPSHOT: frames(-1, 0, 1),
    "observation.state": frames(-20, 0, 5),
    "observation.note": frames(-1, 1),
}


def same(one: Sample, other: Sample) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]
        for key, value in one.items()
    )


async def samples_of(dataset: LeRobotDataset, builder: SampleBuilder, stretch: Stretch) -> list[Sample]:
    with await reader_of(dataset).hold(stretch) as held:
        return builder.build([(held, frame, frame % 3) for frame in range(stretch.start, stretch.stop)])


@pytest.mark.parametrize("gop", [2, 250])
@pytest.mark.parametrize("codec", ["h264", "hevc"])
@pytest.mark.parametrize("windows", [WINDOWS, None], ids=["windows", "none"])
async def test_samples_of_stretches_are_those_of_the_episode(
    library: Library, codec: str, gop: int, windows: Mapping[str, Any] | None
) -> None:
    truth = library(episodes=LENGTHS, codec=codec, gop=gop, extras=EXTRAS, episodes_per_video_file=1)
    async with serve(truth) as served:
        builder = reader_of(served.dataset).sample_builder(windows)
        for episode, length in enumerate(LENGTHS):
            whole = await samples_of(served.dataset, builder, Stretch(episode, 0, length))
            for stop in range(3, length + 3, 3):
                stretch = Stretch(episode, stop - 3, min(stop, length), builder.reach)
                of_stretch = await samples_of(served.dataset, builder, stretch)
                expected = whole[stretch.start : stretch.stop]
                assert all(same(*pair) for pair in zip(of_stretch, expected, strict=True)), stretch


async def test_stretches_with_the_same_bytes_keep_their_frames_apart(library: Library) -> None:
    """The second frames of a group take the same range as all of it: decoders of theirs know other frames."""
    truth = library(episodes=(12,), gop=12, cameras=(TOP,), codec="av1")
    async with serve(truth) as served:
        reader = reader_of(served.dataset)
        stretches = [Stretch(0, start, 12) for start in (0, 3, 7, 11)]
        held = [await reader.hold(stretch) for stretch in stretches]
        assert len({one.entry.leases[TOP].key for one in held}) == 1
        builder = reader.sample_builder(None)
        for _ in range(2):
            asked = [(one, frame, 0) for frame in range(12) for one in held if frame >= one.stretch.start]
            for sample, (_, frame, _) in zip(builder.build(asked), asked, strict=True):
                check_sample(sample, truth, 0, frame)
        for one in held:
            one.release()


async def test_stretches_with_the_same_bytes_have_headers_of_their_own(library: Library) -> None:
    """Where pictures precede a file's first key frame on the screen, the clip of one of them begins earlier."""
    truth = library(episodes=(30,), gop=30, cameras=(TOP,), episodes_per_video_file=1)
    content = in_memory(truth)
    video = content[video_path(TOP)]
    place = video.index(b"stss") + 12
    assert struct.unpack_from(">2I", video, place) == (1, 15)
    content[video_path(TOP)] = video[:place] + struct.pack(">I", 4) + video[place + 4 :]
    async with serve(content) as served:
        reader = reader_of(served.dataset)
        held = [await reader.hold(Stretch(0, start, 12)) for start in (3, 4)]
        plans = [(await reader._episodes._plan(one.stretch))[TOP].plan for one in held]
        assert (plans[0].start, plans[0].stop) == (plans[1].start, plans[1].stop)
        assert len(plans[0].header) == len(plans[1].header)
        assert plans[0].header != plans[1].header
        for one, plan in zip(held, plans, strict=True):
            assert one.clip(TOP).data == plan.header + video[plan.start : plan.stop]
            one.release()


@pytest.mark.parametrize("stats", [True, False], ids=["v2.1", "v2.0"])
async def test_segments_of_old_datasets(library: Library, tmp_path: Path, stats: bool) -> None:
    truth = library(episodes=(9, 4, 14), **EPISODE_FILE)
    async with open_dataset(
        as_version2(truth, tmp_path / "old", stats=stats), config=StreamConfig(segment_seconds=0.1)
    ) as dataset:
        for place in all_frames(truth):
            check_sample(await dataset.sample(*place), truth, *place)


@pytest.mark.parametrize("seconds", [1 / 30, 0.1, 0.33])
async def test_every_frame_by_its_segment(library: Library, seconds: float) -> None:
    truth = library(episodes=(9, 4, 14), gop=6, episodes_per_video_file={TOP: 1, WRIST: 3}, episodes_per_data_file=2)
    async with serve(truth, segment_seconds=seconds) as served:
        for place in all_frames(truth):
            check_sample(await served.dataset.sample(*place), truth, *place)
        assert in_use_bytes(served.dataset) == 0


@pytest.mark.parametrize("seconds", [1 / 30, 0.2, 20.0])
async def test_windows_of_single_samples_reach_over_edges(library: Library, seconds: float) -> None:
    truth = library(episodes=LENGTHS, codec="hevc", extras=EXTRAS, episodes_per_video_file=1)
    async with serve(truth, segment_seconds=seconds) as served:
        builder = reader_of(served.dataset).sample_builder(WINDOWS)
        for episode, length in enumerate(LENGTHS):
            whole = await samples_of(served.dataset, builder, Stretch(episode, 0, length))
            async with serve(truth, segment_seconds=seconds) as other:
                for frame in range(length):
                    assert same(await other.dataset.sample(episode, frame, windows=WINDOWS), whole[frame])


@pytest.mark.parametrize("seconds", [1 / 30, 0.2, 20.0])
async def test_rows_of_times_of_their_own_have_their_frames(library: Library, seconds: float) -> None:
    truth = library(episodes=(11, 26), cameras=(TOP,), codec="hevc", gop=4)
    content = retimed(truth, *variable(truth))
    async with serve(content, segment_seconds=seconds) as served:
        for episode, frame in all_frames(truth):
            sample = await served.dataset.sample(episode, frame, windows={TOP: frames(-4, 0, 3)})
            around = np.clip([frame - 4, frame, frame + 3], 0, truth.lengths[episode] - 1).tolist()
            shown = [read_identity(picture) for picture in sample[TOP]]
            assert shown == [truth.identity(episode, each, TOP) for each in around]


# What is fetched.


@pytest.fixture(scope="module")
def long(library: Library) -> DatasetTruth:
    """An episode of 240 frames whose groups are larger than the indexes, between two short ones."""
    return library(episodes=(4, 240, 5), width=128, height=128, texture=16.0, codec="av1", episodes_per_video_file=3)


def clip_ranges(served: Served, camera: str = "/videos/") -> list[tuple[int, int]]:
    """Ranges asked for of videos, without those of indexes."""
    return [(one.start, one.stop) for one in served.requests(camera) if one.start and one.stop]


async def test_a_stretch_fetches_the_groups_of_its_frames(long: DatasetTruth) -> None:
    async with serve(long, joins=False) as served:
        reader = reader_of(served.dataset)
        whole_bytes = await reader.range_bytes(1)
        stretches = [Stretch(1, start, start + 8) for start in range(0, 240, 8)]
        assert sum([await reader.range_bytes(stretch) for stretch in stretches]) == whole_bytes
        await reader.ready(stretches[0])  # the rows, too
        served.server.reset()
        for stretch in stretches[1:]:
            with await reader.hold(stretch):
                pass
        assert len(clip_ranges(served)) == 2 * (len(stretches) - 1) == len(served.server.requests)
        sent_bytes = sum(one.bytes_sent for one in served.server.requests)
        assert sent_bytes == whole_bytes - await reader.range_bytes(stretches[0])
        for camera in (TOP, WRIST):
            ranges = sorted(clip_ranges(served, camera))
            assert all(one[1] == other[0] for one, other in itertools.pairwise(ranges))  # one behind the other


async def test_a_window_over_an_edge_is_fetched_and_counted(long: DatasetTruth) -> None:
    async with serve(long, joins=False) as served:
        reader = reader_of(served.dataset)
        reach = reader.sample_builder({TOP: frames(-6, 0), "action": frames(-6, 0)}).reach
        assert reach == ((TOP, -6, 0),)
        plain, reaching = Stretch(1, 100, 110), Stretch(1, 100, 110, reach)
        weighed, reaching_bytes = await reader.clip_bytes(reaching), await reader.range_bytes(reaching)
        assert await reader.range_bytes(plain) < reaching_bytes < await reader.range_bytes(Stretch(1, 94, 110))
        served.server.reset()
        with await reader.hold(reaching):
            assert in_use_bytes(served.dataset) == weighed
        assert sum(stop - start for start, stop in clip_ranges(served)) == reaching_bytes
        served.server.reset()
        with await reader.hold(plain), await reader.hold(Stretch(1, 94, 100)):
            assert not clip_ranges(served, TOP)  # both lie in what was fetched


async def test_a_stretch_of_a_long_group_begins_at_its_key_frame(library: Library) -> None:
    truth = library(episodes=(60,), codec="h264", gop=250, cameras=(TOP,))
    async with serve(truth, joins=False) as served:
        reader = reader_of(served.dataset)
        sizes = [await reader.range_bytes(Stretch(0, frame, frame + 1)) for frame in range(60)]
        whole = await reader.range_bytes(0)
    assert max(sizes) <= whole
    assert sizes[0] < sizes[20] < sizes[40]


async def test_a_sample_of_a_long_episode_fetches_its_segment(long: DatasetTruth) -> None:
    async with serve(long, segment_seconds=1.0, joins=False) as served:
        dataset = served.dataset
        whole_bytes = await reader_of(dataset).range_bytes(1)
        check_sample(await dataset.sample(1, 77), long, 1, 77)
        segment_bytes = sum(stop - start for start, stop in clip_ranges(served))
        assert 0.8 * whole_bytes / 8 <= segment_bytes <= 1.2 * whole_bytes / 8
        served.server.reset()
        for frame in (60, 61, 89, 77):
            check_sample(await dataset.sample(1, frame), long, 1, frame)
        await dataset.sample(1, 70, windows={TOP: frames(-10, 19)})
        assert not served.server.requests
        check_sample(await dataset.sample(1, 90), long, 1, 90)
        await dataset.sample(1, 70, windows={TOP: frames(-11, 0)})
        assert len(clip_ranges(served)) == 3  # the other camera's is the same
        assert not served.requests("/data/")


async def test_samples_of_an_episode_in_memory_fetch_nothing(long: DatasetTruth) -> None:
    async with serve(long, segment_seconds=1.0, joins=False) as served:
        await served.dataset.ready(1)
        served.server.reset()
        for frame in range(0, 240, 13):
            check_sample(await served.dataset.sample(1, frame), long, 1, frame)
            await served.dataset.sample(1, frame, windows={TOP: frames(-40, 40)})
        assert not served.server.requests


async def test_samples_wait_for_an_episode_that_is_on_its_way(long: DatasetTruth) -> None:
    async with serve(long, segment_seconds=1.0, joins=False, first_byte_seconds=0.05) as served:
        served.dataset.prefetch(1)
        for frame in (7, 200):
            check_sample(await served.dataset.sample(1, frame), long, 1, frame)
        whole_bytes = await reader_of(served.dataset).range_bytes(1)
        assert sum(stop - start for start, stop in clip_ranges(served)) == whole_bytes


async def test_the_rows_of_an_episode_are_fetched_once(long: DatasetTruth) -> None:
    """Though those who keep them have no room, they are there as long as somebody holds a stretch."""
    async with serve(long, joins=False, max_bytes=1_500_000) as served:
        reader = reader_of(served.dataset)
        held = list(await gather(*(partial(reader.hold, Stretch(1, start, start + 4)) for start in (0, 4, 8))))
        held += [await reader.hold(Stretch(1, 100, 104))]
        assert len({id(one.rows) for one in held}) == 1
        assert len([one for one in served.requests("/data/") if one.start and one.start > 0]) <= 1
        assert held[0].rows["frame_index"].tolist() == [*range(240)]
        for one in held:
            one.release()


@pytest.mark.parametrize("quirks", [Quirks(), Quirks(collapsed_row_groups=True)], ids=["own group", "shared"])
async def test_pictures_in_the_table_are_read_by_their_pages(
    library: Library, quirks: Quirks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyarrow puts 1,024 to a page."""
    monkeypatch.setattr("asyncfetch.tables.pages.LEAST_CHUNK_BYTES", 10_000)
    truth = library(
        episodes=(5, 2500, 7), cameras=(), extras=(SNAPSHOT,), width=64, height=64, texture=10.0, quirks=quirks
    )
    (path,) = truth.root.glob("data/**/*.parquet")
    size = path.stat().st_size
    async with serve(truth, segment_seconds=1.0, max_bytes=64 * MIB) as served:
        for frame in (2400, 2405):
            sample = await served.dataset.sample(1, frame)
            np.testing.assert_array_equal(sample[SNAPSHOT].permute(1, 2, 0), truth.picture(1, frame, SNAPSHOT))
            assert sum(request.bytes_sent for request in served.requests("/data/")) < size / 4
        served.server.reset()
        sample = await served.dataset.sample(1, 2410, windows={SNAPSHOT: frames(-400, -30, 0)})
        for picture, frame in zip(sample[SNAPSHOT], (2010, 2380, 2410), strict=True):
            np.testing.assert_array_equal(picture.permute(1, 2, 0), truth.picture(1, frame, SNAPSHOT))
        assert sum(request.bytes_sent for request in served.requests("/data/")) < size
        with await reader_of(served.dataset).hold(Stretch(1, 1020, 1030)) as held:
            assert len(held.rows[SNAPSHOT]) == 10
            assert held.rows["frame_index"].tolist() == [*range(2500)]
            with pytest.raises(AssertionError, match=r"frame 1019 of pictures, of which \[1020, 1030\)"):
                held.rows[SNAPSHOT][1019]


async def test_pictures_of_episodes_in_several_groups(library: Library, tmp_path: Path) -> None:
    """As the datasets library writes them: 100 rows a group, whoever's they are."""
    truth = library(episodes=(30, 40, 25), cameras=(), extras=(SNAPSHOT,), width=64, height=64)
    root = shutil.copytree(truth.root, tmp_path / "groups")
    (path,) = root.glob("data/**/*.parquet")
    pq.write_table(pq.read_table(path), path, row_group_size=13)
    async with serve(root, segment_seconds=0.3) as served:
        for place in all_frames(truth):
            sample = await served.dataset.sample(*place, windows={SNAPSHOT: frames(-3, 0)})
            check_sample(sample, truth, *place)
            for picture, frame in zip(sample[SNAPSHOT], (max(place[1] - 3, 0), place[1]), strict=True):
                np.testing.assert_array_equal(picture.permute(1, 2, 0), truth.picture(place[0], frame, SNAPSHOT))


async def test_held_stretches_take_the_memory_that_they_weigh(long: DatasetTruth) -> None:
    async with serve(long) as served:
        reader = reader_of(served.dataset)
        stretches = [Stretch(1, start, start + 6, ((TOP, -3, 2),)) for start in range(0, 60, 6)]
        weighed = sum([await reader.clip_bytes(stretch) for stretch in stretches])
        held = [await reader.hold(stretch) for stretch in stretches]
        assert in_use_bytes(served.dataset) == weighed
        assert served.dataset.statistics().episodes.held == len(stretches)
        for one in held:
            one.release()
        assert in_use_bytes(served.dataset) == 0
        served.server.reset()
        with await reader.hold(stretches[3]) as again:
            assert again.stretch == stretches[3]
        assert not served.server.requests


async def test_segments_of_an_episode_need_less_room_than_the_whole(long: DatasetTruth) -> None:
    async with serve(long) as served:
        needed = await reader_of(served.dataset).clip_bytes(1)
        share = reader_of(served.dataset).engine.room.max_bytes / served.dataset.config.max_bytes
    async with serve(long, segment_seconds=1.0, max_bytes=int(needed / 2 / share)) as served:
        with pytest.raises(CacheError, match=r"the clips of episode 1 take"):
            await served.dataset.ready(1)
        for frame in range(0, 240, 17):
            check_sample(await served.dataset.sample(1, frame), long, 1, frame)
        with pytest.raises(CacheError, match=r"the clips of episode 1, frames \[2, 238\) take"):
            await reader_of(served.dataset).hold(Stretch(1, 2, 238))


# What goes wrong.


async def test_errors_name_the_frames_of_a_stretch(library: Library) -> None:
    truth = library(episodes=(4, 8), quirks=Quirks(short_video_frames=3))
    async with serve(truth) as served:
        reader = reader_of(served.dataset)
        with await reader.hold(Stretch(1, 4, 8)) as held:
            assert held.frames(TOP, [4]).shape[0] == 1
            with pytest.raises(FrameMissing, match=rf"{TOP} of episode 1, frames \[4, 8\) in .*has no frame 6;"):
                held.frames(TOP, [4, 6])
            with pytest.raises(FrameMissing, match="no frame 8;"):
                held.frames(TOP, [8])
            with pytest.raises(AssertionError, match=rf"episode 1, frames \[4, 8\): frame 3 of {TOP}.*\[4, 8\)"):
                held.each(TOP, [3])
        with pytest.raises(ClosedError, match=r"episode 1, frames \[4, 8\) was released"):
            held.frames(TOP, [4])
