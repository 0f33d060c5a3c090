"""Arguments of the verbs: what can't be meant is refused before anything is asked for. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from asyncfetch.errors import ConfigError
from asyncfetch.ranges import ByteRange, is_whole_number

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncfetch.fetch.reader import WritableBuffer

__all__ = ["byte_count", "byte_ranges", "closed_range", "has_objects"]

_FIELD_NAME = re.compile(":[^:]*:")


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


def closed_range(url: str, start: int, stop: int, buffer: WritableBuffer) -> tuple[ByteRange, memoryview]:
    """The range, and the buffer as bytes to write to.

    ConfigError where the range has no end, or where the buffer can't be written to so, or isn't of its length.
    """
    wanted = ByteRange(url, start, stop)
    if wanted.stop is None:
        raise ConfigError("stop must be a whole number where there is a buffer: its length is stop - start")
    length = wanted.stop - wanted.start
    try:
        view = memoryview(buffer)
        usable = view.c_contiguous and not view.readonly and view.nbytes == length
        # A view with a zero in its shape can't be cast, and has nothing to write to.
        target = view.cast("B") if usable and length else view
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the buffer can't be written to as bytes: {error}") from error
    if has_objects(view):
        raise ConfigError("the buffer holds Python objects, and bytes can't be written over them: give it numbers")
    if not usable:
        kind = f"{'read-only' if view.readonly else 'writable'}{'' if view.c_contiguous else ' with gaps'}"
        message = f"{wanted!r} needs a writable, contiguous buffer of {length} bytes, not one of {view.nbytes}, {kind}"
        raise ConfigError(message)
    return wanted, target


def has_objects(view: memoryview) -> bool:
    """Return whether it has Python objects, alone or as fields: its bytes are their addresses, good here and now."""
    return "O" in _FIELD_NAME.sub("", view.format)


def byte_count(max_bytes: int) -> int:
    """It as Python's, where it is a whole number and not negative; else ConfigError."""
    if not is_whole_number(max_bytes) or max_bytes < 0:
        raise ConfigError(f"max_bytes must be a whole number and not negative, not {max_bytes!r}")
    return int(max_bytes)
