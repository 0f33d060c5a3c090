"""Stream a LeRobot dataset over HTTPS into a torch DataLoader, and say how it went.

python examples/quickstart.py                             a small dataset, written and served here
python examples/quickstart.py https://host/dataset        any LeRobot v3 dataset, or a path

Needs `pip install "asyncfetch[lerobot,pyav,cli,testing]"`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch.utils.data import DataLoader, IterableDataset

import asyncfetch as af
from asyncfetch.errors import redact_url

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from multiprocessing.queues import SimpleQueue
    from typing import Any

EPISODES, FRAMES = 64, 75
CACHE_DIRECTORY = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "asyncfetch"

console = Console(markup=False, highlight=False)  # of paths and urls, which may look like markup


@dataclass(frozen=True)
class Work:
    """What one process did to read its samples."""

    bytes: int = 0
    requests: int = 0
    hits: int = 0
    misses: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))


class Reporting(IterableDataset["dict[str, Any]"]):
    """A StreamDataset that sends what it did from whichever process it ran in."""

    def __init__(self, dataset: af.torch.StreamDataset, reports: SimpleQueue[Work]) -> None:
        self.dataset = dataset
        self.reports = reports

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from self.dataset
        done = self.dataset.statistics()
        if done is not None:
            self.reports.put(Work(done.fetch.bytes, done.fetch.requests, done.episodes.hits, done.episodes.misses))


@dataclass(frozen=True)
class Outcome:
    """One pass over the dataset, as its consumer saw it."""

    samples: int
    seconds: float
    first_batch_seconds: float
    work: Work


def main(arguments: Sequence[str] | None = None) -> None:
    """Write and serve a dataset where none is named, stream it once, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", help="URL or path of a LeRobot v3 dataset")
    parser.add_argument("--ca-file", help="PEM file of the authorities to trust instead of the system's")
    parser.add_argument("--num-workers", type=int, default=0, help="processes of the DataLoader")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--cache-directory", type=Path, default=CACHE_DIRECTORY, help="where the small dataset is kept")
    options = parser.parse_args(arguments)

    torch.set_num_threads(1)  # the cores are for the decode threads; torch's own would fight them for every core
    with ExitStack() as stack:
        url, ca_file = options.url, options.ca_file
        if url is None:
            server = stack.enter_context(af.testing.RangeServer(small_dataset(options.cache_directory)))
            url, ca_file = server.url, server.ca_file
        config = af.StreamConfig(fetch=af.FetchConfig(ca_file=ca_file))
        frames, cameras = anyio.run(look, url, config)
        stream = af.Stream(url, shuffle=True, seed=0, config=config)
        outcome = run(stream, frames, options.num_workers, options.batch_size)
    report(outcome, cameras)


def small_dataset(directory: Path) -> Path:
    """The dataset that the quick start streams, written at the first call."""
    root = directory / f"quickstart-{af.__version__}-{EPISODES}x{FRAMES}"
    try:
        write_once(root)
    except OSError as error:
        sys.exit(f"quickstart: no dataset can be written to {directory} ({error}); name another --cache-directory")
    return root


def write_once(root: Path) -> None:
    """Write it where it isn't there yet."""
    directory = root.parent
    if not root.exists():
        console.print(f"Writing {EPISODES} episodes of {FRAMES} frames from two cameras to {root}")
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as unfinished:
            written = af.testing.write_dataset(
                Path(unfinished) / root.name,
                episodes=EPISODES,
                length=FRAMES,
                width=320,
                height=240,
                distinct_videos=8,
                episodes_per_video_file=8,
            )
            try:
                written.root.rename(root)  # whole or not at all
            except OSError:
                if not root.is_dir():  # else another quick start was faster
                    raise


async def look(url: str, config: af.StreamConfig) -> tuple[int, int]:
    """Frames and cameras of the dataset."""
    async with af.open_dataset(url, config=config) as dataset:
        frames = f"{dataset.num_frames} frames at {dataset.fps:g} fps"
        console.print(f"{redact_url(url)}: {dataset.num_episodes} episodes, {frames}")
        console.print(f"cameras: {', '.join(dataset.cameras)}")
        return dataset.num_frames, len(dataset.cameras)


def run(stream: af.Stream, frames: int, num_workers: int, batch_size: int) -> Outcome:
    """One epoch through a DataLoader."""
    reports = torch.multiprocessing.get_context().SimpleQueue()
    loader = DataLoader(
        Reporting(af.torch.StreamDataset(stream), reports), batch_size=batch_size, num_workers=num_workers
    )
    indices: list[torch.Tensor] = []
    first_batch_seconds = 0.0
    start = time.perf_counter()
    for batch in progress(loader, frames):
        first_batch_seconds = first_batch_seconds or time.perf_counter() - start
        indices.append(batch["index"])
    seconds = time.perf_counter() - start
    came = torch.cat(indices).tolist() if indices else []
    if sorted(came) != list(range(frames)):
        raise SystemExit(f"{len(came)} samples came, {len(set(came))} different ones, of {frames} frames")
    work = sum((reports.get() for _ in range(max(1, num_workers))), Work())
    stream.close()
    return Outcome(len(came), seconds, first_batch_seconds, work)


def progress(batches: Iterable[dict[str, Any]], frames: int) -> Iterator[dict[str, Any]]:
    """The batches; with a bar on a terminal, else with a line for each tenth of the way."""
    if console.is_terminal:
        columns = (TextColumn("samples"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("samples", total=frames)
            for batch in batches:
                yield batch
                bar.advance(task, len(batch["index"]))
        return
    done = 0
    for batch in batches:
        yield batch
        before, done = done, done + len(batch["index"])
        if done * 10 // frames > before * 10 // frames:
            console.print(f"{done:>8,} of {frames:,} samples")


def report(outcome: Outcome, cameras: int) -> None:
    """A table of figures."""
    samples_per_second = outcome.samples / outcome.seconds
    table = Table(title=f"One epoch: each of {outcome.samples:,} frames exactly once", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_row("samples/s", f"{samples_per_second:,.0f}")
    table.add_row("camera frames/s", f"{samples_per_second * cameras:,.0f}")
    table.add_row("time to the first batch", f"{outcome.first_batch_seconds:.2f} s")
    table.add_row("bytes fetched", f"{outcome.work.bytes / 2**20:,.2f} MiB")
    table.add_row("requests", f"{outcome.work.requests:,}")
    table.add_row("episode cache", f"{outcome.work.hits:,} hits, {outcome.work.misses:,} misses")
    console.print(table)


if __name__ == "__main__":
    try:
        main()
    except af.AsyncFetchError as error:  # its message says what to do
        sys.exit(f"quickstart: {error}")
    except KeyboardInterrupt:
        sys.exit(130)  # what a shell says of it
