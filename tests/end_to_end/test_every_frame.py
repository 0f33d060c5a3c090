"""Every frame right by its pixels and exactly once, whichever way the stream is read."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
from torch.utils.data import DataLoader

import asyncfetch as af
from asyncfetch.stream import Placement
from asyncfetch.stream.epoch_stream import source_of
from asyncfetch.testing import read_identity, write_dataset

if TYPE_CHECKING:
    from pathlib import Path

    from tests.end_to_end.conftest import Serve, Served

pytestmark = [
    pytest.mark.usefixtures("programs_are_warm"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),  # threads are running, as in any trainer
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # more workers than cores
]


async def read(stream: af.Stream, **options: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    async with stream.samples(**options) as samples:
        return [sample async for sample in samples]


@pytest.mark.parametrize("shuffle", [False, True], ids=["in sequence", "shuffled"])
async def test_the_async_iterator(served: Served, shuffle: bool) -> None:
    keys = served.check(await read(served.stream(shuffle=shuffle)))
    assert sorted(keys) == served.keys
    assert (keys == served.keys) is not shuffle


@pytest.mark.may_block  # it iterates synchronously
@pytest.mark.parametrize("shuffle", [False, True], ids=["in sequence", "shuffled"])
async def test_synchronous_iterator_gives_the_same_in_the_same_order(served: Served, shuffle: bool) -> None:
    stream = served.stream(shuffle=shuffle, seed=5)
    asynchronously = served.check(await read(stream, epoch=0))
    stream.set_epoch(0)
    assert served.check(stream) == asynchronously
    stream.close()


@pytest.mark.parametrize("batch_size", [32, None])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True], ids=["in sequence", "shuffled"])
def test_a_loader_with_forked_workers(served: Served, shuffle: bool, num_workers: int, batch_size: int | None) -> None:
    stream = served.stream(shuffle=shuffle)
    dataset = af.torch.StreamDataset(stream)
    context = "fork" if num_workers else None
    loader = DataLoader(dataset, batch_size=batch_size, num_workers=num_workers, multiprocessing_context=context)
    keys = served.check_batches(loader) if batch_size else served.check(loader)
    stream.close()
    assert sorted(keys) == served.keys
    if not num_workers:
        assert (keys == served.keys) is not shuffle


@pytest.mark.slow
def test_a_loader_with_spawned_persistent_workers(served: Served) -> None:
    dataset = af.torch.StreamDataset(served.stream())
    loader = DataLoader(dataset, batch_size=8, num_workers=2, multiprocessing_context="spawn", persistent_workers=True)
    orders = [served.check_batches(loader) for _ in range(2)]
    dataset.set_epoch(0)
    orders.append(served.check_batches(loader))
    assert all(sorted(order) == served.keys for order in orders)
    assert orders[0] != orders[1]
    assert orders[0] == orders[2]


def test_windows_and_their_pads_go_through_collate(served: Served) -> None:
    camera, fps = "observation.images.top", 30
    stream = served.stream(windows={camera: [-1 / fps, 0.0], "action": af.frames(0, 1, 2)})
    loader = DataLoader(af.torch.StreamDataset(stream), batch_size=16, num_workers=2, multiprocessing_context="fork")
    seen = []
    for batch in loader:
        size = len(batch["index"])
        assert batch[camera].shape == (size, 2, 3, 128, 160)
        assert batch["action"].shape == (size, 3, 6)
        for number in range(size):
            episode, frame = int(batch["episode_index"][number]), int(batch["frame_index"][number])
            last = served.truth.lengths[episode] - 1
            shown = [read_identity(picture).frame for picture in batch[camera][number]]
            assert shown == [max(0, frame - 1), frame]
            assert batch[f"{camera}_is_pad"][number].tolist() == [frame == 0, False]
            acted = [served.truth.action(episode, min(last, frame + offset)).tolist() for offset in range(3)]
            assert batch["action"][number].tolist() == acted
            assert batch["action_is_pad"][number].tolist() == [frame + offset > last for offset in range(3)]
            seen.append((episode, frame))
    assert sorted(seen) == served.keys


async def test_chosen_episodes_come_in_the_chosen_order(served: Served) -> None:
    stream = served.stream(shuffle=False, episodes=[10, 2, 6, 5])
    keys = served.check(await read(stream))
    assert keys == [(episode, frame) for episode in (10, 2, 6, 5) for frame in range(served.truth.lengths[episode])]


async def test_chosen_episodes_shuffled(served: Served) -> None:
    chosen = [10, 2, 5]
    keys = served.check(await read(served.stream(episodes=chosen)))
    assert sorted(keys) == [key for key in served.keys if key[0] in chosen]
    read_videos = {request.path for request in served.server.requests if request.path.startswith("/videos")}
    assert len(read_videos) == 3 * len(served.truth.cameras)  # two episodes a file: (2, 3), (4, 5), (10, 11)


async def test_no_episodes_chosen_is_an_empty_epoch(served: Served) -> None:
    stream = served.stream(episodes=[])
    assert await read(stream) == []
    assert stream.epoch == 1


def test_an_episode_can_not_be_chosen_twice(served: Served) -> None:
    with pytest.raises(af.ConfigError, match="twice"):
        served.stream(episodes=[1, 2, 1])


@pytest.mark.parametrize("unknown", [12, -1])
async def test_an_unknown_episode_is_refused(served: Served, unknown: int) -> None:
    with pytest.raises(af.EpisodeNotFound, match=str(unknown)):
        await read(served.stream(episodes=[0, unknown]))


def test_a_dataset_of_one_frame_and_two_workers(tmp_path: Path, serve: Serve) -> None:
    truth = write_dataset(tmp_path / "one", episodes=[1])
    with serve(truth) as served:
        dataset = af.torch.StreamDataset(served.stream())
        loader = DataLoader(dataset, num_workers=2, multiprocessing_context="fork")
        assert served.check_batches(loader) == [(0, 0)]


def test_two_ranks_with_two_workers_each(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        dataset = af.torch.StreamDataset(served.stream())
        loader = DataLoader(dataset, batch_size=5, num_workers=2, multiprocessing_context="fork")
        keys.append(served.check_batches(loader))
    assert sorted(keys[0] + keys[1]) == served.keys
    assert len(keys[0]) == len(keys[1])


@pytest.mark.parametrize(
    ("chosen", "workers"), [(None, 3), ([1, 3], 5)], ids=["three workers, a pool of 64", "more workers than episodes"]
)
def test_workers_that_divide_nothing_evenly(served: Served, chosen: list[int] | None, workers: int) -> None:
    config = served.config(pool_segments=64)
    dataset = af.torch.StreamDataset(served.stream(config=config, episodes=chosen))
    loader = DataLoader(dataset, batch_size=4, num_workers=workers, multiprocessing_context="fork")
    expected = [key for key in served.keys if chosen is None or key[0] in chosen]
    assert sorted(served.check_batches(loader)) == expected


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("shuffle", [False, True], ids=["in sequence", "shuffled"])
async def test_ranks_have_equal_parts_of_an_epoch(served: Served, shuffle: bool, world_size: int) -> None:
    """Not shuffled, they are neighbouring parts of the dataset's order."""
    stream = served.stream(shuffle=shuffle, features=[])
    taken = [keys_of(await read(stream, epoch=3, rank=rank, world_size=world_size)) for rank in range(world_size)]
    together = list(itertools.chain(*taken))
    assert sorted(together) == served.keys
    assert (together == served.keys) is not shuffle
    assert max(map(len, taken)) - min(map(len, taken)) <= 1


@pytest.mark.parametrize(("workers", "turn"), [(2, 1), (3, 4)])
def test_workers_of_a_rank_take_its_order_by_turns(served: Served, workers: int, turn: int) -> None:
    stream = served.stream(features=[])
    for rank in range(2):
        alone = keys_of(source_of(stream).iterate(Placement(rank, 2), epoch=0))
        for worker in range(workers):
            part = keys_of(source_of(stream).iterate(Placement(rank, 2, worker, workers, turn), epoch=0))
            assert part == [key for number, key in enumerate(alone) if number // turn % workers == worker]
    stream.close()


def keys_of(samples: Any) -> list[tuple[int, int]]:  # noqa: ANN401
    return [(int(sample["episode_index"]), int(sample["frame_index"])) for sample in samples]
