"""Train with transformers' Trainer, in one process or several: it takes the loader as it is.

torchrun --nproc-per-node 2 examples/transformers_trainer.py https://host/dataset        or a path

By itself the Trainer hands its loader to accelerate, which would share out once more what is one process's share, and
can't send the tasks, which are strings, to the others. So override ``get_train_dataloader``. Needs
`pip install "asyncfetch[lerobot]" transformers accelerate`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import asyncfetch as af

if TYPE_CHECKING:
    from collections.abc import Sequence


class StreamTrainer(Trainer):  # type: ignore[misc]  # where transformers isn't installed
    """A Trainer over a StreamDataset that makes the batches."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The loader, which accelerate never sees."""
        return DataLoader(self.train_dataset, batch_size=None, num_workers=self.args.dataloader_num_workers)


class Policy(nn.Module):
    """Predicts the action from the robot's state, and notes which frames it was given."""

    def __init__(self, state_size: int, action_size: int) -> None:
        super().__init__()
        self.act = nn.Sequential(nn.Linear(state_size, 32), nn.ReLU(), nn.Linear(32, action_size))
        self.frames: list[int] = []

    def forward(self, **batch: Any) -> dict[str, torch.Tensor]:  # noqa: ANN401 - the batch's keys
        """The loss of a batch."""
        self.frames += batch["index"].tolist()
        return {"loss": nn.functional.smooth_l1_loss(self.act(batch["observation.state"]), batch["action"])}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train for an epoch, and say which frames there were."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="URL or path of a LeRobot v3 dataset")
    parser.add_argument("--ca-file", help="PEM file of the authorities to trust instead of the system's")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--num-workers", type=int, default=0)
    options = parser.parse_args(arguments)

    config = af.StreamConfig(fetch=af.FetchConfig(ca_file=options.ca_file), uneven_ends="drop")  # as many steps for all
    with tempfile.TemporaryDirectory() as directory:
        training = TrainingArguments(
            output_dir=directory,
            num_train_epochs=1,
            dataloader_num_workers=options.num_workers,
            ddp_find_unused_parameters=False,
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        stream = af.Stream(options.url, seed=0, config=config)
        dataset = af.torch.StreamDataset(stream, batch_size=options.batch_size)
        first = next(iter(stream))
        policy = Policy(len(first["observation.state"]), len(first["action"]))
        stream.set_epoch(0)
        trainer = StreamTrainer(model=policy, args=training, train_dataset=dataset)
        loss = trainer.train().training_loss
        trainer.accelerator.end_training()
    line = f"process {training.process_index} of {training.world_size}: mean loss {loss:.4f}, frames"
    sys.stdout.write(" ".join([line, *map(str, policy.frames)]) + "\n")  # at once: other processes write there, too


if __name__ == "__main__":
    main()
