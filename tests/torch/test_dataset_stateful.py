"""torchdata's StatefulDataLoader goes on where it was, with what its workers know."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import asyncfetch as af
from asyncfetch.errors import ConfigError
from tests.torch.test_dataset_resume import keys_of_batches, make_stream

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_pass_begun_again_resumes_without_the_last_ones_samples(fresh: Any, workers: int) -> None:  # noqa: ANN401
    loader = make_loader(fresh(), workers, by_dataset=False, persistent_workers=workers > 0)
    whole = keys_of_batches(make_loader(fresh(), workers, by_dataset=False))
    next(iter(loader))
    again = iter(loader)
    for taken in (0, 1):
        state = loader.state_dict()
        assert keys_of_batches(make_loader(fresh(), workers, by_dataset=False, state=state)) == whole[taken:]
        next(again)


@pytest.mark.slow
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


def test_state_of_other_workers_is_refused_and_resumes_merged(fresh: Any) -> None:  # noqa: ANN401
    loader = make_loader(fresh(), 2, by_dataset=False)
    first = keys_of_batches(itertools.islice(iter(loader), 3))
    state = loader.state_dict()
    with pytest.raises(AssertionError):  # torchdata's own
        iter(make_loader(fresh(), 0, by_dataset=False, state=state))
    stream = fresh()
    stream.load_state_dict(af.torch.merge_states([state]))
    rest = keys_of_batches(make_loader(stream, 0, by_dataset=False))
    assert len({key for batch in first + rest for key in batch}) == 30 == sum(map(len, first + rest))


LOADERS = pytest.mark.parametrize(
    ("workers", "options"),
    [(0, {}), (1, {}), (2, {}), (1, {"persistent_workers": True}), (2, {"persistent_workers": True})],
    ids=["none", "one", "two", "one that persists", "two that persist"],
)


@pytest.fixture
def begun(fresh: Any) -> tuple[list[Any], Any]:  # noqa: ANN401
    """The batches of the third epoch, and a dataset's state behind three of them."""
    dataset = af.torch.StreamDataset(fresh(), batch_size=SIZE)
    dataset.set_epoch(2)
    batches = keys_of_batches(dataset)
    dataset.set_epoch(2)
    keys_of_batches(itertools.islice(iter(dataset), 3))
    return batches, json.loads(json.dumps(dataset.state_dict()))


@pytest.mark.slow
@LOADERS
@pytest.mark.parametrize("given", [0, 1])
def test_loaders_own_state_takes_effect_at_the_next_iteration(
    fresh: Any,  # noqa: ANN401
    workers: int,
    options: dict[str, Any],
    given: int,
) -> None:
    """Whatever the pass that was under way has come to, and twice as once."""
    loader = make_loader(fresh(), workers, by_dataset=True)
    states, batches = states_and_batches(loader)
    loader = make_loader(fresh(), workers, by_dataset=True, **options)
    iterator = iter(loader)
    assert keys_of_batches(itertools.islice(iterator, given)) == batches[:given]
    for _ in range(2):
        loader.load_state_dict(json.loads(json.dumps(states[3])))
    assert keys_of_batches(loader) == batches[3:]


@pytest.mark.slow
@pytest.mark.usefixtures("failed_loaders_end_soon")
@LOADERS
@pytest.mark.parametrize("plain", [False, True], ids=["stateful", "plain"])
@pytest.mark.parametrize("given", [0, 1, None], ids=["asked for its state", "iterated", "begun"])
def test_datasets_state_takes_effect_or_ends_earlier_iterations(
    fresh: Any,  # noqa: ANN401
    begun: tuple[list[Any], Any],
    workers: int,
    options: dict[str, Any],
    plain: bool,
    given: int | None,
) -> None:
    batches, state = begun
    loader = make_loader(fresh(), workers, by_dataset=True, **options)
    if plain:
        context = "fork" if workers else None
        loader = DataLoader(
            loader.dataset, batch_size=None, num_workers=workers, multiprocessing_context=context, **options
        )
    elif given == 0:
        loader.state_dict()  # makes its workers
    iterator = None if given == 0 and not plain else iter(loader)
    if given is None:
        assert iterator is not None
        next(iterator)
    loader.dataset.load_state_dict(state)
    iterator = iter(loader) if iterator is None else iterator
    if workers or given is None:
        with pytest.raises(ConfigError, match="before iterating"):
            list(iterator)
    else:
        assert keys_of_batches(iterator) == batches[3:]
        return
    if options:
        with pytest.raises(ConfigError, match="by a new loader where its workers persist"):
            list(loader)
    again = DataLoader(loader.dataset, batch_size=None, num_workers=workers)
    assert keys_of_batches(again) == batches[3:]


def accelerated(stateful: bool, dispatched: bool) -> Any:  # noqa: ANN401
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    config = DataLoaderConfiguration(dispatch_batches=dispatched, use_stateful_dataloader=stateful)
    return Accelerator(cpu=True, dataloader_config=config)


@pytest.mark.slow
@pytest.mark.usefixtures("failed_loaders_end_soon")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dispatched", [False, True])
@pytest.mark.parametrize(("stateful", "prepared_first"), [(False, False), (False, True), (True, True)])
def test_accelerate_does_not_pass_over_a_state_by_setting_epochs(
    fresh: Any,  # noqa: ANN401
    begun: tuple[list[Any], Any],
    workers: int,
    dispatched: bool,
    stateful: bool,
    prepared_first: bool,
) -> None:
    from accelerate import skip_first_batches

    batches, state = begun
    dataset = af.torch.StreamDataset(fresh(), batch_size=SIZE)
    accelerator = accelerated(stateful, dispatched)
    loader = DataLoader(dataset, batch_size=None, num_workers=workers)
    if prepared_first:
        loader = accelerator.prepare(loader)
        dataset.load_state_dict(state)
    else:
        dataset.load_state_dict(state)
        loader = accelerator.prepare(loader)
    if stateful and workers:  # prepare has made them, and they have begun by then or not
        with pytest.raises(ConfigError, match="a state was loaded"):
            list(loader)
        return
    for each in (loader, skip_first_batches(loader, 1)):
        with pytest.raises(ConfigError, match=r"epoch 2, and set_epoch\(0\) .* call set_epoch\(2\) of its loader"):
            list(each)
    loader.set_epoch(2)
    assert keys_of_batches(loader) == batches[3:]


@pytest.mark.slow
@pytest.mark.parametrize("dispatched", [False, True])
def test_loader_saved_by_accelerate_resumes_with_whole_epochs(
    fresh: Any,  # noqa: ANN401
    tmp_path: Path,
    dispatched: bool,
) -> None:
    """By the states of its own loader; from an epoch that is set in front of the loaded one, all of that comes."""
    accelerator = accelerated(stateful=True, dispatched=dispatched)
    dataset = af.torch.StreamDataset(fresh(), batch_size=SIZE)
    loader = accelerator.prepare(DataLoader(dataset, batch_size=None))
    whole = [keys_of_batches(loader) for _ in range(3)]
    loader.set_epoch(2)
    assert keys_of_batches(itertools.islice(iter(loader), 3)) == whole[2][:3]
    accelerator.save_state(tmp_path)
    accelerator = accelerated(stateful=True, dispatched=dispatched)
    loader = accelerator.prepare(DataLoader(af.torch.StreamDataset(fresh(), batch_size=SIZE), batch_size=None))
    accelerator.load_state(tmp_path)
    assert [keys_of_batches(loader) for _ in range(3)] == [whole[2][3:], whole[1], whole[2]]
