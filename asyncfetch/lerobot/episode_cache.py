"""Episodes in memory: all cameras and rows of an episode at once, each byte fetched once.

An episode is *held* while somebody reads it: its clips are leased in the byte cache, which then can't evict them. Idle,
it keeps its rows and the plan of its clips, and the bytes of its clips stay as long as the byte cache has room: the
next read is then a hit without a request, whether the decoders are still there or not.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Self

from asyncfetch.decode import Clip, open_decoder
from asyncfetch.lerobot.depth import DepthUnit, depth_scale
from asyncfetch.runtime.concurrently import gather

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from types import TracebackType

    import torch

    from asyncfetch.cache import ByteCache, Lease
    from asyncfetch.config import DecoderBackend
    from asyncfetch.decode import DecoderCache, FrameDecoder
    from asyncfetch.lerobot.episode_table import Episode
    from asyncfetch.lerobot.metadata import Metadata
    from asyncfetch.lerobot.rows import EpisodeRows, RowReader
    from asyncfetch.lerobot.video_index import PlannedClip, VideoIndexes

__all__ = ["EpisodeCache", "EpisodeCacheStatistics", "HeldEpisode"]


@dataclass(frozen=True, slots=True)
class EpisodeCacheStatistics:
    """A snapshot of an EpisodeCache."""

    hits: int
    """Reads that found every byte of the episode in memory."""
    misses: int
    """Reads that had to fetch some of it."""
    held: int
    """Episodes that somebody is reading."""
    idle: int
    """Episodes whose rows are kept for the next reader."""
    rows_bytes: int
    """Memory of the rows kept, of held and idle episodes."""


@dataclass(slots=True, eq=False)
class _Entry:
    episode: Episode
    rows: EpisodeRows
    planned: Mapping[str, PlannedClip]
    leases: dict[str, Lease] = field(default_factory=dict)
    holders: int = 0


class HeldEpisode:
    """An episode that can be read until it is released; release it exactly once, or use it as a context manager.

    ``rows`` and ``frames`` may be used from any thread.
    """

    def __init__(self, cache: EpisodeCache, entry: _Entry) -> None:
        self._cache = cache
        self._entry = entry
        self._released = False

    @property
    def episode(self) -> Episode:
        """What the metadata says of it."""
        return self._entry.episode

    @property
    def rows(self) -> EpisodeRows:
        """Its table rows, by feature."""
        return self._entry.rows

    def clip(self, camera: str) -> Clip:
        """The bytes of one camera's frames as a small MP4 in memory, for a decoder of your own."""
        return self._cache.clip(self._entry, camera)

    def frames(self, camera: str, frames: Sequence[int]) -> torch.Tensor:
        """Decoded frames of one camera, (len(frames), C, H, W). Takes a while: call it in a thread."""
        return self._cache.decode(self._entry, camera, frames)

    def release(self) -> None:
        """Let go of its bytes. Call it on the loop."""
        if not self._released:
            self._released = True
            self._cache.release(self._entry)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


class EpisodeCache:
    """Fetches whole episodes, one request per (episode, camera), over a byte cache. Loop-bound."""

    def __init__(
        self,
        *,
        clips: ByteCache,
        rows: RowReader,
        indexes: VideoIndexes,
        decoders: DecoderCache[FrameDecoder],
        backend: DecoderBackend,
        metadata: Metadata,
        depth_unit: DepthUnit,
        max_rows_bytes: int,
    ) -> None:
        self._clips = clips
        self._rows = rows
        self._indexes = indexes
        self._decoders = decoders
        self._backend: DecoderBackend = backend
        self._fps = metadata.info.fps
        self._depth = {key: depth_scale(feature, depth_unit) for key, feature in metadata.features.items()}
        self._max_rows_bytes = max_rows_bytes
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._hits = self._misses = self._rows_bytes = 0
        clips.on_evict(decoders.discard)

    async def clip_bytes(self, episode: Episode) -> int:
        """Memory that the clips of the episode take. Fetches the indexes of its files where needed."""
        entry = self._entries.get(episode.index)
        planned = entry.planned if entry else await self._indexes.plan(episode, fps=self._fps)
        return sum(clip.nbytes for clip in planned.values())

    def hold_nowait(self, episode: Episode) -> HeldEpisode | None:
        """The episode, if every byte of it is in memory."""
        entry = self._entries.get(episode.index)
        if entry is None or not self._lease_nowait(entry):
            return None
        self._hits += 1
        return self._hold(entry)

    async def hold(self, episode: Episode) -> HeldEpisode:
        """The episode, fetched where needed: all cameras and the rows at once, nothing twice.

        Waits for room in the byte cache. Cancelled, it lets go of what it had got. Errors: FetchError, FormatError and
        DatasetError of its files.
        """
        held = self.hold_nowait(episode)
        if held is not None:
            return held
        self._misses += 1
        known = self._entries.get(episode.index)
        planned = known.planned if known else await self._indexes.plan(episode, fps=self._fps)
        rows = [known.rows] if known else []
        leases: dict[str, Lease] = {}

        async def lease(camera: str) -> None:
            leases[camera] = await self._lease(planned[camera])

        async def read_rows() -> None:
            rows.append(await self._rows.rows(episode))

        work: list[Callable[[], Awaitable[None]]] = [partial(lease, camera) for camera in planned]
        try:
            await gather(*work, *([] if known else [read_rows]))
        except BaseException:
            for got in leases.values():
                got.release()
            raise
        return self._hold(self._enter(episode, rows[0], planned, leases))

    async def _lease(self, clip: PlannedClip) -> Lease:
        plan = clip.plan
        lease = await self._clips.acquire(clip.url, plan.start, plan.stop, headroom_bytes=plan.header_bytes)
        plan.write_header(lease.buffer)
        return lease

    def _lease_nowait(self, entry: _Entry) -> bool:
        if entry.holders:
            return True
        leases: dict[str, Lease] = {}
        for camera, clip in entry.planned.items():
            plan = clip.plan
            lease = self._clips.try_lease(clip.url, plan.start, plan.stop, headroom_bytes=plan.header_bytes)
            if lease is None:
                for got in leases.values():
                    got.release()
                return False
            leases[camera] = lease
        entry.leases = leases
        return True

    def _enter(
        self, episode: Episode, rows: EpisodeRows, planned: Mapping[str, PlannedClip], leases: dict[str, Lease]
    ) -> _Entry:
        """The entry of what was just fetched, or the one that another task made of the same episode meanwhile."""
        entry = self._entries.get(episode.index)
        if entry is None:
            entry = self._entries[episode.index] = _Entry(episode, rows, planned)
            self._rows_bytes += rows.nbytes
        if entry.holders:
            for lease in leases.values():
                lease.release()
        else:
            entry.leases = leases
        return entry

    def _hold(self, entry: _Entry) -> HeldEpisode:
        entry.holders += 1
        self._entries.move_to_end(entry.episode.index)
        return HeldEpisode(self, entry)

    def release(self, entry: _Entry) -> None:
        """One holder less. The last one gives the clips back to the byte cache's own order of eviction."""
        entry.holders -= 1
        if not entry.holders:
            for lease in entry.leases.values():
                lease.release()
            entry.leases = {}
            self._drop_idle_rows()

    def _drop_idle_rows(self) -> None:
        surplus = self._rows_bytes - self._max_rows_bytes
        dropped = []
        for entry in self._entries.values():  # least recently held first
            if surplus <= 0:
                break
            if not entry.holders:
                dropped.append(entry)
                surplus -= entry.rows.nbytes
        for entry in dropped:
            del self._entries[entry.episode.index]
            self._rows_bytes -= entry.rows.nbytes

    def decode(self, entry: _Entry, camera: str, frames: Sequence[int]) -> torch.Tensor:
        """Frames of a held clip, by the decoder that is kept for it or a new one. Thread-safe."""
        clip = self.clip(entry, camera)
        clip.ranks(frames)  # a video without any of the frames is no video that a decoder would open
        decoder = self._decoders.get(entry.leases[camera].key, lambda: open_decoder(clip, backend=self._backend))
        return decoder.frames(frames)

    def clip(self, entry: _Entry, camera: str) -> Clip:
        """The clip of a held episode."""
        planned = entry.planned[camera]
        plan = planned.plan
        return Clip(
            data=entry.leases[camera].buffer,
            frame_index=plan.frame_index,
            pts=plan.pts,
            timescale=plan.timescale,
            codec=plan.codec,
            width=plan.width,
            height=plan.height,
            name=f"{camera} of episode {entry.episode.index} in {planned.url}",
            depth=self._depth[camera],
        )

    def statistics(self) -> EpisodeCacheStatistics:
        """A snapshot."""
        held = sum(1 for entry in self._entries.values() if entry.holders)
        return EpisodeCacheStatistics(self._hits, self._misses, held, len(self._entries) - held, self._rows_bytes)
