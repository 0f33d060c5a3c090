"""A small real dataset behind a real HTTPS server, and a checker that looks at the pixels of every sample."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncfetch as af
from asyncfetch.testing import DatasetTruth, RangeServer, read_identity, write_dataset

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

LENGTHS = (5, 9, 1, 12, 7, 3, 0, 8, 10, 6, 4, 11)


@dataclass
class Served:
    """A dataset, where it is served, and what is in it."""

    truth: DatasetTruth
    server: RangeServer
    path: str = ""
    keys: list[tuple[int, int]] = field(init=False)
    """(episode, frame) of every frame, in the dataset's order."""

    def __post_init__(self) -> None:
        lengths = enumerate(self.truth.lengths)
        self.keys = [(episode, frame) for episode, length in lengths for frame in range(length)]

    @property
    def url(self) -> str:
        return self.server.url + self.path

    def config(self, *, max_requests_per_host: int = 64, **settings: Any) -> af.StreamConfig:  # noqa: ANN401
        settings = {"pool_segments": 4, "prefetch_segments": 4, **settings}
        fetch = af.FetchConfig(ca_file=self.server.ca_file, max_requests_per_host=max_requests_per_host)
        return af.StreamConfig(fetch=fetch, **settings)

    def stream(self, *, config: af.StreamConfig | None = None, **options: Any) -> af.Stream:  # noqa: ANN401
        return af.Stream(self.url, config=config or self.config(), **options)

    def check(self, samples: Iterable[dict[str, Any]]) -> list[tuple[int, int]]:
        """(episode, frame) of each sample by its row; every value and every pixel of it is what it should be."""
        return [self._check(sample) for sample in samples]

    def check_batches(self, batches: Iterable[dict[str, Any]]) -> list[tuple[int, int]]:
        return [key for batch in batches for key in self.check(unbatch(batch))]

    def _check(self, sample: dict[str, Any]) -> tuple[int, int]:
        episode, frame = int(sample["episode_index"]), int(sample["frame_index"])
        for camera in self.truth.cameras:
            assert read_identity(sample[camera]) == self.truth.identity(episode, frame, camera)
        np.testing.assert_array_equal(sample["observation.state"], self.truth.state(episode, frame))
        assert int(sample["index"]) == self.truth.first_index(episode) + frame
        assert sample["task"] == self.truth.task(episode)
        return episode, frame


def unbatch(batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for number in range(len(batch["index"])):
        yield {key: values[number] for key, values in batch.items()}


@pytest.fixture(scope="session")
def truth(tmp_path_factory: pytest.TempPathFactory) -> DatasetTruth:
    return write_dataset(tmp_path_factory.mktemp("data") / "small", episodes=LENGTHS)


Serve = Callable[..., AbstractContextManager[Served]]


@contextmanager
def serve_dataset(truth: DatasetTruth, **options: Any) -> Iterator[Served]:  # noqa: ANN401
    with RangeServer(truth.root, **options) as server:
        yield Served(truth, server)


@pytest.fixture(name="serve")
def serve_fixture() -> Serve:
    """``with serve(truth) as served``; what follows is the server's."""
    return serve_dataset


@pytest.fixture(scope="session")
def session_served(truth: DatasetTruth) -> Iterator[Served]:
    with serve_dataset(truth) as served:
        yield served


@pytest.fixture
def served(session_served: Served) -> Served:
    session_served.server.reset()
    return session_served
