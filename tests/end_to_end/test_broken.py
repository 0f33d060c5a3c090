"""Broken things surface in the consumer, at once, as errors of ours, whichever way the stream is read."""

from __future__ import annotations

import gc
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from torch.utils.data import DataLoader

import asyncfetch as af
from asyncfetch.testing import RangeServer

if TYPE_CHECKING:
    from pathlib import Path

    from asyncfetch.testing import DatasetTruth
    from tests.end_to_end.conftest import Served

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]

VIDEO = "videos/observation.images.top/chunk-000/file-002.mp4"
ROWS = "data/chunk-000/file-000.parquet"


@dataclass(frozen=True)
class Case:
    name: str
    damage: Callable[[Path], None]
    error: type[af.AsyncFetchError]
    message: str


def overwrite(path: str, data: bytes | Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        file = root / path
        file.write_bytes(data if isinstance(data, bytes) else data(file.read_bytes()))

    return damage


def without_frames(data: bytes) -> bytes:
    start = data.index(b"mdat") + 4
    tail = data.index(b"moov") - 4
    return (
        data[:start] + b"\xff" * (len(data) - start)
        if tail < start
        else data[:start] + b"\xff" * (tail - start) + data[tail:]
    )


CASES = [
    Case("a video of noise", overwrite(VIDEO, b"\x17" * 20_000), af.FormatError, "file-002.mp4"),
    Case("a video with broken frames", overwrite(VIDEO, without_frames), af.DecodeError, "file-002.mp4"),
    Case("a video of no bytes", overwrite(VIDEO, b""), af.FormatError, "file-002.mp4"),
    Case(
        "a video cut short", overwrite(VIDEO, lambda data: data[: len(data) // 2]), af.AsyncFetchError, "file-002.mp4"
    ),
    Case("rows cut short", overwrite(ROWS, lambda data: data[: len(data) // 2]), af.FormatError, "file-000.parquet"),
    Case("rows of no bytes", overwrite(ROWS, b""), af.FormatError, "file-000.parquet"),
    Case("a video missing", lambda root: (root / VIDEO).unlink(), af.NotFound, "file-002.mp4"),
    Case("rows missing", lambda root: (root / ROWS).unlink(), af.NotFound, "file-000.parquet"),
    Case("info.json missing", lambda root: (root / "meta/info.json").unlink(), af.AsyncFetchError, "info.json"),
    Case("info.json broken", overwrite("meta/info.json", b"{"), af.FormatError, "info.json"),
]


def read_async(stream: af.Stream) -> list[Any]:
    async def read() -> list[Any]:
        async with stream.samples() as samples:
            return [sample async for sample in samples]

    return anyio.run(read)


def read_sync(stream: af.Stream) -> list[Any]:
    try:
        return list(stream)
    finally:
        stream.close()


def read_loader(stream: af.Stream) -> list[Any]:
    dataset = af.torch.StreamDataset(stream)
    return list(DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork"))


Read = Callable[[af.Stream], list[Any]]
directly = pytest.mark.parametrize("read", [read_async, read_sync], ids=["async", "sync"])
ways = pytest.mark.parametrize("read", [read_async, read_sync, read_loader], ids=["async", "sync", "loader"])


@pytest.fixture(autouse=True)
def _loaders_end_in_their_own_test(failed_loaders_end_soon: None) -> Iterator[None]:
    yield
    gc.collect()  # the error held the loader


@directly
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_broken_file_is_named(truth: DatasetTruth, tmp_path: Path, case: Case, read: Read) -> None:
    read_broken(truth, tmp_path, case, read)


def test_a_broken_file_is_named_by_a_loaders_worker(truth: DatasetTruth, tmp_path: Path) -> None:
    read_broken(truth, tmp_path, CASES[4], read_loader)


def read_broken(truth: DatasetTruth, tmp_path: Path, case: Case, read: Read) -> None:
    root = tmp_path / "broken"
    shutil.copytree(truth.root, root)
    case.damage(root)
    with RangeServer(root) as server:
        retry = af.RetryConfig(attempts=2)
        config = af.StreamConfig(fetch=af.FetchConfig(ca_file=server.ca_file, retry=retry))
        with pytest.raises(case.error) as caught:
            read(af.Stream(server.url, config=config))
    assert case.message in str(caught.value)


@directly
def test_a_dataset_that_is_not_there(served: Served, read: Read) -> None:
    with pytest.raises(af.AsyncFetchError, match="nowhere"):
        read(af.Stream(f"{served.url}/nowhere", config=served.config()))


@directly
def test_a_scheme_that_nobody_knows(read: Read) -> None:
    with pytest.raises(af.AsyncFetchError, match="gopher"):
        read(af.Stream("gopher://example.org/data"))


@directly
def test_a_host_that_is_not_there(read: Read) -> None:
    with socket.socket() as taken:  # bound, not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        url = f"https://127.0.0.1:{taken.getsockname()[1]}/data"
        config = af.StreamConfig(fetch=af.FetchConfig(retry=af.RetryConfig(outage_seconds=0.5)))
        with pytest.raises(af.ConnectionFailed, match=r"127\.0\.0\.1.*waited for.*outage_seconds=0\.5"):
            read(af.Stream(url, config=config))


@ways
def test_a_certificate_that_nobody_trusts(served: Served, read: Read) -> None:
    with pytest.raises(af.ConnectionFailed, match="certificate"):
        read(af.Stream(served.url))


@ways
def test_a_transforms_own_error(served: Served, read: Read) -> None:
    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        raise LookupError(f"no label of {int(sample['index'])}")

    with pytest.raises(LookupError, match="no label"):
        read(served.stream(transform=transform))


@directly
def test_a_pool_larger_than_its_room(served: Served, read: Read, caplog: pytest.LogCaptureFixture) -> None:
    samples = read(served.stream(config=served.config(max_bytes=16_000, pool_segments=64)))
    assert len(samples) == served.truth.num_frames
    assert [record.levelname for record in caplog.records if "pool_segments=64" in record.message] == ["WARNING"]


@directly
def test_an_episode_larger_than_all_room(served: Served, read: Read) -> None:
    with pytest.raises(af.CacheError, match=r"StreamConfig\(max_bytes=\d+\)"):
        read(served.stream(config=served.config(max_bytes=1_000, pool_segments=1)))
