"""Processes that share a disk cache, one of them killed every second.

    python -m bench.soak

Eight processes read random ranges over HTTP, through memory and a disk cache whose bound is a tenth of the data. Every
second one of them gets a SIGKILL, wherever it is, and another one takes its place; and a bit of a random file is
flipped. Every byte that is read is compared with the original. It fails at a wrong byte, at a process that stands still
for ten seconds or isn't at work a minute after its start, and when the files are more than the bound and a block a
process; the process that stands still shows where. In the end what the dead had left is swept, and what remains is
verified.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import json
import mmap
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from ctypes import c_int64
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import numpy as np

import asyncfetch as af
from asyncfetch.cache.disk import Folder, verify
from asyncfetch.cache.disk.layout import BLOCK_BYTES
from asyncfetch.testing import RangeServer

if TYPE_CHECKING:
    from collections.abc import MutableSequence, Sequence
    from multiprocessing.context import ForkServerProcess

MIB = 1024 * 1024
OBJECTS, OBJECT_BYTES = 16, 8 * MIB
MAX_BYTES = OBJECTS * OBJECT_BYTES // 10
MEMORY_BYTES = 4 * MIB
LONGEST_BYTES = 3 * MIB
AT_ONCE = 4
STILL_SECONDS = 10.0
START_SECONDS = 60.0
"""Until a process has read something: it imports for half a second of a processor's time, and all may start at once on
a machine that has other things to do."""
WRONG_BYTES = 3
"""Exit code of a process that read some."""


@dataclass(frozen=True)
class Soak:
    """What happened."""

    seconds: float
    processes: int
    killed: int
    flipped_bits: int
    reads: int
    max_bytes: int
    peak_bytes: int
    """Most that the files took, as seen from outside."""
    left_bytes: int
    swept_bytes: int
    """Left by the dead, and deleted in the end. Most was swept before."""
    damaged: int
    """Files with a flipped bit that nobody had read since."""


def read_for_ever(
    url: str, originals: Path, directory: Path, seed: int, slot: int, reads: MutableSequence[int]
) -> None:
    """In a process: read, compare, count in ``reads[slot]``, until ``reads[-1]`` says that it is enough."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    generator = random.Random(seed)
    with ExitStack() as stack:
        contents = []
        for number in range(OBJECTS):
            file = stack.enter_context((originals / str(number)).open("rb"))
            contents.append(stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
        anyio.run(_read, url, contents, directory, generator, slot, reads)


async def _read(
    url: str,
    contents: list[mmap.mmap],
    directory: Path,
    generator: random.Random,
    slot: int,
    reads: MutableSequence[int],
) -> None:
    tier = af.DiskTier(directory, MAX_BYTES, min_free_bytes=0)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, _show_tasks)
    faulthandler.register(signal.SIGUSR1, chain=True)  # for what the loop's handler can't show: threads, a stuck loop

    async def read() -> None:
        while not reads[-1]:
            number = min(int(generator.expovariate(0.3)), OBJECTS - 1)  # some are read more often than others
            start = generator.randrange(OBJECT_BYTES // 4096) * 4096
            stop = min(start + generator.randrange(1, LONGEST_BYTES), OBJECT_BYTES)
            if await cache.fetch(f"{url}/{number}", start, stop) != contents[number][start:stop]:
                os._exit(WRONG_BYTES)
            reads[slot] += 1

    config = af.FetchConfig(trust_env=False)
    async with (
        af.Fetcher(config) as fetcher,
        af.ByteCache(fetcher, max_bytes=MEMORY_BYTES, disk=tier) as cache,
        anyio.create_task_group() as group,
    ):
        for _ in range(AT_ONCE):
            group.start_soon(read)


def _show_tasks() -> None:
    for task in asyncio.all_tasks():
        task.print_stack()


def files_bytes(directory: Path) -> int:
    """What the files in a tier take; each counts once, though one may move while we look."""
    sizes: dict[int, int] = {}
    for part in ("v1/new", "v1/objects"):
        for path in _files(directory / part):
            with suppress(FileNotFoundError):
                status = path.stat()
                sizes[status.st_ino] = -(-status.st_size // 4096) * 4096
    return sum(sizes.values())


def _files(directory: Path) -> list[Path]:
    """All files below; folders that vanish meanwhile are none."""
    return [Path(folder, name) for folder, _, names in os.walk(directory) for name in names]


def flip_a_bit(directory: Path, generator: random.Random) -> int:
    """In a random file; returns how many."""
    files = _files(directory / "v1/objects")
    if not files:
        return 0
    with suppress(FileNotFoundError), generator.choice(files).open("r+b") as file:
        at = generator.randrange(os.fstat(file.fileno()).st_size)
        byte = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), at)
        return 1
    return 0


@dataclass(frozen=True)
class Progress:
    """How far a process is, and since when."""

    reads: int
    since: float
    at_work: bool = False
    """Whether it has read anything; before that it starts."""

    def seen(self, reads: int, now: float) -> Progress:
        """What is known once so many reads were counted."""
        return self if reads == self.reads else Progress(reads, now, at_work=True)

    def is_late(self, now: float) -> bool:
        """Whether it has done nothing for longer than it may."""
        return now - self.since > (STILL_SECONDS if self.at_work else START_SECONDS)

    def describe(self, now: float) -> str:
        """What it does instead."""
        seconds = now - self.since
        if self.at_work:
            return f"has stood still for {seconds:.1f} s, after {self.reads} reads in its place"
        return f"has read nothing in the {seconds:.1f} s since its start"


class Crowd:
    """The processes, and what is known of each."""

    def __init__(self, url: str, originals: Path, directory: Path, count: int) -> None:
        self._arguments = url, originals, directory
        self._context = multiprocessing.get_context("forkserver")  # all but the first needn't import for half a second
        self._context.set_forkserver_preload(["bench.soak"])
        self.reads = self._context.RawArray(c_int64, count + 1)
        self._progress = [Progress(0, time.monotonic())] * count
        self._started = 0
        self.processes = [self._start(slot) for slot in range(count)]

    def _start(self, slot: int) -> ForkServerProcess:
        self._started += 1
        process = self._context.Process(
            target=read_for_ever, args=(*self._arguments, self._started, slot, self.reads), daemon=True
        )
        process.start()
        self._progress[slot] = Progress(self.reads[slot], time.monotonic())
        return process

    def kill(self, slot: int) -> None:
        """Kill one and start another in its place."""
        process = self.processes[slot]
        process.kill()
        process.join()
        self.processes[slot] = self._start(slot)

    def check(self) -> None:
        """RuntimeError where one has read a wrong byte, has died, or stands still."""
        now = time.monotonic()
        for slot, process in enumerate(self.processes):
            if process.exitcode is not None:
                why = "read a wrong byte" if process.exitcode == WRONG_BYTES else f"ended with {process.exitcode}"
                raise RuntimeError(f"process {slot} {why}")
            self._progress[slot] = progress = self._progress[slot].seen(self.reads[slot], now)
            if progress.is_late(now):
                self._show_stacks(process)
                raise RuntimeError(f"process {slot} {progress.describe(now)}")

    def _show_stacks(self, process: ForkServerProcess) -> None:
        """Have it print what its threads and tasks are at; one that hasn't come to its work yet ends by this."""
        if process.pid is not None:
            os.kill(process.pid, signal.SIGUSR1)
            process.join(1.0)  # it prints in microseconds, once it gets a processor

    def end(self) -> None:
        """Let all end by themselves."""
        self.reads[-1] = 1
        for process in self.processes:
            process.join(START_SECONDS)
            if process.exitcode is None:
                self._show_stacks(process)
                raise RuntimeError(f"a process hasn't ended in {START_SECONDS} s")
            if process.exitcode != 0:
                raise RuntimeError(f"a process ended with {process.exitcode}")

    def close(self) -> None:
        """Whatever happened, none is left."""
        for process in self.processes:
            process.kill()
            process.join()


def soak(directory: Path, *, seconds: float, processes: int, kill_every_seconds: float) -> Soak:
    """Run it in an empty directory.

    Raises:
        RuntimeError: Something that must not happen did.
    """
    originals, tier = directory / "originals", directory / "tier"
    originals.mkdir()
    for number in range(OBJECTS):
        (originals / str(number)).write_bytes(np.random.default_rng(number).bytes(OBJECT_BYTES))
    generator = random.Random(0)
    killed = flipped = peak = 0
    with RangeServer(originals, tls=False) as server:
        crowd = Crowd(server.url, originals, tier, processes)
        try:
            while not all(crowd.reads[slot] for slot in range(processes)):
                time.sleep(0.05)
                crowd.check()
            begun = last = time.monotonic()
            while (now := time.monotonic()) < begun + seconds:
                time.sleep(0.05)
                crowd.check()
                peak = max(peak, files_bytes(tier))
                if now >= last + kill_every_seconds:
                    last = now
                    crowd.kill(killed % processes)
                    killed += 1
                    flipped += flip_a_bit(tier, generator)
            crowd.end()
        finally:
            crowd.close()
    return _inspect(tier, crowd, Soak(seconds, processes, killed, flipped, 0, MAX_BYTES, peak, 0, 0, 0))


def _inspect(tier: Path, crowd: Crowd, soak: Soak) -> Soak:
    if soak.peak_bytes > MAX_BYTES + soak.processes * BLOCK_BYTES:
        raise RuntimeError(f"the files took {soak.peak_bytes} bytes, the bound is {MAX_BYTES}")
    abandoned = sum(path.stat().st_size for path in (tier / "v1/new").iterdir())
    folder = Folder(tier, create=False)
    try:
        if any((tier / "v1/new").iterdir()):
            raise RuntimeError("what the dead had left wasn't swept")
        damaged = sum(not is_right for _, is_right in verify(folder))
        if damaged > soak.flipped_bits or not all(is_right for _, is_right in verify(folder)):
            raise RuntimeError(f"{damaged} files are damaged, but only {soak.flipped_bits} bits were flipped")
        left_bytes = files_bytes(tier)
        if not left_bytes <= folder.used_bytes() or folder.count() != left_bytes:
            raise RuntimeError(f"{left_bytes} bytes are there, {folder.used_bytes()} are accounted for")
    finally:
        folder.close()
    found = {"reads": sum(crowd.reads[:-1]), "left_bytes": left_bytes, "swept_bytes": abandoned, "damaged": damaged}
    return Soak(**{**asdict(soak), **found})


def main(argv: Sequence[str] | None = None) -> None:
    """Parse arguments, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--kill-every-seconds", type=float, default=1.0)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        try:
            done = soak(
                Path(directory),
                seconds=arguments.seconds,
                processes=arguments.processes,
                kill_every_seconds=arguments.kill_every_seconds,
            )
        except RuntimeError as error:
            sys.exit(f"failed: {error}")
    if arguments.json:
        print(json.dumps(asdict(done)))
    else:
        for name, value in asdict(done).items():
            print(f"{name:14} {value:>14,}")


if __name__ == "__main__":
    main()
