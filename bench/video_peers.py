"""The programs that ``bench.videos`` compares with: they read windows of the same videos.

Each decoder runs in one thread of FFmpeg's, and seeks by the container's index, without a look at all frames
(torchcodec's approximate mode), which is what costs least.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
import webdataset
from torchcodec.decoders import VideoDecoder  # type: ignore[attr-defined]

from bench.baselines import http_filesystem
from bench.video_files import FPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

T = TypeVar("T")

__all__ = ["Window", "decode_bare", "has_spdl", "read_by_files", "read_by_spdl", "read_members"]


class Window(NamedTuple):
    """Some frames of a video."""

    video: int
    """Its number in the collection."""
    first: int
    stop: int
    """Frames [first, stop), as they are shown."""


def decode_bare(files: Sequence[Path], windows: Sequence[Window], threads: int) -> float:
    """Clips a second of torchcodec over files that are in memory: the kernel's, mapped."""
    data = [torch.from_numpy(np.memmap(path, np.uint8, mode="c")) for path in files]  # "c": else torch warns
    waiting = _Shared(windows)

    def work() -> None:
        for window in waiting:
            _decode(data[window.video], window)

    started = time.perf_counter()
    _in_threads(threads, work)
    return len(windows) / (time.perf_counter() - started)


def read_members(shards: Sequence[str], *, ca_file: str | None, length: int, seconds: float, threads: int) -> float:
    """Clips a second of webdataset: members come whole, and give one random clip of so many frames each.

    Each thread has shards of its own, as a loader's workers have, and begins no clip after so many seconds.
    """
    numbers = itertools.count()

    def work() -> float:
        number = next(numbers)
        drawn = random.Random(number)
        commands = [_pipe(url, ca_file) for url in shards[number % len(shards) :: threads]]
        clips, started = 0, time.perf_counter()
        for sample in webdataset.WebDataset(commands, shardshuffle=False).repeat():
            decoder = _open(sample["mp4"])
            first = drawn.randrange(len(decoder) - length + 1)
            decoder.get_frames_in_range(first, first + length)
            clips += 1
            if time.perf_counter() - started >= seconds:
                break
        return clips / (time.perf_counter() - started)

    return sum(_in_threads(threads, work))


def read_by_files(
    urls: Sequence[str],
    windows: Sequence[Window],
    *,
    ca_file: str | None,
    seconds: float,
    threads: int,
    block_bytes: int | None = None,
) -> float:
    """Clips a second of torchcodec over fsspec's files, each opened for its window; for so many seconds.

    Args:
        urls: Of the videos.
        windows: What to read, over and over.
        ca_file: Authorities to trust.
        seconds: No window is begun later.
        threads: Each reads a window at a time.
        block_bytes: What fsspec asks for at least; None is its own choice, 5 MiB.
    """
    filesystem = http_filesystem(ca_file)
    waiting = _Shared(itertools.cycle(windows))

    def work() -> float:
        clips, started = 0, time.perf_counter()
        for window in waiting:
            with filesystem.open(urls[window.video], "rb", block_size=block_bytes) as file:
                _decode(file, window)
            clips += 1
            if time.perf_counter() - started >= seconds:
                break
        return clips / (time.perf_counter() - started)

    return sum(_in_threads(threads, work))


def has_spdl() -> bool:
    """Whether SPDL is installed."""
    return find_spec("spdl") is not None and find_spec("spdl.io") is not None and find_spec("spdl.pipeline") is not None


def read_by_spdl(files: Sequence[Path], windows: Sequence[Window], threads: int) -> float:
    """Clips a second of SPDL's pipeline over local files."""
    from spdl.pipeline import PipelineBuilder

    builder: Any = PipelineBuilder()
    builder.add_source(windows).pipe(partial(_load, files), concurrency=threads).add_sink(threads)
    started = time.perf_counter()
    pipeline = builder.build(num_threads=threads)
    with pipeline.auto_stop():
        clips = sum(1 for _ in pipeline.get_iterator())
    if clips != len(windows):
        raise RuntimeError(f"SPDL read {clips} of {len(windows)} windows: see what it logged")
    return clips / (time.perf_counter() - started)


def _load(files: Sequence[Path], window: Window) -> Any:  # noqa: ANN401 - numpy's
    import spdl.io

    # Half a frame early at either end, so that no rounding decides.
    span = (max(window.first - 0.5, 0) / FPS, (window.stop - 0.5) / FPS)
    frames = spdl.io.to_numpy(spdl.io.load_video(str(files[window.video]), timestamp=span))
    if len(frames) != window.stop - window.first:
        raise RuntimeError(f"SPDL gave {len(frames)} frames for {window}")
    return frames


def _decode(source: Any, window: Window) -> None:  # noqa: ANN401 - what torchcodec takes
    frames = _open(source).get_frames_in_range(window.first, window.stop)
    assert len(frames.data) == window.stop - window.first


def _open(source: Any) -> VideoDecoder:  # noqa: ANN401
    return VideoDecoder(source, num_ffmpeg_threads=1, seek_mode="approximate")


def _pipe(url: str, ca_file: str | None) -> str:
    return f"pipe:curl -s -f -L {f'--cacert {ca_file} ' if ca_file else ''}{url}"


class _Shared:
    """An iterator that several threads share."""

    def __init__(self, windows: Sequence[Window] | Iterator[Window]) -> None:
        self._left = iter(windows)
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Window]:
        return self

    def __next__(self) -> Window:
        with self._lock:
            return next(self._left)


def _in_threads(threads: int, work: Callable[[], T]) -> list[T]:
    with ThreadPoolExecutor(threads) as pool:
        return [future.result() for future in [pool.submit(work) for _ in range(threads)]]
