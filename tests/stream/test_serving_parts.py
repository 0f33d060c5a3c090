"""What the serving of samples is made of, without a second process."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import asyncfetch as af
from asyncfetch.runtime.shared_memory import MemorySlots, SharedBytes, view_of
from asyncfetch.stream import handing_over
from asyncfetch.stream.handing_over import PackedBatch, stacks
from asyncfetch.stream.serving.messages import Channel, failure

if TYPE_CHECKING:
    from collections.abc import Iterator


def there_and_back(batch: object) -> Any:  # noqa: ANN401
    """What the other process gets."""
    in_slot, by_value = (sent(PackedBatch(batch), slots) for slots in (MemorySlots(), None))
    assert equal(in_slot, by_value)
    return in_slot


def sent(packed: PackedBatch, slots: MemorySlots | None) -> Any:  # noqa: ANN401
    return pickle.loads(ForkingPickler.dumps(packed.written(slots)))


def equal(one: Any, other: Any) -> bool:  # noqa: ANN401
    """Also in type, dtype and shape."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return type(other) is list and len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, Special):
        return equal(vars(one), vars(other))
    return type(one) is type(other) and bool(one == other)


SAMPLES: list[list[Any]] = [
    [{"image": torch.arange(6).reshape(1, 2, 3), "task": "a"}, {"image": torch.ones(1, 2, 3).long(), "task": "b"}],
    [{"x": torch.tensor(1.5)}, {"x": torch.tensor(2.5)}, {"x": torch.tensor(-1.0)}],
    [{"x": torch.zeros(0, 3)}, {"x": torch.ones(0, 3)}],
    [{"x": torch.ones(2)}, {"x": torch.ones(3)}],
    [{"x": torch.ones(2)}, {"x": torch.ones(2).int()}],
    [{"x": torch.ones(2)}, {"x": "no tensor"}],
    [{"x": 1, "y": [torch.ones(1)]}, {"x": 2.5, "y": [torch.ones(1), torch.ones(2)]}],
    [{"x": 1, "y": None}, {"y": True}],
    [{"x": torch.arange(12).reshape(3, 4).T}, {"x": torch.arange(12).reshape(3, 4).T}],
    [{"x": torch.ones(2, requires_grad=True)}, {"x": torch.zeros(2)}],
    [{"x": torch.ones(2)}],
    [{}, {}],
]


@pytest.mark.parametrize("samples", SAMPLES, ids=range(len(SAMPLES)))
def test_a_batch_is_as_our_loader_collates_it(samples: list[Any]) -> None:
    assert equal(there_and_back(stacks(samples)), af.torch.collate(samples))


def test_samples_that_are_no_mappings_become_a_list() -> None:
    assert equal(there_and_back(stacks([torch.ones(2), None, "x"])), [torch.ones(2), None, "x"])


DTYPES = [torch.bfloat16, torch.float16, torch.bool, torch.complex64, torch.uint16, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_any_dtype_come_back_as_they_were(dtype: torch.dtype) -> None:
    tensors = [torch.arange(6).to(dtype).reshape(2, 3), torch.zeros(2, 3).to(dtype)]
    back = there_and_back(stacks([{"x": tensor} for tensor in tensors]))["x"]
    assert (back.dtype, back.shape) == (dtype, (2, 2, 3))
    assert back.view(torch.uint8).tolist() == torch.stack(tensors).view(torch.uint8).tolist()


@dataclass
class Special:
    """A user's own."""

    tensor: torch.Tensor
    name: str


def test_tensors_within_other_values_arrive_too() -> None:
    special = Special(torch.arange(3), "a")
    back = there_and_back(stacks([{"y": special}, {"y": special}]))
    assert [one.name for one in back["y"]] == ["a", "a"]
    assert torch.equal(back["y"][1].tensor, special.tensor)


def test_a_single_sample_comes_back_as_it_is() -> None:
    sample: dict[str, Any] = {
        "image": torch.rand(3, 4),
        "index": torch.tensor(7),
        "n": 3,
        "task": "x",
        "array": np.arange(3),
    }
    back = there_and_back(sample)
    assert torch.equal(back.pop("image"), sample.pop("image"))
    assert back.pop("index").shape == ()
    assert back.pop("array").tolist() == [0, 1, 2]
    assert back == {"n": 3, "task": "x"}


def test_tensors_are_views_of_the_memory_and_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handing_over, "MAX_COPIED_BYTES", 0)
    slots = MemorySlots()
    batch = sent(PackedBatch(stacks([{"x": torch.tensor([1.0])}, {"x": torch.tensor([2.0])}])), slots)
    batch["x"][0] = 5  # it may be written to
    view = batch["x"][1:]
    del batch
    other, _ = slots.take(1000)
    assert view.tolist() == [[2]]
    del view
    slot, memory = slots.take(1000)
    assert slot is not other
    assert memory[64:68].view(np.float32).tolist() == [5]


def test_a_batch_without_large_tensors_frees_its_memory_at_once() -> None:
    slots = MemorySlots()
    for _ in range(3):
        assert sent(PackedBatch(["a", torch.ones(3)]), slots)[0] == "a"
    assert slots.take(1)[0].number == 1


@pytest.mark.parametrize("tensor", [torch.ones(2).to_sparse(), torch.ones(2, device="meta")], ids=["sparse", "meta"])
def test_a_tensor_that_is_not_in_memory_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(af.ConfigError, match="dense tensors on the CPU"):
        PackedBatch(stacks([{"x": tensor}, {"x": tensor}]))


def test_a_value_that_can_not_be_handed_over_is_refused() -> None:
    with pytest.raises(af.ConfigError, match="transform return tensors"):
        PackedBatch({"x": iter([])} | {"y": (number for number in [1])})


# Slots.


def test_slot_is_reused_and_a_larger_batch_replaces_free_ones() -> None:
    slots = MemorySlots()
    first, view = slots.take(100_000)
    second, other_view = slots.take(100_000)
    assert first.number != second.number
    del view, other_view, first
    again, view = slots.take(90_000)
    assert again is second
    before = os.listdir("/proc/self/fd")
    larger, larger_view = slots.take(200_000)
    assert larger.memory.nbytes >= 200_000
    assert len(os.listdir("/proc/self/fd")) == len(before)  # those of the first one are closed
    del view, larger_view
    assert slots.take(10)[0] is larger  # a batch at the end of an epoch is smaller


def test_slot_handed_over_is_its_readers_until_its_last_view() -> None:
    slots = MemorySlots()
    slot, view = slots.take(5000)
    view[70] = 42
    name = slots.hand_over(slot)
    assert name is not None
    assert slots.hand_over(slot) is None
    there = view_of(name)
    del view
    assert there[70] == 42
    other, _ = slots.take(5000)
    assert other is not slot
    part = there[70:]
    del there, _
    assert [slots.take(5000)[0] for _ in range(3)] == [other] * 3
    del part
    assert slots.take(5000)[0] is slot


def test_slot_of_an_ended_process_is_an_error_that_names_it() -> None:
    slots = MemorySlots()
    name = slots.hand_over(slots.take(5000)[0])
    assert name is not None
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with pytest.raises(af.WorkerError, match=rf"pid {ended.pid}\) has ended"):
        view_of(name._replace(pid=ended.pid))
    with pytest.raises(af.WorkerError, match="another one by now"):
        view_of(name._replace(token=bytes(16)))


@pytest.mark.alone
def test_shared_memory_has_no_name() -> None:
    before = set(os.listdir("/dev/shm"))
    slots, shared = MemorySlots(), SharedBytes(5000)
    slots.take(5000)
    assert shared.memory.nbytes == 5000
    assert set(os.listdir("/dev/shm")) == before


def test_lack_of_memory_is_an_error_and_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(af.WorkerError, match=r"no 1\d\d,\d* bytes .* lower batch_size or max_ahead"):
        MemorySlots().take(100_000)
    assert os.listdir("/proc/self/fd") == before


# The channel.


def interrupt() -> None:
    raise KeyboardInterrupt


class Interrupts:
    """Interrupts whoever receives it."""

    def __reduce__(self) -> Any:  # noqa: ANN401
        return interrupt, ()


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    """Both ends in this process; its parent stands for the other one."""
    ends = [Channel(connection, os.getppid()) for connection in multiprocessing.Pipe()]
    yield ends[0], ends[1]
    for end in ends:
        end.close()


def test_messages_arrive_in_order(channels: tuple[Channel, Channel]) -> None:
    here, there = channels
    said = ["one", Special(torch.arange(3), "two"), "three"]
    for message in said:
        here.send(message)
    assert equal([there.receive() for _ in said], said)


def test_messages_before_the_end_are_received_first(channels: tuple[Channel, Channel]) -> None:
    here, there = channels
    here.send("last")
    here.close()
    here.close()
    here.send("too late")
    assert there.receive() == "last"
    for _ in range(2):
        with pytest.raises(EOFError):
            there.receive()
    there.send("to nobody")


def test_batch_of_an_ended_process_leaves_the_channel_open(
    channels: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = channels
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 2**22)
        here.send(PackedBatch(["a"]).written(MemorySlots()))
    with pytest.raises(af.WorkerError, match="has ended"):
        there.receive()
    assert not there.is_closed


def test_end_of_the_other_process_is_seen_beside_its_connection() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    connection, copy = multiprocessing.Pipe()
    channel = Channel(connection, child.pid)
    with pytest.raises(EOFError):
        channel.receive()
    channel.close()
    copy.close()
    child.wait()


def test_interrupt_in_the_middle_of_a_message_closes_the_channel(channels: tuple[Channel, Channel]) -> None:
    here, there = channels
    here.send(Interrupts())
    with pytest.raises(KeyboardInterrupt):
        there.receive()
    assert there.is_closed
    with pytest.raises(EOFError):
        there.receive()


# Errors.


class Unpicklable(Exception):
    """Pickles, but not back."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def raised(error: BaseException) -> BaseException:
    """As it arrives."""
    with pytest.raises(type(error)) as caught:
        raise error
    with pytest.raises(BaseException) as arrived:  # noqa: PT011  of whatever type
        failure(1, caught.value).raise_it()
    return arrived.value


def test_our_errors_arrive_whole() -> None:
    error = raised(af.NotFound("it isn't there", url="https://host/x", status=404))
    assert isinstance(error, af.NotFound)
    assert (error.url, error.status) == ("https://host/x", 404)


@pytest.mark.parametrize("error", [ValueError("mine"), KeyError("k"), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_foreign_errors_arrive_unchanged_with_their_traceback(error: BaseException) -> None:
    arrived = raised(error)
    assert type(arrived) is type(error)
    assert arrived.args == error.args
    assert "in raised" in arrived.__notes__[0]


@pytest.mark.parametrize("error", [Unpicklable(1, 2), ValueError(lambda: 0)], ids=["not back", "not at all"])
def test_error_that_does_not_pickle_arrives_as_text(error: Exception) -> None:
    arrived = raised(error)
    assert type(arrived) is af.WorkerError
    assert f"{type(error).__name__} in the process" in str(arrived)
    assert "in raised" in str(arrived)
    assert str(error) in str(arrived)
    pickle.loads(pickle.dumps(arrived))
