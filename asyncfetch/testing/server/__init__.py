"""A range server for tests: TLS, a pace per stream, a delay to the first byte, and faults on demand.

server        RangeServer: its life, and one request from arrival to end
faults        what can go wrong with a response. Pure
contents      where the bytes are, a mapping in memory or a directory; which of them answer a request
"""

from __future__ import annotations

from asyncfetch.testing.server.faults import Fault, FaultEvery, FaultOnce, FaultRule, ServedRequest, ServerStatistics
from asyncfetch.testing.server.server import RangeServer

__all__ = ["Fault", "FaultEvery", "FaultOnce", "FaultRule", "RangeServer", "ServedRequest", "ServerStatistics"]
