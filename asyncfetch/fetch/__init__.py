"""Reading byte ranges of objects: when, how often and how we ask.

engine      Fetcher: the verbs, what they share, who may call them
batch       many ranges: bounded workers, ranges as they arrive
download    one range over its attempts: what has landed, in which version
responses   whether an answer holds exactly what was asked. Pure
retry       which failure is tried again, and when. Pure
redirects   where a request goes and which secrets go with it. Pure
urls        urls below a root. Pure
addresses   what a user's url means on the wire, and for how long
objects     the versions seen first
hosts       a gate, counters and times per host
transports  http (session, exchange, faults, environment); s3 (s3_signer) and hub, over http; file; other, by fsspec
reader      RangeReader, the protocol of the verbs
"""

from asyncfetch.fetch.engine import Fetcher
from asyncfetch.fetch.hosts import FetchStatistics, HostStatistics
from asyncfetch.fetch.reader import RangeReader

__all__ = ["FetchStatistics", "Fetcher", "HostStatistics", "RangeReader"]
