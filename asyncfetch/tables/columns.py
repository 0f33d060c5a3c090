"""The way from Arrow columns, of whatever type they are stored in, to plain ones, numbers and Python objects.

Blocks: for use in a thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from asyncfetch.errors import WRITE_ANEW, FormatError, redact_url
from asyncfetch.tables.parquet import require_pyarrow

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

Array = Any
"""pyarrow.Array. Its types know neither lists nor structs."""

ArrowType = Any
"""pyarrow.DataType, likewise."""


def to_integers(column: pa.ChunkedArray[Any], name: str, url: str, *, missing: int | None = None) -> NDArray[np.int64]:
    """The column as int64, whatever integer-like type (nullable, float, narrow) it is stored in.

    Args:
        column: One value a row.
        name: For messages.
        url: For messages.
        missing: What null and NaN become. None: they are an error.

    Raises:
        FormatError: Not numbers, not whole, missing, or beyond int64 or what the stored type tells apart.
    """
    if require_pyarrow().types.is_int64(column.type) and not column.null_count:
        whole: NDArray[np.int64] = to_array(column).to_numpy(zero_copy_only=False).astype(np.int64)
        return whole
    numbers = to_floats(column, name, url) if column.null_count else _numbers(column, name, url)
    largest: float = np.iinfo(np.int64).max
    if numbers.dtype.kind == "f":
        largest = 2.0 ** (np.finfo(numbers.dtype).nmant + 1)  # beyond it, a float tells no neighbours apart
        numbers = numbers.astype(np.float64)  # where ``missing`` and ``largest`` fit
        absent = np.isnan(numbers)
        if absent.any():
            if missing is None:
                message = f"column {name} of {redact_url(url)} has no value in {absent.sum()} of {len(numbers)} rows"
                raise FormatError(f"{message}, first in row {absent.argmax()}", remedy=WRITE_ANEW)
            numbers = np.where(absent, missing, numbers)
    wrong = (np.abs(numbers) if numbers.dtype.kind == "f" else numbers) > largest
    with np.errstate(invalid="ignore"):
        whole = numbers.astype(np.int64)
    wrong |= whole != numbers
    if wrong.any():
        row = int(wrong.argmax())
        stored = f"row {row} is {numbers[row]}, stored as {column.type}"
        message = f"column {name} of {redact_url(url)} must hold whole numbers; {stored}"
        raise FormatError(message, remedy=WRITE_ANEW)
    return whole


def to_floats(column: pa.ChunkedArray[Any], name: str, url: str) -> NDArray[np.float64]:
    """The column as float64, null as NaN.

    Raises:
        FormatError: Not numbers.
    """
    return _numbers(column, name, url).astype(np.float64)


def _numbers(column: pa.ChunkedArray[Any], name: str, url: str) -> NDArray[Any]:
    types, array = require_pyarrow().types, to_array(column)
    if array.null_count == len(array):
        return np.full(len(array), np.nan)
    array = without_decimals(array)
    if not (types.is_integer(array.type) or types.is_floating(array.type)):
        message = f"column {name} of {redact_url(url)} must hold numbers, not {column.type}"
        raise FormatError(message, remedy=WRITE_ANEW)
    numbers: NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return numbers


def without_decimals(array: Array) -> Array:
    """The numbers as floats where they are decimals, as databases store them."""
    pa = require_pyarrow()
    return array.cast(pa.float64()) if pa.types.is_decimal(array.type) else array


def to_array(column: pa.ChunkedArray[Any]) -> Array:
    """The column in one piece, its values in their plain form: see ``plain``."""
    pa = require_pyarrow()
    if not _is_plain(column.type):  # which pyarrow (26) may not join
        column = pa.chunked_array([plain(chunk) for chunk in column.chunks or [pa.array([], column.type)]])
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # always with pyarrow 16, and where it takes more than 2 GiB
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    return array


def plain(array: Array) -> Array:
    """Return the values in the form that all readers know, at any depth.

    That is without dictionaries and extension types (the datasets library registers some), and without views, which
    polars writes: their texts and bytes become large ones, and their lists, in any order in memory, large lists.
    """
    pa = require_pyarrow()
    types, kind = pa.types, array.type
    if isinstance(array, pa.ExtensionArray):
        return plain(array.storage)
    if types.is_dictionary(kind):
        return plain(array.dictionary_decode())
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return array.cast(pa.large_string() if types.is_string_view(kind) else pa.large_binary())
    if _is_plain(kind):
        return array
    if types.is_struct(kind):
        children = [plain(array.field(at)) for at in range(kind.num_fields)]
        names = [kind.field(at).name for at in range(kind.num_fields)]
        return pa.StructArray.from_arrays(children, names, mask=array.is_null())
    if not is_list(kind):
        return array
    values = plain(array.flatten())
    return as_lists(array, values, pa.large_list(values.type))


def as_lists(array: Array, values: Array, arrow_type: pa.DataType) -> Array:
    """Lists of this type, with or without large offsets, as long as those in ``array``, of all their values in turn."""
    # Not by pyarrow's ``cast`` (26), which loses values of views.
    pa = require_pyarrow()
    sizes = pa.compute.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    is_missing = np.append(array.is_null().to_numpy(zero_copy_only=False), values=False)
    is_large = pa.types.is_large_list(arrow_type)
    offsets = np.append(0, np.cumsum(sizes, dtype=np.int64)).astype(np.int64 if is_large else np.int32)
    kind = pa.LargeListArray if is_large else pa.ListArray
    return kind.from_arrays(pa.array(offsets, mask=is_missing), values, type=arrow_type)


def plain_type(arrow_type: ArrowType) -> ArrowType:
    """The one type for all that hold the same values: of texts, of bytes, of lists, and of what is in them."""
    pa = require_pyarrow()
    types = pa.types
    if types.is_dictionary(arrow_type):
        return plain_type(arrow_type.value_type)
    if types.is_string_view(arrow_type) or types.is_large_string(arrow_type):
        return pa.string()
    if types.is_binary_view(arrow_type) or types.is_large_binary(arrow_type):
        return pa.binary()
    if is_list(arrow_type):
        return pa.list_(pa.field("element", plain_type(arrow_type.value_type)))
    if types.is_struct(arrow_type):
        fields = [arrow_type.field(at) for at in range(arrow_type.num_fields)]
        return pa.struct([field.with_type(plain_type(field.type)) for field in fields])
    return arrow_type


def _is_plain(arrow_type: pa.DataType) -> bool:
    """Return whether there is nothing in it that ``plain`` would change."""
    pa = require_pyarrow()
    types = pa.types
    changes = (types.is_dictionary, types.is_string_view, types.is_binary_view, *_list_views(types))
    if isinstance(arrow_type, pa.BaseExtensionType) or any(change(arrow_type) for change in changes):
        return False
    return all(_is_plain(arrow_type.field(at).type) for at in range(arrow_type.num_fields))


def take_rows(table: pa.Table, places: NDArray[np.int64]) -> pa.Table:
    """The rows at these places, in this order, whatever is in them."""
    runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
    if len(runs) == 1:
        return table.slice(int(places[0]) if len(places) else 0, len(places))
    try:
        return table.take(places)
    except require_pyarrow().ArrowNotImplementedError:  # pyarrow (26) takes no views
        joined: pa.Table = require_pyarrow().concat_tables([table.slice(int(run[0]), len(run)) for run in runs])
        return joined


def to_objects(array: Array, where: str, *, remedy: str) -> list[Any]:
    """The column's values as Python objects. ``where`` and ``remedy`` are for the message.

    Raises:
        FormatError: Python has none for a value: a text isn't UTF-8, a time lies beyond year 9999, in no time zone ...
    """
    try:
        objects: list[Any] = array.to_pylist()
    except (ValueError, ArithmeticError, LookupError, require_pyarrow().ArrowException) as error:
        raise FormatError(f"{where} holds a {array.type} that Python can't: {error}", remedy=remedy) from error
    return objects


def is_list(arrow_type: pa.DataType) -> bool:
    """Return whether a value is a list, of fixed size or not."""
    types = require_pyarrow().types
    kinds = (types.is_list, types.is_large_list, types.is_fixed_size_list, *_list_views(types))
    return any(is_kind(arrow_type) for is_kind in kinds)


def _list_views(types: Any) -> tuple[Any, ...]:  # noqa: ANN401  (pyarrow has no types)
    return types.is_list_view, types.is_large_list_view


def is_text(arrow_type: pa.DataType) -> bool:
    """Return whether a value is a string. Where all are null, Arrow may know no better type."""
    types = require_pyarrow().types
    return bool(types.is_string(arrow_type) or types.is_large_string(arrow_type) or types.is_null(arrow_type))
