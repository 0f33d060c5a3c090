"""The episodes of an open dataset, for their readers: passes, mixtures, and the dataset's own verbs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncfetch.errors import LEAVE_OUT_FEATURE, FormatError, redact_url
from asyncfetch.formats.reader import StretchReader
from asyncfetch.formats.stretch import Stretch
from asyncfetch.lerobot.episode_cache import EpisodeCache
from asyncfetch.lerobot.held_episode import HeldEpisode
from asyncfetch.lerobot.samples import SampleBuilder, resolve_windows
from asyncfetch.lerobot.scan import scan

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from asyncfetch.config import StreamConfig
    from asyncfetch.decode import PictureSize
    from asyncfetch.formats.samples import ImageDtype
    from asyncfetch.lerobot.episode_table import Episode
    from asyncfetch.lerobot.info import DepthUnit
    from asyncfetch.lerobot.metadata import Metadata
    from asyncfetch.lerobot.samples import Windows
    from asyncfetch.resources import Engine
    from asyncfetch.runtime.fork import LoopGuard


class EpisodeReader(StretchReader[HeldEpisode]):
    """Reads an open dataset's episodes, and keeps what was read of them within the engine's bounds.

    Verbs take a stretch, or the number of an episode for all of it, and raise EpisodeNotFound for one that isn't there.

    Args:
        url: The dataset's root.
        metadata: All of it.
        engine: What it reads by.
        config: Bounds, limits and threads.
        image_dtype: Of the pictures in its samples.
        depth_unit: Of depth cameras.
        size: Of pictures; None leaves them as they are.
        guard: Knows the loop that opened the dataset.
    """

    _episodes: EpisodeCache

    def __init__(
        self,
        url: str,
        metadata: Metadata,
        engine: Engine,
        *,
        config: StreamConfig,
        image_dtype: ImageDtype,
        depth_unit: DepthUnit,
        size: PictureSize | None = None,
        guard: LoopGuard,
    ) -> None:
        episodes = EpisodeCache(
            engine,
            engine.join(config.pool_segments * len(metadata.cameras)),
            metadata=metadata,
            backend=config.decoder,
            tolerance_seconds=config.tolerance_seconds,
            depth_unit=depth_unit,
            size=size,
        )
        super().__init__(url, engine, episodes, config=config, guard=guard)
        self._metadata = metadata
        self._image_dtype: ImageDtype = image_dtype
        self._depth_unit: DepthUnit = depth_unit
        self._size = size

    def episode(self, episode: int) -> Episode:
        """Return where its rows and videos are."""
        self.check()
        return self._metadata.episodes[episode]

    def _stretch(self, wanted: Stretch | int) -> Stretch:
        """The stretch that is meant. All of an episode is the same one, however far windows reach."""
        episode = self.episode(wanted.episode if isinstance(wanted, Stretch) else wanted)
        if isinstance(wanted, Stretch) and (wanted.start, wanted.stop) != (0, episode.length):
            return wanted
        return Stretch(episode.index, 0, episode.length)

    async def hold(self, wanted: Stretch | int) -> HeldEpisode:
        """See StretchReader.

        Where all of the episode is in memory, or on its way, it is that, and nothing is fetched twice.
        """
        stretch = self._stretch(wanted)
        whole = self._stretch(stretch.episode)
        if whole in self._prefetches or self._episodes.is_held(whole):
            stretch = whole
        return self._episodes.hold_nowait(whole) or await super().hold(stretch)

    async def missing_frames(self, wanted: Stretch | int, *, by_rows: bool) -> Mapping[str, int]:
        """See EpisodeCache; reads no clip."""
        return await self._episodes.missing_frames(self._stretch(wanted), by_rows=by_rows)

    def rows(self, keys: Sequence[str], positions: NDArray[np.int64]) -> AsyncGenerator[pa.RecordBatch, None]:
        """Rows of the tables alone; see ``LeRobotDataset.columns``.

        Args:
            keys: Columns that are there.
            positions: Those of the episodes in the dataset's table, in the order in which they are read.
        """
        return scan(self._episodes.rows, self.engine.reader, keys, positions, run=self.engine.run)

    def sample_builder(self, windows: Windows | None) -> SampleBuilder:
        """Return what makes samples with these windows, for the stream above. ConfigError where they don't fit."""
        features = self._metadata.sample_features
        if "task" in features:
            where = f"{redact_url(self._url)}/meta/info.json"
            message = f"{where} calls a feature 'task', where samples have the words of theirs"
            raise FormatError(message, remedy=LEAVE_OUT_FEATURE)
        offsets = resolve_windows(windows, fps=self._metadata.info.fps, keys=features)
        return SampleBuilder(
            features=features,
            tasks=self._metadata.tasks,
            windows=offsets,
            image_dtype=self._image_dtype,
            depth_unit=self._depth_unit,
            size=self._size,
            found_picture=self._metadata.found_picture,
        )
