"""What is left of a mixture's epoch, dealt out anew: nothing is lost, and every rank makes the same batches of it."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import TYPE_CHECKING, get_args

import pytest
from asyncfetch.stream.mixing import Batching, Given, MixedEpoch, MixedRemaining, Mixing, left_of_members
from asyncfetch.stream.remaining import Ends, Remaining
from asyncfetch.stream.state import check_state, resharded, resharded_in
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.stream.test_mixing import mixings

from asyncfetch.errors import StateMismatch
from asyncfetch.stream import Placement

if TYPE_CHECKING:
    from asyncfetch.stream.mixing import Walk

batchings = st.builds(
    Batching,
    batch_size=st.integers(1, 5),
    world_size=st.integers(1, 4),
    drop_last=st.booleans(),
    ends=st.sampled_from(get_args(Ends)),
)


@st.composite
def rests(draw: st.DrawFn, total: int) -> Remaining:
    """As slow consumers leave it."""
    position = draw(st.integers(0, total))
    missing = draw(st.sets(st.integers(0, position - 1), max_size=12)) if position else ()
    return Remaining(position, tuple(sorted(missing)), draw(st.integers(1, 4)))


def given_at(order: MixedEpoch | MixedRemaining, positions: list[int]) -> list[Given | None]:
    walk: Walk | None = None
    found = []
    for position in positions:
        walk = walk or order.walk(position)
        found.append(walk.at(position))
    return found


def counted(order: MixedEpoch | MixedRemaining, rest: Remaining) -> Counter[tuple[int, int]]:
    """(member, which sample of its run) of what is left of the order, without repetitions."""
    found = given_at(order, [*rest.missing, *range(rest.position, order.total)])
    return Counter((each.member, each.number) for each in found if each is not None and not each.is_padding)


def numbers_of(epoch: MixedEpoch, rests: list[Remaining]) -> Counter[tuple[int, int]]:
    stops = epoch.ends()[-1]
    return Counter(
        (member, number)
        for member, (rest, stop) in enumerate(zip(rests, stops, strict=True))
        for number in (*rest.missing, *range(rest.position, stop))
    )


@settings(max_examples=150, deadline=None)
@given(mixing=mixings(), data=st.data())
def test_what_is_left_is_dealt_out_anew_again_and_again(mixing: Mixing, data: st.DataObject) -> None:
    """A chain of stops anywhere, gone on with by other ranks and batches: each sample once, or left out by rule."""
    epoch = mixing.epoch(data.draw(st.integers(0, 2)))
    order: MixedEpoch | MixedRemaining = epoch
    left_out: Counter[tuple[int, int]] = Counter()
    for batching in data.draw(st.lists(batchings, min_size=1, max_size=3)):
        rest = data.draw(rests(order.total))
        expected = counted(order, rest) + left_out
        members = left_of_members(order, rest)
        if not order.total or rest.position < order.total:  # else what was left out lies behind
            assert numbers_of(epoch, members) == expected
        expected = numbers_of(epoch, members)
        told = json.loads(json.dumps(resharded(members, batching)))
        assert resharded_in({"order": told}, epoch.taken, epoch.ends()[-1]) == (members, batching)
        order = MixedRemaining(epoch, members, batching, mixing.seed)
        dealt = counted(order, Remaining())
        left_out = expected - dealt
        assert dealt == expected - left_out
        check_batches(order, batching, left_out)


def check_batches(order: MixedRemaining, batching: Batching, left_out: Counter[tuple[int, int]]) -> None:
    lost = Counter(member for member, _ in left_out)
    most = batching.round_samples if batching.drop_last else batching.world_size if batching.ends == "drop" else 1
    assert all(count < most for count in lost.values())
    found = given_at(order, list(range(order.total)))
    assert order.total % batching.round_samples == 0
    latest: dict[int, int] = {}
    shorter = False
    by_rank: list[list[int]] = [[] for _ in range(batching.world_size)]
    for start in range(0, order.total, batching.round_samples):
        block = found[start : start + batching.round_samples]
        there = [each for each in block if each is not None]
        assert there
        assert block[: len(there)] == there
        assert len({each.member for each in there}) == 1
        assert len(there) == len(block) or not batching.drop_last
        assert not (shorter and len(there) == len(block))
        shorter = len(there) < len(block)
        for each in there:
            assert each.number > latest.get(each.member, -1) or each.is_padding
            latest[each.member] = max(each.number, latest.get(each.member, -1))
        for rank, sizes in enumerate(by_rank):
            sizes.append(sum(each is not None for each in block[rank :: batching.world_size]))
    if batching.ends != "uneven" or batching.drop_last:
        assert all(sizes == by_rank[0] for sizes in by_rank)
    for sizes in by_rank:
        assert all(itertools.accumulate(map(bool, sizes), lambda before, now: before and now)) or 0 in sizes
        assert sizes == sorted(sizes, reverse=True)


@settings(max_examples=100, deadline=None)
@given(mixing=mixings(), batching=batchings, data=st.data())
def test_it_is_gone_on_with_at_any_position(mixing: Mixing, batching: Batching, data: st.DataObject) -> None:
    epoch = mixing.epoch(0)
    order = MixedRemaining(epoch, left_of_members(epoch, data.draw(rests(epoch.total))), batching, mixing.seed)
    whole = given_at(order, list(range(order.total)))
    position = data.draw(st.integers(0, order.total))
    assert given_at(order, list(range(position, order.total))) == whole[position:]
    placement = Placement(data.draw(st.integers(0, batching.world_size - 1)), batching.world_size)
    own = list(Remaining().positions(order.total, placement, batching.ends))
    assert given_at(order, own) == whole[placement.rank :: batching.world_size]


def test_the_weights_change_where_the_schedule_says() -> None:
    """In what is left, too: to a block, and the members are spread as evenly as in an epoch."""
    mixing = Mixing((1000, 1000), ((0, (1.0, 0.0)), (200, (1.0, 3.0))), 600, 8, 0)
    epoch = mixing.epoch(0)
    order = MixedRemaining(
        epoch, left_of_members(epoch, Remaining(50)), Batching(5, 2, drop_last=False, ends="uneven"), 0
    )
    members = [each.member for each in given_at(order, list(range(550))) if each is not None]
    assert set(members[:140]) == {0}
    later = members[150:530]
    assert all(2 <= sum(later[start : start + 40]) / 10 <= 4 for start in range(0, 340, 10))


@pytest.mark.parametrize(
    "damage",
    [
        {"members": [{"position": 0, "missing": []}]},
        {"members": [{"position": -1, "missing": []}] * 2},
        {"batch_size": 0},
        {"world_size": "2"},
        {"ends": "somewhere"},
        {"drop_last": 1},
        {"ends": None},
    ],
    ids=str,
)
def test_a_damaged_rest_is_refused(damage: dict[str, object]) -> None:
    whole = {
        "batch_size": 2,
        "world_size": 1,
        "drop_last": False,
        "ends": "drop",
        "members": [{"position": 0, "missing": []}] * 2,
    }
    order = {"version": 2, "members": 2, "stop_on": "all", "epoch": 0, "block_samples": 1, "taken": [0, 0]}
    state = {"format": "asyncfetch stream state", "version": 1, "epoch": 0, "dataset": "", "order": order}
    check_state(state | {"order": order | {"dealt_anew": whole}})
    with pytest.raises(StateMismatch):
        check_state(state | {"order": order | {"dealt_anew": whole | damage}})
