"""Entries out of a table's columns: urls made absolute, times as seconds, and what a table may not hold.

An entry is one row: ``video`` (string, the absolute url of the file that holds it), ``offset`` and ``size`` (int64, its
bytes of that file; null for all of it), ``start`` and ``stop`` (float64, seconds of the span; null for all of it). All
other columns are the user's. Blocks: for use in a thread. No loop goes over rows, only over those with urls that must
be quoted or have dots to resolve.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from asyncfetch.errors import ConfigError, DatasetError, FormatError
from asyncfetch.tables.columns import is_text, plain
from asyncfetch.tables.packed import MARK
from asyncfetch.tables.parquet import require_pyarrow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import pyarrow as pa

    from asyncfetch.tables.columns import Array

Column = Any
"""pyarrow.ChunkedArray. Its types don't know what compute gives."""

ENTRY_COLUMNS = ("video", "offset", "size", "start", "stop")
RESERVED = (*ENTRY_COLUMNS, "index", "clip_index", "seconds", "audio")
"""Names that no column of the user's may have: an entry's, and those of a sample."""
MEMBER = b"member"
"""Metadata, under ``asyncfetch``, of a column that says where a file beside a video lies."""
INDEX_KEY, INDEX_VERSION = b"asyncfetch.index", b"1"
"""The mark of an index, in the metadata of its schema."""

PART_ROWS = 16 * 1024
"""Rows of a column that are gone through at once: it bounds what is held beside the column."""
_SCHEME = r"^[A-Za-z][A-Za-z0-9+.-]*://"
_DOTS = r"(?:^|/)\.\.?(?:/|$)"
_TO_QUOTE = r"[^A-Za-z0-9_.~/-]"
_TIME = (
    r"^\s*(?:(?:(?P<hours>\d{1,6}):(?P<minutes>[0-5]?\d)|(?P<minutes_alone>\d{1,8})):(?P<seconds>[0-5]?\d|60)"
    r"(?P<fraction>\.\d*)?|(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?))\s*$"
)
TIME_RULE = "a time is a number of seconds, not negative, or text like 01:02:03.5, 02:03 or 123.5"


def is_index(table: pa.Table, shown: str) -> bool:
    """Return whether it is an index, whose rows are entries; FormatError where that is of a version of another kind."""
    version = (table.schema.metadata or {}).get(INDEX_KEY)
    if version is None:
        return False
    missing = [name for name in ENTRY_COLUMNS if name not in table.column_names]
    if version != INDEX_VERSION or missing:
        what = f"lacks {', '.join(missing)}" if missing else f"is of version {version.decode(errors='replace')}"
        message = f"the index {shown} {what}; this asyncfetch reads version {INDEX_VERSION.decode()}"
        raise FormatError(message, remedy="write it anew with asyncfetch index")
    return True


def check_names(names: Sequence[str], asked: Mapping[str, str | None], shown: str) -> None:
    """ConfigError where a column that is asked for isn't there, or one of the others has a name that is reserved.

    ``asked`` are the columns that become ``video``, ``start`` and ``stop``, by these names; None for none.
    """
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        raise ConfigError(f"{shown} has two columns {doubled!r}: give each a name of its own")
    for argument, name in asked.items():
        if name is not None and name not in names:
            raise ConfigError(f"{argument}={name!r}: {shown} has no such column; it has {', '.join(names) or 'none'}")
    taken = [name for name in names if name in RESERVED and name not in asked.values()]
    if taken:
        meant = f", or pass {taken[0]}={taken[0]!r} if it is that" if taken[0] in asked else ""
        message = f"{shown} has a column {taken[0]!r}, a name that asyncfetch uses itself ({', '.join(RESERVED)})"
        raise ConfigError(f"{message}: rename it, or leave it out{meant}")


def entry_table(urls: Column, places: Mapping[str, Column], users: pa.Table) -> pa.Table:
    """The table of entries: ``urls``, those of ``places`` that there are, and all other columns, in plain types."""
    arrow = require_pyarrow()
    kinds = {"offset": arrow.int64(), "size": arrow.int64(), "start": arrow.float64(), "stop": arrow.float64()}
    columns: dict[str, Any] = {"video": urls}
    for name, kind in kinds.items():
        columns[name] = places[name] if name in places else _nulls(len(urls), kind)
    columns |= {name: plain_column(users.column(name)) for name in users.column_names}
    table: pa.Table = arrow.table(columns)
    return table


def _nulls(count: int, kind: pa.DataType) -> Column:
    """A column of so many nulls, in the memory of one part of it."""
    some = require_pyarrow().nulls(min(count, PART_ROWS), kind)
    chunks = [some.slice(0, count - row) for row in range(0, count, PART_ROWS)]
    return require_pyarrow().chunked_array(chunks, kind)


def absolute_urls(column: Column, base: str, name: str, shown: str) -> Column:
    """The urls or paths as strings, relative ones joined to the directory that ``base`` lies in.

    Raises:
        DatasetError: They aren't texts, or one is empty or null. It names the column and the table, as ``shown``.
    """
    pa = require_pyarrow()
    if not is_text(_stored_type(column)):
        example = _first_value(column)
        message = f"column {name!r} of {shown} must hold urls or paths as text, not {column.type}, as {example}"
        raise DatasetError(f"{message}: name the column that does with video=")
    root = _Root(base)

    def work(texts: Array, first_row: int) -> Array:
        texts = texts.cast(pa.string())
        bad = pa.compute.fill_null(pa.compute.equal(texts, ""), fill_value=True)
        _refuse(bad, texts, first_row, name, shown, "must be the url or path of a video")
        return root.join_all(texts)

    return _by_chunks(column, work, pa.string())


def absolute_index(table: pa.Table, base: str) -> pa.Table:
    """An index with absolute urls: those of files below its own directory may be relative.

    Args:
        table: As it lies in its file.
        base: The url or absolute path of the file.
    """
    return _with_urls(table, _Root(base).join_all)


def relative_index(table: pa.Table, path: str) -> pa.Table:
    """The inverse of ``absolute_index``, of an index that is to lie at a local path: it may move with its videos."""
    compute = require_pyarrow().compute
    front = path.rpartition("/")[0] + "/"

    def work(texts: Array) -> Array:
        below = compute.replace_substring_regex(texts, f"^{re.escape(front)}", "")
        is_below = compute.and_not(
            compute.starts_with(texts, front), compute.match_substring_regex(below, f"{_DOTS}|^/|{_SCHEME}")
        )
        return compute.if_else(is_below, below, texts)

    return _with_urls(table, work)


def _with_urls(table: pa.Table, work: Callable[[Array], Array]) -> pa.Table:
    """The table with ``work(urls)`` of videos, as a dictionary, and of files beside them for their urls."""
    pa = require_pyarrow()
    for place, field in enumerate(table.schema):
        column = table.column(place)
        if field.name == "video":
            made = [_of_each(chunk, work) for chunk in column.chunks]
        elif pa.types.is_struct(field.type) and (field.metadata or {}).get(b"asyncfetch") == MEMBER:
            at = field.type.get_field_index("url")
            if at < 0:
                continue
            names = [child.name for child in field.type]
            made = []
            for chunk in column.chunks:
                parts = [pa.compute.struct_field(chunk, name) for name in names]
                parts[at] = _of_each(parts[at], work).dictionary_decode()
                made.append(pa.StructArray.from_arrays(parts, names, mask=chunk.is_null()))
        else:
            continue
        table = table.set_column(place, field.with_type(made[0].type), made) if made else table
    return table


def _of_each(texts: Array, work: Callable[[Array], Array]) -> Array:
    """The urls as a dictionary, of each different text once: all videos of a shard have the same one."""
    found = texts if hasattr(texts, "indices") else texts.dictionary_encode()
    return require_pyarrow().DictionaryArray.from_arrays(found.indices, work(found.dictionary))


class _Root:
    """The place that relative urls of a table are joined to."""

    def __init__(self, base: str) -> None:
        scheme, separator, rest = base.partition("://")
        self.is_web = scheme.lower() in {"http", "https"}
        self.is_quoted = self.is_web or scheme.lower() == "file"
        place, mark, query = rest.partition("?") if self.is_quoted else (rest if separator else base, "", "")
        host, _, path = place.partition("/")
        self.origin = f"{scheme}://{host}/" if separator else f"{host}/"
        self.directories = path.split("/")[:-1]
        self.query = mark + query

    def join(self, text: str) -> str:
        """The url of one text, without dots, quoted."""
        text, mark, packing = text.partition(MARK)
        parts = text.split("/")
        kept = [] if text.startswith("/") else list(self.directories)
        for part in parts[1:] if text.startswith("/") else parts:
            if part == "..":
                kept[-1:] = []
            elif part != ".":
                kept.append(quote(part) if self.is_quoted else part)
        return f"{self.origin}{'/'.join(kept)}{self.query}{mark}{packing}"

    def join_all(self, texts: Array) -> Array:
        """The urls of all texts."""
        pa = require_pyarrow()
        compute = pa.compute
        is_absolute = compute.match_substring_regex(texts, _SCHEME if self.is_web else f"{_SCHEME}|^/")
        if compute.all(is_absolute).as_py():
            return texts
        odd = compute.match_substring_regex(texts, f"{_DOTS}|^/|{_TO_QUOTE}" if self.is_quoted else _DOTS)
        odd = compute.and_not(odd, is_absolute)
        front = self.origin + "".join(f"{part}/" for part in self.directories)
        joined = compute.binary_join_element_wise(front, texts, self.query, "")
        if compute.any(odd).as_py():
            picked = texts.filter(odd).dictionary_encode()
            resolved = pa.array(map(self.join, picked.dictionary.to_pylist()), pa.string())
            joined = compute.replace_with_mask(joined, odd, resolved.take(picked.indices))
        return compute.if_else(is_absolute, texts, joined)


def to_seconds(column: Column, name: str, shown: str) -> Column:
    """The times as float64: numbers as they are, text as the number nearest to what it says; null or blank is null.

    Raises:
        DatasetError: They are neither, or one is no time, negative, not finite.
    """
    pa = require_pyarrow()
    types, kind = pa.types, _stored_type(column)
    kinds = (types.is_integer, types.is_floating, types.is_decimal, types.is_time, types.is_duration, is_text)
    if not any(is_kind(kind) for is_kind in kinds):
        message = f"column {name!r} of {shown} holds {column.type}, as {_first_value(column)}: {TIME_RULE}"
        raise DatasetError(message)

    def work(values: Array, first_row: int) -> Array:
        seconds, given = _read_times(values)
        compute = pa.compute
        good = compute.and_(compute.is_finite(seconds), compute.greater_equal(seconds, 0.0))
        bad = compute.and_(given.is_valid(), compute.invert(compute.fill_null(good, fill_value=False)))
        _refuse(bad, values, first_row, name, shown, f"is no time: {TIME_RULE}")
        return seconds

    return _by_chunks(column, work, pa.float64())


def _read_times(values: Array) -> tuple[Array, Array]:
    """The seconds, null where a value is no time; and the values, null where they are blank texts."""
    pa = require_pyarrow()
    types, kind = pa.types, values.type
    if is_text(kind):
        return _parse_times(values.cast(pa.string()))
    if types.is_time(kind) or types.is_duration(kind):
        counts = values.cast(pa.int32() if types.is_time32(kind) else pa.int64())
        per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[kind.unit]
        return pa.compute.divide(counts.cast(pa.float64()), per_second), values
    return values.cast(pa.float64(), safe=False), values


def _parse_times(texts: Array) -> tuple[Array, Array]:
    pa = require_pyarrow()
    compute = pa.compute
    texts = compute.if_else(compute.match_substring_regex(texts, r"^\s*$"), pa.scalar(None, pa.string()), texts)
    parts = compute.extract_regex(texts, _TIME)

    def whole(name: str) -> Array:
        digits = compute.struct_field(parts, name)
        return compute.if_else(compute.equal(digits, ""), "0", digits).cast(pa.int64())

    minutes = compute.add(whole("minutes"), whole("minutes_alone"))
    seconds = compute.add(compute.multiply(whole("hours"), 3600), compute.multiply(minutes, 60))
    seconds = compute.add(seconds, whole("seconds")).cast(pa.string())
    # As text once more, for the float nearest to it: 60 + 1.1 may be another than 61.1.
    clock = compute.binary_join_element_wise(seconds, compute.struct_field(parts, "fraction"), "")
    number = compute.struct_field(parts, "number")
    return compute.if_else(compute.equal(number, ""), clock, number).cast(pa.float64()), texts


def check_spans(start: Column, stop: Column, shown: str) -> None:
    """DatasetError where a span ends before it begins, or has no length."""
    compute = require_pyarrow().compute
    row = compute.index(compute.greater_equal(start, stop), value=True).as_py()
    if row >= 0:
        span = f"[{start[row].as_py()}, {stop[row].as_py()}) seconds"
        raise DatasetError(f"row {row} of {shown}, counted from 0, is the span {span}: start must be less than stop")


def plain_column(column: Column) -> Column:
    """The column in types that pyarrow's own functions take, as ``plain`` gives them."""
    pa = require_pyarrow()
    chunks = [plain(chunk) for chunk in column.chunks] or [plain(pa.array([], column.type))]
    return pa.chunked_array(chunks)


def _by_chunks(column: Column, work: Callable[[Array, int], Array], kind: pa.DataType) -> Column:
    """The column of ``work(values, first row)`` for each part of it."""
    made, row = [], 0
    for part in parts_of(column):
        made.append(work(plain(part), row))
        row += len(part)
    return require_pyarrow().chunked_array(made, kind)


def parts_of(column: Column) -> Iterator[Array]:
    """Parts of a column, one after the other, of PART_ROWS at most."""
    for chunk in column.chunks:
        for row in range(0, len(chunk), PART_ROWS):
            yield chunk.slice(row, PART_ROWS)


def _stored_type(column: Column) -> Any:  # noqa: ANN401  (pyarrow has no types)
    """The type of the column's values, whatever they are kept as."""
    return plain(require_pyarrow().array([], column.type)).type


def _refuse(bad: Array, values: Array, first_row: int, name: str, shown: str, rule: str) -> None:
    """DatasetError where one is bad."""
    at = require_pyarrow().compute.index(bad, value=True).as_py()
    if at >= 0:
        value = values[at].as_py()
        row = first_row + at
        raise DatasetError(f"row {row} of {shown}, counted from 0, has {value!r:.200} as its {name!r}, which {rule}")


def _first_value(column: Column) -> str:
    return f"{column[0].as_py()!r:.80}" if len(column) else "no row tells"
