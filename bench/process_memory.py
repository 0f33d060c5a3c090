"""Memory of this process alone, on Linux. What getrusage says of the peak begins with the parent's."""

from __future__ import annotations

from pathlib import Path


def resident_bytes() -> int:
    """Return what it has now."""
    return _line("VmRSS")


def peak_bytes() -> int:
    """Return the most that it had, since it began or the last ``forget_peak``."""
    return _line("VmHWM")


def forget_peak() -> None:
    """Count the peak from now on: imports may have taken more than what is measured."""
    Path("/proc/self/clear_refs").write_text("5")


def _line(name: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].removesuffix("kB")) * 1024
