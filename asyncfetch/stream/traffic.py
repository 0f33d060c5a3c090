"""The cost of an epoch before it is paid: which rank reads which episodes, from lengths alone, and their bytes.

Loader workers add nothing to it: those of a rank read as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from asyncfetch.lerobot import reader_of
from asyncfetch.runtime.concurrently import gather
from asyncfetch.stream.remaining import AffinityWalk, Deal, Remaining, SharedOrder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from asyncfetch.lerobot import LeRobotDataset
    from asyncfetch.stream.placement import Placement

__all__ = ["EpisodeWeights", "NamedOrder", "Readers", "TrafficPlan", "readers", "traffic", "weigh"]

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
    """Bytes of all clips of the epoch, each once."""
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
    """Positions in the selection that the order was made for; of a mixture's see ``MixedOrder.slots``."""


class NamedWalk(AffinityWalk, Protocol):
    """A walk that tells of episodes, too."""

    def episodes(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return those at these positions, which ascend."""
        ...


class NamedOrder(SharedOrder, Protocol):
    """An order that tells of episodes where it tells of affinities."""

    def __len__(self) -> int: ...

    def affinities(self, assignment: Any, ranks: int) -> NamedWalk:  # noqa: ANN401
        """See SharedOrder."""
        ...


def readers(order: NamedOrder, layout: Placement) -> Readers:
    """Return who reads which episode in a whole epoch. Takes a second for 5 million samples and few ranks.

    Args:
        order: Of the epoch.
        layout: That all ranks have, whichever of them it is.
    """
    deal = Deal(Remaining(), len(order), layout, order)
    affinities = order.affinities(order.assignment(0), layout.world_size)
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


class EpisodeWeights(NamedTuple):
    """The episodes of one dataset."""

    sizes: NDArray[np.float64]
    """Bytes of each one's clips."""
    files: list[NDArray[np.int64]]
    """Of each camera, a number for the file that an episode is in."""


async def weigh(dataset: LeRobotDataset, selection: Sequence[int]) -> EpisodeWeights:
    """Weigh the selected ones; of more than 1,024, most by their frames. Fetches indexes of videos."""
    reader, places = reader_of(dataset), dataset.episodes.positions(selection)
    lengths = dataset.episodes.lengths[places].astype(np.int64)
    there = np.flatnonzero(lengths)
    chosen = there[np.linspace(0, len(there) - 1, min(len(there), _WEIGHED)).astype(np.int64)]
    found = await gather(*(partial(reader.range_bytes, int(selection[place])) for place in chosen.tolist()))
    sizes = np.array(found, np.float64)
    estimated: NDArray[np.float64] = lengths * (sizes.sum() / max(1, lengths[chosen].sum()))
    estimated[chosen] = sizes
    return EpisodeWeights(estimated, [dataset.episodes.video_files(camera)[places] for camera in dataset.cameras])


def traffic(order: NamedOrder, layout: Placement, datasets: Sequence[EpisodeWeights]) -> tuple[int, int, int, int]:
    """Bytes of what an epoch holds, each once; those fetched, those of the rank that fetches most, and requests.

    Args:
        order: Of the epoch.
        layout: Of all ranks.
        datasets: Those that it is of.
    """
    read = readers(order, layout)
    sizes = np.concatenate([each.sizes for each in datasets])
    found = read.episodes % max(1, len(sizes))  # a mixture's member may come to more than one of its epochs
    by_rank = np.bincount(read.ranks, weights=sizes[found], minlength=1)
    requests = start = 0
    for each in datasets:
        theirs = (found >= start) & (found < start + len(each.sizes))
        ranks, places = read.ranks[theirs], found[theirs] - start
        indexes = sum(len(np.unique(np.stack([ranks, files[places]]), axis=1).T) for files in each.files)
        requests += len(places) * (len(each.files) + 1) + indexes
        start += len(each.sizes)
    return round(sizes[np.unique(found)].sum()), round(by_rank.sum()), round(by_rank.max()), requests
