"""Reading byte ranges of objects, and writing whole ones: when, how often and how we ask.

engine      Fetcher: the verbs, what they share, who may call them
batch       many ranges: bounded workers, ranges as they arrive
joining     ranges of one turn of the loop, by calls that know nothing of each other
parts       how long the parts of a large range are, by what was learned of its host
download    one range over its attempts: what has landed, in which version
sources     what is put somewhere
responses   whether an answer holds exactly what was asked. Pure
attempts    those for one range: another one, or the caller's error
retry       which failure is tried again, and when, and how many of a host's. Pure
quota       what a server says is left of ours. Pure
hedge       when a late answer is asked for again, and how often. Pure
limit       how many requests a host should have in flight. Pure
gate        whose turn it is: callers in turn, what is waited for before read-ahead
redirects   where a request goes and which secrets go with it. Pure
urls        urls below a root. Pure
addresses   what a user's url means on the wire, and for how long
objects     the versions seen first
listing     a directory's entries, from pages of them. Pure
bandwidth   a cap on the bytes per second of the process
hosts       a gate, a limit and budgets per host; a request's turn at it
tally       what is counted and timed, and the snapshots that show it
schemes     which transport the scheme of a url names
transports  http (session, requests, lines, visit, exchange, hedging, direct, paced, faults, environment); s3
            (s3_signer, s3_upload) and hub, over http; file (file_writing); other, by fsspec (back_ends,
            back_end_threads)
reader      RangeReader, the protocol of the verbs
"""

from asyncfetch.fetch.counters import FetchStatistics, HostStatistics
from asyncfetch.fetch.engine import Fetcher
from asyncfetch.fetch.reader import RangeReader

__all__ = ["FetchStatistics", "Fetcher", "HostStatistics", "RangeReader"]
