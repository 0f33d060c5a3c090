"""Statistics, their sums and tables, and durations, counted in buckets that are wider for longer durations.

A list of all durations would grow for ever, and a sample of them loses the rare slow ones, which matter most. So the
logarithm of a duration is its bucket, as in DDSketch (Masson, Rim, Lee: "DDSketch: a fast and fully-mergeable quantile
sketch with relative-error guarantees", VLDB 2019): every duration of a bucket is within RELATIVE_ERROR of the bucket's
value, whatever the distribution, and two histograms merge by addition.

DDSketch grows and collapses its buckets to fit any numbers. Ours are durations, so their range is known and fixed.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import accumulate
from math import ceil, log
from operator import add
from typing import Any, ClassVar, Self, TypeVar


class Figures:
    """A dataclass of statistics. Its ``repr`` is a line of the figures that matter, its ``str`` a table of all."""

    __slots__ = ()

    _telling: ClassVar[tuple[str, ...]] = ()
    """The fields that matter."""
    _of_moment: ClassVar[tuple[str, ...]] = ()
    """The fields that describe the moment of the snapshot; the others are counters, and only grow."""
    _is_line: ClassVar[bool] = False
    """True if a table shows it in one line."""

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={_short(getattr(self, name))}" for name in self._telling)
        return f"{type(self).__name__}({shown})"

    def __str__(self) -> str:
        rows = list(_rows(self, ""))
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join(f"{name:{width}}  {value}".rstrip() for name, value in rows)

    def _plus(self, other: Self) -> Self:
        return type(self)(**{name: _sum(value, getattr(other, name)) for name, value in _values(self).items()})

    def _since(self, earlier: Self) -> Self:
        parts = _values(self)
        for name, now in parts.items():
            then = getattr(earlier, name)
            if name in self._of_moment or then is None or now is None:
                continue
            if isinstance(now, Figures):
                parts[name] = now._since(then)
            elif isinstance(now, Mapping):
                parts[name] = {key: each._since(then[key]) if key in then else each for key, each in now.items()}
            elif now < then:
                return self
            else:
                parts[name] = now - then
        return type(self)(**parts)

    def _ended(self) -> Self:
        parts = _values(self)
        for name, value in parts.items():
            if isinstance(value, Figures):
                parts[name] = value._ended()
            elif isinstance(value, Mapping):
                parts[name] = {k: each._ended() if isinstance(each, Figures) else each for k, each in value.items()}
            elif name in self._of_moment and value is not None:
                parts[name] = type(value)()
        return type(self)(**parts)


FiguresT = TypeVar("FiguresT", bound=Figures)


def sum_of(first: FiguresT, *others: FiguresT) -> FiguresT:
    """The sum, as if one had counted everything."""
    for other in others:
        first = first._plus(other)
    return first


def counted_since(now: FiguresT, earlier: FiguresT) -> FiguresT:
    """The counts since an earlier snapshot of the same; all of them if the counters were reset since."""
    return now._since(earlier)


def counts_of(statistics: FiguresT) -> FiguresT:
    """The counters alone, with zeros for all that describes the moment, to be added to those of a later run."""
    return statistics._ended()


def _values(statistics: Any) -> dict[str, Any]:  # noqa: ANN401
    return {each.name: getattr(statistics, each.name) for each in fields(statistics)}


def _short(value: Any) -> str:  # noqa: ANN401
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, Mapping):
        return str(len(value))
    return repr(value)


def _rows(of: Any, indent: str) -> list[tuple[str, str]]:  # noqa: ANN401
    rows: list[tuple[str, str]] = []
    for key, value in (of if isinstance(of, Mapping) else _values(of)).items():
        name = f"{indent}{key}"
        if isinstance(value, Mapping) or (isinstance(value, Figures) and not value._is_line):
            rows += [(name, ""), *_rows(value, f"{indent}  ")]
        elif value is not None:
            rows.append((name, f"{value:,}" if isinstance(value, int) else _short(value)))
    return rows


def _sum(one: Any, other: Any) -> Any:  # noqa: ANN401
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, Figures):
        return one._plus(other)
    if isinstance(one, Mapping):
        return {key: _sum(one.get(key), other.get(key)) for key in {**one, **other}}
    return one + other


RELATIVE_ERROR = 0.02
"""The relative error of each quantile. 1 % would double the memory for no use."""
SHORTEST_SECONDS = 1e-6
"""The first bucket has this and all shorter durations, which a clock can't distinguish."""
LONGEST_SECONDS = 3600.0
"""The last bucket has all longer durations. Every phase of a request has a limit well below."""

_GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
"""Ratio of a bucket's upper bound to its lower one."""
_BUCKETS_PER_E = 1 / log(_GAMMA)
_LAST = ceil(log(LONGEST_SECONDS / SHORTEST_SECONDS) * _BUCKETS_PER_E)
_EMPTY = array("Q", bytes(8 * (_LAST + 1)))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Quantiles(Figures):
    """All durations recorded since the start, as a snapshot. Zeros without any.

    A quantile is exact within 2 %.
    """

    count: int = 0
    """Durations recorded."""
    sum_seconds: float = 0.0
    """All of them together."""
    p50_seconds: float = 0.0
    """The median."""
    p95_seconds: float = 0.0
    """The duration that 19 of 20 don't exceed."""
    p99_seconds: float = 0.0
    """The duration that 99 of 100 don't exceed."""
    max_seconds: float = 0.0
    """The longest, exactly."""
    buckets: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    """Pairs of a bucket and its number of durations, without empty ones."""
    _is_line = True

    def __repr__(self) -> str:
        """Return the figures in a line, in milliseconds."""
        if not self.count:
            return "none"
        p50, p95, p99, most = (
            f"{1e3 * seconds:.3g}"
            for seconds in (self.p50_seconds, self.p95_seconds, self.p99_seconds, self.max_seconds)
        )
        return f"<{self.count:,}: p50 {p50}, p95 {p95}, p99 {p99}, max {most} ms>"

    __str__ = __repr__

    def _plus(self, other: Self) -> Self:
        """Exactly the quantiles of one histogram of all durations."""
        both = Histogram()
        for bucket, count in (*self.buckets, *other.buckets):
            both._counts[bucket] += count
        both._sum_seconds = self.sum_seconds + other.sum_seconds
        both._max_seconds = max(self.max_seconds, other.max_seconds)
        return both.snapshot()  # type: ignore[return-value]

    def _since(self, earlier: Self) -> Self:
        """The quantiles of a histogram begun then, with the longest duration within 2 %."""
        if self.count < earlier.count:
            return self
        later, then = Histogram(), dict(earlier.buckets)
        for bucket, count in self.buckets:
            later._counts[bucket] = count - then.get(bucket, 0)
            if later._counts[bucket]:
                later._max_seconds = min(_value(bucket), self.max_seconds)
        if self.max_seconds > earlier.max_seconds:
            later._max_seconds = self.max_seconds
        later._sum_seconds = max(0.0, self.sum_seconds - earlier.sum_seconds)
        return later.snapshot()  # type: ignore[return-value]

    def _ended(self) -> Self:
        return self


class Histogram:
    """Counts durations, in 4.5 KB.

    Two threads that record at once may lose one of their durations. ``snapshot`` may be called in any thread; its
    quantiles are of one moment, its sum and maximum perhaps of one duration earlier or later. ``median_seconds`` is for
    the writer only.
    """

    __slots__ = ("_below", "_count", "_counts", "_max_seconds", "_middle", "_sum_seconds")

    def __init__(self) -> None:
        self._counts = _EMPTY[:]
        self._count = 0
        self._middle = 0  # the bucket that had the median when it was last asked for
        self._below = 0  # durations in the buckets below that one
        self._sum_seconds = 0.0
        self._max_seconds = 0.0

    def record(self, seconds: float) -> None:
        """Count one duration, finite and not negative."""
        bucket = ceil(log(seconds / SHORTEST_SECONDS) * _BUCKETS_PER_E) if seconds > SHORTEST_SECONDS else 0
        self._counts[min(_LAST, bucket)] += 1
        self._count += 1
        if bucket < self._middle:
            self._below += 1
        self._sum_seconds += seconds
        if seconds > self._max_seconds:
            self._max_seconds = seconds

    def merge(self, other: Histogram) -> None:
        """Count all durations of ``other``, too."""
        self._counts = array("Q", map(add, self._counts, other._counts))
        self._count, self._below = sum(self._counts), sum(self._counts[: self._middle])
        self._sum_seconds += other._sum_seconds
        self._max_seconds = max(self._max_seconds, other._max_seconds)

    @property
    def count(self) -> int:
        """The snapshot's ``count``, at a small part of its cost."""
        return self._count

    @property
    def median_seconds(self) -> float:
        """The snapshot's ``p50_seconds``, at a small part of its cost, since a median moves by few buckets."""
        counts, bucket, below = self._counts, self._middle, self._below
        rank = (self._count + 1) // 2
        while below >= rank > 0:
            bucket -= 1
            below -= counts[bucket]
        while below + counts[bucket] < rank:
            below += counts[bucket]
            bucket += 1
        self._middle, self._below = bucket, below
        return min(_value(bucket), self._max_seconds)

    def snapshot(self) -> Quantiles:
        """The quantiles of all durations so far."""
        counts = self._counts[:]  # atomic for other threads
        up_to = list(accumulate(counts))
        count, longest = up_to[-1], self._max_seconds

        def quantile(percent: int) -> float:
            rank = -(-count * percent // 100)  # in whole numbers: 0.95 * 20 isn't quite 19 in floats
            return min(_value(bisect_left(up_to, rank)), longest)

        return Quantiles(
            count=count,
            sum_seconds=self._sum_seconds,
            p50_seconds=quantile(50),
            p95_seconds=quantile(95),
            p99_seconds=quantile(99),
            max_seconds=longest,
            buckets=tuple((bucket, times) for bucket, times in enumerate(counts) if times),
        )


def _value(bucket: int) -> float:
    """The duration that is within RELATIVE_ERROR of all in the bucket, except in the first and the last one."""
    if bucket == 0:
        return SHORTEST_SECONDS
    if bucket == _LAST:
        return float("inf")  # callers bound it by the longest duration
    return SHORTEST_SECONDS * _GAMMA**bucket * 2 / (1 + _GAMMA)
