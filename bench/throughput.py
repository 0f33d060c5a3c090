"""How fast a dataset streams, and how well that keeps up with decoding.

    python -m bench.throughput                          makes a dataset and serves it over a shaped HTTPS link
    python -m bench.throughput https://host/dataset     any LeRobot v3 dataset

Keep-up is frames/s streamed, cold start included, over frames/s of the same pipeline for the same samples over clips
that are in memory already. Beside it: that pipeline over bare decoding with the same threads, and one frame at a time
through torchcodec over an fsspec file. All in one run, interleaved; the table shows medians over the repeats. With
``--epoch``, of the made dataset, what a whole shuffled epoch fetches over what it needs, the clips not fitting memory.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
from rich.console import Console
from rich.progress import track
from torch.utils.data import DataLoader

import asyncfetch as af
from asyncfetch.cli.bench import preload, time_samples
from asyncfetch.config import usable_cpus
from asyncfetch.lerobot import reader_of
from bench.baselines import decode_bare, first_epoch, read_by_file, runs_of
from bench.data import bench_dataset
from bench.nginx import NginxServer
from bench.parts import clip_milliseconds, hand_over_microseconds
from bench.rows import Row, show

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


MIB = 1024 * 1024
EPOCH_BYTES = 384 * MIB
"""For the epoch whose bytes are counted: its clips take 520 MiB, those of the pool 165, and clips have 5/8 of this."""
LOOK_AHEAD = 10_000
"""Samples behind those measured whose episodes are in memory too, because the pipeline reads ahead."""


@dataclass(frozen=True)
class Setting:
    """What is measured, on what."""

    url: str
    ca_file: str | None
    seconds: float
    config: af.StreamConfig
    server: NginxServer | None = None
    """Where it runs on the same cores."""


@dataclass(frozen=True)
class Streamed:
    """A cold stream, read for so many seconds."""

    samples: int
    frames_per_second: float
    """From the start of the pass on: metadata, indexes and the first clips included."""
    steady_frames_per_second: float
    """From the first sample on."""
    first_sample_seconds: float
    mib_per_second: float
    server_milliseconds: float
    """Of a core, a frame, that the server took of the same machine; 0 where it is another one."""
    sample_seconds: Sequence[float]
    """From the start to each sample."""


@dataclass(frozen=True)
class Resident:
    """The same samples over clips in memory, and what they are made of."""

    frames_per_second: float
    bare_frames_per_second: float
    decode_milliseconds: float
    """Of a thread, a frame: waiting for a core included."""
    cpu_over_bare: float
    """Of the process, a frame, over that of bare decoding."""
    sample_seconds: Sequence[float]
    """From the start to each sample."""


Pairs = list[tuple[Streamed, Resident]]
"""One a repeat."""


async def stream_cold(setting: Setting, cameras: int) -> Streamed:
    """Read a fresh stream the way it is read over clips in memory."""
    gc.collect()  # else one run or another pays 0.2 s for the 300,000 objects of torch and what earlier runs left
    server_seconds = setting.server.cpu_seconds if setting.server else 0.0
    started = time.perf_counter()
    seconds: list[float] = []
    async with af.open_dataset(setting.url, config=setting.config) as dataset:
        async with af.Stream(dataset).samples() as stream:
            async for _ in stream:
                seconds.append(time.perf_counter() - started)
                if seconds[-1] >= setting.seconds:
                    break
        figures = dataset.statistics()
    if not seconds:
        raise SystemExit(f"{setting.url} has no samples to measure")
    samples, first, ended = len(seconds), seconds[0], seconds[-1]
    server_seconds = setting.server.cpu_seconds - server_seconds if setting.server else 0.0
    return Streamed(
        samples=samples,
        frames_per_second=samples * cameras / ended,
        steady_frames_per_second=(samples - 1) * cameras / max(ended - first, 1e-9),
        first_sample_seconds=first,
        mib_per_second=figures.fetch.bytes / ended / MIB,
        server_milliseconds=1e3 * server_seconds / (samples * cameras),
        sample_seconds=seconds,
    )


async def read_resident(setting: Setting, samples: int) -> Resident:
    """Read the first samples again with their clips in memory, and decode the same frames with torchcodec alone."""
    async with af.open_dataset(setting.url, config=setting.config) as dataset:
        steps = await first_epoch(af.Stream(dataset))
        await preload(dataset, {step.piece.episode for step in steps[: samples + LOOK_AHEAD]})
        busy = dataset.statistics().decode.busy_seconds
        cpu_seconds = time.process_time()
        seconds = await time_samples(dataset, samples)
        cpu_seconds = time.process_time() - cpu_seconds
        pipeline = samples * len(dataset.cameras) / seconds[-1]
        busy = dataset.statistics().decode.busy_seconds - busy
        del steps[samples:]
        with ExitStack() as stack:
            held = {
                episode: stack.enter_context(await reader_of(dataset).hold(episode))
                for episode in sorted({step.piece.episode for step in steps})
            }
            clips = {episode: {key: one.clip(key) for key in dataset.cameras} for episode, one in held.items()}
            threads = reader_of(dataset).engine.decode.statistics().threads
            runs = runs_of(steps, dataset.group_frames)
            bare_cpu_seconds = time.process_time()
            bare = await anyio.to_thread.run_sync(decode_bare, clips, runs, threads)
            bare_cpu_seconds = time.process_time() - bare_cpu_seconds
    decode_milliseconds = 1e3 * busy / (samples * len(clips[steps[0].piece.episode]))
    return Resident(pipeline, bare, decode_milliseconds, cpu_seconds / bare_cpu_seconds, seconds)


def measure(setting: Setting, concurrency: int, cameras: int, repeats: int) -> Pairs:
    """Cold and resident by turns."""
    fetch = replace(setting.config.fetch, max_requests_per_host=concurrency, learn_limit=False)
    setting = replace(setting, config=replace(setting.config, fetch=fetch))
    pairs = []
    for _ in range(repeats):
        cold = anyio.run(stream_cold, setting, cameras)
        pairs.append((cold, anyio.run(read_resident, setting, cold.samples)))
    return pairs


def rows_of(concurrency: int, pairs: Pairs) -> list[Row]:
    """The figures at one concurrency."""

    def row(question: str, unit: str, figure: Callable[[Streamed, Resident], float], goal: str = "") -> Row:
        values = [figure(cold, resident) for cold, resident in pairs]
        return Row.of(f"{concurrency} requests at a time: {question}", unit, values, goal)

    return [
        row("keep-up, cold start included", "", lambda c, r: c.frames_per_second / r.frames_per_second, ">= 0.90"),
        row(
            "keep-up from the first sample on",
            "",
            lambda c, r: c.steady_frames_per_second / r.frames_per_second,
            ">= 0.98",
        ),
        row("first sample", "s", lambda cold, _: cold.first_sample_seconds),
        row("streamed", "frames/s", lambda cold, _: cold.frames_per_second),
        row("fetched", "MiB/s", lambda cold, _: cold.mib_per_second),
        row("the server on the same cores, a frame", "ms", lambda cold, _: cold.server_milliseconds),
        row("in memory", "frames/s", lambda _, resident: resident.frames_per_second),
        row("in memory / bare decoding", "x", lambda _, r: r.frames_per_second / r.bare_frames_per_second, ">= 0.95"),
        row("CPU a frame in memory / bare decoding", "x", lambda _, resident: resident.cpu_over_bare, "<= 1.06"),
        row("a thread's decoding of a frame", "ms", lambda _, resident: resident.decode_milliseconds),
    ]


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


def curves_of(pairs: Pairs, cameras: int, by_file: float, title: str) -> Curves:
    """Those of the repeat whose keep-up is the median, the lower one of two."""
    ordered = sorted(pairs, key=lambda pair: pair[0].frames_per_second / pair[1].frames_per_second)
    streamed, resident = ordered[(len(pairs) - 1) // 2]
    return Curves(streamed.sample_seconds, resident.sample_seconds, cameras, by_file, title)


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


async def traffic(setting: Setting, path: Path) -> float:
    """Bytes that a shuffled epoch fetches, metadata included, over those of all files with videos and rows.

    Each of these is needed whole: it holds clips that touch one another, or rows of chosen features, and their index.
    """
    needed = sum(file.stat().st_size for part in ("videos", "data") for file in (path / part).rglob("*.*"))
    async with af.open_dataset(setting.url, config=setting.config) as dataset:
        async with af.Stream(dataset).samples(epoch=0) as stream:
            async for _ in stream:
                pass
        return dataset.statistics().fetch.bytes / needed


def measure_workers(setting: Setting, workers: int) -> float:
    """Samples a second through a DataLoader with workers, from the first sample on."""
    dataset = af.torch.StreamDataset(af.Stream(setting.url, config=setting.config))
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, multiprocessing_context="spawn")
    samples = iter(loader)
    next(samples)
    started = time.perf_counter()
    count = sum(1 for _ in itertools.takewhile(lambda _: time.perf_counter() - started < setting.seconds, samples))
    return count / (time.perf_counter() - started)


async def look(setting: Setting, seconds: float) -> tuple[int, tuple[float, float], float]:
    """(cameras, milliseconds a header and a clip's plan, frames a second of one frame at a time through a file)."""
    async with (
        af.open_dataset(setting.url, config=setting.config) as dataset,
        af.Fetcher(setting.config.fetch) as fetcher,
    ):
        if not (dataset.cameras and dataset.num_frames):
            count = f"{len(dataset.cameras)} cameras and {dataset.num_frames} frames"
            raise SystemExit(f"{setting.url} has {count}: there is nothing to decode, and so nothing to measure")
        milliseconds = await clip_milliseconds(dataset, fetcher)
        steps = await first_epoch(af.Stream(dataset))
        by_file = partial(read_by_file, dataset, steps, ca_file=setting.ca_file, seconds=seconds)
        return len(dataset.cameras), milliseconds, await anyio.to_thread.run_sync(by_file) if seconds else 0.0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("url", nargs="?", help="a LeRobot v3 dataset; without one, a made one over a shaped link")
    parser.add_argument("--ca-file", help="authorities to trust instead of the system's")
    parser.add_argument("--concurrency", default="4,16,64", help="requests a host, one or more (default: 4,16,64)")
    parser.add_argument("--num-workers", type=int, default=0, help="also through a DataLoader with so many workers")
    parser.add_argument("--epoch", action="store_true", help="also a whole epoch's bytes; takes a minute")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run (default: 10)")
    parser.add_argument("--repeats", type=int, default=5, help="of each concurrency (default: 5)")
    parser.add_argument("--rate", type=float, default=4.0, help="MiB/s of a stream of the made link (default: 4)")
    parser.add_argument("--first-byte", type=float, default=0.05, help="its seconds to the first byte (default: 0.05)")
    parser.add_argument("--pool-segments", type=int, default=64, help="(default: 64)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="frames over time, at the last concurrency")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments()
    with ExitStack() as stack:
        url, ca_file, server = arguments.url, arguments.ca_file, None
        if arguments.epoch and url is not None:
            raise SystemExit("--epoch is for the made dataset, whose files it looks at: give no url")
        if url is None:
            path = bench_dataset()
            rate = int(arguments.rate * MIB)
            server = stack.enter_context(
                NginxServer(path.parent, bytes_per_second=rate, first_byte_seconds=arguments.first_byte)
            )
            url, ca_file = f"{server.url}/{path.name}", server.ca_file
        config = af.StreamConfig(fetch=af.FetchConfig(ca_file=ca_file), pool_segments=arguments.pool_segments)
        setting = Setting(url, ca_file, arguments.seconds, config, server)
        remote = url.startswith("http")
        cameras, (header, plan), by_file = anyio.run(look, setting, arguments.seconds if remote else 0.0)
        concurrencies = [int(part) for part in arguments.concurrency.split(",")]
        measured = {
            concurrency: measure(setting, concurrency, cameras, arguments.repeats)
            for concurrency in track(concurrencies, "measuring", console=Console(stderr=True), transient=True)
        }
        rows = [row for concurrency, pairs in measured.items() for row in rows_of(concurrency, pairs)]
        if arguments.plot is not None:
            title = f"{concurrencies[-1]} requests at a time, {usable_cpus()} cores, order shuffled"
            plot_keep_up(curves_of(measured[concurrencies[-1]], cameras, by_file, title), arguments.plot)
        rows += [
            Row.of("header of a clip", "ms", [header], "<= 0.1"),
            Row.of("plan of a clip from its file's index, header included", "ms", [plan]),
            Row.of("hand-over of a sample", "us", [hand_over_microseconds()], "<= 5"),
        ]
        if by_file:
            rows.append(Row.of("one frame at a time over an fsspec file", "frames/s", [by_file]))
        if arguments.epoch:
            small = replace(setting, config=replace(config, max_bytes=EPOCH_BYTES))
            rows.append(Row.of("bytes fetched in an epoch / needed", "x", [anyio.run(traffic, small, path)]))
        if workers := arguments.num_workers:
            rows.append(Row.of(f"with {workers} workers", "samples/s", [measure_workers(setting, workers)]))
    show(rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
