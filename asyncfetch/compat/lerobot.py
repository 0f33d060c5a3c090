"""LeRobot's dataset classes and its commands, reading by asyncfetch.

``StreamingLeRobotDataset`` and ``LeRobotDataset`` take LeRobot's arguments and give its samples, bit by bit those of
its map style. ``run`` is LeRobot's own command in this process, with these classes in place of its own. ``meta`` is an
object of LeRobot's, so its trainer finds all that it looks for.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import io
import json
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from anyio import to_thread
from anyio.from_thread import start_blocking_portal

from asyncfetch.config import StreamConfig, stream_config
from asyncfetch.errors import AccessDenied, ConfigError, MissingDependency, NotFound
from asyncfetch.fetch import Fetcher
from asyncfetch.fetch.urls import join_url
from asyncfetch.lerobot.info import EPISODES_PATH, is_v2, parse_info, parse_json
from asyncfetch.lerobot.parquet import require_pyarrow
from asyncfetch.lerobot.version2 import load_version2
from asyncfetch.stream import Placement, Stream
from asyncfetch.stream.state import merge_shares
from asyncfetch.torch import FrameDataset, StreamDataset

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from asyncfetch.config import DecoderBackend, FetchConfig
    from asyncfetch.lerobot import DepthUnit, Sample
    from asyncfetch.lerobot.version2 import Version2
    from asyncfetch.stream.state import State

__all__ = ["LeRobotDataset", "StreamingLeRobotDataset", "run"]

INSTALL_LEROBOT = 'pip install "lerobot[training]"'
"""Needs Python 3.12."""
READING_COMMANDS = ("lerobot-train", "lerobot-dataset-viz", "lerobot-imgtransform-viz")
"""LeRobot's others write datasets, or read none."""
STATE_FILE = "training_state/asyncfetch.json"
"""A file in LeRobot's checkpoint, beside what it writes: where a stream has come to."""


def _import(module: str) -> Any:  # noqa: ANN401 - LeRobot is optional
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependency(f"asyncfetch.compat.lerobot needs LeRobot ({error}): {INSTALL_LEROBOT}") from error


# What a dataset says of itself.


def load_metadata(
    repo_id: str,
    root: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    *,
    repo_type: str = "dataset",
    config: FetchConfig | None = None,
    **options: Any,  # noqa: ANN401 - LeRobot's
) -> Any:  # noqa: ANN401
    """LeRobot's metadata of a dataset; of one whose root is a URL, or is of v2, from a copy for this process."""
    root = _root(repo_id, root, repo_type)
    if root is not None and ("://" in str(root) or _is_v2(Path(root))):
        directory = tempfile.TemporaryDirectory(prefix="asyncfetch-meta-")
        atexit.register(directory.cleanup)
        with start_blocking_portal() as portal:
            portal.call(_copy_metadata, str(root), Path(directory.name), config)
        root = directory.name
        options.pop("force_cache_sync", None)  # it is new
    metadata = _import("lerobot.datasets.dataset_metadata")
    return metadata.LeRobotDatasetMetadata(repo_id, root=root, revision=revision, **options)


def _is_v2(root: Path) -> bool:
    file = root / "meta/info.json"
    return file.exists() and is_v2(parse_json(file.read_bytes(), str(file)))


async def _copy_metadata(url: str, directory: Path, config: FetchConfig | None) -> None:
    async with Fetcher(config) if config is not None else Fetcher() as fetcher:

        async def copy(path: str) -> memoryview:
            data = await fetcher.fetch(join_url(url, path))
            await to_thread.run_sync(_write, directory / path, data)
            return data

        data, info_url = await copy("meta/info.json"), join_url(url, "meta/info.json")
        if is_v2(parse_json(data, info_url)):
            dataset = await load_version2(fetcher, url, run=to_thread.run_sync)
            await to_thread.run_sync(_write_as_v3, dataset, directory)
            return
        info = parse_info(data, info_url)
        await copy("meta/tasks.parquet")
        with suppress(AccessDenied, NotFound):  # a dataset may have none
            await copy("meta/stats.json")
        rows = number = 0
        while rows < info.total_episodes:
            chunk, file = divmod(number, info.chunks_size)
            data = await copy(EPISODES_PATH.format(chunk_index=chunk, file_index=file))
            rows += await to_thread.run_sync(_count_rows, data)
            number += 1


def _write_as_v3(dataset: Version2, directory: Path) -> None:
    """Write what LeRobot's trainer reads of a dataset's metadata. The frames stay where they are."""
    pandas, io = _import("pandas"), _import("lerobot.datasets.io_utils")
    metadata, table = dataset.metadata, dataset.metadata.episodes
    info = {key: value for key, value in dataset.raw_info.items() if key not in {"total_chunks", "total_videos"}}
    _write(directory / "meta/info.json", json.dumps(info).encode())
    tasks = dict(sorted(metadata.tasks.items()))
    pandas.DataFrame({"task_index": list(tasks)}, index=list(tasks.values())).to_parquet(
        directory / "meta/tasks.parquet"
    )
    file = directory / EPISODES_PATH.format(chunk_index=0, file_index=0)
    file.parent.mkdir(parents=True)
    columns = {
        "episode_index": list(table.indices),
        "length": table.lengths,
        "tasks": [list(episode.tasks) for episode in table],
        "dataset_from_index": table.starts,
        "dataset_to_index": table.starts + table.lengths,
    }
    pandas.DataFrame(columns).to_parquet(file, index=False)
    stats = metadata.stats
    if stats is None and dataset.episode_stats:
        of_episodes = [io.cast_stats_to_numpy(dict(stats)) for stats in dataset.episode_stats.values()]
        stats = _import("lerobot.datasets.compute_stats").aggregate_stats(of_episodes)
    if stats is not None:
        io.write_stats(stats, directory)


def _write(path: Path, data: bytes | memoryview) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _count_rows(data: memoryview) -> int:
    require_pyarrow()
    import pyarrow.parquet as pq

    return int(pq.ParquetFile(io.BytesIO(data)).metadata.num_rows)


def _root(repo_id: str, root: str | os.PathLike[str] | None, repo_type: str) -> str | os.PathLike[str] | None:
    """Return where a dataset is that isn't a repository of the Hub; None where it is one."""
    if repo_type not in {"dataset", "bucket"}:
        raise ConfigError(f"repo_type must be 'dataset' or 'bucket', not {repo_type!r:.80}")
    if repo_type == "dataset":
        return root
    if root is not None:
        raise ConfigError(f"root={str(root)!r} isn't read where repo_type='bucket': leave out one of the two")
    return f"hf://buckets/{repo_id}"


def _source(repo_id: str, root: str | os.PathLike[str] | None, meta: Any) -> str:  # noqa: ANN401
    """Return where the frames are: the root that was asked for, LeRobot's own folder of the dataset, or the Hub."""
    if root is not None:
        return str(root)
    if (Path(meta.root) / "data").is_dir():
        return str(meta.root)
    return f"hf://datasets/{repo_id}@{meta.revision}"


# Samples as LeRobot gives them.


@dataclass(slots=True)
class _AsLeRobot:
    """Makes a sample of ours one of LeRobot's, in place. Pickles if the transforms do."""

    images: frozenset[str]
    """Pictures of the table, which LeRobot gives as float32 whatever it is asked for."""
    videos: frozenset[str]
    squeezed: frozenset[str]
    """Videos of which a window of one frame is asked for: LeRobot gives the frame."""
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


_FLOATS = {torch.float16, torch.float64}
_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64}
"""Values that pass through Python's numbers in LeRobot, which torch makes float32 and int64 of."""


class _Described:
    """The attributes that LeRobot's trainer asks of a dataset beside its samples."""

    meta: Any
    repo_id: str
    episodes: Any
    """The chosen ones' indices; None where all are read."""
    delta_timestamps: Mapping[str, Sequence[float]] | None
    tolerance_s: float
    _as_lerobot: _AsLeRobot

    def _describe(
        self,
        repo_id: str,
        root: str | os.PathLike[str] | None,
        *,
        revision: str | None,
        delta_timestamps: Mapping[str, Sequence[float]] | None,
        image_transforms: Callable[[torch.Tensor], torch.Tensor] | None,
        tolerance_s: float,
        return_uint8: bool,
        depth_output_unit: DepthUnit,
        config: StreamConfig,
        **options: Any,  # noqa: ANN401
    ) -> None:
        if image_transforms is not None and not callable(image_transforms):
            raise ConfigError(f"image_transforms must be callable, or None, not {image_transforms!r:.80}")
        self.repo_id = repo_id
        self.delta_timestamps = delta_timestamps
        self.tolerance_s = tolerance_s
        self.depth_output_unit: DepthUnit = depth_output_unit
        self.meta = load_metadata(repo_id, root, revision, config=config.fetch, **options)
        self.meta.rescale_depth_stats(depth_output_unit)
        self.root, self.revision = self.meta.root, self.meta.revision
        windows = delta_timestamps or {}
        videos = frozenset(self.meta.video_keys)
        self._as_lerobot = _AsLeRobot(
            images=frozenset(self.meta.image_keys),
            videos=videos,
            squeezed=frozenset(key for key in videos if len(windows.get(key, ())) == 1),
            depth=frozenset(self.meta.depth_keys),
            return_uint8=return_uint8,
            image_transforms=image_transforms,
        )

    @property
    def fps(self) -> int:
        """Frames a second."""
        return self.meta.fps  # type: ignore[no-any-return]

    @property
    def features(self) -> dict[str, dict[str, Any]]:
        """The features as info.json has them."""
        return self.meta.features  # type: ignore[no-any-return]

    @property
    def num_episodes(self) -> int:
        """Number of episodes of the dataset, or of those that were chosen."""
        return int(self.meta.total_episodes) if self.episodes is None else len(self.episodes)

    @property
    def num_frames(self) -> int:
        """Number of frames of these episodes."""
        if self.episodes is None:
            return int(self.meta.total_frames)
        lengths = self.meta.episodes["length"]
        return sum(int(lengths[episode]) for episode in self.episodes)

    @property
    def image_transforms(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Applied to each picture that isn't depth, in a decode thread."""
        return self._as_lerobot.image_transforms

    def set_image_transforms(self, image_transforms: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        """Apply others from the next pass on."""
        self._as_lerobot.image_transforms = image_transforms

    def clear_image_transforms(self) -> None:
        """Apply none from the next pass on."""
        self.set_image_transforms(None)


class StreamingLeRobotDataset(_Described, StreamDataset):
    """LeRobot's streaming dataset, read by a ``Stream``: for a ``DataLoader`` with any number of workers.

    It takes a rank's and a worker's share by itself, also where accelerate's ``prepare`` is given its loader.

    Args:
        repo_id: The dataset on the Hub; where there is a ``root``, only its name.
        root: A folder, or any URL that this library reads.
        episodes, image_transforms, delta_timestamps, tolerance_s, revision, force_cache_sync, seed, shuffle,
            return_uint8, depth_output_unit, token: LeRobot's. ``token`` is for the metadata; the frames are read with
            ``config``'s.
        streaming, max_num_shards, buffer_size, rng: Of no meaning here: all of the dataset is one order, which
            ``config`` and ``seed`` make.
        repo_type: "dataset", or "bucket": then ``repo_id`` is a bucket's, and there is no ``root``.
        config: Bounds, limits and threads; by default an epoch ends alike on all ranks (``uneven_ends="drop"``).
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
        root = _root(repo_id, root, repo_type)
        config = _with_tolerance(stream_config(config or StreamConfig(uneven_ends="drop")), tolerance_s)
        self._describe(
            repo_id,
            root,
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
        self.episodes = None if episodes is None else list(episodes)
        self.seed = seed
        self.shuffle = shuffle
        stream = Stream(
            _source(repo_id, root, self.meta),
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
        _leave_loaders_alone()

    def load_state_dict(self, state: State) -> None:
        """Go on where ``state`` was taken, of whatever number of ranks, batches and workers it is."""
        super().load_state_dict(state)
        self._begun = self.stream.epoch

    def state_at(self, step: int, *, batch_size: int, num_workers: int, world_size: int) -> State:
        """The state of all ranks together when each has been given so many batches by a loader, epoch after epoch.

        Args:
            step: Batches since the first epoch began, or since a state was loaded.
            batch_size: The loader's, of each rank.
            num_workers: The loader's.
            world_size: Ranks.

        Raises:
            ConfigError: Epochs don't end alike on all ranks: leave ``uneven_ends`` of ``config`` at "drop" or "pad".
        """
        workers = max(1, num_workers)
        ranks = [
            [self._in_batches(Placement(rank, world_size, worker, workers)) for worker in range(workers)]
            for rank in range(world_size)
        ]
        epoch = self._begun
        while True:
            plans = [[self.stream.planned(placement, epoch) for placement in rank] for rank in ranks]
            left = [[-(-len(plan) // batch_size) for plan in rank] for rank in plans]
            batches = {sum(rank) for rank in left}
            if len(batches) > 1:
                raise ConfigError(
                    f"ranks have {sorted(batches)} batches of epoch {epoch}, so that no step is one place for all: "
                    'set StreamConfig(uneven_ends="drop") or "pad"'
                )
            if step < (count := batches.pop()) or not count:
                break
            step, epoch = step - count, epoch + 1
        if not step:
            return self.stream.planned(ranks[0][0], epoch).progress.state()
        states = []
        for rank, counts in zip(plans, left, strict=True):
            for plan, given in zip(rank, _in_turns(counts, step), strict=True):
                delivered = min(plan.begun + given * batch_size, plan.end)
                states.append(replace(plan.progress, delivered=delivered).state())
        return merge_shares(states)

    def __repr__(self) -> str:
        return f"StreamingLeRobotDataset({self.repo_id!r}, {self.stream!r})"


def _in_turns(left: Sequence[int], batches: int) -> list[int]:
    """Return how many of the first so many batches each worker of a loader has given, by how many it has."""
    given = [0] * len(left)
    turns = (worker for number in range(max(left)) for worker in range(len(left)) if number < left[worker])
    for worker in islice(turns, batches):
        given[worker] += 1
    return given


class LeRobotDataset(_Described, FrameDataset):
    """LeRobot's map-style dataset, which reads each batch's episodes at once where they are, without a download.

    Args:
        repo_id, root, episodes, image_transforms, delta_timestamps, tolerance_s, revision, force_cache_sync,
            return_uint8, depth_output_unit, token, config: As of ``StreamingLeRobotDataset``. Frames come in the
            dataset's order, whatever that of ``episodes``.
        download_videos: Of no meaning here: nothing is downloaded.
        video_backend: "pyav" for that decoder; else ``config`` chooses.
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
        download_videos: bool = True,
        video_backend: str | None = None,
        return_uint8: bool = False,
        depth_output_unit: DepthUnit = "mm",
        *,
        token: str | bool | None = None,
        config: StreamConfig | None = None,
    ) -> None:
        config = _with_tolerance(stream_config(config), tolerance_s)
        if video_backend == "pyav":
            config = replace(config, decoder="pyav")
        self._describe(
            repo_id,
            root,
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
        self._given_root = root
        super().__init__(
            _source(repo_id, root, self.meta),
            windows=delta_timestamps,
            episodes=None if episodes is None else sorted(episodes),
            depth_unit=depth_output_unit,
            config=config,
        )

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """The samples of several frames, read concurrently, in the asked order."""
        return [self._as_lerobot(sample) for sample in super().__getitems__(indices)]

    @property
    def absolute_to_relative_idx(self) -> dict[int, int] | None:
        """The place here of each frame of chosen episodes, by its ``index``; None where all are read."""
        if self.episodes is None:
            return None
        bounds = (self.meta.episodes[episode] for episode in self.episodes)
        indices = [i for each in bounds for i in range(each["dataset_from_index"], each["dataset_to_index"])]
        return {index: place for place, index in enumerate(indices)}

    def streamed(self, *, seed: int) -> StreamingLeRobotDataset:
        """Return the same episodes as a stream."""
        return StreamingLeRobotDataset(
            self.repo_id,
            self._given_root,
            self.episodes,
            self.image_transforms,
            self.delta_timestamps,
            self.tolerance_s,
            self.revision,
            seed=seed,
            return_uint8=self._as_lerobot.return_uint8,
            depth_output_unit=self.depth_output_unit,
            config=replace(self.config, uneven_ends="drop"),
        )


def _with_tolerance(config: StreamConfig, tolerance_s: float) -> StreamConfig:
    return config if tolerance_s == config.tolerance_seconds else replace(config, tolerance_seconds=tolerance_s)


@functools.cache
def _leave_loaders_alone() -> None:
    """Have accelerate take a loader over a stream as it is, which is one rank's share already."""
    try:
        from accelerate import Accelerator
    except ImportError:
        return
    prepare = Accelerator.prepare_data_loader

    @functools.wraps(prepare)
    def prepare_data_loader(self: Any, data_loader: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        if isinstance(data_loader.dataset, StreamingLeRobotDataset):
            return data_loader
        return prepare(self, data_loader, *args, **options)

    Accelerator.prepare_data_loader = prepare_data_loader


# LeRobot's commands.


def run(command: str, arguments: Sequence[str]) -> None:
    """Run one of LeRobot's commands in this process, with its datasets replaced by these.

    Raises:
        MissingDependency: LeRobot isn't installed.
        ConfigError: It has no such command, or none that reads a dataset; or a flag's value has no meaning here.
    """
    factory = _import("lerobot.datasets.factory")
    if command not in READING_COMMANDS:
        raise ConfigError(
            f"{command!r} is no command of LeRobot's that reads a dataset: these are {', '.join(READING_COMMANDS)}; "
            "run any other as it is"
        )
    (script,) = entry_points(group="console_scripts", name=command)
    main = script.load()
    if command == "lerobot-train":
        _replace_datasets(factory)
    else:
        _import(script.module).LeRobotDataset = LeRobotDataset
    sys.argv = [command, *arguments]
    main()


def _replace_datasets(factory: Any) -> None:  # noqa: ANN401
    """Put these classes where LeRobot's factory of datasets, and its trainer, look theirs up."""
    make_dataset, make_datasets = factory.make_dataset, factory.make_train_eval_datasets
    streams: list[tuple[int, StreamingLeRobotDataset]] = []

    def make(config: Any) -> Any:  # noqa: ANN401
        unit = config.dataset.depth_output_unit
        decoder: DecoderBackend = "pyav" if config.dataset.video_backend == "pyav" else "auto"
        factory.LeRobotDataset = functools.partial(LeRobotDataset, depth_output_unit=unit)
        factory.StreamingLeRobotDataset = functools.partial(
            StreamingLeRobotDataset,
            seed=_seed(config),
            depth_output_unit=unit,
            config=StreamConfig(uneven_ends="drop", decoder=decoder),
        )
        return make_dataset(config)

    def make_train_and_eval(config: Any) -> tuple[Any, Any]:  # noqa: ANN401
        if config.dataset.eval_split and config.max_eval_samples:
            raise ConfigError("max_eval_samples isn't known here: leave it out, or choose a smaller eval_split")
        train, evaluation = make_datasets(config)
        if config.dataset.streaming and isinstance(train, LeRobotDataset):  # held-out episodes make it map-style
            train = train.streamed(seed=_seed(config))
        if isinstance(train, StreamingLeRobotDataset):
            streams.append((_go_on(train, config) if config.resume else 0, train))
        return train, evaluation

    factory.LeRobotDatasetMetadata = load_metadata
    factory.LeRobotDataset = LeRobotDataset
    factory.make_dataset = make
    factory.make_train_eval_datasets = make_train_and_eval
    trainer = _import("lerobot.scripts.lerobot_train")
    trainer.make_train_eval_datasets = make_train_and_eval
    save_checkpoint = trainer.save_checkpoint

    @functools.wraps(save_checkpoint)
    def save_with_state(*, checkpoint_dir: Path, step: int, cfg: Any, num_processes: int, **options: Any) -> None:  # noqa: ANN401
        save_checkpoint(checkpoint_dir=checkpoint_dir, step=step, cfg=cfg, num_processes=num_processes, **options)
        if streams:
            begun, dataset = streams[-1]
            state = dataset.state_at(
                step - begun, batch_size=cfg.batch_size, num_workers=cfg.num_workers, world_size=num_processes
            )
            (checkpoint_dir / STATE_FILE).write_text(json.dumps(state))

    trainer.save_checkpoint = save_with_state


def _go_on(dataset: StreamingLeRobotDataset, config: Any) -> int:  # noqa: ANN401
    """Load what the checkpoint says of the data; its step."""
    checkpoints = _import("lerobot.common.train_utils")
    file = config.checkpoint_path / STATE_FILE
    if not file.exists():
        raise ConfigError(
            f"{config.checkpoint_path} has no {STATE_FILE}, which `asyncfetch run` writes: where its run has come to "
            "in the data isn't known. Go on with the command that wrote it, or without --resume from its policy"
        )
    dataset.load_state_dict(json.loads(file.read_text()))
    return int(checkpoints.load_training_step(file.parent))


def _seed(config: Any) -> int:  # noqa: ANN401
    return 0 if config.seed is None else int(config.seed)
