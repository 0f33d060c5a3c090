"""What a scrape shows of real fetches, by prometheus_client's own writer and parser."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import pytest
from anyio import to_thread
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from asyncfetch.config import FetchConfig, StreamConfig
from asyncfetch.fetch import Fetcher, HostStatistics
from asyncfetch.lerobot import open_dataset
from asyncfetch.prometheus import BY_HOST, OF_DATASET, OF_DISK, OF_FETCHER, OF_PASS, Collector
from asyncfetch.ranges import ByteRange
from asyncfetch.streams import Stream
from asyncfetch.testing import Fault, FaultOnce, RangeServer, write_dataset

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from asyncfetch.fetch import FetchStatistics
    from asyncfetch.formats import DatasetStatistics
    from asyncfetch.observe.report import Report
    from asyncfetch.stream import PassStatistics
    from asyncfetch.testing import DatasetTruth

FIRST_BYTE_SECONDS = 0.1
CONTENT = bytes(range(256)) * 400

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def registry_of(
    statistics: Callable[[], FetchStatistics | DatasetStatistics | PassStatistics | Report | None],
) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=True)
    registry.register(Collector(statistics))
    return registry


def scrape(registry: CollectorRegistry) -> Samples:
    """Every sample by its name and labels."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    samples = [sample for family in families for sample in family.samples]
    by_name = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(by_name) == len(samples)
    return by_name


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"asyncfetch_{name}", frozenset(labels.items())]


async def test_a_scrape_shows_what_was_fetched() -> None:
    fault = FaultOnce("/x", Fault.status(503))
    async with (
        RangeServer({"x": CONTENT}, first_byte_seconds=FIRST_BYTE_SECONDS, fault=fault) as server,
        Fetcher(FetchConfig(ca_file=server.ca_file, trust_env=False)) as fetcher,
    ):
        registry = registry_of(fetcher.statistics)
        await fetcher.fetch_many(ByteRange(f"{server.url}/x", n * 10_000, n * 10_000 + 9) for n in range(8))
        now = await to_thread.run_sync(scrape, registry)
        log = server.requests
    host = server.url

    assert value(now, "requests_total", host=host) == len(log) == 9
    assert value(now, "received_bytes_total", host=host) == 8 * 9
    assert value(now, "retries_total", host=host) == value(now, "errors_total", host=host) == 1
    assert value(now, "requests_in_flight", host=host) == 0
    assert value(now, "max_requests_in_flight", host=host) == FetchConfig().max_requests_per_host
    assert value(now, "first_byte_seconds_count", host=host) == value(now, "wait_seconds_count", host=host) == 9
    assert value(now, "body_seconds_count", host=host) == 8
    assert value(now, "first_byte_seconds_sum", host=host) >= 9 * FIRST_BYTE_SECONDS
    for quantile in ("0.5", "0.95", "0.99"):
        assert 0.98 * FIRST_BYTE_SECONDS <= value(now, "first_byte_seconds", host=host, quantile=quantile) < 10


async def test_openmetrics_can_be_parsed() -> None:
    """Its parser insists on what Prometheus' older format lets pass: types, suffixes, order."""
    async with Fetcher(FetchConfig(trust_env=False)) as fetcher:
        await fetcher.fetch(__file__, 0, 10)
        text = openmetrics.generate_latest(registry_of(fetcher.statistics)).decode()  # type: ignore[no-untyped-call]
    families = {family.name: family for family in parse_openmetrics(text)}  # type: ignore[no-untyped-call]
    assert families["asyncfetch_body_seconds"].type == "summary"
    assert families["asyncfetch_received_bytes"].type == "counter"
    assert families["asyncfetch_received_bytes"].samples[0].value == 10


async def test_scrape_is_new_each_time() -> None:
    async with Fetcher(FetchConfig(trust_env=False)) as fetcher:
        registry = registry_of(fetcher.statistics)
        assert ("asyncfetch_requests_total", frozenset({("host", "file://")})) not in scrape(registry)
        for count in (1, 2):
            await fetcher.fetch(__file__, 0, 10)
            assert value(scrape(registry), "requests_total", host="file://") == count


async def test_a_quantile_of_nothing_is_not_shown() -> None:
    async with Fetcher(FetchConfig(trust_env=False)) as fetcher:
        await fetcher.fetch(__file__, 0, 10)
        now = scrape(registry_of(fetcher.statistics))
    assert value(now, "first_byte_seconds_count", host="file://") == 0
    assert ("asyncfetch_first_byte_seconds", frozenset({("host", "file://"), ("quantile", "0.5")})) not in now
    assert value(now, "body_seconds", host="file://", quantile="0.5") > 0


async def test_no_secret_is_shown() -> None:
    async with Fetcher(FetchConfig(trust_env=False)) as fetcher, RangeServer({"x": CONTENT}, tls=False) as server:
        registry = registry_of(fetcher.statistics)
        login = server.url.replace("://", "://me:hunter2@")
        await fetcher.fetch(f"{login}/x?X-Amz-Signature=hunter2", 0, 9)
        with pytest.raises(Exception, match=r"\*\*\*@host"):
            await fetcher.fetch("nosuch://me:hunter2@host/x?sig=hunter2", 0, 9)
        text = generate_latest(registry).decode()
    assert f'host="{server.url}"' in text
    assert 'host="nosuch://***@host"' in text
    assert "hunter2" not in text


async def test_a_stream_shows_its_dataset_and_a_pass_its_waits(small_dataset: DatasetTruth) -> None:
    stream = Stream(str(small_dataset.root), config=StreamConfig(fetch=FetchConfig(trust_env=False)))
    registry = registry_of(stream.statistics)
    assert not scrape(registry)  # nothing yet
    try:
        delivered = await to_thread.run_sync(lambda: len(list(stream)))
        dataset = await to_thread.run_sync(scrape, registry)
    finally:
        await to_thread.run_sync(stream.close)
    async with stream.samples() as samples:
        passed = registry_of(samples.statistics)
        async for _ in samples:
            pass
        one_pass = scrape(passed)

    assert value(dataset, "episode_misses_total") + value(dataset, "episode_hits_total") >= small_dataset.num_episodes
    assert 0 < value(dataset, "decode_seconds_count") <= delivered
    assert value(dataset, "decode_seconds", quantile="0.99") > 0
    assert value(dataset, "requests_total", host="file://") > 0
    assert 0 < value(dataset, "hand_over_seconds_count") <= delivered
    assert value(dataset, "hand_over_seconds", quantile="0.99") > 0
    assert value(one_pass, "pass_hand_over_seconds_count") == value(one_pass, "consumer_wait_seconds_count")
    assert value(one_pass, "pass_hand_over_seconds_sum") <= value(one_pass, "consumer_wait_seconds_sum")
    assert value(one_pass, "samples_total") == delivered
    assert 0 < value(one_pass, "consumer_wait_seconds_count") <= delivered


async def test_a_disk_cache_is_shown_where_there_is_one(tmp_path: Path, https_server: RangeServer) -> None:
    fetch = FetchConfig(trust_env=False, ca_file=https_server.ca_file)
    config = StreamConfig(fetch=fetch, disk_cache_dir=str(tmp_path))
    async with open_dataset(https_server.url, config=config) as dataset:
        now = scrape(registry_of(dataset.statistics))
        disk = dataset.statistics().disk
    assert disk is not None
    assert value(now, "disk_cache_written_bytes_total") == disk.written_bytes > 0
    assert value(now, "disk_cache_failures_total") == 0


async def test_a_second_one_of_the_same_names_is_refused() -> None:
    async with Fetcher(FetchConfig(trust_env=False)) as fetcher:
        registry = registry_of(fetcher.statistics)
        with pytest.raises(ValueError, match="asyncfetch_"):
            registry.register(Collector(fetcher.statistics))


def test_names_are_shown_once() -> None:
    names = [shown.name for table in (BY_HOST, OF_FETCHER, OF_DATASET, OF_DISK, OF_PASS) for shown in table]
    assert len(names) == len(set(names))


def test_every_figure_of_a_host_is_shown() -> None:
    assert {field.name for field in fields(HostStatistics)} - {shown.figure for shown in BY_HOST} == {"peak_in_flight"}


def test_a_report_shows_what_its_consumer_waited_for(tmp_path: Path) -> None:
    truth = write_dataset(tmp_path / "one", episodes=(4, 5), codec="h264", width=96, height=64)
    stream = Stream(truth.root)
    assert sum(1 for _ in stream) == truth.num_frames
    samples = scrape(registry_of(stream.report))
    stream.close()
    assert value(samples, "consumer_samples_total") == truth.num_frames
    waited = sum(
        seconds for (name, _), seconds in samples.items() if name == "asyncfetch_consumer_waited_seconds_total"
    )
    assert waited + value(samples, "consumer_busy_seconds_total") == pytest.approx(
        value(samples, "consumer_seconds_total")
    )
    assert value(samples, "received_bytes_total", host="file://") > 0
