"""Samples in order: what comes when, what is fetched ahead, who takes which part.

order.py        the order of an epoch, a pure function
remaining.py    what is left of it, and who takes which part; state.py: the same as JSON
traffic.py      what an epoch fetches over all ranks, told before it is read
plan.py, decode_jobs.py  what one pass reads, and what of it is decoded together
placement.py    which part of it this process takes
epochs.py       which epoch comes next
prefetcher.py   episodes held and fetched ahead, within a bound
samples.py      one pass: what was decoded, delivered in order; batch.py: in batches
decode_ahead.py what is decoded ahead of it; job_builder.py: what its threads do
figures.py      what a pass counts, also for another process; pool.py: a pool that fits the bound
quarantine.py   bad data
passes.py       opening a pass, on a loop of the caller's or in a thread, with a dataset that stays open there
protocols.py    what a pass reads, and where an episode of it comes from
source.py       what streams and mixtures have in common
stream.py       Stream, which brings them together
mixing.py       whose turn it is in a mixture, a pure function
mixed.py        a mixture's order, and reading by it; members' samples made to go together
mixture.py      Mixture, of several streams
serving/        a stream read in another process
"""

from __future__ import annotations

from asyncfetch.stream.mixture import Mixture
from asyncfetch.stream.passes import DatasetSession, Samples, StreamIterator
from asyncfetch.stream.placement import Placement
from asyncfetch.stream.samples import PassStatistics, SamplePass
from asyncfetch.stream.serving import ServedBatches, serve_samples
from asyncfetch.stream.source import SampleSource, source_of
from asyncfetch.stream.stream import Stream

__all__ = [
    "DatasetSession",
    "Mixture",
    "PassStatistics",
    "Placement",
    "SamplePass",
    "SampleSource",
    "Samples",
    "ServedBatches",
    "Stream",
    "StreamIterator",
    "serve_samples",
    "source_of",
]
