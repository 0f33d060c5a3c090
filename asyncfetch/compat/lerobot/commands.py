"""LeRobot's commands, run in this process with these datasets in place of its own."""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
from typing import TYPE_CHECKING, Any

from asyncfetch.compat.lerobot.datasets import LEROBOTS_PYAV, LeRobotDataset, StreamingLeRobotDataset
from asyncfetch.compat.lerobot.metadata import INSTALL_LEROBOT, import_lerobots, load_metadata
from asyncfetch.config import StreamConfig
from asyncfetch.errors import ConfigError
from asyncfetch.stream.ranks import find_rank

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from asyncfetch.config import DecoderBackend

READING_COMMANDS = {
    "lerobot-train": "lerobot.scripts.lerobot_train",
    "lerobot-dataset-viz": "lerobot.scripts.lerobot_dataset_viz",
    "lerobot-imgtransform-viz": "lerobot.scripts.lerobot_imgtransform_viz",
}
"""Modules of the commands that read a dataset. LeRobot's other commands write datasets, or read none."""
KNOWN_VERSIONS = re.compile(r"0\.6\.[12]\b|unknown")
"""0.6.2 is its main branch. A source tree that isn't installed says "unknown"."""
FACTORY_NAMES = (
    *("LeRobotDatasetMetadata", "LeRobotDataset", "StreamingLeRobotDataset"),
    *("make_dataset", "make_train_eval_datasets"),
)
TRAINER_NAMES = ("make_train_eval_datasets", "save_checkpoint")
"""Names in LeRobot's factory of datasets, and in its trainer, that are replaced."""
SAVED_BY_NAME = {"checkpoint_dir", "step", "cfg"}
"""The arguments of ``save_checkpoint`` that say how far a run is."""
STATE_FILE = "training_state/asyncfetch.json"
"""The file of a stream's state in LeRobot's checkpoint."""
STEP_FILE = "training_step.json"
"""LeRobot's own file beside it."""


def run(command: str, arguments: Sequence[str]) -> None:
    """Run one of LeRobot's commands in this process, with its datasets replaced by these.

    Raises:
        MissingDependency: LeRobot isn't installed.
        ConfigError: It has no such command that reads a dataset; a flag's value isn't supported; or this version of
            LeRobot isn't.
    """
    package = import_lerobots("lerobot")
    if command not in READING_COMMANDS:
        raise ConfigError(
            f"{command!r} is no command of LeRobot's that reads a dataset: these are {', '.join(READING_COMMANDS)}; "
            "run any other as it is"
        )
    if not KNOWN_VERSIONS.match(package.__version__):
        raise _unknown_lerobot("others aren't known")
    script = import_lerobots(READING_COMMANDS[command])
    if command == "lerobot-train":
        replace_datasets(import_lerobots("lerobot.datasets.factory"))
    else:
        script.LeRobotDataset = LeRobotDataset
    sys.argv = [command, *arguments]
    script.main()


def replace_datasets(factory: Any) -> None:  # noqa: ANN401
    """Replace LeRobot's dataset classes in its factory of datasets, and in its trainer."""
    trainer = import_lerobots("lerobot.scripts.lerobot_train")
    _require_known(factory, trainer)
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
            streams.append((_resume(train, config) if config.resume else 0, train))
        return train, evaluation

    factory.LeRobotDatasetMetadata = load_metadata
    factory.LeRobotDataset = LeRobotDataset
    factory.make_dataset = make
    factory.make_train_eval_datasets = make_train_and_eval
    trainer.make_train_eval_datasets = make_train_and_eval
    save_checkpoint = trainer.save_checkpoint

    @functools.wraps(save_checkpoint)
    def save_with_state(*, checkpoint_dir: Path, step: int, cfg: Any, **options: Any) -> None:  # noqa: ANN401
        save_checkpoint(checkpoint_dir=checkpoint_dir, step=step, cfg=cfg, **options)
        rank, world_size = find_rank()
        if streams and rank == 0:  # LeRobot 0.6.2 calls this on every rank, 0.6.1 on the first
            begun, dataset = streams[-1]
            state = dataset.state_at(
                step - begun, batch_size=cfg.batch_size, num_workers=cfg.num_workers, world_size=world_size
            )
            (checkpoint_dir / STATE_FILE).write_text(json.dumps(state))

    trainer.save_checkpoint = save_with_state


def _require_known(factory: Any, trainer: Any) -> None:  # noqa: ANN401
    for module, names in ((factory, FACTORY_NAMES), (trainer, TRAINER_NAMES)):
        missing = [name for name in names if not hasattr(module, name)]
        if missing:
            raise _unknown_lerobot(f"its {module.__name__} has no {missing[0]}")
    missing = sorted(SAVED_BY_NAME - set(inspect.signature(trainer.save_checkpoint).parameters))
    if missing:
        raise _unknown_lerobot(f"its save_checkpoint has no {missing[0]}")


def _unknown_lerobot(difference: str) -> ConfigError:
    version = import_lerobots("lerobot").__version__
    return ConfigError(
        f"asyncfetch runs commands of LeRobot 0.6.1, and of its main branch of August 2026 (0.6.2). This is LeRobot "
        f"{version}, and {difference}: {INSTALL_LEROBOT}"
    )


def _resume(dataset: StreamingLeRobotDataset, config: Any) -> int:  # noqa: ANN401
    """Load the checkpoint's state of the data; returns its step."""
    file = config.checkpoint_path / STATE_FILE
    if not file.exists():
        raise ConfigError(
            f"{config.checkpoint_path} has no {STATE_FILE}, which `asyncfetch run` writes: where its run has come to "
            "in the data isn't known. Go on with the command that wrote it, or without --resume from its policy"
        )
    dataset.load_state_dict(json.loads(file.read_text()))
    return int(json.loads(file.with_name(STEP_FILE).read_text())["step"])


def _seed(config: Any) -> int:  # noqa: ANN401
    return 0 if config.seed is None else int(config.seed)
