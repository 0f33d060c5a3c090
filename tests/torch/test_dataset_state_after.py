"""``state_after`` without workers says where the latest pass is, though its epoch may be counted by now."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import asyncfetch as af
from asyncfetch.stream import Placement
from asyncfetch.stream.epoch_stream import source_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncfetch.testing import DatasetTruth

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*use of fork:DeprecationWarning",
    "ignore:'set_vital' is deprecated:UserWarning",  # torchdata's own call
)
SIZE = 4


@pytest.fixture(params=["stream", "mixture"])
def source(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(params=[None, SIZE], ids=["loader makes batches", "dataset makes batches"])
def own_size(request: pytest.FixtureRequest) -> int | None:
    size: int | None = request.param
    return size


@pytest.fixture
def make(truth: DatasetTruth, source: str, own_size: int | None) -> Iterator[Any]:
    """Makes the same dataset anew, as in a process of another day."""
    made = []

    def make() -> af.torch.StreamDataset:
        config = af.StreamConfig(pool_segments=4)
        streams = [af.Stream(str(truth.root), features=[], seed=seed) for seed in range(2)]
        mixture = af.Mixture(streams, [2, 1], stop_on=37, config=config)
        stream = mixture if source == "mixture" else af.Stream(str(truth.root), features=[], config=config)
        made.append(stream)
        return af.torch.StreamDataset(stream, own_size)

    yield make
    for stream in made:
        stream.close()


def loader_of(dataset: af.torch.StreamDataset, workers: int = 0) -> Any:  # noqa: ANN401
    """Of batches of SIZE, whoever makes them."""
    size = SIZE if dataset.batch_size is None else None
    context = "fork" if workers else None
    return DataLoader(dataset, size, num_workers=workers, multiprocessing_context=context, collate_fn=collated)


def collated(samples: Any) -> Any:  # noqa: ANN401
    return af.torch.collate(samples) if isinstance(samples, list) else samples


def keys_of(batches: Any) -> list[list[tuple[int, int]]]:  # noqa: ANN401
    return [
        list(zip(batch.get("dataset", 0 * batch["index"]).tolist(), batch["index"].tolist(), strict=True))
        for batch in batches
    ]


def after(dataset: af.torch.StreamDataset, batches: int, workers: int = 0) -> Any:  # noqa: ANN401
    return json.loads(json.dumps(dataset.state_after(batches, batch_size=SIZE, num_workers=workers)))


@pytest.mark.parametrize("asked", [False, True], ids=["last batch given", "end asked for"])
def test_behind_an_epochs_end_comes_the_next_one_whole(make: Callable[[], Any], asked: bool) -> None:
    whole = make()
    epochs = [keys_of(loader_of(whole)) for _ in range(3)]
    dataset, counted = make(), len(epochs[0])
    for epoch in range(2):
        assert keys_of(itertools.islice(loader_of(dataset), counted + asked)) == epochs[epoch]
        for taken in range(1, counted + 1):
            resumed = make()
            resumed.load_state_dict(after(dataset, taken))
            assert resumed.stream.epoch == epoch + (taken == counted)
        assert keys_of(loader_of(resumed)) == epochs[epoch + 1]
    with pytest.raises(af.ConfigError, match=f"batches={counted + 1} .* of epoch 1"):
        dataset.state_after(counted + 1, batch_size=SIZE)


def test_samples_behind_the_end_of_a_resumed_rest_are_not_lost(make: Callable[[], Any]) -> None:
    whole = make()
    epochs = [keys_of(loader_of(whole)) for _ in range(2)]
    begun, dataset, later = make(), make(), make()
    assert keys_of(itertools.islice(loader_of(begun), 2)) == epochs[0][:2]
    dataset.load_state_dict(after(begun, 2))
    rest = keys_of(loader_of(dataset))
    assert rest == epochs[0][2:]
    later.load_state_dict(after(dataset, 3))
    assert keys_of(loader_of(later)) == rest[3:]
    later.load_state_dict(after(dataset, len(rest)))
    assert keys_of(loader_of(later)) == epochs[1]


def test_set_epoch_is_the_next_passes_and_known_behind_its_end(make: Callable[[], Any]) -> None:
    dataset = make()
    counted = len(keys_of(loader_of(dataset)))
    dataset.set_epoch(5)
    assert after(dataset, 1)["epoch"] == 5
    assert len(keys_of(loader_of(dataset))) == counted
    assert (after(dataset, counted)["epoch"], after(dataset, 0)["epoch"]) == (5, 6)


def test_a_pass_aside_that_was_told_its_epoch_changes_nothing(make: Callable[[], Any]) -> None:
    dataset = make()
    batches = iter(loader_of(dataset))
    keys_of(itertools.islice(batches, 2))
    expected = after(dataset, 2)
    next(source_of(dataset.stream).iterate(Placement(), epoch=7))
    assert after(dataset, 2) == expected


def test_passes_with_workers_and_without_come_in_turns(make: Callable[[], Any]) -> None:
    dataset = make()
    for epoch, workers in enumerate((0, 1, 0, 1)):
        for taken in (2, None):
            given = len(keys_of(itertools.islice(loader_of(dataset, workers), taken)))
            assert after(dataset, given, workers)["epoch"] == epoch
            if dataset.batch_size is not None:  # who makes the batches here needs no word on workers
                assert after(dataset, given)["epoch"] == epoch
    assert dataset.stream.epoch == 4


@pytest.mark.parametrize("keeps", ["loader", "iterator"])
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_batches_that_come_out_of_order_tell_no_state(make: Callable[[], Any], keeps: str, kind: Any) -> None:  # noqa: ANN401
    dataset = make()
    size = SIZE if dataset.batch_size is None else None
    options = {"collate_fn": collated, "multiprocessing_context": "fork"}
    loader = kind(dataset, size, num_workers=2, in_order=False, **options)
    batches = iter(loader)
    next(batches)
    if keeps == "iterator":
        del loader
    with pytest.raises(af.ConfigError, match="in_order=False"):
        after(dataset, 1, workers=2)
    batches = loader = None
    batches = iter(kind(dataset, size, num_workers=1, in_order=False, **options))  # one can't but keep it
    next(batches)
    assert after(dataset, 1, workers=1)["epoch"] == 0


@pytest.mark.parametrize("own_size", [None], indirect=True)
@pytest.mark.parametrize("told", [0, 1, 3])
def test_another_number_of_workers_than_have_read_is_refused(make: Callable[[], Any], told: int) -> None:
    dataset = make()
    batches = iter(loader_of(dataset, 2))
    next(batches)
    with pytest.raises(af.ConfigError, match=f"num_workers={told}, and 2 workers read epoch 0"):
        after(dataset, 1, workers=told)
    assert after(dataset, 1, workers=2)["epoch"] == 0
