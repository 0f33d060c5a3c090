from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio

import asyncfetch as af
from asyncfetch.stream import session as sessions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest

    from asyncfetch.testing import DatasetTruth


def test_statistics_asked_for_while_it_is_being_opened_wait_for_that_and_do_not_hold_it_up(
    truth: DatasetTruth, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Opened(Future[Any]):
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
    monkeypatch.setattr(sessions, "Future", Opened)
    session = sessions.Session(opener)
    taken: list[Any] = []
    scrape = threading.Thread(target=lambda: taken.append(session.statistics()), daemon=True)
    scrape.start()
    assert waited_for.wait(5)
    session.thread.start(open_it)
    scrape.join(5)
    session.close()
    assert [statistics.fetch.requests > 0 for statistics in taken] == [True]
