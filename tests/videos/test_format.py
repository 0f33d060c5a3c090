"""The order of windows: each once an epoch, and drawn alike, whoever reads them."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any, Literal

import anyio
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import asyncfetch as af
from asyncfetch.errors import ConfigError, EpisodeNotFound, StateMismatch, UsageError
from asyncfetch.order.state import beginning
from asyncfetch.stream import Placement
from asyncfetch.stream.epoch_stream import source_of
from asyncfetch.testing import write_dataset

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    Window = tuple[int, int]

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning", "ignore:This DataLoader will create")
any_moment = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=6, deadline=None)
NAMES = ["av1.mp4", "open.mp4", "one-frame.mp4", "large.mp4"]
SAMPLERS = {
    "random": af.ClipSampler(2, fps=3, per_video=3),
    "all": af.ClipSampler(4, step=8, pick="all"),
    "every": af.ClipSampler(2, fps=2, every_seconds=1.1),
}


def make_stream(corpus: Path, kind: str, **options: Any) -> af.Stream:  # noqa: ANN401
    config = af.StreamConfig(pool_segments=3, segment_seconds=2.0, **options.pop("config", {}))
    table = [{"video": str(corpus / name)} for name in options.pop("names", NAMES)]
    return af.Stream(af.Videos.from_table(table), clips=SAMPLERS[kind], size=(8, 8), config=config, **options)


def windows_of(samples: Iterable[Any]) -> list[Window]:
    return [(int(sample["index"]), int(sample["clip_index"])) for sample in samples]


def times_of(samples: Iterable[Any]) -> dict[Window, list[float]]:
    """When the frames of each window are shown."""
    return {(int(one["index"]), int(one["clip_index"])): one["seconds"].tolist() for one in samples}


@pytest.fixture(params=SAMPLERS)
def kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture
def stream(corpus: Path, kind: str) -> Iterator[af.Stream]:
    with closing(make_stream(corpus, kind)) as stream:
        yield stream


@any_moment
@given(data=st.data(), worlds=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_windows_come_once_over_any_ranks(
    corpus: Path, stream: af.Stream, data: st.DataObject, worlds: list[int]
) -> None:
    """Those of a rank that is resumed as one of others, too, and each with the frames that it has in one reading."""
    stream.load_state_dict(beginning(0))
    whole = times_of(source_of(stream).iterate(Placement(), epoch=0))
    taken: dict[Window, list[float]] = {}
    count, state = 0, beginning(0)
    for world_size in worlds:
        states = []
        for rank in range(world_size):
            stream.load_state_dict(state)
            samples = source_of(stream).iterate(Placement(rank, world_size), epoch=0)
            part = list(itertools.islice(samples, data.draw(st.integers(0, 5))))
            taken |= times_of(part)
            count += len(part)
            states.append(samples.state_dict())
            samples.close()
        state = json.loads(json.dumps(af.torch.merge_states(states)))
        if count == len(whole):
            break
    stream.load_state_dict(state)
    rest = list(source_of(stream).iterate(Placement(), epoch=0))
    assert count + len(rest) == len(whole)
    assert taken | times_of(rest) == whole


def test_random_windows_are_others_in_each_epoch(corpus: Path) -> None:
    with closing(make_stream(corpus, "random")) as stream, closing(make_stream(corpus, "random")) as again:
        first, second = times_of(stream), times_of(stream)
        assert first.keys() == second.keys()
        long_ones = [window for window in first if NAMES[window[0]] != "one-frame.mp4"]
        assert all(first[window] != second[window] for window in long_ones)
        again.set_epoch(1)
        assert times_of(again) == second
    with closing(make_stream(corpus, "random", seed=1)) as other:
        assert all(times_of(other)[window] != first[window] for window in long_ones)


def test_other_windows_are_the_same_in_each_epoch(corpus: Path) -> None:
    with closing(make_stream(corpus, "every")) as stream:
        assert times_of(stream) == times_of(stream)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_windows_come_once_over_any_workers(corpus: Path, kind: str, world_size: int, workers: int) -> None:
    found = []
    with closing(make_stream(corpus, kind)) as stream:
        whole = times_of(source_of(stream).iterate(Placement(), epoch=0))
        for rank, worker in itertools.product(range(world_size), range(workers)):
            placement = Placement(rank, world_size, worker, workers)
            found.append(times_of(source_of(stream).iterate(placement, epoch=0)))
    assert sum(map(len, found)) == len(whole)
    assert {window: times for part in found for window, times in part.items()} == whole


@pytest.mark.parametrize(("context", "workers"), [("fork", 2), ("spawn", 1)])
@pytest.mark.usefixtures("programs_are_warm")
def test_batches_of_loader_workers_are_those_of_none(corpus: Path, context: str, workers: int) -> None:
    with closing(make_stream(corpus, "random", names=NAMES[:2])) as stream:
        dataset = af.torch.StreamDataset(stream, batch_size=3)
        alone = list(DataLoader(dataset, batch_size=None))
        stream.set_epoch(0)
        together = list(DataLoader(dataset, batch_size=None, num_workers=workers, multiprocessing_context=context))
    for batches in (alone, together):
        assert all(batch["video"].shape == (3, 2, 3, 8, 8) for batch in batches)
        assert all(batch["seconds"].dtype == torch.float64 for batch in batches)
    rows = [
        {
            (int(e), int(c)): video
            for batch in batches
            for e, c, video in zip(batch["index"], batch["clip_index"], batch["video"], strict=True)
        }
        for batches in (alone, together)
    ]
    assert rows[0].keys() == rows[1].keys()
    assert all(torch.equal(rows[1][window], video) for window, video in rows[0].items())


@pytest.mark.usefixtures("programs_are_warm")
def test_batches_of_a_served_stream_are_its_own(corpus: Path) -> None:
    with closing(make_stream(corpus, "all")) as stream:
        with af.serve_samples(stream, 4) as batches:
            served = [batch["video"].clone() for batch in batches]
        stream.set_epoch(0)
        here = [batch["video"] for batch in af.torch.StreamDataset(stream, batch_size=4)]
    assert len(served) == len(here)
    assert all(map(torch.equal, served, here))


@pytest.mark.parametrize("changed", [{"kind": "every"}, {"names": NAMES[:3]}, {"names": NAMES[::-1]}])
def test_a_state_of_other_windows_is_refused(corpus: Path, changed: dict[str, Any]) -> None:
    with closing(make_stream(corpus, "random")) as stream:
        next(iter(stream))
        state = stream.state_dict()
    with closing(make_stream(corpus, **({"kind": "random"} | changed))) as other:
        other.load_state_dict(state)
        with pytest.raises(StateMismatch):
            next(iter(other))


def test_chosen_entries_are_read_alone(corpus: Path) -> None:
    with closing(make_stream(corpus, "all", episodes=[3, 1], shuffle=False)) as stream:
        assert list(dict.fromkeys(entry for entry, _ in windows_of(stream))) == [3, 1]
        assert stream.num_episodes == 2
    with (
        closing(make_stream(corpus, "all", episodes=[4])) as stream,
        pytest.raises(EpisodeNotFound, match=r"has entries \[0, 4\), not 4"),
    ):
        next(iter(stream))


def test_lerobot_only_attributes_and_options_are_refused(corpus: Path) -> None:
    with closing(make_stream(corpus, "all")) as stream:
        for name in ("fps", "features", "stats"):
            with pytest.raises(UsageError, match="isn't a LeRobot dataset"):
                getattr(stream, name)
    with pytest.raises(ConfigError, match="windows is for a LeRobot dataset"):
        make_stream(corpus, "all", windows={"a": [0]})
    with pytest.raises(ConfigError, match=r"needs clips=ClipSampler\("):
        af.Stream(af.Videos.from_folder(corpus))
    with pytest.raises(ConfigError, match="clips is for Videos"):
        af.Stream(str(corpus), clips=SAMPLERS["all"])
    with pytest.raises((ConfigError, TypeError)):
        af.torch.FrameDataset(af.Videos.from_folder(corpus))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"audio_rate": 0}, "audio_rate must be .*at least 1"),
        ({"audio_rate": 16_000.5}, "audio_rate must be"),
        ({"audio_rate": "16000"}, "audio_rate must be"),
        ({"clips": 8}, "clips must be a ClipSampler, not 8"),
        ({"fit": "crop"}, "give size="),
        ({"size": (0, 8)}, "height must be at least 1"),
    ],
)
def test_stream_of_videos_refuses_wrong_options(corpus: Path, wrong: dict[str, Any], why: str) -> None:
    given: dict[str, Any] = {"clips": SAMPLERS["all"]} | wrong
    with pytest.raises(ConfigError, match=why):
        af.Stream(af.Videos.from_folder(corpus), **given)


def test_a_mixture_has_videos_beside_a_lerobot_dataset(corpus: Path, tmp_path: Path) -> None:
    truth = write_dataset(tmp_path / "set", episodes=(6, 4), width=64, height=64)
    robot = af.Stream(str(truth.root))
    videos = make_stream(corpus, "random")
    missing: Literal["keep", "drop"]
    for missing in ("keep", "drop"):
        with closing(af.Mixture([robot, videos], [1, 1], missing=missing)) as mixture:
            found = list(itertools.islice(mixture, 12))
        members = [int(sample["dataset"]) for sample in found]
        assert {0, 1} == set(members)
        for member, sample in zip(members, found, strict=True):
            assert ("video" in sample) == (member == 1 and missing == "keep")


KILLED_RANK = """
import json, os, sys, anyio
import asyncfetch as af

table, folder, rank, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

async def read():
    config = af.StreamConfig(pool_segments=3, segment_seconds=2.0)
    stream = af.Stream(
        af.Videos.from_table(table), clips=af.ClipSampler(4, step=8, pick="all"), size=(8, 8), config=config
    )
    given = []
    async with stream.samples(rank=rank, world_size=3) as samples:
        for _ in range(count):
            sample = await anext(samples)
            given.append((int(sample["index"]), int(sample["clip_index"])))
        with open(f"{folder}/{rank}", "w") as file:
            json.dump({"given": given, "state": samples.state_dict()}, file)
        os.kill(os.getpid(), 9)  # in the middle of fetching and decoding ahead

anyio.run(read)
"""


@pytest.mark.slow
def test_three_killed_ranks_are_resumed_by_two(corpus: Path, tmp_path: Path) -> None:
    table = tmp_path / "videos.jsonl"
    table.write_text("".join(json.dumps({"video": str(corpus / name)}) + "\n" for name in NAMES))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", KILLED_RANK, str(table), str(tmp_path), str(rank), str(rank + 1)],
            env=environment,
            stderr=subprocess.PIPE,
        )
        for rank in range(3)
    ]
    for process in processes:
        errors = process.communicate()[1]
        assert process.returncode == -signal.SIGKILL, errors
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    given: list[Window] = [(index, clip) for each in found for index, clip in each["given"]]
    with closing(make_stream(corpus, "all")) as whole:
        expected = sorted(windows_of(whole))
    state = af.torch.merge_states([each["state"] for each in found])

    async def read_rest(rank: int) -> list[Window]:
        config = af.StreamConfig(pool_segments=3, segment_seconds=2.0)
        videos = af.Videos.from_table(str(table))
        stream = af.Stream(videos, clips=SAMPLERS["all"], size=(8, 8), config=config)
        stream.load_state_dict(state)
        async with stream.samples(rank=rank, world_size=2) as samples:
            return windows_of([sample async for sample in samples])

    for rank in range(2):
        given += anyio.run(read_rest, rank)
    assert sorted(given) == expected
