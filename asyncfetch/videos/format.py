"""A collection of videos as a stream reads it: in clips, with their audio, and what else each entry has."""

from __future__ import annotations

import hashlib
import logging
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from asyncfetch.config.checks import check_keys
from asyncfetch.errors import AsyncFetchError, DatasetError, DecodeError, NotFound
from asyncfetch.fetch.batch import for_each
from asyncfetch.formats.protocol import Format
from asyncfetch.formats.reader import StretchReader
from asyncfetch.formats.stretch import Stretch
from asyncfetch.runtime.fork import LoopGuard
from asyncfetch.runtime.threads import run_sync
from asyncfetch.videos.cache import WHOLE, HeldWindows, VideoCache
from asyncfetch.videos.index import MEASURED_AT_ONCE
from asyncfetch.videos.samples import WindowSamples
from asyncfetch.videos.whole import WholeVideo
from asyncfetch.videos.windows import span_lengths

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from numpy.typing import NDArray

    from asyncfetch.config import StreamConfig
    from asyncfetch.decode import PictureSize
    from asyncfetch.resources import Engine
    from asyncfetch.videos.collection import Videos
    from asyncfetch.videos.entry_table import Entries
    from asyncfetch.videos.windows import ClipSampler

_log = logging.getLogger("asyncfetch")

NOMINAL_FPS = 30.0
"""Frames a second by which windows of frames are cut into segments: it decides nothing but how many are held as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideosFormat(Format):
    """A collection, and how it is read; ``Stream`` documents the fields."""

    videos: Videos
    clips: ClipSampler
    seed: int = 0
    size: PictureSize | None = None
    audio_rate: int | None = None
    features: tuple[str, ...] | None = None
    """Columns and files beside the videos that come along; None for all."""

    is_open = False

    @override
    def reader(self) -> None:
        pass

    @asynccontextmanager
    @override
    async def opened(self, engine: Engine | None, config: StreamConfig) -> AsyncIterator[OpenVideos]:
        assert engine is not None
        opened = OpenVideos(self, await self.videos.open(engine), engine, config)
        await opened.measure()
        yield opened
        opened.reader.is_closed = True

    def __repr__(self) -> str:
        return repr(self.videos)


class OpenVideos:
    """A collection that is open for a stream. Its episodes are its entries, and their frames are windows."""

    group_frames = 1
    stats = None
    file_bytes = None

    def __init__(self, reading: VideosFormat, entries: Entries, engine: Engine, config: StreamConfig) -> None:
        self.entries, self.config, self.url = entries, config, entries.url
        self._clips = reading.clips
        self._run = engine.run
        chosen = reading.features
        if chosen is not None:
            check_keys(chosen, [*entries.own, *entries.members], "features", self.url)
        columns = [name for name in entries.own if chosen is None or name in chosen]
        members = tuple(name for name in entries.members if chosen is None or name in chosen)
        self._cache = VideoCache(
            engine,
            engine.join(config.pool_segments),
            entries=entries,
            clips=reading.clips,
            seed=reading.seed,
            audio=reading.audio_rate is not None,
            members=members,
            backend=config.decoder,
            size=reading.size,
        )
        guard = LoopGuard("this collection of videos")
        self.reader: StretchReader[HeldWindows] = StretchReader(
            self.url, engine, self._cache, config=config, guard=guard
        )
        self._maker = partial(
            WindowSamples,
            entries,
            self._cache,
            num_frames=reading.clips.num_frames,
            size=None if reading.size is None else (reading.size.height, reading.size.width),
            audio_rate=reading.audio_rate,
            columns=columns,
            members=members,
        )
        self._counts: NDArray[np.int64] = np.zeros(0, np.int64)
        said = f"{entries.fingerprint} {reading.clips!r} {reading.seed if self.draws_anew else 0}"
        self.fingerprint = hashlib.sha256(said.encode()).hexdigest()

    async def measure(self) -> None:
        """Find out how many windows each entry gives: from the table, or else from the videos' indexes.

        And how large pictures are, about, for bounds on memory: by the first video.
        """
        largest = self.entries.largest_picture()
        if largest is not None:
            self._cache.largest_picture = largest
        else:
            with suppress(AsyncFetchError):  # it comes again, at its place in the order
                await self._cache.video(0)
        if not self._clips.depends_on:
            self._counts = np.broadcast_to(np.int64(self._clips.count()), len(self.entries))
            return
        seconds, frames = await run_sync(self.entries.lengths)
        unknown = np.flatnonzero(np.isnan(seconds) | np.isnan(frames))
        if len(unknown):
            _log.info("%s: reading the indexes of %d videos, to know how many clips each gives", self.url, len(unknown))

        broken = set[int]()

        async def measure_one(entry: int) -> None:
            try:
                frames[entry], seconds[entry] = await self._measured(entry)
            except (DatasetError, DecodeError, NotFound):
                if self.config.on_error == "raise":
                    raise
                seconds[entry] = frames[entry] = 0
                broken.add(entry)

        await for_each(unknown.tolist(), measure_one, workers=MEASURED_AT_ONCE)
        self._counts = self._clips.count(seconds=seconds, frames=frames)
        self._counts[sorted(broken)] = 1  # which a pass finds to be bad, and names

    async def _measured(self, entry: int) -> tuple[int, float]:
        """Return frames and seconds of an entry by its video's index, or by the whole video where it can't be cut."""
        file = await self._cache.video(entry)
        if file.tracks is not None:
            _, times, end_seconds = file.tracks.video.shown()
        else:
            with await self.reader.hold(Stretch(entry, 0, 1)) as held:
                assert isinstance(held.beside, WholeVideo)
                whole = await self._run(partial(held.beside.frames, held.data(WHOLE), held.entry.name))
            self._cache.note_picture(whole.height, whole.width)
            times, end_seconds = whole.seconds, whole.end_seconds
        return span_lengths(times, end_seconds, *self.entries.span(entry))

    @property
    def frames_per_second(self) -> float | None:
        """Windows of a second, if they follow each other: these are held as one. None if each is held by itself."""
        clips = self._clips
        if clips.pick == "all":
            return (clips.fps or NOMINAL_FPS / (clips.step or 1)) / clips.num_frames
        return None if clips.every_seconds is None else 1 / clips.every_seconds

    @property
    def draws_anew(self) -> bool:
        """True if windows are random: each epoch has others."""
        return self._clips.pick == "random"

    def episodes(self, chosen: Sequence[int] | None) -> Sequence[int]:
        """Return the numbers of all entries, or of those chosen. EpisodeNotFound where one isn't there."""
        return range(len(self.entries)) if chosen is None else self.entries.positions(chosen).tolist()

    def lengths(self, chosen: Sequence[int] | None) -> NDArray[np.int64]:
        """Return how many windows each of them gives."""
        return self._counts if chosen is None else self._counts[self.entries.positions(chosen)]

    def files(self, chosen: Sequence[int] | None) -> dict[str, NDArray[np.int64]]:
        """Return the number of the file that each one's video lies in."""
        files = self.entries.files
        return {"video": files if chosen is None else files[self.entries.positions(chosen)]}

    def urls(self, episode: int) -> list[str]:
        """Return the url of an entry's video."""
        return [self.entries.place(episode).url]

    def sample_maker(self) -> WindowSamples:
        """Return a new maker of samples of its windows."""
        return self._maker()
