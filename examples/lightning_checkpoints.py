"""Train with Lightning, and go on from a checkpoint in the middle of an epoch with just the frames that were left.

python examples/lightning_checkpoints.py https://host/dataset --stop-after 12        or a path
python examples/lightning_checkpoints.py https://host/dataset        goes on behind the last checkpoint, step 10

Lightning saves the state of a loader that has one. torch's DataLoader has none: an epoch that was stopped would begin
anew. torchdata's StatefulDataLoader has one. Needs `pip install "asyncfetch[lerobot]" torchdata pytorch-lightning`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import asyncfetch as af

if TYPE_CHECKING:
    from collections.abc import Sequence


class Policy(pl.LightningModule):
    """Predicts the action from the robot's state, and notes which frames it was given."""

    def __init__(self, state_size: int, action_size: int) -> None:
        super().__init__()
        self.act = nn.Sequential(nn.Linear(state_size, 32), nn.ReLU(), nn.Linear(32, action_size))
        self.frames: list[int] = []

    def training_step(self, batch: dict[str, Any], _: int) -> torch.Tensor:
        """The loss of a batch."""
        self.frames += batch["index"].tolist()
        return nn.functional.smooth_l1_loss(self.act(batch["observation.state"]), batch["action"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As Lightning asks for it."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train to the end of the epoch, from the checkpoint where there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="URL or path of a LeRobot v3 dataset")
    parser.add_argument("--ca-file", help="PEM file of the authorities to trust instead of the system's")
    parser.add_argument("--checkpoint", type=Path, default=Path("policy.ckpt"), help="file to save to and go on from")
    parser.add_argument("--save-every", type=int, default=5, help="steps from checkpoint to checkpoint")
    parser.add_argument("--stop-after", type=int, default=-1, help="stop after so many steps, to go on another time")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--num-workers", type=int, default=0)
    options = parser.parse_args(arguments)

    config = af.StreamConfig(fetch=af.FetchConfig(ca_file=options.ca_file))
    stream = af.Stream(options.url, seed=0, config=config)
    first = next(iter(stream))
    stream.set_epoch(0)
    policy = Policy(len(first["observation.state"]), len(first["action"]))
    dataset = af.torch.StreamDataset(stream, batch_size=options.batch_size, drop_last=True)
    loader: Any = StatefulDataLoader(dataset, batch_size=None, num_workers=options.num_workers)
    path: Path = options.checkpoint
    checkpoints = ModelCheckpoint(
        path.parent, path.stem, every_n_train_steps=options.save_every, enable_version_counter=False
    )
    trainer = pl.Trainer(
        max_epochs=1,
        max_steps=options.stop_after,
        accelerator="auto",
        callbacks=checkpoints,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(policy, loader, ckpt_path=path if path.exists() else None, weights_only=False)
    print(f"to step {trainer.global_step}, frames", *policy.frames)


if __name__ == "__main__":
    main()
