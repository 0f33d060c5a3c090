from __future__ import annotations

import os
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import asyncfetch as af
from asyncfetch.runtime import loop_thread
from asyncfetch.runtime.single_flight import SharedFuture
from asyncfetch.stream.passes import DatasetSession

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from asyncfetch.testing import DatasetTruth


def test_statistics_wait_for_an_opening_without_holding_it_up(
    truth: DatasetTruth, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OpenSource(SharedFuture[Any]):
        def exception(self, timeout: float | None = None) -> BaseException | None:
            waited_for.set()
            return super().exception(timeout)

    @asynccontextmanager
    async def opener() -> AsyncIterator[Any]:
        await may_open.wait()
        async with af.open_dataset(str(truth.root)) as dataset:
            yield dataset

    async def open_it() -> None:
        may_open.set()

    waited_for, may_open = threading.Event(), anyio.Event()
    monkeypatch.setattr(loop_thread, "SharedFuture", OpenSource)
    session = DatasetSession(opener)
    taken: list[Any] = []
    scrape = threading.Thread(target=lambda: taken.append(session.statistics()), daemon=True)
    scrape.start()
    assert waited_for.wait(5)
    session.thread.start(open_it)
    scrape.join(5)
    session.close()
    assert [statistics.fetch.requests > 0 for statistics in taken] == [True]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_that_has_not_iterated_has_no_statistics(truth: DatasetTruth) -> None:
    """As any process that hasn't: who scrapes it for its metrics gets none."""
    stream = af.Stream(str(truth.root))
    assert stream.statistics() is None
    next(iter(stream))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if stream.statistics() is None else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert stream.statistics() is not None
    stream.close()
    assert stream.statistics() is None


def test_a_stream_of_nothing_has_no_statistics(tmp_path: Path) -> None:
    stream = af.Stream(str(tmp_path))
    with pytest.raises(af.AsyncFetchError) as raised:
        next(iter(stream))
    assert "info.json" in str(raised.value)
    assert stream.statistics() is None
