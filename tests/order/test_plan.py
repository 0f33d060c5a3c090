"""One consumer's part of an epoch: its steps, what it has no more use for, and where it goes on."""

from __future__ import annotations

import itertools
import sys
import tracemalloc
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfetch.order.deal import Deal, Left, Leg
from asyncfetch.order.line import Line
from asyncfetch.order.mixing import Mixing
from asyncfetch.order.placement import Placement
from asyncfetch.order.plan import PassPlan
from asyncfetch.order.runs import Runs
from asyncfetch.order.state import EpochProgress, merge_states
from tests.order.test_deal import legs, wholes

if TYPE_CHECKING:
    from types import FrameType

    from asyncfetch.order.line import Piece
    from asyncfetch.order.plan import Step

IDENTITY = {"dataset": "data", "order": {"seed": 0}}


def plan_of(whole: Left, leg: Leg, placement: Placement) -> PassPlan:
    placement = replace(placement, world_size=leg.world_size)
    return PassPlan(whole, EpochProgress(IDENTITY, 0, whole.total, leg, placement), 0)


def sample_of(step: Step) -> tuple[Piece, int, bool]:
    return step.piece, step.frame, step.is_padding


@st.composite
def layouts(draw: st.DrawFn, leg: Leg) -> Placement:
    """One of the workers of a rank."""
    workers = draw(st.integers(1, 3))
    block = leg.block_samples if leg.batches != "any" else draw(st.integers(1, 4))
    return Placement(
        draw(st.integers(0, leg.world_size - 1)), leg.world_size, draw(st.integers(0, workers - 1)), workers, block
    )


@given(whole=wholes(), data=st.data())
def test_workers_take_what_their_rank_takes_in_turns(whole: Left, data: st.DataObject) -> None:
    leg = data.draw(legs(len(whole.members)))
    one = data.draw(layouts(leg))
    order = Deal(whole, leg).rank(one.rank)
    visits = order.visits()
    alone = [visits.at(number) for number in range(order.total)]
    turns = [alone[start : start + one.block_samples] for start in range(0, order.total, one.block_samples)]
    for worker in range(one.workers):
        plan = plan_of(whole, leg, replace(one, worker=worker))
        own = [visit for turn in turns[worker :: one.workers] for visit in turn]
        assert len(plan) == plan.end == len(own)
        there = [visit for visit in own if visit is not None]
        assert [sample_of(step) for step in plan.steps()] == [visit[1:] for visit in there]
        assert max((step.stop for step in plan.steps()), default=0) == (len(own) if there else 0)


@given(whole=wholes(), data=st.data())
def test_a_piece_is_finished_once_and_its_use_is_announced(whole: Left, data: st.DataObject) -> None:
    leg = data.draw(legs(len(whole.members)))
    plan = plan_of(whole, leg, data.draw(layouts(leg)))
    used: list[Piece] = []
    open_now: set[Piece] = set()
    gone: set[Piece] = set()
    padding: set[Piece] = set()
    for step in plan.steps():
        used += [step.piece] if step.piece not in open_now else []
        open_now.add(step.piece)
        assert step.is_padding or step.piece not in gone
        padding.update([step.piece] if step.is_padding else [])
        assert len(open_now - padding) <= sum(map(len, plan.order.lanes))
        assert len(padding) <= len(whole.members)
        assert open_now.issuperset(step.finished)
        open_now.difference_update(step.finished)
        gone.update(step.finished)
    assert [piece for piece in plan.first_uses() if piece is not None] == used
    assert list(plan.first_pieces()) == used[: len(list(plan.first_pieces()))]


@given(whole=wholes(), data=st.data())
def test_a_consumer_goes_on_where_it_was_stopped(whole: Left, data: st.DataObject) -> None:
    leg = data.draw(legs(len(whole.members)))
    plan = plan_of(whole, leg, data.draw(layouts(leg)))
    steps = list(plan.steps())
    stop = data.draw(st.integers(0, len(steps)))
    plan.progress.delivered = max((step.stop for step in steps[:stop]), default=0)
    rest = PassPlan(
        whole, EpochProgress(IDENTITY, 0, whole.total, leg, plan.progress.placement).resumed(plan.progress.state()), 0
    )
    assert [sample_of(step) for step in rest.steps()] == [sample_of(step) for step in steps[stop:]]
    assert len(rest) == rest.left == plan.left
    assert rest.is_resumed == (stop > 0)


@given(whole=wholes(), data=st.data())
def test_a_consumer_goes_on_with_what_waited(whole: Left, data: st.DataObject) -> None:
    """In its order, without what was given before its turn; pieces of that are named only where they are used."""
    leg = data.draw(legs(len(whole.members)))
    plan = plan_of(whole, leg, data.draw(layouts(leg)))
    steps = list(plan.steps())
    stop = data.draw(st.integers(0, len(steps)))
    numbers = [0, *(step.stop for step in steps[:stop])]
    waiting = data.draw(st.sets(st.integers(0, stop - 1), max_size=4)) if stop else set()
    plan.progress.deliver(numbers[-1], itertools.chain(*(range(*numbers[place : place + 2]) for place in waiting)))
    progress = EpochProgress(IDENTITY, 0, whole.total, leg, plan.progress.placement).resumed(plan.progress.state())
    left = [step for place, step in enumerate(steps) if place in waiting or place >= stop]
    rest = PassPlan(whole, progress, 0)
    found = list(rest.steps())
    assert [sample_of(step) for step in found] == [sample_of(step) for step in left]
    assert not found or found[-1].stop == rest.end
    used: set[Piece] = set()
    for step in found:
        used.add(step.piece)
        assert used.issuperset(step.finished)
    # It may be stopped once more.
    rest.progress.deliver(found[0].stop if found else rest.begun, [])
    again = EpochProgress(IDENTITY, 0, whole.total, leg, plan.progress.placement).resumed(rest.progress.state())
    assert [sample_of(step) for step in PassPlan(whole, again, 0).steps()] == [sample_of(step) for step in left[1:]]


def one_line(segments: int, frames: int = 30, *, group_frames: int = 1) -> Left:
    line = Line(np.full(segments, frames), segment_frames=100, group_frames=group_frames)
    return Left((Runs.whole(line, 0, line.total),), np.array([[line.total]]))


@pytest.mark.parametrize(
    ("segments", "ranks", "pool", "most"), [(640, 4, 64, 64), (6, 1, 2**20, 5), (6, 3, 64, 1), (2, 60, 64, 1)]
)
def test_no_more_pieces_are_open_than_there_are(segments: int, ranks: int, pool: int, most: int) -> None:
    plan = plan_of(one_line(segments), Leg(ranks, (pool,)), Placement())
    assert plan.pool() == (most, most * 30)
    assert plan.open_pieces == most
    assert open_at_most(plan) <= most


def test_no_more_pieces_of_other_lengths_are_open_than_it_says() -> None:
    """The first of ten ranks has eight segments of one frame, and the others share a long one."""
    line = Line(np.array([*[1] * 8, 72]), segment_frames=100, seed=5)
    whole = Left((Runs.whole(line, 0, line.total),), np.array([[line.total]]))
    plan = plan_of(whole, Leg(10, (64,)), Placement())
    assert open_at_most(plan) <= plan.open_pieces


def open_at_most(plan: PassPlan) -> int:
    open_now: set[Piece] = set()
    most = 0
    for step in plan.steps():
        open_now.add(step.piece)
        most = max(most, len(open_now))
        open_now.difference_update(step.finished)
    return most


def test_worker_draws_from_its_own_pieces_if_a_turn_fits_in() -> None:
    whole, leg = one_line(640), Leg(1, (64,))
    assert plan_of(whole, leg, Placement()).own_pieces == 64
    assert plan_of(whole, leg, Placement(workers=2, block_samples=32)).own_pieces == 32
    assert plan_of(whole, leg, Placement(workers=2, block_samples=64)).own_pieces == 64
    assert plan_of(whole, leg, Placement(workers=3, block_samples=8)).own_pieces == 64


@pytest.mark.parametrize(
    ("batch", "workers", "parted"), [(32, 2, 0), (64, 2, 1), (32, 4, 1), (32, 3, 1), (48, 2, 2 / 3)]
)
def test_share_of_neighbours_at_another_worker_is_known(batch: int, workers: int, parted: float) -> None:
    """Two frames of a group, of the same lane, come a pool of samples apart, once all lanes have begun."""
    whole, leg = one_line(1920, 40, group_frames=2), Leg(1, (64,))
    of_group: dict[tuple[int, int], set[int]] = {}
    for worker in range(workers):
        for step in plan_of(whole, leg, Placement(0, 1, worker, workers, batch)).steps():
            of_group.setdefault((step.piece.episode, step.frame // 2), set()).add(worker)
    share = sum(len(those) > 1 for those in of_group.values()) / len(of_group)
    assert Placement(workers=workers, block_samples=batch).share_parted(64) == pytest.approx(parted)
    assert share == pytest.approx(parted, abs=0.05)


def test_a_batch_of_one_member_is_gone_on_with_at_its_beginning() -> None:
    lines = [Line(np.full(4, 5), segment_frames=100) for _ in range(2)]
    whole = Left(tuple(Runs.whole(line, 0, 20) for line in lines), np.array([[20, 20]]))
    of_one = plan_of(whole, Leg(1, (4, 4), "uneven", 8, "one"), Placement(batch_size=8))
    assert of_one.parts_batches
    assert [of_one.batch_of(number) for number in (0, 7, 8, 17)] == [0, 0, 1, 2]
    assert [of_one.batch_start(number) for number in (0, 7, 8, 17)] == [0, 0, 8, 16]
    of_any = plan_of(whole, Leg(1, (4, 4)), Placement(batch_size=8))
    assert not of_any.parts_batches
    assert (of_any.batch_of(17), of_any.batch_start(17)) == (0, 17)


def test_an_order_that_takes_long_to_draw_is_known() -> None:
    assert not plan_of(one_line(1000), Leg(1, (64,)), Placement()).is_far
    far = plan_of(one_line(100_001), Leg(2, (64,)), Placement())
    assert far.is_far
    far.find()
    assert next(far.steps()).frame < 30


@pytest.mark.parametrize(("group", "most"), [(2, 2), (2**20, 30)])
def test_no_more_frames_are_decoded_together_than_a_segment_has(group: int, most: int) -> None:
    assert plan_of(one_line(5, group_frames=group), Leg(1, (64,)), Placement()).group_frames == most


def test_weights_change_where_the_schedule_says_in_a_rest_too() -> None:
    """The first member alone up to sample 200, then one to three; three ranks begin, and two go on."""
    lines = [Line(np.full(40, 25), segment_frames=100, seed=seed) for seed in range(2)]
    epoch = Mixing((1000, 1000), ((0, (1.0, 0.0)), (200, (1.0, 3.0))), 600, 1, 0).epoch(0)
    cells = epoch.cells()
    totals = cells.sum(axis=0).tolist()
    whole = Left(tuple(Runs.whole(line, 0, total) for line, total in zip(lines, totals, strict=True)), cells)
    states = []
    for rank in range(3):
        begun = plan_of(whole, Leg(3, (8, 8)), Placement(rank, 3))
        begun.progress.delivered = 20
        states.append(begun.progress.state())
    for rank in range(2):
        progress = EpochProgress(IDENTITY, 0, whole.total, Leg(2, (8, 8)), Placement(rank, 2))
        rest = PassPlan(whole, progress.resumed(merge_states(states)), 0)
        members = [step.piece.member for step in rest.steps()]
        assert len(members) == 270
        assert set(members[:70]) == {0}
        assert all(28 <= sum(members[start : start + 40]) <= 32 for start in range(70, 230))


def work(whole: Left, leg: Leg) -> tuple[int, int, int]:
    """What it takes to go through an order: samples, calls, and bytes at the peak."""
    calls = 0

    def count(_: FrameType, event: str, __: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    list(plan_of(whole, leg, Placement()).steps())  # what is made once is there then
    tracemalloc.start()
    sys.setprofile(count)
    try:
        samples = len(list(plan_of(whole, leg, Placement()).steps()))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        sys.setprofile(None)
        tracemalloc.stop()
    return samples, calls, peak_bytes


@pytest.mark.parametrize(
    ("pool", "settings"),
    [
        (2**20, {}),
        (2**80, {}),
        (8, {"segment_frames": 2**40}),
        (8, {"segment_frames": 2**80}),
        (8, {"group_frames": 2**20}),
        (8, {"group_frames": 2**62}),
    ],
)
def test_a_setting_above_what_there_is_costs_no_more(pool: int, settings: dict[str, int]) -> None:
    lengths = np.array([5, 9, 1, 7, 12, 3, 0])

    def whole(segment_frames: int = 12, group_frames: int = 12) -> Left:
        line = Line(lengths, segment_frames=segment_frames, group_frames=group_frames)
        return Left((Runs.whole(line, 0, 37),), np.array([[37]]))

    _, most_calls, most_bytes = work(whole(), Leg(1, (8,)))
    samples, calls, peak_bytes = work(whole(**settings), Leg(1, (pool,)))
    assert samples == 37
    assert calls < 1.5 * most_calls
    assert peak_bytes < most_bytes + 2**14
