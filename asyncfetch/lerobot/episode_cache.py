"""Stretches of episodes in memory: all cameras and the rows of one at once, each byte fetched once.

First comes the stretch's plan, made from the indexes of the videos, and at the same time the footer of the table: they
say where everything lies. Then all of it is asked for at once, so that a stretch takes two requests one after the
other. In a pass the clips don't wait for the footer, which may be long.

Which frames are the episode's, its rows say by their times. They mostly are at the dataset's rate, so that is what a
plan goes by until they have come. Where that turns out to be wrong, the stretch is planned again by its rows; those
that come after it are planned by theirs at once, a request later.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from typing_extensions import override

from asyncfetch.errors import DatasetError, FormatError, redact_url
from asyncfetch.fetch.limiter import calling
from asyncfetch.formats.clips import PlannedClip, fetch_moov, parsed_moov
from asyncfetch.formats.held import HeldStretch
from asyncfetch.formats.stretch_cache import OBJECTS_BYTES, KeptPart, KeptPlan, PlanChange, StretchCache, kept_plan
from asyncfetch.lerobot.frame_times import find_frames
from asyncfetch.lerobot.info import DepthUnit, depth_scale
from asyncfetch.lerobot.listing import list_tables_of
from asyncfetch.lerobot.rows import EpisodeRows, RowCache, RowReader
from asyncfetch.runtime.concurrently import gather

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from asyncfetch.config import StreamConfig
    from asyncfetch.decode import Clip, FrameDecoder, PictureSize
    from asyncfetch.fetch import RangeReader
    from asyncfetch.formats.held import StretchEntry
    from asyncfetch.formats.stretch import Stretch
    from asyncfetch.lerobot.episode_table import Episode
    from asyncfetch.lerobot.metadata import Metadata
    from asyncfetch.lerobot.rows import PicturePart
    from asyncfetch.media import Mp4Index
    from asyncfetch.resources import Engine
    from asyncfetch.runtime.concurrently import RunSync


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeClip(PlannedClip):
    """The clip of an episode's frames."""

    name: str = ""
    """Its name in messages."""
    is_by_rows: bool = False
    """True where the rows' own times said which frames are the episode's, False where the rate of frames did."""


@dataclass(frozen=True, slots=True)
class VideoFile:
    """A video's index."""

    index: Mp4Index
    size_bytes: int

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.index.nbytes


async def fetch_index(reader: RangeReader, url: str, episodes: int, frames: int, *, run: RunSync) -> VideoFile:
    """The index of a file that has frames of so many episodes, and so many frames; 0 where that isn't known.

    It is asked for in one go where its length is known. FormatError where the file isn't an MP4 that can be read.
    """
    info, _, moov = await fetch_moov(reader, url, episodes, frames)
    return VideoFile(await parsed_moov(moov, url, run), info.size)


def cut_clip(
    file: VideoFile,
    episode: Episode,
    stretch: Stretch,
    camera: str,
    rows: EpisodeRows | None,
    *,
    fps: float,
    tolerance_seconds: float,
    earlier: int | None = None,
) -> EpisodeClip:
    """One camera's clip of a stretch: by its rows, or, as long as they haven't come, as if they were at that rate.

    ``earlier``: see Mp4Index.clip.

    Raises:
        FormatError: The file is cut off.
        DatasetError: The metadata gives a place that no file has, or that another episode has, too.
    """
    span = episode.videos[camera]
    start, stop = stretch.span(camera, span.num_frames)
    frames = find_frames(
        file.index,
        span,
        None if rows is None else rows.own_seconds,
        episode=episode.index,
        fps=fps,
        tolerance_seconds=tolerance_seconds,
        start=start,
        stop=stop,
    )
    plan = file.index.clip(frames.samples, earlier=earlier)
    if plan.stop > file.size_bytes:
        message = f"{redact_url(span.url)}: truncated: it has {file.size_bytes} bytes, but by its index the frames of "
        message += f"{stretch.name(episode.length)} lie in bytes [{plan.start}, {plan.stop})"
        raise FormatError(f"{message}; copy or record it again")
    name = f"{camera} of {stretch.name(episode.length)} in {redact_url(span.url)}"
    return EpisodeClip(span.url, plan, start, frames.misplaced, earlier, name=name, is_by_rows=rows is not None)


class HeldEpisode(HeldStretch[EpisodeRows]):
    """A stretch of an episode, or all of it, that can be read until it is released.

    ``rows`` and ``frames`` may be used from any thread; frames are numbered in the episode.
    """

    episode: Episode
    """The episode as the metadata has it."""

    @property
    def rows(self) -> EpisodeRows:
        """The table rows of its episode, by feature; pictures, for frames that the stretch's samples need."""
        return self.beside

    @contextmanager
    @override
    def decoding(self, camera: str, frames: Sequence[int], reader: int) -> Iterator[FrameDecoder]:
        """The frames must be of the stretch."""
        length = self.episode.length
        start, stop = self.stretch.span(camera, length)
        for frame in frames:
            if not start <= frame < stop and 0 <= frame < length:
                name = self.stretch.name(length)
                raise AssertionError(f"{name}: frame {frame} of {camera}, of which it holds [{start}, {stop})")
        with super().decoding(camera, frames, reader) as decoder:
            yield decoder


class EpisodeCache(StretchCache[EpisodeClip, EpisodeRows, HeldEpisode]):
    """Fetches stretches of a dataset's episodes, one request per (stretch, camera), over a byte cache. Loop-bound.

    ``number`` is the dataset's in the engine. Leaving that ends the fetches, and waiters get ClosedError.
    """

    def __init__(
        self,
        engine: Engine,
        number: int,
        metadata: Metadata,
        config: StreamConfig,
        *,
        depth_unit: DepthUnit,
        size: PictureSize | None,
    ) -> None:
        super().__init__(engine, number, backend=config.decoder, size=size)
        self.rows = RowReader(
            engine.reader,
            metadata,
            kept=engine.shared(RowCache, engine.memory.shared_rows_bytes),
            number=number,
            list_tables=list_tables_of(engine),
            run=engine.run,
        )
        """Reads the rows of its episodes."""
        self._reader, self._run, self._indexes = engine.reader, engine.run, engine.indexes
        self._tolerance_seconds = config.tolerance_seconds
        self._earlier: dict[str, int] = {}  # by camera: see Mp4Index.clip
        self._episodes = metadata.episodes
        self._fps = metadata.info.fps
        self._metadata = metadata
        self._depth = {key: depth_scale(feature, depth_unit) for key, feature in metadata.features.items()}
        self._planning, self._locating = engine.planning, engine.locating
        self._held_rows: WeakValueDictionary[Stretch | int, EpisodeRows] = WeakValueDictionary()
        self._rows_come_first = False  # once clips were fetched that the rows didn't ask for

    @override
    def name(self, stretch: Stretch) -> str:
        return stretch.name(self._episodes[stretch.episode].length)

    def _held_by(self, entry: StretchEntry[EpisodeRows], *, by_pass: bool = False) -> HeldEpisode:
        episode = self._episodes[entry.stretch.episode]
        held = HeldEpisode(entry, self._clip_decoders, self._release, by_pass=by_pass)
        held.episode = episode
        return held

    async def missing_frames(self, stretch: Stretch, *, by_rows: bool) -> Mapping[str, int]:
        """Return how many frames the video of each camera lacks: by the times of its rows, or at the rate of frames."""
        rows = await self._rows(self._rows_key(stretch)) if by_rows else None
        planned = (await self._make_plan(stretch, rows)).value
        return {camera: int((clip.plan.frame_index < 0).sum()) for camera, clip in planned.items()}

    async def locate_beside(self, stretch: Stretch) -> None:
        """Fetch the footer of the stretch's table where needed: beside ``clip_bytes``, so that ``hold`` needn't."""
        episode = self._episodes[stretch.episode]
        if episode.length and self._kept_rows(self._rows_key(stretch)) is None:
            async with self._locating.permit():
                with calling(self._small_reads):
                    await self._watch(self.rows.file(episode))

    async def _fetch_beside(
        self, stretch: Stretch, planned: Mapping[str, EpisodeClip]
    ) -> tuple[EpisodeRows, Mapping[str, EpisodeClip]]:
        rows = await self._rows(self._rows_key(stretch))
        return rows, await self._by_rows(stretch, planned, rows)

    def _kept_beside(self, stretch: Stretch, planned: Mapping[str, EpisodeClip]) -> EpisodeRows | None:
        rows = self._kept_rows(self._rows_key(stretch))
        return rows if rows is not None and _is_of(planned, rows) else None

    async def _by_rows(
        self, stretch: Stretch, guessed: Mapping[str, EpisodeClip], rows: EpisodeRows
    ) -> Mapping[str, EpisodeClip]:
        """Return the plan that the rows' own times make; PlanChange where it is of other bytes."""
        planned = guessed
        while not _is_of(planned, rows):
            self._plans.clear(stretch.__eq__)
            planned = (await self._plans.get(stretch, partial(self._make_plan, stretch, rows))).value
        if any(_bytes_of(clip) != _bytes_of(guessed[camera]) for camera, clip in planned.items()):
            self._rows_come_first = True
            raise PlanChange
        return planned

    async def _make_plan(self, stretch: Stretch, rows: EpisodeRows | None = None) -> KeptPlan[EpisodeClip]:
        episode = self._episodes[stretch.episode]
        if rows is None:
            rows = self._kept_rows(self._rows_key(stretch))
        if rows is None and (self._rows_come_first or any(span.contradiction for span in episode.videos.values())):
            rows = await self._rows(self._rows_key(stretch))
        plans = [partial(self._plan_clip, episode, stretch, camera, rows) for camera in episode.videos]
        async with self._planning.permit():
            with calling(self._small_reads):
                clips = await gather(*plans)
        return kept_plan(dict(zip(episode.videos, clips, strict=True)))

    async def _plan_clip(
        self, episode: Episode, stretch: Stretch, camera: str, rows: EpisodeRows | None
    ) -> EpisodeClip:
        url = episode.videos[camera].url

        async def fetch() -> VideoFile:
            shared = self._episodes.sharing_video_file(episode.index, camera)
            return await fetch_index(self._reader, url, *shared, run=self._run)

        file: VideoFile = await self._watch(self._indexes.get(url, fetch))
        rules = {"fps": self._fps, "tolerance_seconds": self._tolerance_seconds}
        try:
            clip = cut_clip(file, episode, stretch, camera, rows, **rules, earlier=self._earlier.get(camera))
        except DatasetError:
            self._forget_indexes({url})  # the next caller reads the file as it is then
            raise
        self._metadata.found_picture(camera, (clip.plan.height, clip.plan.width), url)
        return clip

    def _rows_key(self, stretch: Stretch) -> Stretch | int:
        """Key of its rows: those of an episode are there once, but for pictures in the table."""
        return stretch if self.rows.picture_keys else stretch.episode

    def _kept_rows(self, key: Stretch | int) -> EpisodeRows | None:
        """Return rows that are kept or held."""
        kept = self._kept.get_nowait(key)
        return self._held_rows.get(key) if kept is None else kept.value

    async def _rows(self, key: Stretch | int) -> EpisodeRows:
        rows = self._kept_rows(key)
        return (await self._kept.get(key, partial(self._read_rows, key))).value if rows is None else rows

    async def _read_rows(self, key: Stretch | int) -> KeptPart[EpisodeRows]:
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
        return KeptPart(rows, OBJECTS_BYTES + rows.nbytes)

    async def _rows_with_pictures(self, stretch: Stretch) -> EpisodeRows:
        episode = self._episodes[stretch.episode]
        keys = self.rows.picture_keys

        async def read(key: str) -> PicturePart:
            return await self._watch(self.rows.pictures(episode, key, *stretch.span(key, episode.length)))

        found: list[Any] = await gather(partial(self._rows, stretch.episode), *(partial(read, key) for key in keys))
        numbers: EpisodeRows = found[0]
        return numbers.with_pictures(dict(zip(keys, found[1:], strict=True)))

    def _over(self, stretch: Stretch, name: str, planned: EpisodeClip, buffer: memoryview) -> Clip:
        return planned.over(buffer, name=planned.name, depth=self._depth[name])

    def _start_earlier(self, name: str, planned: EpisodeClip) -> None:
        # Where they do so already, for others that were under way with it did, they stay as they are.
        if self._earlier.get(name) == planned.earlier:
            self._earlier[name] = 0 if planned.earlier is None else planned.earlier + 1

    def _forget_files(self, episode: int | None) -> None:
        if episode is None:
            self._indexes.clear()
            self.rows.clear()
            self._kept.clear()
            self._held_rows.clear()
        else:
            self._forget_indexes({span.url for span in self._episodes[episode].videos.values()})

    def _forget_indexes(self, urls: set[str]) -> None:
        self._indexes.clear(lambda kept: kept in urls)


def _is_of(planned: Mapping[str, EpisodeClip], rows: EpisodeRows) -> bool:
    """Return whether the frames are those that the rows' times say."""
    return rows.own_seconds is None or all(clip.is_by_rows for clip in planned.values())


def _bytes_of(clip: EpisodeClip) -> tuple[int, int, bytes]:
    """Return what is in the clip's memory: bytes of its file behind a header."""
    return clip.start, clip.stop, clip.header
