"""``asyncfetch bench``: how fast a dataset of the user's own streams on this machine, why, and what to set."""

from __future__ import annotations

import gc
import itertools
import json
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated

import anyio
import typer
from rich.console import Console

from asyncfetch.cli.files import CaFile, fetch_config
from asyncfetch.errors import MissingDependency

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncfetch.config import StreamConfig
    from asyncfetch.lerobot import LeRobotDataset
    from asyncfetch.observe.report import Report
    from asyncfetch.ranges import ByteRange

__all__ = ["Link", "bench", "preload", "time_samples"]

MIB = 1024 * 1024
STREAMS = (1, 4, 16, 64)
"""That the link is asked for side by side."""
RANGE_BYTES = MIB
LINK_SECONDS = 2.0
"""The most time that each number of streams is given; less where there is less to fetch."""
MAX_RANGES = 4096
RESIDENT_EPISODES, RESIDENT_SECONDS = 16, 3.0
BATCH_SIZE = 32
"""Samples in a batch of a loader worker."""


@dataclass(frozen=True)
class Link:
    """Ranges of one MiB, so many at a time."""

    streams: int
    mib_per_second: float
    """All together."""
    stream_mib_per_second: float
    """The rate of one stream, from its answer's first byte on."""
    first_byte_p50_seconds: float
    first_byte_p99_seconds: float


async def preload(dataset: LeRobotDataset, episodes: set[int]) -> None:
    """Bring episodes into memory, some at a time."""
    for some in itertools.zip_longest(*[iter(sorted(episodes))] * 64):
        chosen = [episode for episode in some if episode is not None]
        for episode in chosen:
            dataset.prefetch(episode)
        for episode in chosen:
            await dataset.ready(episode)


async def time_samples(
    dataset: LeRobotDataset,
    samples: int | None = None,
    *,
    seconds: float | None = None,
    episodes: Sequence[int] | None = None,
    shuffle: bool = True,
) -> list[float]:
    """Return the seconds to each of the first samples of a stream of an open dataset, or of some episodes of it."""
    from asyncfetch.stream import Stream

    gc.collect()
    times: list[float] = []
    started = time.perf_counter()
    async with Stream(dataset, episodes=episodes, shuffle=shuffle).samples() as stream:
        async for _ in stream:
            times.append(time.perf_counter() - started)
            if len(times) == samples or (seconds is not None and times[-1] >= seconds):
                break
    return times


def bench(
    source: Annotated[str, typer.Argument(metavar="URL", help="The dataset: a directory or a URL.")],
    seconds: Annotated[float, typer.Option(min=1.0, help="How long to stream, including the start.")] = 20.0,
    num_workers: Annotated[int, typer.Option(min=0, help="Loader workers; 0 streams in this process.")] = 0,
    ca_file: CaFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="OUT.png", help="Draw samples over time.")] = None,
) -> None:
    """Stream a dataset for a while. Shows how fast it is, the bottleneck, and what to set."""
    from asyncfetch.config import StreamConfig  # which loads what a config checks

    config = StreamConfig(fetch=fetch_config(ca_file))
    console = Console(stderr=True)
    with console.status("opening") as status:

        def progress(samples: int, passed: float) -> None:
            status.update(f"{samples:,} samples in {passed:.0f} of {seconds:.0f} s: {samples / passed:.1f} samples/s")

        report, times = _stream(source, config, seconds, num_workers, progress)
        status.update("measuring the link and the decoders")
        links, frames_per_second = anyio.run(partial(_look, source, config))
    if plot is not None:
        _plot(times, plot, source)
    told = {
        "report": report.as_dict(),
        "binds": report.verdict.binds,
        "evidence": report.verdict.evidence,
        "advice": report.verdict.advice,
        "setting": dict(report.verdict.setting),
        "link": [asdict(link) for link in links],
        "resident_frames_per_second": frames_per_second,
    }
    if as_json:
        typer.echo(json.dumps(told))
        return
    typer.echo(str(report))
    for link in links:
        typer.echo(
            f"link, {link.streams:2} at a time: {link.mib_per_second:.1f} MiB/s, first byte "
            f"{1e3 * link.first_byte_p50_seconds:.0f} ms (p99 {1e3 * link.first_byte_p99_seconds:.0f})"
        )
    typer.echo(f"decoding from memory: {frames_per_second:.0f} frames/s")
    typer.echo(f"settings: {_settings(report)}")


def _stream(
    source: str, config: StreamConfig, seconds: float, num_workers: int, progress: Callable[[int, float], None]
) -> tuple[Report, list[float]]:
    """Stream for so long: the report, and the seconds to each sample."""
    from asyncfetch.decode.backends import choose_backend
    from asyncfetch.stream import Stream

    choose_backend(config.decoder)  # loads torch and what decodes, for seconds that aren't the stream's
    stream = Stream(source, config=config)
    times: list[float] = []
    started = told_at = time.perf_counter()
    try:
        if num_workers:
            from torch.utils.data import DataLoader

            from asyncfetch.torch import StreamDataset

            dataset = StreamDataset(stream, batch_size=BATCH_SIZE)
            given = iter(DataLoader(dataset, batch_size=None, num_workers=num_workers))
            report = dataset.report
        else:
            given, report = iter(stream), stream.report  # type: ignore[assignment]
        for item in given:
            now = time.perf_counter()
            times += [now - started] * (len(item["index"]) if num_workers else 1)
            if now - told_at > 0.2:
                told_at = now
                progress(len(times), now - started)
            if now - started >= seconds:
                break
        return report(), times
    finally:
        stream.close()


async def _look(source: str, config: StreamConfig) -> tuple[list[Link], float]:
    """Return what the link gives by itself, and frames a second of clips that are in memory."""
    from asyncfetch.fetch import Fetcher
    from asyncfetch.lerobot import open_dataset
    from asyncfetch.ranges import ByteRange

    async with open_dataset(source, config=config) as dataset:
        episodes = [index for index in dataset.episodes.indices[:RESIDENT_EPISODES] if dataset.episodes[index].length]
        if not episodes or not dataset.cameras:
            return [], 0.0
        urls = {span.url for index in episodes for span in dataset.episodes[index].videos.values()}
        async with Fetcher(config.fetch) as fetcher:
            sizes = {url: (await fetcher.stat(url)).size for url in sorted(urls)}
        ranges = [
            ByteRange(url, start, min(start + RANGE_BYTES, size))
            for url, size in sizes.items()
            for start in range(0, size, RANGE_BYTES)
        ][:MAX_RANGES]
        links = [await _measure_link(config, ranges, streams) for streams in STREAMS]
        await preload(dataset, set(episodes))
        await time_samples(dataset, 1, episodes=episodes)  # opens the libraries
        times = await time_samples(dataset, seconds=RESIDENT_SECONDS, episodes=episodes)
        return links, len(times) * len(dataset.cameras) / times[-1]


async def _measure_link(config: StreamConfig, ranges: Sequence[ByteRange], streams: int) -> Link:
    from asyncfetch.fetch import Fetcher

    fetch = replace(config.fetch, max_requests_per_host=streams, learn_limit=False, max_span_bytes=0, hedge=None)
    fetch = replace(fetch, min_requests_per_host=1, part_bytes=RANGE_BYTES, min_part_bytes=RANGE_BYTES)
    taken_bytes, started = 0, time.perf_counter()
    async with Fetcher(fetch) as fetcher:
        with anyio.move_on_after(LINK_SECONDS):
            async with fetcher.fetch_stream(ranges) as views:
                async for _, view in views:
                    taken_bytes += len(view)
        seen = fetcher.statistics()
    return Link(
        streams=streams,
        mib_per_second=seen.bytes / MIB / (time.perf_counter() - started),
        stream_mib_per_second=taken_bytes / MIB / max(seen.body.sum_seconds, 1e-9),
        first_byte_p50_seconds=seen.first_byte.p50_seconds,
        first_byte_p99_seconds=seen.first_byte.p99_seconds,
    )


def _settings(report: Report) -> str:
    setting = dict(report.verdict.setting)
    if not setting:
        return "StreamConfig(), the defaults"
    [(name, value)] = setting.items()
    if name == "num_workers":
        return f"DataLoader(..., num_workers={value})"
    inner = name.removeprefix("fetch.")
    return f"StreamConfig(fetch=FetchConfig({inner}={value}))" if inner != name else f"StreamConfig({name}={value})"


def _plot(times: Sequence[float], path: Path, title: str) -> None:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise MissingDependency("--plot needs matplotlib: pip install matplotlib") from error
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    panel.plot(times, range(1, len(times) + 1))
    panel.set(title=title, xlabel="seconds", ylabel="samples given", xlim=(0, None), ylim=(0, None))
    panel.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
