"""The pieces that a pass draws from and those it needs next, in memory within a bound.

Episodes are admitted in the order of their first use. Each is weighed first (its video indexes tell how long its clips
are) and its room claimed before it is fetched, strictly in order: a piece needed later never takes the room of one
needed earlier, which is why a pass can't lock itself up. The room comes back when the order has no further use for a
piece and no decoding reads it any more.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from asyncfetch.errors import AsyncFetchError, CacheError, redact_url
from asyncfetch.fetch.limiter import Caller, calling
from asyncfetch.formats import PlanChange
from asyncfetch.observe.trace import running
from asyncfetch.observe.waits import Cause, Meter, WaitStep, metered
from asyncfetch.resources import PassShare
from asyncfetch.runtime.concurrently import copied, gather, kept

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from anyio.abc import TaskGroup

    from asyncfetch.formats import HeldStretch
    from asyncfetch.order.line import Piece
    from asyncfetch.stream.datasets import OpenDatasets, Origin

HEAD_START_SECONDS = 0.1
"""The longest time that the first piece, and decoding its first samples, has for itself: if all pieces of a pool filled
the link or the processor together, the first sample would wait for the last of them. With slow streams it is a
hundredth of the first ten seconds."""

EARLY_EPISODES = 64
"""Episodes that are loaded after that time, beside the first, until that is decoded. One dataset's epoch begins with
fewer; hundreds of members' at once would hold the loop for seconds, and the first sample with it."""


@dataclass(slots=True, eq=False)
class _Slot:
    """An admitted piece, from its weighing to its last use."""

    piece: Piece
    origin: Origin
    caller: Caller
    meter: Meter = field(default_factory=Meter)
    begun_at: float = field(default_factory=time.perf_counter)
    weighed_at: float | None = None
    granted_at: float | None = None
    done_at: float | None = None
    is_short_of_room: bool = False
    size_bytes: int | None = None
    granted: anyio.Event = field(default_factory=anyio.Event)
    done: anyio.Event = field(default_factory=anyio.Event)
    held: HeldStretch[Any] | None = None
    error: Exception | None = None
    is_ahead: bool = True
    """True until its first use is announced."""
    users: int = 0
    readers: int = 0
    """Users that have it, and haven't ended their use."""
    finished: bool = False

    def step(self, now: float) -> WaitStep:
        """Return its time so far, by cause."""
        end = now if self.done_at is None else self.done_at
        room_seconds = 0.0
        if self.is_short_of_room and self.weighed_at is not None:
            room_seconds = (end if self.granted_at is None else self.granted_at) - self.weighed_at
        rest = max(0.0, end - self.begun_at - room_seconds)
        weights = self.meter.share(rest, now if self.done_at is None else None, otherwise=Cause.OPENING)
        weights[Cause.ROOM] = weights.get(Cause.ROOM, 0.0) + room_seconds
        return WaitStep(end, weights, self.origin.episode)


class Prefetcher:
    """Fetches the pieces of one pass ahead of their use. Its tasks belong to ``group``: cancel that before ``close``.

    Args:
        opened, pool: What to read from, and the plan's pool.
        pieces: Each once, in the order of their first use; None now and then where they are far apart, to let others
            have their turn.
        group: Owner of the fetching tasks.
        prefetch_segments: Admitted ahead of the announcement of their first use. Those that come long after it would
            only take the network and the processor from the first ones.
        on_full: Called when the next piece has to wait for room.
        on_arrival: Called when one has come, or failed.
    """

    def __init__(
        self,
        opened: OpenDatasets,
        pieces: Iterable[Piece | None],
        group: TaskGroup,
        *,
        prefetch_segments: int,
        pool: Callable[[], tuple[int, int]],
        on_full: Callable[[], None],
        on_arrival: Callable[[], None],
    ) -> None:
        self._opened, self._group, self._prefetch_segments = opened, group, prefetch_segments
        self._pieces = iter(pieces)
        self._pool = functools.cache(pool)
        self._on_full, self._on_arrival = on_full, on_arrival
        self.coming = 0
        """Pieces admitted that aren't here yet."""
        self._weighed = self._weighed_bytes = self._weighed_frames = self._largest_bytes = self._largest = 0
        self._room = opened.engine.room
        self._share = PassShare(self._room, self._grant)
        self._slots: dict[Piece, _Slot] = {}
        self._ahead = 0  # of these
        self._unclaimed: deque[_Slot] = deque()
        self._first: _Slot | None = None
        self._head_start_over = anyio.Event()
        self._early = 0  # that were loaded before that
        self._exhausted = False
        self._caller = Caller(urgent=False)
        self._freed = anyio.Event()
        group.start_soon(self._admit_ahead, name="admit pieces")

    def __contains__(self, piece: Piece) -> bool:
        """Return whether the piece is admitted and not yet let go of."""
        return piece in self._slots

    @property
    def open_pieces(self) -> int:
        """Episodes admitted and not yet let go of."""
        return len(self._slots)

    def end_head_start(self) -> None:
        """Give the link and the processor to the other pieces, too: the first samples of the first one are decoded."""
        self._head_start_over.set()

    def use(self, piece: Piece) -> None:
        """Announce a use of a piece; ``get`` it, then ``done`` with it. Admits it now if it isn't yet."""
        while piece not in self._slots and not self._exhausted:
            self._admit_next()
        slot = self._slots[piece]
        slot.users += 1
        if slot.is_ahead:
            slot.is_ahead = False
            self._ahead -= 1
            self._wake()

    async def get(self, piece: Piece) -> HeldStretch[Any]:
        """Return the piece that ``use`` announced, as soon as it is in memory. Raises the error of its fetch."""
        slot = self._slots[piece]
        while not slot.done.is_set():  # else it would still give the loop a turn, for each piece of a job
            await slot.done.wait()
        if slot.error is not None:
            raise copied(slot.error)
        assert slot.held is not None
        slot.readers += 1
        return slot.held

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The number of pieces that were weighed, what they weigh together and the heaviest does, and its episode."""
        return self._weighed, self._weighed_bytes, self._largest_bytes, self._largest

    def has(self, piece: Piece) -> bool:
        """Return whether ``get`` of the piece, which ``use`` announced, needs no wait."""
        return self._slots[piece].done.is_set()

    def steps(self, piece: Piece, now: float) -> list[WaitStep]:
        """Return the steps that a waiter for a piece waited for, or waits for. It may be called in any thread."""
        slot = self._slots.get(piece)
        return [] if slot is None else [slot.step(now)]

    def raise_priority(self, piece: Piece) -> None:
        """Fetch a piece, which ``use`` announced, before those that are read ahead."""
        slot = self._slots.get(piece)
        if slot is not None and not slot.done.is_set():
            slot.caller.raise_priority()
            slot.origin.reader.raise_priority(slot.origin.stretch)

    def done(self, piece: Piece) -> None:
        """End a use that ``use`` announced."""
        slot = self._slots[piece]
        slot.users -= 1
        slot.readers -= slot.error is None
        self._let_go(slot)

    def finish(self, piece: Piece) -> None:
        """Note that the order has no use for the piece after those announced."""
        slot = self._slots.get(piece)
        if slot is not None:
            slot.finished = True
            self._let_go(slot)

    def finish_all(self) -> None:
        """Note that the order has no use for any piece after those announced."""
        self._exhausted = True
        self._wake()
        for piece in tuple(self._slots):
            self.finish(piece)

    async def drained_to(self, pieces: int) -> None:
        """Wait until the last episode is admitted and no more than so many are left."""
        while not self._exhausted or len(self._slots) > pieces:
            await self._freed.wait()

    def lacks_room_for(self, piece: Piece) -> CacheError | None:
        """Return the error to raise if the piece waits for room and none will come back; None if it doesn't."""
        slot = self._slots[piece]
        if slot.granted.is_set() or slot.error is not None or not self._unclaimed:
            return None
        first = self._unclaimed[0]
        if first.size_bytes is None or self._room.fits_beside_passes(first.size_bytes):
            return None
        if any(slot.held is not None and not slot.done.is_set() for slot in self._slots.values()):
            return None  # once it is there, it may be taken back
        return self._no_room(first.origin, first.size_bytes)

    def _no_room(self, origin: Origin, size_bytes: int) -> CacheError:
        used_bytes, in_use = self._share.used_bytes, sum(1 for slot in self._slots.values() if slot.held is not None)
        others_bytes = max(0, self._room.pass_bytes - used_bytes)
        needed_bytes = used_bytes + others_bytes + size_bytes
        memory, words = self._opened.engine.memory, origin.reader.words
        # The longest clip may have more bytes a frame than those weighed so far, and
        # beside a full pool one may be needed before another is through: so a quarter more, and the largest again.
        pool_segments, pool_frames = self._pool()
        pool_bytes = pool_frames * self._weighed_bytes * 5 // (4 * self._weighed_frames) + self._largest_bytes
        least_bytes = memory.max_bytes_for_clips(max(needed_bytes, others_bytes + pool_bytes))
        return CacheError(
            f"the {words.ranges} of {in_use} segments in the pool take {used_bytes} bytes, "
            + (f"other passes over this dataset hold {others_bytes}, " if others_bytes else "")
            + f"and {words.samples} [{origin.stretch.start}, {origin.stretch.stop}) of {words.entry} {origin.episode} "
            f"of {redact_url(origin.dataset.url)} need {size_bytes} more: "
            f"{needed_bytes} in all, but max_bytes={memory.max_bytes} leaves {memory.clips_bytes} for {words.ranges}. "
            f"By the {self._weighed} segments seen so far, a pool of {pool_segments} needs about "
            f"StreamConfig(max_bytes={least_bytes}); or lower pool_segments or segment_seconds"
        )

    def close(self) -> None:
        """Let go of everything. The group's tasks must have ended."""
        self._unclaimed.clear()
        for slot in self._slots.values():
            if slot.held is not None:
                slot.held.release()
        self._slots.clear()
        self._share.close()

    async def _admit_ahead(self) -> None:
        while not self._exhausted:
            if self._ahead >= self._prefetch_segments:
                await self._freed.wait()
            elif not self._admit_next():
                await anyio.lowlevel.checkpoint()  # others' turn: between two pieces there may be many steps

    def _admit_next(self) -> bool:
        """Admit a piece, or go a stretch towards it."""
        try:
            piece = next(self._pieces)
        except StopIteration:
            self._exhausted = True
            self._wake()
            return True
        if piece is None:
            return False
        slot = self._slots[piece] = _Slot(piece, self._opened.origin(piece), Caller(urgent=False, behind=self._caller))
        self._first = self._first or slot
        self._ahead += 1
        self.coming += 1
        self._unclaimed.append(slot)
        self._group.start_soon(self._load, slot, name=f"load a piece of episode {slot.origin.episode}")
        return True

    async def _load(self, slot: _Slot) -> None:
        try:
            if slot is not self._first and not self._head_start_over.is_set():
                with anyio.move_on_after(HEAD_START_SECONDS):
                    await self._head_start_over.wait()
                if self._early >= EARLY_EPISODES:
                    await self._head_start_over.wait()
                self._early += 1
            slot.begun_at = time.perf_counter()
            with calling(slot.caller), metered(slot.meter):
                await gather(
                    functools.partial(self._hold, slot),
                    functools.partial(slot.origin.reader.locate_beside, slot.origin.stretch),
                )
        except Exception as error:  # noqa: BLE001  raised by get(), at the piece's place in the order
            slot.error = kept(error)
            self._give_back(slot)
            if not slot.granted.is_set():
                slot.size_bytes = 0
                self._grant()
        slot.done_at = time.perf_counter()
        if slot is self._first and slot.error is not None:
            self.end_head_start()
        if (tracer := running()) is not None:
            tracer.episode(slot.origin.episode, slot.begun_at, slot.done_at, slot.step(slot.done_at).weights)
        self.coming -= 1
        slot.done.set()
        self._on_arrival()
        self._let_go(slot)
        self._grant()  # where one that is needed before waits, it may take this one's room

    async def _hold(self, slot: _Slot) -> None:
        while True:
            try:
                return await self._hold_as_planned(slot)
            except PlanChange:
                self._await_turn(slot)

    async def _hold_as_planned(self, slot: _Slot) -> None:
        reader, stretch = slot.origin.reader, slot.origin.stretch
        size_bytes = await reader.clip_bytes(stretch)
        held = await reader.hold_common(stretch)
        if held is not None:  # the rank's workers have room for it, which they count together
            slot.held, slot.size_bytes = held, 0
            slot.granted.set()
            self._unclaimed.remove(slot)
            self._grant()
            return
        self._weigh(slot.origin, size_bytes)
        slot.weighed_at = time.perf_counter()
        slot.size_bytes = size_bytes
        self._grant()
        await slot.granted.wait()
        slot.granted_at = time.perf_counter()
        if slot.error is not None:
            raise copied(slot.error)
        assert slot.held is not None
        await reader.load(slot.held)

    def _await_turn(self, slot: _Slot) -> None:
        """Take a piece's room, for which it waits anew at its place in the order."""
        held = self._take_from(slot)
        if slot.granted.is_set():
            unclaimed = {*self._unclaimed, slot}
            self._unclaimed = deque(one for one in self._slots.values() if one in unclaimed)
            slot.granted, slot.size_bytes = anyio.Event(), None
        if held is not None:  # last: its room else goes to pieces that are needed later
            held.release()

    def _take_room_for(self, first: _Slot) -> bool:
        """Take back the last piece that nothing reads and that comes after ``first``; False if there is none.

        Such pieces hold room only where the clips of ``first`` turned out to weigh more than it had claimed.
        """
        for slot in reversed(self._slots.values()):
            if slot is first:
                return False
            if slot.held is not None and slot.size_bytes and slot.done.is_set() and not slot.readers:
                self._await_turn(slot)
                slot.done, slot.done_at = anyio.Event(), None
                self.coming += 1
                self._group.start_soon(self._load, slot, name=f"load a piece of episode {slot.origin.episode} again")
                return True
        return False

    def _give_back(self, slot: _Slot) -> None:
        if (held := self._take_from(slot)) is not None:
            held.release()

    def _take_from(self, slot: _Slot) -> HeldStretch[Any] | None:
        held, slot.held = slot.held, None
        if held is not None:
            self._share.used_bytes -= slot.size_bytes or 0
        return held

    def _weigh(self, origin: Origin, size_bytes: int) -> None:
        self._weighed += 1
        self._weighed_bytes += size_bytes
        self._weighed_frames += origin.stretch.stop - origin.stretch.start
        if size_bytes > self._largest_bytes:
            self._largest_bytes, self._largest = size_bytes, origin.episode
        if size_bytes > self._room.max_bytes:
            raise self._no_room(origin, size_bytes)

    def _grant(self) -> None:
        """Claim the pieces in their order, as far as there is room."""
        self._share.wanted_bytes = 0  # else each claim would call back here
        wanted_bytes = 0
        while self._unclaimed and (first := self._unclaimed[0]).size_bytes is not None:
            if first.held is None and first.error is None:
                try:
                    first.held = first.origin.reader.claim(first.origin.stretch, first.size_bytes)
                except AsyncFetchError as error:  # the dataset was closed; raised where the piece waits
                    first.error = kept(error)
                    first.granted.set()
                    self._unclaimed.popleft()
                    continue
                if first.held is None:
                    if self._take_room_for(first):
                        continue
                    wanted_bytes = first.size_bytes
                    for slot in self._unclaimed:
                        slot.is_short_of_room = True
                    self._on_full()
                    break
                self._share.used_bytes += first.size_bytes
            self._unclaimed.popleft()
            first.granted.set()
        self._share.want(wanted_bytes)

    def _let_go(self, slot: _Slot) -> None:
        if not (slot.finished and slot.users == 0 and slot.done.is_set()):
            return
        del self._slots[slot.piece]
        self._ahead -= slot.is_ahead
        self._give_back(slot)
        self._wake()

    def _wake(self) -> None:
        freed, self._freed = self._freed, anyio.Event()
        freed.set()
