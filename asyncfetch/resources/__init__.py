"""What the open datasets of one reader share: connections, caches, threads, and the bounds on all of them.

engine      owns them
budget      what passes pay for clips from
"""

from __future__ import annotations

from asyncfetch.resources.budget import Budget, Share
from asyncfetch.resources.engine import Engine

__all__ = ["Budget", "Engine", "Share"]
