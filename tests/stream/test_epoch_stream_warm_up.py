"""What comes before the first sample, read before it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import asyncfetch as af
from asyncfetch.errors import FetchError, NotFound
from asyncfetch.testing import RangeServer, write_dataset

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    write_dataset(tmp_path / "one", episodes=(9, 8, 7), codec="h264", width=96, height=64, episodes_per_video_file=1)
    with RangeServer(tmp_path / "one") as server:
        yield server


def config(server: RangeServer) -> af.StreamConfig:
    retry = af.RetryConfig(attempts=1)
    # Of one lane: no epoch cuts an episode.
    return af.StreamConfig(pool_segments=1, fetch=af.FetchConfig(ca_file=str(server.ca_file), retry=retry, hedge=None))


def test_warm_up_leaves_only_clips_to_read(server: RangeServer) -> None:
    stream = af.Stream(server.url, config=config(server))
    stream.warm_up()
    assert any(request.path.endswith("info.json") for request in server.requests)
    server.reset()
    assert len(list(stream)) == 24
    clips = [request for request in server.requests if request.path.endswith(".mp4")]
    assert len(clips) == 3 * 2  # no index among them
    # Of so short a table the rows came with its footer.
    assert {request.path.split("/")[1] for request in server.requests} == {"videos"}
    stream.close()


def test_warm_up_with_clips_reads_the_first_samples_ahead(server: RangeServer) -> None:
    for source in (
        af.Stream(server.url, config=config(server)),
        af.Mixture([af.Stream(server.url)], weights=[1.0], config=config(server)),
    ):
        source.warm_up(clips=True)
        server.reset()
        assert "observation.images.top" in next(iter(source))
        assert server.requests == []
        source.close()


def test_warm_up_leaves_a_read_error_to_its_sample(server: RangeServer, tmp_path: Path) -> None:
    next((tmp_path / "one" / "videos").rglob("*.mp4")).unlink()
    stream = af.Stream(server.url, config=config(server))
    stream.warm_up(clips=True)
    with pytest.raises(FetchError):
        list(stream)
    stream.close()
    with pytest.raises(NotFound):
        af.Stream(f"{server.url}/none", config=config(server)).warm_up()
