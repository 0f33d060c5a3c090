"""What a range server served: a bounded list of requests, and counters."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncfetch.testing.server.faults import Fault

__all__ = ["RequestLog", "ServedRequest", "ServerStatistics"]


@dataclass(slots=True, kw_only=True)
class ServedRequest:
    """One request and what became of it. Filled in as the server gets on with it; don't write to it."""

    method: str
    """GET, HEAD, ..."""
    path: str
    """Decoded, with the leading slash."""
    target: str
    """Path and query as sent, still quoted."""
    start: int | None
    """First byte asked for, as in ByteRange: negative for the last bytes. None: no range, or one to be ignored."""
    stop: int | None
    """One past the last byte asked for; None: to the end."""
    headers: Mapping[str, str]
    """The request's, keys in any case."""
    started: float
    """Monotonic seconds at which its headers had arrived."""
    fault: Fault | None = None
    """What went wrong with it on purpose."""
    status: int | None = None
    """Status of the answer; None until that is decided, and where a fault sends none."""
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

    A request ends just before its last byte is handed over, so that a client that has all bytes can send the next
    one without being counted twice: a peak above a client's own limit is the client's fault.
    """

    def __init__(self, max_log: int) -> None:
        self._lock = threading.Lock()
        self._requests: deque[ServedRequest] = deque(maxlen=max_log)
        self._count = self._bytes_sent = self._in_flight = self._peak_in_flight = 0

    def begin(self, request: ServedRequest) -> int:
        """Note that ``request`` arrived; the number in flight with it."""
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
        """Forget all but what is in flight."""
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
