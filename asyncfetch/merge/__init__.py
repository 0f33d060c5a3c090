"""Joining LeRobot datasets to one.

    apply         merge_datasets: what is refused, in which order it goes
    destination   where it is built and comes to lie: a local folder, a prefix of S3
    subsets       some episodes, the parts of a split, a v2 dataset: merges of one source
    sources       what is read of each dataset beforehand
    validate      what datasets must have in common
    plan          which file, frame and task everything gets
    segments      where a video can be cut
    videos        one video of many segments, times in whole ticks
    codecs        what a sample description says
    build         every file written once
    tables, statistics, info     what is in the other files

Sources are read with the engine, so they may lie wherever it reads from.
"""

from asyncfetch.merge.apply import MergeReport, merge_datasets
from asyncfetch.merge.sources import Selection
from asyncfetch.merge.subsets import convert_dataset, select_episodes, split_dataset

__all__ = ["MergeReport", "Selection", "convert_dataset", "merge_datasets", "select_episodes", "split_dataset"]
