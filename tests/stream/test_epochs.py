"""Which epoch comes next, whenever each worker begins, ends or is told to stop."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import asyncfetch as af
from asyncfetch.order.state import MAX_EPOCH, MAX_WORKERS
from asyncfetch.stream.epochs import EpochCounter, Turn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncfetch.testing import DatasetTruth


class Processes:
    """The counters of a rank's workers and of its trainer, over one memory."""

    def __init__(self, workers: int = 3) -> None:
        self.trainer = EpochCounter()
        self.workers = [EpochCounter() for _ in range(workers)]
        for worker in self.workers:
            worker.share(self.trainer.memory)

    def run(self, events: Sequence[tuple[int, bool]], *, workers: int, loader: int) -> list[int]:
        """The epochs taken in a pass; each event is a worker that begins, and then whether it comes to its end."""
        taken = []
        begun = {}
        for worker, ends in events:
            if worker not in begun:
                begun[worker] = self.workers[worker].begin_share(worker, workers, loader)
                taken.append(begun[worker].epoch)
            elif ends:
                begun[worker].finish()
        return taken


@st.composite
def passes(draw: st.DrawFn) -> tuple[list[tuple[int, bool]], int, bool]:
    """Events of a pass of 1-3 workers in any order, and whether all came to their end.

    Some workers may not even begin, as where their process is killed.
    """
    workers = draw(st.integers(1, 3))
    ends = draw(st.lists(st.booleans(), min_size=workers, max_size=workers))
    missing = draw(st.sets(st.integers(0, workers - 1))) if draw(st.booleans()) else set()
    twice = [worker for worker in range(workers) for _ in range(2) if worker not in missing]
    events = [(worker, ends[worker]) for worker in draw(st.permutations(twice))]
    return events, workers, all(ends) and not missing


@given(data=st.data(), given_passes=st.lists(passes(), min_size=1, max_size=8))
def test_workers_share_an_epoch_and_only_finished_passes_count(
    data: st.DataObject, given_passes: list[tuple[list[tuple[int, bool]], int, bool]]
) -> None:
    processes = Processes()
    expected = 0
    for loader, (events, workers, finished) in enumerate(given_passes, 1):
        if data.draw(st.booleans()):
            expected = data.draw(st.integers(0, 5))
            processes.trainer.set(expected)
        assert set(processes.run(events, workers=workers, loader=loader)) <= {expected}
        expected += finished
        assert processes.trainer.current() == expected
        if data.draw(st.booleans()):  # a pass without workers in between
            processes.trainer.begin().finish()
            expected += 1


@given(ends=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), max_size=6), data=st.data())
def test_persistent_workers_and_loaders_of_a_seed_count_alike(ends: list[list[bool]], data: st.DataObject) -> None:
    processes = Processes()
    expected = 0
    for one in ends:
        order = data.draw(st.permutations([0, 0, 1, 1, 2, 2]))
        events = [(worker, one[worker]) for worker in order]
        assert processes.run(events, workers=3, loader=1) == [expected] * 3
        expected += all(one)


@given(data=st.data())
def test_loaders_over_one_dataset_have_their_own_notes(data: st.DataObject) -> None:
    """Whatever the order, a pass is of the epoch that came next when it began, and a finished one is counted."""
    trainer = EpochCounter()
    workers = {1: 2, 2: 2, 3: 1}  # of each loader
    counters = {(loader, worker): EpochCounter() for loader in workers for worker in range(workers[loader])}
    for counter in counters.values():
        counter.share(trainer.memory)
    begun: dict[tuple[int, int], Turn] = {}
    ended: dict[int, set[int]] = {loader: set() for loader in workers}
    expected, epochs = 0, {}
    for who in data.draw(st.lists(st.sampled_from(sorted(counters)), max_size=60)):
        loader, worker = who
        if who not in begun:
            if all(other != loader for other, _ in begun):
                epochs[loader] = expected
            process = sorted(counters).index(who) + 1
            begun[who] = counters[who].begin_share(worker, workers[loader], loader, process)
            assert begun[who].epoch == epochs[loader]
        elif worker not in ended[loader]:
            begun[who].finish()
            ended[loader].add(worker)
            if len(ended[loader]) == workers[loader]:
                expected = max(expected, epochs[loader] + 1)
                ended[loader].clear()
                begun = {other: turn for other, turn in begun.items() if other[0] != loader}
        assert trainer.current() == expected


def test_late_worker_takes_the_epoch_that_others_finished_twice() -> None:
    """The first pass was left when only worker 1 had finished; in the second, worker 0 is done before 1 begins."""
    processes = Processes()
    assert processes.run([(0, False), (1, True), (1, True)], workers=2, loader=1) == [0, 0]
    assert processes.run([(0, True), (0, True), (1, True), (1, True)], workers=2, loader=1) == [0, 0]
    assert processes.trainer.current() == 1


def test_set_in_the_midst_of_a_pass_is_for_the_next_one() -> None:
    processes = Processes()
    fast = processes.workers[0].begin_share(0, 2, 1)
    processes.trainer.set(7)
    slow = processes.workers[1].begin_share(1, 2, 1)
    assert (fast.epoch, slow.epoch) == (0, 0)
    fast.finish()
    slow.finish()
    assert processes.trainer.current() == 7


def test_an_end_that_comes_late_does_not_count_for_a_later_pass() -> None:
    processes = Processes()
    old = processes.workers[0].begin_share(0, 1, 1)
    processes.workers[0].begin_share(0, 1, 2)
    processes.workers[0].begin_share(0, 1, 3)
    old.finish()
    assert processes.trainer.current() == 0


def test_worker_that_missed_a_pass_catches_up_with_an_equal_seed() -> None:
    processes = Processes()
    assert processes.run([(0, False), (0, False)], workers=2, loader=1) == [0]  # 1 was killed before it began
    for _ in range(2):
        assert processes.run([(0, True), (1, True), (0, True), (1, True)], workers=2, loader=1)
    assert processes.trainer.current() == 2


def test_a_pickled_counter_goes_on_from_the_same_epoch() -> None:
    counter = EpochCounter()
    counter.set(3)
    counter.begin().finish()
    other: EpochCounter = pickle.loads(pickle.dumps(counter))
    assert other.current() == 4
    other.begin().finish()
    assert (counter.current(), other.current()) == (4, 5)


@pytest.mark.parametrize("workers", [0, MAX_WORKERS + 1])
def test_a_number_of_workers_that_can_not_be_counted_is_refused(workers: int) -> None:
    with pytest.raises(af.ConfigError, match=f"not {workers}"):
        EpochCounter().begin_share(0, workers, 1)


@pytest.mark.parametrize("epoch", [-1, 1.5, "1", True, 2**63, 2**63 - 1])
async def test_epoch_out_of_range_or_no_whole_number_is_refused(truth: DatasetTruth, epoch: Any) -> None:  # noqa: ANN401
    stream = af.Stream(str(truth.root))
    with pytest.raises(af.ConfigError, match=f"epoch must be a whole number from 0, below .*, not {epoch!r}"):
        stream.set_epoch(epoch)
    with pytest.raises(af.ConfigError, match=f"epoch must be a whole number from 0, below .*, not {epoch!r}"):
        async with stream.samples(epoch=epoch):
            pass
    assert stream.epoch == 0


def test_the_last_epoch_can_be_read_and_there_is_none_behind_it(truth: DatasetTruth) -> None:
    stream = af.Stream(str(truth.root), features=["action"])
    stream.set_epoch(MAX_EPOCH)
    assert len(list(stream)) == sum(truth.lengths)
    for again in (stream, pickle.loads(pickle.dumps(stream))):
        assert again.epoch == MAX_EPOCH + 1
        with pytest.raises(af.ConfigError, match=f"epoch must be a whole number from 0, .* not {MAX_EPOCH + 1}"):
            next(iter(again))
        again.close()


async def test_numbers_of_numpy_are_as_good(truth: DatasetTruth) -> None:
    stream: Any = af.Stream(str(truth.root), features=["action"])
    async with stream.samples(epoch=np.uint8(255), rank=np.int8(1), world_size=np.int64(2)) as samples:
        await anext(samples)
        state = json.loads(json.dumps(samples.state_dict()))
    stream.set_epoch(np.uint8(255))
    async with stream.samples(rank=1, world_size=2) as samples:
        await anext(samples)
        assert samples.state_dict() == state
