"""A mixture that is gone on with by other numbers of ranks and batch sizes, and what its states say of the run."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncfetch as af
from asyncfetch.errors import ConfigError, StateMismatch
from asyncfetch.order.mixing import Mixing
from asyncfetch.order.state import beginning
from asyncfetch.stream import Placement
from asyncfetch.stream.epoch_stream import source_of
from asyncfetch.stream.mixture import MixtureSource
from asyncfetch.torch import merge_states
from tests.order.test_mixing import dealt
from tests.stream.test_mixture import SEVERAL_STREAMS, WEIGHTS, any_moment, keys, keys_of, member, saved

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncfetch.order.mixing import StopOn
    from asyncfetch.order.state import State
    from asyncfetch.testing import DatasetTruth
    from tests.stream.test_mixture import Key


def members(truths: list[DatasetTruth]) -> list[af.Stream]:
    """That disagree in their keys."""
    features = [["action"], [], []]
    return [member(str(each.root), features=features[number]) for number, each in enumerate(truths)]


def parted(truths: list[DatasetTruth], **options: Any) -> af.Mixture:  # noqa: ANN401
    """Of members that disagree, so that each batch is of one of them, without any pictures."""
    return af.Mixture(members(truths), **{"weights": WEIGHTS, "stop_on": "all", **options})


@pytest.fixture
def runs(truths: list[DatasetTruth]) -> Any:  # noqa: ANN401
    """A mixture for each end of epochs, and what each member gives: (member, which place on its line) -> key."""
    made = {stop_on: parted(truths, stop_on=stop_on) for stop_on in ("first", "all", 25)}
    lines = source_of(made["all"]).session().opened().lines(1)

    def own(number: int, place: int) -> Key:
        piece = lines[number].piece(place, place + 1)
        return number, piece.episode, piece.start

    yield made, own
    for mixed in made.values():
        mixed.close()


@SEVERAL_STREAMS
@settings(any_moment, max_examples=10)
@given(data=st.data(), stop_on=st.sampled_from(["first", "all", 25]))
def test_members_give_all_once_over_a_chain_of_layouts(
    truths: list[DatasetTruth],
    runs: Any,  # noqa: ANN401
    data: st.DataObject,
    stop_on: StopOn,
) -> None:
    """However many ranks of whatever batch size, stopped anywhere: as if each epoch had been dealt out at its begin."""
    mixed, own = runs[0][stop_on], runs[1]
    given: dict[int, Counter[Key]] = {}
    blocks: dict[int, int] = {}
    state = beginning(0)
    layouts = st.tuples(st.integers(1, 3), st.sampled_from([1, 3, 4]), st.integers(0, 2), st.integers(0, 30))
    for world_size, size, epochs, stop in [*data.draw(st.lists(layouts, min_size=1, max_size=3)), (1, 2, 1, 0)]:
        states = []
        for rank in range(world_size):
            mixed.load_state_dict(state)
            for left in reversed(range(epochs + 1)):
                epoch = mixed.epoch
                samples = source_of(mixed).iterate(Placement(rank, world_size, batch_size=size))
                taken = itertools.islice(samples, None if left else stop + rank)
                given.setdefault(epoch, Counter()).update(keys(taken))
                blocks.setdefault(epoch, size * world_size)
            states.append(samples.state_dict())
            samples.close()
        state = saved(merge_states(states))
    counts = [0, 0, 0]
    lengths = tuple(each.num_frames for each in truths)
    source = source_of(mixed)
    assert isinstance(source, MixtureSource)
    for epoch, block in sorted(blocks.items()):
        expected = Counter(own(*each) for each in dealt(Mixing(lengths, source.schedule, stop_on, block, 0), counts))
        assert given[epoch] == expected if epoch < max(blocks) else given[epoch] <= expected


@SEVERAL_STREAMS
@settings(any_moment, max_examples=10)
@given(data=st.data(), ends=st.sampled_from(["uneven", "drop", "pad"]), drop_last=st.booleans())
def test_batches_of_a_rest_are_the_same_for_any_number_of_ranks(
    truths: list[DatasetTruth],
    data: st.DataObject,
    ends: Any,  # noqa: ANN401
    drop_last: bool,
) -> None:
    """Of one member each, in one epoch that is stopped again and again and gone on with by other ranks and batches."""
    mixed = parted(truths, config=af.StreamConfig(uneven_ends=ends, pool_segments=8))
    given = Counter[Any]()
    state = beginning(0)
    layouts = st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 4, 5]), st.integers(1, 6))
    chain = [*data.draw(st.lists(layouts, min_size=1, max_size=3)), (2, 4, None)]
    whole = Counter(keys(source_of(mixed).iterate(Placement(batch_size=chain[0][0] * chain[0][1]), epoch=0)))
    for world_size, size, stop in chain:
        states, counts = [], []
        for rank in range(world_size):
            with pytest.MonkeyPatch.context() as environment:
                environment.setenv("RANK", str(rank))
                environment.setenv("WORLD_SIZE", str(world_size))
                dataset = af.torch.StreamDataset(mixed, size, drop_last=drop_last)
                dataset.load_state_dict(state)
                if dataset.stream.epoch:
                    break  # nothing was left
                batches = list(itertools.islice(dataset, None if stop is None else stop + rank))
                states.append(dataset.state_dict())
            assert all(len({number for number, *_ in keys_of(batch)}) == 1 for batch in batches)
            assert not drop_last or {*sizes(batches)} <= {size}
            counts.append(sizes(batches))
            paddings = [batch.get("is_padding", torch.zeros(len(keys_of(batch)))).tolist() for batch in batches]
            samples = [sample for batch in batches for sample in keys_of(batch)]
            given.update(
                sample for sample, padding in zip(samples, itertools.chain(*paddings), strict=True) if not padding
            )
        if mixed.epoch and not states:
            break
        if stop is None and ends != "uneven" and chain[-2][0] != world_size:  # else one was ahead, and stays so
            assert counts[0] == counts[1]
        state = saved(merge_states(states))
    assert given <= whole
    lost = Counter(number for number, *_ in (whole - given).elements())
    # Of each member at most, by the batches of the last two ranks, or of those whose epoch ended in front of them.
    most = 3 * 5 if drop_last else 3 if ends == "drop" else 1
    assert all(count < most for count in lost.values())
    mixed.close()


def test_state_of_one_rank_is_refused_for_another_batch_size(truths: list[DatasetTruth]) -> None:
    mixed = parted(truths)
    assert len(list(itertools.islice(source_of(mixed).iterate(Placement(1, 2, batch_size=4)), 8))) == 8
    state = saved(mixed.state_dict())
    for size in (2, 3, 8):
        mixed.load_state_dict(state)
        with pytest.raises(StateMismatch, match=r"1 of the 2 consumers .* shared the epoch, .*load .*merge_states"):
            next(source_of(mixed).iterate(Placement(1, 2, batch_size=size)))
    mixed.load_state_dict(state)
    assert len(list(source_of(mixed).iterate(Placement(1, 2, batch_size=4)))) > 8
    mixed.close()


def test_a_rest_of_other_members_is_refused_with_both(truths: list[DatasetTruth]) -> None:
    """Whatever it says of what was dealt out anew."""
    mixed = parted(truths)
    next(iter(af.torch.StreamDataset(mixed, 4)))
    mixed.load_state_dict(saved(mixed.state_dict()))
    next(iter(af.torch.StreamDataset(mixed, 3)))
    state = saved(mixed.state_dict())
    mixed.close()
    assert len(state["legs"]) == 2
    fewer = af.Mixture(members(truths)[:2], [1, 1], stop_on="all")
    fewer.load_state_dict(state)
    with pytest.raises(StateMismatch, match=r"a mixture of 3 members, .* can't be loaded into a mixture of 2 members"):
        next(iter(fewer))
    fewer.close()


@pytest.fixture
def odd_rest(truths: list[DatasetTruth], monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401
    """The dataset of one of two ranks, and how many batches of 3 each has of a rest where the first has more."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    mixed = parted(truths, stop_on=22)
    next(iter(source_of(mixed).iterate(Placement(batch_size=4))))
    state = saved(mixed.state_dict())
    dataset = af.torch.StreamDataset(mixed, 3)

    def rest_of(rank: int) -> list[list[Key]]:
        monkeypatch.setenv("RANK", str(rank))
        dataset.load_state_dict(state)
        return [keys_of(batch) for batch in dataset]

    counts = [len(rest_of(rank)) for rank in (0, 1)]
    assert counts[0] > counts[1]

    def begin(rank: int) -> Any:  # noqa: ANN401
        monkeypatch.setenv("RANK", str(rank))
        dataset.load_state_dict(state)
        return dataset

    yield begin, counts
    mixed.close()


def test_rank_without_the_last_batches_does_not_end_the_epoch(odd_rest: Any) -> None:  # noqa: ANN401
    begin, counts = odd_rest
    dataset = begin(1)
    assert len(list(itertools.islice(dataset, counts[1]))) == counts[1]
    own = saved(dataset.state_dict())
    dataset = begin(0)
    assert len(list(itertools.islice(dataset, counts[1]))) == counts[1]
    state = saved(merge_states([dataset.state_dict(), own]))
    dataset.load_state_dict(own)
    assert dataset.stream.epoch == 0
    dataset.load_state_dict(state)
    assert dataset.stream.epoch == 0
    assert len(list(dataset)) == counts[0] - counts[1]


def test_batches_are_counted_as_they_are_given(odd_rest: Any) -> None:  # noqa: ANN401
    """None is counted that a rank doesn't get, and behind the last one nothing is left."""
    begin, counts = odd_rest
    states = []
    for rank in (0, 1):
        dataset = begin(rank)
        states.append(dataset.state_after(counts[rank]))
        assert len(dataset.state_after(counts[rank] - 1)["legs"][-1]["given"]) == 1
        with pytest.raises(ConfigError, match=f"isn't among the {counts[rank]} of"):
            dataset.state_after(counts[rank] + 1)
    dataset.load_state_dict(saved(merge_states(states)))
    assert dataset.stream.epoch == 1


def sizes(batches: Iterable[dict[str, Any]]) -> list[int]:
    return [len(batch["dataset"]) for batch in batches]


@pytest.mark.usefixtures("programs_are_warm")
def test_blocks_of_another_batch_size_last_for_one_epoch(truths: list[DatasetTruth]) -> None:
    """Here and in a process beside, whose epochs' ends are known here, too; from within an epoch and from its end."""
    begun_with = parted(truths)
    batches = iter(af.torch.StreamDataset(begun_with, 3))
    for _ in range(4):
        next(batches)
    within = saved(begun_with.state_dict())
    assert sizes(batches)
    at_the_end = saved(begun_with.state_dict())
    begun_with.close()
    assert within["order"]["block_samples"] == at_the_end["order"]["block_samples"] == 3
    assert (within["order"]["epoch"], at_the_end["order"]["epoch"], at_the_end["epoch"]) == (0, 0, 1)
    here, beside = parted(truths), parted(truths)
    dataset = af.torch.StreamDataset(here, 4)
    with af.serve_samples(beside, 4) as served:
        for state in (within, at_the_end, within):
            dataset.load_state_dict(state)
            served.load_state_dict(state)
            for epoch in range(state["epoch"], 3):
                given = [keys_of(batch) for batch in dataset]
                assert [keys_of(batch) for batch in served] == given
                assert saved(served.state_dict()) == saved(dataset.state_dict())
                assert all(len({number for number, *_ in batch}) == 1 for batch in given)
                assert ({*map(len, given[:-1])} == {4}) == (epoch > 0)
    here.close()
    beside.close()


def test_set_epoch_is_counted_on_unless_it_lies_ahead(truths: list[DatasetTruth]) -> None:
    """For every rank alike; and what is only looked at is nothing that the run goes on from."""
    one, other, fresh = (parted(truths) for _ in range(3))
    by_three, by_four = Placement(batch_size=3), Placement(batch_size=4)
    one.set_epoch(2)
    assert len(list(itertools.islice(source_of(one).iterate(by_three), 5))) == 5
    for each in (one, other):
        each.load_state_dict(saved(one.state_dict()))
    assert keys(source_of(one).iterate(by_four)) == keys(source_of(other).iterate(by_four))
    assert other.epoch == 3
    state = other.state_dict()
    assert keys(source_of(other).iterate(by_four, epoch=7))
    assert keys(source_of(other).iterate(by_four, epoch=1)) == keys(source_of(fresh).iterate(by_four, epoch=1))
    other.load_state_dict(saved(other.state_dict()))
    assert keys(source_of(one).iterate(by_four)) == keys(source_of(other).iterate(by_four))
    one.load_state_dict(state)
    one.set_epoch(5)
    other.set_epoch(5)
    assert keys(source_of(one).iterate(by_four)) == keys(source_of(other).iterate(by_four))
    for each in (one, other, fresh):
        each.close()


def test_ranks_on_both_sides_of_an_epochs_beginning_are_merged(truths: list[DatasetTruth]) -> None:
    """They know the places of two epochs, which is no contradiction."""
    mixed = parted(truths, stop_on=25)
    states = []
    for rank, count in enumerate((5, 0)):
        mixed.load_state_dict(beginning(0))
        placement = Placement(rank, 2, batch_size=4)
        assert keys(source_of(mixed).iterate(placement))
        if count:
            assert len(list(itertools.islice(source_of(mixed).iterate(placement), count))) == count
        states.append(saved(mixed.state_dict()))
    assert [state["order"]["epoch"] for state in states] == [1, 0]
    merged = merge_states(states)
    assert merged["order"] == states[0]["order"]
    assert [(rank, worker[:2]) for rank, _, _, worker in merged["legs"][-1]["given"]] == [(0, [0, 5]), (1, [0, 0])]
    apart = states[1] | {"order": states[1]["order"] | {"taken": [0, 1, 2]}}
    with pytest.raises(StateMismatch, match="differ in order"):
        merge_states([states[1], apart])
    mixed.close()


@pytest.fixture(scope="module")
def begun(truths: list[DatasetTruth]) -> Any:  # noqa: ANN401
    """A mixture and its state."""
    mixed = parted(truths)
    next(iter(mixed))
    yield mixed, mixed.state_dict()
    mixed.close()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"version": None}, "version None of a mixture.s order, .* reads 3: go on with the asyncfetch that wrote it"),
        ({"version": 2}, "version 2 of a mixture's order, and this asyncfetch reads 3"),
        ({"taken": [0, 0]}, "must say of its members what was taken"),
        ({"taken": [0, 0, -1]}, "must say of its members what was taken"),
        ({"taken": "000"}, "must say of its members what was taken"),
        ({"block_samples": 0}, "must say of its members what was taken"),
        ({"epoch": 4}, "the state is of epoch 0, and its order of epoch 4"),
    ],
    ids=str,
)
def test_a_damaged_place_in_the_run_is_refused_at_once(
    begun: tuple[af.Mixture, State], damage: dict[str, Any], message: str
) -> None:
    mixed, state = begun
    with pytest.raises(StateMismatch, match=message):
        mixed.load_state_dict(state | {"order": state["order"] | damage})
    old = {name: state["order"][name] for name in ("members", "weights", "stop_on", "seed", "block_samples")}
    with pytest.raises(StateMismatch, match="version 1 of a mixture's order"):
        mixed.load_state_dict(state | {"order": old})
