"""What the way from the loop's thread to a synchronous consumer costs.

    python -m bench.hand_over

The time of a sample on that way, as ``for sample in stream`` has it, its source always ready: alone, and beside
decode threads that fill all cores. And samples a second of a ``DataLoader`` without workers over those of the async
iterator, of one local dataset, both with torch's ``default_collate``. By turns; medians over the repeats.
"""

from __future__ import annotations

import argparse
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio
import torch
from torch.utils.data import DataLoader
from torchcodec.decoders import VideoDecoder  # type: ignore[attr-defined]

import asyncfetch as af
from asyncfetch.config import usable_cpus
from bench.data import bench_dataset
from bench.parts import hand_over_microseconds
from bench.rows import Row, show
from bench.serving import BATCH, Consumer, forever

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


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


def measure(root: Path, *, repeats: int, seconds: float) -> list[Row]:
    """All of it by turns."""
    idle, busy, ratios = [], [], []
    consumer = Consumer(0.0, seconds)
    stream = af.Stream(str(root))
    video = next(root.rglob("*.mp4"))
    batches = forever(DataLoader(af.torch.StreamDataset(stream), batch_size=BATCH, drop_last=True))
    for _ in range(repeats):
        idle.append(hand_over_microseconds())
        with busy_decoders(video):
            busy.append(hand_over_microseconds())
        ratios.append(consumer.rate(batches) / anyio.run(consumer.rate_of, af.Stream(str(root))))
    stream.close()
    return [
        Row.of("hand-over of a sample, the consumer and the loop alone", "us", idle, "<= 5"),
        Row.of("hand-over of a sample, beside decode threads on all cores", "us", busy, "<= 20"),
        Row.of("samples/s, DataLoader(num_workers=0) / async iterator", "", ratios, ">= 0.95"),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a dataset's samples, either way")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    show(measure(bench_dataset(), repeats=chosen.repeats, seconds=chosen.seconds), as_json=chosen.json)


if __name__ == "__main__":
    main()
