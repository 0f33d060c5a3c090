"""A mixture in a DataLoader: batches of one member, the same for any number of workers, gone on with anywhere."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import asyncfetch as af
from asyncfetch.errors import ConfigError
from asyncfetch.stream import Placement
from asyncfetch.stream.epoch_stream import source_of
from asyncfetch.testing import write_dataset

if TYPE_CHECKING:
    from pathlib import Path

    from asyncfetch.testing import DatasetTruth

SIZE = 4
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning", "ignore:This DataLoader will create")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> DatasetTruth:
    root = tmp_path_factory.mktemp("data") / "wide"
    return write_dataset(root, episodes=(6, 9, 4), cameras=["observation.images.front"], width=96, height=64)


def make(truth: DatasetTruth, wide: DatasetTruth, **options: Any) -> af.torch.StreamDataset:  # noqa: ANN401
    streams = [af.Stream(str(truth.root), seed=1), af.Stream(str(wide.root), seed=2)]
    config = af.StreamConfig(pool_segments=8)
    mixed = af.Mixture(streams, [2, 1], config=config, **{"stop_on": "all", **options})
    return af.torch.StreamDataset(mixed, batch_size=SIZE)


def rows(batches: Any) -> list[list[tuple[int, int]]]:  # noqa: ANN401
    return [list(zip(batch["dataset"].tolist(), batch["index"].tolist(), strict=True)) for batch in batches]


def test_batches_are_of_one_member_and_the_same_with_workers(truth: DatasetTruth, wide: DatasetTruth) -> None:
    dataset = make(truth, wide)
    alone: list[list[tuple[int, int]]] = []
    for batch in dataset:
        alone += rows([batch])
        (member,) = set(batch["dataset"].tolist())
        for camera in (truth, wide)[member].cameras:
            assert isinstance(batch[camera], torch.Tensor)
    assert len(alone) == len(dataset)
    dataset.stream.close()
    fresh = make(truth, wide)
    loader = DataLoader(fresh, batch_size=None, num_workers=2)
    assert rows(loader) == alone
    taken = 3
    state = json.loads(json.dumps(make(truth, wide).state_after(taken, num_workers=2)))
    later = make(truth, wide)
    later.load_state_dict(state)
    assert rows(later) == alone[taken:]
    later.stream.close()


def with_marks(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"mark": torch.ones(2)}


@pytest.mark.parametrize("transforms", [(with_marks, None), (None, with_marks), (with_marks, with_marks), (None, None)])
def test_members_share_a_batch_where_they_share_a_transform(truth: DatasetTruth, transforms: tuple[Any, Any]) -> None:
    """Keys and shapes that a transform makes aren't known beforehand."""
    streams = [af.Stream(str(truth.root), features=["action"], transform=transform) for transform in transforms]
    mixed = af.Mixture(streams, [1, 1], stop_on=8 * SIZE)
    batches = list(af.torch.StreamDataset(mixed, batch_size=SIZE))
    mixed.close()
    assert sum(len(batch["dataset"]) for batch in batches) == 8 * SIZE
    for batch in batches:
        members = set(batch["dataset"].tolist())
        assert len(members) == (2 if transforms[0] is transforms[1] else 1)
        marked = any(transforms[member] for member in members)
        assert isinstance(batch.get("mark"), torch.Tensor) is marked


@dataclass
class Normalized:
    """Equal to another one by tensors."""

    mean: torch.Tensor

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return sample | {"action": sample["action"] - self.mean}


def test_members_have_transforms_that_can_not_be_compared(truth: DatasetTruth) -> None:
    streams = [af.Stream(str(truth.root), features=["action"], transform=Normalized(torch.ones(6))) for _ in range(2)]
    mixed = af.Mixture(streams, [1, 1], stop_on=4 * SIZE)
    assert len(list(mixed)) == 4 * SIZE
    for batch in af.torch.StreamDataset(mixed, batch_size=SIZE):
        assert len(set(batch["dataset"].tolist())) == 1
    mixed.close()
    one = Normalized(torch.ones(6))
    streams = [af.Stream(str(truth.root), features=["action"], transform=one.__call__) for _ in range(2)]
    mixed = af.Mixture(streams, [1, 1], stop_on=SIZE)
    (batch,) = af.torch.StreamDataset(mixed, batch_size=SIZE)
    assert len(set(batch["dataset"].tolist())) == 2
    mixed.close()


@pytest.mark.parametrize("number", [np.int64, np.uint8])
def test_sizes_of_numpy_are_as_good(truth: DatasetTruth, wide: DatasetTruth, number: Any) -> None:  # noqa: ANN401
    expected = make(truth, wide, block_samples=SIZE)
    numpys = af.torch.StreamDataset(make(truth, wide, block_samples=number(SIZE)).stream, number(SIZE))
    state = expected.state_after(3)
    assert json.loads(json.dumps(numpys.state_after(number(3), num_workers=number(0)))) == state
    batches = iter(numpys)
    given = rows(next(batches) for _ in range(3))
    assert json.loads(json.dumps(numpys.state_dict()))["order"] == state["order"]
    assert given + rows(batches) == rows(expected)
    for dataset in (expected, numpys):
        dataset.stream.close()


def test_members_that_agree_are_mixed_within_a_batch(truth: DatasetTruth) -> None:
    mixed = af.Mixture([af.Stream(str(truth.root), seed=seed) for seed in range(2)], [1, 1])
    dataset = af.torch.StreamDataset(mixed, batch_size=SIZE)
    for batch in dataset:
        assert abs(int(batch["dataset"].sum()) - len(batch["dataset"]) / 2) <= 1
    mixed.close()


def test_blocks_that_batches_do_not_fill_are_refused(
    truth: DatasetTruth, wide: DatasetTruth, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    message = "block_samples=12 isn't .* 8 samples .*batch_size=4, world_size=2.* give block_samples=16, or None"
    dataset = make(truth, wide, block_samples=12)
    for use in (lambda: next(iter(dataset)), lambda: len(dataset), lambda: dataset.state_after(0)):
        with pytest.raises(ConfigError, match=message):
            use()
    next(iter(dataset.stream))  # no batches are made
    dataset.stream.close()
    fitting = make(truth, wide, block_samples=16)
    next(iter(fitting))
    fitting.stream.close()


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_read_on_from_another_batch_size_as_one_does(
    truth: DatasetTruth, wide: DatasetTruth, persistent: bool
) -> None:
    dataset = make(truth, wide)
    begun = af.torch.StreamDataset(dataset.stream, SIZE - 1)
    next(iter(begun))
    state = json.loads(json.dumps(begun.state_dict()))
    dataset.load_state_dict(state)
    alone = [rows(dataset) for _ in range(3)]
    assert all(len({member for member, _ in batch}) == 1 for batch in alone[0])
    assert {len(batch) for batch in alone[0][:-2]} == {SIZE}
    dataset.load_state_dict(state)
    dataset.load_state_dict(json.loads(json.dumps(dataset.state_after(2, num_workers=2))))
    assert rows(dataset) == alone[0][2:]
    dataset.stream.close()
    fresh = make(truth, wide)
    fresh.load_state_dict(state)
    loader = DataLoader(fresh, batch_size=None, num_workers=2, persistent_workers=persistent)
    assert [rows(loader), rows(loader)] == alone[:2]
    fresh.load_state_dict(json.loads(json.dumps(fresh.state_after(0, num_workers=2))))
    assert rows(fresh) == alone[2]
    fresh.stream.close()


@pytest.mark.parametrize("served", [False, True], ids=["here", "beside"])
def test_batches_of_others_over_one_mixture_change_nothing(
    truth: DatasetTruth, wide: DatasetTruth, served: bool
) -> None:
    alone = rows(make(truth, wide))
    dataset = make(truth, wide)
    mixed = dataset.stream
    if served:
        af.serve_samples(mixed, SIZE - 1, drop_last=True)
    else:
        af.torch.StreamDataset(mixed, SIZE - 1, drop_last=True)
    assert len(dataset) == len(alone)
    batches = iter(dataset)
    assert rows(next(batches) for _ in alone[1:]) == alone[:-1]
    assert rows(dataset) == alone  # not finished by them: a batch of less than theirs was left
    mixed.close()


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two datasets of other sizes, of whose episodes the second is no video."""
    roots = []
    for height in (64, 96):
        root = tmp_path_factory.mktemp("data") / str(height)
        cameras = ["observation.images.top"]
        write_dataset(root, episodes=(8, 8, 8), cameras=cameras, width=64, height=height, episodes_per_video_file=1)
        for video in root.rglob("file-001.mp4"):
            video.write_bytes(b"x" * video.stat().st_size)
        roots.append(root)
    return roots


def with_bad(broken: list[Path], seed: int, **options: Any) -> af.torch.StreamDataset:  # noqa: ANN401
    config = af.StreamConfig(pool_segments=3, **options)
    streams = [af.Stream(str(root), seed=seed + number, config=config) for number, root in enumerate(broken)]
    return af.torch.StreamDataset(af.Mixture(streams, [1, 1], stop_on=40, seed=seed), batch_size=SIZE)


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_bad_samples_neither_mix_members_nor_spoil_a_state(
    broken: list[Path],
    on_error: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What comes in place of one fits its batch; and a rank goes on from its own state behind any batch."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    for seed in range(4):
        dataset = with_bad(broken, seed, on_error=on_error)
        given, states = [], []
        for batch in dataset:
            given += rows([batch])
            states.append(json.loads(json.dumps(dataset.state_dict())))
        assert given
        assert all(len({member for member, _ in batch}) == 1 for batch in given)
        for number in range(0, len(states) - 1, 2):
            dataset.load_state_dict(states[number])
            rest = rows(dataset)
            if on_error == "skip":
                assert rest == given[number + 1 :]
            else:  # what stands for a bad sample right behind a stop may be another one, or none
                assert all(len({member for member, _ in batch}) == 1 for batch in rest)
        dataset.stream.close()


@pytest.mark.parametrize("ends", ["uneven", "drop", "pad"])
def test_reader_without_batches_is_given_all_that_is_left(
    truth: DatasetTruth,
    wide: DatasetTruth,
    ends: Any,  # noqa: ANN401
) -> None:
    """Of what was dealt out anew for those who leave some of it out, and as evenly as asked."""
    config = af.StreamConfig(pool_segments=8, uneven_ends=ends)
    streams = [af.Stream(str(truth.root), features=["action"]), af.Stream(str(wide.root), features=[])]
    mixed = af.Mixture(streams, [2, 1], stop_on="all", config=config)
    everything = source_of(mixed).iterate(Placement(batch_size=SIZE))
    whole = sorted((int(sample["dataset"]), int(sample["index"])) for sample in everything)
    mixed.set_epoch(0)
    given: list[tuple[int, int]] = []
    for size in (SIZE, SIZE + 1):
        dataset = af.torch.StreamDataset(mixed, size, drop_last=True)
        given += rows([next(iter(dataset))])[0]
        mixed.load_state_dict(json.loads(json.dumps(dataset.state_dict())))
    state = mixed.state_dict()
    counts = []
    for rank in range(3):
        mixed.load_state_dict(state)
        samples = list(source_of(mixed).iterate(Placement(rank, 3)))
        counts.append(len(samples))
        given += [(int(one["dataset"]), int(one["index"])) for one in samples if not one.get("is_padding", False)]
    assert max(counts) - min(counts) <= (2 if ends == "uneven" else 0)
    lost = len(whole) - len(given)
    assert sorted(given) == whole if ends != "drop" else 0 <= lost < 2 * 3
    mixed.close()
