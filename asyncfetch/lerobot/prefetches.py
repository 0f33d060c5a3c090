"""Episodes that are fetched ahead of who reads them, and what became of those that failed."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import TYPE_CHECKING

from asyncfetch.errors import AsyncFetchError, CacheError
from asyncfetch.fetch.gate import Caller, calling

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.abc import TaskGroup

    from asyncfetch.lerobot.episode_table import Episode

__all__ = ["Prefetches"]

MAX_PREFETCHES = 1024
"""That may be asked for and not yet be done; more would only queue up behind the host's limit."""
MAX_FAILURES = 1024
"""That are remembered; the oldest is forgotten, and its episode is then fetched again when it is read."""


class Prefetches:
    """Of one dataset. Loop-bound, as that is.

    Args:
        fetch: Brings an episode into memory.
    """

    def __init__(self, fetch: Callable[[Episode], Awaitable[None]]) -> None:
        self._fetch_episode = fetch
        self._under_way: set[int] = set()
        self._ahead = Caller(urgent=False)
        self._failures: OrderedDict[int, AsyncFetchError] = OrderedDict()

    def start(self, episode: Episode, group: TaskGroup) -> None:
        """Fetch it in a task of this group, unless that is under way; what it failed by before is forgotten.

        Raises:
            CacheError: 1,024 are under way.
        """
        self._failures.pop(episode.index, None)
        if episode.index in self._under_way:
            return
        if len(self._under_way) >= MAX_PREFETCHES:
            raise CacheError(f"{MAX_PREFETCHES} prefetches are under way; await ready() of some before asking for more")
        self._under_way.add(episode.index)
        group.start_soon(self._run, episode, name=f"prefetch episode {episode.index}")

    async def _run(self, episode: Episode) -> None:
        try:
            with calling(Caller(urgent=False, behind=self._ahead)):
                await self._fetch(episode)
        except AsyncFetchError:
            pass  # whoever reads this episode gets it from self._failures, or meets it again
        finally:
            self._under_way.discard(episode.index)

    async def ready(self, episode: Episode) -> None:
        """Wait until it is in memory, fetching it where nobody did. Raises what its fetch ended with."""
        self.raise_failure(episode)
        await self._fetch(episode)

    def raise_failure(self, episode: Episode) -> None:
        """What fetching it ended with, if that failed and wasn't started again since."""
        failure = self._failures.get(episode.index)
        if failure is not None:
            # A copy: one exception object raised in several tasks would pile up their tracebacks.
            raise copy.copy(failure)

    async def _fetch(self, episode: Episode) -> None:
        try:
            await self._fetch_episode(episode)
        except CacheError:
            raise  # there may be room when it is asked for again
        except AsyncFetchError as error:
            # A copy has no traceback, whose frames would keep the fetched buffers alive.
            self._failures[episode.index] = copy.copy(error)
            if len(self._failures) > MAX_FAILURES:
                self._failures.popitem(last=False)
            raise
