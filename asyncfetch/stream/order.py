"""The order of an epoch, as arithmetic: a pure function of (seed, epoch, lengths, lanes, pool, group).

A shuffled epoch takes the episodes in the order of a keyed permutation. They sit on *seats*, as many as the pool holds,
which are shared out evenly among the *lanes*. The order goes in *cycles*: in each, every seat gives one frame of its
episode, the lanes in turns, and each lane its seats from a place drawn anew. An episode that has given its last frame
leaves its seat to the next of the permutation; at both ends of an epoch episodes are divided among seats. So where an
episode sits, and from which cycle to which, follows from lengths alone (see ``Seating``): the order is found at any
position without going frame by frame through what is before it, and the lanes stay level to the end.

The frames of an episode come by *groups* of neighbours, the groups in a drawn order, the frames of a group ascending.
With groups of one frame that is a plain shuffle. With those of a video's groups of pictures (a key frame, and what
leans on it), the frames of one can be decoded by one pass over it; they are delivered a cycle apart.

Who takes which positions of the order is told by ``cursor``. Memory: the frame orders of the episodes in the pool, 8
bytes a frame; nothing grows with the number of episodes. The random numbers are our own (splitmix64, a keyed Feistel
network): numpy doesn't promise the same stream across versions, and a saved position must mean the same after an
upgrade.
"""

from __future__ import annotations

import copy
import hashlib
import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncfetch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from asyncfetch.stream.placement import Placement

__all__ = ["Order", "SeatSlots", "Seating", "Step", "Visits", "draw_key", "permute"]

# Who sits where, from lengths alone. In the middle of an epoch an episode has one seat, and whoever has given its last
# frame leaves it to the next of the permutation. That leaves the two ends of an epoch.
#
# The beginning. Episodes of one length that begin together would end together, and all that follow them be needed at
# once. So where there are more episodes than seats, the first ones have a pair of seats each, which give a part each: a
# small one and the rest, no two alike. From then on the seats change hands one by one, and an episode is needed every
# so often. And an epoch can't begin until its first cycle is fetched. So half of these pairs come later: at first they
# are lent to the episodes of the other half, which have four seats each for a while, where that is a group or more.
#
# The end. A seat that finds no further episode takes half of what the one with most frames left still has to give, in
# whole groups as long as there are any. So all seats are taken until few frames are left: the last samples are nearly
# as mixed as the others, and who takes whole lanes keeps them. A seat that finds nothing to divide drops out.

_LENT_SHARES = (1 / 32, 5 / 32)
"""The share of its length that an episode gives on each seat lent to it, at least and at most: between 300 and 1,500
samples of episodes of 150 frames until the last is given back. Time enough to fetch it where the link keeps up."""
_LEAST_DIVIDED_FRAMES = 4
"""Left within one group for it to be divided: who decodes its second half has to go through the first one, too."""
_QUEUED_AT_ONCE = 1024


class _Divided(NamedTuple):
    """The division of an episode that sits somewhere."""

    seats: int
    """That have a part of it now."""
    parts: int
    """That there were."""
    home: int
    """The seat that had the first of them."""


class Seating:
    """A stretch of an order in which the same episodes sit on the same seats, and the way to the next such stretch."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._queued: Iterator[tuple[int, int]] = iter(())
        self._asked = 0  # of the order's queue
        self.start = 0
        """Position of its first sample."""
        self.cycle = 0
        """Its first one."""
        self.episodes: dict[int, tuple[int, int, int]] = {}
        """Taken seats. For each: the episode, the cycle in which it gave its first frame or, where another seat
        gives that, would have given it, and the number of its reader there."""
        self._divided: dict[int, _Divided] = {}  # by episode
        self._ends: dict[int, int] = {}  # by seat: the cycle that its part doesn't see any more
        self._first_ends: list[tuple[int, int]] = []  # (end, seat): a heap of these, and of some that aren't any more
        self._last_ends: list[tuple[int, int]] | None = None  # (-end, seat): likewise, once no further episode was left
        self._pairs = order.seats // 2 if len(order.lengths) > order.seats else 0  # a seat below this, and one above
        self._lenders = self._pairs // 2
        self._lent: set[int] = set()  # seats
        for seat in range(self._lenders):
            self._take_together(seat, borrowed=self._lenders + seat)
        for seat in range(2 * self._lenders, self._pairs):
            self._take_together(seat)
        for seat in range(2 * self._pairs, order.seats):
            self._take(seat)
            if seat not in self.episodes:  # nobody is left, and there may be any number of seats
                break

    @property
    def stop(self) -> int:
        """Position after its last sample."""
        if not self._first_ends:
            return self.start
        return self.start + (self._first_ends[0][0] - self.cycle) * len(self.episodes)

    def home(self, seat: int) -> int:
        """The seat where the episode that sits on this one came first."""
        return self._divided[self.episodes[seat][0]].home

    def advance(self) -> list[int]:
        """Go to the next stretch, while there are episodes; those that gave their last frame in this one."""
        self.start, self.cycle = self.stop, self._first_ends[0][0]
        left: list[int] = []
        free: list[int] = []
        while self._first_ends and self._first_ends[0][0] == self.cycle:
            seat = heapq.heappop(self._first_ends)[1]
            if self._ends.get(seat) == self.cycle:
                free.append(seat)
                if (episode := self._leave(seat)) is not None:
                    left.append(episode)
        for seat in free:
            if seat not in self._lent:
                self._take(seat)
            elif seat < self._pairs:
                self._take_together(seat)
        self._lent.difference_update(free)
        for seat in free:
            if seat not in self.episodes:
                self._divide_for(seat)
        while self._first_ends and self._ends.get(self._first_ends[0][1]) != self._first_ends[0][0]:
            heapq.heappop(self._first_ends)
        return left

    def _leave(self, seat: int) -> int | None:
        """The seat gave its part; the episode, if no other seat has one."""
        episode = self.episodes.pop(seat)[0]
        del self._ends[seat]
        divided = self._divided.pop(episode)
        if divided.seats == 1:
            return episode
        self._divided[episode] = divided._replace(seats=divided.seats - 1)
        return None

    def _take(self, seat: int) -> None:
        taken = self._next()
        if taken is not None:
            self._sit(seat, taken[0], 0, taken[1])

    def _take_together(self, seat: int, *, borrowed: int | None = None) -> None:
        """The next episode for a pair of seats: a small part for this one, the rest for the other.

        Another pair is *borrowed* for it, which gives a part each. Who is left without a part takes the next episode.
        """
        taken = self._next()
        if taken is None:
            return
        episode, length = taken
        parts: list[tuple[int, int]] = []  # (seat, frames)
        lent = 0 if borrowed is None else self._lent_frames(length, seat)
        if borrowed is not None and lent:
            parts = [(borrowed, lent), (borrowed + self._pairs, lent)]
            self._lent.update(taker for taker, _ in parts)
        elif borrowed is not None:
            self._take_together(borrowed)
        small = int((length - 2 * lent) * self._small_share(seat))
        parts += [(seat, small), (seat + self._pairs, length - 2 * lent - small)]
        start = 0
        for taker, frames in parts:
            if frames:
                self._sit(taker, episode, start, start + frames)
            start += frames
        if not small:
            self._take(seat)

    def _small_share(self, seat: int) -> float:
        """Return the share of a pair's episode that the first seat gives; below a half, and no two are alike.

        Borrowers' shares and lenders' by turns, these falling, since they begin the later the more frames were lent: so
        the ends lie as far apart as can be. Found by trying, for episodes of 90, 150 and 300 frames.
        """
        place = seat
        if seat < self._lenders:
            place = 2 * seat
        elif seat < 2 * self._lenders:
            place = 2 * (2 * self._lenders - 1 - seat) + 1
        return (2 * place + 1) / (4 * self._pairs)

    def _lent_frames(self, length: int, seat: int) -> int:
        """Return what an episode gives on each of the seats that are lent to it: whole groups."""
        least, most = _LENT_SHARES
        share = least + (most - least) * (2 * seat + 1) / (2 * self._lenders)
        return int(length * share) // self._order.group_frames * self._order.group_frames

    def _divide_for(self, seat: int) -> None:
        """Half of what is left of the longest part, for a seat that has none."""
        if self._last_ends is None:
            self._last_ends = [(-end, other) for other, end in self._ends.items()]
            heapq.heapify(self._last_ends)
        while self._last_ends and self._ends.get(self._last_ends[0][1]) != -self._last_ends[0][0]:
            heapq.heappop(self._last_ends)
        if not self._last_ends:
            return
        end, other = self._last_ends[0]
        episode, since, _ = self.episodes[other]
        start, stop, group = self.cycle - since, -end - since, self._order.group_frames
        middle = min(-(-(start + stop) // (2 * group)), (stop - 1) // group) * group
        if middle <= start and stop - start >= _LEAST_DIVIDED_FRAMES:
            middle = -(-(start + stop) // 2)
        if middle > start:
            heapq.heappop(self._last_ends)
            self._end(other, since + middle)
            self._sit(seat, episode, middle, stop)

    def _sit(self, seat: int, episode: int, start: int, stop: int) -> None:
        """The seat gives these of the episode's frames, as they are drawn."""
        seats, parts, home = self._divided.get(episode, (0, 0, seat))
        self._divided[episode] = _Divided(seats + 1, parts + 1, home)
        self.episodes[seat] = (episode, self.cycle - start, parts)
        self._end(seat, self.cycle + stop - start)

    def _end(self, seat: int, cycle: int) -> None:
        """Set where the seat's part ends."""
        self._ends[seat] = cycle
        heapq.heappush(self._first_ends, (cycle, seat))
        if self._last_ends is not None:
            heapq.heappush(self._last_ends, (-cycle, seat))

    def _next(self) -> tuple[int, int] | None:
        """(episode, length) of the next one in the permutation."""
        while (taken := next(self._queued, None)) is None:
            if self._asked >= len(self._order.lengths):
                return None
            self._queued = iter(self._order.queue(self._asked, self._asked + _QUEUED_AT_ONCE))
            self._asked += _QUEUED_AT_ONCE
        return taken

    def copy(self) -> Seating:
        """One that goes its own way."""
        twin = copy.copy(self)
        twin._queued = copy.copy(self._queued)
        twin.episodes = self.episodes.copy()
        twin._divided = self._divided.copy()
        twin._ends = self._ends.copy()
        twin._first_ends = self._first_ends.copy()
        twin._last_ends = None if self._last_ends is None else self._last_ends.copy()
        twin._lent = self._lent.copy()
        return twin


_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_VERSION = 3
"""The version of the shuffled order: a state of another one is refused. The first let all seats begin with an episode
each, the second every two; in both, seats dropped out as soon as they found none."""
_FEISTEL_ROUNDS = 4
"""Enough for a pseudo-random permutation that a distinguisher can't tell cheaply (Luby and Rackoff, 1988)."""
_LEAST_SEATS = 4
"""Seats that a rank needs for an episode on several of them to be kept together. That makes room for each part on its
first seat, so every rank between the two gives a seat on to the next; with few of them each, that is more than is won.
"""
_FAR_SEATS = 1000
"""It takes milliseconds until so many have an episode."""


class Step(NamedTuple):
    """One sample of a consumer's order."""

    episode: int
    """Position in the selection of episodes that the order was made for."""
    frame: int
    """Frame in the episode, from 0."""
    reader: int = 0
    """The number of the episode's reader: where several seats share it they go through different groups at a time.
    Counted over all parts that it ever had."""
    finished: tuple[int, ...] = ()
    """Episodes that this consumer used and won't use after this step; each is named once, or never at the very end."""
    is_padding: bool = False
    """True if it repeats a sample only to make ranks even."""
    empty: int = 0
    """The consumer's positions after this one, or before the first, that hold nothing."""


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
    """Return where a keyed permutation of ``range(size)`` sends each of ``indices``, in O(1) time and memory for each.

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
        """Return what it was made of beside the lengths and the epoch, as JSON."""
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
        """Return how many episodes a consumer draws from at a time, while every seat has one."""
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
        """Return how many different episodes those are at most, and their frames if they are the longest."""
        longest = np.sort(self.lengths[self.lengths > 0])[-self.open_episodes(placement) :]
        return len(longest), int(longest.sum())

    def is_far(self, position: int) -> bool:
        """Return whether the seating there takes long to find."""
        return position > 0 or min(self.seats, len(self.lengths)) > _FAR_SEATS

    def seating(self, position: int = 0) -> Seating:
        """Return who sits where at this position. Takes a microsecond or two for each episode before it."""
        seating = Seating(self)
        while position >= seating.stop and seating.episodes:
            seating.advance()
        return seating

    def steps(self, positions: Iterable[int], seating: Seating | None = None) -> Iterator[Step]:
        """Yield what comes at these positions of the order, which must ascend and be below its length.

        ``seating`` is that of the first position, or of one before it, to save finding it; it stays as it is.

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
        """Return what one consumer takes, asked for position by position; from the start, or where the seating is."""
        return Visits(self, Seating(self) if seating is None else seating.copy())

    def slots(self, seating: Seating, ranks: int) -> SeatSlots:
        """The slots of all positions from that of the seating on, which stays as it is, for so many ranks."""
        return SeatSlots(self, seating.copy(), keeps_together=self.seats >= _LEAST_SEATS * ranks)

    def slot(self, seat: int) -> float:
        """Return a seat's place among all, from 0 to 1: those of a lane together, the lanes by their bits reversed.

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
        """True if each lane has one seat, so that the turns of all cycles are alike."""
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
        """Yield the positions that have the turns that are known by then, and the places of those in them."""
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
