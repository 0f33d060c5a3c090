"""What a sample holds: keys, shapes, types, windows."""

from __future__ import annotations

import json
import struct
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torchcodec.decoders import VideoDecoder  # type: ignore[attr-defined]

from asyncfetch.decode.decoder import TorchcodecDecoder
from asyncfetch.errors import ConfigError, EpisodeNotFound, FormatError, FrameMissing
from asyncfetch.formats import Field
from asyncfetch.lerobot import frames, reader_of
from asyncfetch.lerobot.info import Feature
from asyncfetch.lerobot.samples import SampleBuilder
from asyncfetch.testing import read_identity
from tests.lerobot.serving import DEFAULTS, DEPTH, SNAPSHOT, TOP, WRIST, check_sample, in_memory, serve, video_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncfetch.testing import DatasetTruth
    from tests.lerobot.serving import Library

EXTRAS = ("next.done", "observation.note", "observation.grid", SNAPSHOT, DEPTH)
LENGTHS = (6, 4)
OFFSETS = (-1, 2, 0, 0, -9, 9)


@pytest.fixture(scope="module")
def truth(library: Library) -> DatasetTruth:
    return library(episodes=LENGTHS, extras=EXTRAS)


SINGLE = {
    TOP: ((3, 64, 96), torch.uint8),
    WRIST: ((3, 64, 96), torch.uint8),
    SNAPSHOT: ((3, 64, 96), torch.uint8),
    DEPTH: ((1, 64, 96), torch.float32),
    "observation.state": ((6,), torch.float32),
    "action": ((6,), torch.float32),
    "observation.grid": ((3, 4), torch.float32),
    "next.reward": ((), torch.float32),
    "next.done": ((), torch.bool),
    "timestamp": ((), torch.float32),
    "frame_index": ((), torch.int64),
    "episode_index": ((), torch.int64),
    "index": ((), torch.int64),
    "task_index": ((), torch.int64),
}


async def test_keys_shapes_and_types(truth: DatasetTruth) -> None:
    async with serve(truth) as served:
        sample = await served.dataset.sample(1, 2)
        assert set(sample) == {*SINGLE, "observation.note", "task"} == {*served.dataset.features, "task"}
    for key, (shape, dtype) in SINGLE.items():
        assert (tuple(sample[key].shape), sample[key].dtype) == (shape, dtype), key
    check_sample(sample, truth, 1, 2)
    assert sample["observation.note"] == truth.column("observation.note", 1)[2]
    assert sample["next.done"] == truth.column("next.done", 1)[2]
    np.testing.assert_array_equal(sample["observation.grid"], truth.column("observation.grid", 1)[2])


@pytest.mark.parametrize("offsets", [OFFSETS, (0,), (-1,)])
async def test_windows_have_a_time_axis_and_say_what_is_padding(truth: DatasetTruth, offsets: tuple[int, ...]) -> None:
    async with serve(truth) as served:
        windows = dict.fromkeys(SINGLE, frames(*offsets))
        sample = await served.dataset.sample(1, 3, windows=windows)
    padding = [not 0 <= 3 + offset < 4 for offset in offsets]
    for key, (shape, dtype) in SINGLE.items():
        assert (tuple(sample[key].shape), sample[key].dtype) == ((len(offsets), *shape), dtype), key
        is_pad = sample[f"{key}_is_pad"]
        assert is_pad.dtype == torch.bool
        assert is_pad.tolist() == padding


@pytest.mark.parametrize("frame", range(4))
async def test_windows_repeat_the_ends_of_the_episode(truth: DatasetTruth, frame: int) -> None:
    keys = [TOP, SNAPSHOT, "action", "next.reward", "observation.grid", "observation.note", "index"]
    async with serve(truth) as served:
        sample = await served.dataset.sample(1, frame, windows=dict.fromkeys(keys, frames(*OFFSETS)))
    places = [min(max(frame + offset, 0), 3) for offset in OFFSETS]
    for camera in (TOP, SNAPSHOT):
        assert [read_identity(picture) for picture in sample[camera]] == [
            truth.identity(1, place, camera) for place in places
        ]
    for key in ("action", "next.reward", "observation.grid", "index"):
        np.testing.assert_array_equal(sample[key], truth.column(key, 1)[places], err_msg=key)
    assert sample["observation.note"] == truth.column("observation.note", 1)[places].tolist()
    assert read_identity(sample[WRIST]) == truth.identity(1, frame, WRIST)
    assert {key for key in sample if key.endswith("_is_pad")} == {f"{key}_is_pad" for key in keys}


async def test_long_window_is_one_call_a_camera_and_one_decode_a_frame(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    cameras = (TOP, WRIST, "observation.images.left", "observation.images.right")
    truth = library(episodes=(100,), cameras=cameras, width=64, height=64)
    calls: list[Sequence[int]] = []
    decode = TorchcodecDecoder.frames

    def count(decoder: TorchcodecDecoder, asked: Sequence[int]) -> torch.Tensor:
        calls.append(asked)
        return decode(decoder, asked)

    monkeypatch.setattr(TorchcodecDecoder, "frames", count)
    decoded: list[int] = []
    get_frame_at, get_frames_in_range = VideoDecoder.get_frame_at, VideoDecoder.get_frames_in_range

    def get(decoder: VideoDecoder, rank: int) -> object:
        decoded.append(rank)
        return get_frame_at(decoder, rank)

    def get_range(decoder: VideoDecoder, start: int, stop: int) -> object:
        decoded.extend(range(start, stop))
        return get_frames_in_range(decoder, start, stop)

    monkeypatch.setattr(VideoDecoder, "get_frame_at", get)
    monkeypatch.setattr(VideoDecoder, "get_frames_in_range", get_range)
    async with serve(truth) as served:
        window = dict.fromkeys(cameras, frames(*range(-63, 1)))
        sample = await served.dataset.sample(0, 80, windows=window)
        assert [len(asked) for asked in calls] == [64] * len(cameras)
        assert len(decoded) == 64 * len(cameras)
        await served.dataset.sample(0, 20, windows=window)  # 43 places repeat its first frame
        assert len(decoded) == (64 + 21) * len(cameras)
    for camera in cameras:
        assert [read_identity(picture).frame for picture in sample[camera]] == list(range(17, 81))


async def test_windows_in_seconds(truth: DatasetTruth) -> None:
    async with serve(truth) as served:
        sample = await served.dataset.sample(0, 3, windows={TOP: [-0.1, 0.0], "action": [0.0, 1 / 30]})
    assert [read_identity(picture).frame for picture in sample[TOP]] == [0, 3]
    np.testing.assert_array_equal(sample["action"], truth.column("action", 0)[[3, 4]])


@pytest.mark.parametrize("windows", [{"task": [0.0]}, {"gripper": [0.0]}, {TOP: [0.01]}, {TOP: []}], ids=repr)
async def test_windows_that_do_not_fit_are_refused(truth: DatasetTruth, windows: dict[str, Any]) -> None:
    async with serve(truth) as served:
        served.server.reset()
        with pytest.raises(ConfigError, match="windows"):
            await served.dataset.sample(0, 0, windows=windows)
        assert served.requests() == []


async def test_float_images_lie_within_0_and_1(truth: DatasetTruth) -> None:
    async with serve(truth) as served:
        whole = await served.dataset.sample(1, 2, windows={WRIST: frames(0)})
    async with serve(truth, image_dtype="float32") as served:
        sample = await served.dataset.sample(1, 2, windows={WRIST: frames(0)})
    for key in (TOP, WRIST, SNAPSHOT):
        assert sample[key].dtype == torch.float32
        torch.testing.assert_close(sample[key], whole[key] / 255)
        assert read_identity(sample[key] if key != WRIST else sample[key][0]) == truth.identity(1, 2, key)
    assert torch.equal(sample[DEPTH], whole[DEPTH])


async def test_image_column_is_the_picture_exactly(truth: DatasetTruth) -> None:
    async with serve(truth) as served:
        picture = (await served.dataset.sample(0, 5))[SNAPSHOT]
    np.testing.assert_array_equal(picture.permute(1, 2, 0), truth.picture(0, 5, SNAPSHOT))


@pytest.mark.parametrize(("unit", "scale", "tolerance"), [("m", 1.0, 4e-6), ("mm", 1000.0, 0.504)])
async def test_depth(truth: DatasetTruth, unit: str, scale: float, tolerance: float) -> None:
    async with serve(truth, depth_unit=unit) as served:
        for episode, frame in ((0, 0), (0, 5), (1, 2)):
            depth = (await served.dataset.sample(episode, frame))[DEPTH]
            expected = truth.depth_metres(episode, frame) * scale
            np.testing.assert_allclose(depth[0], expected, rtol=0, atol=tolerance)
            assert unit == "m" or torch.equal(depth, depth.round())


async def test_depth_scale_that_makes_no_sense_names_the_camera(truth: DatasetTruth) -> None:
    content = in_memory(truth)
    content["meta/info.json"] = content["meta/info.json"].replace(b'"video.depth_max": 10.0', b'"video.depth_max": 0')
    with pytest.raises(FormatError, match=rf"{DEPTH}.*0\.01.*0\.0"):
        async with serve(content):
            pass


async def test_audio_is_skipped(truth: DatasetTruth) -> None:
    content = in_memory(truth)
    audio = b'"features": {"sound": {"dtype": "audio", "shape": [1], "names": null},'
    content["meta/info.json"] = content["meta/info.json"].replace(b'"features": {', audio, 1)
    async with serve(content) as served:
        sample = await served.dataset.sample(1, 1)
        assert "sound" not in served.dataset.features
        assert "sound" not in sample
        check_sample(sample, truth, 1, 1)
        with pytest.raises(ConfigError, match="sound"):
            await served.dataset.sample(1, 1, windows={"sound": [0.0]})


@pytest.mark.parametrize("frame", [-1, 6, 2**70])
async def test_a_frame_beyond_the_episode_is_missing(truth: DatasetTruth, frame: int) -> None:
    async with serve(truth) as served:
        with pytest.raises(FrameMissing, match=rf"episode 0 has frames \[0, 6\), not {frame}"):
            await served.dataset.sample(0, frame)


@pytest.mark.parametrize("frame", [1.0, "1", None])
async def test_a_frame_is_a_whole_number(truth: DatasetTruth, frame: Any) -> None:  # noqa: ANN401
    async with serve(truth) as served:
        with pytest.raises(ConfigError, match="whole number"):
            await served.dataset.sample(0, frame)


@pytest.mark.parametrize(("episode", "frame"), [(np.int64(1), np.uint8(3)), (torch.tensor(1), torch.tensor(3))])
async def test_numpy_and_torch_numbers_are_frames(truth: DatasetTruth, episode: Any, frame: Any) -> None:  # noqa: ANN401
    async with serve(truth) as served:
        check_sample(await served.dataset.sample(episode, frame), truth, 1, 3)


@pytest.mark.parametrize("episode", [2, -1, 1.0, None, "0", True])
async def test_an_unknown_episode_is_a_key_error(truth: DatasetTruth, episode: Any) -> None:  # noqa: ANN401
    async with serve(truth) as served:
        with pytest.raises(EpisodeNotFound, match=rf"no episode {episode!r}; it has 0 to 1"):
            await served.dataset.sample(episode, 0)
        with pytest.raises(KeyError):
            await served.dataset.ready(episode)
        with pytest.raises(KeyError):
            served.dataset.prefetch(episode)


async def test_samples_share_no_memory(truth: DatasetTruth) -> None:
    async with serve(truth) as served:
        first = await served.dataset.sample(0, 1, windows={"action": frames(0, 0)})
        for value in first.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
        check_sample(await served.dataset.sample(0, 1), truth, 0, 1)


@pytest.mark.parametrize("windows", [None, {"remarks": frames(0, 0)}], ids=["alone", "in a window"])
async def test_lists_are_the_receivers_own(truth: DatasetTruth, windows: dict[str, Any] | None) -> None:
    content = in_memory(truth)
    content["meta/info.json"] = content["meta/info.json"].replace(
        b'"features": {', b'"features": {"remarks": {"dtype": "language", "shape": [1], "names": null},', 1
    )
    for path in [path for path in content if path.startswith("data/")]:
        table = pq.read_table(pa.BufferReader(content[path]))
        remarks = pa.array([[{"role": "user", "content": f"remark {row}"}] for row in range(len(table))])
        written = pa.BufferOutputStream()
        pq.write_table(table.append_column("remarks", remarks), written)
        content[path] = written.getvalue().to_pybytes()
    said = [{"role": "user", "content": "remark 1"}]
    async with serve(content, features=["remarks"]) as served:
        for _ in range(2):
            given = (await served.dataset.sample(0, 1, windows=windows))["remarks"]
            assert given == ([said, said] if windows else said)
            first = given[0] if windows else given
            first[0]["content"] = "changed"
            first.append("mine")
            assert given[1:] == ([said] if windows else ["mine"])


@pytest.mark.parametrize(
    ("chosen", "fetched"),
    [
        (["action"], ()),
        ([WRIST], (WRIST,)),
        ([], ()),
    ],
    ids=repr,
)
async def test_features_that_are_not_chosen_are_not_fetched(
    truth: DatasetTruth, chosen: list[str], fetched: tuple[str, ...]
) -> None:
    async with serve(truth, features=chosen) as served:
        sample = await served.dataset.sample(1, 3)
        assert set(sample) == {*chosen, *DEFAULTS, "task"}
        assert {request.path.split("/")[2] for request in served.requests("/videos/")} == set(fetched)
        if TOP not in chosen:
            assert sum(request.bytes_sent for request in served.requests(TOP)) == 0


async def test_image_bytes_of_other_features_are_not_fetched(library: Library) -> None:
    """The pictures in the data file are most of it."""
    truth = library(episodes=(40,), extras=(SNAPSHOT,), cameras=(), width=256, height=256, texture=8.0)
    async with serve(truth, features=["action"]) as served:
        await served.dataset.sample(0, 3)
        size = (truth.root / "data/chunk-000/file-000.parquet").stat().st_size
        assert sum(request.bytes_sent for request in served.requests("/data/")) < size / 10


async def test_the_metadata(truth: DatasetTruth) -> None:
    async with serve(truth) as served:
        dataset = served.dataset
        assert (dataset.fps, dataset.num_episodes, dataset.num_frames) == (30, 2, 10)
        assert dataset.cameras == (DEPTH, TOP, WRIST)
        assert dataset.tasks == dict(enumerate(truth.tasks))
        assert dataset.stats is not None
        assert video_path(TOP) in dataset.episodes[0].videos[TOP].url


def of_gray(truth: DatasetTruth, *bits: int, is_depth: bool) -> dict[str, bytes]:
    """The dataset with gray pictures, whose numbers are those of their rows, in place of the snapshots.

    Of several numbers of bits the rows take turns.
    """
    content = in_memory(truth)
    info = json.loads(content["meta/info.json"])
    old = info["features"].pop(SNAPSHOT)
    info["features"]["gray"] = old | {"shape": [2, 3, 1], "info": {"is_depth_map": is_depth}}
    content["meta/info.json"] = json.dumps(info).encode()
    for path in [path for path in content if path.startswith("data/")]:
        table = pq.read_table(pa.BufferReader(content[path]))
        cells = [{"bytes": gray_png(row, bits[row % len(bits)]), "path": None} for row in range(len(table))]
        stored = pa.array(cells, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
        written = pa.BufferOutputStream()
        pq.write_table(table.append_column("gray", stored), written)
        content[path] = written.getvalue().to_pybytes()
    return content


def gray_png(value: int, bits: int) -> bytes:
    """2 x 3 pixels of this value."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    row = b"\0" + 3 * value.to_bytes(bits // 8, "big")
    header = struct.pack(">IIBBBBB", 3, 2, bits, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(2 * row)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("image_dtype", ["uint8", "float32"])
@pytest.mark.parametrize("is_depth", [False, True])
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("windows", [None, {"gray": frames(0, 0)}], ids=["alone", "in a window"])
async def test_gray_pictures_follow_the_layout_or_are_refused_by_name(
    truth: DatasetTruth, bits: int, is_depth: bool, image_dtype: str, windows: dict[str, Any] | None
) -> None:
    async with serve(of_gray(truth, bits, is_depth=is_depth), features=["gray"], image_dtype=image_dtype) as served:
        dataset = served.dataset
        if bits == 16 and not is_depth and image_dtype == "uint8":
            with pytest.raises(FormatError, match=r"gray of episode 0 .* frame 5: .* 16 bits .* image_dtype=\"float32"):
                await dataset.sample(0, 5, windows=windows)
            return
        sample = await dataset.sample(0, 5, windows=windows)
        field = reader_of(dataset).sample_builder(windows).layout()["gray"]
        given = sample["gray"]
        assert Field(str(given.dtype).removeprefix("torch."), tuple(given.shape)) == field
        scale = 1 if is_depth or image_dtype == "uint8" else 2**bits - 1
        assert given.flatten().tolist() == pytest.approx([5 / scale] * given.numel())


@pytest.mark.parametrize(("is_depth", "scales"), [(False, (255, 65535)), (True, (1, 1))])
async def test_window_over_pictures_of_8_and_16_bits_has_each_as_alone(
    truth: DatasetTruth, is_depth: bool, scales: tuple[int, int]
) -> None:
    content = of_gray(truth, 8, 16, is_depth=is_depth)
    async with serve(content, features=["gray"], image_dtype="float32") as served:
        alone = [(await served.dataset.sample(0, frame))["gray"] for frame in (4, 5)]
        window = (await served.dataset.sample(0, 4, windows={"gray": frames(0, 1)}))["gray"]
    assert window.dtype == torch.float32
    assert window.tolist() == [picture.tolist() for picture in alone]
    assert window.float().amax((1, 2, 3)).tolist() == pytest.approx([4 / scales[0], 5 / scales[1]])


def test_a_depth_map_in_a_table_is_laid_out_as_floats() -> None:
    features = {
        key: Feature(key, "image", (4, 6, 1), None, "image", {"is_depth_map": is_depth})
        for key, is_depth in (("depth", True), ("gray", False))
    }
    builder = SampleBuilder(features=features, tasks={}, windows={}, image_dtype="uint8", depth_unit="mm")
    assert [builder.layout()[key] for key in features] == [Field("float32", (1, 4, 6)), Field("uint8", (1, 4, 6))]


@pytest.mark.parametrize(
    ("shape", "names", "laid_out"),
    [
        ((6, 8, 3), None, (3, 6, 8)),
        ((3, 6, 8), None, (3, 6, 8)),
        ((1, 6, 8), {"axes": ["c", "h", "w"]}, (1, 6, 8)),
        ((3, 6, 8), ["c", "h", "w"], (3, 6, 8)),
        ((3, 6, 8), ["Channels", "height", "width"], (3, 6, 8)),
        ((6, 8, 3), ["height", "width", "rgb"], (3, 6, 8)),
        ((3, 8, 4), ["height", "width", "channel"], (4, 3, 8)),
        ((4, 6, 3), ["c", "h", "w"], (4, 6, 3)),
        ((1, 8, 3), [], (3, 1, 8)),  # as LeRobot writes them
        ((6, 8), ["height", "width"], (1, 6, 8)),
    ],
    ids=str,
)
def test_axes_of_pictures_are_known_by_names_or_else_by_sizes(
    shape: tuple[int, ...], names: object, laid_out: tuple[int, ...]
) -> None:
    camera = Feature("camera", "video", shape, names, "video", {})
    builder = SampleBuilder(features={"camera": camera}, tasks={}, windows={}, image_dtype="uint8", depth_unit="mm")
    assert builder.layout()["camera"] == Field("uint8", laid_out)
