"""Stretches of windows in memory: the clips, the audio and the files beside a video that some of its windows need."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from asyncfetch.errors import FrameMissing, redact_url
from asyncfetch.fetch.limiter import calling
from asyncfetch.formats.clips import PlannedRange
from asyncfetch.formats.held import HeldStretch
from asyncfetch.formats.stretch_cache import EpisodeCacheStatistics, KeptPlan, PlanWith, StretchCache, kept_plan
from asyncfetch.observe.report import Words
from asyncfetch.runtime.concurrently import gather
from asyncfetch.tables.packed import packed_part
from asyncfetch.videos.index import read_video
from asyncfetch.videos.plan import WindowClip, WindowTimes, plan_audio, plan_clips
from asyncfetch.videos.whole import WholeVideo
from asyncfetch.videos.windows import draw, frames_within

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from asyncfetch.config import DecoderBackend
    from asyncfetch.decode import Clip, PictureSize
    from asyncfetch.formats.stretch import Stretch
    from asyncfetch.media import Mp4Index
    from asyncfetch.resources import Engine
    from asyncfetch.tables.packed import Packed
    from asyncfetch.videos.entry_table import Entries, Place
    from asyncfetch.videos.index import IndexedVideo
    from asyncfetch.videos.windows import ClipSampler

_log = logging.getLogger("asyncfetch")

WORDS = Words(
    entry="entry",
    entries="entries",
    samples="clips",
    ranges="byte ranges",
    fewer_requests="fewer requests: by an index (asyncfetch index), and fewer files beside the videos (features=)",
    less_decoding="store smaller pictures, or shorter groups of pictures, or use more cores",
    smaller_segments="store it with shorter groups of pictures",
)

Planned = PlannedRange | WindowClip
HeldWindows = HeldStretch[WindowTimes | WholeVideo]
WindowPlan = PlanWith[Planned, WindowTimes | WholeVideo]
"""The bytes of a stretch, by name: clips of the video, audio beside them, files beside the video."""

WHOLE = "whole"
"""The name of the bytes of a video that is read whole."""
MAX_EARLIER = 4096
"""Videos that are remembered to begin with a recovery point in place of a key frame."""
MAX_NAMED = 8
"""Videos and parts of files read whole that are named in the log, each once."""


class VideoCacheStatistics(EpisodeCacheStatistics):
    """A snapshot of a VideoCache."""

    __slots__ = ()
    words = WORDS


class VideoCache(StretchCache[Planned, "WindowTimes | WholeVideo", HeldWindows]):
    """Fetches windows of a collection's videos. Loop-bound.

    A stretch is neighbouring windows of one entry, by their numbers. Its clips have the frames of all of them. Windows
    have the frames that ``clips`` says, drawn by ``seed``; audio, or not; and those files beside the videos that are
    ``members``.
    """

    statistics_type = VideoCacheStatistics

    def __init__(
        self,
        engine: Engine,
        number: int,
        *,
        entries: Entries,
        clips: ClipSampler,
        seed: int,
        audio: bool,
        members: tuple[str, ...],
        backend: DecoderBackend,
        size: PictureSize | None,
    ) -> None:
        super().__init__(engine, number, backend=backend, size=size)
        self.backend: DecoderBackend = backend
        self.size = size
        self._entries = entries
        self._sampler = clips
        self._seed = seed
        self._audio = audio
        self._members = members
        self._reader, self._run = engine.reader, engine.run
        self._indexes, self._planning = engine.indexes, engine.planning
        self._earlier: dict[tuple[str, int], int] = {}  # by url and offset: see Mp4Index.clip
        self.largest_picture: tuple[int, int] = (0, 0)
        """Height and width of the largest pictures seen so far."""
        self._named: set[Place | Packed] = set()
        self._packed: set[Packed] = set()

    @override
    def name(self, stretch: Stretch) -> str:
        windows = f"clip {stretch.start}"
        if stretch.stop > stretch.start + 1:
            windows = f"clips [{stretch.start}, {stretch.stop})"
        return f"{windows} of entry {stretch.episode}, {redact_url(self._entries.place(stretch.episode).url)}"

    async def video(self, entry: int) -> IndexedVideo:
        """The index of an entry's video."""
        place = self._entries.place(entry)

        async def read() -> IndexedVideo:
            async with self._planning.permit():
                with calling(self._small_reads):
                    return await read_video(self._reader, place, self._run, audio=self._audio)

        file: IndexedVideo = await self._watch(self._indexes.get((place, self._audio), read))
        if file.tracks is not None:
            index = file.tracks.video
            self.note_picture(index.height, index.width)
        return file

    async def _make_plan(self, stretch: Stretch) -> KeptPlan[Planned]:
        place = self._entries.place(stretch.episode)
        file = await self.video(stretch.episode)
        self._note_packed(place)
        if file.whole is not None:
            plan = self._plan_whole(place, file.size_bytes, file.whole)
        else:
            plan = await self._run(partial(self._plan_windows, stretch, place, file))
        await gather(*(partial(self._add_member, plan, stretch.episode, name) for name in self._members))
        return kept_plan(plan)

    def _plan_whole(self, place: Place, size_bytes: int, whole: WholeVideo) -> WindowPlan:
        plan = WindowPlan(whole)
        plan[WHOLE] = PlannedRange(place.url, place.offset, place.offset + size_bytes)
        self._whole += 1
        self._whole_bytes += size_bytes
        message = "%s is read whole, all of its %d bytes for each clip, because it can't be cut: %s"
        self._warn_of(place, message, redact_url(place.url), size_bytes, whole.reason)
        return plan

    def _note_packed(self, place: Place) -> None:
        """Note that a video lies in a part of a file that is read whole, and what that costs."""
        packed = packed_part(place.url)
        if packed is None or packed.all_rows in self._packed:
            return
        self._packed.add(packed.all_rows)
        nbytes = packed.stop - packed.start
        self._whole += 1
        self._whole_bytes += nbytes
        message = "%s is compressed (%s): %d bytes of it are read whole and unpacked for a clip, and kept on disk for "
        message += "others as long as there is room: %s"
        self._warn_of(packed.all_rows, message, redact_url(packed.url), packed.codec, nbytes, packed.remedy)

    def _warn_of(self, part: Place | Packed, message: str, *values: object) -> None:
        if part not in self._named and len(self._named) < MAX_NAMED:
            self._named.add(part)
            _log.warning(message, *values)

    def _plan_windows(self, stretch: Stretch, place: Place, file: IndexedVideo) -> WindowPlan:
        """Return the plan; slow: it is called in a thread."""
        assert file.tracks is not None
        index, audio = file.tracks
        file.check_complete(place.url)
        found, ends = self._frames(stretch, index)
        samples, seconds, _ = index.shown()
        chosen = samples[found]
        if (chosen < 0).any():
            at = float(seconds[found][chosen < 0][0])
            raise FrameMissing(f"{self.name(stretch)}: two frames are shown at {at:.6f} s, and can't be told apart")
        earlier = self._earlier.get((place.url, place.offset))
        clips = {f"video {n}": each for n, each in enumerate(plan_clips(index, chosen.ravel(), place, earlier=earlier))}
        sound, ranges = None, dict[str, PlannedRange]()
        if audio is not None:
            spans = [(float(seconds[frames].min()), end) for frames, end in zip(found, ends, strict=True)]
            sound, ranges = plan_audio(audio, spans, clips, place)
        plan = WindowPlan(WindowTimes(seconds[found], None if sound is None else tuple(sound)))
        plan.update(clips)
        plan.update(ranges)
        return plan

    def note_picture(self, height: int, width: int) -> None:
        """Note the size of a video's pictures."""
        self.largest_picture = max(self.largest_picture, (height, width), key=np.prod)

    def _frames(self, stretch: Stretch, index: Mp4Index) -> tuple[NDArray[np.int64], list[float]]:
        """Return the places among the frames shown of each window's frames, and when its latest one ends."""
        _, seconds, end_seconds = index.shown()
        windows = [
            self.window_of(stretch, number, seconds, end_seconds) for number in range(stretch.start, stretch.stop)
        ]
        return np.stack([frames for frames, _ in windows]), [end for _, end in windows]

    def window_of(
        self, stretch: Stretch, number: int, seconds: NDArray[np.float64], end_seconds: float
    ) -> tuple[NDArray[np.int64], float]:
        """Return the places of a window's frames among all frames of a video, and when the latest of them ends.

        ``stretch`` has the window; ``seconds`` are when each frame of the video is shown, ``end_seconds`` when the last
        one ends.
        """
        first, stop, span_end = frames_within(seconds, end_seconds, *self._entries.span(stretch.episode))
        drawn = draw(self._seed, stretch.epoch, stretch.episode, number)
        found = first + self._sampler.window(seconds[first:stop], span_end, number, draw=drawn, name=self.name(stretch))
        last = int(found.max()) + 1
        return found, float(seconds[last]) if last < stop else span_end

    async def _add_member(self, plan: WindowPlan, entry: int, name: str) -> None:
        where = self._entries.member(entry, name)
        if where is not None:
            size = where.size if where.size is not None else (await self._watch(self._reader.stat(where.url))).size
            if size:
                plan[name] = PlannedRange(where.url, where.offset, where.offset + size)

    def _over(self, stretch: Stretch, name: str, planned: Planned, buffer: memoryview) -> Clip | None:
        return planned.over(buffer, name=self.name(stretch))

    def _start_earlier(self, name: str, planned: Planned) -> None:
        assert isinstance(planned, WindowClip)
        key = planned.url, planned.offset
        if self._earlier.get(key) == planned.earlier:  # else others that were under way with it did
            while len(self._earlier) >= MAX_EARLIER:
                del self._earlier[next(iter(self._earlier))]  # learned anew when it is read next
            self._earlier[key] = 0 if planned.earlier is None else planned.earlier + 1

    def _forget_files(self, episode: int | None) -> None:
        key = None if episode is None else (self._entries.place(episode), self._audio)
        self._indexes.clear(lambda kept: key is None or kept == key)
