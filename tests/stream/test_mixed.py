"""A mixture's order: its members' own, and which episodes it has no further use for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfetch.stream.mixed import MixedOrder
from asyncfetch.stream.mixing import Mixing
from asyncfetch.stream.order import Order

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

EPISODES = ((3, 5, 1), (4,), (2, 2, 6, 3))
LENGTHS = tuple(map(sum, EPISODES))


def order_of(member: int) -> Callable[[int], tuple[Order, Sequence[int]]]:
    lengths = np.array(EPISODES[member])

    def order(epoch: int) -> tuple[Order, Sequence[int]]:
        return Order(lengths, shuffle=True, seed=member, epoch=epoch, lanes=2, pool_episodes=2), range(len(lengths))

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
    for seating in (None, order.seating(start)):
        steps = list(order.steps(range(start, 70, stride), seating))
        assert [(step.episode, step.frame) for step in steps] == whole[start::stride]
    used: set[int] = set()
    for place, step in enumerate(steps):
        used.add(step.episode)
        assert used.issuperset(step.finished)
        assert not {later.episode for later in steps[place + 1 :]}.intersection(step.finished)
        used.difference_update(step.finished)
        assert len(used) <= 6  # the pools of three members


def test_the_episodes_of_a_member_that_has_no_more_turns_are_let_go_of() -> None:
    order = mixed(((0, (1, 0, 0)), (5, (0, 0, 1))), 0)
    steps = list(order.steps(range(70)))
    assert {step.episode for step in steps[:5]} == {episode for step in steps[:5] for episode in step.finished}
