"""Half-open byte ranges, the objects they are cut from, and the requests that fetch them. Pure: no clock, no I/O.

A request costs a wait for its first byte, in one of a server's streams, and then time by the byte. So the saving of
joining two ranges depends on the streams. While one is idle, another request runs beside the first and costs little but
its headers; then only small ranges next to each other are joined. When every stream has several requests to make, each
request less saves time; then larger gaps are read over, as long as every stream keeps some work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING

from asyncfetch.config.checks import is_whole_number
from asyncfetch.errors import ConfigError, redact_url

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "HEADERS_BYTES",
    "ByteRange",
    "ObjectInfo",
    "Request",
    "choose_part_bytes",
    "join_spans",
    "lie_apart",
    "own_request",
    "plan_requests",
    "split_range",
]

HEADERS_BYTES = 512
"""A gap that is always read over: less than the headers of another request and its answer."""
SHORT_BYTES = 64 * 1024
"""Up to here, ranges next to each other are one request even while streams are idle: it takes 16 ms at 4 MiB/s, less
than the wait for a first byte, so another request's CPU (0.2 ms) would cost more than these bytes."""
LOOP_BYTES_PER_SECOND = 256 * 1024 * 1024
"""Rate of a host's streams together above which a shared link or this process's CPU counts as their limit, not their
own rates. One loop takes in 0.6-1.1 GB/s of TLS while it does nothing else."""
SOON_SECONDS = 0.02
"""Delay against the fastest way that is still soon enough. A request's CPU, and the wait for its turn on the loop, are
of that order when many are made."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes [start, stop) of one object.

    A negative start with stop None means the last ``-start`` bytes (the whole object where it is shorter).
    """

    url: str
    """http(s)://, s3://, hf:// or file:// URL, a path, or what fsspec reads."""
    start: int
    """First byte, inclusive."""
    stop: int | None
    """One past the last byte; None means to the end of the object."""

    def __post_init__(self) -> None:
        if not isinstance(self.url, str):
            raise ConfigError(f"a url or path must be a string, not of type {type(self.url).__name__}: try str(path)")
        if type(self.start) is not int or not (self.stop is None or type(self.stop) is int):
            self._take_numbers()
        if self.stop is not None and not 0 <= self.start <= self.stop:
            message = (
                f"byte range [{self.start}, {self.stop}) of {redact_url(self.url)} must satisfy 0 <= start <= stop"
            )
            raise ConfigError(message)

    def _take_numbers(self) -> None:
        """Turns NumPy's whole numbers into Python's, which can't overflow; ConfigError for anything else."""
        if not (is_whole_number(self.start) and (self.stop is None or is_whole_number(self.stop))):
            message = (
                f"byte range [{self.start!r}, {self.stop!r}) of {redact_url(self.url)} must have whole numbers as its"
                " ends, or None as its stop"
            )
            raise ConfigError(message)
        object.__setattr__(self, "start", int(self.start))
        object.__setattr__(self, "stop", None if self.stop is None else int(self.stop))

    def __repr__(self) -> str:
        return f"ByteRange({redact_url(self.url)!r}, {self.start}, {self.stop})"


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object as a server describes it."""

    url: str
    """The url as the caller wrote it, before redirects."""
    size: int
    """Length in bytes."""
    etag: str | None = None
    """Entity tag as sent, quotes included; None if the server sends none. A weak one starts with ``W/``."""
    last_modified: str | None = None
    """HTTP date as sent; None if the server sends none."""

    @property
    def version(self) -> str | None:
        """The version, which tells this content from another one under the same name; None if unknown."""
        return self.etag or self.last_modified

    def __repr__(self) -> str:
        return f"ObjectInfo({redact_url(self.url)!r}, size={self.size}, etag={self.etag!r})"


@dataclass(frozen=True, slots=True)
class Request:
    """One range to ask a server for, and the asked ranges that lie within it."""

    range: ByteRange
    """The range from the first byte of ``serves`` to their last."""
    serves: tuple[ByteRange, ...]
    """Ranges that it serves: at least one, all different."""

    def part(self, one: ByteRange) -> slice:
        """The place of the bytes of ``one`` of ``serves`` in the request's; for a request of several closed ranges."""
        assert one.stop is not None
        return slice(one.start - self.range.start, one.stop - self.range.start)


def plan_requests(
    ranges: Iterable[ByteRange], *, max_gap_bytes: int, max_span_bytes: int, streams: int
) -> list[Request]:
    """The requests that fetch all of one server's ranges, in the order in which each is first needed.

    One request serves each range; equal ranges count as one. Empty ranges and those with an open end get a request of
    their own.

    Args:
        ranges: Of any objects, in the order in which they are needed.
        max_gap_bytes: Longest run of unwanted bytes within a request.
        max_span_bytes: Longest request that is made of several ranges; 0 joins none.
        streams: Most requests to the server at a time.
    """
    wanted = list(dict.fromkeys(ranges))
    alone, closed = [], []
    for position, one in enumerate(wanted):
        if one.stop is None or one.start == one.stop:
            alone.append(position)
        else:
            closed.append((one.url, one.start, one.stop, position))
    closed.sort()
    spans = _join(closed, min(HEADERS_BYTES, max_gap_bytes), min(SHORT_BYTES, max_span_bytes))
    if len(spans) > streams:
        covered_bytes = sum(span.stop - span.start for span in _join(closed, max_gap_bytes, None))
        even_bytes = max(SHORT_BYTES, -(-covered_bytes // streams))
        # With room for one more, each gets its even share at least: a few requests too many would take a whole turn.
        room_bytes = max_gap_bytes + max(
            (stop - start for _, start, stop, _ in closed if stop - start <= even_bytes), default=0
        )
        spans = _join(closed, max_gap_bytes, min(even_bytes + room_bytes, max_span_bytes))
    requests = [(position, own_request(wanted[position])) for position in alone]
    requests += [(min(span.positions), span.request(wanted)) for span in spans]
    requests.sort(key=itemgetter(0))
    return [request for _, request in requests]


def lie_apart(ranges: Iterable[ByteRange], max_gap_bytes: int) -> bool:
    """Return whether no two of the ranges could share a request, in a quarter of the time that planning takes.

    True also says that all are closed, and none is empty.
    """
    spans = [(one.url, one.start, -1 if one.stop is None else one.stop) for one in ranges]
    spans.sort()
    last_url, last_stop = "", 0
    for url, start, stop in spans:
        if start >= stop or (url == last_url and start - last_stop <= max_gap_bytes):
            return False
        last_url, last_stop = url, stop
    return True


def choose_part_bytes(
    length: int,
    *,
    bytes_per_second: float,
    first_byte_seconds: float,
    free: int,
    in_flight: int,
    part_bytes: int,
    min_part_bytes: int,
    soon_factor: float,
) -> int:
    """The longest part of a range whose parts, side by side, bring its last byte about as soon as possible.

    A part takes the wait for its first byte and then its length by the stream's rate. So each further part ends the
    whole sooner, by less than the one before, and costs a request. Chosen is the smallest number of parts that isn't
    much later than the largest. Streams that already bring all that one loop can take get no further parts.

    Args:
        length: Bytes of the range, at least 1.
        bytes_per_second: Rate of one stream.
        first_byte_seconds: From a request to the first byte of its answer.
        free: Further requests that the host may get now.
        in_flight: Requests that the host has already.
        part_bytes: Longest part whatever the rate; parts of this size need not be free.
        min_part_bytes: Shortest part.
        soon_factor: Multiple of the fastest way's time that is still soon enough.

    Returns:
        At most ``part_bytes``.
    """
    fewest = -(-length // part_bytes)
    useful = int(LOOP_BYTES_PER_SECOND / bytes_per_second) - in_flight
    most = min(length // min_part_bytes, free, useful)
    if most <= fewest:
        return part_bytes
    body_seconds = length / bytes_per_second
    soon_seconds = soon_factor * (first_byte_seconds + body_seconds / most) + SOON_SECONDS
    enough = math.ceil(body_seconds / (soon_seconds - first_byte_seconds))
    return -(-length // max(fewest, min(most, enough)))


def split_range(one: ByteRange, part_bytes: int) -> list[tuple[int, int]]:
    """Half-open (start, stop) of the fewest equal parts of at most ``part_bytes`` that make up a closed range."""
    assert one.stop is not None
    size = one.stop - one.start
    count = -(-size // part_bytes)
    cuts = [one.start + size * number // count for number in range(count + 1)]
    return list(pairwise(cuts))


def join_spans(spans: Iterable[tuple[int, int]], max_gap_bytes: int) -> list[tuple[int, int]]:
    """The [start, stop) that hold these of one object, ascending; those with at most that gap between them are one."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if joined and start - joined[-1][1] <= max_gap_bytes:
            joined[-1] = joined[-1][0], max(joined[-1][1], stop)
        else:
            joined.append((start, stop))
    return joined


def own_request(one: ByteRange) -> Request:
    """The request for one range and nothing else."""
    return Request(one, (one,))


@dataclass(slots=True)
class _Span:
    """Ranges of one object that become one request."""

    url: str
    start: int
    stop: int
    positions: list[int]
    """Positions in the list of wanted ranges."""

    def request(self, wanted: Sequence[ByteRange]) -> Request:
        """Return the request for them, in the order in which they are wanted."""
        if len(self.positions) == 1:
            return own_request(wanted[self.positions[0]])
        serves = tuple(wanted[position] for position in sorted(self.positions))
        return Request(ByteRange(self.url, self.start, self.stop), serves)


def _join(closed: Iterable[tuple[str, int, int, int]], max_gap_bytes: int, max_span_bytes: int | None) -> list[_Span]:
    """(url, start, stop, position), sorted, in spans of at most ``max_span_bytes``; a longer range has its own."""
    spans: list[_Span] = []
    for url, start, stop, position in closed:
        if spans:
            last = spans[-1]
            joined_stop = max(last.stop, stop)
            if (
                url == last.url
                and start - last.stop <= max_gap_bytes
                and (max_span_bytes is None or joined_stop - last.start <= max_span_bytes)
            ):
                last.stop = joined_stop
                last.positions.append(position)
                continue
        spans.append(_Span(url, start, stop, [position]))
    return spans
