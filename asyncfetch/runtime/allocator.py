"""The C library's allocator."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["give_back_memory"]


def give_back_memory() -> None:
    """Return freed memory that glibc keeps to the system; does nothing with another C library. Takes milliseconds.

    Buffers of some 100 kB to a few MiB, freed in other threads than they came from, leave its arenas full of holes:
    over 500 small videos it kept 240 MiB beside 25 MiB in use.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # not glibc
        return None
