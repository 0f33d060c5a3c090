"""Jobs and micro-batches: samples that are decoded by one call, and samples that are delivered together. Pure.

Frames of one group of pictures are decoded together, by one pass over it, and delivered as the order says: one of each
lane in turn. So a *job*, which a thread does in one call, is made of *runs*: what the next steps take of one group.
Jobs are made in the order of their first use; a *micro-batch*, the next few samples in order, takes from several of
them.

Whole groups need no decoder that goes on where it stopped, so all lanes that give a piece share one. But
two jobs in a row are decoded at a time, and where both read a piece, as nearly all do in an order that isn't shuffled,
they would wait for each other: so such jobs take its readers in turns, each of which has a decoder of its own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from asyncfetch.order.line import Piece
    from asyncfetch.order.plan import Step


@dataclass(frozen=True, slots=True)
class Sizes:
    """Amounts that are decoded at a time."""

    group_frames: int
    """Neighbouring frames that are cheaper to decode together."""
    run_frames: int
    """The most of them that one call decodes together: the more, the more of them wait for their turn."""
    job_samples: int
    """Decoded by one call; it takes whole runs, so it may be a few more. And delivered together."""
    open_pieces: int
    """Pieces that the order goes round: as many steps lie between two frames of a run."""
    readers: int = 1
    """Readers of an episode that jobs in a row take in turns, where they decode whole groups."""
    ahead_samples: int = 0
    """Decoded, or being decoded, that the consumer hasn't taken yet, at most."""

    @property
    def are_whole_groups(self) -> bool:
        """True if a run is all of a group that comes in a row."""
        return self.run_frames >= self.group_frames

    @property
    def waiting_samples(self) -> int:
        """Decoded ahead of their turn, because their run was, at most."""
        return (self.run_frames - 1) * self.open_pieces

    @classmethod
    def within(
        cls,
        max_samples: int,
        *,
        group_frames: int,
        open_pieces: int,
        jobs: int,
        max_job_samples: int,
        readers: int = 1,
    ) -> Sizes:
        """The longest runs, then the largest jobs, of which ``jobs`` fit ``max_samples`` beside what waits.

        A group that makes several runs is divided evenly: as many runs of fewer frames leave more room for jobs.

        The order stays as it is: where memory holds no two frames of a group, each is decoded for itself. An order that
        became another one with less memory would make a state of a large machine worthless on a small one, and ranks of
        unequal memory would give frames twice.
        """
        longest = 1 + max(0, max_samples - jobs) // (open_pieces + jobs)
        run_frames = -(-group_frames // -(-group_frames // longest))
        job_samples = (max_samples - (run_frames - 1) * open_pieces) // jobs
        job_samples = max(run_frames, min(job_samples, max_job_samples))
        return cls(group_frames, run_frames, job_samples, open_pieces, readers)


@dataclass(slots=True, eq=False, weakref_slot=True)
class DecodeJob:
    """Samples that are decoded by one call."""

    steps: list[Step] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class MicroBatch:
    """Consecutive samples of the order."""

    steps: list[Step] = field(default_factory=list)
    takes: list[tuple[DecodeJob, int]] = field(default_factory=list)
    """The job of each step that decodes it, and its place there."""
    starts: list[DecodeJob] = field(default_factory=list)
    """Jobs that it takes from, and no micro-batch before it does."""


@dataclass(slots=True, eq=False)
class _Run:
    """Steps of one group that one call is to decode, from the ``first`` on."""

    first: int
    steps: list[Step] = field(default_factory=list)
    job: DecodeJob | None = None
    offset: int = 0
    """The place of its first step in the job."""


def micro_batches(steps: Iterable[Step], sizes: Sizes) -> Iterator[MicroBatch]:
    """Cut an order into micro-batches and jobs.

    Neither goes past a step after which a piece isn't used any more: what comes then may need that one's memory.
    The first one is one sample, and the job that it takes from one run; those that follow are twice as large each,
    up to their size. So the first sample waits for its own episode alone.
    """
    ahead = _JobsAhead(steps, sizes)
    micro_batch = MicroBatch()
    most = 1
    for step, run, place in ahead:
        if run.job is None:
            micro_batch.starts.append(ahead.start_job(min(most, sizes.job_samples)))
        assert run.job is not None
        micro_batch.steps.append(step)
        micro_batch.takes.append((run.job, run.offset + place))
        if step.finished or len(micro_batch.steps) >= min(most, sizes.job_samples):
            yield micro_batch
            micro_batch = MicroBatch()
            most *= 2
    if micro_batch.steps:
        yield micro_batch


class _JobsAhead:
    """The steps one by one, each with its run, which is looked for among the steps that follow."""

    def __init__(self, steps: Iterable[Step], sizes: Sizes) -> None:
        self._steps = iter(steps)
        self._sizes = sizes
        self._length = sizes.waiting_samples + sizes.job_samples + 1
        self._entries: deque[tuple[Step, _Run, int]] = deque()
        self._read = 0
        self._open: dict[tuple[Piece, int], _Run] = {}
        self._runs: deque[_Run] = deque()  # without a job, in the order of their first steps
        self._latest: tuple[set[Piece], int] = set(), 0  # pieces and reader of the latest job
        self._ends: deque[int] = deque()  # numbers of the steps after which a piece isn't used any more

    def __iter__(self) -> Iterator[tuple[Step, _Run, int]]:
        while True:
            while len(self._entries) < self._length and self._read_one():
                pass
            if not self._entries:
                return
            yield self._entries.popleft()
            if self._ends and self._ends[0] < self._read - len(self._entries):
                self._ends.popleft()

    def start_job(self, samples: int) -> DecodeJob:
        """A job of the next runs that have none, of about so many samples."""
        job = DecodeJob()
        end = self._read - self._sizes.waiting_samples  # runs that begin from here on may have more steps to come
        if self._ends:
            end = min(end, self._ends[0] + 1)
        while self._runs and len(job.steps) < samples and (not job.steps or self._runs[0].first < end):
            run = self._runs.popleft()
            run.job, run.offset = job, len(job.steps)
            job.steps += run.steps
            key = self._key(run.steps[0])
            if self._open.get(key) is run:
                del self._open[key]
        if self._sizes.are_whole_groups:
            self._take_reader(job)
        return job

    def _take_reader(self, job: DecodeJob) -> None:
        pieces, (latest_pieces, latest) = {step.piece for step in job.steps}, self._latest
        reader = 0 if pieces.isdisjoint(latest_pieces) else (latest + 1) % self._sizes.readers
        if reader:
            job.steps = [step._replace(reader=reader) for step in job.steps]
        self._latest = pieces, reader

    def _read_one(self) -> bool:
        step = next(self._steps, None)
        if step is None:
            return False
        key = self._key(step)
        run = self._open.get(key)
        if run is None or len(run.steps) >= self._sizes.run_frames:
            run = self._open[key] = _Run(self._read)
            self._runs.append(run)
        self._entries.append((step, run, len(run.steps)))
        run.steps.append(step)
        if step.finished:
            self._ends.append(self._read)
        self._read += 1
        return True

    def _key(self, step: Step) -> tuple[Piece, int]:
        return step.piece, step.frame // self._sizes.group_frames
