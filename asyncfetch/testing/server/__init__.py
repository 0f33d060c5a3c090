"""A range server for tests: TLS, a pace per stream, a delay to the first byte, and faults on demand.

server        RangeServer: its life, and one request from arrival to end
delivery      a response's bytes onto the wire, at their pace, up to their end or accident
answers       request headers and an object's version to status, headers and range. Pure
faults        what can go wrong with a response. Pure
contents      where the bytes are: a mapping in memory or a directory
log           what was served
certificates  a throw-away authority for loopback names
"""

from __future__ import annotations

from asyncfetch.testing.server.faults import Fault, FaultEvery, FaultOnce, FaultRule, ServedRequest, ServerStatistics
from asyncfetch.testing.server.server import RangeServer

__all__ = ["Fault", "FaultEvery", "FaultOnce", "FaultRule", "RangeServer", "ServedRequest", "ServerStatistics"]
