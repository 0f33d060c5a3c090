"""Episodes that are fetched ahead of who reads them, and what became of those that failed."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from asyncfetch.errors import AsyncFetchError, CacheError
from asyncfetch.fetch.limiter import Caller, calling
from asyncfetch.runtime.failures import copied, kept

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from anyio.abc import TaskGroup

    from asyncfetch.lerobot.episode_table import Episode

__all__ = ["Prefetches"]

MAX_PREFETCHES = 1024
"""Episodes that may be asked for and not yet be done; more would only queue up behind the host's limit."""
MAX_FAILURES = 1024
"""Failures that are remembered; the oldest is forgotten, and its episode is then fetched again when it is read."""


class _Try:
    """The state that all who ask for an episode share until the first is told what came of it; later ones try anew.

    Those who are told later, because they still had something to end, have nothing to say of what was asked meanwhile.
    """

    __slots__ = ("__weakref__", "is_ahead")

    def __init__(self) -> None:
        self.is_ahead = False
        """True if a task of its own fetches the episode."""


class Prefetches:
    """Prefetches of one dataset. Loop-bound, as that is.

    Args:
        fetch: Brings an episode into memory.
    """

    def __init__(self, fetch: Callable[[Episode], Awaitable[None]]) -> None:
        self._fetch_episode = fetch
        self._under_way = 0
        self._tries: WeakValueDictionary[int, _Try] = WeakValueDictionary()  # as long as somebody is at it
        self._ahead = Caller(urgent=False)
        self._failures: OrderedDict[int, AsyncFetchError] = OrderedDict()

    def start(self, episode: Episode, group: TaskGroup) -> None:
        """Fetch it in a task of this group, unless one is at it; what it failed by before is forgotten.

        Raises:
            CacheError: 1,024 are under way.
        """
        self._failures.pop(episode.index, None)
        attempt = self._try(episode)
        if attempt.is_ahead:
            return
        if self._under_way >= MAX_PREFETCHES:
            raise CacheError(f"{MAX_PREFETCHES} prefetches are under way; await ready() of some before asking for more")
        self._under_way += 1
        attempt.is_ahead = True
        group.start_soon(self._run, episode, attempt, name=f"prefetch episode {episode.index}")

    async def _run(self, episode: Episode, attempt: _Try) -> None:
        try:
            with calling(Caller(urgent=False, behind=self._ahead)):
                await self._fetch(episode, attempt)
        except AsyncFetchError:
            pass  # whoever reads this episode gets it from self._failures, or meets it again
        finally:
            self._under_way -= 1

    async def ready(self, episode: Episode) -> None:
        """Wait until it is in memory, fetching it where nobody did. Raises what its fetch ended with."""
        self.raise_failure(episode)
        await self._fetch(episode, self._try(episode))

    def raise_failure(self, episode: Episode) -> None:
        """Raise what fetching it ended with, if that failed and wasn't started again since."""
        failure = self._failures.get(episode.index)
        if failure is not None:
            raise copied(failure)

    @contextmanager
    def told(self, episode: Episode, *, is_whole: bool = True) -> Iterator[None]:
        """Around what brings the episode, or a part of it, beside these fetches: who gets its error is told, too."""
        attempt = self._try(episode)
        try:
            yield
        except AsyncFetchError:
            self._end(episode, attempt)
            raise
        if is_whole:
            self._end(episode, attempt)

    async def _fetch(self, episode: Episode, attempt: _Try) -> None:
        try:
            await self._fetch_episode(episode)
        except AsyncFetchError as error:
            # After CacheError there may be room when it is asked for again.
            if self._end(episode, attempt) and not isinstance(error, CacheError):
                self._failures[episode.index] = kept(error)
                if len(self._failures) > MAX_FAILURES:
                    self._failures.popitem(last=False)
            raise
        self._end(episode, attempt)

    def _try(self, episode: Episode) -> _Try:
        return self._tries.setdefault(episode.index, _Try())

    def _end(self, episode: Episode, attempt: _Try) -> bool:
        """Return what came of a try; False where somebody was told before."""
        if self._tries.get(episode.index) is not attempt:
            return False
        del self._tries[episode.index]
        return True
