from __future__ import annotations

import io
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfetch.errors import ConfigError, DecodeError
from asyncfetch.testing.clips import ENCODINGS, Codec, encode_clip
from asyncfetch.testing.identity import Identity, paint, read_identity

if TYPE_CHECKING:
    from numpy.typing import NDArray

IDENTITIES = st.builds(Identity, st.integers(0, 2**20 - 1), st.integers(0, 2**16 - 1), st.integers(0, 2**4 - 1))


def decoded(clip: bytes) -> list[NDArray[np.uint8]]:
    import av

    with av.open(io.BytesIO(clip), "r") as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]  # type: ignore[misc]


@settings(deadline=None)  # the first example imports and caches
@given(IDENTITIES, st.integers(32, 100), st.integers(32, 100), st.floats(0, 24))
def test_reads_what_was_painted(identity: Identity, half_width: int, half_height: int, texture: float) -> None:
    picture = paint(*identity, width=2 * half_width, height=2 * half_height, texture=texture)

    assert read_identity(picture) == identity


def test_reads_both_layouts_and_floats() -> None:
    picture = paint(5, 6, 1, width=160, height=128)

    for variant in (picture.transpose(2, 0, 1), picture / 255.0, (picture / 255.0).astype(np.float32)):
        assert read_identity(variant) == (5, 6, 1)


@pytest.mark.parametrize("gop", [2, 30])
@pytest.mark.parametrize(("width", "height"), [(64, 64), (160, 128), (322, 242), (640, 480)])
@pytest.mark.parametrize("codec", ["av1", "h264", "hevc"])
@pytest.mark.parametrize("texture", [0.0, 4.3])
def test_survives_coding(codec: Codec, width: int, height: int, gop: int, texture: float) -> None:
    episode, first_frame = 0xF0F0F, 0x7FFC  # the frame number carries into its top bit
    pictures = (paint(episode, first_frame + n, 1, width=width, height=height, texture=texture) for n in range(10))

    frames = decoded(encode_clip(pictures, encoding=ENCODINGS[codec], fps=30, gop=gop))

    assert [read_identity(frame) for frame in frames] == [(episode, first_frame + n, 1) for n in range(10)]


def test_the_smallest_pictures_survive_hevc_each_time() -> None:
    numbers = range(0x7FFC, 0x7FFC + 10)
    pictures = [paint(0xF0F0F, number, 1, width=64, height=64) for number in numbers]

    for _ in range(8):  # the first time the encoder's memory is still clean
        frames = decoded(encode_clip(pictures, encoding=ENCODINGS["hevc"], fps=30, gop=30))
        assert [read_identity(frame) for frame in frames] == [(0xF0F0F, number, 1) for number in numbers]


@settings(deadline=None)  # the first example imports and caches
@given(IDENTITIES, st.integers(0, 55))
def test_a_flipped_cell_is_refused(identity: Identity, cell: int) -> None:
    picture = paint(*identity, width=64, height=56)
    row, column = divmod(cell, 8)
    block = picture[row * 8 : row * 8 + 8, column * 8 : column * 8 + 8]
    block[:] = np.where(block > 128, block - 128, block + 128)

    with pytest.raises(DecodeError, match="checksum"):
        read_identity(picture)


@settings(deadline=None)  # the first example imports and caches
@given(IDENTITIES.filter(lambda identity: identity.frame > 0))
def test_a_blend_of_neighbours_is_refused(identity: Identity) -> None:
    picture = paint(*identity, width=64, height=56)
    before = paint(identity.episode, identity.frame - 1, identity.camera, width=64, height=56)

    with pytest.raises(DecodeError, match="neither dark nor bright"):
        read_identity((picture // 2 + before // 2).astype(np.uint8))


def test_neighbours_differ_in_most_pixels() -> None:
    pictures = [paint(3, frame, 0, width=160, height=128).astype(int) for frame in range(64)]

    differing = [(abs(a - b) > 64).all(axis=-1).mean() for a, b in pairwise(pictures)]

    assert min(differing) > 0.5


def torn(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    other = paint(40, 8, 1, width=160, height=128)
    return np.concatenate([picture[:64], other[64:]])


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(np.zeros_like, id="black"),
        pytest.param(lambda picture: np.full_like(picture, 255), id="white"),
        pytest.param(lambda picture: picture[..., ::-1], id="bgr"),
        pytest.param(lambda picture: picture[::-1], id="upside down"),
        pytest.param(lambda picture: picture[:, ::-1], id="mirrored"),
        pytest.param(lambda picture: np.roll(picture, 20, axis=1), id="shifted"),
        pytest.param(torn, id="torn"),
    ],
)
def test_refuses_what_is_not_one_painted_picture(spoil: Any) -> None:  # noqa: ANN401
    with pytest.raises(DecodeError):
        read_identity(spoil(paint(3, 8, 1, width=160, height=128)))


@pytest.mark.parametrize("uniform", [0.1, 0.9])
def test_a_tinted_flat_picture_is_refused_by_its_checksum(uniform: float) -> None:
    picture = np.full((128, 160, 3), uniform) + np.array([0.05, 0, -0.05])

    with pytest.raises(DecodeError, match="checksum"):
        read_identity(picture)


@pytest.mark.parametrize(
    ("identity", "size"),
    [((2**20, 0, 0), (160, 128)), ((0, 2**16, 0), (160, 128)), ((0, 0, 16), (160, 128)), ((-1, 0, 0), (160, 128)),
     ((0, 0, 0), (63, 128)), ((0, 0, 0), (160, 55))],
)  # fmt: skip
def test_refuses_to_paint_what_does_not_fit(identity: tuple[int, int, int], size: tuple[int, int]) -> None:
    with pytest.raises(ConfigError):
        paint(*identity, width=size[0], height=size[1])


@pytest.mark.parametrize("picture", [np.zeros((128, 160)), np.zeros((128, 160, 3), np.int64), np.zeros((4, 4, 3))])
def test_refuses_what_is_not_a_picture(picture: NDArray[Any]) -> None:
    with pytest.raises(ConfigError):
        read_identity(picture)


def test_grain_makes_frames_cost_what_a_real_scene_does() -> None:
    pictures = (paint(0, frame, 0, width=640, height=480, texture=4.3) for frame in range(12))

    clip = encode_clip(pictures, encoding=ENCODINGS["av1"], fps=30, gop=2)

    assert 8_000 <= len(clip) / 12 <= 10_000
