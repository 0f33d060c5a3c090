"""The entries of a collection: a table, by rows. What a pass reads of it, it reads without a loop over rows."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncfetch.errors import EpisodeNotFound
from asyncfetch.videos.entries import ENTRY_COLUMNS, MEMBER, parts_of
from asyncfetch.videos.windows import PRECISION_SECONDS

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

MEASURE = b"measure "
"""Metadata, as MEMBER, of an index's column that says what a video is like; the measure's name follows."""


class Place(NamedTuple):
    """The bytes of a video, or of a file beside one."""

    url: str
    offset: int = 0
    size: int | None = None
    """None: to the end."""
    moov: tuple[int, int] | None = None
    """Bytes [start, stop) of the video that are its index, where an index of the collection says so."""

    def as_found(self) -> Place:
        """Return it without what an index has measured: a file may be another one by now."""
        return self if self.moov is None else Place(self.url, self.offset, self.size if self.offset else None)


class Entries:
    """The entries of a collection, numbered from 0. Immutable.

    Args:
        table: With the columns ENTRY_COLUMNS, of which any but ``video`` may be missing, and the user's own.
        url: Of the collection, for messages.
    """

    def __init__(self, table: pa.Table, url: str) -> None:
        self.table = table = _with_one_dictionary(table)
        self.url = url
        self._columns = {name: table.column(name) for name in table.column_names}
        kinds = {field.name: (field.metadata or {}).get(b"asyncfetch", b"") for field in table.schema}
        self.measures: dict[str, str] = {
            kind.removeprefix(MEASURE).decode(): name for name, kind in kinds.items() if kind.startswith(MEASURE)
        }
        """The columns that say what a video is like, by the measure; none but in an index."""
        hidden = {*ENTRY_COLUMNS, *self.measures.values()}
        self.members: tuple[str, ...] = tuple(name for name, kind in kinds.items() if kind == MEMBER)
        """Columns of files beside the videos."""
        self.own: tuple[str, ...] = tuple(
            name for name in table.column_names if name not in hidden and name not in self.members
        )
        """The user's other columns."""

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def value(self, entry: int, name: str) -> Any:  # noqa: ANN401
        """Return what a column has for an entry; None where it has nothing."""
        column = self._columns.get(name)
        return None if column is None else column[entry].as_py()

    def dtype(self, name: str) -> str:
        """Return torch's name of the dtype of a column's values in samples; "string" or "object" of others.

        Whole numbers are int64, but for those of uint64, which may be larger: they stay Python's.
        """
        import pyarrow as pa

        kind = self.table.schema.field(name).type
        if pa.types.is_boolean(kind):
            return "bool"
        if pa.types.is_integer(kind) and not pa.types.is_uint64(kind):
            return "int64"
        if pa.types.is_floating(kind):
            return "float64" if pa.types.is_float64(kind) else "float32"
        return "string" if pa.types.is_string(kind) or pa.types.is_large_string(kind) else "object"

    def has_nulls(self, name: str) -> bool:
        """Return whether a column has nothing for some entry."""
        return bool(self._columns[name].null_count)

    def numbers(self, name: str) -> NDArray[np.float64]:
        """Return a column of numbers, NaN where it has none. A copy."""
        found = np.full(len(self), np.nan)
        column = self._columns.get(name)
        if column is None or column.null_count == len(column):
            return found
        import pyarrow as pa

        row = 0
        for part in parts_of(column):
            found[row : row + len(part)] = part.cast(pa.float64()).to_numpy(zero_copy_only=False)
            row += len(part)
        return found

    def _has(self, name: str) -> NDArray[np.bool_]:
        """Return which entries have something in a column."""
        column = self._columns.get(name)
        if column is None or column.null_count == len(column):
            return np.zeros(len(self), bool)
        found: NDArray[np.bool_] = column.is_valid().to_numpy()
        return found

    def place(self, entry: int) -> Place:
        """Return where an entry's video lies. EpisodeNotFound where there is no such entry."""
        if not 0 <= entry < len(self):
            raise EpisodeNotFound(f"{self.url} has entries [0, {len(self)}), not {entry}")
        size, start = self.value(entry, "size"), self.measured(entry, "moov_start")
        moov = None if start is None else (start, start + self.measured(entry, "moov_bytes"))
        return Place(self.value(entry, "video"), self.value(entry, "offset") or 0, size, moov)

    def measured(self, entry: int, name: str) -> Any:  # noqa: ANN401
        """Return what an index has measured of an entry's video; None where it has nothing."""
        return self.value(entry, self.measures[name]) if name in self.measures else None

    def largest_picture(self) -> tuple[int, int] | None:
        """Return the greatest height and width of all videos, by the index; None where that isn't known."""
        import pyarrow.compute as pc

        found = [pc.max(self._columns[self.measures[name]]).as_py() for name in ("height", "width") if self.measures]
        return None if not found or None in found else (found[0], found[1])

    def lengths(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the seconds and frames of what each entry means, by the index; NaN where that isn't known.

        Those of a video that could not be read are the least there are: it gives a clip, which then says why.
        """
        columns = self.measures
        seconds, frames = (self.numbers(columns.get(name, "")) for name in ("seconds", "frames"))
        spans = self._has("start") | self._has("stop")
        if spans.any():
            for lengths, name in ((seconds, "span_seconds"), (frames, "span_frames")):
                lengths[spans] = self.numbers(columns.get(name, ""))[spans]
        broken = self._has(columns.get("error", ""))
        seconds[broken], frames[broken] = PRECISION_SECONDS, 1
        return seconds, frames

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
        """The number of the file that each entry's video lies in, by the first entry in it."""
        urls: Any = self._columns["video"].unique()  # in the order of their first entries
        firsts = urls.indices.to_numpy()
        numbers = np.empty(int(firsts.max()) + 1, np.int64)
        numbers[firsts] = np.arange(len(firsts))
        found, row = np.empty(len(self), np.int64), 0
        for part in parts_of(self._columns["video"]):
            found[row : row + len(part)] = numbers[part.indices.to_numpy()]
            row += len(part)
        return found

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal videos, offsets and spans in equal order, wherever they lie."""
        import pyarrow as pa
        import pyarrow.compute as pc

        lengths, urls = (hashlib.blake2b(digest_size=16) for _ in range(2))  # apart, whatever chunks a column has
        chunk: Any = self._columns["video"].chunk(0)
        least: Any = pc.min_max(chunk.dictionary).as_py()
        first, last = least["min"].encode(), least["max"].encode()
        common = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
        front = np.arange(first.rfind(b"/", 0, common) + 1)
        for part in parts_of(self._columns["video"]):
            texts = part.cast(pa.string())
            _, offsets, data = texts.buffers()
            ends = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
            below = np.ones(ends[-1] - ends[0], bool)
            below[(ends[:-1, None] - ends[0] + front)] = False
            urls.update(np.frombuffer(data, np.uint8)[ends[0] : ends[-1]][below].tobytes())
            lengths.update((np.diff(ends) - len(front)).tobytes())
        digest = hashlib.blake2b(lengths.digest() + urls.digest(), digest_size=16)
        for name in ("offset", "start", "stop"):
            digest.update(self.numbers(name).data)
        return digest.hexdigest()


def _with_one_dictionary(table: pa.Table) -> pa.Table:
    """The table with urls of videos as a dictionary that all chunks have in common: many videos may lie in a file."""
    import pyarrow as pa

    place = table.column_names.index("video")
    column: Any = table.column(place)
    column = column.unify_dictionaries() if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    made: pa.Table = table.set_column(place, table.schema.field(place).with_type(column.type), column)
    return made
