"""Pictures of a size beside torchcodec's own transforms on the whole file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchcodec import transforms as torchcodec_transforms
from torchcodec.decoders import VideoDecoder  # type: ignore[attr-defined]

from asyncfetch.decode import DepthScale, PictureSize, open_decoder, picture_size
from asyncfetch.decode.picture_size import Fit
from asyncfetch.errors import ConfigError, DecodeError, MissingDependency
from tests.decode.conftest import HEIGHT, WIDTH, encode, video_of
from tests.decode.test_decoder import each_backend, of_two_sizes, turned

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from asyncfetch.config import DecoderBackend
    from tests.decode.conftest import Video

transforms: Any = torchcodec_transforms  # without types
FITS: tuple[Fit, ...] = get_args(Fit)
each_fit = pytest.mark.parametrize("fit", FITS)
FRAMES = [3, 4, 5, 0, 17, 17]


def resized(data: bytes, *steps: Any) -> torch.Tensor:  # noqa: ANN401
    decoder: Any = VideoDecoder(data, device="cpu", transforms=steps)
    return torch.stack([decoder.get_frame_at(frame).data for frame in FRAMES])


def check_like(found: torch.Tensor, expected: torch.Tensor) -> None:
    """FFmpeg 5 and 8 round differently."""
    assert found.shape == expected.shape
    difference = (found.int() - expected.int()).abs()
    assert int(difference.max()) <= 2
    assert float(difference.float().mean()) < 0.2


@each_backend
@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
@pytest.mark.parametrize("size", [(50, 70), (121, 33), (240, 320)])
def test_stretched_pictures_are_torchcodecs(
    h264: Video, backend: DecoderBackend, degrees: int, size: tuple[int, int]
) -> None:
    data = turned(h264.data, degrees) if degrees else h264.data
    is_turned = degrees and backend != "pyav-unturned"
    decoder = open_decoder(h264.clip(data=memoryview(data)), backend=backend, size=PictureSize(*size))
    expected = resized(data if is_turned else h264.data, transforms.Resize(size))
    check_like(decoder.frames(FRAMES), expected)
    if backend == "torchcodec":
        assert torch.equal(decoder.frames(FRAMES), expected)


@each_backend
@pytest.mark.parametrize("degrees", [0, 90])
@pytest.mark.parametrize(
    ("size", "scaled"),  # of a picture of 120 x 160, and of one that lies across
    [((64, 64), ((64, 85), (85, 64))), ((33, 100), ((75, 100), (133, 100))), ((151, 20), ((151, 201), (151, 113)))],
)
def test_cropped_pictures_are_the_middle(
    h264: Video,
    backend: DecoderBackend,
    degrees: int,
    size: tuple[int, int],
    scaled: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    data = turned(h264.data, degrees) if degrees else h264.data
    is_turned = degrees == 90 and backend != "pyav-unturned"
    decoder = open_decoder(h264.clip(data=memoryview(data)), backend=backend, size=PictureSize(*size, fit="crop"))
    steps = transforms.Resize(scaled[is_turned]), transforms.CenterCrop(size)
    check_like(decoder.frames(FRAMES), resized(data if is_turned else h264.data, *steps))


@each_backend
@pytest.mark.parametrize("degrees", [0, 90])
@pytest.mark.parametrize(
    ("size", "places"),
    [
        ((64, 64), ((8, 0, 48, 64), (0, 8, 64, 48))),
        ((45, 90), ((0, 15, 45, 60), (0, 28, 45, 34))),
        ((20, 5), ((8, 0, 4, 5), (6, 0, 7, 5))),
    ],
)
def test_padded_pictures_are_whole_between_bars(
    h264: Video,
    backend: DecoderBackend,
    degrees: int,
    size: tuple[int, int],
    places: tuple[tuple[int, int, int, int], tuple[int, int, int, int]],
) -> None:
    data = turned(h264.data, degrees) if degrees else h264.data
    is_turned = degrees == 90 and backend != "pyav-unturned"
    top, left, height, width = places[is_turned]
    found = open_decoder(h264.clip(data=memoryview(data)), backend=backend, size=PictureSize(*size, fit="pad")).frames(
        FRAMES
    )
    expected = torch.zeros((len(FRAMES), 3, *size), dtype=torch.uint8)
    whole = resized(data if is_turned else h264.data, transforms.Resize((height, width)))
    expected[..., top : top + height, left : left + width] = whole
    check_like(found, expected)


@each_backend
@each_fit
def test_pictures_are_the_same_in_all_ways_to_read(h264: Video, backend: DecoderBackend, fit: Fit) -> None:
    decoder = open_decoder(h264.clip(), backend=backend, size=PictureSize(37, 53, fit))
    together, each = decoder.frames([3, 4, 5]), decoder.each([3, 4, 5, 5])
    given: dict[int, torch.Tensor] = {}
    decoder.give([3, 4, 5], lambda place, picture: given.update({place: picture.clone()}))
    assert torch.equal(together, torch.stack(each[:3]))
    assert torch.equal(together, torch.stack([given[place] for place in range(3)]))
    assert each[2] is each[3]
    for picture in (together, each[0].unsqueeze(0)):
        assert picture.is_contiguous(memory_format=torch.channels_last)
    assert decoder.frames([]).shape == (0, 3, 37, 53)


@each_backend
@each_fit
def test_a_picture_of_its_size_stays_as_it_is(h264: Video, backend: DecoderBackend, fit: Fit) -> None:
    decoder = open_decoder(h264.clip(), backend=backend, size=PictureSize(HEIGHT, WIDTH, fit))
    assert np.array_equal(decoder.frames([7]).permute(0, 2, 3, 1).numpy(), h264.frames[7:8])


@each_backend
def test_sizes_are_for_videos_as_their_index_says(images: list[NDArray[np.uint8]], backend: DecoderBackend) -> None:
    smaller = [image[:64, :96] for image in images[:4]]
    video = video_of(encode("libx264", "yuv420p", {"preset": "veryfast"}, smaller), "avc1")
    with pytest.raises(DecodeError, match="a picture is 64 high and 96 wide; the index of its file says 120 and 160"):
        open_decoder(video.clip(height=120, width=160), backend=backend, size=PictureSize(8, 8)).frames([0])


def test_torchcodec_brings_joined_videos_to_one_size(images: list[NDArray[np.uint8]]) -> None:
    """PyAV refuses them, as without a size."""
    video = of_two_sizes(images)
    assert open_decoder(video, backend="torchcodec", size=PictureSize(32, 32)).frames([0, 4]).shape == (2, 3, 32, 32)
    with pytest.raises(DecodeError, match="a picture is 64 high"):
        open_decoder(video, backend="pyav", size=PictureSize(32, 32)).frames([0, 4])


@each_fit
def test_distances_are_those_of_the_nearest_pixels(depth_video: Video, fit: Fit) -> None:
    whole = open_decoder(depth_video.clip(depth=DepthScale())).frames([2])[0, 0]
    found = open_decoder(depth_video.clip(depth=DepthScale()), size=PictureSize(32, 16, fit)).frames([2])[0, 0]
    rows, columns = np.arange(1, 64, 2), {"stretch": np.arange(2, 64, 4), "crop": np.arange(17, 49, 2)}
    if fit == "pad":
        assert torch.equal(found[8:24], whole[np.arange(2, 64, 4)][:, np.arange(2, 64, 4)])
        assert not found[:8].any()
        assert not found[24:].any()
    else:
        assert torch.equal(found, whole[rows][:, columns[fit]])


def test_an_old_torchcodec_is_our_error(h264: Video, monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        def __init__(self, source: object) -> None: ...

    monkeypatch.setattr("torchcodec.decoders.VideoDecoder", Old)
    with pytest.raises(MissingDependency, match=r'pip install "torchcodec>=0\.10".* or use decoder=\'pyav\''):
        open_decoder(h264.clip(), backend="torchcodec", size=PictureSize(8, 8))


@pytest.mark.parametrize(
    ("dtype", "channels"), [(np.uint8, 1), (np.uint8, 3), (np.uint8, 4), (np.uint16, 1), (np.float32, 1)]
)
@each_fit
def test_pictures_of_tables_keep_dtype_and_channels(dtype: type, channels: int, fit: Fit) -> None:
    pixels = torch.from_numpy(np.full((31, 50, channels), 200, dtype)).permute(2, 0, 1)
    found = PictureSize(12, 20, fit).resize(pixels)
    assert found.shape == (channels, 12, 20)
    assert found.dtype == pixels.dtype
    middle = found[:, :, 1:-1] if fit == "pad" else found
    assert (middle == 200).all()


sizes = st.integers(1, 3000)


@given(sizes, sizes, sizes, sizes)
def test_scaled_pictures_cover_the_size_or_fit_in(height: int, width: int, new_height: int, new_width: int) -> None:
    cropped = PictureSize(new_height, new_width, "crop").scaled(height, width)
    padded = PictureSize(new_height, new_width, "pad").scaled(height, width)
    assert cropped[0] == new_height or cropped[1] == new_width
    assert padded[0] == new_height or padded[1] == new_width
    assert cropped[0] >= new_height
    assert cropped[1] >= new_width
    assert 1 <= padded[0] <= new_height
    assert 1 <= padded[1] <= new_width
    assert PictureSize(new_height, new_width).scaled(height, width) == (new_height, new_width)
    for scaled in (cropped, padded):
        assert abs(scaled[0] * width - scaled[1] * height) <= max(height, width)  # of one shape, but for the rounding


def test_sizes_are_given_as_height_and_width() -> None:
    assert picture_size(None, None) is None
    assert picture_size((480, 832), None) == PictureSize(480, 832)
    assert picture_size([np.int64(224), 224], "crop") == PictureSize(224, 224, "crop")


@pytest.mark.parametrize(
    ("size", "fit", "message"),
    [
        (224, None, r"size must be two whole numbers, \(height, width\), as size=\(224, 224\), not 224"),
        ((224,), None, "size must be two whole numbers"),
        ((224.0, 224), None, "size must be two whole numbers"),
        ("12", None, "size must be two whole numbers"),
        ((0, 224), None, "height must be at least 1, not 0"),
        ((224, 224), "cover", "fit must be 'stretch' or 'crop' or 'pad', not 'cover'"),
        (None, "crop", r"fit='crop' says how .*: give size=\(height, width\) too"),
    ],
)
def test_sizes_that_are_none_are_refused(size: object, fit: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        picture_size(size, fit)
