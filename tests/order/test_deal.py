"""What is left of an epoch, dealt to ranks again and again: each sample once, and as many for each rank."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfetch.order.deal import Deal, Left, Leg
from asyncfetch.order.line import Line
from asyncfetch.order.mixing import Mixing
from asyncfetch.order.runs import Runs
from tests.order.test_line import lines
from tests.order.test_runs import frames_of

if TYPE_CHECKING:
    from asyncfetch.order.deal import RankOrder, Visit
    from asyncfetch.order.line import Piece
    from asyncfetch.order.mixing import StopOn

Frame = tuple[int, int, int, int]


@st.composite
def wholes(draw: st.DrawFn) -> Left:
    """An epoch of one dataset, or of a mixture of up to three, whose weights may change on the way."""
    members = draw(st.lists(lines(most=20), min_size=1, max_size=3))
    lengths = tuple(line.total for line in members)
    if len(members) == 1:
        return Left((Runs.whole(members[0], 0, lengths[0]),), np.array([lengths]))
    weights = st.tuples(*[st.sampled_from([0.1, 0.5, 1.0])] * len(members))
    stop_on: StopOn = draw(st.sampled_from(["first", "all", 1, 100]))
    schedule = ((0, draw(weights)), (draw(st.integers(1, 60)), draw(weights)))
    epoch = Mixing(lengths, schedule, stop_on, draw(st.sampled_from([1, 4])), 0).epoch(draw(st.integers(0, 1)))
    cells = epoch.cells()
    each = zip(members, epoch.taken, cells.sum(axis=0).tolist(), strict=True)
    return Left(tuple(Runs.whole(line, taken, taken + count) for line, taken, count in each), cells)


@st.composite
def legs(draw: st.DrawFn, members: int) -> Leg:
    several: list[Literal["any", "one", "whole"]] = ["any", "any", "one", "whole"]
    return Leg(
        world_size=draw(st.sampled_from([1, 2, 3, 8])),
        pools=tuple(draw(st.sampled_from([1, 3, 64])) for _ in range(members)),
        ends=draw(st.sampled_from(["uneven", "drop", "pad"])),
        block_samples=draw(st.sampled_from([1, 4] if members > 1 else [1])),
        batches=draw(st.sampled_from(several)) if members > 1 else "any",
    )


def everything(left: Left) -> Counter[Frame]:
    return Counter((member, *frame) for member, runs in enumerate(left.members) for frame in frames_of(runs))


def visits(order: RankOrder, start: int = 0, step: int = 1) -> list[Visit | None]:
    found = order.visits()
    return [found.at(number) for number in range(start, order.total, step)]


def frame_of(visit: Visit) -> Frame:
    return visit.piece.member, visit.piece.epoch, visit.piece.episode, visit.frame


@settings(max_examples=80)
@given(whole=wholes(), data=st.data())
def test_a_chain_of_moves_gives_each_sample_once(whole: Left, data: st.DataObject) -> None:
    """Any ranks, pools, blocks and ends, stopped anywhere, in up to six moves."""
    left, found = whole, Counter[Frame]()
    moves = data.draw(st.lists(legs(len(whole.members)), max_size=6))
    for leg in [*moves, None]:
        deal = Deal(left, leg or Leg(data.draw(st.integers(1, 4)), (5,) * len(whole.members)))
        part = data.draw(st.floats(0, 1)) if leg else 1.0
        taken = []
        for rank in range(deal.leg.world_size):
            order = deal.rank(rank)
            stop = min(order.total, int(order.total * part) + (data.draw(st.integers(0, 3)) if leg else 0))
            spans = [(0, stop)] if stop else []
            if leg and order.total > stop + 4 and data.draw(st.booleans()):  # as workers of a rank may leave it
                spans.append((stop + 2, stop + 4))
            walk = order.visits()
            given_now = [walk.at(number) for start, end in spans for number in range(start, end)]
            found.update(frame_of(visit) for visit in given_now if visit is not None and not visit.is_padding)
            taken.append(spans)
        left = deal.after(taken)
        assert [runs.total for runs in left.members] == left.cells.sum(axis=0).tolist()
        assert left.total + found.total() == whole.total
    assert not left.total
    assert found == everything(whole)


@settings(max_examples=100)
@given(whole=wholes(), data=st.data())
def test_ranks_are_given_equal_shares(whole: Left, data: st.DataObject) -> None:
    leg = data.draw(legs(len(whole.members)))
    deal = Deal(whole, leg)
    orders = [deal.rank(rank) for rank in range(leg.world_size)]
    each = [visits(order) for order in orders]
    found = Counter(frame_of(visit) for one in each for visit in one if visit is not None and not visit.is_padding)
    assert max(found.values(), default=1) == 1
    lost, world = whole.total - found.total(), leg.world_size
    if leg.batches == "any":
        assert lost == (whole.total % world if leg.ends == "drop" else 0)
    elif leg.batches == "one":
        assert lost < len(whole.members) * world
        assert not lost or leg.ends == "drop"
    else:
        assert lost < len(whole.members) * world * leg.block_samples
    counts = [sum(visit is not None for visit in one) for one in each]
    if leg.batches != "whole":  # which gives as many whole batches as a rank's samples of a member make
        assert max(counts) - min(counts) <= (leg.ends == "uneven")
    elif leg.ends != "uneven":
        assert len(set(counts)) == 1
    padding = sum(visit is not None and visit.is_padding for one in each for visit in one)
    assert padding == 0 or (leg.ends == "pad" and padding < world * (1 if leg.batches == "any" else len(whole.members)))


@given(whole=wholes(), data=st.data())
def test_batches_of_one_member_are_whole_until_they_are_short(whole: Left, data: st.DataObject) -> None:
    leg = data.draw(legs(len(whole.members)).filter(lambda leg: leg.batches != "any"))
    deal = Deal(whole, leg)
    size = leg.block_samples
    for rank in range(leg.world_size):
        order = deal.rank(rank)
        found = visits(order)
        sizes = []
        for start in range(0, len(found), size):
            block = found[start : start + size]
            there = [visit for visit in block if visit is not None]
            assert there
            assert block[: len(there)] == there
            assert len({visit.piece.member for visit in there}) == 1
            sizes.append(len(there))
        assert sizes == sorted(sizes, reverse=True)
        assert leg.batches == "one" or set(sizes) <= {size}


@given(whole=wholes(), data=st.data())
def test_an_order_is_gone_on_with_at_any_number(whole: Left, data: st.DataObject) -> None:
    leg = data.draw(legs(len(whole.members)))
    order = Deal(whole, leg).rank(data.draw(st.integers(0, leg.world_size - 1)))
    found = visits(order)
    start, step = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 4))
    assert [visit and visit[1:] for visit in visits(order, start, step)] == [
        visit and visit[1:] for visit in found[start::step]
    ]
    number = data.draw(st.integers(0, order.total))
    counts = Counter(visit.piece.member for visit in found[:number] if visit is not None)
    if not any(visit is not None and visit.is_padding for visit in found):
        assert order.counts(number) == [counts[member] for member in range(len(whole.members))]


@given(whole=wholes(), data=st.data())
def test_a_piece_is_left_once_and_not_used_afterwards(whole: Left, data: st.DataObject) -> None:
    """Of a rest, too, where several lanes share one that was begun; what only pads is a piece of its own."""
    left = whole
    for leg in data.draw(st.lists(legs(len(whole.members)), max_size=2)):
        totals = [Deal(left, leg).rank(rank).total for rank in range(leg.world_size)]
        left = Deal(left, leg).after([[(0, data.draw(st.integers(1, total)))] if total else [] for total in totals])
    leg = data.draw(legs(len(whole.members)))
    order = Deal(left, leg).rank(0)
    open_now: set[Piece] = set()
    gone: set[Piece] = set()
    for visit in visits(order, step=data.draw(st.integers(1, 3))):
        if visit is None:
            continue
        if visit.is_padding:
            assert visit.piece not in open_now | gone
            gone.update(visit.left)
            continue
        assert open_now.issuperset(visit.left)
        gone.update(visit.left)
        open_now = open_now - {*visit.left} | {visit.piece}
        assert visit.piece not in gone
        assert len(open_now) <= sum(map(len, order.lanes))


@given(st.lists(st.integers(40, 400), min_size=2, max_size=4), st.integers(1, 5), st.sampled_from([1, 4]))
def test_weights_hold_for_each_rank(totals: list[int], ranks: int, block: int) -> None:
    members = tuple(Line(np.full(10, -(-total // 10)), segment_frames=100) for total in totals)
    left = Left(
        tuple(Runs.whole(line, 0, line.total) for line in members), np.array([[line.total for line in members]])
    )
    deal = Deal(left, Leg(ranks, (8,) * len(totals), block_samples=block))
    for rank in range(ranks):
        order = deal.rank(rank)
        for number in range(0, order.whole + 1, 7 * block):
            for count, blocks in zip(order.counts(number), order.blocks_of, strict=True):
                share = blocks * block / max(1, order.whole)
                assert abs(count - share * number) <= block * (1 + (len(totals) - 2) * share) + 1e-6


def test_the_segments_of_a_member_without_more_turns_are_left() -> None:
    members = tuple(Line(np.full(10, 10), segment_frames=100) for _ in range(2))
    left = Left(tuple(Runs.whole(line, 0, 20) for line in members), np.array([[20, 0], [0, 20]]))
    found = [visit for visit in visits(Deal(left, Leg(1, (8, 8))).rank(0)) if visit is not None]
    assert [visit.piece.member for visit in found] == [0] * 20 + [1] * 20
    used = {visit.piece for visit in found[:20]}
    assert used == {piece for visit in found[: 20 + 1] for piece in visit.left}


def test_samples_of_far_turns_are_found_at_once() -> None:
    """Here the 13 millionth of each rank, and what a million samples later is left."""
    members = tuple(Line(np.full(180_000, 150), segment_frames=600, seed=seed) for seed in range(2))
    left = Left(tuple(Runs.whole(line, 0, line.total) for line in members), np.array([[27_000_000, 27_000_000]]))
    deal = Deal(left, Leg(2, (64, 64)))
    order = deal.rank(1)
    visit = order.visits().at(13_000_000)
    assert visit is not None
    after = deal.after([[(0, 13_000_000)], [(0, 13_000_000)]])
    assert after.total == 28_000_000
    assert after.members[0].count_pieces() < 100_000


@pytest.mark.parametrize(
    ("leg", "expected"),
    [
        (Leg(2, (2, 2)), "000 001 128 002 003 104 004 124 103 028 125 126 026 122 027 127 123"),
        (
            Leg(2, (2, 2), block_samples=2, batches="one"),
            "000 001 002 003 128 104 004 028 124 103 125 126 026 027 122 127 123",
        ),
    ],
    ids=["any", "one"],
)
def test_the_order_of_a_mixture_is_frozen_across_releases(leg: Leg, expected: str) -> None:
    """A saved state means the same after an upgrade only while these members, episodes and frames stay as they are."""
    members = tuple(Line(np.array([5, 3, 9]), segment_frames=5, group_frames=2, seed=seed) for seed in range(2))
    left = Left(tuple(Runs.whole(line, 0, 17) for line in members), np.array([[9, 4], [8, 13]]))
    found = [frame_of(visit) for visit in visits(Deal(left, leg, 5).rank(1)) if visit is not None]
    assert " ".join(f"{member}{episode}{frame}" for member, _, episode, frame in found) == expected
