"""A dataset streamed from where datasets live: S3, the Hub, a file system of fsspec's."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from torch.utils.data import DataLoader

import asyncfetch as af
from asyncfetch.testing import DatasetTruth, HubServer, Keys, S3Server, write_dataset
from asyncfetch.testing.truth import DEPTH

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.end_to_end.conftest import Served

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def files_of(truth: DatasetTruth) -> dict[str, bytes]:
    """By path."""
    root = truth.root
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def files(served: Served) -> dict[str, bytes]:
    """The dataset's, by path."""
    return files_of(served.truth)


@pytest.fixture(params=["s3", "hf", "memory"])
def store(
    request: pytest.FixtureRequest, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, af.FetchConfig]]:
    """The root of the dataset there, and how to reach it."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "HF_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", Keys().access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", Keys().secret_key)
    with ExitStack() as stack:
        if request.param == "s3":
            server = stack.enter_context(S3Server({f"bucket/sets/a b/{path}": data for path, data in files.items()}))
            settings: dict[str, Any] = {"s3": af.S3Config(endpoint_url=server.url), "ca_file": server.ca_file}
            yield "s3://bucket/sets/a b", af.FetchConfig(**settings)
        elif request.param == "hf":
            hub = stack.enter_context(HubServer(token="t", lfs_bytes=1000))
            hub.push("datasets/org/name", files, "v3.0")
            monkeypatch.setenv("HF_TOKEN", "t")
            monkeypatch.setenv("HF_ENDPOINT", hub.url)
            yield "hf://datasets/org/name@v3.0", af.FetchConfig(ca_file=hub.ca_file)
        else:
            memory = MemoryFileSystem()
            memory.pipe({f"/sets/{path}": data for path, data in files.items()})
            stack.callback(memory.rm, "/sets", recursive=True)
            yield "memory://sets", af.FetchConfig()


@pytest.fixture
def stream(served: Served, store: tuple[str, af.FetchConfig]) -> Iterator[af.Stream]:
    config = af.StreamConfig(fetch=store[1], pool_segments=4, prefetch_segments=4)
    stream = af.Stream(store[0], config=config)
    yield stream
    stream.close()


async def test_every_frame_by_the_async_iterator(served: Served, stream: af.Stream) -> None:
    async with stream.samples() as samples:
        keys = served.check([sample async for sample in samples])
    assert sorted(keys) == served.keys


def test_every_frame_by_a_loader_with_workers(served: Served, stream: af.Stream) -> None:
    loader = DataLoader(af.torch.StreamDataset(stream), batch_size=8, num_workers=2, multiprocessing_context="fork")
    assert sorted(served.check_batches(loader)) == served.keys


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer(token="t", lfs_bytes=1000) as hub:
        monkeypatch.setenv("HF_TOKEN", "t")
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> DatasetTruth:
    """A dataset whose one camera is of depth."""
    root = tmp_path_factory.mktemp("deep") / "data"
    return write_dataset(root, episodes=(3, 4), cameras=[], width=64, height=64, extras=[DEPTH])


async def test_a_depth_camera_of_the_hub(hub: HubServer, deep: DatasetTruth) -> None:
    hub.push("datasets/org/deep", files_of(deep), "v3.0")
    config = af.StreamConfig(fetch=af.FetchConfig(ca_file=hub.ca_file))
    count = 0
    async with af.Stream("hf://datasets/org/deep@v3.0", depth_unit="m", config=config).samples() as samples:
        async for sample in samples:
            metres = deep.depth_metres(int(sample["episode_index"]), int(sample["frame_index"]))
            np.testing.assert_allclose(sample[DEPTH][0], metres, rtol=0, atol=1e-3)
            count += 1
    assert count == deep.num_frames


async def test_videos_and_tables_come_of_the_revision_that_was_opened(
    hub: HubServer, served: Served, deep: DatasetTruth
) -> None:
    """Though its name means another one from the middle of the pass on."""
    hub.push("datasets/org/name", files_of(served.truth), "mine")
    hub.push("datasets/org/name", files_of(deep), "main")
    config = af.StreamConfig(fetch=af.FetchConfig(ca_file=hub.ca_file), pool_segments=1, prefetch_segments=1)
    async with af.Stream("hf://datasets/org/name@mine", config=config).samples() as samples:
        keys = served.check([await anext(samples)])
        hub.push("datasets/org/name", files_of(deep), "mine")
        keys += served.check([sample async for sample in samples])
    assert sorted(keys) == served.keys
