"""The cost of an epoch before it is paid: which rank reads which episodes, from lengths alone, and their bytes.

Loader workers add nothing to it: those of a rank read as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asyncfetch.runtime.concurrently import gather
from asyncfetch.stream.remaining import Deal, Remaining

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from asyncfetch.lerobot import LeRobotDataset
    from asyncfetch.stream.order import Order
    from asyncfetch.stream.placement import Placement

__all__ = ["Readers", "TrafficPlan", "readers", "traffic", "weigh"]

_WEIGHED = 1024
"""Episodes whose bytes are asked for, spread over the dataset; those of the others go by their frames."""

_AT_ONCE = 1 << 18
"""Samples that are looked at together: 10 MB."""


@dataclass(frozen=True, slots=True)
class TrafficPlan:
    """Bytes and requests of an epoch: clips alone. Metadata, indexes and rows are a few hundredths more, as a rule."""

    world_size: int
    num_workers: int
    batch_size: int | None
    least_bytes: int
    """Bytes of all clips, each once."""
    fetched_bytes: int
    """Bytes that all ranks and their workers fetch."""
    largest_rank_bytes: int
    """Bytes of the rank that fetches most."""
    requests: int
    """Requests for clips and rows of episodes, and for the indexes of videos."""


class Readers(NamedTuple):
    """Each pair of a rank and an episode of which it reads something."""

    ranks: NDArray[np.int64]
    episodes: NDArray[np.int64]
    """Positions in the selection that the order was made for."""


def readers(order: Order, layout: Placement) -> Readers:
    """Return who reads which episode in a whole epoch. Takes a second for 5 million samples and few ranks.

    Args:
        order: Of the epoch.
        layout: That all ranks have, whichever of them it is.
    """
    deal = Deal(Remaining(), len(order), layout, order)
    affinities = order.affinities(order.assignment(), layout.world_size)
    step_samples = deal.step_samples * layout.world_size
    found = [np.zeros(0, np.int64)]
    together: list[NDArray[np.int64]] = []
    for step in range(-(-len(order) // step_samples)):
        ranks, _ = deal.shares(step)
        start = step * step_samples
        episodes = affinities.episodes(np.arange(start, start + len(ranks)))
        together.append(episodes * layout.world_size + ranks)
        if len(together) * step_samples >= _AT_ONCE:
            found.append(np.unique(np.concatenate(together)))
            together = []
    pairs = np.unique(np.concatenate([*found, *together]))
    episodes, ranks = np.divmod(pairs, layout.world_size)
    return Readers(ranks, episodes)


async def weigh(
    dataset: LeRobotDataset, episodes: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Bytes of each episode's clips; of more than 1,024 episodes, most by their frames. Fetches indexes of videos."""
    there = np.flatnonzero(lengths)
    chosen = there[np.linspace(0, len(there) - 1, min(len(there), _WEIGHED)).astype(np.int64)]
    found = await gather(*(partial(dataset.range_bytes, int(episode)) for episode in episodes[chosen]))
    sizes = np.array(found, np.float64)
    estimated: NDArray[np.float64] = lengths * (sizes.sum() / max(1, lengths[chosen].sum()))
    estimated[chosen] = sizes
    return estimated


def traffic(
    order: Order, layout: Placement, sizes: NDArray[np.float64], files: list[NDArray[np.int64]]
) -> tuple[int, int, int]:
    """Bytes of an epoch, those of the rank that fetches most, and requests.

    Args:
        order: Of the epoch.
        layout: Of all ranks.
        sizes: Of each episode's clips.
        files: Of each camera, a number for the file that an episode is in.
    """
    read = readers(order, layout)
    by_rank = np.bincount(read.ranks, weights=sizes[read.episodes], minlength=1)
    indexes = sum(len(np.unique(np.stack([read.ranks, each[read.episodes]]), axis=1).T) for each in files)
    requests = len(read.episodes) * (len(files) + 1) + indexes
    return round(by_rank.sum()), round(by_rank.max()), requests
