"""The number of episodes that an order draws from at a time: as many as were asked for, or as memory has room for.

That is told before the first sample, from the sizes of the dataset's files as its metadata say them or, where those
don't rule out that it is too many, of the clips themselves. It depends on nothing that differs between the ranks and
workers of a run, since the order is the same for all of them.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asyncfetch.config import rank_config
from asyncfetch.errors import AsyncFetchError, CacheError, redact_url
from asyncfetch.lerobot import pool_bytes, reader_of
from asyncfetch.lerobot.engine import DECODERS_SHARE, TABLES_SHARE
from asyncfetch.runtime.concurrently import gather

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from numpy.typing import NDArray

    from asyncfetch.config import StreamConfig
    from asyncfetch.lerobot import LeRobotDataset

__all__ = ["Drawn", "Fitted", "Pool", "fit", "pools_that_fit"]

_log = logging.getLogger("asyncfetch")

_WEIGHED_FILES = 64
"""Files of each camera, whose indexes are fetched before the first sample where the pool may not fit."""
_WEIGHED_EPISODES = 1024
_MARGIN = 1.25
"""The factor by which an episode that wasn't weighed may be larger than its frames say."""


class Pool:
    """The pool of a stream's order. It is what the configuration says, until a dataset was opened."""

    def __init__(self, config: StreamConfig, *, is_shuffled: bool) -> None:
        self.lanes, self.episodes = config.lanes, config.pool_episodes
        self._lanes = config.lanes
        self.asked_for: int = config.pool_episodes if is_shuffled else 1
        """Episodes that it is to have. An order that isn't shuffled has one at a time."""

    def resize(self, episodes: int) -> None:
        """Let it have so many, no more than were asked for."""
        if self.asked_for > 1:
            self.lanes = self._lanes if episodes == self.asked_for else min(self._lanes, episodes & -episodes)
            self.episodes = episodes


class Drawn:
    """The episodes of an open dataset that a pool draws from: all, or those that are chosen.

    Raises:
        EpisodeNotFound: One of them isn't there.
    """

    def __init__(self, pool: Pool, dataset: LeRobotDataset, chosen: Sequence[int] | None) -> None:
        table = dataset.episodes
        indices = table.indices if chosen is None else chosen
        places = table.positions(indices)
        self.pool, self.dataset = pool, dataset
        self.episodes: NDArray[np.int64] = np.array(indices, np.int64)
        self.lengths: NDArray[np.int64] = table.lengths[places].astype(np.int64)
        self.files: list[NDArray[np.int64]] = [table.video_files(camera)[places] for camera in dataset.cameras]
        """The file of each, for each camera."""

    def most_bytes(self) -> NDArray[np.float64]:
        """Bytes of each one's clips at most: a file isn't larger than info.json says, but for one episode that is."""
        sizes = np.zeros(len(self.lengths))
        for each in self.files:
            _, numbers = np.unique(each, return_inverse=True)
            in_file = np.bincount(numbers, weights=self.lengths)
            sizes += self.lengths / np.maximum(1, in_file[numbers]) * self.dataset.metadata.info.video_file_bytes
        return sizes


async def fit(drawn: Sequence[Drawn]) -> None:
    """Make pools that are read by one engine as large as memory lets them be, with one warning where that is less.

    They shrink alike, each to one episode at least.

    Raises:
        CacheError: Not even one episode of each has room, whichever it is.
    """
    config = rank_config(drawn[0].dataset.config)
    max_bytes = pool_bytes(config)
    asked_for = [one.pool.asked_for for one in drawn]
    sizes = [one.most_bytes() for one in drawn]
    fits = pools_that_fit(sizes, asked_for, max_bytes)
    if fits != asked_for:
        most_files = max(1, _WEIGHED_FILES // len(drawn))
        weighed = await gather(*(partial(_weigh, one, most_files) for one in drawn))
        _check_one_of_each(drawn, weighed)
        sizes = [one.sizes for one in weighed]
        fits = pools_that_fit(sizes, asked_for, max_bytes)
    for one, episodes in zip(drawn, fits, strict=True):
        one.pool.resize(episodes)
    if fits != asked_for and any(reader_of(one.dataset).fetches for one in drawn):
        enough = config.max_bytes * _needed_bytes(_summed(sizes), asked_for) // max_bytes + 8
        _log.warning(
            "max_bytes=%d has room for the clips of %d episodes of %s at a time, not for pool_episodes=%d: frames "
            "are drawn from %d, so no more are mixed in a batch. With max_bytes=%d it is as asked for",
            config.max_bytes,
            sum(fits),
            redact_url(drawn[0].dataset.url) if len(drawn) == 1 else f"a mixture's {len(drawn)} datasets",
            sum(asked_for),
            sum(fits),
            enough,
        )


class Fitted(AbstractAsyncContextManager["LeRobotDataset"]):
    """A dataset to be opened, with the pool that fits its episodes, or those of them that are chosen."""

    # No generator: one that is left open at the interpreter's exit is closed by another task, and complains.

    def __init__(
        self,
        pool: Pool,
        opener: Callable[[], AbstractAsyncContextManager[LeRobotDataset]],
        episodes: tuple[int, ...] | None,
    ) -> None:
        self._pool, self._opener, self._episodes = pool, opener, episodes
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> LeRobotDataset:
        async with AsyncExitStack() as stack:
            dataset = await stack.enter_async_context(self._opener())
            await fit([Drawn(self._pool, dataset, self._episodes)])
            self._stack = stack.pop_all()
        return dataset

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, at)


def pools_that_fit(sizes: Sequence[NDArray[np.float64]], pools: Sequence[int], max_bytes: int) -> list[int]:
    """Return how many episodes of each pool fit at a time, whichever they are, beside one that is needed next.

    The pools where those fit; else the same part of each, at least 1, above 8 a multiple of 4, so that it has lanes.
    """
    sums = _summed(sizes)
    if _needed_bytes(sums, pools) <= max_bytes:
        return list(pools)
    largest = max(pools)

    def part(of_largest: int) -> list[int]:
        parts = [pool * of_largest // largest for pool in pools]
        return [part - part % 4 if part > 8 else max(1, part) for part in parts]

    parts = range(1, largest + 1)
    fitting = bisect_left(parts, True, key=lambda some: _needed_bytes(sums, part(some)) > max_bytes)
    return part(max(1, fitting))


def _summed(sizes: Sequence[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
    """Return for each pool what none, one, two ... of its largest episodes take."""
    return [np.concatenate([[0.0], np.cumsum(np.sort(each)[::-1])]) for each in sizes]


def _needed_bytes(sums: Sequence[NDArray[np.float64]], pools: Sequence[int]) -> int:
    """Return the bytes of the largest episodes of each pool, and of one that is needed next."""
    held = [float(each[min(pool, len(each) - 1)]) for each, pool in zip(sums, pools, strict=True)]
    following = [float(each[min(pool + 1, len(each) - 1)]) for each, pool in zip(sums, pools, strict=True)]
    return int(sum(held) + max(more - these for more, these in zip(following, held, strict=True)))


class _Weighed(NamedTuple):
    sizes: NDArray[np.float64]
    """Bytes of each episode's clips; where there are many files, of most by their frames."""
    largest_bytes: int
    """The largest of those that were weighed."""
    largest: int
    """Its index."""


def _check_one_of_each(drawn: Sequence[Drawn], weighed: Sequence[_Weighed]) -> None:
    config = drawn[0].dataset.config
    most_bytes = max(reader_of(drawn[0].dataset).clip_budget.max_bytes, pool_bytes(config))
    needed_bytes = sum(one.largest_bytes for one in weighed)
    if needed_bytes <= most_bytes:
        return
    if len(drawn) == 1:
        whose = f"the clips of episode {weighed[0].largest} of {redact_url(drawn[0].dataset.url)} take"
    else:
        whose = f"a mixture draws from each of its {len(drawn)} datasets, and the clips of their largest episodes take"
    max_bytes = rank_config(config).max_bytes
    raise CacheError(
        f"{whose} {needed_bytes} bytes, but {max_bytes=} leaves {most_bytes} for clips: set "
        f"StreamConfig(max_bytes=...) to at least "
        f"{math.ceil(needed_bytes / (1 - 1 / DECODERS_SHARE - 1 / TABLES_SHARE))}"
    )


async def _weigh(drawn: Drawn, most_files: int) -> _Weighed:
    lengths = drawn.lengths
    chosen = lengths > 0
    for each in drawn.files:
        distinct = np.unique(each[lengths > 0])
        chosen &= np.isin(each, distinct[:: -(-len(distinct) // most_files) or 1])
    there = np.flatnonzero(chosen if chosen.any() else lengths > 0)
    there = there[np.unique(np.linspace(0, len(there) - 1, min(len(there), _WEIGHED_EPISODES)).astype(np.int64))]
    found: dict[int, int] = {}

    async def weigh(place: int) -> None:
        with suppress(AsyncFetchError):  # raised, or left out, at the episode's place in the order
            found[place] = await reader_of(drawn.dataset).clip_bytes(int(drawn.episodes[place]))

    await gather(*(partial(weigh, int(place)) for place in there))
    places, bytes_there = list(found), np.array(list(found.values()), np.float64)
    sizes: NDArray[np.float64] = lengths * (_MARGIN * bytes_there.sum() / max(1, lengths[places].sum()))
    sizes[places] = bytes_there
    largest_bytes, place = max(((nbytes, place) for place, nbytes in found.items()), default=(0, 0))
    return _Weighed(sizes, largest_bytes, int(drawn.episodes[place]) if found else 0)
