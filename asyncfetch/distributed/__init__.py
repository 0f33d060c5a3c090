"""A merge's work on a cluster: the same pieces, the same bytes.

    ray_executor    RayExecutor: merge_datasets(..., executor=RayExecutor())
    steps           merge_steps: a merge as two steps of datatrove pipelines

Both need a destination on S3 or on a file system that all nodes share, and sources that all nodes can read.
"""

from __future__ import annotations

from asyncfetch.distributed.ray_executor import RayExecutor
from asyncfetch.distributed.steps import merge_steps

__all__ = ["RayExecutor", "merge_steps"]
