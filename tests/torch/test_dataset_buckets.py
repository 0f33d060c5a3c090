"""Batches of one shape each, of samples of several, and how an epoch of them goes on."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import asyncfetch as af
from asyncfetch.errors import ConfigError, DecodeError, UsageError
from asyncfetch.testing import write_dataset
from asyncfetch.torch import StreamDataset, merge_states

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from asyncfetch.order.state import State
    from asyncfetch.testing import DatasetTruth

Key = tuple[int, int]
TOP = "observation.images.top"
TOTAL = 30
"""Frames of the dataset."""
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*use of fork:DeprecationWarning",
    "ignore:This DataLoader will create",
    "ignore:'set_vital' is deprecated:UserWarning",  # torchdata's own call
)
few = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15, deadline=None)


def of_shapes(sample: dict[str, Any]) -> dict[str, Any]:
    """A clip of 1 or 2 frames in one of three sizes."""
    frame, episode = int(sample["frame_index"]), int(sample["episode_index"])
    clip = torch.full((1 + frame % 2, 3, 4, (4, 6, 8)[(frame + episode) % 3]), frame, dtype=torch.uint8)
    return {"episode_index": sample["episode_index"], "frame_index": sample["frame_index"], "video": clip}


def breaks(sample: dict[str, Any]) -> dict[str, Any]:
    if int(sample["index"]) == 17:
        raise DecodeError("broken")
    return of_shapes(sample)


def dataset_of(truth: DatasetTruth, **options: Any) -> StreamDataset:  # noqa: ANN401
    names = ("config", "transform", "rank")
    given = {name: options.pop(name) for name in names if name in options}
    config = af.StreamConfig(pool_segments=4, **given.get("config", {}))
    stream = af.Stream(str(truth.root), features=[], transform=given.get("transform", of_shapes), config=config)
    return StreamDataset(stream, options.pop("batch_size", 3), bucket_by=options.pop("bucket_by", "shape"), **options)


def keys_of(batch: Any) -> list[Key]:  # noqa: ANN401
    return list(zip(batch["episode_index"].tolist(), batch["frame_index"].tolist(), strict=True))


def check_each_once(batches: Iterable[list[Key]]) -> None:
    counts = Counter(key for batch in batches for key in batch)
    assert len(counts) == TOTAL
    assert set(counts.values()) == {1}


def saved(state: State) -> State:
    copied: State = json.loads(json.dumps(state))
    assert copied == state
    return copied


def test_batches_have_one_shape_and_come_early(truth: DatasetTruth) -> None:
    batches = list(dataset_of(truth))
    check_each_once(map(keys_of, batches))
    assert all(isinstance(batch["video"], torch.Tensor) for batch in batches)
    sizes = [len(batch["video"]) for batch in batches]
    assert sizes.count(3) >= 8
    full = [batch["video"].shape[1:] for batch in batches if len(batch["video"]) < 3]
    assert len(set(full)) == len(full)  # at most one rest of a shape


def test_batches_of_as_many_frames_hold_lists_of_other_sizes(truth: DatasetTruth) -> None:
    batches = list(dataset_of(truth, bucket_by="frames"))
    check_each_once(map(keys_of, batches))
    assert [len(batch["frame_index"]) for batch in batches].count(3) >= 9
    assert all(len({len(clip) for clip in batch["video"]}) == 1 for batch in batches)
    assert any(isinstance(batch["video"], list) for batch in batches)


def test_mixed_batch_without_buckets_holds_lists(truth: DatasetTruth) -> None:
    batches = list(dataset_of(truth, bucket_by=None))
    assert [len(batch["video"]) for batch in batches] == [3] * 10
    assert any(isinstance(batch["video"], list) for batch in batches)


def test_smaller_batches_are_left_out_by_drop_last(truth: DatasetTruth) -> None:
    whole, full = list(dataset_of(truth)), list(dataset_of(truth, drop_last=True))
    assert [keys_of(batch) for batch in full] == [keys_of(batch) for batch in whole if len(batch["video"]) == 3]


def test_a_collate_fn_makes_batches_of_buckets(truth: DatasetTruth) -> None:
    lists = list(dataset_of(truth, collate_fn=list))
    assert [len(samples) for samples in lists] == [len(batch["video"]) for batch in dataset_of(truth)]


@pytest.mark.parametrize("most", ["bytes", "samples"])
def test_no_more_samples_wait_than_there_is_room_for(
    truth: DatasetTruth, monkeypatch: pytest.MonkeyPatch, most: str
) -> None:
    unbounded = len(list(dataset_of(truth)))
    if most == "samples":
        monkeypatch.setattr("asyncfetch.stream.buckets.WAITING_BATCHES", 2)
    config = {"decoded_max_bytes": 200} if most == "bytes" else {}
    dataset = dataset_of(truth, config=config)
    batches, states = [], []
    for batch in dataset:
        batches.append(keys_of(batch))
        states.append(saved(dataset.state_dict()))
    check_each_once(batches)
    assert len(batches) > unbounded
    for number, state in enumerate(states[:-1], 1):
        resumed = dataset_of(truth, config=config)
        resumed.load_state_dict(state)
        assert [keys_of(batch) for batch in resumed] == batches[number:]


@few
@given(stops=st.lists(st.integers(0, 6), min_size=1, max_size=3), by=st.sampled_from(["shape", "frames"]))
def test_an_epoch_goes_on_with_the_batches_that_were_left(truth: DatasetTruth, stops: list[int], by: str) -> None:
    expected = [keys_of(batch) for batch in dataset_of(truth, bucket_by=by)]
    given_batches: list[list[Key]] = []
    state = None
    for stop in stops:
        dataset = dataset_of(truth, bucket_by=by)
        if state is not None:
            dataset.load_state_dict(state)
        batches = iter(dataset)
        given_batches += [keys_of(batch) for _, batch in zip(range(stop), batches, strict=False)]
        state = saved(dataset.state_dict())
        if len(given_batches) == len(expected):
            break
    else:
        last = dataset_of(truth, bucket_by=by)
        assert state is not None
        last.load_state_dict(state)
        given_batches += [keys_of(batch) for batch in last]
    assert given_batches == expected


def test_the_next_epoch_follows(truth: DatasetTruth) -> None:
    dataset = dataset_of(truth)
    first, second = ([keys_of(batch) for batch in dataset] for _ in range(2))
    check_each_once(first)
    check_each_once(second)
    assert first != second
    assert dataset.state_dict()["epoch"] == 2


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_pass_that_gave_all_is_finished_unasked(truth: DatasetTruth, *, drop_last: bool) -> None:
    count = len(list(dataset_of(truth, drop_last=drop_last)))
    dataset = dataset_of(truth, drop_last=drop_last)
    batches = iter(dataset)
    for _ in range(count):
        next(batches)
    resumed = dataset_of(truth, drop_last=drop_last)
    resumed.load_state_dict(saved(dataset.state_dict()))
    following = [keys_of(batch) for batch in resumed]
    if drop_last:  # the others wait for ever
        following = [keys_of(batch) for batch in resumed]
    dataset = dataset_of(truth, drop_last=drop_last)
    dataset.set_epoch(1)
    assert following == [keys_of(batch) for batch in dataset]


def test_a_state_goes_on_without_buckets_and_with_others(truth: DatasetTruth) -> None:
    for options in ({"bucket_by": None}, {"bucket_by": "frames", "batch_size": 2}):
        dataset = dataset_of(truth)
        batches = iter(dataset)
        given_batches = [keys_of(next(batches)) for _ in range(4)]
        state = saved(dataset.state_dict())
        resumed = dataset_of(truth, **options)
        resumed.load_state_dict(state)
        for batch in resumed:
            given_batches.append(keys_of(batch))
            again = saved(resumed.state_dict())
        check_each_once(given_batches)
        assert again["epoch"] in {0, 1}


def test_an_error_leaves_what_waits_for_later(truth: DatasetTruth) -> None:
    dataset = dataset_of(truth, transform=breaks)
    batches: list[list[Key]] = []
    iterator = iter(dataset)
    with pytest.raises(DecodeError):
        batches.extend(keys_of(batch) for batch in iterator)
    resumed = dataset_of(truth)
    resumed.load_state_dict(saved(dataset.state_dict()))
    batches += [keys_of(batch) for batch in resumed]
    check_each_once(batches)
    assert batches == [keys_of(batch) for batch in dataset_of(truth)]


def test_a_batch_that_cannot_be_made_comes_again(truth: DatasetTruth) -> None:
    made = []

    def third_fails(samples: list[Any]) -> Any:  # noqa: ANN401
        made.append(samples)
        if len(made) == 3:
            raise ValueError(3)
        return samples

    dataset = dataset_of(truth, collate_fn=third_fails)
    with pytest.raises(ValueError, match="3"):
        list(dataset)
    resumed = dataset_of(truth, collate_fn=list)
    resumed.load_state_dict(saved(dataset.state_dict()))
    following = [len(samples) for samples in resumed]
    assert [3, 3, *following] == [len(batch["video"]) for batch in dataset_of(truth)]


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_samples_waiting_behind_bad_data_are_delivered(tmp_path: Path, broken: int) -> None:
    """Also where the pass has ended before the last batches are made, because its last samples were left out."""
    write_dataset(tmp_path, episodes=(9, 9, 9), width=64, height=64, cameras=[TOP], episodes_per_video_file=1)
    next((tmp_path / f"videos/{TOP}").glob(f"*/file-00{broken}.mp4")).unlink()

    def dataset() -> StreamDataset:
        config = af.StreamConfig(on_error="skip")
        stream = af.Stream(str(tmp_path), features=[TOP], shuffle=False, transform=of_shapes, config=config)
        return StreamDataset(stream, 4, bucket_by="shape")

    whole = dataset()
    batches, states = [], []
    for batch in whole:
        batches.append(keys_of(batch))
        states.append(saved(whole.state_dict()))
    assert sorted(key for batch in batches for key in batch) == [
        (episode, frame) for episode in range(3) if episode != broken for frame in range(9)
    ]
    assert [len(batch) for batch in batches].count(4) < len(batches) - 1
    assert [state["epoch"] for state in states] == [*[0] * (len(states) - 1), int(broken == 2)]
    for number, state in enumerate(states[:-1], 1):
        resumed = dataset()
        resumed.load_state_dict(state)
        assert [keys_of(batch) for batch in resumed] == batches[number:]
    assert whole.state_dict()["epoch"] == 1


@pytest.mark.parametrize("stop", [1, 4, 9])
def test_workers_of_a_stateful_loader_go_on(truth: DatasetTruth, stop: int) -> None:
    def loader() -> StatefulDataLoader[Any]:
        return StatefulDataLoader(dataset_of(truth), batch_size=None, num_workers=2)

    whole = [keys_of(batch) for batch in loader()]
    check_each_once(whole)
    first, batches = loader(), []
    for batch in first:
        batches.append(keys_of(batch))
        if len(batches) == stop:
            break
    state = first.state_dict()
    second = loader()
    second.load_state_dict(state)
    batches += [keys_of(batch) for batch in second]
    assert batches == whole
    merged = dataset_of(truth)
    merged.load_state_dict(saved(merge_states([state])))
    check_each_once([*whole[:stop], *(keys_of(batch) for batch in merged)])


def test_workers_have_buckets_of_their_own(truth: DatasetTruth) -> None:
    batches = list(DataLoader(dataset_of(truth), batch_size=None, num_workers=2))
    check_each_once(map(keys_of, batches))
    assert all(isinstance(batch["video"], torch.Tensor) for batch in batches)


def test_bucketed_dataset_refuses_len_and_state_after(truth: DatasetTruth) -> None:
    dataset = dataset_of(truth)
    with pytest.raises(UsageError, match="the number of batches isn't known before"):
        len(dataset)
    with pytest.raises(ConfigError, match="ask state_dict, without workers, or torchdata's StatefulDataLoader"):
        dataset.state_after(1)
    with pytest.raises(ConfigError, match="bucket_by must be 'frames', 'shape' or None, not 'size'"):
        dataset_of(truth, bucket_by="size")
    with pytest.raises(ConfigError, match="give StreamDataset a batch_size"):
        dataset_of(truth, batch_size=None)
