"""The order of an epoch, as arithmetic: a pure function of (seed, epoch, lengths, lanes, pool, group).

A shuffled epoch takes the episodes in the order of a keyed permutation. They sit on *seats*, as many as the pool holds,
which are shared out evenly among the *lanes*. The order goes in *cycles*: in each, every seat gives one frame of its
episode, the lanes in turns, and each lane its seats from a place drawn anew. An episode that has given its last frame
leaves its seat to the next of the permutation; at both ends of an epoch episodes are divided among seats. So where an
episode sits, and from which cycle to which, follows from lengths alone (see ``seating``): the order is found at any
position without going frame by frame through what is in front of it, and the lanes stay level to the end.

The frames of an episode come by *groups* of neighbours, the groups in a drawn order, the frames of a group ascending.
With groups of one frame that is a plain shuffle. With those of a video's groups of pictures (a key frame, and what
leans on it), the frames of one can be decoded by one pass over it; they are delivered a cycle apart.

Who takes which positions of the order is told by ``cursor``. Memory: the frame orders of the episodes in the pool, 8
bytes a frame; nothing grows with the number of episodes. The random numbers are our own (splitmix64, a keyed Feistel
network): numpy doesn't promise the same stream across versions, and a saved position must mean the same after an
upgrade.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncfetch.errors import ConfigError
from asyncfetch.stream.seating import Seating

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from asyncfetch.stream.placement import Placement

__all__ = ["Order", "SeatSlots", "Step", "Visits", "draw_key", "permute"]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_VERSION = 3
"""Of the shuffled order: a state of another one is refused. The first let all seats begin with an episode each, the
second every two; in both, seats dropped out as soon as they found none."""
_FEISTEL_ROUNDS = 4
"""Enough for a pseudo-random permutation that a distinguisher can't tell cheaply (Luby and Rackoff, 1988)."""
_LEAST_SEATS = 4
"""Of a rank for an episode on several seats to be kept together. That makes room for each part on its first seat, so
every rank between the two gives a seat on to the next; with few of them each, that is more than is won."""
_FAR_SEATS = 1000
"""It takes milliseconds until so many have an episode."""


class Step(NamedTuple):
    """One sample of a consumer's order."""

    episode: int
    """Position in the selection of episodes that the order was made for."""
    frame: int
    """Frame in the episode, from 0."""
    reader: int = 0
    """Of the readers of the episode: where several seats share it they go through different groups at a time.
    Counted over all parts that it ever had."""
    finished: tuple[int, ...] = ()
    """Episodes that this consumer used and won't use after this step; each is named once, or never at the very end."""
    is_padding: bool = False
    """Whether it repeats a sample only to make ranks even."""
    empty: int = 0
    """Of the consumer's positions, those behind this one, or in front of the first, that hold nothing."""


def _mix_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Splitmix64's finaliser (Steele, Lea and Flood, 2014): a bijection of 64 bits that leaves no pattern."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed


def draw_key(*parts: int | str) -> int:
    """64 bits for a purpose and its numbers; different purposes never share a stream."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def permute(indices: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Where a keyed permutation of ``range(size)`` sends each of ``indices``, in O(1) time and memory for each.

    A Feistel network over the next even power of two, walked until it lands inside (at most 4 tries on average).
    """
    half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half_bits)) - 1)
    values = indices.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        left, right = values[outside] >> half_bits, values[outside] & mask
        for turn in range(_FEISTEL_ROUNDS):
            round_key = np.uint64((key + turn * _GOLDEN) & _MASK)
            left, right = right, left ^ (_mix_array(right + round_key) & mask)
        values[outside] = left << half_bits | right
        outside = values >= np.uint64(size)
    return values.astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """The order of one epoch.

    Args and fields are what the order is a function of, and nothing else is. ``lanes``, ``pool_episodes`` and
    ``group_frames`` count for a shuffled order only; the order of ``shuffle=False`` is that of the episodes and frames
    themselves.
    """

    lengths: NDArray[np.integer[Any]]
    """Frames of each chosen episode; zero-length episodes are allowed and never appear."""
    shuffle: bool
    seed: int
    epoch: int
    lanes: int
    """Independent sequences that the order goes round."""
    pool_episodes: int
    """Episodes open at a time over all lanes; at least one a lane, and what is over by the lanes isn't used."""
    group_frames: int = 1
    """Neighbouring frames that come in a row as far as their episode goes; counted from its first frame."""
    _total: int = field(init=False)

    def __post_init__(self) -> None:
        if self.lanes < 1 or self.pool_episodes < self.lanes:
            message = f"an order needs lanes >= 1 and pool_episodes >= lanes, not {self.lanes} and {self.pool_episodes}"
            raise ConfigError(message)
        if self.group_frames < 1:
            raise ConfigError(f"group_frames must be at least 1, not {self.group_frames}")
        object.__setattr__(self, "_total", int(self.lengths.sum()))

    def __len__(self) -> int:
        return self._total

    def identity(self) -> dict[str, int | bool]:
        """What it was made of beside the lengths and the epoch, as JSON."""
        if not self.shuffle:
            return {"shuffle": False}
        names = ("shuffle", "seed", "lanes", "pool_episodes", "group_frames")
        return {"version": _VERSION, **{name: getattr(self, name) for name in names}}

    @property
    def slotted(self) -> int:
        """Positions below it have a slot: see SharedOrder."""
        return self._total

    def largest_group(self) -> int:
        """See EpisodeOrder."""
        return min(self.group_frames, int(self.lengths.max(initial=1)))

    def open_episodes(self, placement: Placement) -> int:
        """How many episodes a consumer draws from at a time, while every seat has one."""
        if not placement.step_samples or placement.world_size == 1:
            seats = self.seats // placement.consumers if self.lanes % placement.period == 0 else self.seats
            return min(seats, len(self.lengths))
        seats, shared = divmod(self.seats, placement.world_size)
        if shared:  # with both neighbours
            return min(seats + 2, self.seats, len(self.lengths))
        if placement.block_samples == 1 and seats % placement.workers == 0:
            seats //= placement.workers
        return min(seats, len(self.lengths))

    def pool(self, placement: Placement) -> tuple[int, int]:
        """How many different episodes those are at most, and how many frames they have if they are the longest."""
        longest = np.sort(self.lengths[self.lengths > 0])[-self.open_episodes(placement) :]
        return len(longest), int(longest.sum())

    def is_far(self, position: int) -> bool:
        """Whether the seating there takes long to find."""
        return position > 0 or min(self.seats, len(self.lengths)) > _FAR_SEATS

    def seating(self, position: int = 0) -> Seating:
        """Who sits where at this position. Takes a microsecond or two for each episode in front of it."""
        seating = Seating(self)
        while position >= seating.stop and seating.episodes:
            seating.advance()
        return seating

    def steps(self, positions: Iterable[int], seating: Seating | None = None) -> Iterator[Step]:
        """What comes at these positions of the order, which must ascend and be below its length.

        ``seating`` is that of the first position, or of one in front of it, to save finding it; it stays as it is.

        Raises:
            ConfigError: A position isn't one of the order's, or doesn't ascend.
        """
        visits = self.visits(seating)
        step: Step | None = None
        for position in positions:
            left, episode, frame, reader = visits.at(position)
            if step is not None:
                yield step._replace(finished=tuple(left)) if left else step
            step = Step(episode, frame, reader)
        if step is not None:
            yield step

    def visits(self, seating: Seating | None = None) -> Visits:
        """What one consumer takes, asked for position by position; from the beginning, or where the seating is."""
        return Visits(self, Seating(self) if seating is None else seating.copy())

    def slots(self, seating: Seating, ranks: int) -> SeatSlots:
        """The slots of all positions from that of the seating on, which stays as it is, for so many ranks."""
        return SeatSlots(self, seating.copy(), keeps_together=self.seats >= _LEAST_SEATS * ranks)

    def slot(self, seat: int) -> float:
        """Where a seat lies among all of them, from 0 to 1: those of a lane together, the lanes by their bits reversed.

        So lanes whose turns follow each other lie far apart, and any stretch of the order has about as many of every
        part of the slots as of another. And the seats on which an episode begins lie side by side.
        """
        row, lane = divmod(seat, self.lanes)
        bits = (self.lanes - 1).bit_length()
        reverse = int(f"{lane:0{bits}b}"[::-1], 2) if bits else 0
        return (reverse + row * self.lanes / self.seats) / (1 << bits)

    @property
    def seats(self) -> int:
        """Episodes open at a time over all lanes."""
        return self.pool_episodes // self.lanes * self.lanes if self.shuffle else 1

    @property
    def is_level(self) -> bool:
        """Whether each lane has one seat, so that the turns of all cycles are alike."""
        return not self.shuffle or self.seats == self.lanes

    def queue(self, start: int, stop: int) -> list[tuple[int, int]]:
        """(episode, length) of those that are taken start-th to stop-th, without the empty ones."""
        size = len(self.lengths)
        episodes = np.arange(start, min(stop, size))
        if self.shuffle:
            episodes = permute(episodes, size, draw_key("episodes", self.seed, self.epoch))
        lengths = self.lengths[episodes]
        return list(zip(episodes[lengths > 0].tolist(), lengths[lengths > 0].tolist(), strict=True))

    def turns(self, seating: Seating, cycle: int) -> Sequence[int]:
        """The taken seats in the order in which they give their frames of this cycle."""
        taken = seating.episodes
        per_lane = min(self.seats // self.lanes, _MASK >> 1) if self.shuffle else 1  # as far as numpy counts
        if per_lane == 1:
            return sorted(taken)
        key = np.uint64(draw_key("cycle", self.seed, self.epoch, cycle))
        lanes = np.arange(min(self.lanes, len(self.lengths)))  # those that anybody may sit on
        begin = (_mix_array(lanes.astype(np.uint64) + key) % np.uint64(per_lane)).astype(np.int64)
        if len(taken) == self.seats:  # as mostly, and then nothing has to be sorted
            rows = (np.arange(per_lane)[:, None] + begin) % per_lane
            visits = (rows * self.lanes + lanes).ravel()
        else:
            seats = np.fromiter(taken, np.int64, len(taken))
            row, lane = np.divmod(seats, len(lanes))
            visits = seats[np.lexsort((lane, (row - begin[lane]) % per_lane))]
        turns: list[int] = visits.tolist()
        return turns

    def frames(self, episode: int) -> NDArray[np.int64]:
        """The order of an episode's frames."""
        length = int(self.lengths[episode])
        if not self.shuffle:
            return np.arange(length)
        size = min(self.group_frames, max(length, 1))  # a group may be larger than any episode
        groups = np.arange(1, -(-length // size) + 1, dtype=np.uint64)
        key = np.uint64(draw_key("frames", self.seed, self.epoch, episode))
        drawn = np.argsort(_mix_array(groups * np.uint64(_GOLDEN) + key), kind="stable")
        frames: NDArray[np.int64] = (drawn[:, None] * size + np.arange(size)).ravel()
        return frames[frames < length]


class SeatSlots:
    """The slot of each sample: that of its seat. Made by ``Order.slots``.

    At both ends of an epoch an episode sits on several seats; where it is to be kept together, its slot is that of the
    seat where it came first.
    """

    def __init__(self, order: Order, seating: Seating, *, keeps_together: bool) -> None:
        self._order = order
        self._seating = seating
        self._keeps_together = keeps_together
        self._slots: dict[int, float] = {}  # by seat
        self._begin = self._end = 0
        self._turns, self._episodes = np.zeros(0), np.zeros(0, np.int64)
        """Slots and episodes of the positions from ``_begin`` to ``_end``, which come again and again."""

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.float64]:
        """See ``cursor.Slots``."""
        found = np.empty(len(positions))
        for those, places in self._stretches(positions):
            found[those] = self._turns[places]
        return found

    def episodes(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The episodes that come at these positions; for ``traffic``, which asks for no frames."""
        found = np.empty(len(positions), np.int64)
        for those, places in self._stretches(positions):
            found[those] = self._episodes[places]
        return found

    def _stretches(self, positions: NDArray[np.int64]) -> Iterator[tuple[slice, NDArray[np.int64]]]:
        """Which of the positions have the turns that are known by then, and the places of those in them."""
        done = 0
        while done < len(positions):
            self._go_to(int(positions[done]))
            stop = int(np.searchsorted(positions, self._end))
            yield slice(done, stop), (positions[done:stop] - self._begin) % len(self._turns)
            done = stop

    def _go_to(self, position: int) -> None:
        if self._begin <= position < self._end:
            return
        order, seating = self._order, self._seating
        while position >= seating.stop and seating.episodes:
            seating.advance()
        turn = (position - seating.start) // len(seating.episodes)
        seats = order.turns(seating, seating.cycle + turn)
        self._turns = np.array([self._slot(seat) for seat in seats])
        self._episodes = np.array([seating.episodes[seat][0] for seat in seats])
        self._begin, self._end = seating.start, seating.stop
        if not order.is_level:
            self._begin += turn * len(seats)
            self._end = self._begin + len(seats)

    def _slot(self, seat: int) -> float:
        seat = self._seating.home(seat) if self._keeps_together else seat
        if seat not in self._slots:
            self._slots[seat] = self._order.slot(seat)
        return self._slots[seat]


class Visits:
    """The frames that one consumer takes of an order. Made by ``Order.visits``."""

    def __init__(self, order: Order, seating: Seating) -> None:
        self._order = order
        self._seating = seating
        self._turns: Sequence[int] = ()
        self._turns_of: tuple[int, int] | None = None
        self._frames: dict[int, NDArray[np.int64]] = {}
        """The frame orders of the open episodes that were used."""

    def at(self, position: int) -> tuple[list[int], int, int, int]:
        """The episodes that were used and aren't from this position on; the episode, frame and reader that come at it.

        Raises:
            ConfigError: It isn't a position of the order, or is below that of an earlier call.
        """
        seating, used = self._seating, self._frames
        left: list[int] = []
        while position >= seating.stop and seating.episodes:
            left += [episode for episode in seating.advance() if used.pop(episode, None) is not None]
        if not seating.start <= position < seating.stop:
            message = f"position {position} isn't one of the {len(self._order)} of this order, or doesn't ascend"
            raise ConfigError(message)
        turn, place = divmod(position - seating.start, len(seating.episodes))
        cycle = seating.cycle + turn
        if self._turns_of != (seating.cycle, cycle):
            self._turns, self._turns_of = self._order.turns(seating, cycle), (seating.cycle, cycle)
        episode, since, reader = seating.episodes[self._turns[place]]
        if episode not in used:
            used[episode] = self._order.frames(episode)
        return left, episode, int(used[episode][cycle - since]), reader

    def used(self) -> list[int]:
        """The open episodes of which some frame was taken."""
        return list(self._frames)
