"""What the benchmarks' tests need of the machine."""

from __future__ import annotations

import os

import pytest

from bench import nginx


@pytest.fixture
def needs_nginx() -> None:
    """Skips where it isn't installed; on CI that is an error."""
    if nginx.find_nginx() is None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"nginx must be installed on CI: {nginx.INSTALL}")
        pytest.skip(f"nginx isn't installed: {nginx.INSTALL}")


@pytest.fixture
def needs_lua(needs_nginx: None) -> None:
    """Skips where nginx can't delay a first byte or hold a rate."""
    if not nginx.has_lua():
        pytest.skip(f"nginx's lua module isn't installed: {nginx.INSTALL}")
