"""Whose sample comes when: counts, ends, schedules, and going on at any place."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfetch.errors import ConfigError
from asyncfetch.order.mixing import EpochPlace, Mixing

if TYPE_CHECKING:
    from asyncfetch.order.mixing import MixedEpoch


@st.composite
def mixings(draw: st.DrawFn) -> Mixing:
    members = draw(st.integers(1, 5))
    weights = st.tuples(*[st.sampled_from([0.05, 0.3, 0.7, 1.0, 2.0])] * members)
    steps = draw(st.lists(st.integers(1, 120), max_size=2, unique=True))
    return Mixing(
        lengths=tuple(draw(st.integers(1, 30)) for _ in range(members)),
        schedule=tuple((step, draw(weights)) for step in [0, *sorted(steps)]),
        stop_on=draw(st.sampled_from(["first", "all", 1, 17, 100])),
        block_samples=draw(st.sampled_from([1, 1, 2, 7])),
        seed=draw(st.integers(0, 3)),
    )


def members_of(epoch: MixedEpoch) -> list[int]:
    """Whose sample comes, one after the other."""
    found: list[int] = []
    for stage, following in itertools.zip_longest(epoch.stages, epoch.stages[1:]):
        end = epoch.total if following is None else following.first * epoch.block_samples
        counts = [0] * len(epoch.taken)
        heap = stage.turns.walk(counts)
        while len(found) < end:
            member = heap[0][1]
            counts[member] += 1
            heapq.heapreplace(heap, stage.turns.due(member, counts[member]))
            found += [member] * epoch.block_samples
        del found[end:]
    return found


@settings(max_examples=150, deadline=None)
@given(mixing=mixings(), data=st.data())
def test_members_give_samples_in_a_row_from_epoch_to_epoch(mixing: Mixing, data: st.DataObject) -> None:
    taken = [0] * len(mixing.lengths)
    start = 0
    for number in range(4):
        epoch = mixing.epoch(number)
        assert (epoch.start, list(epoch.taken)) == (start, taken)
        cells = epoch.cells()
        assert (cells >= 0).all()
        assert cells.sum() == epoch.total
        samples = dealt(mixing, taken)
        assert members_of(epoch) == [member for member, _ in samples]
        for position in data.draw(st.lists(st.integers(0, epoch.total - 1), max_size=3)):
            member, sample = samples[position]
            counts = epoch.counts(position)
            assert (sum(counts), counts[member]) == (start + position, sample)
        assert epoch.counts(epoch.total) == taken == (np.array(epoch.taken) + cells.sum(axis=0)).tolist()
        start += epoch.total


@settings(max_examples=100, deadline=None)
@given(mixing=mixings(), number=st.integers(0, 200))
def test_epochs_that_are_alike_are_skipped_rightly(mixing: Mixing, number: int) -> None:
    """Where the weights change soon, and where they do so far behind many epochs of a few samples."""
    later = tuple((step * 9, weights) for step, weights in mixing.schedule)
    for schedule in (mixing.schedule, later):
        mixing = replace(mixing, schedule=schedule)
        taken = [0] * len(mixing.lengths)
        for each in range(number):
            epoch = mixing.epoch(each)
            assert list(epoch.taken) == taken
            taken = epoch.counts(epoch.total)
            if each > 30 and epoch.start > schedule[-1][0]:
                break


def dealt(mixing: Mixing, taken: list[int]) -> list[tuple[int, int]]:
    """An epoch's (member, which sample of its run), block behind block without any search; counts on in ``taken``."""
    given, samples = [0] * len(taken), list[tuple[int, int]]()
    stage, turn = -1, list[int]()
    while True:
        now = max(number for number, (step, _) in enumerate(mixing.schedule) if step <= sum(taken))
        if now != stage:
            stage, turn = now, [0] * len(taken)
        turns = mixing._turns[stage]
        member = min(turns.members, key=lambda one: turns.due(one, turn[one]))
        turn[member] += 1
        for _ in range(mixing.block_samples):
            samples.append((member, taken[member]))
            taken[member] += 1
            given[member] += 1
            used_up = [count >= length for count, length in zip(given, mixing.lengths, strict=True)]
            if {"first": any(used_up), "all": all(used_up)}.get(str(mixing.stop_on), len(samples) == mixing.stop_on):
                return samples


@settings(max_examples=150, deadline=None)
@given(mixing=mixings(), data=st.data())
def test_a_run_is_counted_on_in_other_blocks_again_and_again(mixing: Mixing, data: st.DataObject) -> None:
    """From the place of an epoch that was begun, whose blocks stay, or of one that was finished."""
    place, number, position = None, 0, 0
    taken = [0] * len(mixing.lengths)
    expected: list[tuple[int, int]] = []
    for block in data.draw(st.lists(st.sampled_from([1, 2, 3, 8]), min_size=1, max_size=4)):
        mixing = replace(mixing, block_samples=block)
        finished = data.draw(st.integers(0, 2))
        for _ in range(finished + 1):
            is_begun = place is not None and place.epoch == number
            blocks = replace(mixing, block_samples=place.block_samples) if place and is_begun else mixing
            epoch = blocks.epoch(number, place)
            expected = expected if is_begun else dealt(blocks, taken)
            assert epoch.total == len(expected)
            assert members_of(epoch)[position:] == [member for member, _ in expected[position:]]
            place = EpochPlace(number, epoch.block_samples, epoch.taken)
            later = place.epoch + data.draw(st.integers(1, 3))
            between = EpochPlace(number + 1, block, mixing.epoch(number + 1, place).taken)
            assert mixing.epoch(later, place) == mixing.epoch(later, between)
            number, position = number + 1, 0
        if data.draw(st.booleans()):  # stopped within the last of these epochs
            number, position = number - 1, data.draw(st.integers(0, epoch.total - 1))


def test_epoch_before_the_known_one_is_counted_from_the_start() -> None:
    mixing = Mixing((9, 7), ((0, (2, 1)),), "first", 4, 0)
    known = EpochPlace(3, 1, (40, 2))
    assert [mixing.epoch(number, known) for number in range(3)] == [mixing.epoch(number) for number in range(3)]
    assert mixing.epoch(3, known).taken == (40, 2)
    assert mixing.epoch(3, known).block_samples == 4


def test_epoch_far_before_a_change_of_weights_is_found_at_once() -> None:
    mixing = Mixing((9, 7), ((0, (1, 0)), (10**15, (1, 1))), 10, 1, 0)
    assert mixing.epoch(10**14 - 1).taken == (10**15 - 10, 0)
    assert mixing.epoch(10**14 + 1).taken == (10**15 + 5, 5)


@settings(max_examples=100, deadline=None)
@given(mixing=mixings())
def test_an_epoch_ends_where_it_is_told_to(mixing: Mixing) -> None:
    for number in range(3):
        epoch = mixing.epoch(number)
        members = members_of(epoch)
        used_up = [members.count(member) >= length for member, length in enumerate(mixing.lengths)]
        at_last = members[-1]
        if isinstance(mixing.stop_on, int):
            assert len(members) == mixing.stop_on
        else:
            assert members.count(at_last) == mixing.lengths[at_last]  # with its very last sample
            assert all(used_up) if mixing.stop_on == "all" else sum(used_up) == 1


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.floats(0.01, 1), min_size=2, max_size=6),
    seed=st.integers(0, 99),
    block=st.sampled_from([1, 4]),
)
def test_any_beginning_has_the_weights_shares(weights: list[float], seed: int, block: int) -> None:
    mixing = Mixing((10**6,) * len(weights), ((0, tuple(weights)),), 400 * block, block, seed)
    shares = [weight / sum(weights) for weight in weights]
    counts = [0] * len(weights)
    for blocks, member in enumerate(members_of(mixing.epoch(0))[::block], 1):
        counts[member] += 1
        for count, share in zip(counts, shares, strict=True):
            assert abs(count - share * blocks) < 1 + (len(weights) - 2) * share + 1e-6


def test_a_schedule_changes_the_weights_at_its_step_of_the_run() -> None:
    mixing = Mixing((1000, 1000, 1000), ((0, (1, 0, 0)), (25, (0, 1, 0)), (47, (0, 0, 1))), 20, 4, 0)
    run = [member for number in range(4) for member in members_of(mixing.epoch(number))]
    assert run == [0] * 28 + [1] * 20 + [2] * 32  # at the first blocks of 4 that begin at 25 and 47 or behind


def test_a_block_is_of_one_member() -> None:
    members = members_of(Mixing((100, 70), ((0, (2, 1)),), "all", 8, 5).epoch(0))
    assert {len(set(members[start : start + 8])) for start in range(0, len(members), 8)} == {1}


def test_seeds_differ_and_far_places_are_found_at_once() -> None:
    weights = ((0, (3.0, 2.0, 5.0)),)
    assert len({tuple(members_of(Mixing((99,) * 3, weights, 50, 1, seed).epoch(0))) for seed in range(20)}) > 3
    epoch = Mixing((10**9,) * 3, weights, 10**12, 1, 0).epoch(10**6)
    counts = epoch.counts(10**11 + 1)
    assert sum(counts) == 10**18 + 10**11 + 1
    assert [round(count / sum(counts), 9) for count in counts] == [0.3, 0.2, 0.5]


@pytest.mark.parametrize(
    ("lengths", "weights", "stop_on", "message"),
    [((5, 0), (1, 1), "first", "member 1 .* no samples"), ((5, 5), (1, 0), "all", "never come about")],
)
def test_an_epoch_without_end_is_refused(
    lengths: tuple[int, ...], weights: tuple[float, ...], stop_on: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Mixing(lengths, ((0, weights),), stop_on, 1, 0)  # type: ignore[arg-type]
