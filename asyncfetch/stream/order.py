"""The order of an epoch, as arithmetic: a pure function of (seed, epoch, lengths, lanes, pool, group).

A shuffled epoch takes the episodes in the order of a keyed permutation. They sit on *slots*, as many as the pool holds,
which are shared out evenly among the *lanes*. The order goes in *cycles*: in each, every slot gives one frame of its
episode, the lanes in turns, and each lane its slots from a place drawn anew. An episode that has given its last frame
leaves its slot to the next of the permutation; at both ends of an epoch episodes are divided among slots. So where an
episode sits, and from which cycle to which, follows from lengths alone (see ``SlotAssignment``): the order is found at
any position without going frame by frame through what is before it, and the lanes stay level to the end.

The frames of an episode come by *groups* of neighbours, the groups in a drawn order, the frames of a group ascending.
With groups of one frame that is a plain shuffle. With those of a video's groups of pictures (a key frame, and what
leans on it), the frames of one can be decoded by one pass over it; they are delivered a cycle apart.

Who takes which positions of the order is told by ``remaining``. Memory: the frame orders of the episodes in the pool, 8
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

__all__ = ["Affinities", "Order", "SlotAssignment", "Step", "Visits", "draw_key", "permute"]

# Who sits where, from lengths alone. In the middle of an epoch an episode has one slot, and whoever has given its last
# frame leaves it to the next of the permutation. That leaves the two ends of an epoch.
#
# The beginning. Episodes of one length that begin together would end together, and all that follow them be needed at
# once. So where there are more episodes than slots, the first ones have a pair of slots each, which give a part each: a
# small one and the rest, no two alike. From then on the slots change hands one by one, and an episode is needed every
# so often. And an epoch can't begin until its first cycle is fetched. So half of these pairs come later: at first they
# are lent to the episodes of the other half, which have four slots each for a while, where that is a group or more.
#
# The end. A slot that finds no further episode takes half of what the one with most frames left still has to give, in
# whole groups as long as there are any. So all slots are taken until few frames are left: the last samples are nearly
# as mixed as the others, and who takes whole lanes keeps them. A slot that finds nothing to divide drops out.

_LENT_SHARES = (1 / 32, 5 / 32)
"""The share of its length that an episode gives on each slot lent to it, at least and at most: between 300 and 1,500
samples of episodes of 150 frames until the last is given back. Time enough to fetch it where the link keeps up."""
_LEAST_DIVIDED_FRAMES = 4
"""Left within one group for it to be divided: who decodes its second half has to go through the first one, too."""
_QUEUED_AT_ONCE = 1024


class _Divided(NamedTuple):
    """The division of an episode that sits somewhere."""

    slots: int
    """That have a part of it now."""
    parts: int
    """That there were."""
    home: int
    """The slot that had the first of them."""


class SlotAssignment:
    """A stretch of an order in which the same episodes sit on the same slots, and the way to the next such stretch."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._queued: Iterator[tuple[int, int]] = iter(())
        self._asked = 0  # of the order's queue
        self.start = 0
        """Position of its first sample."""
        self.cycle = 0
        """Its first one."""
        self.episodes: dict[int, tuple[int, int, int]] = {}
        """Taken slots. For each: the episode, the cycle in which it gave its first frame or, where another slot
        gives that, would have given it, and the number of its reader there."""
        self._divided: dict[int, _Divided] = {}  # by episode
        self._ends: dict[int, int] = {}  # by slot: the cycle that its part doesn't see any more
        self._first_ends: list[tuple[int, int]] = []  # (end, slot): a heap of these, and of some that aren't any more
        self._last_ends: list[tuple[int, int]] | None = None  # (-end, slot): likewise, once no further episode was left
        self._pairs = order.slots // 2 if len(order.lengths) > order.slots else 0  # a slot below this, and one above
        self._lenders = self._pairs // 2
        self._lent: set[int] = set()  # slots
        for slot in range(self._lenders):
            self._take_together(slot, borrowed=self._lenders + slot)
        for slot in range(2 * self._lenders, self._pairs):
            self._take_together(slot)
        for slot in range(2 * self._pairs, order.slots):
            self._take(slot)
            if slot not in self.episodes:  # nobody is left, and there may be any number of slots
                break

    @property
    def stop(self) -> int:
        """Position after its last sample."""
        if not self._first_ends:
            return self.start
        return self.start + (self._first_ends[0][0] - self.cycle) * len(self.episodes)

    def home(self, slot: int) -> int:
        """The slot where the episode that sits on this one came first."""
        return self._divided[self.episodes[slot][0]].home

    def advance(self) -> list[int]:
        """Go to the next stretch, while there are episodes; those that gave their last frame in this one."""
        self.start, self.cycle = self.stop, self._first_ends[0][0]
        left: list[int] = []
        free: list[int] = []
        while self._first_ends and self._first_ends[0][0] == self.cycle:
            slot = heapq.heappop(self._first_ends)[1]
            if self._ends.get(slot) == self.cycle:
                free.append(slot)
                if (episode := self._leave(slot)) is not None:
                    left.append(episode)
        for slot in free:
            if slot not in self._lent:
                self._take(slot)
            elif slot < self._pairs:
                self._take_together(slot)
        self._lent.difference_update(free)
        for slot in free:
            if slot not in self.episodes:
                self._divide_for(slot)
        while self._first_ends and self._ends.get(self._first_ends[0][1]) != self._first_ends[0][0]:
            heapq.heappop(self._first_ends)
        return left

    def _leave(self, slot: int) -> int | None:
        """The slot gave its part; the episode, if no other slot has one."""
        episode = self.episodes.pop(slot)[0]
        del self._ends[slot]
        divided = self._divided.pop(episode)
        if divided.slots == 1:
            return episode
        self._divided[episode] = divided._replace(slots=divided.slots - 1)
        return None

    def _take(self, slot: int) -> None:
        taken = self._next()
        if taken is not None:
            self._sit(slot, taken[0], 0, taken[1])

    def _take_together(self, slot: int, *, borrowed: int | None = None) -> None:
        """The next episode for a pair of slots: a small part for this one, the rest for the other.

        Another pair is *borrowed* for it, which gives a part each. Who is left without a part takes the next episode.
        """
        taken = self._next()
        if taken is None:
            return
        episode, length = taken
        parts: list[tuple[int, int]] = []  # (slot, frames)
        lent = 0 if borrowed is None else self._lent_frames(length, slot)
        if borrowed is not None and lent:
            parts = [(borrowed, lent), (borrowed + self._pairs, lent)]
            self._lent.update(taker for taker, _ in parts)
        elif borrowed is not None:
            self._take_together(borrowed)
        small = int((length - 2 * lent) * self._small_share(slot))
        parts += [(slot, small), (slot + self._pairs, length - 2 * lent - small)]
        start = 0
        for taker, frames in parts:
            if frames:
                self._sit(taker, episode, start, start + frames)
            start += frames
        if not small:
            self._take(slot)

    def _small_share(self, slot: int) -> float:
        """Return the share of a pair's episode that the first slot gives; below a half, and no two are alike.

        Borrowers' shares and lenders' by turns, these falling, since they begin the later the more frames were lent: so
        the ends lie as far apart as can be. Found by trying, for episodes of 90, 150 and 300 frames.
        """
        place = slot
        if slot < self._lenders:
            place = 2 * slot
        elif slot < 2 * self._lenders:
            place = 2 * (2 * self._lenders - 1 - slot) + 1
        return (2 * place + 1) / (4 * self._pairs)

    def _lent_frames(self, length: int, slot: int) -> int:
        """Return what an episode gives on each of the slots that are lent to it: whole groups."""
        least, most = _LENT_SHARES
        share = least + (most - least) * (2 * slot + 1) / (2 * self._lenders)
        return int(length * share) // self._order.group_frames * self._order.group_frames

    def _divide_for(self, slot: int) -> None:
        """Half of what is left of the longest part, for a slot that has none."""
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
            self._sit(slot, episode, middle, stop)

    def _sit(self, slot: int, episode: int, start: int, stop: int) -> None:
        """The slot gives these of the episode's frames, as they are drawn."""
        slots, parts, home = self._divided.get(episode, (0, 0, slot))
        self._divided[episode] = _Divided(slots + 1, parts + 1, home)
        self.episodes[slot] = (episode, self.cycle - start, parts)
        self._end(slot, self.cycle + stop - start)

    def _end(self, slot: int, cycle: int) -> None:
        """Set where the slot's part ends."""
        self._ends[slot] = cycle
        heapq.heappush(self._first_ends, (cycle, slot))
        if self._last_ends is not None:
            heapq.heappush(self._last_ends, (-cycle, slot))

    def _next(self) -> tuple[int, int] | None:
        """(episode, length) of the next one in the permutation."""
        while (taken := next(self._queued, None)) is None:
            if self._asked >= len(self._order.lengths):
                return None
            self._queued = iter(self._order.queue(self._asked, self._asked + _QUEUED_AT_ONCE))
            self._asked += _QUEUED_AT_ONCE
        return taken

    def copy(self) -> SlotAssignment:
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
"""The version of the shuffled order: a state of another one is refused. The first let all slots begin with an episode
each, the second every two; in both, slots dropped out as soon as they found none."""
_FEISTEL_ROUNDS = 4
"""Enough for a pseudo-random permutation that a distinguisher can't tell cheaply (Luby and Rackoff, 1988)."""
_LEAST_SLOTS = 4
"""Slots that a rank needs for an episode on several of them to be kept together. That makes room for each part on its
first slot, so every rank between the two gives a slot on to the next; with few of them each, that is more than is won.
"""
_FAR_SLOTS = 1000
"""It takes milliseconds until so many have an episode."""


class Step(NamedTuple):
    """One sample of a consumer's order."""

    episode: int
    """Position in the selection of episodes that the order was made for."""
    frame: int
    """Frame in the episode, from 0."""
    reader: int = 0
    """The number of the episode's reader: where several slots share it they go through different groups at a time.
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
    def affinity_stop(self) -> int:
        """Positions below it have an affinity: see SharedOrder."""
        return self._total

    def largest_group(self) -> int:
        """See EpisodeOrder."""
        return min(self.group_frames, int(self.lengths.max(initial=1)))

    def open_episodes(self, placement: Placement) -> int:
        """Return how many episodes a consumer draws from at a time, while every slot has one."""
        if not placement.step_samples or placement.world_size == 1:
            slots = self.slots // placement.consumers if self.lanes % placement.period == 0 else self.slots
            return min(slots, len(self.lengths))
        slots, shared = divmod(self.slots, placement.world_size)
        if shared:  # with both neighbours
            return min(slots + 2, self.slots, len(self.lengths))
        if placement.block_samples == 1 and slots % placement.workers == 0:
            slots //= placement.workers
        return min(slots, len(self.lengths))

    def pool(self, placement: Placement) -> tuple[int, int]:
        """Return how many different episodes those are at most, and their frames if they are the longest."""
        longest = np.sort(self.lengths[self.lengths > 0])[-self.open_episodes(placement) :]
        return len(longest), int(longest.sum())

    def is_far(self, position: int) -> bool:
        """Return whether the assignment there takes long to find."""
        return position > 0 or min(self.slots, len(self.lengths)) > _FAR_SLOTS

    def assignment(self, position: int = 0) -> SlotAssignment:
        """Return who sits where at this position. Takes a microsecond or two for each episode before it."""
        assignment = SlotAssignment(self)
        while position >= assignment.stop and assignment.episodes:
            assignment.advance()
        return assignment

    def steps(self, positions: Iterable[int], assignment: SlotAssignment | None = None) -> Iterator[Step]:
        """Yield what comes at these positions of the order, which must ascend and be below its length.

        ``assignment`` is that of the first position, or of one before it, to save finding it; it stays as it is.

        Raises:
            ConfigError: A position isn't one of the order's, or doesn't ascend.
        """
        visits = self.visits(assignment)
        step: Step | None = None
        for position in positions:
            left, episode, frame, reader = visits.at(position)
            if step is not None:
                yield step._replace(finished=tuple(left)) if left else step
            step = Step(episode, frame, reader)
        if step is not None:
            yield step

    def visits(self, assignment: SlotAssignment | None = None) -> Visits:
        """Return what one consumer takes, asked position by position; from the start, or where the assignment is."""
        return Visits(self, SlotAssignment(self) if assignment is None else assignment.copy())

    def affinities(self, assignment: SlotAssignment, ranks: int) -> Affinities:
        """The affinities of all positions from that of the assignment on, which stays as it is, for so many ranks."""
        return Affinities(self, assignment.copy(), keeps_together=self.slots >= _LEAST_SLOTS * ranks)

    def affinity(self, slot: int) -> float:
        """Return a slot's place among all, from 0 to 1: those of a lane together, the lanes by their bits reversed.

        So lanes whose turns follow each other lie far apart, and any stretch of the order has about as many of every
        part of the affinities as of another. And the slots on which an episode begins lie side by side.
        """
        row, lane = divmod(slot, self.lanes)
        bits = (self.lanes - 1).bit_length()
        reverse = int(f"{lane:0{bits}b}"[::-1], 2) if bits else 0
        return (reverse + row * self.lanes / self.slots) / (1 << bits)

    @property
    def slots(self) -> int:
        """Episodes open at a time over all lanes."""
        return self.pool_episodes // self.lanes * self.lanes if self.shuffle else 1

    @property
    def is_level(self) -> bool:
        """True if each lane has one slot, so that the turns of all cycles are alike."""
        return not self.shuffle or self.slots == self.lanes

    def queue(self, start: int, stop: int) -> list[tuple[int, int]]:
        """(episode, length) of those that are taken start-th to stop-th, without the empty ones."""
        size = len(self.lengths)
        episodes = np.arange(start, min(stop, size))
        if self.shuffle:
            episodes = permute(episodes, size, draw_key("episodes", self.seed, self.epoch))
        lengths = self.lengths[episodes]
        return list(zip(episodes[lengths > 0].tolist(), lengths[lengths > 0].tolist(), strict=True))

    def turns(self, assignment: SlotAssignment, cycle: int) -> Sequence[int]:
        """The taken slots in the order in which they give their frames of this cycle."""
        taken = assignment.episodes
        per_lane = min(self.slots // self.lanes, _MASK >> 1) if self.shuffle else 1  # as far as numpy counts
        if per_lane == 1:
            return sorted(taken)
        key = np.uint64(draw_key("cycle", self.seed, self.epoch, cycle))
        lanes = np.arange(min(self.lanes, len(self.lengths)))  # those that anybody may sit on
        begin = (_mix_array(lanes.astype(np.uint64) + key) % np.uint64(per_lane)).astype(np.int64)
        if len(taken) == self.slots:  # as mostly, and then nothing has to be sorted
            rows = (np.arange(per_lane)[:, None] + begin) % per_lane
            visits = (rows * self.lanes + lanes).ravel()
        else:
            slots = np.fromiter(taken, np.int64, len(taken))
            row, lane = np.divmod(slots, len(lanes))
            visits = slots[np.lexsort((lane, (row - begin[lane]) % per_lane))]
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


class Affinities:
    """The affinity of each sample: that of its slot. Made by ``Order.affinities``.

    At both ends of an epoch an episode sits on several slots; where it is to be kept together, its affinity is that of
    the slot where it came first.
    """

    def __init__(self, order: Order, assignment: SlotAssignment, *, keeps_together: bool) -> None:
        self._order = order
        self._assignment = assignment
        self.keeps_together = keeps_together
        self._affinities: dict[int, float] = {}  # by slot
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
        order, assignment = self._order, self._assignment
        while position >= assignment.stop and assignment.episodes:
            assignment.advance()
        turn = (position - assignment.start) // len(assignment.episodes)
        slots = order.turns(assignment, assignment.cycle + turn)
        self._turns = np.array([self._affinity(slot) for slot in slots])
        self._episodes = np.array([assignment.episodes[slot][0] for slot in slots])
        self._begin, self._end = assignment.start, assignment.stop
        if not order.is_level:
            self._begin += turn * len(slots)
            self._end = self._begin + len(slots)

    def _affinity(self, slot: int) -> float:
        slot = self._assignment.home(slot) if self.keeps_together else slot
        if slot not in self._affinities:
            self._affinities[slot] = self._order.affinity(slot)
        return self._affinities[slot]


class Visits:
    """The frames that one consumer takes of an order. Made by ``Order.visits``."""

    def __init__(self, order: Order, assignment: SlotAssignment) -> None:
        self._order = order
        self._assignment = assignment
        self._turns: Sequence[int] = ()
        self._turns_of: tuple[int, int] | None = None
        self._frames: dict[int, NDArray[np.int64]] = {}
        """The frame orders of the open episodes that were used."""

    def at(self, position: int) -> tuple[list[int], int, int, int]:
        """The episodes that were used and aren't from this position on; the episode, frame and reader that come at it.

        Raises:
            ConfigError: It isn't a position of the order, or is below that of an earlier call.
        """
        assignment, used = self._assignment, self._frames
        left: list[int] = []
        while position >= assignment.stop and assignment.episodes:
            left += [episode for episode in assignment.advance() if used.pop(episode, None) is not None]
        if not assignment.start <= position < assignment.stop:
            message = f"position {position} isn't one of the {len(self._order)} of this order, or doesn't ascend"
            raise ConfigError(message)
        turn, place = divmod(position - assignment.start, len(assignment.episodes))
        cycle = assignment.cycle + turn
        if self._turns_of != (assignment.cycle, cycle):
            self._turns, self._turns_of = self._order.turns(assignment, cycle), (assignment.cycle, cycle)
        episode, since, reader = assignment.episodes[self._turns[place]]
        if episode not in used:
            used[episode] = self._order.frames(episode)
        return left, episode, int(used[episode][cycle - since]), reader

    def used(self) -> list[int]:
        """The open episodes of which some frame was taken."""
        return list(self._frames)
