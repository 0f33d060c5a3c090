"""The segments that a rank draws from at a time: as many as fit, with what windows reach beside each."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import asyncfetch as af
from asyncfetch.stream.epoch_stream import source_of
from asyncfetch.testing import write_dataset
from tests.stream.conftest import FRONT, TOP

if TYPE_CHECKING:
    from asyncfetch.testing import DatasetTruth


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> DatasetTruth:
    """Episodes of 60 segments each, of which windows of a second reach over many; and one of six."""
    return write_dataset(
        tmp_path_factory.mktemp("pool") / "long",
        episodes=[120, 120, 12],
        cameras=[TOP, FRONT],
        width=64,
        height=64,
        codec="h264",
        gop=2,
    )


def pools_of(stream: af.Stream | af.Mixture) -> tuple[int, ...]:
    return source_of(stream).session().opened().pools


@pytest.mark.parametrize("seconds", [[-1, 0, 1], [-2, 0], [2, 4]])
def test_a_pool_counts_what_windows_reach_beside_segments(
    long: DatasetTruth, seconds: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    config = af.StreamConfig(segment_seconds=0.1, max_bytes=450_000, decode_threads=1)
    with closing(af.Stream(str(long.root), config=config)) as plain:
        assert pools_of(plain) == (64,)
    assert not caplog.messages
    with closing(af.Stream(str(long.root), windows={TOP: seconds}, config=config)) as reaching:
        pools = pools_of(reaching)
        assert sorted(int(sample["index"]) for sample in reaching) == list(range(long.num_frames))
    (warning,) = caplog.messages
    said = re.search(r"for the clips of (\d+) segments .* not for pool_segments=64: .* With max_bytes=(\d+) ", warning)
    assert said is not None
    assert pools == (int(said[1]),)
    assert 4 <= pools[0] < 60
    caplog.clear()
    enough = replace(config, max_bytes=int(said[2]))
    with closing(af.Stream(str(long.root), windows={TOP: seconds}, config=enough)) as roomy:
        assert pools_of(roomy) == (64,)
    assert not caplog.messages


def test_a_mixture_counts_the_reach_of_each_members_windows(
    long: DatasetTruth, caplog: pytest.LogCaptureFixture
) -> None:
    config = af.StreamConfig(segment_seconds=0.1, max_bytes=300_000, decode_threads=1)
    reaching = af.Stream(str(long.root), windows={TOP: [-1, 0, 1]}, features=[TOP])
    others = [af.Stream(str(long.root), features=[key]) for key in (FRONT, "action")]
    mixture = af.Mixture([reaching, *others], [1, 1, 1], stop_on=120, missing="drop", config=config)
    with closing(mixture):
        assert max(pools_of(mixture)) < 21
        assert len(list(mixture)) == 120
    assert len(caplog.messages) == 1


def test_a_pool_larger_than_any_array_has_all_there_is(long: DatasetTruth) -> None:
    with closing(af.Stream(str(long.root), features=[TOP], config=af.StreamConfig(pool_segments=2**80))) as stream:
        assert len({int(sample["index"]) for sample in stream}) == long.num_frames
