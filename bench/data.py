"""The dataset that the benchmarks make for themselves, once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from rich.progress import Progress

from asyncfetch.testing import write_dataset

__all__ = ["bench_dataset"]

EPISODES, LENGTH = 200, 150
"""Enough that a pool of 64 episodes is refilled within a run of ten seconds."""


def bench_dataset(root: Path | None = None, *, width: int = 640, height: int = 480, gop: int = 2) -> Path:
    """A LeRobot dataset: two cameras, AV1, 8-10 kB a frame of 640x480 at ``-g 2``; made at the first call.

    It lies in ``.bench/`` of the checkout or in ``root``. Only 16 episodes are encoded, the others repeat them.
    """
    path = (root or Path(__file__).parent.parent / ".bench") / f"av1-{width}x{height}-g{gop}"
    if path.exists():
        return path
    making = path.with_name(f"{path.name}.{os.getpid()}")
    with Progress(transient=True) as progress:
        task = progress.add_task("writing the benchmark's dataset", total=None)
        write_dataset(
            making,
            episodes=EPISODES,
            length=LENGTH,
            width=width,
            height=height,
            codec="av1",
            gop=gop,
            episodes_per_video_file=8,
            texture=TEXTURE,
            distinct_videos=16,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    try:
        making.rename(path)  # another process may have been quicker
    except OSError:
        shutil.rmtree(making)
    return path


TEXTURE = 4.4
"""Grey levels of grain; brings a frame to 8-10 kB, which is what pictures of real cameras take at this size."""
