"""The values of features, from the Arrow columns that hold them to numpy arrays and Python lists.

Blocks: for use in a thread.
"""

from __future__ import annotations

import itertools
import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncfetch.errors import LEAVE_OUT_FEATURE, FormatError, redact_url
from asyncfetch.tables.columns import is_list, is_text, to_array, to_objects, without_decimals
from asyncfetch.tables.parquet import require_pyarrow

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from asyncfetch.lerobot.info import Feature
    from asyncfetch.tables.columns import Array

Column = Any
"""NDArray (length, *shape), (length,) for shapes (1,) and (); or a list with an item a row."""


def empty_column(feature: Feature) -> Column:
    """The feature's column of no rows."""
    if feature.kind == "value":
        return np.empty((0, *_row_shape(feature)), dtype=feature.row_dtype)
    return []


def to_column(column: pa.ChunkedArray[Any], feature: Feature, url: str) -> Column:
    """The feature's values in row order, in memory of their own.

    Numbers are of the feature's dtype, however they are stored, floats rounded where that is narrower; a null in a
    float column is NaN. Strings are str, pictures the bytes of their file, everything else Python objects. FormatError
    where what is stored isn't the feature's, nor holds the same values, or lacks one that must be there.
    """
    pa, array, where = require_pyarrow(), to_array(column), f"feature {feature.key} of {redact_url(url)}"
    if feature.kind == "value":
        return _values(pa, array, feature, where)
    if feature.kind == "image":
        return _images(pa, array, where)
    if feature.kind == "string" and not is_text(array.type):
        raise _unfit(f"{where} must hold strings, not {array.type}")
    objects = to_objects(array, where, remedy=LEAVE_OUT_FEATURE)
    if feature.kind == "language" and is_list(array.type) and pa.types.is_struct(array.type.value_type):
        _as_lerobot(objects, where)
    return objects


def _as_lerobot(rows: Sequence[Any], where: str) -> None:
    """Change annotations to what LeRobot gives: times as float32, calls of tools out of JSON."""
    for said in itertools.chain.from_iterable(row or () for row in rows):
        if said and said.get("timestamp") is not None:
            said["timestamp"] = float(np.float32(said["timestamp"]))
        if said and (calls := said.get("tool_calls")):
            try:
                said["tool_calls"] = [json.loads(call) if isinstance(call, str) else call for call in calls]
            except ValueError as error:
                raise _unfit(f"{where} has a call of a tool that isn't JSON, {calls!r:.80}") from error


def _unfit(message: str) -> FormatError:
    """Return the error of a feature with a column that isn't what info.json says."""
    return FormatError(message, remedy=LEAVE_OUT_FEATURE)


def _values(pa: Any, array: Array, feature: Feature, where: str) -> NDArray[Any]:  # noqa: ANN401
    length, stored = len(array), []
    while is_list(array.type):
        stored.append(_list_sizes(pa, array, where))
        array = array.flatten()
    if array.null_count and not pa.types.is_floating(array.type):
        raise _unfit(f"{where} has {array.null_count} nulls among its {len(array)} values of type {array.type}")
    array = without_decimals(array)
    # A table that passed through pandas has other widths, and integers as floats.
    if not (pa.types.is_floating(array.type) or pa.types.is_integer(array.type) or pa.types.is_boolean(array.type)):
        raise _unfit(f"{where} must hold {feature.dtype}, not {array.type}")
    if length and not _is_same_shape(stored, feature.shape):
        raise _unfit(f"{where} has shape {tuple(stored)} a row; info.json says {feature.shape}")
    flat = array.to_numpy(zero_copy_only=False)
    return _as_declared(flat, array.type, feature, where).reshape(length, *_row_shape(feature))


def _is_same_shape(stored: Sequence[int], declared: Sequence[int]) -> bool:
    """Return whether the values' order is the same, too: it is where either is flat."""
    long_axes = [[size for size in shape if size != 1] for shape in (stored, declared)]
    is_flat = min(map(len, long_axes)) <= 1
    return math.prod(stored) == math.prod(declared) and (is_flat or long_axes[0] == long_axes[1])


def _as_declared(values: NDArray[Any], stored: pa.DataType, feature: Feature, where: str) -> NDArray[Any]:
    """Return the values as the feature's dtype, in memory of their own."""
    with np.errstate(invalid="ignore", over="ignore"):
        declared = values.astype(feature.dtype)
    if values.dtype.kind == declared.dtype.kind == "f":
        wrong = np.isfinite(values) & ~np.isfinite(declared)
    elif values.dtype != declared.dtype:
        wrong = declared != values
    else:
        return declared
    if wrong.any():
        raise _unfit(
            f"{where} is {feature.dtype} by info.json, but stored as {stored}, among others {values[wrong.argmax()]}, "
            f"which no {feature.dtype} is"
        )
    return declared


def _list_sizes(pa: Any, array: Array, where: str) -> int:  # noqa: ANN401
    """The one length that all lists have."""
    if array.null_count:
        raise _unfit(f"{where} has {array.null_count} nulls among its {len(array)} rows or axes")
    sizes = np.unique(pa.compute.list_value_length(array).to_numpy(zero_copy_only=False))
    if len(sizes) > 1:
        raise _unfit(f"{where} has rows of {sizes[0]} to {sizes[-1]} values; they must have one shape")
    return int(sizes[0]) if len(sizes) else 0


def _images(pa: Any, array: Array, where: str) -> list[bytes]:  # noqa: ANN401
    data = array
    if pa.types.is_struct(array.type) and array.type.get_field_index("bytes") >= 0:
        data = array.field("bytes")
        if array.null_count:
            data = pa.compute.if_else(array.is_valid(), data, None)
    if not (pa.types.is_binary(data.type) or pa.types.is_large_binary(data.type) or pa.types.is_null(data.type)):
        raise _unfit(f"{where} must hold pictures as struct<bytes, path>, not {array.type}")
    if data.null_count:
        message = f"{where} lacks the picture's bytes in {data.null_count} of {len(data)} rows"
        raise _unfit(f"{message}; pictures must be embedded in the table")
    pictures: list[bytes] = data.to_pylist()
    return pictures


def _row_shape(feature: Feature) -> tuple[int, ...]:
    return () if feature.shape == (1,) else feature.shape
