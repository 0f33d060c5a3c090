"""Stores that speak like S3 and do some things otherwise: Backblaze B2, MinIO and others."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio.lowlevel
import pytest

from asyncfetch.config import FetchConfig, RetryConfig, S3Config, TimeoutConfig
from asyncfetch.errors import AccessDenied, FetchError, InvalidResponse, RangeNotSatisfiable, Throttled
from asyncfetch.fetch import Fetcher, listing
from asyncfetch.fetch.transports.s3 import S3Signer
from asyncfetch.ranges import ByteRange
from asyncfetch.testing import Fault, HubServer, S3Quirks, S3Server

if TYPE_CHECKING:
    from asyncfetch.fetch.retry import Clock
    from tests.fetch.conftest import FakeTime, LyingServer, Request, Step

CONTENT = bytes(range(256)) * 40
B2 = S3Quirks(refuses_checksums=True, requests_per_second=500, tells_size=False)
OLD_MINIO = S3Quirks(refuses_checksums=True, encodes_keys=False, wrong_region_status=301)

pytestmark = pytest.mark.usefixtures("aws_keys")


def fetcher_for(server: S3Server, clock: Clock | None = None, *, attempts: int = 5, **settings: object) -> Fetcher:
    config = FetchConfig(
        ca_file=server.ca_file,
        trust_env=False,
        retry=RetryConfig(attempts=attempts, outage_seconds=0),
        timeouts=TimeoutConfig(first_byte_seconds=15),
        s3=S3Config(endpoint_url=server.url, **settings),  # type: ignore[arg-type]
        max_span_bytes=0,
    )
    return Fetcher(config, _clock=clock)


@pytest.mark.parametrize("quirks", [B2, OLD_MINIO], ids=["B2", "old MinIO"])
@pytest.mark.parametrize("requester_pays", [False, True])
async def test_reading_and_listing(quirks: S3Quirks, requester_pays: bool) -> None:
    keys = ["d/a b+c%20.bin", "d/ü&<x>.bin", "d/e/f", *(f"d/{number:03}" for number in range(25))]
    content = {f"bucket/{key}": CONTENT for key in keys}
    async with (
        S3Server(content, quirks=quirks, page_keys=10, requester_pays=requester_pays) as server,
        fetcher_for(server, requester_pays=requester_pays) as fetcher,
    ):
        infos = await fetcher.listdir("s3://bucket/d")
        expected = [f"s3://bucket/{key}" for key in keys if key != "d/e/f"] + ["s3://bucket/d/e/"]
        assert [info.url for info in infos] == sorted(expected)
        for key in keys[:3]:
            assert await fetcher.fetch(f"s3://bucket/{key}", 5, 50) == CONTENT[5:50]
            assert await fetcher.fetch(f"s3://bucket/{key}", -10) == CONTENT[-10:]
        with pytest.raises(RangeNotSatisfiable) as caught:
            await fetcher.fetch("s3://bucket/d/000", len(CONTENT), len(CONTENT) + 1)
        assert caught.value.status == 416
        assert {request.status for request in server.requests} == {200, 206, 416}


@pytest.mark.parametrize("pause", [None, 1])
async def test_slow_down_is_throttling(time: FakeTime, pause: int | None) -> None:
    quirks, began = replace(B2, requests_per_second=5, retry_after_seconds=pause), time.now
    async with S3Server({"b/x": CONTENT}, quirks=quirks) as server:
        ranges = [ByteRange("s3://b/x", start, start + 10) for start in range(60)]

        async def sleep(seconds: float) -> None:
            """Beside those who sleep already; FakeTime's sleeps add up, and the store would be met in time at once."""
            time.sleeps.append(seconds)
            wakes = time.now + seconds
            await anyio.lowlevel.checkpoint()
            time.now = max(time.now, wakes)
            server.clock_seconds = time.now - began

        clock = replace(time.clock(), sleep=sleep)
        async with fetcher_for(server, clock, attempts=50) as fetcher:
            assert await fetcher.fetch_many(ranges) == [CONTENT[one.start : one.stop] for one in ranges]
            retries = fetcher.statistics().retries
        assert 0 < retries <= sum(slept >= (pause or 0) for slept in time.sleeps)  # and pauses of the host
        server._quirks = replace(quirks, requests_per_second=1e-9)
        server._allowance = 0
        async with fetcher_for(server, time.clock()) as fetcher:
            with pytest.raises(Throttled, match="SlowDown") as caught:
                await fetcher.fetch("s3://b/x", 0, 10)
        assert (caught.value.status, caught.value.attempts) == (503, 5)


@pytest.mark.parametrize("status", [400, 301, 307])
async def test_the_wrong_region_is_left_once(status: int) -> None:
    quirks = S3Quirks(wrong_region_status=status)
    content = {"far/x": CONTENT, "far/y": CONTENT}
    async with (
        S3Server(content, regions={"far": "eu-central-1"}, quirks=quirks) as server,
        fetcher_for(server, attempts=1) as fetcher,
    ):
        assert await fetcher.fetch("s3://far/x") == CONTENT
        assert await fetcher.fetch("s3://far/y") == CONTENT
        assert [request.status for request in server.requests] == [status, 206, 206]
    async with (
        S3Server(content, regions={"far": "eu-central-1"}, quirks=quirks) as server,
        fetcher_for(server, attempts=1) as fetcher,
    ):
        assert len(await fetcher.listdir("s3://far")) == 2
        assert [request.status for request in server.requests] == [status, 200]


@pytest.mark.parametrize(("ahead", "said"), [(7200.0, "7[12].. s behind"), (-7200.0, "7[12].. s ahead of")])
async def test_a_wrong_clock_is_named(ahead: float, said: str) -> None:
    async with S3Server({"b/x": CONTENT}) as server, fetcher_for(server) as fetcher:
        server.clock_seconds = ahead
        with pytest.raises(AccessDenied, match=f"clock is {said} the store's") as caught:
            await fetcher.fetch("s3://b/x", 0, 10)
        assert caught.value.attempts == 1
        server.clock_seconds = 0.0
        assert await fetcher.fetch("s3://b/x", 0, 10) == CONTENT[:10]


async def test_a_clock_that_is_right_is_not_named() -> None:
    async with S3Server({"b/x": CONTENT}, fault=lambda _: Fault.status(403)) as server, fetcher_for(server) as fetcher:
        with pytest.raises(AccessDenied) as caught:
            await fetcher.fetch("s3://b/x", 0, 10)
    assert "clock" not in str(caught.value)


@pytest.mark.parametrize("quirk", ["no token", "the same token", "the Hub's own page"])
async def test_a_listing_that_can_not_go_on_is_an_error(quirk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = {f"b/{number}": b"x" for number in range(9)}
    if quirk == "the Hub's own page":
        monkeypatch.delenv("HF_TOKEN", raising=False)
        async with HubServer() as hub, Fetcher(FetchConfig(ca_file=hub.ca_file, hub_endpoint=hub.url)) as fetcher:
            hub.push("datasets/o/n", content)
            hub.hub._fault = lambda request: Fault.headers({"Link": f'<{request.target}>; rel="next"'})
            with pytest.raises(InvalidResponse, match="in a circle") as caught:
                await fetcher.listdir("hf://datasets/o/n")
            assert (caught.value.attempts, caught.value.host) == (1, hub.url.removeprefix("https://"))
        return
    async with S3Server(content, page_keys=5, quirks=S3Quirks(sends_tokens=quirk != "no token")) as server:
        if quirk == "the same token":
            first = server._list
            monkeypatch.setattr(server, "_list", lambda bucket, _: first(bucket, ""))
        async with fetcher_for(server) as fetcher:
            with pytest.raises(InvalidResponse, match=r"no token to ask|in a circle") as caught:
                await fetcher.listdir("s3://b")
        assert caught.value.status == 200


@pytest.mark.parametrize("store", ["s3", "hub"])
@pytest.mark.parametrize("entries", [1, 0])
async def test_a_listing_without_an_end_is_an_error(
    store: str, entries: int, server: LyingServer, step: type[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "MAX_EMPTY_PAGES", 20)

    def page(_: Request) -> Step:
        number = len(server.requests)
        entry = f"<Contents><Key>{number}</Key><Size>5</Size></Contents>" * entries
        token = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{number}</NextContinuationToken>"
        body = f"<ListBucketResult>{entry}{token}</ListBucketResult>"
        if store == "hub":
            body = json.dumps([{"type": "file", "path": f"{number}", "size": 5, "oid": "1"}] * entries)
        headers = {"Content-Length": str(len(body)), "Link": f'</api?cursor={number}>; rel="next"'}
        return step(status=200, headers=headers, body=body.encode())

    server.every = page
    url = "s3://b" if store == "s3" else f"hf://datasets/o/n@{'0' * 40}"
    endpoint = server.url("")
    config = FetchConfig(
        trust_env=False, s3=S3Config(endpoint_url=endpoint), hub_endpoint=endpoint, max_listed_entries=30
    )
    async with Fetcher(config) as fetcher:
        with pytest.raises(FetchError, match=r"max_listed_entries=30: raise" if entries else "20 pages") as caught:
            await fetcher.listdir(url)
    assert len(server.requests) == (31 if entries else 20)
    assert (caught.value.url, caught.value.host) == (url, f"127.0.0.1:{server.port}")
    assert (caught.value.status, caught.value.attempts) == (200, 1)


async def test_listing_has_as_many_entries_as_allowed() -> None:
    content = {f"b/{number}": b"x" for number in range(9)}
    async with S3Server(content, page_keys=5) as server:
        config = FetchConfig(
            ca_file=server.ca_file, trust_env=False, s3=S3Config(endpoint_url=server.url), max_listed_entries=9
        )
        async with Fetcher(config) as fetcher:
            assert len(await fetcher.listdir("s3://b")) == 9


@pytest.mark.parametrize(
    ("endpoint", "settings", "region"),
    [
        ("https://s3.us-west-004.backblazeb2.com", {}, "us-west-004"),
        ("https://s3.us-west-004.backblazeb2.com/", {"region": "eu-central-003"}, "eu-central-003"),
        ("https://s3.example.org", {}, "us-east-1"),
    ],
)
async def test_the_region_that_an_endpoint_names(endpoint: str, settings: dict[str, str], region: str) -> None:
    """No request is made: what counts is the url that would be asked."""
    signer = await S3Signer.open(S3Config(endpoint_url=endpoint, **settings))  # type: ignore[arg-type]
    try:
        signed = await signer.sign("get_object", {"Bucket": "bucket", "Key": "k"}, settings.get("region"))
    finally:
        await signer.aclose()
    assert f"%2F{region}%2Fs3%2Faws4_request" in str(signed.url)
    assert str(signed.url).startswith(f"{endpoint.rstrip('/')}/bucket/k?")


async def test_an_endpoint_below_a_path_is_read(server: LyingServer) -> None:
    """Alluxio's is /api/v1/s3."""
    server.put("/api/v1/s3/bucket/d/a.bin", CONTENT)
    s3 = S3Config(endpoint_url=server.url("/api/v1/s3"), anonymous=True, region="us-east-1")
    async with Fetcher(FetchConfig(trust_env=False, s3=s3)) as fetcher:
        assert await fetcher.fetch("s3://bucket/d/a.bin", 5, 50) == CONTENT[5:50]
