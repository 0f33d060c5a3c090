"""Batches that are filled where frames are decoded: what they hold, and whose memory it is."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections import Counter, deque
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

import asyncfetch as af
import asyncfetch.torch.dataset as torch_dataset
from asyncfetch.formats import Field
from asyncfetch.lerobot.samples import SampleBuilder
from asyncfetch.runtime.memory_pool import MemoryPool
from asyncfetch.runtime.shared_memory import MAX_VIEWS, MemorySlots
from asyncfetch.stream import Placement, handing_over, passes
from asyncfetch.stream.batch import BatchRow, Layout, PooledMemory, Room, RowBatch, Rows
from asyncfetch.stream.epoch_stream import source_of
from asyncfetch.stream.handing_over import HandedOver, SlotMemory
from asyncfetch.testing import DatasetTruth, write_dataset
from asyncfetch.testing.truth import EXTRAS, SNAPSHOT
from tests.conftest import all_others_wait

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from asyncfetch.stream.decode_jobs import DecodeJob

pytestmark = [
    pytest.mark.usefixtures("programs_are_warm"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning", "ignore:This DataLoader will create"),
]
SIZE = 4
STEPS = 2000
TOP, WRIST = "observation.images.top", "observation.images.wrist"
CONFIG: dict[str, Any] = {"pool_segments": 4}


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> DatasetTruth:
    """With a value of every kind: pictures in a table, depth, strings, a grid."""
    root = tmp_path_factory.mktemp("data") / "rich"
    return write_dataset(root, episodes=(7, 9, 1, 6), width=64, height=96, cameras=[TOP], extras=EXTRAS)


def together(samples: Iterable[Any], size: int) -> Iterator[dict[str, Any]]:
    """Batches of a stream's samples, one by one as ever."""
    taken = iter(samples)
    while some := list(itertools.islice(taken, size)):
        yield af.torch.collate(some)


def assert_alike(one: Any, other: Any) -> None:  # noqa: ANN401
    """The same keys in one order, dtypes, shapes and values."""
    assert list(one) == list(other)
    for key, value in one.items():
        if isinstance(value, torch.Tensor):
            assert (value.dtype, value.shape) == (other[key].dtype, other[key].shape), key
            assert torch.equal(value, other[key]), key
        else:
            assert value == other[key], key


def no_collate(_: Any) -> None:  # noqa: ANN401
    raise AssertionError("samples were copied together")


WINDOWS = {TOP: af.frames(-1, 0), "action": af.frames(0, 1, 2), "observation.note": af.frames(0, 1)}


@pytest.mark.parametrize("image_dtype", ["uint8", "float32"])
@pytest.mark.parametrize("windows", [None, WINDOWS, {key: af.frames(0) for key in (TOP, *EXTRAS)}])
@pytest.mark.parametrize("ends", ["uneven", "pad"])
def test_a_batch_is_what_collate_makes_of_the_samples(
    rich: DatasetTruth,
    monkeypatch: pytest.MonkeyPatch,
    image_dtype: Any,  # noqa: ANN401
    windows: Any,  # noqa: ANN401
    ends: Any,  # noqa: ANN401
) -> None:
    config = af.StreamConfig(uneven_ends=ends, **CONFIG)
    stream = af.Stream(str(rich.root), image_dtype=image_dtype, windows=windows, config=config)
    expected = list(
        together(source_of(stream).iterate(Placement(1, 2, batch_size=SIZE, drop_last=False), epoch=0), SIZE)
    )
    dataset = af.torch.StreamDataset(stream, SIZE)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch_dataset, "collate", no_collate)
    given = list(dataset)
    assert len(given) == len(expected)
    for batch, like in zip(given, expected, strict=True):
        assert_alike(batch, like)
        assert batch[TOP].movedim(-3, -1).is_contiguous()  # channels last in memory
    assert ("is_padding" in given[0]) == (ends == "pad")
    stream.close()


@pytest.mark.parametrize("missing", ["keep", "pad", "drop"])
@pytest.mark.parametrize("members", ["alike", "differ"])
def test_so_it_is_of_a_mixture(
    rich: DatasetTruth,
    truth: DatasetTruth,
    monkeypatch: pytest.MonkeyPatch,
    missing: Any,  # noqa: ANN401
    members: str,
) -> None:
    features = (
        [TOP, "action", "observation.images.snapshot"] if members == "differ" else ["action", "observation.state"]
    )
    streams = [
        af.Stream(str(rich.root), features=features),
        af.Stream(str(truth.root), features=[key for key in features if key != SNAPSHOT]),
    ]
    keys = [{"action": "moves"}, {"action": "moves"}]
    mixed = af.Mixture(
        streams, [1, 1], keys=keys, missing=missing, stop_on="all", config=af.StreamConfig(uneven_ends="pad", **CONFIG)
    )
    samples = source_of(mixed).iterate(Placement(batch_size=SIZE), epoch=0)
    expected: list[list[Any]] = []
    number = -1
    for sample in samples:
        batch = samples.plan.batch_of(samples.latest.number)
        if len(expected) == 0 or len(expected[-1]) == SIZE or batch != number:
            expected.append([])
        expected[-1].append(sample)
        number = batch
    monkeypatch.setattr(torch_dataset, "collate", no_collate)
    given = list(af.torch.StreamDataset(mixed, SIZE))
    assert len(given) == len(expected)
    for batch, some in zip(given, expected, strict=True):
        assert_alike(batch, af.torch.collate(some))
    mixed.close()


def test_key_may_be_a_picture_here_and_numbers_in_another_member(tmp_path: Path) -> None:
    for name, camera in (("pictures", TOP), ("numbers", WRIST)):
        write_dataset(tmp_path / name, episodes=(6, 5), width=64, height=64, cameras=[camera])
    (path,) = (tmp_path / "numbers/data").rglob("*.parquet")
    table = pq.read_table(path)
    numbers = [np.full(3 * 64 * 64, row, np.uint8) for row in range(len(table))]
    pq.write_table(table.append_column(TOP, pa.array(numbers, pa.list_(pa.uint8()))), path)
    info = tmp_path / "numbers/meta/info.json"
    said = json.loads(info.read_text())
    said["features"][TOP] = {"dtype": "uint8", "shape": [3, 64, 64], "names": None}
    info.write_text(json.dumps(said))
    streams = [af.Stream(str(tmp_path / name), features=[TOP]) for name in ("pictures", "numbers")]
    mixed = af.Mixture(streams, [1, 1], config=af.StreamConfig(**CONFIG))
    expected = list(together(source_of(mixed).iterate(Placement(), epoch=0), SIZE))
    for batch, like in zip(af.torch.StreamDataset(mixed, SIZE), expected, strict=True):
        assert_alike(batch, like)
    mixed.close()


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_samples_that_are_left_out_or_replaced_shift_the_others(
    tmp_path: Path,
    on_error: Any,  # noqa: ANN401
) -> None:
    write_dataset(tmp_path, episodes=(5, 9, 1, 12, 7, 3), width=64, height=64, episodes_per_video_file=1)
    next((tmp_path / f"videos/{TOP}").glob("*/file-003.mp4")).unlink()
    stream = af.Stream(str(tmp_path), config=af.StreamConfig(on_error=on_error, **CONFIG))
    expected = list(together(source_of(stream).iterate(Placement(), epoch=0), SIZE))
    given = list(af.torch.StreamDataset(stream, SIZE))
    assert len(given) == len(expected)
    for batch, like in zip(given, expected, strict=True):
        assert_alike(batch, like)
    stream.close()


def test_a_transform_gets_single_samples(truth: DatasetTruth) -> None:
    def brighter(sample: dict[str, Any]) -> dict[str, Any]:
        return {"mean": sample[TOP].float().mean(), "index": sample["index"]}

    stream = af.Stream(str(truth.root), transform=brighter, config=af.StreamConfig(**CONFIG))
    expected = list(together(source_of(stream).iterate(Placement(), epoch=0), SIZE))
    for batch, like in zip(af.torch.StreamDataset(stream, SIZE), expected, strict=True):
        assert_alike(batch, like)
    stream.close()


def test_pictures_unlike_their_metadata_are_stacked_apart(tmp_path: Path) -> None:
    """Height and width are in either order in info.json."""
    info = write_dataset(tmp_path, episodes=(6, 5), width=64, height=96, cameras=[TOP]).root / "meta/info.json"
    text = info.read_text()
    info.write_text(text.replace("96,", "SIDE,").replace("64,", "96,").replace("SIDE,", "64,"))
    assert info.read_text() != text
    stream = af.Stream(str(tmp_path), config=af.StreamConfig(**CONFIG))
    expected = list(together(source_of(stream).iterate(Placement(), epoch=0), SIZE))
    given = list(af.torch.StreamDataset(stream, SIZE))
    assert given[0][TOP].shape == (SIZE, 3, 96, 64)
    for batch, like in zip(given, expected, strict=True):
        assert_alike(batch, like)
    stream.close()


def test_held_batch_is_never_written_to(truth: DatasetTruth) -> None:
    """Whole batches, slices, pickles and what other threads have, beyond the epoch and the stream, too."""
    stream = af.Stream(str(truth.root), config=af.StreamConfig(**CONFIG))
    held: list[Any] = []
    sent: list[Any] = []

    def keep_in_thread(batch: Any) -> None:  # noqa: ANN401
        sent.append(batch[TOP][-1:])

    expected = []
    dataset = af.torch.StreamDataset(stream, SIZE)
    for epoch in range(5):
        for batch in dataset:
            expected.append(copy.deepcopy(batch))
            other = threading.Thread(target=keep_in_thread, args=(batch,))
            other.start()
            other.join()
            file = io.BytesIO()
            torch.save(batch[WRIST], file)
            held.append((batch if epoch == 2 else batch[WRIST][1:3], pickle.dumps(batch[TOP]), file))
    stream.close()
    del batch
    gc.collect()
    for like, (kept, pickled, file), last in zip(expected, held, sent, strict=True):
        if isinstance(kept, dict):
            assert_alike(kept, like)
        else:
            assert torch.equal(kept, like[WRIST][1:3])
        assert torch.equal(pickle.loads(pickled), like[TOP])
        file.seek(0)
        assert torch.equal(torch.load(file), like[WRIST])
        assert torch.equal(last, like[TOP][-1:])


@pytest.mark.slow
def test_memory_is_reused_and_flat_if_every_tenth_batch_is_kept(truth: DatasetTruth) -> None:
    stream = af.Stream(str(truth.root), features=[TOP], config=af.StreamConfig(**CONFIG))
    dataset = af.torch.StreamDataset(stream, 6, drop_last=True)
    kept: deque[Any] = deque(maxlen=4)
    seen: set[int] = set()
    resident = []
    batches = itertools.chain.from_iterable(itertools.repeat(dataset))
    for step, batch in enumerate(itertools.islice(batches, STEPS)):
        seen.add(batch[TOP].data_ptr())
        if step % 10 == 0:
            kept.append(batch)
        if step in {STEPS // 2, STEPS - 1}:
            gc.collect()
            resident.append(psutil.Process().memory_info().rss)
    assert len(seen) < 40
    assert resident[1] - resident[0] < 16 * 2**20
    stream.close()


async def test_rows_of_pictures_are_decoded_ahead_in_most_of_the_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else threads would have nothing to do at the end of each turn of the pool."""
    write_dataset(tmp_path, episodes=(40, 40, 40, 40), width=64, height=64, cameras=[TOP], distinct_videos=1)
    sample_bytes = 64 * 64 * 3 + 200
    monkeypatch.setattr(passes, "JOB_BYTES", 8 * sample_bytes)
    started: list[int] = []
    rows_of = Rows.of

    def of(rows: Rows, job: DecodeJob) -> Any:  # noqa: ANN401
        started.extend(step.number for step in job.steps)
        return rows_of(rows, job)

    monkeypatch.setattr(Rows, "of", of)
    config = af.StreamConfig(decode_threads=1, decoded_max_bytes=64 * sample_bytes, **CONFIG)
    stream = af.Stream(str(tmp_path), features=[TOP], config=config)
    samples = source_of(stream).samples_of(
        Placement(batch_size=SIZE, drop_last=False), memory=PooledMemory(MemoryPool(1 << 20))
    )
    async with samples as taken:
        await anext(taken)
        await all_others_wait()
        assert 64 * 5 // 8 <= max(started) < 64


def test_kept_actions_hold_no_memory_of_pictures(truth: DatasetTruth) -> None:
    stream = af.Stream(str(truth.root), config=af.StreamConfig(**CONFIG))
    batch = next(iter(af.torch.StreamDataset(stream, SIZE)))
    assert batch["action"].untyped_storage().nbytes() == batch["action"].nbytes
    assert batch[TOP].untyped_storage().nbytes() == batch[TOP].nbytes
    stream.close()


def loader_of(stream: af.Stream, size: int, **options: Any) -> DataLoader[Any]:  # noqa: ANN401
    return DataLoader(af.torch.StreamDataset(stream, size), batch_size=None, **options)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_hand_over_what_one_process_makes(rich: DatasetTruth, start: str) -> None:
    stream = af.Stream(str(rich.root), windows=WINDOWS, config=af.StreamConfig(**CONFIG))
    expected = list(together(source_of(stream).iterate(Placement(), epoch=0), SIZE))
    loader = loader_of(stream, SIZE, num_workers=2, multiprocessing_context=start, persistent_workers=True)
    for epoch in range(2):
        given = list(loader)
        assert len(given) == len(expected)
        if epoch == 0:
            for batch, like in zip(given, expected, strict=True):
                assert type(batch) is dict
                assert_alike(batch, like)


@pytest.fixture
def no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of 64x64 come as large ones do."""
    monkeypatch.setattr(handing_over, "MAX_COPIED_BYTES", 1000)


@pytest.mark.usefixtures("no_copies")
def test_held_batch_of_a_worker_is_never_written_to(truth: DatasetTruth) -> None:
    """More of them than are views, slices and pickles, while the worker goes on and behind its end."""
    stream = af.Stream(str(truth.root), config=af.StreamConfig(**CONFIG))
    expected = list(together(source_of(stream).iterate(Placement(), epoch=0), 2))
    assert len(expected) > MAX_VIEWS + 3
    loader = loader_of(stream, 2, num_workers=1, multiprocessing_context="fork", persistent_workers=True)
    kept = list(loader)
    pickled = [pickle.dumps(batch) for batch in kept]
    slices = [batch[TOP][1:] for batch in loader]
    places = {batch[TOP].data_ptr() for _ in range(3) for batch in loader}
    assert len(places) < 3 * len(expected) / 2  # memory goes round
    del loader
    gc.collect()
    for batch, packed, like in zip(kept, pickled, expected, strict=True):
        assert_alike(batch, like)
        assert_alike(pickle.loads(packed), like)
    stream.set_epoch(1)
    for part, sample in zip(slices, together(stream, 2), strict=True):
        assert torch.equal(part, sample[TOP][1:])
    stream.close()


@contextmanager
def ways(stream: af.Stream | af.Mixture, way: str, size: int, **options: Any) -> Iterator[Iterable[Any]]:  # noqa: ANN401
    """Batches as a trainer gets them from another process."""
    if way == "served":
        with af.serve_samples(stream, size, **options) as batches:
            yield batches
    else:
        dataset = af.torch.StreamDataset(stream, size, **options)
        yield DataLoader(
            dataset, batch_size=None, num_workers=1, multiprocessing_context="fork", persistent_workers=True
        )


@pytest.mark.usefixtures("no_copies")
@pytest.mark.parametrize("way", ["worker", "served"])
def test_forked_child_sees_held_memory_and_takes_one_piece(truth: DatasetTruth, way: str) -> None:
    stream = af.Stream(str(truth.root), config=af.StreamConfig(**CONFIG))
    slots = []
    with ways(stream, way, 2) as batches:
        passes = itertools.chain.from_iterable(itertools.repeat(batches))
        for _ in range(4):
            batch = next(passes)
            like = copy.deepcopy(batch)
            go, told = os.pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    assert_alike(batch, like)
                    os.read(go, 1)
                    assert_alike(batch, like)
                    os._exit(0)
                finally:
                    os._exit(1)
            del batch
            for _ in range(truth.num_frames // 2):  # all memory goes round
                next(passes)
            slots.append(mapped_slots())
            os.write(told, b"!")
            os.close(told)
            os.close(go)
            assert os.waitpid(pid, 0)[1] == 0
    assert slots[-1] <= slots[0] + 1


def _without_a_camera(batch: dict[str, Any]) -> dict[str, Any]:
    assert_alike(pickle.loads(pickle.dumps(batch)), batch)
    assert_alike(copy.deepcopy(batch), batch)
    return {key: value for key, value in batch.items() if key != WRIST} | {"twice": batch[TOP] * 2}


def _marked(batch: dict[str, Any]) -> dict[str, Any]:
    batch["mark"], batch[TOP] = torch.arange(3), batch[TOP][:, :1]
    batch[WRIST].zero_()
    return batch


@pytest.mark.parametrize("collate_fn", [_without_a_camera, _marked])
def test_a_worker_may_change_a_batch_or_make_another_of_it(truth: DatasetTruth, collate_fn: Any) -> None:  # noqa: ANN401
    stream = af.Stream(str(truth.root), config=af.StreamConfig(**CONFIG))
    expected = [collate_fn(batch) for batch in together(source_of(stream).iterate(Placement(), epoch=0), SIZE)]
    loader = loader_of(stream, SIZE, num_workers=1, multiprocessing_context="fork", collate_fn=collate_fn)
    for batch, like in zip(loader, expected, strict=True):
        assert_alike(batch, like)
    stream.close()


def test_memory_that_is_too_small_by_now_is_kept_by_neither_side() -> None:
    """As where batches of a mixture are of one member, and come to a larger one."""
    memory = SlotMemory(MemorySlots())

    def hand_over(nbytes: int) -> Any:  # noqa: ANN401
        room = memory.take([nbytes])
        batch = HandedOver(x=torch.from_numpy(room.arrays[0]))
        batch.slots, batch.slot = memory.slots, room.slot
        return pickle.loads(ForkingPickler.dumps(batch))["x"]

    before = mapped_slots()
    held = hand_over(100_000)
    for nbytes in (100_000, 200_000, 300_000, 400_000):
        assert hand_over(nbytes).nbytes == nbytes
    assert mapped_slots() - before <= 2 * 3  # on both sides: what is held, the latest, and the one before
    del held


def test_kept_actions_of_a_worker_hold_no_memory_of_pictures(truth: DatasetTruth) -> None:
    stream = af.Stream(str(truth.root), config=af.StreamConfig(**CONFIG))
    batch = next(iter(loader_of(stream, SIZE, num_workers=1, multiprocessing_context="fork")))
    assert batch["action"].untyped_storage().nbytes() == batch["action"].nbytes


def named_by(pids: list[int]) -> list[str]:
    """Files in shared memory that have one of the numbers in their name, as torch's have."""
    return [name for name in os.listdir("/dev/shm") if any(str(pid) in name.split("_") for pid in pids)]


def mapped_slots() -> int:
    with open("/proc/self/maps") as maps:
        return sum("asyncfetch-batch" in line for line in maps)


@pytest.mark.usefixtures("no_copies")
def test_killed_workers_leave_nothing_but_what_is_held(truth: DatasetTruth) -> None:
    stream = af.Stream(str(truth.root), config=af.StreamConfig(**CONFIG))
    batches = iter(loader_of(stream, SIZE, num_workers=2, multiprocessing_context="fork"))
    held = next(batches)
    like = copy.deepcopy(held)
    workers = multiprocessing.active_children()
    for worker in workers:
        worker.kill()
        worker.join()
    with pytest.raises(RuntimeError, match="worker"):
        list(batches)
    assert_alike(held, like)
    assert mapped_slots()
    del held, batches
    gc.collect()
    assert not mapped_slots()
    assert not named_by([os.getpid(), *(worker.pid or 0 for worker in workers)])


def test_a_killed_trainer_leaves_nothing(truth: DatasetTruth) -> None:
    code = """if True:
        import os, signal, sys, multiprocessing
        from torch.utils.data import DataLoader
        import asyncfetch as af
        stream = af.Stream(sys.argv[1])
        loader = DataLoader(af.torch.StreamDataset(stream, 2), batch_size=None, num_workers=2)
        batches = iter(loader)
        held = [next(batches), next(batches)]
        print(*[child.pid for child in multiprocessing.active_children()], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, str(truth.root)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        workers = [int(pid) for pid in process.stdout.readline().split()]
        assert len(workers) == 2
        process.wait()
        _, alive = psutil.wait_procs([psutil.Process(pid) for pid in workers if psutil.pid_exists(pid)], timeout=30)
    assert not alive
    assert not named_by([process.pid, *workers])
    with open("/proc/net/unix") as sockets:
        assert f"-{process.pid}-" not in sockets.read()  # that by which its workers found each other


class _Locked(np.ndarray[Any, Any]):
    """Memory of ``Pinning``."""


class Pinning:
    """Stands for CUDA's allocator in torch where there is no GPU: what comes back is handed out again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.locked = 0
        """Blocks that were locked."""
        self._idle: Counter[int] = Counter()
        self._out: dict[int, weakref.ref[Any]] = {}
        self._empty = torch.empty
        monkeypatch.setattr(torch, "empty", self.empty)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: self.copy(tensor))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def empty(self, *shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:  # noqa: ANN401
        if not pin_memory:
            return self._empty(*shape, **options)
        (nbytes,) = shape
        self.locked += not self._idle[nbytes]
        self._idle[nbytes] = max(0, self._idle[nbytes] - 1)
        block = np.empty(nbytes, np.uint8).view(_Locked)
        tensor = torch.from_numpy(block)
        address = tensor.data_ptr()

        def come_back(_: object) -> None:
            del self._out[address]
            self._idle[nbytes] += 1

        self._out[address] = weakref.ref(block, come_back)
        return tensor

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        twin = self.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=True).view(tensor.dtype).view(tensor.shape)
        return twin.copy_(tensor)

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._out


def _as_it_is(sample: dict[str, Any]) -> dict[str, Any]:
    return sample


@pytest.mark.parametrize("transform", [None, _as_it_is], ids=["rows", "copied"])
def test_pinned_memory_is_torchs_own_and_locked_once(
    truth: DatasetTruth,
    monkeypatch: pytest.MonkeyPatch,
    transform: Any,  # noqa: ANN401
) -> None:
    """Torch knows when a copy to a device has read it, too."""
    stream = af.Stream(str(truth.root), transform=transform, config=af.StreamConfig(**CONFIG))
    expected = list(together(source_of(stream).iterate(Placement(), epoch=0), SIZE))
    pinning = None if torch.cuda.is_available() else Pinning(monkeypatch)
    dataset = af.torch.StreamDataset(stream, SIZE, pin_memory=True)
    for epoch in range(6):
        for number, batch in enumerate(dataset):
            tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
            assert all(value.is_pinned() if pinning is None else pinning.has(value) for value in tensors)
            if epoch == 0:
                assert_alike(batch, expected[number])
    if pinning is not None:
        assert pinning.locked <= (len(expected) + 3) * len(tensors)  # not six times as many
    stream.close()


def test_a_batch_may_be_larger_than_what_there_is(truth: DatasetTruth) -> None:
    stream = af.Stream(str(truth.root), config=af.StreamConfig(**CONFIG))
    (batch,) = af.torch.StreamDataset(stream, 10**9)
    assert batch[TOP].shape == (truth.num_frames, 3, 64, 64)
    stream.close()


def test_memory_plan_of_a_rank_is_known_before(truth: DatasetTruth) -> None:
    mib = 2**20
    stream = af.Stream(str(truth.root), config=af.StreamConfig(max_bytes=100 * mib, decoded_max_bytes=50 * mib))
    alone, batches, workers = (
        stream.memory_plan(),
        stream.memory_plan(128),
        stream.memory_plan(128, num_workers=2),
    )
    assert (alone.clips, alone.decoded, alone.batches, alone.workers, alone.total) == (100, 50, 0, 0, 150)
    picture_mib = 64 * 64 * 3 / mib
    assert batches.batches == pytest.approx(3 * 128 * 2 * picture_mib, rel=0.1)  # two cameras
    assert workers.batches == pytest.approx(batches.batches * 5 / 3)
    assert workers.workers > 2 * 2 * 128 * 2 * picture_mib
    served = [af.serve_samples(stream, 128, max_ahead=9, max_ahead_bytes=most).memory_plan() for most in (9 * mib, 1)]
    assert served[0].batches == batches.batches
    a_batch = batches.batches / 3
    assert served[0].workers - served[1].workers == 9 - a_batch  # one goes, whatever its size
    for wrong in ({"batch_size": 0}, {"num_workers": -1}, {"num_workers": 1.5}):
        with pytest.raises(af.ConfigError, match=f"{next(iter(wrong))} must be a whole number"):
            stream.memory_plan(**wrong)
    stream.close()


@pytest.mark.usefixtures("no_copies")
def test_workers_forked_after_a_pass_have_memory_of_their_own(truth: DatasetTruth) -> None:
    stream = af.Stream(str(truth.root), config=af.StreamConfig(**CONFIG))
    dataset = af.torch.StreamDataset(stream, SIZE)
    here, before = next(iter(dataset)), mapped_slots()
    loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="fork")
    there = next(iter(loader))
    assert mapped_slots() > before
    assert_alike(there, here)
    stream.close()


def test_a_copy_of_a_row_holds_no_other_rows() -> None:
    """As it stands for a bad sample: of a tensor on memory of torch's own, too, which knows no part of it."""
    layout = Layout({TOP: Field("uint8", (3, 64, 64)), "task": Field("string")}, frozenset({TOP}))

    class TorchsMemory:
        def take(self, nbytes: Sequence[int]) -> Room:
            tensors = [torch.empty(each, dtype=torch.uint8) for each in nbytes]
            return Room([tensor.numpy() for tensor in tensors], tensors=tensors)

    row = BatchRow(RowBatch(layout, SIZE, TorchsMemory()), 2)
    row.at(TOP)[:] = np.arange(64 * 64 * 3, dtype=np.uint8).reshape(64, 64, 3)
    row.put("task", "pick")
    twin: Any = copy.deepcopy(row)
    assert_alike(twin, row.sample())
    assert twin[TOP].untyped_storage().nbytes() == twin[TOP].nbytes


class Counting(PooledMemory):
    """Knows how much is in use: of it, and of what else was counted."""

    def __init__(self) -> None:
        super().__init__(MemoryPool(0))
        self.in_use = self.most = 0

    def take(self, nbytes: Sequence[int]) -> Room:
        room = super().take(nbytes)
        for array in room.arrays:
            self.count(array)
        return room

    def count(self, owner: Any) -> None:  # noqa: ANN401
        self.in_use += owner.nbytes
        self.most = max(self.most, self.in_use)
        weakref.finalize(owner, self.give_back, owner.nbytes)

    def give_back(self, nbytes: int) -> None:
        self.in_use -= nbytes


@pytest.mark.parametrize("left_out", [(), (2, 5, 9), range(1, 24, 2)])
def test_memory_holds_its_bound_where_samples_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_out: Sequence[int]
) -> None:
    """Each moves those behind it up by one, which lie in other batches than before then."""
    size, sample_bytes = 32, 64 * 64 * 3 + 200
    write_dataset(
        tmp_path, episodes=24, width=64, height=64, cameras=[TOP], gop=4, episodes_per_video_file=1, distinct_videos=1
    )
    for episode in left_out:
        next((tmp_path / f"videos/{TOP}").glob(f"*/file-{episode:03d}.mp4")).unlink()
    monkeypatch.setattr(passes, "JOB_BYTES", 8 * sample_bytes)
    memory = Counting()

    def build(builder: SampleBuilder, asked: Any) -> Any:  # noqa: ANN401
        samples = build_samples(builder, asked)
        for sample in samples:
            memory.count(sample[TOP])
        return samples

    def collate(samples: Any) -> Any:  # noqa: ANN401
        batch = af.torch.collate(samples)
        memory.count(batch[TOP])
        return batch

    build_samples = SampleBuilder.build
    monkeypatch.setattr(SampleBuilder, "build", build)
    monkeypatch.setattr(torch_dataset, "collate", collate)
    monkeypatch.setattr(torch_dataset, "PooledMemory", lambda _: memory)
    config = af.StreamConfig(on_error="skip", decoded_max_bytes=96 * sample_bytes, **CONFIG)
    stream = af.Stream(str(tmp_path), features=[TOP], config=config)
    plan = stream.memory_plan(size)
    lengths = [len(batch["index"]) for batch in af.torch.StreamDataset(stream, size)]
    assert sum(lengths) == 20 * (24 - len(left_out))
    assert set(lengths[:-1]) == {size}
    assert memory.most <= (plan.decoded + plan.batches) * 2**20
    stream.close()
