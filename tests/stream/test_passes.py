"""One pass: its order, its errors, its end."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import re
import shutil
import threading
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch

import asyncfetch as af
from asyncfetch.formats.held import READERS
from asyncfetch.lerobot import EpisodeReader, reader_of
from asyncfetch.order.placement import Placement
from asyncfetch.stream.epoch_stream import source_of
from asyncfetch.testing import read_identity, write_dataset

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from asyncfetch.config import DecoderBackend
    from asyncfetch.formats import ImageDtype
    from asyncfetch.stream.samples import SamplePass
    from asyncfetch.testing import DatasetTruth

TOP = "observation.images.top"
CONFIG = af.StreamConfig(pool_segments=2, prefetch_segments=1, decode_threads=2)


def stream_of(truth: DatasetTruth, **options: Any) -> af.Stream:  # noqa: ANN401
    return af.Stream(str(truth.root), **{"config": CONFIG, "shuffle": False, **options})


def index(sample: dict[str, Any]) -> int:
    return int(sample["index"])


@pytest.fixture
def broken(truth: DatasetTruth, tmp_path: Path) -> DatasetTruth:
    """Episode 3, frames 15 to 26, has a video of the right length whose frames aren't any."""
    root = tmp_path / "broken"
    shutil.copytree(truth.root, root)
    (video,) = (root / f"videos/{TOP}").glob("*/file-003.mp4")
    data = bytearray(video.read_bytes())
    place = data.index(b"mdat") + 4
    end = data.index(b"moov") - 4 if data.index(b"moov") > place else len(data)
    data[place:end] = b"\xff" * (end - place)
    video.write_bytes(data)
    return dataclasses.replace(truth, root=root)


async def test_an_epoch_opens_each_decoder_once(tmp_path: Path) -> None:
    """Though as many are used in turns as there are clips in the pool, and each that was read through stays a while."""
    episodes, cameras, slots = 96, 2, 64
    truth = write_dataset(
        tmp_path / "data",
        episodes=episodes,
        length=20,
        distinct_videos=1,
        width=64,
        height=64,
        gop=10,
        codec="h264",
        episodes_per_video_file=32,
    )
    config = af.StreamConfig(pool_segments=slots, decoded_max_bytes=4 << 20)
    async with af.open_dataset(str(truth.root), config=config) as dataset:
        stream = af.Stream(dataset)
        async with source_of(stream).opener()() as opened:
            steps = source_of(stream).plan(opened, Placement(), epoch=0).steps()
        # Lanes that share an episode read it with decoders of their own.
        readers = {(step.piece, step.reader % READERS) for step in steps}
        async with stream.samples() as samples:
            assert len({index(sample) async for sample in samples}) == episodes * 20
        assert dataset.statistics().decoders.misses == len(readers) * cameras


async def test_order_does_not_depend_on_room_for_decoded_frames(truth: DatasetTruth) -> None:
    """Though it draws by groups: a state of a large machine goes on on a small one, which decodes frame by frame."""
    roomy = dataclasses.replace(CONFIG, group_frames=4)
    narrow = dataclasses.replace(roomy, decoded_max_bytes=1)
    async with stream_of(truth, config=roomy, shuffle=True).samples() as samples:
        whole = [index(sample) async for sample in samples]
    async with stream_of(truth, config=roomy, shuffle=True).samples() as samples:
        first = [index(await anext(samples)) for _ in range(7)]
        state = samples.state_dict()
    stream = stream_of(truth, config=narrow, shuffle=True)
    stream.load_state_dict(state)
    async with stream.samples() as samples:
        rest = [index(sample) async for sample in samples]
    assert first + rest == whole


async def test_the_episodes_that_the_consumer_waits_for_are_raised(
    truth: DatasetTruth, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[int] = []
    monkeypatch.setattr(EpisodeReader, "raise_priority", lambda _, stretch: raised.append(stretch.episode))
    async with stream_of(truth).samples() as samples:
        await anext(samples)
    assert raised[0] == 0


@pytest.mark.filterwarnings("ignore")
async def test_error_comes_behind_earlier_samples_and_ends_the_pass(broken: DatasetTruth) -> None:
    seen = []
    async with stream_of(broken).samples() as samples:
        with pytest.raises(af.DecodeError, match=r"episode 3 .*file-003\.mp4"):  # noqa: PT012
            async for sample in samples:
                seen.append(index(sample))  # noqa: PERF401
        assert seen == list(range(15))
        with pytest.raises(StopAsyncIteration):
            await anext(samples)


def test_synchronously_it_does_as_well(broken: DatasetTruth) -> None:
    stream, seen = stream_of(broken), []
    iterator = iter(stream)
    with pytest.raises(af.DecodeError, match="episode 3"):  # noqa: PT012
        for sample in iterator:
            seen.append(index(sample))  # noqa: PERF401
    assert seen == list(range(15))
    assert next(iterator, None) is None
    assert stream.epoch == 0
    stream.close()


class Odd(BaseException):
    """An error of a user's own that isn't an Exception."""


@pytest.mark.parametrize("error", [ValueError("mine"), KeyError("k"), Odd("odd")], ids=repr)
async def test_a_transforms_error_comes_as_it_is_at_its_place(truth: DatasetTruth, error: BaseException) -> None:
    stream, seen = stream_of(truth, transform=raise_at(7, error)), []
    async with stream.samples() as samples:
        with pytest.raises(type(error)) as caught:  # noqa: PT012
            async for sample in samples:
                seen.append(index(sample))  # noqa: PERF401
    assert caught.value is error
    assert seen == list(range(7))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle": "no"}, "shuffle must be"),
        ({"seed": 1.5}, "seed must be"),
        ({"seed": True}, "seed must be"),
        ({"episodes": 3}, "episodes must be whole numbers"),
        ({"episodes": [0.5]}, "episodes must be whole numbers"),
        ({"episodes": "ab"}, "episodes must be whole numbers"),
        ({"episodes": [True, False]}, "episodes must be whole numbers"),
        ({"transform": 3}, "transform must be"),
        ({"image_dtype": "int8"}, "image_dtype must be 'uint8' or 'float32', not 'int8'"),
        ({"depth_unit": "cm"}, "depth_unit must be 'm' or 'mm', not 'cm'"),
        ({"windows": 5}, "windows must be a mapping"),
        ({"windows": ["action"]}, "windows must be a mapping"),
        ({"windows": {"action": "12"}}, "'action' needs a list of seconds"),
    ],
    ids=str,
)
def test_arguments_that_can_not_be_meant(truth: DatasetTruth, options: dict[str, Any], message: str) -> None:
    with pytest.raises(af.ConfigError, match=message):
        stream_of(truth, **options)


def test_a_window_that_can_be_read_once_is_none(truth: DatasetTruth) -> None:
    with pytest.raises(af.ConfigError, match="'action' needs a list of seconds"):
        stream_of(truth, windows={"action": (seconds for seconds in (0.0,))})


@pytest.mark.parametrize("source", [5, None, ["a"], b"/data", ""], ids=repr)
def test_a_source_is_a_url_or_a_path(source: Any) -> None:  # noqa: ANN401 - what a user may mistake for one
    with pytest.raises(af.ConfigError, match="a url or a path is needed"):
        af.Stream(source)
    with pytest.raises(af.ConfigError, match="a url or a path is needed"):
        af.open_dataset(source)


async def test_a_path_is_as_good_as_a_string(truth: DatasetTruth) -> None:
    async with af.Stream(truth.root, shuffle=False).samples() as samples:
        assert [index(sample) async for sample in samples] == list(range(sum(truth.lengths)))


@pytest.mark.parametrize("stop", [StopIteration, StopAsyncIteration])
def test_a_transform_can_not_end_the_epoch_silently(truth: DatasetTruth, stop: type[Exception]) -> None:
    stream = stream_of(truth, transform=raise_at(7, stop()))
    with pytest.raises(RuntimeError, match=stop.__name__):
        list(stream)
    stream.close()


def raise_at(place: int, error: BaseException) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        if index(sample) == place:
            raise error
        return sample

    return transform


def test_transform_may_return_any_value(truth: DatasetTruth) -> None:
    results: list[Any] = [False, 0, "text"]
    stream = stream_of(truth, transform=lambda sample: results[index(sample) % 3])
    assert list(stream) == [results[number % 3] for number in range(truth.num_frames)]
    stream.close()


async def test_a_transform_runs_beside_the_loop(truth: DatasetTruth) -> None:
    stream = stream_of(truth, transform=lambda _: {"thread": threading.get_ident()})
    async with stream.samples() as samples:
        assert threading.get_ident() not in {sample["thread"] async for sample in samples}


def test_few_large_samples_keep_all_threads_busy(truth: DatasetTruth) -> None:
    both = threading.Barrier(2, timeout=20)
    calls = itertools.count()

    def meet(sample: dict[str, Any]) -> dict[str, Any]:
        if next(calls) < 2:
            both.wait()
        return sample

    stream = stream_of(truth)
    room = 6 * source_of(stream).sample_bytes()
    stream.close()
    stream = stream_of(truth, transform=meet, config=af.StreamConfig(decoded_max_bytes=room, decode_threads=2))
    with closing(iter(stream)) as samples:
        assert "index" in next(samples)
    assert not both.broken
    stream.close()


async def test_a_cancelled_anext_loses_nothing(truth: DatasetTruth) -> None:
    gate = threading.Semaphore(0)

    def wait(sample: dict[str, Any]) -> dict[str, Any]:
        gate.acquire(timeout=10)
        return sample

    seen: list[int] = []
    cancelled = 0
    async with stream_of(truth, transform=wait).samples() as samples:
        while len(seen) < truth.num_frames:
            with anyio.move_on_after(0.001) as scope:
                seen.append(index(await anext(samples)))
            cancelled += scope.cancelled_caught
            gate.release()
            if cancelled > 20:
                gate.release(truth.num_frames)
    assert seen == list(range(truth.num_frames))
    assert cancelled


async def test_tasks_share_the_iterator(truth: DatasetTruth) -> None:
    seen: list[int] = []

    async def consume(samples: af.SamplePass) -> None:
        async for sample in samples:
            seen.append(index(sample))
            await anyio.lowlevel.checkpoint()

    async with stream_of(truth).samples() as samples, anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(consume, samples)
    assert sorted(seen) == list(range(truth.num_frames))


async def test_a_pass_is_finished_when_it_gave_its_last_sample(truth: DatasetTruth) -> None:
    stream = stream_of(truth)

    async def take(count: int) -> int:
        """The epoch of which so many samples were taken, whether the iterator has ended or not."""
        async with stream.samples() as samples:
            for _ in range(count):
                await anext(samples)
            return int(samples.state_dict()["epoch"])

    counts = [1, truth.num_frames - 1, truth.num_frames, truth.num_frames, 1]
    assert [await take(count) for count in counts] == [0, 0, 0, 1, 2]
    stream.set_epoch(2)
    assert await take(truth.num_frames) == 2
    stream.set_epoch(2)  # said anew, it counts from there
    assert [await take(truth.num_frames), await take(1)] == [2, 3]


@pytest.mark.parametrize("taken", [0, 1, 20])
async def test_leaving_early_ends_every_task(truth: DatasetTruth, taken: int) -> None:
    import asyncio

    before = asyncio.all_tasks()
    async with stream_of(truth).samples() as samples:
        for _ in range(taken):
            await anext(samples)
    assert asyncio.all_tasks() == before
    with pytest.raises(af.ClosedError, match="left"):
        await anext(samples)


async def test_task_that_waits_in_an_abandoned_pass_gets_an_error(truth: DatasetTruth) -> None:
    gate, errors = threading.Event(), []

    def wait(sample: dict[str, Any]) -> dict[str, Any]:
        gate.wait(10)
        return sample

    async def consume(samples: af.SamplePass) -> None:
        try:
            await anext(samples)
        except af.ClosedError as error:
            errors.append(error)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:  # noqa: SIM117
            async with stream_of(truth, transform=wait).samples() as samples:
                group.start_soon(consume, samples)
                await anyio.wait_all_tasks_blocked()
                gate.set()
                # Left before the loop turns: the sample is on its way, but not here.
    assert len(errors) == 1


async def test_the_consumers_own_exception_comes_out_alone(truth: DatasetTruth) -> None:
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with stream_of(truth).samples() as samples:
            async for _ in samples:
                raise ZeroDivisionError


async def test_cancelling_the_consumer_ends_the_pass(truth: DatasetTruth) -> None:
    with anyio.fail_after(5), anyio.CancelScope() as scope:
        async with stream_of(truth).samples() as samples:
            async for sample in samples:
                if index(sample) == 3:
                    scope.cancel()
    assert scope.cancelled_caught


async def test_passes_over_an_open_dataset_share_its_caches(truth: DatasetTruth) -> None:
    async with af.open_dataset(str(truth.root), config=CONFIG) as dataset:
        stream = af.Stream(dataset, shuffle=False)
        for _ in range(2):
            async with stream.samples() as samples:
                assert sorted([index(sample) async for sample in samples]) == list(range(truth.num_frames))
        statistics = dataset.statistics()
    assert statistics.clips.misses == 14  # seven episodes with frames, two cameras, once
    assert statistics.episodes.held == 0
    assert statistics.clips.leased_bytes == 0


async def test_options_of_an_open_dataset_are_not_taken_twice(truth: DatasetTruth) -> None:
    async with af.open_dataset(str(truth.root)) as dataset:
        with pytest.raises(af.ConfigError, match="open_dataset"):
            af.Stream(dataset, features=[TOP])
        with pytest.raises(af.ConfigError, match="its own loop"):
            iter(af.Stream(dataset))


@pytest.mark.parametrize("image_dtype", ["uint8", "float32"])
async def test_two_passes_at_once_over_one_dataset(truth: DatasetTruth, image_dtype: ImageDtype) -> None:
    seen: list[list[int]] = [[], []]
    async with af.open_dataset(str(truth.root), image_dtype=image_dtype, config=CONFIG) as dataset:
        passes = af.Stream(dataset, shuffle=False).samples(), af.Stream(dataset, seed=1).samples()
        async with passes[0] as first, passes[1] as second:
            for _ in range(truth.num_frames):
                for samples, keys in zip((first, second), seen, strict=True):
                    sample = await anext(samples)
                    episode, frame = int(sample["episode_index"]), int(sample["frame_index"])
                    assert read_identity(sample[TOP]) == truth.identity(episode, frame, TOP)
                    keys.append(index(sample))
    assert seen[0] == sorted(seen[1]) == list(range(truth.num_frames))


async def test_paused_pass_neither_holds_up_another_nor_waits_for_it(
    tmp_path: Path,
) -> None:
    """Beside a bound on what is decoded ahead, the one is as far behind as a held-out pass is behind training."""
    behind = 1000
    root = write_dataset(tmp_path, episodes=6, length=400, width=64, height=64, cameras=[TOP], distinct_videos=1).root
    config = dataclasses.replace(CONFIG, decode_threads=1, decoded_max_bytes=80 * 64 * 64 * 3)
    given = 0

    async def read_on(samples: SamplePass) -> None:
        nonlocal given
        async for _ in samples:
            given += 1

    async with af.open_dataset(str(root), features=[TOP], config=config) as dataset:
        passes = af.Stream(dataset, shuffle=False).samples(), af.Stream(dataset, shuffle=False).samples()
        async with passes[0] as ahead, passes[1] as late, anyio.create_task_group() as group:
            await anext(late)
            for _ in range(behind):
                await anext(ahead)
            group.start_soon(read_on, late)
            for _ in range(200):
                await anext(ahead)
            assert 20 < given < behind / 2
            group.cancel_scope.cancel()


async def test_statistics_of_a_pass(truth: DatasetTruth) -> None:
    async with stream_of(truth).samples() as samples:
        before = samples.statistics()
        async for _ in samples:
            pass
        after = samples.statistics()
    assert (before.samples, before.first_sample_seconds) == (0, None)
    assert after.samples == truth.num_frames
    assert after.first_sample_seconds is not None
    assert 0 < after.first_sample_seconds <= after.waited_seconds
    assert (before.wait.count, before.waited_seconds) == (0, 0)
    assert 0 < after.wait.count <= after.samples
    assert after.wait.sum_seconds == after.waited_seconds
    assert after.wait.p50_seconds <= after.wait.max_seconds <= after.waited_seconds


def test_stream_is_read_on_two_loops_one_after_the_other(truth: DatasetTruth) -> None:
    stream = stream_of(truth)

    async def read() -> list[int]:
        async with stream.samples() as samples:
            return [index(sample) async for sample in samples]

    assert anyio.run(read) == anyio.run(read) == list(range(truth.num_frames))


def test_two_streams_in_two_threads(truth: DatasetTruth) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def read(seed: int) -> list[int]:
        stream = stream_of(truth, shuffle=True, seed=seed)
        try:
            return [index(sample) for sample in stream]
        finally:
            stream.close()

    with ThreadPoolExecutor(2) as pool:
        orders = list(pool.map(read, range(2)))
    assert [sorted(order) for order in orders] == [list(range(truth.num_frames))] * 2


@pytest.mark.parametrize("end", ["closed", "collected", "failed"])
def test_the_loop_thread_ends_with_the_stream(truth: DatasetTruth, end: str) -> None:
    def fail(sample: dict[str, Any]) -> dict[str, Any]:
        if index(sample) == 3:
            # A new one each time: one that the transform kept would keep its traceback, and that the stream, for as
            # long as a decode thread still runs the transform.
            raise ValueError("mine")
        return sample

    others = set(threading.enumerate())
    stream = stream_of(truth, transform=fail if end == "failed" else None)
    with pytest.raises(ValueError, match="mine") if end == "failed" else nullcontext():
        for sample in stream:
            if index(sample) == 4:
                break
    (thread,) = (one for one in set(threading.enumerate()) - others if one.name == "asyncfetch stream")
    if end == "closed":
        stream.close()
    del stream
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


WINDOWS: list[af.lerobot.Windows | None] = [
    None,
    {TOP: af.frames(-1, 0), "action": af.frames(0, 1, 2)},
    {TOP: af.frames(-1), "action": af.frames(5)},
]


@pytest.mark.parametrize("decoder", ["torchcodec", "pyav"])
@pytest.mark.parametrize("image_dtype", ["uint8", "float32"])
@pytest.mark.parametrize("windows", WINDOWS, ids=["alone", "window", "window of one"])
async def test_a_samples_tensors_are_its_own(
    truth: DatasetTruth, decoder: DecoderBackend, image_dtype: ImageDtype, windows: af.lerobot.Windows | None
) -> None:
    """Also of those decoded together: a sample that is kept keeps no other's memory, and may be written to."""
    config = dataclasses.replace(CONFIG, decoder=decoder)
    async with stream_of(truth, windows=windows, image_dtype=image_dtype, config=config).samples() as samples:
        tensors = [
            (key, value) async for sample in samples for key, value in sample.items() if isinstance(value, torch.Tensor)
        ]
    assert len({value.untyped_storage().data_ptr() for _, value in tensors}) == len(tensors)
    for key, value in tensors:
        assert value.untyped_storage().nbytes() == value.nbytes, key


async def test_small_samples_are_started_bit_by_bit_within_a_bound(tmp_path: Path) -> None:
    truth = await anyio.to_thread.run_sync(lambda: write_dataset(tmp_path / "x", episodes=300, length=40, cameras=()))
    started = [0]
    async with stream_of(truth).samples() as samples, anyio.create_task_group() as group:

        async def watch() -> None:
            while True:
                started.append(samples._running._ahead._undelivered)
                await anyio.lowlevel.checkpoint()

        group.start_soon(watch)
        await anext(samples)
        while not samples._running._ahead._is_waiting_for_room:
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    most = max(after - before for before, after in itertools.pairwise(started))
    assert most <= 2 * 64  # a job or two a turn
    assert max(started) <= 64 * 64  # of 12,000


async def test_short_episodes_are_not_asked_for_by_the_thousand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job takes 32 of these, and 64 jobs may be decoded ahead."""
    truth = await anyio.to_thread.run_sync(lambda: write_dataset(tmp_path / "x", episodes=600, length=2, cameras=()))
    may_come = anyio.Event()
    async with af.open_dataset(str(truth.root)) as dataset:
        locate = reader_of(dataset).locate_beside

        async def locate_beside(episode: int) -> Any:  # noqa: ANN401 - LeRobotDataset's
            await may_come.wait()
            return await locate(episode)

        monkeypatch.setattr(reader_of(dataset), "locate_beside", locate_beside)
        async with af.Stream(dataset).samples() as samples, anyio.create_task_group() as group:
            group.start_soon(anext, samples)
            await anyio.wait_all_tasks_blocked()
            assert samples.statistics().open_segments <= 64 + 64
            may_come.set()


def few_segments(
    caplog: pytest.LogCaptureFixture, stream: af.Stream | af.Mixture, placement: Placement, *, epoch: int | None = None
) -> list[str]:
    """What is said of segments as a pass begins."""
    caplog.clear()
    iterator = source_of(stream).iterate(placement, epoch=epoch)
    next(iterator)
    iterator.close()
    stream.close()
    return [message for message in caplog.messages if "segments of an epoch" in message]


@pytest.mark.parametrize("fps", [10, 24, 30])
@pytest.mark.parametrize(("ranks", "batch"), [(1, 4), (1, 7), (1, 16), (1, 33), (1, 100), (2, 4), (3, 13)])
def test_segments_fewer_than_a_batch_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fps: int, ranks: int, batch: int
) -> None:
    """By the segment_seconds that the warning names there are as many as the batch has samples, on each rank."""
    root = str(write_dataset(tmp_path / "x", episodes=[37, 50, 41], cameras=(), fps=fps).root)
    placements = [Placement(rank, ranks, batch_size=batch) for rank in range(ranks)]
    (message,) = few_segments(caplog, af.Stream(root), placements[0])
    said = re.search(rf"fewer than the {batch} samples .*segment_seconds=([0-9.]+)\)", message)
    assert said is not None
    config = af.StreamConfig(segment_seconds=float(said[1]))
    for placement in placements:
        stream = af.Stream(root, config=config)
        assert source_of(stream).planned(placement, 0).segments >= batch
        assert few_segments(caplog, stream, placement) == []


def test_few_segments_of_a_mixture_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also where its members have other frame rates."""
    rates = {10: [30, 31], 24: [50, 77, 20]}
    roots = [
        str(write_dataset(tmp_path / f"{fps}", episodes=of, cameras=(), fps=fps).root) for fps, of in rates.items()
    ]

    def mixture(**options: Any) -> af.Mixture:  # noqa: ANN401
        streams = [af.Stream(root) for root in roots]
        return af.Mixture(streams, [1, 2], config=af.StreamConfig(**options), missing="drop")

    for batch in (8, 16, 45):
        (message,) = few_segments(caplog, mixture(), Placement(batch_size=batch))
        said = re.search(r"segment_seconds=([0-9.]+)\)", message)
        assert said is not None
        assert few_segments(caplog, mixture(segment_seconds=float(said[1])), Placement(batch_size=batch)) == []


def test_few_segments_are_warned_of_as_a_run_begins(truth: DatasetTruth, caplog: pytest.LogCaptureFixture) -> None:
    """Once: not in later epochs or other workers, nor in a rest; nor where nothing is to be mixed."""
    batches = Placement(batch_size=8)
    shuffled = stream_of(truth, shuffle=True)
    assert len(few_segments(caplog, shuffled, batches)) == 1
    state = shuffled.state_dict()
    assert few_segments(caplog, shuffled, batches, epoch=1) == []
    assert few_segments(caplog, stream_of(truth), batches) == []
    assert few_segments(caplog, shuffled, Placement(batch_size=7)) == []  # as many as there are
    assert few_segments(caplog, shuffled, Placement(batch_size=truth.num_frames + 1)) == []  # no epoch fills one
    assert len(few_segments(caplog, shuffled, Placement(0, 1, 0, 2, block_samples=8))) == 1
    assert few_segments(caplog, shuffled, Placement(0, 1, 1, 2, block_samples=8)) == []
    rest = stream_of(truth, shuffle=True)
    rest.load_state_dict(state)
    assert few_segments(caplog, rest, batches) == []
