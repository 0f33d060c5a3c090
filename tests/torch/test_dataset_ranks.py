"""A dataset that one process hands to several ranks, as mp.spawn and a notebook's launcher do."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from typing import TYPE_CHECKING, Any

import pytest
from torch.utils.data import DataLoader

import asyncfetch as af

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncfetch.testing import DatasetTruth

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("programs_are_warm"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]
START_SECONDS = 60
"""For processes that import torch, several a core on a busy machine."""


@pytest.fixture
def dataset(truth: DatasetTruth) -> Iterator[af.torch.StreamDataset]:
    stream = af.Stream(str(truth.root), features=[])
    yield af.torch.StreamDataset(stream)
    stream.close()


def in_child(method: str, function: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401
    """What the function returns in a process that is over by now."""
    context: Any = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_result, args=(sender, function, arguments))
    child.start()
    sender.close()  # then a child that ended is heard of at once
    try:
        assert receiver.poll(START_SECONDS)
        result = receiver.recv()
        child.join(START_SECONDS)
        assert child.exitcode == 0
    finally:
        child.kill()
    return result


def _send_result(sender: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:  # noqa: ANN401
    sender.send(function(*arguments))


def read_as_rank(dataset: af.torch.StreamDataset, rank: int, workers: str | None) -> list[list[int]]:
    """Two passes of one of two ranks, which knows behind each what its workers have counted."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    loader: Any = DataLoader(
        dataset,
        batch_size=None,
        num_workers=1 if workers else 0,
        persistent_workers=workers is not None,
        multiprocessing_context=workers,
    )
    passes = []
    for epoch in range(2):
        passes.append(indices(loader))
        assert dataset.stream.epoch == epoch + 1
    return passes


def indices(samples: Any) -> list[int]:  # noqa: ANN401
    return [int(sample["index"]) for sample in samples]


@pytest.mark.parametrize(
    ("method", "workers"),
    [("fork", None), ("fork", "fork"), ("fork", "spawn"), ("spawn", None), ("spawn", "fork"), ("spawn", "forkserver")],
)
def test_late_rank_reads_its_part_of_the_same_epochs(
    dataset: af.torch.StreamDataset, method: str, workers: str | None, truth: DatasetTruth
) -> None:
    ranks = [in_child(method, read_as_rank, dataset, rank, workers) for rank in range(2)]
    for shares in zip(*ranks, strict=True):
        assert sorted(shares[0] + shares[1]) == list(range(truth.num_frames))
        assert len(shares[0]) == len(shares[1])
    assert [len(set(map(tuple, passes))) for passes in ranks] == [2, 2]
    assert dataset.stream.epoch == 0


def test_child_counts_on_from_its_parent_without_moving_it(dataset: af.torch.StreamDataset) -> None:
    dataset.set_epoch(3)
    assert in_child("fork", _count_in_grandchild_too, dataset) == (5, 4)
    assert dataset.stream.epoch == 3


def _count_in_grandchild_too(dataset: af.torch.StreamDataset) -> tuple[int, int]:
    indices(dataset)
    return in_child("fork", _count, dataset), dataset.stream.epoch


def _count(dataset: af.torch.StreamDataset) -> int:
    indices(dataset.stream)
    return dataset.stream.epoch


def test_a_child_sets_the_epoch_of_its_own_stream_alone(dataset: af.torch.StreamDataset) -> None:
    state = dataset.state_dict()
    assert in_child("fork", _set_epochs, dataset, state) == [7, 9, 0, 9]
    assert dataset.stream.epoch == 0


def _set_epochs(dataset: af.torch.StreamDataset, state: Any) -> list[int]:  # noqa: ANN401
    epochs = []
    dataset.stream.set_epoch(7)
    epochs.append(dataset.stream.epoch)
    dataset.set_epoch(9)
    epochs.append(dataset.stream.epoch)
    copied = pickle.loads(pickle.dumps(dataset))
    copied.load_state_dict(state)
    return [*epochs, copied.stream.epoch, dataset.stream.epoch]


def test_two_datasets_in_a_spawned_worker_count_in_ranks_memory(
    dataset: af.torch.StreamDataset, truth: DatasetTruth
) -> None:
    loader = DataLoader(_Both(dataset), batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert sorted(indices(loader)) == list(range(truth.num_frames))
    assert dataset.stream.epoch == 1


class _Both(af.torch.StreamDataset):
    """With another dataset of the same stream at its side."""

    def __init__(self, dataset: af.torch.StreamDataset) -> None:
        super().__init__(dataset.stream)
        self.other = dataset
