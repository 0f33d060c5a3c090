"""Arguments of the verbs: what can't be meant is refused before anything is asked for. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncfetch.errors import ConfigError
from asyncfetch.ranges import ByteRange, is_whole_number

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncfetch.fetch.reader import WritableBuffer

__all__ = ["byte_count", "byte_ranges", "closed_range", "writable_bytes"]


def byte_ranges(ranges: Iterable[ByteRange]) -> list[ByteRange]:
    """All of them; ConfigError where one is something else."""
    try:
        wanted = list(ranges)
    except TypeError as error:
        raise ConfigError(f"ranges must be an iterable of ByteRange: {error}") from error
    for position, one in enumerate(wanted):
        if not isinstance(one, ByteRange):
            raise ConfigError(f"ranges[{position}] must be a ByteRange, not of type {type(one).__name__}")
    return wanted


def closed_range(url: str, start: int, stop: int) -> ByteRange:
    """The range; ConfigError where it has no end."""
    wanted = ByteRange(url, start, stop)
    if wanted.stop is None:
        raise ConfigError("stop must be a whole number where there is a buffer: its length is stop - start")
    return wanted


def byte_count(max_bytes: int) -> int:
    """It, where it is one; else ConfigError."""
    if not is_whole_number(max_bytes) or max_bytes < 0:
        raise ConfigError(f"max_bytes must be a whole number and not negative, not {max_bytes!r}")
    return max_bytes


def writable_bytes(buffer: WritableBuffer, length: int) -> memoryview:
    """The buffer as bytes, to write to; ConfigError where it can't be, or isn't of this length."""
    try:
        view = memoryview(buffer)
        usable = view.c_contiguous and not view.readonly
        view = view.cast("B") if usable else view
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the buffer can't be written to as bytes: {error}") from error
    if not usable:
        raise ConfigError("the buffer must be writable and contiguous")
    if len(view) != length:
        raise ConfigError(f"the buffer has {len(view)} bytes and the range {length}: they must be equal")
    return view
