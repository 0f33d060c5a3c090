"""Helpers for tests, ours and yours.

server      RangeServer: latency, rates and faults on demand, over TLS
datasets    write_dataset: small LeRobot datasets whose frames carry their identity
identity    painting and reading that identity
"""

from __future__ import annotations

from asyncfetch.testing.datasets import write_dataset
from asyncfetch.testing.identity import Identity, paint, read_identity
from asyncfetch.testing.quirks import Quirks
from asyncfetch.testing.server import (
    Fault,
    FaultEvery,
    FaultOnce,
    FaultRule,
    RangeServer,
    ServedRequest,
    ServerStatistics,
)
from asyncfetch.testing.truth import DatasetTruth

__all__ = [
    "DatasetTruth",
    "Fault",
    "FaultEvery",
    "FaultOnce",
    "FaultRule",
    "Identity",
    "Quirks",
    "RangeServer",
    "ServedRequest",
    "ServerStatistics",
    "paint",
    "read_identity",
    "write_dataset",
]
