"""How much is fetched for what is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from asyncfetch.testing import Quirks
from tests.lerobot.serving import all_frames, check_sample, in_memory, serve

if TYPE_CHECKING:
    from tests.lerobot.serving import Library

MEGABYTE = 1_000_000


async def test_a_shuffled_pass_fetches_little_more_than_it_needs(library: Library) -> None:
    truth = library(
        episodes=5, length=70, width=320, height=240, texture=20.0, crf=18, distinct_videos=1, episodes_per_video_file=1
    )
    async with serve(truth) as served:
        clips_bytes = [await served.dataset.clip_bytes(episode) for episode in served.dataset.episodes.indices]
        assert min(clips_bytes) / len(truth.cameras) >= MEGABYTE
        for place in all_frames(truth)[::7]:
            check_sample(await served.dataset.sample(*place), truth, *place)
        fetched_bytes = served.server.statistics().bytes_sent
    # Clip spans with their files' indexes, and rows; what the metadata took comes on top of what was fetched only.
    needed_bytes = sum(len(data) for path, data in in_memory(truth).items() if path.startswith(("videos", "data")))
    assert needed_bytes <= fetched_bytes <= 1.05 * needed_bytes


async def test_a_shared_row_group_is_fetched_once_though_the_budget_is_small(library: Library) -> None:
    """A twenty-fourth of ``max_bytes``, decoded, and asked for by one episode after the other."""
    quirks = Quirks(collapsed_row_groups=True)
    truth = library(episodes=24, length=20, width=64, height=64, distinct_videos=1, quirks=quirks)
    (file,) = (truth.root / "data").rglob("*.parquet")
    max_bytes = 24 * pq.read_table(file).nbytes
    async with serve(truth, max_bytes=max_bytes) as served:
        for episode in [*range(24), *range(24)]:
            await served.dataset.ready(episode)
        fetched_bytes = sum(request.bytes_sent for request in served.requests(file.name) if "data/" in request.path)
    assert fetched_bytes <= 1.05 * file.stat().st_size
