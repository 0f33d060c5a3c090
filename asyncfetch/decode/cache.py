"""Open decoders, kept for the next frame of the same video, bounded in number and in bytes.

The cache owns decoders by reference only. It never closes one: it lets go of it, and a thread that decodes with it then
keeps it alive. A decoder must free its memory and files with its last reference, as ours and torchcodec's do.

The lock guards dictionaries and numbers only: opening and freeing happen outside it. No SharedLRU: its waiters need a
loop.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import TYPE_CHECKING, Final, Generic, Literal, TypeVar

from asyncfetch.config.checks import whole_number
from asyncfetch.errors import ClosedError, ConfigError
from asyncfetch.observe import Figures
from asyncfetch.runtime.memory_pool import trim_heap
from asyncfetch.runtime.single_flight import SharedFuture

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

DecoderT = TypeVar("DecoderT")

MIB = 1024 * 1024
SIZE_VARIABLE = "ASYNCFETCH_DECODER_CACHE_SIZE"
DEFAULT_SIZE = 100
"""LeRobot's default too; at 640x480 about 300 MiB."""
DEFAULT_BYTES = 512 * MIB
"""A quarter of the memory that a stream may use."""

TRIM_SHARE = 8
"""Part of the bound on bytes that may be let go of between two trims of the heap: about what it left behind.

A trim takes 6-8 ms of a decode thread and, after it, as much again or more: of decoded frames that were freed some 70
MiB of a stream's default bound go, too, and their pages are asked for anew. In a stream of 320x240 a trim every 8
decoders took a twentieth of all decoding. While a stream fills its pool nothing is let go of."""
TRIM_LEAST_BYTES = 16 * MIB
"""Least bytes of such a share: workers that divide a bound are to trim no more often than this."""
DECODER_LEAST_BYTES = 2 * MIB
"""Bytes that each counts for: what a small one takes beside its pictures isn't in its estimate. With 160x128 AV1
resident memory goes up and down by 7 MiB with a trim every 8 decoders, by 28 with one every 32."""


class _Unset(Enum):
    UNSET = "unset"

    def __repr__(self) -> str:
        return "<the environment's, or else 100>"


_UNSET: Final = _Unset.UNSET


@dataclass(frozen=True, slots=True, repr=False)
class DecoderCacheStatistics(Figures):
    """A snapshot; the counters run from the cache's making, in this process."""

    _telling = ("size", "hits", "misses", "evictions")
    _of_moment = ("size", "nbytes", "max_size", "max_bytes")

    size: int
    """Decoders held."""
    nbytes: int
    """Bytes that they say they take."""
    max_size: int | None
    max_bytes: int | None
    hits: int
    """Calls that found a decoder, or one being opened by another thread."""
    misses: int
    """Calls that opened one, or tried to."""
    evictions: int
    """Decoders let go of to keep the bounds."""


@dataclass(slots=True)
class _State(Generic[DecoderT]):
    """All that changes; each process has its own."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    held: OrderedDict[Hashable, tuple[DecoderT, int]] = field(default_factory=OrderedDict)
    """Decoders with their bytes; the least recently used comes first."""
    opening: dict[Hashable, SharedFuture[DecoderT]] = field(default_factory=dict)
    nbytes: int = 0
    let_go_bytes: int = 0
    """Bytes let go since the heap was trimmed."""
    hits: int = 0
    misses: int = 0
    evictions: int = 0

    def count_let_go(self, nbytes: int) -> None:
        self.let_go_bytes += max(nbytes, DECODER_LEAST_BYTES)


class DecoderCache(Generic[DecoderT]):
    """Least recently used decoders go first. Safe to use from any thread.

    Decoders evicted while in use are outside the bounds until they are let go of: at most one a thread that decodes.

    After a fork the child starts empty. The parent's decoders stay untouched in its memory, which it shares: freeing
    them could wait for a thread that wasn't copied.

    Args:
        max_size: Most decoders held; None lifts this bound. Left out, it is ASYNCFETCH_DECODER_CACHE_SIZE, or else 100.
        max_bytes: Most bytes held, by what the decoders' ``nbytes`` says when they are opened, 0 where they have none;
            None lifts this bound. A decoder larger than this is handed out, but not kept.

    Raises:
        ConfigError: A bound below 1, or an environment variable that isn't a number from 1 on.
    """

    def __init__(
        self, max_size: int | Literal[_Unset.UNSET] | None = _UNSET, max_bytes: int | None = DEFAULT_BYTES
    ) -> None:
        self._max_size = _size_from_environment() if max_size is _UNSET else _bound("max_size", max_size)
        self._max_bytes = _bound("max_bytes", max_bytes)
        self._trim_bytes = max(TRIM_LEAST_BYTES, (max_bytes or DEFAULT_BYTES) // TRIM_SHARE)
        self._closed = False
        # By process, so that a child finds nothing of its parent's, a lock held at the fork included; adding to a
        # dictionary is atomic.
        self._states: dict[int, _State[DecoderT]] = {}

    def allow(self, size: int) -> None:
        """Let so many decoders be held, where fewer were allowed."""
        self._max_size = max(self._max_size, size)

    def get(self, key: Hashable, open: Callable[[], DecoderT]) -> DecoderT:  # noqa: A002 - the word for it
        """The decoder of ``key``; ``open`` makes it where there is none.

        Threads that ask for one key at a time share one call of ``open``, its error too; the next call tries again.
        Different keys open in parallel. ``open`` must not ask for its own key.

        Raises:
            ClosedError: The cache was closed.
            Exception: What ``open`` raises.
        """
        state = self._state()
        with state.lock:
            if self._closed:
                raise ClosedError("the decoder cache was closed; make a new one")
            if (found := state.held.get(key)) is not None:
                state.held.move_to_end(key)
                state.hits += 1
                return found[0]
            mine: SharedFuture[DecoderT] = SharedFuture()
            opened = state.opening.setdefault(key, mine)
            state.hits += opened is not mine
            state.misses += opened is mine
        return self._open(state, key, open, mine) if opened is mine else opened.result()

    def _open(
        self,
        state: _State[DecoderT],
        key: Hashable,
        open: Callable[[], DecoderT],  # noqa: A002
        opened: SharedFuture[DecoderT],
    ) -> DecoderT:
        try:
            decoder = open()
            nbytes = int(getattr(decoder, "nbytes", 0))
        except BaseException as error:
            with state.lock:
                _forget(state, key, opened)
            opened.fail(error)
            raise
        evicted = []
        with state.lock:
            if _forget(state, key, opened) and nbytes <= self._max_bytes:
                state.held[key] = decoder, nbytes
                state.nbytes += nbytes
            else:
                state.count_let_go(nbytes)
            while len(state.held) > self._max_size or state.nbytes > self._max_bytes:
                _, (oldest, freed) = state.held.popitem(last=False)
                state.nbytes -= freed
                state.evictions += 1
                state.count_let_go(freed)
                evicted.append(oldest)
            trims = state.let_go_bytes >= self._trim_bytes
            if trims:  # here and not in discard, because that is called on loops, too
                state.let_go_bytes = 0
        opened.set_result(decoder)
        del evicted  # here, outside the lock, they are freed
        if trims:
            trim_heap()
        return decoder

    def discard(self, key: Hashable) -> None:
        """Let go of the decoder of ``key``, if there is one. One being opened goes to its callers, but isn't kept."""
        state = self._state()
        with state.lock:
            state.opening.pop(key, None)
            entry = state.held.pop(key, None)
            if entry is not None:
                state.nbytes -= entry[1]
                state.count_let_go(entry[1])
        del entry

    def clear(self) -> None:
        """Let go of all decoders; those being opened go to their callers, but aren't kept."""
        state = self._state()
        with state.lock:
            keys = [*state.held, *state.opening]
        for key in keys:
            self.discard(key)

    def close(self) -> None:
        """Clear, and refuse from now on. Idempotent."""
        self._closed = True
        self.clear()

    def statistics(self) -> DecoderCacheStatistics:
        """A snapshot, of this process."""
        state = self._state()
        with state.lock:
            return DecoderCacheStatistics(
                size=len(state.held),
                nbytes=state.nbytes,
                max_size=_finite(self._max_size),
                max_bytes=_finite(self._max_bytes),
                hits=state.hits,
                misses=state.misses,
                evictions=state.evictions,
            )

    def _state(self) -> _State[DecoderT]:
        process = os.getpid()
        return self._states.get(process) or self._states.setdefault(process, _State())

    def __repr__(self) -> str:
        now = self.statistics()
        closed = " closed" if self._closed else ""
        return f"<DecoderCache{closed} {now.size}/{now.max_size} decoders, {now.nbytes}/{now.max_bytes} bytes>"


def _forget(state: _State[DecoderT], key: Hashable, opened: SharedFuture[DecoderT]) -> bool:
    """End an opening; False if discard, clear or close did, and the decoder isn't to be kept."""
    is_awaited = state.opening.get(key) is opened
    if is_awaited:
        del state.opening[key]
    return is_awaited


def _bound(name: str, bound: int | None) -> float:
    return inf if bound is None else whole_number(f"{name} of a decoder cache, which may be None,", bound, least=1)


def _finite(bound: float) -> int | None:
    return None if bound == inf else int(bound)


def _size_from_environment() -> int:
    text = os.environ.get(SIZE_VARIABLE, str(DEFAULT_SIZE))
    with suppress(ValueError):
        if (size := int(text)) >= 1:
            return size
    raise ConfigError(f"{SIZE_VARIABLE} must be a whole number from 1 on, not {text!r}")
