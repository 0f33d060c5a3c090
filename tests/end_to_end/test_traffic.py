"""The bytes of clips that leave a server in an epoch, by its own count, however many ranks share it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

import asyncfetch as af
from asyncfetch.stream import Placement
from asyncfetch.stream.source import source_of
from asyncfetch.testing import write_dataset
from tests.end_to_end.conftest import serve_dataset

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.end_to_end.conftest import Served

CAMERA = "observation.images.top"


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
    with serve_dataset(truth, max_log=100_000) as served:
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


@pytest.mark.timeout(120)
def test_ranks_together_fetch_what_one_would(many: Served) -> None:
    alone = clip_bytes(many, 1)
    for ranks in (2, 3, 8):
        fetched = clip_bytes(many, ranks)
        assert fetched <= 1.03 * alone, ranks
