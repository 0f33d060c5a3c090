"""A dataset larger than the cache: memory and open files stay flat, within the configured bounds."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from asyncfetch.testing import RangeServer, write_dataset

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1024 * 1024
EPISODES, FRAMES = 2000, 8
MAX_BYTES, DECODED_MAX_BYTES = 32 * MIB, 8 * MIB
ALLOWANCE_BYTES = 256 * MIB
FLAT_BYTES = 24 * MIB
"""What the allocators of torch, FFmpeg and Python may still add once every kind of work has been done."""

SCRIPT = f"""
import json, os, sys, warnings
import aiohttp, numpy, psutil, pyarrow.parquet, torch, torchcodec.decoders
from torch.utils.data import DataLoader
import asyncfetch as af, asyncfetch.cache, asyncfetch.stream, asyncfetch.torch

warnings.filterwarnings("ignore", message=".*use of fork")

def measure():
    # Resident memory without the code of libraries, which comes in at its first use and is there once for all workers.
    # Not private memory: a forked worker's grows by every page of its parent's that it touches.
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    resident = sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024
    return resident, psutil.Process().num_fds()

class Measuring(af.torch.StreamDataset):
    # The index of each sample, and now and then this process's resident memory and open files.
    def __iter__(self):
        yield -1, measure()
        for number, sample in enumerate(super().__iter__()):
            yield int(sample["index"]), measure() if number % 250 == 0 else None
        figures = self.statistics()
        yield -1, (figures.clips.used_bytes, figures.clips.max_bytes, figures.clips.evictions, figures.fetch.bytes)

if __name__ == "__main__":
    url, ca_file, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
    config = af.StreamConfig(
        fetch=af.FetchConfig(ca_file=ca_file), lanes=8, pool_episodes=8, prefetch_episodes=8,
        max_bytes={MAX_BYTES}, decoded_max_bytes={DECODED_MAX_BYTES})
    stream = af.Stream(url, config=config)
    loader = DataLoader(Measuring(stream), batch_size=None, num_workers=workers, collate_fn=lambda item: item,
                        multiprocessing_context="fork" if workers else None)
    series, ends, indices = {{}}, [], []
    for number, (index, figures) in enumerate(loader):
        indices.append(index) if index >= 0 else None
        if figures is not None:
            (series.setdefault(number % workers if workers else 0, []) if len(figures) == 2 else ends).append(figures)
    complete = sorted(indices) == list(range({EPISODES * FRAMES}))
    print(json.dumps({{"complete": complete, "series": list(series.values()), "ends": ends}}))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RangeServer]:
    """About 60 MiB of video in 16,000 frames of two cameras."""
    root = tmp_path_factory.mktemp("large") / "data"
    write_dataset(
        root, episodes=EPISODES, length=FRAMES, distinct_videos=4, episodes_per_video_file=50, texture=12.0, tasks=["t"]
    )
    with RangeServer(root) as server:
        yield server


@pytest.mark.timeout(240)
@pytest.mark.parametrize("workers", [0, 2])
def test_memory_and_files_stay_flat_within_the_bounds(server: RangeServer, workers: int) -> None:
    report = run(server, workers)
    assert report["complete"]
    for used_bytes, max_bytes, evictions, _ in report["ends"]:
        assert used_bytes <= max_bytes
        assert evictions > 0  # the dataset doesn't fit
    bound = MAX_BYTES + DECODED_MAX_BYTES + ALLOWANCE_BYTES
    growth = sum(max(memory for memory, _ in series) - series[0][0] for series in report["series"])
    assert growth <= bound, f"{growth / MIB:.0f} MiB"
    for series in report["series"]:
        half = len(series) // 2
        # Medians: single readings are as high as the heap happens to be just before it is trimmed.
        (early, early_files), (late, late_files) = (
            tuple(statistics.median(values) for values in zip(*part, strict=True))
            for part in (series[1:half], series[half:])
        )
        assert late - early <= FLAT_BYTES, f"{early / MIB:.0f} to {late / MIB:.0f} MiB"
        assert late_files <= early_files + 8


def run(server: RangeServer, workers: int) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
    command = [sys.executable, "-c", SCRIPT, server.url, str(server.ca_file), str(workers)]
    result = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True, timeout=220)
    report: dict[str, Any] = json.loads(result.stdout)
    return report
