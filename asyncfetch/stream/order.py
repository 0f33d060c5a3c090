"""The order of an epoch, as arithmetic: a pure function of (seed, epoch, lengths, lanes, pool), the same everywhere.

A shuffled epoch takes the episodes in the order of a keyed permutation. They are dealt to *lanes*; each lane holds a
small pool of episodes and, when its turn comes, gives one frame of it, drawn without replacement. The global order goes
round the lanes. A lane takes the next episode of the permutation when one of its own is used up, so that the lanes stay
level to the end, and a lane that finds none left drops out of the round.

Consumer k of K (a rank, or a loader's worker of a rank) takes positions k, k + K, ... of the global order. While K
divides the lanes and none is dry, these are whole lanes, so that no episode is needed in two places; otherwise an
episode may be, but every frame is still taken exactly once. So it is without shuffle: an order that is the same for
every K and goes through an episode frame by frame needs each episode at all K consumers, which all fetch it.

Memory: the frame orders of the episodes in the pool, 8 bytes a frame; nothing grows with the number of episodes. The
random numbers are our own (splitmix64, a keyed Feistel network): numpy doesn't promise the same stream across versions,
and a saved position must mean the same after an upgrade.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncfetch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["Order", "Step", "permute"]

_MASK = (1 << 64) - 1
_FEISTEL_ROUNDS = 4
"""Enough for a pseudo-random permutation that a distinguisher can't tell cheaply (Luby and Rackoff, 1988)."""


class Step(NamedTuple):
    """One sample of a consumer's order."""

    episode: int
    """Position in the selection of episodes that the order was made for."""
    frame: int
    """Frame in the episode, from 0."""
    finished: tuple[int, ...]
    """Episodes that this consumer used and won't use after this step; each is named once, or never at the very end."""


def _mix(value: int) -> int:
    """Splitmix64's finaliser (Steele, Lea and Flood, 2014): a bijection of 64 bits that leaves no pattern."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def _mix_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed


def _key(*parts: int | str) -> int:
    """64 bits for a purpose and its numbers; different purposes never share a stream."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def permute(index: int, size: int, key: int) -> int:
    """Where a keyed permutation of ``range(size)`` sends ``index``, in O(1) time and memory.

    A Feistel network over the next even power of two, walked until it lands inside (at most 4 tries on average).
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & mask
        for turn in range(_FEISTEL_ROUNDS):
            left, right = right, left ^ (_mix(key + turn * 0x9E3779B97F4A7C15 + right & _MASK) & mask)
        index = left << half_bits | right
        if index < size:
            return index


def _shuffled_frames(length: int, key: int) -> NDArray[np.int64]:
    numbers = np.arange(1, length + 1, dtype=np.uint64)
    keys = _mix_array(numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key))
    return np.argsort(keys, kind="stable")


class _Drawn:
    """An episode in a lane's pool, and how far its frames have been given out."""

    __slots__ = ("episode", "frames", "given")

    def __init__(self, episode: int, frames: NDArray[np.int64]) -> None:
        self.episode, self.frames, self.given = episode, frames, 0

    @property
    def left(self) -> int:
        return len(self.frames) - self.given


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """The order of one epoch.

    Args and fields are what the order is a function of, and nothing else is. ``lanes`` and ``pool_episodes`` count for
    a shuffled order only; the order of ``shuffle=False`` is that of the episodes and frames themselves.
    """

    lengths: NDArray[np.integer[Any]]
    """Frames of each chosen episode; zero-length episodes are allowed and never appear."""
    shuffle: bool
    seed: int
    epoch: int
    lanes: int
    """Independent sequences that the order goes round."""
    pool_episodes: int
    """Episodes open at a time over all lanes; at least one a lane."""

    def __post_init__(self) -> None:
        if self.lanes < 1 or self.pool_episodes < self.lanes:
            message = f"an order needs lanes >= 1 and pool_episodes >= lanes, not {self.lanes} and {self.pool_episodes}"
            raise ConfigError(message)

    def __len__(self) -> int:
        return int(self.lengths.sum())

    def count(self, consumer: int, consumers: int) -> int:
        """Samples of one consumer: the totals of any two differ by one at most."""
        return (len(self) - consumer + consumers - 1) // consumers

    def open_episodes(self, consumers: int) -> int:
        """How many episodes a consumer draws from at a time, while every lane has some."""
        if not self.shuffle:
            return 1
        return self.pool_episodes // consumers if self.lanes % consumers == 0 else self.pool_episodes

    def steps(self, consumer: int = 0, consumers: int = 1) -> Iterator[Step]:
        """The samples of one consumer, in order."""
        if not 0 <= consumer < consumers:
            raise ConfigError(f"consumer {consumer} isn't one of {consumers} consumers")
        used: set[int] = set()
        finished: list[int] = []
        for position, (episode, frame, last) in enumerate(self._draws()):
            own = position % consumers == consumer
            if own:
                used.add(episode)
            if last and episode in used:
                used.remove(episode)
                finished.append(episode)
            if own:
                yield Step(episode, frame, tuple(finished))
                finished.clear()

    def episodes(self, consumer: int = 0, consumers: int = 1) -> Iterator[int]:
        """The episodes that one consumer uses, each once, in the order of their first use."""
        used: set[int] = set()
        for step in self.steps(consumer, consumers):
            if step.episode not in used:
                used.add(step.episode)
                yield step.episode
            used.difference_update(step.finished)

    def _queue(self) -> Iterator[int]:
        key = _key("episodes", self.seed, self.epoch)
        size = len(self.lengths)
        for index in range(size):
            episode = permute(index, size, key) if self.shuffle else index
            if self.lengths[episode]:
                yield episode

    def _open(self, episode: int) -> _Drawn:
        length = int(self.lengths[episode])
        if not self.shuffle:
            return _Drawn(episode, np.arange(length))
        return _Drawn(episode, _shuffled_frames(length, _key("frames", self.seed, self.epoch, episode)))

    def _draws(self) -> Iterator[tuple[int, int, bool]]:
        """(episode, frame, whether it is the episode's last) of the global order."""
        lanes, per_lane = (self.lanes, self.pool_episodes // self.lanes) if self.shuffle else (1, 1)
        queue = map(self._open, self._queue())
        pools: list[list[_Drawn]] = [[] for _ in range(lanes)]
        for _, pool in itertools.product(range(per_lane), pools):  # breadth first: few episodes still spread
            pool.extend(itertools.islice(queue, 1))
        lanes_left = [(pool, _key("lane", self.seed, self.epoch, lane)) for lane, pool in enumerate(pools) if pool]
        turn = 0
        while lanes_left:
            for pool, key in lanes_left:
                drawn = pool[0] if len(pool) == 1 else _pick(pool, _mix(key + turn & _MASK))
                frame = int(drawn.frames[drawn.given])
                drawn.given += 1
                last = not drawn.left
                if last:
                    pool.remove(drawn)
                    pool.extend(itertools.islice(queue, 1))
                yield drawn.episode, frame, last
            lanes_left = [lane for lane in lanes_left if lane[0]]
            turn += 1


def _pick(pool: list[_Drawn], random: int) -> _Drawn:
    """An episode with the chance of its frames left: every frame left in the pool is equally likely."""
    place = random % sum(drawn.left for drawn in pool)  # the bias of a 64-bit modulo is below 2**-40 for any pool
    for drawn in pool:
        if place < drawn.left:
            return drawn
        place -= drawn.left
    raise AssertionError("unreachable: place is below the sum")
