"""What asyncio, threads and fork ask for. No domain word.

- ``single_flight``: concurrent callers of one key share one execution.
- ``leased_lru``: a byte-bounded LRU whose entries can be in use; a state machine without a loop.
- ``loop_thread``: an event loop in a thread, for callers that aren't coroutines.
- ``channel``: items from a loop to a blocking consumer, in batches.
- ``iterate``: synchronous iteration over an asynchronous iterator, made of the two above.
- ``fork``, ``loop_guard``: who may use an object; ``cancellation``: small helps.
"""
