"""Fixtures for every room: small datasets, servers, and a detector of calls that block the loop."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import pytest
from blockbuster import blockbuster_ctx

from asyncfetch.testing import DatasetTruth, RangeServer, write_dataset

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncfetch.testing.clips import Codec


MAY_BLOCK = {
    "tests/lerobot/conftest.py": {"stat", "fetch", "_path"},
    "asyncfetch/testing/datasets.py": {"write_dataset"},
    "asyncfetch/fetch/transports/s3_signer.py": {"sign", "aclose"},
}
"""Functions, by file, that may block: they stand in for something that wouldn't, build what a test reads, or run on a
loop that is there to be blocked."""


@pytest.fixture(autouse=True)
def _loop_is_never_blocked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail an async test where asyncfetch calls, on the loop, what blocks: files, sleeps, locks, plain sockets.

    What the test itself calls is its own business. ``@pytest.mark.may_block`` lifts it.
    """
    function = getattr(request.node, "function", None)
    if not inspect.iscoroutinefunction(function) or request.node.get_closest_marker("may_block"):
        yield
        return
    with blockbuster_ctx("asyncfetch") as detector:
        for call in detector.functions.values():
            for file, names in MAY_BLOCK.items():
                call.can_block_in(file, names)
        yield


@pytest.fixture(scope="session")
def small_dataset(tmp_path_factory: pytest.TempPathFactory) -> DatasetTruth:
    """Four AV1 episodes of different lengths and two cameras, in files of one and of two episodes."""
    return write_dataset(tmp_path_factory.mktemp("small") / "dataset", episodes=(20, 31, 17, 24))


@pytest.fixture(scope="session", params=["av1", "h264", "hevc"])
def dataset_of_each_codec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DatasetTruth:
    """Three episodes in one codec; a test that takes it runs for each."""
    codec: Codec = request.param
    return write_dataset(tmp_path_factory.mktemp(codec) / "dataset", episodes=(9, 12, 7), codec=codec)


@pytest.fixture
def https_server(small_dataset: DatasetTruth) -> Iterator[RangeServer]:
    """``small_dataset`` over HTTPS, served from a thread."""
    with RangeServer(small_dataset) as server:
        yield server
