"""Segments in memory within a bound: a pass gets all its frames, or an error that says what to set. It never hangs."""

from __future__ import annotations

import itertools
import re
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import asyncfetch as af
import asyncfetch.stream.prefetcher
from asyncfetch.formats import Stretch
from asyncfetch.lerobot import reader_of
from asyncfetch.lerobot.dataset import LeRobotFormat
from asyncfetch.order.line import Piece
from asyncfetch.order.placement import Placement
from asyncfetch.stream.datasets import OpenDatasets
from asyncfetch.stream.epoch_stream import source_of
from asyncfetch.stream.pool import pools_that_fit
from asyncfetch.stream.prefetcher import Prefetcher
from asyncfetch.stream.ranks import found_placement
from asyncfetch.testing import write_dataset

if TYPE_CHECKING:
    from asyncfetch.testing import DatasetTruth


def config(clip_bytes: int, **options: Any) -> af.StreamConfig:  # noqa: ANN401
    """A configuration that leaves just so much for clips: the rest is for decoders and tables."""
    max_bytes = next(total for total in itertools.count(clip_bytes) if total - total // 8 - total // 4 >= clip_bytes)
    return af.StreamConfig(max_bytes=max_bytes, decode_threads=1, **options)


@pytest.fixture(scope="module")
def clip_bytes(truth: DatasetTruth) -> list[int]:
    """What each episode's clips take."""

    async def weigh() -> list[int]:
        async with af.open_dataset(str(truth.root)) as dataset:
            lengths = enumerate(truth.lengths)  # an episode without frames has no file
            return [await reader_of(dataset).clip_bytes(episode) if length else 0 for episode, length in lengths]

    return anyio.run(weigh)


async def read(stream: af.Stream, *, bound_bytes: int | None = None) -> list[int]:
    reading = source_of(stream).members[0].format
    assert isinstance(reading, LeRobotFormat)
    source = reading.source
    async with stream.samples() as samples:
        indices = []
        async for sample in samples:
            indices.append(int(sample["index"]))
            if bound_bytes is not None and isinstance(source, af.LeRobotDataset):
                clips = source.statistics().clips
                assert clips.used_bytes + clips.reserved_bytes <= clips.max_bytes <= bound_bytes
        return indices


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [False, True])  # 20 examples each: 40 at once are over a minute on a busy machine
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_a_pass_gets_every_frame_or_an_error_and_never_hangs(
    truth: DatasetTruth, clip_bytes: list[int], shuffle: bool, data: st.DataObject
) -> None:
    room = data.draw(st.integers(100, sum(clip_bytes) + 10))
    chosen = config(
        room,
        pool_segments=data.draw(st.integers(1, 16)),
        segment_seconds=data.draw(st.sampled_from([0.2, 20.0])),
        prefetch_segments=data.draw(st.integers(0, 4)),
        decoded_max_bytes=data.draw(st.sampled_from([1, 100_000, 64 << 20])),
    )
    with anyio.fail_after(20), suppress(af.CacheError):
        async with af.open_dataset(str(truth.root), config=chosen) as dataset:
            stream = af.Stream(dataset, shuffle=shuffle, seed=data.draw(st.integers(0, 9)))
            indices = await read(stream, bound_bytes=room)
            assert sorted(indices) == list(range(truth.num_frames))


@pytest.mark.parametrize("prefetch_segments", [0, 1, 8])
@pytest.mark.parametrize("decoded_max_bytes", [1, 64 << 20])
async def test_room_for_the_largest_episode_is_just_enough_in_sequence(
    truth: DatasetTruth, clip_bytes: list[int], prefetch_segments: int, decoded_max_bytes: int
) -> None:
    needed = max(clip_bytes)
    options = {"prefetch_segments": prefetch_segments, "decoded_max_bytes": decoded_max_bytes}
    enough = af.Stream(str(truth.root), shuffle=False, config=config(needed, **options))
    short = af.Stream(str(truth.root), shuffle=False, config=config(needed - 1, **options))
    with anyio.fail_after(10):
        assert await read(enough) == list(range(truth.num_frames))
        with pytest.raises(af.CacheError):
            await read(short)


@pytest.mark.parametrize("prefetch_segments", [0, 8])
@pytest.mark.parametrize("room", [1.0, 0.5])
async def test_pool_that_does_not_fit_is_smaller_with_one_warning(
    truth: DatasetTruth, clip_bytes: list[int], prefetch_segments: int, room: float, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"pool_segments": 8, "prefetch_segments": prefetch_segments}
    chosen = config(int(room * sum(clip_bytes)), **options)
    for seed in range(3):
        caplog.clear()
        with anyio.fail_after(10):
            indices = await read(af.Stream(str(truth.root), seed=seed, config=chosen))
            assert sorted(indices) == list(range(truth.num_frames))
        (warning,) = caplog.messages
        said = re.search(r"has room for the clips of (\d) segments .* drawn from (\d), .* max_bytes=(\d+)", warning)
        assert said is not None
        assert 1 <= int(said[1]) == int(said[2]) < 8
        enough = replace(chosen, max_bytes=int(said[3]))
    caplog.clear()
    assert sorted(await read(af.Stream(str(truth.root), seed=seed, config=enough))) == sorted(indices)
    assert not caplog.messages


def test_the_pool_is_the_same_for_any_number_of_workers(truth: DatasetTruth, clip_bytes: list[int]) -> None:
    room = replace(config(sum(clip_bytes) // 2, pool_segments=8), decode_threads=4)
    alone = source_of(af.Stream(str(truth.root), config=room))
    pools = []
    for stream in (alone, alone.shared_by(2), alone.shared_by(4)):
        next(stream.iterate(found_placement()))
        pools.append(stream.session().opened().pools)
        stream.close()
    assert pools[0] == pools[1] == pools[2]
    assert pools[0][0] < 8


async def test_episode_larger_than_the_bound_is_an_error_at_first(truth: DatasetTruth, clip_bytes: list[int]) -> None:
    chosen = config(max(clip_bytes) - 1, pool_segments=8)
    samples = af.Stream(str(truth.root), config=chosen).samples()
    with anyio.fail_after(5), pytest.raises(af.CacheError) as caught:
        await samples.__aenter__()
    message = str(caught.value)
    assert f"max_bytes={chosen.max_bytes}" in message
    assert f"take {max(clip_bytes)} bytes" in message
    assert f"leaves {max(clip_bytes) - 1} for clips" in message
    needed = re.search(r"at least (\d+)", message)
    assert needed is not None
    enough = replace(chosen, max_bytes=int(needed[1]))
    assert len(await read(af.Stream(str(truth.root), config=enough))) == truth.num_frames


@pytest.mark.parametrize("pool_segments", [1, 2, 8])
@pytest.mark.parametrize("room", [1.0, 1.5, 2.5])
async def test_a_pool_that_was_made_smaller_fits_in_every_epoch(
    truth: DatasetTruth, clip_bytes: list[int], pool_segments: int, room: float
) -> None:
    chosen = config(int(room * max(clip_bytes)), pool_segments=pool_segments, decoded_max_bytes=1)
    for seed, epoch in ((0, 0), (0, 1), (1, 2)):
        async with af.Stream(str(truth.root), seed=seed, config=chosen).samples(epoch=epoch) as samples:
            assert len([sample async for sample in samples]) == truth.num_frames


def advised(error: af.CacheError, *, pool_segments: int) -> int:
    said = re.search(rf"a pool of {pool_segments} needs about StreamConfig\(max_bytes=(\d+)\)", str(error))
    assert said is not None, error
    return int(said[1])


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> DatasetTruth:
    """The last episode is twenty times as long as the others."""
    return write_dataset(tmp_path_factory.mktemp("uneven"), episodes=(3, 3, 0, 3, 3, 60), width=64, height=64)


@pytest.mark.parametrize("max_bytes", [2000, 20_000])
async def test_the_figure_is_for_the_episodes_that_there_are(uneven: DatasetTruth, max_bytes: int) -> None:
    """Also where the first ones are no measure for the others, and where one of them doesn't fit by itself."""
    chosen = af.StreamConfig(max_bytes=max_bytes)
    said = set()
    for seed in range(3):
        with pytest.raises(af.CacheError, match="episode 5 ") as caught:
            await read(af.Stream(str(uneven.root), seed=seed, config=chosen))
        said |= set(re.findall(r"at least (\d+)", str(caught.value)))
    (enough,) = said
    async with af.open_dataset(str(uneven.root), config=replace(chosen, max_bytes=int(enough))) as dataset:
        for epoch in range(3):
            assert len(await read(af.Stream(dataset, seed=epoch))) == uneven.num_frames


def mixture_of(truths: list[DatasetTruth], max_bytes: int, **options: Any) -> af.Mixture:  # noqa: ANN401
    streams = [af.Stream(str(truth.root)) for truth in truths]
    config = af.StreamConfig(max_bytes=max_bytes, decode_threads=1, **options)
    return af.Mixture(streams, weights=[1, 2, 1], stop_on=60, missing="drop", config=config)


async def test_mixture_without_room_for_all_members_is_an_error(
    truths: list[DatasetTruth],
) -> None:
    with pytest.raises(af.CacheError, match="each of its 3 datasets") as caught:
        await mixture_of(truths, 2000).samples().__aenter__()
    said = re.search(r"at least (\d+)", str(caught.value))
    assert said is not None
    async with mixture_of(truths, int(said[1])).samples() as samples:
        assert len([sample async for sample in samples]) == 60


async def test_pools_of_a_mixture_shrink_alike(truths: list[DatasetTruth], caplog: pytest.LogCaptureFixture) -> None:
    async def read(mixture: af.Mixture) -> list[int]:
        source = source_of(mixture)
        async with source.opener()() as opened, source.over(opened).samples_of(found_placement()) as samples:
            assert len([sample async for sample in samples]) == 60
            return list(opened.pools)

    mixture = mixture_of(truths, 16_000, pool_segments=8)
    assert [member.config.pool_segments for member in source_of(mixture).members] == [2, 4, 2]
    pools = await read(mixture)
    (warning,) = caplog.messages
    said = re.search(r"clips of (\d) segments of a mixture's 3 datasets .*pool_segments=8: .* max_bytes=(\d+)", warning)
    assert said is not None
    assert 3 <= int(said[1]) == sum(pools) < 8
    caplog.clear()
    assert await read(mixture_of(truths, int(said[2]), pool_segments=8)) == [2, 4, 2]
    assert not caplog.messages


@given(
    sizes=st.lists(st.lists(st.integers(0, 50), max_size=12), min_size=1, max_size=4),
    data=st.data(),
    room=st.integers(0, 2000),
)
def test_pools_that_fit_are_the_largest_parts_of_those_asked_for(
    sizes: list[list[int]], data: st.DataObject, room: int
) -> None:
    asked = [data.draw(st.integers(1, 20)) for _ in sizes]
    largest = [np.cumsum([0.0, *sorted(each, reverse=True)]) for each in sizes]
    found = pools_that_fit(largest, asked, room)

    def needed(pools: list[int]) -> int:
        ordered = [sorted(each, reverse=True) for each in sizes]
        held = sum(sum(each[:pool]) for each, pool in zip(ordered, pools, strict=True))
        return held + max(sum(each[pool : pool + 1]) for each, pool in zip(ordered, pools, strict=True))

    assert all(1 <= pool <= most for pool, most in zip(found, asked, strict=True))
    assert needed(found) <= room or max(found) == 1
    if needed(asked) <= room:
        assert found == asked
    else:  # the same part of each, and of the next larger parts none fits
        parts = [[max(1, pool * some // max(asked)) for pool in asked] for some in range(1, max(asked) + 1)]
        assert found in parts
        assert all(needed(each) > room for each in parts[parts.index(found) :] if each != found)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_two_passes_over_one_dataset_share_room_and_never_hang(
    truth: DatasetTruth, clip_bytes: list[int], data: st.DataObject
) -> None:
    """Read in turns by one task: each holds what the other may need."""
    chosen = config(
        data.draw(st.integers(max(clip_bytes), 2 * sum(clip_bytes))),
        pool_segments=2,
        prefetch_segments=data.draw(st.integers(0, 4)),
        decoded_max_bytes=data.draw(st.sampled_from([1, 64 << 20])),
    )
    with anyio.fail_after(20), suppress(af.CacheError):
        async with af.open_dataset(str(truth.root), config=chosen) as dataset:
            first, second = af.Stream(dataset, seed=1).samples(), af.Stream(dataset, seed=2).samples()
            async with first as one, second as two:
                seen: tuple[list[int], list[int]] = ([], [])
                for _ in range(truth.num_frames):
                    seen[0].append(int((await anext(one))["index"]))
                    seen[1].append(int((await anext(two))["index"]))
                    clips = dataset.statistics().clips
                    assert clips.used_bytes + clips.reserved_bytes <= clips.max_bytes
                assert sorted(seen[0]) == sorted(seen[1]) == list(range(truth.num_frames))


def opened_over(truth: DatasetTruth, config: af.StreamConfig) -> OpenDatasets:
    """What a pass over the dataset reads, yet to be entered."""
    return OpenDatasets(source_of(af.Stream(str(truth.root), config=config)).members, config)


async def test_episode_that_fails_while_it_waits_takes_no_room(
    truth: DatasetTruth, clip_bytes: list[int], largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it later, when whoever asked for it has let go of it and there is room."""
    other = min(episode for episode, size in enumerate(clip_bytes) if size and episode != largest)
    is_full, may_fail = anyio.Event(), anyio.Event()
    pieces = [Piece(episode, 0, truth.lengths[episode]) for episode in (largest, other)]
    async with opened_over(truth, config(max(clip_bytes))) as opened:
        reader = opened.origin(pieces[0]).reader
        locate = reader.locate_beside

        async def locate_or_fail(stretch: Stretch) -> None:
            if stretch.episode == largest:
                return await locate(stretch)
            await may_fail.wait()
            raise af.FormatError("no footer")

        monkeypatch.setattr(reader, "locate_beside", locate_or_fail)
        async with anyio.create_task_group() as group:
            window = Prefetcher(
                opened,
                pieces,
                group,
                prefetch_segments=2,
                pool=lambda: (2, 24),
                on_full=is_full.set,
                on_arrival=lambda: None,
            )
            for piece in pieces:
                window.use(piece)
            await window.get(pieces[0])
            await is_full.wait()
            may_fail.set()
            with pytest.raises(af.FormatError):
                await window.get(pieces[1])
            for piece in reversed(pieces):
                window.done(piece)
                window.finish(piece)
            assert opened.engine.room.pass_bytes == 0
        window.close()


@pytest.mark.parametrize(
    ("head_start_seconds", "early_episodes", "asked_together"), [(20.0, 32, 1), (0.0, 32, 4), (0.0, 2, 3)]
)
async def test_the_first_episode_is_asked_for_alone(
    truth: DatasetTruth,
    monkeypatch: pytest.MonkeyPatch,
    head_start_seconds: float,
    early_episodes: int,
    asked_together: int,
) -> None:
    """On a link that all of a pool fill, it would come last. Where it takes long, a few don't wait for it."""
    episodes = [episode for episode, length in enumerate(truth.lengths) if length][:4]
    monkeypatch.setattr(asyncfetch.stream.prefetcher, "HEAD_START_SECONDS", head_start_seconds)
    monkeypatch.setattr(asyncfetch.stream.prefetcher, "EARLY_EPISODES", early_episodes)
    asked: set[int] = set()
    all_asked, may_come = anyio.Event(), anyio.Event()
    pieces = [Piece(episode, 0, truth.lengths[episode]) for episode in episodes]
    async with opened_over(truth, af.StreamConfig()) as opened:
        reader = opened.origin(pieces[0]).reader
        weigh = reader.clip_bytes

        async def clip_bytes(stretch: Stretch) -> int:
            asked.add(stretch.episode)
            if len(asked) == asked_together:
                all_asked.set()
            if stretch.episode == episodes[0]:
                await may_come.wait()
            return await weigh(stretch)

        monkeypatch.setattr(reader, "clip_bytes", clip_bytes)
        async with anyio.create_task_group() as group:
            window = Prefetcher(
                opened,
                pieces,
                group,
                prefetch_segments=4,
                pool=lambda: (4, 24),
                on_full=lambda: None,
                on_arrival=lambda: None,
            )
            await all_asked.wait()
            await anyio.wait_all_tasks_blocked()
            assert asked == set(episodes[:asked_together])
            may_come.set()
            window.end_head_start()  # as a pass does at its first sample
            for piece in pieces:
                window.use(piece)
                await window.get(piece)
            group.cancel_scope.cancel()
        window.close()


async def test_two_passes_that_fit_both_get_every_frame(truth: DatasetTruth, clip_bytes: list[int]) -> None:
    async with af.open_dataset(str(truth.root), config=config(2 * sum(clip_bytes), pool_segments=2)) as dataset:
        orders: dict[int, list[int]] = {}

        async def run(seed: int) -> None:
            orders[seed] = await read(af.Stream(dataset, seed=seed))

        async with anyio.create_task_group() as group:
            group.start_soon(run, 1)
            group.start_soon(run, 2)
        assert reader_of(dataset).engine.room.pass_bytes == 0
    assert sorted(orders[1]) == sorted(orders[2]) == list(range(truth.num_frames))


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_training_and_validation_in_turns_need_only_their_clips(
    truth: DatasetTruth, clip_bytes: list[int], data: st.DataObject
) -> None:
    """Two streams on one dataset, each with episodes of its own and its own share of one budget."""
    chosen = config(
        sum(clip_bytes), pool_segments=2, prefetch_segments=data.draw(st.integers(0, 4)), decoded_max_bytes=1
    )
    episodes = data.draw(st.permutations(range(len(truth.lengths))))
    cut = data.draw(st.integers(1, len(episodes) - 1))
    chosen_frames = [sum(truth.lengths[episode] for episode in part) for part in (episodes[:cut], episodes[cut:])]
    with anyio.fail_after(20):
        async with af.open_dataset(str(truth.root), config=chosen) as dataset:
            training = af.Stream(dataset, seed=1, episodes=sorted(episodes[:cut])).samples()
            validation = af.Stream(dataset, seed=2, episodes=sorted(episodes[cut:])).samples()
            async with training as one, validation as other:
                seen = [0, 0]
                for _ in range(max(chosen_frames)):
                    for which, samples in enumerate((one, other)):
                        if seen[which] < chosen_frames[which]:
                            await anext(samples)
                            seen[which] += 1
            assert seen == chosen_frames
            assert reader_of(dataset).engine.room.pass_bytes == 0


async def test_a_pass_without_room_says_that_others_hold_it(truth: DatasetTruth, clip_bytes: list[int]) -> None:
    chosen = config(max(clip_bytes), prefetch_segments=0, decoded_max_bytes=1)
    largest, other = sorted(
        (episode for episode, length in enumerate(truth.lengths) if length), key=clip_bytes.__getitem__
    )[:-3:-1]
    async with af.open_dataset(str(truth.root), config=chosen) as dataset:
        stream = af.Stream(dataset, shuffle=False, episodes=[largest])
        beside = af.Stream(dataset, shuffle=False, episodes=[other])
        async with stream.samples() as first:
            await anext(first)
            async with beside.samples() as second:
                with anyio.fail_after(5), pytest.raises(af.CacheError, match="other passes over this dataset hold"):
                    await anext(second)
        assert len(await read(beside)) == truth.lengths[other]  # their room came back


async def test_passes_over_the_same_segments_need_their_room_once(truth: DatasetTruth, clip_bytes: list[int]) -> None:
    chosen = config(max(clip_bytes), prefetch_segments=0)
    async with af.open_dataset(str(truth.root), config=chosen) as dataset:
        stream = af.Stream(dataset, shuffle=False, episodes=[clip_bytes.index(max(clip_bytes))])
        async with stream.samples() as first, stream.samples() as second:
            with anyio.fail_after(5):
                for _ in range(max(truth.lengths)):
                    assert int((await anext(first))["index"]) == int((await anext(second))["index"])


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_passes_samples_prefetches_and_cancellations_all_end(
    truth: DatasetTruth, clip_bytes: list[int], data: st.DataObject
) -> None:
    """In any interleaving, each with what it asked for or a CacheError, within the bound, and all room comes back."""
    there = [episode for episode, length in enumerate(truth.lengths) if length]
    room = data.draw(st.integers(max(clip_bytes), sum(clip_bytes)), label="room")
    chosen = config(
        room,
        pool_segments=data.draw(st.integers(1, 3)),
        prefetch_segments=data.draw(st.integers(0, 3)),
        decoded_max_bytes=1,
    )
    moments = st.sampled_from([0.0, 0.001, 0.01, 30.0])
    deeds = st.tuples(st.sampled_from(["sample", "prefetch", "ready"]), st.sampled_from(there), moments)
    passes = st.tuples(st.integers(0, 3), moments, st.lists(deeds, max_size=3))
    drawn_passes = data.draw(st.lists(passes, min_size=1, max_size=3), label="passes")
    drawn_deeds = data.draw(st.lists(st.lists(deeds, max_size=4), max_size=3), label="beside them")

    async with af.open_dataset(str(truth.root), config=chosen) as dataset:
        reader = reader_of(dataset)

        async def do(deed: str, episode: int, seconds: float) -> None:
            with anyio.move_on_after(seconds), suppress(af.CacheError):
                if deed == "sample":
                    assert int((await dataset.sample(episode, 0))["episode_index"]) == episode
                elif deed == "prefetch":
                    dataset.prefetch(episode)
                else:
                    await dataset.ready(episode)
            clips = dataset.statistics().clips
            assert clips.used_bytes + clips.reserved_bytes <= clips.max_bytes

        async def iterate(seed: int, seconds: float, between: list[tuple[str, int, float]]) -> None:
            seen = []
            with anyio.move_on_after(seconds) as scope, suppress(af.CacheError):
                async with af.Stream(dataset, seed=seed).samples() as samples:
                    async for sample in samples:
                        seen.append(int(sample["index"]))
                        if between:
                            await do(*between.pop())
                    assert scope.cancel_called or sorted(seen) == list(range(truth.num_frames))

        async def act(chain: list[tuple[str, int, float]]) -> None:
            for deed in chain:
                await do(*deed)

        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                for one in drawn_passes:
                    group.start_soon(iterate, *one)
                for chain in drawn_deeds:
                    group.start_soon(act, chain)
            for episode in there:  # which waits for prefetches that are still under way
                await dataset.ready(episode)
        assert (reader.engine.room.pass_bytes, reader.engine.room.brief_bytes) == (0, 0)


@pytest.fixture(scope="module")
def largest(clip_bytes: list[int]) -> int:
    """The episode with the largest clips."""
    return clip_bytes.index(max(clip_bytes))


@pytest.mark.parametrize("shuffle", [True, False])
async def test_sample_beside_a_pass_is_served_or_fails_at_once(
    truth: DatasetTruth, clip_bytes: list[int], largest: int, shuffle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncfetch.stream.passes.JOB_MAX_SAMPLES", 1)  # else one job is the whole pass
    others = [episode for episode, length in enumerate(truth.lengths) if length and episode != largest]
    needed = max(clip_bytes[episode] for episode in others)
    for room, fits in ((max(clip_bytes) + needed, True), (max(clip_bytes) + needed - 1, False)):
        chosen = config(room, pool_segments=1, prefetch_segments=0, decoded_max_bytes=1)
        async with af.open_dataset(str(truth.root), config=chosen) as dataset:
            async with af.Stream(dataset, shuffle=shuffle, episodes=[largest]).samples() as samples:
                await anext(samples)
                other = max(others, key=clip_bytes.__getitem__)
                with anyio.fail_after(5):
                    if fits:
                        await dataset.ready(other)
                        assert int((await dataset.sample(other, 0))["episode_index"]) == other
                    else:
                        with pytest.raises(af.CacheError, match=f"{needed} bytes beside the {max(clip_bytes)} that"):
                            await dataset.sample(other, 0)
                        with pytest.raises(af.CacheError, match="to at least"):
                            await dataset.ready(other)
                    assert int((await dataset.sample(largest, 0))["episode_index"]) == largest  # the pass holds it
            assert int((await dataset.sample(other, 0))["episode_index"]) == other  # the room came back


async def test_waiting_sample_fails_when_a_pass_takes_the_room(
    truth: DatasetTruth, clip_bytes: list[int], largest: int
) -> None:
    """It would have been served after the other one, but for the pass."""
    async with af.open_dataset(str(truth.root), config=config(max(clip_bytes))) as dataset:
        outcomes: list[object] = []

        async def read() -> None:
            try:
                await dataset.ready(largest)
            except af.CacheError as error:
                outcomes.append(error)

        blocker = await reader_of(dataset).hold(Stretch(0, 0, truth.lengths[0]))
        async with anyio.create_task_group() as group:
            group.start_soon(read)
            await anyio.wait_all_tasks_blocked()
            assert not outcomes
            reader_of(dataset).engine.room.change(pass_bytes=1)
            await anyio.wait_all_tasks_blocked()
            assert len(outcomes) == 1
        blocker.release()


async def test_prefetch_without_room_is_not_in_the_way_of_a_pass(
    truth: DatasetTruth, clip_bytes: list[int], largest: int
) -> None:
    chosen = config(max(clip_bytes) + min(filter(None, clip_bytes)), prefetch_segments=1)
    async with af.open_dataset(str(truth.root), config=chosen) as dataset:
        stream = af.Stream(dataset, shuffle=False)
        with anyio.fail_after(10):
            async with stream.samples() as samples:
                seen = []
                async for sample in samples:
                    seen.append(int(sample["index"]))
                    dataset.prefetch(largest)
        assert seen == list(range(truth.num_frames))


async def test_a_sample_joins_what_a_pass_is_fetching(truth: DatasetTruth, clip_bytes: list[int], largest: int) -> None:
    """Though beside that there is no room for as much again."""
    async with af.open_dataset(str(truth.root), config=config(max(clip_bytes))) as dataset:
        size = await reader_of(dataset).clip_bytes(largest)
        claimed = reader_of(dataset).claim(largest, size)
        assert claimed is not None
        async with anyio.create_task_group() as group:

            async def read() -> None:
                assert int((await dataset.sample(largest, 0))["episode_index"]) == largest

            group.start_soon(read)
            with await reader_of(dataset).load(claimed):
                await anyio.wait_all_tasks_blocked()


@pytest.mark.parametrize("max_bytes", [1, 7, 1000])
async def test_a_tiny_bound_says_what_it_is_and_what_would_do(truth: DatasetTruth, max_bytes: int) -> None:
    async def first(max_bytes: int) -> int:
        stream = af.Stream(str(truth.root), shuffle=False, episodes=[3], config=af.StreamConfig(max_bytes=max_bytes))
        async with stream.samples() as samples:
            return int((await anext(samples))["episode_index"])

    with pytest.raises(af.CacheError, match=rf"\) of episode 3 of .* need \d+ more: .* {max_bytes=} leaves") as caught:
        await first(max_bytes)
    assert await first(advised(caught.value, pool_segments=1)) == 3


@pytest.mark.parametrize(
    ("batch", "shuffle", "pool", "remedy"),
    [
        (2, True, 4, None),
        (4, True, 4, "pool_segments=8"),
        (3, True, 64, None),  # more than there are episodes
        (1, False, 4, r"StreamDataset\(batch_size=...\)"),
        (4, False, 4, None),
    ],
)
def test_workers_that_decode_the_same_groups_are_told_of_once(
    truth: DatasetTruth, caplog: pytest.LogCaptureFixture, batch: int, shuffle: bool, pool: int, remedy: str | None
) -> None:
    chosen = af.StreamConfig(pool_segments=pool, group_frames=2)
    stream = af.Stream(str(truth.root), shuffle=shuffle, config=chosen)
    for worker in range(2):
        list(source_of(stream).iterate(Placement(worker=worker, workers=2, block_samples=batch), epoch=0))
    stream.close()
    assert len(caplog.messages) == (remedy is not None)
    assert all(re.search(f"num_workers=2 .* {remedy} one does", message) for message in caplog.messages)
