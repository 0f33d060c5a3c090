"""Every interleaving of what handles and threads do, one step at a time, in one thread.

All that threads share changes between the steps of a read (``_size``, ``_read``, ``_write``) and within the calls of a
handle, so a machine that takes these in any order goes through what threads can do, and always through the same for the
same example.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncfetch.cache.staging import DecodingStore, Lazy
from asyncfetch.cache.staging.directory import StagedFile, StagingDirectory
from asyncfetch.cache.staging.engine import StagingEngine, StagingRoom
from asyncfetch.cache.staging.lazy import StagedLazy
from asyncfetch.cache.staging.stores import Binding, StoredFile, ValueStore
from asyncfetch.errors import CacheError
from tests.cache.staging.conftest import GatedStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from asyncfetch.cache.staging import FileStore
    from asyncfetch.cache.staging.engine import StagedEntry, StagingClaim

FILES = {"empty": b"", "small": b"s", "medium": b"m" * 4, "large": b"l" * 9, "full": b"f" * 16, "huge": b"h" * 17}
NAMES = st.sampled_from(sorted(FILES))
EVENTS = ["nothing"] * 6 + ["break", "mend", "mend", "fill the disk", "empty the disk", "empty the disk", "fork"]
MOVES = ["get", "get", "get", "wake", "hire", "hire", "hire", "step", "step", "step", "step", "step"]
MAX_BYTES, MAX_COUNT, WORKERS = 16, 4, 2


class Disk(StagingDirectory):
    """A directory whose next writes can fail."""

    fails = False

    def write(self, stored: StoredFile) -> StagedFile:
        if self.fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(stored)


class SteppedEngine(StagingEngine):
    """An engine without threads."""

    def __init__(self, parent: str) -> None:
        self.disk = Disk(parent)
        self.clock = 0.0
        super().__init__(self.disk, StagingRoom(MAX_BYTES, MAX_COUNT), WORKERS, now=lambda: self.clock)

    def _open(self) -> None:
        pass

    def _hire(self) -> None:
        return None


class Interleavings(RuleBasedStateMachine):
    """Handles and threads of one pool, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.parent = tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        self.handles: list[Lazy[Any]] = []
        self.waits: list[tuple[Lazy[Any], Future[StoredFile]]] = []
        self.steps: list[tuple[StagedEntry, Callable[[], Any]]] = []
        self.broken: set[str] = set()

    @initialize(sized=st.booleans(), closes=st.booleans())
    def begin(self, sized: bool, closes: bool) -> None:
        self.closes = closes
        self.store = GatedStore(FILES, sized=sized)
        self.decoding = DecodingStore(self.store, lambda raw, name: (name, raw))
        self.engine = SteppedEngine(self.parent)

    # Handles.

    @rule(names=st.lists(NAMES, min_size=1, max_size=4), count=st.integers(1, 3), decoded=st.booleans())
    def request(self, names: list[str], count: int, decoded: bool) -> None:
        store: FileStore[Any] = self.decoding if decoded else self.store
        for name in names * count:
            self.add(Binding(store, name, "raw"))

    @rule(size=st.integers(0, 8))
    def put(self, size: int) -> None:
        store = ValueStore("v" * size, "value")
        binding = Binding(store, "v" * size, "raw")
        self.add(binding, self.engine.adopt(binding, store))

    def add(self, binding: Binding, claim: StagingClaim | None = None) -> None:
        claim = claim or self.engine.request(binding)
        self.handles.append(StagedLazy(self, binding, claim, lambda: self.engine, timeout_seconds=None))

    def advance(self, lazy: Lazy[Any]) -> None:
        try:
            flight = lazy._advance()
        except ZeroDivisionError:
            assert lazy.name in self.broken
            self.forget(lazy)
            return
        if flight is not None:
            self.waits.append((lazy, flight))
            return
        value = lazy.get()
        right: Any = lazy.name if lazy.store is None else FILES[lazy.name]
        assert value == ((lazy.name, right) if lazy.store is self.decoding else right)
        self.forget(lazy)

    @precondition(lambda self: self.handles)
    @rule(number=st.integers(0, 99), drains=st.booleans())
    def drop(self, number: int, drains: bool) -> None:
        self.forget(self.handles[number % len(self.handles)])
        if drains:
            self.engine.drain()

    def forget(self, lazy: Lazy[Any]) -> None:
        self.handles = [each for each in self.handles if each is not lazy]
        self.waits = [each for each in self.waits if each[0] is not lazy]

    def wake(self) -> None:
        """Who waited for a read that ended goes on."""
        for lazy, flight in tuple(self.waits):
            if flight.done() and any(each is lazy for each in self.handles):
                self.waits = [each for each in self.waits if each[0] is not lazy]
                self.advance(lazy)

    # Threads.

    @precondition(lambda self: self.handles or self.steps)
    @rule(moves=st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 99)), min_size=4, max_size=20))
    def go_on(self, moves: list[tuple[str, int]]) -> None:
        """Getters and threads, by turns."""
        for what, number in moves:
            if what == "get" and self.handles:
                self.advance(self.handles[number % len(self.handles)])
            elif what == "wake":
                self.wake()
            elif what == "hire":
                self.hire()
            elif what == "step" and self.steps:
                self.step(number % len(self.steps))
            self.room_is_accounted_for_and_within_the_bounds()
            self.at_rest_room_is_files()

    def hire(self) -> None:
        """A worker takes something, or somebody who waits gets a thread of their own."""
        entry = self.engine._take(urgent_only=len(self.steps) >= WORKERS)
        if entry is not None:
            assert entry.file is None
            assert all(other.binding.key != entry.binding.key for other, _ in self.steps), "one read at a time"
            self.steps.append((entry, partial(self.engine._size, entry)))

    def step(self, index: int) -> None:
        entry, step = self.steps.pop(index)
        reads, in_hands = len(self.store.reads), self.is_in_hands(entry)
        following = step()
        if following is not None:
            self.steps.insert(index, (entry, following))
        if len(self.store.reads) > reads:
            assert not in_hands, "nothing is read whose bytes somebody has"
            self.check_given_up(entry, following)

    def is_in_hands(self, entry: StagedEntry) -> bool:
        """Whether its bytes were read for somebody who hasn't picked up the value yet."""
        return any(
            flight.done() and flight.exception() is None and claim is not None and claim.entry is entry
            for lazy, flight in self.waits
            if (claim := getattr(lazy, "_claim", None)) is not None
        )

    def check_given_up(self, entry: StagedEntry, following: Callable[[], Any] | None) -> None:
        """What was just read goes to the disk, unless nobody is left, it failed, or there is no room for it."""
        engine = self.engine
        if following is None and entry.references and not entry.has_failed and not engine.is_closed:
            assert engine._is_paused or not engine._room.fits(len(FILES[entry.binding.name]))

    # The world.

    @rule(what=st.sampled_from(EVENTS), name=NAMES)
    def happen(self, what: str, name: str) -> None:
        match what:
            case "break":
                self.store.errors[name] = ZeroDivisionError(name)
                self.broken.add(name)
            case "mend":
                self.store.errors.clear()
            case "fill the disk" | "empty the disk":
                self.engine.disk.fails = what == "fill the disk"
                self.engine.clock += 60
            case "fork":
                self.fork()

    def fork(self) -> None:
        """This goes on as the child, which has the handles and none of the threads."""
        self.engine.disk.close()
        self.engine = SteppedEngine(self.parent)
        self.steps = []
        self.waits = []
        self.handles = [lazy for lazy in self.handles if lazy.store is not None]

    @precondition(lambda self: self.at_rest() and any(True for _ in self.on_disk()))
    @rule(number=st.integers(0, 99), truncates=st.booleans())
    def damage(self, number: int, truncates: bool) -> None:
        files = sorted(self.on_disk(), key=lambda each: each.name)
        file = files[number % len(files)]
        if any(lazy.store is None for lazy in self.handles):
            return  # a value given to to_cache is nowhere else
        if truncates and file.stat().st_size:
            os.truncate(file.path, 0)
        else:
            os.unlink(file.path)
        for entry in self.entries():  # put it back, so that disk and figures agree again
            self.advance_all_of(entry)

    def advance_all_of(self, entry: StagedEntry) -> None:
        if entry.file is not None and entry.file.read() is None:
            for lazy in tuple(self.handles):
                claim = getattr(lazy, "_claim", None)
                if claim is not None and claim.is_held and claim.entry is entry:
                    self.advance(lazy)
                    return

    # What always holds.

    def entries(self) -> list[StagedEntry]:
        """Those that somebody refers to, and those that a thread is still at."""
        known = dict.fromkeys([*self.engine._entries.values(), *(entry for entry, _ in self.steps)])
        return list(known)

    def on_disk(self) -> list[os.DirEntry[str]]:
        path = self.engine.disk.path
        return list(os.scandir(path)) if path else []

    def at_rest(self) -> bool:
        return not self.steps and self.engine.dropped.empty()

    @invariant()
    def room_is_accounted_for_and_within_the_bounds(self) -> None:
        room = self.engine._room
        taken = [entry.room_bytes for entry in self.entries() if entry.room_bytes is not None]
        assert (sum(taken), len(taken)) == (room.bytes, room.count)
        assert room.bytes <= MAX_BYTES
        assert room.count <= MAX_COUNT
        assert sum(file.stat().st_size for file in self.on_disk()) <= room.bytes

    @invariant()
    def at_rest_room_is_files(self) -> None:
        if self.at_rest():
            staged = [entry for entry in self.entries() if entry.file is not None]
            files = self.on_disk()
            assert len(staged) == len(files) == self.engine._room.count
            assert sum(file.stat().st_size for file in files) == self.engine._room.bytes

    @invariant()
    def nothing_that_fits_is_left_lying(self) -> None:
        engine = self.engine
        if self.at_rest() and engine._first() is None and not engine._is_paused:
            assert not engine._later or engine._next or engine._room.count == MAX_COUNT

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            shutil.rmtree(self.parent)
            return
        if self.closes:
            self.engine.close(0)
        # Whoever waits gets an answer from the threads that serve those who wait, without a single worker.
        rounds = 0
        while self.waits or self.engine._urgent:
            rounds += 1
            assert rounds < 100, f"{self.waits} wait for nothing"
            while (entry := self.engine._take(urgent_only=True)) is not None:
                self.steps.append((entry, partial(self.engine._size, entry)))
            while self.steps:
                self.step(0)
            self.wake()
        while self.steps:
            self.step(0)
        if self.closes:
            self.get_what_a_closed_pool_gave()
        # With no handles there is nothing.
        self.handles.clear()
        self.engine.drain()
        figures = self.engine.figures()
        assert (figures["entries"], figures["bytes"], figures["count"], self.on_disk()) == (0, 0, 0, [])
        assert self.engine._first() is None
        self.engine.disk.close()
        assert os.listdir(self.parent) == []
        os.rmdir(self.parent)

    def get_what_a_closed_pool_gave(self) -> None:
        for lazy in tuple(self.handles):
            try:
                self.advance(lazy)
            except CacheError:
                assert lazy.store is None
        assert not self.waits


TestInterleavings = pytest.mark.slow(Interleavings.TestCase)  # 120 examples, on a busy machine
TestInterleavings.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("has_room", [True, False])
def test_shared_file_is_read_once_in_every_interleaving(has_room: bool) -> None:
    """All orders of what two handles and the threads do, one after another: the machine sees what is read twice."""
    order: list[tuple[int, int]] = []  # of each choice, which one was taken, and of how many
    orders = 0
    while order or not orders:
        reads = go_through(order, has_room)
        assert reads == 1 if has_room else reads <= 2
        orders += 1
        while order and order[-1][0] + 1 == order[-1][1]:
            order.pop()
        if order:
            order[-1] = order[-1][0] + 1, order[-1][1]
    assert orders > 20


def go_through(order: list[tuple[int, int]], has_room: bool) -> int:
    """Take these choices, and after them always the first, which is added to them. Returns how often it was read."""
    machine = Interleavings()
    machine.begin(sized=True, closes=False)
    if not has_room:
        machine.request(["full"], 1, decoded=False)
        machine.go_on([("hire", 0), ("step", 0), ("step", 0), ("step", 0)])
    held, machine.handles = machine.handles, []
    machine.request(["medium"], 2, decoded=False)
    choices = 0
    while moves := moves_of(machine):
        if choices == len(order):
            order.append((0, len(moves)))
        taken, count = order[choices]
        assert count == len(moves)
        moves[taken]()
        choices += 1
    assert not machine.handles
    machine.handles = held
    machine.teardown()
    return machine.store.reads.count("medium")


def moves_of(machine: Interleavings) -> list[Callable[[], object]]:
    """What can happen now."""
    waiting = [lazy for lazy, _ in machine.waits]
    gets = [lazy for lazy in machine.handles if not any(lazy is each for each in waiting)]
    awake = [lazy for lazy, flight in machine.waits if flight.done()]
    moves: list[Callable[[], object]] = [partial(machine.advance, lazy) for lazy in [*gets, *awake]]
    moves += [partial(machine.step, number) for number in range(len(machine.steps))]
    if machine.engine._first(urgent_only=len(machine.steps) >= WORKERS) is not None:
        moves.append(machine.hire)
    return moves
