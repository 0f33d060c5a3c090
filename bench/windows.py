"""What a frame costs in a long window, beside the same frames decoded plainly.

    python -m bench.windows

Samples of 64-frame windows from four cameras, from clips in memory, in one thread, as a decode thread makes them; and
bare torchcodec over the same clips, one frame after the other. Each keeps its decoders open. By turns, CPU time; the
ratio is that of neighbouring runs. It has the copy that makes one tensor of a window's frames, too.
"""

from __future__ import annotations

import argparse
import random
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import numpy as np
import torch
from torchcodec.decoders import VideoDecoder  # type: ignore[attr-defined]

import asyncfetch as af
from asyncfetch.lerobot import reader_of
from asyncfetch.testing import write_dataset
from bench.data import made_once
from bench.rows import Row, show

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from asyncfetch.lerobot import HeldEpisode, SampleBuilder

CAMERAS = [f"observation.images.{name}" for name in ("top", "wrist", "left", "right")]
EPISODES, LENGTH, WIDTH, HEIGHT = 4, 150, 320, 240
WINDOW = range(-63, 1)


class Plainly:
    """Decoders of an episode's clips, open."""

    def __init__(self, held: HeldEpisode) -> None:
        self._clips = [held.clip(camera) for camera in CAMERAS]
        self._decoders = [
            VideoDecoder(torch.from_numpy(np.array(clip.data)), num_ffmpeg_threads=1, seek_mode="exact")
            for clip in self._clips
        ]

    def read(self, frames: Sequence[int]) -> list[torch.Tensor]:
        """The same frames of all cameras."""
        return [
            decoder.get_frame_at(int(clip.frame_index[frame])).data
            for clip, decoder in zip(self._clips, self._decoders, strict=True)
            for frame in frames
        ]


def make_dataset(path: Path) -> None:
    """The windows' dataset."""
    write_dataset(
        path, episodes=EPISODES, length=LENGTH, cameras=CAMERAS, width=WIDTH, height=HEIGHT, distinct_videos=1
    )


def take_turns(builder: SampleBuilder, episodes: Sequence[HeldEpisode], repeats: int, samples: int) -> list[Row]:
    """Both ways, each time of other windows."""
    rng = random.Random(0)
    plainly = [Plainly(held) for held in episodes]
    frames = samples * len(WINDOW) * len(CAMERAS)
    ours, plain = [], []
    for _ in range(1 + repeats):
        places = [(rng.randrange(len(episodes)), rng.randrange(len(WINDOW), LENGTH)) for _ in range(samples)]
        started = time.thread_time()
        for episode, at in places:
            builder.build([(episodes[episode], at, 0)])
        between = time.thread_time()
        for episode, at in places:
            plainly[episode].read([at + offset for offset in WINDOW])
        ours.append(1e6 * (between - started) / frames)
        plain.append(1e6 * (time.thread_time() - between) / frames)
    ours, plain = ours[1:], plain[1:]  # without the turn in which ours were opened
    return [
        Row.of(f"CPU a frame, in windows of {len(WINDOW)} from {len(CAMERAS)} cameras", "us", ours),
        Row.of("CPU a frame, bare torchcodec, one after the other", "us", plain),
        Row.of("the ratio", "", [one / other for one, other in zip(ours, plain, strict=True)]),
    ]


async def measure(path: Path, *, repeats: int, samples: int) -> list[Row]:
    """Of a dataset that ``make_dataset`` made."""
    async with af.open_dataset(str(path), features=CAMERAS) as dataset:
        builder = reader_of(dataset).sample_builder(dict.fromkeys(CAMERAS, af.frames(*WINDOW)))
        with ExitStack() as stack:
            held = [stack.enter_context(await reader_of(dataset).hold(episode)) for episode in range(EPISODES)]
            return await anyio.to_thread.run_sync(take_turns, builder, held, repeats, samples)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--samples", type=int, default=8, help="of each turn (default: 8)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    path = made_once("windows-320x240", make_dataset)
    show(anyio.run(lambda: measure(path, repeats=chosen.repeats, samples=chosen.samples)), as_json=chosen.json)


if __name__ == "__main__":
    main()
