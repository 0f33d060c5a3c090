"""Stretches of episodes in memory: all their bytes at once, each fetched once.

First comes the stretch's plan: which bytes of which files. Then all of it is asked for at once, and what a format has
beside them, such as rows of a table. What comes beside may show that the plan was wrong: then the stretch is planned
again.

A stretch is *held* while it is read: its bytes are leased in the byte cache, which then can't evict them. Idle, its
plan is kept for a while, and its bytes as long as the byte cache has room: the next read is then a hit without a
request, whether the decoders are still there or not.

Four things could go wrong where many ask at once, and don't:

- Stretches that each hold one camera's clip could wait for ever for the room of the other one. So room for all bytes of
  a stretch is taken before the first is asked for: see ``resources/room.py``.
- A stretch that is waited for could come after all that was prefetched. So a stretch has one caller at all limiters,
  however many want it, and its priority is raised as soon as one of them doesn't only read ahead.
- Plans and rows, which are small but for pictures, could come after clips. So they are urgent at the host, even
  where they are read ahead, and clips never take all requests.
- A file may be replaced. A plan made from the index of the old one cuts the new one at the wrong places. So once
  anything turns out to be replaced, which is rare, all indexes and plans are thrown away, and what was planned before
  is planned again.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast
from weakref import WeakValueDictionary

from typing_extensions import override

from asyncfetch.cache import CacheKey
from asyncfetch.errors import AsyncFetchError, CacheError, ObjectChanged
from asyncfetch.fetch.limiter import Caller, calling, current_caller
from asyncfetch.formats.held import ClipDecoders, HeldStretch, StretchEntry
from asyncfetch.observe import Figures
from asyncfetch.observe.report import Words
from asyncfetch.observe.waits import Cause, running_meter
from asyncfetch.ranges import ByteRange
from asyncfetch.runtime.concurrently import gather
from asyncfetch.runtime.single_flight import LRUPart, SingleFlight

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping

    from asyncfetch.cache import Lease
    from asyncfetch.config import DecoderBackend
    from asyncfetch.decode import PictureSize
    from asyncfetch.formats.clips import PlannedClip, PlannedRange
    from asyncfetch.formats.stretch import Stretch
    from asyncfetch.resources import Engine


class PlanChange(Exception):
    """The bytes that a stretch needs aren't those that were weighed: they are to be weighed again."""


T = TypeVar("T")
X = TypeVar("X")
P = TypeVar("P", bound="PlannedRange | PlannedClip")
H = TypeVar("H", bound=HeldStretch[Any])

OBJECTS_BYTES = 2048
"""About what the Python objects of one kept stretch take beside its arrays; so that empty ones count too."""


@dataclass(frozen=True, slots=True)
class KeptPart(Generic[T]):
    """The part of a stretch that stays between two reads, beside its bytes."""

    value: T
    nbytes: int


@dataclass(frozen=True, slots=True)
class KeptPlan(KeptPart["Mapping[str, P]"], Generic[P]):
    """The bytes that a stretch needs, by name, and the keys that the byte cache has for them."""

    keys: Mapping[str, CacheKey]


class PlanWith(dict[str, P], Generic[P, X]):
    """A plan that tells what comes beside its bytes."""

    def __init__(self, beside: X, planned: Mapping[str, P] | None = None) -> None:
        super().__init__(planned or {})
        self.beside = beside


@dataclass(frozen=True, slots=True, repr=False)
class EpisodeCacheStatistics(Figures):
    """A snapshot of a StretchCache."""

    _telling = ("hits", "misses", "held")
    _of_moment = ("held", "kept", "kept_bytes")
    words: ClassVar[Words] = Words()
    """What a report calls an episode."""

    hits: int
    """Reads that found every byte of an episode, or of a stretch of it, in memory."""
    misses: int
    """Reads that had to fetch some of it, or to wait for another caller's fetch."""
    held: int
    """Episodes, or stretches of one, that are read or waited for."""
    kept: int
    """Episodes of which more than bytes is kept, such as rows, held ones included, and stretches with pictures in
    theirs; plans are bounded likewise, but kept apart."""
    kept_bytes: int
    """Memory of that, and of the plans that are kept."""
    whole: int = 0
    """Plans that need all of a file, because it can't be cut."""
    whole_bytes: int = 0
    """Bytes of those files."""

    @override
    def _since(self, earlier: EpisodeCacheStatistics) -> EpisodeCacheStatistics:
        """``kept`` says how many more are kept than then."""
        return replace(Figures._since(self, earlier), kept=self.kept - earlier.kept)


class StretchCache(ABC, Generic[P, X, H]):
    """Fetches stretches of a dataset's episodes, one request per range of their plans, over a byte cache. Loop-bound.

    A format says by the abstract methods what a stretch is made of.

    Args:
        engine: What it reads with, and keeps what it read in. Leaving it ends the fetches, and waiters get
            ClosedError.
        number: Of the dataset in the engine.
        backend: Which library decodes.
        size: Size that pictures are brought to; None leaves them as they are.
    """

    statistics_type: ClassVar[type[EpisodeCacheStatistics]] = EpisodeCacheStatistics
    """The type of its statistics, which has the format's words."""

    def __init__(
        self, engine: Engine, number: int, *, backend: DecoderBackend, size: PictureSize | None = None
    ) -> None:
        self._clips = engine.clips
        self._rank = engine.rank
        self._clip_decoders = ClipDecoders(engine, number, backend=backend, size=size)
        self._drop_decoders = engine.drop_decoders
        self._flights: SingleFlight[StretchEntry[X], None] = SingleFlight(engine.group)
        self._memory = engine.memory
        self._room = engine.room
        self._fetching_clips = engine.fetching_clips
        self._small_reads = Caller()
        self._callers: WeakValueDictionary[Stretch, Caller] = WeakValueDictionary()
        self._held: dict[Stretch, StretchEntry[X]] = {}
        self._plans: LRUPart[Stretch, KeptPlan[P]] = LRUPart(engine.plans, number)
        self._kept: LRUPart[Stretch | int, KeptPart[X]] = LRUPart(engine.beside, number)
        """What comes beside bytes, by whatever a format calls it."""
        self._hits = self._misses = self._whole = self._whole_bytes = 0

    # What a format says.

    @property
    def words(self) -> Words:
        """The format's nouns."""
        return self.statistics_type.words

    @abstractmethod
    def name(self, stretch: Stretch) -> str:
        """Return what messages call a stretch. EpisodeNotFound where its episode isn't there."""

    @abstractmethod
    async def _make_plan(self, stretch: Stretch) -> KeptPlan[P]:
        """Plan a stretch: which bytes it needs, by name. Fetches indexes where needed."""

    async def _fetch_beside(self, stretch: Stretch, planned: Mapping[str, P]) -> tuple[X, Mapping[str, P]]:
        """Return what comes beside the bytes, and the plan by it; PlanChange where that is of other bytes.

        A PlanWith has it.
        """
        assert isinstance(planned, PlanWith)
        return planned.beside, planned

    def _kept_beside(self, stretch: Stretch, planned: Mapping[str, P]) -> X | None:
        """Return what comes beside the bytes, if it is in memory and the plan is by it. A PlanWith has it."""
        assert isinstance(planned, PlanWith)
        beside: X = planned.beside
        return beside

    def _held_by(self, entry: StretchEntry[X], *, by_pass: bool = False) -> H:
        """Hold an entry once more."""
        return cast("H", HeldStretch(entry, self._clip_decoders, self._release, by_pass=by_pass))

    def _over(self, stretch: Stretch, name: str, planned: P, buffer: memoryview) -> Any:  # noqa: ANN401
        """Return the clip that some bytes of a stretch are; None where they are no video."""
        return planned.over(buffer, name=f"{name} of {self.name(stretch)}")

    def _start_earlier(self, name: str, planned: P) -> None:
        """Plan a camera's clips from an earlier key frame on: see ``Planned.starts_too_late``."""

    def _look_again(self, stretch: Stretch) -> None:
        """Forget what was planned for an episode that is doubted: its file may have been replaced."""
        if self._clip_decoders.take_doubt(stretch.episode):
            self._plans.clear(lambda planned: planned.episode == stretch.episode)
            self._forget_files(stretch.episode)

    def _forget_files(self, episode: int | None) -> None:
        """Forget what is known of the files of an episode, or of all."""

    # What a reader calls.

    async def clip_bytes(self, stretch: Stretch) -> int:
        """Memory that the bytes of the stretch take. Fetches the indexes of its files where needed."""
        with calling(self._caller(stretch)):
            return _nbytes(await self._plan(stretch))

    async def range_bytes(self, stretch: Stretch) -> int:
        """Return what is fetched for the stretch: without the headers that are made for clips."""
        return sum(each.stop - each.start for each in (await self._plan(stretch)).values())

    async def locate_beside(self, stretch: Stretch) -> None:
        """Fetch what ``hold`` needs before what comes beside the bytes, where that takes a request; for a pass."""

    def raise_priority(self, stretch: Stretch) -> None:
        """Let the rest of a stretch that is on its way go first: it is waited for now."""
        caller = self._callers.get(stretch)
        if caller is not None:
            caller.raise_priority()

    def is_held(self, stretch: Stretch) -> bool:
        """Return whether the stretch is in use, or on its way to a user."""
        return stretch in self._held

    def hold_nowait(self, stretch: Stretch) -> H | None:
        """The stretch, if every byte of it is in memory."""
        entry = self._held.get(stretch)
        if entry is None:
            entry = self._revive(stretch)
        if entry is None or entry.beside is None:
            return None
        self._hits += 1
        return self._held_by(entry)

    def claim(self, stretch: Stretch, size_bytes: int) -> H | None:
        """Take room for a stretch, for a pass; None where there is none. ``load`` it, and release it in any case.

        A stretch that is in use has its room already.
        """
        entry = self._held.get(stretch)
        if entry is not None and entry.is_common and entry.beside is not None:
            return self._held_by(entry)
        taken_bytes = 0 if entry is None else entry.size_bytes or 0
        # What only brief readers hold may have been found in memory beyond the bound.
        has_room = entry is not None and entry.passes > 0 and size_bytes <= taken_bytes
        if not has_room and not self._room.fits(size_bytes - taken_bytes):
            return None
        entry = entry or self._revive(stretch) or self._new_entry(stretch)
        taken_bytes = entry.size_bytes or 0
        size_bytes = entry.size_bytes = max(size_bytes, taken_bytes)
        held = self._held_by(entry, by_pass=True)
        if entry.passes > 1:
            self._room.change(pass_bytes=size_bytes - taken_bytes)
        else:
            self._room.change(pass_bytes=size_bytes, brief_bytes=-taken_bytes)
        return held

    async def load(self, held: H, *, is_common: bool = False) -> H:
        """Fetch what isn't in memory of a stretch that has its room: all at once, nothing twice.

        Failed, or cancelled, its claimer still has to release it. It is as urgent as the caller that asks. Where
        ``is_common``, it may lack what comes beside still.

        Raises:
            FetchError, FormatError, DatasetError: Its files can't be read.
            PlanChange: Its bytes aren't those that ``clip_bytes`` weighed.
            ClosedError: The cache's owner ended.
        """
        # Held while it is being fetched, so that it can't be evicted before its waiters run again.
        entry: StretchEntry[X] = held.entry
        if entry.beside is not None:
            self._hits += 1
            return held
        self._misses += 1
        try:
            with calling(self._caller(entry.stretch)):
                while entry.beside is None:  # as it is behind a flight of ``hold_common`` without room
                    await self._flights.run(entry, partial(self._load, entry, is_common=is_common))
                    if is_common:
                        break
        except BaseException:
            if not held.is_by_pass:  # which gives its room back itself, once the piece is in line for it again
                held.release()
            raise
        return held

    async def hold(self, stretch: Stretch) -> H | None:
        """The stretch for a moment, fetched where needed; None once its bytes don't fit beside what passes hold.

        See ``load``. Waits for room that others hold for a moment.

        Raises:
            CacheError: Its bytes are larger than the byte cache.
        """
        while True:
            try:
                held = self.hold_nowait(stretch) or await self.hold_common(stretch)
            except PlanChange:
                continue
            if held is not None:
                return held
            size_bytes, _ = await gather(partial(self.clip_bytes, stretch), partial(self.locate_beside, stretch))
            assert size_bytes is not None
            if size_bytes > self._memory.clips_bytes:
                raise self.no_room(f"{self.name(stretch)} take {size_bytes} bytes", size_bytes)
            entry = self._held.get(stretch)
            if entry is None or entry.size_bytes is None:
                is_taken = await self._room.take_briefly(size_bytes)
                entry = self._held.get(stretch)
                has_got_room = entry is not None and entry.size_bytes is not None  # meanwhile
                if not is_taken and not has_got_room:
                    return None
                entry = entry or self._new_entry(stretch)
                if not has_got_room:
                    entry.size_bytes = size_bytes
                elif is_taken:
                    self._room.change(brief_bytes=-size_bytes)
            try:
                return await self.load(self._held_by(entry))
            except PlanChange:
                continue

    async def hold_common(self, stretch: Stretch) -> H | None:
        """The stretch in memory of all loader workers of the rank; None where there is none, or no room in it.

        See ``load``. It takes no room here, and waits for none.
        """
        if self._rank is None:
            return None
        held = self.hold_nowait(stretch)
        if held is None:
            entry = self._held.get(stretch) or self._new_entry(stretch)
            held = await self.load(self._held_by(entry), is_common=True)
        if held.is_common:
            return held
        held.release()
        return None

    def statistics(self) -> EpisodeCacheStatistics:
        """A snapshot."""
        kept_bytes = self._plans.nbytes + self._kept.nbytes
        return self.statistics_type(
            self._hits,
            self._misses,
            len(self._held),
            len(self._kept),
            kept_bytes,
            whole=self._whole,
            whole_bytes=self._whole_bytes,
        )

    # How it works.

    def _new_entry(self, stretch: Stretch) -> StretchEntry[X]:
        entry = self._held[stretch] = StretchEntry(stretch, self.name)
        return entry

    def _release(self, entry: StretchEntry[X], by_pass: bool) -> None:
        """One holder less. The last one gives the bytes back to the byte cache's own order of eviction."""
        entry.holders -= 1
        entry.passes -= by_pass
        size_bytes = entry.size_bytes or 0
        if entry.holders:
            if by_pass and not entry.passes:
                self._room.change(pass_bytes=-size_bytes, brief_bytes=size_bytes)
            return
        if self._held.get(entry.stretch) is entry:
            del self._held[entry.stretch]
        for lease in entry.leases.values():
            if entry.is_common:
                self._drop_decoders(lease.key)
            lease.release()
        entry.leases, entry.clips, entry.size_bytes = {}, {}, None
        if by_pass:
            self._room.change(pass_bytes=-size_bytes)
        else:
            self._room.change(brief_bytes=-size_bytes)

    def _caller(self, stretch: Stretch) -> Caller:
        """Return the stretch's one caller at all limiters: the first that asked, as long as it lives."""
        asking = current_caller()
        caller = self._callers.setdefault(stretch, asking)
        if asking.urgent:
            caller.raise_priority()
        return caller

    def _revive(self, stretch: Stretch) -> StretchEntry[X] | None:
        """An entry made of what is kept, if that is everything."""
        self._look_again(stretch)
        plan = self._plans.get_nowait(stretch)
        beside = None if plan is None else self._kept_beside(stretch, plan.value)
        if plan is None or beside is None:
            return None
        leases: dict[str, Lease] = {}
        for name, each in plan.value.items():
            lease = self._clips.try_lease_of(plan.keys[name], each.url)
            if lease is None:
                _release(leases)
                return None
            leases[name] = lease
        entry = self._new_entry(stretch)
        entry.size_bytes = _nbytes(plan.value)
        self._room.change(brief_bytes=entry.size_bytes)
        self._fill(entry, beside, plan.value, leases)
        return entry

    async def _load(self, entry: StretchEntry[X], *, is_common: bool = False) -> None:
        """Fetch what isn't there, again where a file was replaced between its index and its bytes."""
        while entry.beside is None:
            generation = self._clip_decoders.generation
            try:
                fetched = await self._fetch(entry, is_common=is_common)
                if fetched is None:
                    return
                beside, planned, leases = fetched
            except ObjectChanged:
                raise
            except AsyncFetchError:
                if generation == self._clip_decoders.generation:
                    raise
                continue
            try:
                late = [name for name, each in planned.items() if each.starts_too_late(leases[name].buffer)]
                for name in late:
                    self._start_earlier(name, planned[name])
                    self._plans.clear()
                # A flight that was given up may end well all the same, beside the one that came after it.
                if not late and generation == self._clip_decoders.generation and entry.beside is None:
                    self._fill(entry, beside, planned, leases)
                    entry.is_common = is_common
                    return
            except BaseException:  # bytes that are no video
                _release(leases)
                raise
            _release(leases)

    async def _fetch(
        self, entry: StretchEntry[X], *, is_common: bool
    ) -> tuple[X, Mapping[str, P], Mapping[str, Lease]] | None:
        """Plan the stretch, then fetch all of it at once: what comes beside, the plan by that, and the bytes.

        None where common memory has no room for all of it. PlanChange where it needs more room than it has here.
        """
        stretch, planned = entry.stretch, await self._plan(entry.stretch)
        if not is_common and entry.size_bytes is not None and _nbytes(planned) > entry.size_bytes:
            raise PlanChange
        found: list[tuple[X, Mapping[str, P]]] = []
        leases: dict[str, Lease] = {}

        async def add_beside() -> None:
            found.append(await self._fetch_beside(stretch, planned))

        async def add(name: str, each: P) -> None:
            lease = await self._watch(self._lease(each, is_common=is_common))
            if lease is not None:
                leases[name] = lease

        try:
            await gather(add_beside, *(partial(add, name, each) for name, each in planned.items()))
        except BaseException:
            _release(leases)
            raise
        if len(leases) < len(planned):
            _release(leases)
            return None
        return *found[0], leases

    async def _lease(self, each: P, *, is_common: bool) -> Lease | None:
        if is_common:
            assert self._rank is not None
            return await self._rank.lease(each.url, each.start, each.stop, header=each.header)
        meter, since = running_meter(), time.perf_counter()
        async with self._fetching_clips.permit():
            if meter is not None:
                meter.add(Cause.LIMIT, time.perf_counter() - since)
            return await self._clips.acquire(each.url, each.start, each.stop, header=each.header)

    def no_room(self, what: str, needed_bytes: int) -> CacheError:
        """Return the error that says what takes so many bytes, and how many to allow for that."""
        memory, ranges = self._memory, self.words.ranges
        return CacheError(
            f"the {ranges} of {what}, but max_bytes={memory.max_bytes} leaves {memory.clips_bytes} for {ranges}: set "
            f"StreamConfig(max_bytes=...) to at least {memory.max_bytes_for_clips(needed_bytes)}"
        )

    async def _plan(self, stretch: Stretch) -> Mapping[str, P]:
        return (await self._plans.get(stretch, partial(self._make_plan, stretch))).value

    async def _watch(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except ObjectChanged:
            self._forget()
            raise

    def _forget(self) -> None:
        """Plan everything anew. Readers of a held stretch go on with its bytes."""
        self._clip_decoders.replace_all()
        self._forget_files(None)
        self._plans.clear()
        self._held = {stretch: entry for stretch, entry in self._held.items() if entry.beside is None}

    def _fill(self, entry: StretchEntry[X], beside: X, planned: Mapping[str, P], leases: Mapping[str, Lease]) -> None:
        clips = {name: self._over(entry.stretch, name, each, leases[name].buffer) for name, each in planned.items()}
        entry.clips = {name: clip for name, clip in clips.items() if clip is not None}
        entry.generation, entry.beside = self._clip_decoders.generation, beside
        entry.leases, entry.planned = leases, planned


def kept_plan(planned: Mapping[str, P], beside_bytes: int = 0) -> KeptPlan[P]:
    """Return a plan to keep, with what it takes: ``beside_bytes`` of that is the format's own."""
    keys = {
        name: CacheKey.of(ByteRange(each.url, each.start, each.stop), each.header) for name, each in planned.items()
    }
    return KeptPlan(planned, OBJECTS_BYTES + beside_bytes + sum(each.plan_nbytes for each in planned.values()), keys)


def _nbytes(planned: Mapping[str, P]) -> int:
    return sum(each.nbytes for each in planned.values())


def _release(leases: Mapping[str, Lease]) -> None:
    for lease in leases.values():
        lease.release()
