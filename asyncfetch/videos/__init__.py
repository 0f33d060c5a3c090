"""Collections of videos, as tables of entries.

entries     a table's columns as entries: absolute urls, seconds, names that are taken
tables      tables of spans: Parquet, CSV, JSON lines, in memory
windows     ClipSampler: which frames of a video make a clip, and how many clips a video gives
listing     files below a directory, by a store or by a web server's index pages
patterns    patterns of urls: braces and wildcards
tar_index   indexes beside tar shards: Energon's, DALI's, wids's. Pure
tars        tar shards as WebDataset writes them
folders     folders and prefixes; VideoFolder's metadata
"""

from __future__ import annotations

from asyncfetch.videos.windows import ClipSampler

__all__ = ["ClipSampler"]
