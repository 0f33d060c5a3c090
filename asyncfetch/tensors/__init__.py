"""Tensors that many processes read and few of them hold: on servers, fetched once, kept within a bound.

client        TensorClient: remotize, localize, clear, by coroutines or plain calls
server        TensorServer: holds shards; who may talk to it
remote        RemoteTensor, the value that stands for a tensor; the border to torch
structure     walking dicts, lists, tuples and dataclasses
ahead         items in a known order, fetched ahead of their consumer
buffer        what came, bounded; who may put it there
flights       what is on its way, once for all who ask
stores        the protocol of back ends, and how shards become requests: http_store, ray_store
session       the verbs, on the client's loop
storage, handlers  a server's shards, and its answers
shared        shards in memory that processes of one machine share
wire, urls    frames, addresses. Pure
"""

from asyncfetch.tensors.ahead import Ahead
from asyncfetch.tensors.client import BlockingTensorClient, Cleared, ClientStatistics, TensorClient
from asyncfetch.tensors.remote import RemoteTensor
from asyncfetch.tensors.server import TensorServer
from asyncfetch.tensors.storage import StorageStatistics

__all__ = [
    "Ahead",
    "BlockingTensorClient",
    "Cleared",
    "ClientStatistics",
    "RemoteTensor",
    "StorageStatistics",
    "TensorClient",
    "TensorServer",
]
