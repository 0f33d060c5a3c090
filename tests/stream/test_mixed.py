"""A mixture's order: its members' own, and which episodes it has no further use for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from asyncfetch.stream.mixed import MixedOrder
from asyncfetch.stream.mixing import Mixing
from asyncfetch.stream.order import Order
from asyncfetch.stream.placement import Placement
from asyncfetch.stream.remaining import Remaining
from hypothesis import given, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

EPISODES = ((3, 5, 1), (4,), (2, 2, 6, 3))
LENGTHS = tuple(map(sum, EPISODES))


def order_of(member: int) -> Callable[[int], tuple[Order, Sequence[int]]]:
    lengths = np.array(EPISODES[member])

    def order(epoch: int) -> tuple[Order, Sequence[int]]:
        return Order(lengths, shuffle=True, seed=member, epoch=epoch, pool_segments=2), range(len(lengths))

    return order


def mixed(schedule: tuple[tuple[int, tuple[float, ...]], ...], epoch: int, block: int = 1) -> MixedOrder:
    mixing = Mixing(LENGTHS, schedule, 70, block, 0)
    return MixedOrder(mixing.epoch(epoch), LENGTHS, [order_of(member) for member in range(3)])


@settings(max_examples=60, deadline=None)
@given(data=st.data(), epoch=st.integers(0, 3), block=st.integers(1, 4), stride=st.integers(1, 4))
def test_found_anywhere_and_every_episode_finished_once(
    data: st.DataObject, epoch: int, block: int, stride: int
) -> None:
    order = mixed(((0, (1, 2, 0)), (150, (0, 1, 3))), epoch, block)
    whole = [(step.episode, step.frame) for step in order.steps(range(len(order)))]
    assert len(set(whole)) == len(whole) == 70  # an episode has another name in each epoch of its member
    start = data.draw(st.integers(0, 69))
    for assignment in (None, order.assignment(start)):
        steps = list(order.steps(range(start, 70, stride), assignment))
        assert [(step.episode, step.frame) for step in steps] == whole[start::stride]
    used: set[int] = set()
    for place, step in enumerate(steps):
        used.add(step.episode)
        assert used.issuperset(step.finished)
        assert not {later.episode for later in steps[place + 1 :]}.intersection(step.finished)
        used.difference_update(step.finished)
        assert len(used) <= 6  # the pools of three members


def test_a_members_order_of_an_epoch_is_made_once() -> None:
    made: list[tuple[int, int]] = []

    def counted(member: int) -> Callable[[int], tuple[Order, Sequence[int]]]:
        def order(epoch: int) -> tuple[Order, Sequence[int]]:
            made.append((member, epoch))
            return order_of(member)(epoch)

        return order

    mixing = Mixing(LENGTHS, ((0, (1.0, 1.0, 1.0)),), "first", 1, 0)
    order = MixedOrder(mixing.epoch(0), LENGTHS, [counted(member) for member in range(3)])
    assert len(list(order.steps(range(6), order.assignment(0)))) == 6
    assert made == [(0, 0), (1, 0), (2, 0)]


def test_the_episodes_of_a_member_that_has_no_more_turns_are_let_go_of() -> None:
    order = mixed(((0, (1, 0, 0)), (5, (0, 0, 1))), 0)
    steps = list(order.steps(range(70)))
    assert {step.episode for step in steps[:5]} == {episode for step in steps[:5] for episode in step.finished}


@settings(max_examples=60, deadline=None)
@given(data=st.data(), epoch=st.integers(0, 3), block=st.integers(1, 4), step=st.integers(1, 9))
def test_ranks_share_it_by_affinity_and_others_go_on_with_just_what_is_left(
    data: st.DataObject, epoch: int, block: int, step: int
) -> None:
    order = mixed(((0, (1, 2, 0)), (150, (0, 1, 3))), epoch, block)
    rest, left = Remaining(), set(range(70))
    for ranks in data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)):
        delivered = {}
        for placement in [Placement(rank, ranks, step_samples=step) for rank in range(ranks)]:
            positions = list(rest.positions(70, placement, "uneven", order))
            count = delivered[placement] = data.draw(st.integers(0, len(positions)))
            assert list(rest.positions(70, placement, "uneven", order, skip=count)) == positions[count:]
            assert left.issuperset(positions)
            left.difference_update(positions[:count])
        rest = rest.after(delivered, 70, order)
        assert [*rest.missing, *range(rest.position, 70)] == sorted(left)


def test_each_rank_draws_from_every_member_and_stays_with_its_episodes() -> None:
    lengths = [np.full(episodes, 50) for episodes in (96, 48)]
    orders = [
        lambda epoch, each=each, member=member: (
            Order(each, shuffle=True, seed=member, epoch=epoch, pool_segments=16),
            range(len(each)),
        )
        for member, each in enumerate(lengths)
    ]
    totals = tuple(int(each.sum()) for each in lengths)
    order = MixedOrder(Mixing(totals, ((0, (2.0, 1.0)),), "first", 1, 0).epoch(0), totals, orders)
    read: list[int] = []
    ranks = 4
    for rank in range(ranks):
        placement = Placement(rank, ranks).in_batches(32, drop_last=False)
        steps = list(order.steps(Remaining().positions(len(order), placement, "uneven", order)))
        assert abs(sum(step.episode >> 63 & 1 for step in steps) / len(steps) - 1 / 3) < 0.02
        read += {step.episode for step in steps}
    assert len(read) / len(set(read)) < 1.6  # it was 4
