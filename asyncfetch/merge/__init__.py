"""Joining LeRobot datasets to one, and taking parts of them.

    apply         merge_datasets: its contract, its report, what is refused before anything is read, how far it is
    subsets       some episodes, the parts of a split, a v2 dataset: merges of one source
    sources       what is read of each dataset beforehand
    plan          what datasets must have in common; which file, frame and task everything gets; its tables,
                  and types that differ in nulls only
    job           a merge that is planned and can be carried out: which pieces run when, and what is added up
    tasks         the pieces that write: each file, and the metadata at the end
    summaries     statistics, and the pieces that read back what they need of the rows
    quantiles     how quantiles are found without all rows in memory
    pairwise      a sum of values that come in any order
    executor      what an executor has to do, and what a piece finds where it runs
    local_executor   the executor of this machine: threads, or processes when they pay
    worker_process   one of these processes
    destination   what a destination has to do
    local_folder  one of them: built beside, gone on with after an interruption
    s3_prefix     the other: put file by file, likewise
    videos        where a video can be cut, and one video of many segments, times in whole ticks
    info          what info.json says

Sources are read with the engine, so they may be anywhere it reads from.
"""

from asyncfetch.merge.apply import MergeReport, PlannedFile, merge_datasets
from asyncfetch.merge.job import MergeProgress
from asyncfetch.merge.sources import Selection
from asyncfetch.merge.subsets import convert_dataset, select_episodes, split_dataset, split_episodes

__all__ = [
    "MergeProgress",
    "MergeReport",
    "PlannedFile",
    "Selection",
    "convert_dataset",
    "merge_datasets",
    "select_episodes",
    "split_dataset",
    "split_episodes",
]
