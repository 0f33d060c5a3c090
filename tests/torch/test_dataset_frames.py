"""dataset[i], in this process and in a loader's workers."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import asyncfetch as af
from asyncfetch.lerobot.episode_table import Episode, EpisodeTable
from asyncfetch.testing import read_identity, write_dataset
from tests.lerobot.serving import renumbered

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from asyncfetch.testing import DatasetTruth

pytestmark = [
    pytest.mark.usefixtures("programs_are_warm"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]

TOP = "observation.images.top"
DEPTH = "observation.images.depth"


@pytest.fixture
def dataset(truth: DatasetTruth) -> Iterator[af.torch.FrameDataset]:
    dataset = af.torch.FrameDataset(str(truth.root))
    yield dataset
    dataset.close()


def key_of(sample: dict[str, Any], truth: DatasetTruth) -> tuple[int, int]:
    key = int(sample["episode_index"]), int(sample["frame_index"])
    assert read_identity(sample[TOP]) == truth.identity(*key, TOP)
    return key


def keys(truth: DatasetTruth) -> list[tuple[int, int]]:
    return [(episode, frame) for episode, length in enumerate(truth.lengths) for frame in range(length)]


def test_every_index_is_its_frame(dataset: af.torch.FrameDataset, truth: DatasetTruth) -> None:
    assert len(dataset) == truth.num_frames
    assert [key_of(dataset[index], truth) for index in range(len(dataset))] == keys(truth)


@pytest.mark.parametrize("index", [-1, -30, 29, torch.tensor(3)], ids=repr)
def test_an_index_counts_from_either_end(dataset: af.torch.FrameDataset, truth: DatasetTruth, index: int) -> None:
    assert key_of(dataset[index], truth) == keys(truth)[index]


@pytest.mark.parametrize("index", [30, -31, 10**12])
def test_an_index_out_of_range_is_an_index_error(dataset: af.torch.FrameDataset, index: int) -> None:
    with pytest.raises(IndexError, match="30 frames"):
        dataset[index]


@pytest.mark.parametrize("index", [slice(0, 2), 1.0, "1", None], ids=repr)
def test_index_that_is_no_whole_number_is_refused(dataset: af.torch.FrameDataset, index: Any) -> None:  # noqa: ANN401
    with pytest.raises(TypeError):
        dataset[index]


def test_a_batch_comes_in_the_asked_order_repeats_included(dataset: af.torch.FrameDataset, truth: DatasetTruth) -> None:
    asked = [29, 0, 14, 14, 5, -1]
    samples = dataset.__getitems__(asked)
    assert [key_of(sample, truth) for sample in samples] == [keys(truth)[index] for index in asked]


def test_a_batch_fetches_all_its_episodes_at_once(truth: DatasetTruth) -> None:
    from asyncfetch.testing import RangeServer

    with RangeServer(truth.root, first_byte_seconds=0.5) as server:  # time for all to ask on a busy machine
        config = af.StreamConfig(fetch=af.FetchConfig(ca_file=server.ca_file, max_span_bytes=0))  # a request for each
        dataset = af.torch.FrameDataset(server.url, config=config)
        len(dataset)
        server.reset()
        dataset.__getitems__([0, 5, 14, 15, 27])
        dataset.close()
        assert server.statistics().peak_in_flight >= 5 * len(truth.cameras)


def test_chosen_episodes_are_counted_alone(truth: DatasetTruth) -> None:
    dataset = af.torch.FrameDataset(str(truth.root), episodes=[3, 4, 0])
    expected = [(3, frame) for frame in range(12)] + [(0, frame) for frame in range(5)]
    assert [key_of(dataset[index], truth) for index in range(len(dataset))] == expected
    dataset.close()


@pytest.mark.parametrize(
    ("episodes", "expected"), [(None, [(0, 5), (3, 12), (10**6, 9)]), ([10**6, 0], [(10**6, 9), (0, 5)])]
)
def test_frames_of_episodes_with_gaps_are_counted_through(
    truth: DatasetTruth, tmp_path: Path, episodes: list[int] | None, expected: list[tuple[int, int]]
) -> None:
    """Their ``index`` stays what is stored. Workers know them, too, and what lies in a gap is no episode."""
    root = renumbered(truth, tmp_path / "gaps", (0, 10**6, None, 3, None, None))
    dataset = af.torch.FrameDataset(str(root), episodes=episodes)
    frames = [(number, frame) for number, length in expected for frame in range(length)]
    starts = {0: 0, 10**6: 5, 3: 15}
    for each in (dataset, pickle.loads(pickle.dumps(dataset))):
        found = [each[index] for index in range(len(each))]
        assert [(int(one["episode_index"]), int(one["frame_index"])) for one in found] == frames
        assert [int(one["index"]) for one in found] == [starts[number] + frame for number, frame in frames]
        assert read_identity(found[-1][TOP])[:2] == (1 if episodes is None else 0, frames[-1][1])
        each.close()
    unknown = af.torch.FrameDataset(str(root), episodes=[0, 1, 10**6])
    with pytest.raises(af.EpisodeNotFound, match="no episode 1; it has 0 to 1000000, but only 3 of these numbers"):
        len(unknown)
    unknown.close()


@pytest.mark.parametrize("episode", [6, -1, 10**30])
def test_an_unknown_episode_is_refused(truth: DatasetTruth, episode: int) -> None:
    dataset = af.torch.FrameDataset(str(truth.root), episodes=[3, episode])
    with pytest.raises(af.EpisodeNotFound, match=f"no episode {episode}; it has 0 to 5"):
        len(dataset)
    dataset.close()


def test_frames_are_counted_without_a_look_at_each_episode(
    truth: DatasetTruth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be a million of them."""
    looked_at = []
    look = EpisodeTable.__getitem__

    def note(table: EpisodeTable, index: int) -> Episode:
        looked_at.append(index)
        return look(table, index)

    monkeypatch.setattr(EpisodeTable, "__getitem__", note)
    for episodes, frames in ((None, 30), ([3, 0], 17)):
        dataset = af.torch.FrameDataset(str(truth.root), episodes=episodes)
        assert len(dataset) == frames
        dataset.close()
    assert not looked_at


@pytest.mark.parametrize("unit", ["m", "mm"])
def test_depth_comes_in_the_unit_that_is_asked_for(tmp_path: Path, unit: Any) -> None:  # noqa: ANN401
    truth = write_dataset(tmp_path, episodes=(3,), cameras=[], extras=[DEPTH], width=96, height=64)
    dataset = af.torch.FrameDataset(str(truth.root), depth_unit=unit)
    expected = truth.depth_metres(0, 1) * (1000 if unit == "mm" else 1)
    np.testing.assert_allclose(dataset[1][DEPTH][0], expected, atol=0.51 if unit == "mm" else 1e-5)
    dataset.close()


def test_windows_and_features(truth: DatasetTruth) -> None:
    dataset = af.torch.FrameDataset(str(truth.root), windows={"action": af.frames(-1, 0)}, features=["action"])
    sample = dataset[0]
    assert sample["action"].shape == (2, 6)
    assert sample["action_is_pad"].tolist() == [True, False]
    assert TOP not in sample
    dataset.close()


@pytest.mark.parametrize("read_before", [False, True], ids=["fresh", "read in the parent before"])
def test_a_shuffling_loader_with_forked_workers(
    dataset: af.torch.FrameDataset, truth: DatasetTruth, read_before: bool
) -> None:
    if read_before:
        dataset[3]
    loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2, multiprocessing_context="fork")
    assert sorted(unbatched(loader, truth)) == keys(truth)
    assert key_of(dataset[3], truth) == keys(truth)[3]  # the parent's own goes on


@pytest.mark.slow
def test_a_shuffling_loader_with_spawned_workers(dataset: af.torch.FrameDataset, truth: DatasetTruth) -> None:
    dataset[3]
    loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2, multiprocessing_context="spawn")
    assert sorted(unbatched(loader, truth)) == keys(truth)


def unbatched(loader: DataLoader[Any], truth: DatasetTruth) -> list[tuple[int, int]]:
    return [
        key_of({key: values[number] for key, values in batch.items()}, truth)
        for batch in loader
        for number in range(len(batch["index"]))
    ]


def test_dataset_pickles_as_what_to_read(dataset: af.torch.FrameDataset, truth: DatasetTruth) -> None:
    dataset[0]
    other = pickle.loads(pickle.dumps(dataset))
    assert key_of(other[4], truth) == (0, 4)
    other.close()


def test_dataset_opens_again_after_close(dataset: af.torch.FrameDataset, truth: DatasetTruth) -> None:
    for _ in range(2):
        assert key_of(dataset[5], truth) == (1, 0)
        dataset.close()
