"""A cluster for the tests of this room, and datasets to merge."""

from __future__ import annotations

import pytest

from tests.lerobot.serving import Library


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(tmp_path_factory, {})
