"""The nouns of a format, and the advice that depends on it: for errors, logs and reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a format for what a stream reads of it. By default they are those of episodes with cameras."""

    entry: str = "episode"
    """A name for a stream's episode."""
    entries: str = "episodes"
    """The plural of that."""
    samples: str = "frames"
    """A name for an episode's frames."""
    ranges: str = "clips"
    """A name for the bytes of a segment in memory."""
    fewer_requests: str = "fewer and longer requests: longer segments (segment_seconds), fewer cameras (features=)"
    """The thing to ask a host for that has a quota."""
    less_decoding: str = "read fewer cameras (features=), store smaller pictures, or use more cores"
    """Advice where decode threads are busy."""
    smaller_segments: str = "cut it smaller by segment_seconds"
    """Advice for an entry of which a segment is huge."""
