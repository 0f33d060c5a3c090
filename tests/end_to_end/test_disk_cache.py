"""A stream whose bytes outlive it: a second epoch, and a second job, read from the disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from torch.utils.data import DataLoader

import asyncfetch as af
from asyncfetch.config import config_share
from asyncfetch.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.end_to_end.conftest import Served

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


async def test_a_second_job_asks_for_the_version_of_each_file_and_for_nothing_else(
    served: Served, tmp_path: Path
) -> None:
    config = served.config(disk_cache_dir=str(tmp_path / "tier"))
    await read(served, config)
    first_bytes, objects = sent_bytes(served), asked_objects(served)
    await read(served, config)
    objects = asked_objects(served)
    requests = served.server.statistics().requests
    assert requests == len(objects)
    assert sent_bytes(served) == requests < first_bytes / 1000


async def test_a_second_epoch_beyond_the_memory_reads_the_clips_from_disk(served: Served, tmp_path: Path) -> None:
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
