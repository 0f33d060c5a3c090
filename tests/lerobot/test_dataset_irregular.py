"""Datasets that aren't quite what LeRobot records: read right, or refused with the file and the number named."""

from __future__ import annotations

import io
import json
import shutil
from codecs import BOM_UTF8
from contextlib import closing
from typing import TYPE_CHECKING, Any, Literal

import anyio
import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torchcodec.decoders import VideoDecoder  # type: ignore[attr-defined]

from asyncfetch.config import StreamConfig
from asyncfetch.errors import DatasetError, DecodeError, EpisodeNotFound, FormatError, FrameMissing, NotFound
from asyncfetch.lerobot import frames, open_dataset, reader_of
from asyncfetch.merge import convert_dataset
from asyncfetch.stream import Mixture
from asyncfetch.streams import Stream
from asyncfetch.testing import Fault, FaultOnce, Quirks, read_identity
from asyncfetch.torch import FrameDataset, StreamDataset
from tests.lerobot.serving import (
    DEFAULTS,
    SNAPSHOT,
    TOP,
    WRIST,
    all_frames,
    check_all,
    check_renumbered,
    check_sample,
    content_of,
    in_memory,
    in_use_bytes,
    refreshed,
    renumbered,
    restarting,
    serve,
    shifted,
    video_path,
)
from tests.merge.version2 import EPISODE_FILE, as_version2
from tests.recorded import DATA

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from asyncfetch.lerobot import LeRobotDataset
    from asyncfetch.testing import DatasetTruth
    from tests.lerobot.serving import Library

LENGTHS = (6, 0, 4, 5)
HARMLESS: dict[str, dict[str, Any]] = {
    "collapsed row groups": {"collapsed_row_groups": True},
    "plain lists": {"plain_lists": True},
    "no huggingface metadata": {"no_huggingface_metadata": True},
    "sorted episode columns": {"sorted_episode_columns": True},
    "float index columns": {"float_index_columns": True},
    "null indices of an episode without frames": {"null_index_episodes": (1,)},
    "several metadata files": {"episodes_per_meta_file": 1, "stale_self_references": True},
    "unnamed and permuted tasks": {"unnamed_tasks_index": True, "permuted_tasks": True},
    "orphan rows": {"orphan_rows": 3, "collapsed_row_groups": True},
    "orphan files": {"orphan_files": True},
    "old info.json": {"unknown_info_keys": True, "legacy_video_info": True},
}


def stored(content: Mapping[str, bytes], root: Path) -> Path:
    """The files below a directory."""
    for path, data in content.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return root


@pytest.mark.parametrize("quirks", HARMLESS.values(), ids=list(HARMLESS))
async def test_every_frame_is_right(library: Library, quirks: dict[str, Any]) -> None:
    truth = library(episodes=LENGTHS, quirks=Quirks(**quirks))
    async with serve(truth) as served:
        await check_all(served.dataset, truth)


GAPS: dict[str, tuple[int | None, ...]] = {
    "in the middle": (0, None, 2, 3),
    "two of them": (0, None, 2, None),
    "the first missing": (None, 1, 2, 3),
    "the last missing": (0, 1, 2, None),
    "not from 0": (5, 6, 7, 8),
    "a million between": (0, 3, 10**6, 10**6 + 1),
    "the largest number": (0, 1, 2, 2**63 - 2),
    "in another order": (7, 3, None, 0),
}


@pytest.mark.parametrize("counts_all", [False, True], ids=["rows", "numbers"])
@pytest.mark.parametrize("numbers", GAPS.values(), ids=list(GAPS))
async def test_episodes_are_those_that_the_table_names(
    library: Library, tmp_path: Path, numbers: tuple[int | None, ...], counts_all: bool
) -> None:
    truth = library(episodes=(6, 3, 4, 5), episodes_per_data_file=3, chunks_size=1)
    root = renumbered(truth, tmp_path / "gaps", numbers, order=(2, 0, 3, 1), per_file=2, counts_all=counts_all)
    async with serve(root) as served:
        await check_renumbered(served.dataset, truth, numbers)
        unknown = served.dataset.prefetch, served.dataset.ready
        with pytest.raises(EpisodeNotFound, match="no episode 4;"):
            await unknown[1](4)
        with pytest.raises(EpisodeNotFound, match="no episode 4;"):
            unknown[0](4)


async def test_file_behind_the_tables_last_may_be_unreadable(library: Library, tmp_path: Path) -> None:
    """As S3 has it where one may not list: it denies access to what isn't there."""
    truth, numbers = library(episodes=(6, 3, 4, 5)), (0, None, None, 3)
    root = renumbered(truth, tmp_path / "gaps", numbers, counts_all=True)
    fault = FaultOnce("/meta/episodes/chunk-000/file-001.parquet", Fault.status(403))
    async with serve(root, fault=fault) as served:
        assert served.dataset.episodes.indices == (0, 3)


async def test_episodes_are_read_beside_one_that_lacks_its_rows(library: Library, tmp_path: Path) -> None:
    """And an episode without frames, whose number only the table has."""
    truth = library(episodes=LENGTHS, quirks=Quirks(collapsed_row_groups=True))
    numbers = (2, 4, None, 9)
    async with serve(renumbered(truth, tmp_path / "gaps", numbers)) as served:
        await check_renumbered(served.dataset, truth, numbers)


async def test_episode_failure_is_kept_under_the_episodes_own_number(library: Library, tmp_path: Path) -> None:
    root = renumbered(library(episodes=(6, 3, 4, 5)), tmp_path / "gaps", (0, None, 3, 8))
    (root / video_path(TOP, 1)).unlink()
    async with serve(root) as served:
        for episode in (3, 8):
            served.dataset.prefetch(episode)
            with pytest.raises(NotFound, match=video_path(TOP, 1)):
                await served.dataset.ready(episode)
            with pytest.raises(NotFound, match=video_path(TOP, 1)):
                await served.dataset.sample(episode, 0)
        await served.dataset.ready(0)


async def test_no_stats(library: Library) -> None:
    async with serve(library(episodes=LENGTHS, quirks=Quirks(no_stats=True))) as served:
        assert served.dataset.stats is None


async def test_null_indices_of_an_episode_with_frames(library: Library) -> None:
    truth = library(episodes=LENGTHS, quirks=Quirks(null_index_episodes=(2,)))
    async with serve(truth) as served:
        for read in (served.dataset.ready(2), served.dataset.sample(2, 0)):
            with pytest.raises(DatasetError, match=r"chunk_index for episode 2, which has 4 frames; leave"):
                await read
        check_sample(await served.dataset.sample(3, 0), truth, 3, 0)


async def test_an_episode_without_frames(library: Library) -> None:
    async with serve(library(episodes=LENGTHS)) as served:
        await served.dataset.ready(1)
        with pytest.raises(FrameMissing, match=r"episode 1 has frames \[0, 0\), not 0"):
            await served.dataset.sample(1, 0)


@pytest.mark.parametrize("feature", DEFAULTS)
async def test_a_missing_default_feature_is_named_with_those_there(library: Library, feature: str) -> None:
    truth = library(episodes=(3,), quirks=Quirks(without_default_feature=feature))
    with pytest.raises(DatasetError, match=rf"info\.json lack {feature},.*present are observation\.state, action"):
        async with serve(truth):
            pass


async def test_an_old_version_is_refused_with_the_way_out(library: Library) -> None:
    truth = library(episodes=(3,), quirks=Quirks(codebase_version="v1.6"))
    with pytest.raises(DatasetError, match=r"v1\.6 dataset.*`asyncfetch convert"):
        async with serve(truth):
            pass


@pytest.mark.parametrize("stats", [True, False], ids=["v2.1", "v2.0"])
async def test_datasets_of_version_2_are_read_as_they_are(library: Library, tmp_path: Path, stats: bool) -> None:
    truth = library(episodes=(9, 4, 0, 14, 5), **EPISODE_FILE)
    root = as_version2(truth, tmp_path / "old", stats=stats)
    tasks = root / "meta/tasks.jsonl"
    tasks.write_text(2 * tasks.read_text())  # as some converters write it
    async with serve(root) as served:
        await check_all(served.dataset, truth)
        assert (served.dataset.stats is None) == stats
        assert served.dataset.fingerprint
    async with serve(root, features=[TOP]) as served:
        sample = await served.dataset.sample(3, 13)
        assert set(sample) == {TOP, "task", *DEFAULTS}
        assert read_identity(sample[TOP]) == truth.identity(3, 13, TOP)


def test_dataset_of_version_2_is_streamed_and_read_by_frame(library: Library, tmp_path: Path) -> None:
    truth = library(episodes=(9, 4, 0, 14, 5), **EPISODE_FILE)
    root = as_version2(truth, tmp_path / "old")
    stream = Stream(root, seed=3, config=StreamConfig(decode_threads=2))
    places = [(int(sample["episode_index"]), int(sample["frame_index"])) for sample in stream]
    assert sorted(places) == sorted(all_frames(truth))
    frames = FrameDataset(root)
    check_sample(frames[12], truth, 1, 3)
    frames.close()


async def test_dataset_of_version_2_may_lack_an_episode(library: Library, tmp_path: Path) -> None:
    truth = library(episodes=(9, 4, 6), **EPISODE_FILE)
    root = as_version2(truth, tmp_path / "old")
    episodes = root / "meta/episodes.jsonl"
    first, _, last = episodes.read_text().splitlines(keepends=True)
    episodes.write_text(first + last)
    info = json.loads((root / "meta/info.json").read_text()) | {"total_episodes": 2, "total_frames": 15}
    (root / "meta/info.json").write_text(json.dumps(info))
    (root / "data/chunk-000/episode_000001.parquet").unlink()
    async with serve(root) as served:
        for episode, frame in ((0, 8), (2, 0), (2, 5)):
            check_sample(await served.dataset.sample(episode, frame), truth, episode, frame)
        with pytest.raises(EpisodeNotFound):
            await served.dataset.sample(1, 0)


def marked(root: Path) -> None:
    """Put a byte order mark before each file of JSON, and before some line in between."""
    for path in root.rglob("*.json*"):
        lines = path.read_bytes().splitlines(keepends=True)
        place = len(lines) // 2 if path.suffix == ".jsonl" else 0
        path.write_bytes(BOM_UTF8 + b"".join([*lines[:place], BOM_UTF8 * (place > 0), *lines[place:]]))


@pytest.mark.parametrize("version", [2, 3])
async def test_a_byte_order_mark_is_no_matter(library: Library, tmp_path: Path, version: int) -> None:
    truth = library(episodes=(9, 4, 0, 14, 5), **EPISODE_FILE)
    root = tmp_path / "set"
    _ = as_version2(truth, root) if version == 2 else shutil.copytree(truth.root, root)
    stats = json.loads((root / "meta/stats.json").read_text()) if version == 3 else None
    marked(root)
    async with open_dataset(root) as dataset:
        await check_all(dataset, truth)
        assert stats is None or dataset.stats == stats


async def test_an_index_of_version_2_may_begin_anew(library: Library, tmp_path: Path) -> None:
    truth = library(episodes=(9, 4, 6), **EPISODE_FILE)
    root = as_version2(truth, tmp_path / "old")
    for path in (root / "data").rglob("*.parquet"):
        rows = pq.read_table(path)
        pq.write_table(rows.set_column(rows.column_names.index("index"), "index", rows["frame_index"]), path)
    async with open_dataset(root) as dataset:
        for episode, frame in all_frames(truth):
            sample = await dataset.sample(episode, frame)
            index = sample["index"] + sum(truth.lengths[:episode])
            check_sample({**sample, "index": index}, truth, episode, frame)
    await convert_dataset(root, tmp_path / "new")
    async with open_dataset(tmp_path / "new") as dataset:
        await check_all(dataset, truth)


async def test_a_broken_dataset_of_version_2_is_refused_by_file(library: Library, tmp_path: Path) -> None:
    truth = library(episodes=(9, 4), **EPISODE_FILE)
    content = content_of(as_version2(truth, tmp_path / "old"))
    lines = content["meta/tasks.jsonl"]
    other = lines.splitlines()[0].replace(b'"task": "', b'"task": "not ')
    for path, data in {"meta/tasks.jsonl": lines + other, "meta/episodes.jsonl": b"{"}.items():
        with pytest.raises(FormatError, match=path):
            async with serve(content | {path: data}):
                pass
    missing = "data/chunk-000/episode_000001.parquet"
    async with serve({path: data for path, data in content.items() if path != missing}) as served:
        check_sample(await served.dataset.sample(0, 3), truth, 0, 3)
        with pytest.raises(NotFound, match=missing):
            await served.dataset.sample(1, 0)


async def test_a_video_without_bytes(library: Library) -> None:
    truth = library(episodes=LENGTHS, quirks=Quirks(empty_video_file=0))
    async with serve(truth) as served:
        with pytest.raises(FormatError, match=rf"{video_path(TOP)}: the file is empty \(0 bytes\)"):
            await served.dataset.sample(0, 0)
        check_sample(await served.dataset.sample(3, 1), truth, 3, 1)


@pytest.mark.parametrize("lost_bytes", [1, 500])
async def test_a_video_cut_off_behind_its_index(library: Library, lost_bytes: int) -> None:
    truth = library(episodes=LENGTHS)
    content = in_memory(truth)
    path = video_path(WRIST, 1)
    content[path] = content[path][:-lost_bytes]
    async with serve(content) as served:
        with pytest.raises(FormatError, match=rf"{path}: truncated: it has {len(content[path])} bytes.*episode 3"):
            await served.dataset.ready(3)
        check_sample(await served.dataset.sample(2, 1), truth, 2, 1)


async def test_a_video_cut_off_in_front_of_its_index(library: Library) -> None:
    truth = library(episodes=LENGTHS, episodes_per_video_file=1)
    content = in_memory(truth)
    path = video_path(TOP, 2)
    content[path] = content[path][: len(content[path]) // 2]
    async with serve(content) as served:
        with pytest.raises(FormatError, match=rf"{path}: truncated.* there are only {len(content[path])}"):
            await served.dataset.sample(2, 0)
        check_sample(await served.dataset.sample(3, 1), truth, 3, 1)


async def test_short_video_lacks_just_its_last_frames(library: Library) -> None:
    truth = library(episodes=LENGTHS, quirks=Quirks(short_video_frames=2))
    lengths = (4, 0, 4, 3)  # of the last episode in each file of two
    async with serve(truth) as served:
        for episode, frame in all_frames(truth):
            if frame < lengths[episode]:
                check_sample(await served.dataset.sample(episode, frame), truth, episode, frame)
            else:
                with pytest.raises(FrameMissing, match=rf"episode {episode} in .*no frame {frame}; it has"):
                    await served.dataset.sample(episode, frame)
        assert in_use_bytes(served.dataset) == 0


@pytest.mark.parametrize("by_frames", [0.6, 0.4, 0.26, 0.01, -0.01, -0.3])
async def test_frame_at_another_time_than_in_metadata_is_missing(library: Library, by_frames: float) -> None:
    truth = library(episodes=(7,))
    async with serve(shifted(truth, by_frames)) as served:
        for frame in range(7):
            due = (frame + by_frames) / 30
            with pytest.raises(FrameMissing) as caught:
                await served.dataset.sample(0, frame)
            message = str(caught.value)
            shown = round(frame + by_frames) / 30
            if shown <= 6 / 30:
                assert f"frame {frame} is due at {due:.6f} s of the video" in message
                assert f"the nearest frame is shown at {shown:.6f} s" in message
            else:
                assert "no frame 6; it has" in message


@pytest.mark.parametrize(
    ("by_frames", "tolerance_seconds"), [(0.002, 1e-4), (-0.002, 1e-4), (0.2, 0.01), (0.24, 10.0), (-0.24, 10.0)]
)
async def test_a_frame_may_be_off_by_the_tolerance(
    library: Library, by_frames: float, tolerance_seconds: float
) -> None:
    truth = library(episodes=(3, 4))
    async with serve(shifted(truth, by_frames), tolerance_seconds=tolerance_seconds) as served:
        await check_all(served.dataset, truth)


async def test_no_tolerance_reaches_beyond_a_quarter_of_a_frame(library: Library) -> None:
    async with serve(shifted(library(episodes=(4,)), 0.26), tolerance_seconds=10.0) as served:
        with pytest.raises(FrameMissing, match=r"frame 0 is due at 0.008667 s .* shown at 0.000000 s"):
            await served.dataset.sample(0, 0)


async def test_a_clock_of_few_ticks_may_round_a_frames_time(library: Library) -> None:
    """Of an MP4 that counts milliseconds, of which a frame takes 33 or 34."""
    truth = library(episodes=(7,))
    content = in_memory(truth)
    for camera in (TOP, WRIST):
        with (
            av.open(io.BytesIO(content[video_path(camera)]), "r") as source,
            av.open(sink := io.BytesIO(), "w", format="mp4", options={"video_track_timescale": "1000"}) as target,
        ):
            stream = target.add_stream_from_template(source.streams.video[0])
            for packet in source.demux(video=0):
                if packet.size:
                    packet.stream = stream
                    target.mux(packet)
        content[video_path(camera)] = sink.getvalue()
    async with serve(content) as served:
        await check_all(served.dataset, truth)


async def test_a_window_over_missing_frames_is_refused(library: Library) -> None:
    truth = library(episodes=LENGTHS, quirks=Quirks(short_video_frames=2))
    async with serve(truth) as served:
        sample = await served.dataset.sample(3, 1, windows={TOP: frames(0, 1)})
        assert [read_identity(picture).frame for picture in sample[TOP]] == [1, 2]
        with pytest.raises(FrameMissing, match="no frame 3"):
            await served.dataset.sample(3, 1, windows={TOP: frames(0, 2)})


async def test_a_video_that_ends_before_its_episode_begins(library: Library) -> None:
    """All frames of the episode are missing: there is nothing to fetch, and nothing that a decoder would open."""
    truth = library(episodes=(6, 4))
    content = in_memory(truth)
    content[video_path(TOP)] = (library(episodes=(6,)).root / video_path(TOP)).read_bytes()
    async with serve(content) as served:
        check_sample(await served.dataset.sample(0, 5), truth, 0, 5)
        with pytest.raises(FrameMissing, match=rf"{TOP} of episode 1 in .*has 0 of 4 frames"):
            await served.dataset.sample(1, 0)


async def test_a_video_that_is_not_there_fails_its_episodes_alone(library: Library) -> None:
    truth = library(episodes=LENGTHS)
    content = in_memory(truth)
    del content[video_path(TOP)]
    async with serve(content) as served:
        for episode in (0, 2, 3):
            if episode == 0:
                with pytest.raises(NotFound, match=video_path(TOP)):
                    await served.dataset.sample(episode, 0)
            else:
                check_sample(await served.dataset.sample(episode, 0), truth, episode, 0)


async def test_damaged_coded_frames_name_camera_episode_and_file(library: Library) -> None:
    truth = library(episodes=(6,))
    content = in_memory(truth)
    path = video_path(TOP)
    start, stop = content[path].index(b"mdat") + 4, content[path].index(b"moov") - 4
    content[path] = content[path][:start] + bytes(stop - start) + content[path][stop:]
    async with serve(content) as served:
        with pytest.raises(DecodeError, match=rf"{TOP} of episode 0 in .*{path}"):
            await served.dataset.sample(0, 0)


def with_shape(truth: DatasetTruth, key: str, shape: list[int], *, tells: bool = True) -> dict[str, bytes]:
    """The dataset with another shape in its info.json, and without a block about its video unless it ``tells``."""
    content = in_memory(truth)
    info = json.loads(content["meta/info.json"])
    info["features"][key]["shape"] = shape
    if not tells:
        del info["features"][key]["info"]
    return content | {"meta/info.json": json.dumps(info).encode()}


OTHER_SHAPES = [[64, 128, 3], [96, 96, 3], [128, 96], [64, 128, 4]]


@pytest.mark.parametrize("shape", OTHER_SHAPES)
async def test_a_videos_own_size_counts_with_one_warning(library: Library, shape: list[int]) -> None:
    truth = library(episodes=LENGTHS, width=96, height=64)
    message = rf"{video_path(TOP)}: the pictures of {TOP} are 64 high and 96 wide; info.json says .*{shape[0]}, "
    async with serve(with_shape(truth, TOP, shape)) as served:
        with pytest.warns(RuntimeWarning, match=message) as warned:
            await check_all(served.dataset, truth)
        await check_all(served.dataset, truth)  # and none any more
        assert len(warned) == 1
        assert served.dataset.features[TOP].shape == (64, 96, 3)


@pytest.mark.parametrize("tells", [True, False], ids=["info", "no info"])
@pytest.mark.parametrize("shape", OTHER_SHAPES)
def test_batches_have_the_videos_size(library: Library, tmp_path: Path, shape: list[int], tells: bool) -> None:
    """Also where nothing in info.json tells of it, and whatever memory was laid out by that."""
    truth = library(episodes=LENGTHS, width=96, height=64)
    stream = Stream(stored(with_shape(truth, TOP, shape, tells=tells), tmp_path / "set"), shuffle=False)

    def read() -> None:
        pictures = [picture for batch in StreamDataset(stream, batch_size=4) for picture in batch[TOP]]
        for picture, (episode, frame) in zip(pictures, sorted(all_frames(truth)), strict=True):
            assert read_identity(picture) == truth.identity(episode, frame, TOP)

    with closing(stream):
        with pytest.warns(RuntimeWarning) as warned:
            read()
        assert len(warned) == 1
        read()


@pytest.mark.parametrize("missing", ["keep", "pad"])
def test_a_mixture_has_the_videos_size(library: Library, tmp_path: Path, missing: Literal["keep", "pad"]) -> None:
    truth = library(episodes=LENGTHS, width=96, height=64)
    root = stored(with_shape(truth, TOP, [60, 96, 3]), tmp_path / "set")
    other = library(episodes=(9, 6), width=96, height=64, cameras=(WRIST,))
    mixture = Mixture([Stream(root), Stream(other.root)], [1, 1], missing=missing)
    with closing(mixture), pytest.warns(RuntimeWarning, match="60, 96, 3"):
        batches = list(StreamDataset(mixture, batch_size=3))
    for batch in batches:
        for member, episode, frame, picture in zip(
            *(batch[key].tolist() for key in ("dataset", "episode_index", "frame_index")),
            batch.get(TOP, ()),
            strict=False,
        ):
            assert picture.shape == (3, 64, 96)
            if not member:
                assert read_identity(picture) == truth.identity(episode, frame, TOP)


@pytest.mark.parametrize("shape", [[64, 96, 1], [64, 96, 4], [64, 96], [64, 128, 3]])
async def test_a_pictures_own_shape_counts_with_one_warning(library: Library, shape: list[int]) -> None:
    truth = library(episodes=(3,), extras=(SNAPSHOT,), width=96, height=64)
    async with serve(with_shape(truth, SNAPSHOT, shape)) as served:
        message = (
            rf"file-000.parquet: the pictures of {SNAPSHOT} are 64 high and 96 wide, of 3 channels; info.json says"
        )
        with pytest.warns(RuntimeWarning, match=message) as warned:
            pictures = [(await served.dataset.sample(0, frame))[SNAPSHOT] for frame in range(3)]
        assert len(warned) == 1
    for frame, picture in enumerate(pictures):
        assert read_identity(picture) == truth.identity(0, frame, SNAPSHOT)


@pytest.mark.parametrize("key", [TOP, SNAPSHOT])
@pytest.mark.parametrize("shape", [[3, 64, 96], [96, 64, 3]])
async def test_the_axes_of_a_picture_may_be_in_any_order(library: Library, key: str, shape: list[int]) -> None:
    truth = library(episodes=(3,), extras=(SNAPSHOT,), width=96, height=64)
    async with serve(with_shape(truth, key, shape)) as served:
        assert (await served.dataset.sample(0, 1))[key].shape == (3, 64, 96)


REFRESHED = {
    "one after the other": "-g 15 -bf 0 -pix_fmt yuv420p -x264-params intra-refresh=1",
    "with B-frames": "-g 12 -bf 3 -pix_fmt yuv420p -x264-params intra-refresh=1",
    "seldom": "-g 250 -pix_fmt yuv420p -x264-params intra-refresh=1",
}


@pytest.mark.parametrize("decoder", ["torchcodec", "pyav"])
@pytest.mark.parametrize("options", REFRESHED.values(), ids=list(REFRESHED))
async def test_video_with_intra_refresh_is_decoded_from_where_it_can(
    library: Library, tmp_path: Path, options: str, decoder: Literal["torchcodec", "pyav"]
) -> None:
    truth = library(episodes=(20, 9, 1, 22, 8), cameras=(TOP,), episodes_per_video_file=5)
    root = await refreshed(truth, tmp_path / "set", options)
    video = VideoDecoder(str(root / video_path(TOP)))
    whole = video.get_frames_in_range(0, len(video)).data
    starts = np.cumsum((0, *truth.lengths))
    async with open_dataset(root, config=StreamConfig(decoder=decoder)) as dataset:
        for episode, frame in all_frames(truth):
            sample = await dataset.sample(episode, frame)
            assert torch.equal(sample[TOP], whole[starts[episode] + frame]), (episode, frame)


async def test_clips_with_intra_refresh_grow_no_more_than_they_must(library: Library, tmp_path: Path) -> None:
    """However many stretches find out at a time that their clips start too late."""
    truth = library(episodes=(20,) * 10, cameras=(TOP,), episodes_per_video_file=10)
    root = await refreshed(truth, tmp_path / "set", REFRESHED["one after the other"])
    longest = []
    for at_once in (1, 10):
        async with serve(content_of(root), first_byte_seconds=0.02, joins=False) as served:
            for start in range(0, 10, at_once):
                async with anyio.create_task_group() as group:
                    for episode in range(start, start + at_once):
                        group.start_soon(served.dataset.ready, episode)
            assert sum(bool(asked.start) for asked in served.requests(".mp4")) > 10  # it was found out
            reader = reader_of(served.dataset)
            longest.append(max([await reader.range_bytes(episode) for episode in range(10)]))
    assert longest[1] <= longest[0]


@pytest.mark.parametrize("decoder", ["torchcodec", "pyav"])
async def test_frames_before_a_refresh_ends_blame_it(
    library: Library, tmp_path: Path, decoder: Literal["torchcodec", "pyav"]
) -> None:
    """Of a file that begins with a recovery point, as a cut by stream copy leaves it."""
    truth = library(episodes=(60,), cameras=(TOP,))
    root = await refreshed(truth, tmp_path / "set", "-g 15 -bf 0 -x264-params intra-refresh=1")
    path = root / video_path(TOP)
    video = VideoDecoder(str(path))
    whole = video.get_frames_in_range(0, len(video)).data
    made = path.with_name("made.mp4")
    await anyio.run_process(["ffmpeg", "-v", "error", "-ss", "0.5", "-i", str(path), "-c", "copy", str(made)])
    made.rename(path)
    outcomes = []
    async with open_dataset(root, config=StreamConfig(decoder=decoder)) as dataset:
        for frame in range(45):
            try:
                sample = await dataset.sample(0, frame)
            except DecodeError as error:
                outcomes.append("recovery point (intra refresh)" not in str(error))
            else:
                assert torch.equal(sample[TOP], whole[15 + frame])
                outcomes.append(True)
    assert outcomes == sorted(outcomes)
    assert 0 < outcomes.index(True) < 15


async def test_feature_named_task_is_refused_unless_left_out(library: Library) -> None:
    content = in_memory(library(episodes=(3,)))
    info = json.loads(content["meta/info.json"])
    info["features"]["task"] = {"dtype": "string", "shape": [1], "names": None}
    content |= {"meta/info.json": json.dumps(info).encode()}
    async with serve(content) as served:
        with pytest.raises(FormatError, match=r"info\.json calls a feature 'task'.*features="):
            await served.dataset.sample(0, 0)
    async with serve(content, features=["action"]) as served:
        assert isinstance((await served.dataset.sample(0, 0))["task"], str)


async def test_a_table_that_contradicts_the_metadata(library: Library) -> None:
    truth = library(episodes=LENGTHS)
    content = in_memory(truth)
    path = "data/chunk-000/file-000.parquet"
    content[path] = in_memory(library(episodes=(6, 0, 4, 4)))[path]
    async with serve(content) as served:
        with pytest.raises(DatasetError, match=rf"{path}, episode 3: 4 rows .* its length is 5"):
            await served.dataset.sample(3, 0)


@pytest.mark.parametrize("group_rows", [None, 4, 1000], ids=["recorded", "mixed", "one"])
@pytest.mark.parametrize("per_file", [1, 3, 100])
@pytest.mark.parametrize("of", ["episode", "file"])
async def test_an_index_that_begins_anew_is_read_as_it_is(
    library: Library, tmp_path: Path, of: str, per_file: int, group_rows: int | None
) -> None:
    truth = library(episodes=(6, 0, 9, 3, 5, 4), episodes_per_data_file=per_file)
    starts = np.cumsum((0, *truth.lengths))
    begin = [0 if of == "episode" else starts[episode - episode % per_file] for episode in range(6)]
    async with open_dataset(restarting(truth, tmp_path / "set", of, group_rows)) as dataset:
        for episode, frame in all_frames(truth):
            sample = await dataset.sample(episode, frame, windows={"action": frames(-1, 1)})
            place = int(starts[episode]) + frame
            assert sample["index"] == (frame if of == "episode" else place - begin[episode])
            action = truth.column("action", episode)
            inside = np.clip([frame - 1, frame + 1], 0, truth.lengths[episode] - 1)
            np.testing.assert_array_equal(sample["action"], action[inside])
            check_sample({**sample, "index": torch.tensor(place), "action": action[frame]}, truth, episode, frame)
        batches = [batch async for batch in dataset.columns(["action", "frame_index"])]
        table = pa.Table.from_batches(batches)
        assert table["frame_index"].to_pylist() == [frame for length in truth.lengths for frame in range(length)]
        np.testing.assert_array_equal(
            table["action"].to_pylist(), np.concatenate([truth.column("action", episode) for episode in range(6)])
        )


def with_data_files(content: dict[str, bytes], name: Callable[[int], int]) -> dict[str, bytes]:
    """The same, the table of episodes naming another data file of each; two are in a chunk."""
    path = "meta/episodes/chunk-000/file-000.parquet"
    table = pq.read_table(pa.BufferReader(content[path]))
    columns = [table.column_names.index(f"data/{part}_index") for part in ("chunk", "file")]
    numbers = [name(2 * row["data/chunk_index"] + row["data/file_index"]) for row in table.to_pylist()]
    for column, values in zip(columns, zip(*(divmod(number, 2) for number in numbers), strict=True), strict=True):
        table = table.set_column(column, table.column_names[column], pa.array(values, pa.int64()))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return content | {path: sink.getvalue().to_pybytes()}


@pytest.mark.parametrize(
    "name",
    [lambda _: 0, lambda file: file + 1, lambda file: max(file - 1, 0), lambda file: 7 - file],
    ids=["the first", "the next", "the last one", "from behind"],
)
async def test_wrongly_named_data_files_are_found_with_one_warning(
    name: Callable[[int], int],
) -> None:
    content = content_of(DATA / "small_files")

    async def check(dataset: LeRobotDataset, right: LeRobotDataset) -> None:
        for episode, frame in ((one.index, frame) for one in right.episodes for frame in range(one.length)):
            sample, expected = await dataset.sample(episode, frame), await right.sample(episode, frame)
            assert all(np.array_equal(sample[key], value) for key, value in expected.items())
        rows, right_rows = [
            pa.Table.from_batches([batch async for batch in one.columns(["index", "action"])]).to_pydict()
            for one in (dataset, right)
        ]
        assert rows == right_rows

    async with serve(with_data_files(content, name)) as served, serve(content) as right:
        with pytest.warns(RuntimeWarning, match=r"parquet for the rows of episode \d, which are in .*") as warned:
            await check(served.dataset, right.dataset)
        assert len(warned) == 1


async def test_an_episode_whose_rows_no_file_has_is_refused_as_ever() -> None:
    content = content_of(DATA / "small_files")
    del content["data/chunk-001/file-001.parquet"]
    async with serve(content) as served:
        with pytest.raises(NotFound, match=r"data/chunk-001/file-001\.parquet"):
            await served.dataset.sample(3, 0)
        assert (await served.dataset.sample(4, 0))["episode_index"] == 4


@pytest.mark.parametrize("path", ["meta/info.json", "meta/tasks.parquet", "data/chunk-000/file-000.parquet"])
async def test_a_cut_off_file_is_named(library: Library, path: str) -> None:
    truth = library(episodes=LENGTHS)
    content = in_memory(truth)
    content[path] = content[path][:-50]
    with pytest.raises(FormatError, match=path):
        async with serve(content) as served:
            await served.dataset.sample(0, 0)


async def test_a_failed_request_names_url_and_status(library: Library) -> None:
    truth = library(episodes=LENGTHS)
    fault = FaultOnce(f"/{video_path(WRIST)}", Fault.status(403))
    async with serve(truth, fault=fault) as served:
        with pytest.raises(PermissionError, match=rf"{served.server.url}/{video_path(WRIST)}, .*status 403"):
            await served.dataset.sample(0, 0)
        check_sample(await served.dataset.sample(0, 0), truth, 0, 0)
