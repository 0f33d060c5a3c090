"""Where the frames of an episode lie in its video files."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from asyncfetch.media import locate_moov, parse_moov
from asyncfetch.runtime.concurrently import gather
from asyncfetch.runtime.shared_lru import SharedLRU

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncfetch.fetch import RangeReader
    from asyncfetch.lerobot.episode_table import Episode, VideoSpan
    from asyncfetch.media import ClipPlan, Mp4Index
    from asyncfetch.runtime.concurrently import RunSync

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
    """The sample tables of video files, each fetched and parsed once while it is kept. Loop-bound.

    Args:
        reader: Fetches them.
        max_bytes: Bound on those kept; the least recently used one is dropped, and fetched again when it is needed.
        run: Runs the parser off the loop.
    """

    def __init__(self, reader: RangeReader, *, max_bytes: int, run: RunSync) -> None:
        self._reader = reader
        self._run = run
        self._kept: SharedLRU[str, Mp4Index] = SharedLRU(max_bytes)

    async def plan(self, episode: Episode, *, fps: float) -> Mapping[str, PlannedClip]:
        """The clips of all cameras of an episode, their files' indexes fetched at once."""
        clips = await gather(*(partial(self._plan, span, fps) for span in episode.videos.values()))
        return dict(zip(episode.videos, clips, strict=True))

    async def _plan(self, span: VideoSpan, fps: float) -> PlannedClip:
        index = await self.index(span.url)
        return PlannedClip(span.url, index.clip(span.first_frame, span.num_frames, fps=fps))

    async def index(self, url: str) -> Mp4Index:
        """The index of one file. Errors: FetchError; FormatError where the file isn't an MP4 that can be read."""
        return await self._kept.get(url, partial(self._fetch, url))

    async def _fetch(self, url: str) -> Mp4Index:
        info, head = await self._reader.fetch_head(url, HEAD_BYTES)
        start, stop = locate_moov(head, size=info.size, url=url)
        moov = head[start:stop] if stop <= len(head) else await self._reader.fetch(url, start, stop)
        return await self._run(partial(parse_moov, moov, url=url))
