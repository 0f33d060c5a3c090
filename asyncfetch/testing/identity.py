"""Pictures that carry their frame's identity, so that a reader is checked by pixels, not by another reader.

A picture is a grid of 7 x 8 cells, each dark or bright: 56 bits, row-major from the top left, most significant first:

    episode (20) | frame (16) | camera (4) | CRC-16 of those 40 bits (16)

On odd frames every bit is inverted but the last one of the frame number. So neighbours differ nearly everywhere: a
blend of two frames has grey cells, and a repeated frame can't pass for the next one. The cells stretch with the
picture, so a resized picture is still readable. Red is above blue everywhere, which exposes a decoder that swaps them.
"""

from __future__ import annotations

from binascii import crc_hqx
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncfetch.errors import ConfigError, DecodeError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

EPISODE_BITS, FRAME_BITS, CAMERA_BITS, CRC_BITS = 20, 16, 4, 16
PAYLOAD_BYTES = (EPISODE_BITS + FRAME_BITS + CAMERA_BITS) // 8
ROWS, COLUMNS = 7, 8
PARITY_BIT = EPISODE_BITS + FRAME_BITS - 1
"""Position of the frame number's last bit, the one that is never inverted."""

DARK, BRIGHT, THRESHOLD = 64, 192, 128
MARGIN = 24
"""Grey levels around the threshold that belong to no bit. Coding moves a cell's mean by less than 10."""
TINT = np.array([12, 0, -12], np.int16)
MIN_TINT = 8
MAX_TEXTURE = 24.0
"""Strongest texture, in grey levels; a cell's mean then still stays clear of the margin."""
MIN_CELL_PX = 8
TEXTURE_TRAVEL_PX = 64


class Identity(NamedTuple):
    """The frame that a picture shows. Equal to the plain tuple."""

    episode: int
    frame: int
    camera: int


def paint(
    episode: int, frame: int, camera: int, *, width: int, height: int, texture: float = 0.0, seed: int = 0
) -> NDArray[np.uint8]:
    """The picture (height, width, 3) of one frame; equal arguments give equal pixels.

    Args:
        episode: Below 2**20.
        frame: Below 2**16.
        camera: Below 2**4.
        width: Pixels, at least 64.
        height: Pixels, at least 56.
        texture: Standard deviation in grey levels, up to `MAX_TEXTURE`, of a grain that drifts from frame to frame;
            it costs an encoder bytes as a real scene does: 4.3 makes a frame of 640x480 in AV1, crf 30, a key frame
            every second frame, 8 to 10 kB. 0 leaves the cells flat.
        seed: Chooses the grain.

    Raises:
        ConfigError: A number doesn't fit its field, or the picture is too small.
    """
    if not 0 <= texture <= MAX_TEXTURE:
        raise ConfigError(f"texture={texture} must be within 0 and {MAX_TEXTURE} grey levels")
    cells = identity_cells(episode, frame, camera, width=width, height=height)
    grey = np.where(cells, np.int16(BRIGHT), np.int16(DARK))
    if texture:
        down, right = 3 * frame % TEXTURE_TRAVEL_PX, 5 * frame % TEXTURE_TRAVEL_PX
        grain = _grain(width, height, camera, seed)[down : down + height, right : right + width]
        grey += (texture * grain).astype(np.int16)
    return (grey[..., None] + TINT).clip(0, 255).astype(np.uint8)


def identity_cells(episode: int, frame: int, camera: int, *, width: int, height: int) -> NDArray[np.bool_]:
    """The grid stretched over (height, width): True where the picture is bright. Arguments and errors as of `paint`."""
    if width < COLUMNS * MIN_CELL_PX or height < ROWS * MIN_CELL_PX:
        raise ConfigError(
            f"a picture of {width}x{height} can't hold an identity: "
            f"it takes at least {COLUMNS * MIN_CELL_PX}x{ROWS * MIN_CELL_PX} pixels"
        )
    fields = {"episode": (episode, EPISODE_BITS), "frame": (frame, FRAME_BITS), "camera": (camera, CAMERA_BITS)}
    for name, (value, size) in fields.items():
        if not 0 <= value < 1 << size:
            raise ConfigError(f"{name} {value} must be within 0 and {(1 << size) - 1}, its field has {size} bits")
    payload = (((episode << FRAME_BITS) | frame) << CAMERA_BITS | camera).to_bytes(PAYLOAD_BYTES, "big")
    bits = _invert_if_odd(np.unpackbits(np.frombuffer(payload + _checksum(payload), np.uint8)))
    heights, widths = np.diff(_edges(height, ROWS)), np.diff(_edges(width, COLUMNS))
    return bits.astype(bool).reshape(ROWS, COLUMNS).repeat(heights, axis=0).repeat(widths, axis=1)


def read_identity(picture: ArrayLike) -> Identity:
    """The identity that `paint` put into a picture, after any lossy coding or resizing.

    Args:
        picture: (H, W, 3) or (3, H, W), uint8 or float in [0, 1]; an array or a CPU tensor.

    Raises:
        DecodeError: A cell is neither dark nor bright, the checksum is wrong, or red and blue are swapped: this isn't
            one whole painted picture.
        ConfigError: It hasn't the shape or the type of a picture.
    """
    pixels = _as_hwc(np.asarray(picture))
    red, _, blue = pixels.mean(axis=(0, 1))
    if red - blue < MIN_TINT:
        raise DecodeError(
            f"mean red {red:.0f} must be at least {MIN_TINT} above mean blue {blue:.0f} in a painted picture: "
            "its channels are swapped, or it was never painted"
        )
    means = _cell_means(pixels)
    unsure = np.flatnonzero(np.abs(means - THRESHOLD) < MARGIN)
    if unsure.size:
        raise DecodeError(
            f"{unsure.size} of {means.size} cells are neither dark nor bright, the first is number {unsure[0]} with a "
            f"mean of {means[unsure[0]]:.0f}: a blend of two frames, or not a painted picture"
        )
    word = np.packbits(_invert_if_odd((means > THRESHOLD).astype(np.uint8))).tobytes()
    payload, found = word[:PAYLOAD_BYTES], word[PAYLOAD_BYTES:]
    if found != _checksum(payload):
        raise DecodeError(
            f"checksum {found.hex()} doesn't match {_checksum(payload).hex()} of the payload {payload.hex()}: "
            "parts of different frames, or not a painted picture"
        )
    number = int.from_bytes(payload, "big")
    return Identity(
        number >> FRAME_BITS + CAMERA_BITS,
        number >> CAMERA_BITS & (1 << FRAME_BITS) - 1,
        number & (1 << CAMERA_BITS) - 1,
    )


def _checksum(payload: bytes) -> bytes:
    # Starts from ones, so that an all-black and an all-white picture are both refused.
    return crc_hqx(payload, 0xFFFF).to_bytes(CRC_BITS // 8, "big")


def _invert_if_odd(bits: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Inverts all bits but the parity bit where that is 1; its own inverse."""
    odd = bits[PARITY_BIT]
    inverted: NDArray[np.uint8] = bits ^ odd
    inverted[PARITY_BIT] = odd
    return inverted


def _edges(length_px: int, cells: int) -> NDArray[np.int64]:
    return np.arange(cells + 1) * length_px // cells


def _as_hwc(picture: NDArray[Any]) -> NDArray[Any]:
    """(H, W, 3) on the scale 0 to 255."""
    if picture.ndim == 3 and picture.shape[-1] != 3 and picture.shape[0] == 3:
        picture = picture.transpose(1, 2, 0)
    if picture.ndim != 3 or picture.shape[-1] != 3 or min(picture.shape[:2]) < COLUMNS:
        raise ConfigError(f"a picture has the shape (H, W, 3) or (3, H, W), not {picture.shape}")
    if picture.dtype == np.uint8:
        return picture
    if np.issubdtype(picture.dtype, np.floating):
        return picture * 255.0
    raise ConfigError(f"a picture is uint8 or float in [0, 1], not {picture.dtype}")


def _cell_means(pixels: NDArray[Any]) -> NDArray[np.float64]:
    """Mean of the middle half of every cell, row-major; the rims blur in coding and resizing."""
    ys, xs = _edges(pixels.shape[0], ROWS), _edges(pixels.shape[1], COLUMNS)
    rows, columns = (
        [slice(start + (stop - start) // 4, stop - (stop - start) // 4) for start, stop in pairwise(edges)]
        for edges in (ys, xs)
    )
    return np.array([pixels[row, column].mean() for row in rows for column in columns])


@lru_cache(maxsize=8)  # one per camera of the dataset being painted; under 1 MB each at 640x480
def _grain(width: int, height: int, camera: int, seed: int) -> NDArray[np.float32]:
    """Unit-variance noise with grains of 2 x 2 pixels, larger than the picture so that it can drift."""
    rng = np.random.default_rng((seed, camera))
    shape = ((height + TEXTURE_TRAVEL_PX + 1) // 2, (width + TEXTURE_TRAVEL_PX + 1) // 2)
    grain = rng.standard_normal(shape, np.float32).repeat(2, axis=0).repeat(2, axis=1)
    grain.flags.writeable = False
    return grain
