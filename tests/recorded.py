"""The datasets of ``tests/data``, which LeRobot itself wrote, and how their pictures say which they are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

DATA = Path(__file__).parent / "data"
CAMERAS = ("observation.images.top", "observation.images.wrist")
"""In the order of the numbers that are painted into their pictures."""


def read_code(picture: NDArray[np.uint8]) -> tuple[int, int, int]:
    """(episode, frame, camera) painted into a picture (C, H, W), in shades of gray.

    16 bits, each in three blocks of 28 x 28 pixels, 11 blocks a row, copy k of bit i in block 16 k + i: the parity of
    the frame, 6 bits of the episode, 8 of the frame, 1 of the camera; all but the first inverted on odd frames.
    """
    blocks = picture[0, : 28 * 5, : 28 * 11].reshape(5, 28, 11, 28)[:, 7:21, :, 7:21].mean(axis=(1, 3))
    copies = blocks.ravel()[: 3 * 16].reshape(3, 16) > 128
    bits = np.count_nonzero(copies, axis=0) >= 2
    number = int("".join(str(int(bit)) for bit in bits[1:] ^ bits[0]), 2)
    episode, frame, camera = number >> 9, number >> 1 & 0xFF, number & 1
    assert frame % 2 == bits[0]
    return episode, frame, camera
