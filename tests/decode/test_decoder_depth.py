from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
import torch

from asyncfetch.decode import DepthScale, open_decoder
from asyncfetch.decode.decoder import PyAVDecoder
from asyncfetch.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tests.decode.conftest import Video


def codes_of(metres: NDArray[np.float64], scale: DepthScale) -> NDArray[np.int64]:
    """What a recorder stores, the other way round."""
    low, high, value = scale.minimum, scale.maximum, metres.clip(scale.minimum, scale.maximum)
    if scale.use_log:
        low, high, value = np.log(low + scale.shift), np.log(high + scale.shift), np.log(value + scale.shift)
    return np.rint((value - low) / (high - low) * 4095).astype(np.int64)


@pytest.mark.parametrize("use_log", [True, False])
def test_distances_come_back_within_half_a_code(use_log: bool) -> None:
    scale = DepthScale(use_log=use_log, unit="m")
    metres = np.linspace(0.0, 11.0, 2000)
    distances = scale.distances()
    back = distances[codes_of(metres, scale)]
    half = np.diff(distances).max() / 2 + 1e-6
    assert np.abs(back - metres.clip(0.01, 10.0)).max() <= half


@pytest.mark.parametrize("use_log", [True, False])
def test_the_ends_of_the_scale_are_exact(use_log: bool) -> None:
    distances = DepthScale(minimum=0.2, maximum=5.0, use_log=use_log, unit="m").distances()
    assert distances.dtype == np.float32
    assert distances[[0, -1]] == pytest.approx([0.2, 5.0])
    assert (np.diff(distances) > 0).all()


def test_millimetres_are_whole() -> None:
    metres, millimetres = DepthScale(unit="m").distances(), DepthScale(unit="mm").distances()
    assert (millimetres == np.rint(millimetres)).all()
    assert np.abs(millimetres - metres * 1000).max() <= 0.501


@pytest.mark.parametrize("unit", ["m", "mm"])
@pytest.mark.parametrize("frames", [[4], [5, 0, 5], []])
def test_a_depth_clip_decodes_to_distances(depth_video: Video, unit: Literal["m", "mm"], frames: list[int]) -> None:
    scale = DepthScale(unit=unit)
    decoded = open_decoder(depth_video.clip(depth=scale), backend="auto").frames(frames)
    assert decoded.dtype == torch.float32
    assert decoded.shape == (len(frames), 1, 64, 64)
    assert np.array_equal(decoded[:, 0].numpy(), scale.distances()[depth_video.frames[frames]])


def test_the_codes_survive_encoding(depth_video: Video, depth_codes: list[NDArray[np.uint16]]) -> None:
    assert np.array_equal(depth_video.frames, np.stack(depth_codes))


def test_depth_goes_to_pyav_whatever_was_chosen(depth_video: Video) -> None:
    assert isinstance(open_decoder(depth_video.clip(depth=DepthScale()), backend="torchcodec"), PyAVDecoder)


@pytest.mark.parametrize(
    "scale",
    [
        {"minimum": 2.0, "maximum": 2.0},
        {"maximum": float("nan")},
        {"maximum": float("inf")},
        {"shift": -0.01},
        {"unit": "cm"},
    ],
)
def test_a_scale_that_means_nothing_is_refused(scale: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="depth"):
        DepthScale(**scale)
