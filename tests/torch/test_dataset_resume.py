"""An epoch that was stopped anywhere goes on with just what was left of it."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import pickle
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import asyncfetch as af
from asyncfetch.errors import ConfigError, StateMismatch
from asyncfetch.order.state import beginning, identity_of
from asyncfetch.stream import Placement
from asyncfetch.stream.epoch_stream import source_of
from tests.lerobot.serving import renumbered

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncfetch.order.state import State
    from asyncfetch.testing import DatasetTruth

Key = tuple[int, int]
TOTAL = 30
"""Frames of the dataset."""
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning", "ignore:This DataLoader will create")
any_moment = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)


def make_stream(truth: DatasetTruth, **arguments: Any) -> af.Stream:  # noqa: ANN401
    config = af.StreamConfig(pool_segments=4, **arguments.pop("config", {}))
    return af.Stream(str(truth.root), features=[], config=config, **arguments)


def keys_of(samples: Iterable[Any]) -> list[Key]:
    return [(int(sample["episode_index"]), int(sample["frame_index"])) for sample in samples]


def keys_of_batches(batches: Iterable[Any]) -> list[list[Key]]:
    return [list(zip(batch["episode_index"].tolist(), batch["frame_index"].tolist(), strict=True)) for batch in batches]


def saved(state: State) -> State:
    copied: State = json.loads(json.dumps(state))
    assert copied == state
    return copied


@pytest.fixture
def stream(truth: DatasetTruth) -> Any:  # noqa: ANN401
    stream = make_stream(truth)
    yield stream
    stream.close()


@pytest.fixture
def other(truth: DatasetTruth) -> Any:  # noqa: ANN401
    """The same in a process of another day."""
    stream = make_stream(truth)
    yield stream
    stream.close()


@any_moment
@given(taken=st.integers(0, TOTAL), again=st.integers(0, TOTAL), epoch=st.integers(0, 2))
def test_epoch_goes_on_in_the_same_order(
    stream: af.Stream, other: af.Stream, taken: int, again: int, epoch: int
) -> None:
    stream.load_state_dict(beginning(epoch))
    whole = keys_of(stream)
    assert stream.epoch == epoch + 1
    stream.load_state_dict(beginning(epoch))
    first = keys_of(itertools.islice(iter(stream), taken))
    other.load_state_dict(saved(stream.state_dict()))
    second = keys_of(itertools.islice(iter(other), again))
    stream.load_state_dict(saved(other.state_dict()))
    if taken + again < TOTAL:
        assert first + second + keys_of(stream) == whole
    elif taken < TOTAL:
        assert first + second == whole
        assert stream.epoch == epoch + 1
    else:
        assert first == whole
        assert len(second) == again  # of the next epoch
        assert stream.epoch == epoch + 1 + (again == TOTAL)


async def test_state_of_the_async_iterator_is_of_delivered_samples(truth: DatasetTruth, stream: af.Stream) -> None:
    async with af.open_dataset(str(truth.root), features=[], config=stream.config) as dataset:
        source = af.Stream(dataset)
        async with source.samples() as samples:
            first = keys_of([await anext(samples) for _ in range(7)])
            state = saved(samples.state_dict())
            assert source.state_dict() == state
        source.load_state_dict(state)
        async with source.samples() as samples:
            rest = keys_of([sample async for sample in samples])
            assert samples.statistics().samples == TOTAL - 7
        async with source.samples(epoch=0) as samples:
            assert first + rest == keys_of([sample async for sample in samples])
        assert source.epoch == 1


@any_moment
@given(data=st.data(), worlds=st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_over_any_world_sizes_just_what_was_left_comes(
    truth: DatasetTruth, stream: af.Stream, data: st.DataObject, worlds: list[int]
) -> None:
    taken: list[Key] = []
    state: State | None = None
    for world_size in worlds:
        states = []
        for rank in range(world_size):
            stream.load_state_dict(state or beginning(0))
            samples = source_of(stream).iterate(Placement(rank, world_size), epoch=0)
            taken += keys_of(itertools.islice(samples, data.draw(st.integers(0, 8))))
            states.append(samples.state_dict())
            samples.close()
        state = saved(af.torch.merge_states(states))
        if len(taken) == TOTAL:
            break  # asked for once more, the epoch would come once more
    stream.load_state_dict(state or beginning(0))
    assert stream.epoch == (len(taken) == TOTAL)
    rest = keys_of(source_of(stream).iterate(Placement(), epoch=0))  # none of one that is over, though it is asked for
    assert sorted(taken + rest) == [(e, f) for e, length in enumerate(truth.lengths) for f in range(length)]


def test_a_piece_that_two_lanes_give_is_one_for_each(truth: DatasetTruth, stream: af.Stream) -> None:
    """Of a begun one each gives a part of what is left, one at the beginning of the pass and one at its end."""
    state, taken = beginning(0), list[Key]()
    for counts in ((9, 6), (1, 2, 3, 4)):
        states = []
        for rank, count in enumerate(counts):
            stream.load_state_dict(state)
            samples = source_of(stream).iterate(Placement(rank, len(counts)), epoch=0)
            taken += keys_of(itertools.islice(samples, count))
            states.append(samples.state_dict())
            samples.close()
        state = saved(af.torch.merge_states(states))
        for worker in range(2):
            stream.load_state_dict(state)
            plan = source_of(stream).planned(Placement(0, 1, worker, 2), 0)
            pieces = [piece for piece in plan.first_uses() if piece is not None]
            assert len(set(pieces)) == len(pieces)
    stream.load_state_dict(state)
    assert len(set(taken + keys_of(stream))) == TOTAL


def test_epoch_of_episodes_with_gaps_resumes_at_any_world_size(truth: DatasetTruth, tmp_path: Path) -> None:
    """In the order of as many episodes without gaps; their states aren't taken for one another's."""
    roots = [
        renumbered(truth, tmp_path / "gaps", (None, 1, 2, 3, None, 5)),
        renumbered(truth, tmp_path / "million", (None, 1, 2, 3, None, 10**6)),
    ]
    gaps, million, chosen = [
        make_stream(dataclasses.replace(truth, root=root), **options)
        for root, options in ((roots[0], {}), (roots[1], {}), (truth.root, {"episodes": [1, 2, 3, 5]}))
    ]
    whole = keys_of(gaps)
    assert (whole, gaps.epoch) == (keys_of(chosen), 1)
    assert keys_of(million) == [(10**6 if episode == 5 else episode, frame) for episode, frame in whole]
    taken: list[Key] = []
    state = beginning(0)
    for world_size in (3, 2):
        states = []
        for rank in range(world_size):
            gaps.load_state_dict(state)
            samples = source_of(gaps).iterate(Placement(rank, world_size), epoch=0)
            taken += keys_of(itertools.islice(samples, 2 + rank))
            states.append(samples.state_dict())
            samples.close()
        state = saved(af.torch.merge_states(states))
    million.load_state_dict(state)
    with pytest.raises(StateMismatch, match=state["dataset"]):
        next(iter(million))
    gaps.load_state_dict(state)
    assert sorted(taken + keys_of(gaps)) == sorted(whole)
    for each in (gaps, million, chosen):
        each.close()


def test_a_state_of_one_rank_goes_on_as_that_rank_alone(stream: af.Stream) -> None:
    whole = keys_of(source_of(stream).iterate(Placement(1, 2), epoch=0))
    first = source_of(stream).iterate(Placement(1, 2))
    begun = keys_of(itertools.islice(first, 4))
    state = first.state_dict()
    stream.load_state_dict(state)
    assert begun + keys_of(source_of(stream).iterate(Placement(1, 2))) == whole
    for placement in (Placement(0, 2), Placement(), Placement(1, 3)):
        stream.load_state_dict(state)
        with pytest.raises(StateMismatch, match="merge_states"):
            next(source_of(stream).iterate(placement))


@pytest.mark.parametrize(
    "different", [{"seed": 1}, {"shuffle": False}, {"episodes": [0, 1, 3]}, {"config": {"group_frames": 3}}]
)
def test_a_state_of_another_order_is_refused_with_both(
    truth: DatasetTruth, stream: af.Stream, different: dict[str, Any]
) -> None:
    next(iter(stream))
    state = stream.state_dict()
    changed = make_stream(truth, **different)
    changed.load_state_dict(state)
    with pytest.raises(StateMismatch) as caught:
        next(iter(changed))
    assert str(state["order"]) in str(caught.value)
    changed.close()


def test_state_of_another_dataset_is_refused_with_fingerprints(stream: af.Stream, small_dataset: DatasetTruth) -> None:
    next(iter(stream))
    state = stream.state_dict()
    elsewhere = make_stream(small_dataset)
    elsewhere.load_state_dict(state)
    with pytest.raises(StateMismatch, match=state["dataset"]) as caught:
        next(iter(elsewhere))
    elsewhere.load_state_dict(beginning(0))
    next(iter(elsewhere))
    assert elsewhere.state_dict()["dataset"] in str(caught.value)
    elsewhere.close()


@pytest.mark.parametrize("ended", [False, True], ids=["last sample given", "end asked for"])
def test_state_of_an_epochs_end_fits_its_dataset_and_order(
    truth: DatasetTruth, small_dataset: DatasetTruth, stream: af.Stream, other: af.Stream, ended: bool
) -> None:
    """Also where it was loaded, or merged, and saved again before anything was read."""
    keys_of(itertools.islice(iter(stream), TOTAL + ended))
    state = saved(stream.state_dict())
    other.load_state_dict(state)
    again = saved(other.state_dict())
    other.load_state_dict(again)
    assert len(keys_of(other)) == TOTAL
    assert other.epoch == 2
    for each in (state, again, af.torch.merge_states([state, state] if ended else [state])):
        for changed in (make_stream(truth, seed=1), make_stream(small_dataset)):
            changed.load_state_dict(each)
            why = (
                state["dataset"]
                if source_of(changed).seed == 0
                else "'seed': 0.*'seed': 1.*make this anew.*set_epoch.1."
            )
            with pytest.raises(StateMismatch, match=why):
                next(iter(changed))
            changed.set_epoch(2)  # said anew, it begins there
            next(iter(changed))
            changed.close()
    bare = {name: again[name] for name in ("format", "version", "epoch")}
    other.load_state_dict(bare)
    assert len(keys_of(other)) == TOTAL
    with pytest.raises(StateMismatch, match="differ in order"):
        af.torch.merge_states([again, bare, again | {"order": {}}])


@pytest.mark.parametrize("change", [{"format": "x"}, {"version": 2}, {"epoch": -1}, {"epoch": "0"}, {"legs": []}])
def test_changed_state_is_refused_at_once(stream: af.Stream, change: dict[str, Any]) -> None:
    next(iter(stream))
    with pytest.raises(StateMismatch):
        stream.load_state_dict(stream.state_dict() | change)


def test_resumed_epoch_is_followed_by_a_whole_one(stream: af.Stream) -> None:
    next(iter(stream))
    stream.load_state_dict(stream.state_dict())
    assert len(keys_of(stream)) == TOTAL - 1
    assert stream.state_dict()["epoch"] == 1
    assert len(keys_of(stream)) == TOTAL


@pytest.mark.parametrize("taken", range(1, 4))
def test_persistent_workers_repeat_the_rest_they_were_left_in(stream: af.Stream, other: af.Stream, taken: int) -> None:
    """One of them has come to the end of its share, and the other one hasn't, or they have both."""
    dataset = af.torch.StreamDataset(stream, batch_size=4)
    given = list(itertools.chain(*keys_of_batches(itertools.islice(iter(dataset), 4))))
    resumed = af.torch.StreamDataset(other, batch_size=4)
    resumed.load_state_dict(saved(dataset.state_dict()))
    loader = DataLoader(resumed, batch_size=None, num_workers=2, persistent_workers=True, prefetch_factor=1)
    batches = iter(loader)
    for _ in range(taken):
        next(batches)
    again = list(itertools.chain(*keys_of_batches(loader)))
    expected = TOTAL - len(given) if other.epoch == 1 else TOTAL
    assert len(set(again)) == len(again) == expected
    assert not set(given) & set(again) or expected == TOTAL


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_resumed_epoch_that_is_set_again_is_whole(stream: af.Stream, other: af.Stream, options: dict[str, Any]) -> None:
    dataset = af.torch.StreamDataset(stream, batch_size=4)
    next(iter(dataset))
    resumed = af.torch.StreamDataset(other, batch_size=4)
    resumed.load_state_dict(saved(dataset.state_dict()))
    resumed.set_epoch(0)
    loader = DataLoader(resumed, batch_size=None, **options)
    assert sum(map(len, keys_of_batches(loader))) == TOTAL - 4
    resumed.set_epoch(0)
    batches = iter(loader)
    given = list(itertools.chain(*keys_of_batches(itertools.islice(batches, 3))))
    state = resumed.state_after(3, num_workers=2) if options else resumed.state_dict()
    stream.load_state_dict(saved(state))
    left = keys_of(stream)
    assert len({*given, *left}) == len(given) + len(left) == TOTAL


def test_epoch_or_state_set_within_a_pass_outlasts_it(stream: af.Stream) -> None:
    samples = iter(stream)
    next(samples)
    state = saved(stream.state_dict())
    stream.set_epoch(0)
    assert len(list(samples)) == TOTAL - 1
    assert stream.epoch == 0
    samples = iter(stream)
    next(samples)
    stream.load_state_dict(state)
    with pytest.raises(ConfigError, match="before iterating"):
        next(samples)
    assert len(keys_of(stream)) == TOTAL - 1
    assert stream.epoch == 1


@pytest.mark.parametrize("raises", [True, False])
def test_batch_that_an_error_ended_is_not_counted_as_delivered(
    truth: DatasetTruth,
    other: af.Stream,
    raises: bool,
) -> None:
    """Neither where a sample can't be had, nor where no batch can be made of those that came."""
    whole = keys_of_batches(af.torch.StreamDataset(other, batch_size=4))
    bad = whole[1][2]

    def fail(sample: Any) -> Any:  # noqa: ANN401
        if keys_of([sample]) != [bad]:
            return sample
        if raises:
            raise KeyError(bad)
        return bad

    stream = make_stream(truth, transform=fail)
    dataset = af.torch.StreamDataset(stream, batch_size=4)
    batches = iter(dataset)
    first = keys_of_batches([next(batches)])
    with pytest.raises(KeyError if raises else ConfigError):
        next(batches)
    other.load_state_dict(saved(dataset.state_dict()))
    assert first + keys_of_batches(af.torch.StreamDataset(other, batch_size=4)) == whole
    stream.close()


def test_next_epoch_follows_one_of_which_nothing_was_left(stream: af.Stream, other: af.Stream) -> None:
    keys_of(itertools.islice(iter(stream), TOTAL))
    other.load_state_dict(saved(stream.state_dict()))
    assert other.epoch == 1
    assert other.state_dict() == beginning(1, identity_of(stream.state_dict()))
    assert len(keys_of(other)) == TOTAL
    assert other.epoch == 2


def test_behind_the_last_batch_of_workers_comes_the_next_epoch(stream: af.Stream, other: af.Stream) -> None:
    dataset = af.torch.StreamDataset(stream, batch_size=7)
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    taken = len(list(itertools.islice(iter(loader), len(loader))))
    resumed = af.torch.StreamDataset(other, batch_size=7)
    resumed.load_state_dict(saved(dataset.state_after(taken, num_workers=2)))
    assert sum(map(len, keys_of_batches(DataLoader(resumed, batch_size=None, num_workers=2)))) == TOTAL
    assert other.epoch == 2


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_next_epoch_follows_the_last_whole_batch_with_drop_last(
    truth: DatasetTruth, stream: af.Stream, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    """By a rank's own state, however it is asked, where all ranks are given as many batches, and by all together."""
    tells_of_all = world_size < 4  # of 4 ranks two have 8 samples and two 7
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    states = []
    for rank in range(world_size):
        monkeypatch.setenv("RANK", str(rank))
        one = make_stream(truth)
        dataset = af.torch.StreamDataset(one, batch_size=4, drop_last=True)
        batches = iter(dataset)
        for left in reversed(range(len(dataset))):
            next(batches)
            state = saved(dataset.state_dict())
            # What state_after says on several ranks has to be merged.
            asked = [dataset.state_after(len(dataset) - left)] if world_size == 1 else []
            for each in (state, *asked):
                resumed = af.torch.StreamDataset(stream, batch_size=4, drop_last=True)
                resumed.load_state_dict(each)
                assert stream.epoch == (left == 0 and tells_of_all)
                assert len(list(resumed)) == (left or tells_of_all * len(dataset))
        states.append(state)
        with pytest.raises(ConfigError, match=f"batches={len(dataset) + 1}"):
            dataset.state_after(len(dataset) + 1)
        one.close()
    resumed.load_state_dict(af.torch.merge_states(states))
    assert stream.epoch == 1


@pytest.mark.parametrize(("world_size", "given"), [(4, (7, 7, 7, 7)), (4, (8, 8, 7, 7)), (3, (10, 10, 10))])
@pytest.mark.parametrize("asked", [False, True])
def test_ended_ranks_and_those_with_a_sample_left_are_merged(
    truth: DatasetTruth, other: af.Stream, world_size: int, given: tuple[int, ...], asked: bool
) -> None:
    """``asked``: for the sample behind the last one, so that those who have none are at the next epoch's beginning."""
    taken: list[Key] = []
    states = []
    for rank, count in enumerate(given):
        stream = make_stream(truth)
        samples = source_of(stream).iterate(Placement(rank, world_size))
        taken += keys_of(itertools.islice(samples, count))
        if asked and count == source_of(stream).count(Placement(rank, world_size)):
            assert next(samples, None) is None
        states.append(stream.state_dict())
        stream.close()
    other.load_state_dict(saved(af.torch.merge_states(states)))
    left = TOTAL - len(taken)
    assert other.epoch == (0 if left else 1)
    if left:
        assert sorted(taken + keys_of(other)) == [
            (e, f) for e, length in enumerate(truth.lengths) for f in range(length)
        ]
    assert len(keys_of(other)) == TOTAL


def test_a_rank_that_has_ended_alone_waits_for_the_others(truth: DatasetTruth) -> None:
    for ends, epoch in (("uneven", 0), ("drop", 1)):
        stream = make_stream(truth, config={"uneven_ends": ends})
        samples = source_of(stream).iterate(Placement(3, 4))
        assert len(keys_of(itertools.islice(samples, 7))) == 7
        state = saved(stream.state_dict())
        samples.close()
        resumed = make_stream(truth, config={"uneven_ends": ends})
        resumed.load_state_dict(state)
        assert resumed.epoch == epoch
        resumed.close()
        stream.close()


def test_states_of_epochs_that_have_no_common_rest_are_refused(stream: af.Stream) -> None:
    """Further apart, more of them than there are ranks, or of a rank that has begun the next one."""
    states = []
    for rank in range(2):
        stream.set_epoch(rank)
        next(source_of(stream).iterate(Placement(rank, 2)))
        states.append(stream.state_dict())
    for wrong in ([beginning(2)], [beginning(1), beginning(1)], states[1:]):
        with pytest.raises(StateMismatch, match="epoch"):
            af.torch.merge_states([states[0], *wrong])
    with pytest.raises(StateMismatch, match='uneven_ends="drop"'):
        af.torch.merge_states(states)


def test_state_says_what_comes_next_after_another_was_loaded(stream: af.Stream, other: af.Stream) -> None:
    next(iter(stream))
    other.load_state_dict(stream.state_dict())
    next(iter(other))
    other.set_epoch(3)
    assert other.state_dict() == beginning(3, identity_of(stream.state_dict()))
    unbegun = iter(other)
    assert other.state_dict() == unbegun.state_dict()
    assert other.state_dict()["epoch"] == 3


def test_state_of_a_set_epoch_is_its_beginning_until_a_pass(stream: af.Stream) -> None:
    samples = iter(stream)
    next(samples)
    state = stream.state_dict()
    stream.set_epoch(0)
    assert stream.state_dict() == beginning(0, identity_of(state))
    next(iter(stream))
    assert stream.state_dict() == state


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("size", [1, 7])
def test_batches_of_the_dataset_are_the_same_for_any_workers(
    stream: af.Stream, other: af.Stream, workers: int, size: int
) -> None:
    alone = keys_of_batches(af.torch.StreamDataset(stream, batch_size=size))
    stream.set_epoch(0)
    dataset = af.torch.StreamDataset(stream, batch_size=size)
    loader = DataLoader(dataset, batch_size=None, num_workers=workers)
    assert len(loader) == len(alone)
    assert keys_of_batches(itertools.islice(iter(loader), 3)) == alone[:3]
    state = saved(dataset.state_after(3, num_workers=workers))
    for count in (workers, 0, 2):
        resumed = af.torch.StreamDataset(other, batch_size=size)
        resumed.load_state_dict(state)
        assert keys_of_batches(DataLoader(resumed, batch_size=None, num_workers=count)) == alone[3:]


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("batches", [0, 1, 4, 6])
def test_rest_comes_after_batches_of_a_plain_loader(
    truth: DatasetTruth, stream: af.Stream, other: af.Stream, workers: int, batches: int
) -> None:
    dataset = af.torch.StreamDataset(stream)
    loader = iter(DataLoader(dataset, batch_size=4, num_workers=workers, collate_fn=af.torch.collate))
    first = [key for batch in keys_of_batches(itertools.islice(loader, batches)) for key in batch]
    resumed = af.torch.StreamDataset(other)
    resumed.load_state_dict(saved(dataset.state_after(batches, batch_size=4, num_workers=workers)))
    rest = keys_of(DataLoader(resumed, batch_size=None, num_workers=2))
    assert sorted(first + rest) == [(e, f) for e, length in enumerate(truth.lengths) for f in range(length)]
    with pytest.raises(ConfigError, match="batches=99"):
        dataset.state_after(99, batch_size=4, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_rests_of_plain_loaders_of_several_ranks_are_merged(
    truth: DatasetTruth, stream: af.Stream, other: af.Stream, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    first: list[Key] = []
    states = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        stream.load_state_dict(beginning(0))
        dataset = af.torch.StreamDataset(stream)
        loader = iter(DataLoader(dataset, batch_size=3, num_workers=workers, collate_fn=af.torch.collate))
        first += itertools.chain(*keys_of_batches(itertools.islice(loader, 1 + rank)))
        states.append(saved(dataset.state_after(1 + rank, batch_size=3, num_workers=workers)))
        del loader
    monkeypatch.delenv("WORLD_SIZE")
    other.load_state_dict(saved(af.torch.merge_states(states)))
    assert sorted(first + keys_of(other)) == [(e, f) for e, length in enumerate(truth.lengths) for f in range(length)]


def test_state_of_a_changed_dataset_is_refused_with_fingerprints(
    truth: DatasetTruth, stream: af.Stream, tmp_path: Path
) -> None:
    """Here by a task that is called another thing."""
    next(iter(stream))
    state = saved(stream.state_dict())
    changed = Path(shutil.copytree(truth.root, tmp_path / "changed"))
    tasks = changed / "meta/tasks.parquet"
    table = pq.read_table(tasks)
    (name,) = (name for name in table.column_names if name != "task_index")
    words = pa.array([f"{word}, again" for word in table[name].to_pylist()])
    pq.write_table(table.set_column(table.column_names.index(name), name, words), tasks)
    later = af.Stream(str(changed), features=[], config=stream.config)
    later.load_state_dict(state)
    with pytest.raises(StateMismatch, match=f"dataset is {state['dataset']}, and that of this is [0-9a-f]+"):
        next(iter(later))
    later.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_behind_an_epoch_no_batches_are_none_of_the_next(stream: af.Stream, workers: int) -> None:
    dataset = af.torch.StreamDataset(stream, batch_size=1)
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    for epoch in range(2):
        assert dataset.state_after(0, num_workers=workers)["epoch"] == epoch
        for taken, _ in enumerate(loader, 1):
            if taken == 5:
                assert dataset.state_after(taken, num_workers=workers)["epoch"] == epoch
    dataset.set_epoch(5)
    assert dataset.state_after(0, num_workers=workers)["epoch"] == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batches": 1.5}, "batches must be a whole number, not 1.5"),
        ({"batches": "3"}, "batches must be a whole number, not '3'"),
        ({"batches": True}, "batches must be a whole number, not True"),
        ({"batches": 1, "batch_size": 0}, "batch_size must be a whole number, at least 1, or None, not 0"),
        ({"batches": 1, "num_workers": -1}, "num_workers must be a whole number from 0 to 1024, not -1"),
    ],
)
def test_state_after_refuses_wrong_numbers(stream: af.Stream, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        af.torch.StreamDataset(stream).state_after(**arguments)


def test_the_process_that_has_the_workers_does_not_guess(stream: af.Stream) -> None:
    dataset = af.torch.StreamDataset(stream)
    next(iter(DataLoader(dataset, batch_size=None, num_workers=1)))
    with pytest.raises(StateMismatch, match="state_after"):
        dataset.state_dict()
    with pytest.raises(ConfigError, match="state_after"):
        stream.state_dict()
    state = dataset.state_after(1, num_workers=1)
    dataset.load_state_dict(state)
    assert dataset.state_dict() == stream.state_dict() == state
    assert len(keys_of(dataset)) == TOTAL - 1
    next(iter(DataLoader(dataset, batch_size=None, num_workers=1)))
    stream.load_state_dict(state)
    assert stream.state_dict() == state


@pytest.mark.parametrize("ends", ["uneven", "drop", "pad"])
def test_ranks_are_even_where_asked(truth: DatasetTruth, ends: str) -> None:
    stream = make_stream(truth, config={"uneven_ends": ends})
    ranks = [list(source_of(stream).iterate(Placement(rank, 4), epoch=0)) for rank in range(4)]
    counts = [len(rank) for rank in ranks]
    assert counts == {"uneven": [8, 8, 7, 7], "drop": [7] * 4, "pad": [8] * 4}[ends]
    assert counts == [source_of(stream).count(Placement(rank, 4)) for rank in range(4)]
    marks = [bool(sample["is_padding"]) for rank in ranks for sample in rank if "is_padding" in sample]
    assert sum(marks) == (2 if ends == "pad" else 0)
    kept = [sample for rank in ranks for sample in rank if not sample.get("is_padding", False)]
    assert len(set(keys_of(kept))) == len(kept)
    stream.close()


def test_a_rank_without_any_sample_repeats_anothers(truth: DatasetTruth) -> None:
    stream = make_stream(truth, episodes=[2], config={"uneven_ends": "pad"})
    assert [keys_of(source_of(stream).iterate(Placement(rank, 3), epoch=0)) for rank in range(3)] == [[(2, 0)]] * 3
    stream.close()


@pytest.mark.parametrize("taken", [0, 3, 7, 8])
def test_padding_is_gone_on_with(truth: DatasetTruth, taken: int) -> None:
    for rank in range(4):
        stream = make_stream(truth, config={"uneven_ends": "pad"})
        whole = list(source_of(stream).iterate(Placement(rank, 4), epoch=0))
        samples = source_of(stream).iterate(Placement(rank, 4), epoch=0)
        given = list(itertools.islice(samples, taken))
        state = samples.state_dict()
        samples.close()
        stream.load_state_dict(saved(state))
        given += source_of(stream).iterate(Placement(rank, 4), epoch=0)
        assert keys_of(given) == keys_of(whole)
        assert [bool(sample["is_padding"]) for sample in given] == [bool(sample["is_padding"]) for sample in whole]
        stream.close()


def test_a_state_behind_padding_is_read_where_there_is_none(truth: DatasetTruth) -> None:
    """All ranks' together: how an epoch ends is a matter of how they share it."""
    padded = make_stream(truth, config={"uneven_ends": "pad"})
    states = []
    for rank in range(4):
        samples = source_of(padded).iterate(Placement(rank, 4), epoch=0)
        assert len(list(itertools.islice(samples, 8))) == 8
        states.append(saved(samples.state_dict()))
        samples.close()
    stream = make_stream(truth, config={"uneven_ends": "drop"})
    stream.load_state_dict(states[3])
    with pytest.raises(StateMismatch, match="merge_states"):
        source_of(stream).planned(Placement(3, 4), 0)
    stream.load_state_dict(af.torch.merge_states(states))
    assert stream.epoch == 1
    for each in (stream, padded):
        each.close()


@pytest.mark.parametrize("state", [None, "x", [1], {}])
def test_value_that_is_no_state_is_refused(stream: af.Stream, state: Any) -> None:  # noqa: ANN401
    with pytest.raises(StateMismatch, match="isn't a state"):
        stream.load_state_dict(state)


def begun_in_epoch(stream: af.Stream, epoch: int) -> State:
    stream.set_epoch(epoch)
    assert len(keys_of(itertools.islice(iter(stream), 7))) == 7
    return saved(stream.state_dict())


@pytest.mark.parametrize("copied", [None, copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("as_dataset", [False, True])
@pytest.mark.parametrize("epoch", [1, 3])
def test_setting_an_epoch_beyond_an_unused_state_is_refused(
    stream: af.Stream,
    other: af.Stream,
    copied: Any,  # noqa: ANN401
    as_dataset: bool,
    epoch: int,
) -> None:
    """Nor is a pass told such a one. That of the state, or any behind a pass that has gone on from it, may be set."""
    state = begun_in_epoch(stream, 2)
    one: Any = af.torch.StreamDataset(other) if as_dataset else other
    one.load_state_dict(begun_in_epoch(stream, 3))
    one.load_state_dict(state)  # the last one counts
    if copied is not None:
        one = copied(one)
    source: af.Stream = one.stream if as_dataset else one
    with pytest.raises(ConfigError, match=rf"goes on with epoch 2, and set_epoch\({epoch}\)"):
        one.set_epoch(epoch)
    with pytest.raises(ConfigError, match=rf"goes on with epoch 2, and samples\(epoch={epoch}\)"):
        source.samples(epoch=epoch)
    one.set_epoch(2)
    assert len(keys_of(itertools.islice(iter(one), 3))) == 3
    one.set_epoch(epoch)
    assert one.state_dict()["epoch"] == epoch
    assert len(keys_of(one)) == TOTAL
    source.close()


def test_state_that_does_not_fit_is_not_ignored(truth: DatasetTruth, stream: af.Stream) -> None:
    state = begun_in_epoch(stream, 2)
    changed = make_stream(truth, seed=1)
    changed.load_state_dict(state)
    with pytest.raises(StateMismatch):
        next(iter(changed))
    changed.set_epoch(0)
    assert len(keys_of(changed)) == TOTAL
    changed.close()


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_epoch_set_before_a_rest_leads_to_its_whole_epoch(
    stream: af.Stream, other: af.Stream, options: dict[str, Any]
) -> None:
    state = begun_in_epoch(stream, 1)
    dataset = af.torch.StreamDataset(other)
    dataset.load_state_dict(state)
    loader = DataLoader(dataset, batch_size=None, **options)
    next(iter(loader))
    dataset.set_epoch(0)
    assert [len(keys_of(loader)) for _ in range(2)] == [TOTAL, TOTAL]


async def test_pass_entered_before_a_state_stops(truth: DatasetTruth, stream: af.Stream) -> None:
    async with af.open_dataset(str(truth.root), features=[], config=stream.config) as dataset:
        source = af.Stream(dataset)
        async with source.samples(epoch=2) as samples:
            assert len(keys_of([await anext(samples) for _ in range(7)])) == 7
            state = saved(samples.state_dict())
        async with source.samples() as samples:
            source.load_state_dict(state)
            with pytest.raises(ConfigError, match="before iterating"):
                await anext(samples)
        async with source.samples() as samples:
            assert len(keys_of([sample async for sample in samples])) == TOTAL - 7


def test_a_state_behind_a_passs_last_sample_is_no_error(stream: af.Stream, other: af.Stream) -> None:
    state = begun_in_epoch(stream, 2)
    for number, _ in enumerate(other, 1):
        if number == TOTAL:
            other.load_state_dict(state)
    assert len(keys_of(other)) == TOTAL - 7


def test_a_copy_does_not_go_on_without_the_state_of_the_other(stream: af.Stream, other: af.Stream) -> None:
    """They count the same epochs."""
    twin = copy.copy(other)
    twin.load_state_dict(begun_in_epoch(stream, 2))
    with pytest.raises(ConfigError, match="a state was loaded"):
        next(iter(other))
    assert len(keys_of(twin)) == TOTAL - 7
    twin.close()
