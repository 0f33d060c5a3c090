"""A stream read in a process beside the consumer's, batches handed over in shared memory.

batches.py      serve_samples: the consumer's iterator, and the worker's process as the consumer sees it
worker.py       what runs in it
messages.py     their messages, and noticing that one has ended
"""

from __future__ import annotations

from asyncfetch.stream.serving.batches import ServedBatches, serve_samples

__all__ = ["ServedBatches", "serve_samples"]
