"""What a merge to S3 is tested with."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

import pytest

from asyncfetch.config import FetchConfig, RetryConfig, S3Config
from asyncfetch.testing import Keys

if TYPE_CHECKING:
    from pathlib import Path

    from asyncfetch.testing import S3Server

OUT = "s3://bucket/sets/out"


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A temporary folder of this test's own, and the environment of somebody whose keys S3Server knows."""
    set_keys(monkeypatch)
    path = tmp_path_factory.mktemp("scratch")
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


def set_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that S3Server knows, in the environment and nothing else of that kind."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", Keys().access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", Keys().secret_key)


def config(server: S3Server) -> FetchConfig:
    s3 = S3Config(endpoint_url=server.url, upload_part_bytes=20_000)
    return FetchConfig(ca_file=server.ca_file, trust_env=False, retry=RetryConfig(attempts=1), s3=s3)


def below(content: dict[str, bytes], prefix: str = "bucket/sets/out/") -> dict[str, bytes]:
    return {name.removeprefix(prefix): data for name, data in content.items() if name.startswith(prefix)}
