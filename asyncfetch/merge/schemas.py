"""Arrow schemas as bytes: in pickle, pyarrow (26) loses the names of lists' elements, which end up in the files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncfetch.lerobot.parquet import require_pyarrow

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["pack_schema", "unpack_schema"]


def pack_schema(schema: pa.Schema) -> bytes:
    """All of it, metadata included."""
    packed: bytes = schema.serialize().to_pybytes()
    return packed


def unpack_schema(packed: bytes) -> pa.Schema:
    """What was packed."""
    arrow = require_pyarrow()
    schema: pa.Schema = arrow.ipc.read_schema(arrow.py_buffer(packed))
    return schema
