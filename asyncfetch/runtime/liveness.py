"""Signs of life of a process that works for this one: the beats of its loop, and its state in /proc.

A process that was killed is noticed at once, by its channel's end. One that is stopped, or hangs, keeps its channels
open and says nothing, and so does one that computes for minutes. So its loop beats as long as it turns. Its parent
looks now and then whether it still does, and if not, whether the process computes: a function that holds the GIL holds
up the beats, too.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Final, NamedTuple

import anyio

if TYPE_CHECKING:
    from collections.abc import Callable

BEAT_SECONDS: Final = 1.0
LOOK_SECONDS: Final = 1.0
"""Seconds between two looks. If twice that passes, this process itself stood still."""
WORKING_SHARE: Final = 0.01
"""A share of a processor. A process that uses more computes; idle wake-ups take a thousandth."""

LONGER_SILENCE: Final = (
    "Where one may be stopped for longer, set FetchConfig(timeouts=TimeoutConfig(silent_process_seconds=...))"
)
"""The remedy for a process that is silent for longer on purpose."""


async def beat(note: Callable[[bool], object]) -> None:
    """Call ``note`` with True as long as this loop turns, and with False at its end. Needs a task of its own."""
    try:
        while True:
            note(True)
            await anyio.sleep(BEAT_SECONDS)
    finally:
        note(False)


class Vitals(NamedTuple):
    """A process as the system sees it."""

    is_stopped: bool
    """True between SIGSTOP, or SIGTSTP of a terminal, and SIGCONT; False under a debugger."""
    cpu_seconds: float
    """Seconds that it has computed."""


def vitals(pid: int) -> Vitals | None:
    """A look at a process; None if it has ended, or without /proc."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # behind the name, which may hold anything
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    ticks = int(fields[11]) + int(fields[12])
    return Vitals(fields[0] == b"T", ticks / os.sysconf("SC_CLK_TCK"))


class Silence:
    """The time for which a process has shown no sign of life, as its parent sees it, from ``now`` on. Pure.

    Time in which this process stands still itself, as in a suspended job, doesn't count.
    """

    def __init__(self, now: float) -> None:
        self._since = self._looked_at = now
        self._beat: float | None = None
        self._cpu_seconds = 0.0

    def look(self, now: float, beat: float | None, seen: Vitals | None) -> float:
        """Return the seconds without a sign of life.

        ``beat`` is the latest one, a number that differs from the one before; None if none is due, because its loop
        hasn't begun or has ended. Then only a stopped process is silent.
        """
        if now - self._looked_at > 2 * LOOK_SECONDS:
            self._since += now - self._looked_at
        self._looked_at = now
        computed = 0.0 if seen is None else seen.cpu_seconds - self._cpu_seconds
        is_silent = seen is not None and seen.is_stopped if beat is None else beat == self._beat
        if not is_silent or computed > WORKING_SHARE * max(LOOK_SECONDS, now - self._since):
            self._since, self._beat = now, beat
            self._cpu_seconds = 0.0 if seen is None else seen.cpu_seconds
        return now - self._since


class Watch:
    """Looks now and then at a process that this one waits for.

    The ``remedy`` is advice for when it is lost, a sentence without its full stop; ``now`` are monotonic seconds.
    """

    def __init__(self, pid: int, max_silent_seconds: float, remedy: str, now: float) -> None:
        self._pid, self._max_silent_seconds, self._remedy = pid, max_silent_seconds, remedy
        self._silence = Silence(now)

    def look(self, now: float, beat: float | None) -> str:
        """Why to kill the process, and what to do, in words; empty to let it live. Arguments as of ``Silence.look``.

        It has to be killed, since a stopped process reacts to nothing else.
        """
        seen = vitals(self._pid)
        seconds = 0.0 if seen is None else self._silence.look(now, beat, seen)
        if seconds <= self._max_silent_seconds:
            return ""
        return f"{how_silent(seconds, seen)}, so it was killed. {self._remedy}. {LONGER_SILENCE}"


def how_silent(seconds: float, seen: Vitals | None) -> str:
    """How a process is silent, in words."""
    if seen is not None and seen.is_stopped:
        return f"is stopped, by SIGSTOP or a terminal, and was for {seconds:.0f} s"
    return f"hangs: it has shown no sign of life for {seconds:.0f} s"


def how_it_ended(code: int | None) -> str:
    """How a process ended, in words, by its exit code as Python reports it."""
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    how = f"was killed by {signal.Signals(-code).name}"
    return f"{how}. If nobody did that, the system was out of memory" if code == -signal.SIGKILL else how
