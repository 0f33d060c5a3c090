"""Clients of bench.engine that ask for the same bytes as an object of S3, each range signed as that client does it.

nginx looks at no signature: what is measured is the client.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import anyio
from anyio import to_thread

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from bench.engine_client import Case, Fetch

__all__ = ["BUCKET", "open_aiobotocore", "open_asyncfetch_s3", "open_obstore_s3", "open_s3fs", "open_s3torchconnector"]

BUCKET = "bucket"
"""The directory of the server's root that holds the object once more."""
REGION = "us-east-1"
KEYS = {"AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_EC2_METADATA_DISABLED": "true"}
CHECKSUMS = {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}


def _endpoint_and_key(case: Case) -> tuple[str, str]:
    os.environ.update(KEYS)
    endpoint, _, key = case.url.rpartition("/")
    return endpoint, key


async def open_asyncfetch_s3(case: Case, stack: AsyncExitStack) -> Fetch:
    """This engine: one signature for all ranges of the object."""
    import asyncfetch as af

    endpoint, key = _endpoint_and_key(case)
    config = af.FetchConfig(
        ca_file=case.ca_file,
        max_requests_per_host=case.concurrency,
        trust_env=False,
        s3=af.S3Config(endpoint_url=endpoint, region=REGION),
    )
    fetcher = await stack.enter_async_context(af.Fetcher(config))

    async def fetch(start: int) -> int:
        return len(await fetcher.fetch(f"s3://{BUCKET}/{key}", start, start + case.range_bytes))

    return fetch


async def open_aiobotocore(case: Case, stack: AsyncExitStack) -> Fetch:
    """``get_object`` and ``read``."""
    from aiobotocore.config import AioConfig
    from aiobotocore.session import get_session

    endpoint, key = _endpoint_and_key(case)
    config = AioConfig(max_pool_connections=case.concurrency, **CHECKSUMS)
    client: Any = await stack.enter_async_context(
        get_session().create_client("s3", region_name=REGION, endpoint_url=endpoint, verify=case.ca_file, config=config)
    )

    async def fetch(start: int) -> int:
        asked = f"bytes={start}-{start + case.range_bytes - 1}"
        answer = await client.get_object(Bucket=BUCKET, Key=key, Range=asked)
        async with answer["Body"] as body:
            return len(await body.read())

    return fetch


async def open_s3fs(case: Case, stack: AsyncExitStack) -> Fetch:
    """The file system s3fs on our loop, without fsspec's thread."""
    from s3fs import S3FileSystem

    endpoint, key = _endpoint_and_key(case)
    filesystem = S3FileSystem(
        asynchronous=True,
        skip_instance_cache=True,
        endpoint_url=endpoint,
        client_kwargs={"region_name": REGION, "verify": case.ca_file},
        config_kwargs={"max_pool_connections": case.concurrency, **CHECKSUMS},
    )
    session = await filesystem.set_session()
    stack.push_async_callback(session.close)

    async def fetch(start: int) -> int:
        return len(await filesystem._cat_file(f"{BUCKET}/{key}", start=start, end=start + case.range_bytes))

    return fetch


async def open_obstore_s3(case: Case, stack: AsyncExitStack) -> Fetch:
    """The asynchronous ``get_range`` of obstore over its S3 store. It trusts no authority of ours, so checks none."""
    import obstore
    from obstore.store import S3Store

    endpoint, key = _endpoint_and_key(case)
    store = S3Store(
        BUCKET,
        endpoint=endpoint,
        region=REGION,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True, "allow_invalid_certificates": True},
    )

    async def fetch(start: int) -> int:
        return len(await obstore.get_range_async(store, key, start=start, length=case.range_bytes))

    return fetch


async def open_s3torchconnector(case: Case, stack: AsyncExitStack) -> Fetch:
    """The client below s3torchconnector, on the AWS runtime; it blocks, so it is asked in threads. Plain HTTP only."""
    from s3torchconnectorclient._mountpoint_s3_client import MountpointS3Client

    endpoint, key = _endpoint_and_key(case)
    client = MountpointS3Client(region=REGION, endpoint=endpoint, force_path_style=True)
    threads = anyio.CapacityLimiter(case.concurrency)

    def get(start: int) -> int:
        stream = client.get_object(BUCKET, key, start=start, end=start + case.range_bytes)
        return len(b"".join(stream))

    async def fetch(start: int) -> int:
        return await to_thread.run_sync(get, start, limiter=threads)

    return fetch
