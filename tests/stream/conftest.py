"""A small real dataset on disk."""

from __future__ import annotations

import pytest

from asyncfetch.testing import DatasetTruth, write_dataset

LENGTHS = (5, 9, 1, 12, 7, 3, 0, 8)


@pytest.fixture(scope="session")
def truth(tmp_path_factory: pytest.TempPathFactory) -> DatasetTruth:
    """Every episode in files of its own."""
    root = tmp_path_factory.mktemp("data") / "small"
    return write_dataset(root, episodes=LENGTHS, width=64, height=64, episodes_per_video_file=1)
