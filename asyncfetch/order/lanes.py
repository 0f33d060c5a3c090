"""A rank's order of one dataset: a pool of lanes, each of which plays a part of the rank's share of the line.

The order goes in *cycles*: in each, every lane that has begun gives one frame. A few lanes begin at once. The others
join them one by one: a sample waits for its whole piece, and pieces for all lanes take seconds to fetch. The share is
cut into a part for each lane, shorter for those that begin later, so that all lanes end together, and the last samples
of an epoch are as mixed as the others. So where a frame stands is arithmetic: nothing before it has to be gone through.

Two things make that even. A pool has fewer lanes than the share has segments, by a sixth: a segment that a cut divides
is then given by one lane at the beginning and by its neighbour at the end, and two lanes seldom give the same one. And
cuts fall at different places in their segments, also where all are of one length: so segments begin and end one after
the other, and what comes next is fetched at an even rate. Lanes that begin together are visited in the order in which
their first pieces end: the shortest come first, and soon are there.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from asyncfetch.order.line import Piece
    from asyncfetch.order.runs import Runs

_SEGMENTS_A_LANE = 6 / 5
"""Fewest. With lengths of 90 to 210 frames, 40 segments and a lane for each, two of 32 samples come of one segment that
two lanes give at a time; with 1.2 it is half a sample."""
_FIRST_LANES = 16
"""Lanes that begin at once: a first batch has samples of so many segments."""
_CYCLES_A_LANE = 2
"""Cycles until one more begins. A first piece has half a segment in the mean, and 16 to 64 lanes give 32 to 128 samples
in two cycles: so a link that brings twice what is consumed keeps up (``python -m bench.throughput --concurrency 16``).
"""


class Lanes:
    """The order of one rank's share, from number 0.

    Args:
        runs: All that is left for all ranks.
        start, stop: Between which offsets the share lies.
        pool: Lanes at most.
        member: Of a mixture.
    """

    def __init__(self, runs: Runs, start: int, stop: int, pool: int, member: int = 0) -> None:
        self.line, self.member, self.total = runs.line, member, stop - start
        self._runs = runs.between(start, stop)
        cuts, begins = self._cuts(min(pool, self.total))
        lanes = np.stack([cuts[:-1], cuts[1:]], axis=1)
        is_used = lanes[:, 0] < lanes[:, 1]
        lanes, begins = lanes[is_used], begins[is_used]
        if self.line.shuffle and len(lanes):
            _, ends = self._runs.pieces_at(lanes[:, 0])
            by_turn = np.lexsort((np.minimum(ends, lanes[:, 1]) - lanes[:, 0], begins))
            lanes, begins = lanes[by_turn], begins[by_turn]
        self.starts, self.stops = lanes[:, 0] + start, lanes[:, 1] + start
        """Between which offsets each lane lies, in the order in which they are visited."""
        self.begins = begins
        """The cycle in which each gives its first frame."""
        self._sizes: NDArray[np.int64] = lanes[:, 1] - lanes[:, 0]
        ends = begins + self._sizes
        self._lanes = lanes
        self._levels: list[int] = np.unique([0, *begins, *ends]).tolist()
        """The cycles before which lanes begin or end."""
        self._visited = [np.flatnonzero((begins <= level) & (level < ends)) for level in self._levels[:-1]]
        cycles = [after - before for before, after in pairwise(self._levels)]
        counts = [turns * len(lanes) for turns, lanes in zip(cycles, self._visited, strict=True)]
        self._firsts: list[int] = [0, *np.cumsum(counts).tolist()]
        """The number of the first sample after each level."""

    def __len__(self) -> int:
        return len(self._lanes)

    def _cuts(self, most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The offsets, in the share, at which it is cut, between groups of pictures; the cycle in which each begins."""
        runs, total, line = self._runs, self.total, self.line
        if not line.shuffle or not total:
            return np.array([0, total]), np.zeros(1, np.int64)
        lanes = max(1, min(most, int(runs.count_pieces() / _SEGMENTS_A_LANE)))
        later = max(0, lanes - _FIRST_LANES)
        # A lane that begins later still has to be through its first segment before its neighbour ends in the same one.
        spare = max(0, total // lanes - line.total // line.segments)
        ramp = min(later * _CYCLES_A_LANE, spare // 2)
        begins = np.maximum(0, np.arange(1, lanes + 1) - _FIRST_LANES) * ramp // max(1, later)
        segments = max(1, round(total * line.segments / line.total))
        # Where lanes and segments have a divisor in common, and these one length, lanes would begin alike. With one
        # segment more to divide they don't; the last lane then ends earlier.
        divided = next(more for more in range(segments, segments + lanes + 1) if math.gcd(more, lanes) == 1)
        cycles, before = (total + int(begins.sum())) * divided, np.cumsum([0, *begins]).tolist()
        cuts = np.array([lane * cycles // (segments * lanes) - before[lane] for lane in range(lanes)] + [total])
        is_inner = (cuts > 0) & (cuts < total)
        inner = cuts[is_inner]
        found, inside = runs.at(inner)
        whole = runs.is_whole[found]
        places = runs.rows[found[whole], 0] + inside[whole]
        starts, stops = line.segment_at(places)
        size = line.coded_frames
        even = np.minimum(starts + (places - starts + size // 2) // size * size, stops)
        inner[whole] += np.clip(even - places, -inside[whole], None)
        cuts[is_inner] = inner
        return np.maximum.accumulate(np.clip(cuts, 0, total)), begins

    def visits(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the lane of each of these samples, and how many that lane gave before it."""
        levels = np.searchsorted(self._firsts, numbers, side="right") - 1
        lanes, given = np.empty(len(numbers), np.int64), np.empty(len(numbers), np.int64)
        for level in np.unique(levels).tolist():
            those, visited = levels == level, self._visited[level]
            turns, places = np.divmod(numbers[those] - self._firsts[level], len(visited))
            lanes[those] = visited[places]
            given[those] = turns + self._levels[level] - self.begins[lanes[those]]
        return lanes, given

    def given(self, count: int) -> NDArray[np.int64]:
        """Return how many of the first so many samples each lane has given."""
        level = bisect_right(self._firsts, count) - 1
        if level == len(self._visited):
            return self._sizes
        visited = self._visited[level]
        turns, place = divmod(count - self._firsts[level], len(visited))
        given = np.clip(self._levels[level] - self.begins, 0, self._sizes)
        given[visited] += turns + (np.arange(len(visited)) < place)
        return given

    def left(self, taken: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the spans of offsets that are left where these samples were given: [start, stop, start, stop ...)."""
        starts, stops = [], []
        whole = int(taken[0, 1]) if len(taken) and taken[0, 0] == 0 else 0
        upto = int(taken[-1, 1]) if len(taken) else 0
        behind = self.given(upto)
        gaps = [np.arange(before, after) for (_, before), (after, _) in pairwise(taken.tolist())]
        if len(taken) and not whole:
            gaps.insert(0, np.arange(int(taken[0, 0])))
        lanes, before = self.visits(np.concatenate([np.zeros(0, np.int64), *gaps]))
        for lane, (start, stop) in enumerate(zip(self.starts.tolist(), self.stops.tolist(), strict=True)):
            missing = start + before[lanes == lane]
            if len(missing):
                apart = np.flatnonzero(np.diff(missing) > 1)
                starts += missing[np.concatenate([[0], apart + 1])].tolist()
                stops += (missing[np.concatenate([apart, [-1]])] + 1).tolist()
            if start + behind[lane] < stop:
                if stops and stops[-1] == start + int(behind[lane]):
                    stops[-1] = stop
                else:
                    starts.append(start + int(behind[lane]))
                    stops.append(stop)
        return np.array(starts, np.int64), np.array(stops, np.int64)

    def cursor(self) -> Cursor:
        """Return a way through it that takes some of its samples, in ascending order."""
        return Cursor(self)

    def apart(self) -> Runs:
        """The whole share, with a run for each piece."""
        return self._runs.cut(self._lanes.ravel()).apart()

    def pieces(self, lane: int) -> Runs:
        """All that a lane gives."""
        start, stop = self._lanes[lane].tolist()
        return self._runs.between(start, stop)


class Cursor:
    """The frames that one consumer takes of a rank's order. Memory: the drawn frames of a piece for each lane."""

    def __init__(self, lanes: Lanes) -> None:
        self._of = lanes
        self._level = 0
        self._lanes: list[_Lane | None] = [None] * len(lanes)
        self._ends: list[tuple[int, Piece]] = []  # a heap: the pieces that were used, by the cycle in which each ends

    def at(self, number: int) -> tuple[list[Piece], Piece, int]:
        """The pieces that were used and aren't from this sample on; the piece and frame of the sample.

        Numbers ascend, and are below the order's length.
        """
        of = self._of
        while number >= of._firsts[self._level + 1]:
            self._level += 1
        visited = of._visited[self._level]
        turn, place = divmod(number - of._firsts[self._level], len(visited))
        cycle, lane = turn + of._levels[self._level], int(visited[place])
        left = []
        while self._ends and self._ends[0][0] <= cycle:
            left.append(heapq.heappop(self._ends)[1])
        begin = int(of.begins[lane])
        at = self._lanes[lane]
        if at is None:
            at = self._lanes[lane] = _Lane(of, lane, cycle - begin)
        if at.go_to(cycle - begin):
            heapq.heappush(self._ends, (begin + at.stop, at.piece))
        return left, at.piece, int(at.frames[cycle - begin - at.start])

    def used(self) -> list[Piece]:
        """The pieces that were used and not yet left."""
        return [piece for _, piece in sorted(self._ends)]


class _Lane:
    """One lane's way through its pieces."""

    def __init__(self, of: Lanes, lane: int, before: int) -> None:
        self._line = of.line
        runs = of.pieces(lane)
        start, _ = runs.pieces_at(np.array([before]))
        self._pieces: Iterator[tuple[Piece, int, int]] = runs.between(int(start[0]), runs.total).pieces(of.member)
        self.start = self.stop = int(start[0])
        """The numbers of its own samples between which it gives the piece."""
        self.piece: Piece
        self.frames: NDArray[np.int64]

    def go_to(self, number: int) -> bool:
        """Go on to the piece with its sample of this number; True if that is another one."""
        if number < self.stop:
            return False
        while number >= self.stop:
            self.piece, begin, end = next(self._pieces)
            self.start, self.stop = self.stop, self.stop + end - begin
        self.frames = self._line.frames(self.piece)[begin:end]
        return True
