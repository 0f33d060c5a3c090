"""What an epoch fetches, told before it is read."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncfetch as af
import asyncfetch.stream.traffic
from asyncfetch.order.placement import Placement
from asyncfetch.stream.epoch_stream import source_of
from asyncfetch.stream.traffic import frames_fetched
from asyncfetch.testing import RangeServer, write_dataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from typing import Literal

    from asyncfetch.stream.traffic import TrafficPlan
    from asyncfetch.testing import DatasetTruth

CONFIG = af.StreamConfig(
    pool_segments=4, prefetch_segments=1, decode_threads=1, fetch=af.FetchConfig(hedge=None, max_gap_bytes=0)
)


def write(root: Path, lengths: Sequence[int], gop: int) -> DatasetTruth:
    """Clips that are no part of what is read of an index."""
    return write_dataset(root, episodes=lengths, width=192, height=192, texture=4.4, gop=gop, episodes_per_video_file=1)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> DatasetTruth:
    """Each episode is one group of pictures, and up to three ranks divide none: bytes are known to the last one."""
    lengths = [10, 10, 0, 10, 10, 10, 10, 10, 0, 10, 10, 10, 10, 10]
    return write(tmp_path_factory.mktemp("traffic") / "data", lengths, gop=10)


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory) -> DatasetTruth:
    """Episodes of several groups of pictures, which ranks and lanes divide."""
    return write(tmp_path_factory.mktemp("parted") / "data", [10, 14, 0, 12, 8, 16, 10, 10, 12, 14], gop=2)


@pytest.fixture
def server(large: DatasetTruth) -> Iterator[RangeServer]:
    with RangeServer(large.root, tls=False) as server:
        yield server


def stream_of(url: str) -> af.Stream:
    return af.Stream(url, config=CONFIG)


def mixture_of(url: str) -> af.Mixture:
    parts = [range(7), range(7, 14)]
    return af.Mixture([af.Stream(url, episodes=part) for part in parts], [1, 1], stop_on=120, config=CONFIG)


def fetched_by(
    server: RangeServer, root: Path, stream: af.Stream | af.Mixture, placement: Placement
) -> dict[tuple[str, int], int]:
    """Read what is left of epoch 0 as one rank; return the bytes of its clips, by file and beginning."""
    server.reset()
    for _ in source_of(stream).iterate(placement, epoch=0):
        pass
    stream.close()
    # Of a file with one episode the index is read at both ends; between them are its clips.
    videos = [one for one in server.requests if "/videos/" in one.path and one.start]
    ranges = [one for one in videos if one.stop != (root / one.path.lstrip("/")).stat().st_size]
    found = {(one.path, one.start or 0): one.bytes_sent for one in ranges}
    assert len(found) == len(ranges)
    return found


@pytest.mark.parametrize("make", [stream_of, mixture_of])
@pytest.mark.parametrize(("ranks", "batch"), [(1, None), (2, 4), (3, None), (2, None)])
def test_traffic_plan_is_what_a_server_counts(
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
    fetched, requests = [], 0
    for rank in range(ranks):
        found = fetched_by(server, large.root, make(server.url), Placement(rank, ranks, batch_size=batch))
        clips |= found
        fetched.append(sum(found.values()))
        requests += 2 * len(found) + len(found) // 2  # an index for each, and rows for each episode of two cameras
    assert requests == plan.requests
    assert sum(clips.values()) == plan.least_bytes == plan.run_bytes
    assert (sum(fetched), max(fetched)) == (plan.fetched_bytes, plan.largest_rank_bytes)
    assert len(clips) == 2 * sum(length > 0 for length in large.lengths)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_parts_of_episodes_are_told_by_their_frames(parted: DatasetTruth, ranks: int) -> None:
    with RangeServer(parted.root, tls=False) as server:
        told = stream_of(server.url)
        plan = told.traffic_plan(world_size=ranks)
        told.close()
        found = [
            fetched_by(server, parted.root, stream_of(server.url), Placement(rank, ranks)) for rank in range(ranks)
        ]
    fetched = [sum(one.values()) for one in found]
    assert sum(fetched) == pytest.approx(plan.fetched_bytes, rel=0.02)
    assert max(fetched) == pytest.approx(plan.largest_rank_bytes, rel=0.02)


@pytest.mark.parametrize("make", [stream_of, mixture_of])
@pytest.mark.parametrize("taken", [1, 30, 70])
def test_traffic_of_a_resumed_epoch_is_planned_for_other_ranks(
    large: DatasetTruth, server: RangeServer, make: Callable[[str], af.Stream | af.Mixture], taken: int
) -> None:
    """Of a piece that was begun a rank fetches what it needs once, though two of its lanes give frames of it."""
    begun = make(server.url)
    iterator = source_of(begun).iterate(Placement(), epoch=0)
    for _ in range(taken):
        next(iterator)
    state = iterator.state_dict()
    iterator.close()
    begun.load_state_dict(state)
    assert begun.traffic_plan(world_size=2) == make(server.url).traffic_plan(world_size=2)  # of the whole epoch
    begun.close()
    for rank in range(2):
        stream = make(server.url)
        stream.load_state_dict(state)
        opened, source = source_of(stream).session().opened(), source_of(stream)
        deal = source.plan(opened, Placement(rank, 2), 0).deal
        pieces = sum(
            np.count_nonzero(frames_fetched(deal, member).ranks == rank) for member in range(len(deal.leg.pools))
        )
        assert len(fetched_by(server, large.root, stream, Placement(rank, 2))) == 2 * pieces


@pytest.mark.parametrize(
    ("keep_shares", "make", "is_kept"),
    [("auto", stream_of, True), ("node", stream_of, True), (None, stream_of, False), ("node", mixture_of, False)],
)
def test_a_run_with_disk_caches_is_told(
    large: DatasetTruth,
    monkeypatch: pytest.MonkeyPatch,
    keep_shares: Literal["auto", "node"] | None,
    make: Callable[[str], af.Stream | af.Mixture],
    is_kept: bool,
) -> None:
    """Each byte leaves the store once where a machine keeps its share; else each machine comes to read it."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setitem(globals(), "CONFIG", replace(CONFIG, keep_shares=keep_shares))
    stream = make(str(large.root))
    for ranks, machines in ((2, 1), (4, 2), (8, 4)):
        plan = stream.traffic_plan(world_size=ranks)
        assert plan.run_bytes == pytest.approx(plan.least_bytes * (1 if is_kept else machines), abs=2)
    stream.close()


@pytest.mark.parametrize("make", [stream_of, mixture_of])
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_distinct_segments_are_those_of_a_batch(
    large: DatasetTruth, make: Callable[[str], af.Stream | af.Mixture], batch: int
) -> None:
    stream = make(str(large.root))
    told = stream.traffic_plan(batch_size=batch).distinct_segments
    assert stream.traffic_plan().distinct_segments == 4  # the pool, which a batch of 32 is drawn from
    episodes = [int(sample["episode_index"]) for sample in source_of(stream).iterate(Placement(), epoch=0)]
    stream.close()
    assert told == max(len(set(episodes[at : at + batch])) for at in range(0, len(episodes), batch)) == batch


def test_a_member_of_a_mixture_that_begins_anew_is_fetched_anew(large: DatasetTruth) -> None:
    def plan(samples: int) -> TrafficPlan:
        streams = [af.Stream(str(large.root), episodes=[3]), af.Stream(str(large.root), episodes=[9])]
        mixture = af.Mixture(streams, [1, 1], stop_on=samples, config=CONFIG)
        found = mixture.traffic_plan()
        mixture.close()
        return found

    once = plan(2 * 10)
    assert once.fetched_bytes == once.least_bytes
    assert once.requests == 2 * (2 + 1) + 2 * 2
    thrice = plan(2 * 25)  # the third time it is fetched for half of its frames
    assert thrice.least_bytes == once.least_bytes
    assert 2 * once.least_bytes < thrice.fetched_bytes < 3 * once.least_bytes
    assert thrice.requests == 6 * 2 + 2 + 2 * 2  # rows of an episode are told once


def test_most_of_many_episodes_go_by_their_frames(large: DatasetTruth, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = af.Stream(str(large.root), config=CONFIG)
    whole = stream.traffic_plan(world_size=2, batch_size=4)
    monkeypatch.setattr(asyncfetch.stream.traffic, "_WEIGHED", 3)
    some = stream.traffic_plan(world_size=2, batch_size=4)
    assert some.requests == whole.requests
    assert some.least_bytes != whole.least_bytes
    assert some.fetched_bytes == pytest.approx(whole.fetched_bytes, rel=0.1)
    stream.close()


@pytest.mark.parametrize(
    "wrong", [{"world_size": 0}, {"world_size": "2"}, {"num_workers": -1}, {"batch_size": 0}], ids=str
)
def test_a_traffic_plan_of_what_can_not_be(large: DatasetTruth, wrong: dict[str, Any]) -> None:
    with pytest.raises(af.ConfigError, match=next(iter(wrong))):
        stream_of(str(large.root)).traffic_plan(**wrong)
