"""Where the files of a dataset are: the path templates of info.json. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from string import Formatter

from asyncfetch.errors import FormatError

__all__ = ["EPISODES_PATH", "PathTemplate"]

_FIELDS = frozenset({"chunk_index", "file_index", "video_key"})
_NUMBER_SPEC = re.compile(r"0?\d{0,2}d?")


@dataclass(frozen=True, slots=True)
class PathTemplate:
    """A path with ``{chunk_index:03d}``, ``{file_index:03d}`` and ``{video_key}`` in it.

    The text comes from the dataset, so from anyone: it may format these fields as whole numbers of up to 99 digits and
    do nothing else that ``str.format`` can (reach attributes, ask for gigabytes of padding), nor leave the root.

    Raises:
        FormatError: The template asks for anything else.
    """

    text: str
    """As in info.json."""

    def __post_init__(self) -> None:
        try:
            pieces = list(Formatter().parse(self.text))
        except ValueError as error:
            raise FormatError(f"path template {self.text!r} of info.json can't be read: {error}") from error
        for _, field, spec, conversion in pieces:
            if field is None:
                continue
            plain = field != "video_key" or not spec
            if field not in _FIELDS or conversion or not plain or not _NUMBER_SPEC.fullmatch(spec or ""):
                message = f"path template {self.text!r} of info.json may only use {', '.join(sorted(_FIELDS))}"
                raise FormatError(f"{message} (numbers as :03d), not {{{field}}}")

    def has(self, field: str) -> bool:
        """Whether paths differ where this field does."""
        return any(name == field for _, name, _, _ in Formatter().parse(self.text))

    def format(self, *, chunk_index: int, file_index: int, video_key: str = "") -> str:
        """The path, relative to the dataset's root.

        Raises:
            FormatError: The path would leave the root.
        """
        path = self.text.format(chunk_index=chunk_index, file_index=file_index, video_key=video_key)
        if path.startswith("/") or ".." in path.split("/"):
            raise FormatError(f"path {path!r} of info.json must be relative to the dataset's root, without '..'")
        return path


EPISODES_PATH = PathTemplate("meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet")
"""The episode table's files. info.json has no template for them."""
