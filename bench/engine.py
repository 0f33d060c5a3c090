"""What a range costs: this engine beside obstore, aiohttp, fsspec, aiobotocore, s3fs and s3torchconnector.

    python -m bench.engine                  every size, every concurrency, plain and TLS: some 20 minutes
    python -m bench.engine --quick          two sizes at one concurrency, within two minutes
    python -m bench.engine --save FILE.json --plot FILE.png     else in .bench/; written anew after each case

One nginx, the same ranges of one object in memory, each client in a process of its own that stays for all repeats, one
after the other in a new order each repeat. The table shows medians, and the lowest and the highest of the repeats;
below it stands which of GOALS are met. Clients of S3 ask the same nginx, signing as they do it.
Before that, what is in bench/slow_link.py.

A client that isn't installed is left out (pip install --group peers), and so is a case whose ranges in flight would
take more than MAX_IN_FLIGHT_BYTES in each client, or that isn't begun when the time is up: all of these are named.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.engine_client import BUCKET, CLIENTS, LOOPS, PLAIN_ONLY, Case, Measured
from bench.nginx import NginxServer
from bench.slow_link import SlowLink, measure_slow_link

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

KIB, MIB, GIB = 1024, 1024**2, 1024**3
OBJECT_BYTES = 64 * MIB
MAX_IN_FLIGHT_BYTES = 512 * MIB
"""All clients keep what they once held, side by side."""
DEFAULT_CLIENTS = (
    "asyncfetch", "asyncfetch-s3", "obstore", "aiohttp", "fsspec", "aiobotocore", "s3fs", "s3torchconnector",
)  # fmt: skip
SIZES = (16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
CONCURRENCIES = (16, 64, 256)
QUICK_SIZES, QUICK_CONCURRENCIES = (64 * KIB, 4 * MIB), (32,)
OUTPUT = Path(__file__).parent.parent / ".bench"
"""Which git ignores."""
STOP_SECONDS = 10.0
"""For a client's process to end after its input has."""


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    clients: Sequence[str]
    """Keys of CLIENTS, each with ``@loop`` behind it where that isn't asyncio."""
    sizes: Sequence[int]
    concurrencies: Sequence[int]
    tls: Sequence[bool]
    repeats: int
    repeat_bytes: int
    """Fetched in one repeat, at least a range for each stream."""
    max_requests: int
    """In one repeat, where ranges are small."""
    seconds: float = math.inf
    """No case is begun later than this."""

    def cases(self) -> list[tuple[bool, int, int]]:
        """(TLS, bytes of a range, ranges in flight) of each. The middle ones come first, if time is short."""
        return [
            (tls, size, concurrency)
            for concurrency in sorted(self.concurrencies, key=lambda one: one != 64)
            for tls in self.tls
            for size in self.sizes
        ]


@dataclass(frozen=True)
class Row:
    """One client in one case: medians over the repeats, but for the spreads and the peak."""

    client: str
    tls: bool
    range_bytes: int
    concurrency: int
    cpu_seconds_per_gib: float
    cpu_spread: tuple[float, float]
    """Lowest and highest of the repeats."""
    cpu_microseconds_per_request: float
    mib_per_second: float
    mib_per_second_spread: tuple[float, float]
    requests_per_second: float
    peak_bytes: int
    """Resident memory above what the opened client began with, at its highest."""


class Process:
    """A client at work: ``with Process(case) as process: process.measure()``."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "bench.engine_client", json.dumps(asdict(self._case))]
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            text=True,
            cwd=Path(__file__).parent.parent,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # numpy's idle threads spin before they sleep
        )
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._child.stdin.close()  # type: ignore[union-attr]
        try:
            self._child.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child.stdout.close()  # type: ignore[union-attr]

    def wait_until_ready(self) -> None:
        """Returns when its connections are there."""
        self._read_line()

    def measure(self) -> Measured:
        """One repeat."""
        self._child.stdin.write("go\n")  # type: ignore[union-attr]
        self._child.stdin.flush()  # type: ignore[union-attr]
        return Measured(**json.loads(self._read_line()))

    def _read_line(self) -> str:
        line: str = self._child.stdout.readline()  # type: ignore[union-attr]
        if not line:
            raise SystemExit(f"{self._case.client} over {self._case.loop} has failed; its error is above")
        return line


def measure(plan: Plan, directory: Path) -> Iterator[list[Row]]:
    """The rows of one case after the other."""
    write_object(directory)
    begun = time.monotonic()
    with ExitStack() as stack:
        servers = {tls: stack.enter_context(NginxServer(directory, tls=tls)) for tls in plan.tls}
        for tls, size, concurrency in plan.cases():
            if time.monotonic() - begun > plan.seconds:
                return
            if size * concurrency > MAX_IN_FLIGHT_BYTES:
                continue
            requests = max(concurrency, min(plan.max_requests, plan.repeat_bytes // size))
            url = f"{servers[tls].url}/object"
            shared = Case("", "", url, servers[tls].ca_file, OBJECT_BYTES, size, concurrency, requests)
            yield measure_case(plan, shared)


def write_object(directory: Path) -> None:
    """What is read, as a file and as an object of a bucket."""
    (directory / "object").write_bytes(random.Random(0).randbytes(OBJECT_BYTES))
    (directory / BUCKET).mkdir(exist_ok=True)
    (directory / BUCKET / "object").unlink(missing_ok=True)
    os.link(directory / "object", directory / BUCKET / "object")


def measure_case(plan: Plan, shared: Case) -> list[Row]:
    """All clients on the same ranges, interleaved."""
    clients = [name for name in plan.clients if shared.ca_file is None or name not in PLAIN_ONLY]
    measured: dict[str, list[Measured]] = {name: [] for name in clients}
    with ExitStack() as stack:
        processes = {}
        for name in clients:
            client, _, loop = name.partition("@")
            case = replace(shared, client=client, loop=loop or "asyncio")
            processes[name] = stack.enter_context(Process(case))
        for process in processes.values():
            process.wait_until_ready()
        for _ in range(plan.repeats):
            for name in random.sample(clients, len(clients)):  # none always comes first
                measured[name].append(processes[name].measure())
    return [summarise(name, shared, repeats) for name, repeats in measured.items()]


def summarise(name: str, case: Case, repeats: list[Measured]) -> Row:
    """The row of one client."""
    gib = case.requests * case.range_bytes / GIB
    cpu = [one.cpu_seconds for one in repeats]
    seconds = [one.seconds for one in repeats]
    median_seconds = statistics.median(seconds)
    return Row(
        client=name,
        tls=case.ca_file is not None,
        range_bytes=case.range_bytes,
        concurrency=case.concurrency,
        cpu_seconds_per_gib=statistics.median(cpu) / gib,
        cpu_spread=(min(cpu) / gib, max(cpu) / gib),
        cpu_microseconds_per_request=1e6 * statistics.median(cpu) / case.requests,
        mib_per_second=1024 * gib / median_seconds,
        mib_per_second_spread=(1024 * gib / max(seconds), 1024 * gib / min(seconds)),
        requests_per_second=case.requests / median_seconds,
        peak_bytes=max(one.peak_bytes for one in repeats),
    )


def show(rows: list[Row], links: Sequence[SlowLink], console: Console) -> None:
    """Print the table, with the ratio of this engine to each client in brackets."""
    table = Table(title="client CPU per range: medians, lowest-highest")
    columns = (
        "client",
        "",
        "range",
        "streams",
        "CPU-s/GiB",
        "spread",
        "CPU us/request",
        "MiB/s",
        "spread",
        "requests/s",
        "MiB",
    )
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < 2 else "right")
    rows = sorted(rows, key=case_of)
    ours = {case_of(row): row.cpu_seconds_per_gib for row in rows if row.client == "asyncfetch"}
    for number, row in enumerate(rows):
        ratio = ours.get(case_of(row), math.nan) / row.cpu_seconds_per_gib
        table.add_row(
            row.client,
            "TLS" if row.tls else "plain",
            f"{row.range_bytes // KIB} KiB",
            str(row.concurrency),
            f"{row.cpu_seconds_per_gib:.2f} ({ratio:.2f})",
            f"{row.cpu_spread[0]:.2f}-{row.cpu_spread[1]:.2f}",
            f"{row.cpu_microseconds_per_request:.0f}",
            f"{row.mib_per_second:.0f}",
            "{:.0f}-{:.0f}".format(*row.mib_per_second_spread),
            f"{row.requests_per_second:.0f}",
            f"{row.peak_bytes / MIB:.0f}",
            end_section=number + 1 == len(rows) or case_of(rows[number + 1]) != case_of(row),
        )
    console.print(table)
    console.print("In brackets: asyncfetch over that client. MiB: highest resident memory above that at the start.")
    for line in (*verdicts(rows), *links):
        console.print(str(line), soft_wrap=True, highlight=False)


@dataclass(frozen=True)
class Goal:
    """For each case of some sizes: this engine's CPU is at most so much of a peer's, which is the same for GiB."""

    ours: str
    """A client of this engine: plain, or signing for S3."""
    peer: str
    tls: bool | None
    """None: either."""
    from_bytes: int
    to_bytes: int
    """Sizes of ranges, both included."""
    share: float


LARGE, SMALL = (MIB, 16 * MIB), (16 * KIB, 64 * KIB)
GOALS = (
    Goal("asyncfetch", "obstore", False, *LARGE, 0.7),
    Goal("asyncfetch", "obstore", True, *LARGE, 0.95),
    Goal("asyncfetch", "aiohttp", False, *LARGE, 0.55),
    Goal("asyncfetch", "aiohttp", True, *LARGE, 0.8),
    Goal("asyncfetch", "fsspec", None, *LARGE, 0.25),
    Goal("asyncfetch-s3", "s3fs", None, *LARGE, 0.25),
    Goal("asyncfetch", "obstore", None, *SMALL, 0.9),
)


@dataclass(frozen=True)
class Verdict:
    """How the measured cases of a goal came out."""

    goal: Goal
    ratios: tuple[float, ...]
    """This engine's CPU over the peer's, of each case, in ascending order."""

    @property
    def is_met(self) -> bool:
        """In every case."""
        return self.ratios[-1] <= self.goal.share

    def __str__(self) -> str:
        goal, ratios = self.goal, self.ratios
        where = {None: "plain and TLS", False: "plain", True: "TLS"}[goal.tls]
        within = sum(ratio <= goal.share for ratio in ratios)
        verdict = "met" if self.is_met else f"MISSED, but for {within} of {len(ratios)} cases"
        return (
            f"{goal.ours} / {goal.peer}, {where}, {goal.from_bytes // KIB}-{goal.to_bytes // KIB} KiB:"
            f" {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}), goal {goal.share}: {verdict}"
        )


def verdicts(rows: Iterable[Row]) -> Iterator[Verdict]:
    """Of all goals of which a case was measured."""
    cases: dict[tuple[bool, int, int], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        cases[row.tls, row.range_bytes, row.concurrency][row.client] = row
    for goal in GOALS:
        ratios = [
            rows_of[goal.ours].cpu_seconds_per_gib / rows_of[goal.peer].cpu_seconds_per_gib
            for (tls, size, _), rows_of in cases.items()
            if goal.tls in {None, tls}
            and goal.from_bytes <= size <= goal.to_bytes
            and {goal.ours, goal.peer} <= {*rows_of}
        ]
        if ratios:
            yield Verdict(goal, tuple(sorted(ratios)))


def case_of(row: Row) -> tuple[bool, int, int]:
    """What rows that can be compared have in common."""
    return row.tls, row.range_bytes, row.concurrency


def plot(rows: list[Row], path: Path) -> None:
    """CPU per GiB over the size of ranges, a panel for each concurrency, plain above TLS."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    encryptions = sorted({row.tls for row in rows})
    concurrencies = sorted({row.concurrency for row in rows})
    figure, panels = pyplot.subplots(
        len(encryptions),
        len(concurrencies),
        squeeze=False,
        sharex=True,
        sharey=True,
        figsize=(4 * len(concurrencies), 3.2 * len(encryptions)),
        layout="constrained",
    )
    for line, tls in enumerate(encryptions):
        for column, concurrency in enumerate(concurrencies):
            panel = panels[line][column]
            for client in dict.fromkeys(row.client for row in rows):
                own = [row for row in rows if (row.client, row.tls, row.concurrency) == (client, tls, concurrency)]
                costs = [row.cpu_seconds_per_gib for row in own]
                panel.plot([row.range_bytes / KIB for row in own], costs, marker="o", label=client)
            panel.set_title(f"{'TLS' if tls else 'plain'}, {concurrency} streams")
            panel.set(xscale="log", yscale="log", xlabel="range, KiB", ylabel="client CPU-s per GiB")
            panel.grid(visible=True, which="both", alpha=0.3)
    panels[0][0].legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="two sizes at one concurrency, 3 repeats")
    parser.add_argument("--clients", help=f"of {', '.join(CLIENTS)}, each with @{'/@'.join(LOOPS)} where wanted")
    parser.add_argument("--sizes", help="KiB, with commas")
    parser.add_argument("--concurrency", help="with commas")
    parser.add_argument("--only", choices=("plain", "tls"))
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--repeat-mib", type=int, help="fetched in one repeat by each client")
    parser.add_argument("--no-slow-link", action="store_true")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--save", type=Path, metavar="FILE.json", default=OUTPUT / "engine.json", help="%(default)s")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", default=OUTPUT / "engine.png", help="%(default)s")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no case is begun later; default: none")
    return parser.parse_args(arguments)


def is_installed(name: str) -> bool:
    """Whether there are the packages of a client, and of its loop."""
    return all(find_spec(part.partition("-")[0]) for part in name.split("@"))


def plan_of(asked: argparse.Namespace) -> Plan:
    """What the command line asks for."""
    installed = [name for name in DEFAULT_CLIENTS if is_installed(name)]
    sizes, concurrencies = (QUICK_SIZES, QUICK_CONCURRENCIES) if asked.quick else (SIZES, CONCURRENCIES)
    return Plan(
        clients=asked.clients.split(",") if asked.clients else installed,
        sizes=[int(size) * KIB for size in asked.sizes.split(",")] if asked.sizes else sizes,
        concurrencies=list(map(int, asked.concurrency.split(","))) if asked.concurrency else concurrencies,
        tls=[False, True] if asked.only is None else [asked.only == "tls"],
        repeats=asked.repeats or (3 if asked.quick else 5),
        repeat_bytes=(asked.repeat_mib or 128) * MIB,
        max_requests=1000,
        seconds=60 * asked.minutes,
    )


def save(rows: list[Row], links: Sequence[SlowLink], asked: argparse.Namespace) -> None:
    """Write what is known so far."""
    asked.save.parent.mkdir(parents=True, exist_ok=True)
    asked.save.write_text(as_json(rows, links))
    asked.plot.parent.mkdir(parents=True, exist_ok=True)
    plot(rows, asked.plot)


def as_json(rows: list[Row], links: Sequence[SlowLink]) -> str:
    """All figures."""
    goals = [{**asdict(verdict), "is_met": verdict.is_met} for verdict in verdicts(rows)]
    return json.dumps({
        "rows": [asdict(row) for row in rows],
        "goals": goals,
        "slow_links": [asdict(link) for link in links],
    })


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    asked = parse(arguments)
    plan = plan_of(asked)
    cases = plan.cases()
    shared_memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    rows: list[Row] = []
    links: list[SlowLink] = []
    with tempfile.TemporaryDirectory(prefix="asyncfetch-bench-", dir=shared_memory) as directory:
        if not asked.no_slow_link:
            for tls in plan.tls:
                links += measure_slow_link(Path(directory), repeats=plan.repeats, tls=tls)
        progress = Console(stderr=True)
        for case in track(measure(plan, Path(directory)), "cases", total=len(cases), console=progress, transient=True):
            rows += case
            save(rows, links, asked)
    if asked.json:
        print(as_json(rows, links))
    else:
        show(rows, links, Console(width=None if sys.stdout.isatty() else 150))
    if rows:
        progress.print(f"all figures are in {asked.save}, a plot in {asked.plot}")
    for line in left_out(plan, rows):
        progress.print(f"not measured: {line}")


def left_out(plan: Plan, rows: Sequence[Row]) -> Iterator[str]:
    """The cases and clients that the figures don't show, and why."""
    done = {case_of(row) for row in rows}
    for tls, size, concurrency in (case for case in plan.cases() if case not in done):
        why = "too much memory in each client" if size * concurrency > MAX_IN_FLIGHT_BYTES else "the time was up"
        yield f"{'TLS' if tls else 'plain'}, {size // KIB} KiB, {concurrency} streams: {why}"
    yield from (f"{name}: not asked for, or not installed" for name in DEFAULT_CLIENTS if name not in plan.clients)


if __name__ == "__main__":
    main()
