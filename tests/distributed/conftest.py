"""A cluster for the tests of this room, and datasets to merge."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.clusters import local_ray
from tests.lerobot.serving import Library
from tests.merge.on_s3 import set_keys

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[None]:
    """Two workers; gone before the next room's tests, since an initialised Ray is seen by all that ask.

    They have the keys that S3Server knows.
    """
    pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        set_keys(patch)
        with local_ray(num_cpus=2):
            yield


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(tmp_path_factory, {})
