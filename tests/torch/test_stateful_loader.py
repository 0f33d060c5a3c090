"""torchdata's StatefulDataLoader goes on where it was, with what its workers know."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

import asyncfetch as af
from tests.torch.test_resume import keys_of_batches, make_stream

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncfetch.testing import DatasetTruth

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*use of fork:DeprecationWarning",
    "ignore:This DataLoader will create",
    "ignore:'set_vital' is deprecated:UserWarning",  # torchdata's own call
)

SIZE = 4


def make_loader(stream: af.Stream, workers: int, *, by_dataset: bool, state: Any = None, **options: Any) -> Any:  # noqa: ANN401
    """A new loader, as in a new process: of a dataset that knows nothing but what the loader's state tells it."""
    dataset = af.torch.StreamDataset(stream, batch_size=SIZE if by_dataset else None)
    loader = StatefulDataLoader(
        dataset,
        batch_size=None if by_dataset else SIZE,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
        collate_fn=None if by_dataset else af.torch.collate,
        **options,
    )
    if state is not None:
        loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


def states_and_batches(loader: Any) -> tuple[list[Any], list[Any]]:  # noqa: ANN401
    """The loader's state before each batch of a pass and behind the last, and the batches."""
    states, batches = [], []
    iterator = iter(loader)
    states.append(loader.state_dict())
    for batch in iterator:
        batches += keys_of_batches([batch])
        states.append(loader.state_dict())
    return states, batches


def in_order(batches: Iterable[Any]) -> list[Any]:
    return sorted(key for batch in batches for key in batch)


@pytest.fixture
def fresh(truth: DatasetTruth) -> Any:  # noqa: ANN401
    """Streams as new processes make them."""
    made = []

    def make() -> af.Stream:
        made.append(make_stream(truth))
        return made[-1]

    yield make
    for stream in made:
        stream.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("by_dataset", [False, True], ids=["loader's batches", "dataset's batches"])
@pytest.mark.parametrize("workers", [0, 2])
def test_from_any_batch_it_goes_on_with_just_the_rest(fresh: Any, workers: int, by_dataset: bool) -> None:  # noqa: ANN401
    loader = make_loader(fresh(), workers, by_dataset=by_dataset)
    states, batches = states_and_batches(loader)
    following = keys_of_batches(loader)
    for taken in sorted({0, 1, 3, len(batches) - 1, len(batches)} if workers else range(len(states))):
        resumed = make_loader(fresh(), workers, by_dataset=by_dataset, state=states[taken])
        if workers or not by_dataset or taken < len(batches):  # there the dataset itself goes on to the next epoch
            assert keys_of_batches(resumed) == batches[taken:]
        assert keys_of_batches(resumed) == following


@pytest.mark.timeout(60)
def test_persistent_workers_count_epochs_on_and_resume_in_each(fresh: Any) -> None:  # noqa: ANN401
    loader = make_loader(fresh(), 2, by_dataset=False, persistent_workers=True)
    epochs = [states_and_batches(loader) for _ in range(3)]
    orders = [batches for _, batches in epochs]
    assert orders[0] != orders[1] != orders[2]
    for epoch, taken in [(0, -1), (1, 0), (1, 1), (1, 5), (2, -1)]:
        states, batches = epochs[epoch]
        taken %= len(states)
        resumed = make_loader(fresh(), 2, by_dataset=False, persistent_workers=True, state=states[taken])
        assert keys_of_batches(resumed) == batches[taken:]
        if epoch < 2:
            assert keys_of_batches(resumed) == orders[epoch + 1]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_begun_again_is_resumed_without_what_the_one_before_gave(fresh: Any, workers: int) -> None:  # noqa: ANN401
    loader = make_loader(fresh(), workers, by_dataset=False, persistent_workers=workers > 0)
    whole = keys_of_batches(make_loader(fresh(), workers, by_dataset=False))
    next(iter(loader))
    again = iter(loader)
    for taken in (0, 1):
        state = loader.state_dict()
        assert keys_of_batches(make_loader(fresh(), workers, by_dataset=False, state=state)) == whole[taken:]
        next(again)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("by_dataset", [False, True], ids=["loader's batches", "dataset's batches"])
@pytest.mark.parametrize("finished", [0, 1], ids=["first epoch", "second epoch"])
def test_other_layouts_share_just_what_was_left_again_and_again(
    fresh: Any,  # noqa: ANN401
    truth: DatasetTruth,
    monkeypatch: pytest.MonkeyPatch,
    by_dataset: bool,
    finished: int,
) -> None:
    """Over the layouts (world size, workers) in turn, each stopped after some batches, of which some ranks had none."""
    expected = [(e, f) for e, length in enumerate(truth.lengths) for f in range(length)]
    given: list[Any] = []
    state = None
    for world_size, workers, batches in [(2, 2, [3, 1]), (1, 0, [2]), (3, 1, [0, 1, 1]), (2, 2, [1, 0]), (1, 2, [99])]:
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        states = []
        for rank, count in enumerate(batches):
            monkeypatch.setenv("RANK", str(rank))
            stream = fresh()
            loader = make_loader(stream, workers, by_dataset=by_dataset, persistent_workers=workers > 0)
            if state is not None:
                loader.dataset.load_state_dict(state)
            else:
                for _ in range(finished):
                    keys_of_batches(loader)
            given += keys_of_batches(itertools.islice(iter(loader), count))
            states.append(json.loads(json.dumps(loader.state_dict())))
        state = af.torch.merge_states(states)
        assert state["epoch"] == finished
    assert in_order(given) == expected


def test_a_state_of_another_number_of_workers_is_refused_and_goes_on_merged(fresh: Any) -> None:  # noqa: ANN401
    loader = make_loader(fresh(), 2, by_dataset=False)
    first = keys_of_batches(itertools.islice(iter(loader), 3))
    state = loader.state_dict()
    with pytest.raises(AssertionError):  # torchdata's own
        iter(make_loader(fresh(), 0, by_dataset=False, state=state))
    stream = fresh()
    stream.load_state_dict(af.torch.merge_states([state]))
    rest = keys_of_batches(make_loader(stream, 0, by_dataset=False))
    assert len({key for batch in first + rest for key in batch}) == 30 == sum(map(len, first + rest))
