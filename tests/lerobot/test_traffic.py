"""How much is fetched for what is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
