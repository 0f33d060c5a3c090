"""Programs that end, with whatever they have open: not a word on stderr, the exit code is theirs, nothing is left.

Each runs once, and one of each kind in an interpreter of its own. The others are forks of one that has torch already,
as a trainer that imported it first has it. ``ASYNCFETCH_ENDS=30 pytest tests/end_to_end/test_ends.py`` runs each in its
own, 30 times on asyncio's loop and as often on uvloop.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

import psutil
import pytest
from moto.server import ThreadedMotoServer

from asyncfetch.tensors.storage import ROOT
from asyncfetch.testing import HubServer, RangeServer, write_dataset

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncfetch.testing import DatasetTruth
    from tests.warm import WarmInterpreter

RUNS: Final = int(os.environ.get("ASYNCFETCH_ENDS", "1"))
WAYS: Final = ("asyncio",) if RUNS == 1 else ("asyncio", "uvloop")
TREE: Final = Path(__file__).parents[2]

RUN_SECONDS: Final = 300
"""Of one program, most of which is the import of torch."""

pytestmark = pytest.mark.timeout(60 + RUN_SECONDS * RUNS * len(WAYS))

PRELUDE = """
import os, sys, threading
way, url, plain = sys.argv[1:]
if way == "uvloop":
    import asyncio, uvloop
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())

start = threading.Thread.start
def start_before_the_end(thread):  # what Python does from 3.12 on
    if not threading.main_thread().is_alive():
        raise RuntimeError("can't create new thread at interpreter shutdown")
    start(thread)
threading.Thread.start = start_before_the_end

import asyncio, anyio
import asyncfetch as af
"""

OPENED = """
async def main():
    global dataset, opened
    dataset = af.open_dataset(url)
    opened = await dataset.__aenter__()
    opened.prefetch(1)
    await opened.sample(0, 3)
"""
TENSORS = """
import torch
from asyncfetch.tensors import TensorClient, TensorServer

async def main():
    global server, client
    server, client = TensorServer(max_bytes=2**30, ttl_seconds=3600), TensorClient(max_bytes=2**28)
    await server.__aenter__()
    await client.__aenter__()
    await client.localize(await client.remotize([torch.ones(300_000)], server.url))
"""
SAMPLES = """
async def main():
    global samples
    samples = af.Stream(url, seed=0).samples()
    await anext(await samples.__aenter__())
"""
IN_A_DAEMON = """
ready = threading.Event()
async def stay():
    await main()
    ready.set()
    await anyio.sleep_forever()
threading.Thread(target=lambda: asyncio.run(stay()), daemon=True).start()
ready.wait()
"""
A_LOOP = "loop = asyncio.new_event_loop(); loop.run_until_complete(main())"

PROGRAMS = {
    "a stream is iterated": "for sample in af.Stream(url, seed=0): pass",
    "over plain http": "for sample in af.Stream(plain, seed=0): pass",
    "a stream is left": "stream = af.Stream(url, seed=0)\nfor sample in stream: break",
    "iterators stay": """
        iterators = [iter(af.Stream(url, seed=seed)) for seed in range(3)]
        for one in iterators: next(one)
    """,
    "an exit code": "iterator = iter(af.Stream(url, seed=0)); next(iterator); sys.exit(3)",
    "a mixture": """
        iterator = iter(af.Mixture([af.Stream(url), af.Stream(plain)], weights=[1, 1])); next(iterator)
    """,
    "a loader": """
        from torch.utils.data import DataLoader
        iterator = iter(DataLoader(af.torch.StreamDataset(af.Stream(url)), batch_size=8)); next(iterator)
    """,
    "a loader with workers": """
        from torch.utils.data import DataLoader
        dataset = af.torch.StreamDataset(af.Stream(url))
        iterator = iter(DataLoader(dataset, batch_size=8, num_workers=2)); next(iterator)
    """,
    "single frames": "frames = af.torch.FrameDataset(url); frames[3]",
    "served samples": """
        batches = af.serve_samples(af.Stream(url, seed=0), batch_size=3).__enter__()
        iterator = iter(batches); batch = next(iterator)
    """,
    "an async iterator of one's own, with threads": """
        async def numbers():
            while True: yield await asyncio.to_thread(int)
        iterator = iter(af.torch.AsyncIterableDataset(numbers)); next(iterator)
    """,
    "async samples": SAMPLES + "asyncio.run(main())",
    "async samples on a loop that stays": SAMPLES + A_LOOP,
    "an open dataset": OPENED + "asyncio.run(main())",
    "an open dataset, by anyio": OPENED + "anyio.run(main)",
    "an open dataset that is forgotten": OPENED.replace("global dataset, opened", "pass") + "asyncio.run(main())",
    "an open dataset on a loop that stays": OPENED + A_LOOP,
    "an open dataset that is reading, on a loop that stays": OPENED.replace(
        "await opened.sample", "opened.sample"
    ).replace("opened.sample(0, 3)", "await asyncio.sleep(0)")
    + A_LOOP,
    "an open dataset in a daemon": OPENED + IN_A_DAEMON,
    "a daemon's call in a thread": """
        import torch
        from asyncfetch.runtime.threads import run_sync
        ready = threading.Event()
        def work():
            ready.set()
            ones = torch.ones(1500, 1500)
            for _ in range(3): ones = ones @ ones
        async def forever():
            while True: await run_sync(work)
        async def main(): await asyncio.gather(forever(), forever())
        threading.Thread(target=lambda: asyncio.run(main()), daemon=True).start()
        ready.wait()
    """,
    "a daemon iterates": """
        ready = threading.Event()
        def work():
            while True:
                for sample in af.Stream(url, seed=0): ready.set()
        threading.Thread(target=work, daemon=True).start()
        ready.wait()
    """,
    "byte ranges": """
        async def main():
            global fetcher, cache
            fetcher = await af.Fetcher().__aenter__()
            cache = await af.ByteCache(fetcher, max_bytes=2**28).__aenter__()
            await cache.fetch(url + "/meta/info.json", 0, 100)
        asyncio.run(main())
    """,
    "a fetcher that is forgotten": """
        async def main():
            fetcher = await af.Fetcher().__aenter__()
            await fetcher.fetch(url + "/meta/info.json")
        asyncio.run(main())
    """,
    "fsspec": """
        async def main():
            global fetcher
            settings = {"path": ".", "target_protocol": "file"}
            fetcher = await af.Fetcher(af.FetchConfig(fsspec={"dir": settings})).__aenter__()
            await fetcher.fetch("dir://README.md", 0, 100)
        asyncio.run(main())
    """,
    "s3 is iterated": "for sample in af.Stream('s3://robots/small', seed=0): pass",
    "s3 is left": "iterator = iter(af.Stream('s3://robots/small', seed=0)); next(iterator)",
    "s3 from a fetcher": """
        async def main():
            global fetcher
            fetcher = await af.Fetcher().__aenter__()
            await fetcher.fetch("s3://robots/small/meta/info.json")
        asyncio.run(main())
    """,
    "the hub": "iterator = iter(af.Stream('hf://datasets/lerobot/pusht', seed=0)); next(iterator)",
    "a disk cache": """
        config = af.StreamConfig(disk_cache_dir=os.environ["SCRATCH"], disk_cache_max_bytes=2**30)
        iterator = iter(af.Stream(url, config=config)); next(iterator)
    """,
    "staging": """
        store = af.UrlStore(plain)
        pool = af.CachePool(parent_dir=None, workers=8, max_bytes=2**30, method="raw").__enter__()
        lazies = [pool.get_lazy(store, "meta/info.json") for _ in range(3)]; lazies[0].get()
    """,
    "tensors, by plain calls": """
        import torch
        from asyncfetch.tensors import TensorClient, TensorServer
        server = TensorServer("localhost", max_bytes=2**30).__enter__()
        client = TensorClient().__enter__()
        client.localize(client.remotize([torch.ones(300_000)], server.url))
    """,
    "tensors": TENSORS + "asyncio.run(main())",
    "tensors on a loop that stays": TENSORS + A_LOOP,
    "tensors in a daemon": TENSORS + IN_A_DAEMON,
    "a merge": """
        async def main(): await af.select_episodes(url, os.environ["SCRATCH"] + "/some", [0, 2])
        asyncio.run(main())
    """,
}
EXIT_CODES = {"an exit code": 3}
IN_THEIR_OWN: Final = {
    *("a stream is left", "a loader with workers", "served samples", "a daemon iterates", "tensors in a daemon"),
    *("async samples", "async samples on a loop that stays"),
    *("an open dataset", "an open dataset, by anyio", "an open dataset that is forgotten"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DatasetTruth:
    return write_dataset(tmp_path_factory.mktemp("data") / "small", episodes=(20, 31, 17))


@pytest.fixture(scope="module")
def tls(data: DatasetTruth) -> Iterator[RangeServer]:
    """By name, which has to be looked up."""
    with RangeServer(data.root, host="localhost") as server:
        yield server


@pytest.fixture(scope="module")
def plain(data: DatasetTruth) -> Iterator[RangeServer]:
    with RangeServer(data.root, host="localhost", tls=False) as server:
        yield server


@pytest.fixture(scope="module")
def stores(data: DatasetTruth) -> Iterator[dict[str, str]]:
    """The environment of somebody with a bucket and a token for the Hub."""
    import botocore.session

    paths = [path for path in data.root.rglob("*") if path.is_file()]
    files = {path.relative_to(data.root).as_posix(): path.read_bytes() for path in paths}
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "eu-west-1"}
    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    endpoint = f"http://localhost:{moto.get_host_and_port()[1]}"
    client = botocore.session.get_session().create_client(
        "s3", "eu-west-1", endpoint_url=endpoint, aws_access_key_id="a", aws_secret_access_key="b"
    )
    client.create_bucket(Bucket="robots", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    for path, content in files.items():
        client.put_object(Bucket="robots", Key=f"small/{path}", Body=content)
    client.close()
    with HubServer(token="t", tls=False) as hub:
        hub.push("datasets/lerobot/pusht", files)
        yield {**keys, "AWS_ENDPOINT_URL_S3": endpoint, "HF_ENDPOINT": hub.url, "HF_TOKEN": "t"}
    moto.stop()


@pytest.fixture
def places() -> Iterator[dict[str, str]]:
    """Where a program puts files; with short names, for torch puts sockets there."""
    with TemporaryDirectory(prefix="ends-") as temporary, TemporaryDirectory(prefix="ends-") as scratch:
        yield {"TMPDIR": temporary, "SCRATCH": scratch, "TORCHINDUCTOR_CACHE_DIR": scratch}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_ends_in_silence_and_leaves_nothing(
    name: str,
    tls: RangeServer,
    plain: RangeServer,
    stores: dict[str, str],
    places: dict[str, str],
    warm_python: WarmInterpreter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if RUNS == 1 and name not in IN_THEIR_OWN:
        warm_python.stands_in(monkeypatch.setattr, ends_in_full=True)
    for way in WAYS * RUNS:
        command = [sys.executable, "-c", PRELUDE + textwrap.dedent(PROGRAMS[name]), way, tls.url, plain.url]
        environment = {**os.environ, **stores, **places, "SSL_CERT_FILE": str(tls.ca_file)}
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, cwd=TREE)
        try:  # it waits for the program's children, too, which have its stderr
            output, errors = process.communicate(timeout=RUN_SECONDS)
        finally:
            process.kill()
        assert (way, output, errors, process.returncode) == (way, "", "", EXIT_CODES.get(name, 0))
        # torch's workers leave these to themselves: its loaders do it without us, too.
        assert [one for one in os.listdir(places["TMPDIR"]) if not one.startswith("pymp-")] == []


SERVED = """
import os, signal, sys, threading, torch
from asyncfetch.tensors import TensorClient, TensorServer
if sys.argv[1] == "handled": signal.signal(signal.SIGTERM, lambda *_: sys.exit("the user's own"))
with TensorServer(max_bytes=1 << 26) as server, TensorClient(backend="http") as client:
    client.remotize(torch.ones(100_000), server.url)
    if sys.argv[1] == "forked" and not os.fork():
        sys.stdin.read()
        os._exit(0)
    print(server.storage._shared_directory.path.name, flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(not ROOT.is_dir(), reason="no /dev/shm")
@pytest.mark.parametrize(
    ("how", "number", "code"),
    [
        ("", signal.SIGTERM, -signal.SIGTERM),
        ("", signal.SIGHUP, -signal.SIGHUP),
        ("", signal.SIGKILL, -signal.SIGKILL),
        ("", signal.SIGINT, -signal.SIGINT),
        ("handled", signal.SIGTERM, 1),
        ("forked", signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_tensor_server_leaves_no_shared_memory_whatever_ends_it(
    how: str, number: int, code: int, warm_python: WarmInterpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal goes to all of the job's processes, as a cluster's does."""
    if RUNS == 1 and (how, number) != ("", signal.SIGTERM):
        warm_python.stands_in(monkeypatch.setattr, ends_in_full=True)
    command, pipe = [sys.executable, "-c", SERVED, how], subprocess.PIPE
    with subprocess.Popen(
        command, cwd=TREE, text=True, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
    ) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        place = ROOT / server.stdout.readline().strip()
        assert list(place.iterdir())
        children = psutil.Process(server.pid).children()
        [remover] = [child for child in children if os.getpgid(child.pid) != server.pid]
        for child in [remover] if number != signal.SIGKILL else []:
            child.send_signal(number)
        server.send_signal(number) if how == "forked" else os.killpg(server.pid, number)
        assert server.wait(10) == code
        remover.wait(10)
        assert not place.exists()
        assert server.stdin is not None
        server.stdin.close()
        assert ("the user's own" in server.stderr.read()) == (how == "handled")
