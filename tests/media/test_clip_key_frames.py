"""Key frames of HEVC, by their NAL units."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from asyncfetch.media import KeyFrames
from tests.media.conftest import clip_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.media.conftest import Video

SETS, SEI, TRAILING, LEADING, IDR, CRA, RESERVED = 32, 39, 1, 8, 19, 21, 23


def units(*kinds: int, length_bytes: int = 4) -> bytes:
    """A NAL unit of each type, its header of two bytes and five more."""
    return b"".join((7).to_bytes(length_bytes) + bytes((kind << 1, 1)) + b"\xff" * 5 for kind in kinds)


@pytest.mark.parametrize("length_bytes", [1, 2, 4])
@pytest.mark.parametrize(
    ("kinds", "alone"),
    [
        ([IDR], True),
        ([SETS, 33, 34, SEI, IDR, IDR], True),
        ([35, CRA], True),
        ([RESERVED], True),
        ([TRAILING], False),
        ([LEADING], False),
        ([SETS, SEI, TRAILING, IDR], False),
        ([24], False),
        ([SETS, SEI], False),
        ([], False),
    ],
)
def test_the_first_picture_tells(kinds: list[int], alone: bool, length_bytes: int) -> None:
    sample = units(*kinds, length_bytes=length_bytes)
    data = memoryview(b"\0" * 9 + sample + units(IDR, length_bytes=length_bytes))
    keys = KeyFrames(np.zeros(1, np.int32), np.array([[9, 9 + len(sample)]]), length_bytes)
    assert keys.stands_alone(data, 0) == alone


@pytest.mark.parametrize("data", [b"", b"\0\0\0", b"\0\0\0\7", b"\0" * 40, b"\xff" * 40, units(SETS, IDR)[:12]])
def test_key_frame_that_is_damaged_or_cut_short_is_none(data: bytes) -> None:
    keys = KeyFrames(np.zeros(1, np.int32), np.array([[0, 40]]), 4)
    assert not keys.stands_alone(memoryview(data), 0)


def test_a_decoder_starts_at_the_last_one_shown_no_later() -> None:
    keys = KeyFrames(np.array([0, 10, 20], np.int32), np.zeros((3, 2), np.int64), 4)
    assert [keys.in_front_of(rank) for rank in (0, 9, 10, 19, 20, 1000)] == [0, 0, 1, 1, 2, 2]
    late = KeyFrames(np.array([3], np.int32), np.zeros((1, 2), np.int64), 4)
    assert late.in_front_of(0) == 0


@pytest.mark.parametrize(("name", "some"), [("hevc-open", True), ("h264-open", False), ("av1-g2", False)])
def test_key_frames_of_a_file_stand_alone(make_video: Callable[[str], Video], name: str, some: bool) -> None:
    video = make_video(name)
    for first in (0, 7, 23):
        plan = clip_of(video.index(), first, 20, fps=30)
        clip = memoryview(plan.header + video.data[plan.start : plan.stop])
        if (keys := plan.key_frames) is None:
            assert not some
            continue
        assert some
        assert keys.nbytes == 20 * len(keys.ranks)
        assert all(keys.stands_alone(clip, number) for number in range(len(keys.ranks)))
        assert (np.diff(keys.ranks) > 0).all()
