"""LeRobot's commands, run in this process with these datasets in place of its own."""

from __future__ import annotations

import functools
import json
import sys
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from asyncfetch.compat.lerobot.datasets import LEROBOTS_PYAV, LeRobotDataset, StreamingLeRobotDataset
from asyncfetch.compat.lerobot.metadata import import_lerobots, load_metadata
from asyncfetch.config import StreamConfig
from asyncfetch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from asyncfetch.config import DecoderBackend

__all__ = ["replace_datasets", "run"]

READING_COMMANDS = ("lerobot-train", "lerobot-dataset-viz", "lerobot-imgtransform-viz")
"""LeRobot's others write datasets, or read none."""
STATE_FILE = "training_state/asyncfetch.json"
"""A file in LeRobot's checkpoint, beside what it writes: where a stream has come to."""


def run(command: str, arguments: Sequence[str]) -> None:
    """Run one of LeRobot's commands in this process, with its datasets replaced by these.

    Raises:
        MissingDependency: LeRobot isn't installed.
        ConfigError: It has no such command, or none that reads a dataset; or a flag's value has no meaning here.
    """
    factory = import_lerobots("lerobot.datasets.factory")
    if command not in READING_COMMANDS:
        raise ConfigError(
            f"{command!r} is no command of LeRobot's that reads a dataset: these are {', '.join(READING_COMMANDS)}; "
            "run any other as it is"
        )
    (script,) = entry_points(group="console_scripts", name=command)
    main = script.load()
    if command == "lerobot-train":
        replace_datasets(factory)
    else:
        import_lerobots(script.module).LeRobotDataset = LeRobotDataset
    sys.argv = [command, *arguments]
    main()


def replace_datasets(factory: Any) -> None:  # noqa: ANN401
    """Put these classes where LeRobot's factory of datasets, and its trainer, look theirs up."""
    make_dataset, make_datasets = factory.make_dataset, factory.make_train_eval_datasets
    streams: list[tuple[int, StreamingLeRobotDataset]] = []

    def make(config: Any) -> Any:  # noqa: ANN401
        unit = config.dataset.depth_output_unit
        decoder: DecoderBackend = "pyav-unturned" if config.dataset.video_backend in LEROBOTS_PYAV else "auto"
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
    trainer = import_lerobots("lerobot.scripts.lerobot_train")
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
    checkpoints = import_lerobots("lerobot.common.train_utils")
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
