"""s3:// urls: signed once, by region, for as long as it lasts; nothing of it in any message."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import subprocess
import sys
import threading
import traceback
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import anyio
import pytest
from moto.server import ThreadedMotoServer

from asyncfetch.config import FetchConfig, RetryConfig, S3Config, TimeoutConfig
from asyncfetch.errors import AccessDenied, ConfigError, FetchError, InvalidResponse, NotFound, install_command
from asyncfetch.fetch import Fetcher
from asyncfetch.fetch.transports.http import MAX_RESPONSE_BYTES
from asyncfetch.fetch.transports.s3 import S3Signer, bucket_and_key
from asyncfetch.ranges import ByteRange
from asyncfetch.testing import Fault, FaultEvery, FaultOnce, Keys, S3Server
from tests.fetch.conftest import s3_fetcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.fetch.conftest import FakeTime, LyingServer, Step

CONTENT = bytes(range(256)) * 400
SECRETS = ("X-Amz-Signature=", Keys().secret_key, "Security-Token=", Keys().access_key)

pytestmark = pytest.mark.usefixtures("aws_keys")


def signatures(server: S3Server) -> set[str]:
    return {parse_qs(urlsplit(request.target).query)["X-Amz-Signature"][0] for request in server.requests}


async def test_signature_serves_all_ranges_of_an_object() -> None:
    async with S3Server({"b/x": CONTENT, "b/y": CONTENT}) as server, s3_fetcher(server) as fetcher:

        async def read(start: int) -> None:
            assert await fetcher.fetch("s3://b/x", start, start + 100) == CONTENT[start : start + 100]

        async with anyio.create_task_group() as group:
            for start in range(0, 50_000, 1000):  # too far apart to come by one request
                group.start_soon(read, start)
        assert (len(server.requests), len(signatures(server))) == (50, 1)
        await fetcher.fetch("s3://b/y")
        assert len(signatures(server)) == 2


@pytest.mark.usefixtures("signing_clock")
async def test_signature_is_made_anew_before_it_expires(time: FakeTime) -> None:
    async with S3Server({"b/x": CONTENT}) as server, s3_fetcher(server, time, presign_seconds=600) as fetcher:
        await fetcher.fetch("s3://b/x", 0, 1)
        time.now += 500
        await fetcher.fetch("s3://b/x", 0, 1)
        assert len(signatures(server)) == 1
        time.now += 60
        await fetcher.fetch("s3://b/x", 0, 1)
        assert len(signatures(server)) == 2
        assert [request.status for request in server.requests] == [206] * 3


async def test_expired_signature_is_replaced_once(time: FakeTime) -> None:
    async with S3Server({"b/x": CONTENT}) as server, s3_fetcher(server, time, attempts=1) as fetcher:
        await fetcher.fetch("s3://b/x", 0, 1)
        server.keys = Keys(secret_key="another")
        time.now += 10
        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(_denied, fetcher)
        assert len(signatures(server)) <= 2
        server.keys = Keys()
        assert await fetcher.fetch("s3://b/x", 3, 9) == CONTENT[3:9]


async def _denied(fetcher: Fetcher) -> None:
    with pytest.raises(AccessDenied, match="SignatureDoesNotMatch"):
        await fetcher.fetch("s3://b/x", 0, 10)


@pytest.mark.parametrize(
    ("configured", "endpoint"),
    [
        (S3Config(), ""),
        (S3Config(region="eu-west-1"), ""),
        (S3Config(endpoint_url="https://s3.dualstack.eu-west-1.amazonaws.com/"), ""),
        (S3Config(region="cn-north-1"), "https://s3.cn-north-1.amazonaws.com.cn"),
        (S3Config(region="us-gov-west-1"), "https://s3.us-gov-west-1.amazonaws.com"),
        (S3Config(endpoint_url="https://minio.example.org:9000/"), "https://minio.example.org:9000"),
        (S3Config(anonymous=True, endpoint_url="https://s3.us-west-004.backblazeb2.com"),
         "https://s3.us-west-004.backblazeb2.com"),
    ],
)  # fmt: skip
async def test_endpoint_is_the_store_that_is_asked(configured: S3Config, endpoint: str) -> None:
    async with Fetcher(FetchConfig(s3=configured)) as fetcher:
        assert await fetcher.endpoint("s3://bucket/key") == endpoint
        assert await fetcher.endpoint("https://minio.example.org:9000/bucket/key") == ""
        assert fetcher.statistics().requests == 0


async def test_a_store_that_cannot_be_told_is_an_error_of_ours() -> None:
    async with Fetcher(FetchConfig(s3=S3Config(profile="nobody"))) as fetcher:
        with pytest.raises(ConfigError, match="nobody"):
            await fetcher.endpoint("s3://bucket/key")


async def test_a_fresh_signature_that_is_refused_is_not_tried_again() -> None:
    async with S3Server({"b/x": CONTENT}, keys=Keys(secret_key="another")) as server, s3_fetcher(server) as fetcher:
        await _denied(fetcher)
        assert len(server.requests) == 1


async def test_a_server_whose_clock_says_expired_gets_a_new_one(
    time: FakeTime, signing_clock: Callable[[], float]
) -> None:
    async with S3Server({"b/x": CONTENT}) as server, s3_fetcher(server, time, presign_seconds=600) as fetcher:
        server.clock_seconds = 300
        await fetcher.fetch("s3://b/x", 0, 1)
        time.now += 0.5
        server.clock_seconds = 700
        with pytest.raises(AccessDenied, match="AccessDenied"):  # so soon after it was found, it is believed
            await fetcher.fetch("s3://b/x", 0, 1)
        time.now += 400
        assert signing_clock() == 400.5
        assert await fetcher.fetch("s3://b/x", 3, 9) == CONTENT[3:9]
        assert [request.status for request in server.requests] == [206, 403, 403, 206]


async def test_a_bucket_of_another_region_is_followed_once() -> None:
    regions = {"far": "eu-central-1", "farther": "ap-south-1"}
    content = {"far/x": CONTENT, "far/y": CONTENT, "farther/x": CONTENT}
    async with S3Server(content, regions=regions) as server, s3_fetcher(server) as fetcher:
        assert await fetcher.fetch("s3://far/x") == CONTENT
        assert await fetcher.fetch("s3://far/y") == CONTENT
        assert [request.status for request in server.requests] == [400, 206, 206]
        assert [info.url for info in await fetcher.listdir("s3://farther")] == ["s3://farther/x"]
        assert [request.status for request in server.requests[3:]] == [400, 200]


@pytest.mark.parametrize("lost", [Fault.truncate(10), Fault.reset(10)])
async def test_a_refusal_whose_words_are_lost_is_asked_for_again(lost: Fault) -> None:
    regions = {"far": "eu-central-1"}
    async with (
        S3Server({"far/x": CONTENT}, regions=regions, fault=FaultOnce("/far/x", lost)) as server,
        s3_fetcher(server) as fetcher,
    ):
        assert await fetcher.fetch("s3://far/x") == CONTENT
        assert [request.status for request in server.requests] == [400, 400, 206]


async def test_a_refusal_without_words_is_asked_for_once_more() -> None:
    fault = Fault.status(400)
    async with S3Server({"b/x": CONTENT}, fault=lambda _: fault) as server, s3_fetcher(server) as fetcher:
        with pytest.raises(FetchError, match="without a reason") as caught:
            await fetcher.fetch("s3://b/x")
        assert (caught.value.status, caught.value.attempts, len(server.requests)) == (400, 2, 2)


@pytest.mark.parametrize(
    ("bucket", "settings", "base"),
    [
        ("bucket", {}, "https://bucket.s3.eu-west-1.amazonaws.com/k"),
        ("bucket", {"path_style": True}, "https://s3.eu-west-1.amazonaws.com/bucket/k"),
        ("dotted.bucket", {}, "https://s3.eu-west-1.amazonaws.com/dotted.bucket/k"),
        ("bucket", {"endpoint_url": "https://minio.example.org:9000"}, "https://minio.example.org:9000/bucket/k"),
        ("bucket", {"endpoint_url": "https://r2.example.org", "path_style": False}, "https://bucket.r2.example.org/k"),
        ("bucket", {"anonymous": True}, "https://bucket.s3.eu-west-1.amazonaws.com/k"),
    ],
)
async def test_signed_url_leads_to_its_bucket(bucket: str, settings: dict[str, Any], base: str) -> None:
    """No request is made: what counts is the url that would be asked."""
    signer = await S3Signer.open(S3Config(region="eu-west-1", **settings))
    try:
        signed = await signer.sign("get_object", {"Bucket": bucket, "Key": "k"}, None)
    finally:
        await signer.aclose()
    url = str(signed.url)
    assert url.partition("?")[0] == base
    assert ("checksum" in url.lower(), "X-Amz-Signature=" in url) == (False, "anonymous" not in settings)


async def test_many_readers_of_a_far_bucket_all_find_it() -> None:
    objects = {f"far/{number}": CONTENT for number in range(10)}
    async with S3Server(objects, regions={"far": "eu-west-1"}) as server, s3_fetcher(server, attempts=1) as fetcher:
        wanted = [ByteRange(f"s3://{path}", start, start + 10) for path in objects for start in range(0, 5000, 1000)]
        assert await fetcher.fetch_many(wanted) == [CONTENT[one.start : one.stop] for one in wanted]


async def test_a_region_that_is_none_is_not_believed() -> None:
    fault = Fault(answer_status=400, answer_headers={"x-amz-bucket-region": "evil.example.org/"})
    async with S3Server({"b/x": CONTENT}, fault=lambda _: fault) as server, s3_fetcher(server, attempts=1) as fetcher:
        with pytest.raises(FetchError):
            await fetcher.fetch("s3://b/x")
        assert len(server.requests) == 1


async def test_a_redirect_takes_no_secret_along() -> None:
    async with S3Server({"b/x": CONTENT}) as other, S3Server({}) as server:
        server._fault = FaultOnce("/b/x", Fault.redirect(f"{other.url}/b/x"))
        async with s3_fetcher(server, attempts=1) as fetcher:
            with pytest.raises(AccessDenied):
                await fetcher.fetch("s3://b/x")
        (request,) = other.requests
        assert request.target == "/b/x"
        assert not [name for name in request.headers if name.lower().startswith(("x-amz", "authorization", "cookie"))]


async def test_anonymous_requests_carry_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    async with S3Server({"b/x": CONTENT}, keys=None) as server, s3_fetcher(server, anonymous=True) as fetcher:
        assert await fetcher.fetch("s3://b/x") == CONTENT
        assert server.requests[0].target == "/b/x"
        assert [info.size for info in await fetcher.listdir("s3://b/")] == [len(CONTENT)]


@pytest.mark.parametrize("anonymous", [False, True])
async def test_the_requester_pays(anonymous: bool) -> None:
    keys = None if anonymous else Keys()
    async with S3Server({"b/x": CONTENT}, keys=keys, requester_pays=True) as server:
        async with s3_fetcher(server, requester_pays=True, anonymous=anonymous) as fetcher:
            assert await fetcher.fetch("s3://b/x") == CONTENT
            assert len(await fetcher.listdir("s3://b")) == 1
        async with s3_fetcher(server, anonymous=anonymous) as fetcher:
            with pytest.raises(AccessDenied):
                await fetcher.fetch("s3://b/x")


async def test_session_tokens_come_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a/b+c==")
    keys = Keys(session_token="a/b+c==")
    async with S3Server({"b/x": CONTENT}, keys=keys) as server, s3_fetcher(server) as fetcher:
        assert await fetcher.fetch("s3://b/x") == CONTENT


async def test_a_session_token_that_has_expired_is_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "old")
    async with S3Server({"b/x": CONTENT}, keys=Keys(session_token="new")) as server, s3_fetcher(server) as fetcher:
        with pytest.raises(AccessDenied, match=r"get new credentials \(ExpiredToken") as caught:
            await fetcher.fetch("s3://b/x")
        assert (caught.value.status, len(server.requests)) == (400, 1)


@pytest.mark.usefixtures("signing_clock")
async def test_temporary_credentials_that_expired_are_had_anew(
    monkeypatch: pytest.MonkeyPatch, time: FakeTime, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    (tmp_path / "config").write_text(f"[default]\ncredential_process = cat {tmp_path}/credentials.json\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))

    def issue(token: str) -> Keys:
        keys = Keys(session_token=token)
        soon = datetime.now(UTC) + timedelta(minutes=5)
        text = json.dumps({
            "Version": 1,
            "AccessKeyId": keys.access_key,
            "SecretAccessKey": keys.secret_key,
            "SessionToken": token,
            "Expiration": soon.isoformat(),
        })
        (tmp_path / "credentials.json").write_text(text)
        return keys

    async with S3Server({"b/x": CONTENT}, keys=issue("one")) as server, s3_fetcher(server, time) as fetcher:
        await fetcher.fetch("s3://b/x", 0, 1)
        server.keys = issue("two")
        time.now += 10
        assert await fetcher.fetch("s3://b/x", 3, 9) == CONTENT[3:9]
        assert [request.status for request in server.requests] == [206, 400, 206]
        time.now += 280  # a signature doesn't outlive its credentials
        await fetcher.fetch("s3://b/x", 3, 9)
        assert len(signatures(server)) == 3


async def test_profiles(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    path = f"{tmp_path}/credentials"
    with open(path, "w") as file:  # noqa: ASYNC230
        file.write(f"[me]\naws_access_key_id={Keys().access_key}\naws_secret_access_key={Keys().secret_key}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", path)
    async with S3Server({"b/x": CONTENT}) as server:
        async with s3_fetcher(server, profile="me") as fetcher:
            assert await fetcher.fetch("s3://b/x") == CONTENT
        async with s3_fetcher(server, profile="you") as fetcher:
            with pytest.raises(ConfigError, match="you"):
                await fetcher.fetch("s3://b/x")


@pytest.mark.parametrize("said_by", ["environment", "profile"])
async def test_the_region_is_resolved_where_none_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said_by: str
) -> None:
    profile = None
    if said_by == "environment":
        monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-3")
    else:
        keys = f"aws_access_key_id={Keys().access_key}\naws_secret_access_key={Keys().secret_key}\n"
        (tmp_path / "config").write_text(f"[profile me]\nregion=eu-west-3\n{keys}")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        profile = "me"
    async with S3Server({"b/x": CONTENT}) as server, s3_fetcher(server, profile=profile) as fetcher:
        assert await fetcher.fetch("s3://b/x") == CONTENT
    assert "eu-west-3" in repr(server.requests)


async def test_no_credentials_is_an_error_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    async with S3Server({"b/x": CONTENT}) as server, s3_fetcher(server) as fetcher:
        with pytest.raises(AccessDenied, match=r"AWS_PROFILE.*anonymous=True") as caught:
            await fetcher.fetch("s3://b/x", 1, 2)
    assert (caught.value.url, caught.value.start, server.requests) == ("s3://b/x", 1, [])


async def test_a_login_for_the_stores_host_is_not_a_second_signature() -> None:
    async with S3Server({"b/x": CONTENT}) as server:
        host = server.url.removeprefix("https://")
        config = FetchConfig(ca_file=server.ca_file, tokens={host: "t"}, s3=S3Config(endpoint_url=server.url))
        async with Fetcher(config) as fetcher:
            assert await fetcher.fetch("s3://b/x") == CONTENT


@pytest.mark.parametrize("key", ["a//b", "/a", "a/../b", "a b+c%20d", "q?x=1&y#z", "ü/é", "~!*'()", "a\\b"])
async def test_odd_keys(key: str) -> None:
    # A server that keeps to S3's rules finds the key in the path as it was sent.
    async with S3Server({f"b/{key}": CONTENT}) as server, s3_fetcher(server) as fetcher:
        assert await fetcher.fetch(f"s3://b/{key}", 5, 50) == CONTENT[5:50]
        assert (await fetcher.stat(f"s3://b/{key}")).url == f"s3://b/{key}"


@pytest.mark.parametrize("url", ["s3://", "s3:///key", "s3://b", "s3://b/", "s3://u:p@b/x", "s3://b?/x", "s3://.x/y"])
async def test_urls_that_name_no_object(url: str) -> None:
    async with Fetcher() as fetcher:
        with pytest.raises(ConfigError, match="s3://bucket/key") as caught:
            await fetcher.fetch(url)
    assert "u:p" not in str(caught.value)


def test_bucket_and_key() -> None:
    assert bucket_and_key("s3://b.c-d/e/f//g?h") == ("b.c-d", "e/f//g?h")


async def test_errors_logs_statistics_and_reprs_show_no_secret(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a-token-for-a-session")
    asyncio.get_running_loop().set_debug(True)
    caplog.set_level(logging.DEBUG)
    faults = {
        "/b/stalled": Fault.stall(10),
        "/b/broken": Fault.truncate(10),
        "/b/reset": Fault.reset(None),
        "/b/denied": Fault.status(403),
        "/b/gone": Fault.status(404),
        "/b/lost": Fault.redirect("https://127.0.0.1:1/x?X-Amz-Signature=abc"),
        "/b/down": Fault.redirect("http://127.0.0.1:1/x"),
        "/b/lies": Fault.wrong_content_range(),
        "/b/odd": Fault(answer_status=302, answer_headers={"Location": "ftp://x/?X-Amz-Signature=abc"}),
    }
    objects = {path.lstrip("/"): CONTENT for path in faults}
    shown = []
    keys = Keys(session_token="a-token-for-a-session")
    async with S3Server(objects, keys=keys, fault=lambda request: faults.get(request.path)) as server:
        config = FetchConfig(
            ca_file=server.ca_file,
            retry=RetryConfig(attempts=1),
            timeouts=TimeoutConfig(first_byte_seconds=0.5, stall_seconds=0.3),
            s3=S3Config(endpoint_url=server.url),
        )
        async with Fetcher(config) as fetcher:
            for path in faults:
                with pytest.raises(FetchError) as caught:
                    await fetcher.fetch(f"s3:/{path}", 0, 100)
                assert caught.value.url == f"s3:/{path}"
                shown += ["".join(traceback.format_exception(caught.value)), repr(caught.value)]
                shown.append(str(vars(pickle.loads(pickle.dumps(caught.value)))))
            shown += [repr(fetcher), repr(fetcher.statistics()), repr(config)]
        signed = [signature[:16] for signature in signatures(server)]
    assert "botocore" in {record.name.partition(".")[0] for record in caplog.records}
    text = "\n".join([*shown, *(record.getMessage() for record in caplog.records)])
    text = text.replace("=***", "")
    assert [secret for secret in (*SECRETS, *signed, "Signature=abc", "a-token-for") if secret in text] == []


@pytest.mark.parametrize("raw", [b"garbage\r\n\r\n", b"HTTP/1.1 206 OK\r\nContent-Length: x\r\n\r\n", b"HTTP/1.1 200"])
async def test_error_of_an_answer_that_is_no_http_shows_no_secret(
    raw: bytes, server: LyingServer, step: type[Step]
) -> None:
    server.every = lambda _: step(raw=raw, end="close")
    config = FetchConfig(s3=S3Config(endpoint_url=server.url("")), retry=RetryConfig(attempts=1))
    async with Fetcher(config) as fetcher:
        with pytest.raises(FetchError) as caught:
            await fetcher.fetch("s3://b/x", 0, 100)
    shown = "".join(traceback.format_exception(caught.value))
    assert [secret for secret in SECRETS if secret in shown] == []


async def test_listings_come_by_pages() -> None:
    objects = {f"b/p/{number:03}": bytes(number) for number in range(25)} | {"b/p/": b"", "b/p/d/x": b"", "b/q": b"1"}
    async with S3Server(objects, page_keys=10) as server, s3_fetcher(server) as fetcher:
        infos = await fetcher.listdir("s3://b/p")
        assert [info.size for info in infos] == [*range(25), 0]
        assert infos[-1].url == "s3://b/p/d/"
        assert len(server.requests) == 3
        assert [info.url for info in await fetcher.listdir("s3://b")] == ["s3://b/p/", "s3://b/q"]


async def test_empty_folder_of_a_console_is_an_empty_directory() -> None:
    async with S3Server({"b/d/": b"", "b/d-1": b"1", "b/d.x": b"1"}) as server, s3_fetcher(server) as fetcher:
        assert [info.url for info in await fetcher.listdir("s3://b")] == ["s3://b/d/", "s3://b/d-1", "s3://b/d.x"]
        for url in ("s3://b/d", "s3://b/d/"):
            assert await fetcher.listdir(url) == []
        with pytest.raises(NotFound, match="nothing is below"):
            await fetcher.listdir("s3://b/d/d")


async def test_a_key_with_slashes_side_by_side_is_found_by_going_down() -> None:
    keys = ["a/x", "a//y", "a///z", "/r", "//s"]
    async with S3Server({f"b/{key}": b"1" for key in keys}) as server, s3_fetcher(server) as fetcher:
        found: list[str] = []
        prefixes = ["s3://b"]
        for _ in range(6):
            for info in await fetcher.listdir(prefixes.pop()):
                (prefixes if info.url.endswith("/") else found).append(info.url)
    assert prefixes == []
    assert sorted(found) == sorted(f"s3://b/{key}" for key in keys)


async def test_listings_are_retried_and_refused_in_words() -> None:
    async with S3Server({"b/p/x": b""}) as server, s3_fetcher(server) as fetcher:
        server._fault = FaultOnce("/b", Fault.status(503))
        assert len(await fetcher.listdir("s3://b/p/")) == 1
        with pytest.raises(NotFound, match="nothing is below") as caught:
            await fetcher.listdir("s3://b/none")
        assert (caught.value.url, caught.value.status, caught.value.attempts) == ("s3://b/none", 200, 1)
        assert caught.value.host == server.url.removeprefix("https://")


@pytest.mark.parametrize(
    "page",
    [
        "<html>",
        "<html/>",
        '<?xml version="1.0" encoding="none"?><x/>',
        '<?xml version="1.0" encoding="utf-7"?><x/>',
        *(
            f"<ListBucketResult>{entry}</ListBucketResult>"
            for entry in (
                *(
                    f"<Contents><Key>d/x</Key><Size>{size}</Size></Contents>"
                    for size in ("", "-1", "1e9", "1_0", "\u0661", "9" * 19, "1" * 5000)
                ),
                *(f"<Contents><Key>{key}</Key><Size>5</Size></Contents>" for key in ("", "x", "/d/x", "d", "e/x")),
                "<Contents/>",
                *(f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>" for name in ("", "x/", "d/", "e/")),
            )
        ),
    ],
)
async def test_a_listing_that_is_none(page: str, server: LyingServer, step: type[Step], time: FakeTime) -> None:
    body = page.encode()
    server.every = lambda _: step(status=200, headers={"Content-Length": str(len(body))}, body=body)
    config = FetchConfig(s3=S3Config(endpoint_url=server.url("")))
    async with Fetcher(config, _clock=time.clock()) as fetcher:
        with pytest.raises(InvalidResponse, match="endpoint") as caught:
            await fetcher.listdir("s3://b/d")
    assert (caught.value.url, caught.value.host) == ("s3://b/d", f"127.0.0.1:{server.port}")
    assert (caught.value.status, caught.value.attempts) == (200, 2)


async def test_a_page_too_long_to_be_one(server: LyingServer, step: type[Step], time: FakeTime) -> None:
    body = bytes(MAX_RESPONSE_BYTES + 1)
    server.every = lambda _: step(status=200, headers={"Content-Length": str(len(body))}, body=body)
    async with Fetcher(FetchConfig(s3=S3Config(endpoint_url=server.url(""))), _clock=time.clock()) as fetcher:
        with pytest.raises(InvalidResponse, match=f"more than {MAX_RESPONSE_BYTES} bytes") as caught:
            await fetcher.listdir("s3://b")
    assert (caught.value.url, caught.value.host) == ("s3://b", f"127.0.0.1:{server.port}")
    assert (caught.value.status, caught.value.attempts) == (200, 2)


async def test_a_listing_is_asked_for_once_more(server: LyingServer, step: type[Step], time: FakeTime) -> None:
    page = b"<ListBucketResult><Contents><Key>x</Key><Size>5</Size></Contents></ListBucketResult>"
    server.will(step(status=200, headers={"Content-Length": "6"}, body=b"<html>"))
    server.every = lambda _: step(status=200, headers={"Content-Length": str(len(page))}, body=page)
    async with Fetcher(FetchConfig(s3=S3Config(endpoint_url=server.url(""))), _clock=time.clock()) as fetcher:
        assert [info.size for info in await fetcher.listdir("s3://b")] == [5]


async def test_right_bytes_or_an_error_whatever_the_store_does(time: FakeTime) -> None:
    fault = FaultEvery(3, Fault.reset(1000))
    async with S3Server({"b/x": CONTENT}, fault=fault) as server, s3_fetcher(server, time) as fetcher:
        for start in range(0, 60_000, 2000):
            assert await fetcher.fetch("s3://b/x", start, start + 2000) == CONTENT[start : start + 2000]


async def test_no_thread_stays_behind() -> None:
    before = threading.active_count()
    async with S3Server({"b/x": CONTENT}) as server:
        async with s3_fetcher(server) as fetcher:
            await fetcher.fetch("s3://b/x")
            assert [thread.name for thread in threading.enumerate() if "s3" in thread.name]
        assert not [thread.name for thread in threading.enumerate() if "s3" in thread.name]
    assert threading.active_count() <= before + 2  # anyio's own, which end with the loop


async def test_closing_while_credentials_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A metadata service that doesn't answer holds up nobody who leaves."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.delenv(name)
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener:
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{port}/")
        monkeypatch.setenv("AWS_METADATA_SERVICE_TIMEOUT", "60")
        config = FetchConfig(s3=S3Config(endpoint_url="http://127.0.0.1:1"))
        with anyio.fail_after(5):
            async with Fetcher(config) as fetcher:
                with anyio.move_on_after(1.0) as scope:
                    await fetcher.fetch("s3://b/x")
        assert scope.cancelled_caught


def test_a_missing_extra_is_an_error_with_the_command() -> None:
    program = """
import sys; sys.modules["aiobotocore"] = None
import anyio, asyncfetch as af
async def main():
    async with af.Fetcher() as fetcher:
        try: await fetcher.fetch("s3://b/x")
        except af.MissingDependency as error: print(error)
anyio.run(main)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert install_command("s3") in ended.stdout


@pytest.mark.parametrize("settings", [{"presign_seconds": 0}, {"presign_seconds": 700_000}, {"endpoint_url": "h:9000"}])
def test_configurations_that_can_not_work(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        S3Config(**settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


async def test_objects_of_motos_server_are_listed_and_read(moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What aiobotocore itself put there, listed and read; the endpoint comes from the environment."""
    from aiobotocore.session import get_session

    keys = ["d/a b+c.bin", "d/ü%20.bin", "d/sub/x", *(f"d/n{number:04}" for number in range(25))]
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "10")
    with anyio.fail_after(15):
        async with get_session().create_client("s3", region_name="eu-west-1", endpoint_url=moto) as client:
            place = {"LocationConstraint": "eu-west-1"}
            with suppress(client.exceptions.BucketAlreadyOwnedByYou):  # on another loop
                await client.create_bucket(Bucket="bucket", CreateBucketConfiguration=place)
            for key in keys:
                await client.put_object(Bucket="bucket", Key=key, Body=CONTENT[: len(key)])
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", moto)
        async with Fetcher(FetchConfig(s3=S3Config(region="eu-west-1"))) as fetcher:
            infos = await fetcher.listdir("s3://bucket/d")
            expected = [f"s3://bucket/{key}" for key in keys if "/sub/" not in key] + ["s3://bucket/d/sub/"]
            assert [info.url for info in infos] == sorted(expected)
            for key in keys[:3]:
                assert await fetcher.fetch(f"s3://bucket/{key}") == CONTENT[: len(key)]
                info = await fetcher.stat(f"s3://bucket/{key}")
                assert info.size == len(key)
            listed = {info.url: info.etag for info in infos}
            assert listed["s3://bucket/d/ü%20.bin"] == (await fetcher.stat("s3://bucket/d/ü%20.bin")).etag
            with pytest.raises(NotFound, match="NoSuchKey"):
                await fetcher.fetch("s3://bucket/none")


async def test_credentials_that_were_missing_are_looked_for_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = Keys()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    async with S3Server({"b/x": CONTENT}, keys=keys) as server, s3_fetcher(server) as fetcher:
        for _ in range(2):
            with pytest.raises(AccessDenied, match="log in"):
                await fetcher.fetch("s3://b/x")
        (tmp_path / "credentials").write_text(
            f"[default]\naws_access_key_id = {keys.access_key}\naws_secret_access_key = {keys.secret_key}\n"
        )
        assert await fetcher.fetch("s3://b/x") == CONTENT
