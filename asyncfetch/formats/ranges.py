"""Formats of a user's own, each sample made of some byte ranges: ``RangeFormat``, and how a stream reads it.

The entries of such a format are the stream's episodes, and their samples its frames.
"""

from __future__ import annotations

import copy
import hashlib
import operator
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from typing_extensions import override

from asyncfetch.config import PrivateUrl, StreamConfig
from asyncfetch.config.checks import is_whole_number, require
from asyncfetch.decode.backends import import_torch
from asyncfetch.errors import AsyncFetchError, ConfigError, EpisodeNotFound, FormatError, UsageError, redact_url
from asyncfetch.formats.clips import PlannedRange
from asyncfetch.formats.held import HeldStretch
from asyncfetch.formats.protocol import Format, SampleMaker
from asyncfetch.formats.reader import StretchReader
from asyncfetch.formats.samples import Field, by_reader
from asyncfetch.formats.stretch_cache import EpisodeCacheStatistics, KeptPlan, PlanWith, StretchCache, kept_plan
from asyncfetch.observe.report import Words
from asyncfetch.ranges import HEADERS_BYTES, ByteRange, join_spans
from asyncfetch.runtime.concurrently import gather
from asyncfetch.runtime.fork import LoopGuard, forks_wait
from asyncfetch.runtime.threads import run_sync

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from numpy.typing import NDArray

    from asyncfetch.fetch import Fetcher, RangeReader
    from asyncfetch.formats.samples import Asked, Row, Sample
    from asyncfetch.formats.stretch import Reach, Stretch
    from asyncfetch.resources import Engine

PART_BYTES = 256
"""About what the place of one range of a sample takes in a plan."""
GUESSED_SAMPLE_BYTES = 1024 * 1024
"""Size of samples before any was made."""
WORDS = Words(
    entry="entry",
    entries="entries",
    samples="samples",
    ranges="byte ranges",
    fewer_requests="fewer and longer requests: samples of a segment that lie side by side (segment_samples)",
    less_decoding="make the format's sample() faster, or use more cores",
    smaller_segments="give it fewer samples a segment (segment_samples)",
)


class RangeFormat(ABC):
    """Data of a kind of your own for a ``Stream``, of which each sample is made of some byte ranges.

    A subclass says which entries there are, which bytes a sample of one is made of, and how. A stream does the rest:
    order, fetching ahead, batches, workers, states, mixtures, reports.

    Each pass, worker and session of a stream opens a shallow copy: what ``open`` keeps on ``self`` is for the other
    methods, and the format itself pickles as it was made. So does its stream, but for the password or signature of
    ``url``, as with other streams.

    Attributes:
        url: The place of the data: for messages, and for ``fingerprint``. Empty by default.
        segment_samples: Neighbouring samples of an entry that are fetched and held as one; 1 by default. More are for
            small samples that lie side by side: each rank then draws from ``StreamConfig(pool_segments=...)`` times as
            many at a time. ``StreamConfig(segment_seconds=...)`` scales it, against its default.
    """

    url: str = ""
    segment_samples: int = 1

    @abstractmethod
    async def open(self, reader: RangeReader, fetcher: Fetcher) -> Mapping[str, int]:
        """Find the entries. Called on the loop: don't block it.

        Args:
            reader: Reads byte ranges, through the disk cache where there is one.
            fetcher: Lists directories and prefixes.

        Returns:
            The number of samples that each entry gives, by its name, such as its url. Their order has to be the same
            whenever the data is.
        """

    @abstractmethod
    def ranges(self, entry: str, number: int) -> Mapping[str, ByteRange]:
        """The bytes that sample ``number`` of an entry is made of, by names of your own. Pure; called on the loop.

        Give the end of a range where you know it: one with ``stop=None`` costs a request for the object's size. Ranges
        that samples have in common are fetched once while they are in memory, and neighbouring ones of a segment
        together.
        """

    @abstractmethod
    def sample(self, entry: str, number: int, data: Mapping[str, bytearray]) -> dict[str, Any]:
        """Make a sample of its bytes, by the names that ``ranges`` gave them. Called in threads, several at a time.

        The bytes are the sample's own: tensors may lie on them, as ``torch.frombuffer`` makes them. Tensors of one key
        that have one shape and dtype become a batch, other values a list.

        Raise FormatError or DecodeError where the bytes are no good: ``StreamConfig(on_error=...)`` says what becomes
        of these samples, and the stream's ``quarantine`` lists their entries. Any other error is raised as it is.
        """

    def layout(self) -> Mapping[str, tuple[str, tuple[int, ...]]] | None:
        """The dtype and shape of every value of a sample, by key; None, the default, where only samples show it.

        For example ``{"image": ("uint8", (3, 96, 96)), "name": ("string", ())}``: torch's name of a dtype, or
        "string" or "object" for what is no tensor. Samples are then written straight into batches, and a ``Mixture``
        can put them into one batch with others of the layout. One of another layout is an error there.
        """
        return None

    def fingerprint(self, entries: Mapping[str, int]) -> str:
        """Equal for equal data, wherever it lies: a state that was saved of other data is refused.

        By default it is made of the class's name, the entries' names without ``url`` in front, and their samples.
        """
        names = [type(self).__qualname__, *(name.removeprefix(self.url) for name in entries)]
        said = hashlib.sha256("\0".join(names).encode())
        said.update(np.fromiter(entries.values(), "<i8", len(entries)).tobytes())
        return said.hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | ({"url": PrivateUrl(self.url)} if self.url else {})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({redact_url(self.url)!r})"


class Part(NamedTuple):
    """The place of a range among the bytes of a stretch."""

    name: str
    """The name of the bytes that it is a part of; empty where the range is."""
    start: int
    """First byte, counted in these."""
    stop: int


Parts: TypeAlias = tuple[Mapping[str, Part], ...]
"""The ranges of each sample of a stretch, by the user's names."""
HeldRanges: TypeAlias = HeldStretch[Parts]


def plan_ranges(asked: Sequence[Mapping[str, ByteRange]]) -> PlanWith[PlannedRange, Parts]:
    """Return the bytes that samples need: ranges that overlap, or lie next to each other, become one. Pure.

    They are by number, in order of url and place.

    Args:
        asked: The ranges of each sample, which have an end.
    """
    wanted: dict[str, set[tuple[int, int]]] = {}
    for one in (one for each in asked for one in each.values() if one.start != one.stop):
        wanted.setdefault(one.url, set()).add((one.start, _stop(one)))
    joined = ((url, span) for url in sorted(wanted) for span in join_spans(wanted[url], HEADERS_BYTES))
    spans = [PlannedRange(url, *span) for url, span in joined]
    places = [(span.url, span.start) for span in spans]

    def part(one: ByteRange) -> Part:
        if one.start == one.stop:
            return Part("", 0, 0)
        number = bisect_right(places, (one.url, one.start)) - 1
        begin = spans[number].start
        return Part(str(number), one.start - begin, _stop(one) - begin)

    parts = tuple({key: part(one) for key, one in each.items()} for each in asked)
    return PlanWith(parts, {str(number): span for number, span in enumerate(spans)})


def _stop(one: ByteRange) -> int:
    assert one.stop is not None
    return one.stop


class RangeCacheStatistics(EpisodeCacheStatistics):
    """A snapshot of a RangeCache."""

    __slots__ = ()
    words = WORDS


class RangeCache(StretchCache[PlannedRange, Parts, HeldRanges]):
    """Fetches the ranges of neighbouring samples of an entry. Loop-bound."""

    statistics_type = RangeCacheStatistics

    def __init__(self, engine: Engine, number: int, reading: RangeFormat, names: Sequence[str]) -> None:
        super().__init__(engine, number, backend=engine.config.decoder)
        self._format = reading
        self._names = names
        self._stat = engine.reader.stat

    @override
    def name(self, stretch: Stretch) -> str:
        return f"samples [{stretch.start}, {stretch.stop}) of {redact_url(self._names[stretch.episode])}"

    def asked(self, episode: int, number: int) -> Mapping[str, ByteRange]:
        """Return what the user says of a sample; ConfigError where that is nothing that can be fetched."""
        entry = self._names[episode]
        try:
            asked: Any = self._format.ranges(entry, number)
        except AsyncFetchError:
            raise
        except Exception as error:
            raise ConfigError(f"{self._call(entry, number)} raised {type(error).__name__}: {error}") from error
        if not isinstance(asked, Mapping) or not all(isinstance(one, ByteRange) for one in asked.values()):
            raise ConfigError(f"{self._call(entry, number)} must give ByteRange by name, in a dict, not {asked!r:.200}")
        return asked

    def _call(self, entry: str, number: int) -> str:
        return f"{type(self._format).__name__}.ranges({redact_url(entry)!r}, {number})"

    async def _make_plan(self, stretch: Stretch) -> KeptPlan[PlannedRange]:
        asked = [self.asked(stretch.episode, number) for number in range(stretch.start, stretch.stop)]
        sizes = {one.url: 0 for each in asked for one in each.values() if one.stop is None}

        async def measure(url: str) -> None:
            sizes[url] = (await self._watch(self._stat(url))).size

        if sizes:
            await gather(*(partial(measure, url) for url in sizes))
            asked = [{key: _closed(one, sizes.get(one.url, 0)) for key, one in each.items()} for each in asked]
        plan = plan_ranges(asked)
        return kept_plan(plan, PART_BYTES * (len(plan) + sum(map(len, asked))))


def _closed(one: ByteRange, size: int) -> ByteRange:
    """Return the range with its end, of an object of this size."""
    if one.stop is not None:
        return one
    start = max(0, size + one.start) if one.start < 0 else one.start
    if start > size:
        raise FormatError(f"{redact_url(one.url)} has {size} bytes, and byte {start} was asked for")
    return ByteRange(one.url, start, size)


class RangeSamples(SampleMaker):
    """Makes the samples of a format of a user's own. Thread-safe, as far as that is."""

    reach: Reach = ()
    pictures: frozenset[str] = frozenset()

    def __init__(self, reading: RangeFormat, names: Sequence[str]) -> None:
        self._format = reading
        self._names = names
        self._layout = _fields(reading)
        self._largest_bytes = 0 if self._layout is None else sum(field.nbytes for field in self._layout.values())

    @property
    @override
    def sample_bytes(self) -> int:
        """About what one sample takes: as much as the largest so far."""
        return self._largest_bytes or GUESSED_SAMPLE_BYTES

    @override
    def layout(self) -> dict[str, Field] | None:
        return self._layout

    @override
    def build(self, asked: Sequence[Asked]) -> list[Sample]:
        samples: list[Sample] = [{} for _ in asked]
        with forks_wait():
            for held, _, places in by_reader(asked):
                for place in places:
                    samples[place] = self._sample(held, asked[place][1])
        return samples

    @override
    def write(self, asked: Sequence[Asked], rows: Sequence[Row]) -> None:
        assert self._layout is not None
        for sample, row in zip(self.build(asked), rows, strict=True):
            for key, value in sample.items():
                row.put(key, value.numpy() if self._layout[key].is_tensor else value)

    def _sample(self, held: HeldRanges, number: int) -> Sample:
        parts = held.beside[number - held.stretch.start]
        data = {
            key: bytearray(held.data(one.name)[one.start : one.stop]) if one.name else bytearray()
            for key, one in parts.items()
        }
        entry = self._names[held.stretch.episode]
        sample = self._format.sample(entry, number, data)
        mistake = self._mistake_of(sample)
        if mistake is not None:
            raise UsageError(f"{type(self._format).__name__}.sample({redact_url(entry)!r}, {number}, ...) {mistake}")
        nbytes = sum(int(getattr(value, "nbytes", 0)) for value in sample.values())
        self._largest_bytes = max(self._largest_bytes, nbytes + sum(map(len, data.values())), 1)
        return sample

    def _mistake_of(self, sample: object) -> str | None:
        """Return what is wrong with a sample, if anything: it is a dict, and of the layout."""
        if not isinstance(sample, dict):
            return f"must give a dict, not {sample!r:.80}: end it by `return sample`"
        if self._layout is None:
            return None
        if sample.keys() != self._layout.keys():
            return f"gave the keys {list(sample)}, and those of layout() are {list(self._layout)}"
        for key, field in self._layout.items():
            found = _described(sample[key])
            if field.is_tensor and found != field:
                return f"gave {key!r} as {found.dtype} {found.shape}, and layout() says {field.dtype} {field.shape}"
        return None


def _fields(reading: RangeFormat) -> dict[str, Field] | None:
    """Return the layout that the user says, if any; ConfigError where it can't be one."""
    said: Any = reading.layout()
    if said is None:
        return None
    try:
        found = {key: Field(dtype, tuple(map(operator.index, shape))) for key, (dtype, shape) in said.items()}
        is_one = all(isinstance(key, str) and isinstance(field.dtype, str) for key, field in found.items())
    except (AttributeError, TypeError, ValueError):
        is_one = False
    if not is_one:
        raise ConfigError(
            f"{type(reading).__name__}.layout() must give dtype and shape by key, such as "
            f"{{'x': ('uint8', (3, 32, 32))}}, not {said!r:.200}"
        )
    return found


def _described(value: object) -> Field:
    if not isinstance(value, import_torch().Tensor):
        return Field(type(value).__name__)
    return Field(str(value.dtype).removeprefix("torch."), tuple(value.shape))


class OpenRanges:
    """A format of a user's own that is open for a stream."""

    group_frames = 1
    stats = None
    file_bytes = None
    draws_anew = False

    def __init__(
        self,
        reading: RangeFormat,
        engine: Engine,
        config: StreamConfig,
        *,
        names: Sequence[str],
        counts: NDArray[np.int64],
        fingerprint: str,
    ) -> None:
        self.config, self.url = config, reading.url
        self.fingerprint = fingerprint
        self._format = reading
        self._names, self._counts = names, counts
        self._cache = RangeCache(engine, engine.join(0), reading, names)
        guard = LoopGuard(f"this {type(reading).__name__}")
        self.reader: StretchReader[HeldRanges] = StretchReader(
            self.url or type(reading).__name__, engine, self._cache, config=config, guard=guard
        )
        self._samples = RangeSamples(reading, names)

    @property
    def frames_per_second(self) -> float | None:
        """The rate at which the default ``segment_seconds`` is ``segment_samples``; None where each is a segment."""
        if self._format.segment_samples == 1:
            return None
        return self._format.segment_samples / StreamConfig().segment_seconds

    def episodes(self, chosen: Sequence[int] | None) -> Sequence[int]:
        """Return the numbers of all entries, or of those chosen. EpisodeNotFound where one isn't there."""
        return range(len(self._names)) if chosen is None else self._positions(chosen).tolist()

    def lengths(self, chosen: Sequence[int] | None) -> NDArray[np.int64]:
        """Return how many samples each of them gives."""
        return self._counts if chosen is None else self._counts[self._positions(chosen)]

    def files(self, chosen: Sequence[int] | None) -> dict[str, NDArray[np.int64]]:
        """Return their numbers once more: each entry counts as a file."""
        return {"entry": np.array(self.episodes(chosen), np.int64)}

    def urls(self, episode: int) -> list[str]:
        """Return the urls of an entry's first sample, or the entry's name where that has none."""
        asked = self._cache.asked(episode, 0) if self._counts[episode] else {}
        return list(dict.fromkeys(one.url for one in asked.values())) or [self._names[episode]]

    def sample_maker(self) -> RangeSamples:
        """Return the maker of its samples, which all passes share."""
        return self._samples

    def _positions(self, chosen: Sequence[int]) -> NDArray[np.int64]:
        numbers = np.asarray(chosen, np.int64).reshape(-1)
        outside = numbers[(numbers < 0) | (numbers >= len(self._names))]
        if len(outside):
            raise EpisodeNotFound(f"{self._format!r} has entries [0, {len(self._names)}), not {int(outside[0])}")
        return numbers


@dataclass(frozen=True, slots=True, repr=False)
class OwnFormat(Format):
    """A format of a user's own, as a stream reads it."""

    format: RangeFormat

    is_open = False

    def __post_init__(self) -> None:
        kind, url, samples = type(self.format).__name__, self.format.url, self.format.segment_samples
        require(isinstance(url, str), f"{kind}.url must be a string, not of type {type(url).__name__}: try str(path)")
        is_count = is_whole_number(samples) and samples >= 1
        require(is_count, f"{kind}.segment_samples must be a whole number from 1, not {samples!r}")

    @override
    def reader(self) -> None:
        pass

    @asynccontextmanager
    @override
    async def opened(self, engine: Engine | None, config: StreamConfig) -> AsyncIterator[OpenRanges]:
        assert engine is not None
        reading = copy.copy(self.format)
        async with engine.lister() as fetcher:
            entries = await reading.open(engine.reader, fetcher)
        counts, fingerprint = await run_sync(partial(_read_entries, reading, entries))
        opened = OpenRanges(reading, engine, config, names=[*entries], counts=counts, fingerprint=fingerprint)
        yield opened
        opened.reader.is_closed = True

    def __repr__(self) -> str:
        return repr(self.format)


def _read_entries(reading: RangeFormat, entries: Any) -> tuple[NDArray[np.int64], str]:  # noqa: ANN401 - a user's
    """Return the samples of each entry, and the fingerprint of all."""
    call = f"{type(reading).__name__}.open()"
    if not isinstance(entries, Mapping):
        raise ConfigError(f"{call} must give the number of samples by the entry's name, in a dict, not {entries!r:.80}")
    for name, count in entries.items():
        if type(name) is str and type(count) is int and count >= 0:
            continue  # of a million entries, what takes longer would be seconds
        if not isinstance(name, str) or not is_whole_number(count) or count < 0:
            raise ConfigError(
                f"{call} must give names and whole numbers from 0, not {redact_url(str(name))!r}: {count!r:.80}"
            )
    return np.fromiter(entries.values(), np.int64, len(entries)), reading.fingerprint(entries)
