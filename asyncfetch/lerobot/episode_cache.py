"""Stretches of episodes in memory: all cameras and the rows of one at once, each byte fetched once.

First comes the stretch's plan, made from the indexes of the videos, and at the same time the footer of the table: they
say where everything lies. Then all of it is asked for at once, so that a stretch takes two requests one after the
other. In a pass the clips don't wait for the footer, which may be long.

Which frames are the episode's, its rows say by their times. They mostly are at the dataset's rate, so that is what a
plan goes by until they have come. Where that turns out to be wrong, the stretch is planned again by its rows; those
that come after it are planned by theirs at once, a request later.

A stretch is *held* while it is read: its clips are leased in the byte cache, which then can't evict them. Idle,
the plan of its clips and the rows of its episode are kept for a while, and the bytes of its clips as long as the byte
cache has room: the next read is then a hit without a request, whether the decoders are still there or not.

Four things could go wrong where many ask at once, and don't:

- Stretches that each hold one camera's clip could wait for ever for the room of the other one. So room for all clips of
  a stretch is taken before the first is asked for: see ``resources/room.py``.
- A stretch that is waited for could come after all that was prefetched. So a stretch has one caller at all limiters,
  however many want it, and its priority is raised as soon as one of them doesn't only read ahead.
- Plans and rows, which are small but for pictures, could come after clips. So they are urgent at the host, even
  where they are read ahead, and clips never take all requests.
- A video may be replaced. A plan made from the index of the old one cuts the new one at the wrong places. So once
  anything turns out to be replaced, which is rare, all indexes and plans are thrown away, and what was planned before
  is planned again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from asyncfetch.errors import (
    AsyncFetchError,
    CacheError,
    ObjectChanged,
    redact_url,
)
from asyncfetch.fetch.limiter import Caller, calling, current_caller
from asyncfetch.lerobot.held_episode import ClipDecoders, EpisodeEntry, HeldEpisode
from asyncfetch.lerobot.info import DepthUnit, depth_scale
from asyncfetch.lerobot.rows import RowReader
from asyncfetch.lerobot.video_index import VideoIndexes
from asyncfetch.observe import Figures
from asyncfetch.observe.waits import Cause, running_meter
from asyncfetch.runtime.concurrently import gather
from asyncfetch.runtime.single_flight import LRUPart, SingleFlight

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from asyncfetch.cache import Lease
    from asyncfetch.config import DecoderBackend
    from asyncfetch.decode import PictureSize
    from asyncfetch.lerobot.engine import DatasetEngine
    from asyncfetch.lerobot.metadata import Metadata
    from asyncfetch.lerobot.rows import EpisodeRows, PicturePart
    from asyncfetch.lerobot.stretch import Stretch
    from asyncfetch.lerobot.video_index import PlannedClip


class PlanChange(Exception):
    """The clips that an episode's rows ask for aren't those that were weighed: they are to be weighed again."""


T = TypeVar("T")

OBJECTS_BYTES = 2048
"""About what the Python objects of one kept episode take beside its arrays; so that empty ones count too."""


@dataclass(frozen=True, slots=True, repr=False)
class EpisodeCacheStatistics(Figures):
    """A snapshot of an EpisodeCache."""

    _telling = ("hits", "misses", "held")
    _of_moment = ("held", "kept", "kept_bytes")

    hits: int
    """Reads that found every byte of an episode, or of a stretch of it, in memory."""
    misses: int
    """Reads that had to fetch some of it, or to wait for another caller's fetch."""
    held: int
    """Episodes, or stretches of one, that are read or waited for."""
    kept: int
    """Episodes whose rows are kept, held ones included, and stretches with pictures in theirs; plans are bounded
    likewise, but kept apart."""
    kept_bytes: int
    """Memory of the rows and plans that are kept."""

    def _since(self, earlier: EpisodeCacheStatistics) -> EpisodeCacheStatistics:
        """See ``counted_since``; ``kept`` says how many more are kept than then."""
        return replace(Figures._since(self, earlier), kept=self.kept - earlier.kept)


class _EpisodeParts(NamedTuple):
    rows: EpisodeRows
    planned: Mapping[str, PlannedClip]
    leases: dict[str, Lease]


@dataclass(frozen=True, slots=True)
class _KeptPart(Generic[T]):
    """The part of a stretch that stays between two reads, beside the bytes of its clips."""

    value: T
    nbytes: int


class EpisodeCache:
    """Fetches stretches of a dataset's episodes, one request per (stretch, camera), over a byte cache. Loop-bound.

    Args:
        engine: What it reads with, and keeps what it read in. Leaving it ends the fetches, and waiters get
            ClosedError.
        number: Of the dataset in the engine.
        metadata: Of the dataset.
        backend: Which library decodes.
        tolerance_seconds: By which a frame may be shown at another time than its row has.
        depth_unit: Unit of depth cameras' frames.
        size: What cameras' frames are brought to.
    """

    def __init__(
        self,
        engine: DatasetEngine,
        number: int,
        *,
        metadata: Metadata,
        backend: DecoderBackend,
        tolerance_seconds: float,
        depth_unit: DepthUnit,
        size: PictureSize | None = None,
    ) -> None:
        self._clips = engine.clips
        self._rank = engine.rank
        self.rows = RowReader(
            engine.reader,
            metadata,
            kept=engine.rows,
            number=number,
            list_tables=engine.list_tables,
            run=engine.run,
        )
        """Reads the rows of its episodes."""
        self._indexes = VideoIndexes(
            engine.reader,
            kept=engine.indexes,
            run=engine.run,
            tolerance_seconds=tolerance_seconds,
            sharing=metadata.episodes.sharing_video_file,
        )
        self._clip_decoders = ClipDecoders(engine, number, backend, size)
        self._drop_decoders = engine.drop_decoders
        self._episodes = metadata.episodes
        self._fps = metadata.info.fps
        self._metadata = metadata
        self._depth = {key: depth_scale(feature, depth_unit) for key, feature in metadata.features.items()}
        self._flights: SingleFlight[EpisodeEntry, None] = SingleFlight(engine.group)
        self._memory = engine.memory
        self._room = engine.room
        self._planning, self._locating = engine.planning, engine.locating
        self._fetching_clips = engine.fetching_clips
        self._small_reads = Caller()
        self._callers: WeakValueDictionary[Stretch, Caller] = WeakValueDictionary()
        self._held: dict[Stretch, EpisodeEntry] = {}
        self._plans: LRUPart[Stretch, _KeptPart[Mapping[str, PlannedClip]]] = LRUPart(engine.plans, number)
        self._tables: LRUPart[Stretch | int, _KeptPart[EpisodeRows]] = LRUPart(engine.tables, number)
        self._held_rows: WeakValueDictionary[Stretch | int, EpisodeRows] = WeakValueDictionary()
        self._hits = self._misses = 0
        self._rows_come_first = False  # once clips were fetched that the rows didn't ask for

    async def clip_bytes(self, stretch: Stretch) -> int:
        """Memory that the clips of the stretch take. Fetches the indexes of its videos where needed."""
        with calling(self._caller(stretch)):
            return _clip_bytes(await self._plan(stretch))

    async def range_bytes(self, stretch: Stretch) -> int:
        """Return what is fetched of the clips of the stretch: without the headers that are made for them."""
        planned = await self._plan(stretch)
        return sum(clip.plan.stop - clip.plan.start for clip in planned.values())

    async def missing_frames(self, stretch: Stretch, *, by_rows: bool) -> Mapping[str, int]:
        """Return how many frames the video of each camera lacks: by the times of its rows, or at the rate of frames."""
        rows = await self._rows(self._rows_key(stretch)) if by_rows else None
        planned = (await self._make_plan(stretch, rows)).value
        return {camera: int((clip.plan.frame_index < 0).sum()) for camera, clip in planned.items()}

    async def locate_rows(self, stretch: Stretch) -> None:
        """Fetches the footer of the stretch's table where needed: beside ``clip_bytes``, so that ``hold`` needn't."""
        if self._kept_rows(self._rows_key(stretch)) is not None:
            return
        async with self._locating.permit():
            with calling(self._small_reads):
                await self._watch(self.rows.locate(self._episodes[stretch.episode]))

    def raise_priority(self, stretch: Stretch) -> None:
        """Let the rest of a stretch that is on its way go first: it is waited for now."""
        caller = self._callers.get(stretch)
        if caller is not None:
            caller.raise_priority()

    def is_held(self, stretch: Stretch) -> bool:
        """Return whether the stretch is in use, or on its way to a user."""
        return stretch in self._held

    def hold_nowait(self, stretch: Stretch) -> HeldEpisode | None:
        """The stretch, if every byte of it is in memory."""
        entry = self._held.get(stretch)
        if entry is None:
            entry = self._revive(stretch)
        if entry is None or entry.rows is None:
            return None
        self._hits += 1
        return self._held_by(entry)

    def claim(self, stretch: Stretch, size_bytes: int) -> HeldEpisode | None:
        """Take room for a stretch, for a pass; None where there is none. ``load`` it, and release it in any case.

        A stretch that is in use has its room already.
        """
        entry = self._held.get(stretch)
        if entry is not None and entry.is_common and entry.rows is not None:
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

    async def load(self, held: HeldEpisode) -> HeldEpisode:
        """Fetch what isn't in memory of a stretch that has its room: all cameras and the rows at once, nothing twice.

        Failed, or cancelled, its claimer still has to release it. It is as urgent as the caller that asks.

        Raises:
            FetchError, FormatError, DatasetError: Its files can't be read.
            PlanChange: Its clips aren't those that ``clip_bytes`` weighed.
            ClosedError: The cache's owner ended.
        """
        return await self._loaded(held, is_common=False)

    async def hold(self, stretch: Stretch) -> HeldEpisode | None:
        """The stretch for a moment, fetched where needed; None once its clips don't fit beside what passes hold.

        See ``load``. Waits for room that others hold for a moment.

        Raises:
            CacheError: Its clips are larger than the byte cache.
        """
        while True:
            try:
                held = self.hold_nowait(stretch) or await self.hold_common(stretch)
            except PlanChange:
                continue
            if held is not None:
                return held
            size_bytes, _ = await gather(partial(self.clip_bytes, stretch), partial(self.locate_rows, stretch))
            assert size_bytes is not None
            self._check_size(stretch, size_bytes)
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

    async def hold_common(self, stretch: Stretch) -> HeldEpisode | None:
        """The stretch in memory of all loader workers of the rank; None where there is none, or no room in it.

        See ``load``. It takes no room here, and waits for none.
        """
        if self._rank is None:
            return None
        held = self.hold_nowait(stretch)
        if held is None:
            entry = self._held.get(stretch) or self._new_entry(stretch)
            held = await self._loaded(self._held_by(entry), is_common=True)
        if held.is_common:
            return held
        held.release()
        return None

    def _held_by(self, entry: EpisodeEntry, *, by_pass: bool = False) -> HeldEpisode:
        return HeldEpisode(entry, self._clip_decoders, self._release, by_pass=by_pass)

    def _new_entry(self, stretch: Stretch) -> EpisodeEntry:
        entry = self._held[stretch] = EpisodeEntry(self._episodes[stretch.episode], stretch)
        return entry

    async def _loaded(self, held: HeldEpisode, *, is_common: bool) -> HeldEpisode:
        """The stretch when it is loaded; where ``is_common`` it may lack its rows still."""
        # Held while it is being fetched, so that it can't be evicted before its waiters run again.
        entry = held.entry
        if entry.rows is not None:
            self._hits += 1
            return held
        self._misses += 1
        try:
            with calling(self._caller(entry.stretch)):
                while entry.rows is None:  # as it is behind a flight of ``hold_common`` without room
                    await self._flights.run(entry, partial(self._load, entry, is_common=is_common))
                    if is_common:
                        break
        except BaseException:
            if not held.is_by_pass:  # which gives its room back itself, once the piece is in line for it again
                held.release()
            raise
        return held

    def _release(self, entry: EpisodeEntry, by_pass: bool) -> None:
        """One holder less. The last one gives the clips back to the byte cache's own order of eviction."""
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

    def _revive(self, stretch: Stretch) -> EpisodeEntry | None:
        """An entry made of what is kept, if that is everything."""
        self._look_again(stretch)
        plan, rows = self._plans.get_nowait(stretch), self._kept_rows(self._rows_key(stretch))
        if plan is None or rows is None or not _is_of(plan.value, rows):
            return None
        leases: dict[str, Lease] = {}
        for camera, clip in plan.value.items():
            lease = self._clips.try_lease(clip.url, clip.plan.start, clip.plan.stop, header=clip.plan.header)
            if lease is None:
                _release(leases)
                return None
            leases[camera] = lease
        entry = self._new_entry(stretch)
        entry.size_bytes = _clip_bytes(plan.value)
        self._room.change(brief_bytes=entry.size_bytes)
        self._fill(entry, rows, plan.value, leases)
        return entry

    async def _load(self, entry: EpisodeEntry, *, is_common: bool = False) -> None:
        """Fetch what isn't there, again where a file was replaced between its index and its clip."""
        while entry.rows is None:
            generation = self._clip_decoders.generation
            try:
                fetched = await (self._fetch_common(entry.stretch) if is_common else self._fetch(entry))
                if fetched is None:
                    return
                rows, planned, leases = fetched
            except ObjectChanged:
                raise
            except AsyncFetchError:
                if generation == self._clip_decoders.generation:
                    raise
                continue
            try:
                late = [camera for camera, clip in planned.items() if clip.starts_too_late(leases[camera].buffer)]
                for camera in late:
                    self._indexes.start_earlier(camera, planned[camera])
                    self._plans.clear()
                # A flight that was given up may end well all the same, beside the one that came after it.
                if not late and generation == self._clip_decoders.generation and entry.rows is None:
                    self._fill(entry, rows, planned, leases)
                    entry.is_common = is_common
                    return
            except BaseException:  # bytes that are no video
                _release(leases)
                raise
            _release(leases)

    async def _fetch(self, entry: EpisodeEntry) -> _EpisodeParts:
        """Plan the stretch, then fetch all of it at once. PlanChange where it needs more room than it has."""
        meter = running_meter()

        async def lease(clip: PlannedClip) -> Lease:
            plan = clip.plan
            since = time.perf_counter()
            async with self._fetching_clips.permit():
                if meter is not None:
                    meter.add(Cause.LIMIT, time.perf_counter() - since)
                return await self._clips.acquire(clip.url, plan.start, plan.stop, header=plan.header)

        planned = await self._plan(entry.stretch)
        if entry.size_bytes is not None and _clip_bytes(planned) > entry.size_bytes:
            raise PlanChange
        return await self._all_of(entry.stretch, planned, lease)

    async def _fetch_common(self, stretch: Stretch) -> _EpisodeParts | None:
        """See ``_fetch`` and ``hold_common``."""
        rank = self._rank
        assert rank is not None

        async def lease(clip: PlannedClip) -> Lease | None:
            plan = clip.plan
            return await rank.lease(clip.url, plan.start, plan.stop, header=plan.header)

        planned = await self._plan(stretch)
        fetched = await self._all_of(stretch, planned, lease)
        if len(fetched.leases) < len(planned):
            _release(fetched.leases)
            return None
        return fetched

    async def _all_of(
        self,
        stretch: Stretch,
        planned: Mapping[str, PlannedClip],
        lease: Callable[[PlannedClip], Awaitable[Lease | None]],
    ) -> _EpisodeParts:
        """Return the rows and the leases of those clips that ``lease`` gives one for."""
        found: list[tuple[EpisodeRows, Mapping[str, PlannedClip]]] = []
        leases: dict[str, Lease] = {}

        async def add_rows() -> None:
            rows = await self._rows(self._rows_key(stretch))
            found.append((rows, await self._by_rows(stretch, planned, rows)))

        async def add(camera: str, clip: PlannedClip) -> None:
            given = await self._watch(lease(clip))
            if given is not None:
                leases[camera] = given

        try:
            await gather(add_rows, *(partial(add, camera, clip) for camera, clip in planned.items()))
        except BaseException:
            _release(leases)
            raise
        return _EpisodeParts(*found[0], leases)

    async def _by_rows(
        self, stretch: Stretch, guessed: Mapping[str, PlannedClip], rows: EpisodeRows
    ) -> Mapping[str, PlannedClip]:
        """Return the plan that the rows' own times make; PlanChange where it is of other bytes."""
        planned = guessed
        while not _is_of(planned, rows):
            self._plans.clear(stretch.__eq__)
            planned = (await self._plans.get(stretch, partial(self._make_plan, stretch, rows))).value
        if any(_bytes_of(clip) != _bytes_of(guessed[camera]) for camera, clip in planned.items()):
            self._rows_come_first = True
            raise PlanChange
        return planned

    def _check_size(self, stretch: Stretch, needed_bytes: int) -> None:
        """CacheError where clips don't fit in the byte cache."""
        memory = self._memory
        if needed_bytes > memory.clips_bytes:
            name = stretch.name(self._episodes[stretch.episode].length)
            raise CacheError(
                f"the clips of {name} take {needed_bytes} bytes, but max_bytes={memory.max_bytes} leaves "
                f"{memory.clips_bytes} for clips: set StreamConfig(max_bytes=...) to at least "
                f"{memory.max_bytes_for_clips(needed_bytes)}"
            )

    async def _plan(self, stretch: Stretch) -> Mapping[str, PlannedClip]:
        return (await self._plans.get(stretch, partial(self._make_plan, stretch))).value

    async def _make_plan(
        self, stretch: Stretch, rows: EpisodeRows | None = None
    ) -> _KeptPart[Mapping[str, PlannedClip]]:
        episode = self._episodes[stretch.episode]
        planned: dict[str, PlannedClip] = {}
        if rows is None:
            rows = self._kept_rows(self._rows_key(stretch))
        if rows is None and (self._rows_come_first or any(span.contradiction for span in episode.videos.values())):
            rows = await self._rows(self._rows_key(stretch))

        async def plan_clip(camera: str) -> None:
            clip = await self._watch(self._indexes.plan(episode, stretch, camera, fps=self._fps, rows=rows))
            self._metadata.found_picture(camera, (clip.plan.height, clip.plan.width), redact_url(clip.url))
            planned[camera] = clip

        async with self._planning.permit():
            with calling(self._small_reads):
                await gather(*(partial(plan_clip, camera) for camera in episode.videos))
        in_order = {camera: planned[camera] for camera in episode.videos}
        return _KeptPart(in_order, OBJECTS_BYTES + sum(clip.plan_nbytes for clip in planned.values()))

    def _rows_key(self, stretch: Stretch) -> Stretch | int:
        """Key of its rows: those of an episode are there once, but for pictures in the table."""
        return stretch if self.rows.picture_keys else stretch.episode

    def _kept_rows(self, key: Stretch | int) -> EpisodeRows | None:
        """Return rows that are kept or held."""
        kept = self._tables.get_nowait(key)
        return self._held_rows.get(key) if kept is None else kept.value

    async def _rows(self, key: Stretch | int) -> EpisodeRows:
        rows = self._kept_rows(key)
        if rows is None:
            rows = (await self._tables.get(key, partial(self._read_rows, key))).value
        return rows

    async def _read_rows(self, key: Stretch | int) -> _KeptPart[EpisodeRows]:
        generation = self._clip_decoders.generation
        if isinstance(key, int):
            with calling(self._small_reads):
                rows = await self._watch(self.rows.rows(self._episodes[key], pictures=False))
        elif key.stop - key.start == self._episodes[key.episode].length:
            rows = await self._watch(self.rows.rows(self._episodes[key.episode]))
        else:
            rows = await self._rows_with_pictures(key)
        if generation == self._clip_decoders.generation:
            self._held_rows[key] = rows
        return _KeptPart(rows, OBJECTS_BYTES + rows.nbytes)

    async def _rows_with_pictures(self, stretch: Stretch) -> EpisodeRows:
        episode = self._episodes[stretch.episode]
        parts: dict[str, PicturePart] = {}

        async def add(key: str) -> None:
            parts[key] = await self._watch(self.rows.pictures(episode, key, *stretch.span(key, episode.length)))

        numbers, *_ = await gather(
            partial(self._rows, stretch.episode), *(partial(add, key) for key in self.rows.picture_keys)
        )
        assert numbers is not None
        return numbers.with_pictures(parts)

    async def _watch(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except ObjectChanged:
            self._forget()
            raise

    def _forget(self) -> None:
        """Plan everything anew. Readers of a held stretch go on with its bytes."""
        self._clip_decoders.replace_all()
        self._indexes.clear()
        self.rows.clear()
        self._plans.clear()
        self._tables.clear()
        self._held_rows.clear()
        self._held = {stretch: entry for stretch, entry in self._held.items() if entry.rows is None}

    def _fill(
        self,
        entry: EpisodeEntry,
        rows: EpisodeRows,
        planned: Mapping[str, PlannedClip],
        leases: Mapping[str, Lease],
    ) -> None:
        clips = {
            camera: clip.over(
                leases[camera].buffer,
                name=f"{camera} of {entry.stretch.name(entry.episode.length)} in {redact_url(clip.url)}",
                depth=self._depth[camera],
            )
            for camera, clip in planned.items()
        }
        entry.generation, entry.rows, entry.leases, entry.clips = self._clip_decoders.generation, rows, leases, clips

    def _look_again(self, stretch: Stretch) -> None:
        """Forget the plans of an episode that is doubted: its video may have been replaced, which an index tells."""
        if self._clip_decoders.take_doubt(stretch.episode):
            self._plans.clear(lambda planned: planned.episode == stretch.episode)
            for span in self._episodes[stretch.episode].videos.values():
                self._indexes.forget(span.url)

    def statistics(self) -> EpisodeCacheStatistics:
        """A snapshot."""
        kept_bytes = self._plans.nbytes + self._tables.nbytes
        return EpisodeCacheStatistics(self._hits, self._misses, len(self._held), len(self._tables), kept_bytes)


def _is_of(planned: Mapping[str, PlannedClip], rows: EpisodeRows) -> bool:
    """Return whether the frames are those that the rows' times say."""
    return rows.own_seconds is None or all(clip.is_by_rows for clip in planned.values())


def _bytes_of(clip: PlannedClip) -> tuple[int, int, bytes]:
    """Return what is in the clip's memory: bytes of its file behind a header."""
    return clip.plan.start, clip.plan.stop, clip.plan.header


def _clip_bytes(planned: Mapping[str, PlannedClip]) -> int:
    return sum(clip.nbytes for clip in planned.values())


def _release(leases: Mapping[str, Lease]) -> None:
    for lease in leases.values():
        lease.release()
