"""A stream whose bytes outlive it: a second epoch, and a second job, read from the disk."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
from torch.utils.data import DataLoader

import asyncfetch as af
from asyncfetch.config import config_share
from asyncfetch.errors import ConfigError
from asyncfetch.order.line import shares
from asyncfetch.runtime.concurrently import gather
from asyncfetch.testing import write_dataset

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from asyncfetch.testing import DatasetTruth
    from tests.end_to_end.conftest import Serve, Served

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def sent_bytes(served: Served) -> int:
    """By the server, since the last time."""
    sent = served.server.statistics().bytes_sent
    served.server.reset()
    return sent


def asked_objects(served: Served) -> list[str]:
    return sorted({request.path for request in served.server.requests})


async def read(served: Served, config: af.StreamConfig, *, epochs: int = 1) -> af.Stream:
    stream = served.stream(config=config)
    for _ in range(epochs):
        async with stream.samples() as samples:
            assert sorted(served.check([sample async for sample in samples])) == served.keys
    return stream


async def test_second_job_asks_for_versions_of_files_alone(served: Served, tmp_path: Path) -> None:
    config = served.config(disk_cache_dir=str(tmp_path / "tier"))
    await read(served, config)
    first_bytes, objects = sent_bytes(served), asked_objects(served)
    await read(served, config)
    objects = asked_objects(served)
    requests = served.server.statistics().requests
    assert requests == len(objects)
    assert sent_bytes(served) == requests < first_bytes / 1000


async def test_second_epoch_beyond_memory_reads_clips_from_disk(served: Served, tmp_path: Path) -> None:
    async with af.open_dataset(
        served.url, config=served.config(disk_cache_dir=str(tmp_path / "tier"), max_bytes=512 * 1024)
    ) as dataset:
        stream = af.Stream(dataset)
        for epoch in range(2):
            async with stream.samples() as samples:
                assert sorted(served.check([sample async for sample in samples])) == served.keys
            statistics = dataset.statistics().disk
            assert statistics is not None
            assert (sent_bytes(served) == 0) == (epoch == 1)
            assert statistics.hits > 0 or epoch == 0


def test_loader_workers_share_the_tier(served: Served, tmp_path: Path) -> None:
    config = served.config(disk_cache_dir=str(tmp_path / "tier"), disk_cache_max_bytes=1 << 30)
    seen = []
    for _ in range(2):
        served.server.reset()
        stream = served.stream(config=config)
        loader: Any = DataLoader(af.torch.StreamDataset(stream), batch_size=4, num_workers=2)
        assert sorted(served.check_batches(loader)) == served.keys
        seen.append(served.server.statistics().bytes_sent)
        stream.close()
    assert seen[1] < seen[0] / 1000


@pytest.mark.parametrize("settings", [{"disk_cache_dir": ""}, {"disk_cache_max_bytes": 0}])
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        af.StreamConfig(**settings)


def test_workers_get_no_shares_of_the_disk() -> None:
    config = config_share(af.StreamConfig(disk_cache_dir="tier", disk_cache_max_bytes=1000), 4)
    assert (config.disk_cache_dir, config.disk_cache_max_bytes) == ("tier", 1000)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> DatasetTruth:
    """Its clips are nearly all of it."""
    return write_dataset(
        tmp_path_factory.mktemp("large") / "data",
        episodes=20,
        length=60,
        cameras=["observation.images.top"],
        width=192,
        height=192,
        codec="h264",
        crf=4,
        texture=24.0,
        distinct_videos=2,
        episodes_per_video_file=10,
    )


def size_of(truth: DatasetTruth) -> int:
    return sum(path.stat().st_size for path in truth.root.rglob("*") if path.is_file())


async def read_epoch(
    served: Served,
    epoch: int,
    tiers: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    *,
    ranks: int,
    keep_shares: Literal["node"] | None,
) -> int:
    """The bytes that are sent for an epoch of jobs of so many ranks on each node, which has a disk cache."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    world_size, seen = ranks * len(tiers), Counter[int]()

    async def read_rank(rank: int) -> None:
        stream = served.stream(
            config=af.StreamConfig(
                disk_cache_dir=str(tiers[rank // ranks]),
                disk_cache_max_bytes=1 << 30,
                pool_segments=8,
                fetch=af.FetchConfig(ca_file=served.server.ca_file, hedge=None),
                keep_shares=keep_shares,
            )
        )
        async with stream.samples(epoch=epoch, rank=rank, world_size=world_size) as samples:
            seen.update([int(sample["index"]) async for sample in samples])

    await gather(*(partial(read_rank, rank) for rank in range(world_size)))
    assert seen == dict.fromkeys(range(served.truth.num_frames), 1)
    return sent_bytes(served)


@pytest.fixture
def large_served(large: DatasetTruth, serve: Serve) -> Iterator[Served]:
    with serve(large) as served:
        yield served


@pytest.mark.slow
async def test_bytes_are_sent_once_for_all_nodes_and_epochs(
    large_served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each epoch is another job's, whose memory is empty. A node that is lost has read half of the dataset."""
    size_bytes, tiers = size_of(large_served.truth), [tmp_path / "one", tmp_path / "two"]
    read = partial(read_epoch, large_served, monkeypatch=monkeypatch, ranks=2, keep_shares="node")
    sent = [await read(epoch, tiers) for epoch in range(3)]
    assert sum(sent) <= 1.03 * size_bytes
    lost = await read(3, tiers[:1])
    assert lost <= (1 / 2 + 0.05) * size_bytes


async def test_a_node_that_keeps_no_shares_reads_what_others_had(
    large_served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = [tmp_path / "one", tmp_path / "two"]
    read = partial(read_epoch, large_served, monkeypatch=monkeypatch, ranks=1, keep_shares=None)
    assert sum([await read(epoch, tiers) for epoch in range(2)]) > 1.3 * size_of(large_served.truth)


@pytest.mark.parametrize("nodes", [2, 8, 32])
@pytest.mark.parametrize("mean", [90, 600])
def test_few_segments_move_where_the_last_node_is_lost(nodes: int, mean: int) -> None:
    """Those of the lost node, and 5 % of all at most."""
    sizes = np.random.default_rng(nodes).integers(mean // 2, mean * 3 // 2, 4000)
    before, after = (shares(sizes, each, seed=7) // 2 for each in (nodes, nodes - 1))
    assert sizes[before != after].sum() / sizes.sum() <= 1 / nodes + 0.05
