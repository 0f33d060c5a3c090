"""A small real dataset on disk."""

from __future__ import annotations

import pytest

import asyncfetch.stream  # noqa: F401 - imported by the first test, on its loop, it would be found to block that
from asyncfetch.testing import DatasetTruth, write_dataset

FRONT, TOP = "observation.images.front", "observation.images.top"
LENGTHS = (5, 9, 1, 12, 7, 3, 0, 8)


@pytest.fixture(scope="session")
def truth(tmp_path_factory: pytest.TempPathFactory) -> DatasetTruth:
    """Every episode in files of its own."""
    root = tmp_path_factory.mktemp("data") / "small"
    return write_dataset(root, episodes=LENGTHS, width=64, height=64, episodes_per_video_file=1)


@pytest.fixture(scope="session")
def truths(truth: DatasetTruth, tmp_path_factory: pytest.TempPathFactory) -> list[DatasetTruth]:
    """Three datasets of different cameras, sizes and lengths."""
    root = tmp_path_factory.mktemp("mixed")
    small = write_dataset(root / "front", episodes=(4, 7, 3), cameras=[FRONT], width=96, height=64)
    other = write_dataset(root / "tall", episodes=(6, 5), cameras=[TOP], width=64, height=96)
    return [truth, small, other]
