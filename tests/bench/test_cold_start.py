"""bench/cold_start.py, tiny: the dataset that it makes can be read, and its rounds are counted right."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import asyncfetch as af
from asyncfetch.testing import RangeServer
from bench.cold_start import FRAMES, MODEL_EPISODES, rounds_of, start, write_large

if TYPE_CHECKING:
    from pathlib import Path

EPISODES = 25


def requests(*spans: tuple[float, float | None]) -> Any:  # noqa: ANN401 - as a server logs them
    return [SimpleNamespace(started=started, finished=finished) for started, finished in spans]


@pytest.mark.parametrize(
    ("spans", "rounds"),
    [
        ((), 0),
        (((0, 1), (0.5, 1.5)), 1),
        (((0, 1), (1, 2), (0.5, 3), (2, 4)), 3),
        (((2, 3), (0, 1), (1.5, 2.5)), 2),
        (((0, None), (5, 6)), 1),
    ],
)
def test_the_longest_chain_is_counted(spans: tuple[tuple[float, float | None], ...], rounds: int) -> None:
    assert rounds_of(requests(*spans)) == rounds


@pytest.mark.parametrize("group_episodes", [10, 1000])
def test_the_dataset_is_whole(tmp_path: Path, group_episodes: int) -> None:
    write_large(tmp_path, EPISODES, group_episodes)

    async def last() -> tuple[int, int, int]:
        async with af.open_dataset(str(tmp_path)) as dataset:
            sample = await dataset.sample(EPISODES - 1, FRAMES - 1)
            return dataset.num_frames, int(sample["index"]), int(sample["episode_index"])

    assert EPISODES > MODEL_EPISODES
    assert anyio.run(last) == (EPISODES * FRAMES, EPISODES * FRAMES - 1, EPISODES - 1)


def test_a_start_is_timed(tmp_path: Path) -> None:
    write_large(tmp_path, EPISODES, 10)
    with RangeServer(tmp_path, tls=False) as server:
        figures = start(server.url, reads_ahead=False)
        assert 0 < rounds_of(server.requests) <= len(server.requests)
    assert 0 < figures["open_seconds"] <= figures["first_sample_seconds"]
