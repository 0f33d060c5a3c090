"""Files of rows that lie elsewhere than the table says, on stores that can be listed and on one that can't."""

from __future__ import annotations

import shutil
import warnings
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader

from asyncfetch.config import StreamConfig
from asyncfetch.errors import FetchError, MergeError, NotFound, Throttled
from asyncfetch.lerobot import open_dataset
from asyncfetch.lerobot.listing import places_beside
from asyncfetch.merge import merge_datasets
from asyncfetch.streams import Stream
from asyncfetch.testing import Fault, S3Server
from asyncfetch.torch import StreamDataset
from tests.lerobot.serving import all_frames, check_all, check_sample, content_of, serve
from tests.merge.on_s3 import config as s3_config
from tests.merge.on_s3 import set_keys
from tests.merge.test_job import check_merged

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from asyncfetch.testing import DatasetTruth, ServedRequest
    from tests.lerobot.serving import Library

RECORDED = [f"chunk-{chunk:03d}/file-{file:03d}" for chunk in (0, 1) for file in (0, 1)]
MOVED: dict[str, list[str]] = {
    "chunks of one file": ["chunk-000/file-000", "chunk-001/file-000", "chunk-002/file-000", "chunk-003/file-000"],
    "one chunk": ["chunk-000/file-000", "chunk-000/file-001", "chunk-000/file-002", "chunk-000/file-003"],
    "names of another program": ["train/part-1", "train/part-2", "train/part-10", "valid/part-1"],
}


@pytest.fixture(name="truth")
def truth_fixture(library: Library) -> DatasetTruth:
    return library(episodes=(3, 4, 2, 5, 3, 2, 4), episodes_per_data_file=2, chunks_size=2)


def moved(truth: DatasetTruth, root: Path, names: list[str]) -> Path:
    """A copy whose data files have other names than its table of episodes says."""
    shutil.copytree(truth.root, root, ignore=shutil.ignore_patterns("data"))
    for old, new in zip(RECORDED, names, strict=True):
        path = root / f"data/{new}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(truth.root / f"data/{old}.parquet", path)
    return root


@pytest.mark.parametrize("names", MOVED.values(), ids=list(MOVED))
async def test_rows_are_found_in_a_folder(truth: DatasetTruth, tmp_path: Path, names: list[str]) -> None:
    root = moved(truth, tmp_path / "set", names)
    async with open_dataset(root) as dataset:
        with pytest.warns(RuntimeWarning, match="for the rows of episode") as warned:
            await check_all(dataset, truth)
        assert len(warned) == 1
        assert [kind for kind, _ in dataset.metadata.oddities] == ["file of rows"]
        assert sum(batch.num_rows for batch in [_ async for _ in dataset.columns(["action"])]) == sum(truth.lengths)


@pytest.mark.parametrize("names", MOVED.values(), ids=list(MOVED))
async def test_rows_are_found_in_s3(
    truth: DatasetTruth, tmp_path: Path, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_keys(monkeypatch)
    content = content_of(moved(truth, tmp_path / "set", names))
    async with (
        S3Server({f"bucket/set/{path}": data for path, data in content.items()}) as server,
        open_dataset("s3://bucket/set", config=StreamConfig(fetch=s3_config(server))) as dataset,
    ):
        with pytest.warns(RuntimeWarning, match="for the rows of episode"):
            await check_all(dataset, truth)


def moved_table(truth: DatasetTruth, root: Path, names: list[str]) -> Path:
    """A copy whose table of episodes is in these files: one row each, and the last of them has the rest."""
    shutil.copytree(truth.root, root)
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    whole = pq.read_table(path)
    path.unlink()
    for number, name in enumerate(names):
        rows = whole.slice(number) if name == names[-1] else whole.slice(number, 1)
        pq.write_table(rows, path.with_name(f"{name}.parquet"))
    return root


def listing_fails(status: int) -> Callable[[ServedRequest], Fault | None]:
    return lambda request: Fault.status(status) if "list-type" in request.target else None


@pytest.mark.parametrize(("status", "error"), [(429, Throttled), (500, FetchError), (503, Throttled), (403, NotFound)])
async def test_rows_whose_listing_fails(
    truth: DatasetTruth, tmp_path: Path, status: int, error: type[FetchError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be there, but where one may read and not list."""
    set_keys(monkeypatch)
    content = content_of(moved(truth, tmp_path / "set", MOVED["names of another program"]))
    served = {f"bucket/set/{path}": data for path, data in content.items()}
    async with (
        S3Server(served, fault=listing_fails(status)) as server,
        open_dataset("s3://bucket/set", config=StreamConfig(fetch=s3_config(server))) as dataset,
    ):
        with pytest.raises(error) as caught:
            await dataset.sample(2, 0)
    if error is not NotFound:
        assert (caught.value.url, caught.value.status) == ("s3://bucket/set/data", status)


@pytest.mark.parametrize("status", [429, 500, 503, 403])
async def test_a_table_whose_listing_fails_is_not_cut_short(
    truth: DatasetTruth, tmp_path: Path, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names that are guessed lead to two of its three files."""
    set_keys(monkeypatch)
    content = content_of(moved_table(truth, tmp_path / "set", ["file-000", "file-001", "file-007"]))
    served = {f"bucket/set/{path}": data for path, data in content.items()}
    async with S3Server(served, fault=listing_fails(status)) as server:
        config = s3_config(server)
        opened = open_dataset("s3://bucket/set", config=StreamConfig(fetch=config))
        if status == 403:  # one may read, and not list
            with pytest.warns(RuntimeWarning, match="7 episodes where there are 2"):
                async with opened:
                    pass
            return
        with pytest.raises(FetchError) as caught:
            async with opened:
                pass
        assert (caught.value.url, caught.value.status) == ("s3://bucket/set/meta/episodes", status)
        with pytest.raises(MergeError, match=f"status {status}"):
            await merge_datasets(["s3://bucket/set", truth.root], tmp_path / "out", fetch=config)
        assert not (tmp_path / "out").exists()


async def test_a_file_that_comes_later_is_found(truth: DatasetTruth, tmp_path: Path) -> None:
    root = moved(truth, tmp_path / "set", MOVED["names of another program"])
    late = root / "data/train/part-2.parquet"
    rows = late.read_bytes()
    late.unlink()
    async with open_dataset(root) as dataset:
        with pytest.warns(RuntimeWarning, match="for the rows of episode"):
            await dataset.sample(0, 0)
        with pytest.raises(NotFound):
            await dataset.sample(2, 0)
        late.write_bytes(rows)
        check_sample(await dataset.sample(2, 0), truth, 2, 0)


@pytest.mark.parametrize("names", list(MOVED.values())[:2], ids=list(MOVED)[:2])
async def test_rows_are_found_by_the_next_names(truth: DatasetTruth, tmp_path: Path, names: list[str]) -> None:
    async with serve(moved(truth, tmp_path / "set", names)) as served:
        with pytest.warns(RuntimeWarning, match="for the rows of episode"):
            await check_all(served.dataset, truth)


async def test_rows_that_no_name_leads_to_are_not_there(truth: DatasetTruth, tmp_path: Path) -> None:
    content = content_of(moved(truth, tmp_path / "set", MOVED["names of another program"]))
    async with serve(content) as served:
        with pytest.raises(NotFound, match=r"data/chunk-000/file-000\.parquet"):
            await served.dataset.sample(0, 0)


@pytest.mark.parametrize("names", MOVED.values(), ids=list(MOVED))
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_finds_them(truth: DatasetTruth, tmp_path: Path, names: list[str], num_workers: int) -> None:
    """Also loader workers of which just one fetches."""
    dataset = StreamDataset(Stream(moved(truth, tmp_path / "set", names), shuffle=False))
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # a worker's own are its own
        samples = list(DataLoader(dataset, batch_size=None, num_workers=num_workers))
    in_order = sorted(samples, key=lambda sample: int(sample["index"]))
    for sample, (episode, frame) in zip(in_order, sorted(all_frames(truth)), strict=True):
        check_sample(sample, truth, episode, frame)


@pytest.mark.parametrize("names", MOVED.values(), ids=list(MOVED))
async def test_a_merge_finds_them(truth: DatasetTruth, tmp_path: Path, names: list[str]) -> None:
    root = moved(truth, tmp_path / "set", names)
    with pytest.warns(RuntimeWarning, match="for the rows of episode"):
        await merge_datasets([root, truth.root], tmp_path / "out")
    await check_merged(tmp_path / "out", [truth, truth])


def test_the_next_places() -> None:
    assert places_beside((0, 0), 1, 1000) == [(0, 1), (1, 0)]
    assert places_beside((0, 999), 1, 1000) == [(1, 0), (0, 1000)]
    assert places_beside((0, 1), -1, 1000) == [(0, 0)]
    assert places_beside((1, 7), -1, 1000) == [(1, 6), (0, 999)]
    assert places_beside((1, 0), -1, 1000) == [(0, 999)]
    assert places_beside((0, 0), -1, 1000) == []
