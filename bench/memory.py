"""Resident memory and open files over ten thousand episodes in random order.

    python -m bench.memory

Reads two samples of each of 10,000 different episodes over HTTPS, in random order, with bounds a fraction of the
dataset, in a process of its own, and prints what it grew by after its imports, beside the bounds. A plot, with
``--plot file.png``.

torchcodec 0.13 leaks 1 kB a decoder that it opens (asyncfetch/decode/decoder.py says why), and an episode
takes two of them. ``--decoder pyav`` shows what grows without that.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import psutil
from rich.console import Console
from rich.progress import Progress

from asyncfetch.testing import RangeServer, write_dataset

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from asyncfetch.config import DecoderBackend

MIB = 1024 * 1024
EPISODES, LENGTH = 10_000, 8
MAX_BYTES = 64 * MIB
AT_ONCE = 16


def read_in_process(url: str, ca_file: str, reads: int, decoder: DecoderBackend, progress: Connection) -> None:
    """Read, and send (reads done, resident bytes, open files) now and then."""
    import av  # noqa: F401  growth is counted after imports
    import pyarrow.compute  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import torchcodec.decoders  # noqa: F401

    import asyncfetch as af
    import asyncfetch.torch

    process = psutil.Process()

    async def read() -> None:
        config = af.StreamConfig(fetch=af.FetchConfig(ca_file=ca_file), max_bytes=MAX_BYTES, decoder=decoder)
        gc.collect()
        progress.send((0, process.memory_info().rss, process.num_fds()))
        order = np.random.default_rng(0).permutation(EPISODES).tolist()
        async with af.open_dataset(url, config=config) as dataset:
            for done in range(0, reads, AT_ONCE):
                async with anyio.create_task_group() as group:
                    for episode in (order[read % EPISODES] for read in range(done, done + AT_ONCE)):
                        for frame in (1, LENGTH - 2):
                            group.start_soon(dataset.sample, episode, frame)
                if done % (AT_ONCE * 8) == 0:
                    progress.send((done, process.memory_info().rss, process.num_fds()))
        progress.send(None)

    anyio.run(read)


def measure(reads: int, decoder: DecoderBackend) -> list[tuple[int, int, int]]:
    """(reads, resident bytes, open files) over the run."""
    with tempfile.TemporaryDirectory() as directory, Progress(console=Console(stderr=True), transient=True) as progress:
        writing = progress.add_task("writing the dataset", total=None)
        write_dataset(
            Path(directory) / "many",
            episodes=EPISODES,
            length=LENGTH,
            texture=8.0,
            episodes_per_video_file=100,
            distinct_videos=16,
            progress=lambda done, total: progress.update(writing, completed=done, total=total),
        )
        reading = progress.add_task("reading episodes", total=reads)
        with RangeServer(directory) as server:
            context = multiprocessing.get_context("spawn")
            receiver, sender = context.Pipe(duplex=False)
            arguments = f"{server.url}/many", server.ca_file, reads, decoder, sender
            process = context.Process(target=read_in_process, args=arguments)
            process.start()
            sender.close()
            points = []
            while (point := receiver.recv()) is not None:
                points.append(point)
                progress.update(reading, completed=point[0])
            process.join()
    return points


def plot(points: list[tuple[int, int, int]], path: str) -> None:
    """Resident growth over the reads."""
    import matplotlib.pyplot as plt

    done, resident, _ = zip(*points, strict=True)
    plt.figure(figsize=(8, 4))
    plt.plot(done, [(one - resident[0]) / MIB for one in resident])
    plt.axhline(MAX_BYTES / MIB + 256, linestyle="--", color="grey", label="bounds + 256 MiB")
    plt.xlabel("episodes read")
    plt.ylabel("growth of resident memory, MiB")
    plt.legend()
    plt.tight_layout()
    plt.savefig(path, dpi=120)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--reads", type=int, default=EPISODES, help="from 10,000 on some episodes come again")
    parser.add_argument("--decoder", choices=("auto", "torchcodec", "pyav"), default="auto")
    parser.add_argument("--plot", help="file for a plot")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    arguments = parser.parse_args()
    os.environ.pop("ASYNCFETCH_DECODER_CACHE_SIZE", None)
    points = measure(arguments.reads, arguments.decoder)
    base = points[0][1]
    growth = [(resident - base) / MIB for _, resident, _ in points]
    half = len(growth) // 2
    figures: dict[str, Any] = {
        "episodes_read": arguments.reads,
        "bounds_mib": MAX_BYTES / MIB,
        "growth_peak_mib": max(growth),
        "growth_peak_first_half_mib": max(growth[:half]),
        "growth_peak_second_half_mib": max(growth[half:]),
        "growth_median_second_quarter_mib": statistics.median(growth[half // 2 : half]),
        "growth_median_last_quarter_mib": statistics.median(growth[-(half // 2) :]),
        "open_files_peak_first_half": max(files for _, _, files in points[1:half]),
        "open_files_peak_second_half": max(files for _, _, files in points[half:]),
    }
    if arguments.plot:
        plot(points, arguments.plot)
    if arguments.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name.replace('_', ' ')}: {value:.4g}")


if __name__ == "__main__":
    main()
