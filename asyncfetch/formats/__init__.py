"""The parts that all formats of data share below the streams that read them, and what a format is to a stream.

protocol        what a stream needs from a format; a user's own implements it
samples         samples, their layout, rows of batches
stretch         neighbouring frames of an episode, which are read as one
clips           the bytes that a stretch needs: ranges, and clips cut out of videos by their indexes
held            a stretch while it is read: its bytes, clips and decoders
stretch_cache   stretches in memory, each byte fetched once; the error where the clips of one don't fit
reader          an open dataset's reader: fetched ahead, held while it is read
ranges          formats of a user's own, of which each sample is made of some byte ranges
"""

from __future__ import annotations

from asyncfetch.formats.held import HeldStretch
from asyncfetch.formats.protocol import Format, OpenFormat, SampleMaker
from asyncfetch.formats.ranges import OwnFormat, RangeFormat
from asyncfetch.formats.reader import DatasetStatistics, StretchReader
from asyncfetch.formats.samples import Asked, DoesNotFit, Field, ImageDtype, Row, Sample
from asyncfetch.formats.stretch import Reach, Stretch, reach_of
from asyncfetch.formats.stretch_cache import EpisodeCacheStatistics, PlanChange

__all__ = [
    "Asked",
    "DatasetStatistics",
    "DoesNotFit",
    "EpisodeCacheStatistics",
    "Field",
    "Format",
    "HeldStretch",
    "ImageDtype",
    "OpenFormat",
    "OwnFormat",
    "PlanChange",
    "RangeFormat",
    "Reach",
    "Row",
    "Sample",
    "SampleMaker",
    "Stretch",
    "StretchReader",
    "reach_of",
]
