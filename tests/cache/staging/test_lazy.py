"""What a handle and a pool promise beyond surviving: the semantics, one by one."""

from __future__ import annotations

import copy
import gc
import math
import multiprocessing
import pickle
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from asyncfetch.cache.staging import (
    CachePool,
    DecodingStore,
    DirectoryStore,
    FileStore,
    NoCachePool,
    SourceInfo,
    StagingPool,
    get_source_info,
)
from asyncfetch.errors import CacheError, ConfigError, FetchTimeout, NotFound
from tests.cache.staging.conftest import GatedStore, InThread, four_numbers, is_empty, is_staged, joined, until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    MakePool = Callable[..., CachePool]

TEN = {name: name.encode() * 10 for name in "abcdefgh"}


def source(name: str) -> SourceInfo:
    return SourceInfo("gated", name, None, (name,))


def test_s01_one_read_serves_all_handles(make_pool: MakePool) -> None:
    store = GatedStore(TEN)
    store.hold("a")
    pool = make_pool()
    lazies = [pool.get_lazy(store, "a") for _ in range(50)]
    with ThreadPoolExecutor(20) as threads:
        got = [threads.submit(lazy.get) for lazy in lazies[:20]]
        until(lambda: joined(pool) == 20)
        store.let("a")
        assert {each.result() for each in got} == {TEN["a"]}
    assert {lazy.get() for lazy in lazies} == {TEN["a"]}
    assert store.reads == ["a"]


def test_s02_a_file_lives_as_long_as_handles_do(make_pool: MakePool) -> None:
    pool = make_pool()
    store = GatedStore(TEN)
    one, two, three = (pool.get_lazy(store, "a") for _ in range(3))
    until(lambda: is_staged(pool, 1))
    one.get()
    assert four_numbers(pool) == (10, 1, 1, 1)
    del two
    assert four_numbers(pool) == (10, 1, 1, 1)
    three.get()
    assert is_empty(pool)


def test_s05_others_queue_again_after_a_direct_read_without_room(make_pool: MakePool) -> None:
    store = GatedStore(TEN)
    pool = make_pool(workers=1, max_bytes=10)
    full = pool.get_lazy(store, "a")
    until(lambda: is_staged(pool, 1))
    now, later, other = (pool.get_lazy(store, name) for name in "bbc")
    assert now.get() == TEN["b"]
    assert full.get() == TEN["a"]
    until(lambda: is_staged(pool, 1))
    assert store.reads == ["a", "b", "c"]  # they stand at the tail
    assert other.get() == TEN["c"]
    until(lambda: is_staged(pool, 1))
    assert later.get() == TEN["b"]
    assert pool.statistics().direct_reads == 1


def test_s06_failure_reaches_all_sharers_and_next_tries_again(make_pool: MakePool) -> None:
    store = GatedStore(TEN)
    store.errors["a"] = OSError("the disk is on fire")
    store.hold("a")
    pool = make_pool()
    lazies = [pool.get_lazy(store, "a") for _ in range(3)]
    store.let("a")
    for lazy in lazies:
        with pytest.raises(OSError, match="on fire"):
            lazy.get()
    assert store.reads == ["a"]
    with pytest.raises(OSError, match="on fire"):
        lazies[0].get()
    assert store.reads == ["a", "a"]
    store.errors.clear()
    assert [lazy.get() for lazy in lazies] == [TEN["a"]] * 3
    del lazies, lazy
    until(lambda: is_empty(pool))
    assert pool.get_lazy(store, "a").get() == TEN["a"]
    until(lambda: is_empty(pool))


def test_s06_threads_of_one_handle_share_a_failure(make_pool: MakePool) -> None:
    store = GatedStore(TEN)
    store.errors["a"] = OSError("the disk is on fire")
    store.hold("a")
    pool = make_pool()
    lazy = pool.get_lazy(store, "a")
    got = [InThread(lazy.get) for _ in range(4)]
    until(lambda: joined(pool) == 1)
    store.let("a")
    for each in got:
        with pytest.raises(OSError, match="on fire"):
            each.result()
    store.errors.clear()
    assert [each.result() for each in [InThread(lazy.get) for _ in range(4)]] == [TEN["a"]] * 4
    del lazy, got, each
    until(lambda: is_empty(pool))


@pytest.mark.parametrize("closes", [True, False])
async def test_s06_a_failure_awaited_is_not_remembered(make_pool: MakePool, closes: bool) -> None:
    store = GatedStore(TEN)
    store.errors["a"] = OSError("the disk is on fire")
    pool = make_pool()
    lazy = pool.get_lazy(store, "a")
    for _ in range(2):
        with pytest.raises(OSError, match="on fire"):
            await lazy
    store.errors.clear()
    if closes:
        await anyio.to_thread.run_sync(pool.close)
    assert await lazy == TEN["a"]
    assert store.reads == ["a"] * 3


def test_s06_failure_is_not_given_to_a_later_handle(make_pool: MakePool) -> None:
    store = GatedStore(TEN)
    store.errors["a"] = OSError("the disk is on fire")
    store.hold("a")
    pool = make_pool()
    first, second = pool.get_lazy(store, "a"), pool.get_lazy(store, "a")
    store.let("a")
    with pytest.raises(OSError, match="on fire"):
        first.get()
    store.errors.clear()
    later = pool.get_lazy(store, "a")
    assert later.get() == TEN["a"]
    with pytest.raises(OSError, match="on fire"):
        second.get()  # it was there before
    assert store.reads == ["a", "a"]
    assert pool.get_lazy(store, "a").get() == TEN["a"]
    until(lambda: is_empty(pool))


class StoreError(Exception):
    """Of a store of one's own, whose constructor wants more than it keeps."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__(f"{name} is broken")
        self.number = number


class BrokenStore(GatedStore):
    """Whose every third file is broken."""

    def read_raw(self, name: str) -> tuple[bytes, SourceInfo]:
        if int(name) % 3 == 0:
            raise StoreError(name, int(name))
        return super().read_raw(name)


@pytest.mark.parametrize("method", ["raw", "pickle"])
def test_s06_a_failing_store_takes_no_room_for_good(make_pool: MakePool, method: str) -> None:
    """Each error is handled in a frame that holds other handles: of the same file, and of files that are staged."""
    names = [f"{number:03}" for number in range(300)]
    store = BrokenStore(dict.fromkeys(names, b"x" * 10))
    pool = make_pool(workers=4, max_bytes=200, method=method)
    failed = 0

    def consume(some: list[str]) -> None:
        nonlocal failed
        handles = {name: (pool.get_lazy(store, name), pool.get_lazy(store, name)) for name in some}
        until(lambda: is_staged(pool, sum(int(name) % 3 > 0 for name in some)))
        for name, (handle, _other) in handles.items():
            try:
                assert handle.get() == b"x" * 10
            except StoreError as error:
                failed += (str(error), error.number) == (f"{name} is broken", int(name))
                return  # with the second handle, and all those that follow

    gc.collect()
    gc.disable()  # what is in a cycle stays
    try:
        for start in range(0, len(names), 3):
            consume([names[start + 1], names[start + 2], names[start]])
        until(lambda: is_empty(pool))
        assert failed == 100
        # Those that are staged are none: only a broken file may be asked for before a thread has begun with it.
        assert pool.statistics().direct_reads <= failed
    finally:
        gc.enable()


@pytest.mark.parametrize("error", [NotFound("not there"), OSError("the disk is on fire"), StoreError("it", 3)])
def test_s06_a_failure_holds_no_samples_of_those_who_have_it(make_pool: MakePool, error: Exception) -> None:
    store = GatedStore(TEN)
    store.errors["a"] = error
    pool = make_pool()
    lazies = [pool.get_lazy(store, "a") for _ in range(3)]
    samples: list[weakref.ref[Sample]] = []
    frames = []
    for lazy in lazies * 5:
        sample = Sample()
        samples.append(weakref.ref(sample))
        with pytest.raises(type(error), match=str(error)) as caught:
            lazy.get(sample)
        frames.append(len(caught.traceback))
        del sample, caught
    gc.collect()
    assert sum(each() is not None for each in samples) == 0
    assert max(frames) == frames[0]


def test_s07_the_count_is_a_bound_too(make_pool: MakePool) -> None:
    store = GatedStore(TEN)
    pool = make_pool(max_count=2)
    lazies = [pool.get_lazy(store, name) for name in TEN]
    until(lambda: is_staged(pool, 2))
    until(lambda: unread(pool) == 6)
    assert len(store.reads) == 2
    assert [lazy.get() for lazy in lazies] == list(TEN.values())


def unread(pool: CachePool) -> int:
    now = pool.statistics()
    return now.queued + now.waiting


def test_s08_decoding_is_done_when_a_value_is_picked_up(make_pool: MakePool) -> None:
    decoded: list[str] = []
    store = DecodingStore(GatedStore(TEN), lambda raw, name: decoded.append(name))
    raw, early = make_pool(), make_pool(method="pickle")
    lazy, other = raw.get_lazy(store, "a"), early.get_lazy(store, "b")
    until(lambda: is_staged(raw, 1) and is_staged(early, 1))
    assert decoded == ["b"]
    lazy.get()
    other.get()
    assert decoded == ["b", "a"]


@dataclass
class Sample:
    __sources__: tuple[SourceInfo, ...] | None = None


@pytest.mark.parametrize("kind", [CachePool, NoCachePool])
def test_s09_sources_are_recorded_in_order_on_the_sample(kind: type[Any]) -> None:
    store = GatedStore(TEN)
    with kind() as pool:
        one, two = pool.get_lazy(store, "a"), pool.get_lazy(store, "b")
        sample, other, plain = Sample(), {"x": 1}, [3]
        two.get()
        two.get(sample)
        one.get(sample)
        pool.get(store, "c", sample)
        one.get(other)
        one.get(plain)
        pool.to_cache(1, "mine").get(sample)
    assert get_source_info(sample) == (source("b"), source("a"), source("c"))
    assert get_source_info([sample, other]) == (source("b"), source("a"), source("c"), source("a"))
    assert plain == [3]


def test_s10_close_refuses_new_handles_and_is_idempotent(make_pool: MakePool) -> None:
    pool = make_pool()
    pool.close()
    pool.close()
    for verb in (pool.get_lazy, pool.get):
        with pytest.raises(CacheError, match="closed"):
            verb(GatedStore(TEN), "a")
    with pytest.raises(RuntimeError):
        pool.get_lazy(GatedStore(TEN), "a")
    assert "closed" in repr(pool)


def test_s10_close_waits_for_a_hanging_read_within_its_timeout(
    make_pool: MakePool, parent: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = GatedStore(TEN)
    store.hold("a")
    pool = make_pool()
    kept, lazy = pool.get_lazy(store, "b"), pool.get_lazy(store, "a")
    until(lambda: is_staged(pool, 1))
    got = InThread(lazy.get)
    until(lambda: joined(pool) == 1)
    InThread(lambda: pool.close(wait_seconds=0.05)).result(2)
    assert "still under way 0.05 s after" in caplog.text
    assert list(parent.iterdir()) == []
    store.let("a")
    assert (got.result(), kept.get()) == (TEN["a"], TEN["b"])
    assert list(parent.iterdir()) == []


def test_s12_handles_are_equal_by_store_and_name(make_pool: MakePool) -> None:
    pool = make_pool()
    store, other = GatedStore(TEN), GatedStore(TEN)
    one, same, name, far = (pool.get_lazy(*key) for key in ((store, "a"), (store, "a"), (store, "b"), (other, "a")))
    assert one == same
    assert one not in [name, far]
    assert len({one, same, name, far}) == 3
    before = {one: "found"}
    one.get()
    assert before[same] == "found"
    assert copy.deepcopy([one])[0] is copy.copy(one) is one


def test_a_store_with_the_two_least_verbs_will_do(make_pool: MakePool) -> None:
    class Least:
        path = "least"

        def __init__(self) -> None:
            self.reads = 0

        def __getitem__(self, name: str) -> tuple[Any, SourceInfo]:
            self.reads += 1
            return {"name": name}, SourceInfo("least", name)

    store: FileStore[Any] = Least()
    pool = make_pool()
    lazy, twin = pool.get_lazy(store, "x"), pool.get_lazy(store, "x")
    decoded = pool.get_lazy(DecodingStore(store, lambda value, _: value["name"]), "x")
    assert lazy.get() == twin.get() == {"name": "x"}
    assert lazy.get() is not twin.get()
    assert decoded.get() == "x"
    assert store.reads == 1  # type: ignore[attr-defined]
    assert pool.get_lazy(Least(), "x").get() == {"name": "x"}


def test_value_that_cannot_be_pickled_is_named_in_the_error(make_pool: MakePool) -> None:
    store = DecodingStore(GatedStore(TEN), lambda raw, name: threading.Lock())
    pool = make_pool(method="pickle")
    with pytest.raises(CacheError, match=r"'a', a lock, can't be pickled"):
        pool.get_lazy(store, "a").get()
    with pytest.raises(CacheError, match=r"'mine', a lock, can't be pickled"):
        pool.to_cache(threading.Lock(), "mine")
    until(lambda: is_empty(pool))


def test_a_decoder_that_raises_is_the_handle_s_own_affair(make_pool: MakePool) -> None:
    store = GatedStore(TEN)
    pool = make_pool()
    broken, right = pool.get_lazy(DecodingStore(store, lambda raw, _: 1 // 0), "a"), pool.get_lazy(store, "a")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            broken.get()
    assert right.get() == TEN["a"]
    del broken
    gc.collect()
    until(lambda: is_empty(pool))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "zip"}, "'raw' or 'pickle', not 'zip'"),
        ({"workers": 0}, "workers .* at least 1, not 0"),
        ({"max_bytes": 0}, "max_bytes .* at least 1"),
        ({"max_count": -1}, "max_count .* at least 1"),
        ({"timeout_seconds": 0}, "timeout_seconds must be positive"),
        ({"workers": 1.5}, "workers .* whole number, at least 1, not 1.5"),
        ({"max_bytes": math.inf}, "max_bytes .* whole number, at least 1, not inf"),
        ({"max_bytes": math.nan}, "max_bytes .* whole number, at least 1, not nan"),
        ({"max_bytes": "1GiB"}, "max_bytes .* whole number, at least 1, not '1GiB'"),
        ({"max_count": True}, "max_count .* whole number, at least 1, not True"),
        ({"timeout_seconds": math.inf}, "timeout_seconds must be a number of seconds, .* or None, not inf"),
        ({"timeout_seconds": math.nan}, "timeout_seconds must be a number of seconds, .* or None, not nan"),
        ({"timeout_seconds": "10"}, "timeout_seconds must be a number of seconds, .* or None, not '10'"),
        ({"parent_dir": ""}, "'' doesn't name a directory"),
        ({"parent_dir": "a\0b"}, "doesn't name a directory"),
        ({"parent_dir": "~nobody-of-this-name/stage"}, "a user who has no home here"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CachePool(**settings)


@pytest.mark.parametrize("seconds", [math.inf, math.nan, 1e300, "10"])
def test_impossible_wait_is_refused_and_changes_nothing(make_pool: MakePool, seconds: Any) -> None:  # noqa: ANN401
    store = GatedStore(TEN)
    pool = make_pool()
    lazy = pool.get_lazy(store, "a")
    with pytest.raises(ConfigError, match="timeout_seconds must be a number of seconds"):
        lazy.get(timeout_seconds=seconds)
    with pytest.raises(ConfigError, match="wait_seconds must be a number of seconds"):
        pool.close(wait_seconds=seconds)
    assert (lazy.get(timeout_seconds=1e9), pool.get_lazy(store, "b").get()) == (TEN["a"], TEN["b"])
    pool.close(wait_seconds=1e9)


@pytest.mark.parametrize("size", [-1, "ten", 1.5])
def test_a_length_that_cannot_be_one_is_the_store_s_error(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, size: object
) -> None:
    store = GatedStore(TEN)
    store.hold("a")
    pool = make_pool(workers=1)
    busy, lazy = pool.get_lazy(store, "a"), pool.get_lazy(store, "b")
    store.wait_begun("a")
    monkeypatch.setattr(store, "size", lambda _: size)
    store.let("a")
    until(lambda: pool.statistics().queued == 0 and is_staged(pool, 1))
    with pytest.raises(CacheError, match=rf"gated says that 'b' has {size!r} bytes"):
        lazy.get()
    assert busy.get() == TEN["a"]
    del lazy
    until(lambda: is_empty(pool))


def test_figures_show_what_it_does(make_pool: MakePool) -> None:
    store = GatedStore(TEN)
    pool = make_pool(max_bytes=15)
    lazies = [pool.get_lazy(store, name) for name in "abc"]
    until(lambda: is_staged(pool, 1) and unread(pool) == 2)
    now = pool.statistics()
    assert (now.bytes, now.count, now.entries, now.waiting + now.queued, now.direct_reads) == (10, 1, 3, 2, 0)
    assert repr(pool).startswith("<CachePool 10/15 bytes, 1/10000000 files, ")
    assert [lazy.get() for lazy in lazies] == [TEN["a"], TEN["b"], TEN["c"]]
    assert pool.statistics().reads == 3


def test_pools_with_and_without_cache_have_one_interface() -> None:
    pools: list[StagingPool] = [CachePool(), NoCachePool()]
    for pool in pools:
        lazy = pool.get_lazy(GatedStore(TEN), "a")
        assert (lazy.get(), lazy.get()) == (TEN["a"], TEN["a"])
        assert pool.to_cache({"a": 1}, "mine").get() == {"a": 1}
        assert pool.get(GatedStore(TEN), "b") == TEN["b"]
        assert pool.statistics().reads == 2
        pool.close(wait_seconds=1)
        assert pool.path is None


async def test_an_awaited_handle_leaves_the_loop_alone(make_pool: MakePool) -> None:
    store = GatedStore(TEN)
    store.hold("a")
    pool = make_pool()
    lazy, staged = pool.get_lazy(store, "a"), pool.get_lazy(store, "b")
    sample: dict[str, Any] = {}
    turns = 0
    async with anyio.create_task_group() as group:

        async def turn() -> None:
            nonlocal turns
            while turns < 20:
                await anyio.lowlevel.checkpoint()
                turns += 1
            store.let("a")

        group.start_soon(turn)
        assert await lazy == TEN["a"]
    assert turns == 20
    assert await staged.aget(sample) == TEN["b"]
    assert sample["__sources__"] == (source("b"),)
    assert await NoCachePool().get_lazy(store, "c") == TEN["c"]


async def test_a_cancelled_await_leaves_the_handle_as_it_was(make_pool: MakePool) -> None:
    store = GatedStore(TEN)
    store.hold("a")
    pool = make_pool()
    lazy, other = pool.get_lazy(store, "a"), pool.get_lazy(store, "a")
    with anyio.move_on_after(0.05) as scope:
        await lazy
    assert scope.cancelled_caught
    with pytest.raises(FetchTimeout):
        await lazy.aget(timeout_seconds=0.01)
    store.let("a")
    assert (await lazy, await other) == (TEN["a"], TEN["a"])
    assert store.reads == ["a"]
    await anyio.to_thread.run_sync(until, lambda: is_empty(pool))


async def test_a_thousand_coroutines_await_at_once(make_pool: MakePool) -> None:
    store = GatedStore({str(number): b"%d" % number for number in range(1000)})
    pool = make_pool(workers=1, max_bytes=100)
    lazies = [pool.get_lazy(store, name) for name in store.files]
    got: dict[str, bytes] = {}

    async def pick_up(number: int) -> None:
        got[str(number)] = await lazies[number]

    async with anyio.create_task_group() as group:
        for number in reversed(range(1000)):
            group.start_soon(pick_up, number)
    assert got == store.files
    assert sorted(store.reads) == sorted(store.files)


def test_threads_may_share_a_handle(make_pool: MakePool) -> None:
    store = GatedStore(TEN)
    pool = make_pool()
    for name in TEN:
        lazy = pool.get_lazy(store, name)
        with ThreadPoolExecutor(8) as threads:
            got = [threads.submit(lazy.get) for _ in range(8)]
        assert {each.result() for each in got} == {TEN[name]}
    assert store.reads == list(TEN)
    until(lambda: is_empty(pool))


def test_a_handle_collected_under_the_lock_waits_for_nobody(make_pool: MakePool) -> None:
    pool = make_pool()
    lazies = [pool.get_lazy(GatedStore(TEN), "a")]
    with pool._engine()._lock:
        InThread(lazies.clear).result(1)
    until(lambda: is_empty(pool))


def test_a_pool_that_is_forgotten_ends_its_threads(parent: Path) -> None:
    before = threading.active_count()
    pool = CachePool(parent)
    lazy = pool.get_lazy(GatedStore(TEN), "a")
    until(partial(is_staged, pool, 1))
    del pool
    assert lazy.get() == TEN["a"]
    del lazy
    gc.collect()
    until(lambda: threading.active_count() <= before and not any(parent.iterdir()))


def in_child(pool: CachePool, store: DirectoryStore, answers: Any) -> None:  # noqa: ANN401
    lazy = pool.get_lazy(store, "file")
    until(lambda: is_staged(pool, 1))
    answers.send((pool.path, lazy.get(), pool.statistics().reads))
    kept = pool.get_lazy(store, "file")
    until(lambda: is_staged(pool, 1))
    answers.send(kept.name)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_loader_worker_has_a_pool_of_its_own(make_pool: MakePool, parent: Path, tmp_path: Path, method: str) -> None:
    (tmp_path / "file").write_bytes(b"content")
    store = DirectoryStore(tmp_path)
    pool = make_pool(workers=2)
    kept = pool.get_lazy(store, "file")
    until(lambda: is_staged(pool, 1))
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    child = context.Process(target=in_child, args=(pool, store, theirs))
    child.start()
    theirs.close()
    path, content, reads = ours.recv()
    assert (content, reads) == (b"content", 1)
    assert path not in {None, pool.path}
    ours.recv()
    child.join()
    assert child.exitcode == 0
    assert [each.name for each in parent.iterdir() if each.is_dir()] == [str(pool.path).rpartition("/")[2]]
    assert kept.get() == b"content"


def test_a_handle_cannot_be_pickled_and_says_so(make_pool: MakePool) -> None:
    with pytest.raises(CacheError, match=r"<Lazy 'a' of gated> belongs to its process"):
        pickle.dumps(make_pool().get_lazy(GatedStore(TEN), "a"))


def test_ctrl_c_ends_a_get() -> None:
    program = """
import os, signal, threading
from asyncfetch.cache.staging import CachePool
from tests.cache.staging.conftest import GatedStore
store = GatedStore({"a": b"a"})
store.hold("a")
lazy = CachePool().get_lazy(store, "a")
store.wait_begun("a")
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try: lazy.get()
except KeyboardInterrupt: print("interrupted")
store.let("a")
print(lazy.get())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=18, check=False)
    assert (ended.returncode, ended.stdout) == (0, "interrupted\nb'a'\n")
