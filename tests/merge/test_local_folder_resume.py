"""A merge that was killed: what is finished stays, the rest is written, and the result is the same bytes."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from asyncfetch.errors import FetchError, MergeError
from asyncfetch.merge import merge_datasets, split_dataset
from asyncfetch.merge.local_folder import LocalFolder
from tests.merge.test_job import all_files, check_merged
from tests.merge.test_plan import names

if TYPE_CHECKING:
    from asyncfetch.merge import MergeProgress
    from tests.lerobot.serving import Library

ROOT = Path(__file__).parents[2]
MANY_FILES: dict[str, Any] = {"video_file_max_bytes": 1, "data_file_max_bytes": 10_000}

CHILD = """
import sys
import anyio
from functools import partial
from asyncfetch.merge import merge_datasets
from asyncfetch.merge.local_folder import LocalFolder as Folder

def say(*what):
    print(*what, flush=True)

finish, publish, remove = Folder._finish, Folder._publish, Folder._remove
Folder._finish = lambda self, path: (say("written"), finish(self, path), say("noted"))[1]
Folder._publish = lambda self, *args: (say("publishing"), publish(self, *args))[1]
Folder._remove = lambda self: (say("published"), remove(self))[1]
options = {"video_file_max_bytes": 1, "data_file_max_bytes": 10_000, "workers": 2, "overwrite": True}
say("ready")
anyio.run(partial(merge_datasets, sys.argv[2:], sys.argv[1], **options, progress=lambda now: say("progress")))
"""
"""Says what it does; the parent kills it at a line of its choosing."""


def merge_and_kill(roots: list[Path], target: Path, behind: int) -> int:
    """Kill the child behind that many lines; how many it said in all."""
    command = [sys.executable, "-c", CHILD, str(target), *map(str, roots)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert child.stdout is not None
    with child, child.stdout as said:
        for number, _ in enumerate(said, 1):
            if number == behind:
                child.send_signal(signal.SIGKILL)
        assert child.wait() in {0, -signal.SIGKILL}
        return number


@pytest.mark.slow  # three processes
@pytest.mark.usefixtures("programs_are_warm")
async def test_killed_at_any_moment_it_is_gone_on_with(library: Library, tmp_path: Path) -> None:
    truths = [library(episodes=(9, 4, 5), gop=6), library(episodes=(5, 7, 6), gop=6)]
    roots, target = [truth.root for truth in truths], tmp_path / "out"
    lines = merge_and_kill(roots, tmp_path / "whole", behind=0)
    whole, old = all_files(tmp_path / "whole"), {"file": b"as it was"}
    target.mkdir()
    (target / "file").write_bytes(old["file"])
    moments = [random.randrange(1, lines) for _ in range(2)]
    for behind in moments:
        merge_and_kill(roots, target, behind)
        assert not target.exists() or all_files(target) in (old, whole), moments
    await merge_datasets(roots, target, overwrite=True, **MANY_FILES)
    assert all_files(target) == whole, moments
    assert names(tmp_path) == {"out", "whole"}
    await check_merged(target, truths)


def folder_of(tmp_path: Path) -> LocalFolder:
    (root,) = tmp_path.glob(".out.merging-*")
    return LocalFolder(tmp_path / "out", root.name.removeprefix(".out.merging-"))


async def interrupt(roots: list[Path], target: Path, files: int, **options: Any) -> None:  # noqa: ANN401
    """A merge that ends when so many files are finished."""

    def stop(now: MergeProgress) -> None:
        if now.files_done == files:
            raise FetchError("the network is gone")

    with pytest.raises(FetchError, match="network"):
        await merge_datasets(roots, target, workers=1, progress=stop, **MANY_FILES, **options)


def times(paths: list[Path]) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in paths}


@pytest.mark.may_block  # the folder's methods, called by the test
async def test_finished_files_stay_and_damaged_ones_are_written_anew(
    library: Library, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    roots = [library(episodes=(9, 4, 5), gop=6).root] * 2
    await merge_datasets(roots, tmp_path / "whole", **MANY_FILES)
    await interrupt(roots, tmp_path / "out", files=5)
    folder = folder_of(tmp_path)
    assert f"5 finished files stay in {folder.root}" in caplog.text
    written = [folder.dataset / path for path in all_files(folder.dataset) if folder.find_now(path)]
    before = times(written)
    damaged, cut, *untouched = written
    assert len(untouched) == 3
    damaged.write_bytes(bytes(damaged.stat().st_size))
    os.truncate(cut, 7)

    after: dict[Path, int] = {}

    def look(now: MergeProgress) -> None:
        if now.files_done == now.files_total:
            after.update(times(written))

    await merge_datasets(roots, tmp_path / "out", progress=look, **MANY_FILES)
    assert all_files(tmp_path / "out") == all_files(tmp_path / "whole")
    assert {path for path in written if after[path] == before[path]} == set(untouched)


async def test_another_plan_begins_anew(library: Library, tmp_path: Path) -> None:
    """Other limits, another source, or a source that has changed meanwhile."""
    source = tmp_path / "source"
    shutil.copytree(library(episodes=(9, 4, 5), gop=6).root, source)
    await interrupt([source], tmp_path / "out", files=3)
    first = folder_of(tmp_path).root
    await interrupt([source, source], tmp_path / "out", files=3)
    second = folder_of(tmp_path).root
    shutil.copytree(library(episodes=(9, 4, 5), gop=6).root, source, dirs_exist_ok=True, copy_function=shutil.copyfile)
    await interrupt([source, source], tmp_path / "out", files=3)
    assert len({first, second, folder_of(tmp_path).root}) == 3
    await merge_datasets([source], tmp_path / "out")
    assert names(tmp_path) == {"source", "out"}


@pytest.mark.may_block  # the folder's methods, called by the test
async def test_two_merges_do_not_build_for_one_destination(library: Library, tmp_path: Path) -> None:
    root, target = library(episodes=(4, 5)).root, tmp_path / "out"
    await interrupt([root], target, files=1)
    with folder_of(tmp_path).held():
        for roots in ([root], [root, root]):
            with pytest.raises(MergeError, match="built by another merge"):
                await merge_datasets(roots, target, **MANY_FILES)
    await merge_datasets([root], target, **MANY_FILES)
    assert names(tmp_path) == {"out"}


async def test_replaced_folder_comes_back_after_a_kill(library: Library, tmp_path: Path) -> None:
    """Killed between the two renames, whatever is called next."""
    root, target = library(episodes=(4, 5)).root, tmp_path / "out"
    target.mkdir()
    (target / "file").touch()
    await interrupt([root], target, files=1, overwrite=True)
    target.rename(folder_of(tmp_path).replaced)
    with pytest.raises(MergeError, match="overwrite=True"):
        await merge_datasets([root], target)
    assert (target / "file").exists()
    await merge_datasets([root, root], target, overwrite=True)
    assert names(tmp_path) == {"out"}
    assert not (target / "file").exists()


async def test_replaced_files_go_after_a_killed_merge(library: Library, tmp_path: Path) -> None:
    root, target = library(episodes=(4, 5)).root, tmp_path / "out"
    await interrupt([root], target, files=1)
    old = folder_of(tmp_path).replaced
    old.mkdir()
    (old / "file").touch()
    await merge_datasets([library(episodes=(3,)).root], target.with_name("other"))
    target.with_name("other").rename(target)
    await merge_datasets([root], target, overwrite=True, **MANY_FILES)
    assert names(tmp_path) == {"out"}
    await check_merged(target, [library(episodes=(4, 5))])


async def test_a_full_disk_is_seen_before_anything_is_written(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as it can be tried without filling one."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(MergeError, match=r"has 1000 bytes free, but the merge has about \d{4,} to write"):
        await merge_datasets([library(episodes=(9, 4, 5)).root], tmp_path / "out")
    assert not names(tmp_path)


async def test_system_errors_are_raised_as_merge_errors(library: Library, tmp_path: Path) -> None:
    """A place that can't be, and a file that may not become so long, as on a disk that others fill meanwhile."""
    root, soft_hard = library(episodes=(9, 4, 5)).root, resource.getrlimit(resource.RLIMIT_FSIZE)
    (tmp_path / "file").touch()
    with pytest.raises(MergeError, match=r"doesn't let the merge write .*file/out: .*Not a directory"):
        await merge_datasets([root], tmp_path / "file/out")
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, soft_hard[1]))
    try:
        with pytest.raises(MergeError, match=r"File too large.*same call goes on"):
            await merge_datasets([root], tmp_path / "out", workers=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft_hard)
    await merge_datasets([root], tmp_path / "out")
    assert names(tmp_path) == {"file", "out"}


ENDING = """
import os, signal, sys
import anyio
from asyncfetch.merge import merge_datasets, split_dataset
from asyncfetch.merge.local_folder import LocalFolder as Folder

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

publish = Folder._publish
def once(*arguments):
    Folder._publish = die
    publish(*arguments)

what, source, target = sys.argv[1:]
if what == "split":
    Folder._publish = once
    anyio.run(split_dataset, source, {"a": 0.5, "b": 0.5}, target)
else:
    Folder._remove = die
    anyio.run(merge_datasets, [source, source], target)
"""
"""Dies right behind a dataset's taking its place."""


def die_behind_the_end(what: str, source: Path, target: Path) -> None:
    command = [sys.executable, "-c", ENDING, what, str(source), str(target)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert done.returncode == -signal.SIGKILL


@pytest.fixture(scope="module")
def killed(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is left where a merge into "out", of twice the same source, died right behind its end."""
    root = tmp_path_factory.mktemp("killed")
    die_behind_the_end("merge", library(episodes=(4, 5)).root, root / "out")
    return root


@pytest.mark.parametrize("overwrite", [False, True])
async def test_merge_killed_after_its_end_is_reported_by_the_same_call(
    library: Library, tmp_path: Path, killed: Path, overwrite: bool
) -> None:
    """And isn't written again."""
    source, target = library(episodes=(4, 5)).root, tmp_path / "out"
    whole = await merge_datasets([source, source], tmp_path / "whole")
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    before = {path: path.stat().st_ino for path in target.rglob("*")}
    told: list[MergeProgress] = []
    report = await merge_datasets([source, source], target, overwrite=overwrite, progress=told.append)
    assert replace(report, destination=whole.destination, seconds=whole.seconds) == whole
    assert (told[-1].files_done, told[-1].bytes_done) == (told[-1].files_total, told[-1].bytes_total)
    assert {path: path.stat().st_ino for path in target.rglob("*")} == before
    assert all_files(target) == all_files(tmp_path / "whole")
    assert names(tmp_path) == {"out", "whole"}
    with pytest.raises(MergeError, match="isn't empty"):
        await merge_datasets([source, source], target)


@pytest.mark.usefixtures("programs_are_warm")
async def test_of_a_split_killed_between_its_parts_the_rest_is_written(library: Library, tmp_path: Path) -> None:
    source = library(episodes=(4, 5)).root
    whole = await split_dataset(source, {"a": 0.5, "b": 0.5}, tmp_path / "whole")
    await anyio.to_thread.run_sync(die_behind_the_end, "split", source, tmp_path / "out")
    assert (tmp_path / "out/a/meta/info.json").is_file()
    assert not (tmp_path / "out/b").exists()
    reports = await split_dataset(source, {"a": 0.5, "b": 0.5}, tmp_path / "out")
    assert {name: one.bytes for name, one in reports.items()} == {name: one.bytes for name, one in whole.items()}
    assert all_files(tmp_path / "out") == all_files(tmp_path / "whole")


@pytest.mark.parametrize("change", ["a file less", "a file more", "another byte", "other sources"])
async def test_folder_that_differs_from_the_merge_is_refused(
    library: Library, tmp_path: Path, killed: Path, change: str
) -> None:
    source, target = library(episodes=(4, 5)).root, tmp_path / "out"
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    path = next(target.rglob("*.mp4"))
    sources = [source, source]
    match change:
        case "a file less":
            path.unlink()
        case "a file more":
            path.with_name("more").touch()
        case "another byte":
            path.write_bytes(path.read_bytes()[:-1] + b"x")
        case _:
            sources.append(source)
    with pytest.raises(MergeError, match="isn't empty"):
        await merge_datasets(sources, target)
    await merge_datasets(sources, target, overwrite=True)
    assert names(tmp_path) == {"out"}
    await check_merged(target, [library(episodes=(4, 5))] * len(sources))
