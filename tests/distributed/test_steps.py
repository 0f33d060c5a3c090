"""A merge by datatrove's own executor."""

from __future__ import annotations

import pickle
from functools import partial
from typing import TYPE_CHECKING

import anyio
import pytest

from asyncfetch.distributed import merge_steps
from asyncfetch.errors import ConfigError, MergeError
from asyncfetch.merge import merge_datasets
from tests.merge.test_merge import all_files
from tests.merge.test_safety import names

if TYPE_CHECKING:
    from pathlib import Path

    from tests.lerobot.serving import Library


def sources(library: Library) -> list[Path]:
    return [library(episodes=(9, 4, 5), tasks=("a", "b")).root, library(episodes=(5, 6), tasks=("c", "a")).root]


@pytest.mark.timeout(120)  # it starts a manager, a fork server and two processes
def test_datatrove_gives_the_same_bytes(library: Library, tmp_path: Path) -> None:
    from datatrove.executor import LocalPipelineExecutor

    roots, out = sources(library), tmp_path / "out"
    write, finish = merge_steps(roots, out, video_file_max_bytes=1)
    written = LocalPipelineExecutor([write], tasks=3, workers=2, logging_dir=str(tmp_path / "logs/write"))
    LocalPipelineExecutor(
        [finish], tasks=1, workers=1, logging_dir=str(tmp_path / "logs/finish"), depends=written
    ).run()
    anyio.run(partial(merge_datasets, roots, tmp_path / "one", video_file_max_bytes=1))
    assert all_files(out) == all_files(tmp_path / "one")
    assert names(tmp_path) == {"out", "one", "logs"}


@pytest.mark.parametrize("world_size", [1, 2, 50])
def test_shares_make_the_whole_and_what_is_missing_is_made_up_for(
    library: Library, tmp_path: Path, world_size: int
) -> None:
    steps = merge_steps(sources(library), tmp_path / "out", video_file_max_bytes=1)
    write, finish = pickle.loads(pickle.dumps(steps))
    for rank in range(world_size):
        assert write("data", rank, world_size) == "data"
    folder = write.job.folder
    assert folder.keep_finished() == len(write.job.units)
    finish("data", 1, 2)
    assert not (tmp_path / "out").exists()
    finish("data", 0, 2)
    once = all_files(tmp_path / "out")
    write, finish = merge_steps(sources(library), tmp_path / "lame", video_file_max_bytes=1)
    write.run(None, 0, 2)
    finish.run()
    anyio.run(partial(merge_datasets, sources(library), tmp_path / "one", video_file_max_bytes=1))
    assert once == all_files(tmp_path / "lame") == all_files(tmp_path / "one")
    assert names(tmp_path) == {"out", "lame", "one"}


def test_what_cannot_be_merged_is_refused_before_a_step_is_made(library: Library, tmp_path: Path) -> None:
    with pytest.raises(MergeError, match="fps"):
        merge_steps([*sources(library), library(episodes=(4,), fps=10).root], tmp_path / "out")
    with pytest.raises(ConfigError, match="at least one"):
        merge_steps([], tmp_path / "out")
