from __future__ import annotations

import re
import struct
import subprocess
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import av
import numpy as np
import pytest
import torch

from asyncfetch.decode import backends, decode_image
from asyncfetch.errors import DecodeError, MissingDependency, install_command

if TYPE_CHECKING:
    from numpy.typing import NDArray


RANDOM = np.random.default_rng(5)
RGB = RANDOM.integers(0, 256, (31, 50, 3), np.uint8)
RGBA = RANDOM.integers(0, 256, (31, 50, 4), np.uint8)
GRAY = RANDOM.integers(0, 256, (31, 50), np.uint8)
GRAY_16 = RANDOM.integers(0, 65536, (31, 50), np.uint16)
ONE_BIT = RANDOM.integers(0, 2, (31, 50), np.uint8) * np.uint8(255)


def image(codec: str, pix_fmt: str, array: NDArray[Any]) -> bytes:
    encoder: Any = av.CodecContext.create(codec, "w")
    encoder.height, encoder.width = array.shape[:2]
    encoder.pix_fmt, encoder.time_base = pix_fmt, Fraction(1)
    if pix_fmt.startswith("mono"):
        frame = av.VideoFrame.from_ndarray(array, format="gray").reformat(format=pix_fmt)
    else:
        frame = av.VideoFrame.from_ndarray(array, format=pix_fmt)
    return b"".join(bytes(packet) for packet in [*encoder.encode(frame), *encoder.encode(None)])


@pytest.mark.parametrize(
    ("codec", "pix_fmt", "stored"),
    [
        ("png", "rgb24", RGB),
        ("png", "rgba", RGBA),
        ("png", "gray", GRAY),
        ("png", "monob", ONE_BIT),
        ("png", "gray16be", GRAY_16),
        ("tiff", "rgb24", RGB),
        ("tiff", "gray16le", GRAY_16),
        ("tiff", "monob", ONE_BIT),
        ("pbm", "monow", ONE_BIT),
    ],
)
@pytest.mark.parametrize("wrap", [bytes, memoryview])
def test_lossless_images_come_back_as_stored(codec: str, pix_fmt: str, stored: NDArray[Any], wrap: type) -> None:
    decoded = decode_image(wrap(image(codec, pix_fmt, stored)))
    channels = stored.shape[2] if stored.ndim == 3 else 1
    assert decoded.shape == (channels, 31, 50)
    assert decoded.dtype == (torch.uint16 if stored.dtype == np.uint16 else torch.uint8)
    assert np.array_equal(decoded.permute(1, 2, 0).numpy().squeeze(), stored)


def test_a_jpeg_is_close() -> None:
    smooth = np.linspace(20, 230, 64 * 48 * 3).reshape(48, 64, 3).astype(np.uint8)
    command = "ffmpeg -v error -f rawvideo -pix_fmt rgb24 -s 64x48 -i - -q:v 2 -f image2pipe -c:v mjpeg -"
    run = subprocess.run(command.split(), input=smooth.tobytes(), capture_output=True, check=True, timeout=15)
    decoded = decode_image(run.stdout).permute(1, 2, 0).numpy()
    assert np.abs(decoded.astype(int) - smooth).mean() < 3


def test_a_png_in_rgb_is_the_same_without_torchcodec(monkeypatch: pytest.MonkeyPatch) -> None:
    data = image("png", "rgb24", RGB)
    monkeypatch.setattr("asyncfetch.decode.image.choose_backend", lambda _: "pyav")
    assert np.array_equal(decode_image(data).permute(1, 2, 0).numpy(), RGB)


@pytest.mark.parametrize(
    "data",
    [b"", b"\x89PNG", b"not an image", image("png", "rgb24", RGB)[:60], image("png", "gray", GRAY)[:60], b"II*\0" * 9],
    ids=["empty", "start", "text", "cut", "cut gray", "tiff"],
)
def test_bytes_that_are_no_image_are_refused(data: bytes) -> None:
    with pytest.raises(DecodeError, match=f"row 7: .* {len(data)} bytes"):
        decode_image(data, name="row 7")


def float_tiff(order: str, channels: int) -> bytes:
    """As Pillow writes it: the pixels, then the directory, then what is too long for that."""
    pixels = np.arange(24 * channels, dtype=order + "f4").tobytes()
    formats = struct.pack(f"{order}{channels}H", *[3] * channels)
    where_formats = 8 + len(pixels) + 2 + 10 * 12 + 4
    tags = {256: 6, 257: 4, 258: 32, 259: 1, 262: 1, 273: 8, 277: channels, 278: 4, 279: len(pixels)}
    directory = struct.pack(f"{order}H", 10) + b"".join(
        struct.pack(f"{order}HHII", tag, 4, 1, value) for tag, value in tags.items()
    )
    inline = formats.ljust(4, b"\0") if channels < 3 else struct.pack(f"{order}I", where_formats)
    directory += struct.pack(f"{order}HHI", 339, 3, channels) + inline + bytes(4)
    start = {"<": b"II*\0", ">": b"MM\0*"}[order]
    return start + struct.pack(f"{order}I", 8 + len(pixels)) + pixels + directory + formats


@pytest.mark.parametrize("order", ["<", ">"])
def test_a_tiff_of_floats_is_the_floats(order: str) -> None:
    image = decode_image(float_tiff(order, 1))
    assert (image.dtype, image.flatten().tolist()) == (torch.float32, list(range(24)))
    assert image.shape == (1, 4, 6)


@pytest.mark.parametrize("order", ["<", ">"])
def test_a_tiff_of_several_floats_a_pixel_is_refused_by_name(order: str) -> None:
    data = float_tiff(order, 3)
    with pytest.raises(DecodeError, match=f"row 7: .* {len(data)} bytes are a TIFF of floats.* leave the feature out"):
        decode_image(data, name="row 7")


@pytest.mark.parametrize("lost", [{273: 200}, {279: 40}, {257: 5}, {258: 12}, {259: 5}], ids=str)
def test_a_damaged_tiff_of_floats_is_refused_by_name(lost: dict[int, int]) -> None:
    data = bytearray(float_tiff("<", 1))
    for tag, value in lost.items():
        entry = data.index(struct.pack("<HHI", tag, 4, 1))
        data[entry + 8 : entry + 12] = struct.pack("<I", value)
    with pytest.raises(DecodeError, match=f"row 7: these {len(data)} bytes are a "):
        decode_image(bytes(data), name="row 7")


def test_missing_pyav_is_an_error_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_problem", lambda module: ImportError("no av") if module == "av" else None)
    assert decode_image(image("png", "rgb24", RGB)).shape == (3, 31, 50)
    with pytest.raises(MissingDependency, match=re.escape(install_command("pyav"))):
        decode_image(image("png", "gray", GRAY))
