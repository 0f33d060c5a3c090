"""LeRobot v3 datasets: metadata, tables by column and range, episodes and samples.

metadata            info.json, tasks, statistics and the episode table, checked against each other; what in them is
                    wrong, but changes no sample
info                what info.json says; where files are; units of depth
episode_files, episode_table    meta/episodes: its files; the table in memory
columns             features' columns as arrays
listing             files that no name on record leads to
version2            metadata of v2.0 and v2.1, in the terms of v3
rows                the rows of an episode, and where in a file they lie
frame_times         which frame of a video is each row's, by their times
scan                columns of many episodes, as record batches
episode_cache       stretches of episodes in memory, each byte fetched once; one of them while it is read; where an
                    episode's frames lie in its video files
samples             which frames a sample is made of; making it
summary             a dataset in one value, with the sizes of its files
dataset             LeRobotDataset, open for reading; its episodes for streams: fetched ahead, held while they are read;
                    a dataset as a stream reads it
"""

from __future__ import annotations

from asyncfetch.lerobot.dataset import EpisodeReader, LeRobotDataset, open_dataset, reader_of
from asyncfetch.lerobot.episode_cache import HeldEpisode
from asyncfetch.lerobot.info import DepthUnit
from asyncfetch.lerobot.samples import SampleBuilder, Windows, check_windows, frames
from asyncfetch.lerobot.summary import CameraSummary, DatasetSummary, FileSizes, dataset_info, summarise

__all__ = [
    "CameraSummary",
    "DatasetSummary",
    "DepthUnit",
    "EpisodeReader",
    "FileSizes",
    "HeldEpisode",
    "LeRobotDataset",
    "SampleBuilder",
    "Windows",
    "check_windows",
    "dataset_info",
    "frames",
    "open_dataset",
    "reader_of",
    "summarise",
]
