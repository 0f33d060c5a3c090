"""A mixture of real datasets: whose samples come, in which order, going on anywhere, and what is refused."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import asyncfetch as af
from asyncfetch.errors import ConfigError, StateMismatch
from asyncfetch.order.state import beginning, identity_of, run_of
from asyncfetch.stream import Placement
from asyncfetch.stream.epoch_stream import source_of
from asyncfetch.testing import RangeServer, read_identity, write_dataset
from asyncfetch.torch import merge_states
from tests.lerobot.serving import renumbered
from tests.stream.conftest import FRONT, TOP

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from asyncfetch.testing import DatasetTruth, ServedRequest

Key = tuple[int, int, int]
WEIGHTS = [0.6, 0.3, 0.1]
SEVERAL_STREAMS = pytest.mark.slow
"""An example opens up to eight datasets."""
any_moment = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=12, deadline=None)


def member(source: str, **options: Any) -> af.Stream:  # noqa: ANN401
    return af.Stream(source, **{"config": af.StreamConfig(pool_segments=2, decode_threads=2), **options})


def mixture(truths: list[DatasetTruth], *, features: list[str] | None = None, **options: Any) -> af.Mixture:  # noqa: ANN401
    streams = [member(str(each.root), seed=seed, features=features) for seed, each in enumerate(truths)]
    return af.Mixture(streams, **{"weights": WEIGHTS, "stop_on": "all", **options})


def key(sample: dict[str, Any]) -> Key:
    return int(sample["dataset"]), int(sample["episode_index"]), int(sample["frame_index"])


def keys(samples: Iterable[dict[str, Any]]) -> list[Key]:
    return list(map(key, samples))


def saved(state: dict[str, Any], most: int = 1000) -> dict[str, Any]:
    copied: dict[str, Any] = json.loads(json.dumps(state))
    assert len(json.dumps(state)) < most
    return copied


@pytest.fixture
def mixed(truths: list[DatasetTruth]) -> Any:  # noqa: ANN401
    mixed = mixture(truths, features=[])
    yield mixed
    mixed.close()


@pytest.fixture
def other(truths: list[DatasetTruth]) -> Any:  # noqa: ANN401
    """The same in a process of another day."""
    mixed = mixture(truths, features=[])
    yield mixed
    mixed.close()


@pytest.fixture(scope="module")
def host(truths: list[DatasetTruth], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RangeServer]:
    """The datasets as /0, /1 and /2 of a web server."""
    root = tmp_path_factory.mktemp("host")
    for number, each in enumerate(truths):
        shutil.copytree(each.root, root / str(number))
    with RangeServer(root) as server:
        yield server


def test_members_give_their_epochs_in_turns_over_the_network(truths: list[DatasetTruth], host: RangeServer) -> None:
    """Pictures and all: every frame is the right one, and each member gives as often whatever it has, but for once."""
    config = af.StreamConfig(pool_segments=2, fetch=af.FetchConfig(ca_file=str(host.ca_file)))
    streams = [member(f"{host.url}/{number}", seed=number, config=config) for number in range(3)]
    mixed = af.Mixture(streams, WEIGHTS, stop_on="all", seed=5)
    seen: list[Key] = []
    for _ in range(2):
        for sample in mixed:
            number, episode, frame = key(sample)
            seen.append((number, episode, frame))
            for camera in truths[number].cameras:
                assert read_identity(sample[camera]) == truths[number].identity(episode, frame, camera)
            assert {name for name in sample if name.startswith("observation.images")} == set(truths[number].cameras)
        for number, truth in enumerate(truths):
            given = Counter(each for each in seen if each[0] == number)
            epochs, more = divmod(given.total(), truth.num_frames)
            times = Counter({epochs + 1: more, epochs: truth.num_frames - more})
            assert Counter(given.values()) == +Counter({each: times[each] for each in times if each})
    mixed.close()
    counts = [sum(each[0] == number for each in seen) / len(seen) for number in range(3)]
    assert counts == pytest.approx(WEIGHTS, abs=0.03)


@SEVERAL_STREAMS
@any_moment
@given(taken=st.integers(0, 130), again=st.integers(0, 60), epoch=st.integers(0, 2))
def test_mixture_goes_on_in_the_same_order(
    mixed: af.Mixture, other: af.Mixture, taken: int, again: int, epoch: int
) -> None:
    mixed.set_epoch(epoch)
    whole = keys(mixed)
    mixed.set_epoch(epoch)
    first = keys(itertools.islice(iter(mixed), taken))
    other.load_state_dict(saved(mixed.state_dict()))
    second = keys(itertools.islice(iter(other), again))
    mixed.load_state_dict(saved(other.state_dict()))
    assert (first + second + keys(mixed))[: len(whole)] == whole


@SEVERAL_STREAMS
@any_moment
@given(data=st.data())
async def test_consumers_share_it_and_others_go_on(truths: list[DatasetTruth], data: st.DataObject) -> None:
    """However many ranks, and however far each: all of it comes exactly once.

    Each asks for the same epoch: behind one that was delivered to its last sample, the next would begin by itself.
    """
    stop_on = data.draw(st.sampled_from(["first", "all", 57]))
    block = data.draw(st.sampled_from([None, 4]))

    def make() -> af.Mixture:
        return mixture(truths, features=[], stop_on=stop_on, block_samples=block)

    async with make().samples() as samples:
        whole = [key(sample) async for sample in samples]
    given: list[Key] = []
    state = None
    for world_size in data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)):
        states = []
        for rank in range(world_size):
            mixed = make()
            if state is not None:
                mixed.load_state_dict(state)
            async with mixed.samples(epoch=0, rank=rank, world_size=world_size) as samples:
                for _ in range(data.draw(st.integers(0, 1 + len(whole) // world_size))):
                    sample = await anext(samples, None)
                    if sample is not None:
                        given.append(key(sample))
                states.append(samples.state_dict())
        state = saved(merge_states(states), 4000)  # what slow ranks lack, which is anywhere, is told one by one
    mixed = make()
    mixed.load_state_dict(state or {})
    async with mixed.samples(epoch=0) as samples:
        given += [key(sample) async for sample in samples]
    assert sorted(given) == sorted(whole)


def test_padding_key_does_not_replace_a_feature(truths: list[DatasetTruth], tmp_path: Path) -> None:
    shutil.copytree(truths[0].root, root := tmp_path / "renamed")
    for path in (root / "data").rglob("*.parquet"):
        table = pq.read_table(path).rename_columns({"action": "is_padding"})
        pq.write_table(table.replace_schema_metadata(None), path)
    info = root / "meta/info.json"
    info.write_text(info.read_text().replace('"action"', '"is_padding"'))
    config = af.StreamConfig(uneven_ends="pad")
    of_one = member(str(root), features=["is_padding"], config=config)
    renamed = {number: {"action": "is_padding"} for number in range(3)}
    of_many = mixture(truths, features=["action"], keys=renamed, config=config)
    for source in (of_one, of_many):
        with pytest.raises(ConfigError, match=r"that is the name of a feature.*features="):
            next(iter(source))
        source.close()
    assert len(list(member(str(root), features=["is_padding"]))) == truths[0].num_frames


@pytest.mark.parametrize("ends", ["drop", "pad"])
def test_ranks_of_a_mixture_are_even_where_asked(truths: list[DatasetTruth], ends: str) -> None:
    """Where members share a batch, and where blocks of them end inside of a rank's part; gone on with by two ranks."""
    total, world_size = 50, 4
    config = af.StreamConfig(uneven_ends=ends)  # type: ignore[arg-type]
    for block in (1, 4):
        mixed = mixture(truths, features=[], stop_on=total, block_samples=block, config=config)
        whole = keys(source_of(mixed).iterate(Placement(), epoch=0))
        ranks = [list(source_of(mixed).iterate(Placement(rank, world_size), epoch=0)) for rank in range(world_size)]
        counts = [len(rank) for rank in ranks]
        assert counts == {"drop": [12] * 4, "pad": [13] * 4}[ends]
        assert counts == [source_of(mixed).count(Placement(rank, world_size)) for rank in range(world_size)]
        padding = [sample for rank in ranks for sample in rank if sample.get("is_padding", False)]
        assert len(padding) == (2 if ends == "pad" else 0)
        kept = [key(sample) for rank in ranks for sample in rank if not sample.get("is_padding", False)]
        assert len(kept) == min(total, sum(counts))
        assert Counter(kept) <= Counter(whole)
        given: list[Key] = []
        states = []
        for rank in range(world_size):
            samples = source_of(mixed).iterate(Placement(rank, world_size))
            given += keys(itertools.islice(samples, 5 + rank))
            states.append(samples.state_dict())
        for rank in range(2):
            mixed.load_state_dict(saved(merge_states(states)))
            given += keys(source_of(mixed).iterate(Placement(rank, 2), epoch=0))
        assert sorted(given) == sorted(whole)  # 24 were left, which two ranks share evenly
        mixed.close()


def test_states_of_other_mixtures_are_refused_with_both(truths: list[DatasetTruth], mixed: af.Mixture) -> None:
    next(iter(mixed))
    state = mixed.state_dict()
    for changed, why in (
        (
            mixture(truths, features=[], weights=[0.5, 0.3, 0.2]),
            "state's order is .*weights, stop_on, seed",
        ),
        (mixture(truths[::-1], features=[]), "state's dataset is .*the streams and, of each of them, source"),
        (mixture(truths, features=[], stop_on="first"), "state's order is .*weights, stop_on, seed"),
        (member(str(truths[0].root), features=[]), "this is the state of a mixture of 3 members, .* into a stream"),
    ):
        changed.load_state_dict(state)
        with pytest.raises(StateMismatch, match=why) as refused:
            next(iter(changed))
        run = run_of(identity_of(state))
        assert str(run["order"]) in str(refused.value) or run["dataset"] in str(refused.value)
        changed.close()
    itself = member(str(truths[0].root), features=[])
    next(iter(itself))
    mixed.load_state_dict(itself.state_dict())
    itself.close()
    with pytest.raises(StateMismatch, match=r"this is the state of a stream, .* into a mixture of 3 members"):
        next(iter(mixed))


def test_an_epoch_whose_episodes_have_names_beyond_64_bits(mixed: af.Mixture) -> None:
    mixed.set_epoch(10**9)
    assert len(list(itertools.islice(mixed, 3))) == 3


@pytest.mark.parametrize("place", [{"taken": [2**80] * 3}, {"block_samples": 2**70}, {"taken": [0]}, {"epoch": 7}])
def test_a_damaged_place_in_the_run_is_refused(mixed: af.Mixture, other: af.Mixture, place: dict[str, Any]) -> None:
    next(iter(mixed))
    state = mixed.state_dict()
    with pytest.raises(StateMismatch, match="order"):
        other.load_state_dict({**state, "order": {**state["order"], **place}})


def test_mixtures_state_at_an_epochs_beginning_is_not_a_streams(truths: list[DatasetTruth], mixed: af.Mixture) -> None:
    stream = member(str(truths[0].root), features=[])
    states = []
    for each in (stream, mixed):
        assert len(list(each)) > 1
        states.append(saved(each.state_dict()))
        assert "legs" not in states[-1]
    mixed.load_state_dict(states[0])
    with pytest.raises(StateMismatch, match=r"this is the state of a stream, .* into a mixture of 3 members"):
        next(iter(mixed))
    stream.load_state_dict(states[1])
    with pytest.raises(StateMismatch, match=r"this is the state of a mixture of 3 members, .* into a stream"):
        next(iter(stream))
    stream.close()


@pytest.mark.usefixtures("programs_are_warm")
def test_batches_of_a_process_beside_this_one_are_the_same(truths: list[DatasetTruth]) -> None:
    mixed = mixture(truths)
    batches = list(af.torch.StreamDataset(mixed, batch_size=4))
    mixed.close()
    served = mixture(truths)
    with af.serve_samples(served, batch_size=np.int64(4)) as handed_over:  # type: ignore[arg-type]
        given = list(itertools.islice(handed_over, 5))
        handed_over.load_state_dict(saved(handed_over.state_dict()))
        given += list(handed_over)
    served.close()
    assert len(given) == len(batches)
    for left, right in zip(given, batches, strict=True):
        assert left.keys() == right.keys()
        assert len(set(left["dataset"].tolist())) == 1
        assert all(torch.equal(left[name], right[name]) for name in left if isinstance(left[name], torch.Tensor))


@pytest.mark.usefixtures("programs_are_warm")
def test_rest_behind_a_part_of_a_batch_comes_in_whole_batches(truths: list[DatasetTruth]) -> None:
    """Of one member each, but for the last one of each; wherever it is read, and gone on with behind any of them."""
    mixed, taken = mixture(truths, block_samples=4), 6
    whole = keys(mixed)
    mixed.set_epoch(0)
    assert keys(itertools.islice(iter(mixed), taken)) == whole[:taken]
    state = mixed.state_dict()
    mixed.close()
    read_before: list[list[Key]] = []
    for read in (_read_here, _read_beside):
        later = mixture(truths, block_samples=4)
        later.load_state_dict(saved(state))
        batches = read(later)
        later.close()
        assert {len(batch) for batch in batches[: -len(truths)]} == {4}
        assert all(len({member for member, *_ in batch}) == 1 for batch in batches)
        assert sorted(whole[:taken] + list(itertools.chain(*batches))) == sorted(whole)
        assert batches == (read_before or batches)
        read_before = batches


def _read_here(mixed: af.Mixture) -> list[list[Key]]:
    """Stopped behind each batch, and gone on with."""
    batches: list[list[Key]] = []
    epoch = mixed.epoch
    while mixed.epoch == epoch:
        dataset = af.torch.StreamDataset(mixed, batch_size=4)
        batches.append(keys_of(next(iter(dataset))))
        mixed.load_state_dict(saved(dataset.state_dict()))
    return batches


def _read_beside(mixed: af.Mixture) -> list[list[Key]]:
    with af.serve_samples(mixed, batch_size=4) as handed_over:
        return [keys_of(batch) for batch in handed_over]


def keys_of(batch: dict[str, torch.Tensor]) -> list[Key]:
    names = ("dataset", "episode_index", "frame_index")
    return list(zip(*(batch[name].tolist() for name in names), strict=True))


def test_members_are_made_to_go_together(truths: list[DatasetTruth]) -> None:
    renamed = {0: None, 1: {FRONT: TOP}}
    padded = mixture(truths[:2], weights=[1, 1], keys=renamed, missing="pad", stop_on=2, block_samples=1)
    samples = {int(sample["dataset"]): sample for sample in padded}
    wrist = "observation.images.wrist"
    assert samples[0].keys() == samples[1].keys()
    assert not samples[0][f"{wrist}_is_missing"]
    assert samples[1][f"{wrist}_is_missing"]
    assert samples[1][wrist].shape == samples[0][wrist].shape
    assert samples[1][wrist].dtype == torch.uint8
    assert not samples[1][wrist].any()
    assert samples[1][TOP].shape == (3, 64, 96)
    stats = padded.stats[1] or {}
    assert TOP in stats
    assert FRONT not in stats
    assert stats["action"] == json.loads((truths[1].root / "meta/stats.json").read_text())["action"]
    padded.close()
    dropped = mixture(truths, missing="drop", stop_on=20)
    cameras = {name for sample in dropped for name in sample if name.startswith("observation.images")}
    assert not cameras
    dropped.close()


@pytest.mark.parametrize("largest", [7, 2**32, 2**63 - 2])
def test_members_have_episodes_of_any_numbers(truths: list[DatasetTruth], tmp_path: Path, largest: int) -> None:
    """Each is read and, where it is bad, listed by its own; two numbers that agree in 32 bits are two episodes."""
    root = renumbered(truths[1], tmp_path / "gaps", (0, None, largest))
    video = next(iter((root / "videos").rglob("file-000.mp4")))  # of its episodes 0 and 1
    streams = [member(str(truths[2].root), seed=1), member(str(root), seed=2)]
    mixed = af.Mixture(streams, [1, 1], stop_on="all", config=af.StreamConfig(on_error="skip"))
    found = list(mixed)
    assert {key(sample) for sample in found if sample["dataset"] == 1} == {
        (1, number, frame) for number, length in ((0, 4), (largest, 3)) for frame in range(length)
    }
    for sample in found:
        if sample["dataset"] == 1:
            own = 0 if sample["episode_index"] == 0 else 2
            assert read_identity(sample[FRONT]) == truths[1].identity(own, int(sample["frame_index"]), FRONT)
    mixed.close()
    video.unlink()
    mixed = af.Mixture(streams, [1, 1], stop_on="all", config=af.StreamConfig(on_error="skip"))
    assert {key(sample)[:2] for sample in mixed if sample["dataset"] == 1} == {(1, largest)}
    assert {(bad.member, bad.episode) for bad in mixed.quarantine.episodes()} == {(1, 0)}
    mixed.close()


def test_bad_data_of_a_member(truths: list[DatasetTruth], tmp_path: Path) -> None:
    """Left out, or replaced by samples of the same member, and listed with the member."""
    root = tmp_path / "broken"
    shutil.copytree(truths[1].root, root)
    shutil.rmtree(root / "videos")

    def make(on_error: str) -> af.Mixture:
        config = af.StreamConfig(on_error=on_error)  # type: ignore[arg-type]
        streams = [af.Stream(str(truths[0].root)), af.Stream(str(root))]
        return af.Mixture(streams, [2, 1], stop_on="all", config=config)

    skipping = make("skip")
    assert {member for member, *_ in keys(skipping)} == {0}
    assert {(bad.member, bad.episode) for bad in skipping.quarantine.episodes()} == {(1, 0), (1, 1), (1, 2)}
    skipping.close()
    replacing = make("replace")
    count = len(list(replacing))
    assert count == skipping.quarantine.samples + len(keys(make("skip")))
    replacing.close()


def test_a_hundred_members_share_one_engine(tmp_path: Path) -> None:
    """One loop thread, one bound, and pools of an episode each; every member gives what it has."""
    members = 100
    tiny = write_dataset(tmp_path / "0", episodes=(2,), cameras=[TOP], width=64, height=64)
    for number in range(1, members):
        shutil.copytree(tiny.root, tmp_path / str(number), copy_function=os.link)
    streams = [af.Stream(str(tmp_path / str(number)), seed=number) for number in range(members)]
    mixed = af.Mixture(streams, [1] * members, stop_on="all", config=af.StreamConfig(max_bytes=64 * 2**20))
    before = threading.active_count()
    seen = keys(mixed)
    assert sorted(set(seen)) == [(number, 0, frame) for number in range(members) for frame in (0, 1)]
    loops = [thread for thread in threading.enumerate() if thread.name == "asyncfetch stream"]
    assert len(loops) == 1
    assert threading.active_count() - before < 40
    statistics = mixed.statistics()
    assert statistics is not None
    assert statistics.clips.used_bytes <= statistics.clips.max_bytes < 64 * 2**20
    mixed.close()


def test_a_hundred_members_of_a_host_share_its_few_connections(tmp_path: Path) -> None:
    """By the system's count of both ends, again and again: as many as may be asked for at a time, and no more."""
    members, at_once = 100, 8
    tiny = write_dataset(tmp_path, episodes=(2,), cameras=[TOP], width=64, height=64)
    files = {
        path.relative_to(tiny.root).as_posix(): path.read_bytes() for path in tiny.root.rglob("*") if path.is_file()
    }
    content = {f"/{number}/{path}": data for number in range(members) for path, data in files.items()}
    process = psutil.Process()
    counts: list[tuple[int, int]] = []

    numbers = itertools.count()

    def count(_: ServedRequest) -> None:
        if next(numbers) % 16:
            return  # reading the system's tables takes longer than an answer
        open_sockets = [one for one in process.net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED]
        servers = sum(one.laddr.port == port for one in open_sockets)
        counts.append((servers, sum(bool(one.raddr) and one.raddr.port == port for one in open_sockets)))

    with RangeServer(content, fault=count) as server:
        port = urlsplit(server.url).port
        fetch = af.FetchConfig(ca_file=server.ca_file, max_requests_per_host=at_once, hedge=None)
        streams = [af.Stream(f"{server.url}/{number}", seed=number, features=[]) for number in range(members)]
        mixed = af.Mixture(streams, [1] * members, stop_on="all", config=af.StreamConfig(fetch=fetch))
        seen = keys(mixed)
        assert server.statistics().requests > 4 * members
        mixed.close()
    assert sorted(set(seen)) == [(number, 0, frame) for number in range(members) for frame in (0, 1)]
    assert len(counts) > members / 10
    assert max(servers for servers, _ in counts) == at_once
    assert max(clients for _, clients in counts) == at_once


def test_a_dataset_may_be_several_members(truths: list[DatasetTruth]) -> None:
    """Read in different ways, though much of it is the same bytes; each has its own sample of every frame."""
    root = str(truths[1].root)
    streams = [member(root, image_dtype="float32"), member(root, features=["action"]), member(root, seed=3)]
    mixed = af.Mixture(streams, [1, 1, 1], stop_on="all")
    samples = {key(sample): sample for sample in mixed}
    assert len(samples) == 3 * truths[1].num_frames
    for (number, episode, frame), sample in samples.items():
        assert torch.equal(sample["action"], samples[0, episode, frame]["action"])
        if number != 1:
            picture = sample[FRONT] if number == 2 else (sample[FRONT] * 255).round().to(torch.uint8)
            assert read_identity(picture) == truths[1].identity(episode, frame, FRONT)
    assert FRONT not in samples[1, 0, 0]
    mixed.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": [1, 1]}, "3 streams need 3 weights"),
        ({"weights": ["a", 1, 1]}, "a number for each stream"),
        ({"weights": 3}, "a number for each stream"),
        ({"weights": {1: [1, 1, 1]}}, "begin at step 0"),
        ({"weights": [(0, [1, 1, 1]), (0, [1, 1, 1])]}, "must ascend"),
        ({"weights": [1, -1, 1]}, "0 or more"),
        ({"weights": [0, 0, 0]}, "one of them above"),
        ({"weights": [1e308, 1e308, 0]}, "their sum finite"),
        ({"weights": [1, 1, float("nan")]}, "0 or more"),
        ({"weights": "123"}, "a number for each stream"),
        ({"weights": {0: "123"}}, "a number for each stream"),
        ({"stop_on": "last"}, "stop_on must be"),
        ({"stop_on": 0}, "stop_on must be"),
        ({"stop_on": 1.5}, "stop_on must be"),
        ({"stop_on": 2**63 - 1}, "stop_on must be"),
        ({"seed": 1.5}, "seed must be"),
        ({"transform": "crop"}, "transform must be"),
        ({"missing": "ignore"}, "missing must be"),
        ({"block_samples": 0}, "block_samples must be"),
        ({"block_samples": 2**63 - 1}, "block_samples must be"),
        ({"block_samples": "4"}, "block_samples must be"),
        ({"keys": 5}, "keys must be a mapping"),
        ({"keys": ["top", None, None]}, "a mapping or None for each"),
        ({"keys": {0: "top"}}, "a mapping or None for each"),
        ({"keys": [None]}, "3 streams need 3 mappings"),
        ({"keys": {3: {}}}, "no members .3."),
        ({"keys": {0: {"action": None}}}, "must be a string, .*features="),
        ({"keys": {0: {"action": ["a"]}}}, "must be a string"),
        ({"keys": {0: {1: "action"}}}, "must be a string"),
    ],
    ids=str,
)
def test_arguments_that_can_not_be_meant(truths: list[DatasetTruth], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mixture(truths, **options)


def test_errors_that_only_datasets_show_are_raised_at_opening(truths: list[DatasetTruth]) -> None:
    for options, message in (
        ({"missing": "raise"}, "members lack keys"),
        ({"missing": "pad"}, "can't tell the shape"),
        ({"keys": [{"nowhere": "top"}, None, None]}, "has no"),
        ({"weights": [1, 1, 0]}, "never come about"),
    ):
        mixed = mixture(truths, **options)
        with pytest.raises(ConfigError, match=message):
            next(iter(mixed))
        mixed.close()


async def test_members_and_their_configurations(truths: list[DatasetTruth]) -> None:
    root = str(truths[0].root)
    with pytest.raises(ConfigError, match="give Mixture"):
        af.Mixture([member(root), member(root, config=af.StreamConfig(max_bytes=2**28))], [1, 1])
    with pytest.raises(ConfigError, match="at least one stream"):
        af.Mixture([], [])
    async with af.open_dataset(root) as dataset:
        with pytest.raises(ConfigError, match=r"member 1 .* Stream of a URL"):
            af.Mixture([af.Stream(root), af.Stream(dataset)], [1, 1])
    shared = af.Mixture([af.Stream(root), member(root), af.Stream(root)], [6, 1, 3])
    assert [one.config.pool_segments for one in source_of(shared).members] == [38, 2, 19]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_state_of_a_member_is_refused_as_nobody_would_read_it(truths: list[DatasetTruth], moment: str) -> None:
    streams = [member(str(each.root), features=[]) for each in truths]
    if moment == "before":
        next(iter(streams[0]))
        streams[0].load_state_dict(saved(streams[0].state_dict()))
    mixed = af.Mixture(streams, WEIGHTS, stop_on="all")
    if moment == "after":
        streams[0].load_state_dict(beginning(3))
    with pytest.raises(ConfigError, match="loaded into member 0 of this mixture"):
        next(iter(mixed))
    mixed.close()
    for each in streams:
        each.close()
