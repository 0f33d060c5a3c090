"""Batches that decode threads fill row by row, in memory that is used again.

A pass knows which samples make a batch long before it has them. So a batch's tensors are made first, and each picture
is written to its row by the thread that has just decoded it, while it is in the processor's caches: a sample is then
its row. Samples that are the rows of one batch needn't be put together: there it is. Where they aren't, because one of
them was left out or replaced, they are copied together as any others.

Pictures lie channels-last in memory, as decoders write them and as a single sample has them.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import numpy as np
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from numpy.typing import NDArray

    from asyncfetch.config import StreamConfig
    from asyncfetch.formats import Field, Sample
    from asyncfetch.order.plan import PassPlan, Step
    from asyncfetch.runtime.memory_pool import MemoryPool
    from asyncfetch.stream.decode_jobs import DecodeJob

MIB = 1024 * 1024
PREFETCHED_BATCHES = 2
"""Batches that each worker makes ahead: torch's default of ``prefetch_factor``."""
WORKER_MIB = 250
"""Memory of a loader's worker that was spawned, beside its samples: an estimate. One that was forked shares much."""


class Layout(NamedTuple):
    """The values of a batch of samples that are all alike."""

    fields: Mapping[str, Field]
    pictures: frozenset[str]
    """Keys of pictures, which have the last three axes."""


class Room(NamedTuple):
    """Memory for a batch."""

    arrays: list[NDArray[np.uint8]]
    """Writable and aligned; nothing else refers to them."""
    slot: Any = None
    """The slot of shared memory that they lie in."""
    tensors: list[torch.Tensor] | None = None
    """The arrays as tensors, where a library must know which memory it hands out."""


class BatchMemory(Protocol):
    """A source of memory for batches. Thread-safe."""

    def take(self, nbytes: Sequence[int]) -> Room:
        """Arrays of these sizes."""


class PooledMemory(BatchMemory):
    """Blocks of this process, each used again when the last tensor on it is gone."""

    def __init__(self, pool: MemoryPool) -> None:
        self._pool = pool

    @override
    def take(self, nbytes: Sequence[int]) -> Room:
        """Each is a block of its own, so that actions that are kept keep no pictures."""
        return Room([self._pool.take(each) for each in nbytes])


class PinnedMemory(BatchMemory):
    """Page-locked memory of torch's own, from which a copy to the GPU needs no other one before it.

    Torch keeps it for the next batch. And it knows which copies to a device still read it: memory that we had pinned
    would be filled again under a copy that runs.
    """

    @override
    def take(self, nbytes: Sequence[int]) -> Room:
        import torch

        tensors = [torch.empty(each, dtype=torch.uint8, device="cpu", pin_memory=True) for each in nbytes]
        return Room([tensor.numpy() for tensor in tensors], tensors=tensors)

    def pinned(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch with its tensors there."""
        import torch

        def moved(value: Any) -> Any:  # noqa: ANN401
            on_cpu = isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.layout == torch.strided
            return value.pin_memory() if on_cpu else value

        return {key: moved(value) for key, value in batch.items()}


class RowBatch:
    """Room for so many samples of one layout. Its memory is taken when the first of them is written."""

    def __init__(self, layout: Layout, size: int, memory: BatchMemory) -> None:
        self._layout, self._size, self._memory = layout, size, memory
        self._lock = threading.Lock()
        self._columns: dict[str, Any] | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        """Tensors of columns in a library's memory."""
        self.slot: Any = None
        """The slot of shared memory that it lies in, if it does."""

    def columns(self) -> Mapping[str, Any]:
        """An array of each tensor, channels last; of anything else a list. Waits for memory: call it in a thread."""
        with self._lock:
            if self._columns is None:
                self._columns = self._make()
        return self._columns

    def _make(self) -> dict[str, Any]:
        fields = self._layout.fields
        room = self._memory.take([self._size * field.nbytes for field in fields.values() if field.is_tensor])
        self.slot = room.slot
        columns: dict[str, Any] = {key: [None] * self._size for key in fields}
        keys = [key for key, field in fields.items() if field.is_tensor]
        for number, key in enumerate(keys):
            shape = (self._size, *fields[key].shape)
            if key in self._layout.pictures:
                shape = (*shape[:-3], *shape[-2:], shape[-3])
            columns[key] = room.arrays[number].view(fields[key].dtype).reshape(shape)
            if room.tensors is not None:
                import torch

                self._tensors[key] = room.tensors[number].view(getattr(torch, fields[key].dtype)).view(shape)
        return columns

    def rows(self, rows: slice | int) -> Sample:
        """Some of it, or one sample, as tensors on its memory."""
        return {key: self._value(key, column, rows) for key, column in self.columns().items()}

    def _value(self, key: str, column: Any, rows: slice | int) -> Any:  # noqa: ANN401
        import torch

        if isinstance(column, list):
            return column[rows]
        tensor = self._tensors[key][rows] if key in self._tensors else torch.from_numpy(np.asarray(column[rows]))
        return tensor.movedim(-1, -3) if key in self._layout.pictures else tensor


class BatchRow:
    """A sample in its place in a batch. See ``lerobot.Row``.

    Args:
        batch, number: Its place.
        names: The batch's key by the sample's, where they differ.
        without: Keys that the batch doesn't have, and what they hold.
    """

    __slots__ = ("batch", "names", "number", "without")

    def __init__(
        self,
        batch: RowBatch,
        number: int,
        names: Mapping[str, str] | None = None,
        without: Mapping[str, Field] | None = None,
    ) -> None:
        self.batch, self.number, self.names, self.without = batch, number, names or {}, without or {}

    def put(self, key: str, value: object) -> None:
        """Write a value."""
        if key not in self.without:
            self.batch.columns()[self.names.get(key, key)][self.number] = value

    def at(self, key: str) -> NDArray[Any]:
        """Return the array that pictures go to, channels last."""
        if key in self.without:
            field = self.without[key]
            return np.empty((*field.shape[:-3], *field.shape[-2:], field.shape[-3]), field.dtype)
        room: NDArray[Any] = self.batch.columns()[self.names.get(key, key)][self.number]
        return room

    def sample(self) -> Sample:
        """Return the sample by itself, on the batch's memory."""
        return self.batch.rows(self.number)

    def __deepcopy__(self, memo: dict[int, Any]) -> Sample:
        from copy import deepcopy

        import torch

        # Of a tensor that is a part of another one deepcopy copies all of that.
        return {
            key: value.clone() if isinstance(value, torch.Tensor) else deepcopy(value, memo)
            for key, value in self.sample().items()
        }


def batch_of(samples: Sequence[Any]) -> tuple[RowBatch, slice] | None:
    """The batch where the samples are rows of one that follow one another, and which ones; else None."""
    first = samples[0]
    if not isinstance(first, BatchRow):
        return None
    numbers = range(first.number, first.number + len(samples))
    are_its = all(
        isinstance(sample, BatchRow) and sample.batch is first.batch and sample.number == number
        for sample, number in zip(samples, numbers, strict=True)
    )
    return (first.batch, slice(numbers.start, numbers.stop)) if are_its else None


def samples_of(rows: Sequence[Any]) -> list[Any]:
    """Return the samples, rows of batches among them as samples on their memory."""
    return [row.sample() if isinstance(row, BatchRow) else row for row in rows]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The most that a rank takes, in MiB, beside what Python and the libraries take without any data."""

    clips: float
    """``max_bytes``: clips, table rows and indexes, and the decoders on them."""
    decoded: float
    """``decoded_max_bytes``: samples, or rows of batches, that wait for the consumer."""
    batches: float
    """The one that the trainer has, and the rows beside those that are counted, of the first and the last batch; where
    ``on_error`` isn't "raise" two more, copied together. Memory that waits for its next batch is among all these."""
    workers: float
    """Processes with torch in them, a loader's workers or that of ``serve_samples``, and batches that are made ahead
    there."""

    @property
    def total(self) -> float:
        """All together."""
        return self.clips + self.decoded + self.batches + self.workers

    @classmethod
    def of(
        cls,
        config: StreamConfig,
        sample_bytes: int,
        batch_size: int,
        num_workers: int,
        ahead: Callable[[float], float] = lambda batch: PREFETCHED_BATCHES * batch,
    ) -> MemoryPlan:
        """Return the plan for samples of this size. ``ahead`` says what a worker makes ahead, by a batch's size."""
        batch = batch_size * sample_bytes / MIB
        copied = 0 if config.on_error == "raise" else 2  # around bad data: a new one, and the rows that it was made of
        return cls(
            clips=config.max_bytes / MIB,
            decoded=config.decoded_max_bytes / MIB,
            batches=batch * (1 + (2 + copied) * max(1, num_workers)),
            workers=num_workers * (ahead(batch) + WORKER_MIB),
        )


class Rows:
    """Assigns each sample of a pass its row of a batch, where the layout of a step's is known before."""

    def __init__(self, plan: PassPlan, layout: Callable[[Step], Layout | None], memory: BatchMemory) -> None:
        self._plan, self._layout, self._memory = plan, layout, memory
        self._size = plan.progress.placement.batch_size or 1
        self._open: WeakValueDictionary[int, RowBatch] = WeakValueDictionary()
        self._left_out = 0
        self._shift = 0
        """Samples left out before the batches that are open begin."""
        self.are_used = False
        """True where the latest job has rows, or has none because of others that are shifted otherwise."""
        self._is_stopped = False

    def of(self, job: DecodeJob) -> list[BatchRow] | None:
        """A row for each of the job's steps; None where one of them can't have any."""
        if not self._open:
            self._shift = self._left_out
        # Batches that are shifted otherwise would take memory for the same samples once more.
        is_aligned = self._shift == self._left_out
        rows = self._found(job) if is_aligned and not self._is_stopped else []
        self.are_used = bool(rows) or not is_aligned
        return rows or None

    def _found(self, job: DecodeJob) -> list[BatchRow]:
        rows = []
        for step in job.steps:
            number = step.number - self._plan.begun
            if self._plan.parts_batches:
                batch, row = self._plan.batch_of(step.number), step.number - self._plan.batch_start(step.number)
            else:
                batch, row = divmod(number - self._shift, self._size)
            if (room := self._open.get(batch)) is None:
                layout = self._layout(step)
                if layout is None:
                    return []
                left = len(self._plan) - (number - row)  # a batch may be larger than what there is
                room = self._open[batch] = RowBatch(layout, min(self._size, left), self._memory)
            rows.append(BatchRow(room, row))
        return rows

    def stop(self) -> None:
        """Make samples by themselves from now on: a picture doesn't fit, and others may not either."""
        self._is_stopped = True

    def leave_out(self) -> None:
        """Note that a sample won't come: those behind it move up by one, unless batches are parted."""
        self._left_out += not self._plan.parts_batches
