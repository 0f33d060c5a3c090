"""A directory's entries: within bounds, and put together from the pages that a store lists it by."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Generic, TypeVar

from asyncfetch.errors import FetchError, InvalidResponse
from asyncfetch.fetch.retry import AttemptFailed, RetryVerdict

if TYPE_CHECKING:
    from collections.abc import Hashable

    from asyncfetch.ranges import ObjectInfo

MAX_EMPTY_PAGES = 1000
"""Bound on empty pages in a row. S3 sends some where it goes over many deleted versions, 1,000 keys at a time."""
_SIZE = re.compile("[0-9]{1,18}")

C = TypeVar("C", bound="Hashable")


class Listing(Generic[C]):
    """The entries of the pages so far, ``max_entries`` at most. A page is asked for by a C."""

    def __init__(self, max_entries: int) -> None:
        self.infos: list[ObjectInfo] = []
        self.has_marker = False
        """True if there is an object for the directory itself, which may be empty then."""
        self._max_entries = max_entries
        self._empty_pages = 0
        self._asked: set[C] = set()

    def add(self, infos: list[ObjectInfo], *, asked: C, following: C | None) -> None:
        """Takes a page, asked for by ``asked``, and by ``following`` the next one, which is None after the last.

        AttemptFailed where it is one too many, or leads to none that is new.
        """
        self._asked.add(asked)
        if following in self._asked:
            message = "the listing's pages lead in a circle: is the endpoint right?"
            raise AttemptFailed(InvalidResponse, message, RetryVerdict.FATAL)
        self._empty_pages = 0 if infos else self._empty_pages + 1
        if following is not None and self._empty_pages >= MAX_EMPTY_PAGES:
            message = f"{MAX_EMPTY_PAGES} pages of the listing in a row have no entries: is the endpoint right?"
            raise AttemptFailed(InvalidResponse, message, RetryVerdict.FATAL)
        check_length(len(self.infos) + len(infos), self._max_entries)
        self.infos += infos

    def sorted(self) -> list[ObjectInfo]:
        """The entries by name."""
        return sorted(self.infos, key=by_name)


def by_name(info: ObjectInfo) -> str:
    """Return what the entries of one directory are sorted by: a slash behind a name is no part of it."""
    return info.url.removesuffix("/")


def check_length(entries: int, max_entries: int) -> None:
    """AttemptFailed where a listing has more entries than may be held."""
    if entries > max_entries:
        message = (
            f"the listing has more entries than max_listed_entries={max_entries}: raise that, at about 370 bytes for"
            " each, or list a directory with less in it"
        )
        raise AttemptFailed(FetchError, message, RetryVerdict.FATAL)


def listed_size(said: object) -> int:
    """The size that a listing says, a number or its digits; ValueError where no object has it."""
    if isinstance(said, bool) or not isinstance(said, int | str) or _SIZE.fullmatch(str(said)) is None:
        raise ValueError("a size that no object has")
    return int(said)
