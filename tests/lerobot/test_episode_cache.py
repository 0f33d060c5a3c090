"""Whole episodes in memory: who fetches what, how often, and what stays."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import numpy as np
import pytest

from asyncfetch.decode import DecoderCache
from asyncfetch.errors import (
    AsyncFetchError,
    CacheError,
    ClosedError,
    DatasetError,
    DecodeError,
    EpisodeNotFound,
    NotFound,
    ObjectChanged,
    WrongLoop,
)
from asyncfetch.formats import Stretch, reader
from asyncfetch.lerobot import open_dataset, reader_of
from asyncfetch.resources import engine
from asyncfetch.runtime import memory_pool
from asyncfetch.runtime.concurrently import gather
from asyncfetch.streams import Stream
from asyncfetch.testing import Fault, read_identity
from tests.lerobot.serving import (
    SNAPSHOT,
    TOP,
    WRIST,
    check_sample,
    in_memory,
    in_use_bytes,
    serve,
    video_path,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from asyncfetch.lerobot import LeRobotDataset
    from asyncfetch.lerobot.episode_cache import EpisodeClip
    from asyncfetch.testing import DatasetTruth, ServedRequest
    from tests.lerobot.serving import Library, Served

CAMERAS = 2


@pytest.fixture(scope="module")
def truth(library: Library) -> DatasetTruth:
    """Ten episodes, two in a file, whose clips are larger than the indexes."""
    return library(episodes=10, length=5, width=128, height=128, texture=16.0)


def clips(served: Served) -> list[ServedRequest]:
    """Requests for frames; those for an index start at the file's first byte."""
    return [request for request in served.requests("/videos/") if kind(request) == "clip"]


async def know_indexes(served: Served) -> None:
    """Fetch the indexes of all files, then forget the log."""
    for episode in served.dataset.episodes.indices:
        await reader_of(served.dataset).clip_bytes(episode)
    served.server.reset()


async def budget(truth: DatasetTruth, episodes: float) -> int:
    """``max_bytes`` that leaves room for the clips of so many episodes."""
    async with serve(truth) as served:
        sizes = [await reader_of(served.dataset).clip_bytes(episode) for episode in served.dataset.episodes.indices]
        share = reader_of(served.dataset).engine.room.max_bytes / served.dataset.config.max_bytes
    return int(max(sizes) * episodes / share) + 8


class Overlap:
    """A rule without faults, for a server that answers late: counts what is in flight of each kind."""

    def __init__(self, wanted: Callable[[ServedRequest], bool]) -> None:
        self._wanted = wanted
        self.seen: list[ServedRequest] = []

    def __call__(self, request: ServedRequest) -> None:
        if self._wanted(request):
            self.seen.append(request)

    def peak(self) -> int:
        """Most of them in flight at once."""
        return max(
            sum(1 for other in self.seen if other.started <= one.started < (other.finished or np.inf))
            for one in self.seen
        )


# One wave, one request, one error.


async def test_episodes_and_cameras_are_fetched_in_one_wave(truth: DatasetTruth) -> None:
    overlap = Overlap(lambda request: kind(request) == "clip")
    async with serve(truth, first_byte_seconds=0.15, fault=overlap, joins=False) as served:
        for episode in range(4):
            served.dataset.prefetch(episode)
        await gather(*(partial(served.dataset.ready, episode) for episode in range(4)))
    assert len(overlap.seen) == overlap.peak() == 4 * CAMERAS


def kind(request: ServedRequest) -> str:
    """What is asked for, where no file comes whole with its first or last bytes."""
    if "/videos/" in request.path:
        return "clip" if request.start is not None and request.start > 0 else "index"
    if "/data/" in request.path:
        return "footer" if request.start is not None and request.start < 0 else "rows"
    return "metadata"


@pytest.mark.parametrize(
    ("withheld", "asked"),
    [("index", "footer"), ("footer", "index"), ("clip", "rows"), ("rows", "clip")],
)
async def test_requests_wait_only_for_what_they_depend_on(library: Library, withheld: str, asked: str) -> None:
    """So an episode takes two requests one after the other: for where its rows and clips lie, and for these."""
    truth = library(episodes=8, length=300, width=64, height=64, distinct_videos=1)
    came = {name: anyio.Event() for name in ("metadata", "index", "footer", "rows", "clip")}

    def withhold(request: ServedRequest) -> Fault | None:
        came[kind(request)].set()
        return Fault(first_byte_seconds=60.0) if kind(request) == withheld else None

    async with serve(truth, fault=withhold) as served:
        served.dataset.prefetch(0)
        with anyio.fail_after(10):
            await came[withheld].wait()
            await came[asked].wait()


async def test_the_clips_of_a_pass_do_not_wait_for_where_its_rows_lie(library: Library) -> None:
    truth = library(episodes=8, length=300, width=64, height=64, distinct_videos=1)
    clip_was_asked_for = anyio.Event()

    def withhold(request: ServedRequest) -> Fault | None:
        if kind(request) == "clip":
            clip_was_asked_for.set()
        return Fault(first_byte_seconds=60.0) if kind(request) == "footer" else None

    async with serve(truth, fault=withhold) as served, Stream(served.dataset).samples():
        with anyio.fail_after(10):
            await clip_was_asked_for.wait()


@pytest.fixture(scope="module")
def many_files(library: Library) -> DatasetTruth:
    """Each of 24 episodes in files of its own."""
    return library(episodes=24, length=5, width=64, height=64, distinct_videos=1, episodes_per_video_file=1)


async def test_the_first_clips_are_fetched_before_the_last_indexes(
    many_files: DatasetTruth, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "PLANNED_AT_ONCE", 8)
    async with serve(many_files, first_byte_seconds=0.05, joins=False) as served:
        await gather(*(partial(served.dataset.ready, episode) for episode in range(24)))
        indexes = [request for request in served.requests("/videos/") if kind(request) == "index"]
        assert len(indexes) == 24 * CAMERAS
        assert min(clip.started for clip in clips(served)) < max(index.started for index in indexes)


async def test_rows_and_indexes_read_ahead_never_wait_for_clips(
    many_files: DatasetTruth, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "PLANNED_AT_ONCE", 8)
    asked: set[str] = set()
    all_asked = anyio.Event()

    def clips_never_come(request: ServedRequest) -> Fault | None:
        if kind(request) == "clip":
            return Fault(first_byte_seconds=60.0)
        if kind(request) == "index":
            asked.add(request.path)
        if len(asked) == 24 * CAMERAS:
            all_asked.set()
        return None

    async with serve(many_files, fault=clips_never_come, max_requests_per_host=16) as served:
        for episode in range(24):
            served.dataset.prefetch(episode)
        with anyio.fail_after(10):
            await all_asked.wait()


class ClipsBefore:
    """A rule without faults: counts the clips asked for before the last one of an episode that has files of its own."""

    def __init__(self, episode: int) -> None:
        self._file = f"file-{episode:03d}.mp4"
        self._own = 0
        self.count = 0
        self.any_came, self.own_came = anyio.Event(), anyio.Event()

    def __call__(self, request: ServedRequest) -> None:
        if kind(request) != "clip":
            return
        self.any_came.set()
        self._own += request.path.endswith(self._file)
        if self._own == CAMERAS:
            self.own_came.set()
        else:
            self.count += 1


@pytest.mark.alone
@pytest.mark.parametrize("how", ["sample", "ready"])
@pytest.mark.parametrize("prefetched", [23, 24])
async def test_awaited_episode_overtakes_prefetched_ones(many_files: DatasetTruth, how: str, prefetched: int) -> None:
    """Its own few round trips let some of the others pass; without them it would come last, behind 46 clips."""
    before = ClipsBefore(23)
    async with serve(many_files, first_byte_seconds=0.02, max_requests_per_host=4, fault=before) as served:
        dataset = served.dataset
        for episode in range(prefetched):
            dataset.prefetch(episode)
        await before.any_came.wait()
        if how == "sample":
            await dataset.sample(23, 0)
        else:
            await dataset.ready(23)
        assert before.count < 24
        await gather(*(partial(dataset.ready, episode) for episode in range(24)))
        assert len(served.requests("/videos/")) == 2 * 24 * CAMERAS


async def test_clip_is_one_request_for_any_number_of_readers(truth: DatasetTruth) -> None:
    async with serve(truth, joins=False) as served:
        await know_indexes(served)
        places = [(episode, frame) for episode in range(3) for frame in range(5)] * 4
        samples = await gather(*(partial(served.dataset.sample, *place) for place in places))
        for place, sample in zip(places, samples, strict=True):
            check_sample(sample, truth, *place)
        assert len(clips(served)) == len(served.requests("/videos/")) == 3 * CAMERAS


@pytest.mark.parametrize("path", [video_path(TOP), "data/chunk-000/file-000.parquet"])
async def test_a_failure_is_not_remembered(truth: DatasetTruth, path: str) -> None:
    content = in_memory(truth)
    file = content.pop(path)
    async with serve(content) as served:
        dataset = served.dataset
        for _ in range(2):
            asked = len(served.requests(path))
            with pytest.raises(NotFound, match=path):
                await dataset.ready(0)
            with pytest.raises(NotFound, match=path):
                await dataset.sample(0, 0)
            assert len(served.requests(path)) == asked + 2
        content[path] = file
        check_sample(await dataset.sample(0, 0), truth, 0, 0)
        await dataset.ready(1)
        check_sample(await dataset.sample(1, 0), truth, 1, 0)


async def test_a_failed_prefetch_is_not_remembered(truth: DatasetTruth) -> None:
    content = in_memory(truth)
    video = content.pop(video_path(TOP))
    async with serve(content) as served:
        dataset = served.dataset
        dataset.prefetch(0)
        with pytest.raises(NotFound):  # of the same fetch
            await dataset.ready(0)
        content[video_path(TOP)] = video
        for episode in (0, 1):
            await dataset.ready(episode)
            check_sample(await dataset.sample(episode, 1), truth, episode, 1)


async def test_waiters_for_one_fetch_share_its_failure(truth: DatasetTruth) -> None:
    content = in_memory(truth)
    video = content.pop(video_path(TOP))
    async with serve(content) as served:
        dataset, failed = served.dataset, []

        async def ask() -> None:
            with pytest.raises(NotFound):
                await dataset.ready(0)
            failed.append(True)

        dataset.prefetch(0)
        await gather(*[ask] * 8)
        assert len(failed) == 8
        assert len(served.requests(video_path(TOP))) == 1
        content[video_path(TOP)] = video
        check_sample(await dataset.sample(0, 0), truth, 0, 0)


@pytest.mark.parametrize("path", [video_path(TOP), "data/chunk-000/file-000.parquet"])
async def test_a_damaged_file_is_looked_at_anew(truth: DatasetTruth, path: str) -> None:
    """What is kept of it told of the damage, and would for ever."""
    content = in_memory(truth)
    whole = content[path]
    content[path] = _damaged(whole) if path.startswith("data") else whole[:-1000]
    async with serve(content) as served:
        dataset = served.dataset
        for _ in range(2):
            asked = len(served.requests(path))
            with pytest.raises((DatasetError, DecodeError)):
                await dataset.sample(1, 4)
            assert len(served.requests(path)) > asked
        content[path] = whole
        with pytest.raises(ObjectChanged):
            await dataset.sample(1, 4)
        check_sample(await dataset.sample(1, 4), truth, 1, 4)


def _damaged(table: bytes) -> bytes:
    """The same file with pages of rows that can't be read."""
    footer = int.from_bytes(table[-8:-4], "little") + 8
    return table[:4] + bytes(len(table) - 4 - footer) + table[-footer:]


async def test_a_clip_that_no_decoder_reads_is_planned_anew(truth: DatasetTruth) -> None:
    content, path = in_memory(truth), video_path(TOP)
    whole = content[path]
    async with serve(content) as served:
        plan = await reader_of(served.dataset)._episodes._plan(Stretch(0, 0, 5))
    start, stop = plan[TOP].plan.start, plan[TOP].plan.stop
    content[path] = whole[:start] + bytes(stop - start) + whole[stop:]
    async with serve(content) as served:
        dataset = served.dataset
        for _ in range(2):
            asked = len(served.requests(path))
            with pytest.raises((DecodeError, DatasetError)):
                await dataset.sample(0, 0)
            assert len(served.requests(path)) > asked
        content[path] = whole
        with pytest.raises(ObjectChanged):
            await dataset.sample(0, 0)
        check_sample(await dataset.sample(0, 0), truth, 0, 0)


async def test_unknown_episodes_start_nothing(truth: DatasetTruth) -> None:
    async with serve(truth) as served:
        served.server.reset()
        with pytest.raises(EpisodeNotFound, match=r"no episode 10; it has 0 to 9"):
            served.dataset.prefetch(10)
        with pytest.raises(EpisodeNotFound):
            await served.dataset.ready(10)
        assert served.requests() == []


async def test_prefetches_are_bounded(truth: DatasetTruth, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_PREFETCHES", 3)
    async with serve(truth) as served:
        for episode in (0, 1, 2, 2, 1):
            served.dataset.prefetch(episode)
        with pytest.raises(CacheError, match="3 prefetches are under way"):
            served.dataset.prefetch(3)
        await gather(*(partial(served.dataset.ready, episode) for episode in range(3)))
        await anyio.wait_all_tasks_blocked()
        served.dataset.prefetch(3)
        await served.dataset.ready(3)


# Hits.


async def test_a_hit_never_waits(truth: DatasetTruth) -> None:
    async with serve(truth) as served:
        dataset = served.dataset
        await dataset.ready(0)
        served.server.reset()
        held = reader_of(dataset).hold(0)
        with pytest.raises(StopIteration) as returned:
            held.send(None)  # a coroutine that waits for nothing ends at its first step
        with returned.value.value as episode:
            assert read_identity(episode.frames(TOP, [3])[0]) == truth.identity(0, 3, TOP)
        assert served.requests() == []


async def test_a_decoder_that_is_gone_is_made_again_without_a_request(truth: DatasetTruth) -> None:
    async with serve(truth) as served:
        dataset = served.dataset
        await dataset.sample(0, 0)
        before = dataset.statistics()
        reader_of(dataset).engine.decoders.clear()
        served.server.reset()
        check_sample(await dataset.sample(0, 2), truth, 0, 2)
        after = dataset.statistics()
        assert served.requests() == []
        assert after.episodes.hits == before.episodes.hits + 1
        assert after.episodes.misses == before.episodes.misses == 1
        assert after.decoders.misses == before.decoders.misses + CAMERAS


async def test_no_memory_is_kept_for_bodies_beside_the_bound(
    truth: DatasetTruth, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_pool, "SMALL_BYTES", 1024)  # so that tables come in blocks that could be kept
    async with serve(truth) as served:
        await served.dataset.sample(0, 0)
        fetched = reader_of(served.dataset).engine.fetcher.statistics()
    assert fetched.bytes > 10_000
    assert fetched.idle_buffer_bytes == 0


async def test_decoders_are_kept_between_reads(truth: DatasetTruth) -> None:
    async with serve(truth) as served:
        for frame in range(4):
            await served.dataset.sample(0, frame)
        decoders = served.dataset.statistics().decoders
        assert (decoders.misses, decoders.hits, decoders.size) == (CAMERAS, 3 * CAMERAS, CAMERAS)


async def test_readers_of_an_episode_have_a_decoder_each(truth: DatasetTruth) -> None:
    async with serve(truth) as served:
        await served.dataset.ready(0)
        with await reader_of(served.dataset).hold(0) as episode:
            for frame in range(3):
                for reader, number in ((0, frame), (1, 4 - frame)):
                    picture = episode.frames(TOP, [number], reader=reader)[0]
                    assert read_identity(picture) == truth.identity(0, number, TOP)
        decoders = served.dataset.statistics().decoders
        assert (decoders.misses, decoders.hits, decoders.size) == (2, 4, 2)


# Room.


async def test_episodes_that_do_not_fit_are_fetched_again(truth: DatasetTruth) -> None:
    async with serve(truth, max_bytes=await budget(truth, 3), joins=False) as served:
        dataset = served.dataset
        await know_indexes(served)
        for _ in range(2):
            for episode in dataset.episodes.indices:
                check_sample(await dataset.sample(episode, 1), truth, episode, 1)
                kept = dataset.statistics().clips
                assert kept.used_bytes + kept.reserved_bytes <= kept.max_bytes
        after = dataset.statistics()
        assert after.episodes.misses == 20
        assert after.clips.evictions >= 2 * 10 * CAMERAS - 3 * CAMERAS - 2
        assert len(clips(served)) == 2 * 10 * CAMERAS


async def test_the_decoder_goes_with_its_clip(truth: DatasetTruth, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where decoders have all room they want: each one that stays would keep its clip's bytes."""
    monkeypatch.setattr("asyncfetch.resources.engine.DecoderCache", lambda **_: DecoderCache(None, None))
    async with serve(truth, max_bytes=await budget(truth, 3)) as served:
        for episode in served.dataset.episodes.indices:
            await served.dataset.sample(episode, 0)
            with await reader_of(served.dataset).hold(episode) as held:
                held.frames(TOP, [0], reader=1)
            now = served.dataset.statistics()
            assert CAMERAS < now.decoders.size <= 2 * now.clips.entries
            assert now.decoders.size <= 3 * (CAMERAS + 1)


async def test_many_readers_of_more_than_fits(truth: DatasetTruth) -> None:
    async with serve(truth, max_bytes=await budget(truth, 3)) as served:
        rng = np.random.default_rng(0)
        places = [
            (int(episode), int(frame)) for episode, frame in zip(*rng.integers((10, 5), size=(200, 2)).T, strict=True)
        ]
        samples = await gather(*(partial(served.dataset.sample, *place) for place in places))
        for place, sample in zip(places, samples, strict=True):
            check_sample(sample, truth, *place)
        assert in_use_bytes(served.dataset) == 0


async def test_episodes_do_not_wait_for_each_others_second_camera(truth: DatasetTruth) -> None:
    """The cache is full of one camera's clips; if each reader took its own, none could get the other camera's."""
    async with serve(truth, max_bytes=await budget(truth, 1.5)) as served:
        dataset = served.dataset
        for episode in range(3):
            clip = (await reader_of(dataset)._episodes._plan(Stretch(episode, 0, 5)))[TOP]
            where = (clip.url, clip.plan.start, clip.plan.stop)
            (await reader_of(dataset).engine.clips.acquire(*where, header=clip.plan.header)).release()
        assert dataset.statistics().clips.entries == 3
        with anyio.fail_after(5):
            samples = await gather(*(partial(dataset.sample, episode, 0) for episode in range(3)))
        for episode, sample in enumerate(samples):
            check_sample(sample, truth, episode, 0)


async def test_episode_larger_than_the_cache_is_refused_with_figures(truth: DatasetTruth) -> None:
    async with serve(truth, max_bytes=await budget(truth, 0.75)) as served:
        dataset = served.dataset
        for episode in range(2):
            needed = await reader_of(dataset).clip_bytes(episode)
            room = reader_of(dataset).engine.room.max_bytes
            with pytest.raises(
                CacheError, match=rf"episode {episode} take {needed} bytes, .* leaves {room} .*max_bytes"
            ):
                await dataset.ready(episode)
        assert in_use_bytes(dataset) == 0


async def test_rows_and_plans_are_kept_within_a_bound(truth: DatasetTruth) -> None:
    async with serve(truth, max_bytes=24 * 20_000) as served:
        dataset = served.dataset
        for episode in dataset.episodes.indices:
            check_sample(await dataset.sample(episode, 4), truth, episode, 4)
            kept = dataset.statistics().episodes
            assert kept.kept_bytes <= 20_000
        assert 1 <= kept.kept < 10
        assert kept.held == 0


# Cancellation and the end.


@pytest.mark.parametrize("seed", range(6))
async def test_cancelled_readers_leave_nothing_behind(truth: DatasetTruth, seed: int) -> None:
    rng = np.random.default_rng(seed)
    async with serve(truth, max_bytes=await budget(truth, 2), first_byte_seconds=0.005) as served:
        dataset = served.dataset

        async def read(episode: int, seconds: float) -> None:
            with anyio.move_on_after(seconds):
                check_sample(await dataset.sample(episode, 1), truth, episode, 1)

        readers = zip(rng.integers(0, 6, 60).tolist(), rng.uniform(0, 0.08, 60).tolist(), strict=True)
        await gather(*(partial(read, *reader) for reader in readers))
        assert in_use_bytes(dataset) == 0
        assert dataset.statistics().episodes.held == 0
        assert dataset.statistics().clips.waiting == 0
        for episode in range(6):
            check_sample(await dataset.sample(episode, 2), truth, episode, 2)


async def test_a_cancelled_reader_costs_the_others_nothing(truth: DatasetTruth) -> None:
    async with serve(truth, first_byte_seconds=0.05) as served:
        await know_indexes(served)
        async with anyio.create_task_group() as tasks:
            first = anyio.CancelScope()

            async def read_first() -> None:
                with first:
                    await served.dataset.sample(0, 0)

            tasks.start_soon(read_first)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(served.dataset.ready, 0)
            await anyio.wait_all_tasks_blocked()
            first.cancel()
        assert len(clips(served)) == CAMERAS


async def test_a_held_episode_can_be_read_until_it_is_released(truth: DatasetTruth) -> None:
    async with serve(truth) as served:
        held = await reader_of(served.dataset).hold(3)
        assert held.rows["index"].tolist() == list(range(15, 20))
        assert len(held.clip(TOP)) == 5
        held.release()
        held.release()
        assert in_use_bytes(served.dataset) == 0
        with pytest.raises(ClosedError, match="episode 3 was released"):
            held.frames(TOP, [0])


def stall_videos(request: ServedRequest) -> Fault | None:
    return Fault.stall() if "/videos/" in request.path else None


async def test_closing_ends_prefetches_under_way(truth: DatasetTruth) -> None:
    with anyio.fail_after(5):
        async with serve(truth, fault=stall_videos) as served:
            for episode in served.dataset.episodes.indices:
                served.dataset.prefetch(episode)
            await anyio.wait_all_tasks_blocked()


async def test_closing_ends_readers_with_closed_error(truth: DatasetTruth) -> None:
    errors: list[AsyncFetchError] = []

    async def read(dataset: LeRobotDataset, episode: int) -> None:
        try:
            await dataset.sample(episode, 0)
        except AsyncFetchError as error:
            errors.append(error)

    async with anyio.create_task_group() as tasks, serve(truth, fault=stall_videos) as served:
        for episode in (0, 0, 1):
            tasks.start_soon(read, served.dataset, episode)
        await anyio.wait_all_tasks_blocked()
    assert [type(error) for error in errors] == [ClosedError] * 3


async def test_before_and_after_its_block_it_is_closed(truth: DatasetTruth) -> None:
    unopened = open_dataset(str(truth.root))
    with pytest.raises(ClosedError, match="isn't open"):
        _ = unopened.fps
    with pytest.raises(ClosedError):
        await unopened.sample(0, 0)
    with pytest.raises(ClosedError):
        unopened.statistics()
    async with serve(truth) as served:
        await served.dataset.sample(0, 0)
    for read in (served.dataset.sample(0, 0), served.dataset.ready(0), reader_of(served.dataset).hold(0)):
        with pytest.raises(ClosedError):
            await read
    with pytest.raises(ClosedError):
        served.dataset.prefetch(0)
    with pytest.raises(ClosedError, match="only once"):
        await served.dataset.__aenter__()
    assert served.dataset.statistics().episodes.misses == 1


async def test_an_error_in_the_block_comes_out_as_it_is(truth: DatasetTruth) -> None:
    with pytest.raises(ZeroDivisionError):
        async with open_dataset(str(truth.root)):
            raise ZeroDivisionError


async def test_dataset_belongs_to_its_loop(truth: DatasetTruth) -> None:
    async with serve(truth, features=["action"]) as served:
        await served.dataset.ready(0)

        def elsewhere() -> None:
            with pytest.raises(WrongLoop, match="LeRobotDataset"):
                anyio.run(served.dataset.sample, 0, 0)
            with pytest.raises(WrongLoop, match="LeRobotDataset"):
                served.dataset.prefetch(0)

        await anyio.to_thread.run_sync(elsewhere)


# Replaced files.


@pytest.fixture(scope="module")
def other_video(library: Library) -> bytes:
    """The top camera's file of episodes 0 and 1 with larger frames: the old places exist in it, and are wrong."""
    other = library(episodes=2, length=5, width=128, height=128, texture=24.0, gop=1, seed=1)
    return (other.root / video_path(TOP)).read_bytes()


async def test_a_replaced_video_is_an_error_and_then_planned_anew(truth: DatasetTruth, other_video: bytes) -> None:
    content = in_memory(truth)
    async with serve(content) as served:
        dataset = served.dataset
        old = await dataset.sample(1, 0)
        content[video_path(TOP)] = other_video
        with pytest.raises(ObjectChanged, match=video_path(TOP)):
            await dataset.ready(0)
        dataset.prefetch(0)
        for frame in range(5):
            check_sample(await dataset.sample(0, frame), truth, 0, frame)
        new = await dataset.sample(1, 0)
        check_sample(new, truth, 1, 0)
        assert not new[TOP].equal(old[TOP])
        assert new[WRIST].equal(old[WRIST])


async def test_held_episode_of_a_replaced_video_keeps_its_frames(truth: DatasetTruth, other_video: bytes) -> None:
    content = in_memory(truth)
    async with serve(content) as served:
        dataset = served.dataset
        with await reader_of(dataset).hold(1) as old:
            before = old.frames(TOP, [4])
            content[video_path(TOP)] = other_video
            with pytest.raises(ObjectChanged):
                await dataset.ready(0)
            new = await dataset.sample(1, 4)
            check_sample(new, truth, 1, 4)
            assert old.frames(TOP, [4]).equal(before)
            assert not new[TOP].equal(before[0])
        assert in_use_bytes(dataset) == 0


async def test_a_clip_planned_before_the_change_is_planned_again(truth: DatasetTruth, other_video: bytes) -> None:
    """Episode 1 is planned by the old index, and its clip asked for when the fetcher has forgotten the old version."""
    content = in_memory(truth)
    async with serve(content) as served:
        dataset = served.dataset
        await reader_of(dataset).clip_bytes(0)
        content[video_path(TOP)] = other_video
        plan = reader_of(dataset)._episodes._plan

        async def plan_then_change(stretch: Stretch) -> Mapping[str, EpisodeClip]:
            planned = await plan(stretch)
            if stretch.episode == 1:
                with pytest.raises(ObjectChanged):
                    await dataset.ready(0)
                reader_of(dataset)._episodes._plan = plan  # type: ignore[method-assign]
            return planned

        reader_of(dataset)._episodes._plan = plan_then_change  # type: ignore[method-assign]
        for frame in range(5):
            check_sample(await dataset.sample(1, frame), truth, 1, frame)
        assert in_use_bytes(dataset) == 0


@pytest.mark.may_block  # builds its datasets as it goes
async def test_a_replaced_table_is_read_anew(library: Library) -> None:
    """Its row groups hold pictures, of other sizes in the new one, and lie at other places."""
    options = {"episodes": 4, "length": 5, "cameras": (), "extras": (SNAPSHOT,), "width": 128, "height": 128}
    truth = library(**options, texture=16.0)
    other = library(**options, texture=8.0)
    content, path = in_memory(truth), "data/chunk-000/file-000.parquet"
    async with serve(content) as served:
        await served.dataset.ready(0)
        content[path] = in_memory(other)[path]
        with pytest.raises(ObjectChanged, match=path):
            await served.dataset.ready(1)
        served.dataset.prefetch(1)
        sample = await served.dataset.sample(1, 3)
        np.testing.assert_array_equal(sample[SNAPSHOT].permute(1, 2, 0), other.picture(1, 3, SNAPSHOT))
