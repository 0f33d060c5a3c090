"""What a remote tensor costs: beside the engine's plain GET of the same bytes, and beside base64 in JSON.

    python -m bench.tensors                 10,000 steps; then 64 KiB, 1 MiB and 16 MiB, 5 repeats; some minutes
    python -m bench.tensors --quick         one size, 3 repeats, 500 steps
    python -m bench.tensors --only steps --backend ray      the steps over a Ray of its own

One server in a process of its own holds bf16 tensors. Each repeat reads all of them by each way, in a new order: the
table has medians. "base64 JSON" is what the published design does: bf16 cast up to float32, base64 in JSON, decoded
again. Before that, steps of put, localize and clear, and the resident memory of both sides meanwhile.

Goal beside those in the table: memory as high in the last fifth of the steps as in the second.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import multiprocessing
import os
import random
import sys
import time
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

import aiohttp
import anyio
import psutil
import torch
from aiohttp import web

import asyncfetch as af
from asyncfetch.tensors import TensorClient, TensorServer
from asyncfetch.tensors.server import shards_url
from bench.rows import Row, show

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

    from asyncfetch.tensors import RemoteTensor

KIB, MIB, GIB = 1024, 1024**2, 1024**3
SIZES = [64 * KIB, MIB, 16 * MIB]
REPEAT_BYTES = 64 * MIB
"""Read in one repeat: as in a training step, memory of the one before is used again."""
JSON_BYTES = 32 * MIB
"""Read as JSON in one repeat, which is slow."""
JSON_CONCURRENCY = 16
STEP_BYTES = (4 * KIB, 64 * KIB, 512 * KIB)
"""Tensors of one step."""


@dataclass(frozen=True)
class Steps:
    """Resident memory of both sides over steps of put, localize and clear."""

    backend: str
    steps: int
    seconds: float
    client_bytes: tuple[int, int]
    """Highest in the second and in the last fifth."""
    server_bytes: tuple[int, int]
    """Of the server's process, or of all of Ray's, its object store included."""
    kept_bytes: int
    """Of shards, by the client at the end."""


def serve(pipe: Connection, count: int, nbytes: int) -> None:
    """The server's process: says its urls, and ends when told."""
    asyncio.run(_serve(pipe, nbytes, count))


async def _serve(pipe: Connection, nbytes: int, count: int) -> None:
    payloads = [torch.randn(nbytes // 2).bfloat16() for _ in range(count)]

    async def as_json(request: web.Request) -> web.Response:
        tensor = payloads[int(request.match_info["number"])].float()
        data = base64.b64encode(tensor.numpy().tobytes()).decode()
        text = json.dumps({"shape": list(tensor.shape), "dtype": "float32", "data": data})
        return web.Response(text=text, content_type="application/json")

    application = web.Application()
    application.router.add_get("/{number}", as_json)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    async with TensorServer(max_bytes=4 * GIB) as server, TensorClient(backend="http", own=server) as client:
        remotes = await client.remotize(payloads, server.url)
        pipe.send((server.url, f"http://127.0.0.1:{port}", remotes))
        while not pipe.poll():  # noqa: ASYNC110 - a pipe isn't awaited
            await anyio.sleep(0.2)
    await runner.cleanup()


class ServerProcess:
    """``with ServerProcess(count, nbytes) as server``."""

    def __init__(self, count: int, nbytes: int) -> None:
        self._pipe, far = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=serve, args=(far, count, nbytes))

    def __enter__(self) -> Self:
        self._process.start()
        self.url, self.json_url, self.remotes = self._pipe.recv()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pipe.send("end")
        self._process.join(30)

    def resident_bytes(self) -> int:
        """Of the process."""
        memory: int = psutil.Process(self._process.pid).memory_info().rss
        return memory


async def measure(nbytes: int, repeats: int) -> list[Row]:
    """All ways for tensors of one size, interleaved."""
    count = max(8, REPEAT_BYTES // nbytes)
    with ServerProcess(count, nbytes) as server:
        async with AsyncExitStack() as stack:
            ways = await open_ways(stack, server, server.remotes)
            for way in ways.values():
                await way()
            measured: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
            for _ in range(repeats):
                for name in random.sample(list(ways), len(ways)):
                    measured[name].append(await timed(ways[name]))
    plain, as_json = measured["plain GET"], measured["base64 JSON"]
    rows = []
    for name, own in measured.items():
        question = f"{name}, {nbytes // KIB} KiB"
        rates = [one[0] / other[0] for one, other in zip(own, plain, strict=True)]
        savings = [other[1] / one[1] for one, other in zip(own, as_json, strict=True)]
        rows += [
            Row.of(question, "MiB/s", [rate / MIB for rate, _ in own]),
            Row.of(f"{question}: rate / plain GET", "x", rates, ">= 0.8"),
            Row.of(f"{question}: CPU of the client", "s/GiB", [cpu * GIB for _, cpu in own]),
            Row.of(f"CPU of base64 JSON / {question}", "x", savings, ">= 10"),
        ]
    return rows


async def open_ways(
    stack: AsyncExitStack, server: ServerProcess, remotes: list[RemoteTensor]
) -> dict[str, Callable[[], Awaitable[int]]]:
    """By name: reads tensors and returns how many bytes of tensors that were."""
    fetcher = await stack.enter_async_context(af.Fetcher(af.FetchConfig(trust_env=False)))
    ranges = [af.ByteRange(shards_url(one.server, [one.shard_id]), 0, one.frame_bytes) for one in remotes]
    session = await stack.enter_async_context(aiohttp.ClientSession())

    async def plain() -> int:
        views = await fetcher.fetch_many(ranges)
        return sum(map(len, views))

    async def as_json() -> int:
        queue = iter(range(max(4, min(len(remotes), JSON_BYTES // remotes[0].nbytes))))
        total = 0

        async def work() -> None:
            nonlocal total
            for number in queue:
                async with session.get(f"{server.json_url}/{number}") as response:
                    answer = json.loads(await response.read())
                data = bytearray(base64.b64decode(answer["data"]))
                tensor = torch.frombuffer(data, dtype=torch.float32).reshape(answer["shape"]).bfloat16()
                total += tensor.nbytes

        async with anyio.create_task_group() as tasks:
            for _ in range(JSON_CONCURRENCY):
                tasks.start_soon(work)
        return total

    async def localize(**settings: Any) -> Callable[[], Awaitable[int]]:  # noqa: ANN401
        client = await stack.enter_async_context(TensorClient(backend="http", **settings))

        async def work() -> int:
            client.clear_all()
            tensors = await client.localize(remotes)
            return sum(tensor.nbytes for tensor in tensors)

        return work

    return {
        "plain GET": plain,
        "localize, views": await localize(delivery="view", shared_memory=False),
        "localize, copies": await localize(shared_memory=False),
        "localize, shared memory": await localize(delivery="view"),
        "base64 JSON": as_json,
    }


async def timed(way: Callable[[], Awaitable[int]]) -> tuple[float, float]:
    """Bytes per second, and CPU seconds per byte."""
    cpu, started = time.process_time(), time.perf_counter()
    nbytes = await way()
    return nbytes / (time.perf_counter() - started), (time.process_time() - cpu) / nbytes


async def measure_steps(steps: int, backend: Literal["http", "ray"]) -> Steps:
    """Put, localize, clear, again and again. Over Ray, where it isn't initialised, it starts one."""
    client_bytes, server_bytes = [], []
    url, resident_bytes = "ray", _bytes_of_children
    with ExitStack() as stack:
        if backend == "ray":
            stack.enter_context(running_ray())
        else:
            server = stack.enter_context(ServerProcess(1, 2))
            url, resident_bytes = server.url, server.resident_bytes
        async with TensorClient(backend=backend) as client:
            started = time.perf_counter()
            for step in range(steps):
                tensors = [torch.full((size // 2,), step % 100, dtype=torch.bfloat16) for size in STEP_BYTES]
                remotes = await client.remotize(tensors, url)
                local = await client.localize(remotes)
                if int(local[-1][-1]) != step % 100:
                    sys.exit(f"step {step} brought another tensor")
                await client.clear(url, [one.shard_id for one in remotes])
                if step % max(1, steps // 50) == 0:
                    client_bytes.append(psutil.Process().memory_info().rss)
                    server_bytes.append(resident_bytes())
            seconds = time.perf_counter() - started
            kept = client.statistics()
    return Steps(
        backend,
        steps,
        seconds,
        _fifths(client_bytes),
        _fifths(server_bytes),
        kept.bytes + kept.in_flight_bytes + kept.pinned_bytes,
    )


@contextmanager
def running_ray() -> Iterator[None]:
    """The Ray that this process is connected to, or one for this block, which reports nothing to anybody."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    import ray

    if ray.is_initialized():
        yield
        return
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=200 * MIB)
    try:
        yield
    finally:
        ray.shutdown()


def _bytes_of_children() -> int:
    total = 0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


def _fifths(samples: list[int]) -> tuple[int, int]:
    fifth = max(1, len(samples) // 5)
    return max(samples[fifth : 2 * fifth]), max(samples[-fifth:])


def rows_of(steps: Steps) -> list[Row]:
    """The highest of both sides in the second fifth and in the last."""
    question = f"{steps.steps} steps of put, localize, clear over {steps.backend}"
    sides = {"client": steps.client_bytes, "server" if steps.backend == "http" else "all of Ray": steps.server_bytes}
    return [
        Row.of(question, "s", [steps.seconds]),
        *(
            Row.of(f"{question}: {side}, {fifth} fifth", "MiB", [nbytes / MIB])
            for side, both in sides.items()
            for fifth, nbytes in zip(("second", "last"), both, strict=True)
        ),
        Row.of(f"{question}: kept at the end", "bytes", [steps.kept_bytes], "0"),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="one size, 3 repeats, 500 steps")
    parser.add_argument("--sizes", help="KiB, with commas")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--only", choices=("reading", "steps"))
    parser.add_argument("--backend", choices=("http", "ray"), default="http", help="of the steps")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    asked = parser.parse_args(arguments)
    sizes = (
        [int(size) * KIB for size in asked.sizes.split(",")] if asked.sizes else SIZES[1:2] if asked.quick else SIZES
    )
    repeats = asked.repeats or (3 if asked.quick else 5)
    rows: list[Row] = []
    if asked.only != "reading":  # first: what base64 in JSON leaves to this process's heap isn't the client's
        rows += rows_of(anyio.run(measure_steps, asked.steps or (500 if asked.quick else 10_000), asked.backend))
    if asked.only != "steps":
        rows += [row for size in sizes for row in anyio.run(measure, size, repeats)]
    show(rows, as_json=asked.json)


if __name__ == "__main__":
    main()
