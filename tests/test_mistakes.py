"""Mistakes that people make, each with what its message has to say: the wrong value, the rule, and what to do."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from torch.utils.data import DataLoader

import asyncfetch as af
from asyncfetch.testing import HubServer, RangeServer, write_dataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


TRACEBACK_MAX_LINES = 25


@dataclass(frozen=True)
class World:
    """What there is to be mistaken about."""

    root: str
    server: RangeServer
    hub: HubServer

    @property
    def url(self) -> str:
        return f"{self.server.url}/pick-place"

    def stream(self, source: Any = None, **options: Any) -> af.Stream:  # noqa: ANN401 - mistakes are of any type
        ca_file = self.hub.ca_file if str(source).startswith("hf://") else self.server.ca_file
        config = af.StreamConfig(fetch=af.FetchConfig(ca_file=ca_file))
        return af.Stream(self.root if source is None else source, **{"config": config, **options})

    def first(self, source: Any = None, **options: Any) -> Any:  # noqa: ANN401
        stream = self.stream(source, **options)
        try:
            return next(iter(stream))
        finally:
            stream.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("data")
    write_dataset(root / "pick-place", episodes=(5, 6))
    dataset = root / "pick-place"
    files = {path.relative_to(dataset).as_posix(): path.read_bytes() for path in dataset.rglob("*") if path.is_file()}
    with RangeServer(root) as server, HubServer(token="hf_good") as hub:
        hub.push("datasets/org/name", files)
        yield World(str(dataset), server, hub)


@pytest.fixture(autouse=True)
def environment(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Somebody with a token for the Hub and without keys for S3."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", world.hub.url)
    monkeypatch.setenv("HF_TOKEN", "hf_good")


def with_token(token: str | None, call: Callable[[World], object]) -> Callable[[World], object]:
    def called(world: World) -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("HF_TOKEN") if token is None else patch.setenv("HF_TOKEN", token)
            return call(world)

    return called


async def sample_of_a_dataset_that_isnt_open(world: World) -> object:
    return await af.open_dataset(world.root).sample(0, 0)


async def fetch_of_a_fetcher_that_isnt_entered(world: World) -> object:
    return await af.Fetcher().fetch(world.root + "/meta/info.json")


async def dataset_awaited(world: World) -> object:
    return await af.open_dataset(world.root)


async def fetcher_awaited(world: World) -> object:
    return await af.Fetcher()


async def async_for_over_a_stream(world: World) -> object:
    return [sample async for sample in world.stream()]


async def async_for_over_samples(world: World) -> object:
    return [sample async for sample in world.stream().samples()]


async def open_things_pickled(world: World, what: str) -> object:
    async with af.open_dataset(world.root) as dataset, af.Fetcher() as fetcher:
        cache = af.ByteCache(fetcher, max_bytes=2**20)
        things = {"dataset": dataset, "fetcher": fetcher, "cache": cache, "stream": af.Stream(dataset)}
        return pickle.dumps(things[what])


def with_of(thing: Any) -> object:  # noqa: ANN401
    with thing as entered:
        return entered


def spawned_lambda(world: World) -> object:
    dataset = af.torch.StreamDataset(world.stream(transform=lambda sample: sample))
    return next(iter(DataLoader(dataset, batch_size=2, num_workers=1, multiprocessing_context="spawn")))


MISTAKES: dict[str, tuple[Callable[[World], object], type[BaseException], list[str]]] = {
    # Where the data is.
    "a repository without hf://": (lambda w: w.first("org/name"), af.NotFound, ["hf://datasets/org/name"]),
    "a host without https://": (lambda w: w.first("data.example.org/d"), af.NotFound, ["https://data.example.org/d"]),
    "a home directory": (lambda w: w.first("~/d"), af.ConfigError, ["'~/d'", "Path('~/d').expanduser()"]),
    "a home directory in a path": (lambda w: w.first(Path("~/d")), af.ConfigError, ["~/d", "expanduser()"]),
    "a page of the Hub": (
        lambda w: w.first("https://huggingface.co/datasets/org/name"),
        af.ConfigError,
        ["page of the Hub", "'hf://datasets/org/name'"],
    ),
    "a page of the Hub's files": (
        lambda w: w.first("https://huggingface.co/datasets/org/name/tree/v1/meta"),
        af.ConfigError,
        ["'hf://datasets/org/name@v1'"],
    ),
    "a url in a Path": (lambda w: w.first(Path("https://x.org/d")), af.ConfigError, ["a slash", "'https://x.org/d'"]),
    "a bucket in a Path": (lambda w: w.first(Path("s3://robots/d")), af.ConfigError, ["a slash", "'s3://robots/d'"]),
    "info.json in place of the root": (
        lambda w: w.first(f"{w.root}/meta/info.json"),
        af.NotFound,
        ["Its root would be", "pick-place/"],
    ),
    "a directory that is no dataset": (lambda w: w.first(str(Path(w.root).parent)), af.NotFound, ["is it the root"]),
    "a scheme that nobody knows": (lambda w: w.first("ftps://x/d"), af.ConfigError, ["ftps", "http, https, s3, hf"]),
    "http to a port of TLS": (
        lambda w: w.first(w.url.replace("https", "http")),
        af.ConnectionFailed,
        ["if this port speaks TLS, write https://"],
    ),
    "nothing at the url": (lambda w: w.first(f"{w.server.url}/none"), af.NotFound, ["/none has no meta/info.json"]),
    # Credentials.
    "a repository that isn't there": (lambda w: w.first("hf://datasets/org/none"), af.NotFound, ["no such repository"]),
    "a revision that isn't there": (
        lambda w: w.first("hf://datasets/org/name@none"),
        af.NotFound,
        ["hf://datasets/org/name@none", "branch, tag or commit"],
    ),
    "a dataset without datasets/": (lambda w: w.first("hf://org/name"), af.NotFound, ["begins with hf://datasets/"]),
    "a token that has expired": (
        with_token("hf_old", lambda w: w.first("hf://datasets/org/name")),
        af.AccessDenied,
        ["doesn't take this token", "expired", "HF_TOKEN"],
    ),
    "no token": (
        with_token(None, lambda w: w.first("hf://datasets/org/name")),
        af.AccessDenied,
        ["set HF_TOKEN", "no credentials were sent"],
    ),
    "no keys for S3": (lambda w: w.first("s3://robots/d"), af.AccessDenied, ["AWS_ACCESS_KEY_ID", "anonymous=True"]),
    "a token with Bearer": (
        lambda _: af.FetchConfig(tokens={"x.org": "Bearer t"}),
        af.ConfigError,
        ["tokens['x.org']", "without 'Bearer '"],
    ),
    "tokens by url": (lambda _: af.FetchConfig(tokens={"https://x.org": "t"}), af.ConfigError, ["by host"]),
    # Settings.
    "decoding on a GPU": (lambda _: af.StreamConfig(decoder="cuda"), af.ConfigError, ["'cuda'", "on the CPU"]),  # type: ignore[arg-type]
    "a decoder that isn't there": (lambda _: af.StreamConfig(decoder="opencv"), af.ConfigError, ["'opencv'", "'pyav'"]),  # type: ignore[arg-type]
    "a size in words": (lambda _: af.StreamConfig(max_bytes="4GiB"), af.ConfigError, ["'4GiB'", "4 * 2**30"]),  # type: ignore[arg-type]
    "a cache's size in words": (
        lambda _: af.ByteCache(af.Fetcher(), max_bytes="500 MB"),  # type: ignore[arg-type]
        af.ConfigError,
        ["'500 MB'", "500 * 10**6"],
    ),
    "a size with a point": (lambda _: af.StreamConfig(max_bytes=4e9), af.ConfigError, ["4000000000.0", "whole"]),  # type: ignore[arg-type]
    "the wrong configuration": (
        lambda w: w.stream(config=af.FetchConfig()),
        af.ConfigError,
        ["FetchConfig", "StreamConfig(fetch=...)"],
    ),
    "delta_timestamps": (
        lambda w: w.stream(delta_timestamps={"action": [0]}),
        af.UsageError,
        ["delta_timestamps=", "windows="],
    ),
    "batch_size of a stream": (lambda w: w.stream(batch_size=8), af.UsageError, ["batch_size=", "StreamDataset"]),
    "a keyword that is spelt wrong": (lambda w: w.stream(episode=[1]), af.UsageError, ["episode=", "episodes"]),
    "a feature that isn't there": (lambda w: w.first(features=["actions"]), af.ConfigError, ["'actions'", "action,"]),
    "a window off the grid": (lambda w: w.first(windows={"action": [0.05]}), af.ConfigError, ["0.05", "frames(2)"]),
    "an episode that isn't there": (lambda w: w.first(episodes=[99]), af.EpisodeNotFound, ["99", "0 to 1"]),
    "a shuffle buffer": (lambda w: w.stream(shuffle=1000), af.ConfigError, ["1000", "True or False"]),
    # How things are used.
    "a stream in a DataLoader": (
        lambda w: next(iter(DataLoader(w.stream()))),  # type: ignore[arg-type]
        af.UsageError,
        ["StreamDataset(stream", "batch_size=None"],
    ),
    "a frame of a stream": (lambda w: w.stream()[3], af.UsageError, ["3", "FrameDataset"]),
    "a frame by name": (lambda w: af.torch.FrameDataset(w.root)["3"], af.UsageError, ["'3'", "whole number"]),  # type: ignore[index]
    "a url in a StreamDataset": (lambda w: af.torch.StreamDataset(w.root), af.ConfigError, ["takes a Stream"]),  # type: ignore[arg-type]
    "async for over a stream": (async_for_over_a_stream, af.UsageError, ["async with stream.samples()"]),
    "async for over samples()": (async_for_over_samples, af.UsageError, ["entered first", "async with"]),
    "for over samples()": (lambda w: list(w.stream().samples()), af.UsageError, ["for sample in stream"]),
    "with in place of async with": (lambda w: with_of(af.open_dataset(w.root)), af.UsageError, ["`async with`"]),
    "with of a fetcher": (lambda _: with_of(af.Fetcher()), af.UsageError, ["Fetcher", "`async with`"]),
    "a dataset that is awaited": (dataset_awaited, af.UsageError, ["isn't awaited", "async with"]),
    "a fetcher that is awaited": (fetcher_awaited, af.UsageError, ["isn't awaited", "async with"]),
    "a forgotten async with": (sample_of_a_dataset_that_isnt_open, af.ClosedError, ["async with open_dataset(url)"]),
    "a fetcher without async with": (fetch_of_a_fetcher_that_isnt_entered, af.ClosedError, ["async with"]),
    "a transform without return": (
        lambda w: w.first(transform=lambda sample: None),
        af.UsageError,
        ["gave None", "return sample"],
    ),
    "pickling an open dataset": (partial(open_things_pickled, what="dataset"), af.UsageError, ["give another process"]),
    "pickling a fetcher": (partial(open_things_pickled, what="fetcher"), af.UsageError, ["give another process"]),
    "pickling a cache": (partial(open_things_pickled, what="cache"), af.UsageError, ["give another process"]),
    "pickling a stream of an open dataset": (
        partial(open_things_pickled, what="stream"),
        af.UsageError,
        ["make it of the dataset's URL"],
    ),
    "a lambda under spawn": (spawned_lambda, af.UsageError, ["lambda", "spawn", "at a module's top"]),
    "a store for a directory": (
        lambda world: af.CachePool(af.DirectoryStore(world.root)),  # type: ignore[arg-type]
        af.ConfigError,
        ["a directory must be a path", "'/scratch/files'", "DirectoryStore"],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.filterwarnings("ignore:Got pickle error:UserWarning")  # torch's own, of what comes with the error
def test_a_mistake_is_told_with_what_to_do(name: str, world: World) -> None:
    make, kind, said = MISTAKES[name]

    def made() -> object:
        result = make(world)
        return asyncio.run(result) if asyncio.iscoroutine(result) else result

    with pytest.raises(af.AsyncFetchError) as caught:
        made()
    assert type(caught.value) is kind
    for words in said:
        assert words in str(caught.value)


def test_batching_twice_is_warned_of_with_both_sizes(world: World) -> None:
    loader = DataLoader(af.torch.StreamDataset(world.stream(), batch_size=2), batch_size=3)
    with pytest.warns(UserWarning, match=r"StreamDataset\(batch_size=2\).*DataLoader\(batch_size=3\).*batch_size=None"):
        next(iter(loader))


def test_a_stream_is_true_and_a_list_can_be_made_of_it(world: World) -> None:
    stream = world.stream()
    assert stream
    assert len(list(stream)) == 11


def test_a_transform_that_only_another_pickler_can_send_stays(world: World) -> None:
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(world.stream(transform=lambda sample: sample))


@pytest.mark.usefixtures("programs_are_warm")
@pytest.mark.parametrize(
    "use",
    [
        "next(iter(af.Stream(url)))",
        "af.torch.FrameDataset(url)[0]",
        "next(iter(DataLoader(af.torch.StreamDataset(af.Stream(url)), batch_size=2)))",
        "asyncio.run(opened())",
        "asyncio.run(fetched())",
    ],
)
def test_a_404_fits_a_screen(use: str, world: World) -> None:
    program = f"""
import asyncio, sys, asyncfetch as af
from torch.utils.data import DataLoader
url = sys.argv[1]
async def opened():
    async with af.open_dataset(url): pass
async def fetched():
    async with af.Fetcher() as fetcher: await fetcher.fetch(url)
{use}
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, f"{world.server.url}/none"],
        env=os.environ | {"SSL_CERT_FILE": str(world.server.ca_file)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = ended.stderr.splitlines()
    assert lines[-1].startswith("asyncfetch.errors.NotFound:")
    assert len(lines) <= TRACEBACK_MAX_LINES, ended.stderr
