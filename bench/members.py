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
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from bench.process_memory import peak_bytes

GOAL_CPU_MS = 4.0
GOAL_MIB = 0.2


def open_mixture(root: str, members: int) -> dict[str, float]:
    """Return what a mixture took up to its first sample, in this process: seconds, CPU seconds, MiB at the peak."""
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
        "cpu_seconds": time.process_time() - cpu,
        "opening_cpu_seconds": opened_cpu - cpu,
        "mib": peak_bytes() / 2**20,
    }
    samples.close()
    mixture.close()
    return took | {"floor_cpu_seconds": read_metadata(root, members)}


def read_metadata(root: str, members: int) -> float:
    """Return the CPU seconds that json and pyarrow alone take for the members' metadata, one after the other."""
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
    return time.process_time() - cpu


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
    medians = {
        size: {name: statistics.median(run[name] for run in runs) for name in runs[0]} for size, runs in found.items()
    }
    each = [
        {
            "from": few,
            "to": many,
            "cpu_ms": (medians[many]["cpu_seconds"] - medians[few]["cpu_seconds"]) / (many - few) * 1000,
            "opening_cpu_ms": (medians[many]["opening_cpu_seconds"] - medians[few]["opening_cpu_seconds"])
            / (many - few)
            * 1000,
            "floor_cpu_ms": medians[many]["floor_cpu_seconds"] / many * 1000,
            "mib": (medians[many]["mib"] - medians[few]["mib"]) / (many - few),
        }
        for few, many in pairwise(options.members)
    ]
    if options.json:
        print(json.dumps({"mixtures": medians, "a_member": each}, indent=2))
        return 0
    print(f"{'members':>8} {'seconds':>8} {'CPU s':>8} {'MiB':>8}")
    for size, run in medians.items():
        print(f"{size:>8} {run['seconds']:>8.2f} {run['cpu_seconds']:>8.2f} {run['mib']:>8.0f}")
    for one in each:
        print(
            f"a member, {one['from']} to {one['to']}: {one['cpu_ms']:.2f} ms of CPU, {one['opening_cpu_ms']:.2f} of "
            f"them to open it, {one['mib']:.3f} MiB; json and pyarrow alone take {one['floor_cpu_ms']:.2f} ms"
        )
    print(f"goals: {GOAL_CPU_MS:g} ms of CPU, {GOAL_MIB:g} MiB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
