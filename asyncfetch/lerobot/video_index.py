"""Where the frames of an episode lie in its video files."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from asyncfetch.media import ClipPlan, Mp4Index, locate_moov, parse_moov
from asyncfetch.runtime import run_all

if TYPE_CHECKING:
    from asyncfetch.fetch import RangeReader
    from asyncfetch.lerobot.episode_table import Episode
    from asyncfetch.runtime import SingleFlight

__all__ = ["PlannedClip", "VideoIndexes"]

HEAD_BYTES = 16 * 1024
"""Asked for first. Holds the whole index of a file with up to 2,500 frames at AV1's 6 bytes a frame, and tells where a
longer one or one at the tail lies, so that either costs one request more. A larger probe would be wasted on every
file whose index is at the tail: 1.2 % of a clip of 1.3 MB as it is."""


@dataclass(frozen=True, slots=True)
class PlannedClip:
    """One camera's clip of an episode: what to fetch, and how to make an MP4 of it."""

    url: str
    plan: ClipPlan

    @property
    def nbytes(self) -> int:
        """Memory the clip takes: its header and its range."""
        return self.plan.header_bytes + self.plan.stop - self.plan.start


class VideoIndexes:
    """The sample tables of video files, each fetched and parsed once while it is kept.

    Loop-bound. Bounded in bytes: the least recently used index is dropped, and fetched again if it is needed again.
    """

    def __init__(self, reader: RangeReader, flights: SingleFlight[str, Mp4Index], *, max_bytes: int) -> None:
        self._reader = reader
        self._flights = flights
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, Mp4Index] = OrderedDict()
        self._used_bytes = 0
        self._parsers = anyio.CapacityLimiter(1)

    async def plan(self, episode: Episode, *, fps: float) -> Mapping[str, PlannedClip]:
        """The clips of all cameras of an episode, their files' indexes fetched at once."""
        planned: dict[str, PlannedClip] = {}

        async def plan_one(camera: str) -> None:
            span = episode.videos[camera]
            index = await self.index(span.url)
            planned[camera] = PlannedClip(span.url, index.clip(span.first_frame, span.num_frames, fps=fps))

        await run_all(partial(plan_one, camera) for camera in episode.videos)
        return planned

    async def index(self, url: str) -> Mp4Index:
        """The index of one file. Errors: FetchError; FormatError where the file isn't an MP4 that can be read."""
        kept = self._kept.get(url)
        if kept is None:
            return await self._flights.run(url, lambda: self._fetch(url))
        self._kept.move_to_end(url)
        return kept

    async def _fetch(self, url: str) -> Mp4Index:
        info, head = await self._reader.fetch_head(url, HEAD_BYTES)
        start, stop = locate_moov(head, size=info.size, url=url)
        moov = head[start:stop] if stop <= len(head) else await self._reader.fetch(url, start, stop)
        index = await anyio.to_thread.run_sync(lambda: parse_moov(moov, url=url), limiter=self._parsers)
        self._keep(url, index)
        return index

    def _keep(self, url: str, index: Mp4Index) -> None:
        self._kept[url] = index
        self._used_bytes += index.nbytes
        while self._used_bytes > self._max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._used_bytes -= dropped.nbytes
