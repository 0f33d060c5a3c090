"""What lies where, and in which order it goes, when the clock is wrong."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from asyncfetch.cache.disk import DiskStore, DiskTier
from asyncfetch.cache.disk.layout import VersionFile, parse_file_name
from asyncfetch.ranges import ObjectInfo
from tests.cache.disk.conftest import CONTENT, MIB, VERSION, Tier, get, put

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCKS = 6
FILE_BYTES = MIB + 4096
SECOND, YEAR = 10**9, 365 * 86400 * 10**9
TODAY = 1_750_000_000 * SECOND
OTHER = VersionFile.of(ObjectInfo("https://data.example.org/b", len(CONTENT), '"one"'))


@dataclass
class Wall:
    """A clock on the wall that goes a second at each look, and that somebody sets."""

    now_ns: int

    def __call__(self) -> int:
        self.now_ns += SECOND
        return self.now_ns


@pytest.fixture
def open_at(tier: Tier) -> Callable[[Wall], DiskStore]:
    """Stores with room for six blocks that look at a clock."""

    def open_store(wall: Wall) -> DiskStore:
        disk = DiskTier(tier.directory, BLOCKS * FILE_BYTES, min_free_bytes=0)
        tier.stores.append(DiskStore(disk, clock=lambda: tier.now, wall_ns=wall))
        return tier.stores[-1]

    return open_store


def versions(tier: Tier) -> list[VersionFile]:
    return [parse_file_name(path.name)[0] for path in tier.files()]


@pytest.mark.parametrize("wrong_by", [YEAR, 500 * YEAR, 3600 * SECOND], ids=["a year", "centuries", "an hour"])
def test_files_dated_by_a_fast_clock_are_evicted_like_others(
    tier: Tier, open_at: Callable[[Wall], DiskStore], wrong_by: int
) -> None:
    wall = Wall(TODAY + wrong_by)
    disk = open_at(wall)
    put(disk, 0, BLOCKS * MIB)
    wall.now_ns = TODAY
    for low in range(0, BLOCKS * MIB, MIB):
        put(disk, low, low + MIB, OTHER)
        assert get(disk, 0, low + MIB, OTHER) == []  # the new ones stay
    assert versions(tier) == [OTHER] * BLOCKS
    put(disk, 0, MIB)
    assert VERSION in versions(tier)
    assert disk.folder.survey().newest_use_ns <= wall.now_ns  # type: ignore[operator]


def test_files_dated_by_a_slow_clock_are_evicted_first(tier: Tier, open_at: Callable[[Wall], DiskStore]) -> None:
    wall = Wall(0)  # 1970: a machine without a battery
    disk = open_at(wall)
    put(disk, 0, 3 * MIB)
    wall.now_ns = TODAY
    put(disk, 3 * MIB, 6 * MIB)
    assert get(disk, 0, MIB) == []
    put(disk, 0, 2 * MIB, OTHER)
    assert [len(get(disk, low, low + MIB)) for low in range(0, 6 * MIB, MIB)] == [0, 1, 1, 0, 0, 0]


def test_times_are_put_right_by_a_look(tier: Tier, open_at: Callable[[Wall], DiskStore]) -> None:
    wall = Wall(TODAY)
    disk = open_at(wall)
    put(disk, 0, 2 * MIB)
    ahead, behind = tier.files()
    os.utime(ahead, ns=(0, TODAY + YEAR))
    before = behind.stat().st_mtime_ns
    disk.folder.survey()
    assert TODAY < ahead.stat().st_mtime_ns <= wall.now_ns
    assert behind.stat().st_mtime_ns == before
