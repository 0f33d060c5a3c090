"""How much is fetched for what is needed."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import pyarrow.parquet as pq
import pytest

from asyncfetch.config import FetchConfig, StreamConfig
from asyncfetch.fetch import Fetcher
from asyncfetch.lerobot import open_dataset, reader_of
from asyncfetch.lerobot.metadata import load_metadata
from asyncfetch.lerobot.rows import RowCache, RowReader
from asyncfetch.runtime.concurrently import gather
from asyncfetch.streams import Stream
from asyncfetch.testing import Quirks, RangeServer
from tests.lerobot.conftest import RoundReader
from tests.lerobot.serving import all_frames, check_sample, in_memory, renumbered, serve

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.lerobot.serving import Library

T = TypeVar("T")

MEGABYTE = 1_000_000


@pytest.mark.parametrize(("whole_bytes", "opening_rounds"), [(MEGABYTE, 2), (0, 3)], ids=["short", "long"])
async def test_a_cold_start_takes_five_requests_one_after_the_other(
    library: Library, monkeypatch: pytest.MonkeyPatch, whole_bytes: int, opening_rounds: int
) -> None:
    """Files' ends, the rest of a footer and its columns; then the indexes of videos and rows; then clips and rows.

    One less where the table of episodes is short, for its columns come with the rest of the footer.
    """
    monkeypatch.setattr("asyncfetch.tables.parquet.WHOLE_BYTES", whole_bytes)
    truth = library(episodes=60, length=40, episodes_per_video_file=12, distinct_videos=1)
    reader = RoundReader()
    monkeypatch.setattr("asyncfetch.resources.engine.Fetcher", lambda *_, **__: nullcontext(reader))
    monkeypatch.setattr("anyio.to_thread.run_sync", reader.run_here)
    async with open_dataset(str(truth.root)) as dataset:
        assert reader.rounds == opening_rounds
        await gather(*(partial(dataset.ready, episode) for episode in (3, 31, 59)))
    assert reader.rounds == opening_rounds + 2


async def test_a_shuffled_pass_fetches_little_more_than_it_needs(library: Library) -> None:
    truth = library(
        episodes=5, length=70, width=320, height=240, texture=20.0, crf=18, distinct_videos=1, episodes_per_video_file=1
    )
    async with serve(truth) as served:
        clips_bytes = [
            await reader_of(served.dataset).clip_bytes(episode) for episode in served.dataset.episodes.indices
        ]
        assert min(clips_bytes) / len(truth.cameras) >= MEGABYTE
        for place in all_frames(truth)[::7]:
            check_sample(await served.dataset.sample(*place), truth, *place)
        fetched_bytes = served.server.statistics().bytes_sent
    # Clip spans with their files' indexes, and rows; what the metadata took comes on top of what was fetched only.
    needed_bytes = sum(len(data) for path, data in in_memory(truth).items() if path.startswith(("videos", "data")))
    assert needed_bytes <= fetched_bytes <= 1.05 * needed_bytes


async def test_epoch_beyond_memory_fetches_little_more_than_it_needs(library: Library) -> None:
    truth = library(
        episodes=12,
        length=70,
        width=320,
        height=240,
        texture=20.0,
        crf=18,
        distinct_videos=1,
        episodes_per_video_file=3,
    )
    needed_bytes = sum(len(data) for path, data in in_memory(truth).items() if path.startswith(("videos", "data")))
    max_bytes = 16 * MEGABYTE
    async with RangeServer(truth.root) as server:
        config = StreamConfig(
            fetch=FetchConfig(ca_file=server.ca_file, trust_env=False),
            max_bytes=max_bytes,
            pool_segments=2,
            prefetch_segments=1,
        )
        async with open_dataset(server.url, config=config) as dataset, Stream(dataset).samples(epoch=0) as samples:
            indices = {int(sample["index"]) async for sample in samples}
        fetched_bytes = server.statistics().bytes_sent
    assert len(indices) == truth.num_frames
    assert max_bytes < needed_bytes <= fetched_bytes <= 1.05 * needed_bytes


async def test_rows_that_no_episode_names_are_not_fetched(library: Library, tmp_path: Path) -> None:
    truth = library(episodes=(3000,) * 4, cameras=())
    root = renumbered(truth, tmp_path / "gaps", (0, None, 10**6, None))
    (path,) = (root / "data").rglob("*.parquet")
    groups = [pq.ParquetFile(path).metadata.row_group(number) for number in range(4)]
    starts = [
        min(one.dictionary_page_offset or one.data_page_offset for one in map(group.column, range(group.num_columns)))
        for group in groups
    ]
    async with serve(root) as served:
        await gather(*(partial(served.dataset.ready, episode) for episode in served.dataset.episodes.indices))
        check_sample({**await served.dataset.sample(10**6, 7), "episode_index": 2}, truth, 2, 7)
        ranges = sorted((one.start, one.stop) for one in served.requests("/data") if one.start and one.stop)
    assert ranges == [(starts[0], starts[1]), (starts[2], starts[3])]  # beside the footer


async def test_shared_row_group_is_fetched_once_in_a_small_budget(library: Library) -> None:
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


async def test_rows_that_several_episodes_want_at_once_share_requests(library: Library) -> None:
    truth = library(episodes=24, length=300, width=64, height=64, distinct_videos=1)
    (file,) = (truth.root / "data").rglob("*.parquet")

    async def run_here(call: Callable[[], T]) -> T:
        return call()  # in a thread, it would be left to the scheduler who asks in the same turn

    async def count_requests(max_span_bytes: int) -> int:
        async with RangeServer(truth.root, tls=False) as server:
            async with Fetcher(FetchConfig(trust_env=False, max_span_bytes=max_span_bytes)) as fetcher:
                metadata = await load_metadata(fetcher, server.url)
                reader = RowReader(fetcher, metadata, kept=RowCache(64 * MEGABYTE), run=run_here)
                episodes = [metadata.episodes[index] for index in range(24)]
                await gather(*(partial(reader.rows, episode) for episode in episodes))
            return sum(file.name in request.path and "data/" in request.path for request in server.requests)

    alone = await count_requests(0)
    assert alone >= 20
    assert await count_requests(FetchConfig().max_span_bytes) <= alone / 2
