"""What an epoch fetches, told before it is read."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import asyncfetch as af
import asyncfetch.stream.traffic
from asyncfetch.stream import Placement
from asyncfetch.stream.source import EpochStream, source_of
from asyncfetch.testing import RangeServer, write_dataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncfetch.stream.traffic import TrafficPlan
    from asyncfetch.testing import DatasetTruth

CONFIG = af.StreamConfig(
    pool_segments=4, prefetch_segments=1, decode_threads=1, fetch=af.FetchConfig(hedge=None, max_gap_bytes=0)
)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> DatasetTruth:
    """Clips that are no part of what is read of an index; an episode without frames among them."""
    root = tmp_path_factory.mktemp("traffic") / "data"
    lengths = [10, 14, 0, 12, 8, 16, 10, 10, 12, 14]
    return write_dataset(root, episodes=lengths, width=192, height=192, texture=4.4, episodes_per_video_file=1)


@pytest.fixture
def server(large: DatasetTruth) -> Iterator[RangeServer]:
    with RangeServer(large.root, tls=False) as server:
        yield server


def stream_of(url: str) -> af.Stream:
    return af.Stream(url, config=CONFIG)


def mixture_of(url: str) -> af.Mixture:
    parts = [range(5), range(5, 10)]
    return af.Mixture([af.Stream(url, episodes=part) for part in parts], [44, 56], stop_on=100, config=CONFIG)


@pytest.mark.parametrize("make", [stream_of, mixture_of])
@pytest.mark.parametrize(("ranks", "batch"), [(1, None), (2, 4), (3, None), (2, None)])
def test_what_is_told_is_what_a_server_counts(
    large: DatasetTruth,
    server: RangeServer,
    make: Callable[[str], af.Stream | af.Mixture],
    ranks: int,
    batch: int | None,
) -> None:
    told = make(server.url)
    plan = told.traffic_plan(world_size=ranks, batch_size=batch)
    for_workers = told.traffic_plan(world_size=ranks, num_workers=8, batch_size=batch)
    assert replace(for_workers, num_workers=0) == plan  # those of a rank read as one
    told.close()
    clips: dict[tuple[str, int], int] = {}
    fetched = []
    for rank in range(ranks):
        server.reset()
        placement = Placement(rank, ranks).in_batches(batch, drop_last=False)
        stream: EpochStream[Any] = make(server.url)
        for _ in source_of(stream).iterate(placement, epoch=0):
            pass
        stream.close()
        # Of a file with one episode the index is read at both ends; between them begins the clip.
        ranges = [one for one in server.requests if "/videos/" in one.path and 0 < (one.start or 0) < 1000]
        found = {(one.path, one.start or 0): one.bytes_sent for one in ranges}
        assert len(found) == len(ranges)
        clips |= found
        fetched.append(sum(found.values()))
    assert sum(clips.values()) == plan.least_bytes
    assert (sum(fetched), max(fetched)) == (plan.fetched_bytes, plan.largest_rank_bytes)
    assert len(clips) == 2 * sum(length > 0 for length in large.lengths)


def test_a_member_of_a_mixture_that_begins_anew_is_fetched_anew(large: DatasetTruth) -> None:
    def plan(samples: int) -> TrafficPlan:
        streams = [af.Stream(str(large.root), episodes=[1]), af.Stream(str(large.root), episodes=[3])]
        mixture = af.Mixture(streams, [1, 1], stop_on=samples, config=CONFIG)
        found = mixture.traffic_plan()
        mixture.close()
        return found

    once = plan(24)  # 12 of 14 frames, and 12 of 12
    assert once.fetched_bytes == once.least_bytes
    assert once.requests == 2 * (2 + 1) + 2 * 2
    thrice = plan(2 * 30)
    assert thrice.least_bytes == once.least_bytes
    assert 2.9 * once.least_bytes < thrice.fetched_bytes <= 3 * once.least_bytes
    assert thrice.requests == 6 * (2 + 1) + 2 * 2


def test_most_of_many_episodes_go_by_their_frames(large: DatasetTruth, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = af.Stream(str(large.root), config=CONFIG)
    whole = stream.traffic_plan(world_size=2, batch_size=4)
    monkeypatch.setattr(asyncfetch.stream.traffic, "_WEIGHED", 3)
    some = stream.traffic_plan(world_size=2, batch_size=4)
    assert some.requests == whole.requests
    assert some.least_bytes != whole.least_bytes
    assert some.fetched_bytes == pytest.approx(whole.fetched_bytes, rel=0.1)
    with pytest.raises(af.ConfigError, match="world_size"):
        stream.traffic_plan(world_size=0)
    stream.close()
