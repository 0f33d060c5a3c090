"""The resources that the open datasets of one reader share: connections, caches, threads, and their bounds.

engine      owns them, and says where on disk they may keep something, and how much
room        the memory for clips of stretches in use
"""

from __future__ import annotations

from asyncfetch.resources.engine import Engine
from asyncfetch.resources.room import ClipRoom, PassShare

__all__ = ["ClipRoom", "Engine", "PassShare"]
