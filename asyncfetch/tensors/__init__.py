"""Tensors on servers, which many processes fetch, each once, and keep within a bound.

client        TensorClient: remotize, localize, clear, by coroutines or plain calls
server        TensorServer: holds shards; tokens
remote        RemoteTensor, a reference to a tensor; walking structures; bytes of torch's tensors
ahead         items in a known order, fetched ahead of their consumer
buffer        shards on their way, and the fetch buffer
http_store, ray_store   back ends; http_store: a shard by a request, or from shared memory on the server's machine
storage       a server's shards, how long they live; also in memory that processes of one machine share
wire          frames; which dtypes and shapes a tensor may have. Pure
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
