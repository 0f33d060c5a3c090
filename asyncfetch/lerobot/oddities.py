"""Wrong statements of metadata that change no sample: each kind is warned of once, and `asyncfetch check` lists it."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Oddities:
    """The oddities of one open dataset, as they are met. Thread-safe."""

    def __init__(self) -> None:
        self._said: dict[str, str] = {}

    def note(self, kind: str, text: str) -> None:
        """Warn of it, unless the dataset has shown this kind before."""
        if self._said.setdefault(kind, text) is text:
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """The kinds and the first of each, in the order in which they were met."""
        return iter(list(self._said.items()))
