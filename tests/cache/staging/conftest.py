"""A store whose reads begin and end when a test says so."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from asyncfetch.cache.staging import CachePool, SourceInfo, SplitStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from asyncfetch.cache.staging.directory import StagedFile
    from asyncfetch.cache.staging.stores import StoredFile


class GatedStore(SplitStore[bytes]):
    """Files in memory, whose reads are counted, can be held up, and can fail.

    Args:
        files: Content by name.
        sized: Whether it knows lengths without reading.
    """

    def __init__(self, files: Mapping[str, bytes], *, path: str = "gated", sized: bool = True) -> None:
        self.files = dict(files)
        self.sized = sized
        self.reads: list[str] = []
        self.errors: dict[str, BaseException] = {}
        self._path = path
        self._begun: dict[str, threading.Event] = {}
        self._limiters: dict[str, threading.Event] = {}

    @property
    def path(self) -> str:
        return self._path

    def hold(self, *names: str) -> None:
        """Reads of these wait for ``let``."""
        for name in names:
            self._limiters[name] = threading.Event()
            self._begun[name] = threading.Event()

    def let(self, *names: str) -> None:
        for name in names:
            self._limiters[name].set()

    def wait_begun(self, name: str) -> None:
        assert self._begun[name].wait(10), f"{name} isn't read"

    def read_raw(self, name: str) -> tuple[bytes, SourceInfo]:
        self.reads.append(name)
        if name in self._limiters:
            self._begun[name].set()
            assert self._limiters[name].wait(15)
        if name in self.errors:
            raise self.errors[name]
        return self.files[name], SourceInfo(self.path, name, None, (name,))

    def decode(self, raw: bytes, name: str) -> bytes:
        return raw

    def size(self, name: str) -> int | None:
        return len(self.files[name]) if self.sized else None


class GatedWrites:
    """Holds up the writing of staged files, and makes it fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from asyncfetch.cache.staging.directory import StagingDirectory

        write = StagingDirectory.write
        self.begun = threading.Event()
        self.limiter = threading.Event()
        self.limiter.set()
        self.error: BaseException | None = None

        def gated(directory: StagingDirectory, stored: StoredFile) -> StagedFile:
            self.begun.set()
            assert self.limiter.wait(15)
            if self.error is not None:
                raise self.error
            return write(directory, stored)

        monkeypatch.setattr(StagingDirectory, "write", gated)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> GatedWrites:
    return GatedWrites(monkeypatch)


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    return tmp_path / "stage"


@pytest.fixture
def make_pool(parent: Path) -> Iterator[Callable[..., CachePool]]:
    """Pools in ``parent``, closed after the test, which must leave nothing there."""
    pools: list[CachePool] = []

    def make(**settings: Any) -> CachePool:  # noqa: ANN401
        pools.append(CachePool(parent, **settings))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
    assert not parent.exists() or os.listdir(parent) == []


def until(reached: Callable[[], object]) -> None:
    """Wait for what happens in other threads."""
    pause = threading.Event()
    for _ in range(5000):
        if reached():
            return
        pause.wait(0.002)
    pytest.fail("it didn't happen within 10 s")


def files_of(pool: CachePool) -> list[os.DirEntry[str]]:
    """What lies in the pool's directory."""
    return list(os.scandir(pool.path)) if pool.path else []


def disk_bytes(pool: CachePool) -> int:
    """Of files that are still there when they are looked at."""
    sizes = []
    for file in files_of(pool):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(os.stat(file.path).st_size)
    return sum(sizes)


def four_numbers(pool: CachePool) -> tuple[int, int, int, int]:
    """Bytes, count, files on disk, entries."""
    gc.collect()
    now = pool.statistics()
    return now.bytes, now.count, len(files_of(pool)), now.entries


def is_empty(pool: CachePool) -> bool:
    return four_numbers(pool) == (0, 0, 0, 0)


def is_staged(pool: CachePool, count: int) -> bool:
    """So many files are on disk, whole."""
    pool.statistics()
    engine = pool._engine()
    with engine._lock:
        return count == sum(entry.file is not None for entry in engine._entries.values())


def joined(pool: CachePool) -> int:
    """Handles that wait for a read."""
    engine = pool._engine()
    with engine._lock:
        return sum(entry.waiters for entry in engine._entries.values())


class InThread:
    """A call in a thread."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:  # noqa: BLE001 - raised by ``result``
            self._error = error

    def result(self, timeout_seconds: float = 5) -> Any:  # noqa: ANN401
        self._thread.join(timeout_seconds)
        assert not self._thread.is_alive(), "the call hangs"
        if self._error is not None:
            raise self._error
        return self._result
