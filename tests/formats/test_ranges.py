"""A format of a user's own: pictures on a web server, and records in one file, read as any other data is."""

from __future__ import annotations

import io
import itertools
import json
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader

import asyncfetch as af
from asyncfetch.errors import ConfigError, DecodeError, EpisodeNotFound, FormatError, StateMismatch, UsageError
from asyncfetch.formats.ranges import plan_ranges
from asyncfetch.stream import Placement
from asyncfetch.stream.epoch_stream import source_of
from asyncfetch.testing import Fault, RangeServer, write_dataset

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from asyncfetch.fetch import RangeReader
    from asyncfetch.stream.epoch_stream import EpochStream
    from asyncfetch.testing import ServedRequest

COUNT, SIDE = 23, 16
RECORD_BYTES = 100
Served = dict[str, bytes]


class Images(af.RangeFormat):
    """PNG images on a web server, which ``names.txt`` lists with their sizes."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def open(self, reader: RangeReader, fetcher: af.Fetcher) -> dict[str, int]:
        listed = bytes(await reader.fetch(f"{self.url}/names.txt")).decode()
        self.sizes = {f"{self.url}/{name}": int(size) for name, size in map(str.split, listed.splitlines())}
        return dict.fromkeys(self.sizes, 1)

    def ranges(self, entry: str, number: int) -> dict[str, af.ByteRange]:
        return {"png": af.ByteRange(entry, 0, self.sizes[entry])}

    def sample(self, entry: str, number: int, data: Mapping[str, bytearray]) -> dict[str, Any]:
        try:
            pixels = np.array(Image.open(io.BytesIO(data["png"])))
        except OSError as error:
            raise DecodeError(f"{entry}: {error}") from error
        name = entry.rpartition("/")[2]
        return {"image": torch.from_numpy(pixels).permute(2, 0, 1), "name": name}


@dataclass
class Records(af.RangeFormat):
    """Records of 100 bytes one after the other, in several files; a sample has its file's last byte, too."""

    url: str
    counts: tuple[int, ...] = (7, 0, 12)
    segment_samples: int = 4

    async def open(self, reader: RangeReader, fetcher: af.Fetcher) -> dict[str, int]:
        return {f"{self.url}/{number}.bin": count for number, count in enumerate(self.counts)}

    def ranges(self, entry: str, number: int) -> dict[str, af.ByteRange]:
        start = RECORD_BYTES * number
        record = af.ByteRange(entry, start, start + RECORD_BYTES)
        return {"record": record, "none": af.ByteRange(entry, 5, 5), "last": af.ByteRange(entry, -1, None)}

    def sample(self, entry: str, number: int, data: Mapping[str, bytearray]) -> dict[str, Any]:
        assert len(data["record"]) == RECORD_BYTES
        assert not data["none"]
        values = torch.frombuffer(data["record"], dtype=torch.uint8)
        return {"values": values, "last": data["last"][0], "at": (entry[-5], number)}


def png(number: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((SIDE, SIDE, 3), number, np.uint8)).save(file, "png")
    return file.getvalue()


def images() -> Served:
    files = {f"{number:02d}.png": png(number) for number in range(COUNT)}
    listed = "".join(f"{name} {len(data)}\n" for name, data in files.items())
    return {f"/images/{name}": data for name, data in files.items()} | {"/images/names.txt": listed.encode()}


def records(counts: tuple[int, ...] = (7, 0, 12)) -> Served:
    found = {}
    for file, count in enumerate(counts):
        rows = [np.full(RECORD_BYTES, 20 * file + number, np.uint8) for number in range(count)]
        found[f"/records/{file}.bin"] = b"".join(row.tobytes() for row in rows) + bytes([200 + file])
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[RangeServer]:
    with RangeServer(images() | records()) as server:
        yield server


def config_of(server: RangeServer, **settings: Any) -> af.StreamConfig:  # noqa: ANN401
    return af.StreamConfig(fetch=af.FetchConfig(ca_file=server.ca_file), pool_segments=4, decode_threads=2, **settings)


@pytest.fixture
def stream(server: RangeServer) -> Iterator[af.Stream]:
    stream = af.Stream(Images(f"{server.url}/images"), seed=3, config=config_of(server))
    yield stream
    stream.close()


def names(samples: Any) -> list[str]:  # noqa: ANN401
    return [sample["name"] for sample in samples]


ALL = [f"{number:02d}.png" for number in range(COUNT)]


# Samples.


def test_images_come_once_an_epoch_in_a_seeded_order(server: RangeServer, stream: af.Stream) -> None:
    first = list(stream)
    for sample in first:
        assert (sample["image"] == int(sample["name"][:2])).all()
        assert sample["image"].shape == (3, SIDE, SIDE)
    assert sorted(names(first)) == ALL
    second = names(stream)
    assert second != names(first)
    assert sorted(second) == ALL
    again = af.Stream(Images(f"{server.url}/images"), seed=3, config=config_of(server))
    assert names(again) == names(first)
    again.close()


def test_an_image_of_known_size_is_one_request() -> None:
    with RangeServer(images()) as server:
        stream = af.Stream(Images(f"{server.url}/images"), shuffle=False, config=config_of(server))
        assert names(stream) == ALL
        report = stream.report()
        stream.close()
        assert len(server.requests) <= 2 + COUNT  # of the names their size, too
    assert report.as_dict()["samples"] == COUNT
    assert report.verdict.binds


def test_records_of_a_segment_are_fetched_together() -> None:
    with RangeServer(records()) as server:
        stream = af.Stream(Records(f"{server.url}/records"), shuffle=False, config=config_of(server))
        samples = list(stream)
        stream.close()
        fetched = [request for request in server.requests if request.status == 206]
    assert [sample["at"] for sample in samples] == [*(("0", n) for n in range(7)), *(("2", n) for n in range(12))]
    for sample in samples:
        file, number = int(sample["at"][0]), sample["at"][1]
        assert (sample["values"] == 20 * file + number).all()
        assert sample["last"] == 200 + file
    assert len(fetched) < len(samples)


@given(st.lists(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3000), st.integers(0, 900)), max_size=3)))
def test_plan_has_every_range_once(asked: list[list[tuple[str, int, int]]]) -> None:
    objects = {url: np.random.default_rng(ord(url)).bytes(4000) for url in "ab"}
    ranges = [
        {str(key): af.ByteRange(url, start, start + size) for key, (url, start, size) in enumerate(each)}
        for each in asked
    ]
    plan = plan_ranges(ranges)
    held = {name: objects[span.url][span.start : span.stop] for name, span in plan.items()}
    for each, parts in zip(ranges, plan.beside, strict=True):
        assert each.keys() == parts.keys()
        for key, one in each.items():
            part = parts[key]
            assert held.get(part.name, b"")[part.start : part.stop] == objects[one.url][one.start : one.stop]
    for before, after in itertools.pairwise(plan.values()):
        assert before.url < after.url or before.stop < after.start


# Batches, workers, states, mixtures.


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_batches_are_the_same_with_workers(stream: af.Stream) -> None:
    dataset = af.torch.StreamDataset(stream, batch_size=4)
    stream.set_epoch(0)
    alone = list(DataLoader(dataset, batch_size=None))
    assert len(alone) == len(dataset) == 6
    assert alone[0]["image"].shape == (4, 3, SIDE, SIDE)
    stream.set_epoch(0)
    shared = list(DataLoader(dataset, batch_size=None, num_workers=2))
    assert [batch["name"] for batch in shared] == [batch["name"] for batch in alone]
    for one, other in zip(alone, shared, strict=True):
        assert torch.equal(one["image"], other["image"])


@pytest.mark.parametrize("counts", [(3, 5), (0, 1, 9)])
def test_a_pass_goes_on_at_other_ranks(stream: af.Stream, counts: tuple[int, ...]) -> None:
    taken, states = list[str](), []
    for rank, count in enumerate(counts):
        samples = source_of(stream).iterate(Placement(rank, len(counts)), epoch=0)
        taken += names(itertools.islice(samples, count))
        states.append(samples.state_dict())
        samples.close()
    state = json.loads(json.dumps(af.torch.merge_states(states)))
    for rank in range(2):
        stream.load_state_dict(state)
        taken += names(source_of(stream).iterate(Placement(rank, 2), epoch=0))
    assert sorted(taken) == ALL


def test_a_state_is_of_the_data_wherever_it_lies(server: RangeServer, stream: af.Stream) -> None:
    taken = names(itertools.islice(stream, 6))
    state = stream.state_dict()
    files = images()
    with RangeServer({name.replace("images", "moved"): data for name, data in files.items()}) as elsewhere:
        moved = af.Stream(Images(f"{elsewhere.url}/moved"), seed=3, config=config_of(elsewhere))
        moved.load_state_dict(state)
        assert sorted(taken + names(moved)) == ALL
        moved.close()
    fewer = af.Stream(Records(f"{server.url}/records"), seed=3, config=config_of(server))
    fewer.load_state_dict(state)
    with pytest.raises(StateMismatch):
        next(iter(fewer))
    fewer.close()


def test_a_mixture_has_it_beside_a_lerobot_dataset(server: RangeServer, stream: af.Stream, tmp_path: Path) -> None:
    write_dataset(tmp_path / "robot", episodes=(6, 5), width=64, height=64)
    other = af.Stream(str(tmp_path / "robot"))
    mixture: EpochStream = af.Mixture([stream, other], [2, 1], stop_on="all", config=config_of(server))
    samples = list(mixture)
    by_member = [[sample for sample in samples if int(sample["dataset"]) == member] for member in range(2)]
    assert set(names(by_member[0])) == set(ALL)
    assert {"task", "action"} <= by_member[1][0].keys()
    batches = list(af.torch.StreamDataset(mixture, batch_size=4))
    assert all(len(set(batch["dataset"].tolist())) == 1 for batch in batches)  # their keys differ
    mixture.close()
    with pytest.raises(ConfigError, match=r"member 0.*transform"):
        list(af.Mixture([stream, other], [1, 1], missing="pad", config=config_of(server)))


class Listed(Images):
    """Says what its samples are like."""

    def layout(self) -> dict[str, tuple[str, tuple[int, ...]]] | None:
        return {"image": ("uint8", (3, SIDE, SIDE)), "name": ("string", ())}


def test_samples_of_a_known_layout_are_written_into_batches(server: RangeServer, stream: af.Stream) -> None:
    listed = af.Stream(Listed(f"{server.url}/images"), seed=3, config=config_of(server))
    batches = list(af.torch.StreamDataset(listed, batch_size=4))
    stream.set_epoch(0)
    others = list(af.torch.StreamDataset(stream, batch_size=4))
    for one, other in zip(batches, others, strict=True):
        assert one["name"] == other["name"]
        assert torch.equal(one["image"], other["image"])
    mixture = af.Mixture([listed, listed], [1, 1], stop_on=32, config=config_of(server))
    mixed = list(af.torch.StreamDataset(mixture, batch_size=4))
    assert all(batch["dataset"].tolist() in ([0, 1, 0, 1], [1, 0, 1, 0]) for batch in mixed)
    mixture.close()
    listed.close()


# Errors.


@pytest.mark.parametrize("damage", [b"not a png", None])
def test_a_bad_image_is_an_error_or_is_left_out(damage: bytes | None) -> None:
    files = images()
    if damage is None:
        del files["/images/05.png"]
    else:
        files["/images/05.png"] = damage.ljust(len(files["/images/05.png"]))
    with RangeServer(files) as server:
        reading = Images(f"{server.url}/images")
        strict = af.Stream(reading, config=config_of(server))
        with pytest.raises(af.NotFound if damage is None else DecodeError, match=r"05\.png"):
            list(strict)
        strict.close()
        lenient = af.Stream(reading, config=config_of(server, on_error="skip"))
        assert sorted(names(lenient)) == [name for name in ALL if name != "05.png"]
        [bad] = lenient.quarantine.episodes()
        assert (bad.episode, bad.file, bad.samples) == (5, f"{server.url}/images/05.png", 1)
        lenient.close()
        filled = af.Stream(reading, config=config_of(server, on_error="replace"))
        assert len(list(filled)) == COUNT
        filled.close()


class Wrong(Images):
    """Has one mistake."""

    def __init__(self, url: str, mistake: str) -> None:
        super().__init__(url)
        self.mistake = mistake

    async def open(self, reader: RangeReader, fetcher: af.Fetcher) -> dict[str, int]:
        found = await super().open(reader, fetcher)
        wrong: dict[str, Any] = {"list": [*found], "count": found | {"other": -1}}
        given: dict[str, int] = wrong.get(self.mistake, found)
        return given

    def ranges(self, entry: str, number: int) -> dict[str, af.ByteRange]:
        if self.mistake == "raises":
            raise KeyError(entry)
        wrong: dict[str, Any] = {"bytes": (0, 10), "late": {"png": af.ByteRange(entry, 10_000, None)}}
        given: dict[str, af.ByteRange] = wrong.get(self.mistake) or super().ranges(entry, number)
        return given

    def layout(self) -> dict[str, tuple[str, tuple[int, ...]]] | None:
        wrong: dict[str, Any] = {"layout": ["image"], "keys": {"image": ("uint8", (3, SIDE, SIDE))}}
        wrong["shape"] = wrong["keys"] | {"name": ("int64", ())}
        given: dict[str, tuple[str, tuple[int, ...]]] | None = wrong.get(self.mistake)
        return given

    def sample(self, entry: str, number: int, data: Mapping[str, bytearray]) -> dict[str, Any]:
        wrong: dict[str, Any] = {"none": None}
        given: dict[str, Any] = wrong.get(self.mistake, super().sample(entry, number, data))
        return given


@pytest.mark.parametrize(
    ("mistake", "error", "message"),
    [
        ("list", ConfigError, r"Wrong\.open\(\) must give the number of samples by"),
        ("count", ConfigError, r"names and whole numbers from 0, not 'other': -1"),
        ("bytes", ConfigError, r"Wrong\.ranges\('http.*\.png', 0\) must give ByteRange by name"),
        ("raises", ConfigError, r"Wrong\.ranges\('http.*\.png', 0\) raised KeyError"),
        ("late", FormatError, r"png has \d+ bytes, and byte 10000 was asked for"),
        ("layout", ConfigError, r"Wrong\.layout\(\) must give dtype and shape by key, .*, not \['image'\]"),
        ("keys", UsageError, r"gave the keys \['image', 'name'\], and those of layout\(\) are \['image'\]"),
        ("shape", UsageError, r"gave 'name' as str \(\), and layout\(\) says int64 \(\)"),
        ("none", UsageError, r"Wrong\.sample\('http.*\.png', 0, \.\.\.\) must give a dict, not None"),
    ],
)
def test_a_mistake_is_an_error_that_says_what_to_give(
    server: RangeServer, mistake: str, error: type[Exception], message: str
) -> None:
    stream = af.Stream(Wrong(f"{server.url}/images", mistake), shuffle=False, config=config_of(server))
    with pytest.raises(error, match=message):
        list(stream)
    stream.close()


def test_attributes_of_other_types_are_refused_at_once(tmp_path: Path) -> None:
    path: Any = tmp_path
    with pytest.raises(ConfigError, match=r"Images\.url must be a string, not of type PosixPath: try str\(path\)"):
        af.Stream(Images(path))
    with pytest.raises(ConfigError, match=r"Records\.segment_samples must be a whole number from 1, not 0"):
        af.Stream(Records("records", segment_samples=0))


def test_entries_are_chosen_by_number(server: RangeServer) -> None:
    reading, config = Images(f"{server.url}/images"), config_of(server)
    some = af.Stream(reading, shuffle=False, episodes=[7, 2], config=config)
    assert names(some) == ["07.png", "02.png"]
    assert some.num_episodes == 2
    some.close()
    absent = af.Stream(reading, episodes=[COUNT], config=config)
    with pytest.raises(EpisodeNotFound, match=rf"has entries \[0, {COUNT}\), not {COUNT}"):
        list(absent)
    absent.close()
    with pytest.raises(ConfigError, match="windows is for other formats"):
        af.Stream(reading, windows={"image": [0.0]})


def test_pickled_stream_has_no_secret(server: RangeServer) -> None:
    reading = Images("https://user:hunter2@host/images")
    stream = af.Stream(reading, config=config_of(server))
    assert b"hunter2" not in pickle.dumps(stream)
    assert "hunter2" not in repr(stream)
    assert reading.url == "https://user:hunter2@host/images"


async def test_a_pass_that_is_cancelled_ends_at_once() -> None:
    asked = anyio.Event()

    def stall(request: ServedRequest) -> Fault | None:
        if not request.path.endswith("/02.png"):
            return None
        asked.set()
        return Fault.stall(0)

    async with RangeServer(images(), fault=stall) as server:
        stream = af.Stream(Images(f"{server.url}/images"), shuffle=False, config=config_of(server))
        taken: list[str] = []
        async with anyio.create_task_group() as group:

            async def read() -> None:
                async with stream.samples() as samples:
                    while True:
                        taken.append((await anext(samples))["name"])

            group.start_soon(read)
            await asked.wait()
            group.cancel_scope.cancel()
        assert taken == ALL[: len(taken)]
        assert len(taken) <= 2
