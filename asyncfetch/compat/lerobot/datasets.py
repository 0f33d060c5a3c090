"""LeRobot's two dataset classes, over a Stream and over a FrameDataset."""

from __future__ import annotations

import functools
import pickle
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from asyncfetch.compat.lerobot.metadata import find
from asyncfetch.config import StreamConfig, stream_config
from asyncfetch.errors import ConfigError, EpisodeNotFound
from asyncfetch.order.state import merge_shares
from asyncfetch.stream import Placement
from asyncfetch.streams import Stream
from asyncfetch.torch import FrameDataset, StreamDataset

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from asyncfetch.formats import Sample
    from asyncfetch.lerobot import DepthUnit
    from asyncfetch.order.state import State


@dataclass(slots=True)
class _AsLeRobot:
    """Turns a sample of ours into one of LeRobot's, in place. Pickles if the transforms do."""

    images: frozenset[str]
    """Pictures of the table, which LeRobot always gives as float32."""
    videos: frozenset[str]
    squeezed: frozenset[str]
    """Videos with a window of one frame, for which LeRobot gives just the frame."""
    depth: frozenset[str]
    return_uint8: bool
    image_transforms: Callable[[torch.Tensor], torch.Tensor] | None

    def __call__(self, sample: Sample) -> Sample:
        for key, value in sample.items():
            if not isinstance(value, torch.Tensor):
                continue
            if key in self.images or key in self.videos:
                sample[key] = self._picture(key, value)
            elif value.dtype in _FLOATS:
                sample[key] = value.to(torch.float32)
            elif value.dtype in _INTEGERS:
                sample[key] = value.to(torch.int64)
        return sample

    def _picture(self, key: str, picture: torch.Tensor) -> torch.Tensor:
        if key in self.squeezed:
            picture = picture.squeeze(0)
        if key in self.depth:
            return picture
        if key in self.images or not self.return_uint8:
            picture = picture.to(torch.float32).div_(255)
        return picture if self.image_transforms is None else self.image_transforms(picture)


def _require_callable(image_transforms: object) -> None:
    if image_transforms is not None and not callable(image_transforms):
        raise ConfigError(f"image_transforms must be callable, or None, not {image_transforms!r:.80}")


_FLOATS = {torch.float16, torch.float64}
_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64}
"""Types that become float32 and int64 in LeRobot, since they pass through Python's numbers."""


LEROBOTS_PYAV = frozenset({"pyav", "video_reader"})
"""LeRobot's names of that decoder; the second is an old one."""


class _Description:
    """The attributes of a dataset that LeRobot's trainer reads."""

    repo_id: str
    episodes: Any
    """The chosen episodes' indices; None for all."""
    delta_timestamps: Mapping[str, Sequence[float]] | None
    tolerance_s: float
    _as_lerobot: _AsLeRobot
    _meta: Any
    """LeRobot's object; in a worker pickled until its first use, since it loads all of LeRobot."""

    def _describe(
        self,
        repo_id: str,
        root: str | os.PathLike[str] | None,
        *,
        episodes: Sequence[int] | None,
        episode_filter: Callable[[dict[str, Any]], bool] | None = None,
        revision: str | None,
        delta_timestamps: Mapping[str, Sequence[float]] | None,
        image_transforms: Callable[[torch.Tensor], torch.Tensor] | None,
        tolerance_s: float,
        return_uint8: bool,
        depth_output_unit: DepthUnit,
        config: StreamConfig,
        **options: Any,  # noqa: ANN401
    ) -> tuple[str, list[int] | None]:
        """Set the attributes; returns the place of the frames, and the chosen episodes."""
        _require_callable(image_transforms)
        self.repo_id = repo_id
        self.delta_timestamps = delta_timestamps
        self.tolerance_s = tolerance_s
        self.depth_output_unit: DepthUnit = depth_output_unit
        self._given_root, self._given_revision = root, revision
        found = find(repo_id, root, revision, episodes=episodes, config=config.fetch, **options)
        self._meta = meta = found.meta
        meta.rescale_depth_stats(depth_output_unit)
        self.root, self.revision = meta.root, meta.revision
        windows = delta_timestamps or {}
        videos = frozenset(meta.video_keys)
        self._as_lerobot = _AsLeRobot(
            images=frozenset(meta.image_keys),
            videos=videos,
            squeezed=frozenset(key for key in videos if len(windows.get(key, ())) == 1),
            depth=frozenset(meta.depth_keys),
            return_uint8=return_uint8,
            image_transforms=image_transforms,
        )
        chosen = found.episodes if episodes is None else list(episodes)
        count = len(_lengths(meta))
        unknown = [episode for episode in chosen or () if not 0 <= episode < count]
        if unknown:
            raise EpisodeNotFound(f"{repo_id} has no episode {unknown[0]}: its {count} count from 0")
        if episode_filter is not None:
            chosen = meta.filter_episodes(episode_filter, candidates=chosen)
            if not chosen:
                raise ConfigError(f"episode_filter leaves no episode of {repo_id}")
        return found.source, chosen

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[assignment]
        return state | {"_meta": self._meta if isinstance(self._meta, bytes) else pickle.dumps(self._meta)}

    @property
    def meta(self) -> Any:  # noqa: ANN401
        """LeRobot's metadata of the dataset."""
        if isinstance(self._meta, bytes):
            self._meta = pickle.loads(self._meta)
        return self._meta

    @property
    def fps(self) -> int:
        """Frames a second."""
        return self.meta.fps  # type: ignore[no-any-return]

    @property
    def features(self) -> dict[str, dict[str, Any]]:
        """The features of info.json."""
        return self.meta.features  # type: ignore[no-any-return]

    @property
    def num_episodes(self) -> int:
        """Number of episodes, or of chosen ones."""
        return len(_lengths(self.meta)) if self.episodes is None else len(self.episodes)

    @property
    def num_frames(self) -> int:
        """Number of frames of these episodes."""
        lengths = _lengths(self.meta)
        return sum(lengths if self.episodes is None else (lengths[episode] for episode in self.episodes))

    @property
    def image_transforms(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """The function applied to each picture that isn't depth; a stream calls it in a decode thread."""
        return self._as_lerobot.image_transforms

    def set_image_transforms(self, image_transforms: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        """Replace the function from the next pass on."""
        _require_callable(image_transforms)
        self._as_lerobot.image_transforms = image_transforms

    def clear_image_transforms(self) -> None:
        """Apply no function from the next pass on."""
        self.set_image_transforms(None)


def _lengths(meta: Any) -> list[int]:  # noqa: ANN401
    """Frames of each episode, by the table."""
    return [] if meta.episodes is None else [int(length) for length in meta.episodes["length"]]


class StreamingLeRobotDataset(_Description, StreamDataset):
    """LeRobot's streaming dataset, read by a ``Stream``: for a ``DataLoader`` with any number of workers.

    It takes a rank's and a worker's share by itself, even if accelerate's ``prepare`` gets its loader.

    Args:
        repo_id: The dataset on the Hub; with a ``root``, only its name.
        root: A folder, or any URL that this library reads.
        episodes, image_transforms, delta_timestamps, tolerance_s, revision, force_cache_sync, seed, shuffle,
            return_uint8, depth_output_unit, token: LeRobot's. ``token`` is for the metadata; the frames are read with
            ``config``'s.
        streaming, max_num_shards, buffer_size, rng: Ignored: ``config`` and ``seed`` determine the order of the whole
            dataset.
        repo_type: "dataset", or "bucket": then ``repo_id`` is a bucket's, and there is no ``root``.
        config: Bounds, limits and threads; by default an epoch has the same length on all ranks
            (``uneven_ends="drop"``).
    """

    def __init__(
        self,
        repo_id: str,
        root: str | os.PathLike[str] | None = None,
        episodes: Sequence[int] | None = None,
        image_transforms: Callable[[torch.Tensor], torch.Tensor] | None = None,
        delta_timestamps: Mapping[str, Sequence[float]] | None = None,
        tolerance_s: float = 1e-4,
        revision: str | None = None,
        force_cache_sync: bool = False,
        streaming: bool = True,
        buffer_size: int = 1000,
        max_num_shards: int = 16,
        seed: int = 42,
        rng: object = None,
        shuffle: bool = True,
        return_uint8: bool = False,
        depth_output_unit: DepthUnit = "mm",
        *,
        repo_type: str = "dataset",
        token: str | bool | None = None,
        config: StreamConfig | None = None,
    ) -> None:
        config = _with_tolerance(stream_config(config or StreamConfig(uneven_ends="drop")), tolerance_s)
        source, self.episodes = self._describe(
            repo_id,
            root,
            repo_type=repo_type,
            episodes=episodes,
            revision=revision,
            delta_timestamps=delta_timestamps,
            image_transforms=image_transforms,
            tolerance_s=tolerance_s,
            return_uint8=return_uint8,
            depth_output_unit=depth_output_unit,
            config=config,
            force_cache_sync=force_cache_sync,
            token=token,
        )
        self.seed = seed
        self.shuffle = shuffle
        stream = Stream(
            source,
            shuffle=shuffle,
            seed=seed,
            windows=delta_timestamps,
            episodes=self.episodes,
            transform=self._as_lerobot,
            depth_unit=depth_output_unit,
            config=config,
        )
        super().__init__(stream)
        self._begun = stream.epoch
        _prepare_loaders_of_streams()

    def load_state_dict(self, state: State) -> None:
        """Resume where ``state`` was taken, with any number of ranks, batches and workers."""
        super().load_state_dict(state)
        self._begun = self.stream.epoch

    def state_at(self, step: int, *, batch_size: int, num_workers: int, world_size: int) -> State:
        """The state of all ranks together after each has got ``step`` batches from a loader, over several epochs.

        Args:
            step: Batches since the first epoch began, or since a state was loaded.
            batch_size: The loader's, of each rank.
            num_workers: The loader's.
            world_size: Number of ranks.

        Raises:
            ConfigError: Epochs have different lengths on the ranks: leave ``config.uneven_ends`` at "drop" or "pad".
        """
        workers = max(1, num_workers)
        ranks = [
            [self._in_batches(Placement(rank, world_size, worker, workers)) for worker in range(workers)]
            for rank in range(world_size)
        ]

        def count(samples: Sequence[Sequence[int]], epoch: int) -> tuple[list[list[int]], int]:
            """The batches that each worker of each rank makes of its samples, and those of each rank."""
            left = [[-(-number // batch_size) for number in rank] for rank in samples]
            batches = {sum(rank) for rank in left}
            if len(batches) > 1:
                raise ConfigError(
                    f"ranks have {sorted(batches)} batches of epoch {epoch}, so that no step is one place for all: "
                    'set StreamConfig(uneven_ends="drop") or "pad"'
                )
            return left, batches.pop()

        epoch = self._begun
        plans = [[self._source.planned(placement, epoch) for placement in rank] for rank in ranks]
        left, batches = count([list(map(len, rank)) for rank in plans], epoch)
        if step >= batches:  # later epochs are complete, and equally long
            _, whole = count([list(map(self._source.count, rank)) for rank in ranks], epoch + 1)
            epochs, step = divmod(step - batches, whole) if whole else (0, 0)
            epoch += 1 + epochs
            plans = [[self._source.planned(placement, epoch) for placement in rank] for rank in ranks]
            left, _ = count([list(map(len, rank)) for rank in plans], epoch)
        states = []
        for rank, counts in zip(plans, left, strict=True):
            for plan, given in zip(rank, _in_turns(counts, step), strict=True):
                delivered = min(plan.begun + given * batch_size, plan.end)
                states.append(replace(plan.progress, delivered=delivered).state())
        return merge_shares(states)

    def __repr__(self) -> str:
        return f"StreamingLeRobotDataset({self.repo_id!r}, {self.stream!r})"


def _in_turns(left: Sequence[int], batches: int) -> list[int]:
    """How many of a loader's first ``batches`` come from each worker, if ``left`` are the workers' batches."""
    given = [0] * len(left)
    turns = (worker for number in range(max(left)) for worker in range(len(left)) if number < left[worker])
    for worker in islice(turns, batches):
        given[worker] += 1
    return given


class LeRobotDataset(_Description, FrameDataset):
    """LeRobot's map-style dataset, which reads each batch's episodes concurrently, without a download.

    Args:
        repo_id, root, episodes, image_transforms, delta_timestamps, tolerance_s, revision, force_cache_sync,
            return_uint8, depth_output_unit, token, config: As of ``StreamingLeRobotDataset``. Frames come in the
            dataset's order, whatever that of ``episodes``.
        episode_filter: LeRobot's: chooses episodes by their metadata.
        download_videos: Ignored: nothing is downloaded.
        video_backend: "pyav" for that decoder, which in LeRobot ignores rotation; else ``config`` chooses.
    """

    def __init__(
        self,
        repo_id: str,
        root: str | os.PathLike[str] | None = None,
        episodes: Sequence[int] | None = None,
        episode_filter: Callable[[dict[str, Any]], bool] | None = None,
        image_transforms: Callable[[torch.Tensor], torch.Tensor] | None = None,
        delta_timestamps: Mapping[str, Sequence[float]] | None = None,
        tolerance_s: float = 1e-4,
        revision: str | None = None,
        force_cache_sync: bool = False,
        download_videos: bool = True,
        video_backend: str | None = None,
        return_uint8: bool = False,
        depth_output_unit: DepthUnit = "mm",
        *,
        token: str | bool | None = None,
        config: StreamConfig | None = None,
    ) -> None:
        config = _with_tolerance(stream_config(config), tolerance_s)
        if video_backend in LEROBOTS_PYAV:
            config = replace(config, decoder="pyav-unturned")
        source, chosen = self._describe(
            repo_id,
            root,
            episodes=episodes,
            episode_filter=episode_filter,
            revision=revision,
            delta_timestamps=delta_timestamps,
            image_transforms=image_transforms,
            tolerance_s=tolerance_s,
            return_uint8=return_uint8,
            depth_output_unit=depth_output_unit,
            config=config,
            force_cache_sync=force_cache_sync,
            token=token,
        )
        super().__init__(
            source,
            windows=delta_timestamps,
            episodes=None if chosen is None else sorted(chosen),
            depth_unit=depth_output_unit,
            config=config,
        )

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """The samples of several frames, read concurrently, in the asked order."""
        return [self._as_lerobot(sample) for sample in super().__getitems__(indices)]

    @property
    def absolute_to_relative_idx(self) -> dict[int, int] | None:
        """The place here of each frame of chosen episodes, by its ``index``; None if all are read."""
        if self.episodes is None:
            return None
        bounds = (self.meta.episodes[episode] for episode in self.episodes)
        indices = [i for each in bounds for i in range(each["dataset_from_index"], each["dataset_to_index"])]
        return {index: place for place, index in enumerate(indices)}

    def streamed(self, *, seed: int) -> StreamingLeRobotDataset:
        """The same episodes as a stream, with the same metadata."""
        stream = StreamingLeRobotDataset(
            self.repo_id,
            self._given_root,
            self.episodes,
            self.image_transforms,
            self.delta_timestamps,
            self.tolerance_s,
            self._given_revision,
            seed=seed,
            return_uint8=self._as_lerobot.return_uint8,
            depth_output_unit=self.depth_output_unit,
            config=replace(self.config, uneven_ends="drop"),
        )
        stream._meta = self.meta  # LeRobot writes ImageNet's statistics into it
        return stream


def _with_tolerance(config: StreamConfig, tolerance_s: float) -> StreamConfig:
    return config if tolerance_s == config.tolerance_seconds else replace(config, tolerance_seconds=tolerance_s)


@functools.cache
def _prepare_loaders_of_streams() -> None:
    """Have accelerate move the batches of a loader over a stream to its device, without dividing them among ranks.

    They are one rank's share already. As with other loaders, pictures become floats on the device.
    """
    try:
        from accelerate import Accelerator
    except ImportError:
        return
    prepare = Accelerator.prepare_data_loader

    @functools.wraps(prepare)
    def prepare_data_loader(self: Any, data_loader: Any, device_placement: bool | None = None, **options: Any) -> Any:  # noqa: ANN401
        if not isinstance(data_loader.dataset, StreamingLeRobotDataset):
            return prepare(self, data_loader, device_placement, **options)
        if not (self.device_placement if device_placement is None else device_placement):
            return data_loader
        return _OnDevice(data_loader, self.device, non_blocking=self.non_blocking)

    Accelerator.prepare_data_loader = prepare_data_loader


class _OnDevice:
    """A loader whose batches are on a device."""

    def __init__(self, loader: Any, device: torch.device, *, non_blocking: bool) -> None:  # noqa: ANN401
        self._loader = loader
        self._device = device
        self._non_blocking = non_blocking

    def __iter__(self) -> Iterator[Any]:
        from accelerate.utils import send_to_device

        return (send_to_device(batch, self._device, non_blocking=self._non_blocking) for batch in self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._loader, name)
