"""Types of columns that differ only in what may be null: one for all, and values as that one. Blocks.

pyarrow's own ``cast`` spoils a null type within a list (26: "Struct child array #4 has length smaller than expected").
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from asyncfetch.lerobot.parquet import require_pyarrow

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["common_type", "converted"]

ArrowType = Any
Array = Any
"""pyarrow's types know neither lists nor structs."""


def common_type(one: ArrowType, other: ArrowType) -> ArrowType | None:
    """The type that has room for the values of both; None where they differ in more than nulls, at any depth."""
    pa = require_pyarrow()
    types = pa.types
    if one == other or types.is_null(other):
        return one
    if types.is_null(one):
        return other
    if one.id != other.id or one.num_fields != other.num_fields:
        return None
    if isinstance(one, pa.BaseExtensionType) or not one.num_fields:
        return None
    if types.is_fixed_size_list(one) and one.list_size != other.list_size:
        return None
    pairs = [(one.field(at), other.field(at)) for at in range(one.num_fields)]
    fields: list[Any] = [_common_field(*pair) for pair in pairs]
    if any(field is None for field in fields):
        return None
    if types.is_struct(one):
        return pa.struct(fields) if [a.name for a, _ in pairs] == [b.name for _, b in pairs] else None
    if types.is_list(one):
        return pa.list_(fields[0])
    if types.is_large_list(one):
        return pa.large_list(fields[0])
    if types.is_fixed_size_list(one):
        return pa.list_(fields[0], one.list_size)
    if types.is_map(one):
        key, value = fields[0].type.field(0), fields[0].type.field(1)
        return pa.map_(key, value, one.keys_sorted)
    return None


def _common_field(one: pa.Field[Any], other: pa.Field[Any]) -> pa.Field[Any] | None:
    common = common_type(one.type, other.type)
    return None if common is None else one.with_type(common).with_nullable(one.nullable or other.nullable)


def converted(column: pa.ChunkedArray[Any], arrow_type: ArrowType) -> pa.ChunkedArray[Any]:
    """The column's values as this type, a ``common_type`` of its own."""
    arrow = require_pyarrow()
    same: pa.ChunkedArray[Any] = arrow.chunked_array(
        [_converted(arrow, chunk, arrow_type) for chunk in column.chunks], arrow_type
    )
    return same


def _converted(pa: Any, array: Array, to: ArrowType) -> Array:  # noqa: ANN401
    types = pa.types
    if array.type == to:
        return array
    if types.is_null(array.type):
        return pa.nulls(len(array), to)
    if array.type.id != to.id or isinstance(to, pa.BaseExtensionType) or not to.num_fields:
        return array.cast(to)
    if types.is_struct(to):
        children = [_converted(pa, array.field(at), to.field(at).type) for at in range(to.num_fields)]
        return pa.StructArray.from_arrays(children, fields=list(to), mask=array.is_null())
    if types.is_fixed_size_list(to):
        values = array.values.slice(array.offset * to.list_size, len(array) * to.list_size)
        return pa.FixedSizeListArray.from_arrays(_converted(pa, values, to.value_type), type=to, mask=array.is_null())
    first, stop = array.offsets[0].as_py(), array.offsets[len(array)].as_py()
    is_missing = np.append(array.is_null().to_numpy(zero_copy_only=False), values=False)
    offsets = pa.array(array.offsets.to_numpy() - first, mask=is_missing)
    if types.is_map(to):
        parts = ((array.keys, to.key_type), (array.items, to.item_type))
        children = [_converted(pa, part.slice(first, stop - first), own) for part, own in parts]
        return pa.MapArray.from_arrays(offsets, *children, type=to)
    kind = pa.LargeListArray if types.is_large_list(to) else pa.ListArray
    values = _converted(pa, array.values.slice(first, stop - first), to.value_type)
    return kind.from_arrays(offsets, values, type=to)
