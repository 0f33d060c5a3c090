"""What a sample description says of the pictures: codec, pixel format, decoder configuration. Pure."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from asyncfetch.errors import FormatError, redact_url
from asyncfetch.media.boxes import Box

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncfetch.media import Mp4Index

__all__ = ["Pictures", "describe_pictures", "plain_description"]

_CODECS = {"av01": "av1", "avc1": "h264", "avc3": "h264", "hev1": "hevc", "hvc1": "hevc"}
_ENTRY_BYTES = 78
"""Fixed part of a visual sample entry (ISO/IEC 14496-12)."""
_STSD_BYTES = 8
"""Version, flags and the number of entries, in front of the entries."""
_CHROMA = {0: "gray", 1: "yuv420p", 2: "yuv422p", 3: "yuv444p"}
_PLAIN_PROFILES = frozenset({66, 77, 88})
"""H.264 profiles that are 8 bit 4:2:0; the configuration of the others ends with the chroma format and bit depths."""


class Pictures(NamedTuple):
    """What all videos of a camera must have in common to be one camera's."""

    codec: str
    """As info.json names it: "av1", "h264", "hevc"."""
    width: int
    height: int
    pixel_format: str
    """As FFmpeg names it: "yuv420p", "gray12le"; empty where the configuration doesn't tell."""
    timescale: int
    """Ticks per second."""


def describe_pictures(index: Mp4Index) -> Pictures:
    """What the file's own index says.

    Raises:
        FormatError: It has more than one sample description, or one that is cut off.
    """
    if len(index.formats) != 1:
        raise FormatError(
            f"{redact_url(index.url)}: {len(index.formats)} sample descriptions; a merge takes videos of one encoding "
            "each"
        )
    (entry,) = _entries(index.track.stsd, index.url)
    boxes = {box.kind: box for box in entry.children(_ENTRY_BYTES)}
    codec = _CODECS.get(index.codec, index.codec)
    return Pictures(codec, index.width, index.height, _pixel_format(boxes), index.timescale)


def plain_description(stsd: bytes) -> bytes:
    """A sample description's body without what says nothing of the pictures.

    That is the bit rate (``btrt``), true of one file only, and square pixels (``pasp``), the default.
    """
    pieces = [stsd[:_STSD_BYTES]]
    for entry in _entries(stsd, "stsd"):
        body = [bytes(entry.body[:_ENTRY_BYTES])]
        body += [_box(box) for box in entry.children(_ENTRY_BYTES) if not _is_idle(box)]
        pieces.append(_pack(entry.kind, b"".join(body)))
    return b"".join(pieces)


def _entries(stsd: bytes, where: str) -> Iterator[Box]:
    return Box("stsd", memoryview(stsd), where).children(_STSD_BYTES)


def _box(box: Box) -> bytes:
    return _pack(box.kind, bytes(box.body))


def _is_idle(box: Box) -> bool:
    return box.kind == "btrt" or (box.kind == "pasp" and box.body[:4] == box.body[4:8])


def _pack(kind: str, body: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(body), kind.encode("latin-1")) + body


def _pixel_format(boxes: dict[str, Box]) -> str:
    if box := boxes.get("av1C"):
        (flags,) = box.unpack("B", 2)
        depth = (12 if flags & 0x20 else 10) if flags & 0x40 else 8
        chroma = 0 if flags & 0x10 else {0b11: 1, 0b10: 2, 0b00: 3}.get(flags >> 2 & 0b11, 1)
    elif box := boxes.get("hvcC"):
        chroma, luma = (value & mask for value, mask in zip(box.unpack("BB", 16), (3, 7), strict=True))
        depth = luma + 8
    elif box := boxes.get("avcC"):
        chroma, depth = _h264_format(box)
    else:
        return ""
    return _CHROMA[chroma] + (f"{depth}le" if depth > 8 else "")


def _h264_format(box: Box) -> tuple[int, int]:
    """(chroma format, bit depth), from behind the parameter sets."""
    data = bytes(box.body)
    if len(data) < 7:
        raise box.error(f"is {len(data)} bytes long, too short for a decoder configuration")
    position = 5
    if data[1] in _PLAIN_PROFILES:
        return 1, 8
    for mask in (0x1F, 0xFF):
        count = data[position] & mask if position < len(data) else 0
        position += 1
        for _ in range(count):
            position += 2 + int.from_bytes(data[position : position + 2], "big")
    if position + 2 > len(data):  # older writers leave the end out
        return 1, 8
    return data[position] & 3, (data[position + 1] & 7) + 8
