"""The time of one request by its causes, for its caller's meter and for the process's trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncfetch.observe.trace import Tracer
    from asyncfetch.observe.waits import Cause, Meter


class RequestWatch:
    """Follows one request that is metered or traced, by the readings of one clock: ``time.perf_counter``.

    Its time is cut into stretches, each of one cause: ``begin`` the first, ``turn`` from one to the next, ``stop``.
    """

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

    def begin(self, cause: Cause, now: float) -> None:
        """Start a stretch."""
        self._since = now
        if self._meter is not None:
            self._meter.begin(cause, now)

    def turn(self, cause: Cause, now: float, then: Cause) -> None:
        """End a stretch, which was due to ``cause``, and start the next one."""
        self.stop(cause, now)
        self.begin(then, now)

    def stop(self, cause: Cause, now: float) -> None:
        """End a stretch, which was due to ``cause``."""
        if self._meter is not None:
            self._meter.add(cause, now - self._since)

    def enter(self, cause: Cause, now: float) -> None:
        """Take a lane of the trace, and start a stretch: the request has its place at the host."""
        self.begin(cause, now)
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
