"""Two-second windows out of long videos over a shaped HTTPS link, beside the programs that people take today.

    python -m bench.videos                        all of them by turns, over the videos that it makes
    python -m bench.videos --quick                one short turn, to see that all of it works
    python -m bench.videos --entries 1000000      instead, an index of so many entries

Ours reads an epoch of random windows of each video, in tar shards, from a cold start: with an index of the collection,
and without one, where it reads the headers of the shards first. Clips/s are those of the whole epoch. *Bytes* are all
that it fetched over those of the groups of pictures that its windows need (``Mp4Index.group_bytes``), window by window.
*CPU a frame* is that of this process, over that of torchcodec alone for the same windows of the same files in memory;
the server is another process, and has a row of its own.

The peers, each for so many seconds but for the two that are local:

- webdataset and torchcodec: the same shards, whole members, a random window of each; a thread for each core.
- torchcodec over fsspec's HTTP files: the same windows of the same videos as plain files, with as many threads as ours
  decodes with, and blocks as large as fsspec's own; then, tuned, with eight times the threads and blocks of 256 KiB.
- SPDL, reading the same windows from local files, a thread for each core. What the link takes is accounted for so:
  ours / min(SPDL, link), where link = streams * bytes a second of one / bytes a clip needs, with as many streams as
  ours may have requests to a host. SPDL is optional (``pip install --group peers``): without it, a line says so.

All in one run; the table shows medians over the repeats, and the lowest and highest of them. Ratios are those of
neighbouring runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import track

import asyncfetch as af
from asyncfetch.config import usable_cpus
from asyncfetch.videos.index_file import ROWS_IN_A_GROUP, write_index
from bench.nginx import NginxServer
from bench.process_memory import forget_peak, peak_bytes, resident_bytes
from bench.rows import Row, show
from bench.video_files import FPS, Collection, index_of, make_collection
from bench.video_peers import Window, decode_bare, has_spdl, read_by_files, read_by_spdl, read_members

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MIB = 1024 * 1024
FRAMES = 2 * FPS
"""Of a window."""
BATCH = 16
"""Samples of the first batch."""
WORLD_SIZE = 64
"""Ranks that share an index of very many entries."""
TUNED_THREADS, TUNED_BLOCK_BYTES = 8, 256 * 1024
"""Threads of fsspec's for each of ours, and its blocks, where it is tuned."""


@dataclass(frozen=True)
class Setting:
    """What is measured, on what."""

    root: Path
    """Of the collection."""
    videos: Sequence[Path]
    shards: Sequence[str]
    """Their urls."""
    index: str
    """Its url."""
    server: NginxServer
    config: af.StreamConfig
    clips: af.ClipSampler
    seconds: float
    """Of each peer."""
    bytes_per_second: float
    """Of a stream."""

    def url(self, path: Path) -> str:
        """Return that of a file of the collection."""
        return f"{self.server.url}/{path.relative_to(self.root)}"


class Streamed(NamedTuple):
    """An epoch of ours."""

    windows: list[Window]
    seconds: float
    batch_seconds: float
    """To the end of the first batch."""
    cpu_seconds: float
    """Of this process."""
    server_seconds: float
    fetched_bytes: int
    requests: int

    @property
    def clips_per_second(self) -> float:
        """From the start on: what opening the collection takes is in it."""
        return len(self.windows) / self.seconds

    @property
    def frames(self) -> int:
        """Delivered."""
        return len(self.windows) * FRAMES


async def stream_epoch(setting: Setting, videos: af.Videos, seed: int) -> Streamed:
    """Read one."""
    gc.collect()
    server_seconds, cpu_seconds, started = setting.server.cpu_seconds, time.process_time(), time.perf_counter()
    seconds, begins = list[float](), list[tuple[int, float]]()
    stream = af.Stream(videos, clips=setting.clips, seed=seed, config=setting.config)
    async with stream.samples(epoch=0) as samples:
        async for sample in samples:
            seconds.append(time.perf_counter() - started)
            begins.append((int(sample["index"]), float(sample["seconds"][0])))
        cpu_seconds = time.process_time() - cpu_seconds
        server_seconds = setting.server.cpu_seconds - server_seconds
        fetched = samples.report().all_statistics.fetch
    return Streamed(
        windows=[Window(entry, first := round(FPS * begin), first + FRAMES) for entry, begin in begins],
        seconds=seconds[-1],
        batch_seconds=seconds[min(BATCH, len(seconds)) - 1],
        cpu_seconds=cpu_seconds,
        server_seconds=server_seconds,
        fetched_bytes=fetched.bytes,
        requests=fetched.requests,
    )


class Figures:
    """What a run has found, each figure in every repeat."""

    def __init__(self) -> None:
        self._values: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)

    def add(self, question: str, unit: str, value: float, goal: str = "") -> None:
        """Add a repeat's."""
        self._values[question, unit, goal].append(value)

    def rows(self) -> list[Row]:
        """Return them in the order in which they were first found."""
        return [Row.of(question, unit, values, goal) for (question, unit, goal), values in self._values.items()]


def measure(setting: Setting, figures: Figures, needed: Callable[[Sequence[Window]], int], seed: int) -> None:
    """One turn of all.

    Args:
        setting: What is measured.
        figures: Get what is found.
        needed: Bytes of the groups of pictures of some windows, each window by itself.
        seed: Of the windows.
    """
    indexed = anyio.run(stream_epoch, setting, af.Videos.from_table(setting.index), seed)
    headers = anyio.run(stream_epoch, setting, af.Videos.from_tars(setting.shards), seed)
    table = af.Videos.from_table(setting.root / "files.csv", video="url")
    local = anyio.run(stream_epoch, setting, table, seed)
    threads, windows = setting.config.decode_threads or usable_cpus(), indexed.windows
    cpu_seconds = time.process_time()
    bare = decode_bare(setting.videos, windows, threads)
    bare_seconds = (time.process_time() - cpu_seconds) / indexed.frames
    for name, one, goal in (("with an index", indexed, 2), ("without an index", headers, 5)):
        figures.add(f"{name}: clips/s", "", one.clips_per_second)
        figures.add(f"{name}: bytes / those of the groups", "", one.fetched_bytes / needed(one.windows), "<= 1.1")
        figures.add(f"{name}: requests a clip", "", one.requests / len(one.windows))
        figures.add(f"{name}: first batch of {BATCH}", "s", one.batch_seconds, f"<= {goal} s")
        figures.add(f"{name}: CPU a frame / bare", "", one.cpu_seconds / one.frames / bare_seconds, "<= 1.1")
    figures.add("local files: clips/s", "", local.clips_per_second)
    figures.add("local files: CPU a frame / bare", "", local.cpu_seconds / local.frames / bare_seconds)
    figures.add("bare torchcodec, from memory: clips/s", "", bare)
    figures.add("bare torchcodec: CPU a frame", "ms", 1e3 * bare_seconds)
    figures.add("the server, on the same cores: CPU a frame", "ms", 1e3 * indexed.server_seconds / indexed.frames)
    ours = indexed.clips_per_second

    link = partial(_seconds_left, setting)
    members = read_members(setting.shards, length=FRAMES, threads=usable_cpus(), **link())
    figures.add("webdataset + torchcodec: clips/s", "", members)
    figures.add("ours, with an index / webdataset + torchcodec", "", ours / members, ">= 5")
    urls = [setting.url(path) for path in setting.videos]
    files = read_by_files(urls, windows, threads=threads, **link())
    figures.add(f"torchcodec over fsspec, {threads} threads: clips/s", "", files)
    figures.add("ours, with an index / torchcodec over fsspec", "", ours / files, ">= 2")
    more = threads * TUNED_THREADS
    files = read_by_files(urls, windows, threads=more, block_bytes=TUNED_BLOCK_BYTES, **link())
    figures.add(f"torchcodec over fsspec, {more} threads, small blocks: clips/s", "", files)
    figures.add("ours, with an index / that", "", ours / files)

    streams = setting.config.fetch.max_requests_per_host
    allowed = streams * setting.bytes_per_second / (needed(windows) / len(windows))
    figures.add(f"what the link allows, {streams} streams: clips/s", "", allowed)
    if has_spdl():
        spdl = read_by_spdl(setting.videos, windows, usable_cpus())
        figures.add("SPDL, from local files: clips/s", "", spdl)
        figures.add("ours, with an index / the lesser of SPDL and the link", "", ours / min(spdl, allowed), ">= 1")


def _seconds_left(setting: Setting) -> dict[str, Any]:
    """What all peers over the link take."""
    return {"ca_file": setting.server.ca_file, "seconds": setting.seconds}


def groups_of(videos: Sequence[Path]) -> Callable[[Sequence[Window]], int]:
    """Return the function of the bytes that windows of these videos need."""
    indexes = [index_of(path) for path in videos]

    def needed(windows: Sequence[Window]) -> int:
        return sum(
            indexes[window.video].group_bytes(indexes[window.video].shown()[0][window.first : window.stop])
            for window in windows
        )

    return needed


def write_many(index: Path, path: Path, entries: int) -> None:
    """Write an index of so many entries: those of another one, drawn, each with a name of its own.

    Only texts are written as a dictionary: numbers of as many videos would all differ.
    """
    few = pq.read_table(index)
    many = few.take(np.random.default_rng(0).integers(few.num_rows, size=entries))
    place = many.schema.get_field_index("__key__")
    many = many.set_column(place, "__key__", pa.array([f"clip-{number:09d}" for number in range(entries)]))
    packed: Any = ["video", "codec"]
    pq.write_table(many, path, compression="zstd", use_dictionary=packed, row_group_size=ROWS_IN_A_GROUP)


async def start(url: str, ca_file: str | None) -> dict[str, float]:
    """In a process of its own: what one of very many ranks takes to open an index, and for its first batch."""
    import torchcodec.decoders  # noqa: F401  what is imported takes its memory before

    before, started = resident_bytes(), time.perf_counter()
    forget_peak()
    config = af.StreamConfig(fetch=af.FetchConfig(ca_file=ca_file))
    stream = af.Stream(af.Videos.from_table(url), clips=af.ClipSampler(FRAMES), config=config)
    async with stream.samples(rank=0, world_size=WORLD_SIZE) as samples:
        opened_seconds = time.perf_counter() - started
        figures = samples.report().all_statistics.fetch
        found = {
            "open_seconds": opened_seconds,
            "open_peak_mebibytes": (peak_bytes() - before) / MIB,
            "open_mebibytes": (resident_bytes() - before) / MIB,
            "open_requests": figures.requests,
            "open_fetched_bytes": figures.bytes,
        }
        left = BATCH
        async for _ in samples:
            left -= 1
            if not left:
                break
        figures = samples.report().all_statistics.fetch
    return found | {
        "batch_seconds": time.perf_counter() - started,
        "requests": figures.requests,
        "fetched_bytes": figures.bytes,
    }


def measure_many(setting: Setting, figures: Figures, path: Path, entries: int, clip_bytes: float) -> None:
    """One start, in a fresh process.

    Args:
        setting: What is measured.
        figures: Get what is found.
        path: Of the index.
        entries: That it has.
        clip_bytes: Of the groups of pictures that a window needs, the mean.
    """
    command = [sys.executable, "-m", "bench.videos", "--start", setting.url(path)]
    command += ["--ca-file", str(setting.server.ca_file)]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    index_bytes = path.stat().st_size
    share_bytes = index_bytes + clip_bytes * entries / WORLD_SIZE
    figures.add(f"index of {entries} entries", "MiB", index_bytes / MIB)
    figures.add("open", "s", found["open_seconds"], "<= 3 s")
    figures.add("memory: what the peak grew by", "MiB", found["open_peak_mebibytes"], "<= 300 MiB")
    figures.add("memory that stays", "MiB", found["open_mebibytes"])
    figures.add("requests to open", "", found["open_requests"])
    figures.add("bytes to open / those of the index", "", found["open_fetched_bytes"] / index_bytes)
    figures.add(f"first batch of {BATCH}, a rank of {WORLD_SIZE}", "s", found["batch_seconds"])
    figures.add("requests until then", "", found["requests"])
    figures.add("bytes until then, beside the index", "MiB", (found["fetched_bytes"] - index_bytes) / MIB)
    figures.add("bytes until then / the rank's share", "", found["fetched_bytes"] / share_bytes, "<= 1")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench.videos", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="of all (default: 3)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each peer over the link (default: 10)")
    parser.add_argument("--per-video", type=int, default=2, help="windows of each video, an epoch (default: 2)")
    parser.add_argument("--rate", type=float, default=4.0, help="MiB/s of a stream of the link (default: 4)")
    parser.add_argument("--first-byte", type=float, default=0.05, help="its seconds to the first byte (default: 0.05)")
    parser.add_argument("--entries", type=int, default=0, help="measure the start of an index of so many, only")
    parser.add_argument(
        "--quick", action="store_true", help="small videos, one repeat, no more than a second of each peer"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--directory", type=Path, help="where the videos are made (default: .bench)")
    parser.add_argument("--start", help=argparse.SUPPRESS)
    parser.add_argument("--ca-file", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


QUICK = Collection(videos=12, shards=2, width=160, height=120, groups=(30, 250), repeats=(1, 2))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = parse_arguments(arguments)
    if options.start:
        print(json.dumps(anyio.run(start, options.start, options.ca_file)))
        return
    repeats = range(1 if options.quick else options.repeats)
    figures = Figures()
    with ExitStack() as stack:
        root = make_collection(QUICK if options.quick else Collection(), options.directory)
        rate = options.rate * MIB
        server = stack.enter_context(NginxServer(root, bytes_per_second=rate, first_byte_seconds=options.first_byte))
        index, many = root / "index.parquet", root / "many.parquet"
        anyio.run(write_index, af.Videos.from_tars(str(root / "shards" / "*.tar")), index)  # its urls are relative
        shards = [f"{server.url}/shards/{path.name}" for path in sorted((root / "shards").iterdir())]
        setting = Setting(
            root=root,
            videos=sorted((root / "files").iterdir()),
            shards=shards,
            index=f"{server.url}/{index.name}",
            server=server,
            config=af.StreamConfig(fetch=af.FetchConfig(ca_file=server.ca_file)),
            clips=af.ClipSampler(FRAMES, pick="random", per_video=options.per_video),
            seconds=min(options.seconds, 1.0) if options.quick else options.seconds,
            bytes_per_second=rate,
        )
        needed = groups_of(setting.videos)
        turns = track(repeats, "measuring", console=Console(stderr=True), transient=True)
        if options.entries:
            write_many(index, many, options.entries)
            stack.callback(many.unlink)
            windows = [Window(number, 0, FRAMES) for number in range(len(setting.videos))]
            for _ in turns:
                measure_many(setting, figures, many, options.entries, needed(windows) / len(windows))
        else:
            warm_up = af.Videos.from_table(root / "files.csv", video="url")
            anyio.run(stream_epoch, setting, warm_up, len(repeats))  # what is imported takes its time before
            for seed in turns:
                measure(setting, figures, needed, seed)
            if not has_spdl():
                Console(stderr=True).print("SPDL isn't installed, and so isn't measured: pip install --group peers")
    show(figures.rows(), as_json=options.json)


if __name__ == "__main__":
    main()
