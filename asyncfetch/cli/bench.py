"""``asyncfetch bench``: how fast a dataset of the user's own streams on this machine, why, and what to set."""

from __future__ import annotations

import copy
import gc
import importlib.util
import itertools
import json
import multiprocessing
import signal
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import typer
from rich.console import Console

from asyncfetch.cli.source import KindOption, Source, StartOption, StopOption, VideoOption, find_source, own_format
from asyncfetch.cli.terminal import CaFile  # noqa: TC001 - typer reads the annotations
from asyncfetch.config import FetchConfig, StreamConfig
from asyncfetch.errors import AsyncFetchError, ConfigError, MissingDependency, redact_url
from asyncfetch.formats import RangeFormat
from asyncfetch.videos import ClipSampler, Videos

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from asyncfetch.fetch import Fetcher
    from asyncfetch.lerobot import LeRobotDataset
    from asyncfetch.observe.report import Report
    from asyncfetch.ranges import ByteRange

MIB = 1024 * 1024
STREAMS = (1, 4, 16, 64)
"""Numbers of concurrent requests with which the link is measured, bounded by the number of ranges."""
RANGE_BYTES = MIB
LINK_SECONDS = 2.0
"""Bound on the time for each number of streams."""
MAX_RANGES = 4096
RESIDENT_EPISODES, RESIDENT_SECONDS = 16, 3.0
ALONE_SECONDS = 30.0
"""Bound on the time for measuring the link and the decoders."""
INTERRUPTED = "it was interrupted"
AGAIN_SECONDS = 5.0
"""Seconds until the exception is raised again: one that is raised within a finalizer is lost."""
DAY_SECONDS = 24 * 3600.0
"""The longest stream, since a timer has a limit."""
CLIP_FRAMES = 16
"""Frames of a clip of videos, unless the user says otherwise."""
BATCH_SIZE = 32
"""Samples in a batch of a loader worker."""


@dataclass(frozen=True)
class Link:
    """Rates of ranges of one MiB, fetched by ``streams`` requests at a time."""

    streams: int
    mib_per_second: float
    """All together."""
    stream_mib_per_second: float
    """The rate of one stream, from its answer's first byte on."""
    first_byte_p50_seconds: float
    first_byte_p99_seconds: float


@dataclass
class Alone:
    """The link and the decoders, each measured alone."""

    links: list[Link] = field(default_factory=list)
    frames_per_second: float | None = None
    """Frames decoded from memory; None without cameras."""
    no_frames: str = "the dataset has no cameras"
    """Why that is None."""
    trouble: str | None = None
    """The reason why the rest isn't measured."""


async def preload(dataset: LeRobotDataset, episodes: set[int]) -> None:
    """Load episodes into memory, some at a time."""
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
    """The seconds to each of the first samples of a stream of an open dataset, or of some of its episodes."""
    from asyncfetch.streams import Stream

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
    source: Source,
    seconds: Annotated[
        float, typer.Option(min=1.0, max=DAY_SECONDS, help="How long to stream, including the start.")
    ] = 20.0,
    num_workers: Annotated[int, typer.Option(min=0, help="Loader workers; 0 streams in this process.")] = 0,
    num_frames: Annotated[
        int | None, typer.Option(min=1, help="Frames of a clip of videos. [default: 16]", show_default=False)
    ] = None,
    fps: Annotated[float | None, typer.Option(help="Frames a second of a clip.", show_default=False)] = None,
    step: Annotated[int | None, typer.Option(min=1, help="Every so many frames one.", show_default=False)] = None,
    pick: Annotated[
        str | None, typer.Option(help="Where clips start: random, uniform or all.", show_default=False)
    ] = None,
    per_video: Annotated[int | None, typer.Option(min=1, help="Clips of each video.", show_default=False)] = None,
    size: Annotated[
        str | None, typer.Option(help="Height and width of pictures, as 480x832.", show_default=False)
    ] = None,
    kind: KindOption = None,
    video: VideoOption = None,
    start: StartOption = None,
    stop: StopOption = None,
    ca_file: CaFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="OUT.png", help="Draw samples over time.")] = None,
) -> None:
    """Stream a dataset, or clips of videos, for a while. Shows how fast it is, the bottleneck, and what to set.

    A format of your own is named by its module here: `mydata:images` where mydata.py has `images = Images(url)`.
    """
    config = StreamConfig(fetch=FetchConfig(ca_file=ca_file))
    options: dict[str, Any] = {"fps": fps, "step": step, "pick": pick, "per_video": per_video}
    clips = None
    if num_frames is not None or any(value is not None for value in options.values()):
        clips = ClipSampler(num_frames or CLIP_FRAMES, **options)
    picture_size = None if size is None else _height_and_width(size)
    if plot is not None:
        _require_plot(plot)
    console = Console(stderr=True)
    with console.status("opening") as status:

        def progress(samples: int, passed: float) -> None:
            status.update(f"{samples:,} samples in {passed:.0f} of {seconds:.0f} s: {samples / passed:.1f} samples/s")

        own = own_format(source)  # which may import torch for seconds
        began = time.perf_counter()
        found: str | Videos | RangeFormat = own or source  # of a host that never answers, which the report then says
        if own is None:
            with _ends_after(seconds / 2):
                found = find_source(source, config.fetch, kind, video=video, start=start, stop=stop)
        left_seconds = seconds + began - time.perf_counter()
        report, times, is_interrupted = _stream(found, config, left_seconds, num_workers, progress, clips, picture_size)
        alone = Alone()
        if is_interrupted:
            alone.trouble = INTERRUPTED
        elif times:
            status.update("measuring the link and the decoders")
            try:
                anyio.run(partial(_measure_alone, found, config, alone))
            except KeyboardInterrupt:
                alone.trouble, is_interrupted = INTERRUPTED, True
        else:
            alone.trouble = "no sample came"
    numbers = {
        "report": report.as_dict(),
        "binds": report.verdict.binds,
        "evidence": report.verdict.evidence,
        "advice": report.verdict.advice,
        "setting": dict(report.verdict.setting),
        "link": [asdict(link) for link in alone.links],
        "resident_frames_per_second": alone.frames_per_second,
        "trouble": alone.trouble,
    }
    if as_json:
        typer.echo(json.dumps(numbers))
    else:
        _show(report, alone, has_samples=bool(times))
    if plot is not None:
        _plot(times, plot, redact_url(source))
    if is_interrupted:
        raise typer.Exit(130)


def _show(report: Report, alone: Alone, *, has_samples: bool) -> None:
    typer.echo(str(report))
    for link in alone.links:
        typer.echo(
            f"link, {link.streams:2} at a time: {link.mib_per_second:.1f} MiB/s, a stream "
            f"{link.stream_mib_per_second:.1f}, first byte {1e3 * link.first_byte_p50_seconds:.0f} ms "
            f"(p99 {1e3 * link.first_byte_p99_seconds:.0f})"
        )
    if alone.frames_per_second is not None:
        typer.echo(f"decoding from memory: {alone.frames_per_second:.0f} frames/s")
    elif alone.trouble is None:
        typer.echo(f"decoding from memory: {alone.no_frames}")
    if alone.trouble is not None:
        typer.echo(f"the rest isn't measured: {alone.trouble}")
    if has_samples:
        typer.echo(f"settings: {_settings(report)}")


class _TimeIsUp(BaseException):
    """Raised in the consumer when its time is over, anywhere, like KeyboardInterrupt."""


@contextmanager
def _ends_after(seconds: float) -> Iterator[None]:
    """End the block when the time is over, whatever it waits for. For the main thread."""

    def end(*_: object) -> None:
        raise _TimeIsUp

    before = signal.signal(signal.SIGALRM, end)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _TimeIsUp:
        pass
    finally:
        signal.signal(signal.SIGALRM, before)


def _height_and_width(text: str) -> tuple[int, int]:
    height, _, width = text.partition("x")
    if not (height.isdecimal() and width.isdecimal()):
        raise ConfigError(f"--size={text!r} must be height and width, such as 480x832")
    return int(height), int(width)


def _stream(
    source: str | Videos | RangeFormat,
    config: StreamConfig,
    seconds: float,
    num_workers: int,
    progress: Callable[[int, float], None],
    clips: ClipSampler | None = None,
    size: tuple[int, int] | None = None,
) -> tuple[Report, list[float], bool]:
    """Stream for so long, epoch after epoch: the report, the seconds to each sample, and whether it was interrupted."""
    from asyncfetch.decode.backends import choose_backend, import_torch
    from asyncfetch.observe.report import Report
    from asyncfetch.streams import Stream

    if isinstance(source, RangeFormat):
        import_torch()
    else:
        choose_backend(config.decoder)  # loading torch and the decoder takes seconds that aren't the stream's
    if clips is None and isinstance(source, Videos):
        clips = ClipSampler(CLIP_FRAMES)
    stream = Stream(source, clips=clips, size=size, config=config)
    given: Iterable[Any] = stream
    report: Callable[[], Report] = stream.report
    if num_workers:
        from torch.utils.data import DataLoader

        from asyncfetch.torch import StreamDataset

        dataset = StreamDataset(stream, batch_size=BATCH_SIZE)
        given = DataLoader(dataset, batch_size=None, num_workers=num_workers, persistent_workers=True)
        report = dataset.report
    times: list[float] = []
    others = set(multiprocessing.active_children())
    started = shown_at = time.perf_counter()
    epochs, is_interrupted = 0, False
    try:
        try:
            with _ends_after(seconds):
                while times or not epochs:  # an empty epoch ends it
                    epochs += 1
                    for item in given:
                        now = time.perf_counter()
                        times += [now - started] * (len(next(iter(item.values()))) if num_workers else 1)
                        if now - shown_at > 0.2:
                            shown_at = now
                            progress(len(times), now - started)
        except KeyboardInterrupt:
            is_interrupted = True
        except AsyncFetchError as error:
            if num_workers:  # torch has put the worker's traceback before the message
                raise type(error)(str(error).rstrip().rpartition("\n")[2].partition(": ")[2]) from None
            raise
        latest = report()
        if epochs > 1:
            latest = Report.of(latest.all_waits, latest.all_statistics, config, num_workers=latest.num_workers)
        return latest, times, is_interrupted
    finally:
        for worker in set(multiprocessing.active_children()) - others:
            worker.terminate()  # torch waits five seconds for each that doesn't react
        stream.close()


async def _measure_alone(source: str | Videos | RangeFormat, config: StreamConfig, alone: Alone) -> None:
    """Measure the link alone, and decoding of clips in memory."""
    from asyncfetch.fetch import Fetcher

    try:
        with anyio.fail_after(ALONE_SECONDS):
            if isinstance(source, str):
                await _measure_dataset(source, config, alone)
                return
            kind = "videos" if isinstance(source, Videos) else "a format of one's own"
            alone.no_frames = f"not measured of {kind}"
            async with Fetcher(config.fetch) as fetcher:
                ranges = await _ranges(await _urls_of(source, fetcher), fetcher)
            await _measure_links(config, ranges, alone)
    except TimeoutError:
        alone.trouble = f"it took longer than {ALONE_SECONDS:.0f} s"
    except (AsyncFetchError, OSError) as error:
        alone.trouble = str(error)


async def _measure_dataset(source: str, config: StreamConfig, alone: Alone) -> None:
    from asyncfetch.fetch import Fetcher
    from asyncfetch.lerobot import open_dataset

    async with open_dataset(source, config=config) as dataset:
        episodes = [index for index in dataset.episodes.indices[:RESIDENT_EPISODES] if dataset.episodes[index].length]
        urls = {span.url for index in episodes for span in dataset.episodes[index].videos.values()}
        urls = urls or {dataset.episodes[index].data_url for index in episodes}
        async with Fetcher(config.fetch) as fetcher:
            ranges = await _ranges(sorted(urls), fetcher)
        await _measure_links(config, ranges, alone)
        if dataset.cameras:
            await preload(dataset, set(episodes))
            await time_samples(dataset, 1, episodes=episodes)  # opens the libraries
            times = await time_samples(dataset, seconds=RESIDENT_SECONDS, episodes=episodes)
            alone.frames_per_second = len(times) * len(dataset.cameras) / times[-1]


async def _urls_of(source: Videos | RangeFormat, fetcher: Fetcher) -> Iterable[str]:
    """The files of some of its entries."""
    from asyncfetch.tables.packed import MARK

    if isinstance(source, Videos):
        entries = await source.read(fetcher)
        places = (entries.place(entry) for entry in range(min(len(entries), RESIDENT_EPISODES)))
        return dict.fromkeys(place.url.partition(MARK)[0] for place in places)
    reading = copy.copy(source)
    counts = await reading.open(fetcher, fetcher)
    some = itertools.islice((name for name, count in counts.items() if count), RESIDENT_EPISODES)
    return dict.fromkeys(one.url for name in some for one in reading.ranges(name, 0).values())


async def _ranges(urls: Iterable[str], fetcher: Fetcher) -> list[ByteRange]:
    """Ranges of files by which the link is measured."""
    from asyncfetch.ranges import ByteRange

    sizes = {url: (await fetcher.stat(url)).size for url in urls}
    return [
        ByteRange(url, start, min(start + RANGE_BYTES, size))
        for url, size in sizes.items()
        for start in range(0, min(size, MAX_RANGES * RANGE_BYTES), RANGE_BYTES)
    ][:MAX_RANGES]


async def _measure_links(config: StreamConfig, ranges: Sequence[ByteRange], alone: Alone) -> None:
    for streams in sorted({min(streams, len(ranges)) for streams in STREAMS if ranges}):
        alone.links.append(await _measure_link(config, ranges, streams))


async def _measure_link(config: StreamConfig, ranges: Sequence[ByteRange], streams: int) -> Link:
    from asyncfetch.fetch import Fetcher

    fetch = replace(config.fetch, max_requests_per_host=streams, learn_limit=False, max_span_bytes=0, hedge=None)
    fetch = replace(fetch, part_bytes=RANGE_BYTES, min_part_bytes=RANGE_BYTES)
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


def _require_plot(path: Path) -> None:
    """Check the plot's prerequisites before the measurement."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependency("--plot needs matplotlib: pip install matplotlib")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot={path}: there is no directory {path.parent}; make it, or name a file elsewhere")
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in formats:
        raise ConfigError(f"--plot={path}: there is no format {path.suffix}; name a file that ends with .png, say")


def _plot(times: Sequence[float], path: Path, title: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    panel.plot(times, range(1, len(times) + 1))
    panel.set_title(title, parse_math=False)
    panel.set(xlabel="seconds", ylabel="samples given", xlim=(0, None), ylim=(0, None))
    panel.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
