"""What a loader's workers do, as the training process sees it: of each pass, of all passes, and of whom."""

from __future__ import annotations

import itertools
import multiprocessing
from typing import TYPE_CHECKING, Any

import pytest
from torch.utils.data import DataLoader

import asyncfetch as af
from asyncfetch.prometheus import Collector
from asyncfetch.testing import RangeServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from asyncfetch.testing import DatasetTruth

pytestmark = pytest.mark.slow  # workers that each import what decodes

CONFIG = af.StreamConfig(fetch=af.FetchConfig(trust_env=False))


@pytest.fixture
def dataset(truth: DatasetTruth) -> Iterator[af.torch.StreamDataset]:
    """Single samples of local files."""
    stream = af.Stream(str(truth.root), config=CONFIG)
    yield af.torch.StreamDataset(stream)
    stream.close()


def counters(dataset: af.torch.StreamDataset) -> dict[tuple[str, str], float]:
    """What a scrape has of what only grows."""
    return {
        (sample.name, str(sample.labels)): sample.value
        for metric in Collector(dataset.report).collect()
        for sample in metric.samples
        if metric.type == "counter"
    }


@pytest.mark.usefixtures("programs_are_warm")
@pytest.mark.parametrize("is_persistent", [False, True])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_are_seen_while_they_run_and_in_each_epoch(
    truth: DatasetTruth, method: str, is_persistent: bool
) -> None:
    with RangeServer(truth.root, tls=False) as server:
        stream = af.Stream(server.url, config=CONFIG)
        dataset = af.torch.StreamDataset(stream)
        assert dataset.statistics() is None
        loader = DataLoader(
            dataset,
            batch_size=None,
            num_workers=1,
            multiprocessing_context=method,
            persistent_workers=is_persistent,
            prefetch_factor=1,
        )
        scrapes: list[dict[tuple[str, str], float]] = []
        sent_bytes = 0
        for epoch in range(2):
            for _ in loader:
                assert dataset.statistics() is not None  # of a worker that runs, which isn't asked
                assert 0 < dataset.report().waits.samples <= truth.num_frames
                scrapes.append(counters(dataset))
            report, statistics = dataset.report(), dataset.statistics()
            now_sent_bytes = server.statistics().bytes_sent
            assert (report.num_workers, report.waits.consumers) == (1, 1)
            assert report.waits.samples == truth.num_frames
            assert report.as_dict()["fetched_bytes"] == report.statistics.fetch.bytes == now_sent_bytes - sent_bytes
            assert (report.statistics.fetch.bytes > 0) == (epoch == 0 or not is_persistent)
            assert statistics is not None
            assert statistics.fetch.bytes == now_sent_bytes
            assert report.waits.busy_seconds + report.waits.waited_seconds == pytest.approx(report.waits.wall_seconds)
            scrapes.append(counters(dataset))
            sent_bytes = now_sent_bytes
        stream.close()
    for before, after in itertools.pairwise(scrapes):
        assert not [name for name, value in before.items() if after.get(name, 0.0) < value - 1e-9]
    assert scrapes[-1]["asyncfetch_consumer_samples_total", "{}"] == 2 * truth.num_frames
    assert scrapes[-1]["asyncfetch_received_bytes_total", str({"host": server.url})] == sent_bytes


def test_abandoned_pass_is_not_counted_into_the_next(truth: DatasetTruth, dataset: af.torch.StreamDataset) -> None:
    loader = DataLoader(dataset, batch_size=None, num_workers=1, persistent_workers=True, prefetch_factor=1)
    scrapes = []
    for leaves_early in (True, True, False):
        for _ in loader:
            scrapes.append(counters(dataset))
            if leaves_early and len(scrapes) % 3 == 0:
                break
    report = dataset.report()
    assert report.waits.samples == truth.num_frames
    assert report.waits.wall_seconds < report.all_waits.wall_seconds
    assert report.all_waits.samples >= 3 + 3 + truth.num_frames
    for before, after in itertools.pairwise(scrapes):
        assert not [name for name, value in before.items() if after.get(name, 0.0) < value - 1e-9]


def test_a_report_is_of_whoever_read_last(truth: DatasetTruth, dataset: af.torch.StreamDataset) -> None:
    for num_workers in (1, 0, 2, 0):
        assert sum(1 for _ in DataLoader(dataset, batch_size=None, num_workers=num_workers)) == truth.num_frames
        report = dataset.report()
        assert report.num_workers == num_workers
        assert report.waits.consumers == max(1, num_workers)
        assert report.waits.samples == truth.num_frames
    assert dataset.report().all_waits.samples == 4 * truth.num_frames


def test_loaders_that_are_alive_together_have_pages_of_their_own(
    truth: DatasetTruth, dataset: af.torch.StreamDataset
) -> None:
    loaders = [DataLoader(dataset, batch_size=None, num_workers=workers) for workers in (1, 2)]
    first, second = (iter(loader) for loader in loaders)
    next(first)
    next(second)
    report = dataset.report()
    assert (report.num_workers, report.waits.consumers <= 2) == (2, True)
    seen = 2 + sum(1 for _ in itertools.chain(first, second))
    assert seen == 2 * truth.num_frames
    report = dataset.report()
    assert (report.num_workers, report.waits.consumers, report.waits.samples) == (2, 2, truth.num_frames)
    assert report.all_waits.samples == seen


def test_a_forked_child_tells_of_itself(truth: DatasetTruth, dataset: af.torch.StreamDataset) -> None:
    assert sum(1 for _ in DataLoader(dataset, batch_size=None, num_workers=1)) == truth.num_frames
    for _ in dataset:
        break
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=tell, args=(dataset, theirs))
    process.start()
    theirs.close()
    assert ours.recv() == ("no pass has begun in this process", "no pass has begun in this process", True, 1)
    process.join()
    assert dataset.report().waits.samples > 0
    assert dataset.report().all_waits.samples < 2 * truth.num_frames  # none of the child's


def tell(dataset: af.torch.StreamDataset, connection: Connection) -> None:
    """Say what this process knows before and after it reads a sample."""
    before: tuple[Any, ...] = str(dataset.report()), str(dataset.stream.report()), dataset.statistics() is None
    next(iter(DataLoader(dataset, batch_size=None, num_workers=1)))
    connection.send((*before, dataset.report().num_workers))


def test_report_says_how_a_workers_pass_ended(truth: DatasetTruth) -> None:
    stream = af.Stream(str(truth.root), transform=refuse, config=CONFIG)
    dataset = af.torch.StreamDataset(stream)
    with pytest.raises(ValueError, match="refused"):
        list(DataLoader(dataset, batch_size=None, num_workers=1))
    assert "the pass ended by ValueError: refused" in dataset.report().verdict.evidence
    stream.close()


def refuse(sample: dict[str, Any]) -> dict[str, Any]:
    """Take no sample."""
    raise ValueError("refused")
