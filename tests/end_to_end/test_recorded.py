"""Datasets that LeRobot itself wrote, over HTTPS: every frame right by its pixels and exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader

import asyncfetch as af
from asyncfetch.testing import RangeServer
from tests.recorded import CAMERAS, DATA, read_code

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,  # 1,656 pictures
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),  # threads are running, as in any trainer
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # more workers than cores
]


class Recorded:
    """A recorded dataset, where it is served, and its rows by pyarrow."""

    def __init__(self, root: Path, server: RangeServer) -> None:
        self.server = server
        self.rows = [row for path in sorted(root.glob("data/*/*")) for row in pq.read_table(path).to_pylist()]
        tasks = pq.read_table(root / "meta/tasks.parquet").to_pylist()
        self.tasks = {row["task_index"]: row["task"] for row in tasks}

    def stream(self, shuffle: bool) -> af.Stream:
        fetch = af.FetchConfig(ca_file=self.server.ca_file)
        config = af.StreamConfig(pool_segments=4, prefetch_segments=2, fetch=fetch)
        return af.Stream(self.server.url, shuffle=shuffle, seed=3, config=config)

    def check(self, sample: dict[str, Any]) -> int:
        """The sample's index; all else of it is what it should be."""
        index = int(sample["index"])
        row = self.rows[index]
        for number, camera in enumerate(CAMERAS):
            assert read_code(sample[camera].numpy()) == (row["episode_index"], row["frame_index"], number)
        read = np.hstack([sample[key].numpy() for key in row])
        np.testing.assert_allclose(read, np.hstack(list(row.values())), rtol=1e-6, err_msg=str(index))
        assert sample["task"] == self.tasks[row["task_index"]]
        return index

    def check_order(self, indices: list[int], *, shuffled: bool) -> None:
        assert sorted(indices) == [row["index"] for row in self.rows]
        assert (indices != sorted(indices)) is shuffled


@pytest.fixture(scope="module", params=["pick-place", "one-episode-files", "h264"])
def recorded(request: pytest.FixtureRequest) -> Iterator[Recorded]:
    root = DATA / request.param
    with RangeServer(root) as server:
        yield Recorded(root, server)


@pytest.mark.parametrize("shuffle", [False, True], ids=["in sequence", "shuffled"])
async def test_by_the_async_iterator(recorded: Recorded, shuffle: bool) -> None:
    async with recorded.stream(shuffle).samples() as samples:
        recorded.check_order([recorded.check(sample) async for sample in samples], shuffled=shuffle)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True], ids=["in sequence", "shuffled"])
def test_by_a_loader(recorded: Recorded, shuffle: bool, num_workers: int) -> None:
    stream = recorded.stream(shuffle)
    context = "fork" if num_workers else None
    dataset = af.torch.StreamDataset(stream)
    loader = DataLoader(dataset, batch_size=None, num_workers=num_workers, multiprocessing_context=context)
    # Two workers take the frames of the order in turns, and so does the loader from them: it stays what it was.
    recorded.check_order([recorded.check(sample) for sample in loader], shuffled=shuffle)
    stream.close()
