"""A disk cache in a temporary directory, and what tests do to it from the outside."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from asyncfetch.cache.disk import DiskStore, DiskTier
from asyncfetch.cache.disk.layout import BlockSpan, VersionFile, split
from asyncfetch.ranges import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1024 * 1024
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
CONTENT = np.random.default_rng(0).bytes(6 * MIB)
VERSION = VersionFile.of(ObjectInfo("https://data.example.org/a", len(CONTENT), '"one"'))


@dataclass
class Tier:
    """A directory, and the stores open on it."""

    directory: Path
    stores: list[DiskStore]
    now: float = 0.0

    def open(self, max_bytes: int = 64 * MIB, *, min_free_bytes: int = 0) -> DiskStore:
        tier = DiskTier(self.directory, max_bytes, min_free_bytes=min_free_bytes)
        store = DiskStore(tier, clock=lambda: self.now)
        self.stores.append(store)
        return store

    def files(self) -> list[Path]:
        """Those of blocks, by name."""
        return sorted((self.directory / "v1/objects").glob("*/*"), key=lambda path: path.name)

    def unfinished(self) -> list[Path]:
        return list((self.directory / "v1/new").iterdir())

    def on_disk_bytes(self) -> int:
        """What the files take, counted by another way than the tier's."""
        sizes = []
        for path in [*self.files(), *self.unfinished()]:
            with suppress(FileNotFoundError):  # some is made room for
                sizes.append(path.stat().st_size)
        return sum((size + 4095) // 4096 * 4096 for size in sizes)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Tier]:
    tier = Tier(tmp_path / "tier", [])
    yield tier
    for store in tier.stores:
        store.close()


@pytest.fixture
def memory_tier() -> Iterator[Tier]:
    """A tier on a file system in memory, where there is one: those of hundreds of steps wait for a disk's journal."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        tier = Tier(Path(directory) / "tier", [])
        yield tier
        for store in tier.stores:
            store.close()


def put(store: DiskStore, start: int, stop: int, version: VersionFile = VERSION) -> None:
    """Write block by block, and make room where there is none."""
    for piece in split(start, stop):
        content = memoryview(CONTENT)[piece.start : piece.stop]
        if lacking := store.write(version, piece.start, content):
            store.make_room(lacking)
            store.write(version, piece.start, content)


def get(store: DiskStore, start: int, stop: int, version: VersionFile = VERSION) -> list[BlockSpan]:
    """The pieces that are missing; the others are right."""
    place = bytearray(stop - start)
    missing = store.read(version, start, memoryview(place))
    expected = bytearray(CONTENT[start:stop])
    for piece in missing:
        expected[piece.start - start : piece.stop - start] = place[piece.start - start : piece.stop - start]
    assert place == expected
    return missing


def flip_a_bit(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 4]))


def truncate(path: Path, _at: int) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path, _at: int) -> None:
    os.truncate(path, 0)


def swap(path: Path, _at: int) -> None:
    """Other content of the same length takes the place of what is there; one that was deleted meanwhile stays so."""
    with path.open("r+b") as file:
        file.write(os.urandom(os.fstat(file.fileno()).st_size))


DAMAGES: dict[str, Callable[[Path, int], None]] = {
    "a flipped bit": flip_a_bit,
    "truncated": truncate,
    "empty": empty,
    "other content": swap,
}
