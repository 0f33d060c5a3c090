"""Each quirk is in the files as it is described, and the rest of the dataset is as without it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from asyncfetch.testing.datasets import write_dataset
from asyncfetch.testing.recorder import Quirks

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow.parquet as pq

    from asyncfetch.testing.truth import DatasetTruth

TOP, WRIST = "observation.images.top", "observation.images.wrist"
LENGTHS = (4, 0, 6, 5)
DATA = "data/chunk-000/file-000.parquet"
EPISODES = "meta/episodes/chunk-000/file-000.parquet"


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> DatasetTruth:
    return write(tmp_path_factory.mktemp("plain"))


def write(root: Path, **quirks: Any) -> DatasetTruth:  # noqa: ANN401
    return write_dataset(
        root, episodes=LENGTHS, width=64, height=64, codec="h264", episodes_per_data_file=3, quirks=Quirks(**quirks)
    )


def open_parquet(truth: DatasetTruth, path: str) -> pq.ParquetFile:
    from pyarrow.parquet import ParquetFile

    return ParquetFile(truth.root / path)


def info(truth: DatasetTruth) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((truth.root / "meta/info.json").read_text())
    return content


def files(truth: DatasetTruth) -> dict[str, bytes]:
    return {p.relative_to(truth.root).as_posix(): p.read_bytes() for p in truth.root.rglob("*") if p.is_file()}


def changed(truth: DatasetTruth, plain: DatasetTruth) -> set[str]:
    """Files that differ from those of the dataset without quirks."""
    mine, others = files(truth), files(plain)
    return {path for path in mine.keys() | others.keys() if mine.get(path) != others.get(path)}


def frame_count(path: Path) -> int:
    import av

    with av.open(str(path), "r") as container:
        return len(list(container.decode(video=0)))


def test_no_quirks_by_default(plain: DatasetTruth, tmp_path: Path) -> None:
    assert changed(write(tmp_path), plain) == set()


def test_collapsed_row_groups(tmp_path: Path, plain: DatasetTruth) -> None:
    truth = write(tmp_path, collapsed_row_groups=True)

    assert open_parquet(plain, DATA).num_row_groups == 2
    assert open_parquet(truth, DATA).num_row_groups == 1
    assert open_parquet(truth, DATA).read() == open_parquet(plain, DATA).read()


def test_plain_lists(tmp_path: Path, plain: DatasetTruth) -> None:
    truth = write(tmp_path, plain_lists=True)

    assert str(open_parquet(truth, DATA).schema_arrow.field("action").type) == "list<element: float>"
    assert open_parquet(truth, DATA).read().to_pylist() == open_parquet(plain, DATA).read().to_pylist()


def test_no_huggingface_metadata(tmp_path: Path) -> None:
    assert open_parquet(write(tmp_path, no_huggingface_metadata=True), DATA).schema_arrow.metadata is None


def test_sorted_episode_columns(tmp_path: Path, plain: DatasetTruth) -> None:
    table = open_parquet(write(tmp_path, sorted_episode_columns=True), EPISODES).read()
    recorded = open_parquet(plain, EPISODES).read()

    assert table.column_names == sorted(recorded.column_names) != recorded.column_names
    assert table.select(recorded.column_names) == recorded


def test_float_and_null_index_columns(tmp_path: Path, plain: DatasetTruth) -> None:
    table = open_parquet(write(tmp_path, float_index_columns=True, null_index_episodes=(2,)), EPISODES).read()

    for name in open_parquet(plain, EPISODES).read().column_names:
        if name.endswith("_index"):
            assert str(table.schema.field(name).type) == "double"
    assert table["data/file_index"].to_pylist() == [0.0, 0.0, None, 1.0]
    assert table[f"videos/{TOP}/chunk_index"].to_pylist() == [0.0, 0.0, None, 0.0]
    assert table["meta/episodes/file_index"].to_pylist() == [0.0, 0.0, None, 0.0]


def test_several_meta_files(tmp_path: Path, plain: DatasetTruth) -> None:
    import pyarrow.parquet as pq

    truth = write(tmp_path, episodes_per_meta_file=3)
    rows = pq.read_table(tmp_path / "meta/episodes").to_pylist()

    assert changed(truth, plain) == {EPISODES, "meta/episodes/chunk-000/file-001.parquet"}
    assert [row["episode_index"] for row in rows] == [0, 1, 2, 3]
    assert [row["meta/episodes/file_index"] for row in rows] == [0, 0, 0, 1]


def test_stale_self_references(tmp_path: Path) -> None:
    rows = open_parquet(write(tmp_path, stale_self_references=True), EPISODES).read().to_pylist()

    for row in rows:
        assert not (tmp_path / f"meta/episodes/chunk-000/file-{row['meta/episodes/file_index']:03d}.parquet").exists()


def test_unnamed_and_permuted_tasks(tmp_path: Path) -> None:
    tasks = open_parquet(write(tmp_path, unnamed_tasks_index=True, permuted_tasks=True), "meta/tasks.parquet").read()

    assert tasks.to_pydict() == {"task_index": [1, 0], "__index_level_0__": ["place", "pick"]}
    assert json.loads(tasks.schema.metadata[b"pandas"])["index_columns"] == ["__index_level_0__"]


def test_orphan_rows(tmp_path: Path, plain: DatasetTruth) -> None:
    truth = write(tmp_path, orphan_rows=3)
    rows = open_parquet(truth, DATA).read().to_pylist()

    assert changed(truth, plain) == {DATA, "data/chunk-000/file-001.parquet"}
    assert [row["episode_index"] for row in rows[:3]] == [4, 4, 4]
    assert [row["index"] for row in rows] == [15, 16, 17, *range(10)]
    assert rows[3:] == open_parquet(plain, DATA).read().to_pylist()


def test_orphan_files(tmp_path: Path, plain: DatasetTruth) -> None:
    orphans = {"data/chunk-000/file-002.parquet", *(f"videos/{name}/chunk-000/file-002.mp4" for name in (TOP, WRIST))}
    truth = write(tmp_path, orphan_files=True)

    assert changed(truth, plain) == orphans
    assert frame_count(tmp_path / f"videos/{TOP}/chunk-000/file-002.mp4") == 4
    assert open_parquet(truth, "data/chunk-000/file-002.parquet").read()["index"].to_pylist() == [0, 1, 2, 3]


def test_no_stats(tmp_path: Path, plain: DatasetTruth) -> None:
    truth = write(tmp_path, no_stats=True)

    assert changed(truth, plain) == {"meta/stats.json", EPISODES}
    assert not (tmp_path / "meta/stats.json").exists()
    assert not [name for name in open_parquet(truth, EPISODES).schema_arrow.names if name.startswith("stats/")]


def test_short_videos(tmp_path: Path, plain: DatasetTruth) -> None:
    truth = write(tmp_path, short_video_frames=2)

    videos = [path for path in sorted(files(truth)) if path.endswith(".mp4")]
    assert [frame_count(tmp_path / path) for path in videos] == [2, 9, 2, 9]
    assert changed(truth, plain) == set(videos)


def test_an_empty_video_file(tmp_path: Path, plain: DatasetTruth) -> None:
    truth = write(tmp_path, empty_video_file=1)

    assert changed(truth, plain) == {f"videos/{TOP}/chunk-000/file-001.mp4"}
    assert files(truth)[f"videos/{TOP}/chunk-000/file-001.mp4"] == b""


@pytest.mark.parametrize("feature", ["timestamp", "index"])
def test_default_feature_can_be_left_out(tmp_path: Path, feature: str) -> None:
    truth = write(tmp_path, without_default_feature=feature, orphan_rows=1)

    assert feature not in info(truth)["features"]
    assert feature not in open_parquet(truth, DATA).schema_arrow.names
    assert f"stats/{feature}/min" not in open_parquet(truth, EPISODES).schema_arrow.names


def test_unusual_info(tmp_path: Path, plain: DatasetTruth) -> None:
    truth = write(tmp_path, unknown_info_keys=True, legacy_video_info=True, codebase_version="v2.1")
    content = info(truth)

    assert changed(truth, plain) == {"meta/info.json"}
    assert content["codebase_version"] == "v2.1"
    assert content["total_videos"] == 8
    assert content["features"][TOP]["video_info"]["video.codec"] == "h264"
    assert "info" not in content["features"][TOP]
