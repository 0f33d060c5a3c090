"""Videos that are broken, change or are too large, and servers that fail."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
from collections import Counter
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from torch.utils.data import DataLoader

import asyncfetch as af
from asyncfetch.errors import (
    CacheError,
    DatasetError,
    DecodeError,
    FormatError,
    FrameMissing,
    NotFound,
    ObjectChanged,
    WorkerError,
)
from asyncfetch.observe.figures import sum_of
from asyncfetch.observe.report import Report
from asyncfetch.observe.waits import Cause, Waits
from asyncfetch.stream import Placement, source_of
from asyncfetch.testing import Fault, FaultEvery, RangeServer

if TYPE_CHECKING:
    from pathlib import Path

    from asyncfetch.testing.faults import ServedRequest

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning", "ignore:This DataLoader will create")
CLIPS = af.ClipSampler(3, fps=4, per_video=2)
ALL = af.ClipSampler(75, pick="all")
NAMES = ["front.mp4", "truncated.mp4", "missing.mp4", "open.mp4", "garbage.mp4"]
ERRORS = {"truncated.mp4": FormatError, "missing.mp4": NotFound, "garbage.mp4": DecodeError}


def make_stream(urls: list[str], clips: af.ClipSampler = CLIPS, **options: Any) -> af.Stream:  # noqa: ANN401
    config = af.StreamConfig(**options.pop("config", {}))
    videos = af.Videos.from_table([{"video": url} for url in urls])
    return af.Stream(videos, clips=clips, config=config, **({"shuffle": False} | options))


def windows_of(stream: af.Stream) -> list[tuple[int, int]]:
    return [(int(sample["index"]), int(sample["clip_index"])) for sample in stream]


@pytest.mark.parametrize("clips", [CLIPS, ALL], ids=["random", "all"])
def test_broken_videos_are_left_out_and_named(
    corpus: Path, clips: af.ClipSampler, caplog: pytest.LogCaptureFixture
) -> None:
    urls = [str(corpus / name) for name in NAMES]
    with closing(make_stream(urls, clips, config={"on_error": "skip"})) as stream:
        assert windows_of(stream) == [(0, 0), (0, 1), (3, 0), (3, 1)]
        found = {one.episode: one for one in stream.quarantine.episodes()}
    assert found.keys() == {1, 2, 4}
    said = [record.getMessage() for record in caplog.records if record.name == "asyncfetch.stream"]
    assert [line.partition(",")[0] for line in said] == [f"samples of entry {entry} can't be read" for entry in found]
    for entry, one in found.items():
        assert one.file == urls[entry]
        assert one.cause.startswith(ERRORS[NAMES[entry]].__name__)
        assert one.samples == (1 if clips is ALL and NAMES[entry] != "truncated.mp4" else 2)


def test_broken_videos_are_replaced_by_good_ones(corpus: Path) -> None:
    with closing(make_stream([str(corpus / name) for name in NAMES], config={"on_error": "replace"})) as stream:
        found = windows_of(stream)
        assert found == [(0, 0), (0, 1), *[(0, 1)] * 4, (3, 0), (3, 1), *[(3, 1)] * 2]
        assert stream.quarantine.samples == 6


@pytest.mark.parametrize("clips", [CLIPS, ALL], ids=["random", "all"])
@pytest.mark.parametrize(("name", "error"), ERRORS.items())
def test_a_broken_video_says_which_and_what_helps(
    corpus: Path, name: str, error: type[Exception], clips: af.ClipSampler
) -> None:
    with closing(make_stream([str(corpus / name)], clips)) as stream, pytest.raises(error) as caught:
        next(iter(stream))
    assert str(corpus / name) in str(caught.value)
    assert any(remedy in str(caught.value) for remedy in ("copy the file anew", "check the path"))


def test_broken_member_is_named_in_the_error(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "a.mp4").symlink_to(corpus / "front.mp4")
    (tmp_path / "a.json").write_text("{")
    with (
        closing(af.Stream(af.Videos.from_folder(tmp_path), clips=CLIPS)) as stream,
        pytest.raises(FormatError, match=r"json of clip . of entry 0, .*a.mp4, in .*a.json: not the json .*features="),
    ):
        next(iter(stream))


def test_short_videos_and_long_windows(corpus: Path) -> None:
    urls = [str(corpus / "one-frame.mp4"), str(corpus / "av1.mp4")]
    for clips, counts in (
        (af.ClipSampler(5, fps=3), [1, 1]),
        (af.ClipSampler(500, step=2), [1, 1]),
        (af.ClipSampler(60, pick="all", at_end="wrap"), [1, 2]),
        (af.ClipSampler(2, fps=1, every_seconds=0.8), [1, 3]),
    ):
        with closing(make_stream(urls, clips)) as stream:
            found = list(stream)
        assert [sum(int(sample["index"]) == entry for sample in found) for entry in (0, 1)] == counts
        assert all(len(sample["video"]) == len(sample["seconds"]) == clips.num_frames for sample in found)
        assert set(found[0]["seconds"].tolist()) == {0.0}
    strict = af.ClipSampler(5, fps=3, at_end="error")
    with closing(make_stream(urls, strict)) as stream, pytest.raises(FrameMissing, match="1 of them are there"):
        next(iter(stream))


def test_a_span_behind_the_end_is_no_clip(corpus: Path) -> None:
    url = str(corpus / "front.mp4")
    videos = af.Videos.from_table([{"video": url, "t0": 100.0}, {"video": url, "t0": 4.0}], start="t0")
    with closing(af.Stream(videos, clips=ALL, shuffle=False)) as stream:
        assert windows_of(stream) == [(1, 0)]
    with (
        closing(af.Stream(videos, clips=CLIPS, shuffle=False)) as stream,
        pytest.raises(FrameMissing, match="the span"),
    ):
        next(iter(stream))


def test_no_good_video_for_a_rank_is_said_in_entries(corpus: Path) -> None:
    stream = make_stream([str(corpus / "missing.mp4")] * 2, config={"on_error": "replace"})
    with closing(stream), pytest.raises(DatasetError, match="leave the entries that the stream's quarantine lists"):
        list(source_of(stream).iterate(Placement(0, 2)))


def test_reports_speak_of_entries_and_give_advice_for_videos(corpus: Path) -> None:
    """Also where several workers' figures are added up, which come pickled."""
    with closing(make_stream([str(corpus / "front.mp4")])) as stream:
        list(stream)
        statistics = stream.statistics()
    statistics = sum_of(statistics, pickle.loads(pickle.dumps(statistics)))
    of_decoding = Waits(consumers=1, samples=1, wall_seconds=9.0, by_cause={Cause.DECODING: 9.0})
    of_one = Waits(
        consumers=1,
        samples=5,
        wall_seconds=9.0,
        by_cause={Cause.BODIES: 9.0},
        longest_wait_episode=3,
        longest_wait_seconds=8.0,
        largest_bytes=50e6,
        largest_episode=3,
        other_bytes=1e6,
    )
    threads = af.StreamConfig(decode_threads=1)
    decoding, one = (Report.of(waits, statistics, threads).verdict for waits in (of_decoding, of_one))
    assert decoding.advice == "store smaller pictures, or shorter groups of pictures, or use more cores"
    assert "for entry 3, a segment of which has 48 MiB" in one.evidence
    assert one.advice.startswith("store it with shorter groups of pictures, or leave it out")


# Memory.


def test_a_clip_beyond_the_bound_says_what_it_takes(heavy: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(heavy["heavy-250.mp4"])
    clips, config = af.ClipSampler(250), {"max_bytes": 4_000_000}
    with (
        closing(make_stream([str(tmp_path / "a.mp4")], clips, config=config)) as stream,
        pytest.raises(
            CacheError, match=r"clips \[0, 1\) of entry 0 .*=4000000 leaves .* StreamConfig\(max_bytes=\d+\)"
        ),
    ):
        next(iter(stream))


# Servers.


def test_a_server_that_fails_at_times_makes_no_difference(corpus: Path) -> None:
    files = {name: (corpus / name).read_bytes() for name in ("front.mp4", "tail.mp4", "web.webm", "fragments.mp4")}
    with RangeServer(files, fault=FaultEvery(3, Fault.status(503))) as server:
        config = {"fetch": af.FetchConfig(ca_file=server.ca_file)}
        with closing(make_stream([f"{server.url}/{name}" for name in files], config=config, audio_rate=8000)) as stream:
            assert windows_of(stream) == [(entry, number) for entry in range(4) for number in range(2)]
            assert stream.quarantine.samples == 0
        assert sum(request.status == 503 for request in server.requests) >= 4


async def test_a_file_replaced_behind_its_index_is_noticed(corpus: Path) -> None:
    """No picture is cut out of the new file by the old one's index; read once more, all is the new one's."""
    files = {"a.mp4": (corpus / "front.mp4").read_bytes()}
    other = (corpus / "large.mp4").read_bytes()

    def replace(request: ServedRequest) -> None:
        if request.start:
            files["a.mp4"] = other

    clips = af.ClipSampler(3, fps=4)  # one: of two, that which comes second may find the first's error, and read anew
    async with RangeServer(files, fault=replace) as server:
        config = {"fetch": af.FetchConfig(ca_file=server.ca_file)}
        stream = make_stream([f"{server.url}/a.mp4"], clips, config=config)
        async with stream.samples(epoch=0) as samples:
            with pytest.raises(ObjectChanged, match=r"a\.mp4"):
                await anext(samples)
        async with stream.samples(epoch=0) as samples:
            assert [sample["video"].shape async for sample in samples] == [(3, 3, 112, 208)]


async def test_a_pass_that_is_left_leaves_nothing(corpus: Path) -> None:
    is_reading = asyncio.Event()

    def stall(request: ServedRequest) -> Fault | None:
        if not request.start:
            return None
        is_reading.set()
        return Fault.stall()

    async with RangeServer({"a.mp4": (corpus / "front.mp4").read_bytes()}, fault=stall) as server:
        config = {"fetch": af.FetchConfig(ca_file=server.ca_file)}
        stream = make_stream([f"{server.url}/a.mp4"], config=config)

        async def read() -> None:
            async with stream.samples() as samples:
                await anext(samples)

        tasks = asyncio.all_tasks()
        reading = asyncio.ensure_future(read())
        await is_reading.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        left = asyncio.all_tasks() - tasks
        assert [task for task in left if "aiohttp" not in repr(task)] == []


@pytest.mark.usefixtures("failed_loaders_end_soon")
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_worker_leaves_nothing(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: int
) -> None:
    """Whichever it is; the first of them fetches for both."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    this = psutil.Process()
    children, files = this.children(recursive=True), open_files()
    with closing(make_stream([str(corpus / "front.mp4")] * 4, af.ClipSampler(8, pick="all"))) as stream:
        batches = iter(DataLoader(af.torch.StreamDataset(stream, batch_size=2), batch_size=None, num_workers=2))
        next(batches)
        pids = [worker.pid for worker in batches._workers]  # type: ignore[attr-defined]
        pid = pids[killed]

        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match=rf"\(pid {pid}\) was killed by SIGKILL"):
            list(batches)
        del batches, stream
    gc.collect()
    for worker in multiprocessing.active_children():  # torch terminates the other, and doesn't wait for it
        worker.join(10)
    assert this.children(recursive=True) == children
    assert open_files() <= files
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(tuple(f"torch_{each}_" for each in pids))]
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith("pymp-")]


def open_files() -> Counter[str]:
    """What this process has open, by kind and place."""
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            found[os.readlink(f"/proc/self/fd/{number}")] += 1
    return found
