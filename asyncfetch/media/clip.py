"""A clip: a stretch of a video file's samples, and the header that makes a whole MP4 of their bytes.

The samples' bytes are fetched as they lie in the source file; in front of them go ``ftyp``, ``moov`` and the header of
``mdat``. The new sample tables describe only the samples needed; what else lies between them (audio, free space) stays
in the media data, and nothing refers to it. There is no edit list: composition offsets are moved so that none is
negative, so a frame's presentation time is its decode time plus its offset, in every reader.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncfetch.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from asyncfetch.media.samples import ByteRuns

__all__ = ["ClipPlan", "ClipTables", "TrackFormat", "build_header"]

UINT32_LIMIT = 1 << 32


@dataclass(frozen=True, slots=True, eq=False)
class ClipPlan:
    """Which bytes of a video file to fetch for some frames, and how to find the frames in them.

    ``buffer[:header_bytes]``, filled by ``write_header``, followed by the file's bytes [start, stop) is an MP4 of one
    video track. It may hold more frames than asked for: the key frame in front, and what lies between.
    With no frame to show, all is empty: ``start == stop``, no header.
    """

    start: int
    """First byte of the source file to fetch."""
    stop: int
    """One past the last byte to fetch."""
    frame_index: NDArray[np.int32]
    """Rank, by presentation time among the clip's samples, of each asked frame; -1 where the file has no such frame."""
    pts: NDArray[np.int64]
    """Presentation time of each asked frame in the clip, in ticks; -1 where the file has no such frame."""
    timescale: int
    """Ticks per second; the source track's."""
    num_samples: int
    """Frames that the clip holds."""
    codec: str
    """Sample entry: "av01", "avc1", "hev1" ..."""
    width: int
    height: int
    header: bytes = field(repr=False)
    """``ftyp``, ``moov`` and the header of ``mdat``."""

    @property
    def header_bytes(self) -> int:
        """Room to reserve in front of the fetched bytes."""
        return len(self.header)

    def write_header(self, buffer: memoryview) -> None:
        """Writes the header to the first ``header_bytes`` of a writable byte buffer; what follows is left alone.

        Raises:
            ConfigError: The buffer is too short.
        """
        if buffer.nbytes < self.header_bytes:
            raise ConfigError(f"the clip's header takes {self.header_bytes} bytes; the buffer has {buffer.nbytes}")
        buffer[: self.header_bytes] = self.header


@dataclass(frozen=True, slots=True)
class TrackFormat:
    """What a clip takes over from its source track unchanged."""

    codec: str
    width: int
    height: int
    timescale: int
    stsd: bytes = field(repr=False)
    """Body of the sample description box, with the decoder's configuration and the colour description."""
    geometry: bytes = field(repr=False)
    """The end of the track header, from ``layer`` on: volume, matrix (rotation), width and height."""


class ClipTables(NamedTuple):
    """The samples of a clip, in decode order, in the numbers of the new file."""

    sizes: NDArray[Any]
    durations: NDArray[Any]
    composition: NDArray[Any]
    """None negative."""
    sync: NDArray[Any] | None
    """Key frames, from 0; None means all."""
    runs: ByteRuns


def build_header(track: TrackFormat, tables: ClipTables, *, start: int, stop: int) -> bytes:
    """The bytes to put in front of bytes [start, stop) of the source file; all runs lie within them."""
    header = _build_header(track, tables, start, stop, wide=stop - start >= UINT32_LIMIT)
    if len(header) + stop - start >= UINT32_LIMIT:  # an offset, or the size of mdat, may not fit 32 bits
        header = _build_header(track, tables, start, stop, wide=True)
    return header


def _build_header(track: TrackFormat, tables: ClipTables, start: int, stop: int, *, wide: bool) -> bytes:
    mdat = (
        struct.pack(">I4sQ", 1, b"mdat", 16 + stop - start) if wide else struct.pack(">I4s", 8 + stop - start, b"mdat")
    )
    offsets = np.zeros(len(tables.runs.offset), ">u8" if wide else ">u4")
    header = bytearray().join((FTYP, _moov(track, tables, offsets), mdat))
    # The offsets are the last bytes of moov, and depend on its length: they are filled in now that it is known.
    offsets[:] = tables.runs.offset + (len(header) - start)
    header[-len(mdat) - offsets.nbytes : -len(mdat)] = offsets.tobytes()
    return bytes(header)


def _box(kind: bytes, *parts: bytes) -> bytes:
    return b"".join((struct.pack(">I4s", 8 + sum(map(len, parts)), kind), *parts))


UNITY_MATRIX = struct.pack(">9i", 0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000)
FTYP = _box(b"ftyp", b"isom", struct.pack(">I", 512), b"isomiso2mp41")
HDLR = _box(b"hdlr", struct.pack(">II4s12x", 0, 0, b"vide"), b"video\0")
VMHD = _box(b"vmhd", struct.pack(">I8x", 1))
SELF_CONTAINED = _box(b"dinf", _box(b"dref", struct.pack(">II", 0, 1), _box(b"url ", struct.pack(">I", 1))))
MVHD_END = (
    struct.pack(">IH10x", 0x10000, 0x100) + UNITY_MATRIX + struct.pack(">24xI", 2)
)  # rate 1, volume 1, next track 2
VERSION_1 = 1 << 24  # 64-bit durations
TRACK_ENABLED = 3  # and part of the movie
UNDETERMINED = 0x55C4  # the language "und"


def _moov(track: TrackFormat, tables: ClipTables, offsets: NDArray[Any]) -> bytes:
    duration = int(tables.durations.sum(dtype=np.int64))
    mvhd = _box(b"mvhd", struct.pack(">I16xIQ", VERSION_1, track.timescale, duration), MVHD_END)
    tkhd = _box(b"tkhd", struct.pack(">I16xI4xQ8x", VERSION_1 | TRACK_ENABLED, 1, duration), track.geometry)
    mdhd = _box(b"mdhd", struct.pack(">I16xIQHH", VERSION_1, track.timescale, duration, UNDETERMINED, 0))
    minf = _box(b"minf", VMHD, SELF_CONTAINED, _stbl(track, tables, offsets))
    return _box(b"moov", mvhd, _box(b"trak", tkhd, _box(b"mdia", mdhd, HDLR, minf)))


def _stbl(track: TrackFormat, tables: ClipTables, offsets: NDArray[Any]) -> bytes:
    boxes = [_box(b"stsd", track.stsd), _run_length(b"stts", tables.durations)]
    if tables.composition.any():
        boxes.append(_run_length(b"ctts", tables.composition))
    if tables.sync is not None:
        boxes.append(_table(b"stss", len(tables.sync), (tables.sync + 1).astype(">u4")))
    chunks = np.empty((len(offsets), 3), ">u4")
    chunks[:, 0] = np.arange(1, len(offsets) + 1)
    chunks[:, 1] = tables.runs.num_samples
    chunks[:, 2] = tables.runs.description
    boxes.append(_table(b"stsc", len(offsets), chunks))
    boxes.append(_box(b"stsz", struct.pack(">III", 0, 0, len(tables.sizes)), tables.sizes.astype(">u4").tobytes()))
    boxes.append(_table(b"stco" if offsets.itemsize == 4 else b"co64", len(offsets), offsets))
    return _box(b"stbl", *boxes)


def _table(kind: bytes, count: int, entries: NDArray[Any]) -> bytes:
    return _box(kind, struct.pack(">II", 0, count), entries.tobytes())


def _run_length(kind: bytes, values: NDArray[Any]) -> bytes:
    edges = np.flatnonzero(values[1:] != values[:-1]) + 1
    entries = np.empty((len(edges) + 1, 2), ">u4")
    entries[:, 0] = np.diff(edges, prepend=0, append=len(values))
    entries[:, 1] = values[np.append(0, edges)]
    return _table(kind, len(entries), entries)
