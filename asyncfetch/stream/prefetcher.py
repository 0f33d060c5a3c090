"""The episodes that a pass draws from and those it needs next, in memory within a bound.

Episodes are admitted in the order of their first use. Each is weighed first (its video indexes tell how long its clips
are) and paid for before it is fetched, strictly in order: an episode needed later never takes the room of one needed
earlier, which is why a pass can't lock itself up. The room comes back when the order has no further use for an episode
and no decoding reads it any more.
"""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from asyncfetch.errors import CacheError, redact_url
from asyncfetch.fetch.limiter import Caller, calling
from asyncfetch.lerobot import PlanChange
from asyncfetch.observe.trace import running
from asyncfetch.observe.waits import Cause, Meter, WaitStep, metered
from asyncfetch.runtime.concurrently import copied, gather, kept

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from anyio.abc import TaskGroup

    from asyncfetch.lerobot import HeldEpisode
    from asyncfetch.stream.protocols import Origin, Readable

__all__ = ["EpisodePrefetcher"]

HEAD_START_SECONDS = 0.1
"""That the first episode, and decoding what is first of it, has alone, at most: where the episodes of a pool fill the
link or the processor together, the first sample would wait for the last of them. Where each stream is slow that is a
hundredth of the first ten seconds."""

EARLY_EPISODES = 64
"""That are loaded after that time, beside the first, until that is decoded. One dataset's epoch begins with fewer;
hundreds of members' at once would hold the loop for seconds, and the first sample with it."""


class _NoMoreEpisodes:
    """A mark after the last episode."""


_END = _NoMoreEpisodes()


class _Slot:
    """An admitted episode, from its weighing to its last use."""

    __slots__ = (
        "begun_at", "caller", "done", "done_at", "episode", "error", "finished", "granted", "granted_at", "held",
        "is_ahead", "is_short_of_room", "meter", "size_bytes", "users", "weighed_at",
    )  # fmt: skip

    def __init__(self, episode: int, behind: Caller) -> None:
        self.episode = episode
        self.meter = Meter()
        self.caller = Caller(urgent=False, behind=behind)
        self.begun_at = time.perf_counter()
        self.weighed_at: float | None = None
        self.granted_at: float | None = None
        self.done_at: float | None = None
        self.is_short_of_room = False
        self.size_bytes: int | None = None
        self.granted = anyio.Event()
        self.done = anyio.Event()
        self.held: HeldEpisode | None = None
        self.error: Exception | None = None
        self.is_ahead = True
        """True until its first use is announced."""
        self.users = 0
        self.finished = False

    def step(self, now: float) -> WaitStep:
        """Return what its life was, or is so far."""
        end = now if self.done_at is None else self.done_at
        room_seconds = 0.0
        if self.is_short_of_room and self.weighed_at is not None:
            room_seconds = (end if self.granted_at is None else self.granted_at) - self.weighed_at
        rest = max(0.0, end - self.begun_at - room_seconds)
        weights = self.meter.share(rest, now if self.done_at is None else None, otherwise=Cause.OPENING)
        weights[Cause.ROOM] = weights.get(Cause.ROOM, 0.0) + room_seconds
        return WaitStep(end, weights, self.episode)


class EpisodePrefetcher:
    """Fetches the episodes of one pass ahead of their use. Loop-bound; its tasks belong to the group it is given.

    Args:
        reader: What to read from, open.
        origin: Where an episode comes from.
        episodes: Episode indices, each once, in the order of their first use; None now and then where they are far
            apart, to let others have their turn.
        group: Owner of the fetching tasks; cancel it before ``close``.
        prefetch_episodes: Admitted ahead of the announcement of their first use. Those that come long after it would
            only take the network and the processor from the first ones.
        pool: Of the order: see EpisodeOrder.
        on_full: Called when the next episode has to wait for room.
        on_arrival: Called when one has come, or failed.
    """

    def __init__(
        self,
        reader: Readable,
        origin: Callable[[int], Origin],
        episodes: Iterable[int | None],
        group: TaskGroup,
        *,
        prefetch_episodes: int,
        pool: Callable[[], tuple[int, int]],
        on_full: Callable[[], None],
        on_arrival: Callable[[], None],
    ) -> None:
        self._reader = reader
        self._origin = origin
        self._episodes = iter(episodes)
        self._group = group
        self._prefetch_episodes = prefetch_episodes
        self._pool = functools.cache(pool)
        self._on_full, self._on_arrival = on_full, on_arrival
        self.coming = 0
        """Episodes admitted that aren't here yet."""
        self._weighed = self._weighed_bytes = self._weighed_frames = self._largest_bytes = self._largest = 0
        self._paid = reader.clip_budget.share(self._grant)
        self._slots: dict[int, _Slot] = {}
        self._ahead = 0  # of these
        self._unpaid: deque[_Slot] = deque()
        self._first: _Slot | None = None
        self._head_start_over = anyio.Event()
        self._early = 0  # that were loaded before that
        self._exhausted = False
        self._caller = Caller(urgent=False)
        self._freed = anyio.Event()
        group.start_soon(self._admit_ahead, name="admit episodes")

    def __contains__(self, episode: int) -> bool:
        """Return whether the episode is admitted and not yet let go of."""
        return episode in self._slots

    @property
    def open_episodes(self) -> int:
        """Episodes admitted and not yet let go of."""
        return len(self._slots)

    def end_head_start(self) -> None:
        """What is first of the first episode is decoded: the others may have the link and the processor, too."""
        self._head_start_over.set()

    def use(self, episode: int) -> None:
        """Announce a use of an episode; ``get`` it, then ``done`` with it. Admits it now if it isn't yet."""
        while episode not in self._slots and not self._exhausted:
            self._admit_next()
        slot = self._slots[episode]
        slot.users += 1
        if slot.is_ahead:
            slot.is_ahead = False
            self._ahead -= 1
            self._wake()

    async def get(self, episode: int) -> HeldEpisode:
        """The episode that ``use`` announced, as soon as it is in memory; or the error that its fetch ended with."""
        slot = self._slots[episode]
        if not slot.done.is_set():  # else it would still give the loop a turn, for each episode of a job
            await slot.done.wait()
        if slot.error is not None:
            raise copied(slot.error)
        assert slot.held is not None
        return slot.held

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The number of episodes that were weighed, what they weigh together and the heaviest does, and which it is."""
        return self._weighed, self._weighed_bytes, self._largest_bytes, self._largest

    def has(self, episode: int) -> bool:
        """Return whether ``get`` of the episode, which ``use`` announced, needs no wait."""
        return self._slots[episode].done.is_set()

    def steps(self, episode: int, now: float) -> list[WaitStep]:
        """Return what who waits for an episode waited for, or waits for. It may be called in any thread."""
        slot = self._slots.get(episode)
        return [] if slot is None else [slot.step(now)]

    def raise_priority(self, episode: int) -> None:
        """Somebody waits for the episode, which ``use`` announced: it is fetched before those that are read ahead."""
        slot = self._slots.get(episode)
        if slot is not None and not slot.done.is_set():
            slot.caller.raise_priority()
            self._reader.raise_priority(episode)

    def done(self, episode: int) -> None:
        """The use announced by ``use`` is over."""
        slot = self._slots[episode]
        slot.users -= 1
        self._let_go(slot)

    def finish(self, episode: int) -> None:
        """The order has no use for the episode after those announced."""
        slot = self._slots.get(episode)
        if slot is not None:
            slot.finished = True
            self._let_go(slot)

    def finish_all(self) -> None:
        """The order is through: it has no use for any episode after those announced."""
        self._exhausted = True
        self._wake()
        for episode in tuple(self._slots):
            self.finish(episode)

    async def drained_to(self, episodes: int) -> None:
        """Wait until the last episode is admitted and no more than so many are left."""
        while not self._exhausted or len(self._slots) > episodes:
            await self._freed.wait()

    def lacks_room_for(self, episode: int) -> CacheError | None:
        """Return why the episode waits, if it waits for room: an error to raise where nothing will give any back."""
        slot = self._slots[episode]
        if slot.granted.is_set() or slot.error is not None or not self._unpaid:
            return None
        first = self._unpaid[0]
        if first.size_bytes is None or self._paid.fits(first.size_bytes):
            return None
        return self._no_room(first.episode, first.size_bytes)

    def _no_room(self, episode: int, size_bytes: int) -> CacheError:
        budget, in_use = self._paid.budget, sum(1 for slot in self._slots.values() if slot.held is not None)
        others_bytes = budget.used_bytes - self._paid.used_bytes
        needed_bytes = budget.used_bytes + size_bytes
        max_bytes, origin = self._reader.config.max_bytes, self._origin(episode)
        # Clips have a fixed part of max_bytes. The longest may have more bytes a frame than those weighed so far, and
        # beside a full pool one may be needed before another is through: so a quarter more, and the largest again.
        pool_episodes, pool_frames = self._pool()
        pool_bytes = pool_frames * self._weighed_bytes * 5 // (4 * self._weighed_frames) + self._largest_bytes
        least_bytes = math.ceil(max(needed_bytes, others_bytes + pool_bytes) * max_bytes / budget.max_bytes)
        return CacheError(
            f"the clips of {in_use} episodes in the pool take {self._paid.used_bytes} bytes, "
            + (f"other passes over this dataset hold {others_bytes}, " if others_bytes else "")
            + f"and episode {origin.episode} of {redact_url(origin.dataset.url)} needs {size_bytes} more: "
            f"{needed_bytes} in all, but {max_bytes=} leaves {budget.max_bytes} for clips. By the {self._weighed} "
            f"episodes seen so far, a pool of {pool_episodes} needs about StreamConfig(max_bytes={least_bytes}), "
            "times the number of loader workers; or lower pool_episodes and lanes"
        )

    def close(self) -> None:
        """Let go of everything. The group's tasks must have ended."""
        for slot in self._slots.values():
            if slot.held is not None:
                slot.held.release()
        self._slots.clear()
        self._unpaid.clear()
        self._paid.close()

    async def _admit_ahead(self) -> None:
        while not self._exhausted:
            if self._ahead >= self._prefetch_episodes:
                await self._freed.wait()
            elif not self._admit_next():
                await anyio.lowlevel.checkpoint()  # others' turn: between two episodes there may be many steps

    def _admit_next(self) -> bool:
        """Admit an episode, or go a stretch towards it."""
        episode = next(self._episodes, _END)
        if episode is None:
            return False
        if isinstance(episode, _NoMoreEpisodes):
            self._exhausted = True
            self._wake()
            return True
        slot = self._slots[episode] = _Slot(episode, self._caller)
        self._first = self._first or slot
        self._ahead += 1
        self.coming += 1
        self._unpaid.append(slot)
        self._group.start_soon(self._load, slot, name=f"load episode {episode}")
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
                    functools.partial(self._reader.locate_rows, slot.episode),
                )
        except Exception as error:  # noqa: BLE001  raised by get(), at the episode's place in the order
            slot.error = kept(error)
            if not slot.granted.is_set():
                slot.size_bytes = 0
                self._grant()
        slot.done_at = time.perf_counter()
        if slot is self._first and slot.error is not None:
            self.end_head_start()
        if (tracer := running()) is not None:
            tracer.episode(slot.episode, slot.begun_at, slot.done_at, slot.step(slot.done_at).weights)
        self.coming -= 1
        slot.done.set()
        self._on_arrival()
        self._let_go(slot)

    async def _hold(self, slot: _Slot) -> None:
        while True:
            try:
                return await self._hold_as_planned(slot)
            except PlanChange:
                self._give_back(slot)

    async def _hold_as_planned(self, slot: _Slot) -> None:
        size_bytes = await self._reader.clip_bytes(slot.episode)
        slot.held = await self._reader.hold_common(slot.episode)
        if slot.held is not None:  # the rank's workers have room for it, which they count together
            slot.size_bytes = 0
            slot.granted.set()
            self._unpaid.remove(slot)
            self._grant()
            return
        self._weigh(slot.episode, size_bytes)
        slot.weighed_at = time.perf_counter()
        slot.size_bytes = size_bytes
        self._grant()
        await slot.granted.wait()
        slot.granted_at = time.perf_counter()
        slot.held = await self._reader.hold(slot.episode)

    def _give_back(self, slot: _Slot) -> None:
        """Admit an episode anew, at its place in the order: it weighs something else than was paid for."""
        if slot.granted.is_set():
            unpaid = {*self._unpaid, slot}
            self._unpaid = deque(one for one in self._slots.values() if one in unpaid)
            slot.granted, paid_bytes, slot.size_bytes = anyio.Event(), slot.size_bytes or 0, None
            self._paid.give(paid_bytes)

    def _weigh(self, episode: int, size_bytes: int) -> None:
        origin = self._origin(episode)
        self._weighed += 1
        self._weighed_bytes += size_bytes
        self._weighed_frames += origin.dataset.episodes[origin.episode].length
        if size_bytes > self._largest_bytes:
            self._largest_bytes, self._largest = size_bytes, episode
        if size_bytes > self._paid.budget.max_bytes:
            raise self._no_room(episode, size_bytes)

    def _grant(self) -> None:
        while self._unpaid and (first := self._unpaid[0]).size_bytes is not None:
            if not self._paid.fits(first.size_bytes):
                for slot in self._unpaid:
                    slot.is_short_of_room = True
                self._on_full()
                return
            self._unpaid.popleft()
            self._paid.take(first.size_bytes)
            first.granted.set()

    def _let_go(self, slot: _Slot) -> None:
        if not (slot.finished and slot.users == 0 and slot.done.is_set()):
            return
        if slot.held is not None:
            slot.held.release()
        del self._slots[slot.episode]
        self._ahead -= slot.is_ahead
        if slot.granted.is_set():
            self._paid.give(slot.size_bytes or 0)
        self._wake()

    def _wake(self) -> None:
        freed, self._freed = self._freed, anyio.Event()
        freed.set()
