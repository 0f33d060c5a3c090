"""What asyncio, threads and fork ask of us, without a word of what it is used for.

concurrently    calls side by side, the first error alone
single_flight   concurrent askers of one key share one execution
relay           one call for several tasks, in the task of one of them
shared_lru      values loaded once for all who ask, bounded by weight
leased_lru      entries that are bounded in bytes and never evicted while somebody uses them
memory_pool     blocks of bytes, used again when their last view is gone
heap            giving freed memory back to the system
sockets         every socket of an owner, so that none outlives it
thread_call     one blocking call in a thread, whose end can be awaited
call_on         a callback for a loop that may have ended
loop_thread     an event loop in a thread, for callers that aren't coroutines
channel         items from a loop to a blocking consumer
iterate         an async iterator as a plain one
loop_guard, fork, cancellation  belonging to one loop and one process; ending a block, telling cancellations apart
"""

from __future__ import annotations

from asyncfetch.runtime.iterate import iterate
from asyncfetch.runtime.loop_thread import LoopThread

__all__ = ["LoopThread", "iterate"]
