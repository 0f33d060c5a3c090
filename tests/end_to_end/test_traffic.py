"""The bytes of clips that leave a server in an epoch, by its own count, and what a plan says of them."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

import asyncfetch as af
from asyncfetch.stream import Placement
from asyncfetch.stream.epoch_stream import source_of
from asyncfetch.testing import write_dataset
from tests.end_to_end.conftest import serve_dataset

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncfetch.lerobot import Windows
    from tests.end_to_end.conftest import Served

CAMERA, OTHER = "observation.images.top", "observation.images.wrist"


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """400 short episodes."""
    truth = write_dataset(
        tmp_path_factory.mktemp("many") / "data",
        episodes=400,
        length=4,
        cameras=[CAMERA],
        width=64,
        height=64,
        codec="h264",
        texture=20.0,
        crf=10,
        distinct_videos=4,
        episodes_per_video_file=50,
    )
    with serve_dataset(truth, tls=False, max_log=100_000) as served:
        yield served


def clip_bytes(served: Served, ranks: int) -> int:
    """What ranks fetch, each by a stream of its own, which share nothing."""
    served.server.reset()
    seen = Counter[int]()
    for rank in range(ranks):
        config = af.StreamConfig(fetch=af.FetchConfig(ca_file=served.server.ca_file, hedge=None))
        stream = served.stream(features=[CAMERA], config=config)
        seen.update(int(sample["index"]) for sample in source_of(stream).iterate(Placement(rank, ranks), epoch=0))
        stream.close()
    assert seen == dict.fromkeys(range(served.truth.num_frames), 1)
    # The index is at a file's beginning.
    return sum(one.bytes_sent for one in served.server.requests if "/videos/" in one.path and one.start)


@pytest.mark.slow
def test_ranks_together_fetch_what_one_would(many: Served) -> None:
    alone = clip_bytes(many, 1)
    for ranks in (2, 3, 8):
        fetched = clip_bytes(many, ranks)
        assert fetched <= 1.03 * alone, ranks


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Episodes of many segments; the second camera's clips are several times as large."""
    truth = write_dataset(
        tmp_path_factory.mktemp("long") / "data",
        episodes=[90, 160, 240],
        cameras=[CAMERA, OTHER],
        width=64,
        height=64,
        codec="h264",
        gop=4,
        texture=20.0,
        episodes_per_video_file=1,
    )
    with serve_dataset(truth, tls=False, max_log=100_000) as served:
        yield served


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("windows", [{CAMERA: [-1, 0]}, {CAMERA: [0, 0.5], OTHER: af.frames(-3, 0)}, None])
def test_a_plan_counts_what_windows_reach(long: Served, ranks: int, windows: Windows | None) -> None:
    """With room for little more than the pool: of overlapping clips, what memory holds isn't fetched again."""
    fetch = af.FetchConfig(hedge=None, max_span_bytes=0)
    config = af.StreamConfig(segment_seconds=0.5, pool_segments=1, prefetch_segments=0, max_bytes=100_000, fetch=fetch)
    with closing(long.stream(windows=windows, config=config)) as stream:
        plan = stream.traffic_plan(world_size=ranks)
    fetched = []
    for rank in range(ranks):
        long.server.reset()
        with closing(long.stream(windows=windows, config=config)) as stream:
            for _ in source_of(stream).iterate(Placement(rank, ranks), epoch=0):
                pass
        clips = [one for one in long.server.requests if "/videos/" in one.path and one.start and one.stop]
        fetched.append(sum(one.bytes_sent for one in clips))
    assert 0.9 * plan.fetched_bytes <= sum(fetched) <= plan.fetched_bytes
    assert 0.9 * plan.largest_rank_bytes <= max(fetched) <= plan.largest_rank_bytes
    assert (plan.fetched_bytes > 1.5 * plan.least_bytes) == (windows is not None)
