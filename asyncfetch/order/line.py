"""The segments of a dataset, and the line in which an epoch lays them end to end.

A *segment* is a stretch of an episode's frames that are fetched, held, drawn from and let go of as one: a whole episode
or, of a long one, an equal part. An epoch draws an order of all segments; laid end to end they are its *line*, on which
each frame has a *place*, a number. The places of later epochs follow those of earlier ones, so that a member of a
mixture can go on from one of its epochs to the next.

A line is cut at places: among nodes, ranks and the lanes of a pool. A part of a segment between two cuts is a *piece*.
Its frames lie on the line as they were recorded, so a cut parts neighbours and both pieces take bytes of their own; but
they are given in a drawn order: by groups of neighbours, the groups drawn, the frames of a group ascending.

The random numbers are our own (splitmix64): numpy doesn't promise the same stream across versions, and a saved place
must mean the same after an upgrade.
"""

from __future__ import annotations

import copy
import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncfetch.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_DRAWN_AT_ONCE = 100_000
"""Segments of an epoch that are drawn in about 20 ms."""


class Piece(NamedTuple):
    """Neighbouring frames of one episode that one lane gives in a row: a segment, or a part of it."""

    episode: int
    """Position among the chosen episodes."""
    start: int
    """Its first frame in the episode."""
    stop: int
    """The frame after its last one."""
    member: int = 0
    """The member of a mixture."""
    epoch: int = 0
    """The member's own epoch."""
    begin: int = 0
    """Frames of it, as they are drawn, that others gave or give: so parts of a begun one are pieces of their own."""


def draw_key(*parts: int | str) -> int:
    """64 bits for a purpose and its numbers; different purposes never share a stream."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mixed(numbers: NDArray[np.int64], key: int) -> NDArray[np.uint64]:
    """Splitmix64 of a key at these numbers (Steele, Lea and Flood, 2014): a bijection that leaves no pattern."""
    values = numbers.astype(np.uint64)
    values *= _GOLDEN
    values += np.uint64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values ^= values >> np.uint64(shift)
        values *= np.uint64(factor)
    values ^= values >> np.uint64(31)
    return values


def count_segments(lengths: NDArray[np.int64], segment_frames: int, group_frames: int) -> NDArray[np.int64]:
    """Return how many segments each episode is cut into: equal parts of whole groups, of up to so many frames."""
    groups, most = -(-lengths // group_frames), max(1, segment_frames // group_frames)
    return np.where(lengths <= segment_frames, lengths > 0, -(-groups // most))


def segment_of(frame: int, length: int, segment_frames: int, group_frames: int) -> tuple[int, int]:
    """Return the segment [start, stop) that this frame of an episode of so many is in."""
    groups, parts = -(-length // group_frames), int(count_segments(np.array([length]), segment_frames, group_frames)[0])
    start, stop = _part(((frame // group_frames + 1) * parts - 1) // groups, parts, length, group_frames)
    return int(start), int(stop)


def _part(part: Any, parts: Any, length: Any, group_frames: int) -> tuple[Any, Any]:  # noqa: ANN401 - numbers or arrays
    """Return where a part of so many of an episode begins and ends: between groups."""
    groups = -(-length // group_frames)
    return part * groups // parts * group_frames, np.minimum((part + 1) * groups // parts * group_frames, length)


class Line:
    """The frames of the chosen episodes, epoch after epoch, by their places.

    Args:
        lengths: Frames of each episode; empty ones never appear.
        segment_frames: Frames of a segment at most, but for one of a single group.
        group_frames: Neighbouring frames that are given in a row, counted from an episode's first one.
        coded_frames: Frames of a group of pictures, which segments aren't cut inside of; a multiple of the group.
        shuffle: Whether segments and groups are drawn, or come as they are.
        seed: Of what is drawn.
        nodes: Among how many nodes segments are divided, the same in each epoch; see ``shares``.
    """

    def __init__(
        self,
        lengths: NDArray[np.integer[Any]],
        *,
        segment_frames: int,
        group_frames: int = 1,
        coded_frames: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        nodes: int = 1,
    ) -> None:
        if segment_frames < 1 or group_frames < 1:
            raise ConfigError(f"segments and groups have 1 frame or more, not {segment_frames} and {group_frames}")
        self.lengths: NDArray[np.int64] = np.asarray(lengths, np.int64)
        self.segment_frames, self.group_frames = segment_frames, group_frames
        longest = int(self.lengths.max(initial=1))  # more means the same, and would be counted through
        self._most_frames = min(segment_frames, longest)
        self.coded_frames: int = min(coded_frames or group_frames, longest)
        self.shuffle, self.seed, self.nodes = shuffle, seed, nodes
        self.total: int = int(self.lengths.sum())
        """Frames of an epoch."""
        self._firsts = np.zeros(len(self.lengths) + 1, np.int64)  # the number of each episode's first segment
        self.largest = 1
        """Frames of the longest segment, to a group of pictures."""
        for first in range(0, len(self.lengths), _DRAWN_AT_ONCE):
            part = self.lengths[first : first + _DRAWN_AT_ONCE]
            counts = count_segments(part, self._most_frames, self.coded_frames)
            self._firsts[first + 1 : first + 1 + len(part)] = counts
            self.largest = max(self.largest, int(self._longest(part, counts).max()))
        np.cumsum(self._firsts, out=self._firsts)
        self.segments: int = int(self._firsts[-1])
        self._first_epoch = 0
        # Both shared with those of other first epochs.
        self._shares: list[NDArray[np.int64]] = []
        self._drawn: dict[int, tuple[NDArray[np.int32], NDArray[np.int64]]] = {}  # of the latest two epochs

    @property
    def is_large(self) -> bool:
        """True if an epoch takes more than a few ms to draw: do that in a thread."""
        return self.segments > _DRAWN_AT_ONCE

    def since(self, epoch: int) -> Line:
        """Return the line with places counted from an epoch on: those of late epochs would outgrow 64 bits."""
        line = copy.copy(self)
        line._first_epoch = self._first_epoch + epoch
        return line

    def counts(self) -> NDArray[np.int64]:
        """Return the number of each episode's segments."""
        return np.diff(self._firsts)

    def segment_sizes(self) -> NDArray[np.int64]:
        """Return the frames of each episode's longest segment, to a group of pictures."""
        return self._longest(self.lengths, self.counts())

    def _longest(self, lengths: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
        groups = -(-lengths // self.coded_frames)
        return np.minimum(-(-groups // np.maximum(counts, 1)) * self.coded_frames, lengths)

    def bounds(self, segments: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return of these segments the episode, the first frame and the one after the last."""
        episodes = np.searchsorted(self._firsts, segments, side="right") - 1
        parts = self._firsts[episodes + 1] - self._firsts[episodes]
        starts, stops = _part(segments - self._firsts[episodes], parts, self.lengths[episodes], self.coded_frames)
        return episodes, starts, stops

    def index_of(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of each place's segment on the line, counted through all epochs."""
        epochs, inside = np.divmod(places, self.total)
        found = np.empty(len(places), np.int64)
        for epoch in np.unique(epochs).tolist():
            those = epochs == epoch
            found[those] = np.searchsorted(self._epoch(epoch)[1], inside[those], side="right") + epoch * self.segments
        return found

    def segment(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where on the line these segments begin and end, by the numbers that ``index_of`` gives."""
        epochs, numbers = np.divmod(numbers, max(1, self.segments))
        starts, stops = np.empty((2, len(numbers)), np.int64)
        for epoch in np.unique(epochs).tolist():
            those, ends = epochs == epoch, self._epoch(epoch)[1]
            before = numbers[those] - 1
            starts[those] = np.where(before < 0, 0, ends[before]) + epoch * self.total
            stops[those] = ends[numbers[those]] + epoch * self.total
        return starts, stops

    def segment_at(self, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where on the line the segment of each place begins and ends."""
        return self.segment(self.index_of(places))

    def frames_at(self, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the episode and the frame in it that is recorded at each place."""
        numbers = self.index_of(places)
        epochs, order = np.divmod(numbers, max(1, self.segments))
        drawn = np.empty(len(places), np.int64)
        for epoch in np.unique(epochs).tolist():
            those = epochs == epoch
            drawn[those] = self._epoch(epoch)[0][order[those]]
        episodes, firsts, _ = self.bounds(drawn)
        return episodes, firsts + places - self.segment(numbers)[0]

    def piece(self, first: int, stop: int, member: int = 0) -> Piece:
        """Return what lies from a place on, up to another one or to the end of its segment.

        What ``frames_at`` says of one place, without arrays: loops ask it for each piece.
        """
        epoch, inside = divmod(first, self.total)
        drawn, ends = self._epoch(epoch)
        number = int(ends.searchsorted(inside, side="right"))
        segment = int(drawn[number])
        episode = int(self._firsts.searchsorted(segment, side="right")) - 1
        before, after = self._firsts[episode : episode + 2].tolist()
        _, end = _part(segment - before, after - before, int(self.lengths[episode]), self.coded_frames)
        frame = int(end) - int(ends[number]) + inside
        return Piece(episode, frame, min(frame + stop - first, int(end)), member, self._first_epoch + epoch)

    def frames(self, piece: Piece) -> NDArray[np.int64]:
        """The frames of a piece in the order in which they are given."""
        if not self.shuffle:
            return np.arange(piece.start, piece.stop)
        size = min(self.group_frames, max(1, piece.stop))
        groups = np.arange(piece.start // size, (piece.stop - 1) // size + 1)
        key = draw_key("frames", self.seed, piece.epoch, piece.episode)
        drawn = groups[np.argsort(mixed(groups + 1, key), kind="stable")]
        frames: NDArray[np.int64] = (drawn[:, None] * size + np.arange(size)).ravel()
        return frames[(frames >= piece.start) & (frames < piece.stop)]

    def _epoch(self, epoch: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The segments of an epoch in their order on the line, and the places where they end."""
        epoch += self._first_epoch
        found = self._drawn.get(epoch)
        if found is None:
            while len(self._drawn) > 1:
                del self._drawn[next(iter(self._drawn))]
            found = self._drawn[epoch] = self._draw(epoch)
        return found

    def _draw(self, epoch: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        numbers = np.arange(self.segments)
        if not self.shuffle:
            drawn = numbers.astype(np.int32)
        else:
            if self.nodes > 1 and not self._shares:
                self._shares.append(shares(self._sizes(numbers), self.nodes, self.seed))
            keys = mixed(numbers, draw_key("segments", self.seed, epoch))
            del numbers  # of single groups each of these has 100 MB
            order = np.argsort(keys, kind="stable") if self.nodes == 1 else np.lexsort((keys, self._shares[0]))
            del keys
            drawn = order.astype(np.int32)
            del order
        sizes = self._sizes(drawn)
        return drawn, np.cumsum(sizes, out=sizes)

    def _sizes(self, segments: NDArray[Any]) -> NDArray[np.int64]:
        """The frames of these segments, a part of them at a time: what is made beside them is larger."""
        sizes = np.empty(len(segments), np.int64)
        for first in range(0, len(segments), _DRAWN_AT_ONCE):
            _, starts, stops = self.bounds(segments[first : first + _DRAWN_AT_ONCE])
            np.subtract(stops, starts, out=sizes[first : first + _DRAWN_AT_ONCE])
        return sizes


def shares(sizes: NDArray[np.int64], nodes: int, seed: int) -> NDArray[np.int64]:
    """Return a number for each segment by which they are sorted into equal shares of so many nodes, in every epoch.

    That is twice the segment's node; of one that two neighbouring nodes divide, one more. Each node is given the
    segments that it draws highest among all nodes, so that few move where there is a node more or less (rendezvous
    hashing, Thaler and Ravishankar, 1996), until it has its part; the others go to the node that comes next for them.
    """
    numbers, most = np.arange(len(sizes)), sizes.sum() / nodes
    order = np.argsort(mixed(numbers, draw_key("shares", seed)), kind="stable")
    found = np.full(len(sizes), -1)
    taken = np.zeros(nodes)
    left, open_nodes = order, list(range(nodes))
    while len(left):
        best = np.full(len(left), open_nodes[0])
        highest = np.zeros(len(left), np.uint64)
        for node in open_nodes:
            drawn = mixed(left, draw_key("node", seed, node))
            best, highest = np.where(drawn >= highest, node, best), np.maximum(drawn, highest)
        refused = [np.zeros(0, np.int64)]
        for node in list(open_nodes):
            asks = left[best == node]
            before = taken[node] + np.cumsum(sizes[asks]) - sizes[asks]
            fits = before < most if len(open_nodes) > 1 else np.ones(len(asks), bool)
            found[asks[fits]] = node
            taken[node] += sizes[asks[fits]].sum()
            refused.append(asks[~fits])
            if not fits.all():
                open_nodes.remove(node)
        left = np.concatenate(refused)
    # Shares are equal to the frame: a segment that a border falls into is always at that border.
    line = order[np.argsort(found[order], kind="stable")]
    ends = np.cumsum(sizes[line])
    first_node = (ends - sizes[line]) * nodes // ends[-1]
    last_node = (ends * nodes - 1) // ends[-1]
    found[line] = 2 * first_node + (last_node > first_node)
    return found
