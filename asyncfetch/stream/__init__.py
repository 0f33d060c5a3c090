"""Samples in order: what comes when, what is fetched ahead, who takes which part.

order.py        the order of an epoch, a pure function
cursor.py       what is left of it, and who takes which part; state.py: the same as JSON
plan.py, jobs.py  what one pass reads, and what of it is decoded together
placement.py    which part of it this process takes
epochs.py       which epoch comes next
window.py       episodes held and fetched ahead, within a bound
samples.py      one pass: decoded ahead, delivered in order; building.py: what its threads do
quarantine.py   bad data
passes.py       opening a pass, on a loop of the caller's or in a thread
session.py      a dataset on a loop in a thread, for synchronous iteration
stream.py       Stream, which brings them together
"""

from __future__ import annotations

from asyncfetch.stream.passes import Samples, StreamIterator
from asyncfetch.stream.placement import Placement
from asyncfetch.stream.samples import PassStatistics, SamplePass
from asyncfetch.stream.session import Session
from asyncfetch.stream.stream import Stream

__all__ = ["PassStatistics", "Placement", "SamplePass", "Samples", "Session", "Stream", "StreamIterator"]
