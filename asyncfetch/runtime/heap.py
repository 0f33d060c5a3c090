"""Giving freed memory back to the system."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

__all__ = ["trim_heap"]


@cache
def _malloc_trim() -> Any:  # noqa: ANN401
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):  # not glibc
        return None
    trim.argtypes = [ctypes.c_size_t]
    return trim


def trim_heap() -> None:
    """Let glibc return the free pages inside of its heaps; nothing where the C library is another one.

    glibc keeps a heap a thread and returns only what is free at a heap's end. Where several threads allocate and free
    large things in turn, the holes add up, the more so where small things stay between them: 8,000 videos opened and
    closed by two threads held 450 MiB, of which 145 were in use. Takes milliseconds, without the GIL, but no allocation
    can go on meanwhile: not for the loop's thread.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)
