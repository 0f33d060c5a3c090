"""Joining LeRobot datasets to one, and taking parts of them.

    apply         merge_datasets: its contract, its report, its arguments
    subsets       some episodes, the parts of a split, a v2 dataset: merges of one source
    sources       all that is read of each dataset before a merge; statistics of a part aren't those of the whole
    plan          agreement of the sources; the file, frame and task of each episode; tables, and common types; the
                  fingerprint, by which an interrupted merge is known again
    job           a planned merge, and carrying it out: the order of the pieces, and their sums
    tasks         the pieces that write: each file, and the metadata at the end, with the statistics of pictures
    summaries     statistics, and the pieces that read rows back for them; quantiles without all rows in memory
    executor      where the pieces run: on this machine in threads, or in processes when they pay; the protocol
    destination   which destination a path or url means
    local_folder  a local destination: built beside it, where there is space, and resumed after an interruption
    s3_prefix     a destination on S3: put file by file, and resumed likewise
    videos        places where a video can be cut, and one video of many segments, times in whole ticks
    info          info.json of the result

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
