"""Faults that one response can have, as values. Pure."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Mapping  # noqa: TC003 - check_types reads the annotations
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from asyncfetch.config.checks import check_types, require, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable

Ending: TypeAlias = Literal["complete", "stall", "reset", "close"]
"""The end of a response: complete; silent until the client or the server goes; by RST; by FIN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The faults of one response.

    The static methods make the usual ones. For several at once, set the fields yourself:
    ``Fault(new_etag=True, ending="stall", after_bytes=1000)``. ConfigError for invalid values.
    """

    answer_status: int | None = None
    """Status sent instead of the object; the body is a line of text. The object needn't exist."""
    answer_headers: Mapping[str, str | None] = field(default_factory=dict, hash=False)
    """Headers set last, over all others; None removes one. Without Content-Length the body goes in chunks."""
    ending: Ending = "complete"
    """The end of the response."""
    after_bytes: int | None = 0
    """Bytes of the body sent before an early ending; None sends not even a status line."""
    drop_range: bool = False
    """The request is answered as if it had no Range header."""
    shift_bytes: int = 0
    """Offset of both ends in Content-Range; the body stays right."""
    missing_bytes: int = 0
    """Bytes by which a ranged answer is too short, with consistent headers."""
    surplus_bytes: int = 0
    """Bytes sent after the end of the body, beyond Content-Length."""
    new_etag: bool = False
    """The object counts as replaced: another ETag, so a condition on the old one fails."""
    encode_gzip: bool = False
    """Compress the body without being asked, with Content-Encoding. It is held in memory whole."""
    corrupt_at: int | None = None
    """Offset in the object of one byte that is inverted, in responses that cover it, and in uploads."""
    taken_bytes: int | None = None
    """Bytes of the request's body that are taken before the connection breaks; None takes all."""
    first_byte_seconds: float | None = None
    """The server's delay to the first byte, for this response."""
    bytes_per_second: float | None = None
    """The server's rate, for this response."""

    def __post_init__(self) -> None:
        check_types(self)
        delay, rate = self.first_byte_seconds, self.bytes_per_second
        require(delay is None or 0 <= delay < math.inf, f"first_byte_seconds must be 0 or more, and end, not {delay}")
        require(rate is None or rate > 0, f"bytes_per_second must be positive, or None for no limit, not {rate}")

    @staticmethod
    def status(code: int, *, retry_after: float | str | None = None) -> Fault:
        """Answer ``code``; ``retry_after`` in seconds or as an HTTP date."""
        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        return Fault(answer_status=code, answer_headers=headers)

    @staticmethod
    def redirect(url: str, status: int = 302) -> Fault:
        """Send the client to ``url``."""
        return Fault(answer_status=status, answer_headers={"Location": url})

    @staticmethod
    def headers(headers: Mapping[str, str | None]) -> Fault:
        """Override headers of the answer; None removes one."""
        return Fault(answer_headers=headers)

    @staticmethod
    def reset(after_bytes: int | None = 0) -> Fault:
        """Break the connection by RST after so many bytes of the body; None: instead of an answer.

        Bytes that the client's kernel has not received by then are lost, too.
        """
        return Fault(ending="reset", after_bytes=after_bytes)

    @staticmethod
    def truncate(after_bytes: int | None = 0) -> Fault:
        """Close the connection in good order after so many bytes of the body; None: instead of an answer."""
        return Fault(ending="close", after_bytes=after_bytes)

    @staticmethod
    def hang_up(taken_bytes: int = 0) -> Fault:
        """Break the connection when so many bytes of the request's body have come, and answer nothing."""
        return Fault(taken_bytes=taken_bytes)

    @staticmethod
    def stall(after_bytes: int | None = 0) -> Fault:
        """Send no more after so many bytes of the body; None: nothing at all. The connection stays open."""
        return Fault(ending="stall", after_bytes=after_bytes)

    @staticmethod
    def ignore_range() -> Fault:
        """Answer 200 with the whole object."""
        return Fault(drop_range=True)

    @staticmethod
    def wrong_content_range(shift: int = 1) -> Fault:
        """Claim a range that is ``shift`` bytes off the one sent."""
        return Fault(shift_bytes=shift)

    @staticmethod
    def short(missing_bytes: int = 1) -> Fault:
        """Answer a shorter range than asked, of at least one byte, with consistent headers."""
        return Fault(missing_bytes=missing_bytes)

    @staticmethod
    def surplus(byte_count: int = 1) -> Fault:
        """Send so many bytes after the end of the body."""
        return Fault(surplus_bytes=byte_count)

    @staticmethod
    def change_etag() -> Fault:
        """Answer as if the object had been replaced by one with another ETag."""
        return Fault(new_etag=True)

    @staticmethod
    def gzip() -> Fault:
        """Compress the body, asked or not."""
        return Fault(encode_gzip=True)

    @staticmethod
    def corrupt(at: int) -> Fault:
        """Invert the byte at offset ``at`` of the object."""
        return Fault(corrupt_at=at)

    @staticmethod
    def slow(*, first_byte_seconds: float | None = None, bytes_per_second: float | None = None) -> Fault:
        """Another delay, another rate than the server's."""
        return Fault(first_byte_seconds=first_byte_seconds, bytes_per_second=bytes_per_second)


FaultRule: TypeAlias = "Callable[[ServedRequest], Fault | None]"
"""Returns a request's fault, or None. Called once for each request, in order of arrival."""


class FaultEvery:
    """A rule: ``fault`` for every ``n``-th request, the ``n``-th first."""

    def __init__(self, n: int, fault: Fault) -> None:
        self._n, self._fault, self._seen = whole_number("n", n, least=1), fault, 0

    def __call__(self, request: ServedRequest) -> Fault | None:
        """The fault, or None."""
        self._seen += 1
        return self._fault if self._seen % self._n == 0 else None


class FaultOnce:
    """A rule: ``fault`` for the first ``times`` requests for ``path``, which begins with a slash: "/a.bin"."""

    def __init__(self, path: str, fault: Fault, *, times: int = 1) -> None:
        self._path, self._fault, self._left = path, fault, times

    def __call__(self, request: ServedRequest) -> Fault | None:
        """The fault, or None."""
        if request.path != self._path or self._left <= 0:
            return None
        self._left -= 1
        return self._fault


@dataclass(slots=True, kw_only=True)
class ServedRequest:
    """One request and its outcome. The server fills it in as it goes; don't write to it."""

    method: str
    """GET, HEAD, ..."""
    path: str
    """Decoded, with the leading slash."""
    target: str
    """Path and query as sent, still quoted."""
    start: int | None
    """First byte asked for, as in ByteRange: negative for the last bytes. None for no range, or an ignored one."""
    stop: int | None
    """One past the last byte asked for; None: to the end."""
    headers: Mapping[str, str]
    """The request's, keys in any case."""
    started: float
    """Monotonic seconds at which its headers had arrived."""
    fault: Fault | None = None
    """Its fault, if any."""
    status: int | None = None
    """Status of the answer; None until that is decided, and if a fault sends none."""
    bytes_sent: int = 0
    """Bytes of the body handed to the connection; surplus ones don't count."""
    finished: float | None = None
    """Monotonic seconds at which it ended, well or badly; None while it is in flight."""


@dataclass(frozen=True, slots=True)
class ServerStatistics:
    """A snapshot. ``requests``, ``bytes_sent`` and the peak count from the last reset."""

    requests: int
    """Requests that arrived, refused ones included."""
    bytes_sent: int
    """Bytes of bodies."""
    in_flight: int
    """Requests that arrived and have not ended."""
    peak_in_flight: int
    """Most requests in flight at once, refused ones included."""


class RequestLog:
    """Counts and remembers requests. Safe to read from any thread while the server writes.

    A request ends just before its last byte is sent, so a client that has all bytes can send the next one without being
    counted twice: a peak above a client's own limit is the client's fault.
    """

    def __init__(self, max_log: int) -> None:
        self._lock = threading.Lock()
        self._requests: deque[ServedRequest] = deque(maxlen=max_log)
        self._count = self._bytes_sent = self._in_flight = self._peak_in_flight = 0

    def begin(self, request: ServedRequest) -> int:
        """Note that ``request`` arrived; returns the number in flight with it."""
        with self._lock:
            self._requests.append(request)
            self._count += 1
            self._in_flight += 1
            self._peak_in_flight = max(self._peak_in_flight, self._in_flight)
            return self._in_flight

    def sent(self, request: ServedRequest, byte_count: int) -> None:
        """Note that bytes of its body are handed over."""
        with self._lock:
            request.bytes_sent += byte_count
            self._bytes_sent += byte_count

    def end(self, request: ServedRequest) -> None:
        """Note that ``request`` is over; the first call counts."""
        with self._lock:
            if request.finished is None:
                request.finished = time.monotonic()
                self._in_flight -= 1

    def reset(self) -> None:
        """Forget all but the requests in flight."""
        with self._lock:
            self._requests.clear()
            self._count = self._bytes_sent = 0
            self._peak_in_flight = self._in_flight

    def requests(self) -> list[ServedRequest]:
        """The latest requests, in order of arrival."""
        with self._lock:
            return list(self._requests)

    def statistics(self) -> ServerStatistics:
        """The counters now."""
        with self._lock:
            return ServerStatistics(self._count, self._bytes_sent, self._in_flight, self._peak_in_flight)
