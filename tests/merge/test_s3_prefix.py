"""Merged datasets that are put below a prefix of S3."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import pyarrow.parquet as pq
import pytest
from anyio import to_thread

from asyncfetch.errors import AccessDenied, ConfigError, DatasetError, FetchError, MergeError
from asyncfetch.merge import merge_datasets
from asyncfetch.merge.local_folder import temporary_room
from asyncfetch.merge.s3_prefix import S3Prefix
from asyncfetch.testing import Fault, S3Server
from tests.merge.on_s3 import OUT, below, config
from tests.merge.on_s3 import scratch as scratch  # a fixture
from tests.merge.test_job import all_files, check_merged

if TYPE_CHECKING:
    from asyncfetch.fetch import Fetcher
    from asyncfetch.merge import MergeProgress
    from asyncfetch.merge.local_folder import WrittenFile
    from asyncfetch.testing import ServedRequest
    from tests.lerobot.serving import Library

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("scratch")


def count_files(scratch: Path) -> int:
    """Which others may be removing meanwhile."""
    return sum(name.endswith((".mp4", ".parquet")) for _, _, names in os.walk(scratch) for name in names)


def built_in(scratch: Path) -> list[str]:
    return [name for name in os.listdir(scratch) if "merging" in name]


@pytest.mark.may_block  # it looks into the scratch folder
async def test_scratch_folder_of_a_killed_merge_is_swept(library: Library, scratch: Path) -> None:
    """And what a living one has there isn't."""
    (scratch / "asyncfetch-merging-dead/videos").mkdir(parents=True)
    (scratch / "asyncfetch-merging-dead/lock").touch()
    (scratch / "asyncfetch-merging-dead/videos/file-000.mp4").touch()
    async with S3Server({}) as server:
        with temporary_room() as living:
            await merge_datasets([library(episodes=(4,)).root], OUT, fetch=config(server))
            assert built_in(scratch) == [living.name]
    assert built_in(scratch) == []


async def test_merge_to_s3_writes_what_a_merge_to_a_folder_does(
    library: Library, tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File for file, info.json last; no more files are on the disk than workers; a source lies there as well."""
    truths = [library(episodes=(9, 4, 14)), library(episodes=(5, 7), tasks=("place", "stack"))]
    options: dict[str, Any] = {"video_file_max_bytes": 3_000, "data_file_max_bytes": 20_000}
    report = await merge_datasets([truth.root for truth in truths], tmp_path / "out", **options)
    content = {f"bucket/sets/one/{name}": data for name, data in all_files(truths[0].root).items()}
    on_disk, finish = [], S3Prefix.finish

    async def look(self: S3Prefix, fetcher: Fetcher, room: Path, path: str) -> WrittenFile:
        on_disk.append(await to_thread.run_sync(count_files, scratch))
        return await finish(self, fetcher, room, path)

    monkeypatch.setattr(S3Prefix, "finish", look)
    async with S3Server(content) as server:
        remote = await merge_datasets(
            ["s3://bucket/sets/one", truths[1].root], f"{OUT}/", workers=2, fetch=config(server), **options
        )
        puts = [request.path for request in server.requests if request.method in {"PUT", "POST"}]
        assert server.uploads == {}
    assert below(content) == all_files(tmp_path / "out")
    assert puts[-1] == "/bucket/sets/out/meta/info.json"
    assert (remote.destination, remote.files, remote.bytes) == (OUT, report.files, report.bytes)
    assert 0 < max(on_disk) <= 2 < len(list((tmp_path / "out").rglob("*.mp4")))
    assert built_in(scratch) == []
    await check_merged(tmp_path / "out", truths)


async def test_prefix_with_objects_is_refused_before_any_read(library: Library) -> None:
    root = library(episodes=(4,)).root
    content = {"bucket/sets/out/deep/down": b"x", "bucket/sets/output": b"a neighbour"}
    async with S3Server(dict(content)) as server:
        with pytest.raises(MergeError, match=rf"{OUT} isn't empty; pass overwrite=True"):
            await merge_datasets([root, "s3://bucket/none"], OUT, fetch=config(server))
        assert len(server.requests) == 1
        assert server.objects == content


async def test_overwriting_removes_what_was_there(library: Library) -> None:
    """All of it, and info.json first: at no time is it a mixture of both that looks like a dataset."""
    long, short = library(episodes=(9, 4, 14)).root, library(episodes=(4,)).root
    content = {"bucket/sets/output": b"a neighbour"}
    seen = []

    def look(request: ServedRequest) -> None:
        if request.method == "PUT":
            seen.append("bucket/sets/out/meta/info.json" in content)

    async with S3Server(content, fault=look) as server:
        await merge_datasets([long], OUT, video_file_max_bytes=1, fetch=config(server))
        many = below(content)
        await merge_datasets([short], OUT, overwrite=True, fetch=config(server))
        assert set(seen) == {False}
        assert len(below(content)) < len(many)
        again = below(content)
        await merge_datasets([short], "s3://bucket/other", fetch=config(server))
        assert below(content, "bucket/other/") == again
        assert content["bucket/sets/output"] == b"a neighbour"


def put_files(server: S3Server, behind: int = 0) -> set[str]:
    """The dataset's files that were put behind so many requests, by their paths."""
    requests = server.requests[behind:]
    puts = {request.path.removeprefix("/bucket/sets/out/") for request in requests if request.method == "PUT"}
    return {path for path in puts if path.startswith(("data/", "videos/"))}


@pytest.mark.slow  # hundreds of requests
@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "replaced"])
async def test_interrupted_merge_is_gone_on_with(library: Library, tmp_path: Path, overwrite: bool) -> None:
    """Behind what is whole still; without leave to overwrite, too, but not when it has become a dataset."""
    root = library(episodes=(9, 4, 5), gop=6).root
    options: dict[str, Any] = {"video_file_max_bytes": 1, "data_file_max_bytes": 10_000, "workers": 1}
    await merge_datasets([root], tmp_path / "whole", **options)
    whole, content = all_files(tmp_path / "whole"), {"bucket/sets/out/meta/info.json": b"old"} if overwrite else {}

    def stop(now: MergeProgress) -> None:
        if now.files_done == 4:
            raise FetchError("the network is gone")

    async with S3Server(content) as server:
        options["fetch"] = config(server)
        with pytest.raises(FetchError, match="network"):
            await merge_datasets([root], OUT, progress=stop, overwrite=overwrite, **options)
        finished = put_files(server)
        assert len(finished) == 4
        assert finished < below(content).keys() - {"meta/info.json"}
        damaged, *_ = sorted(finished)
        content[f"bucket/sets/out/{damaged}"] += b"x"
        before = len(server.requests)
        await merge_datasets([root], OUT, **options)
        assert put_files(server, before) & finished == {damaged}
        assert below(content) == whole
        with pytest.raises(MergeError, match="overwrite=True"):
            await merge_datasets([root], OUT, **options)


CHILD = """
import sys
from functools import partial
import anyio
from asyncfetch.config import FetchConfig, S3Config
from asyncfetch.merge import merge_datasets

url, ca_file, target, *roots = sys.argv[1:]
fetch = FetchConfig(ca_file=ca_file, trust_env=False, s3=S3Config(endpoint_url=url, upload_part_bytes=20_000))
options = {"video_file_max_bytes": 1, "data_file_max_bytes": 10_000, "workers": 2, "overwrite": True}
anyio.run(partial(merge_datasets, roots, target, fetch=fetch, **options))
"""


@dataclass
class Child:
    """A process that merges, killed at one of its requests that write."""

    last: int | None = None
    writes: int = 0
    process: subprocess.Popen[bytes] | None = None

    def saw(self, request: ServedRequest) -> None:
        """Called by the server, in its own thread."""
        self.writes += request.method != "GET"
        if self.writes == self.last and self.process is not None:
            self.process.kill()

    def run(self, *arguments: str) -> int:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, *arguments], env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        with self.process:
            return self.process.wait()


@pytest.mark.slow  # two processes
@pytest.mark.usefixtures("programs_are_warm")
async def test_killed_at_any_moment_it_is_gone_on_with(library: Library, tmp_path: Path) -> None:
    """At any request that writes: what is there is no dataset, or a whole one."""
    truths = [library(episodes=(9, 4, 5), gop=6), library(episodes=(5, 7, 6), gop=6)]
    roots = [truth.root for truth in truths]
    options: dict[str, Any] = {"video_file_max_bytes": 1, "data_file_max_bytes": 10_000, "overwrite": True}
    await merge_datasets(roots, tmp_path / "whole", **options)
    whole, content = all_files(tmp_path / "whole"), {"bucket/sets/out/meta/info.json": b"old"}
    child = Child()
    async with S3Server(content, fault=lambda request: child.saw(request)) as server:
        run = partial(to_thread.run_sync, lambda: child.run(server.url, str(server.ca_file), OUT, *map(str, roots)))
        await merge_datasets(roots, OUT, workers=2, fetch=config(server), **options)
        assert below(content) == whole
        writes = child.writes
        ends = []
        for _ in range(2):
            child = Child(random.randrange(1, writes))
            ends.append(await run())
            there = below(content)
            is_whole = whole.items() <= there.items()
            assert is_whole or "meta/info.json" not in there, child.last
        assert ends[0] == -signal.SIGKILL  # the second one, which goes on, may come to its end
        await merge_datasets(roots, OUT, fetch=config(server), **options)
    assert below(content) == whole


async def test_of_another_plan_nothing_stays(library: Library, tmp_path: Path) -> None:
    """Nor of one whose source is broken."""
    root = tmp_path / "source"
    shutil.copytree(library(episodes=(4, 5)).root, root)
    content: dict[str, bytes] = {}

    def refuse(request: ServedRequest) -> Fault | None:
        return Fault.status(403) if request.method == "PUT" and request.path.endswith("tasks.parquet") else None

    async with S3Server(content, fault=refuse) as server:
        fetch = config(server)
        with pytest.raises(AccessDenied):
            await merge_datasets([root], OUT, video_file_max_bytes=1, fetch=fetch)
        assert below(content)
        assert "meta/info.json" not in below(content)
        path = next((root / "data").rglob("*.parquet"))
        whole = pq.read_table(path)
        pq.write_table(whole.slice(0, 6), path)
        before = below(content)
        with pytest.raises(DatasetError, match="has 2 rows with index in"):
            await merge_datasets([root], OUT, workers=1, files_per_chunk=7, fetch=fetch)
        assert below(content).keys() <= before.keys()
        pq.write_table(whole, path)
        server._fault = None
        await merge_datasets([root], OUT, fetch=fetch)
        assert server.uploads == {}
    await merge_datasets([root], tmp_path / "out")
    assert below(content) == all_files(tmp_path / "out")


async def test_a_dataset_whose_merge_was_killed_behind_its_end_is_one(library: Library) -> None:
    content = {"bucket/sets/out/meta/info.json": b"{}", "bucket/sets/out/.merging-0/begun": b""}
    async with S3Server(content) as server:
        with pytest.raises(MergeError, match="isn't empty"):
            await merge_datasets([library(episodes=(4,)).root], OUT, fetch=config(server))
        await merge_datasets([library(episodes=(4,)).root], OUT, overwrite=True, fetch=config(server))
    assert not any("merging" in name for name in content)


async def test_merge_that_failed_after_its_end_is_reported_by_a_rerun(library: Library) -> None:
    """Where its notes could not be removed any more; but not when the dataset has been changed since."""
    root = library(episodes=(4, 5)).root
    content: dict[str, bytes] = {}

    def refuse(request: ServedRequest) -> Fault | None:
        is_over = "bucket/sets/out/meta/info.json" in content
        return Fault.status(403) if is_over and request.method == "DELETE" else None

    async with S3Server(content, fault=refuse) as server:
        fetch = config(server)
        with pytest.raises(AccessDenied):
            await merge_datasets([root], OUT, fetch=fetch)
        with pytest.raises(MergeError, match="isn't empty"):
            await merge_datasets([root, root], OUT, fetch=fetch)
        (video, *_) = (name for name in content if name.endswith(".mp4"))
        whole = dict(content)
        for name in (video, "bucket/sets/out/meta/info.json"):
            content[name] += b" "
            with pytest.raises(MergeError, match="isn't empty"):
                await merge_datasets([root], OUT, fetch=fetch)
            content[name] = whole[name]
        server._fault = None
        before = len(server.requests)
        report = await merge_datasets([root], OUT, fetch=fetch)
        assert "PUT" not in {request.method for request in server.requests[before:]}
    assert (report.files, report.bytes) == (len(below(content)), sum(map(len, below(content).values())))
    assert (
        below(content).items() <= {name.removeprefix("bucket/sets/out/"): data for name, data in whole.items()}.items()
    )
    assert not any("merging" in name for name in content)


@pytest.mark.parametrize("destination", [OUT, OUT.replace("s3", "S3")])
@pytest.mark.parametrize(
    "source", [OUT, f"{OUT}/", f"{OUT}/part", "s3://bucket/sets", "S3://bucket/sets/out", "s3a://bucket/sets/out"]
)
async def test_a_source_is_not_overwritten(source: str, destination: str) -> None:
    with pytest.raises(MergeError, match="sources are never changed"):
        await merge_datasets([source], destination, overwrite=True)


async def test_the_case_of_the_scheme_makes_no_other_place(library: Library) -> None:
    content: dict[str, bytes] = {}
    async with S3Server(content) as server:
        report = await merge_datasets([library(episodes=(4,)).root], OUT.replace("s3", "S3"), fetch=config(server))
    assert report.destination == OUT
    assert "meta/info.json" in below(content)


@pytest.mark.parametrize("destination", ["https://h/out", "hf://datasets/o/n", "gs://b/x"])
async def test_destination_that_cannot_be_written_is_refused(destination: str, library: Library) -> None:
    with pytest.raises(ConfigError, match="below an s3:// prefix"):
        await merge_datasets([library(episodes=(4,)).root], destination)


@pytest.mark.parametrize("status", [403, 500])
async def test_listing_of_what_is_left_out_may_fail(library: Library, tmp_path: Path, status: int) -> None:
    """Only where one may read and not list."""
    content = {f"bucket/set/{path}": data for path, data in all_files(library(episodes=(4, 5)).root).items()}
    content["bucket/set/meta/lineage.json"] = b"{}"

    def refuse(request: ServedRequest) -> Fault | None:
        asked = parse_qs(request.target.partition("?")[2])
        return Fault.status(status) if asked.get("prefix") == ["set/meta/"] else None

    async with S3Server(content, fault=refuse) as server:
        merge = partial(merge_datasets, ["s3://bucket/set"], tmp_path / "out", fetch=config(server))
        if status == 403:
            assert (await merge()).dropped == ()
        else:
            with pytest.raises(MergeError, match=f"status {status}"):
                await merge()


async def test_a_small_disk_is_seen_before_anything_is_put(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")  # noqa: PYI024 - as shutil's
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10, 10, 10))
    async with S3Server({}) as server:
        with pytest.raises(MergeError, match="has 10 bytes free"):
            await merge_datasets([library(episodes=(4,)).root], OUT, fetch=config(server))
        assert server.objects == {}
