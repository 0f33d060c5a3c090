"""Helpers for tests, ours and yours: a range server with latency, rates and faults on demand."""

from __future__ import annotations

from asyncfetch.testing.server import (
    Fault,
    FaultEvery,
    FaultOnce,
    FaultRule,
    RangeServer,
    ServedRequest,
    ServerStatistics,
)

__all__ = ["Fault", "FaultEvery", "FaultOnce", "FaultRule", "RangeServer", "ServedRequest", "ServerStatistics"]
