"""How far a command is, where no terminal shows a bar."""

from __future__ import annotations

import sys

__all__ = ["Tenths"]


class Tenths:
    """Says it on stderr, a line for each tenth of the way."""

    def __init__(self) -> None:
        self._said: tuple[str, int] = ("", 0)

    def say(self, doing: str, share: float, more: str = "") -> None:
        """Of what is being done, which has a way of its own, the share that is done, and what stands behind that."""
        now = doing, int(10 * share)
        if now != self._said and now[1] and sys.stderr is not None:
            print(f"{doing}: {10 * now[1]} %{more and f', {more}'}", file=sys.stderr)
        self._said = now
