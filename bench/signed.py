"""What a signed range of an S3 object costs the client: ours, aiobotocore's and obstore's CPU per request.

    python -m bench.signed [--kib 64] [--concurrency 64] [--requests 2000] [--repeats 5] [--tls] [--json FILE]

Needs obstore beside the extra ``s3``: pip install --group peers. Every client signs with real keys and reads the same
ranges of the same object from nginx, which looks at no signature: what is measured is the client. Clients take turns;
the figures are medians over the repeats, with the spread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import statistics
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from asyncfetch.config import FetchConfig, S3Config
from asyncfetch.fetch import Fetcher
from bench.nginx import NginxServer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

KEYS = {"AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_EC2_METADATA_DISABLED": "true"}
OBJECT_BYTES = 64 * 1024 * 1024


async def ours(server: NginxServer, stack: AsyncExitStack, limit: int) -> Callable[[int, int], Awaitable[object]]:
    """Fetcher over a presigned url."""
    config = FetchConfig(
        ca_file=server.ca_file,
        trust_env=False,
        max_requests_per_host=limit,
        learn_limit=False,
        s3=S3Config(endpoint_url=server.url, region="us-east-1"),
    )
    fetcher = await stack.enter_async_context(Fetcher(config))
    return lambda start, stop: fetcher.fetch("s3://bucket/x.bin", start, stop)


async def aiobotocore(
    server: NginxServer, stack: AsyncExitStack, limit: int
) -> Callable[[int, int], Awaitable[object]]:
    """``get_object`` and ``read``."""
    from aiobotocore.config import AioConfig
    from aiobotocore.session import get_session

    client = await stack.enter_async_context(
        get_session().create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=server.url,
            verify=server.ca_file,
            config=AioConfig(
                max_pool_connections=limit,
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )
    )

    async def read(start: int, stop: int) -> object:
        answer = await client.get_object(Bucket="bucket", Key="x.bin", Range=f"bytes={start}-{stop - 1}")
        async with answer["Body"] as body:
            return await body.read()

    return read


async def obstore(server: NginxServer, stack: AsyncExitStack, limit: int) -> Callable[[int, int], Awaitable[object]]:
    """``get_range_async``. It trusts no authority of ours, so over TLS it doesn't look at the certificate."""
    from obstore.store import S3Store

    store = S3Store(
        "bucket",
        endpoint=server.url,
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True, "allow_invalid_certificates": True},
    )
    return lambda start, stop: store.get_range_async("x.bin", start=start, end=stop)


CLIENTS = {"asyncfetch": ours, "aiobotocore": aiobotocore, "obstore": obstore}


async def cpu_seconds(
    read: Callable[[int, int], Awaitable[object]], spans: list[tuple[int, int]], concurrency: int
) -> float:
    """CPU of this process over all spans, ``concurrency`` at a time."""
    queue = iter(spans)

    async def worker() -> None:
        for start, stop in queue:
            await read(start, stop)

    before = resource.getrusage(resource.RUSAGE_SELF)
    async with anyio.create_task_group() as group:
        for _ in range(concurrency):
            group.start_soon(worker)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


async def measure(arguments: argparse.Namespace, server: NginxServer) -> dict[str, list[float]]:
    """CPU microseconds per request, by client, one figure a repeat."""
    rng = random.Random(0)
    size = arguments.kib * 1024
    spans = [(start, start + size) for start in (rng.randrange(OBJECT_BYTES - size) for _ in range(arguments.requests))]
    figures: dict[str, list[float]] = {name: [] for name in CLIENTS}
    async with AsyncExitStack() as stack:
        reads = {name: await make(server, stack, arguments.concurrency) for name, make in CLIENTS.items()}
        for read in reads.values():
            await cpu_seconds(read, spans[: 4 * arguments.concurrency], arguments.concurrency)  # warm connections
        for _ in range(arguments.repeats):
            for name, read in reads.items():
                seconds = await cpu_seconds(read, spans, arguments.concurrency)
                figures[name].append(seconds / len(spans) * 1e6)
    return figures


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kib", type=int, default=64, help="KiB of a range")
    parser.add_argument("--concurrency", type=int, default=64, help="ranges in flight")
    parser.add_argument("--requests", type=int, default=2000, help="ranges a repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    os.environ.update(KEYS)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "bucket").mkdir()
        (Path(directory) / "bucket" / "x.bin").write_bytes(os.urandom(OBJECT_BYTES))
        with NginxServer(directory, tls=arguments.tls) as server:
            figures = asyncio.run(measure(arguments, server))
    print(f"client CPU per signed range of {arguments.kib} KiB, {arguments.concurrency} concurrent, us")
    base = statistics.median(figures["asyncfetch"])
    for name, values in figures.items():
        median = statistics.median(values)
        print(f"  {name:12} {median:7.0f}  ({min(values):.0f}-{max(values):.0f})  ours / this {base / median:.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"arguments": vars(arguments), "cpu_us": figures}, default=str, indent=2))


if __name__ == "__main__":
    main()
