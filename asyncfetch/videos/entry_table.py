"""The entries of a collection: a table, by rows. What a pass reads of it, it reads without a loop over rows."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncfetch.errors import ConfigError, EpisodeNotFound
from asyncfetch.videos.entries import ENTRY_COLUMNS, INDEX_KEY

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

MEASURES = ("seconds", "frames", "width", "height")
"""Columns of an index that say what a video is like, beside these."""
MEMBER = b"member"
"""Metadata, under ``asyncfetch``, of a column that says where a file beside a video lies."""


class Place(NamedTuple):
    """The bytes of a video, or of a file beside one."""

    url: str
    offset: int = 0
    size: int | None = None
    """None: to the end."""


class Entries:
    """The entries of a collection, numbered from 0. Immutable.

    Args:
        table: With the columns ENTRY_COLUMNS, of which any but ``video`` may be missing, and the user's own.
        url: Of the collection, for messages.
    """

    def __init__(self, table: pa.Table, url: str) -> None:
        self.table = table
        self.url = url
        self._columns = {name: table.column(name) for name in table.column_names}
        hidden = {*ENTRY_COLUMNS, *MEASURES} if self.is_index else set(ENTRY_COLUMNS)
        self.members: tuple[str, ...] = tuple(
            field.name for field in table.schema if (field.metadata or {}).get(b"asyncfetch") == MEMBER
        )
        """Columns of files beside the videos."""
        self.own: tuple[str, ...] = tuple(
            name for name in table.column_names if name not in hidden and name not in self.members
        )
        """The user's other columns."""

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def is_index(self) -> bool:
        """True if it was read from an index, which has measured the videos."""
        return INDEX_KEY in (self.table.schema.metadata or {})

    def value(self, entry: int, name: str) -> Any:  # noqa: ANN401
        """Return what a column has for an entry; None where it has nothing."""
        column = self._columns.get(name)
        return None if column is None else column[entry].as_py()

    def dtype(self, name: str) -> str:
        """Return torch's name of the dtype of a column's values in samples; "string" or "object" of others."""
        import pyarrow as pa

        kind = self.table.schema.field(name).type
        if pa.types.is_boolean(kind):
            return "bool"
        if pa.types.is_integer(kind):
            return "int64"
        if pa.types.is_floating(kind):
            return "float32"
        return "string" if pa.types.is_string(kind) or pa.types.is_large_string(kind) else "object"

    def numbers(self, name: str) -> NDArray[np.float64]:
        """Return a column of numbers, NaN where it has none."""
        column = self._columns.get(name)
        if column is None:
            return np.full(len(self), np.nan)
        import pyarrow as pa

        found: NDArray[np.float64] = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
        return found

    def place(self, entry: int) -> Place:
        """Return where an entry's video lies. EpisodeNotFound where there is no such entry."""
        if not 0 <= entry < len(self):
            raise EpisodeNotFound(f"{self.url} has entries [0, {len(self)}), not {entry}")
        size = self.value(entry, "size")
        return Place(self.value(entry, "video"), self.value(entry, "offset") or 0, size)

    def span(self, entry: int) -> tuple[float | None, float | None]:
        """Return the seconds of its video that an entry means; None for its begin, or its end."""
        return self.value(entry, "start"), self.value(entry, "stop")

    def member(self, entry: int, name: str) -> Place | None:
        """Return where a file beside an entry's video lies, if there is one."""
        found = self.value(entry, name)
        if found is None:
            return None
        return Place(found.get("url") or self.value(entry, "video"), found.get("offset") or 0, found.get("size"))

    def positions(self, chosen: Any) -> NDArray[np.int64]:  # noqa: ANN401 - numbers
        """Return the numbers of chosen entries. EpisodeNotFound where there is none."""
        numbers = np.asarray(chosen, np.int64).reshape(-1)
        outside = numbers[(numbers < 0) | (numbers >= len(self))]
        if len(outside):
            raise EpisodeNotFound(f"{self.url} has entries [0, {len(self)}), not {int(outside[0])}")
        return numbers

    @cached_property
    def files(self) -> NDArray[np.int64]:
        """The number of the file that each entry's video lies in."""
        codes: Any = self._columns["video"].combine_chunks().dictionary_encode()
        found: NDArray[np.int64] = codes.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        return found

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal videos, offsets and spans in equal order, wherever they lie."""
        import pyarrow as pa
        import pyarrow.compute as pc

        digest = hashlib.blake2b(digest_size=16)
        videos = self._columns["video"].cast(pa.large_string())
        if len(self):
            first, last = pc.min(videos).as_py(), pc.max(videos).as_py()
            common = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
            videos = pc.utf8_slice_codeunits(videos, first.rfind("/", 0, common) + 1)
        for chunk in videos.chunks:
            _, offsets, data = chunk.buffers()
            ends = np.frombuffer(memoryview(offsets or b""), np.int64)[chunk.offset : chunk.offset + len(chunk) + 1]
            digest.update(np.diff(ends).tobytes())
            digest.update(memoryview(data or b"")[ends[0] : ends[-1]])
        for name in ("offset", "start", "stop"):
            digest.update(self.numbers(name).tobytes())
        return digest.hexdigest()


def check_entries(table: pa.Table, url: str) -> None:
    """Raise ConfigError where a collection has no entry."""
    if not table.num_rows:
        raise ConfigError(f"{url}: the collection has no video: check the url, or the pattern")
