"""A dataset as an endless supply of epochs: what to read, in which order, within which bounds.

The one place above ``stream`` that knows formats by name: what that reads may be any.
"""

from __future__ import annotations

import os
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncfetch.config import PrivateUrl, stream_config
from asyncfetch.config.checks import chosen_features, explains_keywords, index_of, whole_number
from asyncfetch.decode import picture_size
from asyncfetch.errors import ConfigError, UsageError
from asyncfetch.formats import Format, OwnFormat, RangeFormat
from asyncfetch.lerobot import LeRobotDataset, check_windows, summarise
from asyncfetch.lerobot.dataset import LeRobotFormat, OpenLeRobot, check_values
from asyncfetch.runtime import iterate
from asyncfetch.stream.datasets import Member
from asyncfetch.stream.epoch_stream import EpochStream
from asyncfetch.stream.source import SampleSource, checked_transform, whole_seed
from asyncfetch.videos import ClipSampler, Videos
from asyncfetch.videos.format import VideosFormat

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence

    import pyarrow as pa

    from asyncfetch.config import StreamConfig
    from asyncfetch.decode import Fit
    from asyncfetch.formats import ImageDtype
    from asyncfetch.lerobot import DatasetSummary, DepthUnit, Windows
    from asyncfetch.lerobot.info import Feature
    from asyncfetch.stream.job_builder import Transform

__all__ = ["Stream"]


class Stream(EpochStream):
    """The samples of a dataset, epoch after epoch, in a seeded order.

    Iterate it (``for sample in stream``), or ``async with stream.samples() as samples`` on a loop of your own. The
    order is a pure function of the seed, the epoch, the chosen episodes' lengths, the configuration's segments and pool
    and the ranks; every frame comes exactly once an epoch over all ranks and workers.

    Args:
        source: URL or path of a LeRobot v3 dataset; or an open ``LeRobotDataset``, which is then read on its own loop,
            with its own features, image_dtype and config; or ``Videos``; or a ``RangeFormat`` of your own.
        shuffle: Whether frames are drawn from a pool of segments, or come in the dataset's order: of several ranks,
            each has an equal part of it.
        seed: Any whole number.
        windows: By feature key: seconds or ``frames(...)`` relative to the sample's frame.
        episodes: Indices of the episodes to read; None means all. Without shuffle they are read in this order.
        features: Keys to fetch and deliver; None means all. Of ``Videos``: columns, and files beside the videos.
        transform: Applied to each sample in a decode thread. To use loader workers started by spawn it must pickle.
        image_dtype: "uint8", or "float32" in [0, 1].
        depth_unit: "mm" or "m".
        clips: The clips that each of ``Videos`` gives, and their frames. A sample is then one of them: ``video`` uint8
            (T, 3, H, W), ``seconds`` float64 (T,), the times at which the file shows them; ``index``, the number of the
            entry, and ``clip_index``; the other columns and files of the entry under their names.
        size: (height, width) that pictures are brought to where they are decoded; None leaves them as they are.
        fit: "stretch", "crop" or "pad", where their shape is another one; None is "stretch".
        audio_rate: Samples a second of ``audio`` float32 (channels, samples), from the first frame of a clip to the end
            of its last one; None leaves audio out. A video without any has one of (0, 0).
        config: Bounds, limits and threads, for one rank.

    Pickles, as what to read; connections and caches stay behind, and so does the url's password or signature, except on
    the way to a process that multiprocessing starts, such as a loader's worker. Not thread-safe: one thread at a time.
    """

    @explains_keywords
    def __init__(
        self,
        source: str | os.PathLike[str] | LeRobotDataset | Videos | RangeFormat | Format,
        *,
        shuffle: bool = True,
        seed: int = 0,
        windows: Windows | None = None,
        episodes: Sequence[int] | None = None,
        features: Collection[str] | None = None,
        transform: Transform | None = None,
        image_dtype: ImageDtype | None = None,
        depth_unit: DepthUnit | None = None,
        clips: ClipSampler | None = None,
        size: tuple[int, int] | None = None,
        fit: Fit | None = None,
        audio_rate: int | None = None,
        config: StreamConfig | None = None,
    ) -> None:
        if not isinstance(shuffle, bool):
            raise ConfigError(f"shuffle must be True or False, not {shuffle!r}")
        seed = whole_seed(seed)
        of_lerobot = {"windows": windows, "image_dtype": image_dtype, "depth_unit": depth_unit}
        of_videos = {"clips": clips, "audio_rate": audio_rate}
        reading: Format
        if isinstance(source, Videos):
            _refuse(of_lerobot, "a LeRobot dataset", source)
            if clips is None:
                raise ConfigError(
                    f"Stream({source!r}) needs clips=ClipSampler(...), which says which frames a clip has"
                )
            if not isinstance(clips, ClipSampler):
                raise ConfigError(f"clips must be a ClipSampler, not {clips!r:.80}")
            if audio_rate is not None:
                audio_rate = whole_number("audio_rate", audio_rate, least=1)
            reading = VideosFormat(
                videos=source,
                clips=clips,
                seed=seed,
                size=picture_size(size, fit),
                audio_rate=audio_rate,
                features=chosen_features(features),
            )
        elif isinstance(source, str | os.PathLike | LeRobotDataset):
            _refuse(of_videos, "Videos", source)
            if isinstance(source, LeRobotDataset):
                if any(given is not None for given in (features, image_dtype, depth_unit, size, fit, config)):
                    raise ConfigError(
                        "features, image_dtype, depth_unit, size, fit and config of an open dataset were given to "
                        "open_dataset()"
                    )
                config = source.config
            check_windows(windows)
            check_values(image_dtype or "uint8", depth_unit or "mm")
            reading = LeRobotFormat(
                source=source if isinstance(source, LeRobotDataset) else PrivateUrl(source),
                windows=windows,
                features=chosen_features(features),
                image_dtype=image_dtype or "uint8",
                depth_unit=depth_unit or "mm",
                size=picture_size(size, fit),
            )
        elif isinstance(source, RangeFormat | Format):
            _refuse(of_lerobot | of_videos | {"features": features, "size": size, "fit": fit}, "other formats", source)
            reading = OwnFormat(source) if isinstance(source, RangeFormat) else source
        else:
            raise ConfigError(
                f"a url or a path is needed, of a LeRobot dataset, or Videos, or a RangeFormat, not {source!r}"
            )
        member = Member(
            format=reading,
            shuffle=shuffle,
            seed=seed,
            episodes=None if episodes is None else distinct_episodes(episodes),
            transform=checked_transform(transform),
            config=stream_config(config),
            has_config=config is not None,
        )
        self._source = SampleSource([member], member.config, seed=member.seed, transform=member.transform)

    @property
    def _member(self) -> Member:
        return self._source.members[0]

    def _dataset(self) -> LeRobotDataset:
        """The dataset, for what its metadata says; opens it where nothing has."""
        reading = self._member.format
        if isinstance(reading, LeRobotFormat) and isinstance(reading.source, LeRobotDataset):
            return reading.source
        if not isinstance(reading, LeRobotFormat):
            raise UsageError(f"{reading!r} isn't a LeRobot dataset: it has no fps, features, stats and columns")
        opened = self._source.session().opened().datasets[0]
        assert isinstance(opened, OpenLeRobot)
        return opened.dataset

    @property
    def fps(self) -> float:
        """Frames a second. Opens the dataset where nothing has; so do the others."""
        return self._dataset().fps

    @property
    def num_episodes(self) -> int:
        """Number of episodes that are read."""
        if self._member.episodes is not None:
            return len(self._member.episodes)
        if self._member.format.is_open:
            return self._dataset().num_episodes
        return len(self._source.session().opened().datasets[0].episodes(None))

    @property
    def features(self) -> Mapping[str, Feature]:
        """The features that are read, by key, in the dataset's order."""
        return self._dataset().features

    @property
    def stats(self) -> Mapping[str, Any] | None:
        """meta/stats.json, for normalising; None where the dataset has none, FormatError where it is damaged."""
        return self._dataset().stats

    def columns(self, keys: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Rows of the tables alone, as Arrow record batches: ``for batch in stream.columns(["action"])``.

        Of the episodes that are read, in their order; row i of all batches together is frame i of these. The types are
        those that the files store. ``pyarrow.Table.from_batches`` joins them.

        Args:
            keys: See ``LeRobotDataset.columns``, as for errors.
        """
        session = self._source.session()
        batches = partial(_some_columns, self._dataset(), keys, self._member.episodes)
        return iterate(session.thread, batches, max_batches=1)

    def dataset_info(self) -> DatasetSummary:
        """Return what is in the dataset, as ``asyncfetch.dataset_info`` says it; of the features that are read."""
        session = self._source.session()
        return session.thread.run(summarise, self._dataset())

    def __repr__(self) -> str:
        one = self._member
        return f"Stream({one.format!r}, shuffle={one.shuffle}, seed={one.seed}, epoch={self.epoch})"


@asynccontextmanager
async def _some_columns(
    dataset: LeRobotDataset, keys: Sequence[str], episodes: Sequence[int] | None
) -> AsyncIterator[AsyncIterator[list[pa.RecordBatch]]]:
    async with aclosing(dataset.columns(keys, episodes=episodes)) as batches:
        yield ([batch] async for batch in batches)


def _refuse(given: Mapping[str, object], kind: str, source: object) -> None:
    """Raise ConfigError where an argument is for another kind of data."""
    names = [name for name, value in given.items() if value is not None]
    if names:
        raise ConfigError(f"{', '.join(names)} is for {kind}, and {source!r} isn't that: leave it out")


def distinct_episodes(episodes: Sequence[int]) -> tuple[int, ...]:
    """Return what a user gave as ``episodes``, once and for all; ConfigError where one comes twice, or is none."""
    try:
        chosen = tuple(map(index_of, episodes))
    except TypeError as error:
        raise ConfigError(f"episodes must be whole numbers, not {episodes!r:.80}") from error
    if len(set(chosen)) != len(chosen):
        raise ConfigError("episodes must not name an episode twice: every frame comes once an epoch")
    return chosen
