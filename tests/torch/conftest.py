"""A small real dataset on disk."""

from __future__ import annotations

import pytest

from asyncfetch.testing import DatasetTruth, write_dataset

LENGTHS = (5, 9, 1, 12, 0, 3)


@pytest.fixture(scope="session")
def truth(tmp_path_factory: pytest.TempPathFactory) -> DatasetTruth:
    root = tmp_path_factory.mktemp("data") / "small"
    return write_dataset(root, episodes=LENGTHS, width=64, height=64)
