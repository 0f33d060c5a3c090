"""An epoch whose server is killed again and again: is each sample there once, and how many bytes come twice?

    python -m bench.outages

A loader, with workers and without, reads an epoch of 10,000 samples from a web server in a process of its own, by
answers at 256 KiB/s. At random samples the server gets a SIGKILL, whatever it is at, and another one takes its place
after a random time. The bytes that were fetched are compared with those of an epoch that nothing disturbs. It fails
where a sample is missing or there twice.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch.utils.data import DataLoader

import asyncfetch as af
from asyncfetch.testing import write_dataset
from asyncfetch.torch import StreamDataset

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

EPISODE_FRAMES = 50
BYTES_PER_SECOND = 256 * 1024
BATCH = 20
SERVER = f"""
import sys
from asyncfetch.testing import RangeServer

with RangeServer(sys.argv[1], port=int(sys.argv[2]), tls=False, bytes_per_second={BYTES_PER_SECOND}) as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


@dataclass(frozen=True)
class Epoch:
    """What an epoch was."""

    workers: int
    restarts: int
    samples: int
    seconds: float
    fetched_bytes: int
    requests: int
    failed: int
    """Attempts that did."""
    outages: int
    """As the fetchers of all processes counted them."""


class MortalServer:
    """A web server that can be killed and started again, at one url."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._restarting: threading.Thread | None = None

    def _start(self, port: int) -> None:
        command = [sys.executable, "-c", SERVER, str(self._root), str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()

    def _kill(self) -> None:
        with self._process:
            self._process.kill()

    def restart(self, away_seconds: float) -> None:
        """Kill it now, and start it again after some time, in a thread; one after the other."""
        if self._restarting is not None:
            self._restarting.join()
        self._kill()
        self._restarting = threading.Thread(target=self._return, args=[away_seconds])
        self._restarting.start()

    def _return(self, away_seconds: float) -> None:
        time.sleep(away_seconds)
        self._start(int(self.url.rpartition(":")[2]))

    def __enter__(self) -> Self:
        self._start(0)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._restarting is not None:
            self._restarting.join()
        self._kill()


def epoch(root: Path, samples: int, *, workers: int, restarts: int, max_away_seconds: float, seed: int) -> Epoch:
    """One epoch, its server killed so often; RuntimeError where a sample isn't there just once."""
    dice = random.Random(seed)
    moments = set(dice.sample(range(samples), restarts))
    config = af.StreamConfig(pool_segments=4, prefetch_segments=2, fetch=af.FetchConfig(trust_env=False))
    seen: Counter[int] = Counter()
    began = time.monotonic()
    with MortalServer(root) as server:
        stream = af.Stream(server.url, seed=seed, config=config)
        dataset = StreamDataset(stream, batch_size=BATCH)
        for batch in DataLoader(dataset, batch_size=None, num_workers=workers):
            for index in batch["index"].tolist():
                seen[index] += 1
                if seen.total() in moments:
                    server.restart(dice.uniform(0.0, max_away_seconds))
        statistics = dataset.statistics()
    assert statistics is not None
    fetch = statistics.fetch
    if seen != Counter(range(samples)):
        missing, twice = samples - len(seen), sum(count > 1 for count in seen.values())
        raise RuntimeError(f"{missing} samples are missing, {twice} were there more than once")
    return Epoch(
        workers, restarts, samples, time.monotonic() - began, fetch.bytes, fetch.requests, fetch.errors, fetch.outages
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Parse arguments, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000, help=f"a multiple of {EPISODE_FRAMES}")
    parser.add_argument("--restarts", type=int, default=20)
    parser.add_argument("--max-away-seconds", type=float, default=4.0)
    parser.add_argument("--workers", default="0,2", help="numbers of loader workers, each of which reads an epoch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "dataset"
        episodes = arguments.samples // EPISODE_FRAMES
        write_dataset(
            root, episodes=episodes, length=EPISODE_FRAMES, width=256, height=192, texture=8.0, distinct_videos=8
        )
        for workers in map(int, arguments.workers.split(",")):
            found = []
            for restarts in (0, arguments.restarts):
                try:
                    found.append(
                        epoch(
                            root,
                            arguments.samples,
                            workers=workers,
                            restarts=restarts,
                            max_away_seconds=arguments.max_away_seconds,
                            seed=arguments.seed,
                        )
                    )
                except (RuntimeError, af.AsyncFetchError) as error:
                    sys.exit(f"failed with {workers} workers and {restarts} restarts: {error}")
                line = asdict(found[-1])
                print(json.dumps(line) if arguments.json else "  ".join(f"{name}={line[name]:,}" for name in line))
            undisturbed, disturbed = found
            ratio = disturbed.fetched_bytes / undisturbed.fetched_bytes
            if not arguments.json:
                print(f"{workers} workers: {ratio:.4f} of the bytes of an epoch that nothing disturbs")


if __name__ == "__main__":
    main()
