"""LeRobot's trainer by ``asyncfetch run``, as one rank of a launcher's; each batch's frames are written down.

torchrun --nproc-per-node 2 tests/peers/record_batches.py DIRECTORY --policy.type=act ...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from lerobot.scripts import lerobot_train

from asyncfetch.compat.lerobot import StreamingLeRobotDataset, run


def shard_on_cpu() -> None:
    """Have accelerate, which shards models of GPUs only, take the CPU for several of them."""
    from accelerate.state import DistributedType, PartialState

    torch.distributed.init_process_group("gloo")
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))


if __name__ == "__main__":
    if "SHARDS_ON_CPU" in os.environ:
        shard_on_cpu()
    directory, *arguments = sys.argv[1:]
    rank = os.environ["RANK"]
    update, state_at = lerobot_train.update_policy, StreamingLeRobotDataset.state_at
    policies: list[Any] = []  # the last one, held until the end

    def note(file: str, *words: object) -> None:
        """Write a line."""
        with (Path(directory) / file).open("a") as lines:
            print(*words, file=lines)

    def update_policy(metrics: Any, policy: Any, batch: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        """Write down, and update."""
        note(rank, *batch["index"].tolist())
        policies[:] = [policy]
        return update(metrics, policy, batch, *args, **options)

    def noted_state(self: StreamingLeRobotDataset, step: int, **options: int) -> Any:  # noqa: ANN401
        """Write down which rank saves how far the run is."""
        note("states", rank, step, options["world_size"])
        return state_at(self, step, **options)

    lerobot_train.update_policy = update_policy
    StreamingLeRobotDataset.state_at = noted_state  # type: ignore[method-assign]
    run("lerobot-train", arguments)
    sys.stdout.flush()
    # Torch 2.11 sometimes waits for itself when the last reference to a DDP model goes: its destructor joins gloo's
    # thread while it holds the interpreter, which that thread needs.
    os._exit(0)
