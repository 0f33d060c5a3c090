"""The sample tables of a track as columns.

A *sample* is one coded frame. Samples are numbered from 0 in decode order, times are integer ticks of the track's
time scale. A column is one number where it is constant, as durations mostly are, and else of the narrowest type that
holds it, so that a frame costs about 4 to 8 bytes. Sums (decode time, byte offset) are kept once per BLOCK samples;
what lies between is summed when asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from asyncfetch.media.boxes import Box

BLOCK = 256
"""Samples between two kept sums: 0.06 bytes a frame, and at most 255 numbers to add before those asked for."""
MAX_CONSTANT_SAMPLES = 1 << 20
"""Most samples of a track of equal sizes (9.7 hours at 30 fps): there no table's length bounds their count."""
MAX_HELD_SAMPLES = 48
"""Number of samples after which, from a key frame of H.264, a decoder has given it out, and what it took in till then:
it holds back at most 16 pictures, and encoders let no more than 16 follow a key frame that are shown before it."""
MAX_OFFSET = 1 << 28
"""Composition offsets from here on make FFmpeg ignore the whole table, and show other times than we compute."""
MAX_DURATION = 1 << 31
"""FFmpeg takes durations from here on for negative."""
MAX_POSITION = 1 << 62
"""No file is this long; sums up to here fit 64 bits."""


@dataclass(frozen=True, slots=True, eq=False)
class ByteRuns:
    """Samples [first, stop) as runs of samples that follow each other in the file without a gap."""

    offset: NDArray[np.int64]
    """Position at which each run starts in the file."""
    num_bytes: NDArray[np.int64]
    num_samples: NDArray[np.int64]
    description: NDArray[np.int64]
    """Number of the sample description of stsd that the run's samples use, from 1."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleTable:
    """Sizes, times, key frames and byte offsets of all samples of a track, copied from what they were parsed from."""

    num_samples: int
    sizes: NDArray[Any]
    """Bytes of each sample."""
    durations: NDArray[Any]
    """Ticks from each sample's decode time to the next one's."""
    composition: NDArray[Any]
    """Ticks from decode to presentation time of each sample, may be negative."""
    composition_limits: tuple[int, int]
    """Least and greatest composition offset."""
    sync: NDArray[np.int32] | None
    """Samples that decoding can start at, ascending; None means every sample."""
    has_open_gops: bool
    """True if a picture follows some key frame in decode order and precedes it on the screen. Nothing else in a file's
    tables tells an open GOP from a closed one."""
    block_times: NDArray[np.int64]
    """Decode time of samples 0, BLOCK, 2 BLOCK ..."""
    run_first: NDArray[np.int32]
    """First sample of each run of adjacent samples; a run is at most BLOCK long."""
    run_offset: NDArray[np.int64]
    """Position at which each run starts in the file."""
    run_description: NDArray[Any]
    """Sample description of each run, from 1."""
    data_stop: int
    """One past the last byte of the file that belongs to a sample."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the columns hold."""
        columns = (self.sizes, self.durations, self.composition, self.block_times)
        runs = (self.run_first, self.run_offset, self.run_description)
        sync = () if self.sync is None else (self.sync,)
        return sum(column.itemsize if column.strides == (0,) else column.nbytes for column in (*columns, *runs, *sync))

    @property
    def most_delay(self) -> int:
        """Ticks by which presentation lags behind decoding at most; negative offsets had it subtracted from all."""
        least, greatest = self.composition_limits
        return greatest - min(least, 0)

    def decode_times(self, first: int, stop: int) -> NDArray[np.int64]:
        """Decode times of samples [first, stop)."""
        block = first // BLOCK
        times = np.empty(stop - block * BLOCK + 1, np.int64)
        times[0] = 0
        np.cumsum(self.durations[block * BLOCK : stop], out=times[1:])
        times += self.block_times[block]
        return times[first - block * BLOCK : -1]

    def presentation_times(self, first: int, stop: int) -> NDArray[np.int64]:
        """Presentation times of samples [first, stop), before any edit list."""
        times = self.decode_times(first, stop)
        times += self.composition[first:stop]
        return times

    def count_before(self, time: int) -> int:
        """Return how many samples have a decode time below ``time``: the number of the first one that hasn't."""
        time = min(max(time, -MAX_POSITION), MAX_POSITION)
        block = int(np.searchsorted(self.block_times, time)) - 1
        if block < 0:
            return 0
        first = block * BLOCK
        times = self.decode_times(first, min(first + BLOCK, self.num_samples))
        return first + int(np.searchsorted(times, time))

    def presented(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The samples presented in [start, stop), in that order, and when, before any edit list."""
        least, greatest = self.composition_limits
        low, high = np.searchsorted(self.block_times, (start - greatest, stop - least)).tolist()
        first = max(0, low - 1) * BLOCK
        times = self.presentation_times(first, max(first, min(high * BLOCK, self.num_samples)))
        order = np.argsort(times, kind="stable")
        low, high = np.searchsorted(times, (start, stop), sorter=order).tolist()
        order = order[low:high]
        return order + first, times[order]

    def decodable_from(self, samples: NDArray[np.int64], earlier: int = 0) -> int:
        """Return where decoding has to start for these samples, at least one.

        That is the last key frame at or before the first of them. One more back where pictures are wanted that follow
        the key frame in decode order and precede it on the screen (open GOP): they may refer to the group before;
        standards let them refer no further. The first sample where there is no key frame in front. Some more key frames
        ``earlier`` where decoding can't start at every one that the file marks.
        """
        lowest = int(samples.min())
        if self.sync is None:
            return lowest
        nearest = int(np.searchsorted(self.sync, lowest, "right")) - 1
        if nearest < 0:
            return 0
        if self.has_open_gops:
            key = int(self.sync[nearest])
            times = self.presentation_times(key, int(samples.max()) + 1)
            earlier += bool((times[samples - key] < times[0]).any())
        return int(self.sync[max(0, nearest - earlier)])

    def last_entry_before(self, stop: int) -> int:
        """The last key frame at which to start a decoder of H.264 that goes to the sample before ``stop``: see clip.py.

        That is the last one that comes out before the end, as does what goes in between. A picture comes out when one
        goes in whose decode time is its presentation time: by the greatest composition offset later. The first key
        frame where no other does; without open GOPs it may be any sample.
        """
        if self.sync is None or not self.has_open_gops:
            return stop - 1
        early_enough = self.count_before(int(self.decode_times(stop - 1, stop)[0]) - 2 * self.most_delay + 1)
        early_enough = max(early_enough, stop - MAX_HELD_SAMPLES)  # a gap in time makes one offset large
        nearest = max(0, int(np.searchsorted(self.sync, early_enough)) - 1)
        return min(int(self.sync[nearest]), stop - 1)

    def sync_between(self, first: int, stop: int) -> NDArray[np.int32] | None:
        """Key frames among samples [first, stop), counted from ``first``; None means all."""
        if self.sync is None:
            return None
        low, high = np.searchsorted(self.sync, (first, stop))
        return self.sync[low:high] - np.int32(first)

    def byte_runs(self, first: int, stop: int) -> ByteRuns:
        """Return where samples [first, stop) lie in the file; at least one sample."""
        behind, high = np.searchsorted(self.run_first, (first + 1, stop)).tolist()
        low = behind - 1
        origin = int(self.run_first[low])
        ends = np.zeros(stop - origin + 1, np.int64)
        np.cumsum(self.sizes[origin:stop], out=ends[1:])
        starts = self.run_first[low:high] - origin
        shift = self.run_offset[low:high] - ends[starts]
        description = self.run_description[low:high]
        new = changes(shift) | changes(description)
        shift = shift[new]
        edges = np.append(np.maximum(starts[new], first - origin), stop - origin)
        ends = ends[edges]
        return ByteRuns(
            offset=ends[:-1] + shift,
            num_bytes=ends[1:] - ends[:-1],
            num_samples=edges[1:] - edges[:-1],
            description=description[new],
        )


class Columns(NamedTuple):
    """The samples of a track in decode order, as its boxes have them: all, or those of one fragment."""

    sizes: NDArray[Any]
    durations: NDArray[Any]
    composition: NDArray[Any]
    sync: NDArray[np.int64] | None
    """Key frames, from 0, ascending; None means all."""
    firsts: NDArray[np.int64]
    """First sample of each run of neighbours in the file; no run is empty."""
    offsets: NDArray[np.int64]
    """Position at which each run starts in the file."""
    description: NDArray[np.int64]
    """Sample description of each run, from 1."""
    start: int = 0
    """Decode time of the first sample."""


def joined(parts: Sequence[Columns]) -> Columns:
    """The columns of parts that follow each other, at least one; the first one's start is that of all."""
    if len(parts) == 1:
        return parts[0]
    counts = np.array([len(part.sizes) for part in parts])
    before = (np.cumsum(counts) - counts).tolist()
    sync = None
    if any(part.sync is not None for part in parts):
        marked = (np.arange(len(part.sizes)) if part.sync is None else part.sync for part in parts)
        sync = np.concatenate([each + shift for each, shift in zip(marked, before, strict=True)])
    return Columns(
        sizes=np.concatenate([part.sizes for part in parts]),
        durations=np.concatenate([part.durations for part in parts]),
        composition=np.concatenate([part.composition for part in parts]),
        sync=sync,
        firsts=np.concatenate([part.firsts + shift for part, shift in zip(parts, before, strict=True)]),
        offsets=np.concatenate([part.offsets for part in parts]),
        description=np.concatenate([part.description for part in parts]),
        start=parts[0].start,
    )


def read_columns(stbl: Box, *, group: int = 1) -> Columns:
    """The columns of a sample table box, of at least one sample.

    Args:
        stbl: The box.
        group: Up to so many samples that lie side by side become one, if all have the same size and duration. A sample
            of PCM is one value a channel.

    Raises:
        FormatError: A table is cut off, disagrees with another one, or holds numbers that can't be meant.
    """
    sizes = _sizes(stbl)
    count = len(sizes)
    is_even = group > 1 and sizes.strides == (0,) and stbl.require("stts").u32(4) == 1
    is_even &= stbl.child("ctts") is None and stbl.child("stss") is None
    if sizes.strides == (0,) and count > MAX_CONSTANT_SAMPLES * (group if is_even else 1):
        raise stbl.error(f"{count} samples of {sizes[0]} bytes each: more than {MAX_CONSTANT_SAMPLES} can't be meant")
    firsts, offsets, description = _runs(stbl, count)
    columns = Columns(
        sizes=sizes,
        durations=_durations(stbl, count),
        composition=_composition(stbl, count),
        sync=_sync(stbl, count),
        firsts=firsts,
        offsets=offsets,
        description=description,
    )
    return _grouped(columns, group) if is_even else columns


def _grouped(columns: Columns, group: int) -> Columns:
    counts = np.diff(columns.firsts, append=len(columns.sizes))
    groups = -(-counts // group)
    firsts = np.cumsum(groups) - groups
    place = np.arange(int(groups.sum())) - np.repeat(firsts, groups)
    lengths = np.minimum(np.repeat(counts, groups) - place * group, group)
    return columns._replace(
        sizes=lengths * int(columns.sizes[0]),
        durations=lengths * int(columns.durations[0]),
        composition=np.broadcast_to(np.int64(0), lengths.shape),
        firsts=firsts,
    )


def sample_table(columns: Columns, box: Box) -> SampleTable:
    """The columns as a table. ``box``, which they came from, is named in errors.

    Raises:
        FormatError: They contradict each other, or hold numbers that can't be meant.
    """
    if (longest := int(columns.durations.max())) >= MAX_DURATION:
        raise box.error(f"a sample lasts {longest} ticks, which is {MAX_DURATION} or more and can't be meant")
    if (greatest := int(np.abs(columns.composition).max())) >= MAX_OFFSET:
        raise box.error(f"a composition offset is {greatest} ticks, which is {MAX_OFFSET} or more and can't be meant")
    sizes, sync = _compact(columns.sizes), columns.sync
    durations, composition = _compact(columns.durations), _compact(columns.composition)
    times = np.concatenate(([0], np.cumsum(durations[:-1], dtype=np.int64))) + columns.start
    presentation = times + composition
    if (np.diff(presentation if sync is None else presentation[sync]) < 0).any():
        raise box.error(
            "not all the frames can be key frames that it says are (stss; without it, all): they are shown in another "
            "order than they are decoded in; remux with: ffmpeg -i IN -c copy OUT.mp4"
        )
    run_first, run_offset, run_description, data_stop = _split_runs(columns, box)
    return SampleTable(
        num_samples=len(sizes),
        sizes=sizes,
        durations=durations,
        composition=composition,
        composition_limits=(int(composition.min()), int(composition.max())),
        sync=None if sync is None else sync.astype(np.int32),
        has_open_gops=sync is not None and bool((np.minimum.reduceat(presentation, sync) < presentation[sync]).any()),
        block_times=times[::BLOCK].copy(),
        run_first=run_first,
        run_offset=run_offset,
        run_description=run_description,
        data_stop=data_stop,
    )


def changes(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return where a value differs from the one before it; the first always does."""
    changed = np.empty(len(values), np.bool_)
    changed[:1] = True
    np.not_equal(values[1:], values[:-1], out=changed[1:])
    return changed


def _compact(values: NDArray[Any]) -> NDArray[Any]:
    """The column in the narrowest type; one stored number where all are equal."""
    low, high = int(values.min()), int(values.max())
    dtype = np.result_type(np.min_scalar_type(low), np.min_scalar_type(high))
    if low == high:
        return np.broadcast_to(dtype.type(low), values.shape)
    return values.astype(dtype)


def _repeated(values: NDArray[np.int64], counts: NDArray[np.int64], total: int) -> NDArray[Any]:
    """Value i ``counts[i]`` times, in all ``total``; one stored number where there is one value."""
    if len(values) and (values == values[0]).all():
        return np.broadcast_to(values[0], (total,))
    return np.repeat(values, counts)


def count_samples(stbl: Box) -> int:
    """Number of samples that a sample table box has; 0 where they all lie in fragments."""
    return (stbl.child("stsz") or stbl.child("stz2") or stbl.require("stsz")).u32(8)


def _sizes(stbl: Box) -> NDArray[Any]:
    box = stbl.child("stsz") or stbl.child("stz2") or stbl.require("stsz")
    size, count = box.unpack("II", 4)
    if count == 0:
        raise box.error("the track has 0 samples")
    if box.kind == "stz2":
        return _compact_sizes(box, size & 0xFF, count)
    if size == 0:
        return box.table(">u4", count, 12)
    return np.broadcast_to(np.int64(size), (count,))


def _compact_sizes(stz2: Box, bits: int, count: int) -> NDArray[Any]:
    """Sizes of 4, 8 or 16 bits each; of two in a byte, the first one is in the upper half."""
    if bits == 4:
        pairs = stz2.table(">u1", (count + 1) // 2, 12)
        return np.stack((pairs >> 4, pairs & 0xF), axis=1).reshape(-1)[:count]
    if bits not in {8, 16}:
        raise stz2.error(f"its sizes have {bits} bits each; there are 4, 8 and 16")
    return stz2.table(f">u{bits // 8}", count, 12)


def _run_length(box: Box, dtype: str, total: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(counts, values) of a run-length table; every sample has to have its value."""
    table = box.table(np.dtype([("count", ">u4"), ("value", dtype)]), box.u32(4), 8)
    counts = table["count"].astype(np.int64)
    if (described := int(counts.sum())) != total:
        raise box.error(f"describes {described} samples, but there are {total} (stsz)")
    return counts, table["value"].astype(np.int64)


def _durations(stbl: Box, total: int) -> NDArray[Any]:
    stts = stbl.require("stts")
    counts, durations = _run_length(stts, ">u4", total)
    return _repeated(durations, counts, total)


def _composition(stbl: Box, total: int) -> NDArray[Any]:
    ctts = stbl.child("ctts")
    if ctts is None:
        return np.broadcast_to(np.int64(0), (total,))
    # Version 0 has unsigned offsets by the book; QuickTime writes signed ones there, and FFmpeg reads them so.
    counts, offsets = _run_length(ctts, ">i4", total)
    return _repeated(offsets, counts, total)


def _sync(stbl: Box, total: int) -> NDArray[np.int64] | None:
    stss = stbl.child("stss")
    if stss is None:
        return None
    numbers = stss.table(">u4", stss.u32(4), 8).astype(np.int64)
    if not len(numbers):
        raise stss.error("marks no sample as a key frame")
    if numbers[0] < 1 or numbers[-1] > total or (np.diff(numbers) <= 0).any():
        raise stss.error(f"its sample numbers aren't ascending within 1..{total}")
    return numbers - 1


def _runs(stbl: Box, total: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(first sample, position, description) of each chunk that isn't empty."""
    offsets = _chunk_offsets(stbl)
    counts, description = _chunk_samples(stbl, len(offsets), total)
    used = counts > 0
    offsets, counts, description = offsets[used], counts[used], description[used]
    return np.cumsum(counts) - counts, offsets, description


def _split_runs(columns: Columns, box: Box) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[Any], int]:
    """(run_first, run_offset, run_description, data_stop) of SampleTable."""
    total, firsts = len(columns.sizes), columns.firsts
    before = np.zeros(total + 1, np.int64)  # bytes in front of each sample, were there no gaps
    np.cumsum(columns.sizes, out=before[1:])
    shift = columns.offsets - before[firsts]
    data_stop = int((shift + before[np.append(firsts[1:], total)]).max())
    if data_stop >= MAX_POSITION:
        raise box.error(f"its samples run to byte {data_stop}")

    new = changes(shift) | changes(columns.description)
    firsts, shift, description = firsts[new], shift[new], columns.description[new]
    run_first = np.union1d(firsts, np.arange(0, total, BLOCK))
    source = np.searchsorted(firsts, run_first, "right") - 1
    return (
        run_first.astype(np.int32),
        shift[source] + before[run_first],
        _compact(description[source]),
        data_stop,
    )


def _chunk_offsets(stbl: Box) -> NDArray[np.int64]:
    box = stbl.child("stco") or stbl.require("co64")
    offsets = box.table(">u4" if box.kind == "stco" else ">u8", box.u32(4), 8)
    if not len(offsets):
        raise box.error("has 0 chunks, but there are samples (stsz)")
    if int(offsets.max()) >= MAX_POSITION:
        raise box.error(f"a chunk starts at byte {int(offsets.max())}, which can't be meant")
    return offsets.astype(np.int64)


def _chunk_samples(stbl: Box, num_chunks: int, total: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(number of samples, sample description) of each chunk."""
    stsc = stbl.require("stsc")
    entry = np.dtype([("chunk", ">u4"), ("samples", ">u4"), ("description", ">u4")])
    table = stsc.table(entry, stsc.u32(4), 8)
    firsts = table["chunk"].astype(np.int64)
    lengths = np.diff(firsts, append=num_chunks + 1)
    if not len(firsts) or firsts[0] != 1 or (lengths <= 0).any():
        raise stsc.error(f"its chunk numbers aren't ascending from 1 within 1..{num_chunks}")
    counts = np.repeat(table["samples"].astype(np.int64), lengths)
    if (described := int(counts.sum())) != total:
        raise stsc.error(f"its {num_chunks} chunks hold {described} samples, but there are {total} (stsz)")
    return counts, np.repeat(table["description"].astype(np.int64), lengths)
