"""Structs of Thrift's compact protocol, which the headers and footers of Parquet are. Pure."""

from __future__ import annotations

from typing import Any

BOOLEANS, BYTE, INTEGERS, DOUBLE, BINARY, LISTS, STRUCT = (1, 2), 3, (4, 5, 6), 7, 8, (9, 10), 12
"""Numbers of types, as they stand before a value."""
MAX_DEPTH = 16
"""Structs and lists in each other; a footer of Parquet has 8."""
MAX_VARINT_BYTES = 10


class Long(int):
    """A whole number in a field of 64 bits; other fields have 32."""


def read_struct(data: memoryview, at: int = 0) -> tuple[dict[int, Any], int]:
    """The struct that begins there, its values by the numbers of their fields, and where it ends.

    Raises:
        IndexError: The data ends before it.
        ValueError: That is no struct.
    """
    return _read_struct(data, at, MAX_DEPTH)


def _read_struct(data: memoryview, at: int, depth: int) -> tuple[dict[int, Any], int]:
    fields: dict[int, Any] = {}
    number = 0
    while kind := data[at]:
        at += 1
        if kind >> 4:
            number += kind >> 4
        else:
            number, at = _read(data, at, INTEGERS[0], depth)
        kind &= 15
        fields[number], at = (kind == BOOLEANS[0], at) if kind in BOOLEANS else _read(data, at, kind, depth)
    return fields, at + 1


def _read(data: memoryview, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if not depth:
        raise ValueError(f"more than {MAX_DEPTH} structs and lists in each other")
    if kind in BOOLEANS:  # of a list
        return data[at] == BOOLEANS[0], at + 1
    if kind == BYTE:
        return data[at], at + 1
    if kind in INTEGERS:
        number, at = read_varint(data, at)
        return (number >> 1) ^ -(number & 1), at
    if kind == STRUCT:
        return _read_struct(data, at, depth - 1)
    if kind in LISTS:
        size, of = data[at] >> 4, data[at] & 15
        size, at = read_varint(data, at + 1) if size == 15 else (size, at + 1)
        items = []
        for _ in range(size):
            item, at = _read(data, at, of, depth - 1)
            items.append(item)
        return items, at
    size, at = (8, at) if kind == DOUBLE else read_varint(data, at)
    if kind not in {DOUBLE, BINARY}:
        raise ValueError(f"no type {kind}")
    if at + size > len(data):
        raise IndexError(f"{size} bytes from {at} on, of {len(data)}")
    return bytes(data[at : at + size]), at + size


def read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """The number that begins there, seven bits a byte, and where it ends; errors as of ``read_struct``."""
    number = 0
    for place in range(MAX_VARINT_BYTES):
        number |= (data[at + place] & 127) << 7 * place
        if data[at + place] < 128:
            return number, at + place + 1
    raise ValueError(f"a number of more than {MAX_VARINT_BYTES} bytes")


def write_struct(fields: dict[int, Any]) -> bytes:
    """A struct of whole numbers that aren't negative, bytes, structs, and lists of one of these."""
    written, previous = b"", 0
    for number, value in sorted(fields.items()):
        written += bytes([(number - previous) << 4 | _kind(value)]) + _write(value)
        previous = number
    return written + b"\0"


def _write(value: Any) -> bytes:  # noqa: ANN401
    if isinstance(value, dict):
        return write_struct(value)
    if isinstance(value, int):
        return _write_varint(value << 1)
    if isinstance(value, bytes):
        return _write_varint(len(value)) + value
    return bytes([0xF0 | _kind(value[0])]) + _write_varint(len(value)) + b"".join(map(_write, value))


def _kind(value: Any) -> int:  # noqa: ANN401
    if isinstance(value, int):
        return INTEGERS[isinstance(value, Long) + 1]
    return BINARY if isinstance(value, bytes) else LISTS[0] if isinstance(value, list) else STRUCT


def _write_varint(number: int) -> bytes:
    written = bytearray()
    while number > 127:
        written.append(number & 127 | 128)
        number >>= 7
    written.append(number)
    return bytes(written)
