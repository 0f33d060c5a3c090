"""A merge by datatrove's own executor."""

from __future__ import annotations

import pickle
import shutil
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import pytest

from asyncfetch.distributed import merge_steps
from asyncfetch.errors import ConfigError, MergeError, ObjectChanged, StateMismatch
from asyncfetch.merge import Selection, merge_datasets
from asyncfetch.merge.local_folder import LocalFolder
from asyncfetch.testing import S3Server
from tests.merge.on_s3 import OUT, below, config
from tests.merge.on_s3 import scratch as scratch  # a fixture
from tests.merge.test_job import all_files
from tests.merge.test_plan import names

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from asyncfetch.distributed import FinishStep, WriteStep
    from tests.lerobot.serving import Library


def sources(library: Library) -> list[Path]:
    return [library(episodes=(9, 4, 5), tasks=("a", "b")).root, library(episodes=(5, 6), tasks=("c", "a")).root]


def run_by_datatrove(steps: tuple[WriteStep, FinishStep], logs: Path) -> None:
    from datatrove.executor import LocalPipelineExecutor

    write, finish = steps
    written = LocalPipelineExecutor([write], tasks=3, workers=2, logging_dir=str(logs / "write"))
    LocalPipelineExecutor([finish], tasks=1, workers=1, logging_dir=str(logs / "finish"), depends=written).run()


@pytest.mark.slow  # it starts a manager, a fork server and two processes
@pytest.mark.usefixtures("scratch")
async def test_datatrove_gives_the_same_bytes(library: Library, tmp_path: Path) -> None:
    """In a folder, and straight to S3."""
    roots, out, content = sources(library), tmp_path / "out", dict[str, bytes]()
    async with S3Server(content) as server:
        for target, fetch in ((out, None), (OUT, config(server))):
            plan = partial(merge_steps, roots, target, video_file_max_bytes=1, fetch=fetch)
            steps = await anyio.to_thread.run_sync(plan)
            await anyio.to_thread.run_sync(run_by_datatrove, steps, tmp_path / f"logs/{type(target).__name__}")
    await merge_datasets(roots, tmp_path / "one", video_file_max_bytes=1)
    assert all_files(out) == below(content) == all_files(tmp_path / "one")
    assert names(tmp_path) == {"out", "one", "logs"}


@pytest.mark.parametrize("world_size", [1, 2, 50])
def test_shares_make_the_whole_and_missing_ones_are_made_up_for(
    library: Library, tmp_path: Path, world_size: int
) -> None:
    steps = merge_steps(sources(library), tmp_path / "out", video_file_max_bytes=1)
    write, finish = pickle.loads(pickle.dumps(steps))
    for rank in range(world_size):
        assert write("data", rank, world_size) == "data"
    assert LocalFolder(tmp_path / "out", write.job.plan.fingerprint()).count_finished() == len(write.job.units)
    finish("data", 1, 2)
    assert not (tmp_path / "out").exists()
    finish("data", 0, 2)
    once = all_files(tmp_path / "out")
    for step in (write, finish):
        with pytest.raises(MergeError, match="isn't empty"):
            step.run()
    write, finish = merge_steps(sources(library), tmp_path / "lame", video_file_max_bytes=1)
    write.run(None, 0, 2)
    finish.run()
    anyio.run(partial(merge_datasets, sources(library), tmp_path / "one", video_file_max_bytes=1))
    assert once == all_files(tmp_path / "lame") == all_files(tmp_path / "one")
    assert names(tmp_path) == {"out", "lame", "one"}


@pytest.mark.usefixtures("scratch")
async def test_shares_of_a_dataset_on_s3_need_no_folder_in_common(library: Library, tmp_path: Path) -> None:
    one, two = sources(library)
    selected = [Selection(one, [0, 2]), Selection(two)]
    content: dict[str, bytes] = {}
    async with S3Server(content) as server:
        plan = partial(merge_steps, selected, OUT, video_file_max_bytes=1, fetch=config(server))
        write, finish = pickle.loads(pickle.dumps(await anyio.to_thread.run_sync(plan)))
        async with anyio.create_task_group() as tasks:
            for rank in range(2):
                tasks.start_soon(anyio.to_thread.run_sync, write.run, None, rank, 3)
        await anyio.to_thread.run_sync(finish.run)
        puts = [request.path for request in server.requests if request.method == "PUT" and ".mp4" in request.path]
    await merge_datasets(selected, tmp_path / "one", video_file_max_bytes=1)
    assert below(content) == all_files(tmp_path / "one")
    assert sum(".merging" not in path for path in puts) == len(list((tmp_path / "one").rglob("*.mp4")))


@pytest.mark.parametrize("pattern", ["*.mp4", "data/**/*.parquet"])
@pytest.mark.parametrize("change", [lambda old: old + b"x", lambda old: bytes(reversed(old)), lambda _: b"short"])
def test_a_source_that_is_replaced_meanwhile_is_no_part_of_it(
    library: Library, tmp_path: Path, pattern: str, change: Callable[[bytes], bytes]
) -> None:
    """Nothing of the plan is true of it."""
    root = tmp_path / "source"
    shutil.copytree(library(episodes=(4, 5)).root, root)
    write, finish = pickle.loads(pickle.dumps(merge_steps([root], tmp_path / "out", video_file_max_bytes=1)))
    replaced = min(root.rglob(pattern))
    (tmp_path / "new").write_bytes(change(replaced.read_bytes()))
    (tmp_path / "new").replace(replaced)
    for step in (write, finish):
        with pytest.raises(ObjectChanged) as caught:
            step.run()
        assert caught.value.url == str(replaced)
    assert not (tmp_path / "out").exists()


async def test_steps_are_not_run_in_a_coroutine(library: Library, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"asyncio\.to_thread"):
        merge_steps(sources(library), tmp_path / "out")


def test_a_source_by_a_relative_path_is_found_from_anywhere(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = library(episodes=(4, 5)).root
    monkeypatch.chdir(root.parent)
    steps = merge_steps([root.name, Selection(root.name, [1])], tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    for step in steps:
        step.run()
    anyio.run(partial(merge_datasets, [root, Selection(root, [1])], tmp_path / "one"))
    assert all_files(tmp_path / "out") == all_files(tmp_path / "one")


def test_a_step_of_another_version_is_refused(library: Library, tmp_path: Path) -> None:
    write, _ = merge_steps(sources(library), tmp_path / "out")
    del write.job_format  # as one has it that was pickled before there was any
    with pytest.raises(StateMismatch, match="asyncfetch merge: write files, was planned by another version"):
        pickle.loads(pickle.dumps(write))


def test_what_cannot_be_merged_is_refused_before_a_step_is_made(library: Library, tmp_path: Path) -> None:
    with pytest.raises(MergeError, match="fps"):
        merge_steps([*sources(library), library(episodes=(4,), fps=10).root], tmp_path / "out")
    with pytest.raises(ConfigError, match="at least one"):
        merge_steps([], tmp_path / "out")
    with pytest.raises(ConfigError, match="would carry the secrets of 'https://") as caught:
        merge_steps(["https://user:hunter2@data.example.org/set"], tmp_path / "out")
    assert "hunter2" not in str(caught.value)
