from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfetch.errors import ConfigError
from asyncfetch.lerobot.samples import clamp, frames, resolve_windows

KEYS = ("action", "state")


def resolve(window: Any, fps: float = 30) -> list[int]:  # noqa: ANN401
    return [int(offset) for offset in resolve_windows({"action": window}, fps=fps, keys=KEYS)["action"]]


@given(st.lists(st.integers(-10_000, 10_000), min_size=1), st.sampled_from([1, 10, 15, 29.97, 30, 50, 240]))
def test_seconds_on_the_grid_are_its_frames_in_their_order(offsets: list[int], fps: float) -> None:
    assert resolve([offset / fps for offset in offsets], fps) == offsets
    assert resolve(frames(*offsets), fps) == offsets


def test_a_bare_number_is_always_seconds() -> None:
    assert resolve([1, -2]) == [30, -60]


@pytest.mark.parametrize("seconds", [0.01, -0.05, 1 / 30 + 2e-4])
def test_seconds_off_the_grid_are_refused_with_the_nearest(seconds: float) -> None:
    nearest = round(seconds * 30)
    with pytest.raises(
        ConfigError, match=rf"{seconds} s of 'action'.*nearest: {nearest / 30:.6f} s.*frames\({nearest}\)"
    ):
        resolve([0.0, seconds])


def test_seconds_near_the_grid_are_on_it() -> None:
    assert resolve([-0.09995, 0.1, 0.0333]) == [-3, 3, 1]


def test_arrays_and_numpy_numbers_are_windows() -> None:
    assert resolve(np.array([-0.1, 0.0], np.float32)) == [-3, 0]
    assert resolve(frames(*np.arange(-2, 1))) == [-2, -1, 0]


@pytest.mark.parametrize(
    ("window", "message"),
    [
        ([], "empty"),
        (frames(), "empty"),
        (0.1, "list of seconds"),
        (["soon"], "list of seconds"),
        ([None], "list of seconds"),
        ("12", "list of seconds"),
        ([math.nan], "isn't a time"),
        ([1e308], "isn't a time"),
        ([1e300], "no offset"),
        (frames(10**40), "no offset"),
        (frames(-(2**63)), "no offset"),
    ],
    ids=repr,
)
def test_window_that_is_no_list_of_offsets_is_refused(window: Any, message: str) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError, match=message):
        resolve(window)


def test_mask_in_the_place_of_a_feature_is_refused() -> None:
    keys = {"action", "action_is_pad"}
    with pytest.raises(ConfigError, match=r"'action_is_pad': leave that out by features="):
        resolve_windows({"action": [0.0]}, fps=30, keys=keys)
    resolve_windows({"action_is_pad": [0.0]}, fps=30, keys=keys)


def test_an_unknown_key_is_refused_with_the_known() -> None:
    with pytest.raises(ConfigError, match=r"'gripper'.*action, state"):
        resolve_windows({"gripper": [0.0]}, fps=30, keys=KEYS)


@pytest.mark.parametrize("offset", [0.5, "1", True, None])
def test_frames_takes_whole_numbers(offset: Any) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError, match="whole numbers of frames"):
        frames(offset)


@given(st.integers(1, 50), st.data())
def test_a_place_outside_repeats_the_nearest_end_and_is_padding(length: int, data: st.DataObject) -> None:
    frame = data.draw(st.integers(0, length - 1))
    offsets = data.draw(st.lists(st.integers(-100, 100), min_size=1))
    inside, is_pad = clamp(frame, np.asarray(offsets, np.int64), length)
    for offset, place, padding in zip(offsets, inside.tolist(), is_pad.tolist(), strict=True):
        assert padding == (not 0 <= frame + offset < length)
        assert place == min(max(frame + offset, 0), length - 1)
