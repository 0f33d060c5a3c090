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


def bench_dataset(root: Path | None = None) -> Path:
    """A LeRobot dataset: two cameras, 640x480 AV1 at ``-g 2``, 8-10 kB a frame; made at the first call.

    It lies in ``.bench/`` of the checkout or in ``root``. Only 16 episodes are encoded, the others repeat them.
    """
    path = (root or Path(__file__).parent.parent / ".bench") / "av1-640x480-g2"
    if path.exists():
        return path
    making = path.with_name(f"{path.name}.{os.getpid()}")
    with Progress(transient=True) as progress:
        task = progress.add_task("writing the benchmark's dataset", total=None)
        write_dataset(
            making,
            episodes=EPISODES,
            length=LENGTH,
            width=640,
            height=480,
            codec="av1",
            gop=2,
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
