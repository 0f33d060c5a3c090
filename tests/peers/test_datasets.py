"""Beside Hugging Face's datasets, in the same environment: the files that it writes of Video() by default."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from asyncfetch.fetch import Fetcher
from asyncfetch.videos.parquet_bytes import parquet_entries

if TYPE_CHECKING:
    from pathlib import Path

theirs = pytest.importorskip("datasets", exc_type=ImportError)

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.may_block]


async def test_videos_that_datasets_writes_are_read_by_range(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    data = [rng.bytes(int(rng.integers(100_000, 900_000))) for _ in range(25)]
    rows = {
        "video": [{"bytes": one, "path": f"{row}.mp4"} for row, one in enumerate(data)],
        "caption": [f"row {row}" for row in range(25)],
    }
    features = theirs.Features({"video": theirs.Video(), "caption": theirs.Value("string")})
    theirs.Dataset.from_dict(rows, features=features).to_parquet(path := tmp_path / "train.parquet")
    async with Fetcher() as fetcher:
        entries = await parquet_entries(fetcher, fetcher, path)
        places_bytes = fetcher.statistics().bytes
        places = [(row["video"], row["offset"], row["offset"] + row["size"]) for row in entries.to_pylist()]
        read = [bytes(await fetcher.fetch(*place)) for place in places]
    assert read == data
    assert entries["caption"].to_pylist() == rows["caption"]
    assert places_bytes < sum(map(len, data)) / 40
