"""Samples in an async pipeline: one task reads them, another uses them, on one loop, with a bounded queue between.

python examples/async_pipeline.py https://host/dataset    or a path

Needs `pip install "asyncfetch[lerobot]"`.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import anyio

import asyncfetch as af

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream


async def read(stream: af.Stream, sending: MemoryObjectSendStream[dict[str, Any]]) -> None:
    """Send every sample of one epoch on; waits wherever the reader is behind."""
    async with sending, stream.samples() as samples:
        async for sample in samples:
            await sending.send(sample)
        print(samples.statistics())


async def use(receiving: MemoryObjectReceiveStream[dict[str, Any]]) -> None:
    """Count the samples of each task."""
    counts: dict[str, int] = {}
    async with receiving:
        async for sample in receiving:
            counts[sample["task"]] = counts.get(sample["task"], 0) + 1
    for task, count in sorted(counts.items()):
        print(f"{task}: {count} samples")


async def pipeline(url: str, ca_file: str | None) -> None:
    """Run both tasks; an error in either cancels the other."""
    stream = af.Stream(url, seed=0, config=af.StreamConfig(fetch=af.FetchConfig(ca_file=ca_file)))
    sending, receiving = anyio.create_memory_object_stream["dict[str, Any]"](max_buffer_size=16)
    async with anyio.create_task_group() as group:
        group.start_soon(read, stream, sending)
        group.start_soon(use, receiving)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the dataset once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="URL or path of a LeRobot v3 dataset")
    parser.add_argument("--ca-file", help="PEM file of the authorities to trust instead of the system's")
    options = parser.parse_args(arguments)
    anyio.run(pipeline, options.url, options.ca_file)


if __name__ == "__main__":
    main()
