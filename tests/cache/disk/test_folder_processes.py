"""Several processes on one tier, and what a kill leaves behind."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Any

import pytest

from asyncfetch.cache.disk import Folder, layout, verify
from bench.soak import MAX_BYTES, soak
from tests.cache.disk.conftest import MIB, VERSION, flip_a_bit, get, put

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import FrameType

    from tests.cache.disk.conftest import Tier

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

BLOCK = 8192


def in_child(work: Callable[[], None]) -> int:
    """How a forked child ended that did it: 0, or minus the signal."""
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException:  # noqa: BLE001  nothing may get out of a fork of the test process
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


CHANGES = {"open", "mkdir", "rename", "unlink", "truncate", "pwrite", "pwritev", "utime", "flock"}


def kill_at_change(number: int) -> None:
    """Have this process killed just before its so many-th call from here on that may change what is on the disk."""
    left = number

    def count(_frame: FrameType, event: str, function: Any) -> None:  # noqa: ANN401
        nonlocal left
        if event == "c_call" and function.__name__ in CHANGES:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)


@pytest.mark.slow  # it forks some 150 times
@pytest.mark.parametrize("begins", ["nothing", "a full tier with damage"])
def test_a_kill_at_any_moment_loses_no_room_and_spoils_no_byte(
    memory_tier: Tier, begins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "BLOCK_BYTES", BLOCK)  # so many times through all of it: with less to write
    tier, max_bytes = memory_tier, 3 * (BLOCK + 4096)

    def live() -> None:
        kill_at_change(number)
        disk = tier.open(max_bytes)
        get(disk, 3 * BLOCK, 6 * BLOCK)
        put(disk, 0, 2 * BLOCK)
        list(verify(disk.folder))
        disk.folder.prune(BLOCK)
        disk.close()

    number, status, flipped = 0, -signal.SIGKILL, 0
    while status == -signal.SIGKILL:
        shutil.rmtree(tier.directory, ignore_errors=True)
        if begins != "nothing":
            put(tier.open(max_bytes), 3 * BLOCK, 6 * BLOCK)
            for path in (tier.files()[0], tier.files()[-1]):
                flip_a_bit(path, BLOCK // 2)
            flipped = 2
        status = in_child(live)
        survivor = tier.open(max_bytes)
        assert tier.unfinished() == []
        assert tier.on_disk_bytes() <= survivor.folder.used_bytes()
        get(survivor, 0, 6 * BLOCK)
        assert survivor.statistics().damaged <= flipped
        put(survivor, 0, 2 * BLOCK)
        assert get(survivor, BLOCK, 2 * BLOCK) == []
        assert tier.on_disk_bytes() <= max_bytes
        assert survivor.folder.count() == tier.on_disk_bytes()
        number += 1
        while tier.stores:
            tier.stores.pop().close()
    assert status == 0
    assert number > 40


def test_file_another_process_writes_is_not_swept(tier: Tier) -> None:
    writer = tier.open()
    new = writer.folder.new_file(1000, lambda _: MIB)
    assert new is not None

    def open_another() -> None:
        assert tier.open().folder.sweep() == 0

    try:
        for age_seconds in (0, 2**31):  # its lock counts, not its age
            os.utime(tier.unfinished()[0], (age_seconds, age_seconds))
            assert in_child(open_another) == 0
        assert len(tier.unfinished()) == 1
        assert writer.folder.count() == 4096
        writer.folder.discard(new)
    finally:
        os.close(new.descriptor)
    assert (tier.unfinished(), writer.folder.used_bytes()) == ([], 0)


def test_child_forked_during_an_eviction_holds_no_lock(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.pipe()
    children: list[int] = []

    def fork_first(folder: Folder) -> int:
        if not children:
            children.append(os.fork())
            if not children[0]:  # a loader's worker, which stays
                os.close(theirs)
                os.read(ours, 1)
                os._exit(0)
        return sweep(folder)

    sweep = Folder.sweep
    disk = tier.open(3 * (MIB + 4096))
    put(disk, 0, 3 * MIB)
    monkeypatch.setattr(Folder, "sweep", fork_first)
    try:
        put(disk, 3 * MIB, 4 * MIB)
        put(disk, 4 * MIB, 5 * MIB)
        assert len(children) == 1
        assert get(disk, 3 * MIB, 5 * MIB) == []
    finally:
        os.close(theirs)
        os.close(ours)
        for child in children:
            os.waitpid(child, 0)


def test_many_writers_count_right_together(tier: Tier) -> None:
    def start() -> int:
        child = os.fork()
        if not child:
            disk = tier.open()
            for number in range(100):
                disk.write(VERSION, (os.getpid() * 100 + number) * 10, memoryview(bytes(10)))
            os._exit(0)
        return child

    observer = tier.open()
    children = [start() for _ in range(4)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    assert observer.folder.used_bytes() == tier.on_disk_bytes() == 400 * 4096


def test_opening_while_others_open_is_no_error(tier: Tier) -> None:
    def start() -> int:
        child = os.fork()
        if not child:
            try:
                for _ in range(100):
                    tier.open().close()
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        return child

    children = [start() for _ in range(4)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4


@pytest.mark.alone
@pytest.mark.slow  # it has bounds of its own, and on a busy machine so many interpreters start slowly
def test_a_short_soak(tmp_path: Path) -> None:
    done = soak(tmp_path, seconds=2.5, processes=4, kill_every_seconds=0.25)
    assert done.killed >= 5
    assert done.reads > 0
    assert done.peak_bytes <= MAX_BYTES
