from __future__ import annotations

import itertools
import sys
import tracemalloc
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import numpy as np
import pytest
from asyncfetch.stream.order import Order, draw_key, permute
from asyncfetch.stream.placement import Placement
from hypothesis import given
from hypothesis import strategies as st

from asyncfetch.errors import ConfigError

if TYPE_CHECKING:
    from types import FrameType

    from asyncfetch.stream.order import SlotAssignment

lengths_strategy = st.lists(st.integers(0, 40), max_size=24)
lanes_strategy = st.sampled_from([1, 2, 4, 8])


@st.composite
def orders(draw: st.DrawFn) -> Order:
    lanes = draw(lanes_strategy)
    return order(
        draw(lengths_strategy),
        shuffle=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
        lanes=lanes,
        pool=lanes * draw(st.integers(1, 3)),
        group=draw(st.integers(1, 5)),
    )


def order(
    lengths: list[int],
    *,
    shuffle: bool = True,
    seed: int = 0,
    epoch: int = 0,
    lanes: int = 4,
    pool: int = 8,
    group: int = 1,
) -> Order:
    return Order(
        np.array(lengths, dtype=np.int64),
        shuffle=shuffle,
        seed=seed,
        epoch=epoch,
        lanes=lanes,
        pool_segments=pool,
        group_frames=group,
    )


def drawn(whole: Order, start: int = 0, step: int = 1) -> list[tuple[int, int]]:
    return [(one.episode, one.frame) for one in whole.steps(range(start, len(whole), step))]


def mixed(value: int) -> int:
    """Splitmix64's finaliser."""
    value %= 1 << 64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % (1 << 64)
    return value ^ (value >> 31)


def plain_turns(whole: Order, assignment: SlotAssignment, cycle: int) -> list[int]:
    """All slots, of which those are left that are taken."""
    per_lane = whole.slots // whole.lanes
    key = draw_key("cycle", whole.seed, whole.epoch, cycle)
    begin = [mixed(lane + key) % per_lane for lane in range(whole.lanes)]
    slots = [
        (turn + begin[lane]) % per_lane * whole.lanes + lane for turn in range(per_lane) for lane in range(whole.lanes)
    ]
    return [slot for slot in slots if slot in assignment.episodes]


def plain_frames(whole: Order, episode: int) -> list[int]:
    """All frames of whole groups, of which those are left that there are."""
    length, size = whole.lengths[episode], whole.group_frames
    key = draw_key("frames", whole.seed, whole.epoch, episode)
    groups = sorted(range(-(-length // size)), key=lambda group: mixed((group + 1) * 0x9E3779B97F4A7C15 + key))
    return [frame for group in groups for frame in range(group * size, (group + 1) * size) if frame < length]


def work(whole: Order) -> tuple[int, int]:
    """What it takes to go through an order: calls, and bytes at the peak."""
    calls = 0

    def count(_: FrameType, event: str, __: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    drawn(whole)  # what is made once is there then
    tracemalloc.start()
    sys.setprofile(count)
    try:
        drawn(whole)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        sys.setprofile(None)
        tracemalloc.stop()
    return calls, peak_bytes


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permute_is_a_bijection(size: int, key: int) -> None:
    assert sorted(permute(np.arange(size), size, key).tolist()) == list(range(size))


def test_permute_of_ten_million_needs_no_table() -> None:
    assert len(set(permute(np.arange(1000), 10_000_000, 7).tolist())) == 1000


@given(whole=orders())
def test_every_frame_comes_once(whole: Order) -> None:
    frames = [(episode, frame) for episode, length in enumerate(whole.lengths) for frame in range(length)]
    assert sorted(drawn(whole)) == frames


@given(whole=orders(), start=st.integers(0, 100), step=st.integers(1, 9))
def test_any_part_of_the_order_is_found_without_what_is_in_front_of_it(whole: Order, start: int, step: int) -> None:
    assert drawn(whole, start, step) == drawn(whole)[start::step]


@given(whole=orders(), start=st.integers(0, 100))
def test_a_assignment_serves_several_and_stays_as_it_is(whole: Order, start: int) -> None:
    assignment = whole.assignment(start)
    for _ in range(2):
        steps = whole.steps(range(start, len(whole)), assignment)
        assert [(one.episode, one.frame) for one in steps] == drawn(whole)[start:]


@given(whole=orders(), consumers=st.integers(1, 5))
def test_an_episode_is_finished_once_and_never_used_afterwards(whole: Order, consumers: int) -> None:
    for consumer in range(consumers):
        gone: set[int] = set()
        for step in whole.steps(range(consumer, len(whole), consumers)):
            assert step.episode not in gone
            assert not gone.intersection(step.finished)
            gone.update(step.finished)


@given(whole=orders())
def test_no_more_episodes_are_open_than_the_pool_holds(whole: Order) -> None:
    open_now: set[int] = set()
    for step in whole.steps(range(len(whole))):
        open_now.add(step.episode)
        assert len(open_now) <= whole.slots
        open_now.difference_update(step.finished)
    assert len(open_now) <= whole.slots


@pytest.mark.parametrize(("lanes", "pool"), [(8, 8), (8, 24)])
@pytest.mark.parametrize("consumers", [1, 2, 4, 8])
def test_whole_lanes_go_to_one_consumer_while_consumers_divide_the_lanes(lanes: int, pool: int, consumers: int) -> None:
    whole = order([30] * 64, lanes=lanes, pool=pool)
    owners: defaultdict[int, set[int]] = defaultdict(set)
    for consumer in range(consumers):
        for episode, _ in drawn(whole, consumer, consumers)[: 600 // consumers]:
            owners[episode].add(consumer)
    # Of those that begin on several slots, these may be other consumers' where they don't lie a round of them apart.
    pairs, lent = whole.slots // 2, whole.slots // 4
    several = pairs if pairs % consumers else lent if lent % consumers else 0
    assert sum(len(owning) > 1 for owning in owners.values()) <= several
    assert whole.open_segments(Placement(0, consumers)) == pool // consumers


def test_who_takes_blocks_keeps_whole_lanes_where_these_divide_the_lanes() -> None:
    whole = order([30] * 64, lanes=8, pool=8)
    assert whole.open_segments(Placement(0, 1, 0, 2, block_samples=4)) == 4
    assert whole.open_segments(Placement(0, 1, 0, 2, block_samples=8)) == 8
    assert whole.open_segments(Placement(0, 3)) == 8


def test_no_more_episodes_are_open_than_there_are() -> None:
    whole = order([30] * 6, lanes=8, pool=2**20)
    assert whole.open_segments(Placement()) == 6
    assert whole.open_segments(Placement(0, 3)) == 6
    assert whole.pool(Placement()) == (6, 180)


@given(length=st.integers(1, 40), group=st.integers(1, 6))
def test_the_frames_of_a_group_come_in_a_row(length: int, group: int) -> None:
    frames = order([length], group=group).frames(0).tolist()
    groups = [list(run) for _, run in itertools.groupby(frames, lambda frame: frame // group)]
    assert sorted(groups) == [list(range(start, min(start + group, length))) for start in range(0, length, group)]


@given(whole=orders())
def test_the_readers_of_a_shared_episode_go_through_different_groups(whole: Order) -> None:
    """But for those where one part ends and another begins: so none begins a group anew for the sake of another."""
    of_reader: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for step in whole.steps(range(len(whole))):
        of_reader[step.episode, step.reader].append(step.frame)
    groups: defaultdict[int, list[int]] = defaultdict(list)
    readers: Counter[int] = Counter()
    for (episode, _), frames in of_reader.items():
        runs = [
            (group, list(run)) for group, run in itertools.groupby(frames, lambda frame: frame // whole.group_frames)
        ]
        assert all(run == list(range(run[0], run[0] + len(run))) for _, run in runs)
        assert len({group for group, _ in runs}) == len(runs)
        groups[episode] += [group for group, _ in runs]
        readers[episode] += 1
    assert all(len(begun) - len(set(begun)) < readers[episode] for episode, begun in groups.items())


def test_groups_are_drawn() -> None:
    frames = [frame for _, frame in drawn(order([40], lanes=1, pool=1, group=2))]
    assert frames[::2] != sorted(frames[::2])


def test_sequential_order_is_the_order_of_the_dataset() -> None:
    assert drawn(order([2, 0, 3], shuffle=False, group=2)) == [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2)]


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    def first(seed: int, epoch: int) -> list[tuple[int, int]]:
        return drawn(order([20] * 30, seed=seed, epoch=epoch))

    assert first(0, 0) == first(0, 0)
    assert first(0, 0) != first(1, 0)
    assert first(0, 0) != first(0, 1)
    assert first(1, 0) != first(0, 1)


def test_the_order_is_frozen_across_releases() -> None:
    # A saved position means the same after an upgrade only while these values stay as they are.
    assert drawn(order([5, 3, 4, 6, 2], lanes=2, pool=4, group=2, seed=3, epoch=1))[:9] == [
        (3, 2),
        (4, 0),
        (2, 0),
        (1, 0),
        (3, 3),
        (1, 1),
        (2, 1),
        (4, 1),
        (3, 4),
    ]


@pytest.mark.parametrize(
    ("lanes", "pool", "group", "expected"),
    [
        (2, 10, 2, [(1, 0), (0, 2), (2, 0), (1, 1), (0, 3), (2, 1), (1, 2), (0, 0), (2, 2), (0, 4), (0, 1), (2, 3)]),
        (8, 16, 50, [(1, 0), (2, 0), (0, 0), (2, 1), (0, 1), (1, 1), (1, 2), (2, 2), (0, 2), (2, 3), (0, 3), (0, 4)]),
    ],
)
def test_the_order_of_a_pool_larger_than_the_dataset_is_frozen_too(
    lanes: int, pool: int, group: int, expected: list[tuple[int, int]]
) -> None:
    assert drawn(order([5, 3, 4], lanes=lanes, pool=pool, group=group, seed=3, epoch=1)) == expected


@given(
    lengths=lengths_strategy,
    seed=st.integers(0, 9),
    lanes=lanes_strategy,
    per_lane=st.integers(1, 40),
    group=st.integers(1, 100),
)
def test_turns_and_frames_are_those_of_all_slots_and_of_whole_groups(
    lengths: list[int], seed: int, lanes: int, per_lane: int, group: int
) -> None:
    whole = order(lengths, seed=seed, lanes=lanes, pool=lanes * per_lane, group=group)
    assignment = whole.assignment()
    while assignment.episodes:
        assert list(whole.turns(assignment, assignment.cycle)) == plain_turns(whole, assignment, assignment.cycle)
        assignment.advance()
    for episode in range(len(lengths)):
        assert whole.frames(episode).tolist() == plain_frames(whole, episode)


@pytest.mark.parametrize(
    ("lanes", "pool", "group"), [(2, 2**20, 2), (2**19, 2**20, 2), (2**20, 2**20, 2), (2, 16, 2**20)]
)
def test_a_setting_above_what_there_is_costs_no_more(lanes: int, pool: int, group: int) -> None:
    lengths = [5, 9, 1, 7, 12, 3]
    most_calls, most_bytes = work(order(lengths, lanes=2, pool=16, group=12))
    calls, peak_bytes = work(order(lengths, lanes=lanes, pool=pool, group=group))
    assert calls < 1.5 * most_calls
    assert peak_bytes < most_bytes + 2**14


@pytest.mark.parametrize(("lanes", "position", "is_far"), [(64, 0, False), (64, 1, True), (2000, 0, True)])
def test_a_assignment_that_takes_long_to_find_is_known_beforehand(lanes: int, position: int, *, is_far: bool) -> None:
    assert order([5] * 2000, lanes=lanes, pool=lanes).is_far(position) is is_far
    assert not order([5] * 64, lanes=lanes, pool=lanes).is_far(0)


@pytest.mark.parametrize("lanes", [1, 2**70])
def test_settings_of_any_size_mean_all_there_is(lanes: int) -> None:
    whole = order([5, 0, 3], lanes=lanes, pool=2**80, group=2**80)
    assert sorted(drawn(whole)) == [*((0, frame) for frame in range(5)), *((2, frame) for frame in range(3))]
    assert whole.frames(0).tolist() == [0, 1, 2, 3, 4]


def test_neighbours_come_from_as_many_episodes_as_there_are_lanes() -> None:
    steps = drawn(order([100] * 200, lanes=64, pool=64))
    assert all(len({episode for episode, _ in steps[start : start + 16]}) == 16 for start in range(0, 1000, 7))
    assert all(len({episode for episode, _ in steps[start : start + 32]}) == 32 for start in range(1000, 15_000, 7))
    assert all(len({episode for episode, _ in steps[start : start + 64]}) == 64 for start in range(6400, 12_800, 7))


@pytest.mark.parametrize(("group", "fewest"), [(2, 24), (30, 16)])
@pytest.mark.parametrize("varied", [False, True])
def test_neighbours_come_from_many_groups_to_the_last_one(group: int, fewest: int, varied: bool) -> None:
    lengths = np.random.default_rng(0).integers(75, 225, 96).tolist() if varied else [150] * 96
    steps = [(episode, frame // group) for episode, frame in drawn(order(lengths, lanes=64, pool=64, group=group))]
    assert min(len(set(steps[start : start + 32])) for start in range(len(steps) - 31)) >= fewest


@pytest.mark.parametrize(("consumers", "most"), [(8, 1.3), (64, 1.6)])
def test_consumers_that_divide_the_lanes_read_few_episodes_of_others(consumers: int, most: float) -> None:
    """In an epoch of 300 of them; they share its first and its last. With slots that drop out it was 2.4 and 9.8."""
    steps = enumerate(drawn(order([150] * 300, lanes=64, pool=64, group=2)))
    assert len({(number % consumers, episode) for number, (episode, _) in steps}) / 300 < most


@pytest.mark.parametrize(
    ("batch", "workers", "parted"), [(32, 2, 0), (64, 2, 1), (32, 4, 1), (32, 3, 1), (48, 2, 2 / 3)]
)
def test_how_many_frames_of_a_group_come_to_another_worker_is_known(batch: int, workers: int, parted: float) -> None:
    whole = order([150] * 300, lanes=64, pool=64, group=2)
    middle = list(enumerate(drawn(whole)))[9600:28_800]  # where the slots change hands one by one
    of_group = defaultdict(set)
    for number, (episode, frame) in middle:
        of_group[episode, frame // 2].add(number // batch % workers)
    share = sum(len(those) > 1 for those in of_group.values()) / len(of_group)
    rank = Placement()
    shared = Placement(workers=workers, block_samples=batch)
    assert shared.share_parted(whole.open_segments(rank)) == pytest.approx(parted)
    assert share == pytest.approx(parted, abs=0.05)


def test_an_episode_that_begins_on_two_slots_comes_in_two_parts() -> None:
    steps = drawn(order([40] * 5, lanes=2, pool=2, group=4))
    frames = [frame for episode, frame in steps if episode == steps[0][0]]
    assert sorted(frames) == list(range(40))
    groups = [
        list(group)
        for part in (frames[:20:2], frames[1:20:2] + frames[20:])
        for _, group in itertools.groupby(part, lambda frame: frame // 4)
    ]
    assert all(group == sorted(group) for group in groups)
    assert sum(len(group) < 4 for group in groups) <= 2  # one with which the first part ends and the other begins


@pytest.mark.parametrize(("lanes", "pool"), [(64, 64), (16, 64)])
def test_episodes_of_one_length_are_needed_one_by_one(lanes: int, pool: int) -> None:
    length = 150
    steps = drawn(order([length] * 500, lanes=lanes, pool=pool))
    first_uses: dict[int, int] = {}
    for number, (episode, _) in enumerate(steps):
        first_uses.setdefault(episode, number)
    uses = list(first_uses.values())
    assert uses[pool // 4 - 1] < pool <= uses[pool // 4]  # four slots have one together

    def apart(first: int) -> int:
        return min(later - number for number, later in zip(uses[first:], uses[first + 8 :], strict=False))

    # On average one in as many samples as an episode has; eight of them are fetched ahead.
    assert apart(pool // 2) > 8 * length / 2
    assert apart(pool // 4) > 8 * length / 4  # until the pool is whole


def test_an_episode_on_two_slots_is_finished_by_the_later_one() -> None:
    whole = order([40] * 5, lanes=2, pool=2)
    steps = list(whole.steps(range(len(whole))))
    first = steps[0].episode
    (finished,) = [number for number, step in enumerate(steps) if first in step.finished]
    assert finished == max(number for number, step in enumerate(steps) if step.episode == first)


@pytest.mark.parametrize("per_lane", [1, 3])
def test_lanes_stay_level_to_the_end(per_lane: int) -> None:
    lanes, longest = 8, 50
    lengths = [int(length) for length in np.random.default_rng(0).integers(10, longest, 100)]
    whole = order(lengths, lanes=lanes, pool=lanes * per_lane)
    assignment = whole.assignment()
    while len(assignment.episodes) == whole.slots:
        assignment.advance()
    assert len(whole) - assignment.start < whole.slots  # a frame each, at most


def test_a_lane_gives_its_episodes_in_a_changing_order() -> None:
    cycles = [tuple(episode for episode, _ in cycle) for cycle in zip(*[iter(drawn(order([50] * 8)))] * 8, strict=True)]
    assert len(set(cycles)) > 1


def test_ten_million_episodes_take_no_memory_of_their_own() -> None:
    """Beside their lengths: neither at the beginning nor on the way to a far place, and behind that."""
    lengths = np.full(10_000_000, 150, dtype=np.int32)
    far = 20_000 * 150
    tracemalloc.start()
    try:
        whole = Order(lengths, shuffle=True, seed=0, epoch=0, lanes=64, pool_segments=64, group_frames=2)
        seen = set()
        for start, assignment in ((0, None), (far, whole.assignment(far))):
            for step in itertools.islice(whole.steps(range(start, len(whole)), assignment), 1000):
                seen.add((step.episode, step.frame))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(seen) == 2000
    assert peak_bytes < 2**20 < lengths.nbytes / 30


@pytest.mark.parametrize(("lanes", "pool"), [(0, 1), (4, 3)])
def test_a_pool_smaller_than_the_lanes_is_refused(lanes: int, pool: int) -> None:
    with pytest.raises(ConfigError, match="pool_segments"):
        order([1], lanes=lanes, pool=pool)


def test_a_group_of_no_frames_is_refused() -> None:
    with pytest.raises(ConfigError, match="group_frames"):
        order([1], group=0)


@pytest.mark.parametrize("positions", [[3], [1, 0], [-1]])
def test_positions_outside_of_the_order_or_not_ascending_are_refused(positions: list[int]) -> None:
    with pytest.raises(ConfigError, match="position"):
        list(order([2, 1], lanes=1, pool=1).steps(positions))
