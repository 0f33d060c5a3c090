"""Train a small model on clips of videos in tar shards, which are neither unpacked nor split first.

python examples/train_on_tars.py "https://host/shards/{000000..000123}.tar"        or paths, s3://, hf://

Each sample is a clip of FRAMES frames from a random place of a video, with what lies beside that in the shard. From the
first frames the model predicts the last one, small and gray. Needs `pip install "asyncfetch[videos]"`.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.data import DataLoader

import asyncfetch as af

if TYPE_CHECKING:
    from collections.abc import Sequence

FRAMES, FPS = 5, 5.0
"""Frames of a clip, and how many of them there are in a second, whatever the rate of the video."""
SIDE = 16
"""Pixels of the pictures, which come in this size from the decoder."""


class Predictor(nn.Module):
    """The last frame of a clip by those before it: that before it, and a change."""

    def __init__(self) -> None:
        super().__init__()
        self.change = nn.Conv2d(FRAMES - 1, 1, 3, padding=1)
        for parameter in self.change.parameters():
            nn.init.zeros_(parameter)

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        """(batch, FRAMES - 1, SIDE, SIDE) to (batch, SIDE, SIDE)."""
        predicted: torch.Tensor = seen[:, -1] + self.change(seen).squeeze(1)
        return predicted


def train(model: nn.Module, dataset: af.torch.StreamDataset, epochs: int, num_workers: int) -> None:
    """Some epochs; prints the mean loss of each."""
    loader = DataLoader(dataset, batch_size=None, num_workers=num_workers, persistent_workers=num_workers > 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(epochs):
        dataset.set_epoch(epoch)  # which also draws other places of the videos
        total, clips = 0.0, 0
        for batch in loader:
            gray = batch["video"].float().mean(dim=2) / 255  # (batch, FRAMES, SIDE, SIDE)
            loss = nn.functional.l1_loss(model(gray[:, :-1]), gray[:, -1])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.item() * len(gray)
            clips += len(gray)
        print(f"epoch {epoch}: {clips} clips, mean loss {total / max(1, clips):.4f}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Stream the shards into the training loop, and say what it waited for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", nargs="+", help="URLs or paths, with braces and wildcards")
    parser.add_argument("--ca-file", help="PEM file of the authorities to trust instead of the system's")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--per-video", type=int, default=2, help="clips of each video in an epoch")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--num-workers", type=int, default=0)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    torch.set_num_threads(1)  # the cores are for the decode threads; torch's own would fight them for every core
    stream = af.Stream(
        af.Videos.from_tars(options.shards),
        clips=af.ClipSampler(FRAMES, fps=FPS, pick="random", per_video=options.per_video),
        features=[],  # beside the videos nothing is read; "txt" or "json" would come with each clip
        size=(SIDE, SIDE),
        fit="crop",
        seed=0,
        config=af.StreamConfig(fetch=af.FetchConfig(ca_file=options.ca_file), on_error="skip"),
    )
    dataset = af.torch.StreamDataset(stream, batch_size=options.batch_size)
    train(Predictor(), dataset, options.epochs, options.num_workers)
    for bad in stream.quarantine.episodes():
        print(f"left out: {bad.file}: {bad.cause}")
    print(dataset.report())
    stream.close()


if __name__ == "__main__":
    main()
