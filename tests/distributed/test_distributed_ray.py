"""A merge on a real Ray: the same bytes, our errors, and nothing that goes on behind the caller's back."""

from __future__ import annotations

import errno
import logging
import pickle
import shutil
from functools import partial
from typing import TYPE_CHECKING

import anyio
import pyarrow.parquet as pq
import pytest

from asyncfetch.config import FetchConfig
from asyncfetch.distributed import RayExecutor
from asyncfetch.errors import ConfigError, FetchError, FormatError
from asyncfetch.merge import MergeProgress, Selection, merge_datasets
from asyncfetch.testing import S3Server
from tests.lerobot.serving import TOP
from tests.merge.on_s3 import OUT, below, config
from tests.merge.on_s3 import scratch as scratch  # a fixture
from tests.merge.test_job import all_files
from tests.merge.test_plan import names

if TYPE_CHECKING:
    from pathlib import Path

    from asyncfetch.merge.executor import WorkerSetup
    from tests.lerobot.serving import Library

pytestmark = pytest.mark.slow  # Ray's workers import


def sources(library: Library) -> list[Path]:
    one = library(episodes=(9, 4, 5), tasks=("a", "b"), cameras=(TOP,))
    return [one.root, library(episodes=(5, 6), tasks=("c", "a"), cameras=(TOP,)).root]


async def test_ray_must_run(library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=r"ray\.init"):
        await merge_datasets(sources(library), tmp_path / "out", executor=RayExecutor())


@pytest.mark.usefixtures("ray_cluster")
async def test_it_gives_the_same_bytes_report_and_log(
    library: Library, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "asyncfetch")
    roots, told = sources(library), list[MergeProgress]()
    here = await merge_datasets(roots, tmp_path / "here", video_file_max_bytes=1)
    for workers in (None, 2):
        out = tmp_path / f"with-{workers}"
        there = await merge_datasets(
            roots, out, workers=workers, executor=RayExecutor(), progress=told.append, video_file_max_bytes=1
        )
        assert all_files(out) == all_files(tmp_path / "here")
        assert (there.files, there.bytes, there.episodes) == (here.files, here.bytes, here.episodes)
    assert told[-1].files_done == told[-1].files_total
    lines = [record.message.partition(": ")[2].rpartition(",")[0] for record in caplog.records]
    assert len(lines) == 3
    assert len(set(lines)) == 1


@pytest.mark.usefixtures("ray_cluster", "scratch")
async def test_straight_to_s3(library: Library, tmp_path: Path) -> None:
    """The workers put, read back and add up; what an interruption has left they find."""
    roots, content, puts = sources(library), dict[str, bytes](), list[str]()

    def stop(now: MergeProgress) -> None:
        if now.files_done == 4:
            raise FetchError("the network is gone")

    async with S3Server(content) as server:
        merge = partial(
            merge_datasets, roots, OUT, executor=RayExecutor(), fetch=config(server), video_file_max_bytes=1
        )
        with pytest.raises(FetchError, match="network"):
            await merge(progress=stop)
        assert "meta/info.json" not in below(content)
        finished = {path for path in below(content) if path.startswith((".merging", "videos"))}
        before = len(server.requests)
        report = await merge()
        puts = [request.path for request in server.requests[before:] if request.method == "PUT"]
    await merge_datasets(roots, tmp_path / "here", video_file_max_bytes=1)
    assert below(content) == all_files(tmp_path / "here")
    assert report.destination == OUT
    assert puts[-1] == "/bucket/sets/out/meta/info.json"
    noted = {path.partition("/")[2] for path in finished if path.startswith(".merging") and path.endswith(".mp4")}
    assert noted
    assert not {f"/bucket/sets/out/{path}" for path in noted} & set(puts)


@pytest.mark.usefixtures("ray_cluster")
async def test_a_workers_error_is_ours(library: Library, tmp_path: Path) -> None:
    root = tmp_path / "source"
    shutil.copytree(library(episodes=(4, 5)).root, root)
    path = next((root / "data").rglob("*.parquet"))
    pq.write_table(pq.read_table(path).slice(0, 6), path)
    with pytest.raises(FormatError, match="has 2 rows with index in") as caught:
        await merge_datasets([root], tmp_path / "out", executor=RayExecutor())
    assert type(caught.value) is FormatError
    assert names(tmp_path) == {"source"}


@pytest.mark.usefixtures("ray_cluster")
async def test_what_a_workers_system_refuses_is_what_it_would_be_here() -> None:
    async def refused(_: WorkerSetup) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/there")

    async with RayExecutor().open(FetchConfig(), 1, lambda _path, _nbytes: None) as pool:
        with pytest.raises(PermissionError) as caught:
            await pool.run(refused)
    assert (caught.value.filename, "\n" in str(caught.value)) == ("/there", False)


@pytest.mark.usefixtures("ray_cluster")
async def test_secrets_of_a_url_stay_here(tmp_path: Path) -> None:
    """And what is left of it is refused by the worker, before it asks anybody."""
    url = "https://user:hunter2@data.example.org/set"
    with pytest.raises(ConfigError, match=r"https://\*\*\*@data\.example\.org") as caught:
        await merge_datasets([url], tmp_path / "out", executor=RayExecutor())
    assert "hunter2" not in f"{caught.value!r} {Selection(url)!r} {pickle.dumps(Selection(url))!r}"


@pytest.mark.usefixtures("ray_cluster")
async def test_what_was_cancelled_is_gone_on_with(library: Library, tmp_path: Path) -> None:
    roots = sources(library)
    with anyio.CancelScope() as scope:

        def cancel(_now: MergeProgress) -> None:
            scope.cancel()

        await merge_datasets(roots, tmp_path / "out", executor=RayExecutor(), progress=cancel, video_file_max_bytes=1)
    assert scope.cancelled_caught
    await merge_datasets(roots, tmp_path / "out", video_file_max_bytes=1)
    await merge_datasets(roots, tmp_path / "here", video_file_max_bytes=1)
    assert all_files(tmp_path / "out") == all_files(tmp_path / "here")
    assert names(tmp_path) == {"out", "here"}
