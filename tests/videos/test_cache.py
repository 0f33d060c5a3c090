"""What is fetched for windows, counted by the server."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

import asyncfetch as af
from asyncfetch.media import locate_moov, parse_moov
from asyncfetch.testing import RangeServer
from asyncfetch.videos.windows import draw

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncfetch.media import Mp4Index

HEAD_BYTES = 16 * 1024
"""Bytes that are read of each file to find its index."""
SAMPLERS = {
    "random": af.ClipSampler(12, fps=8, per_video=4),
    "short": af.ClipSampler(3, per_video=5),
    "sparse": af.ClipSampler(3, fps=0.4, per_video=2),
    "sparse step": af.ClipSampler(4, step=80, per_video=2),
    "every": af.ClipSampler(10, every_seconds=2.0),
    "all": af.ClipSampler(16, pick="all"),
}


@pytest.fixture
def server(heavy: dict[str, bytes]) -> Iterator[RangeServer]:
    with RangeServer(heavy) as server:
        yield server


def stream_of(server: RangeServer, names: list[str], clips: af.ClipSampler, **options: Any) -> af.Stream:  # noqa: ANN401
    config = af.StreamConfig(fetch=af.FetchConfig(ca_file=server.ca_file), **options.pop("config", {}))
    videos = af.Videos.from_table([{"video": f"{server.url}/{name}"} for name in names])
    return af.Stream(videos, clips=clips, config=config, **options)


def one_epoch(stream: af.Stream) -> list[tuple[int, int]]:
    """The windows of epoch 0, read without a look at the next one."""

    async def read() -> list[tuple[int, int]]:
        async with stream.samples(epoch=0) as samples:
            return [(int(sample["index"]), int(sample["clip_index"])) async for sample in samples]

    with closing(stream):
        return asyncio.run(read())


def index_of(data: bytes) -> tuple[Mp4Index, int]:
    """The index, and how many bytes it takes."""
    first, stop = locate_moov(data, size=len(data), url="heavy.mp4")
    return parse_moov(data[first:stop], url="heavy.mp4"), stop - first


def samples_of(index: Mp4Index, clips: af.ClipSampler, entry: int, number: int) -> Any:  # noqa: ANN401
    samples, seconds, end_seconds = index.shown()
    return samples[clips.window(seconds, end_seconds, number, draw=draw(0, 0, entry, number))]


@pytest.mark.parametrize("audio_rate", [None, 16_000])
@pytest.mark.parametrize("name", ["heavy-30.mp4", "heavy-250.mp4"])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_no_more_is_fetched_than_the_groups_needed(
    heavy: dict[str, bytes], server: RangeServer, kind: str, name: str, audio_rate: int | None
) -> None:
    clips, (index, index_bytes) = SAMPLERS[kind], index_of(heavy[name])
    windows = one_epoch(stream_of(server, [name], clips, audio_rate=audio_rate))
    samples = [samples_of(index, clips, *window) for window in windows]
    needed = sum(map(index.group_bytes, samples))
    if kind in {"every", "all"}:  # windows that are fetched together
        needed = index.group_bytes(np.concatenate(samples))
    if audio_rate is not None and kind.startswith("sparse"):
        needed = len(windows) * len(heavy[name])  # sound lies between the pictures, all the way
    assert server.statistics().bytes_sent - HEAD_BYTES - index_bytes <= 1.1 * needed


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning", "ignore:This DataLoader will create")
def test_bytes_are_fetched_once_for_two_workers_together(heavy: dict[str, bytes], server: RangeServer) -> None:
    names = sorted(heavy)
    with closing(stream_of(server, names, SAMPLERS["all"], size=(8, 8))) as stream:
        loader = DataLoader(af.torch.StreamDataset(stream, 4), None, num_workers=2, multiprocessing_context="fork")
        windows = [
            (int(entry), int(number))
            for batch in loader
            for entry, number in zip(batch["index"], batch["clip_index"], strict=True)
        ]
    assert len(set(windows)) == len(windows) == 2 * -(-300 // 16)
    index_bytes = sum(index_of(data)[1] for data in heavy.values())
    most_bytes = sum(map(len, heavy.values())) + 2 * index_bytes + 4 * HEAD_BYTES  # each worker reads the indexes
    assert server.statistics().bytes_sent <= most_bytes
