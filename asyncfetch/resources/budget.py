"""A bound in bytes on what passes hold, which they pay from before they fetch."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Budget:
    """A bound in bytes, divided by who takes first. Nobody waits in it. Belongs to one thread.

    No ReservationQueue: who waits there doesn't find out that it waits for what it holds itself, and can't fail.

    Args:
        max_bytes: Most that all shares together hold.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._shares: list[Share] = []
        self._watchers: dict[object, Callable[[], object]] = {}

    def share(self, on_freed: Callable[[], object]) -> Share:
        """A share that holds nothing yet; ``on_freed`` is called when bytes come back, its own or another's."""
        share = Share(self, on_freed)
        self._shares.append(share)
        return share

    def fits(self, size_bytes: int) -> bool:
        """Return whether so much can be taken now."""
        return self.used_bytes + size_bytes <= self.max_bytes

    @contextmanager
    def watched(self, on_taken: Callable[[], object]) -> Iterator[None]:
        """Call ``on_taken`` whenever a share has taken some, while in this context."""
        watcher = object()
        self._watchers[watcher] = on_taken
        try:
            yield
        finally:
            del self._watchers[watcher]

    def change(self, change_bytes: int) -> None:
        """Account for what a share took or gave back. For shares."""
        self.used_bytes += change_bytes
        if change_bytes < 0:
            for share in sorted(self._shares, key=lambda share: share.used_bytes):  # so that none is starved
                share.on_freed()
        else:
            for on_taken in list(self._watchers.values()):
                on_taken()

    def leave(self, share: Share) -> None:
        """Forget a share that holds nothing. For shares."""
        self._shares.remove(share)


class Share:
    """The share that one user holds of a budget. Made by ``Budget.share``; close it."""

    def __init__(self, budget: Budget, on_freed: Callable[[], object]) -> None:
        self.budget = budget
        self.on_freed = on_freed
        self.used_bytes = 0

    def fits(self, size_bytes: int) -> bool:
        """Return whether so much can be taken now."""
        return self.budget.fits(size_bytes)

    def take(self, size_bytes: int) -> None:
        """Take what ``fits``."""
        self.used_bytes += size_bytes
        self.budget.change(size_bytes)

    def give(self, size_bytes: int) -> None:
        """Give some back."""
        self.used_bytes -= size_bytes
        self.budget.change(-size_bytes)

    def close(self) -> None:
        """Give everything back and leave. Once."""
        self.budget.leave(self)
        self.give(self.used_bytes)
