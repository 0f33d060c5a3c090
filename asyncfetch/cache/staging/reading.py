"""One thread's way with one entry, in steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncfetch.cache.staging.binding import Stored
    from asyncfetch.cache.staging.engine import Engine
    from asyncfetch.cache.staging.entries import Entry

    Step = Callable[[], "Step | None"]

__all__ = ["Reading"]


class Reading:
    """Size, read, write. Each step does its I/O and then tells the table, which decides on the next.

    Everything that another thread can do happens between two steps. So tests can take the steps one by one, in every
    order, in one thread.
    """

    def __init__(self, engine: Engine, entry: Entry) -> None:
        self._engine = engine
        self._entry = entry
        assert entry.flight is not None
        self._flight = entry.flight
        self._stored: Stored | None = None

    def run(self) -> None:
        """All steps."""
        step: Step | None = self.size
        while step is not None:
            step = step()

    def size(self) -> Step | None:
        """Find out how much room it takes, where that must be known."""
        entry = self._entry
        size_bytes = None
        if entry.size_bytes is None and not entry.joined:  # a glance; the table looks again
            try:
                size_bytes = entry.binding.size()
            except BaseException as error:  # noqa: BLE001 - it is for those who ask for the file
                self._fail(error)
                return None
        with self._engine.table() as table:
            reads = table.sized(entry, size_bytes)
        return self.read if reads else None

    def read(self) -> Step | None:
        """Read, unless somebody has the bytes already, and serve those who wait."""
        try:
            stored = self._flight.result() if self._flight.done() else self._entry.binding.read()
        except BaseException as error:  # noqa: BLE001 - likewise
            self._fail(error)
            return None
        with self._engine.table() as table:
            writes = table.landed(self._entry, stored)
        if not self._flight.done():
            self._flight.set_result(stored)
        if not writes:
            return None
        self._stored = stored
        return self.write

    def write(self) -> None:
        """Put the bytes on disk for those who will ask later."""
        assert self._stored is not None
        file = self._engine.write(self._stored)
        with self._engine.table() as table:
            leftover = table.written(self._entry, file)
        self._engine.discard(leftover)

    def _fail(self, error: BaseException) -> None:
        with self._engine.table() as table:
            table.failed(self._entry)
        self._flight.fail(error)
