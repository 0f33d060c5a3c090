"""Train on a stream: a DataLoader with workers that live from epoch to epoch, and a small policy.

python examples/dataloader.py https://host/dataset        or a path

From a small picture of each camera the policy predicts the next actions. Needs `pip install "asyncfetch[lerobot]"`.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import anyio
import torch
from torch import nn
from torch.utils.data import DataLoader

import asyncfetch as af

if TYPE_CHECKING:
    from collections.abc import Sequence

HORIZON = 4
"""Actions predicted from one frame: its own and the following ones."""
SIDE = 8
"""Pixels of the pictures that the policy sees."""


async def sizes(url: str, config: af.StreamConfig) -> tuple[int, int]:
    """Cameras of the dataset, and numbers in one action."""
    async with af.open_dataset(url, config=config) as dataset:
        return len(dataset.cameras), dataset.features["action"].shape[0]


def policy(cameras: int, action_size: int) -> nn.Module:
    """(batch, 3 per camera, SIDE, SIDE) to (batch, HORIZON, action)."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(3 * cameras * SIDE * SIDE, 64),
        nn.ReLU(),
        nn.Linear(64, HORIZON * action_size),
        nn.Unflatten(1, (HORIZON, action_size)),
    )


def pictures(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """All cameras side by side, (batch, 3 per camera, SIDE, SIDE), in [0, 1]."""
    cameras = sorted(key for key in batch if key.startswith("observation.images."))
    small = [nn.functional.interpolate(batch[camera], (SIDE, SIDE)) for camera in cameras]
    return torch.cat(small, dim=1).float() / 255


def train(model: nn.Module, dataset: af.torch.StreamDataset, epochs: int, num_workers: int, batch_size: int) -> None:
    """Some epochs; prints the mean loss of each."""
    # Workers that stay keep their connections and caches from epoch to epoch.
    loader: DataLoader[dict[str, torch.Tensor]] = DataLoader(
        dataset, batch_size=batch_size, num_workers=num_workers, persistent_workers=num_workers > 0
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        dataset.set_epoch(epoch)  # the order of the frames is a function of seed and epoch
        total, samples = 0.0, 0
        for batch in loader:
            # Actions beyond the end of the episode repeat its last one; they don't count.
            inside = ~batch["action_is_pad"]
            loss = nn.functional.smooth_l1_loss(model(pictures(batch))[inside], batch["action"][inside])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.item() * len(inside)
            samples += len(inside)
        print(f"epoch {epoch}: {samples} samples, mean loss {total / max(1, samples):.4f}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Stream the dataset into the training loop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="URL or path of a LeRobot v3 dataset")
    parser.add_argument("--ca-file", help="PEM file of the authorities to trust instead of the system's")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=32)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    torch.set_num_threads(1)  # the cores are for the decode threads; torch's own would fight them for every core
    config = af.StreamConfig(fetch=af.FetchConfig(ca_file=options.ca_file))
    model = policy(*anyio.run(sizes, options.url, config))
    stream = af.Stream(options.url, seed=0, windows={"action": af.frames(*range(HORIZON))}, config=config)
    train(model, af.torch.StreamDataset(stream), options.epochs, options.num_workers, options.batch_size)


if __name__ == "__main__":
    main()
