"""A loader's workers that are lost: an error of ours, in time, whatever torch says of it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import asyncfetch as af
import asyncfetch.torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncfetch.testing import DatasetTruth

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata's own call
]


def config(silent_process_seconds: float = 60.0) -> af.StreamConfig:
    timeouts = af.TimeoutConfig(silent_process_seconds=silent_process_seconds)
    return af.StreamConfig(pool_segments=2, decode_threads=2, decoder="pyav", fetch=af.FetchConfig(timeouts=timeouts))


def larger(sample: Any) -> Any:  # noqa: ANN401
    return {"index": sample["index"], "large": torch.zeros(3, 64, 64)}


def fails(_sample: Any) -> Any:  # noqa: ANN401
    raise RuntimeError("the user's own")


def together(samples: list[Any]) -> Any:  # noqa: ANN401
    return torch.stack([sample["action"] for sample in samples])


LOADERS: dict[str, Any] = {
    "batches of ours": lambda root, config: DataLoader(
        af.torch.StreamDataset(af.Stream(root, config=config), batch_size=2), batch_size=None, num_workers=2
    ),
    "batches of a transform": lambda root, config: DataLoader(
        af.torch.StreamDataset(af.Stream(root, config=config, transform=larger), batch_size=2),
        batch_size=None,
        num_workers=2,
    ),
    "a collate_fn": lambda root, config: DataLoader(
        af.torch.StreamDataset(af.Stream(root, config=config), batch_size=2, collate_fn=together),
        batch_size=None,
        num_workers=2,
        persistent_workers=True,
    ),
    "torchdata's": lambda root, config: StatefulDataLoader(
        af.torch.StreamDataset(af.Stream(root, config=config), batch_size=2), batch_size=None, num_workers=2
    ),
    "frames": lambda root, config: DataLoader(
        af.torch.FrameDataset(root, config=config, features=["action"]), batch_size=2, num_workers=2
    ),
}


def begun(loader: Any) -> tuple[Iterator[Any], int]:  # noqa: ANN401
    """An iterator that has given a batch, and the id of the worker whose turn is next."""
    before = multiprocessing.active_children()
    batches = iter(loader)
    next(batches)
    workers = [each for each in multiprocessing.active_children() if each not in before]
    assert len(workers) == 2
    pid = max(each.pid or 0 for each in workers)
    return batches, pid


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


@pytest.mark.parametrize("kind", LOADERS)
def test_a_killed_worker_is_an_error_of_ours(truth: DatasetTruth, kind: str) -> None:
    batches, pid = begun(LOADERS[kind](str(truth.root), config()))
    os.kill(pid, signal.SIGKILL)
    # torch's handler of SIGCHLD would raise here, wherever the main thread is: in a finalizer, too.
    psutil.Process(pid).wait(10)
    for _ in range(2):
        with pytest.raises(af.WorkerError, match=rf"\(pid {pid}\) was killed by SIGKILL.*out of memory.*num_workers"):
            list(batches)


@pytest.mark.usefixtures("failed_loaders_end_soon")
@pytest.mark.parametrize("kind", LOADERS)
def test_a_stopped_worker_is_an_error_in_time(truth: DatasetTruth, kind: str) -> None:
    batches, pid = begun(LOADERS[kind](str(truth.root), config(1.5)))
    stop(pid)
    with pytest.raises(af.WorkerError, match=rf"\(pid {pid}\) is stopped, by SIGSTOP.*silent_process_seconds"):
        list(batches)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_loader_without_a_thread_to_watch_it_says_so(truth: DatasetTruth, monkeypatch: pytest.MonkeyPatch) -> None:
    loader, start = LOADERS["batches of ours"](str(truth.root), config()), threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "asyncfetch workers":
            raise RuntimeError("can't start new thread")
        start(thread)

    batches = iter(loader)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(af.WorkerError, match=r"can't start new thread.*ulimit -u"):
            next(batches)
    assert sum(1 for _ in batches) == len(loader)


def test_persistent_workers_are_looked_after_in_each_pass(truth: DatasetTruth) -> None:
    loader = LOADERS["a collate_fn"](str(truth.root), config(1.5))
    batches, pid = begun(loader)
    list(batches)
    del batches
    batches = iter(loader)
    stop(pid)
    with pytest.raises(af.WorkerError, match=rf"\(pid {pid}\) is stopped, by SIGSTOP"):
        list(batches)


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_persistent_workers_are_looked_after_between_passes(truth: DatasetTruth, kind: type[DataLoader[Any]]) -> None:
    """Torch waits for them already as it makes the iterator."""
    dataset = af.torch.StreamDataset(af.Stream(str(truth.root), config=config(1.5)), batch_size=2)
    loader = kind(dataset, batch_size=None, num_workers=2, persistent_workers=True)
    batches, pid = begun(loader)
    list(batches)
    stop(pid)
    with pytest.raises(af.WorkerError, match=rf"\(pid {pid}\) is stopped, by SIGSTOP"):
        list(loader)


def test_workers_that_a_state_has_started_are_looked_after(truth: DatasetTruth) -> None:
    loader, before = LOADERS["torchdata's"](str(truth.root), config(1.5)), multiprocessing.active_children()
    loader.state_dict()
    pid = max(each.pid or 0 for each in multiprocessing.active_children() if each not in before)
    stop(pid)
    with pytest.raises(af.WorkerError, match=rf"\(pid {pid}\) is stopped, by SIGSTOP"):
        list(loader)


def test_a_worker_is_looked_after_in_any_thread(truth: DatasetTruth) -> None:
    batches, pid = begun(LOADERS["batches of ours"](str(truth.root), config(1.5)))
    stop(pid)
    caught: list[BaseException] = []

    def consume() -> None:
        try:
            list(batches)
        except af.WorkerError as error:
            caught.append(error)

    thread = threading.Thread(target=consume)
    thread.start()
    try:
        thread.join()
    except RuntimeError as error:  # torch's handler raises in the main thread
        caught.append(error)
        thread.join()
    assert caught
    assert all(isinstance(error, af.WorkerError) and f"(pid {pid})" in str(error) for error in caught)


@pytest.mark.usefixtures("failed_loaders_end_soon")
def test_the_report_blames_a_worker_that_is_lost(truth: DatasetTruth) -> None:
    dataset = af.torch.StreamDataset(af.Stream(str(truth.root), config=config(1.5)), batch_size=2)
    batches, pid = begun(DataLoader(dataset, batch_size=None, num_workers=2))
    assert dataset.report().verdict.binds != "worker"
    stop(pid)
    verdict = dataset.report().verdict
    assert (verdict.binds, f"process {pid}" in verdict.evidence) == ("worker", True)
    with pytest.raises(af.WorkerError):
        list(batches)
    verdict = dataset.report().verdict
    assert verdict.binds == "worker"
    assert f"a worker of the loader (pid {pid}) is stopped" in verdict.evidence


@pytest.mark.parametrize("kind", LOADERS)
def test_workers_that_end_as_they_should_are_no_error(truth: DatasetTruth, kind: str) -> None:
    loader = LOADERS[kind](str(truth.root), config())
    for _ in range(2):
        batches = iter(loader)
        assert iter(batches) is batches
        assert sum(1 for _ in batches) == len(loader)


def test_an_error_of_the_users_own_stays_what_it_is(truth: DatasetTruth) -> None:
    dataset = af.torch.StreamDataset(af.Stream(str(truth.root), config=config(), transform=fails), batch_size=2)
    with pytest.raises(RuntimeError, match="the user's own") as caught:
        list(DataLoader(dataset, batch_size=None, num_workers=2))
    assert not isinstance(caught.value, af.AsyncFetchError)


def test_loaders_of_others_are_left_alone() -> None:
    loader: DataLoader[Any] = DataLoader([1, 2, 3], num_workers=1)  # type: ignore[arg-type]
    assert type(iter(loader)).__module__ == "torch.utils.data.dataloader"
