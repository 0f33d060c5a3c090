"""serve_samples with a real process: same order, same state, and no process that outlives its reason."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader

import asyncfetch as af
from asyncfetch.order.state import beginning, identity_of
from asyncfetch.stream import Placement, handing_over
from asyncfetch.stream.epoch_stream import source_of
from asyncfetch.testing import read_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from asyncfetch.testing import DatasetTruth

pytestmark = pytest.mark.usefixtures("programs_are_warm")

CONFIG = af.StreamConfig(pool_segments=2, prefetch_segments=1, decode_threads=1, group_frames=2)


def stream_of(truth: DatasetTruth, **options: Any) -> af.Stream:  # noqa: ANN401
    return af.Stream(str(truth.root), **{"config": CONFIG, "features": ["action"], **options})


def indices(batches: Any) -> list[int]:  # noqa: ANN401
    return [index for batch in batches for index in batch["index"].tolist()]


def alone(truth: DatasetTruth, epoch: int, **options: Any) -> list[int]:  # noqa: ANN401
    """The order of the stream itself."""
    stream = stream_of(truth, **options)
    stream.set_epoch(epoch)
    order = [int(sample["index"]) for sample in stream]
    stream.close()
    return order


# What it gives. One process serves all of these tests: whatever one of them leaves must not harm the next.


@pytest.fixture(scope="module")
def served(truth: DatasetTruth) -> Iterator[tuple[af.Stream, af.ServedBatches]]:
    stream = stream_of(truth, features=None)
    with af.serve_samples(stream, 4) as batches:
        yield stream, batches
    assert not psutil.pid_exists(batches.pid)


@pytest.fixture
def stream(served: tuple[af.Stream, af.ServedBatches]) -> af.Stream:
    served[0].set_epoch(0)
    return served[0]


@pytest.fixture
def no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors come as large ones do."""
    monkeypatch.setattr(handing_over, "MAX_COPIED_BYTES", 0)


@pytest.fixture
def batches(served: tuple[af.Stream, af.ServedBatches]) -> af.ServedBatches:
    return served[1]


def test_the_order_is_the_streams_epoch_after_epoch(
    truth: DatasetTruth, stream: af.Stream, batches: af.ServedBatches
) -> None:
    for epoch in range(2):
        assert stream.epoch == epoch
        assert indices(batches) == alone(truth, epoch, features=None)
    stream.set_epoch(5)
    assert indices(batches) == alone(truth, 5, features=None)


def test_a_batch_is_what_a_loader_makes(truth: DatasetTruth, stream: af.Stream, batches: af.ServedBatches) -> None:
    expected = DataLoader(af.torch.StreamDataset(stream_of(truth, features=None)), batch_size=4)
    for ours, theirs in zip(batches, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == theirs[key].dtype
                assert torch.equal(value, theirs[key]), key
            else:
                assert value == theirs[key]


def test_early_break_leaves_it_usable_and_repeats_the_epoch(
    truth: DatasetTruth, stream: af.Stream, batches: af.ServedBatches
) -> None:
    for taken in (1, 3, 2) * 4:
        for number, _ in enumerate(batches, 1):
            if number == taken:
                break
        assert stream.epoch == 0
    assert indices(batches) == alone(truth, 0)


@pytest.mark.usefixtures("no_copies")
def test_batches_that_are_kept_stay_what_they_are(
    truth: DatasetTruth, stream: af.Stream, batches: af.ServedBatches
) -> None:
    kept = list(batches)
    assert len(kept) > 10  # more than are views
    assert sorted(indices(batches)) == sorted(indices(kept))  # another epoch goes through the same memory
    for batch in kept:
        for number in range(len(batch["index"])):
            episode, frame = int(batch["episode_index"][number]), int(batch["frame_index"][number])
            for camera in truth.cameras:
                assert read_identity(batch[camera][number]) == truth.identity(episode, frame, camera)


@pytest.mark.usefixtures("no_copies")
def test_memory_goes_round(stream: af.Stream, batches: af.ServedBatches) -> None:
    """What is decoded ahead lies in batches already, so those of an epoch may be on their way together, and no more."""
    places = [batch["action"].data_ptr() for _ in range(6) for batch in batches]
    assert len(set(places)) < len(places) / 3


def test_a_later_iteration_ends_an_earlier_one(
    truth: DatasetTruth, stream: af.Stream, batches: af.ServedBatches
) -> None:
    first = iter(batches)
    next(first)
    second = iter(batches)
    head = next(second)
    with pytest.raises(af.ClosedError, match="later"):
        next(first)
    assert indices([head, *second]) == alone(truth, 0)


def test_statistics_are_those_of_the_process_which_is_not_asked(
    truth: DatasetTruth, stream: af.Stream, batches: af.ServedBatches
) -> None:
    assert stream.epoch == 0
    iterator = iter(batches)
    head = next(iterator)
    os.kill(batches.pid, signal.SIGSTOP)
    try:
        statistics = batches.statistics()
    finally:
        os.kill(batches.pid, signal.SIGCONT)
    assert statistics is not None
    assert statistics.fetch.requests > 0
    assert statistics.decode.threads == 1
    assert indices([head, *iterator]) == alone(truth, 0)


def test_a_state_goes_on_behind_the_batch_that_was_given_last(
    truth: DatasetTruth, stream: af.Stream, batches: af.ServedBatches
) -> None:
    """After any number of batches, here and in the stream itself, and from the stream to here."""
    order = alone(truth, 0)
    total = -(-len(order) // 4)
    for taken in range(total + 1):
        stream.set_epoch(0)
        iterator = iter(batches)
        seen = indices(next(iterator) for _ in range(taken))
        state = json.loads(json.dumps(batches.state_dict()))
        iterator.close()  # type: ignore[attr-defined]
        batches.load_state_dict(state)
        if taken == total:  # nothing of this epoch is left
            assert stream.epoch == 1
            assert seen == order
            with pytest.raises(af.ConfigError, match="goes on with epoch 1"):
                stream.set_epoch(0)
            break
        assert batches.state_dict() == state
        assert seen + indices(batches) == order
        assert stream.epoch == 1
    itself = stream_of(truth, features=None)
    itself.load_state_dict(state_after(itself, 7))
    batches.load_state_dict(itself.state_dict())
    assert indices(batches) == [int(sample["index"]) for sample in itself] == order[7:]
    itself.close()


def state_after(stream: af.Stream, taken: int) -> dict[str, Any]:
    iterator = iter(stream)
    for _ in range(taken):
        next(iterator)
    return iterator.state_dict()


def test_behind_an_epoch_the_state_is_the_beginning_of_the_next(
    truth: DatasetTruth, stream: af.Stream, batches: af.ServedBatches
) -> None:
    indices(batches)
    batches.load_state_dict(batches.state_dict())
    assert indices(batches) == alone(truth, 1, features=None)


def test_last_batch_finishes_a_pass_and_its_state(
    truth: DatasetTruth, stream: af.Stream, batches: af.ServedBatches
) -> None:
    """As of a stream: whether the end was asked for or not, and where an epoch is set or a pass begun again."""
    iterator = iter(batches)
    for _ in range(-(-truth.num_frames // 4)):
        next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    iterator = iter(batches)
    assert stream.epoch == 1
    assert batches.state_dict()["epoch"] == 1
    next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    begun = batches.state_dict()
    assert begun["legs"][-1]["given"] == [[0, 1, [], [0, 4, truth.num_frames]]]
    iter(batches)  # the same epoch again, from its beginning
    assert batches.state_dict() == beginning(1, identity_of(begun))
    next(iter(batches))
    stream.set_epoch(3)
    assert batches.state_dict() == stream.state_dict() == beginning(3, identity_of(begun))
    assert indices(batches) == alone(truth, 3, features=None)


def test_next_epoch_follows_the_last_whole_batch_with_drop_last(truth: DatasetTruth) -> None:
    for rest_is_dropped, epoch in ((True, 1), (False, 0)):
        stream = stream_of(truth)
        whole = truth.num_frames // 7
        assert truth.num_frames % 7
        with af.serve_samples(stream, 7, drop_last=rest_is_dropped) as batches:
            iterator = iter(batches)
            for _ in range(whole):
                next(iterator)
            batches.load_state_dict(batches.state_dict())
            assert stream.epoch == epoch
            assert len(list(batches)) == (whole if rest_is_dropped else 1)


def test_a_state_of_another_order_is_refused_and_does_no_harm(
    truth: DatasetTruth, stream: af.Stream, batches: af.ServedBatches
) -> None:
    other = stream_of(truth, seed=1)
    batches.load_state_dict(state_after(other, 3))
    other.close()
    with pytest.raises(af.StateMismatch, match="seed"):
        next(iter(batches))
    with pytest.raises(af.StateMismatch, match="isn't a state"):
        batches.load_state_dict({"epoch": 3})
    batches.load_state_dict(stream_of(truth, features=None).state_dict())
    assert indices(batches) == alone(truth, 0)


def test_pass_stops_when_a_state_is_loaded_meanwhile(
    truth: DatasetTruth, stream: af.Stream, batches: af.ServedBatches
) -> None:
    iterator = iter(batches)
    next(iterator)
    stream.load_state_dict(batches.state_dict())
    with pytest.raises(af.ConfigError, match="before iterating"):
        next(iterator)
    assert indices(batches) == alone(truth, 0)[4:]


def test_a_forked_child_can_not_use_it_and_leaves_it_alone(
    truth: DatasetTruth, stream: af.Stream, batches: af.ServedBatches
) -> None:
    iterator = iter(batches)
    head = next(iterator)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        try:
            uses: list[Callable[[], object]] = [lambda: next(iterator), lambda: next(iter(batches))]
            for use in uses:
                try:
                    use()
                except af.WrongLoop as error:
                    sender.send(str(error))
            iterator.close()  # type: ignore[attr-defined]
            batches.close()
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    for _ in range(2):
        assert receiver.poll(5)
        assert "forked" in receiver.recv()
    assert indices([head, *iterator]) == alone(truth, 0)


# What a process of its own shows.


class Fail:
    """A transform that raises at one frame."""

    def __init__(self, index: int, error: BaseException | str) -> None:
        self.index = index
        self.error = error

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        if int(sample["index"]) == self.index:
            if self.error == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.error == "grow":
                sample["action"] = torch.zeros(300_000)
            if isinstance(self.error, BaseException):
                raise self.error
        return sample


def test_error_comes_at_its_batch_and_the_next_pass_works(truth: DatasetTruth) -> None:
    stream = stream_of(truth, shuffle=False, transform=Fail(9, ValueError("mine")))
    seen: list[int] = []
    with af.serve_samples(stream, 4, max_ahead=5) as batches:
        with pytest.raises(ValueError, match="mine") as caught:  # noqa: PT012
            for batch in batches:
                seen += batch["index"].tolist()
        assert "in __call__" in caught.value.__notes__[0]
        assert seen == list(range(8))
        assert stream.epoch == 0
        assert next(iter(batches))["index"].tolist() == [0, 1, 2, 3]


def test_killed_process_is_an_error_and_the_state_is_kept(truth: DatasetTruth) -> None:
    stream = stream_of(truth, shuffle=False, transform=Fail(20, "kill"))
    with af.serve_samples(stream, 4) as batches:
        seen = []
        with pytest.raises(af.WorkerError, match=r"killed by SIGKILL.*memory.*state_dict"):  # noqa: PT012
            for batch in batches:
                seen += batch["index"].tolist()
        assert batches.statistics() is not None  # as it wrote them last
        state = batches.state_dict()
    assert seen == list(range(len(seen)))
    assert len(seen) <= 20
    stream.close()
    stream = stream_of(truth, shuffle=False)
    stream.load_state_dict(state)
    assert seen + [int(sample["index"]) for sample in stream] == list(range(truth.num_frames))
    stream.close()


def test_a_stopped_process_is_an_error_in_time(truth: DatasetTruth) -> None:
    """Meanwhile the report blames it, and not the trainer; afterwards its pass goes on in another one."""
    fetch = af.FetchConfig(timeouts=af.TimeoutConfig(silent_process_seconds=1.5))
    stream = stream_of(truth, shuffle=False, config=replace(CONFIG, fetch=fetch))
    seen: list[int] = []
    with af.serve_samples(stream, 4, max_ahead=1) as batches:
        passing = iter(batches)
        seen += next(passing)["index"].tolist()
        os.kill(batches.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, batches.pid, os.WSTOPPED | os.WNOWAIT)
        verdict = batches.report().verdict
        assert verdict.binds == "worker"
        assert verdict.evidence.startswith(f"process {batches.pid}, which reads for this one, is stopped, by SIGSTOP")
        with pytest.raises(
            af.WorkerError, match=rf"\(pid {batches.pid}\) is stopped, by SIGSTOP.*state_dict"
        ) as caught:
            seen.extend(index for batch in passing for index in batch["index"].tolist())
        assert "silent_process_seconds" in str(caught.value)
        verdict = batches.report().verdict
        assert (verdict.binds, verdict.evidence[:28]) == ("worker", "the process of serve_samples")
        state = batches.state_dict()
    assert not psutil.pid_exists(batches.pid)
    stream.load_state_dict(state)
    assert seen + [int(sample["index"]) for sample in stream] == list(range(truth.num_frames))
    stream.close()


def test_a_process_that_hangs_is_an_error_in_time(truth: DatasetTruth) -> None:
    fetch = af.FetchConfig(timeouts=af.TimeoutConfig(silent_process_seconds=1.5))
    stream = stream_of(truth, shuffle=False, transform=hang, config=replace(CONFIG, fetch=fetch))
    with af.serve_samples(stream, 4) as batches:
        pid = batches.pid
        with pytest.raises(af.WorkerError, match=rf"\(pid {pid}\) hangs: it has shown no sign of life"):
            next(iter(batches))
        assert batches.report().verdict.binds == "worker"
    assert not psutil.pid_exists(pid)


def hang(_sample: Any) -> Any:  # noqa: ANN401
    """Wait without letting anybody else have the interpreter, as some C code does."""
    ctypes.PyDLL(None).sleep(50)


def test_a_slow_transform_is_no_error(truth: DatasetTruth) -> None:
    """The loop of its process beats meanwhile."""
    fetch = af.FetchConfig(timeouts=af.TimeoutConfig(silent_process_seconds=3))
    stream = stream_of(truth, shuffle=False, transform=Wait(4.5), config=replace(CONFIG, fetch=fetch))
    with af.serve_samples(stream, 4) as batches:
        assert indices(batches) == list(range(truth.num_frames))
        assert batches.report().verdict.binds != "worker"


class Wait:
    """A transform that takes its time, now and then."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, sample: Any) -> Any:  # noqa: ANN401
        if int(sample["index"]) == 4:
            time.sleep(self.seconds)
        return sample


def test_single_samples_and_larger_ones(truth: DatasetTruth) -> None:
    stream = stream_of(truth, shuffle=False, transform=Fail(3, "grow"))
    with af.serve_samples(stream, None, max_ahead=100, max_ahead_bytes=50_000) as samples:
        got = list(samples)
    assert [int(sample["index"]) for sample in got] == list(range(truth.num_frames))
    assert [sample["action"].numel() for sample in got[2:5]] == [6, 300_000, 6]
    assert got[0]["index"].shape == ()
    assert isinstance(got[0]["task"], str)


def test_rank_holds_in_the_process_and_short_batches_are_dropped(
    truth: DatasetTruth, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = stream_of(truth)
    mine = [int(sample["index"]) for sample in source_of(own).iterate(Placement(1, 2))]
    own.close()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with af.serve_samples(stream_of(truth), 4, drop_last=True) as batches:
        monkeypatch.delenv("RANK")
        seen = indices(batches)
    assert seen == mine[: len(mine) // 4 * 4]
    assert len(seen) < len(mine)


def test_two_at_once_and_a_dataset_that_is_not_there(truth: DatasetTruth) -> None:
    with (
        af.serve_samples(stream_of(truth), 4) as one,
        af.serve_samples(af.Stream(str(truth.root) + "-not", config=CONFIG), 4) as other,
    ):
        for _ in range(2):
            with pytest.raises(af.NotFound, match="-not"):
                next(iter(other))
        assert other.statistics() is None
        assert indices(one) == alone(truth, 0)


def test_server_process_outlives_the_thread_that_entered_it(truth: DatasetTruth) -> None:
    batches = af.serve_samples(stream_of(truth), 4)
    thread = threading.Thread(target=batches.__enter__)
    thread.start()
    thread.join()
    assert indices(batches) == alone(truth, 0)
    batches.close()


# What is refused.


async def test_a_stream_of_an_open_dataset_is_refused(truth: DatasetTruth) -> None:
    async with af.open_dataset(str(truth.root)) as dataset:
        with pytest.raises(af.ConfigError, match="URL"):
            af.serve_samples(af.Stream(dataset))


@pytest.mark.parametrize("other", ["https://data.example.org/pick-place", [1, 2]])
def test_source_that_is_no_stream_is_refused(other: Any) -> None:  # noqa: ANN401
    with pytest.raises(af.ConfigError, match="serve_samples takes a Stream"):
        af.serve_samples(other)
    with pytest.raises(af.ConfigError, match="StreamDataset takes a Stream"):
        af.torch.StreamDataset(other)


@pytest.mark.parametrize("value", [0, -1, 2.5, True])
@pytest.mark.parametrize("name", ["batch_size", "max_ahead", "max_ahead_bytes"])
def test_numbers_out_of_range_are_refused(truth: DatasetTruth, name: str, value: float) -> None:
    options: Any = {name: value}
    with pytest.raises(af.ConfigError, match=f"{name} must be a whole number, at least 1, not {value}"):
        af.serve_samples(stream_of(truth), **options)


def test_transform_that_does_not_pickle_leaves_no_process(truth: DatasetTruth) -> None:
    before = multiprocessing.active_children()
    with pytest.raises(af.ConfigError, match=r"lambda.* top of a module"):
        af.serve_samples(stream_of(truth, transform=lambda sample: sample)).__enter__()
    assert multiprocessing.active_children() == before


def test_a_process_that_may_have_no_children_is_told(truth: DatasetTruth, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    with pytest.raises(af.ConfigError, match="without a DataLoader"):
        af.serve_samples(stream_of(truth)).__enter__()


def test_serve_samples_is_used_once_and_within_its_block(truth: DatasetTruth) -> None:
    batches = af.serve_samples(stream_of(truth))
    with pytest.raises(af.ClosedError, match="with serve_samples"):
        next(iter(batches))
    with batches:
        iterator = iter(batches)
    batches.close()
    with pytest.raises(af.ClosedError, match="closed"):
        next(iterator)
    with pytest.raises(af.ClosedError, match="before"):
        batches.__enter__()


# What ends it. Programs of their own, each of which prints the process's id when that is at work.

PRELUDE = """
import gc, os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are born deaf to it
import asyncfetch as af

def slow(sample):
    time.sleep(0.01)
    return sample

def serve():
    config = af.StreamConfig(pool_segments=2, decode_threads=1)
    return af.serve_samples(af.Stream(sys.argv[1], features=["action"], transform=slow, config=config), 2)

def begin(batches):
    iterator = iter(batches)
    next(iterator)
    print(batches.pid, flush=True)
    return iterator

"""


def start(truth: DatasetTruth, folder: Path, body: str) -> subprocess.Popen[str]:
    path = folder / "program.py"
    path.write_text(PRELUDE + textwrap.dedent(body))
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(path), str(truth.root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
        start_new_session=True,
    )


def assert_gone(pid: int, within_seconds: float = 10.0) -> None:
    deadline = time.monotonic() + within_seconds
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, pid
        time.sleep(0.02)


def first_line(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


ENDS = {
    "exit without close": """
        if __name__ == "__main__":
            batches = serve().__enter__()
            iterator = begin(batches)
    """,
    "collection": """
        if __name__ == "__main__":
            batches = serve().__enter__()
            iterator, pid = begin(batches), batches.pid
            del iterator, batches
            gc.collect()
            deadline = time.monotonic() + 10
            while not os.waitpid(pid, os.WNOHANG)[0]:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    """,
}


@pytest.mark.usefixtures("nested_programs_are_warm")
@pytest.mark.parametrize("name", ENDS)
def test_the_process_ends_and_nothing_is_said(truth: DatasetTruth, tmp_path: Path, name: str) -> None:
    process = start(truth, tmp_path, ENDS[name])
    pid = first_line(process)
    _, errors = process.communicate(timeout=40)
    assert (process.returncode, errors) == (0, "")
    assert_gone(pid)


@pytest.mark.alone
@pytest.mark.usefixtures("nested_programs_are_warm")
def test_server_process_dies_with_its_parent(truth: DatasetTruth, tmp_path: Path) -> None:
    """Also where a child forked from the parent has a copy of the connection, which so doesn't end."""
    body = """
    if __name__ == "__main__":
        batches = serve().__enter__()
        iterator = iter(batches)
        next(iterator)
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        print(batches.pid, flush=True)
        time.sleep(30)
    """
    names = set(os.listdir("/dev/shm"))
    process = start(truth, tmp_path, body)
    pid = first_line(process)
    process.kill()
    process.wait(10)
    try:
        assert_gone(pid)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert set(os.listdir("/dev/shm")) <= names


@pytest.mark.alone
@pytest.mark.usefixtures("nested_programs_are_warm")
def test_interrupt_of_both_processes_ends_with_one_traceback(truth: DatasetTruth, tmp_path: Path) -> None:
    body = """
    if __name__ == "__main__":
        with serve() as batches:
            iterator = begin(batches)
            while True:
                for batch in iterator:
                    pass
                iterator = iter(batches)
    """
    process = start(truth, tmp_path, body)
    pid = first_line(process)
    os.killpg(process.pid, signal.SIGINT)
    try:
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode in {-signal.SIGINT, 1}
    assert errors.count("Traceback") == 1
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert_gone(pid)


@pytest.mark.usefixtures("nested_programs_are_warm")
def test_a_program_without_a_guard_is_told_about_it(truth: DatasetTruth, tmp_path: Path) -> None:
    process = start(truth, tmp_path, "with serve() as batches: list(batches)")
    _, errors = process.communicate(timeout=40)
    assert process.returncode == 1
    assert 'if __name__ == "__main__":' in errors
