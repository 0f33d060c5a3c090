from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import importlib
import os
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import psutil
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncfetch.decode import DecoderCache, open_decoder
from asyncfetch.decode import cache as cache_module
from asyncfetch.errors import ClosedError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncfetch.decode import FrameDecoder
    from tests.decode.conftest import Video


KEYS, SIZES = st.integers(0, 7), st.integers(0, 25)
ERRORS = st.sampled_from([OSError, asyncio.CancelledError]).map(lambda kind: kind("no such video"))
LIMIT_SECONDS = 10.0
MIB = 1024 * 1024


class Decoder:
    """Has what the cache asks for: a size, and that it can be referred to weakly."""

    def __init__(self, nbytes: int = 1) -> None:
        self.nbytes = nbytes


class Opening:
    """A call of ``open`` that ends when the test says so, and the calls of ``get`` that wait for it."""

    def __init__(self, key: int) -> None:
        self.key = key
        self.answer: Future[Decoder] = Future()
        self.calls: list[Future[Decoder]] = []
        self.left: set[Future[Decoder]] = set()
        """Of these, such as nobody looks at any more."""
        self.is_kept = True
        """Whether its decoder will be."""


class CacheMachine(RuleBasedStateMachine):
    """The cache against an ordered dictionary and a list of what is being opened."""

    MAX_SIZE, MAX_BYTES = 4, 20
    MAX_CALLS = 12

    def __init__(self) -> None:
        super().__init__()
        self.cache: DecoderCache[Decoder] = DecoderCache(self.MAX_SIZE, self.MAX_BYTES)
        self.model: OrderedDict[int, Decoder] = OrderedDict()
        self.openings: list[Opening] = []
        self.threads = ThreadPoolExecutor(self.MAX_CALLS)
        self.hits = self.misses = 0

    def teardown(self) -> None:
        for opening in self.openings:
            opening.answer.set_result(Decoder())
        self.threads.shutdown()

    # Calls that end before anything else happens.

    @rule(key=KEYS, nbytes=SIZES)
    def get(self, key: int, nbytes: int) -> None:
        if self.opening(key) is not None:
            return
        fresh = Decoder(nbytes)
        found = self.cache.get(key, lambda: fresh)
        if key in self.model:
            self.hits += 1
            assert found is self.model[key]
            self.model.move_to_end(key)
        else:
            self.misses += 1
            assert found is fresh
            self.keep(key, fresh)

    @rule(key=KEYS, error=ERRORS)
    def fail(self, key: int, error: BaseException) -> None:
        if key in self.model or self.opening(key) is not None:
            return
        self.misses += 1
        with pytest.raises(type(error)):
            self.cache.get(key, functools.partial(raise_it, error))

    # Calls that others come between.

    @precondition(lambda self: sum(len(each.calls) for each in self.openings) < self.MAX_CALLS)
    @rule(key=KEYS)
    def ask(self, key: int) -> None:
        if key in self.model:
            return
        opening = self.opening(key)
        if opening is None:
            self.misses += 1
            opening = Opening(key)
            self.openings.append(opening)
        else:
            self.hits += 1
        opening.calls.append(self.threads.submit(self.cache.get, key, opening.answer.result))
        wait_for(self.cache, self.hits + self.misses)

    @precondition(lambda self: self.openings)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Whoever asked goes away. The thread goes on, for those who wait and for the cache."""
        opening = data.draw(st.sampled_from(self.openings))
        opening.left.add(data.draw(st.sampled_from(opening.calls)))

    @precondition(lambda self: self.openings)
    @rule(data=st.data(), nbytes=SIZES)
    def succeed(self, data: st.DataObject, nbytes: int) -> None:
        opening, fresh = self.take(data), Decoder(nbytes)
        opening.answer.set_result(fresh)
        wait(opening.calls, LIMIT_SECONDS)
        assert all(call.result(0) is fresh for call in opening.calls if call not in opening.left)
        if opening.is_kept:
            self.keep(opening.key, fresh)

    @precondition(lambda self: self.openings)
    @rule(data=st.data(), error=ERRORS)
    def fail_late(self, data: st.DataObject, error: BaseException) -> None:
        opening = self.take(data)
        opening.answer.set_exception(error)
        wait(opening.calls, LIMIT_SECONDS)
        told = [call.exception(0) for call in opening.calls if call not in opening.left]
        assert {(type(each), str(each)) for each in told} <= {(type(error), str(error))}
        assert len(set(map(id, told))) == len(told)  # each its own: none holds another one's frames

    # What lets go.

    @rule(key=KEYS)
    def discard(self, key: int) -> None:
        self.cache.discard(key)
        self.model.pop(key, None)
        if (opening := self.opening(key)) is not None:
            opening.is_kept = False

    @precondition(lambda self: self.model or self.openings)
    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.model.clear()
        for opening in self.openings:
            opening.is_kept = False

    # The model.

    def opening(self, key: int) -> Opening | None:
        """That calls for the key join."""
        return next((each for each in self.openings if each.key == key and each.is_kept), None)

    def take(self, data: st.DataObject) -> Opening:
        opening = data.draw(st.sampled_from(self.openings))
        self.openings.remove(opening)
        return opening

    def keep(self, key: int, decoder: Decoder) -> None:
        if decoder.nbytes <= self.MAX_BYTES:
            self.model[key] = decoder
        while len(self.model) > self.MAX_SIZE or self.held_bytes() > self.MAX_BYTES:
            self.model.popitem(last=False)

    def held_bytes(self) -> int:
        return sum(decoder.nbytes for decoder in self.model.values())

    @invariant()
    def the_same_numbers(self) -> None:
        now = self.cache.statistics()
        assert (now.size, now.nbytes) == (len(self.model), self.held_bytes())
        assert (now.hits, now.misses) == (self.hits, self.misses)


def raise_it(error: BaseException) -> NoReturn:
    raise error


TestCache = CacheMachine.TestCase


def test_decoders_without_a_size_are_counted_only() -> None:
    cache: DecoderCache[object] = DecoderCache(max_size=2, max_bytes=1)
    for key in range(3):
        cache.get(key, object)
    assert (cache.statistics().size, cache.statistics().nbytes) == (2, 0)


def test_bounds_of_none_limit_nothing() -> None:
    cache: DecoderCache[Decoder] = DecoderCache(max_size=None, max_bytes=None)
    for key in range(300):
        cache.get(key, lambda: Decoder(1 << 40))
    assert cache.statistics().size == 300
    assert cache.statistics().evictions == 0


@pytest.mark.parametrize(
    ("max_bytes", "nbytes", "between"),
    [
        (512 * MIB, 4 * MIB, 16),  # an eighth of the bound
        (512 * MIB, 0, 32),  # none counts for less than 2 MiB
        (None, 4 * MIB, 16),
        (32 * MIB, 4 * MIB, 4),  # no more often than every 16 MiB
    ],
)
def test_heap_is_trimmed_after_a_share_of_the_bound_was_released(
    max_bytes: int | None, nbytes: int, between: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trims: list[int] = []
    cache: DecoderCache[Decoder] = DecoderCache(1, max_bytes)
    monkeypatch.setattr(cache_module, "trim_heap", lambda: trims.append(cache.statistics().evictions))
    for key in range(3 * between + 1):
        cache.get(key, lambda: Decoder(nbytes))
    assert trims == [between, 2 * between, 3 * between]


def test_bound_can_be_raised_and_not_lowered() -> None:
    cache: DecoderCache[Decoder] = DecoderCache(2)
    cache.allow(1)
    assert cache.statistics().max_size == 2
    cache.allow(3)
    for key in range(4):
        cache.get(key, Decoder)
    assert cache.statistics().size == 3
    cache = DecoderCache(None)
    cache.allow(3)
    assert cache.statistics().max_size is None


def test_the_environment_counts_where_the_argument_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASYNCFETCH_DECODER_CACHE_SIZE", raising=False)
    assert DecoderCache().statistics().max_size == 100
    monkeypatch.setenv("ASYNCFETCH_DECODER_CACHE_SIZE", "7")
    assert DecoderCache().statistics().max_size == 7
    assert DecoderCache(3).statistics().max_size == 3
    assert DecoderCache(None).statistics().max_size is None


@pytest.mark.parametrize("value", ["", "many", "0", "-1", "1.5", "None"])
def test_a_bad_environment_is_named(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("ASYNCFETCH_DECODER_CACHE_SIZE", value)
    with pytest.raises(ConfigError, match=f"ASYNCFETCH_DECODER_CACHE_SIZE .* not '{value}'"):
        DecoderCache()
    DecoderCache(5)


@pytest.mark.parametrize("bounds", [{"max_size": 0}, {"max_size": -1}, {"max_size": 1.5}, {"max_bytes": 0}])
def test_a_bound_below_one_is_refused(bounds: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(bounds))} .* at least 1"):
        DecoderCache(**bounds)


def in_threads(count: int, work: Callable[[int], object]) -> None:
    threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def wait_for(cache: DecoderCache[Decoder], calls: int) -> None:
    """Until so many calls of ``get`` are past the lock."""
    reached = threading.Event()
    while (now := cache.statistics()).hits + now.misses < calls:
        reached.wait(0.001)


def test_key_is_opened_once_for_all_threads() -> None:
    cache: DecoderCache[Decoder] = DecoderCache()
    got: list[Decoder] = []

    def open_it() -> Decoder:
        wait_for(cache, 8)
        return Decoder()

    in_threads(8, lambda _: got.append(cache.get("file", open_it)))
    assert len(got) == 8
    assert len(set(map(id, got))) == 1
    assert cache.statistics().misses == 1


def test_different_keys_open_at_the_same_time() -> None:
    cache: DecoderCache[Decoder] = DecoderCache()
    all_inside = threading.Barrier(4, timeout=10)

    def open_it() -> Decoder:
        all_inside.wait()
        cache.statistics()  # the lock is free
        return Decoder()

    in_threads(4, lambda key: cache.get(key, open_it))
    assert cache.statistics().size == 4


def test_failure_reaches_all_waiters_and_next_call_tries_again() -> None:
    cache: DecoderCache[Decoder] = DecoderCache()
    failures: list[OSError] = []

    def fail() -> Decoder:
        wait_for(cache, 4)
        raise OSError("no such video")

    def ask(_: int) -> None:
        try:
            cache.get("file", fail)
        except OSError as error:
            failures.append(error)

    in_threads(4, ask)
    assert [str(error) for error in failures] == ["no such video"] * 4
    assert isinstance(cache.get("file", Decoder), Decoder)


def test_a_failure_keeps_nothing_alive() -> None:
    cache: DecoderCache[Decoder] = DecoderCache()
    block = Decoder()
    alive = weakref.ref(block)

    def fail(_: Decoder) -> Decoder:
        raise OSError("no such video")

    gc.disable()  # nothing may wait for it
    try:
        with contextlib.suppress(OSError):
            cache.get("file", functools.partial(fail, block))
        del block
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("end", ["discard", "clear", "close"])
def test_decoder_discarded_while_it_opens_is_not_kept(end: str) -> None:
    cache: DecoderCache[Decoder] = DecoderCache()

    def open_it() -> Decoder:
        if end == "discard":
            cache.discard("file")
        else:
            getattr(cache, end)()
        return Decoder()

    assert isinstance(cache.get("file", open_it), Decoder)
    assert cache.statistics().size == 0


def test_the_evicted_go_when_their_last_user_does() -> None:
    cache: DecoderCache[Decoder] = DecoderCache(max_size=1)
    used = cache.get("a", Decoder)
    alive = weakref.ref(used)
    cache.get("b", Decoder)
    assert alive() is used
    del used
    assert alive() is None


def test_a_decoder_may_ask_the_cache_when_it_is_freed() -> None:
    cache: DecoderCache[Decoder] = DecoderCache(max_size=1)
    sizes: list[int] = []
    for key in range(3):
        weakref.finalize(cache.get(key, Decoder), lambda: sizes.append(cache.statistics().size))
    cache.clear()
    assert sizes == [1, 1, 0]


def test_closed_cache_is_closed() -> None:
    cache: DecoderCache[Decoder] = DecoderCache()
    cache.get("file", Decoder)
    cache.close()
    cache.close()
    assert cache.statistics().size == 0
    assert "closed 0/100" in repr(cache)
    with pytest.raises(ClosedError):
        cache.get("file", Decoder)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_starts_empty_even_if_the_lock_was_held() -> None:
    cache: DecoderCache[Decoder] = DecoderCache()
    cache.get("file", Decoder)
    with cache._state().lock:
        child = os.fork()
        if child == 0:
            fresh = Decoder()
            right = cache.get("file", lambda: fresh) is fresh and cache.statistics().size == 1
            os._exit(0 if right else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert cache.statistics().size == 1


@pytest.mark.parametrize("backend", ["torchcodec", "pyav"])
def test_memory_and_files_stay_flat_over_many_videos(h264: Video, backend: str) -> None:
    cache: DecoderCache[FrameDecoder] = DecoderCache(max_size=50)
    process = psutil.Process()

    def visit(keys: range) -> int:
        for key in keys:
            cache.get(key, lambda: open_decoder(h264.clip(), backend=backend)).frames([key % 30])  # type: ignore[arg-type]
        return int(process.memory_info().rss)

    gc.disable()  # nothing may wait for it
    try:
        before = visit(range(100))
        files = len(os.listdir("/proc/self/fd"))
        after = visit(range(100, 600))
    finally:
        gc.enable()
    assert cache.statistics().size == 50
    assert len(os.listdir("/proc/self/fd")) == files
    # 500 such decoders take 200 MiB when none is freed.
    assert after - before < 20 * 1024 * 1024


def decoder_on(path: Path) -> Any:  # noqa: ANN401
    """torchcodec's own, which keeps the file open."""
    return importlib.import_module("torchcodec.decoders").VideoDecoder(str(path))


@pytest.mark.slow
def test_five_hundred_open_files_at_a_cap_of_fifty(h264: Video, tmp_path: Path) -> None:
    """Decoders that hold their files open, over 500 files and then 2,000 calls more, of which each fourth is a miss."""
    paths = [tmp_path / f"{number}.mp4" for number in range(500)]
    for path in paths:
        path.write_bytes(h264.data)
    cache: DecoderCache[Any] = DecoderCache(max_size=50, max_bytes=None)
    process = psutil.Process()

    def visit(numbers: range, times: int = 1) -> tuple[int, int]:
        for number in (number for number in numbers for _ in range(times)):
            path = paths[number * 7 % 500]
            cache.get(path, functools.partial(decoder_on, path)).get_frame_at(number % 4)
        return int(process.memory_info().rss), open_files(tmp_path)

    fresh, _ = visit(range(1))
    filled, files = visit(range(1, 500))
    after, files_after = visit(range(500, 1000), times=4)
    now = cache.statistics()
    assert (now.size, now.misses, now.hits) == (50, 1000, 1500)
    assert files == files_after == 50
    assert filled - fresh < 300 * 1024 * 1024
    assert after - filled < 20 * 1024 * 1024
    cache.clear()
    assert open_files(tmp_path) == 0


def open_files(directory: Path) -> int:
    """Descriptors of this process that refer to files in ``directory``."""
    return sum(str(directory) in os.readlink(f"/proc/self/fd/{each.name}") for each in descriptors())


def descriptors() -> list[Path]:
    return [each for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]


def test_decoder_in_use_stays_open_when_it_is_evicted(h264: Video, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(h264.data)
    cache: DecoderCache[Any] = DecoderCache(max_size=1)
    used = cache.get("a", functools.partial(decoder_on, tmp_path / "a"))
    cache.get("b", functools.partial(decoder_on, tmp_path / "b"))
    assert (cache.statistics().size, open_files(tmp_path)) == (1, 2)
    assert used.get_frame_at(3).data.shape[0] == 3
    del used
    assert open_files(tmp_path) == 1


def test_a_hit_gives_the_same_decoder_and_leaves_the_count() -> None:
    cache: DecoderCache[Decoder] = DecoderCache()
    first = cache.get("a", Decoder)
    assert cache.get("a", Decoder) is first
    now = cache.statistics()
    assert (now.size, now.hits, now.misses) == (1, 1, 1)


def test_failure_reaches_no_asker_after_its_key_was_discarded() -> None:
    cache: DecoderCache[Decoder] = DecoderCache()
    fails, began = threading.Event(), threading.Event()

    def fail() -> Decoder:
        began.set()
        assert fails.wait(LIMIT_SECONDS)
        raise OSError("of the old file")

    with ThreadPoolExecutor(1) as threads:
        old = threads.submit(cache.get, "file", fail)
        assert began.wait(LIMIT_SECONDS)
        cache.discard("file")
        fresh = cache.get("file", Decoder)
        fails.set()
        assert str(old.exception(LIMIT_SECONDS)) == "of the old file"
    assert cache.get("file", fail) is fresh
