"""Memory for what is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from asyncfetch.errors import CacheError, ConfigError
from asyncfetch.runtime.memory_pool import HUGE_BYTES, fresh_memory

if TYPE_CHECKING:
    from asyncfetch.fetch.reader import WritableBuffer
    from asyncfetch.ranges import ByteRange

__all__ = ["allocate", "writable_bytes"]


def allocate(size_bytes: int) -> memoryview:
    """Writable bytes with undefined content; CacheError where there is no memory for so many."""
    try:
        return (np.empty(size_bytes, np.uint8) if size_bytes < HUGE_BYTES else fresh_memory(size_bytes)).data
    except (MemoryError, OverflowError, ValueError) as error:  # numpy has a limit of its own on sizes
        raise CacheError(f"no memory for a range of {size_bytes} bytes: ask for a smaller one") from error


def writable_bytes(buffer: WritableBuffer, wanted: ByteRange) -> memoryview:
    """A caller's buffer as bytes; ConfigError where the range, whose end is known, can't go there."""
    view = memoryview(buffer)
    assert wanted.stop is not None
    size = wanted.stop - wanted.start
    if view.readonly or not view.c_contiguous or view.nbytes != size:
        raise ConfigError(
            f"{wanted!r} needs a writable, contiguous buffer of {size} bytes, not a "
            f"{'read-only' if view.readonly else 'writable'} one of {view.nbytes}"
        )
    return view.cast("B")
