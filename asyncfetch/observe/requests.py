"""The time of one request by its causes, for its caller's meter and for the process's trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncfetch.observe.waits import Cause

if TYPE_CHECKING:
    from asyncfetch.observe.trace import Tracer
    from asyncfetch.observe.waits import Meter


class RequestWatch:
    """Follows one request that is metered or traced, by the readings of one clock: ``time.perf_counter``."""

    __slots__ = ("_lane", "_meter", "_name", "_since", "_tracer", "details")

    def __init__(self, name: str, meter: Meter | None, tracer: Tracer | None) -> None:
        """``name`` is the host's."""
        self._name = name
        self._meter = meter
        self._tracer = tracer  # kept, since another trace may have begun when the request ends
        self._since = 0.0
        self._lane: int | None = None
        self.details: dict[str, Any] = {}
        """Facts of the request for the trace."""

    def turn(self, cause: Cause | None, now: float, then: Cause | None = None) -> None:
        """End a stretch of its time, which was due to ``cause``, and begin the next one; None where there is none."""
        if self._meter is not None:
            if cause is not None:
                self._meter.add(cause, now - self._since)
            if then is not None:
                self._meter.begin(then, now)
        self._since = now

    def enter(self, now: float) -> None:
        """Take a lane of the trace, and wait for the first byte: the request has its place at the host."""
        self.turn(None, now, Cause.FIRST_BYTE)
        if self._tracer is not None:
            self._lane = self._tracer.enter(self._name)

    def leave(self, since: float, first_byte: tuple[float, float] | None, facts: dict[str, Any]) -> None:
        """Write the request to the trace, and give the lane back.

        It got its place at ``since``, was sent and had its answer's head at ``first_byte``, if it had one; ``facts``
        say what became of it, beside ``details``.
        """
        if self._tracer is not None and self._lane is not None:
            self._tracer.request(self._name, self._lane, since, first_byte, {**self.details, **facts})
            self._tracer.leave(self._name, self._lane)
