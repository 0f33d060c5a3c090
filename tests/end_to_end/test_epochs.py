"""Which epoch comes next."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING, Any

import pytest
from torch.utils.data import DataLoader, default_collate, get_worker_info

import asyncfetch as af
from asyncfetch.stream import Placement
from asyncfetch.stream.epoch_stream import source_of
from asyncfetch.stream.ranks import found_placement
from asyncfetch.testing import write_dataset

if TYPE_CHECKING:
    from pathlib import Path

    from tests.end_to_end.conftest import Serve, Served

TOP = "observation.images.top"
pytestmark = [
    pytest.mark.usefixtures("programs_are_warm"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


def keys_of(samples: Any) -> list[tuple[int, int]]:  # noqa: ANN401
    return [(int(sample["episode_index"]), int(sample["frame_index"])) for sample in samples]


@pytest.fixture
def stream(served: Served) -> Any:  # noqa: ANN401
    stream = served.stream(features=[])
    yield stream
    stream.close()


def test_a_finished_pass_is_an_epoch_and_each_has_its_order(stream: af.Stream) -> None:
    orders = [keys_of(stream) for _ in range(3)]
    assert stream.epoch == 3
    assert len({tuple(order) for order in orders}) == 3
    assert len({tuple(sorted(order)) for order in orders}) == 1
    stream.set_epoch(1)
    assert keys_of(stream) == orders[1]


@pytest.mark.parametrize("taken", [0, 1, 75, 76])
def test_a_synchronous_pass_that_is_left_early_is_no_epoch(stream: af.Stream, taken: int) -> None:
    iterator = iter(stream)
    assert len(list(itertools.islice(iterator, taken))) == taken
    iterator.close()
    assert stream.epoch == 0


async def test_an_asynchronous_pass_that_is_left_early_is_no_epoch(stream: af.Stream) -> None:
    async with stream.samples() as samples:
        for _ in range(75):
            await anext(samples)
    assert stream.epoch == 0
    async with stream.samples() as samples:
        assert len([None async for _ in samples]) == 76
    assert stream.epoch == 1


async def test_numbered_epoch_counts_only_if_it_is_the_next(stream: af.Stream) -> None:
    for epoch, expected in [(5, 0), (0, 1)]:
        async with stream.samples(epoch=epoch) as samples:
            assert len([None async for _ in samples]) == 76
        assert stream.epoch == expected


def test_set_epoch_reaches_persistent_workers(stream: af.Stream) -> None:
    dataset = af.torch.StreamDataset(stream)
    loader = DataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context="fork", persistent_workers=True)

    def order() -> list[int]:
        return [int(index) for batch in loader for index in batch["index"]]

    orders = [order() for _ in range(2)]
    assert stream.epoch == 2  # the workers' counting is seen here
    dataset.set_epoch(0)
    assert [order() for _ in range(2)] == orders
    stream.set_epoch(1)
    assert order() == orders[1]
    assert orders[0] != orders[1]


@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.slow
def test_pass_counts_beside_another_that_is_left_early(stream: af.Stream, context: str) -> None:
    dataset = af.torch.StreamDataset(stream, batch_size=4)
    loaders = [
        DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True, multiprocessing_context=context)
        for _ in range(2)
    ]
    orders = set()
    for epoch in range(3):
        whole, left = (iter(loader) for loader in loaders)
        batches = [[next(side)["index"].tolist() for side in (whole, left)] for _ in range(2)]
        assert all(ours == others for ours, others in batches)
        order = [
            *itertools.chain(*(ours for ours, _ in batches)),
            *(i for batch in whole for i in batch["index"].tolist()),
        ]
        assert sorted(order) == list(range(76))
        orders.add(tuple(order))
        assert stream.epoch == epoch + 1
    assert len(orders) == 3


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda dataset: pickle.loads(pickle.dumps(dataset))])
def test_a_copy_of_a_dataset_counts_its_own_workers_epochs(stream: af.Stream, copied: Any) -> None:  # noqa: ANN401
    dataset = copied(af.torch.StreamDataset(stream))
    loader = DataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context="fork", persistent_workers=True)
    orders = [[int(index) for batch in loader for index in batch["index"]] for _ in range(2)]
    assert orders[0] != orders[1]
    assert (dataset.stream.epoch, stream.epoch) == (2, 0)
    dataset.set_epoch(0)
    assert [int(index) for batch in loader for index in batch["index"]] == orders[0]


@pytest.mark.slow
def test_datasets_of_a_stream_count_epochs_in_one_place(stream: af.Stream) -> None:
    """Though a spawned worker knows none but its own."""
    dataset, _ = af.torch.StreamDataset(stream), af.torch.StreamDataset(stream)
    assert list(DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn"))
    assert stream.epoch == 1


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.slow
def test_whenever_a_pass_is_left_the_next_one_is_a_whole_epoch(stream: af.Stream, persistent: bool) -> None:
    """Near the end too, when some workers have finished their share and some have not."""
    dataset = af.torch.StreamDataset(stream)
    loader = DataLoader(
        dataset,
        batch_size=4,
        num_workers=2,
        multiprocessing_context="fork",
        persistent_workers=persistent,
        collate_fn=slow_in_one_worker,
    )
    orders = {tuple(keys_of(source_of(stream).iterate(Placement(), epoch=epoch))): epoch for epoch in range(16)}
    whole = {frozenset(keys[place::2] for place in range(2)): epoch for keys, epoch in orders.items()}
    dataset.set_epoch(0)
    for taken in (0, 1, 15, 16, 17, 18, 19):
        before = stream.epoch
        for _ in itertools.islice(loader, taken):
            pass
        epoch = whole[frozenset(shares_of(loader, 2))]
        assert epoch in {before, before + 1}  # the workers may have been at their ends when the trainer left
        assert stream.epoch == epoch + 1


def slow_in_one_worker(samples: list[Any]) -> Any:  # noqa: ANN401
    """Its last batch comes when the other worker has begun the next pass."""
    worker = get_worker_info()
    time.sleep(0.02 if worker is not None and worker.id == 1 else 0)
    return default_collate(samples)


def shares_of(loader: Any, workers: int) -> list[tuple[tuple[int, int], ...]]:  # noqa: ANN401
    """What each worker gave, told apart by the turns in which a loader takes their batches."""
    shares: list[list[tuple[int, int]]] = [[] for _ in range(workers)]
    for number, batch in enumerate(loader):
        shares[number % workers] += zip(batch["episode_index"].tolist(), batch["frame_index"].tolist(), strict=True)
    return [tuple(share) for share in shares]


def test_a_slow_worker_never_takes_the_next_epoch(stream: af.Stream) -> None:
    af.torch.StreamDataset(stream)
    fast, slow = (Placement(worker=worker, workers=2) for worker in range(2))
    first = keys_of(source_of(stream).iterate(fast))
    late = keys_of(source_of(stream).iterate(slow))  # starts when the fast one has moved on
    stream.set_epoch(0)
    assert sorted(first + late) == sorted(keys_of(stream))


@pytest.mark.parametrize("workers", [0, 1], ids=["stream", "persistent worker"])
def test_next_epoch_begins_to_fetch_while_the_last_one_drains(tmp_path: Path, serve: Serve, workers: int) -> None:
    """Though memory holds but two thirds of the clips, and not that one any more."""
    truth = write_dataset(
        tmp_path / "data",
        episodes=12,
        length=12,
        cameras=[TOP],
        codec="h264",
        texture=20.0,
        crf=10,
        distinct_videos=1,
        episodes_per_video_file=1,  # by which requests are told apart
    )
    clip_bytes = max(file.stat().st_size for file in truth.root.rglob("*.mp4"))
    with serve(truth) as served:
        config = served.config(max_bytes=14 * clip_bytes, decoded_max_bytes=1, pool_segments=2, prefetch_segments=2)
        stream = served.stream(features=[TOP], seed=8, config=config)  # in the epoch before, it is the third
        ((first, _),) = keys_of(itertools.islice(source_of(stream).iterate(Placement(), epoch=2), 1))
        stream.close()
        samples: Any = stream
        if workers:
            samples = DataLoader(
                af.torch.StreamDataset(stream),
                batch_size=None,
                num_workers=workers,
                persistent_workers=True,
                multiprocessing_context="fork",
            )
        assert len(keys_of(samples)) == truth.num_frames
        second, used = iter(samples), 0.0
        for sample in itertools.islice(second, truth.num_frames - 1):
            if int(sample["episode_index"]) == first:
                used = time.monotonic()
        deadline = time.monotonic() + 10
        file = f"file-{first:03d}.mp4"
        while not any(each.started > used for each in served.server.requests if each.path.endswith(file)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert len(keys_of(second)) == 1
        stream.close()


def test_a_negative_epoch_is_refused(stream: af.Stream) -> None:
    with pytest.raises(af.ConfigError, match="-1"):
        stream.set_epoch(-1)


def test_half_a_rank_is_refused(stream: af.Stream) -> None:
    with pytest.raises(af.ConfigError, match="both"):
        stream.samples(rank=1)
    with pytest.raises(af.ConfigError, match="2 of 2"):
        stream.samples(rank=2, world_size=2)


def test_the_rank_is_found_in_the_environment(stream: af.Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    part = keys_of(source_of(stream).iterate(found_placement(2, 3), epoch=0))
    stream.set_epoch(0)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert keys_of(stream) == part
    monkeypatch.setenv("RANK", "two")
    with pytest.raises(af.ConfigError, match="two"):
        iter(stream)


@pytest.mark.slow
@pytest.mark.usefixtures("nested_programs_are_warm")
def test_ranks_of_torch_distributed_reach_all_workers(served: Served) -> None:
    script = f"""
    import sys, torch.distributed, asyncfetch as af
    from torch.utils.data import DataLoader, default_collate, get_worker_info
    if __name__ == "__main__":
        rank = int(sys.argv[1])
        store = torch.distributed.FileStore(sys.argv[2], 2)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
        config = af.StreamConfig(fetch=af.FetchConfig(ca_file={served.server.ca_file!r}))
        dataset = af.torch.StreamDataset(af.Stream({served.url!r}, features=[], config=config))
        for context in ("fork", "spawn"):
            dataset.set_epoch(0)
            loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context=context)
            print(*(int(sample["index"]) for sample in loader))
        torch.distributed.destroy_process_group()
    """
    outputs = run_pair(script)
    for line in range(2):
        shares = [[int(index) for index in output.splitlines()[line].split()] for output in outputs]
        assert sorted(shares[0] + shares[1]) == list(range(76))
        assert len(shares[0]) == len(shares[1])


def run_pair(script: str) -> list[str]:
    """What two processes of a script print; their arguments are their rank and a file that doesn't exist yet."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "script.py")
        with open(path, "w") as file:
            file.write(textwrap.dedent(script))
        environment = {key: value for key, value in os.environ.items() if key not in {"RANK", "WORLD_SIZE"}}
        environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        processes = [
            subprocess.Popen(
                [sys.executable, path, str(rank), os.path.join(folder, "store")],
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(2)
        ]
        outputs = [process.communicate(timeout=50)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return outputs
