"""A table of a million spans: what it takes to open it, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

if TYPE_CHECKING:
    from pathlib import Path

ROWS = 1_000_000
MAX_CPU_SECONDS, MAX_BYTES = 3.0, 300_000_000

PROGRAM = """
import json, re, sys, time
from pathlib import Path
import anyio, pyarrow.parquet
from asyncfetch.fetch import Fetcher
from asyncfetch.videos.tables import table_entries

def peak():
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])

async def main():
    async with Fetcher() as fetcher:
        bytes_before, cpu_before = peak(), time.process_time()
        entries = await table_entries(fetcher, fetcher, sys.argv[1], video="url", start="t0", stop="t1")
        print(json.dumps([entries.num_rows, peak() - bytes_before, time.process_time() - cpu_before]))

anyio.run(main)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says what a process had at most")
def test_a_million_spans(tmp_path: Path) -> None:
    join: Any = pc.binary_join_element_wise
    numbers = pa.array(np.arange(ROWS)).cast(pa.string())
    words = np.array(["opens the drawer", "takes a cup", "puts it on the table", "leaves"])
    drawn = np.random.default_rng(0).integers(0, 4, (3, ROWS))
    captions = [pa.array(words[each]) for each in drawn]
    start = np.random.default_rng(1).random(ROWS) * 100
    table = pa.table({
        "url": join("s3://bucket/videos/part-00000/video_", numbers, ".mp4", ""),
        "t0": pa.array(start),
        "t1": pa.array(start + 2),
        "caption": join(*captions, numbers, ", "),
    })
    pq.write_table(table, tmp_path / "spans.parquet")
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "spans.parquet")], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    rows, peak_bytes, cpu_seconds = json.loads(ended.stdout)
    assert rows == ROWS
    assert peak_bytes <= MAX_BYTES
    assert cpu_seconds <= MAX_CPU_SECONDS
