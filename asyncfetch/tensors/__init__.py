"""Tensors that many processes read and few of them hold: on servers, fetched once, kept within a bound.

client        TensorClient: remotize, localize, clear, by coroutines or plain calls
server        TensorServer: holds shards; tokens
remote        RemoteTensor, the value that stands for a tensor; walking what holds some; the border to torch
ahead         items in a known order, fetched ahead of their consumer
buffer        the protocol of back ends (http_store, ray_store), what is on its way, and what came, bounded
storage       a server's shards, also in memory that processes of one machine share
wire          frames. Pure
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
