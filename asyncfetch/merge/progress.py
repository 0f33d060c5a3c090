"""How far a merge is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MergeProgress", "Progress"]


@dataclass(frozen=True, slots=True)
class MergeProgress:
    """What is written of the rows and videos."""

    bytes_done: int
    bytes_total: int
    """About; at least what is done."""
    files_done: int
    files_total: int


class Progress:
    """Adds up what was written, and tells.

    Args:
        tell: Called with each change; None: nobody.
    """

    def __init__(self, tell: Callable[[MergeProgress], object] | None) -> None:
        self._tell = tell
        self._bytes: dict[str, int] = {}
        self._bytes_done = self._bytes_total = self._files_done = self._files_total = 0

    def expect(self, files: int, nbytes: int) -> None:
        """How many files of rows and videos there will be, and about how many bytes."""
        self._files_total, self._bytes_total = files, nbytes

    def wrote(self, url: str, nbytes: int) -> None:
        """The file has this many bytes so far."""
        self._bytes_done += nbytes - self._bytes.get(url, 0)
        self._bytes[url] = nbytes
        if self._tell is not None:
            total = max(self._bytes_total, self._bytes_done)
            self._tell(MergeProgress(self._bytes_done, total, self._files_done, self._files_total))

    def finished(self, url: str, nbytes: int) -> None:
        """The file is whole."""
        self._files_done += 1
        self.wrote(url, nbytes)
