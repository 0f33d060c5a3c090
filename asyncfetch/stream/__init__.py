"""Samples in the order that the room ``order`` says: fetched ahead, decoded and delivered.

datasets.py     what a pass reads: one dataset or a mixture's, open over one engine; pool.py: a pool that fits the bound
ranks.py        which rank of how many this process is
traffic.py      what an epoch will fetch over all ranks
epochs.py       which epoch comes next
decode_jobs.py  what is decoded together
prefetcher.py   pieces held and fetched ahead, within a bound
samples.py      one pass: what was decoded, delivered in order; its figures and its report; batch.py: in batches;
                buckets.py: which samples make one
decode_ahead.py what is decoded ahead of it; job_builder.py: what its threads do
figures.py      figures of passes in other processes, such as loader workers, added up; whose count, and for how long
quarantine.py   bad data
passes.py       opening a pass, on a loop of the caller's or in a thread, with datasets that stay open there
source.py       what a stream or a mixture reads, and where it resumes; epoch_stream.py: the face of both
mixture.py      Mixture, of several streams; shapes.py: their samples made to go together
handing_over.py batches on their way from another process
serving/        a stream read in another process
"""

from __future__ import annotations

from asyncfetch.order.placement import Placement
from asyncfetch.stream.epoch_stream import EpochStream, source_of
from asyncfetch.stream.mixture import Mixture
from asyncfetch.stream.passes import DatasetSession, Samples, StreamIterator
from asyncfetch.stream.samples import PassStatistics, SamplePass
from asyncfetch.stream.serving import ServedBatches, serve_samples
from asyncfetch.stream.source import SampleSource

__all__ = [
    "DatasetSession",
    "EpochStream",
    "Mixture",
    "PassStatistics",
    "Placement",
    "SamplePass",
    "SampleSource",
    "Samples",
    "ServedBatches",
    "StreamIterator",
    "serve_samples",
    "source_of",
]
