"""A small real dataset on disk."""

from __future__ import annotations

import pytest

from asyncfetch.testing import DatasetTruth, write_dataset

LENGTHS = (5, 9, 1, 12, 0, 3)


@pytest.fixture(scope="session")
def truth(tmp_path_factory: pytest.TempPathFactory) -> DatasetTruth:
    root = tmp_path_factory.mktemp("data") / "small"
    return write_dataset(root, episodes=LENGTHS, width=64, height=64)


@pytest.fixture(scope="session")
def larger(tmp_path_factory: pytest.TempPathFactory) -> DatasetTruth:
    """The same with one camera, of pictures four times as large: as many bytes take a quarter of the steps."""
    root = tmp_path_factory.mktemp("data") / "larger"
    return write_dataset(root, episodes=LENGTHS, width=128, height=128, cameras=["observation.images.top"])
