"""What is decoded by one call, and what is delivered together."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfetch.order.deal import Left, Leg
from asyncfetch.order.line import Line
from asyncfetch.order.placement import Placement
from asyncfetch.order.plan import PassPlan
from asyncfetch.order.runs import Runs
from asyncfetch.order.state import EpochProgress
from asyncfetch.stream.decode_jobs import DecodeJob, Sizes, micro_batches

if TYPE_CHECKING:
    from asyncfetch.order.line import Piece
    from asyncfetch.order.plan import Step


def steps_of(
    lengths: list[int], *, pool: int, group: int, shuffle: bool = True, placement: Placement | None = None
) -> list[Step]:
    """The steps of one consumer, of segments that are whole episodes."""
    placement = placement or Placement()
    line = Line(np.array(lengths, np.int64), segment_frames=1000, group_frames=group, shuffle=shuffle)
    whole = Left((Runs.whole(line, 0, line.total),), np.array([[line.total]]))
    progress = EpochProgress({}, 0, line.total, Leg(placement.world_size, (pool,)), placement)
    return list(PassPlan(whole, progress, 0).steps())


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Step], Sizes]:
    pool = draw(st.sampled_from([1, 2, 4]))
    group = draw(st.integers(1, 6))
    lengths = draw(st.lists(st.integers(0, 30), max_size=12))
    steps = steps_of(lengths, pool=pool, group=group, placement=Placement(workers=draw(st.integers(1, 3))))
    run_frames = draw(st.integers(1, group))
    return steps, Sizes(group, run_frames, max(run_frames, draw(st.integers(1, 8))), pool)


@given(case=cases())
def test_micro_batches_keep_the_order_and_jobs_hold_steps_once(case: tuple[list[Step], Sizes]) -> None:
    steps, sizes = case
    cut = list(micro_batches(steps, sizes))
    if sizes.run_frames >= sizes.group_frames:  # whole groups: one decoder of a piece does for all its lanes
        steps = [step._replace(reader=0) for step in steps]
    assert [step for micro_batch in cut for step in micro_batch.steps] == steps
    assert [job.steps[place] for micro_batch in cut for job, place in micro_batch.takes] == steps
    jobs = [job for micro_batch in cut for job in micro_batch.starts]
    assert sum(len(job.steps) for job in jobs) == len(steps)


def test_the_first_sample_waits_for_its_own_run_alone() -> None:
    """And those that follow for few, until micro-batches and jobs are as large as they get."""
    cut = list(itertools.islice(micro_batches(steps_of([50] * 100, pool=64, group=2), Sizes(2, 2, 16, 64)), 8))
    assert [len(micro_batch.steps) for micro_batch in cut] == [1, 2, 4, 8, 16, 16, 16, 16]
    assert {step.piece for job in cut[0].starts for step in job.steps} == {cut[0].steps[0].piece}
    assert all(len(job.steps) <= 2 * len(micro_batch.steps) for micro_batch in cut for job in micro_batch.starts)


@given(case=cases())
def test_job_is_started_by_its_first_micro_batch(case: tuple[list[Step], Sizes]) -> None:
    steps, sizes = case
    started: set[DecodeJob] = set()
    for micro_batch in micro_batches(steps, sizes):
        assert {job for job, _ in micro_batch.takes} - started == set(micro_batch.starts)
        started.update(micro_batch.starts)


@given(case=cases())
def test_samples_waiting_for_their_turn_are_bounded(case: tuple[list[Step], Sizes]) -> None:
    steps, sizes = case
    undelivered = 0
    for micro_batch in micro_batches(steps, sizes):
        undelivered += sum(len(job.steps) for job in micro_batch.starts)
        # The last job was begun for one sample, and its last run may make it longer.
        assert undelivered <= sizes.waiting_samples + len(micro_batch.steps) + sizes.job_samples + sizes.run_frames
        undelivered -= len(micro_batch.steps)
    assert undelivered == 0


@given(case=cases())
def test_job_is_not_shared_by_pieces_that_contend_for_memory(case: tuple[list[Step], Sizes]) -> None:
    """A job waits for all its pieces; one of them mustn't wait for another's end, which comes behind a step of it."""
    steps, sizes = case
    number = {(step.piece, step.frame): place for place, step in enumerate(steps)}
    first_use = {step.piece: number[step.piece, step.frame] for step in reversed(steps)}
    ends = [place for place, step in enumerate(steps) if step.finished]
    for micro_batch in micro_batches(steps, sizes):
        assert not any(step.finished for step in micro_batch.steps[:-1])
        for job in micro_batch.starts:
            first = min(number[step.piece, step.frame] for step in job.steps)
            end = next((place for place in ends if place >= first), len(steps))
            assert all(first_use[step.piece] <= end for step in job.steps)


def test_no_run_is_cut_short_by_where_the_look_ahead_ends() -> None:
    steps = steps_of([240] * 8, pool=8, group=6)
    for micro_batch in micro_batches(steps, Sizes(6, 3, 7, 8)):
        for job in micro_batch.starts:
            runs = Counter((step.piece, step.frame // 6) for step in job.steps)
            assert set(runs.values()) <= {3, 6}


def test_frames_of_a_group_are_decoded_by_one_job() -> None:
    steps = steps_of([30] * 64, pool=8, group=5)[:200]
    job_of = {
        (job.steps[place].piece, job.steps[place].frame): job
        for micro_batch in micro_batches(steps, Sizes(5, 5, 10, 8))
        for job, place in micro_batch.takes
    }
    groups: dict[tuple[Piece, int], set[DecodeJob]] = {}
    for (piece, frame), job in job_of.items():
        groups.setdefault((piece, frame // 5), set()).add(job)
    assert {len(jobs) for jobs in groups.values()} == {1}


@pytest.mark.parametrize("shuffle", [False, True])
def test_jobs_in_a_row_take_the_readers_of_a_piece_in_turns(shuffle: bool) -> None:
    steps = steps_of([90] * 4, pool=2, group=5, shuffle=shuffle)
    cut = micro_batches(steps, Sizes(5, 5, 10, 2 if shuffle else 1, readers=2))
    jobs = [job.steps for micro_batch in cut for job in micro_batch.starts]
    assert all(len({step.reader for step in steps}) == 1 for steps in jobs)
    assert {step.reader for steps in jobs for step in steps} == {0, 1}
    for former, latter in itertools.pairwise(jobs):
        shares = {step.piece for step in former} & {step.piece for step in latter}
        assert latter[0].reader == (1 - former[0].reader if shares else 0)


def test_parts_of_a_group_stay_with_one_decoder() -> None:
    cut = micro_batches(steps_of([90] * 4, pool=1, group=30, shuffle=False), Sizes(30, 10, 10, 1, readers=2))
    assert {step.reader for micro_batch in cut for job in micro_batch.starts for step in job.steps} == {0}


@pytest.mark.parametrize(
    ("max_samples", "group", "open_pieces", "jobs", "run_frames", "job_samples"),
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
    max_samples: int, group: int, open_pieces: int, jobs: int, run_frames: int, job_samples: int
) -> None:
    sizes = Sizes.within(max_samples, group_frames=group, open_pieces=open_pieces, jobs=jobs, max_job_samples=8)
    assert (sizes.run_frames, sizes.job_samples) == (run_frames, job_samples)


@given(max_samples=st.integers(1, 2**70), group=st.integers(1, 10**400), open_pieces=st.integers(1, 100))
def test_groups_of_any_size_divide_exactly(max_samples: int, group: int, open_pieces: int) -> None:
    sizes = Sizes.within(max_samples, group_frames=group, open_pieces=open_pieces, jobs=4, max_job_samples=8)
    longest = 1 + max(0, max_samples - 4) // (open_pieces + 4)
    assert 1 <= sizes.run_frames <= min(group, longest)
    assert -(-group // sizes.run_frames) == -(-group // longest)
