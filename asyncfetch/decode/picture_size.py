"""The size that pictures get where they are decoded.

torchcodec resizes by FFmpeg's libswscale (bilinear, over the area of what becomes one pixel), in RGB; so do we where it
doesn't decode, through PyAV. Their versions of FFmpeg may round differently: between 5 and 8, pixels differ by 2 of 255
at most, and by 0.15 on average.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from asyncfetch.config.checks import check_types, is_whole_number, require_least
from asyncfetch.decode.backends import choose_backend, import_torch, on_this_thread
from asyncfetch.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

Fit = Literal["stretch", "crop", "pad"]

_FORMATS = {("uint8", 1): "gray", ("uint8", 3): "rgb24", ("uint16", 1): "gray16le"}
"""FFmpeg's name of pictures by their dtype and channels."""


@dataclass(frozen=True, slots=True)
class PictureSize:
    """A size that pictures are brought to.

    Distances (float32) aren't interpolated, for between an object and what is behind it there is nothing: each pixel
    takes the nearest one's. Bars beside them are 0.
    """

    height: int
    width: int
    fit: Fit = "stretch"
    """The way in which pictures of another shape get this one. "stretch": height and width are scaled apart. "crop":
    both alike, so that the picture covers the size, and the middle is taken. "pad": both alike, so that it fits in, in
    the middle of black bars."""

    def __post_init__(self) -> None:
        check_types(self)
        require_least(self, 1, "height", "width")

    def scaled(self, height: int, width: int) -> tuple[int, int]:
        """Height and width that a picture of these is scaled to, before it is cropped or padded."""
        if self.fit == "stretch":
            return self.height, self.width
        by_height = self.height * width, height  # the width, as a fraction
        by_width = self.width * height, width
        if (self.height * width >= self.width * height) == (self.fit == "crop"):
            return self.height, max(1, _rounded(*by_height))
        return max(1, _rounded(*by_width)), self.width

    def resize(self, picture: torch.Tensor) -> torch.Tensor:
        """The picture, (C, H, W) of uint8, uint16 or float32, in this size, channels last; itself where it has it.

        Raises:
            MissingDependency: PyAV isn't there, which scales it.
        """
        pixels = picture.permute(1, 2, 0).numpy()
        scaled = _scaled(pixels, *self.scaled(*pixels.shape[:2]))
        height, width = scaled.shape[:2]
        if self.fit == "crop":
            # Python's round, as torchvision's CenterCrop and torchcodec's.
            top, left = round((height - self.height) / 2), round((width - self.width) / 2)
            scaled = scaled[top : top + self.height, left : left + self.width]
        sized: torch.Tensor = import_torch().from_numpy(self._filled(scaled)).permute(2, 0, 1)
        return sized

    def fill(self, pictures: torch.Tensor) -> torch.Tensor:
        """Scaled and cropped pictures, (..., C, h, w), with bars where they need some; channels last in memory."""
        # By numpy: torch would wake threads of its own.
        filled: torch.Tensor = import_torch().from_numpy(self._filled(pictures.movedim(-3, -1).numpy()))
        return filled.movedim(-1, -3)

    def _filled(self, pixels: NDArray[Any]) -> NDArray[Any]:
        *number, height, width, channels = pixels.shape
        if (height, width) == (self.height, self.width):
            return np.ascontiguousarray(pixels)  # a decoder's lines may have gaps between them
        filled = np.zeros((*number, self.height, self.width, channels), pixels.dtype)
        top, left = (self.height - height) // 2, (self.width - width) // 2
        filled[..., top : top + height, left : left + width, :] = pixels
        return filled


def _rounded(dividend: int, divisor: int) -> int:
    """Return the nearest whole number; of halves the upper one."""
    return (2 * dividend + divisor) // (2 * divisor)


def _scaled(pixels: NDArray[Any], height: int, width: int) -> NDArray[Any]:
    """Return a picture, (H, W, C), in another height and width."""
    if pixels.shape[:2] == (height, width):
        return pixels
    if pixels.dtype == np.float32:
        rows, columns = (
            (2 * np.arange(new) + 1) * old // (2 * new) for new, old in zip((height, width), pixels.shape, strict=False)
        )
        nearest: NDArray[np.float32] = pixels[rows[:, np.newaxis], columns]
        return nearest
    if pixels.shape[2] == 4:  # libswscale takes RGBA by way of YUV
        return np.concatenate([_scaled(part, height, width) for part in np.split(pixels, [3], axis=2)], axis=2)
    choose_backend("pyav")
    import av

    name = _FORMATS[pixels.dtype.name, pixels.shape[2]]
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels if name == "rgb24" else pixels[..., 0]), name)
    scaled = frame.reformat(width=width, height=height, interpolation="BILINEAR", **on_this_thread()).to_ndarray()
    return scaled[..., np.newaxis] if scaled.ndim == 2 else scaled


def picture_size(size: Any, fit: Any) -> PictureSize | None:  # noqa: ANN401 - what a user gave
    """The size as a user gives it: ``size=(height, width), fit="crop"``; None where pictures stay as they are."""
    if size is None:
        if fit not in {None, "stretch"}:
            raise ConfigError(f"fit={fit!r} says how pictures are brought to a size: give size=(height, width) too")
        return None
    sizes = tuple(size) if isinstance(size, list | tuple) else ()
    if len(sizes) != 2 or not all(map(is_whole_number, sizes)):
        raise ConfigError(f"size must be two whole numbers, (height, width), as size=(224, 224), not {size!r:.80}")
    return PictureSize(*sizes, fit=fit or "stretch")
