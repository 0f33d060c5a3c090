"""What is decoded by one call, and what is delivered together."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from asyncfetch.stream.order import Order, Step
from hypothesis import given
from hypothesis import strategies as st

from asyncfetch.stream.decode_jobs import DecodeJob, Sizes, micro_batches


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Step], Sizes]:
    lanes = draw(st.sampled_from([1, 2, 4]))
    group = draw(st.integers(1, 6))
    lengths = np.array(draw(st.lists(st.integers(0, 30), max_size=12)), dtype=np.int64)
    order = Order(lengths, shuffle=True, seed=0, epoch=0, lanes=lanes, pool_segments=lanes, group_frames=group)
    consumers = draw(st.integers(1, 3))
    steps = list(order.steps(range(0, len(order), consumers)))
    run_frames = draw(st.integers(1, group))
    return steps, Sizes(group, run_frames, max(run_frames, draw(st.integers(1, 8))), lanes)


@given(case=cases())
def test_micro_batches_are_the_order_and_jobs_hold_each_step_once(case: tuple[list[Step], Sizes]) -> None:
    steps, sizes = case
    cut = list(micro_batches(steps, sizes))
    if sizes.run_frames >= sizes.group_frames:  # whole groups: one decoder of an episode does for all its slots
        steps = [step._replace(reader=0) for step in steps]
    assert [step for micro_batch in cut for step in micro_batch.steps] == steps
    assert [job.steps[place] for micro_batch in cut for job, place in micro_batch.takes] == steps
    jobs = [job for micro_batch in cut for job in micro_batch.starts]
    assert sum(len(job.steps) for job in jobs) == len(steps)


def test_the_first_sample_waits_for_its_own_run_alone() -> None:
    """And those that follow for few, until micro-batches and jobs are as large as they get."""
    order = Order(np.full(100, 50), shuffle=True, seed=0, epoch=0, pool_segments=64, group_frames=2)
    cut = list(itertools.islice(micro_batches(order.steps(range(len(order))), Sizes(2, 2, 16, 64)), 8))
    assert [len(micro_batch.steps) for micro_batch in cut] == [1, 2, 4, 8, 16, 16, 16, 16]
    assert {step.episode for job in cut[0].starts for step in job.steps} == {cut[0].steps[0].episode}
    assert all(len(job.steps) <= 2 * len(micro_batch.steps) for micro_batch in cut for job in micro_batch.starts)


@given(case=cases())
def test_a_job_is_started_by_the_first_micro_batch_that_takes_from_it(case: tuple[list[Step], Sizes]) -> None:
    steps, sizes = case
    started: set[DecodeJob] = set()
    for micro_batch in micro_batches(steps, sizes):
        assert {job for job, _ in micro_batch.takes} - started == set(micro_batch.starts)
        started.update(micro_batch.starts)


@given(case=cases())
def test_what_waits_for_its_turn_is_bounded(case: tuple[list[Step], Sizes]) -> None:
    steps, sizes = case
    undelivered = 0
    for micro_batch in micro_batches(steps, sizes):
        undelivered += sum(len(job.steps) for job in micro_batch.starts)
        # The last job was begun for one sample, and its last run may make it longer.
        assert undelivered <= sizes.waiting_samples + len(micro_batch.steps) + sizes.job_samples + sizes.run_frames
        undelivered -= len(micro_batch.steps)
    assert undelivered == 0


@given(case=cases())
def test_nothing_is_decoded_with_what_may_need_the_memory_of_its_episode(case: tuple[list[Step], Sizes]) -> None:
    """A job waits for all its episodes; one of them mustn't wait for another's end, which comes behind a step of it."""
    steps, sizes = case
    number = {(step.episode, step.frame): place for place, step in enumerate(steps)}
    first_use = {step.episode: number[step.episode, step.frame] for step in reversed(steps)}
    ends = [place for place, step in enumerate(steps) if step.finished]
    for micro_batch in micro_batches(steps, sizes):
        assert not any(step.finished for step in micro_batch.steps[:-1])
        for job in micro_batch.starts:
            first = min(number[step.episode, step.frame] for step in job.steps)
            end = next((place for place in ends if place >= first), len(steps))
            assert all(first_use[step.episode] <= end for step in job.steps)


def test_no_run_is_cut_short_by_where_the_look_ahead_ends() -> None:
    lengths = np.full(8, 240)
    order = Order(lengths, shuffle=True, seed=0, epoch=0, pool_segments=8, group_frames=6)
    steps = list(order.steps(range(len(order))))
    for micro_batch in micro_batches(steps, Sizes(6, 3, 7, 8)):
        for job in micro_batch.starts:
            runs = Counter((step.episode, step.frame // 6) for step in job.steps)
            assert set(runs.values()) <= {3, 6}


def test_frames_of_a_group_are_decoded_by_one_job() -> None:
    lengths = np.full(64, 30)
    order = Order(lengths, shuffle=True, seed=0, epoch=0, pool_segments=8, group_frames=5)
    steps = list(order.steps(range(400)))[:200]
    job_of = {
        (job.steps[place].episode, job.steps[place].frame): job
        for micro_batch in micro_batches(steps, Sizes(5, 5, 10, 8))
        for job, place in micro_batch.takes
    }
    groups: dict[tuple[int, int], set[DecodeJob]] = {}
    for (episode, frame), job in job_of.items():
        groups.setdefault((episode, frame // 5), set()).add(job)
    # But for those in which an episode is cut that several slots share.
    assert sum(len(jobs) > 1 for jobs in groups.values()) <= 8 // 2


@pytest.mark.parametrize("shuffle", [False, True])
def test_jobs_in_a_row_that_share_an_episode_take_its_readers_in_turns(shuffle: bool) -> None:
    lengths = np.full(4, 90)
    order = Order(lengths, shuffle=shuffle, seed=0, epoch=0, pool_segments=2, group_frames=5)
    cut = micro_batches(order.steps(range(len(order))), Sizes(5, 5, 10, 2 if shuffle else 1, readers=2))
    jobs = [job.steps for micro_batch in cut for job in micro_batch.starts]
    assert all(len({step.reader for step in steps}) == 1 for steps in jobs)
    assert {step.reader for steps in jobs for step in steps} == {0, 1}
    for former, latter in itertools.pairwise(jobs):
        shares = {step.episode for step in former} & {step.episode for step in latter}
        assert latter[0].reader == (1 - former[0].reader if shares else 0)


def test_parts_of_a_group_stay_with_the_decoder_that_goes_on_with_it() -> None:
    order = Order(np.full(4, 90), shuffle=False, seed=0, epoch=0, pool_segments=1, group_frames=30)
    cut = micro_batches(order.steps(range(len(order))), Sizes(30, 10, 10, 1, readers=2))
    assert {step.reader for micro_batch in cut for job in micro_batch.starts for step in job.steps} == {0}


@pytest.mark.parametrize(
    ("max_samples", "group", "open_segments", "jobs", "run_frames", "job_samples"),
    [
        (145, 2, 64, 7, 2, 8),  # two 640x480 cameras in 256 MiB, 2 threads
        (145, 2, 64, 35, 2, 2),  # 16 threads
        (145, 1, 64, 7, 1, 8),
        (60, 2, 64, 7, 1, 8),  # no room for frames that wait
        (582, 30, 64, 7, 8, 8),  # four runs a group, where 9 frames at a time make four, too
        (582, 30, 16, 7, 15, 15),
        (3, 2, 64, 7, 1, 1),
    ],
)
def test_sizes_keep_groups_together_as_far_as_memory_goes(
    max_samples: int, group: int, open_segments: int, jobs: int, run_frames: int, job_samples: int
) -> None:
    sizes = Sizes.within(max_samples, group_frames=group, open_segments=open_segments, jobs=jobs, max_job_samples=8)
    assert (sizes.run_frames, sizes.job_samples) == (run_frames, job_samples)


@given(max_samples=st.integers(1, 2**70), group=st.integers(1, 10**400), open_segments=st.integers(1, 100))
def test_groups_of_any_size_divide_exactly(max_samples: int, group: int, open_segments: int) -> None:
    sizes = Sizes.within(max_samples, group_frames=group, open_segments=open_segments, jobs=4, max_job_samples=8)
    longest = 1 + max(0, max_samples - 4) // (open_segments + 4)
    assert 1 <= sizes.run_frames <= min(group, longest)
    assert -(-group // sizes.run_frames) == -(-group // longest)


def test_a_group_is_no_larger_than_the_longest_episode() -> None:
    def largest(lengths: list[int], group: int) -> int:
        order = Order(np.array(lengths, np.int64), shuffle=True, seed=0, epoch=0, pool_segments=1)
        return replace(order, group_frames=group).largest_group()

    assert [largest([3, 0, 9, 5], group) for group in (1, 8, 9, 10, 10**30)] == [1, 8, 9, 9, 9]
    assert largest([], 7) == 1
