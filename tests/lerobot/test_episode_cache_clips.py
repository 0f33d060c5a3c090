from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import anyio.to_thread
import pytest

from asyncfetch.config import FetchConfig
from asyncfetch.errors import DatasetError, FormatError
from asyncfetch.fetch import Fetcher
from asyncfetch.formats.clips import FRAME_INDEX_BYTES, HEAD_BYTES, MAX_INDEX_BYTES, MAX_READS
from asyncfetch.formats.stretch import Stretch
from asyncfetch.lerobot.episode_cache import VideoFile, cut_clip, fetch_index
from asyncfetch.lerobot.episode_table import Episode, VideoSpan
from asyncfetch.runtime.concurrently import gather
from asyncfetch.runtime.single_flight import SharedLRU
from asyncfetch.testing import RangeServer
from tests.lerobot.serving import MIB, TOP, in_memory, video_path

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncfetch.lerobot.episode_cache import EpisodeClip
    from tests.lerobot.serving import Library


FREE = (HEAD_BYTES + 8).to_bytes(4, "big") + b"free" + bytes(HEAD_BYTES)


class World:
    """Indexes of the videos on a server."""

    def __init__(self, server: RangeServer, fetcher: Fetcher) -> None:
        self.server = server
        self.fetcher = fetcher
        self.shared = (0, 0)
        self.indexes: SharedLRU[str, VideoFile] = SharedLRU(MIB)

    async def plan(self, path: str, *, first_frame: int = 0, length: int = 4) -> EpisodeClip:
        span = VideoSpan(f"{self.server.url}/{path}", first_frame, length, first_frame / 30)
        episode = Episode(7, length, (), "", 0, length, {TOP: span})
        fetch = partial(fetch_index, self.fetcher, span.url, *self.shared, run=anyio.to_thread.run_sync)
        file = await self.indexes.get(span.url, fetch)
        return cut_clip(file, episode, Stretch(7, 0, length), TOP, None, fps=30, tolerance_seconds=1e-4)

    def ranges(self) -> list[tuple[int | None, int | None]]:
        return [(request.start, request.stop) for request in self.server.requests]


@pytest.fixture(scope="module")
def content(library: Library) -> dict[str, bytes]:
    front = in_memory(library(episodes=(4, 4)))[video_path(TOP)]
    tail = in_memory(library(episodes=(4,), width=256, height=256, texture=16.0))[video_path(TOP)]
    return {
        "front.mp4": front,
        "tail.mp4": tail,
        "long.mp4": _with_free_space_in_moov(front),
        "spaced.mp4": _with_free_space_in_front(front, 3),
        "endless.mp4": _with_free_space_in_front(front, MAX_READS),
        "empty.mp4": b"",
    }


def _with_free_space_in_front(video: bytes, num_boxes: int) -> bytes:
    """Boxes longer than the first request between the file's first one and its index."""
    start = video.index(b"moov") - 4
    return _shift_chunks(video[:start] + num_boxes * FREE + video[start:], num_boxes * len(FREE))


def _with_free_space_in_moov(video: bytes) -> bytes:
    """The index made longer than the first request: a box that means nothing is added to it, behind the media data."""
    start = video.index(b"moov") - 4
    length = int.from_bytes(video[start : start + 4], "big")
    padding = 2 * HEAD_BYTES
    moov = (length + padding).to_bytes(4, "big") + video[start + 4 : start + length]
    moov += padding.to_bytes(4, "big") + b"free" + bytes(padding - 8)
    hole = length.to_bytes(4, "big") + b"free" + video[start + 8 : start + length]
    # ftyp, long moov, then the rest: every chunk lies further back by the length of the new box.
    return _shift_chunks(video[:start] + moov + hole + video[start + length :], len(moov))


def _shift_chunks(video: bytes, by: int) -> bytes:
    at = video.index(b"stco") + 8
    count = int.from_bytes(video[at : at + 4], "big")
    shifted = b"".join(
        (int.from_bytes(video[at + 4 + 4 * i : at + 8 + 4 * i], "big") + by).to_bytes(4, "big") for i in range(count)
    )
    return video[: at + 4] + shifted + video[at + 4 + 4 * count :]


@pytest.fixture
async def world(content: dict[str, bytes]) -> AsyncIterator[World]:
    async with RangeServer(content) as server:
        config = FetchConfig(ca_file=server.ca_file, trust_env=False)
        async with Fetcher(config) as fetcher:
            yield World(server, fetcher)


async def test_an_index_in_front_costs_one_request(world: World) -> None:
    await world.plan("front.mp4")
    assert world.ranges() == [(0, HEAD_BYTES)]


async def test_an_index_at_the_tail_costs_one_request_more(world: World, content: dict[str, bytes]) -> None:
    await world.plan("tail.mp4")
    moov = content["tail.mp4"].index(b"moov") - 4
    size = len(content["tail.mp4"])
    assert world.ranges() == [(0, HEAD_BYTES), (moov, size)]


async def test_a_long_index_costs_one_request_more(world: World, content: dict[str, bytes]) -> None:
    clip = await world.plan("long.mp4")
    start = content["long.mp4"].index(b"moov") - 4
    stop = start + int.from_bytes(content["long.mp4"][start : start + 4], "big")
    assert world.ranges() == [(0, HEAD_BYTES), (start, stop)]
    plain = await world.plan("front.mp4")
    moved = content["long.mp4"][clip.plan.start : clip.plan.stop]
    assert moved == content["front.mp4"][plain.plan.start : plain.plan.stop]


async def test_long_index_costs_one_request_if_frames_are_known(world: World) -> None:
    world.shared = (2, 3 * HEAD_BYTES // FRAME_INDEX_BYTES)
    await world.plan("long.mp4")
    assert world.ranges() == [(0, 4 * HEAD_BYTES)]


async def test_no_more_is_asked_for_on_a_guess_than_comes_soon(world: World) -> None:
    world.shared = (200, 10_000_000)
    await world.plan("front.mp4")
    assert world.ranges() == [(0, MAX_INDEX_BYTES)]


@pytest.mark.parametrize("path", ["tail.mp4", "front.mp4", "long.mp4"])
async def test_of_a_single_episode_both_ends_are_asked_for_at_once(world: World, path: str) -> None:
    plan = await world.plan(path)
    world.server.reset()
    world.indexes.clear()
    world.shared = (1, 100)
    assert (await world.plan(path)).plan.header == plan.plan.header
    guessed = {(0, HEAD_BYTES), (-HEAD_BYTES - 100 * FRAME_INDEX_BYTES, None)}
    assert set(world.ranges()[:2]) == guessed
    assert len(world.ranges()) == (3 if path == "long.mp4" else 2)


async def test_boxes_in_front_of_the_index_are_stepped_over(world: World, content: dict[str, bytes]) -> None:
    clip = await world.plan("spaced.mp4")
    first = content["spaced.mp4"].index(b"free") - 4
    size = len(content["spaced.mp4"])
    steps = [first + (i + 1) * len(FREE) for i in range(3)]
    assert world.ranges() == [(0, HEAD_BYTES), *((at, min(size, at + HEAD_BYTES)) for at in steps)]
    plain = await world.plan("front.mp4")
    moved = content["spaced.mp4"][clip.plan.start : clip.plan.stop]
    assert moved == content["front.mp4"][plain.plan.start : plain.plan.stop]


async def test_a_file_of_nothing_but_space_is_not_walked_without_end(world: World) -> None:
    with pytest.raises(FormatError, match=r"endless\.mp4: no 'moov' box among the first boxes"):
        await world.plan("endless.mp4")
    assert len(world.ranges()) == 1 + MAX_READS


async def test_concurrent_plans_share_one_fetch(world: World) -> None:
    await gather(*(partial(world.plan, "front.mp4", first_frame=first) for first in (0, 4, 0, 4)))
    await world.plan("front.mp4", first_frame=4)
    assert world.ranges() == [(0, HEAD_BYTES)]


async def test_after_clear_an_index_is_fetched_again(world: World) -> None:
    await world.plan("front.mp4")
    world.indexes.clear()
    await world.plan("front.mp4")
    assert len(world.ranges()) == 2


async def test_a_place_that_no_video_has_is_the_metadatas_fault(world: World) -> None:
    with pytest.raises(DatasetError, match=r"episode 7 a place that .*front\.mp4 can't have"):
        await world.plan("front.mp4", first_frame=2**40)


async def test_a_clip_weighs_its_header_and_its_range(world: World) -> None:
    clip = await world.plan("front.mp4", first_frame=4)
    assert clip.nbytes == len(clip.plan.header) + clip.plan.stop - clip.plan.start
