"""What the benchmarks make for themselves, once; and the dataset of most."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import Progress

from asyncfetch.testing import write_dataset

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["bench_dataset", "made_once"]

EPISODES, LENGTH = 200, 150
"""Enough that a pool of 64 episodes is refilled within a run of ten seconds."""


def made_once(name: str, make: Callable[[Path], object], root: Path | None = None) -> Path:
    """The directory of this name in ``.bench/`` of the checkout, or in ``root``, which the first call has made.

    What ``make`` leaves at the path that it gets takes its place.
    """
    path = (root or Path(__file__).parent.parent / ".bench") / name
    if path.exists():
        return path
    making = path.with_name(f"{path.name}.{os.getpid()}")
    shutil.rmtree(making, ignore_errors=True)
    make(making)
    try:
        making.rename(path)  # another process may have been quicker
    except OSError:
        shutil.rmtree(making)
    return path


def bench_dataset(*, width: int = 640, height: int = 480, gop: int = 2) -> Path:
    """A LeRobot dataset: two cameras, AV1, 8-10 kB a frame of 640x480 at ``-g 2``; made at the first call.

    Only 16 episodes are encoded, the others repeat them.
    """

    def make(path: Path) -> None:
        with Progress(transient=True) as progress:
            task = progress.add_task("writing the benchmark's dataset", total=None)
            write_dataset(
                path,
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

    return made_once(f"av1-{width}x{height}-g{gop}", make)


TEXTURE = 4.4
"""Grey levels of grain; brings a frame to 8-10 kB, which is what pictures of real cameras take at this size."""
