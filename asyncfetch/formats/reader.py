"""The reader of an open dataset, for passes, mixtures, and the dataset's own verbs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from asyncfetch.errors import AccessDenied, AsyncFetchError, CacheError, ClosedError, NotFound, redact_url
from asyncfetch.fetch.limiter import Caller, calling
from asyncfetch.formats.held import HeldStretch
from asyncfetch.observe import Figures, Quantiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncfetch.cache import CacheStatistics
    from asyncfetch.cache.disk import DiskStatistics
    from asyncfetch.config import StreamConfig
    from asyncfetch.decode import DecodePoolStatistics, DecoderCacheStatistics
    from asyncfetch.fetch import FetchStatistics
    from asyncfetch.formats.stretch import Stretch
    from asyncfetch.formats.stretch_cache import EpisodeCacheStatistics, StretchCache
    from asyncfetch.observe.report import Report, Words
    from asyncfetch.resources import Engine
    from asyncfetch.runtime.fork import LoopGuard

MAX_PREFETCHES = 1024
"""Stretches that may be asked for and not yet be done; more would only queue up behind the host's limit."""


H = TypeVar("H", bound=HeldStretch[Any])


@dataclass(frozen=True, slots=True, repr=False)
class DatasetStatistics(Figures):
    """A snapshot of everything that works for one open dataset. Counters are since it was opened."""

    _telling = ("fetch", "decode", "clips")

    fetch: FetchStatistics
    clips: CacheStatistics
    episodes: EpisodeCacheStatistics
    decoders: DecoderCacheStatistics
    decode: DecodePoolStatistics
    disk: DiskStatistics | None = None
    """Statistics of the disk cache; None without one."""
    hand_over: Quantiles = field(default_factory=Quantiles)
    """Seconds from the loop's thread to a synchronous consumer that waits, for each few samples; of a Stream's
    statistics."""

    def without_hosts(self) -> DatasetStatistics:
        """Return the same without what is known of each host."""
        return replace(self, fetch=replace(self.fetch, hosts={}))


class StretchReader(Generic[H]):
    """Reads an open dataset's episodes, and keeps what was read of them within the engine's bounds.

    Belongs to the dataset's loop, as ``check`` says: WrongLoop elsewhere, and ClosedError once the dataset was closed.

    Args:
        url: The dataset's, for messages.
        engine: What it reads by.
        episodes: The cache of its stretches.
        config: Bounds, limits and threads.
        guard: Knows the loop that opened the dataset.
    """

    def __init__(
        self, url: str, engine: Engine, episodes: StretchCache[Any, Any, H], *, config: StreamConfig, guard: LoopGuard
    ) -> None:
        self.config, self.engine = config, engine
        self.pass_report: Callable[[], Report] | None = None
        """Gives the report of the latest pass over it."""
        self.is_closed = False
        self._url = url
        self._guard = guard
        self._prefetches: set[Stretch] = set()
        """Stretches that are being prefetched."""
        self._ahead = Caller(urgent=False)
        self._episodes = episodes

    def check(self) -> None:
        """Raise WrongLoop or ClosedError where it can't be used."""
        if self.is_closed:
            raise ClosedError(f"{redact_url(self._url)} is closed: use it inside of `async with`")
        self._guard.check()

    @property
    def words(self) -> Words:
        """What its format calls what it reads."""
        return self._episodes.words

    @property
    def fetches(self) -> bool:
        """True if it fetches by itself: of loader workers that read as one, one does."""
        return self.engine.rank is None or self.engine.rank.clips is not None

    def prefetch(self, wanted: Stretch | int) -> None:
        """Start fetching a stretch, in the order of these calls, and return at once; ``hold`` overtakes them.

        Raises:
            CacheError: 1,024 are under way.
        """
        stretch = self._stretch(wanted)
        if stretch in self._prefetches:
            return
        if len(self._prefetches) >= MAX_PREFETCHES:
            raise CacheError(f"{MAX_PREFETCHES} prefetches are under way; await ready() of some before asking for more")
        self._prefetches.add(stretch)
        self.engine.group.start_soon(self._prefetch, stretch, name=f"prefetch episode {stretch.episode}")

    async def _prefetch(self, stretch: Stretch) -> None:
        try:
            with calling(Caller(urgent=False, behind=self._ahead)):
                await self.ready(stretch)
        except AsyncFetchError:
            pass  # a reader of this stretch asks for it anew
        finally:
            self._prefetches.discard(stretch)

    async def ready(self, wanted: Stretch | int) -> None:
        """Wait until a stretch is in memory."""
        (await self.hold(wanted)).release()

    async def hold(self, wanted: Stretch | int) -> H:
        """The stretch in memory until it is released, for a moment, fetched where needed.

        Raises:
            CacheError: Its bytes don't fit beside what passes hold. It waits for room that calls like this one hold.
        """
        stretch = self._stretch(wanted)
        held = await self._episodes.hold(stretch)
        if held is None:
            name, size_bytes = self._episodes.name(stretch), await self._episodes.clip_bytes(stretch)
            pass_bytes = self.engine.room.pass_bytes
            raise self._episodes.no_room(
                f"{name} take {size_bytes} bytes beside the {pass_bytes} that passes over this dataset hold",
                pass_bytes + size_bytes,
            )
        return held

    # For a pass.

    def claim(self, wanted: Stretch | int, size_bytes: int) -> H | None:
        """Take the room of a stretch, which takes so much; see StretchCache."""
        return self._episodes.claim(self._stretch(wanted), size_bytes)

    async def load(self, claimed: H) -> H:
        """Fetch what isn't in memory of a stretch that was claimed; see StretchCache."""
        return await self._episodes.load(claimed)

    async def hold_common(self, wanted: Stretch | int) -> H | None:
        """Return it in memory that all loader workers of the rank share; None where there is none, or no room in it."""
        return await self._episodes.hold_common(self._stretch(wanted))

    def raise_priority(self, wanted: Stretch | int) -> None:
        """Make a stretch that was read ahead urgent."""
        self._episodes.raise_priority(self._stretch(wanted))

    async def clip_bytes(self, wanted: Stretch | int) -> int:
        """Memory that the bytes of a stretch take; fetches indexes where needed."""
        return await self._episodes.clip_bytes(self._stretch(wanted))

    async def range_bytes(self, wanted: Stretch | int) -> int:
        """Return what is fetched for a stretch; fetches indexes where needed."""
        return await self._episodes.range_bytes(self._stretch(wanted))

    async def locate_beside(self, wanted: Stretch | int) -> None:
        """Fetch what tells where the rest of a stretch lies, such as a table's footer, beside ``clip_bytes``."""
        await self._episodes.locate_beside(self._stretch(wanted))

    async def file_bytes(self, url: str) -> int | None:
        """Return the size of one of its files; None where it isn't there."""
        self.check()
        try:
            return (await self.engine.reader.stat(url)).size
        except (AccessDenied, NotFound):  # S3 denies access to a missing object where listing isn't allowed
            return None

    def statistics(self) -> DatasetStatistics:
        """A snapshot of the engine, the caches and the decode threads; after closing too."""
        engine = self.engine
        return DatasetStatistics(
            fetch=engine.fetcher.statistics(),
            clips=engine.clips_statistics(),
            episodes=self._episodes.statistics(),
            decoders=engine.decoders.statistics(),
            decode=engine.decode.statistics(),
            disk=None if engine.disk is None else engine.disk.disk_statistics(),
        )

    def _stretch(self, wanted: Stretch | int) -> Stretch:
        """Return the stretch that is meant, by the name that all use for the same one."""
        self.check()
        if isinstance(wanted, int):
            raise TypeError(f"episode {wanted} as a whole is no stretch of this format")
        return wanted
