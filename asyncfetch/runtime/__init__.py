"""Work that asyncio, threads and fork ask of us, without a word of what it is used for.

concurrently    calls side by side, the first error alone; an error that several get: each a copy
single_flight   calls of several who ask for the same, made once, of tasks and of threads; values that are kept, within
                a bound on bytes, or until they expire
leased_lru      entries that are bounded in bytes and never evicted while somebody uses them
memory_pool     blocks of bytes, used again when their last view is gone; freed memory given back to the system
shared_memory   memory of several processes, and slots of it that go round between two
sockets         every socket of an owner, so that none outlives it
threads         calls from a loop into a thread, whose end can be awaited, and back; the time that a thread had work;
                the interpreter's end, with threads about
loop_thread     an event loop in a thread, for callers that aren't coroutines, and what they keep open on it
channel         items from a loop to a blocking consumer; an async iterator as a plain one
fork            belonging to one loop and one process
liveness        signs of life of a process that works for this one
cancellation    ending a block, telling cancellations apart; many limits on time, with one timer
"""

from __future__ import annotations

from asyncfetch.runtime.channel import iterate
from asyncfetch.runtime.loop_thread import LoopThread

__all__ = ["LoopThread", "iterate"]
