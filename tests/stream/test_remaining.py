"""What is left of an epoch, and who takes which part of it."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest
from asyncfetch.stream.order import Order
from asyncfetch.stream.placement import Placement, find_rank
from asyncfetch.stream.remaining import Deal, Ends, Remaining
from hypothesis import given
from hypothesis import strategies as st

from asyncfetch.errors import ConfigError, StateMismatch

ends_strategy = st.sampled_from(["uneven", "drop", "pad"])


@st.composite
def layouts(draw: st.DrawFn) -> list[Placement]:
    world_size, workers, block = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    step = draw(st.integers(0, 5))
    return [
        Placement(rank, world_size, worker, workers, block, step)
        for rank in range(world_size)
        for worker in range(workers)
    ]


@st.composite
def orders(draw: st.DrawFn) -> Order:
    lengths, lanes = draw(st.lists(st.integers(0, 20), max_size=12)), draw(st.sampled_from([1, 2, 4, 8]))
    return Order(
        np.array(lengths, np.int64),
        shuffle=draw(st.booleans()),
        seed=draw(st.integers(0, 1 << 40)),
        epoch=0,
        lanes=lanes,
        pool_segments=lanes * draw(st.integers(1, 3)),
        group_frames=draw(st.integers(1, 4)),
    )


def left_of(rest: Remaining, total: int) -> list[int]:
    return [*rest.missing, *range(rest.position, total)]


@given(order=orders(), restarts=st.lists(st.tuples(layouts(), ends_strategy), max_size=4), data=st.data())
def test_after_any_number_of_samples_in_any_layouts_the_rest_is_just_what_was_left(
    order: Order, restarts: list[tuple[list[Placement], Ends]], data: st.DataObject
) -> None:
    total = len(order)
    rest, left = Remaining(), set(range(total))
    for layout, ends in restarts:
        delivered: dict[Placement, int] = {}
        for placement in layout:
            positions = list(rest.positions(total, placement, ends, order))
            taken, padding = rest.shared(total, placement, ends)
            assert len(positions) == taken - padding
            assert positions == sorted(positions)
            count = delivered[placement] = data.draw(st.integers(0, taken))
            assert list(rest.positions(total, placement, ends, order, skip=count)) == positions[count:]
            assert left.issuperset(positions[:count])
            left.difference_update(positions[:count])
        rest = Remaining.of_json(json.loads(json.dumps(rest.after(delivered, total, order).as_json())), total)
        assert left_of(rest, total) == sorted(left)


@given(order=orders(), restarts=st.lists(layouts(), max_size=4), data=st.data())
def test_a_dataset_read_by_any_ranks_and_workers_stopped_anywhere_is_read_once_and_in_order(
    order: Order, restarts: list[list[Placement]], data: st.DataObject
) -> None:
    """The union exact, nothing twice; each gets its part of the one order, and one alone all of it in order."""
    whole = [(step.episode, step.frame) for step in order.steps(range(len(order)))]
    lengths = order.lengths.tolist()
    assert sorted(whole) == [(episode, frame) for episode, length in enumerate(lengths) for frame in range(length)]
    rest, read = Remaining(), list[tuple[int, int]]()
    for layout in [*restarts, [Placement()]]:
        delivered: dict[Placement, int] = {}
        for placement in layout:
            taken, _ = rest.shared(len(order), placement, "uneven")
            count = delivered[placement] = taken if layout == [Placement()] else data.draw(st.integers(0, taken))
            positions = list(rest.positions(len(order), placement, "uneven", order))[:count]
            given = [(step.episode, step.frame) for step in order.steps(positions)]
            assert given == [whole[position] for position in positions]
            read += given
        rest = Remaining.of_json(json.loads(json.dumps(rest.after(delivered, len(order), order).as_json())), len(order))
    assert len(read) == len(whole)
    assert sorted(read) == sorted(whole)
    if not restarts:
        assert read == whole


@given(order=orders(), layout=layouts(), ends=ends_strategy)
def test_consumers_share_everything_but_fewer_samples_than_there_are_ranks(
    order: Order, layout: list[Placement], ends: Ends
) -> None:
    total = len(order)
    taken = Counter(position for one in layout for position in Remaining().positions(total, one, ends, order))
    assert max(taken.values(), default=1) == 1
    world_size = layout[0].world_size
    assert total - len(taken) < world_size if ends == "drop" else len(taken) == total
    given_to: Counter[int] = Counter()
    padding = 0
    for placement in layout:
        count, repeated = Remaining().shared(total, placement, ends)
        given_to[placement.rank] += count
        padding += repeated
    assert padding < world_size
    assert padding == 0 or ends == "pad"
    assert max(given_to.values()) - min(given_to.values()) <= (ends == "uneven")


@given(order=orders(), layout=layouts())
def test_what_batches_of_workers_hold_is_what_the_rank_takes_alone(order: Order, layout: list[Placement]) -> None:
    rank, world_size, total = layout[0].rank, layout[0].world_size, len(order)
    one = Placement(rank, world_size, step_samples=layout[0].step_samples)
    alone = list(Remaining().positions(total, one, "uneven", order))
    workers = [list(Remaining().positions(total, one, "uneven", order)) for one in layout if one.rank == rank]
    size = layout[0].block_samples
    batches = [[part[at : at + size] for at in range(0, len(part), size)] for part in workers]
    in_turns = [part[turn] for turn in range(max(map(len, batches))) for part in batches if turn < len(part)]
    assert [position for batch in in_turns for position in batch] == alone


@given(order=orders(), ranks=st.integers(1, 9), batch=st.integers(1, 7), data=st.data())
def test_the_batches_of_a_step_hold_the_same_samples_whoever_takes_which(
    order: Order, ranks: int, batch: int, data: st.DataObject
) -> None:
    """Of all ranks together; of what is left, too, after others have stopped anywhere."""
    total = len(order)
    position = data.draw(st.integers(0, total))
    missing = data.draw(st.sets(st.integers(0, position - 1), max_size=9)) if position else set[int]()
    rest = Remaining(position, tuple(sorted(missing)))
    left = left_of(rest, total)
    taken = [
        list(rest.positions(total, Placement(rank, ranks).in_batches(batch, drop_last=False), "uneven", order))
        for rank in range(ranks)
    ]
    for step in range(-(-len(left) // (ranks * batch))):
        together = [each for one in taken for each in one[step * batch : (step + 1) * batch]]
        assert sorted(together) == left[step * ranks * batch : (step + 1) * ranks * batch]


def readers(order: Order, ranks: int, batch: int) -> Counter[int]:
    """Of each episode, how many ranks read it."""
    placements = [Placement(rank, ranks).in_batches(batch, drop_last=False) for rank in range(ranks)]
    return Counter(
        episode
        for one in placements
        for episode in {step.episode for step in order.steps(Remaining().positions(len(order), one, "uneven", order))}
    )


@pytest.mark.parametrize(
    ("ranks", "batch", "most"),
    [
        (2, 32, 1.03),
        (3, 32, 1.08),
        (8, 1, 1.11),
        (8, 32, 1.04),
        (24, 32, 1.38),
        (64, 32, 1.2),
        (100, 32, 2.8),
    ],
)
def test_a_rank_stays_with_its_episodes(ranks: int, batch: int, most: float) -> None:
    """Each takes as much of each step, so of 64 lanes some are shared; both ends of the epoch add a little.

    Fewer than lanes + ranks - their greatest common divisor pairs of a lane and a rank there can't be.
    """
    lengths = np.random.default_rng(0).integers(130, 171, 960)
    order = Order(lengths, shuffle=True, seed=0, epoch=0, pool_segments=64, group_frames=2)
    read = readers(order, ranks, batch)
    assert len(read) == 960
    assert (64 + ranks - math.gcd(64, ranks)) / 64 < read.total() / 960 <= most
    if ranks <= 64:
        assert np.median(list(read.values())) <= 2
        assert sum(count <= 2 for count in read.values()) > 0.85 * 960


@given(order=orders(), placement=st.builds(Placement, st.integers(0, 3), st.just(4), step_samples=st.integers(1, 5)))
def test_where_a_sample_is_can_be_asked_for_in_any_order(order: Order, placement: Placement) -> None:
    positions = list(Remaining().positions(len(order), placement, "uneven", order))
    deal = Deal(Remaining(), len(order), placement, order)
    numbers = np.random.default_rng(len(order)).permutation(len(positions)).tolist()
    assert [deal.index(number) for number in numbers] == [positions[number] for number in numbers]
    assert all(deal.begin(number) <= positions[number] for number in numbers)


@pytest.mark.parametrize(("batch", "step"), [(None, 32), (1, 1), (7, 7), (1024, 1024), (2000, 1000), (1031, 1)])
def test_a_step_is_of_whole_batches_or_a_batch_of_whole_steps(batch: int | None, step: int) -> None:
    assert Placement().in_batches(batch, drop_last=False).step_samples == step


def test_any_number_of_ranks_takes_no_room() -> None:
    order = Order(np.full(10, 5), shuffle=True, seed=0, epoch=0, pool_segments=4)
    assert len(list(Remaining().positions(50, Placement(7, 10**15, step_samples=10**15), "uneven", order))) == 1


def test_a_state_of_a_level_epoch_is_one_number() -> None:
    delivered = {Placement(rank, 512): 1_000_000_000 for rank in range(512)}
    assert Remaining().after(delivered, 10**12).as_json() == {"position": 512 * 10**9, "missing": []}


def test_a_slow_consumer_takes_one_run_of_the_state() -> None:
    delivered = {Placement(rank, 8): 1000 - 500 * (rank == 3) for rank in range(8)}
    assert Remaining().after(delivered, 10**6).as_json() == {"position": 8000, "missing": [[4003, 7996, 8]]}


@pytest.mark.parametrize(("ranks", "batch", "most"), [(8, 32, 33), (3, 32, 70)])
def test_a_slow_rank_that_stays_with_its_lanes_takes_few_runs_of_the_state(ranks: int, batch: int, most: int) -> None:
    order = Order(np.full(5000, 150), shuffle=True, seed=0, epoch=0, pool_segments=64, group_frames=2)
    placements = [Placement(rank, ranks).in_batches(batch, drop_last=False) for rank in range(ranks)]
    delivered = {one: 64_000 - 32_000 * (one.rank == 1) for one in placements}
    rest = Remaining().after(delivered, len(order), order)
    assert (rest.position, len(rest.missing)) == (ranks * 64_000, 32_000)
    assert len(rest.as_json()["missing"]) <= most


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"position": 1},
        {"position": -1, "missing": []},
        {"position": 11, "missing": []},
        {"position": 3, "missing": [[2, 4, 1]]},
        {"position": 3, "missing": [[0, 2, 1], [1, 2, 1]]},
        {"position": 3, "missing": [[-1, 2, 1]]},
        {"position": 3, "missing": [["0", 2, 1]]},
        {"position": "x", "missing": []},
        {"position": 3, "missing": [[0, 2, 0]]},
    ],
)
def test_a_rest_that_cannot_be_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(StateMismatch):
        Remaining.of_json(state, 10)


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, (0, 1)),
        ({"RANK": "2", "WORLD_SIZE": "4"}, (2, 4)),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "3"}, (1, 3)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, (0, 1)),  # a job's script, which runs once
        ({"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "6"}, (5, 6)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, (0, 2)),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
            (0, 2),
        ),
    ],
)
def test_rank_and_world_size_are_found(environ: dict[str, str], found: tuple[int, int]) -> None:
    assert find_rank(environ) == found


@pytest.mark.parametrize("environ", [{"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}])
def test_an_environment_that_names_no_rank_of_its_world_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="RANK"):
        find_rank(environ)


def test_a_block_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1 sample"):
        Placement(block_samples=0)
