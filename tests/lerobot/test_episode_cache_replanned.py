"""Stretches whose clips turn out to be others than those that were weighed, where room is scarce: all reads end."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
import pytest

import asyncfetch as af
from asyncfetch.lerobot import reader_of
from tests.lerobot.serving import TOP, refreshed, retimed, variable, write_files

if TYPE_CHECKING:
    from pathlib import Path

    from tests.lerobot.serving import Library

LENGTHS = (12, 9, 14, 8, 11, 10)


async def replanned(kind: str, library: Library, tmp_path: Path) -> Path:
    """A dataset whose rows are at times of their own, or whose videos can be decoded from recovery points alone."""
    truth = library(episodes=LENGTHS, cameras=(TOP,), episodes_per_video_file=6, gop=4)
    if kind == "times":
        return write_files(retimed(truth, *variable(truth)), tmp_path / "times")
    return await refreshed(truth, tmp_path / "refreshed", "-g 10 -bf 0 -pix_fmt yuv420p -x264-params intra-refresh=1")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["times", "refresh"])
@pytest.mark.parametrize("room", [1.0, 1.5, 2.2, 3.5])
async def test_passes_and_samples_beside_them_end_in_data_or_errors(
    library: Library, tmp_path: Path, kind: str, room: float
) -> None:
    root = await replanned(kind, library, tmp_path)
    async with af.open_dataset(str(root)) as dataset:
        for episode in range(len(LENGTHS)):
            await dataset.ready(episode)
        sizes = [await reader_of(dataset).clip_bytes(episode) for episode in range(len(LENGTHS))]
    for seed in range(3):
        config = af.StreamConfig(
            max_bytes=int(room * max(sizes) * 8 / 5) + 8, pool_segments=3, prefetch_segments=2, decoded_max_bytes=1
        )
        with anyio.fail_after(30):
            async with af.open_dataset(str(root), config=config) as dataset:

                async def sample(dataset: af.LeRobotDataset) -> None:
                    for episode, length in enumerate(LENGTHS):
                        with suppress(af.CacheError):
                            await dataset.sample(episode, length - 1)

                async def iterate(dataset: af.LeRobotDataset, seed: int) -> None:
                    with suppress(af.CacheError):
                        async with af.Stream(dataset, seed=seed).samples() as samples:
                            seen = [int(one["index"]) async for one in samples]
                        assert sorted(seen) == list(range(sum(LENGTHS)))

                async with anyio.create_task_group() as group:
                    group.start_soon(sample, dataset)
                    group.start_soon(sample, dataset)
                    group.start_soon(iterate, dataset, seed)
                for episode in range(len(LENGTHS)):  # and of what the pass has read ahead for the next epoch
                    with suppress(af.CacheError):
                        await dataset.ready(episode)
                engine = reader_of(dataset).engine
                assert (engine.room.pass_bytes, engine.room.brief_bytes) == (0, 0)


@pytest.mark.parametrize("kind", ["times", "refresh"])
async def test_pool_that_fits_gets_every_frame_despite_wrong_weights(
    library: Library, tmp_path: Path, kind: str
) -> None:
    root = await replanned(kind, library, tmp_path)
    async with af.open_dataset(str(root)) as dataset:
        for episode in range(len(LENGTHS)):
            await dataset.ready(episode)
        sizes = sorted([await reader_of(dataset).clip_bytes(episode) for episode in range(len(LENGTHS))])
    config = af.StreamConfig(
        max_bytes=int(sum(sizes[-3:]) * 8 / 5) + 8, pool_segments=2, prefetch_segments=2, decoded_max_bytes=1
    )
    for seed in range(4):
        with anyio.fail_after(30):
            async with af.Stream(str(root), seed=seed, config=config).samples() as samples:
                seen = sorted([int(sample["index"]) async for sample in samples])
        assert seen == list(range(sum(LENGTHS)))
