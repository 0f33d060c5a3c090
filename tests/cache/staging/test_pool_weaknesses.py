"""W1 to W22: what goes wrong in the pool that this one follows, and must not here; and eight more like them.

Each test fails on the behaviour in its comment.
"""

from __future__ import annotations

import errno
import logging
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from asyncfetch.cache.staging import (
    CachePool,
    DecodingStore,
    KeyedStore,
    NoCachePool,
    SourceInfo,
    add_source_info,
)
from asyncfetch.errors import CacheError, FetchTimeout
from tests.cache.staging.conftest import (
    GatedStore,
    GatedWrites,
    InThread,
    disk_bytes,
    files_of,
    four_numbers,
    is_empty,
    is_staged,
    joined,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    MakePool = Callable[..., CachePool]

TEN = {name: name.encode() * 10 for name in "abcdefgh"}


def test_w01_get_during_the_read_into_a_full_cache_returns(make_pool: MakePool) -> None:
    # There: "required now" is looked at after the wait only; the get hangs for ever.
    store = GatedStore(TEN, sized=False)
    pool = make_pool(workers=1, max_bytes=10)
    full = pool.get_lazy(store, "a")
    until(lambda: is_staged(pool, 1))
    store.hold("b")
    late = pool.get_lazy(store, "b")
    got = InThread(late.get)
    store.wait_begun("b")
    store.let("b")
    assert got.result(1) == TEN["b"]
    assert full.get() == TEN["a"]


def test_w01_get_during_a_read_with_reserved_room_returns(make_pool: MakePool) -> None:
    store = GatedStore(TEN)
    store.hold("a")
    pool = make_pool(workers=1, max_bytes=10)
    lazy = pool.get_lazy(store, "a")
    store.wait_begun("a")
    got = InThread(lazy.get)
    store.let("a")
    assert got.result(1) == TEN["a"]
    assert store.reads == ["a"]


def test_w02_a_handle_dropped_during_the_read_leaves_nothing(make_pool: MakePool) -> None:
    # There: the space reserved for it is never given back.
    store = GatedStore(TEN)
    store.hold("a")
    pool = make_pool()
    lazy = pool.get_lazy(store, "a")
    store.wait_begun("a")
    del lazy
    store.let("a")
    until(lambda: is_empty(pool))


def test_w03_a_handle_dropped_in_the_queue_is_never_read(make_pool: MakePool) -> None:
    # There: it is read in full.
    store = GatedStore(TEN)
    store.hold("a")
    pool = make_pool(workers=1)
    first = pool.get_lazy(store, "a")
    store.wait_begun("a")
    queued = pool.get_lazy(store, "b")
    del queued
    until(lambda: pool.statistics().queued == 0)
    store.let("a")
    assert first.get() == TEN["a"]
    until(lambda: is_empty(pool))
    assert store.reads == ["a"]


def test_w04_a_handle_dropped_during_the_write_leaves_nothing(make_pool: MakePool, writes: GatedWrites) -> None:
    # There: its file and its room stay.
    store = GatedStore(TEN)
    writes.limiter.clear()
    pool = make_pool()
    lazy = pool.get_lazy(store, "a")
    assert writes.begun.wait(10)
    del lazy
    writes.limiter.set()
    until(lambda: is_empty(pool))


@pytest.mark.parametrize("sized", [True, False])
def test_w05_dropped_handle_holds_up_no_other_in_the_queue(make_pool: MakePool, sized: bool) -> None:
    # There: it keeps a worker; with one worker the pool stops.
    store = GatedStore({"large": bytes(10), "larger": bytes(8), "small": bytes(1)}, sized=sized)
    pool = make_pool(workers=1, max_bytes=12)
    held = pool.get_lazy(store, "large")
    until(lambda: is_staged(pool, 1))
    waiter = pool.get_lazy(store, "larger")
    behind = pool.get_lazy(store, "small")
    until(lambda: pool.statistics().waiting)
    del waiter
    if sized:  # else it may be as large as the first one
        until(lambda: is_staged(pool, 2))
    assert held.get() == bytes(10)
    until(lambda: is_staged(pool, 1))
    assert behind.get() == bytes(1)
    assert store.reads == ["large", "small"]
    assert is_empty(pool)


def test_w06_a_direct_read_holds_no_lock(make_pool: MakePool) -> None:
    # There: another get_lazy takes as long as the read.
    store = GatedStore(TEN)
    store.hold("a", "b")
    pool = make_pool(workers=1)
    busy = pool.get_lazy(store, "a")
    store.wait_begun("a")
    lazy = pool.get_lazy(store, "b")
    got = InThread(lazy.get)
    store.wait_begun("b")
    other = pool.get_lazy(store, "c")  # with a lock held, neither would ever come back
    pool.statistics()
    store.let("a", "b")
    assert (got.result(), busy.get(), other.get()) == (TEN["b"], TEN["a"], TEN["c"])


def test_w06_decoding_holds_no_lock(make_pool: MakePool) -> None:
    pool = make_pool()
    store = GatedStore(TEN)
    decoding = DecodingStore(store, lambda raw, _: (pool.statistics().entries, raw))
    assert InThread(pool.get_lazy(decoding, "a").get).result()[1] == TEN["a"]


@pytest.mark.parametrize("sized", [True, False])
def test_w07_an_object_larger_than_the_cache_is_read_directly(make_pool: MakePool, sized: bool) -> None:
    # There: it blocks a worker for ever, and what is behind it is never staged.
    store = GatedStore({"huge": bytes(100), "small": b"s"}, sized=sized)
    pool = make_pool(workers=1, max_bytes=10)
    huge, small = pool.get_lazy(store, "huge"), pool.get_lazy(store, "small")
    until(lambda: is_staged(pool, 1))
    assert InThread(huge.get).result(1) == bytes(100)
    assert small.get() == b"s"
    assert store.reads.count("small") == 1
    assert store.reads.count("huge") == (1 if sized else 2)


@pytest.mark.parametrize("sized", [True, False])
def test_w08_nothing_is_read_that_there_is_no_room_for(make_pool: MakePool, sized: bool) -> None:
    # There: eight reads with room for one.
    store = GatedStore(TEN, sized=sized)
    pool = make_pool(workers=8, max_bytes=10)
    lazies = [pool.get_lazy(store, name) for name in TEN]
    until(lambda: is_staged_and_waiting(pool))
    assert len(store.reads) == 1
    assert [lazy.get() for lazy in lazies] == list(TEN.values())
    until(lambda: is_empty(pool))


def is_staged_and_waiting(pool: CachePool) -> bool:
    return is_staged(pool, 1) and pool.statistics().waiting > 0


def test_w08_held_bytes_stay_within_the_bound(make_pool: MakePool) -> None:
    store = GatedStore({str(number): bytes(number) for number in range(60)}, sized=False)
    pool = make_pool(workers=8, max_bytes=100)
    lazies = [pool.get_lazy(store, name) for name in store.files]
    for lazy in lazies:
        assert lazy.get() == bytes(int(lazy.name))
        assert pool.statistics().bytes <= 100
        assert disk_bytes(pool) <= 100


def test_w09_two_getters_of_what_waits_for_room_cost_one_read(make_pool: MakePool) -> None:
    # There: four reads and a leak.
    store = GatedStore(TEN)
    pool = make_pool(workers=1, max_bytes=10)
    full = pool.get_lazy(store, "a")
    until(lambda: is_staged(pool, 1))
    store.hold("b")
    one, two = pool.get_lazy(store, "b"), pool.get_lazy(store, "b")
    until(lambda: pool.statistics().waiting == 1)
    got = [InThread(one.get), InThread(two.get)]
    store.wait_begun("b")
    until(lambda: joined(pool) == 2)
    store.let("b")
    assert [each.result() for each in got] == [TEN["b"]] * 2
    assert store.reads == ["a", "b"]
    del full
    until(lambda: is_empty(pool))


def test_w09_bytes_in_hand_are_staged_for_those_who_come_later(make_pool: MakePool) -> None:
    store = GatedStore(TEN)
    store.hold("a")
    pool = make_pool(workers=1)
    busy = pool.get_lazy(store, "a")
    store.wait_begun("a")
    now, later = pool.get_lazy(store, "b"), pool.get_lazy(store, "b")
    assert now.get() == TEN["b"]
    store.let("a")
    assert busy.get() == TEN["a"]
    assert later.get() == TEN["b"]
    assert store.reads == ["a", "b"]


def test_w09_bytes_being_decoded_serve_others(make_pool: MakePool) -> None:
    # There, and wherever there was no room: each getter reads anew.
    store = GatedStore(TEN)
    decodes, goes_on = threading.Event(), threading.Event()

    def decode(raw: bytes, _: str) -> bytes:
        decodes.set()
        assert goes_on.wait(10)
        return raw

    pool = make_pool(workers=1, max_bytes=10)
    full = pool.get_lazy(store, "a")
    until(lambda: is_staged(pool, 1))
    slow, late, later = pool.get_lazy(DecodingStore(store, decode), "b"), *(pool.get_lazy(store, "b") for _ in range(2))
    got = InThread(slow.get)
    assert decodes.wait(10)
    assert late.get() == TEN["b"]
    assert store.reads == ["a", "b"]
    goes_on.set()
    assert got.result() == later.get() == TEN["b"]
    assert full.get() == TEN["a"]
    assert store.reads.count("b") <= 2  # without room, once more for who asks when it is gone
    until(lambda: is_empty(pool))


def test_w10_an_old_handle_cannot_touch_a_newer_entry(make_pool: MakePool) -> None:
    # There: a failed handle gives back by key when it is collected, and takes the newer one's file away.
    store = GatedStore(TEN)
    store.errors["a"] = ValueError("broken")
    pool = make_pool()
    old = pool.get_lazy(store, "a")
    with pytest.raises(ValueError, match="broken"):
        old.get()
    del store.errors["a"]
    new = pool.get_lazy(store, "a")
    until(lambda: is_staged(pool, 1))
    del old
    assert four_numbers(pool) == (10, 1, 1, 1)
    assert new.get() == TEN["a"]
    assert store.reads == ["a", "a"]


def test_w11_every_get_gives_the_same_value_and_adds_the_source(make_pool: MakePool) -> None:
    # There: the second get returns a tuple and adds nothing.
    store = GatedStore(TEN)
    lazy = make_pool().get_lazy(store, "a")
    first: dict[str, object] = {}
    second: dict[str, object] = {}
    assert lazy.get(first) is lazy.get(second)
    assert first == second == {"__sources__": (SourceInfo("gated", "a", None, ("a",)),)}


@pytest.mark.parametrize("raw_first", [True, False])
def test_w12_each_handle_gets_its_own_store_s_form_from_one_read(make_pool: MakePool, raw_first: bool) -> None:
    # There: a decoding store returned raw bytes.
    store = GatedStore(TEN)
    decoding = DecodingStore(store, lambda raw, name: (name, len(raw)))
    pool = make_pool()
    if raw_first:
        raw, decoded = pool.get_lazy(store, "a"), pool.get_lazy(decoding, "a")
    else:
        decoded, raw = pool.get_lazy(decoding, "a"), pool.get_lazy(store, "a")
    assert raw.get() == TEN["a"]
    assert decoded.get() == ("a", 10)
    assert store.reads == ["a"]


def test_w12_pickled_values_are_shared_by_one_store_alone(make_pool: MakePool) -> None:
    store = GatedStore(TEN)
    decoding = DecodingStore(store, lambda raw, name: (name, len(raw)))
    pool = make_pool(method="pickle")
    one, two, raw = pool.get_lazy(decoding, "a"), pool.get_lazy(decoding, "a"), pool.get_lazy(store, "a")
    assert (one.get(), two.get(), raw.get()) == (("a", 10), ("a", 10), TEN["a"])
    assert store.reads == ["a", "a"]


def test_w13_a_full_disk_costs_nobody_a_sample(
    make_pool: MakePool, writes: GatedWrites, caplog: pytest.LogCaptureFixture
) -> None:
    # There: the sample gets the OSError.
    writes.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    store = GatedStore(TEN)
    pool = make_pool(workers=1)
    with caplog.at_level(logging.WARNING):
        lazies = [pool.get_lazy(store, name) for name in TEN]
        until(lambda: pool.statistics().write_failures == 1)
        until(lambda: four_numbers(pool) == (0, 0, 0, len(TEN)))  # what was set aside is back
        assert [lazy.get() for lazy in lazies] == list(TEN.values())
        stored = pool.to_cache([1, 2], "mine")
        assert stored.get() == [1, 2]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space left on device" in caplog.text
    assert pool.statistics().write_failures == 1  # staging paused
    assert is_empty(pool)


def test_w13_directory_that_cannot_be_made_costs_no_sample(make_pool: MakePool, parent: Path) -> None:
    pool = make_pool()
    parent.write_bytes(b"in the way")
    lazy = pool.get_lazy(GatedStore(TEN), "a")
    until(lambda: pool.statistics().write_failures == 1)
    assert lazy.get() == TEN["a"]
    parent.unlink()


def test_w14_live_handles_read_for_themselves_after_close(make_pool: MakePool, parent: Path) -> None:
    # There: files and directory stay, and a second reference fails with "cannot schedule new futures".
    store = GatedStore(TEN)
    store.hold("b")
    pool = make_pool(workers=1)
    staged, twin = pool.get_lazy(store, "a"), pool.get_lazy(store, "a")
    until(lambda: is_staged(pool, 1))
    running, queued = pool.get_lazy(store, "b"), pool.get_lazy(store, "c")
    store.wait_begun("b")
    closing = InThread(pool.close)
    until(lambda: "closed" in repr(pool) and pool.statistics().queued == 0)
    store.let("b")
    closing.result()
    assert os.listdir(parent) == []
    assert [each.get() for each in (staged, twin, running, queued)] == [TEN["a"], TEN["a"], TEN["b"], TEN["c"]]
    assert os.listdir(parent) == []
    assert pool.statistics().bytes == pool.statistics().count == 0


def test_w15_an_empty_object_gives_its_count_back(make_pool: MakePool) -> None:
    # There: guarded by size > 0.
    pool = make_pool()
    lazy = pool.get_lazy(GatedStore({"empty": b""}), "empty")
    until(lambda: is_staged(pool, 1))
    assert four_numbers(pool) == (0, 1, 1, 1)
    assert lazy.get() == b""
    assert is_empty(pool)


@pytest.mark.parametrize("pooled", [True, False])
def test_w16_none_is_a_value(make_pool: MakePool, pooled: bool) -> None:
    # There: None means "not loaded", and the second get raises TypeError.
    lazy = (make_pool() if pooled else NoCachePool()).to_cache(None, "nothing")
    assert lazy.get() is None
    assert lazy.get() is None


def test_w17_generations_of_a_name_never_share_a_file(make_pool: MakePool, writes: GatedWrites) -> None:
    # There: an orphaned writer and a new one open the same path.
    store = GatedStore(TEN)
    writes.limiter.clear()
    pool = make_pool()
    orphan = pool.get_lazy(store, "a")
    assert writes.begun.wait(10)
    del orphan
    pool.statistics()
    store.files["a"] = b"new content"
    new = pool.get_lazy(store, "a")  # joins the orphan's write: its read was a moment ago
    writes.limiter.set()
    until(lambda: is_staged(pool, 1))
    [first] = files_of(pool)
    assert new.get() == TEN["a"]
    newer = pool.get_lazy(store, "a")
    until(lambda: is_staged(pool, 1))
    assert [file.name for file in files_of(pool)] != [first.name]
    assert newer.get() == b"new content"


FORK = """
import gc, os, sys, threading, time
from asyncfetch.cache.staging import CachePool
from tests.cache.staging.conftest import GatedStore, is_staged, until
parent_dir = sys.argv[1]
store = GatedStore({"a": b"a" * 10, "b": b"b" * 10})
store.hold("a")
pool = CachePool(parent_dir, workers=1)
"""


def script(body: str, *arguments: str, limit_seconds: float = 18) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", body, *arguments],
        capture_output=True,
        text=True,
        timeout=limit_seconds,
        check=False,
    )


def test_w18_after_a_fork_with_work_under_way_both_sides_serve(parent: Path) -> None:
    # There: the child has dead threads, the parent's directory and a leaked count.
    ended = script(
        FORK
        + """
staged = pool.get_lazy(store, "b")
until(lambda: is_staged(pool, 1))
running, queued = pool.get_lazy(store, "a"), pool.get_lazy(store, "b")
store.wait_begun("a")
own = pool.to_cache("mine", "value")
child = os.fork()
store.let("a")
assert staged.get() == queued.get() == b"b" * 10 and running.get() == b"a" * 10
if child == 0:
    try: own.get()
    except RuntimeError as error: assert "gone" in str(error)
    fresh = pool.get_lazy(store, "b")
    until(lambda: is_staged(pool, 1))
    assert fresh.get() == b"b" * 10
    assert pool.statistics().bytes == pool.statistics().count == pool.statistics().entries == 0, pool
    pool.close()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert own.get() == "mine"
assert pool.statistics().bytes == pool.statistics().count == pool.statistics().entries == 0, pool
""",
        str(parent),
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert os.listdir(parent) == []


@pytest.mark.alone
def test_w19_a_fork_waits_for_nothing(parent: Path) -> None:
    # There: the hook before the fork waits for the executor, whose worker is blocked.
    ended = script(
        FORK
        + """
lazy = pool.get_lazy(store, "a")
store.wait_begun("a")
with pool._engine()._lock:
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        os._exit(0 if pool.get_lazy(store, "b").get() == b"b" * 10 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert time.monotonic() - started < 1
store.let("a")
assert lazy.get() == b"a" * 10
""",
        str(parent),
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.alone
def test_w20_the_interpreter_exits_without_close(parent: Path) -> None:
    # There: it hangs.
    ended = script(
        FORK
        + """
queued_and_staged = [pool.get_lazy(store, "b") for _ in range(3)]
reads = CachePool(parent_dir, workers=1).get_lazy(store, "a")
store.wait_begun("a")
full = CachePool(parent_dir, 1, 10)
staged, waits_for_room = full.get_lazy(store, "b"), full.get_lazy(store, "a")
until(lambda: full.statistics().waiting)
waited_for = CachePool(parent_dir, workers=1).get_lazy(store, "a")
threading.Thread(target=waited_for.get, daemon=True).start()
print(time.monotonic())
""",
        str(parent),
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert time.monotonic() - float(ended.stdout) < 5
    assert os.listdir(parent) == []


def test_w21_forks_leave_no_directories(parent: Path) -> None:
    # There: three forks leave seven.
    ended = script(
        FORK
        + """
before = pool.get_lazy(store, "b")
for leave in (sys.exit, os._exit) * 2:
    if os.fork() == 0:
        lazy = pool.get_lazy(store, "b")
        until(lambda: is_staged(pool, 1))
        leave(0)
    os.wait()
assert before.get() == b"b" * 10
""",
        str(parent),
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert os.listdir(parent) == []


def test_w21_a_pool_that_staged_nothing_made_no_directory(make_pool: MakePool, parent: Path) -> None:
    pool = make_pool()
    assert pool.get(GatedStore(TEN), "a") == TEN["a"]
    assert not parent.exists()


@pytest.mark.parametrize("damage", ["truncated", "longer", "changed"])
def test_w22_a_damaged_file_is_read_again(make_pool: MakePool, damage: str) -> None:
    # There: what lies in the file is what the sample gets.
    store = GatedStore(TEN)
    pool = make_pool()
    lazy, twin = pool.get_lazy(store, "a"), pool.get_lazy(store, "a")
    until(lambda: is_staged(pool, 1))
    [file] = files_of(pool)
    with open(file.path, "r+b") as content:
        match damage:
            case "truncated":
                content.truncate(9)
            case "longer":
                content.seek(0, os.SEEK_END)
                content.write(b"!")
            case _:
                content.write(b"?")
    assert lazy.get() == twin.get() == TEN["a"]
    assert store.reads == ["a", "a"]
    assert pool.statistics().damaged == 1
    until(lambda: is_empty(pool))


def test_w22_leftovers_of_killed_processes_alone_are_swept(make_pool: MakePool, parent: Path) -> None:
    # There: it stays.
    ended = script(
        FORK
        + """
lazy = pool.get_lazy(store, "b")
until(lambda: is_staged(pool, 1))
os.kill(os.getpid(), 9)
""",
        str(parent),
    )
    assert ended.returncode == -9
    left = set(os.listdir(parent))
    assert len(left) == 2
    lazies = []
    for pool in (make_pool(), make_pool()):  # the second one sweeps where the first one lives
        lazies.append(pool.get_lazy(GatedStore(TEN), "a"))
        until(partial(is_staged, pool, 1))
    assert len(os.listdir(parent)) == 4
    assert not left & set(os.listdir(parent))
    assert [lazy.get() for lazy in lazies] == [TEN["a"]] * 2


def test_w22_a_read_that_hangs_ends_at_the_deadline(make_pool: MakePool) -> None:
    # There: no timeout.
    store = GatedStore(TEN)
    store.hold("a")
    pool = make_pool(timeout_seconds=0.05)
    lazy = pool.get_lazy(store, "a")
    with pytest.raises(FetchTimeout, match=r"'a' wasn't read in time.*gated"):
        lazy.get()
    store.let("a")
    assert lazy.get(timeout_seconds=5) == TEN["a"]
    assert store.reads == ["a"]


def test_w22_what_is_required_now_overtakes_the_queue(make_pool: MakePool) -> None:
    # There: first in, first out.
    store = GatedStore(TEN)
    store.hold("a")
    pool = make_pool(workers=1)
    lazies = [pool.get_lazy(store, name) for name in TEN]
    store.wait_begun("a")
    assert lazies[-1].get() == TEN["h"]
    assert store.reads == ["a", "h"]
    store.let("a")
    assert [lazy.get() for lazy in lazies] == list(TEN.values())


# The further points.


def test_file_deleted_from_outside_is_read_again(make_pool: MakePool) -> None:
    # There: FileNotFoundError, and bytes and count are lost.
    store = GatedStore(TEN)
    pool = make_pool()
    lazy = pool.get_lazy(store, "a")
    until(lambda: is_staged(pool, 1))
    [file] = files_of(pool)
    os.unlink(file.path)
    assert lazy.get() == TEN["a"]
    assert is_empty(pool)


def test_a_directory_deleted_from_outside_is_made_again(make_pool: MakePool, parent: Path) -> None:
    store = GatedStore(TEN)
    pool = make_pool()
    lazy = pool.get_lazy(store, "a")
    until(lambda: is_staged(pool, 1))
    shutil.rmtree(parent)
    assert lazy.get() == TEN["a"]
    lost = pool.get_lazy(store, "b")
    until(lambda: pool.statistics().write_failures == 1)
    assert lost.get() == TEN["b"]
    pool._engine()._resume_at = 0  # the pause after the failure is over
    again = pool.get_lazy(store, "c")
    until(lambda: is_staged(pool, 1))
    assert again.get() == TEN["c"]


@pytest.mark.parametrize("method", ["raw", "pickle"])
def test_short_names_of_different_samples_are_different_files(make_pool: MakePool, method: str) -> None:
    # There: raw raises KeyError, pickle gives the second sample the first one's data.
    store = GatedStore({"0.txt": b"zero", "1.txt": b"one"})
    pool = make_pool(method=method)
    lazies = [pool.get_lazy(KeyedStore(store, key), ".txt") for key in "01"]
    assert [lazy.get() for lazy in lazies] == [b"zero", b"one"]
    assert pool.get_lazy(KeyedStore(store, "0"), "1.txt").get() == b"one"


def test_a_to_cache_handle_is_found_in_its_dict_after_get(make_pool: MakePool) -> None:
    # There: its hash changes.
    pool = make_pool()
    one, two = pool.to_cache("first", "same name"), pool.to_cache("second", "same name")
    found = {one: 1, two: 2}
    assert (one.get(), two.get()) == ("first", "second")
    assert (found[one], found[two]) == (1, 2)


def test_to_cache_counts_its_bytes(make_pool: MakePool) -> None:
    # There: outside of the accounting.
    pool = make_pool(max_bytes=1000)
    value = bytes(600)
    one = pool.to_cache(value, "one")
    size = len(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))
    assert four_numbers(pool) == (size, 1, 1, 1)
    two = pool.to_cache(value, "two")  # no room: held in memory
    assert four_numbers(pool) == (size, 1, 1, 2)
    assert one.get() == two.get() == value
    assert is_empty(pool)


def test_to_cache_is_refused_after_close(make_pool: MakePool) -> None:
    # There: it goes on.
    pool = make_pool()
    lazy = pool.to_cache(1, "one")
    pool.close()
    with pytest.raises(CacheError, match="closed"):
        pool.to_cache(2, "two")
    with pytest.raises(CacheError, match=r"'one' given to to_cache is gone"):
        lazy.get()


def test_a_file_that_cannot_be_removed_keeps_its_room(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # There: a failed unlink gives the room back, and the disk fills.
    from asyncfetch.cache.staging.directory import StagingDirectory

    store = GatedStore(TEN)
    pool = make_pool()
    lazy = pool.get_lazy(store, "a")
    until(lambda: is_staged(pool, 1))
    monkeypatch.setattr(StagingDirectory, "remove", raise_busy)
    assert lazy.get() == TEN["a"]
    assert four_numbers(pool) == (10, 1, 1, 0)
    assert "can't remove" in caplog.text


def raise_busy(*_: object) -> None:
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))


def test_sources_of_other_types_are_left_alone() -> None:
    sample = object()
    add_source_info(sample, SourceInfo("path"))
    add_source_info(None, SourceInfo("path"))


def test_to_cache_gives_its_room_back_when_interrupted(make_pool: MakePool, writes: GatedWrites) -> None:
    pool = make_pool()
    writes.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        pool.to_cache("value", "mine")
    assert is_empty(pool)
