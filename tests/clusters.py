"""A real Ray on this machine, for the tests of more than one room."""

from __future__ import annotations

import os
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.merge.on_s3 import set_keys

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
MIB = 1024 * 1024


@contextmanager
def local_ray(num_cpus: int) -> Iterator[None]:
    """It reports nothing to anybody, and is gone behind the block. Its workers have the keys that S3Server knows."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(ROOT)}
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        set_keys(patch)
        warnings.simplefilter("ignore")  # Ray's own: on accelerators, on files it leaves open
        import ray

        ray.init(
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=200 * MIB,
        )
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.shutdown()
