"""Video files as they describe themselves: where each frame lies, and a file header for a stretch of them. Pure.

boxes       the box structure of MP4, and where the index (moov) lies in a file
samples     the sample tables as columns: size, duration, composition offset, key frames, byte runs
index       moov -> Mp4Index; times -> samples; samples -> ClipPlan
clip        ClipPlan: which bytes to fetch, which frames they hold, and the header that makes an MP4 of them
tar         the headers of a tar archive: where each of its files lies
"""

from __future__ import annotations

from asyncfetch.media.boxes import locate_moov
from asyncfetch.media.clip import ClipPlan, KeyFrames
from asyncfetch.media.index import Mp4Index, parse_moov

__all__ = ["ClipPlan", "KeyFrames", "Mp4Index", "locate_moov", "parse_moov"]
