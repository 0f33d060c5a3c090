"""S3 and the Hub, whose urls are signed anew by every process, below a disk cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from asyncfetch.cache.disk import DiskReader, DiskTier
from asyncfetch.config import FetchConfig, S3Config
from asyncfetch.fetch import Fetcher
from asyncfetch.testing import Fault, HubServer, Keys, S3Server
from tests.cache.disk.conftest import CONTENT, MIB

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cache.disk.conftest import Tier


async def read_in_two_jobs(tier: Tier, url: str, config: FetchConfig) -> list[int]:
    """Bytes fetched by each."""
    fetched = []
    for _ in range(2):
        async with (
            Fetcher(config) as fetcher,
            DiskReader(fetcher, DiskTier(tier.directory, 64 * MIB, min_free_bytes=0)) as reader,
        ):
            for start, stop in ((100, 3 * MIB), (0, 10), (4 * MIB, 5 * MIB)):
                assert await reader.fetch(url, start, stop) == CONTENT[start:stop]
            fetched.append(sum(host.bytes for host in fetcher.statistics().hosts.values()))
    return fetched


@pytest.fixture
def aws_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", Keys().access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", Keys().secret_key)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "nothing"))


@pytest.mark.usefixtures("aws_keys")
async def test_a_second_job_reads_s3_from_the_disk(tier: Tier) -> None:
    async with S3Server({"bucket/a.bin": CONTENT}) as server:
        config = FetchConfig(ca_file=server.ca_file, s3=S3Config(endpoint_url=server.url))
        first, second = await read_in_two_jobs(tier, "s3://bucket/a.bin", config)
    assert first > 4 * MIB - 100
    assert second < 10_000


@pytest.mark.usefixtures("aws_keys")
@pytest.mark.parametrize("named_by", ["configuration", "environment"])
async def test_s3_url_at_two_endpoints_is_two_objects(
    tier: Tier, monkeypatch: pytest.MonkeyPatch, named_by: str
) -> None:
    disk = DiskTier(tier.directory, 64 * MIB, min_free_bytes=0)
    same_tag = Fault(answer_headers={"ETag": '"0123-1"'})  # as of two multipart uploads: it is no digest of the content
    for content in (CONTENT, CONTENT[::-1]):
        async with S3Server({"bucket/a.bin": content}, fault=lambda _: same_tag) as server:
            monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
            s3 = S3Config(endpoint_url=server.url if named_by == "configuration" else None)
            async with (
                Fetcher(FetchConfig(ca_file=server.ca_file, s3=s3)) as fetcher,
                DiskReader(fetcher, disk) as reader,
            ):
                assert await reader.fetch("s3://bucket/a.bin", 0, MIB) == content[:MIB]
                assert await reader.fetch("s3://bucket/a.bin", 0, MIB) == content[:MIB]
            assert len(server.requests) == 1


async def test_hub_url_at_two_hubs_is_two_objects(tier: Tier) -> None:
    for _ in range(2):
        async with HubServer() as server:
            server.push("datasets/org/name", {"a.bin": CONTENT})
            config = FetchConfig(ca_file=server.ca_file, hub_endpoint=server.url, trust_env=False)
            first, second = await read_in_two_jobs(tier, "hf://datasets/org/name/a.bin", config)
        assert first > 4 * MIB - 100
        assert second < 10_000


async def test_a_second_job_reads_the_hub_from_the_disk(tier: Tier) -> None:
    async with HubServer(token="t") as server:
        server.push("datasets/org/name", {"a.bin": CONTENT})
        config = FetchConfig(ca_file=server.ca_file, hub_endpoint=server.url, tokens={"127.0.0.1": "t"})
        first, second = await read_in_two_jobs(tier, "hf://datasets/org/name/a.bin", config)
    assert first > 4 * MIB - 100
    assert second < 10_000
