"""Images as encoded bytes, as a table holds them."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Literal

import numpy as np

from asyncfetch.decode.backends import choose_backend, import_torch, on_this_thread
from asyncfetch.decode.decoder import MemoryFile, open_video
from asyncfetch.errors import DecodeError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from numpy.typing import NDArray

PNG_START = b"\x89PNG\r\n\x1a\n"
PNG_DEPTH_AND_COLOUR = slice(24, 26)
"""Bytes in the header chunk, which comes first: bits a sample, kind of colour."""
TRUECOLOUR_8_BITS = b"\x08\x02"

TIFF_STARTS: Mapping[bytes, Literal["little", "big"]] = {b"II*\0": "little", b"MM\0*": "big"}
WIDTH, HEIGHT, BITS, COMPRESSION, STRIP_STARTS, CHANNELS, STRIP_BYTES, SAMPLE_FORMAT = WANTED_TAGS = (
    *(256, 257, 258, 259),
    *(273, 277, 279, 339),
)
"""Tags of a TIFF."""
NUMBER_BYTES = {1: 1, 3: 2, 4: 4}
"""Bytes of the types that the values of these tags have."""
NOT_COMPRESSED, FLOATS = 1, 3
"""Values of two of them."""

STORED_AS = {"gray": "gray", "rgba": "rgba", "gray16le": "gray16le", "gray16be": "gray16le"}
STORED_AS |= {"monob": "gray", "monow": "gray"}  # of one bit, 1 or 0 for white
"""The array format of FFmpeg's pixel formats that keep their channels; all others become rgb24."""


def encode_png(picture: NDArray[np.uint8]) -> bytes:
    """An RGB picture (height, width, 3) as a PNG file."""
    height, width, _ = picture.shape
    rows = np.pad(picture.reshape(height, width * 3), ((0, 0), (1, 0)))  # each begins with its filter: 0, none
    header = struct.pack(">II", width, height) + TRUECOLOUR_8_BITS + bytes(3)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 1)), (b"IEND", b""))
    return PNG_START + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )


def decode_image(data: bytes | memoryview, *, name: str = "image") -> torch.Tensor:
    """A PNG, JPEG or TIFF as a tensor of its own.

    RGB images (and every JPEG but a gray one, palettes, and what else has colours) come as (3, height, width) uint8,
    gray ones as (1, height, width), of uint8 or, with 16 bits (depth), of uint16, unscaled; RGBA has 4 channels. Of one
    bit, black is 0 and white 255. A TIFF of floats, one a pixel and not compressed, as LeRobot writes it of depth in
    metres, comes as (1, height, width) float32.
    JPEGs that store colour at half resolution may differ at edges from other libraries, which interpolate it.

    PNG in RGB, what LeRobot writes, needs torchcodec or PyAV; all else but floats PyAV.

    Raises:
        DecodeError: The bytes aren't an image that can be read.
        MissingDependency: No library for this image loads.
    """
    if data[PNG_DEPTH_AND_COLOUR] == TRUECOLOUR_8_BITS and bytes(data[: len(PNG_START)]) == PNG_START:
        if choose_backend("auto") == "torchcodec":
            return _with_torchcodec(data, name)
    elif (tags := _tiff_tags(data)).get(SAMPLE_FORMAT, [0])[0] == FLOATS:
        return _floats(data, tags, name)  # FFmpeg refuses some, and makes bytes of others
    else:
        choose_backend("pyav")
    return _with_pyav(data, name)


def _with_torchcodec(data: bytes | memoryview, name: str) -> torch.Tensor:
    video = open_video(data, name)
    try:
        image: torch.Tensor = video.get_frame_at(0).data
    except (IndexError, RuntimeError) as error:
        raise DecodeError(f"{name}: torchcodec can't decode these {len(data)} bytes: {error}") from error
    return image


def _with_pyav(data: bytes | memoryview, name: str) -> torch.Tensor:
    import av

    try:
        with av.open(MemoryFile(data), mode="r") as container:
            container.streams.video[0].codec_context.thread_count = 1
            frame = next(container.decode(video=0))
            pixels = frame.to_ndarray(format=STORED_AS.get(frame.format.name, "rgb24"), **on_this_thread())
    except (av.FFmpegError, StopIteration, IndexError) as error:
        raise DecodeError(f"{name}: these {len(data)} bytes aren't an image that can be read: {error}") from error
    image: torch.Tensor = import_torch().from_numpy(np.atleast_3d(pixels)).permute(2, 0, 1)
    return image


def _tiff_tags(data: bytes | memoryview) -> dict[int, list[int]]:
    """The values of these tags in the first directory of a TIFF; of what is cut off or damaged they may be anything."""
    order = TIFF_STARTS.get(bytes(data[:4]))
    if order is None:
        return {}

    def number(start: int, size: int) -> int:
        return int.from_bytes(data[start : start + size], order)

    directory, tags = number(4, 4), {}
    for entry in range(directory + 2, min(directory + 2 + 12 * number(directory, 2), len(data)), 12):
        size, count = NUMBER_BYTES.get(number(entry + 2, 2), 0), number(entry + 4, 4)
        if number(entry, 2) in WANTED_TAGS and size and count * size <= len(data):
            values = entry + 8 if size * count <= 4 else number(entry + 8, 4)
            tags[number(entry, 2)] = [number(values + size * i, size) for i in range(count)]
    return tags


def _floats(data: bytes | memoryview, tags: Mapping[int, list[int]], name: str) -> torch.Tensor:
    """Return the picture of a TIFF with tags that say it is made of floats."""
    bits, channels, compression = tags.get(BITS, [0]), tags.get(CHANNELS, [1]), tags.get(COMPRESSION, [NOT_COMPRESSED])
    if channels != [1] or compression != [NOT_COMPRESSED] or bits not in ([16], [32], [64]):
        raise DecodeError(
            f"{name}: these {len(data)} bytes are a TIFF of floats with {channels[0]} channels of {bits[0]} bits, "
            f"compression {compression[0]}; it can be read with one channel of 16, 32 or 64 bits, not compressed: write"
            " the pictures so, or leave the feature out by features="
        )
    starts, sizes = tags.get(STRIP_STARTS, []), tags.get(STRIP_BYTES, [])
    height, width = tags.get(HEIGHT, [0])[0], tags.get(WIDTH, [0])[0]
    pixels = b"".join(data[start : start + size] for start, size in zip(starts, sizes, strict=False))
    if not pixels or len(pixels) != height * width * bits[0] // 8:
        raise DecodeError(
            f"{name}: these {len(data)} bytes are a damaged TIFF: {len(pixels)} bytes of pixels for {height} rows of "
            f"{width} floats of {bits[0]} bits"
        )
    order = "<" if TIFF_STARTS[bytes(data[:4])] == "little" else ">"
    stored = np.frombuffer(pixels, f"{order}f{bits[0] // 8}").reshape(1, height, width)
    image: torch.Tensor = import_torch().from_numpy(stored.astype(np.float32))
    return image
