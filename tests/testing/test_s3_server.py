"""The S3 server and the Hub of the tests refuse what the real ones refuse; judged by independent clients."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from contextlib import closing
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import botocore.session
import pytest
from botocore import UNSIGNED
from botocore.config import Config

from asyncfetch.testing import HubServer, Keys, S3Server

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CONTENT = bytes(range(256))


def get(
    url: str, ca_file: str | None, headers: Mapping[str, str] | None = None
) -> tuple[int, http.client.HTTPMessage, bytes]:
    parts = urlsplit(url)
    context = ssl.create_default_context(cafile=ca_file)
    connection = http.client.HTTPSConnection(parts.netloc, context=context)
    try:
        connection.request("GET", f"{parts.path}?{parts.query}", headers=dict(headers or {}))
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server({"bucket/a b/ü+%.bin": CONTENT}) as server:
        yield server


def presigned(server: S3Server, *, keys: Keys = Keys(), region: str = "us-east-1", seconds: int = 60) -> str:  # noqa: B008
    client = botocore.session.Session().create_client(
        "s3",
        region_name=region,
        endpoint_url=server.url,
        aws_access_key_id=keys.access_key,
        aws_secret_access_key=keys.secret_key,
        aws_session_token=keys.session_token,
        config=Config(signature_version="s3v4"),
    )
    parameters = {"Bucket": "bucket", "Key": "a b/ü+%.bin"}
    url: str = client.generate_presigned_url("get_object", Params=parameters, ExpiresIn=seconds)
    return url


def test_request_signed_by_botocore_is_served(server: S3Server) -> None:
    status, headers, body = get(presigned(server), server.ca_file, {"Range": "bytes=3-9"})
    assert (status, headers["Content-Range"], body) == (206, "bytes 3-9/256", CONTENT[3:10])


def change(url: str, old: str, new: str) -> str:
    assert old in url
    return url.replace(old, new)


def test_a_forged_signature_is_refused(server: S3Server) -> None:
    url = presigned(server)
    last = url[-1]
    for forged in (
        url[:-1] + ("0" if last != "0" else "1"),
        change(url, "X-Amz-Expires=60", "X-Amz-Expires=61"),
        change(url, "a%20b", "a%20c"),
        url + "&versionId=1",
    ):
        status, _, body = get(forged, server.ca_file)
        assert (status, b"SignatureDoesNotMatch" in body) == (403, True), forged
    assert get(url.partition("?")[0], server.ca_file)[0] == 403


@pytest.mark.parametrize(
    ("keys", "region", "status", "code"),
    [
        (Keys(secret_key="x"), "us-east-1", 403, b"SignatureDoesNotMatch"),
        (Keys(access_key="x"), "us-east-1", 403, b"InvalidAccessKeyId"),
        (Keys(session_token="x"), "us-east-1", 400, b"ExpiredToken"),
        (Keys(), "eu-west-1", 400, b"<Region>us-east-1</Region>"),
    ],
)
def test_other_keys_and_regions_are_refused(
    server: S3Server, keys: Keys, region: str, status: int, code: bytes
) -> None:
    got, _, body = get(presigned(server, keys=keys, region=region), server.ca_file)
    assert got == status
    assert code in body


def test_a_signature_expires(server: S3Server) -> None:
    url = presigned(server, seconds=60)
    server.clock_seconds = 58.0
    assert get(url, server.ca_file)[0] == 200
    server.clock_seconds = 62.0
    status, _, body = get(url, server.ca_file)
    assert (status, b"Request has expired" in body) == (403, True)
    server.clock_seconds = -1000.0
    assert b"not valid yet" in get(url, server.ca_file)[2]
    server.clock_seconds = 0.0


def test_headers_that_were_not_signed_are_refused(server: S3Server) -> None:
    assert get(presigned(server), server.ca_file, {"x-amz-acl": "public"})[0] == 403
    assert get(presigned(server), server.ca_file, {"Authorization": "Bearer x"})[0] == 400


def test_errors_are_s3s(server: S3Server) -> None:
    status, headers, body = get(presigned(server), server.ca_file, {"Range": "bytes=256-"})
    assert (status, headers["Content-Range"]) == (416, None)
    assert b"<ActualObjectSize>256</ActualObjectSize>" in body


def test_listings_go_on_behind_any_key_and_have_markers() -> None:
    objects = {"b/d/x": b"1", "b/d/": b"12", "b/\x01<&%+": b"3", "b/z": b"4"}
    with S3Server(objects, keys=None, page_keys=1) as server:
        unsigned = Config(signature_version=UNSIGNED)
        client = botocore.session.Session().create_client(
            "s3", region_name="us-east-1", endpoint_url=server.url, verify=server.ca_file, config=unsigned
        )
        with closing(client):
            pages = list(client.get_paginator("list_objects_v2").paginate(Bucket="b", Delimiter="/"))
    assert [one["Key"] for page in pages for one in page.get("Contents", [])] == ["\x01<&%+", "z"]
    assert [one["Prefix"] for page in pages for one in page.get("CommonPrefixes", [])] == ["d/"]


def test_the_hubs_cdn_wants_its_signature_and_no_token() -> None:
    with HubServer(url_seconds=60) as hub:
        commit = hub.push("datasets/o/n", {"x": CONTENT})
        url = f"{hub.url}/datasets/o/n/resolve/{commit}/x"
        status, headers, _ = get(url, hub.ca_file)
        target = headers["Location"]
        assert (status, headers["X-Repo-Commit"]) == (302, commit)
        assert get(target, hub.ca_file)[2] == CONTENT
        assert get(target, hub.ca_file, {"Authorization": "Bearer x"})[0] == 403
        assert get(change(target, "Signature=", "Signature=0"), hub.ca_file)[0] == 403
        assert get(change(target, "Expires=", "Expires=1"), hub.ca_file)[0] == 403
        hub.clock_seconds = 61
        assert get(target, hub.ca_file)[0] == 403
        hub.clock_seconds = 0
        hub.revoke()
        assert get(target, hub.ca_file)[0] == 403


def test_the_hub_lists_branches() -> None:
    with HubServer() as hub:
        commits = {branch: hub.push("datasets/o/n", {"x": branch.encode()}, branch) for branch in ("main", "v2.1")}
        hub.push("datasets/o/other", {"x": CONTENT})
        status, _, body = get(f"{hub.url}/api/datasets/o/n/refs", hub.ca_file)
        listed = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": sha} for name, sha in commits.items()]
        assert (status, json.loads(body)) == (200, {"branches": listed, "converts": [], "tags": []})


def test_the_hubs_quota() -> None:
    with HubServer(resolver_quota=1) as hub:
        commit = hub.push("datasets/o/n", {"x": CONTENT})
        url = f"{hub.url}/datasets/o/n/resolve/{commit}/x"
        assert get(url, hub.ca_file)[0] == 302
        status, headers, _ = get(url, hub.ca_file)
        assert (status, headers["RateLimit"]) == (429, '"resolvers";r=0;t=300')
        assert time.time() == pytest.approx(hub.now, abs=5)
