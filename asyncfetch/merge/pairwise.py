"""A sum of values that come in any order, of which few are held at a time.

Neighbours are added as soon as both are there, then neighbouring sums, and so on. The additions depend on the values'
numbers alone, so the result is the same, rounding included, in any order of arrival. A late value delays only the sums
that it is part of, and n values are log2(n) additions deep.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class PairwiseSum:
    """The sum of ``count`` values, in the order of their numbers.

    Args:
        count: Number of values, at least one.
        add: Adds two neighbours, the left one first.
    """

    def __init__(self, count: int, add: Callable[[Any, Any], Awaitable[Any]]) -> None:
        self.total: Any = None
        """The sum, once every value is there."""
        self._count = count
        self._add = add
        self._waiting: dict[tuple[int, int], Any] = {}
        """Sums without a neighbour yet, by the number of sums on their level and their number among these."""

    async def put(self, number: int, value: Any) -> None:  # noqa: ANN401
        """Take the value with this number, and make all additions that it completes."""
        count = self._count
        while count > 1:
            neighbour = number ^ 1
            if neighbour < count:
                if (count, neighbour) not in self._waiting:
                    self._waiting[count, number] = value
                    return
                other = self._waiting.pop((count, neighbour))
                value = await (self._add(other, value) if neighbour < number else self._add(value, other))
            number, count = number // 2, (count + 1) // 2
        self.total = value
