"""Video files as they describe themselves: where each frame lies, and a file header for a stretch of them. Pure.

boxes       the box structure of MP4, and where its index (moov) and fragments (moof) lie in a file
samples     the sample tables as columns: size, duration, composition offset, key frames, byte runs
index       moov -> Mp4Index; times -> samples; samples -> ClipPlan
audio       moov -> AudioIndex, beside the video's; times -> AudioClip
fragments   the same of a fragmented MP4, and which bytes to read for it
clip        ClipPlan: which bytes to fetch, which frames they hold, and the header that makes an MP4 of them;
            from when on pictures are whole in H.264 that has recovery points in place of key frames
tar         the headers of a tar archive: where each of its files lies
"""

from __future__ import annotations

from asyncfetch.media.audio import AudioClip, AudioIndex, Tracks, parse_tracks
from asyncfetch.media.boxes import locate_moov
from asyncfetch.media.clip import ClipPlan, KeyFrames
from asyncfetch.media.fragments import fragment_reads
from asyncfetch.media.index import Mp4Index, parse_moov

__all__ = [
    "AudioClip",
    "AudioIndex",
    "ClipPlan",
    "KeyFrames",
    "Mp4Index",
    "Tracks",
    "fragment_reads",
    "locate_moov",
    "parse_moov",
    "parse_tracks",
]
