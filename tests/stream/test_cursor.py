"""What is left of an epoch, and who takes which part of it."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfetch.errors import ConfigError, StateMismatch
from asyncfetch.stream.cursor import Ends, Rest
from asyncfetch.stream.order import Order
from asyncfetch.stream.placement import Placement, find_rank

ends_strategy = st.sampled_from(["uneven", "drop", "pad"])


@st.composite
def layouts(draw: st.DrawFn) -> list[Placement]:
    world_size, workers, block = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    return [
        Placement(rank, world_size, worker, workers, block) for rank in range(world_size) for worker in range(workers)
    ]


def left_of(rest: Rest, total: int) -> list[int]:
    return [*rest.missing, *range(rest.position, total)]


@given(total=st.integers(0, 150), restarts=st.lists(st.tuples(layouts(), ends_strategy), max_size=4), data=st.data())
def test_after_any_number_of_samples_in_any_layouts_the_rest_is_just_what_was_left(
    total: int, restarts: list[tuple[list[Placement], Ends]], data: st.DataObject
) -> None:
    rest, left = Rest(), set(range(total))
    for layout, ends in restarts:
        delivered: dict[Placement, int] = {}
        for placement in layout:
            positions = list(rest.positions(total, placement, ends))
            taken, padding = rest.shared(total, placement, ends)
            assert len(positions) == taken - padding
            count = delivered[placement] = data.draw(st.integers(0, taken))
            assert list(rest.positions(total, placement, ends, skip=count)) == positions[count:]
            assert left.issuperset(positions[:count])
            left.difference_update(positions[:count])
        rest = Rest.of_json(json.loads(json.dumps(rest.after(delivered, total).as_json())), total)
        assert left_of(rest, total) == sorted(left)


@given(
    lengths=st.lists(st.integers(0, 20), max_size=12),
    seed=st.integers(0, 1 << 40),
    shuffle=st.booleans(),
    group=st.integers(1, 4),
    restarts=st.lists(layouts(), max_size=4),
    data=st.data(),
)
def test_a_dataset_read_by_any_ranks_and_workers_stopped_anywhere_is_read_once_and_in_order(
    lengths: list[int], seed: int, shuffle: bool, group: int, restarts: list[list[Placement]], data: st.DataObject
) -> None:
    """The union exact, nothing twice; each gets its part of the one order, and one alone all of it in order."""
    order = Order(np.array(lengths, np.int64), shuffle, seed, 0, lanes=4, pool_episodes=8, group_frames=group)
    whole = [(step.episode, step.frame) for step in order.steps(range(len(order)))]
    assert sorted(whole) == [(episode, frame) for episode, length in enumerate(lengths) for frame in range(length)]
    rest, read = Rest(), list[tuple[int, int]]()
    for layout in [*restarts, [Placement()]]:
        delivered: dict[Placement, int] = {}
        for placement in layout:
            taken, _ = rest.shared(len(order), placement, "uneven")
            count = delivered[placement] = taken if layout == [Placement()] else data.draw(st.integers(0, taken))
            positions = list(rest.positions(len(order), placement, "uneven"))[:count]
            given = [(step.episode, step.frame) for step in order.steps(positions)]
            assert given == [whole[position] for position in positions]
            read += given
        rest = Rest.of_json(json.loads(json.dumps(rest.after(delivered, len(order)).as_json())), len(order))
    assert len(read) == len(whole)
    assert sorted(read) == sorted(whole)
    if not restarts:
        assert read == whole


@given(total=st.integers(0, 100), layout=layouts(), ends=ends_strategy)
def test_consumers_share_everything_but_fewer_samples_than_there_are_ranks(
    total: int, layout: list[Placement], ends: Ends
) -> None:
    taken = Counter(position for one in layout for position in Rest().positions(total, one, ends))
    assert max(taken.values(), default=1) == 1
    world_size = layout[0].world_size
    assert total - len(taken) < world_size if ends == "drop" else len(taken) == total
    given_to: Counter[int] = Counter()
    padding = 0
    for placement in layout:
        count, repeated = Rest().shared(total, placement, ends)
        given_to[placement.rank] += count
        padding += repeated
    assert padding < world_size
    assert padding == 0 or ends == "pad"
    assert max(given_to.values()) - min(given_to.values()) <= (ends == "uneven")


@given(layout=layouts(), total=st.integers(0, 60))
def test_what_batches_of_workers_hold_is_what_the_rank_takes_alone(layout: list[Placement], total: int) -> None:
    rank = layout[0].rank
    alone = list(Rest().positions(total, Placement(rank, layout[0].world_size), "uneven"))
    workers = [list(Rest().positions(total, one, "uneven")) for one in layout if one.rank == rank]
    size = layout[0].block_samples
    batches = [[part[at : at + size] for at in range(0, len(part), size)] for part in workers]
    in_turns = [part[turn] for turn in range(max(map(len, batches))) for part in batches if turn < len(part)]
    assert [position for batch in in_turns for position in batch] == alone


def test_a_state_of_a_level_epoch_is_one_number() -> None:
    delivered = {Placement(rank, 512): 1_000_000_000 for rank in range(512)}
    assert Rest().after(delivered, 10**12).as_json() == {"position": 512 * 10**9, "missing": []}


def test_a_slow_consumer_takes_one_run_of_the_state() -> None:
    delivered = {Placement(rank, 8): 1000 - 500 * (rank == 3) for rank in range(8)}
    assert Rest().after(delivered, 10**6).as_json() == {"position": 8000, "missing": [[4003, 7996, 8]]}


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
        Rest.of_json(state, 10)


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
