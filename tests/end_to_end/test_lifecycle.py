"""What needs a process of its own: leaks, Ctrl-C, kill -9. Everything ends within a second."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from asyncfetch.testing import Fault, RangeServer, ServedRequest
from tests.end_to_end.conftest import LENGTHS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.end_to_end.conftest import Served

pytestmark = pytest.mark.usefixtures("programs_are_warm")

END_SECONDS = 2.5
"""A second, and what an interpreter with torch in it takes to end on a busy machine."""

PRELUDE = """
import anyio, gc, itertools, os, signal, sys, threading, time, warnings
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are born deaf to it
import asyncfetch as af
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker
worker.MP_STATUS_CHECK_INTERVAL = 0.5  # of looking whether its trainer is alive, instead of 5 s
warnings.filterwarnings("ignore", message=".*use of fork")
url, ca_file = sys.argv[1:]
config = af.StreamConfig(fetch=af.FetchConfig(ca_file=ca_file), pool_segments=4)

def make(**options):
    return af.Stream(url, config=config, **options)

def slow(sample):
    time.sleep(0.005)
    return sample

def slower(sample):  # so that an epoch takes seconds: Python loses an interrupt that comes while workers are forked
    time.sleep(0.05)
    return sample

def forever(stream):
    while True:
        yield from stream

def loader_of(stream):
    return DataLoader(af.torch.StreamDataset(stream), batch_size=4, num_workers=2, multiprocessing_context="fork")

def open_things():
    deadline = time.monotonic() + 5  # a thread that was told to end needs a moment
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    return [thread.name for thread in threading.enumerate()], len(os.listdir("/proc/self/fd"))
"""


def start(served: Served, body: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(body), served.url, str(served.server.ca_file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


LEAVES = {
    "break": "for sample in stream: break",
    "close": "iterator = iter(stream); next(iterator); iterator.close(); del iterator",
    "collection": "iterator = iter(stream); next(iterator); del iterator",
    "an error of the consumer": """
        try:
            for sample in stream: 1 / 0
        except ZeroDivisionError: pass
    """,
    "the end": "for sample in stream: pass",
    "an error of a transform": """
        stream._source.transform = lambda sample: 1 / 0
        try: list(stream)
        except ZeroDivisionError: pass
    """,
    "leaving the async iterator": """
        async def main():
            async with stream.samples() as samples:
                await anext(samples)
        anyio.run(main)
    """,
    "cancelling the async iterator": """
        async def main():
            with anyio.move_on_after(0.2):
                async with stream.samples() as samples:
                    while True: await anext(samples); await anyio.sleep(0.05)
        anyio.run(main)
    """,
    "a wrong url": """
        stream._source.source = url + "/nowhere"
        try: list(stream)
        except af.AsyncFetchError: pass
    """,
    "a missing file": """
        stream._source.source = missing
        try: list(stream)
        except af.NotFound: pass
    """,
    "frames of a missing file": """
        frames = af.torch.FrameDataset(missing, config=config)
        try: frames[0]
        except af.NotFound: pass
        del frames
    """,
    "a broken file": """
        stream._source.source = broken
        try: list(stream)
        except af.DatasetError: pass
    """,
    **{
        name: f"""
        try: list(af.Stream({source}))
        except af.{error}: pass
    """
        for name, source, error in (
            ("a damaged video", "damaged, config=config", "FormatError"),
            ("a video of no bytes", "empty, config=config", "FormatError"),
            ("rows cut short", "cut, config=config", "FormatError"),
            ("a wrong scheme", "'gopher://host/data', config=config", "AsyncFetchError"),
            ("nobody listens", "'https://127.0.0.1:1/data', config=hasty", "ConnectionFailed"),
            ("a certificate of nobody known", "url", "ConnectionFailed"),
        )
    },
    "a mixture with a missing file": """
        mixture = af.Mixture([stream, af.Stream(missing, config=config)], weights=[1, 1])
        try: list(mixture)
        except af.NotFound: pass
        del mixture
    """,
    "a loader": "list(loader_of(stream))",
    "breaking out of a loader": "for batch in loader_of(stream): break",
}


@pytest.mark.slow  # ten seconds of a core
@pytest.mark.parametrize("end", ["stream.close(); del stream", "del stream"], ids=["closed", "dropped"])
def test_threads_and_files_are_not_left_open(served: Served, tmp_path: Path, end: str) -> None:
    """In one process, one after the other: each way must leave threads and files as the one before did.

    The collector of cycles, for which a program may wait for long, isn't asked for help.
    """
    names = ("missing", "broken", "damaged", "empty", "cut")
    copies = {name: Path(shutil.copytree(served.truth.root, tmp_path / name)) for name in names}
    next(copies["missing"].rglob("*.mp4")).unlink()
    next(copies["damaged"].rglob("*.mp4")).write_bytes(b"\x17" * 20_000)
    next(copies["empty"].rglob("*.mp4")).write_bytes(b"")
    next((copies["broken"] / "data").rglob("*.parquet")).write_bytes(bytes(10_000))
    rows = next((copies["cut"] / "data").rglob("*.parquet"))
    rows.write_bytes(rows.read_bytes()[:-100])
    body = (
        "".join(f"{name} = {str(path)!r}\n" for name, path in copies.items()) + "gc.collect(); gc.disable()\n"
        "hasty = af.StreamConfig(fetch=af.FetchConfig(retry=af.RetryConfig(outage_seconds=0)))\n"
        "stream = make(); list(stream); list(loader_of(stream)); stream.close(); del stream; before = open_things()\n"
    )
    for name, leave in LEAVES.items():
        body += f"stream = make(transform=slow)\n{textwrap.dedent(leave).strip()}\n"
        body += f"sample = batch = iterator = samples = None\nstarted = time.monotonic()\n{end}\n"
        body += "took = time.monotonic() - started\n"
        body += f"print({name!r}, before == (now := open_things()), took < 1.5, now, before, took)\n"
    process = start(served, body)
    output, errors = process.communicate(timeout=140)
    assert process.returncode == 0, errors
    # Nobody listens at the one host of which all attempts fail, and that is what a program hears of by itself.
    assert re.fullmatch(r"https://127\.0\.0\.1:1 failed (\d+) of \1 attempts .*\n", errors)
    lines = output.splitlines()
    assert len(lines) == len(LEAVES)
    assert [line for line in lines if "True True" not in line] == []
    wait_until_idle(served)


def wait_until_idle(served: Served) -> None:
    deadline = time.monotonic() + 5
    while served.server.statistics().in_flight and time.monotonic() < deadline:
        time.sleep(0.02)
    assert served.server.statistics().in_flight == 0


@dataclass(frozen=True)
class Interrupted:
    name: str
    body: str
    whole_group: bool = False
    """Whether the workers get the signal too, as they do from a terminal."""


FIRST = "print('ready', flush=True) if number == 0 else None"
INTERRUPTED = [
    Interrupted("items flow", f"for number, _ in enumerate(forever(make())): {FIRST}"),
    # For ever: the first items come with a whole job's, once with the last of the epoch, which then ended by itself.
    Interrupted(
        "items are awaited",
        f"for number, _ in enumerate(forever(make(transform=lambda s: time.sleep(0.1) or s))): {FIRST}",
    ),
    Interrupted(
        "the dataset opens",
        "print('ready', flush=True); make() is not None and list(af.Stream(url + '/slow', config=config))",
    ),
    Interrupted(
        "the async iterator",
        f"""
        async def main():
            async with make(transform=slow).samples() as samples:
                number = 0
                async for _ in samples:
                    {FIRST}
                    number += 1
                    await anyio.sleep(0.2)
        anyio.run(main)
        """,
    ),
    Interrupted("a loader", f"for number, _ in enumerate(forever(loader_of(make(transform=slower)))): {FIRST}"),
    Interrupted(
        "a loader and its workers",
        f"for number, _ in enumerate(forever(loader_of(make(transform=slower)))): {FIRST}",
        True,
    ),
]


@pytest.fixture(scope="module")
def slow_server(session_served: Served) -> Iterator[Served]:
    """The dataset again; what is asked for under /slow never answers."""

    def rule(request: ServedRequest) -> Fault | None:
        return Fault.stall(None) if request.path.startswith("/slow/") else None

    with RangeServer(session_served.truth.root, fault=rule) as server:
        yield replace(session_served, server=server)


@pytest.fixture(scope="module")
def waiting(slow_server: Served) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """A process for each, which has imported everything and waits for a line: at once they take all cores for that."""
    wait = "import asyncfetch.torch, torchcodec.decoders\nprint('waiting', flush=True); input()\n"
    processes = {case.name: start(slow_server, wait + textwrap.dedent(case.body)) for case in INTERRUPTED}
    for process in processes.values():
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
    yield processes
    for process in processes.values():
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.mark.alone
@pytest.mark.slow  # the first one starts the processes of all
@pytest.mark.parametrize("case", INTERRUPTED, ids=lambda case: case.name)
def test_an_interrupt_ends_it_within_a_second(waiting: dict[str, subprocess.Popen[str]], case: Interrupted) -> None:
    process = waiting[case.name]
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
    asked = time.monotonic()
    if case.whole_group:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    try:
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert time.monotonic() - asked < END_SECONDS
    assert process.returncode in {-signal.SIGINT, 1}, errors
    assert "KeyboardInterrupt" in errors
    assert_gone(family)


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while alive := [pid for pid in pids if psutil.pid_exists(pid) and not is_zombie(pid)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


def is_zombie(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_killed_worker_is_an_error_and_no_process_remains(served: Served) -> None:
    process = start(
        served,
        """
        loader = loader_of(make(transform=slow))
        iterator = iter(loader)
        next(iterator)
        os.kill(iterator._workers[0].pid, 9)
        while next(iterator, None) is not None: pass
        """,
    )
    _, errors = process.communicate(timeout=30)
    assert "asyncfetch.errors.WorkerError: a worker of the loader (pid " in errors, errors
    assert "was killed by SIGKILL" in errors
    assert process.returncode == 1, errors
    assert [other for other in psutil.process_iter() if group_of(other.pid) == process.pid] == []


def test_a_killed_trainer_leaves_no_worker_behind(served: Served) -> None:
    process = start(
        served, f"for number, _ in enumerate(forever(loader_of(make(transform=slow)))): {FIRST}; time.sleep(0.1)"
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    family = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    assert len(family) >= 2
    process.kill()
    process.wait(10)
    assert_gone(family)
    process.communicate()


def group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


FRAMES = sum(LENGTHS)
USES = {
    "a stream": f"assert len(list(make())) == {FRAMES}",
    "a length": f"assert len(af.torch.StreamDataset(make())) == {FRAMES}",
    "a mixture": f"assert len(list(af.Mixture([make(), make()], weights=[1, 1]))) >= {FRAMES}",
    "a loader without workers": f"""
        loader = DataLoader(af.torch.StreamDataset(make()), batch_size=4)
        assert sum(len(batch["index"]) for batch in loader) == {FRAMES}
    """,
    "a loader with two workers": f"""
        assert sum(len(batch["index"]) for batch in loader_of(make())) == {FRAMES}
    """,
    "served samples and their statistics": f"""
        with af.serve_samples(make(), batch_size=4) as batches:
            assert sum(len(batch["index"]) for batch in batches) == {FRAMES}
            assert batches.statistics()
    """,
    "frames": f"""
        frames = af.torch.FrameDataset(url, config=config)
        assert len(frames) == {FRAMES} and int(frames[7]["index"]) == 7
    """,
    "tensors by plain calls": """
        with TensorServer(max_bytes=2**20) as server, TensorClient() as client:
            assert client.localize(client.remotize([torch.ones(3)], server.url))[0].tolist() == [1, 1, 1]
    """,
    "tensors by coroutines": """
        async def main():
            with TensorServer(max_bytes=2**20) as server:
                async with TensorClient() as client:
                    tensors = await client.localize(await client.remotize([torch.ones(3)], server.url))
                    assert tensors[0].tolist() == [1, 1, 1]
        anyio.run(main)
    """,
    "a pool of staged files": """
        with af.UrlStore(url, config.fetch) as store, af.CachePool(parent_dir=None, method="raw") as pool:
            lazies = [pool.get_lazy(store, "meta/info.json") for _ in range(2)]
            assert [b"codebase_version" in lazy.get() for lazy in lazies] == [True, True]
    """,
    "a stream inside of trio": f"""
        async def main():
            assert len(list(make())) == {FRAMES}
        anyio.run(main, backend="trio")
    """,
}


@pytest.mark.slow  # eight seconds of a core, where it doesn't hang
@pytest.mark.usefixtures("nested_programs_are_warm")
def test_synchronous_uses_end_beside_sniffio_and_trio(served: Served) -> None:
    body = "import sniffio, trio, torch\nfrom asyncfetch.tensors import TensorClient, TensorServer\n"
    for name, use in USES.items():
        body += f"{textwrap.dedent(use)}\nprint({name!r}, flush=True)\n"
    process = start(served, body)
    try:
        output, errors = process.communicate(timeout=180)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
    assert (output.splitlines(), errors) == (list(USES), "")  # where it hangs, the next one hasn't come
    assert process.returncode == 0
