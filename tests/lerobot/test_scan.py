"""Columns of many episodes as record batches: each row once, in the order of the frames, however they lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncfetch.errors import ConfigError, DatasetError, EpisodeNotFound
from asyncfetch.lerobot import open_dataset, scan
from asyncfetch.streams import Stream
from asyncfetch.testing import Quirks, write_dataset
from tests.lerobot.serving import serve
from tests.merge.version2 import EPISODE_FILE, as_version2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from asyncfetch.testing import DatasetTruth

LENGTHS = (5, 0, 7, 3, 4)
SHAPES: dict[str, dict[str, Any]] = {
    "recorded": {},
    "two files": {"episodes_per_data_file": 2},
    "one row group": {"quirks": Quirks(collapsed_row_groups=True)},
    "lists": {"quirks": Quirks(plain_lists=True, no_huggingface_metadata=True)},
    "orphans": {"quirks": Quirks(orphan_rows=3, orphan_files=True, collapsed_row_groups=True)},
}


def write(root: Path, **options: Any) -> DatasetTruth:  # noqa: ANN401
    return write_dataset(root, **{"episodes": LENGTHS, "codec": "h264", "width": 96, "height": 64, **options})


def rows_of(batches: Sequence[pa.RecordBatch]) -> list[tuple[int, int, list[float]]]:
    """The numbers of each row, and its action, whose first two values are those numbers again."""
    columns = pa.Table.from_batches(batches).to_pydict()
    return list(zip(columns["episode_index"], columns["frame_index"], columns["action"], strict=True))


def expected(truth: DatasetTruth, episodes: Sequence[int] = range(len(LENGTHS))) -> list[tuple[int, int, list[float]]]:
    return [
        (episode, frame, truth.action(episode, frame).tolist())
        for episode in episodes
        for frame in range(truth.lengths[episode])
    ]


KEYS = ["action", "episode_index", "frame_index"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("unit_rows", [1, 10, scan.UNIT_ROWS])
async def test_every_row_in_the_order_of_the_frames(
    tmp_path: Path, shape: str, unit_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "UNIT_ROWS", unit_rows)
    truth = write(tmp_path / "one", **SHAPES[shape])
    async with serve(truth.root) as served:
        batches = [batch async for batch in served.dataset.columns(KEYS)]
        assert {tuple(batch.schema.names) for batch in batches} == {tuple(KEYS)}
        assert rows_of(batches) == expected(truth)
        some = [batch async for batch in served.dataset.columns(KEYS, episodes=[3, 0, 1])]
        assert rows_of(some) == expected(truth, [3, 0, 1])


@pytest.mark.parametrize("stats", [True, False])
async def test_files_of_version_2(tmp_path: Path, stats: bool) -> None:
    truth = write(tmp_path / "one", **EPISODE_FILE)
    async with open_dataset(as_version2(truth, tmp_path / "old", stats=stats)) as dataset:
        assert rows_of([batch async for batch in dataset.columns(KEYS)]) == expected(truth)


def rewrite(truth: DatasetTruth, change: Callable[[pa.Table], pa.Table], rows_in_a_group: int | None = None) -> None:
    [file] = (truth.root / "data").rglob("*.parquet")
    pq.write_table(change(pq.read_table(file)), file, row_group_size=rows_in_a_group)


@pytest.mark.parametrize("rows_in_a_group", [None, 4])
async def test_rows_in_another_order_are_put_right(tmp_path: Path, rows_in_a_group: int | None) -> None:
    truth = write(tmp_path / "one")
    rewrite(truth, lambda rows: rows.take([*range(0, 19, 2), *range(1, 19, 2)]), rows_in_a_group)
    async with open_dataset(truth.root) as dataset:
        assert rows_of([batch async for batch in dataset.columns(KEYS)]) == expected(truth)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda rows: pa.concat_tables([rows.slice(0, 9), rows.slice(10)]), "episode 2: 0 rows have .* index 9"),
        (lambda rows: pa.concat_tables([rows, rows.slice(3, 1)]), "episode 0: 2 rows have .* index 3"),
    ],
)
async def test_rows_that_are_missing_or_there_twice_are_an_error(
    tmp_path: Path, change: Callable[[pa.Table], pa.Table], told: str
) -> None:
    truth = write(tmp_path / "one")
    rewrite(truth, change)
    async with open_dataset(truth.root) as dataset:
        with pytest.raises(DatasetError, match=told):
            [batch async for batch in dataset.columns(KEYS)]


async def test_an_episode_of_which_no_row_group_has_a_row_is_an_error(tmp_path: Path) -> None:
    truth = write(tmp_path / "one")
    rewrite(truth, lambda rows: rows.slice(0, 9), 3)
    async with open_dataset(truth.root) as dataset:
        with pytest.raises(
            DatasetError, match=r"episode 3: 0 rows have its episode_index and index \d+; it should be one"
        ):
            [batch async for batch in dataset.columns(KEYS, episodes=[3])]


async def test_columns_refuses_wrong_keys_and_episodes(tmp_path: Path) -> None:
    truth = write(tmp_path / "one")
    async with open_dataset(truth.root) as dataset:
        for keys, told in {
            ("actions",): r"columns: .* has no feature 'actions'; it has .*action",
            truth.cameras[:1]: r"frames of cameras are decoded: sample\(\) and Stream give them",
            ("action", "action"): "must be different ones of",
            (): "must be different ones of",
        }.items():
            with pytest.raises(ConfigError, match=told):
                dataset.columns(keys)
        with pytest.raises(ConfigError, match="features must be a collection of keys"):
            dataset.columns("action")
        with pytest.raises(EpisodeNotFound):
            dataset.columns(["action"], episodes=[9])


def test_stream_gives_batches_without_a_loop_and_stops_when_left(tmp_path: Path) -> None:
    truth = write(tmp_path / "one", episodes_per_data_file=1)
    stream = Stream(truth.root, episodes=[2, 4])
    assert rows_of(list(stream.columns(KEYS))) == expected(truth, [2, 4])
    for batch in stream.columns(KEYS):
        assert batch.num_rows
        break
    with pytest.raises(ConfigError, match="has no feature 'none'"):
        next(stream.columns(["none"]))
    assert len(list(stream)) == 7 + 4
    stream.close()


async def test_only_what_is_asked_for_is_fetched(tmp_path: Path) -> None:
    """Of a table with pictures in it, whose row groups are long against a gap."""
    truth = write(tmp_path / "one", extras=["observation.images.snapshot"], width=320, height=240, texture=1.0)
    async with serve(truth.root) as served:
        size = sum(file.stat().st_size for file in (truth.root / "data").rglob("*.parquet"))
        served.server.reset()
        batches = [batch async for batch in served.dataset.columns(["action"])]
        assert sum(batch.num_rows for batch in batches) == truth.num_frames
        assert sum(request.bytes_sent for request in served.requests("/data/")) < size / 2
