"""Images that a table holds as encoded bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from asyncfetch.decode.backends import choose_backend, import_torch
from asyncfetch.decode.pyav_decoder import MemoryFile
from asyncfetch.decode.torchcodec_decoder import open_video
from asyncfetch.errors import DecodeError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["decode_image"]

PNG_START = b"\x89PNG\r\n\x1a\n"
PNG_DEPTH_AND_COLOUR = slice(24, 26)
"""In the header chunk, which comes first: bits a sample, kind of colour."""
TRUECOLOUR_8_BITS = b"\x08\x02"

TIFF_STARTS: Mapping[bytes, Literal["little", "big"]] = {b"II*\0": "little", b"MM\0*": "big"}
SAMPLE_FORMAT, FLOATS = 339, 3
"""The tag that tells what a TIFF's samples are, and what it says where they are floats."""

STORED_AS = {"gray": "gray", "rgba": "rgba", "gray16le": "gray16le", "gray16be": "gray16le"}
STORED_AS |= {"monob": "gray", "monow": "gray"}  # of one bit, 1 or 0 for white
"""The array format of FFmpeg's pixel formats that keep their channels; all others become rgb24."""


def decode_image(data: bytes | memoryview, *, name: str = "image") -> torch.Tensor:
    """A PNG, JPEG or integer TIFF as a tensor of its own.

    RGB images (and every JPEG but a gray one, palettes, and what else has colours) come as (3, height, width) uint8,
    gray ones as (1, height, width), of uint8 or, with 16 bits (depth), of uint16, unscaled; RGBA has 4 channels. Of one
    bit, black is 0 and white 255.
    JPEGs that store colour at half resolution may differ at edges from other libraries, which interpolate it.

    PNG in RGB, what LeRobot writes, needs torchcodec or PyAV; all else PyAV.

    Raises:
        DecodeError: The bytes aren't an image that FFmpeg reads. TIFFs of floats aren't; the message says so.
        MissingDependency: No library for this image loads.
    """
    if data[PNG_DEPTH_AND_COLOUR] == TRUECOLOUR_8_BITS and bytes(data[: len(PNG_START)]) == PNG_START:
        if choose_backend("auto") == "torchcodec":
            return _with_torchcodec(data, name)
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

    if _is_float_tiff(data):  # FFmpeg refuses some, and makes bytes of others
        raise DecodeError(
            f"{name}: these {len(data)} bytes are a TIFF of floats, which can't be read: store depth as integers, 16 "
            "bits of millimetres say, or leave the feature out by features="
        )
    try:
        with av.open(MemoryFile(data), mode="r") as container:
            container.streams.video[0].codec_context.thread_count = 1
            frame = next(container.decode(video=0))
            pixels = frame.to_ndarray(format=STORED_AS.get(frame.format.name, "rgb24"))
    except (av.FFmpegError, StopIteration, IndexError) as error:
        raise DecodeError(f"{name}: these {len(data)} bytes aren't an image that can be read: {error}") from error
    image: torch.Tensor = import_torch().from_numpy(np.atleast_3d(pixels)).permute(2, 0, 1)
    return image


def _is_float_tiff(data: bytes | memoryview) -> bool:
    """Whether the first directory of a TIFF says so; of what is cut off or damaged it may say anything."""
    order = TIFF_STARTS.get(bytes(data[:4]))
    if order is None:
        return False

    def number(start: int, size: int) -> int:
        return int.from_bytes(data[start : start + size], order)

    directory = number(4, 4)
    for entry in range(directory + 2, directory + 2 + 12 * number(directory, 2), 12):
        if number(entry, 2) == SAMPLE_FORMAT:
            values = entry + 8 if number(entry + 4, 4) <= 2 else number(entry + 8, 4)
            return number(values, 2) == FLOATS
    return False
