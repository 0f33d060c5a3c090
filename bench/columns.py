"""Columns of a dataset by record batches, beside pyarrow reading the same local files.

Frames/s of ``LeRobotDataset.columns`` over those of pyarrow, for two columns of a dataset without videos: of row groups
that are an episode each, as LeRobot records them, and of one a file. Footers are read anew each time by both.

    python -m bench.columns --repeats 7
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.dataset
import pyarrow.parquet

from asyncfetch.lerobot import LeRobotDataset, open_dataset
from asyncfetch.testing import Quirks, write_dataset
from bench.rows import Row, show

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KEYS = ["observation.state", "action"]
GOAL = 0.8


def by_file(files: Sequence[Path]) -> int:
    """Return the rows that ``iter_batches`` of each file gives."""
    return sum(
        batch.num_rows for file in files for batch in pyarrow.parquet.ParquetFile(file).iter_batches(columns=KEYS)
    )


def by_dataset(files: Sequence[Path]) -> int:
    """Return the rows that pyarrow's own dataset gives."""
    dataset = pyarrow.dataset.dataset([str(file) for file in files])
    return sum(batch.num_rows for batch in dataset.to_batches(columns=KEYS))


async def ours(url: str) -> tuple[int, float]:
    """Return the rows that our dataset gives, and the seconds from when it was open."""
    async with open_dataset(url) as dataset:
        return await _rows(dataset)


async def _rows(dataset: LeRobotDataset) -> tuple[int, float]:
    began = time.perf_counter()
    rows = 0
    async for batch in dataset.columns(KEYS):
        rows += batch.num_rows
    return rows, time.perf_counter() - began


def timed(read: Callable[[Sequence[Path]], int], files: Sequence[Path]) -> tuple[int, float]:
    """Return what it returns, and its seconds."""
    began = time.perf_counter()
    return read(files), time.perf_counter() - began


def measure(url: Path, repeats: int) -> dict[str, list[float]]:
    """Return ratios of neighbouring runs by peer."""
    files = sorted((url / "data").rglob("*.parquet"))
    ratios: dict[str, list[float]] = {"ParquetFile.iter_batches": [], "dataset.to_batches": []}
    for repeat in range(repeats + 1):
        for name, read in zip(ratios, (by_file, by_dataset), strict=True):
            rows, before = timed(read, files)
            given, seconds = asyncio.run(ours(str(url)))
            _, after = timed(read, files)
            if rows != given:
                raise RuntimeError(f"{name} has {rows} rows, columns() {given}")
            if repeat:  # the first brings libraries and files into memory
                ratios[name].append((before + after) / 2 / seconds)
    return ratios


def main(arguments: list[str] | None = None) -> int:
    """Print the table; with ``--json`` the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=1200)
    parser.add_argument("--length", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    shapes = {"a row group an episode": Quirks(), "a row group a file": Quirks(collapsed_row_groups=True)}
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for number, (shape, quirks) in enumerate(shapes.items()):
            root = Path(directory, str(number))
            write_dataset(
                root,
                episodes=options.episodes,
                length=options.length,
                cameras=[],
                episodes_per_data_file=max(1, options.episodes // 3),
                quirks=quirks,
            )
            for peer, ratios in measure(root, options.repeats).items():
                question = f"{shape}: columns() / pyarrow's {peer}"
                rows.append(Row.of(question, "x", ratios, f">= {GOAL}"))
    show(rows, as_json=options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
