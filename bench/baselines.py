"""What the pipeline is compared with: bare decoding of the same frames, and one frame at a time over a remote file."""

from __future__ import annotations

import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
import torch
from fsspec.implementations.http import HTTPFileSystem
from torchcodec.decoders import VideoDecoder  # type: ignore[attr-defined]

from asyncfetch.order.placement import Placement
from asyncfetch.stream.epoch_stream import source_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from asyncfetch.decode import Clip
    from asyncfetch.lerobot import LeRobotDataset
    from asyncfetch.order.plan import Step
    from asyncfetch.streams import Stream

__all__ = ["decode_bare", "first_epoch", "http_filesystem", "read_by_file", "runs_of"]


@dataclass
class _Opened:
    """A clip's decoder, opened at its first use by whichever thread comes first."""

    clip: Clip
    lock: threading.Lock = field(default_factory=threading.Lock)
    decoder: Any = None

    def read(self, frame: int) -> None:
        with self.lock:
            if self.decoder is None:
                data = torch.from_numpy(np.frombuffer(self.clip.data, dtype=np.uint8))
                self.decoder = VideoDecoder(data, num_ffmpeg_threads=1, seek_mode="exact")
            self.decoder.get_frame_at(int(self.clip.frame_index[frame]))


async def first_epoch(stream: Stream) -> list[Step]:
    """All steps of its first epoch; a step's episode is its place among those that are read."""
    source = source_of(stream)
    async with source.opener()() as opened:
        return list(source.plan(opened, Placement(), epoch=0).steps())


def runs_of(steps: Iterable[Step], group_frames: int) -> list[list[Step]]:
    """The steps that share a group of pictures, together, in the order of their first use."""
    runs: dict[tuple[int, int], list[Step]] = {}
    for step in steps:
        runs.setdefault((step.piece.episode, step.frame // group_frames), []).append(step)
    return list(runs.values())


def decode_bare(clips: Mapping[int, Mapping[str, Clip]], runs: Sequence[Sequence[Step]], threads: int) -> float:
    """Frames a second of bare torchcodec over clips in memory, run by run, each by one thread.

    A decoder stays open for each clip, as the pipeline's do; opening it counts, as it does there.
    """
    opened = {episode: [_Opened(clip) for clip in cameras.values()] for episode, cameras in clips.items()}
    remaining = iter(runs)
    lock = threading.Lock()

    def work() -> int:
        frames = 0
        while True:
            with lock:
                run = next(remaining, None)
            if run is None:
                return frames
            for camera in opened[run[0].piece.episode]:
                for step in run:
                    camera.read(step.frame)
                    frames += 1

    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        counts = [future.result() for future in [pool.submit(work) for _ in range(threads)]]
    return sum(counts) / (time.perf_counter() - started)


def http_filesystem(ca_file: str | None) -> HTTPFileSystem:
    """That of fsspec, with these authorities and any number of connections."""
    context = ssl.create_default_context(cafile=ca_file)

    async def get_client(**_: object) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context, limit=0))

    return HTTPFileSystem(get_client=get_client, skip_instance_cache=True)


def read_by_file(dataset: LeRobotDataset, steps: Iterable[Step], *, ca_file: str | None, seconds: float) -> float:
    """Frames a second of reading one frame at a time through torchcodec over an fsspec file, for so many seconds.

    This is what streaming readers of today do: the decoder seeks in a file object, whose cache fetches blocks.
    """
    filesystem = http_filesystem(ca_file)
    decoders: dict[str, Any] = {}
    frames = 0
    started = time.perf_counter()
    for step in steps:
        for span in dataset.episodes[step.piece.episode].videos.values():
            if span.url not in decoders:
                file = filesystem.open(span.url, "rb")
                decoders[span.url] = VideoDecoder(file, num_ffmpeg_threads=1, seek_mode="approximate")
            decoders[span.url].get_frame_at(span.first_frame + step.frame)
            frames += 1
        if time.perf_counter() - started >= seconds:
            break
    return frames / (time.perf_counter() - started)
