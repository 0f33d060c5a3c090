"""Beside LeRobot itself: run by .ci/peers, skipped where LeRobot isn't installed."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from anyio import run_process, to_thread
from torch.utils.data import DataLoader

from asyncfetch.config import FetchConfig, StreamConfig
from asyncfetch.errors import ConfigError, EpisodeNotFound, FrameMissing
from asyncfetch.merge import convert_dataset, merge_datasets, select_episodes, split_dataset
from asyncfetch.testing import HubServer, RangeServer
from tests.lerobot.serving import content_of, retime, shown_after, write_files
from tests.recorded import DATA

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

theirs = pytest.importorskip("lerobot.datasets.lerobot_dataset", exc_type=ImportError)
compat = pytest.importorskip("asyncfetch.compat.lerobot")
commands = pytest.importorskip("asyncfetch.compat.lerobot.commands")

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.may_block, pytest.mark.timeout(400)]
TOP, SNAPSHOT, DEPTH = "observation.images.top", "observation.images.snapshot", "observation.images.depth"
RECORDED = ("depth_img_m", "depth_img_mm", "depth_video_m", "small_files", "language")


os.environ |= {"HF_HUB_OFFLINE": "1"}


WINDOWS_OF_21 = {"action": [0.0, 5 / 30], TOP: [-2 / 30, 0.0]}


def record(root: Path, *, lengths: tuple[int, ...] = (7, 3, 12), vcodec: str = "h264", g: int = 2) -> Path:
    """A dataset that LeRobot's writer makes."""
    from lerobot.configs.video import RGBEncoderConfig

    features = {
        TOP: {"dtype": "video", "shape": (64, 96, 3), "names": ["height", "width", "channels"]},
        SNAPSHOT: {"dtype": "image", "shape": (32, 48, 3), "names": ["height", "width", "channels"]},
        "observation.state": {"dtype": "float32", "shape": (6,), "names": None},
        "observation.pose": {"dtype": "float64", "shape": (3,), "names": None},
        "action": {"dtype": "float32", "shape": (6,), "names": None},
        "count": {"dtype": "int16", "shape": (1,), "names": None},
        "done": {"dtype": "bool", "shape": (1,), "names": None},
    }
    dataset = theirs.LeRobotDataset.create(
        "a/b", fps=30, features=features, root=root, rgb_encoder=RGBEncoderConfig(vcodec=vcodec, g=g)
    )
    random = np.random.default_rng(0)
    for episode, length in enumerate(lengths):
        for frame in range(length):
            dataset.add_frame({
                TOP: random.integers(0, 255, (64, 96, 3), np.uint8),
                SNAPSHOT: random.integers(0, 255, (32, 48, 3), np.uint8),
                "observation.state": random.random(6, np.float32),
                "observation.pose": random.random(3),
                "action": random.random(6, np.float32),
                "count": np.array([frame], np.int16),
                "done": np.array([frame == length - 1]),
                "task": ("nimm die Tür", "拿起杯子 ☕")[episode % 2],
            })
        dataset.save_episode()
    dataset.finalize()
    return root


WRITTEN: dict[str, dict[str, Any]] = {
    "H.264": {},
    "H.264, long groups": {"g": 10},
    "HEVC": {"vcodec": "hevc"},
}
"""AV1 is in those that were recorded: where root encodes it, SVT-AV1 raises the process to a realtime priority."""


@pytest.fixture(scope="module", params=[*RECORDED, *WRITTEN, "deleted", "split", "merged"])
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name: str = request.param
    there = tmp_path_factory.mktemp("dataset")
    if name in RECORDED:
        return DATA / name
    if name in WRITTEN:
        return record(there / "set", **WRITTEN[name])
    from lerobot.datasets import dataset_tools as tools

    dataset = theirs.LeRobotDataset("a/b", root=record(there / "set"))
    if name == "deleted":
        return Path(tools.delete_episodes(dataset, [1], output_dir=there / "out", repo_id="a/c").root)
    if name == "split":
        return Path(tools.split_dataset(dataset, {"one": [0, 2], "two": [1]}, output_dir=there / "out")["one"].root)
    other = theirs.LeRobotDataset("a/d", root=record(there / "other", lengths=(3, 4)))
    return Path(tools.merge_datasets([dataset, other], "a/c", output_dir=there / "out").root)


def check_equal(ours: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Key by key, of the same types and to the last bit."""
    assert set(ours) == set(expected)
    for key, value in expected.items():
        given = ours[key]
        assert type(given) is type(value), key
        if isinstance(value, torch.Tensor):
            assert (given.dtype, given.shape) == (value.dtype, value.shape), key
            assert torch.equal(given, value), key
        else:
            assert given == value, key


def windows_of(meta: Any) -> dict[str, list[float]]:  # noqa: ANN401
    return (
        {"action": [-1 / 30, 0.0, 5 / 30], "observation.state": [0.0]}
        | {camera: [0.0] for camera in meta.camera_keys}
        | {camera: [-2 / 30, 0.0] for camera in meta.video_keys[:1]}
    )


@pytest.mark.parametrize(("return_uint8", "unit"), [(False, "mm"), (True, "m")])
@pytest.mark.parametrize(("has_windows", "segment_seconds"), [(False, 20.0), (True, 20.0), (True, 0.1)])
def test_samples_are_lerobots_to_the_last_bit(
    root: Path, return_uint8: bool, unit: str, has_windows: bool, segment_seconds: float
) -> None:
    options: dict[str, Any] = {"return_uint8": return_uint8, "depth_output_unit": unit}
    expected = theirs.LeRobotDataset("a/b", root=root, **options)
    if has_windows:
        options["delta_timestamps"] = windows_of(expected.meta)
    codecs = [(expected.meta.features[key].get("info") or {}).get("video.codec") for key in expected.meta.video_keys]
    backend = "pyav" if "hevc" in codecs else None  # by torchcodec, LeRobot fails at most seeks in it
    expected = theirs.LeRobotDataset("a/b", root=root, video_backend=backend, **options)
    options["config"] = StreamConfig(segment_seconds=segment_seconds)  # windows reach over the edges of short segments
    mapped = compat.LeRobotDataset("a/b", root=root, **options)
    assert len(mapped) == len(expected) == mapped.num_frames
    samples = [expected[index] for index in range(len(expected))]
    for index, sample in enumerate(samples):
        check_equal(mapped[index], sample)
    streamed = list(compat.StreamingLeRobotDataset("a/b", root=root, **options))
    for sample in streamed:
        check_equal(sample, samples[int(sample["index"])])
    assert sorted(int(sample["index"]) for sample in streamed) == list(range(len(expected)))
    for key, stats in (expected.meta.stats or {}).items():
        for name, values in stats.items():
            np.testing.assert_array_equal(mapped.meta.stats[key][name], values)
    mapped.close()


@pytest.mark.parametrize("seed", range(4))
def test_rows_at_times_of_their_own_have_lerobots_frames(tmp_path: Path, seed: int) -> None:
    """Of a variable rate, of dropped frames and of a clock a little off, beside rows that have no frame near enough."""
    from lerobot.datasets.video_utils import FrameTimestampError

    lengths, random = (7, 3, 12), np.random.default_rng(seed)
    content = content_of(record(tmp_path / "recorded", lengths=lengths))
    shown = shown_after(random.choice([512, 512, 512, 1024, 700, 300], size=sum(lengths) - 1).tolist())
    firsts = np.cumsum(lengths) - lengths
    starts = [shown[first] / 15360 for first in firsts]
    offs = random.choice([0, 0, 0, 0, 4e-5, -4e-5], size=sum(lengths))
    offs[random.integers(sum(lengths), size=3)] = 2e-3
    rows = [
        [shown[first + frame] / 15360 - start + offs[first + frame] for frame in range(length)]
        for first, start, length in zip(firsts.tolist(), starts, lengths, strict=True)
    ]
    retime(content, [TOP], shown, rows, starts)
    root = write_files(content, tmp_path / "retimed")
    for windows in (None, {TOP: [-0.1, 0.0, 2 / 30], "action": [0.0, 0.1]}):
        options: dict[str, Any] = {"return_uint8": True, "delta_timestamps": windows}
        expected = theirs.LeRobotDataset("a/b", root=root, video_backend="pyav", **options)
        mapped = compat.LeRobotDataset("a/b", root=root, **options)
        read = 0
        for index in range(sum(lengths)):
            try:
                sample = expected[index]
            except FrameTimestampError:
                with pytest.raises(FrameMissing):
                    mapped[index]
            else:
                check_equal(mapped[index], sample)
                read += 1
        assert 0 < read < sum(lengths)
        mapped.close()


def _declare(root: Path) -> None:
    path = root / "meta/info.json"
    info = json.loads(path.read_text())
    info["features"][TOP]["shape"] = [48, 64, 3]
    path.write_text(json.dumps(info))


def _count(root: Path) -> None:
    path = root / "meta/info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"total_tasks": 9}))


def _rename(root: Path) -> None:
    """What its own change of settings leaves behind, and more."""
    path = root / "meta/info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chunks_size": 1}))
    (path,) = (root / "meta/episodes").rglob("*.parquet")
    table = pq.read_table(path)
    for number, start in enumerate(range(0, len(table), 2)):
        pq.write_table(table.slice(start, 2), path.with_name(f"file-{number:03d}.parquet"))


def _retype(root: Path) -> None:
    for path in (*(root / "meta").rglob("*.parquet"), *(root / "data").rglob("*.parquet")):
        table = pq.read_table(path)
        for number, field in enumerate(table.schema):
            kind: Any = field.type
            if pa.types.is_string(kind):
                kind = pa.large_string()
            elif pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind):
                value = kind.value_type
                kind = pa.large_list(pa.large_string() if pa.types.is_string(value) else value)
            table = table.set_column(number, field.name, table[field.name].cast(kind))
        pq.write_table(table, path)


def _begin_index_anew(root: Path) -> None:
    (path,) = (root / "data").rglob("*.parquet")
    table = pq.read_table(path)
    number = table.column_names.index("index")
    pq.write_table(table.set_column(number, "index", table["frame_index"]), path)


def _turn(root: Path) -> None:
    for path in (root / "videos").rglob("*.mp4"):
        data = path.read_bytes()
        place = data.index(struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30), data.index(b"tkhd"))
        matrix = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)
        path.write_bytes(data[:place] + matrix + data[place + len(matrix) :])


@pytest.mark.parametrize("backend", ["torchcodec", "pyav"])
@pytest.mark.parametrize("change", [_declare, _count, _rename, _retype, _begin_index_anew, _turn])
@pytest.mark.filterwarnings("ignore:.*(pictures of|counts):RuntimeWarning")
def test_odd_datasets_are_read_as_lerobot_does(tmp_path: Path, change: Callable[[Path], None], backend: str) -> None:
    root = record(tmp_path / "set")
    change(root)
    expected = theirs.LeRobotDataset("a/b", root=root, video_backend=backend)
    mapped = compat.LeRobotDataset("a/b", root=root, video_backend=backend)
    assert len(mapped) == len(expected) == mapped.num_frames
    for index in range(len(expected)):
        check_equal(mapped[index], expected[index])
    mapped.close()


def test_chosen_episodes_are_numbered_as_lerobot_does(tmp_path: Path) -> None:
    root = record(tmp_path / "set")
    expected = theirs.LeRobotDataset("a/b", root=root, episodes=[2, 0])
    mapped = compat.LeRobotDataset("a/b", root=root, episodes=[2, 0])
    assert (len(mapped), mapped.num_frames, mapped.num_episodes) == (19, 19, 2)
    assert mapped.absolute_to_relative_idx == expected.absolute_to_relative_idx
    for index in range(len(expected)):
        check_equal(mapped[index], expected[index])
    streamed = compat.StreamingLeRobotDataset("a/b", root=root, episodes=[2, 0])
    assert streamed.num_frames == 19
    assert sorted(int(sample["index"]) for sample in streamed) == sorted(expected.absolute_to_relative_idx)
    mapped.close()


async def test_lerobot_opens_what_is_merged_selected_and_split(tmp_path: Path) -> None:
    one, two = record(tmp_path / "one"), record(tmp_path / "two", lengths=(3, 4))
    await merge_datasets([one, two], tmp_path / "merged")
    await select_episodes(one, tmp_path / "selected", [0, 2])
    await split_dataset(one, {"a": [0], "b": [1, 2]}, tmp_path / "split")
    for path, frames in (("merged", 29), ("selected", 19), ("split/a", 7), ("split/b", 15)):
        opened = theirs.LeRobotDataset("a/b", root=tmp_path / path)
        assert len(opened) == frames
        mapped = compat.LeRobotDataset("a/b", root=tmp_path / path)
        for index in range(frames):
            check_equal(mapped[index], opened[index])
        mapped.close()


async def test_a_dataset_in_a_bucket_is_streamed() -> None:
    expected = theirs.LeRobotDataset("a/b", root=DATA / "small_files")
    async with HubServer() as hub:
        files = (path for path in (DATA / "small_files").rglob("*") if path.is_file())
        hub.push("buckets/org/name", {str(path.relative_to(DATA / "small_files")): path.read_bytes() for path in files})
        config = StreamConfig(fetch=FetchConfig(ca_file=hub.ca_file, hub_endpoint=hub.url, trust_env=False))

        def check() -> None:
            streamed = compat.StreamingLeRobotDataset("org/name", repo_type="bucket", config=config)
            samples = list(streamed)
            for sample in samples:
                check_equal(sample, expected[int(sample["index"])])
            assert len(samples) == streamed.num_frames == len(expected)

        await to_thread.run_sync(check)
    with pytest.raises(ConfigError, match="root='/nowhere' isn't read where repo_type='bucket'"):
        compat.StreamingLeRobotDataset("org/name", "/nowhere", repo_type="bucket")
    with pytest.raises(ConfigError, match="'dataset' or 'bucket', not 'model'"):
        compat.StreamingLeRobotDataset("org/name", repo_type="model")


def files_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


READ_FROM_HUB = """
import json, sys
from asyncfetch.compat.lerobot import LeRobotDataset, StreamingLeRobotDataset
for name, options in json.loads(sys.argv[1]).items():
    dataset, mapped = StreamingLeRobotDataset(name, **options), LeRobotDataset(name, **options)
    indices = sorted(int(sample["index"]) for sample in dataset)
    assert int(mapped[-1]["index"]) == indices[-1]
    source = dataset._source.members[0].format.source
    print(name, indices == list(range(dataset.num_frames)), dataset.num_frames, source)
    mapped.close()
"""
"""Reads datasets by their names, in a process whose environment says where the Hub is."""


async def test_a_dataset_is_found_by_its_name(tmp_path: Path) -> None:
    home, whole = tmp_path / "lerobot", DATA / "small_files"
    old = record_version21(tmp_path / "v21", 7, 4)
    shutil.copytree(whole, home / "a/some")
    (home / "a/some/data/chunk-000/file-001.parquet").unlink()  # LeRobot has loaded the other episodes
    shutil.copytree(whole, home / "a/whole")
    shutil.copytree(old, home / "a/old-at-home")
    (tmp_path / "empty").mkdir()
    # The Hub's own client goes after a redirect to the same host, and misses there what the Hub said.
    async with HubServer(lfs_bytes=2**30) as hub:
        for name in ("some", "new", "empty"):
            hub.push(f"datasets/a/{name}", files_of(whole), "v3.0")
        hub.push("datasets/a/branch", files_of(whole), "for/training")
        for version in ("main", "v2.0", "v2.1"):
            hub.push("datasets/a/old", files_of(old), version)
        hub.push("datasets/a/oldest", files_of(as_version20(shutil.copytree(old, tmp_path / "v20"))), "v2.0")
        cases: dict[str, tuple[dict[str, str], int, str]] = {
            "a/new": ({}, 63, "hf://datasets/a/new@v3.0"),
            "a/some": ({}, 63, "hf://datasets/a/some@v3.0"),
            "a/whole": ({}, 63, str(home / "a/whole")),
            "a/empty": ({"root": str(tmp_path / "empty")}, 63, "hf://datasets/a/empty@v3.0"),
            "a/branch": ({"revision": "for/training"}, 63, "hf://datasets/a/branch@for%2Ftraining"),
            "a/old": ({}, 11, "hf://datasets/a/old@v2.1"),
            "a/oldest": ({}, 11, "hf://datasets/a/oldest@v2.0"),
            "a/old-at-home": ({}, 11, str(home / "a/old-at-home")),
        }
        asked = json.dumps({name: options for name, (options, _, _) in cases.items()})
        variables = os.environ | {"HF_HOME": str(tmp_path), "HF_LEROBOT_HOME": str(home), "HF_ENDPOINT": hub.url}
        variables |= {"SSL_CERT_FILE": str(hub.ca_file), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        ended = await run_process(
            [sys.executable, "-c", READ_FROM_HUB, asked], env=variables, check=False, stderr=subprocess.STDOUT
        )
    said = ended.stdout.decode()
    assert ended.returncode == 0, said
    for name, (_, frames, source) in cases.items():
        assert f"{name} True {frames} {source}\n" in said


@pytest.mark.parametrize("root", ["hf://datasets/a/b", "https://example.org/b"])
def test_a_revision_beside_a_url_is_refused(root: str) -> None:
    with pytest.raises(ConfigError, match=r"revision=.main. isn.t read where the dataset is at .*leave it out"):
        compat.StreamingLeRobotDataset("a/b", root, revision="main")


async def test_a_url_that_went_through_a_path_is_one(tmp_path: Path) -> None:
    async with RangeServer(DATA / "small_files", tls=False) as server:

        def check() -> None:
            mapped = compat.LeRobotDataset("a/b", Path(server.url), episodes=[1])
            assert int(mapped[0]["episode_index"]) == 1
            mapped.close()

        await to_thread.run_sync(check)


def record_version21(root: Path, *lengths: int) -> Path:
    """A dataset that LeRobot 0.3.3 writes."""
    python = Path(__file__).parents[2] / ".venv-peers-v21/bin/python"
    if not python.exists():
        pytest.skip("LeRobot 0.3.3 isn't installed: .ci/peers makes .venv-peers-v21")
    program = str(Path(__file__).with_name("write_v21.py"))
    command = [str(python), "-E", program, str(root), *map(str, lengths)]  # not the LeRobot that PYTHONPATH names
    subprocess.run(command, check=True, timeout=200)
    return root


async def test_version_21_is_read_as_what_lerobot_converts_it_to(tmp_path: Path) -> None:
    from lerobot.scripts import convert_dataset_v21_to_v30

    version21 = record_version21(tmp_path / "v21", 7, 4, 12)  # its converter fails at an episode of one frame
    shutil.copytree(version21, tmp_path / "set")
    convert_dataset_v21_to_v30.convert_dataset("a/b", root=tmp_path / "set", push_to_hub=False)
    expected = theirs.LeRobotDataset("a/b", root=tmp_path / "set", delta_timestamps=WINDOWS_OF_21)
    async with RangeServer(version21, tls=False) as server:

        def check() -> None:
            for root in (str(version21), server.url):
                mapped = compat.LeRobotDataset("a/b", root=root, delta_timestamps=WINDOWS_OF_21)
                streamed = list(compat.StreamingLeRobotDataset("a/b", root=root, delta_timestamps=WINDOWS_OF_21))
                assert len(mapped) == len(streamed) == len(expected) == 23
                for index, sample in enumerate(map(expected.__getitem__, range(23))):
                    check_equal(mapped[index], sample)
                for sample in streamed:
                    check_equal(sample, expected[int(sample["index"])])
                for key in ("length", "tasks", "dataset_from_index", "dataset_to_index"):
                    assert list(mapped.meta.episodes[key]) == list(expected.meta.episodes[key])
                assert mapped.meta.tasks.equals(expected.meta.tasks)
                for key, stats in expected.meta.stats.items():
                    for name, values in stats.items():
                        np.testing.assert_allclose(mapped.meta.stats[key][name], values, rtol=1e-6)
                mapped.close()

        await to_thread.run_sync(check)


def as_version20(root: Path) -> Path:
    """Have statistics of the whole, as v2.0 has, in place of those of each episode."""
    from lerobot.datasets.compute_stats import aggregate_stats
    from lerobot.datasets.io_utils import cast_stats_to_numpy, write_stats

    by_episode = root / "meta/episodes_stats.jsonl"
    lines = map(json.loads, by_episode.read_text().splitlines())
    write_stats(aggregate_stats([cast_stats_to_numpy(line["stats"]) for line in lines]), root)
    by_episode.unlink()
    info = root / "meta/info.json"
    info.write_text(info.read_text().replace('"v2.1"', '"v2.0"'))
    return root


def without_episode(root: Path, episode: int, total: int) -> Path:
    """Have one of so many episodes taken out, its statistics left."""
    for path in root.rglob(f"episode_{episode:06d}.*"):
        path.unlink()
    file = root / "meta/episodes.jsonl"
    lines = [line for line in file.read_text().splitlines() if json.loads(line)["episode_index"] != episode]
    file.write_text("".join(f"{line}\n" for line in lines))
    info = json.loads((root / "meta/info.json").read_text())
    frames = sum(json.loads(line)["length"] for line in lines)
    (root / "meta/info.json").write_text(json.dumps(info | {"total_episodes": total - 1, "total_frames": frames}))
    return root


@pytest.mark.parametrize("version", ["v2.0", "v2.1"])
async def test_trainer_reads_version_2_that_lacks_an_episode(
    version: str,
    tmp_path: Path,
    factory: Any,  # noqa: ANN401
) -> None:
    from lerobot.datasets.sampler import EpisodeAwareSampler

    root = without_episode(record_version21(tmp_path / "old", 7, 4, 12, 9), 1, 4)
    if version == "v2.0":
        as_version20(root)
    await convert_dataset(root, tmp_path / "converted")
    expected = theirs.LeRobotDataset("a/b", root=tmp_path / "converted", delta_timestamps=WINDOWS_OF_21)
    new_numbers, numbered = {0: 0, 2: 1, 3: 2}, {"index", "episode_index"}
    samples = {
        (int(one["episode_index"]), int(one["frame_index"])): one for one in map(expected.__getitem__, range(28))
    }

    def check_sample(sample: Mapping[str, Any]) -> tuple[int, int]:
        place = int(sample["episode_index"]), int(sample["frame_index"])
        wanted = samples[new_numbers[place[0]], place[1]]
        check_equal(*({key: one[key] for key in set(one) - numbered} for one in (sample, wanted)))
        return place

    def check() -> None:
        mapped = compat.LeRobotDataset("a/b", root=root, delta_timestamps=WINDOWS_OF_21)
        streamed = compat.StreamingLeRobotDataset("a/b", root=str(root), delta_timestamps=WINDOWS_OF_21)
        for dataset in (mapped, streamed):
            assert (len(dataset), dataset.num_frames, dataset.num_episodes) == (28, 28, 3)
        places = [(episode, frame) for episode, length in ((0, 7), (2, 12), (3, 9)) for frame in range(length)]
        assert sorted(map(check_sample, streamed)) == places
        starts, stops = (mapped.meta.episodes[f"dataset_{end}_index"] for end in ("from", "to"))
        sampler = EpisodeAwareSampler(
            starts, stops, mapped.episodes, absolute_to_relative_idx=mapped.absolute_to_relative_idx
        )
        assert [check_sample(mapped[index]) for index in sampler] == places
        some = compat.LeRobotDataset("a/b", root=root, episodes=[3], delta_timestamps=WINDOWS_OF_21)
        assert (len(some), some.num_frames, some.num_episodes) == (9, 9, 1)
        for key, stats in expected.meta.stats.items() if version == "v2.1" else ():
            for name in {"mean", "count"} - ({"mean"} if key in numbered else set()):
                np.testing.assert_allclose(mapped.meta.stats[key][name], stats[name], rtol=1e-6)
        for each in (mapped, some):
            each.close()
        commands.replace_datasets(factory)
        split = {"root": str(root), "eval_split": 0.4, "streaming": True}
        train, evaluation = factory.make_train_eval_datasets(config_of("act", **split))
        assert sorted([*train.episodes, *evaluation.episodes]) == [0, 2, 3]
        assert {int(sample["episode_index"]) for sample in train} == set(train.episodes)
        evaluation.close()
        if excludes_episodes():
            excluding = config_of("act", root=str(root), exclude_episodes=[0], streaming=True)
            train, _ = factory.make_train_eval_datasets(excluding)
            with pytest.raises(EpisodeNotFound, match="has no episode 1; it has 0 to 3"):  # LeRobot chose it
                next(iter(train))
            excluding.dataset.exclude_episodes = [0, 1]
            train, _ = factory.make_train_eval_datasets(excluding)
            assert {int(sample["episode_index"]) for sample in train} == {2, 3}

    await to_thread.run_sync(check)


async def test_lerobot_opens_what_is_converted(tmp_path: Path) -> None:
    version21 = record_version21(tmp_path / "v21", 7, 1, 12)
    await convert_dataset(version21, tmp_path / "converted")
    opened = theirs.LeRobotDataset("a/b", root=tmp_path / "converted")
    mapped = compat.LeRobotDataset("a/b", root=version21)
    assert len(opened) == 20
    for index in range(20):
        check_equal(mapped[index], opened[index])
    mapped.close()


def policy_of(name: str, **options: Any) -> Any:  # noqa: ANN401
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
    from lerobot.policies.pi05.configuration_pi05 import PI05Config
    from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig

    policies = {"act": ACTConfig, "diffusion": DiffusionConfig, "pi05": PI05Config, "smolvla": SmolVLAConfig}
    return policies[name](device="cpu", push_to_hub=False, **options)


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401
    """LeRobot's, whose datasets are replaced in a test that says so, and put back after it."""
    from lerobot.datasets import factory
    from lerobot.scripts import lerobot_train

    names = ("LeRobotDatasetMetadata", "LeRobotDataset", "StreamingLeRobotDataset", "make_dataset")
    for name in (*names, "make_train_eval_datasets"):
        monkeypatch.setattr(factory, name, getattr(factory, name))
    for name in ("make_train_eval_datasets", "save_checkpoint"):
        monkeypatch.setattr(lerobot_train, name, getattr(lerobot_train, name))
    return factory


def excludes_episodes() -> bool:
    from lerobot.configs.default import DatasetConfig

    return "exclude_episodes" in inspect.signature(DatasetConfig).parameters


def config_of(policy: str, **options: Any) -> Any:  # noqa: ANN401
    from lerobot.configs.default import DatasetConfig
    from lerobot.configs.train import TrainPipelineConfig

    config = TrainPipelineConfig(dataset=DatasetConfig("a/b", **options), seed=7)
    config.policy = policy_of(policy)
    return config


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("policy", ["act", "diffusion", "smolvla"])
async def test_trainers_first_100_batches_are_lerobots_map_styles(
    policy: str,
    workers: int,
    factory: Any,  # noqa: ANN401
) -> None:
    async with RangeServer(DATA / "small_files", first_byte_seconds=0.02, tls=False) as server:

        def check() -> None:
            expected = factory.make_dataset(config_of(policy, root=str(DATA / "small_files")))
            commands.replace_datasets(factory)
            dataset, _ = factory.make_train_eval_datasets(config_of(policy, root=server.url, streaming=True))
            assert isinstance(dataset, compat.StreamingLeRobotDataset)
            collate = torch.utils.data.default_collate
            spawn = "spawn" if workers else None
            loader = DataLoader(
                dataset,
                batch_size=5,
                num_workers=workers,
                multiprocessing_context=spawn,
                persistent_workers=workers > 0,
            )
            samples: dict[int, Any] = {}
            batches = 0
            while batches < 100:
                seen: list[int] = []
                for batch in loader:
                    indices = batch["index"].tolist()
                    for index in set(indices) - set(samples):
                        samples[index] = expected[index]
                    check_equal(batch, collate([samples[index] for index in indices]))
                    seen += indices
                    batches += 1
                assert sorted(seen) == list(range(dataset.num_frames))

        await to_thread.run_sync(check)


def check_split(split: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    """The same episodes and samples to train with and to evaluate with, as a stream or by index."""
    for ours, theirs in zip(split, expected, strict=True):
        if theirs is None:
            assert ours is None
            continue
        wanted = {int(sample["index"]): sample for sample in map(theirs.__getitem__, range(len(theirs)))}
        assert (ours.num_frames, ours.num_episodes) == (len(wanted), theirs.num_episodes)
        assert ours.delta_timestamps == theirs.delta_timestamps
        by_index = isinstance(ours, compat.LeRobotDataset)
        for sample in map(ours.__getitem__, range(len(ours))) if by_index else ours:
            check_equal(sample, wanted.pop(int(sample["index"])))
        assert not wanted
        if by_index:
            ours.close()


@pytest.mark.parametrize("streaming", [True, False])
async def test_episodes_are_held_out_as_lerobot_does(
    streaming: bool,
    factory: Any,  # noqa: ANN401
) -> None:
    async with RangeServer(DATA / "small_files", tls=False) as server:

        def check() -> None:
            local = {"root": str(DATA / "small_files"), "eval_split": 0.3, "episodes": [0, 1, 3, 4, 5]}
            expected = factory.make_train_eval_datasets(config_of("act", **local))
            commands.replace_datasets(factory)
            remote = local | {"root": server.url, "streaming": streaming}
            train, evaluation = factory.make_train_eval_datasets(config_of("act", **remote))
            assert isinstance(train, compat.StreamingLeRobotDataset if streaming else compat.LeRobotDataset)
            for ours, theirs in zip((train, evaluation), expected, strict=True):
                for key, stats in theirs.meta.stats.items():  # those of ImageNet for pictures
                    for name, values in stats.items():
                        np.testing.assert_array_equal(ours.meta.stats[key][name], values)
                assert sorted(ours.episodes) == sorted(theirs.episodes)
            check_split((train, evaluation), expected)

        await to_thread.run_sync(check)


@pytest.mark.parametrize("eval_split", [0.0, 0.3])
@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("episodes", [None, [6, 0, 1, 2, 4]])
def test_excluded_episodes_are_those_that_lerobot_excludes(
    episodes: list[int] | None,
    streaming: bool,
    eval_split: float,
    factory: Any,  # noqa: ANN401
) -> None:
    if not excludes_episodes():
        pytest.skip("this LeRobot has no exclude_episodes: its main branch has")
    options: dict[str, Any] = {"episodes": episodes, "exclude_episodes": [1, 6], "root": str(DATA / "small_files")}
    options |= {"eval_split": eval_split}
    expected = factory.make_train_eval_datasets(config_of("act", **options))
    commands.replace_datasets(factory)
    split = factory.make_train_eval_datasets(config_of("act", **options, streaming=streaming))
    assert not {1, 6} & set(split[0].episodes)
    check_split(split, expected)


MEMORY = {"use_visual_memory": True, "use_proprioceptive_memory": True, "memory_frames": 3, "memory_stride": 2}


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(("policy", "options"), [("diffusion", {}), ("pi05", {}), ("pi05", MEMORY)])
@pytest.mark.parametrize("renamed", [{}, {"observation.images.wrist": "wrist", TOP: "observation.image"}])
def test_windows_are_those_of_lerobots_policy_and_rename_map(
    policy: str,
    options: dict[str, Any],
    renamed: dict[str, str],
    streaming: bool,
    factory: Any,  # noqa: ANN401
) -> None:
    known = inspect.signature(type(policy_of(policy))).parameters
    if not set(options) <= set(known):
        pytest.skip("this LeRobot's pi05 has no memory: its main branch's has")

    def config(*, streaming: bool) -> Any:  # noqa: ANN401
        made = config_of(policy, root=str(DATA / "small_files"), streaming=streaming)
        made.policy, made.rename_map = policy_of(policy, **options), renamed
        return made

    expected = factory.make_train_eval_datasets(config(streaming=False))
    commands.replace_datasets(factory)
    check_split(factory.make_train_eval_datasets(config(streaming=streaming)), expected)
    windows = expected[0].delta_timestamps
    if options:
        assert windows[TOP] == windows["observation.state"] == [-4 / 30, -2 / 30, 0.0]
        assert ("observation.images.wrist" in windows) == (not renamed)


@pytest.mark.parametrize("name", ["LeRobotDataset", "StreamingLeRobotDataset"])
def test_arguments_are_lerobots_in_its_order(name: str) -> None:
    from lerobot.datasets import streaming_dataset

    module = theirs if name == "LeRobotDataset" else streaming_dataset
    expected = dict(inspect.signature(getattr(module, name)).parameters)
    for writing in ("batch_encoding_size", "encoder_threads", "streaming_encoding", "encoder_queue_maxsize"):
        expected.pop(writing, None)
    expected = {name: each for name, each in expected.items() if not name.endswith("_encoder")}
    ours = inspect.signature(getattr(compat, name)).parameters
    assert [(each.name, each.kind, each.default) for each in list(ours.values())[: len(expected)]] == [
        (each.name, each.kind, each.default) for each in expected.values()
    ]


def test_episodes_are_chosen_by_what_the_metadata_says_of_them() -> None:
    def is_long(episode: dict[str, Any]) -> bool:
        return bool(episode["length"] > 9)

    for episodes in (None, [0, 1, 2, 3]):
        options = {"root": DATA / "small_files", "episodes": episodes, "episode_filter": is_long}
        expected, ours = theirs.LeRobotDataset("a/b", **options), compat.LeRobotDataset("a/b", **options)
        assert list(ours.episodes) == expected.episodes
        assert (len(ours), ours.num_frames, ours.num_episodes) == (len(expected), len(expected), len(expected.episodes))
        check_equal(ours[3], expected[3])
        ours.close()
    with pytest.raises(ConfigError, match="episode_filter leaves no episode of a/b"):
        compat.LeRobotDataset("a/b", root=DATA / "small_files", episode_filter=lambda _: False)


@pytest.mark.parametrize("kind", ["LeRobotDataset", "StreamingLeRobotDataset"])
def test_an_episode_that_isnt_there_is_named_at_once(kind: str) -> None:
    with pytest.raises(EpisodeNotFound, match="a/b has no episode 99: its 8 count from 0"):
        getattr(compat, kind)("a/b", root=DATA / "small_files", episodes=[0, 99])


def brightened(picture: torch.Tensor) -> torch.Tensor:
    """A transform."""
    return 255 - picture if picture.dtype == torch.uint8 else 1 - picture


@pytest.mark.parametrize("name", ["small_files", "depth_img_mm", "depth_video_m"])
def test_transforms_are_applied_to_the_pictures_as_in_lerobot(name: str) -> None:
    options: dict[str, Any] = {"root": DATA / name, "image_transforms": brightened, "return_uint8": True}
    expected, mapped = theirs.LeRobotDataset("a/b", **options), compat.LeRobotDataset("a/b", **options)
    samples = [expected[index] for index in range(len(expected))]
    loader = DataLoader(compat.StreamingLeRobotDataset("a/b", **options), batch_size=None, num_workers=1)
    for sample in loader:
        check_equal(sample, samples[int(sample["index"])])
    check_equal(mapped[2], samples[2])
    for dataset in (expected, mapped):
        dataset.clear_image_transforms()
    check_equal(mapped[2], expected[2])
    with pytest.raises(ConfigError, match="image_transforms must be callable, or None, not 3"):
        mapped.set_image_transforms(3)
    mapped.close()


def test_accelerate_moves_batches_and_shares_out_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import Accelerator

    dataset = compat.StreamingLeRobotDataset("a/b", root=DATA / "small_files", return_uint8=True)
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(Accelerator, "device", torch.device("meta"))
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    loader = accelerator.prepare(DataLoader(dataset, batch_size=8))
    batches = list(loader)
    assert len(batches) == len(loader) == 8
    assert sum(len(batch["task"]) for batch in batches) == 63
    for batch in batches:
        tensors = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
        assert {value.device.type for value in tensors.values()} == {"meta"}
        assert batch[dataset.meta.video_keys[0]].dtype == torch.uint8
    assert loader.dataset is dataset
    kept = DataLoader(dataset, batch_size=8)
    assert accelerator.prepare_data_loader(kept, device_placement=False) is kept


def test_a_worker_reads_without_lerobot(tmp_path: Path) -> None:
    file = tmp_path / "dataset"
    dataset = compat.StreamingLeRobotDataset("a/b", root=DATA / "small_files", return_uint8=True)
    file.write_bytes(pickle.dumps(dataset))
    code = (
        "import pickle, sys; from pathlib import Path; dataset = pickle.loads(Path(sys.argv[1]).read_bytes()); "
        "assert len(list(dataset)) == 63; assert 'lerobot' not in sys.modules; "
        "assert pickle.loads(pickle.dumps(dataset)).fps == dataset.fps; assert dataset.meta.total_episodes == 8"
    )
    subprocess.run([sys.executable, "-c", code, str(file)], check=True, timeout=200)


def test_a_flag_that_means_nothing_here_is_refused_by_name(factory: Any) -> None:  # noqa: ANN401
    config = config_of("act", root=str(DATA / "small_files"), eval_split=0.3)
    config.max_eval_samples = 5
    commands.replace_datasets(factory)
    with pytest.raises(ConfigError, match="max_eval_samples isn't known here"):
        factory.make_train_eval_datasets(config)


def batches_of_ranks(
    world_size: int,
    loader: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    *,
    state: dict[str, Any] | None = None,
    steps: int = 0,
) -> list[list[list[int]]]:
    """What each rank's loader gives in so many steps, epoch after epoch, or in what is left of one; and of how many."""
    given = []
    for rank in range(world_size):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        dataset = compat.StreamingLeRobotDataset("a/b", root=DATA / "small_files")
        if state is not None:
            dataset.load_state_dict(state)
        batches = DataLoader(dataset, **loader)
        epochs = [[batch["index"].tolist() for batch in batches]]
        while sum(map(len, epochs)) <= steps:
            epochs.append([batch["index"].tolist() for batch in batches])
        begun = steps - sum(map(len, epochs[:-1]))
        given.append(epochs[-1][:begun] if steps else epochs[0])
    return given


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("steps", [3, 9])
@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 5), (3, 4)])
def test_a_run_of_two_ranks_goes_on_with_others(
    steps: int, workers: int, world_size: int, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = {"batch_size": 5, "num_workers": workers}
    before = batches_of_ranks(2, loader, monkeypatch, steps=steps)
    dataset = compat.StreamingLeRobotDataset("a/b", root=DATA / "small_files")
    state = json.loads(json.dumps(dataset.state_at(steps, **loader, world_size=2)))
    after = batches_of_ranks(world_size, {"batch_size": batch_size}, monkeypatch, state=state)
    frames = [index for ranks in (before, after) for rank in ranks for batch in rank for index in batch]
    assert state["epoch"] == (1 if steps == 9 else 0)
    assert len(set(frames)) == len(frames)
    assert 63 - len(frames) < world_size  # what isn't enough for all ranks is dropped


@pytest.mark.parametrize("workers", [0, 2])
def test_state_at_takes_no_longer_for_a_long_run(workers: int) -> None:
    dataset = compat.StreamingLeRobotDataset("a/b", root=DATA / "small_files")
    loader = {"batch_size": 5, "num_workers": workers, "world_size": 2}
    whole = -(-31 // 5) if not workers else -(-16 // 5) + -(-15 // 5)  # of 63 frames a rank has 31
    state, later = dataset.state_at(3, **loader), dataset.state_at(1_000_000 * whole + 3, **loader)
    assert (state.pop("epoch"), later.pop("epoch")) == (0, 1_000_000)
    assert state == later
    assert dataset.state_at(whole, **loader)["epoch"] == 1


TINY_ACT = [
    *("--policy.type=act", "--policy.device=cpu", "--policy.push_to_hub=false", "--dataset.repo_id=a/b"),
    *("--policy.dim_model=16", "--policy.n_heads=2", "--policy.dim_feedforward=16", "--policy.n_encoder_layers=1"),
    *("--policy.n_decoder_layers=1", "--policy.use_vae=false", "--policy.chunk_size=4", "--policy.n_action_steps=4"),
    "--policy.pretrained_backbone_weights=null",
]


@pytest.mark.parametrize("streaming", [True, False])
async def test_lerobot_train_runs_and_goes_on_over_https(tmp_path: Path, streaming: bool) -> None:
    out = tmp_path / "out"
    async with RangeServer(DATA / "small_files", first_byte_seconds=0.05) as server:

        async def train(*arguments: str) -> str:
            command = [sys.executable, "-m", "asyncfetch", "run", "lerobot-train", *arguments]
            variables = os.environ | {"OMP_NUM_THREADS": "1", "SSL_CERT_FILE": str(server.ca_file)}
            ended = await run_process(command, env=variables, check=False, stderr=subprocess.STDOUT)
            output = ended.stdout.decode()
            assert ended.returncode == 0, output
            assert "End of training" in output
            return output

        data = [f"--dataset.root={server.url}", "--batch_size=2", "--num_workers=1", f"--output_dir={out}"]
        data += ["--log_freq=1"]
        data += ["--dataset.streaming=true"] if streaming else ["--dataset.eval_split=0.3", "--eval_steps=1"]
        assert len(re.findall(r"step:\d .*loss:\d", await train(*TINY_ACT, *data, "--steps=2"))) == 2
        assert server.requests
        assert (out / "checkpoints/000002/pretrained_model/model.safetensors").exists()
        if not streaming:
            return
        resumed = [f"--config_path={out / 'checkpoints/000002/pretrained_model/train_config.json'}", "--resume=true"]
        assert len(re.findall(r"step:3 .*loss:\d", await train(*resumed, "--steps=3"))) == 1
        first, second = (
            json.loads((out / f"checkpoints/{step}/training_state/asyncfetch.json").read_text())
            for step in ("000002", "000003")
        )
        assert [state["total"] for state in (first, second)] == [63, 63]
        assert first["legs"] != second["legs"]


def train_in_ranks(directory: Path, ranks: int, *arguments: str, **variables: str) -> list[list[int]]:
    """What each rank of a run is given. The directory gets a file of each rank, and ``states``."""
    directory.mkdir()
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launch, str(Path(__file__).with_name("record_batches.py")), str(directory), *arguments]
    environ = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    ended = subprocess.run(
        command, env=environ, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert ended.returncode == 0, ended.stdout[-5000:]
    return [[int(index) for index in path.read_text().split()] for path in sorted(directory.glob("[0-9]*"))]


IN_RANKS = [f"--dataset.root={DATA / 'small_files'}", "--dataset.streaming=true", "--batch_size=4", "--log_freq=1"]
LAST_CONFIG = "checkpoints/000003/pretrained_model/train_config.json"


def has_parallelism() -> bool:
    from lerobot.configs.train import TrainPipelineConfig

    return "parallelism" in inspect.signature(TrainPipelineConfig).parameters


def test_checkpoint_of_two_processes_is_resumed_by_one_and_three(tmp_path: Path) -> None:
    begun = [*TINY_ACT, *IN_RANKS, "--num_workers=1", "--steps=3", f"--output_dir={tmp_path / 'first'}"]
    first = train_in_ranks(tmp_path / "seen-2", 2, *begun)
    assert [len(indices) for indices in first] == [12, 12]
    assert (tmp_path / "seen-2/states").read_text() == "0 3 2\n"  # one rank writes it, after 3 steps of 2 ranks
    for ranks, steps in ((1, 10), (3, 4)):  # the rest of the epoch
        again = tmp_path / f"again-{ranks}"
        shutil.copytree(tmp_path / "first", again, symlinks=True)
        resumed = [f"--config_path={again / LAST_CONFIG}", "--resume=true", "--num_workers=0", f"--steps={3 + steps}"]
        if has_parallelism():  # its checkpoint says how many ranks there were
            resumed.append(f"--parallelism.dp_replicate={ranks}")
        rest = train_in_ranks(tmp_path / f"seen-{ranks}", ranks, *resumed, "--save_checkpoint=false")
        assert len(rest) == ranks
        frames = [index for rank in (*first, *rest) for index in rank]
        assert len(set(frames)) == len(frames)
        assert 63 - len(frames) < ranks  # what isn't enough for all ranks is dropped


def test_a_run_that_shards_its_model_goes_on(tmp_path: Path) -> None:
    if not has_parallelism():
        pytest.skip("this LeRobot shards by accelerate's FSDP1, which needs GPUs: its main branch by FSDP2")
    sharded = ["--parallelism.dp_shard=2", '--accelerator.fsdp.wrap_modules=["ACTEncoderLayer"]']
    begun = [*TINY_ACT, *IN_RANKS, "--num_workers=0", "--checkpoint_format=dcp", "--steps=3"]
    first = train_in_ranks(
        tmp_path / "seen", 2, *begun, *sharded, f"--output_dir={tmp_path / 'out'}", SHARDS_ON_CPU="1"
    )
    resumed = [f"--config_path={tmp_path / 'out' / LAST_CONFIG}", "--resume=true", "--steps=6"]
    rest = train_in_ranks(tmp_path / "seen-again", 2, *resumed, SHARDS_ON_CPU="1")
    frames = [index for rank in (*first, *rest) for index in rank]
    assert len(set(frames)) == len(frames) == 48
    assert [(tmp_path / name / "states").read_text() for name in ("seen", "seen-again")] == ["0 3 2\n", "0 3 2\n"]


async def test_a_command_that_shows_pictures_reads_them_here(tmp_path: Path) -> None:
    from PIL import Image

    shutil.copytree(DATA / "small_files", tmp_path / "home/a/b")
    command = [sys.executable, "-m", "asyncfetch", "run", "lerobot-imgtransform-viz", "--repo_id=a/b"]
    await run_process(command, cwd=tmp_path, env=os.environ | {"HF_LEROBOT_HOME": str(tmp_path / "home")})
    first = theirs.LeRobotDataset("a/b", root=DATA / "small_files", return_uint8=True)[0]
    with Image.open(tmp_path / "outputs/image_transforms/b/original_frame.png") as picture:
        shown = np.asarray(picture).transpose(2, 0, 1)
    assert any(np.array_equal(shown, first[key]) for key in first if key.startswith("observation.images"))


@pytest.mark.parametrize("command", ["lerobot-fly", "lerobot-record", "lerobot-eval"])
def test_a_command_that_reads_no_dataset_is_refused_by_name(command: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{command}' is no command .*lerobot-train.* as it is"):
        compat.run(command, [])


@pytest.mark.parametrize("version", ["0.5.1", "0.6.0", "0.6.10", "0.7.0.dev0"])
def test_another_lerobot_is_refused_before_it_trains(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import lerobot

    monkeypatch.setattr(lerobot, "__version__", version)
    known = rf"of LeRobot 0\.6\.1, and of its main .*0\.6\.2.* LeRobot {version}, .*\"lerobot\[training\]==0\.6\.1\""
    with pytest.raises(ConfigError, match=known):
        compat.run("lerobot-train", [])


def saves_otherwise(checkpoint_dir: Path, step: int, config: object) -> None:
    """A later LeRobot's, say."""
    raise AssertionError(checkpoint_dir, step, config)


def test_a_trainer_that_works_otherwise_is_refused_by_name(factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN401
    from lerobot.scripts import lerobot_train

    with monkeypatch.context() as patch:
        patch.setattr(lerobot_train, "save_checkpoint", saves_otherwise)
        with pytest.raises(ConfigError, match=r"0\.6\.1, .* its save_checkpoint has no cfg: pip install"):
            compat.run("lerobot-train", [])
    for module, name in ((factory, "make_train_eval_datasets"), (lerobot_train, "save_checkpoint")):
        with monkeypatch.context() as patch:
            patch.delattr(module, name)
            with pytest.raises(ConfigError, match=rf"its {module.__name__} has no {name}: pip install"):
                compat.run("lerobot-train", [])
    assert factory.LeRobotDataset is theirs.LeRobotDataset
