"""Whether a report names what binds: twelve bottlenecks, each made on purpose, read in an order that is drawn.

    python -m bench.why                 three rounds of all twelve
    python -m bench.why --gains         and what the settings that it proposes bring, beside what it said
    python -m bench.why --costs         instead, the CPU that the account of waits takes, and a trace

Each is read for some seconds by a process of its own, which is told what to read and how, and not what is wrong. What
it reports as binding is compared afterwards with what was made.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from asyncfetch.stream import source_of
from asyncfetch.testing import Fault, RangeServer, write_dataset

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from asyncfetch.testing import FaultRule, ServedRequest

CAMERA = "observation.images.top"
SLOW_TLS = {"OPENSSL_ia32cap": "~0xffffffffffffffff:~0xffffffffffffffff"}
"""OpenSSL without the processor's help. With a connection for each request a core gets no further than these."""


@dataclass(frozen=True)
class Setup:
    """What a reader is told."""

    dataset: str = "small"
    server: dict[str, Any] | None = field(default_factory=dict)
    """RangeServer's arguments; None reads the directory."""
    fault: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    shuffle: bool = True
    windows: int = 0
    """Frames that each sample has of the camera, if more than one."""
    transform_seconds: float = 0.0
    consumer_seconds: float = 0.0
    """A sample."""
    collate_seconds: float = 0.0
    """A batch of 8; of a loader's collate_fn."""
    num_workers: int = 0
    environment: dict[str, str] = field(default_factory=dict)


POOL = {"pool_segments": 8, "prefetch_segments": 4}
# Hard enough that it binds on a busy machine, too, where a sample takes ten times as long to decode.
CASES: dict[str, tuple[str, Setup]] = {
    "late first bytes": ("first_byte", Setup(server={"first_byte_seconds": 3.0}, config=POOL)),
    "slow streams": ("bodies", Setup(server={"bytes_per_second": 8_000}, config=POOL)),
    "a quota": ("limit", Setup(fault="quota", config=POOL)),
    "503s": ("retries", Setup(fault="503", config=POOL)),
    "TLS takes a core": (
        "loop",
        Setup("tiny", server={"tls": True}, fault="closes", config=POOL, environment=SLOW_TLS),
    ),
    "decoding": ("decoding", Setup(windows=24, config=POOL)),
    "one huge episode": (
        "episode",
        Setup("huge", server={"bytes_per_second": 100_000}, shuffle=False, config={"prefetch_segments": 2}),
    ),
    "a transform that holds the GIL": ("transform", Setup(transform_seconds=0.01, config=POOL)),
    "a slow collate": ("hand_over", Setup(collate_seconds=1.0, num_workers=1, config=POOL)),
    "a slow consumer": ("trainer", Setup(consumer_seconds=0.1, config=POOL)),
    "memory too small for the pool": (
        "room",
        Setup(
            "long",
            server={"first_byte_seconds": 0.7},
            config={"pool_segments": 2, "prefetch_segments": 4, "max_bytes": 2_200_000},
        ),
    ),
    "a cold disk cache": ("disk", Setup(server={"bytes_per_second": 8_000}, config=POOL | {"disk_cache_dir": ""})),
}
"""By what is wrong: what a report should call it, and how it is made."""


def datasets(root: Path) -> None:
    """Make what is read: short episodes; long ones; short ones and one that is 50 times as long; two frames a file."""
    cameras, huge = [CAMERA], [60] * 3 + [3000] + [60] * 60
    sizes = {"codec": "h264", "cameras": cameras, "width": 96, "height": 96, "texture": 20.0, "crf": 8}
    write_dataset(root / "small", episodes=200, length=40, distinct_videos=8, **sizes)  # type: ignore[arg-type]
    write_dataset(root / "long", episodes=120, length=100, distinct_videos=4, **(sizes | {"texture": 24.0, "crf": 1}))  # type: ignore[arg-type]
    write_dataset(root / "huge", episodes=huge, **sizes)  # type: ignore[arg-type]
    tiny = sizes | {"episodes_per_video_file": 1}
    write_dataset(root / "tiny", episodes=1500, length=2, distinct_videos=8, **tiny)  # type: ignore[arg-type]


@contextmanager
def served(setup: Setup, root: Path) -> Iterator[tuple[str, str | None]]:
    """Serve the dataset from another process: its url, and the authority to trust."""
    if setup.server is None:
        yield str(root / setup.dataset), None
        return
    context = _context(setup)
    ours, theirs = context.Pipe()
    arguments = {"tls": False} | setup.server
    process = context.Process(target=_serve, args=(str(root / setup.dataset), arguments, setup.fault, theirs))
    process.start()
    try:
        yield ours.recv()
    finally:
        ours.send(None)
        process.join()


def _context(setup: Setup) -> Any:  # noqa: ANN401 - one of multiprocessing's
    """Processes that know of nothing, but have the libraries already, where those don't read the environment."""
    multiprocessing.set_forkserver_preload(["av", "asyncfetch.torch", "bench.why"])
    return multiprocessing.get_context("spawn" if setup.environment else "forkserver")


def _serve(directory: str, arguments: dict[str, Any], fault: str, connection: Connection) -> None:
    rules: dict[str, FaultRule] = {
        "quota": _Quota(8),
        "quota of 50": _Quota(50),
        "503": _unavailable,
        "late": _late,
        "closes": _close,
    }
    with RangeServer(directory, fault=rules.get(fault), **arguments) as server:
        connection.send((server.url, server.ca_file))
        connection.recv()


class _Quota:
    """So many requests a second; the others are told to come back."""

    def __init__(self, requests_per_second: float) -> None:
        self._rate, self._left, self._at = requests_per_second, requests_per_second, time.monotonic()

    def __call__(self, request: ServedRequest) -> Fault | None:
        now = time.monotonic()
        self._left, self._at = min(self._rate, self._left + (now - self._at) * self._rate), now
        if self._left < 1:
            return Fault.status(429, retry_after=1)
        self._left -= 1
        return None


def _unavailable(request: ServedRequest) -> Fault | None:
    return Fault.status(503) if request.path.endswith(".mp4") and random.random() < 0.7 else None


def _close(_: ServedRequest) -> Fault:
    return Fault.headers({"Connection": "close"})


def _late(_: ServedRequest) -> Fault | None:
    return Fault.slow(first_byte_seconds=0.25) if random.random() < 0.015 else None


def read(setup: Setup, root: Path, seconds: float) -> dict[str, Any]:
    """Read in a process of its own, so long from the first sample on: what it reports, and samples/s in that time.

    Frames/s have the time before it, too.
    """
    context = _context(setup)
    ours, theirs = context.Pipe()
    with served(setup, root) as (url, ca_file), tempfile.TemporaryDirectory() as directory:
        before = {name: os.environ.get(name) for name in setup.environment}
        os.environ.update(setup.environment)
        process = context.Process(target=_read, args=(setup, url, ca_file, root, directory, seconds, theirs))
        process.start()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
        theirs.close()
        told: dict[str, Any] = ours.recv()
        process.join()
    return told


def _read(
    setup: Setup, url: str, ca_file: str | None, root: Path, directory: str, seconds: float, connection: Connection
) -> None:
    import torch
    from torch.utils.data import DataLoader

    import asyncfetch as af
    from asyncfetch.torch import StreamDataset

    torch.set_num_threads(1)
    options = dict(setup.config)
    if "disk_cache_dir" in options:
        options["disk_cache_dir"] = directory
    fetch = {name.partition(".")[2]: options.pop(name) for name in list(options) if name.startswith("fetch.")}
    config = af.StreamConfig(
        fetch=af.FetchConfig(ca_file=ca_file, retry=af.RetryConfig(attempts=40), trust_env=False, **fetch), **options
    )
    stream = af.Stream(
        url,
        shuffle=setup.shuffle,
        config=config,
        windows={CAMERA: af.frames(*range(-setup.windows + 1, 1))} if setup.windows else None,
        transform=_Spin(setup.transform_seconds) if setup.transform_seconds else None,
    )
    warm = af.Stream(root / setup.dataset, episodes=[0])
    next(iter(warm))  # imports what decodes
    cameras = len(source_of(warm).session().opened().datasets[0].files(None))
    warm.close()
    source: Any = stream
    dataset = None
    batch = 8
    if setup.collate_seconds:
        dataset, spin = StreamDataset(stream), _Spin(setup.collate_seconds)
        source = DataLoader(dataset, batch_size=batch, num_workers=setup.num_workers, collate_fn=spin)
    elif setup.num_workers:
        dataset = StreamDataset(stream, batch_size=batch)
        source = DataLoader(dataset, batch_size=None, num_workers=setup.num_workers)
    began, times, samples = time.perf_counter(), [], 0
    for _ in source:
        times.append(time.perf_counter() - began)
        samples += batch if setup.num_workers else 1
        time.sleep(setup.consumer_seconds)  # on its device
        if times[-1] - times[0] > seconds:
            break
    report = stream.report() if dataset is None else dataset.report()
    verdict = asdict(report.verdict)
    connection.send({
        "verdict": verdict,
        "page": str(report),
        "samples_per_second": samples * (1 - 1 / len(times)) / max(times[-1] - times[0], 1e-9),
        "frames_per_second": cameras * samples / times[-1],
    })
    stream.close()


class _Spin:
    """Hold the interpreter for so long, and give back what came."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, given: Any) -> Any:  # noqa: ANN401
        until = time.thread_time() + self._seconds
        while time.thread_time() < until:
            pass
        return given


@dataclass(frozen=True)
class Row:
    """One bottleneck of one round."""

    round: int
    made: str
    expected: str
    told: str
    evidence: str
    setting: dict[str, int]
    said_gain: float
    gain: float | None
    """With that setting over without it; None where there is none or it wasn't tried."""
    page: str

    @property
    def is_right(self) -> bool:
        """Whether the report named it."""
        return self.told == self.expected


def measure(
    root: Path, console: Console, *, rounds: int, seconds: float, gains: bool, only: list[str] | None = None
) -> list[Row]:
    """All cases, or ``only`` some, in an order that is drawn for each round."""
    rows = []
    for number in range(1, rounds + 1):
        names = list(only or CASES)
        random.shuffle(names)
        for name in names:
            expected, setup = CASES[name]
            told = read(setup, root, seconds)
            verdict, gain = told["verdict"], None
            if gains and verdict["setting"]:
                changed = read(_with(setup, verdict["setting"]), root, seconds)
                gain = changed["samples_per_second"] / told["samples_per_second"]
            row = Row(
                number, name, expected, verdict["binds"], verdict["evidence"], verdict["setting"], verdict["gain"],
                gain, told["page"],
            )  # fmt: skip
            rows.append(row)
            console.print(f"{name}: {row.told}, {'right' if row.is_right else 'wrong'}", markup=False)
    return rows


def _with(setup: Setup, setting: dict[str, int]) -> Setup:
    [(name, value)] = setting.items()
    if name == "num_workers":
        return replace(setup, num_workers=value)
    return replace(setup, config=setup.config | {name: value})


def show(console: Console, rows: list[Row]) -> None:
    """The figures for people."""
    table = Table("round", "made", "named", "", "said", "brought", title="what binds, made on purpose")
    for row in rows:
        table.add_row(
            str(row.round),
            row.made,
            row.told,
            "right" if row.is_right else f"[bold]wrong, {row.expected}[/]",
            f"{row.said_gain:.2f} x by {row.setting}" if row.setting else "",
            "" if row.gain is None else f"{row.gain:.2f} x",
        )
    console.print(table)
    for number in sorted({row.round for row in rows}):
        of_round = [row for row in rows if row.round == number]
        console.print(f"round {number}: {sum(row.is_right for row in of_round)} of {len(of_round)}")
    for row in rows:
        if not row.is_right:
            console.print(f"\n{row.made}:\n{row.page}", markup=False)


TURNS = ("as it is", "without the account", "traced")


def measure_costs(root: Path, console: Console, *, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of CPU a sample, from its first ones on, of an epoch over HTTP, by turns; a figure for each repeat.

    Without the account nothing is counted of the consumer, the loop, episodes and requests; the calls stay.
    """
    figures: dict[str, list[float]] = {turn: [] for turn in TURNS}
    with served(Setup(), root) as (url, _), tempfile.TemporaryDirectory() as directory:
        for _ in range(repeats):
            for turn in random.sample(TURNS, len(TURNS)):
                ours, theirs = _context(Setup()).Pipe()
                process = _context(Setup()).Process(target=_read_for, args=(turn, url, f"{directory}/trace", theirs))
                process.start()
                theirs.close()
                figures[turn].append(ours.recv())
                process.join()
                console.print(f"{turn}: {figures[turn][-1]:.3f} ms of CPU a sample", markup=False)
    return figures


def _read_for(turn: str, url: str, trace_path: str, connection: Connection) -> None:
    import asyncfetch as af
    from asyncfetch.observe import trace

    if turn == "without the account":
        _leave_out_the_account()
    with trace(trace_path) if turn == "traced" else nullcontext():
        stream = af.Stream(url, config=af.StreamConfig(fetch=af.FetchConfig(trust_env=False)))
        samples = iter(stream)
        for _ in itertools.islice(samples, 64):  # loads what decodes
            pass
        began = time.process_time()
        count = sum(1 for _ in samples)
        connection.send(1e3 * (time.process_time() - began) / count)
        stream.close()


def _leave_out_the_account() -> None:
    from asyncfetch.observe.waits import WaitAccount
    from asyncfetch.runtime.threads import ThreadClock
    from asyncfetch.stream import prefetcher
    from asyncfetch.stream.decode_ahead import DecodeAhead

    gives: dict[tuple[object, str], object] = {
        (DecodeAhead, "path"): (),
        (DecodeAhead, "forget_path"): None,
        (prefetcher.Prefetcher, "steps"): (),
        (prefetcher, "metered"): nullcontext(),
        (ThreadClock, "seconds"): 0.0,
    }
    gives |= {(WaitAccount, name): None for name in ("wait", "give", "end", "note", "note_cause", "note_worked")}
    for (owner, name), given in gives.items():
        setattr(owner, name, lambda *_, given=given, **__: given)


def show_costs(console: Console, figures: dict[str, list[float]]) -> None:
    """The figures for people."""
    table = Table("CPU of", "share of the CPU", "lowest", "highest", title="what it costs to know")
    for name, more, less in (("the account", TURNS[0], TURNS[1]), ("a trace", TURNS[2], TURNS[0])):
        shares = sorted(one / other - 1 for one, other in zip(figures[more], figures[less], strict=True))
        table.add_row(name, *(f"{share:.1%}" for share in (statistics.median(shares), shares[0], shares[-1])))
    console.print(table)


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each run, from its first sample on")
    parser.add_argument("--gains", action="store_true", help="also try each setting that is proposed")
    parser.add_argument("--costs", action="store_true", help="measure what reports and traces cost instead")
    parser.add_argument("--repeats", type=int, default=7, help="of --costs")
    parser.add_argument("--only", nargs="*", help="some of the cases")
    parser.add_argument("--root", type=Path, help="where the datasets are, or are made")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    asked = parser.parse_args(arguments)
    console = Console(stderr=asked.json)
    with tempfile.TemporaryDirectory(prefix="asyncfetch-bench-") as directory:
        root = asked.root or Path(directory)
        if not (root / "tiny").exists():
            datasets(root)
        if asked.costs:
            figures = measure_costs(root, console, repeats=asked.repeats)
            show_costs(console, figures)
            if asked.json:
                print(json.dumps(figures, indent=2))
            return
        rows = measure(root, console, rounds=asked.rounds, seconds=asked.seconds, gains=asked.gains, only=asked.only)
    show(console, rows)
    if asked.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
