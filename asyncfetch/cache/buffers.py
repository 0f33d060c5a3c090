"""Memory for what is read."""

from __future__ import annotations

import numpy as np

from asyncfetch.errors import CacheError
from asyncfetch.runtime.memory_pool import HUGE_BYTES, fresh_memory

__all__ = ["allocate"]


def allocate(size_bytes: int) -> memoryview:
    """Writable bytes with undefined content; CacheError where there is no memory for so many."""
    try:
        return (np.empty(size_bytes, np.uint8) if size_bytes < HUGE_BYTES else fresh_memory(size_bytes)).data
    except (MemoryError, OverflowError, ValueError) as error:  # numpy has a limit of its own on sizes
        raise CacheError(f"no memory for a range of {size_bytes} bytes: ask for a smaller one") from error
