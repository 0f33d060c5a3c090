"""The number of episodes that an order draws from at a time: as many as were asked for, or as memory has room for.

That is told before the first sample, from the sizes of the dataset's files as its metadata say them or, where those
don't rule out that it is too many, of the clips themselves. It depends on nothing that differs between the ranks and
workers of a run, since the order is the same for all of them.
"""

from __future__ import annotations

import logging
import math
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from asyncfetch.config import rank_config
from asyncfetch.errors import AsyncFetchError, CacheError, redact_url
from asyncfetch.lerobot import pool_bytes
from asyncfetch.lerobot.engine import DECODERS_SHARE, TABLES_SHARE
from asyncfetch.runtime.concurrently import gather

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from numpy.typing import NDArray

    from asyncfetch.config import StreamConfig
    from asyncfetch.lerobot import LeRobotDataset

__all__ = ["Fitted", "Pool", "pool_that_fits"]

_log = logging.getLogger("asyncfetch")

_WEIGHED_FILES = 64
"""Files of each camera, whose indexes are fetched before the first sample where the pool may not fit."""
_WEIGHED_EPISODES = 1024
_MARGIN = 1.25
"""The factor by which an episode that wasn't weighed may be larger than its frames say."""


class Pool:
    """The pool of a stream's order. It is what the configuration says, until a dataset was opened."""

    def __init__(self, config: StreamConfig) -> None:
        self.lanes, self.episodes = config.lanes, config.pool_episodes
        self._asked_for = config.lanes, config.pool_episodes

    async def fit(self, dataset: LeRobotDataset, chosen: Sequence[int]) -> None:
        """Make it as large as the chosen episodes let it be, with one warning where that is less than asked."""
        lanes, pool = self._asked_for
        places = dataset.episodes.positions(chosen)  # EpisodeNotFound
        episodes = np.array(chosen, np.int64)
        lengths = dataset.episodes.lengths[places].astype(np.int64)
        max_bytes = pool_bytes(dataset.config)
        files = [dataset.episodes.video_files(camera)[places] for camera in dataset.cameras]
        sizes = np.zeros(len(lengths))
        for each in files:  # a file isn't larger than info.json says, but for one episode that is
            _, numbers = np.unique(each, return_inverse=True)
            in_file = np.bincount(numbers, weights=lengths)
            sizes += lengths / np.maximum(1, in_file[numbers]) * dataset.metadata.info.video_file_bytes
        fits = pool_that_fits(sizes, pool, max_bytes)
        if fits < pool:
            sizes = await _weighed(dataset, episodes, lengths, files)
            fits = pool_that_fits(sizes, pool, max_bytes)
        self.lanes, self.episodes = lanes, pool
        if fits == pool:
            return
        self.lanes, self.episodes = min(lanes, fits & -fits), fits
        if dataset.fetches:
            _log.warning(
                "max_bytes=%d has room for the clips of %d episodes of %s at a time, not for pool_episodes=%d: frames "
                "are drawn from %d, so no more are mixed in a batch. With max_bytes=%d it is as asked for",
                rank_config(dataset.config).max_bytes,
                fits,
                redact_url(dataset.url),
                pool,
                fits,
                rank_config(dataset.config).max_bytes * _needed_bytes(sizes, pool) // max_bytes + 8,
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
            await self._pool.fit(dataset, dataset.episodes.indices if self._episodes is None else self._episodes)
            self._stack = stack.pop_all()
        return dataset

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, at)


def pool_that_fits(sizes: NDArray[np.float64], pool: int, max_bytes: int) -> int:
    """Return how many of these episodes fit at a time, whichever they are, beside one that is needed next; at least 1.

    The pool where that is so many, or all that there are. Above 8 a multiple of 4, so that it has lanes.
    """
    if _needed_bytes(sizes, pool) <= max_bytes:
        return pool
    fitting = int(np.searchsorted(np.cumsum(np.sort(sizes)[::-1]), max_bytes, side="right")) - 1
    return fitting - fitting % 4 if fitting > 8 else max(1, fitting)


def _needed_bytes(sizes: NDArray[np.float64], pool: int) -> int:
    """Return the bytes of the largest episodes of a pool, and of one that is needed next."""
    return int(np.sort(sizes)[::-1][: pool + 1].sum())


async def _weighed(
    dataset: LeRobotDataset, episodes: NDArray[np.int64], lengths: NDArray[np.int64], files: list[NDArray[np.int64]]
) -> NDArray[np.float64]:
    """Bytes of each episode's clips; where there are many files, of most by their frames."""
    chosen = lengths > 0
    for each in files:
        distinct = np.unique(each[lengths > 0])
        chosen &= np.isin(each, distinct[:: -(-len(distinct) // _WEIGHED_FILES)])
    there = np.flatnonzero(chosen if chosen.any() else lengths > 0)
    there = there[np.unique(np.linspace(0, len(there) - 1, min(len(there), _WEIGHED_EPISODES)).astype(np.int64))]
    found: dict[int, int] = {}

    async def weigh(place: int) -> None:
        with suppress(AsyncFetchError):  # raised, or left out, at the episode's place in the order
            found[place] = await dataset.clip_bytes(int(episodes[place]))

    await gather(*(partial(weigh, int(place)) for place in there))
    places, bytes_there = list(found), np.array(list(found.values()), np.float64)
    largest_bytes = int(bytes_there.max(initial=0))
    most_bytes = max(dataset.clip_budget.max_bytes, pool_bytes(dataset.config))
    if largest_bytes > most_bytes:
        largest, max_bytes = episodes[places[int(bytes_there.argmax())]], rank_config(dataset.config).max_bytes
        raise CacheError(
            f"the clips of episode {largest} of {redact_url(dataset.url)} take {largest_bytes} bytes, but {max_bytes=} "
            f"leaves {most_bytes} for clips: set StreamConfig(max_bytes=...) to at least "
            f"{math.ceil(largest_bytes / (1 - 1 / DECODERS_SHARE - 1 / TABLES_SHARE))}"
        )
    sizes: NDArray[np.float64] = lengths * (_MARGIN * bytes_there.sum() / max(1, lengths[places].sum()))
    sizes[places] = bytes_there
    return sizes
