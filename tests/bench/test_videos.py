"""bench/videos.py, tiny: every program reads the same windows, and each figure is there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from bench import video_peers, videos
from bench.video_files import FPS, PATTERN_SECONDS, Collection, index_of, make_collection

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("programs_are_warm", "needs_lua")

TINY = Collection(videos=4, shards=2, width=128, height=96, groups=(250,), repeats=(1, 2))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A collection."""
    return make_collection(TINY, tmp_path_factory.mktemp("videos"))


def run(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str
) -> dict[str, float]:
    """Return the figures that the command prints as JSON."""
    monkeypatch.setattr(videos, "QUICK", TINY)
    videos.main(["--quick", "--json", "--directory", str(root.parent), *options])
    return {row["question"]: row["median"] for row in json.loads(capsys.readouterr().out)}


def test_videos_are_made_with_exact_times(root: Path) -> None:
    indexes = [index_of(path) for path in sorted((root / "files").iterdir())]
    assert [index.codec for index in indexes] == ["avc1", "hvc1"] * 2
    for index, times in zip(indexes, (1, 1, 1, 2), strict=True):
        _, seconds, end_seconds = index.shown()
        assert end_seconds == pytest.approx(times * PATTERN_SECONDS)
        assert seconds == pytest.approx([number / FPS for number in range(times * PATTERN_SECONDS * FPS)])


def test_every_program_is_measured(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(root, monkeypatch, capsys, "--seconds", "0.1", "--per-video", "1")
    assert min(found.values()) >= 0
    assert found["with an index: bytes / those of the groups"] > 0
    assert found["with an index: requests a clip"] < found["without an index: requests a clip"]
    assert found["ours, with an index / webdataset + torchcodec"] == pytest.approx(
        found["with an index: clips/s"] / found["webdataset + torchcodec: clips/s"]
    )
    assert ("SPDL, from local files: clips/s" in found) == video_peers.has_spdl()


def test_a_rank_of_many_reads_its_share(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(root, monkeypatch, capsys, "--entries", "20000")
    assert found["bytes to open / those of the index"] == pytest.approx(1, rel=0.01)
    assert 0 < found["bytes until then / the rank's share"] < 1
    assert [path.name for path in root.glob("*.parquet")] == ["index.parquet"]
