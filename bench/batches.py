"""What a batch costs beside the samples in it: CPU a frame, frames a second, and memory at its peak.

    python -m bench.batches                     two cameras of 640x480, uint8, batches of 32
    python -m bench.batches --cases all         other sizes, pictures, windows and batches, too

One local dataset, in the page cache, or with ``--link`` over HTTPS at 4 MiB/s a stream and 50 ms to the first byte,
cold start included. By turns, each time in a process of its own: ``for sample in stream``; a loader over
``StreamDataset(batch_size=n)`` without workers and with two of them; torch's ``default_collate`` on samples;
``serve_samples``. CPU is that of the process and of its children, the server's not counted. Memory is
proportional, what several processes share counted once, at its peak: goals 1,178 MiB, and 1,843 with two workers.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import random
import subprocess
import sys
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import psutil
from rich.console import Console
from rich.progress import track

from bench.data import bench_dataset
from bench.nginx import NginxServer
from bench.rows import Row, show

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

MIB = 1024 * 1024
RATE_BYTES, FIRST_BYTE_SECONDS = 4 * MIB, 0.05
LOOK_SECONDS = 0.25
"""Between two looks at the memory."""
WAYS = ("samples", "batches", "collate", "2 workers", "served")
GOALS = {"batches": ("<= 1.12", ">= 0.92"), "2 workers": ("<= 1.25", ">= 0.80"), "served": ("<= 1.25", ">= 0.80")}
"""Of CPU and of frames a second."""
SKIPPED_SAMPLES = 320
"""Before a run from memory is measured: more than wait, decoded, behind the start."""
CAMERAS = ("observation.images.top", "observation.images.wrist")


@dataclass(frozen=True)
class Case:
    """What is read, and how."""

    name: str = "640x480, uint8, two cameras, batches of 32"
    width: int = 640
    height: int = 480
    image_dtype: str = "uint8"
    cameras: int = 2
    window: int = 1
    batch: int = 32
    transform_loops: int = 0
    """Of Python in a transform of each sample; none where there is no transform."""


BASE = Case()
CASES = {
    "base": BASE,
    "batch8": replace(BASE, name="batches of 8", batch=8),
    "batch64": replace(BASE, name="batches of 64", batch=64),
    "float32": replace(BASE, name="float32", image_dtype="float32"),
    "camera": replace(BASE, name="one camera", cameras=1),
    "window": replace(BASE, name="windows of 2", window=2),
    "small": replace(BASE, name="224x224", width=224, height=224),
    "transform": replace(BASE, name="a transform in Python, some 4 ms a sample", transform_loops=100_000),
}


def be_busy(loops: int, sample: dict[str, Any]) -> dict[str, Any]:
    """A transform that holds Python's lock."""
    for number in range(loops):
        number * number
    return sample


@dataclass(frozen=True)
class Job:
    """What a child process is to measure."""

    way: str
    case: Case
    url: str
    ca_file: str | None
    seconds: float
    skipped_samples: int
    """Before it; none where the start counts."""


@dataclass(frozen=True)
class Measured:
    """Of one run."""

    frames_per_second: float
    cpu_milliseconds: float
    """A frame."""
    proportional_mib: float = 0.0
    """At the peak, of all processes."""


@contextmanager
def items(job: Job) -> Iterator[Iterator[int]]:
    """How many samples each thing that the trainer gets has."""
    import torch
    from torch.utils.data import DataLoader

    import asyncfetch as af
    import asyncfetch.torch

    torch.set_num_threads(1)
    case, chosen = job.case, CAMERAS[: job.case.cameras]
    stream = af.Stream(
        job.url,
        features=["observation.state", "action", *chosen],
        image_dtype=case.image_dtype,  # type: ignore[arg-type]
        transform=functools.partial(be_busy, case.transform_loops) if case.transform_loops else None,
        windows={} if case.window == 1 else {key: af.frames(*range(1 - case.window, 1)) for key in chosen},
        config=af.StreamConfig(fetch=af.FetchConfig(ca_file=job.ca_file)),
    )

    def epochs(source: Any) -> Generator[Any]:  # noqa: ANN401
        while True:
            yield from source

    source: Any
    with ExitStack() as stack:
        stack.callback(stream.close)
        if job.way == "served":
            source = stack.enter_context(af.serve_samples(stream, case.batch))
        elif job.way == "samples":
            source = stream
        elif job.way == "collate":
            source = DataLoader(af.torch.StreamDataset(stream), batch_size=case.batch)
        else:
            workers = 2 if job.way == "2 workers" else 0
            dataset = af.torch.StreamDataset(stream, case.batch)
            source = DataLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
        given = stack.enter_context(closing(epochs(source)))
        # The trainer holds a batch while it waits for the next one, as any loop does.
        yield (1 if job.way == "samples" else len(batch["index"]) for batch in given)


def cpu_seconds() -> float:
    """Of this process and its children, those that have ended counted."""
    me = psutil.Process()
    own = me.cpu_times()
    total = own.user + own.system + own.children_user + own.children_system
    for child in me.children(recursive=True):
        times = child.cpu_times()
        total += times.user + times.system
    return float(total)


def measure_here(job: Job) -> Measured:
    """In this process, which has done nothing else."""
    importlib.import_module("asyncfetch.torch")  # which takes longer than the start, on a busy machine than the run
    begun, before = time.perf_counter(), cpu_seconds()
    with items(job) as counts:
        skipped = 0
        while skipped < job.skipped_samples:
            skipped += next(counts)
        started, used = (time.perf_counter(), cpu_seconds()) if skipped else (begun, before)
        samples = next(counts)  # however late it comes
        while time.perf_counter() - started < job.seconds:
            samples += next(counts)
        seconds, used = time.perf_counter() - started, cpu_seconds() - used
    frames = samples * job.case.cameras * job.case.window
    return Measured(frames / seconds, 1e3 * used / frames)


def measure(job: Job) -> Measured:
    """In a process of its own, whose memory is looked at from here."""
    command = [sys.executable, "-m", "bench.batches", "--job", json.dumps(asdict(job))]
    proportional = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            proportional = max(proportional, proportional_bytes(process.pid))
            with suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_SECONDS)
        assert process.stdout is not None
        said = process.stdout.read()
    if process.returncode:
        raise SystemExit(f"{job.way} of {job.case.name} ended with exit code {process.returncode}")
    return replace(Measured(**json.loads(said)), proportional_mib=proportional / MIB)


def proportional_bytes(pid: int) -> int:
    """Of a process and its children."""
    total = 0
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it has just ended
                total += each.memory_full_info().pss
    return total


def measure_case(jobs: Sequence[Job], repeats: int) -> dict[str, list[Measured]]:
    """Each way by turns."""
    found: dict[str, list[Measured]] = {job.way: [] for job in jobs}
    for _ in range(repeats):
        for job in random.sample(jobs, len(jobs)):  # none always comes first
            found[job.way].append(measure(job))
    return found


def rows_of(case: Case, way: str, runs: list[Measured], samples: list[Measured]) -> list[Row]:
    """The figures of one way; ratios are over the samples of the same repeat."""
    question, pairs = f"{case.name}: {way}", list(zip(runs, samples, strict=True))
    cpu_goal, rate_goal = GOALS.get(way, ("", ""))
    cpu = [run.cpu_milliseconds / base.cpu_milliseconds for run, base in pairs]
    rates = [run.frames_per_second / base.frames_per_second for run, base in pairs]
    return [
        Row.of(f"{question}: CPU a frame", "ms", [run.cpu_milliseconds for run in runs]),
        Row.of(f"{question}: CPU / samples", "x", cpu, cpu_goal),
        Row.of(question, "frames/s", [run.frames_per_second for run in runs]),
        Row.of(f"{question}: frames/s / samples", "x", rates, rate_goal),
        Row.of(f"{question}: proportional memory at its peak", "MiB", [run.proportional_mib for run in runs]),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--cases", default="base", help=f"all, or some of {', '.join(CASES)} (default: base)")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"some of {', '.join(WAYS)}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run (default: 10)")
    parser.add_argument("--link", action="store_true", help="over HTTPS, cold, instead of from the page cache")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--job", help=argparse.SUPPRESS)  # for a process of its own
    chosen = parser.parse_args(arguments)
    if chosen.job is not None:
        given = json.loads(chosen.job)
        print(json.dumps(asdict(measure_here(Job(**given | {"case": Case(**given["case"])})))), flush=True)
        return
    names = list(CASES) if chosen.cases == "all" else chosen.cases.split(",")
    ways = ["samples", *(way for way in chosen.ways.split(",") if way != "samples")]
    rows: list[Row] = []
    for name in track(names, "measuring", console=Console(stderr=True), transient=True):
        case = CASES[name]
        root = bench_dataset(width=case.width, height=case.height)
        with ExitStack() as stack:
            url, ca_file, skipped = str(root), None, SKIPPED_SAMPLES
            if chosen.link:
                server = NginxServer(root.parent, bytes_per_second=RATE_BYTES, first_byte_seconds=FIRST_BYTE_SECONDS)
                stack.enter_context(server)
                url, ca_file, skipped = f"{server.url}/{root.name}", str(server.ca_file), 0
            jobs = [Job(way, case, url, ca_file, chosen.seconds, skipped) for way in ways]
            found = measure_case(jobs, chosen.repeats)
            rows += [row for way in ways for row in rows_of(case, way, found[way], found["samples"])]
    show(rows, as_json=chosen.json)


if __name__ == "__main__":
    main()
