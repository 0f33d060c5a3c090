"""What a rank takes at most, said before and then measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from asyncfetch.testing import write_dataset

if TYPE_CHECKING:
    from pathlib import Path

    from asyncfetch.testing import DatasetTruth

MIB = 2**20
PROGRAM = """
import itertools, json, os, sys, threading
import psutil
import pyarrow.parquet, torchcodec.decoders
import torch
from torch.utils.data import DataLoader
import asyncfetch as af

MIB, SIZE = 2**20, 24

def taken():
    # Of each process what no file holds: the libraries' own pages are shared with who knows whom.
    me, total = psutil.Process(), 0
    for process in (me, *me.children(recursive=True)):
        try:
            lines = open(f"/proc/{process.pid}/smaps_rollup").read().splitlines()
        except OSError:  # it has just ended
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
    return total / 1024

def main(way, url):
    torch.set_num_threads(1)
    before = most = taken()
    config = af.StreamConfig(
        max_bytes=64 * MIB, decoded_max_bytes=128 * MIB, pool_segments=4, decode_threads=2
    )
    stream = af.Stream(url, config=config)
    if way == "served":
        batches = af.serve_samples(stream, SIZE, max_ahead=4).__enter__()
        plan = batches.memory_plan()
    else:
        workers = int(way)
        plan = stream.memory_plan(SIZE, num_workers=workers)
        batches = DataLoader(af.torch.StreamDataset(stream, SIZE), batch_size=None, num_workers=workers)
    for batch in itertools.islice(itertools.chain.from_iterable(itertools.repeat(batches)), 20):
        most = max(most, taken())
    print(json.dumps({"most": most - before, "plan": plan.total}), flush=True)
    os._exit(0)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> DatasetTruth:
    """Batches of which are most of what is taken."""
    root = tmp_path_factory.mktemp("data") / "large"
    return write_dataset(root, episodes=8, length=60, width=480, height=480, distinct_videos=1)


@pytest.mark.usefixtures("programs_are_warm")
@pytest.mark.parametrize("way", ["0", "2", "served"])
def test_a_rank_takes_no_more_than_was_said(large: DatasetTruth, tmp_path: Path, way: str) -> None:
    """And no small part of that; of a process with torch in it most is what forked ones share."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    found = subprocess.run(
        [sys.executable, "-W", "ignore", str(path), way, str(large.root)],
        capture_output=True,
        text=True,
        check=False,
        timeout=80,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
    )
    assert found.returncode == 0, found.stderr
    said = json.loads(found.stdout)
    assert said["plan"] / 4 < said["most"] <= said["plan"]
