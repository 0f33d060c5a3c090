"""Figures of what the processes that read for another one have done, in memory that both have mapped.

A worker isn't asked, since it may be in the middle of something: it writes, and the other process looks. The times of
its consumer are numbers that it counts in there; its statistics are pickled beside them, twice a second.
"""

from __future__ import annotations

import os
import pickle
import time
import zlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from asyncfetch.observe.figures import counts_of, sum_of
from asyncfetch.observe.report import Report
from asyncfetch.observe.waits import FIGURES, WaitAccount, Waits
from asyncfetch.runtime.liveness import how_silent, vitals

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from asyncfetch.config import StreamConfig
    from asyncfetch.formats import DatasetStatistics

PAGES = 128
"""The pages of a rank, one for each process that reads for it; further processes aren't counted elsewhere."""
_STEPS = (0, PAGES // 2, PAGES // 4, 3 * PAGES // 4)
"""The step from a process's own page to those that it takes while that one belongs to a process that still lives."""
PUBLISH_SECONDS = 0.5
SILENT_SECONDS = 5.0
"""A process that has written nothing for so long has ended: it doesn't wait any longer."""
_FIGURES_BYTES = 8 * FIGURES
_LOADER, _WORKER, _NUM_WORKERS, _PROCESS, _BEGUN_AT, _PUBLISHED_AT, _VERSION, _LENGTHS = range(8)
_CHECKSUMS = _LENGTHS + 2
_BEAT_AT = _CHECKSUMS + 2
_HEAD_BYTES = 8 * (_BEAT_AT + 1)
_LOST = -1.0
"""A mark in place of its latest beat, where the process was lost."""
PAGE_BYTES = 32 * 1024
_PICKLED_AT = _FIGURES_BYTES + _HEAD_BYTES
_PICKLED_BYTES = (PAGE_BYTES - _PICKLED_AT) // 2
"""Most bytes of each of the latest two snapshots: while one is written, or its writer killed then, the other stays."""
BOARD_BYTES = PAGES * PAGE_BYTES
"""The size of all pages."""


@dataclass(frozen=True, slots=True)
class PublishedFigures:
    """The latest snapshot on a worker's page, beside the numbers of its account."""

    statistics: DatasetStatistics | None = None
    """Statistics of the pass alone; None until it has begun."""
    all_waits: Waits = field(default_factory=Waits)
    """The consumers' time of all passes that were counted on the page."""
    all_statistics: DatasetStatistics | None = None
    """Statistics since the worker opened its dataset, and the counts of those that had the page before."""
    failure: str = ""
    """The error that ended the pass, in words."""

    def without_hosts(self) -> PublishedFigures:
        """Return the same without what is known of each host."""
        each = (self.statistics, self.all_statistics)
        statistics, all_statistics = (None if one is None else one.without_hosts() for one in each)
        return replace(self, statistics=statistics, all_statistics=all_statistics)


class FiguresPage:
    """The page of one worker: written there, and read in any process that has it mapped."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self.numbers = memory[:_FIGURES_BYTES].cast("d")
        """Numbers in which the worker's account counts."""
        self._head = memory[_FIGURES_BYTES:_PICKLED_AT].cast("d")
        self._before: DatasetStatistics | None = None
        self._failure = ""

    def begin(self, loader: int, worker: int, num_workers: int) -> None:
        """Belong to this worker of this loader from now on."""
        earlier = self.published()
        self._before = None if earlier.all_statistics is None else counts_of(earlier.all_statistics)
        head = self._head
        head[_LOADER], head[_WORKER], head[_NUM_WORKERS], head[_PROCESS] = (
            loader % 2**48, worker, num_workers, os.getpid(),
        )  # fmt: skip
        head[_BEAT_AT] = 0.0
        self.begin_pass(time.perf_counter())

    def begin_pass(self, now: float) -> Waits:
        """Count another pass of this process from now on; returns what was counted of those before."""
        before = self.published()
        head, self._failure = self._head, ""
        head[_PROCESS], head[_BEGUN_AT] = os.getpid(), now
        self._write(PublishedFigures(None, before.all_waits, before.all_statistics))
        return before.all_waits

    def publish(self, statistics: DatasetStatistics, all_waits: Waits, all_statistics: DatasetStatistics) -> None:
        """Write a snapshot: of the pass, of all passes, and since the dataset was opened."""
        if self._before is not None:
            all_statistics = sum_of(all_statistics, self._before)
        self._write(PublishedFigures(statistics, all_waits, all_statistics, self._failure))

    def fail(self, failure: str) -> None:
        """Write that the pass has failed."""
        self._failure = failure
        self._write(replace(self.published(), failure=failure))

    def _write(self, published: PublishedFigures) -> None:
        """Write them; without each host's figures where they are too long."""
        pickled = zlib.compress(pickle.dumps(published, pickle.HIGHEST_PROTOCOL), 1)
        if len(pickled) > _PICKLED_BYTES:
            pickled = zlib.compress(pickle.dumps(published.without_hosts(), pickle.HIGHEST_PROTOCOL), 1)
        head = self._head
        head[_PUBLISHED_AT] = time.perf_counter()
        if len(pickled) <= _PICKLED_BYTES:
            version = int(head[_VERSION]) + 1
            start = _PICKLED_AT + version % 2 * _PICKLED_BYTES
            self._memory[start : start + len(pickled)] = pickled
            head[_LENGTHS + version % 2], head[_CHECKSUMS + version % 2] = len(pickled), zlib.crc32(pickled)
            head[_VERSION] = version

    def beat(self, turns: bool) -> None:
        """Write that the loop of this process turns, or that it has ended."""
        self._head[_BEAT_AT] = time.perf_counter() if turns else 0.0

    @property
    def beat_at(self) -> float | None:
        """The time of its latest beat; None where none is due, because no loop turns."""
        at = self._head[_BEAT_AT]
        return at if at > 0 else None

    def lose(self, error: BaseException) -> None:
        """Write, in the process that had it read, that the one of this page was lost."""
        self.fail(str(error))
        self._head[_BEAT_AT] = _LOST

    def silence(self) -> str:
        """Return in words that the process is lost, or silent now; nothing where it lives, or ended as it should."""
        if self._head[_BEAT_AT] == _LOST:
            return self.published().failure
        at, pid = self.beat_at, self.process
        seen = vitals(pid)
        silent_seconds = 0.0 if at is None else time.perf_counter() - at
        if seen is None or not (seen.is_stopped or silent_seconds > SILENT_SECONDS):
            return ""
        return f"process {pid}, which reads for this one, {how_silent(silent_seconds, seen)}"

    @property
    def begun_at(self) -> float:
        """The time at which its pass began."""
        return self._head[_BEGUN_AT]

    @property
    def num_workers(self) -> int:
        """The loader's workers; 0 before one has written here."""
        return int(self._head[_NUM_WORKERS])

    @property
    def loader(self) -> tuple[int, int]:
        """The loader's number, and that of its workers."""
        return int(self._head[_LOADER]), self.num_workers

    @property
    def worker(self) -> int:
        """The worker's number in the loader."""
        return int(self._head[_WORKER])

    @property
    def process(self) -> int:
        """The id of the process that it belongs to."""
        return int(self._head[_PROCESS])

    @property
    def is_in_use(self) -> bool:
        """True if that process lives."""
        return self.num_workers > 0 and _lives(self.process)

    def waits(self) -> Waits:
        """Return where the time of the worker's consumer went."""
        now, silent_at = time.perf_counter(), self._head[_PUBLISHED_AT] + SILENT_SECONDS
        if now > silent_at and not (self.published().statistics is None and self.is_in_use):
            now = silent_at  # what opens a dataset says nothing meanwhile
        return WaitAccount.read(self.numbers, now)

    def statistics(self) -> DatasetStatistics | None:
        """Return the latest snapshot of the pass; None where there is none."""
        return self.published().statistics

    def published(self) -> PublishedFigures:
        """Return what was written last; nothing where two processes write at once, or again and again."""
        for _ in range(100):
            version = int(self._head[_VERSION])
            start, length = _PICKLED_AT + version % 2 * _PICKLED_BYTES, int(self._head[_LENGTHS + version % 2])
            pickled, checksum = bytes(self._memory[start : start + length]), self._head[_CHECKSUMS + version % 2]
            if version == 0:
                break
            if zlib.crc32(pickled) == checksum:  # else two have been written meanwhile, it may be
                found: PublishedFigures = pickle.loads(zlib.decompress(pickled))
                return found
        return PublishedFigures()


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True


class FiguresBoard:
    """The pages of a rank's workers, of any number of loaders, in ``BOARD_BYTES`` that were zeros once."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def claim(self, loader: int, worker: int, num_workers: int, process: int) -> FiguresPage | None:
        """Take a page for a worker; None where all that it may take are in use.

        Children of one process have different numbers, ``process``, and those of one loader neighbouring ones, so that
        no two take one page.
        """
        for step in _STEPS:
            page = self._page((process + step) % PAGES)
            if not page.is_in_use or page.process == os.getpid():
                page.begin(loader, worker, num_workers)
                return page
        return None

    def _page(self, place: int) -> FiguresPage:
        return FiguresPage(self._memory[place * PAGE_BYTES : (place + 1) * PAGE_BYTES])

    def pages(self) -> list[FiguresPage]:
        """Return those that are, or were, a worker's."""
        return [page for place in range(PAGES) if (page := self._page(place)).num_workers]

    def latest(self) -> Sequence[FiguresPage]:
        """Return the pages of the loader that began a pass last, one for each worker; none where no worker has begun.

        An earlier loader with the same seed and as many workers has pages of the same numbers, which began earlier.
        """
        pages = sorted(self.pages(), key=lambda page: page.begun_at)
        of_loader = [page for page in pages if page.loader == pages[-1].loader]
        return list({page.worker: page for page in of_loader}.values())

    def together(self) -> tuple[Waits, DatasetStatistics | None]:
        """Return the time of all consumers, and the statistics of all workers, those that have ended included."""
        latest = {(page.worker, page.begun_at) for page in self.latest()}
        waits, statistics = Waits(), []
        for page in self.pages():
            published = page.published()
            waits = sum_of(waits, published.all_waits)
            found = published.all_statistics
            if found is not None and (page.worker, page.begun_at) not in latest and not page.is_in_use:
                found = counts_of(found)
            statistics.append(found)
        return waits, sum_known(statistics)


def sum_known(each: Iterable[DatasetStatistics | None]) -> DatasetStatistics | None:
    """Return the sum of those that are known; None where none is."""
    known = [statistics for statistics in each if statistics is not None]
    return sum_of(*known) if known else None


def report_of(pages: Sequence[FiguresPage], config: StreamConfig) -> Report:
    """Return why the consumer of these workers, one at least, waits, in their latest pass."""
    return Report.of(
        Waits.together(page.waits() for page in pages),
        sum_known(page.statistics() for page in pages),
        config,
        num_workers=pages[0].num_workers,
        failure=next((failure for page in pages if (failure := page.published().failure)), ""),
        silence=next((silence for page in pages if (silence := page.silence())), ""),
    )
