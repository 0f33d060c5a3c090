from __future__ import annotations

import pytest

from tests.local_reader import LocalReader


@pytest.fixture
def reader() -> LocalReader:
    return LocalReader()
