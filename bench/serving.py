"""What handing samples over costs: from the loop to a synchronous consumer, and from a process that makes batches.

    python -m bench.serving

The time of a sample from the loop's thread to ``for sample in stream``, its source always ready: alone, and beside
decode threads that fill all cores. And samples a second of a ``DataLoader`` without workers over those of the async
iterator. By turns; medians over the repeats.

Then one local dataset read in three ways: the async iterator, ``for sample in stream``, and ``serve_samples``. Each
beside a consumer that does nothing else, and beside one that computes in Python for a while at every batch. All
consumers get batches of the same size; in the trainer's process torch's ``default_collate`` makes them. Interleaved;
medians over the repeats. Then the time that ``next`` takes for a batch that is ready, and what a copy of it would take.
"""

from __future__ import annotations

import argparse
import itertools
import random
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import torch
from rich.console import Console
from rich.progress import track
from torch.utils.data import DataLoader, default_collate
from torchcodec.decoders import VideoDecoder  # type: ignore[attr-defined]

import asyncfetch as af
from asyncfetch.config import usable_cpus
from bench import parts
from bench.data import bench_dataset
from bench.rows import Row, show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

BATCH = 32
SKIPPED_SAMPLES = 320
"""At the start of each measurement: more than wait, decoded, behind the pause before it."""
SLOTS = 8
"""Batches after which the shared memory has been used before."""
READY_SECONDS = 0.5
"""Enough to make a batch."""


@dataclass(frozen=True)
class Consumer:
    """What it does with a batch, and for how long it goes on."""

    busy_seconds: float
    measured_seconds: float

    def rate(self, batches: Iterator[Any]) -> float:
        """Samples a second that it takes."""
        for _ in range(SKIPPED_SAMPLES // BATCH):
            self._use(next(batches))
        taken, started = 0, time.perf_counter()
        while time.perf_counter() - started < self.measured_seconds:
            self._use(next(batches))
            taken += BATCH
        return taken / (time.perf_counter() - started)

    async def rate_of(self, stream: af.Stream) -> float:
        """The same of the stream's async iterator, on this loop."""
        async with stream.samples() as samples:
            started, taken = 0.0, -SKIPPED_SAMPLES
            while taken <= 0 or time.perf_counter() - started < self.measured_seconds:
                if taken == 0:
                    started = time.perf_counter()
                self._use(default_collate([await anext(samples) for _ in range(BATCH)]))
                taken += BATCH
            return taken / (time.perf_counter() - started)

    def _use(self, _: object) -> None:
        end = time.perf_counter() + self.busy_seconds
        while time.perf_counter() < end:
            pass


def forever(epochs: Iterable[Any]) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from epochs


def collated(samples: Iterator[Any]) -> Iterator[Any]:
    """In batches."""
    while True:
        yield default_collate(list(itertools.islice(samples, BATCH)))


def measure(stream: Callable[[], af.Stream], repeats: int, consumers: dict[str, Consumer]) -> list[Row]:
    """Samples a second by way and consumer."""
    rates: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack:
        served = forever(stack.enter_context(af.serve_samples(stream(), BATCH, drop_last=True)))
        here = stream()
        stack.callback(here.close)
        batches = collated(forever(here))
        ways: dict[str, Callable[[Consumer], float]] = {
            "async iterator": lambda consumer: anyio.run(consumer.rate_of, stream()),
            "for sample in stream": lambda consumer: consumer.rate(batches),
            "serve_samples": lambda consumer: consumer.rate(served),
        }
        order = list(itertools.product(ways, consumers))
        for _ in track(range(repeats), "ways", console=Console(stderr=True), transient=True):
            for way, name in random.sample(order, len(order)):  # none always comes first
                rates.setdefault((way, name), []).append(ways[way](consumers[name]))
    return [Row.of(f"{way}: {name}", "samples/s", rates[way, name]) for way, name in order]


@contextmanager
def busy_decoders(video: Path) -> Iterator[None]:
    """As many threads as cores that decode all the while."""
    data = torch.frombuffer(bytearray(video.read_bytes()), dtype=torch.uint8)
    is_over = threading.Event()

    def decode() -> None:
        decoder = VideoDecoder(data, num_ffmpeg_threads=1)
        while not is_over.is_set():
            decoder.get_frames_in_range(0, 8)

    threads = [threading.Thread(target=decode) for _ in range(usable_cpus())]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def measure_way(root: Path, *, repeats: int, seconds: float) -> list[Row]:
    """The way of samples from the loop's thread to a synchronous consumer."""
    idle, busy, ratios = [], [], []
    consumer = Consumer(0.0, seconds)
    stream = af.Stream(str(root))
    video = next(root.rglob("*.mp4"))
    batches = forever(DataLoader(af.torch.StreamDataset(stream), batch_size=BATCH, drop_last=True))
    for _ in range(repeats):
        idle.append(parts.hand_over_microseconds())
        with busy_decoders(video):
            busy.append(parts.hand_over_microseconds())
        ratios.append(consumer.rate(batches) / anyio.run(consumer.rate_of, af.Stream(str(root))))
    stream.close()
    return [
        Row.of("hand-over of a sample, the consumer and the loop alone", "us", idle, "<= 5"),
        Row.of("hand-over of a sample, beside decode threads on all cores", "us", busy, "<= 20"),
        Row.of("samples/s, DataLoader(num_workers=0) / async iterator", "", ratios, ">= 0.95"),
    ]


def measure_hand_over(stream: af.Stream, batches: int) -> list[Row]:
    """Times for one batch that is ready: taking it, and copying it, which isn't done."""
    taking, copying = [], []
    with af.serve_samples(stream, BATCH, drop_last=True) as served:
        iterator = forever(served)
        for _ in range(SLOTS):
            next(iterator)
        for _ in range(batches):
            time.sleep(READY_SECONDS)
            started = time.perf_counter()
            batch = next(iterator)
            taking.append(1e6 * (time.perf_counter() - started))
            started = time.perf_counter()
            copied = [value.clone() for value in batch.values() if isinstance(value, torch.Tensor)]
            copying.append(1e6 * (time.perf_counter() - started))
    mebibytes = sum(tensor.nbytes for tensor in copied) / 2**20
    return [
        Row.of(f"taking a batch of {mebibytes:.0f} MiB that is ready", "us", taking),
        Row.of("what a copy of it would take", "us", copying),
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--busy-milliseconds", type=float, default=20.0, help="of Python at each batch")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dataset = bench_dataset()
    rows, root = measure_way(dataset, repeats=arguments.repeats, seconds=arguments.seconds), str(dataset)
    consumers = {
        "consumer idle": Consumer(0.0, arguments.seconds),
        f"busy for {arguments.busy_milliseconds:g} ms a batch": Consumer(
            arguments.busy_milliseconds / 1e3, arguments.seconds
        ),
    }
    rows += measure(lambda: af.Stream(root), arguments.repeats, consumers)
    rows += measure_hand_over(af.Stream(root), 4 * arguments.repeats)
    show(rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
