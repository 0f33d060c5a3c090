"""What keep-up looks like: frames given over time, streamed from a cold start and out of memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["Curves", "plot_keep_up"]


@dataclass(frozen=True)
class Curves:
    """One repeat. Seconds from the start to each sample."""

    streamed_seconds: Sequence[float]
    resident_seconds: Sequence[float]
    """The same samples by the same pipeline, their clips in memory."""
    cameras: int
    by_file_frames_per_second: float
    """Of one frame at a time through a decoder that seeks in a remote file; 0 where that wasn't measured."""
    title: str


def plot_keep_up(curves: Curves, path: Path) -> None:
    """Write the picture, a PNG or whatever the path's suffix says."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    end = curves.streamed_seconds[-1]
    for label, seconds, style in (
        ("asyncfetch, clips already in memory", curves.resident_seconds, "--"),
        ("asyncfetch, streamed from a cold start", curves.streamed_seconds, "-"),
    ):
        panel.plot(seconds, [curves.cameras * (number + 1) for number in range(len(seconds))], style, label=label)
    if curves.by_file_frames_per_second:
        label = "one frame at a time, torchcodec over an fsspec file"
        panel.plot([0, end], [0, curves.by_file_frames_per_second * end], label=label)
    panel.set(title=curves.title, xlabel="seconds", ylabel="frames given", xlim=(0, end), ylim=(0, None))
    panel.grid(visible=True, alpha=0.3)
    panel.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
