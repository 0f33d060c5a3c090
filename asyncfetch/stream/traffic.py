"""The cost of an epoch before it is paid: which rank reads which pieces, from lengths alone, and their bytes.

Loader workers add nothing to it: those of a rank read as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asyncfetch.lerobot import Stretch, reader_of
from asyncfetch.order.runs import FIRST, STOP
from asyncfetch.runtime.concurrently import gather

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from asyncfetch.lerobot import LeRobotDataset
    from asyncfetch.order.deal import Deal
    from asyncfetch.order.placement import Placement
    from asyncfetch.stream.datasets import OpenDatasets

_WEIGHED = 1024
"""Episodes whose bytes are asked for, spread over the dataset; those of the others go by their frames."""


@dataclass(frozen=True, slots=True)
class TrafficPlan:
    """Bytes and requests of an epoch: clips alone. Metadata, indexes and rows are a few hundredths more, as a rule."""

    world_size: int
    num_workers: int
    batch_size: int | None
    least_bytes: int
    """Bytes of all clips of the epoch, each once."""
    fetched_bytes: int
    """Bytes that all ranks and their workers fetch, without a disk cache."""
    run_bytes: int
    """Bytes that a run of many epochs fetches, where each machine has a disk cache that holds all it reads: each once
    where shares are kept (``keep_shares``), else as often as there are machines."""
    largest_rank_bytes: int
    """Bytes of the rank that fetches most."""
    requests: int
    """Requests for clips and rows of episodes, and for the indexes of videos."""
    distinct_segments: int
    """Segments that the samples of a rank's batch come from, at most; where no batch is known, of 32 samples."""


class PiecesRead(NamedTuple):
    """The pieces that all ranks read of one member in an epoch, one in each place."""

    ranks: NDArray[np.int64]
    episodes: NDArray[np.int64]
    frames: NDArray[np.int64]
    """Frames of the groups of pictures that the piece lies in."""


def frames_fetched(deal: Deal, member: int) -> PiecesRead:
    """Return who reads what of a member."""
    line, found = deal.left.members[member].line, [np.zeros((3, 0), np.int64)]
    size = line.coded_frames
    for rank in np.flatnonzero(deal.real[:, member]).tolist():
        rows = deal.lanes(rank, member).apart().rows
        firsts, those = np.unique(rows[:, FIRST], return_index=True)  # two lanes may give what is left of one piece
        episodes, starts = line.frames_at(firsts)
        stops = starts + rows[those, STOP] - firsts
        frames = np.minimum(-(-stops // size) * size, line.lengths[episodes]) - starts // size * size
        found.append(np.stack([np.full(len(frames), rank), episodes, frames]))
    return PiecesRead(*np.concatenate(found, axis=1))


async def _weigh(dataset: LeRobotDataset, chosen: Sequence[int]) -> NDArray[np.float64]:
    """Return bytes a frame of each episode's clips; of more than 1,024, of most the mean. Fetches indexes of videos."""
    reader, lengths = reader_of(dataset), dataset.episodes.lengths[dataset.episodes.positions(chosen)].astype(np.int64)
    there = np.flatnonzero(lengths)
    weighed = there[np.linspace(0, len(there) - 1, min(len(there), _WEIGHED)).astype(np.int64)]
    stretches = [Stretch(int(chosen[place]), 0, int(lengths[place])) for place in weighed.tolist()]
    sizes = np.array(await gather(*(partial(reader.range_bytes, each) for each in stretches)), np.float64)
    found = np.full(len(lengths), sizes.sum() / max(1, lengths[weighed].sum()))
    found[weighed] = sizes / lengths[weighed]
    return found


async def traffic(opened: OpenDatasets, deal: Deal, layout: Placement, readers: int) -> TrafficPlan:
    """Return what an epoch fetches, told from lengths and indexes alone. ``readers`` are those of a byte in a run."""
    by_rank = np.zeros(layout.world_size)
    least = requests = 0.0
    for number, (member, dataset) in enumerate(zip(opened.members, opened.datasets, strict=True)):
        read = frames_fetched(deal, number)
        chosen = member.chosen(dataset)
        frame_bytes = await _weigh(dataset, chosen)
        by_rank += np.bincount(read.ranks, read.frames * frame_bytes[read.episodes], layout.world_size)
        runs = deal.left.members[number]
        epochs = runs.total / max(1, runs.line.total)  # a mixture's member may come to more than one of its epochs
        least += float((runs.line.lengths * frame_bytes).sum()) * epochs
        files = [dataset.episodes.video_files(camera)[dataset.episodes.positions(chosen)] for camera in dataset.cameras]
        requests += len(read.ranks) * len(files)
        requests += len(np.unique(np.stack([read.ranks, read.episodes]), axis=1).T)
        for each in files:
            requests += len(np.unique(np.stack([read.ranks, each[read.episodes]]), axis=1).T)
    batch = layout.batch_size or 32
    distinct = min(batch, sum(len(deal.lanes(0, member)) for member in range(len(opened.members))))
    return TrafficPlan(
        layout.world_size,
        layout.workers if layout.workers > 1 else 0,
        layout.batch_size,
        round(least),
        round(by_rank.sum()),
        round(least * readers),
        round(by_rank.max()),
        round(requests),
        distinct,
    )
