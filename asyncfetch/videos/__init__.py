"""Collections of videos that aren't LeRobot's: tables of spans, folders, tar shards, bytes in Parquet.

collection  Videos: where a collection is found
entry_table its entries, by rows; entries: a table's columns as entries: urls, times as text, rows that are wrong
tables      tables of spans: Parquet, CSV, JSON lines, in memory
parquet_bytes  videos in a column of Parquet
folders     folders and prefixes; VideoFolder's metadata
tars        tar shards as WebDataset writes them
tar_index   indexes beside tar shards: Energon's, DALI's, wids's. Pure
listing     files below a directory, by a store or by a web server's index pages; patterns of urls: braces, wildcards
windows     ClipSampler: which frames of a video make a clip, and how many clips a video gives
index       a video's index, wherever it lies, and what it says of the video
index_file  the index of a collection, written once: places and measures of all its videos
plan        the bytes of some windows: clips, audio. Pure
cache       windows in memory
samples     windows as samples, with their audio; whole: videos that can't be cut
format      a collection as a stream reads it
"""

from __future__ import annotations

from asyncfetch.videos.collection import Videos
from asyncfetch.videos.windows import ClipSampler

__all__ = ["ClipSampler", "Videos"]
