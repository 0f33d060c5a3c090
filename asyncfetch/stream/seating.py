"""Who sits where: which episode gives a frame at each turn of a shuffled order, from lengths alone.

See ``order`` for what seats, lanes and cycles are. In the middle of an epoch an episode has one seat, and whoever has
given its last frame leaves it to the next of the permutation. That leaves the two ends of an epoch.

*The beginning.* Episodes of one length that begin together would end together, and all that follow them be needed at
once. So where there are more episodes than seats, the first ones have a pair of seats each, which give a part each: a
small one and the rest, no two alike. From then on the seats change hands one by one, and an episode is needed every so
often. And an epoch can't begin until its first cycle is fetched. So half of these pairs come later: at first they are
lent to the episodes of the other half, which have four seats each for a while, where that is a group or more.

*The end.* A seat that finds no further episode takes half of what the one with most frames left still has to give, in
whole groups as long as there are any. So all seats are taken until few frames are left: the last samples are nearly as
mixed as the others, and who takes whole lanes keeps them. A seat that finds nothing to divide drops out.
"""

from __future__ import annotations

import copy
import heapq
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncfetch.stream.order import Order

__all__ = ["Seating"]

_LENT_SHARES = (1 / 32, 5 / 32)
"""Of its length an episode gives on each seat that is lent to it, at least and at most: between 300 and 1,500 samples
of episodes of 150 frames until the last is given back. Time enough to fetch it where the link keeps up."""
_LEAST_DIVIDED_FRAMES = 4
"""Left within one group for it to be divided: who decodes its second half has to go through the first one, too."""
_QUEUED_AT_ONCE = 1024


class _Divided(NamedTuple):
    """How an episode that sits somewhere is divided."""

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
        """On the seats that are taken: the episode, the cycle in which it gave its first frame or, where another seat
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
        """Position behind its last sample."""
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
        """Of an episode that a pair of seats has, what the first one gives; below a half, and no two are alike.

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
        """What an episode gives on each of the seats that are lent to it: whole groups."""
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
        """Where the seat's part ends."""
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
