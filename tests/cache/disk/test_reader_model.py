"""ByteCache with and without a disk cache, and DiskReader alone, against a dumb model.

Reads go on side by side; any of them can be cancelled, any request can fail, objects are replaced, files spoiled, the
disk is full, and everything starts again on what lies there. The model is the number of each object's version.
"""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncfetch.cache import ByteCache
from asyncfetch.cache.disk import DiskReader, DiskTier
from asyncfetch.cache.disk import layout as disk_layout
from asyncfetch.errors import ConnectionFailed, ObjectChanged
from asyncfetch.ranges import ObjectInfo
from tests.cache.conftest import PinningReader
from tests.cache.disk.conftest import DAMAGES, MEMORY, Tier

if TYPE_CHECKING:
    from asyncfetch.fetch.reader import WritableBuffer

BLOCK = 8192
SIZE = 4 * BLOCK
URLS = ["https://data.example.org/a", "https://data.example.org/b"]
AMPLE = 1024 * 1024


class Objects(PinningReader):
    """A VersionedReader over the versions of two objects, whose requests fail when told."""

    def __init__(self) -> None:
        super().__init__(SIZE)
        self.versions = dict.fromkeys(URLS, 0)
        self.bodies: list[tuple[str, int, int]] = []
        self.fails_in = -1
        """How many requests go well before one that doesn't; below 0, all do."""

    def content(self, url: str, version: int) -> bytes:
        return np.random.default_rng([URLS.index(url), version]).bytes(SIZE)

    async def read_into(
        self, url: str, start: int, stop: int, buffer: WritableBuffer, *, version: ObjectInfo | None = None
    ) -> ObjectInfo:
        info = ObjectInfo(url, SIZE, f'"{self.versions[url]}"')
        content = self.content(url, self.versions[url])[start:stop]
        if (start, stop) != (0, 1):
            self.bodies.append((url, start, stop))
        self.fails_in -= 1
        fails = self.fails_in == -1
        half = len(content) // 2
        buffer[:half] = content[:half]
        await anyio.lowlevel.checkpoint()
        if fails:
            raise ConnectionFailed("gone", url=url)
        buffer[half:] = content[half:]
        await anyio.lowlevel.checkpoint()
        return self.pin(info, version or self.known(url))


@dataclass(frozen=True)
class Read:
    """One of the reads of a batch."""

    url: str
    start: int
    stop: int
    cancelled_after: int | None
    """Turns of the loop; None for one that is let be."""


@dataclass
class House:
    """What is tested, on a directory that outlives it."""

    kind: str
    directory: Path
    memory_bytes: int
    disk_bytes: int
    objects: Objects = field(default_factory=Objects)
    disk_is_full: bool = False
    seen: dict[str, int] = field(default_factory=dict)
    """The version of each object below which nothing may be served."""

    async def open(self) -> None:
        """As a new process does, which knows nothing of the versions before."""
        self.objects.pinned.clear()
        self.seen = dict(self.objects.versions)
        disk = DiskTier(self.directory, self.disk_bytes, min_free_bytes=0)
        self._stack = AsyncExitStack()
        if self.kind == "disk":
            self.reader: DiskReader | ByteCache = DiskReader(self.objects, disk)
        else:
            tier = disk if self.kind == "memory and disk" else None
            self.reader = ByteCache(self.objects, max_bytes=self.memory_bytes, disk=tier)
        await self._stack.enter_async_context(self.reader)

    async def close(self) -> None:
        await self._stack.aclose()

    async def batch(self, reads: list[Read], fails_in: int) -> None:
        self.objects.fails_in = fails_in
        least = dict(self.seen)
        async with anyio.create_task_group() as group:
            for read in reads:
                group.start_soon(self._read, read, least, fails_in >= 0)
        self.objects.fails_in = -1
        self.check()

    async def _read(self, read: Read, least: dict[str, int], may_fail: bool) -> None:
        async with anyio.create_task_group() as group:
            if read.cancelled_after is not None:
                group.start_soon(_cancel_after, read.cancelled_after, group.cancel_scope)
            try:
                view = await self.reader.fetch(read.url, read.start, read.stop)
            except ConnectionFailed:
                assert may_fail
            except ObjectChanged:
                assert self.objects.versions[read.url] > least[read.url]
            else:
                self._compare(read, bytes(view), least[read.url])
            group.cancel_scope.cancel()

    def _compare(self, read: Read, found: bytes, least: int) -> None:
        for version in range(self.objects.versions[read.url], least - 1, -1):
            if found == self.objects.content(read.url, version)[read.start : read.stop]:
                self.seen[read.url] = max(self.seen[read.url], version)
                return
        pytest.fail(f"wrong bytes, or those of a version that was replaced before the last one seen: {read}")

    def check(self) -> None:
        """What holds when nobody reads."""
        if isinstance(self.reader, ByteCache):
            now = self.reader.statistics()
            assert (now.leased_bytes, now.reserved_bytes, now.waiting) == (0, 0, 0)
            assert now.used_bytes <= self.memory_bytes
        if self.kind != "memory":
            tier = Tier(self.directory, [])
            assert tier.unfinished() == []
            assert tier.on_disk_bytes() <= self.disk_bytes

    def spoil(self, number: int, damage: str) -> None:
        with suppress(FileNotFoundError):  # room is still being made, which deletes some
            files = [path for path in Tier(self.directory, []).files() if path.stat().st_size]
            if files:
                path = files[number % len(files)]
                DAMAGES[damage](path, number % path.stat().st_size)

    async def end(self) -> None:
        """With all mended, every byte of the newest versions is there, and with room on disk is read from it."""
        self.disk_is_full = False
        whole = [Read(url, low, low + BLOCK, None) for url in URLS for low in range(0, SIZE, BLOCK)]
        for _ in range(2):
            await self.close()
            await self.open()
            self.objects.bodies.clear()
            for read in whole:
                await self.batch([read], -1)
        assert self.seen == self.objects.versions
        if self.kind != "memory" and self.disk_bytes == AMPLE:
            assert self.objects.bodies == []


async def _cancel_after(turns: int, scope: anyio.CancelScope) -> None:
    for _ in range(turns):
        await anyio.lowlevel.checkpoint()
    scope.cancel()


READS = st.builds(
    lambda url, start, size, cancelled: Read(url, start, min(SIZE, start + size), cancelled),
    st.sampled_from(URLS),
    st.sampled_from([0, 1, BLOCK - 5, BLOCK, 2 * BLOCK, 3 * BLOCK + 7]),
    st.sampled_from([1, 10, BLOCK, 2 * BLOCK + 1, SIZE]),
    st.sampled_from([None, None, None, 0, 1, 3, 6, 12]),
)
READ = st.tuples(st.just("read"), st.lists(READS, min_size=1, max_size=4), st.sampled_from([-1, -1, -1, 0, 1, 2, 3]))
OPERATIONS = st.lists(
    st.one_of(
        READ,
        READ,
        st.tuples(st.just("replace"), st.sampled_from(URLS)),
        st.tuples(st.just("spoil"), st.integers(0, 99), st.sampled_from(sorted(DAMAGES))),
        st.tuples(st.sampled_from(["fill the disk", "empty the disk", "restart"])),
    ),
    min_size=6,
    max_size=20,
)


@pytest.mark.parametrize("kind", ["memory", "disk", "memory and disk"])
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    operations=OPERATIONS,
    memory_bytes=st.sampled_from([BLOCK, 3 * BLOCK, AMPLE]),
    disk_bytes=st.sampled_from([3 * BLOCK, AMPLE]),
)
async def test_readers_behave_as_their_model(
    kind: str, operations: list[tuple[object, ...]], memory_bytes: int, disk_bytes: int
) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory, mock.patch.object(disk_layout, "BLOCK_BYTES", BLOCK):
        house = House(kind, Path(directory), memory_bytes, disk_bytes)
        write = os.pwritev

        def write_if_there_is_room(*arguments: object) -> int:
            if house.disk_is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(*arguments)  # type: ignore[arg-type]

        with mock.patch("os.pwritev", write_if_there_is_room):
            await house.open()
            for operation in operations:
                match operation:
                    case ("read", list(reads), int(fails_in)):
                        await house.batch(reads, fails_in)
                    case ("replace", str(url)):
                        house.objects.versions[url] += 1
                    case ("spoil", int(number), str(damage)):
                        house.spoil(number, damage)
                    case ("restart",):
                        await house.close()
                        await house.open()
                    case (str(what),):
                        house.disk_is_full = what == "fill the disk"
            await house.end()
            await house.close()
