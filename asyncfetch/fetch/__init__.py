"""Reading byte ranges of objects, and writing whole ones: when, how often and how we ask.

engine        Fetcher: the verbs, what they share, and which transport the scheme of a url names
range_reader  one range by a request that it shares with others, in parts, or by its own
batch         many ranges: bounded workers, ranges as they arrive; the verbs of readers that read each on its own
buffers       one answer into the memory of several ranges
download      one range over its attempts: what has landed, in which version
retry         the one retry loop: which failure is tried again, or looks like a host that is away; when; how many of a
              host's; how long a caller waits for one that is away; when to warn of one that fails most requests
request       a user's url as a ranged GET: where to, what it carries, and what its answer is. Pure
responses     whether an answer holds exactly what was asked. Pure
refusals      what a refusal, or an error in place of an answer, means, in words
hosts         a limit, budgets and idle connections per host; a request's permit, and its times
statistics    counters and times of requests, and snapshots of them
limiter       whose turn it is: callers in turn, what is waited for before read-ahead
limit         how many requests a host should have in flight. Pure
outage        whether a host is away, when it is asked again, and when that is given up. Pure
hedge         when a late answer is asked for again, and how often. Pure
bandwidth     a cap on the bytes per second of the process
answer        an answer from its bytes as they come, each straight in its memory. Pure
connection    a connection of ours, its waits and their limits: one request at a time
connector     new connections: names (resolver), addresses, TCP, TLS
environment   proxies and logins that the user's environment names
urls          where a request goes and which secrets go with it; an object's name, however its url is signed. Pure
objects       the versions seen first
listing       a directory's entries, from pages of them. Pure
upload_sources   what is put somewhere
transports    the ways to reach bytes: http, s3, hub, file, fsspec
reader        RangeReader, the protocol of the verbs, and what they take. Pure
"""

from asyncfetch.fetch.engine import Fetcher, ask_server, insist_on
from asyncfetch.fetch.reader import RangeReader
from asyncfetch.fetch.statistics import FetchStatistics, HostStatistics

__all__ = ["FetchStatistics", "Fetcher", "HostStatistics", "RangeReader", "ask_server", "insist_on"]
