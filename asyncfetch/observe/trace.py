"""A timeline as Chrome trace events, for Perfetto (ui.perfetto.dev) and chrome://tracing.

One file has the events of all processes, each with lanes of its own: a host's concurrent requests, the threads that
decode, the loop with the episodes on their way, and the consumer with its waits. Each process appends whole events. The
array has no end, as the format allows, so a killed process spoils nothing.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from bisect import bisect_right
from contextlib import contextmanager, suppress
from functools import partial
from heapq import heappop, heappush
from itertools import accumulate, count
from multiprocessing import util
from typing import TYPE_CHECKING, Any

from asyncfetch.errors import ConfigError
from asyncfetch.observe.waits import Cause

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from asyncfetch.observe.waits import WaitStep

VARIABLE = "ASYNCFETCH_TRACE"
BEGUN = "ASYNCFETCH_TRACE_BEGUN"
"""Set by the process that begins the file, so that those it starts continue it: the bound on its size, and its path."""
MAX_BYTES = 256 * 1024 * 1024
"""Bound on a file; later events are dropped. Perfetto takes a minute to open as much."""
FLUSH_BYTES, FLUSH_SECONDS = 64 * 1024, 0.5
LOOP = 2**22
"""The lane of a process's loop. Lanes of threads have the threads' own numbers, which are smaller: this is Linux's
largest. Those of consumers and hosts are larger."""
LANES = 2**16
"""Lanes of each host, and of the consumers."""
LEAST_BYTES = 1024
"""A smaller file would hold little more than names."""
CONSUMER = "consumer"
"""The name in place of a host's for ``enter`` and ``leave``: concurrent passes have a lane each."""


_log = logging.getLogger(__name__)


class Tracer:
    """Appends this process's events to a file that is there. Thread-safe. Logs one warning if it can't be written."""

    def __init__(self, path: str, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._line_bytes = 0
        self._flushed_at = time.perf_counter()
        self._named: set[int] = set()
        self._lanes: dict[str, tuple[int, list[int], Iterator[int]]] = {}
        self._episodes_until: list[float] = []
        self._is_full = False
        self.add({"name": "process_name", "ph": "M", "args": {"name": f"asyncfetch, process {self._pid}"}}, LOOP)

    def add(self, event: dict[str, Any], lane: int, name: str | None = None) -> None:
        """Add an event to a lane called ``name``."""
        with self._lock:
            if name is not None and lane not in self._named:
                self._named.add(lane)
                self._write({"name": "thread_name", "ph": "M", "args": {"name": name}}, lane)
            self._write(event, lane)
            if self._line_bytes >= FLUSH_BYTES or time.perf_counter() - self._flushed_at > FLUSH_SECONDS:
                self._flush()

    def span(self, name: str, since: float, until: float, lane: int, lane_name: str, **details: Any) -> None:  # noqa: ANN401
        """Add a span between two readings of ``time.perf_counter``."""
        begin, end = _microseconds(since), _microseconds(until)
        self.add({"name": name, "ph": "X", "ts": begin, "dur": max(0, end - begin), "args": details}, lane, lane_name)

    def enter(self, host: str) -> int:
        """A free lane of the host, or of consumers, to be given back by ``leave``."""
        with self._lock:
            if host not in self._lanes:
                self._lanes[host] = LOOP + LANES * (1 + len(self._lanes)), [], count()
            first, free, unused = self._lanes[host]
            return first + (heappop(free) if free else next(unused))

    def leave(self, host: str, lane: int) -> None:
        """Give the lane back."""
        with self._lock:
            first, free, _ = self._lanes[host]
            heappush(free, lane - first)

    def request(
        self, host: str, lane: int, since: float, first_byte: tuple[float, float] | None, details: Mapping[str, Any]
    ) -> None:
        """Add a request that ends now, and within it the times to its first and to its last byte."""
        now, name = time.perf_counter(), f"{host} {lane % LANES}"
        self.span("request", since, now, lane, name, host=host, **details)
        if first_byte is not None:
            self.span("first byte", *first_byte, lane, name)
            self.span("body", first_byte[1], now, lane, name)

    def episode(self, episode: int, since: float, until: float, weights: Mapping[Cause, float]) -> None:
        """Add an episode's way into memory: a pair of events, linked by a number of their own.

        The episode's number wouldn't do: another pass or dataset may have that on its way, too.
        """
        details = {"episode": episode} | {f"{cause.key}_ms": 1e3 * seconds for cause, seconds in weights.items()}
        with self._lock:
            rows = self._episodes_until
            row = next((row for row, end in enumerate(rows) if end <= since), len(rows))
            rows[row : row + 1] = [until]
        event = {"name": "episode", "id": f"{self._pid}.{row}", "args": details}
        for phase, at in (("b", since), ("e", until)):
            self.add({**event, "ph": phase, "ts": _microseconds(at)}, LOOP, "loop")

    def waits(self, lane: int, since: float, until: float, path: Iterable[WaitStep]) -> None:
        """Add a consumer's wait, one span for each step, named after the step's largest cause."""
        name = f"{CONSUMER} {lane % LANES}" if lane % LANES else CONSUMER
        for step in path:
            end = min(step.until, until)
            if end > since and step.weights:
                cause = max(step.weights, key=step.weights.__getitem__)
                details = {} if step.episode is None else {"episode": step.episode}
                self.span(f"wait: {cause.key}", since, end, lane, name, **details)
                since = end
        if until > since:
            self.span(f"wait: {Cause.HAND_OVER.key}", since, until, lane, name)

    def close(self) -> None:
        """Write the remaining events. Later ones are dropped."""
        with self._lock:
            self._flush()
            self._is_full = True
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _write(self, event: dict[str, Any], lane: int) -> None:
        if not self._is_full:
            self._lines.append(line := self._line(event, lane))
            self._line_bytes += len(line) + 2

    def _line(self, event: dict[str, Any], lane: int) -> str:
        return json.dumps(event | {"pid": self._pid, "tid": lane, "cat": "asyncfetch"}, separators=(",", ":"))

    def _flush(self) -> None:
        if not self._lines or self._file < 0:
            return
        size = os.fstat(self._file).st_size
        if size + self._line_bytes > self._max_bytes:
            self._cut(self._max_bytes - size)
        content = "".join(f"{line},\n" for line in self._lines).encode()
        self._lines, self._line_bytes, self._flushed_at = [], 0, time.perf_counter()
        try:  # one call, so that lines of other processes don't come in between
            written = os.write(self._file, content) if content else 0
        except OSError as error:
            self._end(error.strerror)
            return
        if written < len(content):
            if os.fstat(self._file).st_size == size + written:  # else another process's lines follow
                os.ftruncate(self._file, size)
            self._end(os.strerror(errno.ENOSPC))

    def _end(self, why: str | None) -> None:
        """End the trace with a warning, and let the traced program go on."""
        self._is_full = True
        _log.warning("the trace %s ends here, for it can't be written: %s", self.path, why)

    def _cut(self, left_bytes: int) -> None:
        """Keep the lines for which there is room, with a last one that says that the file is full."""
        self._is_full = True
        end = {"name": "the file is full", "ph": "i", "s": "p", "ts": _microseconds(time.perf_counter()), "args": {}}
        self._lines.insert(0, self._line(end, LOOP))
        ends = list(accumulate(len(line) + 2 for line in self._lines))
        kept = self._lines[: bisect_right(ends, left_bytes)]
        self._lines = kept[1:] + kept[:1]


def _microseconds(at: float) -> int:
    """Whole microseconds: with fractions, rounding could let a span end after the next one begins, and contain it."""
    return round(at * 1e6)


_tracers: dict[str, Tracer] = {}

running: Callable[[], Tracer | None] = partial(_tracers.get, "the process's")
"""Returns the process's tracer, if any. No Python function: each request calls it three times."""


@contextmanager
def trace(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> Iterator[None]:
    """Trace this block, and loader workers started in it, to a file for Perfetto.

    Events name hosts, ranges, statuses, episodes and causes of waits; neither paths of urls nor headers. Setting the
    environment's ``ASYNCFETCH_TRACE`` to a path traces a whole program, together with those that it starts.

    Args:
        path: The file, which is replaced.
        max_bytes: Bound on the file, about; later events are dropped.

    Raises:
        ConfigError: A trace is under way already, or ``max_bytes`` is below 1,024.
        OSError: The file can't be opened. Later, on a full disk, the trace ends with a warning, and the block goes on.
    """
    if max_bytes < LEAST_BYTES:
        raise ConfigError(f"max_bytes of a trace must be at least {LEAST_BYTES}, not {max_bytes!r}")
    if (tracer := running()) is not None:
        raise ConfigError(f"asyncfetch is traced to {tracer.path} already: leave that trace first")
    path = os.path.abspath(path)
    before = os.environ.get(VARIABLE)
    _begin(path)
    _tracers["the process's"] = Tracer(path, max_bytes)
    os.environ[VARIABLE], os.environ[BEGUN] = path, f"{max_bytes} {path}"  # for processes that are spawned
    try:
        yield
    finally:
        for variable in (BEGUN, VARIABLE):
            os.environ.pop(variable, None)
        if before is not None:
            os.environ[VARIABLE] = before
        _tracers.pop("the process's").close()


def _begin(path: str) -> None:
    with open(path, "w") as file:
        file.write("[\n")


def _go_on_in_child() -> None:
    parents = _tracers.pop("the process's", None)
    if parents is not None and (tracer := _opened(parents.path, parents._max_bytes)) is not None:
        util.register_after_fork(tracer, _close_at_exit)  # multiprocessing drops the parent's finalizers


def _opened(path: str, max_bytes: int) -> Tracer | None:
    """The process's tracer from now to its end; None, and a warning, if the file can't be written."""
    try:
        tracer = Tracer(path, max_bytes)
    except OSError as error:
        _log.warning("%s=%s can't be written: %s. Nothing is traced", VARIABLE, path, error.strerror)
        return None
    _tracers["the process's"] = tracer
    _close_at_exit(tracer)
    return tracer


def _close_at_exit(tracer: Tracer) -> None:
    if tracer is running():
        util.Finalize(None, tracer.close, exitpriority=0)


os.register_at_fork(after_in_child=_go_on_in_child)


def _begin_by_environment() -> None:
    given = os.environ.get(VARIABLE)
    if given:
        path = os.path.abspath(given)  # the program may change its directory
        max_bytes, _, begun = os.environ.get(BEGUN, "").partition(" ")
        if begun != path:
            max_bytes = str(MAX_BYTES)
            # The first rank of each node begins the file, which may be on a local disk.
            if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0":
                with suppress(OSError):  # opening it raises the same
                    _begin(path)
        os.environ[VARIABLE], os.environ[BEGUN] = path, f"{max_bytes} {path}"
        _opened(path, int(max_bytes))


_begin_by_environment()
