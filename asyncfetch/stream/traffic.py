"""The cost of an epoch before it is paid: which rank reads which pieces, from lengths alone, and their bytes.

Loader workers add nothing to it: those of a rank read as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asyncfetch.order.line import Piece
from asyncfetch.order.runs import FIRST, STOP
from asyncfetch.runtime.concurrently import gather

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from asyncfetch.order.deal import Deal
    from asyncfetch.order.placement import Placement
    from asyncfetch.stream.datasets import OpenDatasets

_WEIGHED = 1024
"""Episodes that are weighed, spread over the dataset, and pieces of them; the others count by their frames."""


@dataclass(frozen=True, slots=True)
class TrafficPlan:
    """Bytes and requests of an epoch: clips alone. Metadata, indexes and rows are a few hundredths more, as a rule."""

    world_size: int
    num_workers: int
    batch_size: int | None
    least_bytes: int
    """Bytes of all clips of the epoch, each once."""
    fetched_bytes: int
    """Bytes that all ranks and their workers fetch at most, without a disk cache. What windows reach beside a segment
    counts, though a rank doesn't fetch what it still has in memory."""
    run_bytes: int
    """Bytes that a run of many epochs fetches, where each machine has a disk cache that holds all it reads: each once
    where shares are kept (``keep_shares``), else as often as there are machines. What windows reach of the segments of
    another machine comes on top."""
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
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    frames: NDArray[np.int64]
    """Frames of the groups of pictures that the piece lies in, without those that windows reach beside it."""


def frames_fetched(deal: Deal, member: int) -> PiecesRead:
    """Return the pieces of a member that each rank reads."""
    line, found = deal.left.members[member].line, [np.zeros((5, 0), np.int64)]
    size = line.coded_frames
    for rank in np.flatnonzero(deal.real[:, member]).tolist():
        rows = deal.lanes(rank, member).apart().rows
        firsts, those = np.unique(rows[:, FIRST], return_index=True)  # two lanes may give what is left of one piece
        episodes, starts = line.frames_at(firsts)
        stops = starts + rows[those, STOP] - firsts
        frames = np.minimum(-(-stops // size) * size, line.lengths[episodes]) - starts // size * size
        found.append(np.stack([np.full(len(frames), rank), episodes, starts, stops, frames]))
    return PiecesRead(*np.concatenate(found, axis=1))


def _spread(those: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return up to 1,024 of them."""
    return those[np.linspace(0, len(those) - 1, min(len(those), _WEIGHED)).astype(np.int64)]


async def _range_bytes(opened: OpenDatasets, pieces: Iterable[Piece]) -> NDArray[np.float64]:
    """Return what is fetched for each piece, with what windows reach beside it. Fetches indexes of videos."""
    origins = [opened.origin(piece) for piece in pieces]
    return np.array(await gather(*(partial(one.reader.range_bytes, one.stretch) for one in origins)), np.float64)


async def _weigh(opened: OpenDatasets, member: int, read: PiecesRead) -> tuple[NDArray[np.float64], float]:
    """Return the bytes of each piece that is read of a member, and those of all its episodes, each once."""
    lengths = opened.datasets[member].lengths(opened.members[member].episodes).astype(np.int64)
    weighed = _spread(np.flatnonzero(lengths))
    sizes = await _range_bytes(opened, (Piece(each, 0, int(lengths[each]), member) for each in weighed.tolist()))
    frame_bytes = np.full(len(lengths), sizes.sum() / max(1, lengths[weighed].sum()))
    frame_bytes[weighed] = sizes / lengths[weighed]
    found: NDArray[np.float64] = read.frames * frame_bytes[read.episodes]
    there = _spread(np.flatnonzero(np.isin(read.episodes, weighed)))
    spans = np.stack([read.episodes, read.starts, read.stops], axis=1)[there].tolist()
    sizes = await _range_bytes(opened, (Piece(episode, start, stop, member) for episode, start, stop in spans))
    found *= sizes.sum() / max(1.0, found[there].sum())
    found[there] = sizes
    return found, float((lengths * frame_bytes).sum())


async def traffic(opened: OpenDatasets, deal: Deal, layout: Placement, readers: int) -> TrafficPlan:
    """Return what an epoch fetches, by lengths and indexes alone; ``readers`` fetch each byte once in a run."""
    by_rank = np.zeros(layout.world_size)
    least = all_members = requests = 0.0
    for number, (member, dataset) in enumerate(zip(opened.members, opened.datasets, strict=True)):
        read = frames_fetched(deal, number)
        sizes, all_bytes = await _weigh(opened, number, read)
        by_rank += np.bincount(read.ranks, sizes, layout.world_size)
        runs = deal.left.members[number]
        all_members += all_bytes
        least += all_bytes * min(1.0, runs.total / max(1, runs.line.total))  # of a mixture's member it may be a part
        files = list(dataset.files(member.episodes).values())
        requests += len(read.ranks) * len(files)
        requests += len(np.unique(np.stack([read.ranks, read.episodes]), axis=1).T)
        for each in files:
            requests += len(np.unique(np.stack([read.ranks, each[read.episodes]]), axis=1).T)
    batch = layout.batch_size or 32
    order = deal.rank(0)
    visits, middle = order.visits(), max(0, order.last - batch) // 2
    given = [visits.at(number) for number in range(middle, min(middle + batch, order.last))]
    return TrafficPlan(
        layout.world_size,
        layout.workers if layout.workers > 1 else 0,
        layout.batch_size,
        round(least),
        round(by_rank.sum()),
        round(all_members * readers),
        round(by_rank.max()),
        round(requests),
        len({visit.piece for visit in given if visit is not None}),
    )
