"""What workers write for the process that they read for."""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import asyncfetch as af
from asyncfetch.observe.figures import sum_of
from asyncfetch.observe.report import Report
from asyncfetch.observe.waits import Cause, WaitAccount, Waits, WaitStep
from asyncfetch.stream.figures import BOARD_BYTES, PAGES, FiguresBoard, FiguresPage, PublishedFigures

if TYPE_CHECKING:
    from asyncfetch.formats import DatasetStatistics
    from asyncfetch.testing import DatasetTruth


def board() -> FiguresBoard:
    return FiguresBoard(memoryview(bytearray(BOARD_BYTES)))


async def statistics_of(truth: DatasetTruth) -> DatasetStatistics:
    async with af.open_dataset(truth.root) as dataset:
        return dataset.statistics()


def read(page: FiguresPage | None, samples: int) -> None:
    """Count a pass in which a worker waited for a second, and gave so many samples."""
    assert page is not None
    account, now = WaitAccount(page.numbers), time.perf_counter()
    account.wait(now - 1.0)
    account.give(now, [WaitStep(now, {Cause.BODIES: 1.0})], samples=samples)
    account.end(now)


def test_64_workers_add_up_and_those_of_an_earlier_loader_do_not() -> None:
    pages = board()
    assert pages.latest() == []
    for loader in (1, 2):
        for worker in range(64 if loader == 1 else 63):
            read(pages.claim(loader, worker, 64, 64 * loader + worker), samples=loader)
    latest = pages.latest()
    assert len(latest) == 63  # the last one hasn't begun yet
    report = Report.of(Waits.together(page.waits() for page in latest), None, af.StreamConfig(), num_workers=64)
    assert report.waits.samples == 2 * 63
    assert report.seconds == pytest.approx(1.0)
    assert report.verdict.binds == "bodies"
    assert "63 of 64 workers" in str(report)


def test_a_loader_with_the_seed_of_an_earlier_one_is_told_apart() -> None:
    pages = board()
    for begin in (10, 20):
        for worker in range(2):
            read(pages.claim(7, worker, 2, begin + worker), samples=begin)
    assert [page.waits().samples for page in pages.latest()] == [20, 20]


def test_a_page_of_a_process_that_lives_is_taken_by_no_other() -> None:
    pages = board()
    taken = []
    for _ in range(4):
        page = pages.claim(1, 0, 1, 5)
        assert page is not None
        page.begin_pass(time.perf_counter())
        page._head[3] = os.getppid()  # somebody else's
        taken.append(page.numbers.obj)
    assert pages.claim(1, 0, 1, 5) is None
    assert pages.claim(1, 0, 1, 6) is not None
    assert len(pages.latest()) == 1
    assert sum(page.num_workers for page in pages.pages()) == 5


async def test_totals_never_fall_whoever_has_the_page(truth: DatasetTruth) -> None:
    statistics, pages = await statistics_of(truth), board()
    requests = statistics.fetch.requests
    seen = [0]
    for loader in range(3):
        for worker in range(2):
            page = pages.claim(loader, worker, 2, 1 + worker + loader * PAGES)  # the same two pages
            assert page is not None
            for _ in range(2):  # passes
                before = page.begin_pass(time.perf_counter())
                assert page.statistics() is None
                seen.append(found.fetch.requests if (found := pages.together()[1]) is not None else 0)
                read(page, samples=3)
                page.publish(statistics, sum_of(before, page.waits()), statistics)
    waits, together = pages.together()
    assert waits.samples == 3 * 2 * 2 * 3
    assert together is not None
    seen.append(together.fetch.requests)
    assert seen == sorted(seen)
    assert seen[-1] == 3 * 2 * requests  # each worker's, since it opened the dataset
    assert together.decode.threads == 2 * statistics.decode.threads  # of those that live


async def test_a_page_keeps_what_it_can_of_a_dataset_with_many_hosts(truth: DatasetTruth) -> None:
    statistics = await statistics_of(truth)
    [host] = statistics.fetch.hosts.values()
    hosts = {f"https://{os.urandom(16).hex()}": replace(host, requests=i) for i in range(2_000)}
    many = replace(statistics, fetch=replace(statistics.fetch, hosts=hosts))
    page = board().claim(1, 0, 1, 0)
    assert page is not None
    assert page.statistics() is None
    page.publish(statistics, Waits(), statistics)
    assert page.statistics() == statistics
    page.publish(many, Waits(), many)
    assert page.statistics() == many.without_hosts()
    page._memory = Torn(page._memory)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        page.publish(statistics, Waits(), statistics)
    assert page.statistics() == many.without_hosts()  # of a process that was killed while it wrote, the one before


async def test_page_torn_by_two_writers_reads_as_empty(truth: DatasetTruth) -> None:
    statistics = await statistics_of(truth)
    page = board().claim(1, 0, 1, 0)
    assert page is not None
    page.publish(statistics, Waits(), statistics)
    written = bytes(page._memory)
    for at in (written.index(b"\x78\x01"), written.rindex(b"\x78\x01")):  # where zlib begins: the latest two
        page._memory[at + 40 : at + 44] = b"torn"
    assert page.published() == PublishedFigures()


async def test_opening_worker_waits_and_a_dead_one_does_not(truth: DatasetTruth) -> None:
    statistics = await statistics_of(truth)
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    process.join()
    assert process.pid is not None
    for owner, has_begun, seconds in ((process.pid, False, 5), (os.getpid(), True, 5), (os.getpid(), False, 60)):
        page = board().claim(1, 0, 1, 0)
        assert page is not None
        account, now = WaitAccount(page.numbers), time.perf_counter()
        account.wait(now - 60.0)
        if has_begun:
            page.publish(statistics, Waits(), statistics)
        page._head[3], page._head[5] = owner, now - 60.0  # when it wrote last
        assert page.waits().waited_seconds == pytest.approx(seconds, abs=1.0)


class Torn:
    """Memory whose writer doesn't get to the end."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def __getitem__(self, place: slice) -> memoryview:
        return self._memory[place]

    def __setitem__(self, place: slice, value: bytes) -> None:
        self._memory[place.start : place.start + 10] = value[:10]
        raise KeyboardInterrupt
