"""Joining LeRobot datasets to one, and taking parts of them.

    apply         merge_datasets: its contract and its report
    arguments     what is refused before anything is read
    subsets       some episodes, the parts of a split, a v2 dataset: merges of one source
    sources       what is read of each dataset beforehand
    validate      what datasets must have in common
    plan          which file, frame and task everything gets
    job           a merge that is planned and can be carried out
    build         the job's pieces, what waits for what, and what is reduced
    units         the pieces that write: each file
    summaries     the pieces that read back what the statistics need of the rows
    quantiles     how quantiles are found without all rows in memory
    kernel        each piece as soon as what it needs is there; where it runs is an executor's to say
    here          the executor of this machine
    children      processes of its own, and when they pay; child: what runs in one
    destination   what a destination has to do
    local_folder  one of them, and folder: built beside, gone on with after an interruption
    s3_prefix     the other: put file by file, likewise
    segments      where a video can be cut
    videos        one video of many segments, times in whole ticks
    codecs        what a sample description says
    finish        the metadata, at the end
    tables, statistics, info     what is in the files
    schemas       schemas that pickle
    arrow_types   types that differ in nulls only
    progress      how far it is

Sources are read with the engine, so they may lie wherever it reads from.
"""

from asyncfetch.merge.apply import MergeReport, PlannedFile, merge_datasets
from asyncfetch.merge.progress import MergeProgress
from asyncfetch.merge.sources import Selection
from asyncfetch.merge.subsets import convert_dataset, select_episodes, split_dataset

__all__ = [
    "MergeProgress",
    "MergeReport",
    "PlannedFile",
    "Selection",
    "convert_dataset",
    "merge_datasets",
    "select_episodes",
    "split_dataset",
]
