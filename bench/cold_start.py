"""What comes before the first sample of a large dataset: the metadata of 100,000 episodes.

    python -m bench.cold_start

With a fixed delay to the first byte a fresh process opens the dataset and takes one shuffled sample. Told are requests,
bytes, seconds and the process's peak memory; and, of another start that reads nothing ahead, how many requests had to
wait for one another: the longest chain of which each began when the one before it had ended. Plain HTTP, so that a new
connection takes no longer than a warm one. The table of episodes comes in two layouts: as it is read best, a row group
for 1,000 episodes, and as LeRobot records it, one for 10. Both have LeRobot's columns, statistics of each episode
included, in files of LeRobot's size; the rows have a group an episode; all episodes show the pictures of the first ten.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import asyncfetch as af
from asyncfetch.testing import RangeServer, write_dataset
from bench.data import made_once
from bench.process_memory import peak_bytes
from bench.rows import Row, show

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from asyncfetch.testing import ServedRequest

MIB = 1024 * 1024
EPISODES, FRAMES = 100_000, 20
MODEL_EPISODES = 10
"""Written for real; the others repeat them, in files that are links to theirs."""
EPISODES_PER_DATA_FILE = 500
META_FILE_BYTES = 100_000_000
"""At which LeRobot begins a new file of the episode table: ``data_files_size_in_mb``."""
LAYOUTS = {"1,000 episodes a row group": 1000, "10 episodes a row group, as recorded": 10}


def write_large(root: Path, episodes: int, group_episodes: int) -> None:
    """A dataset of so many episodes, all of which show the pictures of the first ones."""
    write_dataset(
        root, episodes=MODEL_EPISODES, length=FRAMES, width=64, height=64, episodes_per_video_file=MODEL_EPISODES
    )
    info = json.loads((root / "meta/info.json").read_text())
    info |= {"total_episodes": episodes, "total_frames": episodes * FRAMES, "splits": {"train": f"0:{episodes}"}}
    (root / "meta/info.json").write_text(json.dumps(info))
    _write_rows(root, episodes)
    _link_videos(root, episodes)
    _write_episodes(root, episodes, group_episodes)


def _write_rows(root: Path, episodes: int) -> None:
    model = pq.read_table(root / "data/chunk-000/file-000.parquet")
    for first in range(0, episodes, EPISODES_PER_DATA_FILE):
        count = min(EPISODES_PER_DATA_FILE, episodes - first)
        frames = np.arange(count * FRAMES)
        rows = _with(
            model.take(frames % (MODEL_EPISODES * FRAMES)),
            {"index": first * FRAMES + frames, "episode_index": first + frames // FRAMES},
        )
        pq.write_table(rows, _path(root, "data", first // EPISODES_PER_DATA_FILE), row_group_size=FRAMES)


def _link_videos(root: Path, episodes: int) -> None:
    for first in list(root.glob("videos/*/chunk-000/file-000.mp4")):
        for number in range(1, -(-episodes // MODEL_EPISODES)):
            link = first.parent.parent / f"chunk-{number // 1000:03d}" / f"file-{number % 1000:03d}.mp4"
            link.parent.mkdir(exist_ok=True)
            link.hardlink_to(first)


def _write_episodes(root: Path, episodes: int, group_episodes: int) -> None:
    model = pq.read_table(root / "meta/episodes/chunk-000/file-000.parquet")
    cameras = [name.removesuffix("/from_timestamp") for name in model.column_names if name.endswith("/from_timestamp")]
    number, next_episode = 0, 0
    while next_episode < episodes:
        path = _path(root, "meta/episodes", number)
        # What repeats would be packed to nothing, unlike the statistics of real episodes.
        with (
            path.open("wb") as file,
            pq.ParquetWriter(file, model.schema, compression="none", use_dictionary=False) as writer,
        ):
            while next_episode < episodes and file.tell() < META_FILE_BYTES:
                rows = np.arange(next_episode, min(next_episode + group_episodes, episodes))
                next_episode += len(rows)
                columns = {
                    "episode_index": rows,
                    "dataset_from_index": rows * FRAMES,
                    "dataset_to_index": (rows + 1) * FRAMES,
                    "data/chunk_index": rows // EPISODES_PER_DATA_FILE // 1000,
                    "data/file_index": rows // EPISODES_PER_DATA_FILE % 1000,
                }
                for camera in cameras:
                    columns[f"{camera}/chunk_index"] = rows // MODEL_EPISODES // 1000
                    columns[f"{camera}/file_index"] = rows // MODEL_EPISODES % 1000
                writer.write_table(_with(model.take(rows % MODEL_EPISODES), columns))
        number += 1


def _with(table: pa.Table, columns: dict[str, np.ndarray]) -> pa.Table:
    for name, values in columns.items():
        place = table.column_names.index(name)
        table = table.set_column(place, table.schema.field(place), pa.array(values))
    return table


def _path(root: Path, folder: str, number: int) -> Path:
    path = root / folder / f"chunk-{number // 1000:03d}" / f"file-{number % 1000:03d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def rounds_of(requests: Sequence[ServedRequest]) -> int:
    """The longest chain of requests of which each began when the one before it had ended."""
    ended: list[tuple[float, int]] = []  # when, and the length of the chain
    longest = 0
    for request in sorted(requests, key=lambda one: one.started):
        depth = 1 + max((depth for finished, depth in ended if finished <= request.started), default=0)
        ended.append((request.finished or float("inf"), depth))
        longest = max(longest, depth)
    return longest


def start(url: str, *, reads_ahead: bool) -> dict[str, float]:
    """In a process of its own: seconds and memory of opening the dataset and taking one sample."""
    import torch
    import torchcodec.decoders  # noqa: F401  what is imported takes its time before

    torch.set_num_threads(1)
    imports = peak_bytes()
    # Nothing waits for its turn either: 64 requests at a time would take the 100 places of such a table in two rounds.
    unlimited = af.FetchConfig(max_requests_per_host=4096, learn_limit=False)
    alone = af.StreamConfig(pool_segments=1, prefetch_segments=0, decoded_max_bytes=1, fetch=unlimited)
    stream = af.Stream(url, config=af.StreamConfig() if reads_ahead else alone)
    began = time.perf_counter()
    len(af.torch.StreamDataset(stream))
    opened = time.perf_counter()
    next(iter(stream))
    figures = {
        "open_seconds": opened - began,
        "first_sample_seconds": time.perf_counter() - began,
        "peak_mebibytes": peak_bytes() / MIB,
        "imports_mebibytes": imports / MIB,
    }
    stream.close()
    return figures


def measure(root: Path, layout: str, first_byte_seconds: float) -> list[Row]:
    """A start in a fresh process, of a dataset on disk. In the chain of requests nothing is read ahead."""
    with RangeServer(root, tls=False, first_byte_seconds=first_byte_seconds, max_log=1_000_000) as server:
        command = [sys.executable, "-m", "bench.cold_start", "--start", server.url]
        subprocess.run([*command, "--alone"], check=True, stdout=subprocess.PIPE)
        rounds = rounds_of(server.requests)
        server.reset()
        ran = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        requests = server.requests
    figures = json.loads(ran.stdout)
    return [
        Row.of(f"{layout}: requests one after the other", "", [rounds], "<= 5"),
        Row.of(f"{layout}: requests", "", [len(requests)]),
        Row.of(f"{layout}: fetched", "MiB", [sum(request.bytes_sent for request in requests) / MIB]),
        Row.of(f"{layout}: open", "s", [figures["open_seconds"]]),
        Row.of(f"{layout}: first sample, opening included", "s", [figures["first_sample_seconds"]]),
        Row.of(f"{layout}: memory at the peak", "MiB", [figures["peak_mebibytes"]]),
        Row.of(f"{layout}: of it by imports", "MiB", [figures["imports_mebibytes"]]),
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--first-byte", type=float, default=0.1, help="seconds (default: 0.1)")
    parser.add_argument("--episodes", type=int, default=EPISODES)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--start", help=argparse.SUPPRESS)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.start:
        print(json.dumps(start(arguments.start, reads_ahead=not arguments.alone)))
        return
    rows: list[Row] = []
    for layout, group_episodes in LAYOUTS.items():
        make = partial(write_large, episodes=arguments.episodes, group_episodes=group_episodes)
        root = made_once(f"cold-{arguments.episodes}-{group_episodes}", make)
        rows += measure(root, layout, arguments.first_byte)
    show(rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
