"""A checksum at the speed of memory, for bytes that TCP or TLS has guarded already.

What has to be found are our own and others' mistakes: a flipped bit, a piece that is missing, doubled, zeroed or in the
wrong place. Where this was measured crc32 took 0.25 s for a GiB, more than half of what fetching it takes; this takes a
third of that. It isn't a signature: who wants to deceive can.

The bytes are 64-bit little-endian words in rows of 512, zeros after their end. The sum of every word times a weight of
its own, modulo 2**64, is the sum over the rows of 2 * row + 1 times the row's sum, plus that over the columns of
COLUMN * column times the column's sum. All weights are odd, so a change within one word always shows; they differ, so
words that change their places show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["checksum"]

ROW_WORDS = 512
ROW_BYTES = 8 * ROW_WORDS
ROWS_AT_ONCE = 256
"""A MiB, which is still in the processor's cache when its columns are added after its rows."""
COLUMN = 2 * 0x9E3779B97F4B
"""Even, and more than twice the rows of any tensor, so that no two words weigh the same."""
_COLUMN_WEIGHTS = np.arange(ROW_WORDS, dtype=np.uint64) * np.uint64(COLUMN)
_MASK = 2**64 - 1


def checksum(data: memoryview | NDArray[np.uint8]) -> int:
    """The checksum of the bytes, below 2**64; their number counts too."""
    octets = np.frombuffer(data, np.uint8)
    whole = len(octets) // ROW_BYTES
    columns = np.zeros(ROW_WORDS, np.uint64)
    total = _add_rows(octets[: whole * ROW_BYTES], 0, columns)
    if rest := octets[whole * ROW_BYTES :].tobytes():
        total += _add_rows(np.frombuffer(rest.ljust(ROW_BYTES, b"\0"), np.uint8), whole, columns)
    total += int(columns @ _COLUMN_WEIGHTS) + len(octets)
    return total & _MASK


def _add_rows(octets: NDArray[np.uint8], first_row: int, columns: NDArray[np.uint64]) -> int:
    """The weighted sum of whole rows, modulo nothing yet; their columns are added to ``columns``."""
    rows = octets.view("<u8").reshape(-1, ROW_WORDS)
    total = 0
    for start in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[start : start + ROWS_AT_ONCE]
        weights = np.arange(first_row + start, first_row + start + len(some), dtype=np.uint64) * np.uint64(2)
        total += int(some.sum(axis=1) @ (weights + np.uint64(1)))
        columns += some.sum(axis=0)
    return total
