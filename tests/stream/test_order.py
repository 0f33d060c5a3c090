from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfetch.errors import ConfigError
from asyncfetch.stream.order import Order, permute

lengths_strategy = st.lists(st.integers(0, 40), max_size=24)
lanes_strategy = st.sampled_from([1, 2, 4, 8])


def order(
    lengths: list[int], *, shuffle: bool = True, seed: int = 0, epoch: int = 0, lanes: int = 4, pool: int = 8
) -> Order:
    return Order(
        np.array(lengths, dtype=np.int64), shuffle=shuffle, seed=seed, epoch=epoch, lanes=lanes, pool_episodes=pool
    )


def frames(lengths: list[int]) -> Counter[tuple[int, int]]:
    return Counter((episode, frame) for episode, length in enumerate(lengths) for frame in range(length))


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permute_is_a_bijection(size: int, key: int) -> None:
    assert sorted(permute(index, size, key) for index in range(size)) == list(range(size))


def test_permute_of_ten_million_needs_no_table() -> None:
    size = 10_000_000
    assert len({permute(index, size, 7) for index in range(1000)}) == 1000


@given(
    lengths=lengths_strategy,
    lanes=lanes_strategy,
    per_lane=st.integers(1, 3),
    consumers=st.integers(1, 9),
    shuffle=st.booleans(),
)
def test_consumers_together_take_every_frame_once(
    lengths: list[int], lanes: int, per_lane: int, consumers: int, shuffle: bool
) -> None:
    whole = order(lengths, shuffle=shuffle, lanes=lanes, pool=lanes * per_lane)
    taken = [[(step.episode, step.frame) for step in whole.steps(k, consumers)] for k in range(consumers)]
    assert Counter(itertools.chain.from_iterable(taken)) == frames(lengths)
    assert [len(part) for part in taken] == [whole.count(k, consumers) for k in range(consumers)]


@given(lengths=lengths_strategy, lanes=lanes_strategy, consumers=st.integers(1, 9))
def test_the_global_order_is_the_same_for_every_number_of_consumers(
    lengths: list[int], lanes: int, consumers: int
) -> None:
    whole = order(lengths, lanes=lanes, pool=2 * lanes)
    alone = [(step.episode, step.frame) for step in whole.steps()]
    for consumer in range(consumers):
        part = [(step.episode, step.frame) for step in whole.steps(consumer, consumers)]
        assert part == alone[consumer::consumers]


@given(lengths=lengths_strategy, lanes=lanes_strategy, consumers=st.integers(1, 5), shuffle=st.booleans())
def test_an_episode_is_finished_once_and_never_used_afterwards(
    lengths: list[int], lanes: int, consumers: int, shuffle: bool
) -> None:
    whole = order(lengths, shuffle=shuffle, lanes=lanes, pool=lanes)
    for consumer in range(consumers):
        gone: set[int] = set()
        for step in whole.steps(consumer, consumers):
            assert step.episode not in gone
            assert not gone.intersection(step.finished)
            gone.update(step.finished)


@given(lengths=lengths_strategy, lanes=lanes_strategy, consumers=st.integers(1, 5))
def test_episodes_are_named_in_the_order_of_first_use(lengths: list[int], lanes: int, consumers: int) -> None:
    whole = order(lengths, lanes=lanes, pool=lanes)
    for consumer in range(consumers):
        first_uses = dict.fromkeys(step.episode for step in whole.steps(consumer, consumers))
        assert list(whole.episodes(consumer, consumers)) == list(first_uses)


@given(lengths=lengths_strategy, lanes=lanes_strategy, per_lane=st.integers(1, 3))
def test_no_more_episodes_are_open_than_the_pool_holds(lengths: list[int], lanes: int, per_lane: int) -> None:
    whole = order(lengths, lanes=lanes, pool=lanes * per_lane)
    open_now: set[int] = set()
    for step in whole.steps():
        open_now.add(step.episode)
        assert len(open_now) <= lanes * per_lane
        open_now.difference_update(step.finished)
    assert not open_now


def test_whole_lanes_go_to_one_consumer_while_consumers_divide_the_lanes() -> None:
    whole = order([30] * 64, lanes=8, pool=8)
    owners: dict[int, set[int]] = {}
    for consumer in range(4):
        for step in itertools.islice(whole.steps(consumer, 4), 200):
            owners.setdefault(step.episode, set()).add(consumer)
    assert all(len(consumers) == 1 for consumers in owners.values())


def test_sequential_order_is_the_order_of_the_dataset() -> None:
    steps = order([2, 0, 3], shuffle=False).steps()
    assert [(step.episode, step.frame) for step in steps] == [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2)]


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    def first(seed: int, epoch: int) -> list[tuple[int, int]]:
        return [(step.episode, step.frame) for step in order([20] * 30, seed=seed, epoch=epoch).steps()]

    assert first(0, 0) == first(0, 0)
    assert first(0, 0) != first(1, 0)
    assert first(0, 0) != first(0, 1)
    assert first(1, 0) != first(0, 1)


def test_the_order_is_frozen_across_releases() -> None:
    # A saved position means the same after an upgrade only while these values stay as they are.
    steps = itertools.islice(order([5, 3, 4, 6], lanes=2, pool=4, seed=3, epoch=1).steps(), 6)
    assert [(step.episode, step.frame) for step in steps] == [(0, 4), (2, 0), (3, 1), (1, 0), (0, 1), (1, 2)]


def test_neighbours_come_from_as_many_episodes_as_there_are_lanes() -> None:
    window = itertools.islice(order([100] * 200, lanes=64, pool=64).steps(), 64)
    assert len({step.episode for step in window}) == 64


def test_lanes_stay_level_to_the_end() -> None:
    # When the first lane finds no further episode, the others hold what is left of one episode each.
    lanes, longest = 8, 50
    lengths = [int(length) for length in np.random.default_rng(0).integers(10, longest, 100)]
    episodes = [step.episode for step in order(lengths, lanes=lanes, pool=lanes).steps()]
    level = next(at for at in range(0, len(episodes), lanes) if len(set(episodes[at : at + lanes])) < lanes)
    assert len(episodes) - level <= lanes * longest


@pytest.mark.parametrize(("lanes", "pool"), [(0, 1), (4, 3)])
def test_a_pool_smaller_than_the_lanes_is_refused(lanes: int, pool: int) -> None:
    with pytest.raises(ConfigError, match="pool_episodes"):
        order([1], lanes=lanes, pool=pool)


def test_a_consumer_outside_of_the_consumers_is_refused() -> None:
    with pytest.raises(ConfigError, match="consumer 2"):
        next(order([1]).steps(2, 2))
