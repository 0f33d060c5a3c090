"""Train a small policy for some hundred steps, stop, and go on with the losses of a run that was never stopped.

python examples/train_policy.py https://host/dataset --checkpoint policy.pt        or a path
python examples/train_policy.py https://host/dataset --checkpoint policy.pt        goes on where the first was stopped

The policy sees the state of the robot and a small picture of each camera, now and a tenth of a second ago, and predicts
the next actions. The dataset makes the batches, so that they are the same whatever --num-workers says, and the position
in the epoch is saved with the weights. Needs `pip install "asyncfetch[lerobot,cli]"`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import torch
from rich.console import Console
from rich.progress import track
from torch import nn
from torch.utils.data import DataLoader

import asyncfetch as af

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HORIZON = 4
"""Actions predicted from one frame: its own and the following ones."""
SIDE = 16
"""Pixels of the pictures that the policy sees."""


async def look(url: str, config: af.StreamConfig) -> tuple[tuple[str, ...], int]:
    """Cameras of the dataset, and numbers in one action."""
    async with af.open_dataset(url, config=config) as dataset:
        return dataset.cameras, dataset.features["action"].shape[0]


class Policy(nn.Module):
    """Predicts (batch, HORIZON, action size). The first layers take their sizes from the first batch."""

    def __init__(self, cameras: Sequence[str], action_size: int) -> None:
        super().__init__()
        self.cameras = cameras
        self.see = nn.Sequential(nn.LazyConv2d(16, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(32), nn.ReLU())
        self.act = nn.Sequential(
            nn.LazyLinear(64),
            nn.ReLU(),
            nn.LazyLinear(HORIZON * action_size),
            nn.Unflatten(1, (HORIZON, action_size)),
        )

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The actions of a batch of samples."""
        small = [nn.functional.interpolate(batch[camera].flatten(1, 2), (SIDE, SIDE)) for camera in self.cameras]
        seen = self.see(torch.cat(small, dim=1).float() / 255)
        actions: torch.Tensor = self.act(torch.cat([seen, batch["observation.state"]], dim=1))
        return actions


class Training:
    """A policy, its optimiser, and the place in the data; saved and loaded together."""

    def __init__(self, stream: af.Stream, policy: Policy, batch_size: int, num_workers: int) -> None:
        self.dataset = af.torch.StreamDataset(stream, batch_size=batch_size, drop_last=True)
        self.num_workers = num_workers
        self.policy = policy
        first = next(iter(self.dataset), None)
        if first is None:
            raise SystemExit(f"the dataset has no {batch_size} frames, which make a batch: take a smaller --batch-size")
        self.policy(first)  # sizes the layers
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=3e-3)
        self.losses: list[float] = []
        self.batches_of_epoch = 0

    def batches(self) -> Iterator[dict[str, torch.Tensor]]:
        """Epoch after epoch."""
        while True:
            self.batches_of_epoch = 0
            for batch in DataLoader(self.dataset, batch_size=None, num_workers=self.num_workers):
                self.batches_of_epoch += 1
                yield batch

    def step(self, batch: dict[str, torch.Tensor]) -> None:
        """One step of the optimiser."""
        # Actions beyond the end of the episode repeat its last one; they don't count.
        inside = ~batch["action_is_pad"]
        loss = nn.functional.smooth_l1_loss(self.policy(batch)[inside], batch["action"][inside])
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.losses.append(loss.item())

    def save(self, path: Path) -> None:
        """What ``load`` needs."""
        state = {
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "data": self.dataset.state_after(self.batches_of_epoch, num_workers=self.num_workers),
            "losses": self.losses,
        }
        torch.save(state, path)

    def load(self, path: Path) -> None:
        """Go on where it was saved."""
        state: dict[str, Any] = torch.load(path)
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.dataset.load_state_dict(state["data"])
        self.losses = state["losses"]


def plot(losses: Sequence[float], path: Path) -> None:
    """The losses as a picture. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss", yscale="log")
    axes.plot(losses, linewidth=1)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, from the checkpoint where there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="URL or path of a LeRobot v3 dataset")
    parser.add_argument("--ca-file", help="PEM file of the authorities to trust instead of the system's")
    parser.add_argument("--steps", type=int, default=300, help="in all, over all runs (default: 300)")
    parser.add_argument("--stop-after", type=int, help="stop after so many, to go on another time")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="file to go on from, and to save to at the end")
    parser.add_argument("--plot", type=Path, help="picture of the losses to write, such as losses.png")
    options = parser.parse_args(arguments)
    config = af.StreamConfig(fetch=af.FetchConfig(ca_file=options.ca_file))
    cameras, action_size = anyio.run(look, options.url, config)
    windows = {camera: [-0.1, 0.0] for camera in cameras} | {"action": af.frames(*range(HORIZON))}
    stream = af.Stream(options.url, windows=windows, config=config)
    torch.manual_seed(0)
    training = Training(stream, Policy(cameras, action_size), options.batch_size, options.num_workers)
    if options.checkpoint is not None and options.checkpoint.exists():
        training.load(options.checkpoint)
    else:
        stream.set_epoch(0)
    until = options.steps if options.stop_after is None else min(options.steps, options.stop_after)
    steps = range(len(training.losses), until)
    batches = training.batches()
    for number in track(steps, "training", console=Console(stderr=True)):
        training.step(next(batches))
        if (number + 1) % 20 == 0:
            print(f"step {number + 1}: loss {training.losses[-1]:.6f}")
    if options.checkpoint is not None:
        training.save(options.checkpoint)
    if options.plot is not None:
        plot(training.losses, options.plot)
    stream.close()


if __name__ == "__main__":
    main()
