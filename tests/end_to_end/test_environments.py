"""The package beside what users have installed, or have running: all of its uses, in a process of each such kind."""

from __future__ import annotations

import asyncio
import faulthandler
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader

import asyncfetch as af
from asyncfetch.tensors import TensorClient, TensorServer
from asyncfetch.testing import write_dataset
from tests.end_to_end.conftest import serve_dataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.end_to_end.conftest import Served

pytestmark = pytest.mark.usefixtures("programs_are_warm")

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 60
"""A process takes a tenth of it, where it has a core. One that hangs says where, and ends."""


@dataclass(frozen=True)
class Source:
    """A dataset that is served."""

    url: str
    config: af.StreamConfig

    def stream(self) -> af.Stream:
        return af.Stream(self.url, seed=0, config=self.config)


# The uses. Each gives the number of different frames that it had.


def quick_start(source: Source) -> int:
    return len({int(sample["index"]) for sample in source.stream()})


def loader(source: Source, num_workers: int = 0) -> int:
    dataset = af.torch.StreamDataset(source.stream(), batch_size=3)
    batches: Any = DataLoader(dataset, batch_size=None, num_workers=num_workers)
    indices = [batch["index"] for batch in batches]
    assert len(indices) == len(dataset)
    return len(set(torch.cat(indices).tolist()))


def loader_with_workers(source: Source) -> int:
    return loader(source, num_workers=2)


def resume(source: Source) -> int:
    stream = source.stream()
    samples = iter(stream)
    before = {int(next(samples)["index"]) for _ in range(10)}
    state = stream.state_dict()
    samples.close()
    stream = source.stream()
    stream.load_state_dict(state)
    after = {int(sample["index"]) for sample in stream}
    assert not before & after
    return len(before | after)


def single_frames(source: Source) -> int:
    frames = af.torch.FrameDataset(source.url, config=source.config)
    assert int(frames[len(frames) - 1]["index"]) == len(frames) - 1
    frames.close()
    return len(frames)


def staging(source: Source) -> int:
    store = af.UrlStore(source.url, source.config.fetch)
    with af.CachePool(parent_dir=None, workers=2, max_bytes=2**20, method="raw") as pool:
        return int(json.loads(pool.get_lazy(store, "meta/info.json").get())["total_frames"])


def tensors(source: Source) -> int:
    frames = torch.arange(quick_start(source))
    with TensorServer(max_bytes=2**20) as server, TensorClient() as client:
        return len(client.localize(client.remotize(frames, server.url)))


async def samples(source: Source) -> int:
    async with source.stream().samples() as samples:
        return len({int(sample["index"]) async for sample in samples})


async def awaited_tensors(source: Source) -> int:
    frames = torch.arange(await samples(source))
    server = TensorServer(max_bytes=2**20)
    async with server, TensorClient() as client:
        return len(await client.localize(await client.remotize(frames, server.url)))


async def merge(source: Source) -> int:
    with tempfile.TemporaryDirectory() as directory:
        report = await af.merge_datasets([source.url], Path(directory) / "merged", fetch=source.config.fetch)
    return report.frames


PLAIN = [quick_start, loader, loader_with_workers, resume, single_frames, staging, tensors]
COROUTINES = [samples, awaited_tensors, merge]


# Where they run.


def tell(use: Callable[..., object], frames: int) -> None:
    sys.stdout.write(f"{use.__name__} {frames}\n")


def scripts(source: Source) -> None:
    for use in PLAIN:
        tell(use, use(source))
    for coroutine in COROUTINES:
        tell(coroutine, asyncio.run(coroutine(source)))


async def notebook(source: Source) -> None:
    """As its cells do, on a loop that is running."""
    for use in PLAIN:
        tell(use, use(source))
    for coroutine in COROUTINES:
        tell(coroutine, await coroutine(source))


def beside_trio(source: Source) -> None:
    """And sniffio, which anyio asks where it is installed."""
    import trio  # noqa: F401

    scripts(source)


def beside_gevent(source: Source) -> None:
    import gevent

    gevent.spawn(scripts, source).get()


def beside_nest_asyncio(source: Source) -> None:
    import nest_asyncio

    nest_asyncio.apply()
    scripts(source)


def in_a_notebook_of_nest_asyncio(source: Source) -> None:
    import nest_asyncio

    async def cell() -> None:
        scripts(source)

    nest_asyncio.apply()
    asyncio.run(cell())


def in_a_notebook(source: Source) -> None:
    asyncio.run(notebook(source))


def on_uvloop(source: Source) -> None:
    import uvloop

    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    scripts(source)


def in_a_notebook_on_uvloop(source: Source) -> None:
    import uvloop

    uvloop.run(notebook(source))


def in_a_run_of_trio(source: Source) -> None:
    import trio

    async def run() -> None:
        for use in PLAIN:
            tell(use, use(source))
        for coroutine in COROUTINES:
            tell(coroutine, await trio.to_thread.run_sync(asyncio.run, coroutine(source)))

    trio.run(run)


def without_sniffio(source: Source) -> None:
    assert sys.modules.pop("sniffio") is None  # which kept it from being imported
    scripts(source)


PLACES = [
    without_sniffio,
    beside_trio,
    beside_gevent,
    beside_nest_asyncio,
    in_a_notebook_of_nest_asyncio,
    in_a_notebook,
    on_uvloop,
    in_a_notebook_on_uvloop,
    in_a_run_of_trio,
]


def main(place: str, url: str, ca_file: str) -> None:
    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
    config = af.StreamConfig(fetch=af.FetchConfig(ca_file=ca_file))
    globals()[place](Source(url, config))


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """21 frames, all of which each use decodes."""
    with serve_dataset(write_dataset(tmp_path_factory.mktemp("few") / "data", episodes=(9, 1, 0, 11))) as served:
        yield served


@pytest.mark.slow
@pytest.mark.parametrize("place", [place.__name__ for place in PLACES])
def test_every_use_works(place: str, few: Served) -> None:
    lacks = "sys.modules['sniffio'] = None; " if place == "without_sniffio" else ""
    program = f"import sys; {lacks}from {__name__} import main; main(*sys.argv[1:])"
    command = [sys.executable, "-W", "error", "-c", program, place, few.url, str(few.server.ca_file)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.stderr == ""
    assert ended.returncode == 0
    every_frame = len(few.keys)
    assert ended.stdout == "".join(f"{use.__name__} {every_frame}\n" for use in [*PLAIN, *COROUTINES])
