"""Helpers for tests, ours and yours.

server      RangeServer: TLS, a pace per stream, a delay to the first byte; one request from arrival to end
faults      faults of a response, as values. Pure
contents    a server's bytes, from a mapping in memory or a directory; answers to range requests
s3_server   S3Server: buckets behind signatures that are verified
hub_server  HubServer: a Hugging Face Hub and its CDN
recorder    a dataset's files as LeRobot's recorder writes them, with the oddities of public ones
conformance the contract of readers of objects, as checks for a store of yours
datasets    write_dataset: small LeRobot datasets whose frames carry their identity; clips: their videos; truth: their
            contents
identity    painting and reading that identity
"""

from __future__ import annotations

from asyncfetch.testing import conformance
from asyncfetch.testing.datasets import write_dataset
from asyncfetch.testing.faults import Fault, FaultEvery, FaultOnce, FaultRule, ServedRequest, ServerStatistics
from asyncfetch.testing.hub_server import HubServer
from asyncfetch.testing.identity import Identity, paint, read_identity
from asyncfetch.testing.recorder import Quirks
from asyncfetch.testing.s3_server import Keys, S3Quirks, S3Server
from asyncfetch.testing.server import RangeServer
from asyncfetch.testing.truth import DatasetTruth

__all__ = [
    "DatasetTruth",
    "Fault",
    "FaultEvery",
    "FaultOnce",
    "FaultRule",
    "HubServer",
    "Identity",
    "Keys",
    "Quirks",
    "RangeServer",
    "S3Quirks",
    "S3Server",
    "ServedRequest",
    "ServerStatistics",
    "conformance",
    "paint",
    "read_identity",
    "write_dataset",
]
