"""Stretches of lines that are left of an epoch, end to end: to be cut among ranks, and what these leave.

A run is a row of four numbers: it lies on the line from ``first`` to ``stop`` and, of what lies there, the frames from
``begin`` to ``end`` are left, in the order in which they are given. Of a whole run that is everything, and it may hold
any number of pieces. Of a piece that was begun it is what hasn't been given of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from asyncfetch.order.line import Line, Piece

FIRST, STOP, BEGIN, END = range(4)


class Runs:
    """Runs of one line. Their frames are numbered through all of them; those numbers are *offsets*. Immutable."""

    def __init__(self, line: Line, rows: NDArray[np.int64]) -> None:
        self.line = line
        self.rows = rows
        self.ends: NDArray[np.int64] = np.cumsum(rows[:, END] - rows[:, BEGIN])
        """The offset after each."""

    @classmethod
    def whole(cls, line: Line, first: int, stop: int) -> Runs:
        """All that lies between two places, which may be of any epoch."""
        count = stop - first
        epoch, first = divmod(first, max(1, line.total))
        rows = [[first, first + count, 0, count]] if count > 0 else []
        return cls(line.since(epoch), np.array(rows, np.int64).reshape(-1, 4))

    @property
    def total(self) -> int:
        """Frames that are left."""
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def is_whole(self) -> NDArray[np.bool_]:
        """True for each run of which nothing was given."""
        rows = self.rows
        whole: NDArray[np.bool_] = (rows[:, BEGIN] == 0) & (rows[:, END] == rows[:, STOP] - rows[:, FIRST])
        return whole

    def at(self, offsets: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the run of each offset, and how many of its frames come before."""
        found = np.searchsorted(self.ends, offsets, side="right")
        return found, offsets - (self.ends[found] - self.rows[found, END] + self.rows[found, BEGIN])

    def pieces_at(self, offsets: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return between which offsets the piece of each offset lies."""
        found, before = self.at(offsets)
        rows, whole = self.rows[found], self.is_whole[found]
        starts, stops = np.zeros(len(offsets), np.int64), rows[:, END] - rows[:, BEGIN]
        if whole.any():
            first, last = self.line.segment_at(rows[whole, FIRST] + before[whole])
            starts[whole] = np.maximum(first - rows[whole, FIRST], 0)
            stops[whole] = np.minimum(last - rows[whole, FIRST], stops[whole])
        return offsets - before + starts, offsets - before + stops

    def cut(self, offsets: NDArray[np.int64]) -> Runs:
        """Return the same with a run's end at each offset."""
        inside = offsets[(offsets > 0) & (offsets < self.total)]
        ends = np.union1d(self.ends, inside)
        starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
        found, before = self.at(starts)
        return Runs(self.line, self._parts(found, before, before + ends - starts))

    def between(self, start: int, stop: int) -> Runs:
        """All that lies between two offsets."""
        if start >= stop:
            return Runs(self.line, self.rows[:0])
        low = int(np.searchsorted(self.ends, start, side="right"))
        high = int(np.searchsorted(self.ends, stop, side="left"))
        found = np.arange(low, high + 1)
        sizes = self.rows[found, END] - self.rows[found, BEGIN]
        begins = self.ends[found] - sizes
        return Runs(self.line, self._parts(found, np.maximum(start - begins, 0), np.minimum(stop - begins, sizes)))

    def left(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Runs:
        """Runs that these spans of offsets leave where the rest was given; they ascend and don't meet."""
        starts, stops = starts[starts < stops], stops[starts < stops]
        edges = np.concatenate([starts, stops - 1])
        runs = self.cut(np.concatenate(self.pieces_at(edges)))  # so that what was begun has a run of its own
        low, high = np.searchsorted(runs.ends, starts, side="right"), np.searchsorted(runs.ends, stops, side="left")
        counts = high - low + 1
        found = np.repeat(low - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        rows = runs.rows[found]
        begins = runs.ends[found] - (rows[:, END] - rows[:, BEGIN])
        kept = rows.copy()
        kept[:, BEGIN] += np.maximum(np.repeat(starts, counts) - begins, 0)
        kept[:, END] -= np.maximum(runs.ends[found] - np.repeat(stops, counts), 0)
        return Runs(self.line, kept)

    def pieces(self, member: int = 0) -> Iterator[tuple[Piece, int, int]]:
        """Yield each piece, and from which to which of its frames, as they are given, are left."""
        for (first, stop, begin, end), is_whole in zip(self.rows.tolist(), self.is_whole.tolist(), strict=True):
            while first < stop:
                piece = self.line.piece(first, stop, member)
                first += piece.stop - piece.start  # of a whole run there may be more
                yield (piece, 0, piece.stop - piece.start) if is_whole else (piece._replace(begin=begin), begin, end)

    def apart(self) -> Runs:
        """Return the same with a run for each piece."""
        whole, line = self.rows[self.is_whole], self.line
        firsts, lasts = line.index_of(whole[:, FIRST]), line.index_of(whole[:, STOP] - 1)
        counts = lasts - firsts
        numbers = np.repeat(firsts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        begins = self.ends[self.is_whole] - whole[:, END]
        return self.cut(line.segment(numbers)[1] + np.repeat(begins - whole[:, FIRST], counts))

    def count_pieces(self) -> int:
        """Return how many there are."""
        whole = self.rows[self.is_whole]
        if not len(whole):
            return len(self.rows)
        firsts, lasts = self.line.index_of(whole[:, FIRST]), self.line.index_of(whole[:, STOP] - 1)
        return int((lasts - firsts + 1).sum()) + len(self.rows) - len(whole)

    def _parts(self, found: NDArray[np.int64], begins: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return of these runs what lies from the begin-th to the end-th of their frames."""
        rows = self.rows[found]
        whole = self.is_whole[found]
        parts = rows.copy()
        parts[:, BEGIN], parts[:, END] = rows[:, BEGIN] + begins, rows[:, BEGIN] + ends
        parts[whole, FIRST], parts[whole, STOP] = rows[whole, FIRST] + begins[whole], rows[whole, FIRST] + ends[whole]
        parts[whole, BEGIN], parts[whole, END] = 0, (ends - begins)[whole]
        return parts
