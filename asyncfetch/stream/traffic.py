"""What an epoch costs before it is paid: which consumer reads which episodes. Pure, from lengths alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asyncfetch.stream.cursor import Deal, Rest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from asyncfetch.stream.order import Order
    from asyncfetch.stream.placement import Placement

__all__ = ["Readers", "readers"]

_AT_ONCE = 1 << 18
"""Samples that are looked at together: 10 MB."""


class Readers(NamedTuple):
    """Each pair of a consumer and an episode of which it reads something."""

    ranks: NDArray[np.int64]
    workers: NDArray[np.int64]
    episodes: NDArray[np.int64]
    """Positions in the selection that the order was made for."""


def readers(order: Order, layout: Placement) -> Readers:
    """Who reads what in a whole epoch. A second for 5 million samples and few ranks.

    Args:
        order: Of the epoch.
        layout: That all consumers have, whichever of them it is.
    """
    deal = Deal(Rest(), len(order), layout, order)
    slots = order.slots(order.seating(), layout.world_size)
    step_samples = deal.step_samples * layout.world_size
    consumers, block = layout.world_size * layout.workers, layout.block_samples
    found = [np.zeros(0, np.int64)]
    together: list[NDArray[np.int64]] = []
    for step in range(-(-len(order) // step_samples)):
        ranks, numbers = deal.shares(step)
        start = step * step_samples
        episodes = slots.episodes(np.arange(start, start + len(ranks)))
        together.append((episodes * layout.world_size + ranks) * layout.workers + numbers // block % layout.workers)
        if len(together) * step_samples >= _AT_ONCE:
            found.append(np.unique(np.concatenate(together)))
            together = []
    pairs = np.unique(np.concatenate([*found, *together]))
    episodes, consumer = np.divmod(pairs, consumers)
    return Readers(consumer // layout.workers, consumer % layout.workers, episodes)
