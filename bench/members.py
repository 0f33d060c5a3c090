"""What a member of a mixture costs: CPU and memory to the first sample of a mixture of many tiny local datasets.

One dataset is written and copied by hard links, so that a member has everything of its own but blocks on the disk. Each
size of mixture runs in a process of its own, by turns; the cost of a member is the difference between two sizes.

    python -m bench.members --members 10 400
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from bench.process_memory import peak_bytes
from bench.rows import Row, show

UNITS = {
    "seconds": "s",
    "CPU": "ms",
    "CPU to open it": "ms",
    "CPU of json and pyarrow alone": "ms",
    "memory at the peak": "MiB",
}
GOALS = {"CPU": "<= 4", "memory at the peak": "<= 0.2"}
"""Of a member."""


def open_mixture(root: str, members: int) -> dict[str, float]:
    """Return what a mixture took up to its first sample, in this process, in UNITS."""
    import asyncfetch as af
    from asyncfetch.stream.epoch_stream import source_of

    streams = [af.Stream(os.path.join(root, str(number)), seed=0) for number in range(members)]
    began, cpu = time.perf_counter(), time.process_time()
    mixture = af.Mixture(streams, weights=[1.0] * members)
    source_of(mixture).session().opened()
    opened_cpu = time.process_time()
    samples = iter(mixture)
    next(samples)
    took = {
        "seconds": time.perf_counter() - began,
        "CPU": 1000 * (time.process_time() - cpu),
        "CPU to open it": 1000 * (opened_cpu - cpu),
        "memory at the peak": peak_bytes() / 2**20,
    }
    samples.close()
    mixture.close()
    return took | {"CPU of json and pyarrow alone": read_metadata(root, members)}


def read_metadata(root: str, members: int) -> float:
    """Return the milliseconds of CPU that json and pyarrow take for the members' metadata, one after the other."""
    from pyarrow import BufferReader
    from pyarrow.parquet import ParquetFile

    cpu = time.process_time()
    for number in range(members):
        meta = Path(root, str(number), "meta")
        json.loads((meta / "info.json").read_bytes())
        for name, unwanted in (("tasks.parquet", None), ("episodes/chunk-000/file-000.parquet", "stats/")):
            file = ParquetFile(BufferReader((meta / name).read_bytes()), pre_buffer=False)
            columns = [key for key in file.schema_arrow.names if unwanted is None or not key.startswith(unwanted)]
            file.read(columns=columns, use_threads=False)
    return 1000 * (time.process_time() - cpu)


def copy_by_links(template: Path, root: Path, members: int) -> None:
    """Make ``members`` datasets below ``root`` whose files are the template's."""
    for number in range(members):
        shutil.copytree(template, root / str(number), copy_function=os.link)


def main(arguments: list[str] | None = None) -> int:
    """Print the table; with ``--json`` the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, nargs="+", default=[10, 400], help="sizes of mixtures, ascending")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(open_mixture(options.child, options.members[0])))
        return 0
    from asyncfetch.testing import write_dataset

    with tempfile.TemporaryDirectory() as directory:
        template = Path(directory, "template")
        write_dataset(template, episodes=2, length=10, cameras=["observation.images.top"], width=64, height=64)
        copy_by_links(template, Path(directory), max(options.members))
        found: dict[int, list[dict[str, float]]] = {size: [] for size in options.members}
        for _ in range(options.repeats):
            for size, runs in found.items():
                command = [sys.executable, "-m", "bench.members", "--child", directory, "--members", str(size)]
                runs.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    rows = [
        Row.of(f"{size} members: {name}", unit, [run[name] for run in runs])
        for size, runs in found.items()
        for name, unit in UNITS.items()
    ]
    for few, many in pairwise(options.members):
        for name, unit in UNITS.items():
            each = [
                (more[name] - less[name]) / (many - few) for more, less in zip(found[many], found[few], strict=True)
            ]
            rows.append(Row.of(f"a member, {few} to {many}: {name}", unit, each, GOALS.get(name, "")))
    show(rows, as_json=options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
