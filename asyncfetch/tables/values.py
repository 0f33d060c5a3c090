"""Places in a file of a column's byte strings, so that one can be read by its range.

That is so where pages hold plain values that aren't compressed: each string has its length in front, and the next one
follows. So only page headers and lengths are read, a request for each string, one after the other within a page. Pages
that an offset index places are gone through side by side, and so are row groups.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncfetch.fetch.batch import for_each
from asyncfetch.tables.pages import HEADER_BYTES, MAX_HEADER_BYTES, damaged, offset_indexes
from asyncfetch.tables.thrift import read_struct, read_varint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from asyncfetch.fetch.reader import RangeReader
    from asyncfetch.runtime.concurrently import RunSync
    from asyncfetch.tables.parquet import TableFile

HEAD_BYTES = 1024
"""Bytes asked for of a page: its header of some 30, which rows are null, and the first length. A header that is longer,
with its least and greatest value, is asked for again."""
CHAINS_AT_ONCE = 32
"""Pages of a file that are gone through side by side, with a request under way in each."""
PLAIN, RLE = 0, 3
LENGTH_BYTES = 4
_PLAIN_ENCODINGS = {"PLAIN", "RLE", "BIT_PACKED"}
"""Encodings that pyarrow names for a chunk of plain values: theirs, and those of levels."""


@dataclass(frozen=True, slots=True)
class ValuePlaces:
    """Places of the byte strings of a column, a row each."""

    starts: NDArray[np.int64]
    """First byte in the file; -1 where the row has none."""
    sizes: NDArray[np.int64]
    """Length in bytes; -1 where the row has none."""


def null_count(chunk: Any) -> int | None:  # noqa: ANN401  (pyarrow has no types)
    """Return how many values of a column chunk are null, where its statistics say that."""
    statistics = chunk.statistics
    return int(statistics.null_count) if statistics is not None and statistics.has_null_count else None


def why_no_places(file: TableFile, groups: Sequence[int], leaf: int) -> str | None:
    """Return in words why strings of this physical column can't be read by range; None if they can."""
    if file.metadata.schema.column(leaf).max_repetition_level:
        return "is a list"
    for group in groups:
        chunk = file.metadata.row_group(group).column(leaf)
        if _is_null(chunk):
            continue
        if chunk.compression != "UNCOMPRESSED":
            return f"is compressed ({chunk.compression})"
        others = sorted(set(chunk.encodings) - _PLAIN_ENCODINGS)
        if chunk.has_dictionary_page or others:
            return f"is encoded as {', '.join(others) or 'a dictionary'}"
    return None


def _is_null(chunk: Any) -> bool:  # noqa: ANN401
    """Return whether the chunk is known to hold nulls alone."""
    return bool(null_count(chunk) == chunk.num_values)


async def find_values(
    reader: RangeReader, file: TableFile, groups: Sequence[int], leaf: int, *, run: RunSync
) -> ValuePlaces:
    """Return where the strings of a physical column lie, of one without a reason in ``why_no_places``.

    Args:
        reader: Reads the file.
        file: The open file.
        groups: Row groups that have rows.
        leaf: The physical column, of byte strings.
        run: Runs what takes long for a long footer.

    Raises:
        FetchError: A range could not be fetched.
        FormatError: The file is damaged, or its pages aren't what its footer says.
    """
    stretches = await _find_stretches(reader, file, groups, leaf, run)
    levels = file.metadata.schema.column(leaf).max_definition_level
    walks = [_ValueWalk(reader, file, stretch, levels) for stretch in stretches]
    walked = await for_each(walks, _ValueWalk.places, workers=CHAINS_AT_ONCE)
    starts = np.fromiter(itertools.chain.from_iterable(starts for starts, _ in walked), np.int64)
    sizes = np.fromiter(itertools.chain.from_iterable(sizes for _, sizes in walked), np.int64)
    return ValuePlaces(starts, sizes)


class _Stretch(NamedTuple):
    """Neighbouring pages of one chunk; [0, 0) where all of its rows are null."""

    start: int
    stop: int
    rows: int


async def _find_stretches(
    reader: RangeReader, file: TableFile, groups: Sequence[int], leaf: int, run: RunSync
) -> list[_Stretch]:
    """The pages of the chunks, as far as an offset index places each, and otherwise whole chunks."""
    found: dict[int, list[_Stretch]] = {}
    indexed = []
    for group in groups:
        about = file.metadata.row_group(group)
        if _is_null(about.column(leaf)):
            found[group] = [_Stretch(0, 0, about.num_rows)]
        elif about.column(leaf).has_offset_index:
            indexed.append(group)
        else:
            found[group] = [_Stretch(*file.chunk(group, leaf), about.num_rows)]
    if indexed:
        for group, pages in (await offset_indexes(reader, file, indexed, leaf, run=run)).items():
            edges = zip(pages.starts.tolist(), pages.stops.tolist(), np.diff(pages.rows).tolist(), strict=True)
            found[group] = [_Stretch(*each) for each in edges]
    return [stretch for group in groups for stretch in found[group]]


class _ValueWalk:
    """The way through some pages, from one length to the next."""

    def __init__(self, reader: RangeReader, file: TableFile, stretch: _Stretch, levels: int) -> None:
        self._reader, self._file, self._stretch, self._levels = reader, file, stretch, levels
        self._held_start, self._held = 0, memoryview(b"")

    async def places(self) -> tuple[list[int], list[int]]:
        """Starts and sizes of the values, -1 for null."""
        starts: list[int] = []
        sizes: list[int] = []
        at, stop, rows = self._stretch
        if not stop:
            return [-1] * rows, [-1] * rows
        while at < stop:
            page = await self._page(at)
            place = page.values_start
            for is_there in page.is_there.tolist():
                if not is_there:
                    starts.append(-1)
                    sizes.append(-1)
                    continue
                size = int.from_bytes(await self._read(place, LENGTH_BYTES, page.stop), "little")
                starts.append(place + LENGTH_BYTES)
                sizes.append(size)
                place += LENGTH_BYTES + size
            if place != page.stop:
                raise damaged(self._file.url, f"values of the page at {at} end at {place}, not with it at {page.stop}")
            at = page.stop
        if len(starts) != rows:
            raise damaged(self._file.url, f"pages of {rows} rows have {len(starts)}")
        return starts, sizes

    async def _read(self, start: int, size: int, stop: int, *, ahead: int = 0) -> memoryview:
        """Bytes of the file, which must lie in front of ``stop``; where none of them is held, ``ahead`` or more."""
        if start + size > stop:
            raise damaged(self._file.url, f"bytes [{start}, {start + size}) of a page lie behind its end {stop}")
        file, end = self._file, start + size
        if start >= file.tail_start:
            return file.tail[start - file.tail_start : end - file.tail_start]
        if not self._held_start <= start <= end <= self._held_start + len(self._held):
            end = max(end, min(start + ahead, stop))
            self._held_start, self._held = start, await self._reader.fetch(file.url, start, end)
        return self._held[start - self._held_start :][:size]

    async def _page(self, at: int) -> _Page:
        stop = self._stretch.stop
        for nbytes in (HEAD_BYTES, HEADER_BYTES, MAX_HEADER_BYTES):
            head = await self._read(at, min(nbytes, stop - at), stop)
            try:
                header, length = read_struct(head)
                break
            except IndexError as error:
                if nbytes == MAX_HEADER_BYTES or len(head) == stop - at:
                    raise damaged(self._file.url, f"no page begins at {at}") from error
            except ValueError as error:
                raise damaged(self._file.url, f"no page begins at {at}: {error}") from error
        try:
            return await self._levels_of(header, at + length, stop)
        except (LookupError, TypeError, ValueError) as error:
            raise damaged(self._file.url, f"the page at {at} has an odd header: {error}") from error

    async def _levels_of(self, header: dict[int, Any], start: int, stop: int) -> _Page:
        """The page whose header ends there."""
        kind, page_stop = header[1], start + header[3]
        if not start <= page_stop <= stop or header[2] != header[3]:
            raise damaged(self._file.url, f"a page of bytes [{start}, {page_stop}) lies behind its chunk's end {stop}")
        if kind == 0:
            about = header[5]
            rows, encoding, prefix, nbytes = about[1], about[2], LENGTH_BYTES, 0
            if self._levels and about[3] != RLE:
                raise damaged(self._file.url, f"levels of encoding {about[3]}; there should be {RLE}")
            if self._levels:
                nbytes = int.from_bytes(await self._read(start, prefix, page_stop), "little")
                start += prefix
        elif kind == 3:
            about = header[8]
            rows, encoding, nbytes = about[1], about[4], about[5]
            start += about[6]
        else:
            raise damaged(self._file.url, f"a page of type {kind} among those of values")
        if encoding != PLAIN or not 0 <= rows <= self._stretch.rows or nbytes < 0:
            raise damaged(self._file.url, f"a page of {rows} values of encoding {encoding}; it should be {PLAIN}")
        is_there = np.ones(rows, np.bool_)
        if self._levels:
            data = await self._read(start, nbytes, page_stop)
            is_there = read_levels(data, rows, self._levels) == self._levels
        return _Page(start + nbytes, page_stop, is_there)


class _Page(NamedTuple):
    values_start: int
    stop: int
    is_there: NDArray[np.bool_]


def read_levels(data: memoryview, count: int, largest: int) -> NDArray[np.uint8]:
    """``count`` levels up to ``largest``, of Parquet's hybrid of runs and packed bits.

    Raises:
        IndexError: The data ends before them.
        ValueError: They are none.
    """
    width = largest.bit_length()
    parts: list[NDArray[np.uint8]] = []
    held = at = 0
    while held < count:
        header, at = read_varint(data, at)
        if header & 1:
            nbytes = (header >> 1) * width
            bits = np.unpackbits(np.frombuffer(data[at : at + nbytes], np.uint8), bitorder="little")
            bits = bits[: len(bits) // width * width].reshape(-1, width) << np.arange(width, dtype=np.uint8)
            part = bits.sum(axis=1, dtype=np.uint8)[: count - held]
            at += nbytes
        else:
            part = np.full(min(header >> 1, count - held), data[at], np.uint8)
            at += 1
        if not len(part):
            raise IndexError("an empty run of levels")
        parts.append(part)
        held += len(part)
    return np.concatenate([np.empty(0, np.uint8), *parts])
