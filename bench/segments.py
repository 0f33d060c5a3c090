"""Segments over a link: the first sample, those of one group of pictures, and those of long episodes.

    python -m bench.segments             three minutes
    python -m bench.segments --long      also 20 episodes of ten minutes beside 600 of 20 seconds, which it writes first
    python -m bench.segments --long 1280x720     these larger than 320x240

Over HTTPS at 4 MiB/s a stream and 50 ms to the first byte, in one process, by turns. The first sample of a dataset that
is open is compared with 16 threads, each of which fetches the clips of an episode, whose ranges it knows, and decodes a
frame of each. Of one group a segment, frames/s are those of the default; bytes are those of an epoch over those of all
videos. Segments of long episodes are counted once all lanes have begun. The order of 27 million frames is drawn for
rank 3 of 8, in segments of two frames, without a dataset.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import ssl
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import anyio
import numpy as np
import torch
from torchcodec.decoders import VideoDecoder  # type: ignore[attr-defined]

import asyncfetch as af
from asyncfetch.lerobot import reader_of
from asyncfetch.order.deal import Deal, Left, Leg
from asyncfetch.order.line import Line
from asyncfetch.order.runs import Runs
from asyncfetch.testing import write_dataset
from bench.data import TEXTURE, bench_dataset
from bench.nginx import NginxServer
from bench.process_memory import peak_bytes
from bench.rows import Row, show

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["draw_order", "measure_first", "measure_groups", "measure_long", "show"]

MIB = 1 << 20
THREADS = 16
LINK: dict[str, Any] = {"bytes_per_second": 4 * MIB, "first_byte_seconds": 0.05}
LONG: dict[str, tuple[int, int]] = {"long": (20, 18_000), "short": (600, 600)}
"""Episodes and their frames."""
BEGUN = 3840
"""Samples after which all of 64 lanes have begun."""


def _config(server: NginxServer, **settings: Any) -> af.StreamConfig:  # noqa: ANN401
    return af.StreamConfig(fetch=af.FetchConfig(ca_file=server.ca_file, hedge=None), **settings)


async def _read(url: str, config: af.StreamConfig, samples: int | None, seconds: float) -> tuple[list[float], int, Any]:
    """Return when each sample came after the dataset was open, what was fetched, and the segment of each."""
    times, segments = [], []
    async with af.open_dataset(url, config=config) as dataset:
        started = time.perf_counter()
        async with af.Stream(dataset).samples(epoch=0) as stream:
            async for sample in stream:
                times.append(time.perf_counter() - started)
                segments.append((int(sample["episode_index"]), int(sample["frame_index"]) // 600))
                if len(times) == samples or times[-1] > seconds:
                    break
        return times, dataset.statistics().fetch.bytes, segments


async def _clips(path: Path) -> list[list[tuple[str, bytes]]]:
    """Return of 16 episodes the path and the bytes of each camera's clip."""
    async with af.open_dataset(str(path)) as dataset:
        found = []
        for episode in itertools.islice(range(0, len(dataset.episodes), 10), THREADS):
            spans = dataset.episodes[episode].videos
            names = {camera: str(Path(span.url).relative_to(path.parent)) for camera, span in spans.items()}
            with await reader_of(dataset).hold(episode) as held:
                found.append([(name, bytes(held.clip(camera).data)) for camera, name in names.items()])
        return found


def measure_first(path: Path, repeats: int) -> dict[str, list[float]]:
    """Seconds to the first sample, and until the first of the threads is through."""
    found: dict[str, list[float]] = {"a stream's": [], "the first thread's": []}
    clips = anyio.run(_clips, path)
    with NginxServer(path.parent, **LINK) as server:
        context, place = ssl.create_default_context(cafile=server.ca_file), urlsplit(server.url)

        def fetch(started: float, cameras: Sequence[tuple[str, bytes]]) -> float:
            for name, content in cameras:
                connection = http.client.HTTPSConnection(place.hostname or "", place.port, context=context)
                connection.request("GET", f"{place.path}/{name}", headers={"Range": f"bytes=0-{len(content) - 1}"})
                connection.getresponse().read()
                connection.close()
                data = torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())  # another's bytes, as many
                VideoDecoder(data, num_ffmpeg_threads=1).get_frame_at(0)
            return time.perf_counter() - started

        for _ in range(repeats):
            times, _, _ = anyio.run(_read, f"{server.url}/{path.name}", _config(server), 1, 60.0)
            found["a stream's"].append(times[0])
            with ThreadPoolExecutor(THREADS) as pool:
                found["the first thread's"].append(min(pool.map(partial(fetch, time.perf_counter()), clips)))
    return found


def measure_groups(path: Path, repeats: int, seconds: float) -> tuple[list[float], float]:
    """Frames/s of one group a segment over the default's; and bytes of its epoch over those of all videos."""
    ratios = []
    with NginxServer(path.parent, **LINK) as server:
        url = f"{server.url}/{path.name}"
        for _ in range(repeats):
            counts = [
                len(anyio.run(_read, url, _config(server, **settings), None, seconds)[0])
                for settings in ({"segment_seconds": 1 / 30}, {})
            ]
            ratios.append(counts[0] / counts[1])
    with NginxServer(path.parent) as server:
        config = _config(server, segment_seconds=1 / 30)
        _, fetched_bytes, _ = anyio.run(_read, f"{server.url}/{path.name}", config, None, 1e9)
    return ratios, fetched_bytes / sum(file.stat().st_size for file in path.rglob("*.mp4"))


def measure_long(root: Path, width: int = 320, height: int = 240) -> dict[str, tuple[float, int, float]]:
    """Of each dataset the seconds to the first sample, the fewest segments of 32 samples, and MiB at the peak."""
    found = {}
    for name, (episodes, length) in LONG.items():
        path = root / f"{name}-{width}x{height}"
        if not path.exists():
            write_dataset(
                path, episodes=episodes, length=length, width=width, height=height, codec="h264",
                texture=TEXTURE * 320 / width,
                episodes_per_video_file=1, distinct_videos=1,
            )  # fmt: skip
        with NginxServer(root, **LINK) as server:
            url, ca_file = f"{server.url}/{path.name}", server.ca_file or ""
            command = [sys.executable, "-m", "bench.segments", "--read", url, ca_file]
            found[name] = tuple(json.loads(subprocess.check_output(command)))
    return found


def _read_apart(url: str, ca_file: str) -> tuple[float, int, float]:
    config = af.StreamConfig(fetch=af.FetchConfig(ca_file=ca_file))
    times, _, segments = anyio.run(_read, url, config, 2 * BEGUN, 600.0)
    first = BEGUN if len(segments) > BEGUN else 0
    fewest = min(len(set(segments[start : start + 32])) for start in range(first, len(segments) - 31, 32))
    return times[0], fewest, peak_bytes() / MIB


def draw_order(episodes: int = 180_000) -> tuple[int, float, float]:
    """Frames, and seconds and MiB at the peak that it takes to find a rank's first sample."""
    line = Line(np.random.default_rng(0).integers(90, 211, episodes), segment_frames=2, group_frames=2)
    started = time.perf_counter()
    deal = Deal(Left((Runs.whole(line, 0, line.total),), np.array([[line.total]])), Leg(8, (64,)))
    deal.rank(3).visits().at(0)
    seconds = time.perf_counter() - started
    return line.total, seconds, peak_bytes() / MIB


def main() -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", nargs="?", const="320x240", metavar="WIDTHxHEIGHT")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each run of one group a segment (default: 8)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--read", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        print(json.dumps(_read_apart(*arguments.read)))
        return
    frames, seconds, mib = draw_order()
    order = f"the order of {frames:,} frames"
    rows = [Row.of(f"{order}: time", "s", [seconds]), Row.of(f"{order}: memory at the peak", "MiB", [mib])]
    large, small = bench_dataset(), bench_dataset(width=320, height=240)
    rows += [Row.of(f"{name} first sample", "s", each) for name, each in measure_first(large, 4).items()]
    ratios, fetched = measure_groups(small, arguments.repeats, arguments.seconds)
    rows.append(Row.of("one group a segment, 320x240: frames/s / the default's", "x", ratios))
    rows.append(Row.of("its epoch's bytes / those of all videos", "x", [fetched]))
    if arguments.long:
        size = [int(side) for side in arguments.long.split("x")]
        for name, (first, fewest, peak) in measure_long(small.parent / "segments", *size).items():
            rows += [
                Row.of(f"{name} episodes: first sample", "s", [first]),
                Row.of(f"{name} episodes: fewest segments of 32", "", [fewest]),
                Row.of(f"{name} episodes: memory at the peak", "MiB", [peak]),
            ]
    show(rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
