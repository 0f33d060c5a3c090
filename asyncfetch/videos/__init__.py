"""Collections of videos that aren't LeRobot's.

windows    ClipSampler: which frames of a video make a clip, and how many clips a video gives
"""

from asyncfetch.videos.windows import ClipSampler, draw, frames_within

__all__ = ["ClipSampler", "draw", "frames_within"]
