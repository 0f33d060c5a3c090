"""serve_samples(bucket_by=): the batches, and the states, of a StreamDataset with the same word."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import asyncfetch as af
from asyncfetch.order.state import beginning
from asyncfetch.testing import write_dataset
from asyncfetch.torch import StreamDataset
from tests.stream.conftest import TOP

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from asyncfetch.order.state import State
    from asyncfetch.testing import DatasetTruth

pytestmark = pytest.mark.usefixtures("programs_are_warm")
few = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15, deadline=None)

SIZE = 3
CONFIG = af.StreamConfig(pool_segments=4, prefetch_segments=1, decode_threads=1)
Batch = tuple[list[tuple[int, int]], Any]
"""The (episode, frame) of each sample, and the shape of its clips; of a list the shape of each."""


def of_shapes(sample: dict[str, Any]) -> dict[str, Any]:
    """A clip of 1 or 2 frames in one of three sizes."""
    frame, episode = int(sample["frame_index"]), int(sample["episode_index"])
    clip = torch.full((1 + frame % 2, 3, 4, (4, 6, 8)[(frame + episode) % 3]), frame, dtype=torch.uint8)
    return {"episode_index": sample["episode_index"], "frame_index": sample["frame_index"], "video": clip}


def breaks(sample: dict[str, Any]) -> dict[str, Any]:
    if int(sample["index"]) == 23:
        raise af.DecodeError("broken")
    return of_shapes(sample)


def stream_of(truth: DatasetTruth, **options: Any) -> af.Stream:  # noqa: ANN401
    return af.Stream(str(truth.root), **{"config": CONFIG, "features": [], "transform": of_shapes, **options})


def seen(batch: Any) -> Batch:  # noqa: ANN401
    """What a batch has; its pictures are checked."""
    keys = list(zip(batch["episode_index"].tolist(), batch["frame_index"].tolist(), strict=True))
    assert all((clip == frame).all() for clip, (_, frame) in zip(batch["video"], keys, strict=True))
    clips = batch["video"]
    return keys, [clip.shape for clip in clips] if isinstance(clips, list) else clips.shape[1:]


def of_dataset(stream: af.Stream, *, epoch: int = 0, state: State | None = None, **options: Any) -> list[Batch]:  # noqa: ANN401
    """The batches that a StreamDataset gives of an epoch."""
    dataset = StreamDataset(stream, SIZE, **{"bucket_by": "shape", **options})
    dataset.load_state_dict(state) if state else dataset.set_epoch(epoch)
    batches = [seen(batch) for batch in dataset]
    stream.close()
    return batches


def saved(state: State) -> State:
    copied: State = json.loads(json.dumps(state))
    assert copied == state
    return copied


@pytest.fixture(scope="module")
def served(truth: DatasetTruth) -> Iterator[tuple[af.Stream, af.ServedBatches]]:
    stream = stream_of(truth)
    with af.serve_samples(stream, SIZE, bucket_by="shape") as batches:
        yield stream, batches
    assert not psutil.pid_exists(batches.pid)


@pytest.fixture
def batches(served: tuple[af.Stream, af.ServedBatches]) -> af.ServedBatches:
    served[1].load_state_dict(beginning(0))
    return served[1]


@pytest.fixture(scope="module")
def expected(truth: DatasetTruth) -> list[Batch]:
    return of_dataset(stream_of(truth))


def test_batches_have_one_shape_epoch_after_epoch(
    truth: DatasetTruth, batches: af.ServedBatches, expected: list[Batch]
) -> None:
    got = [seen(batch) for batch in batches]
    assert got == expected
    assert {len(keys) for keys, _ in got} == {1, 2, SIZE}
    assert not any(isinstance(shapes, list) for _, shapes in got)
    assert sorted(key for keys, _ in got for key in keys) == [
        (episode, frame) for episode, length in enumerate(truth.lengths) for frame in range(length)
    ]
    assert [seen(batch) for batch in batches] == of_dataset(stream_of(truth), epoch=1)


@pytest.mark.parametrize(("bucket_by", "drop_last"), [("frames", False), ("shape", True), (None, False)])
def test_the_other_words_mean_the_same(truth: DatasetTruth, bucket_by: Any, *, drop_last: bool) -> None:  # noqa: ANN401
    """Where what is alike isn't all of a shape, a batch holds lists."""
    options = {"bucket_by": bucket_by, "drop_last": drop_last}
    with af.serve_samples(stream_of(truth), SIZE, **options) as batches:
        got = [seen(batch) for batch in batches]
    assert got == of_dataset(stream_of(truth), **options)
    assert any(isinstance(shapes, list) for _, shapes in got) == (bucket_by != "shape")
    assert not drop_last or {len(keys) for keys, _ in got} == {SIZE}


@few
@given(stops=st.lists(st.integers(0, 12), min_size=1, max_size=3))
def test_an_epoch_goes_on_with_the_batches_that_were_left(
    batches: af.ServedBatches, expected: list[Batch], stops: list[int]
) -> None:
    """A state names samples that were given before their turn; the others fill the same buckets."""
    batches.load_state_dict(beginning(0))
    got: list[Batch] = []
    for stop in stops:
        passing = iter(batches)
        got += [seen(batch) for _, batch in zip(range(stop), passing, strict=False)]
        state = saved(batches.state_dict())
        passing.close()  # type: ignore[attr-defined]
        batches.load_state_dict(state)
        if len(got) == len(expected):
            break
    else:
        got += [seen(batch) for batch in batches]
    assert got == expected


@pytest.mark.parametrize("taken", [1, 4, 11])
def test_states_are_those_of_a_dataset(
    truth: DatasetTruth, batches: af.ServedBatches, expected: list[Batch], taken: int
) -> None:
    """They go on there, and those of a dataset here."""
    passing = iter(batches)
    for _ in range(taken):
        next(passing)
    state = saved(batches.state_dict())
    assert of_dataset(stream_of(truth), state=state) == expected[taken:]
    dataset = StreamDataset(stream_of(truth), SIZE, bucket_by="shape")
    theirs = iter(dataset)
    for _ in range(taken):
        next(theirs)
    assert saved(dataset.state_dict()) == state
    batches.load_state_dict(dataset.state_dict())
    assert [seen(batch) for batch in batches] == expected[taken:]


def test_last_batch_finishes_a_pass(batches: af.ServedBatches, expected: list[Batch]) -> None:
    """Also where the end isn't asked for."""
    passing = iter(batches)
    for _ in expected:
        next(passing)
    state = saved(batches.state_dict())
    passing.close()  # type: ignore[attr-defined]
    iter(batches)
    assert batches.state_dict()["epoch"] == 1
    batches.load_state_dict(state)
    assert batches.state_dict()["epoch"] == 1


def test_an_error_leaves_what_waits_for_later(truth: DatasetTruth, expected: list[Batch]) -> None:
    got: list[Batch] = []
    with af.serve_samples(stream_of(truth, transform=breaks), SIZE, bucket_by="shape") as batches:
        with pytest.raises(af.DecodeError, match="broken"):
            got.extend(seen(batch) for batch in batches)
        state = saved(batches.state_dict())
    assert 0 < len(got) < len(expected)
    assert got + of_dataset(stream_of(truth), state=state) == expected


def test_no_more_samples_wait_than_there_is_room_for(truth: DatasetTruth, expected: list[Batch]) -> None:
    options = {"config": replace(CONFIG, decoded_max_bytes=200)}
    with af.serve_samples(stream_of(truth, **options), SIZE, bucket_by="shape") as batches:
        got, states = [], []
        for batch in batches:
            got.append(seen(batch))
            states.append(saved(batches.state_dict()))
    assert len(got) > len(expected)
    for number in range(1, len(got), 5):
        assert of_dataset(stream_of(truth, **options), state=states[number - 1]) == got[number:]


def test_samples_waiting_behind_bad_data_are_delivered(tmp_path: Path) -> None:
    """Where the last samples are left out, the pass has ended before the last batches are made."""
    truth = write_dataset(tmp_path, episodes=(9, 9, 9), width=64, height=64, cameras=[TOP], episodes_per_video_file=1)
    next((tmp_path / f"videos/{TOP}").glob("*/file-002.mp4")).unlink()
    options = {"features": [TOP], "shuffle": False, "config": replace(CONFIG, on_error="skip")}
    stream = stream_of(truth, **options)
    got, states = [], []
    with af.serve_samples(stream, SIZE, bucket_by="shape") as batches:
        for batch in batches:
            got.append(seen(batch))
            states.append(saved(batches.state_dict()))
        assert [found.episode for found in stream.quarantine.episodes()] == [2]
    assert sorted(key for keys, _ in got for key in keys) == [
        (episode, frame) for episode in range(2) for frame in range(9)
    ]
    assert [len(keys) for keys, _ in got[-2:]] != [SIZE, SIZE]
    for number, state in enumerate(states, 1):
        assert of_dataset(stream_of(truth, **options), state=state) == got[number:]


def test_bucket_by_without_buckets_is_refused(truth: DatasetTruth) -> None:
    options: Any = {"bucket_by": "size"}
    with pytest.raises(af.ConfigError, match="bucket_by must be 'frames', 'shape' or None, not 'size'"):
        af.serve_samples(stream_of(truth), **options)
    with pytest.raises(af.ConfigError, match="bucket_by='shape' is about batches made here: give serve_samples a"):
        af.serve_samples(stream_of(truth), None, bucket_by="shape")
