"""Tools for asyncio, threads and fork, independent of their use.

concurrently    calls side by side, the first error alone; copies of an error for several receivers
single_flight   one call for many callers, of tasks and of threads; cached values, bounded in bytes or in time
leased_lru      entries that are bounded in bytes and never evicted while in use
memory_pool     blocks of bytes, used again when their last view is gone; freed memory given back to the system
shared_memory   memory of several processes; slots of it that go round between two: views, or copies of too many
sockets         every socket of an owner, so that none outlives it
threads         calls from a loop into a thread, whose end can be awaited, and back; a thread's work time; the
                interpreter's exit
loop_thread     an event loop in a thread, for callers that aren't coroutines, and contexts open on it
channel         items from a loop to a blocking consumer; an async iterator as a plain one
fork            guards of one loop and one process
liveness        signs of life of a process that works for this one
cancellation    telling cancellations apart, outlasting one; many limits on time, with one timer
"""

from __future__ import annotations

from asyncfetch.runtime.channel import iterate
from asyncfetch.runtime.loop_thread import LoopThread

__all__ = ["LoopThread", "iterate"]
