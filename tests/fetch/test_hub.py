"""hf:// urls: one commit per revision, one question per file, the token for the Hub alone."""

from __future__ import annotations

import base64
import json
import logging
import math
import traceback
from itertools import count
from typing import TYPE_CHECKING

import anyio
import pytest
from yarl import URL

from asyncfetch.config import FetchConfig, RetryConfig
from asyncfetch.errors import AccessDenied, ConfigError, FetchError, InvalidResponse, NotFound, ObjectChanged, Throttled
from asyncfetch.fetch import Fetcher
from asyncfetch.fetch.retry import pause_seconds
from asyncfetch.fetch.transports.hub import HubFile, signed_seconds
from asyncfetch.testing import Fault, FaultEvery, FaultOnce, HubServer
from asyncfetch.testing.contents import ContentAnswer

if TYPE_CHECKING:
    from pathlib import Path

    from asyncfetch.testing.faults import ServedRequest
    from tests.fetch.conftest import FakeTime, LyingServer, Step

BIG = bytes(range(256)) * 400
SMALL = b"small"
REPOSITORY = "datasets/org/name"
URL_TEXT = "hf://datasets/org/name/big.bin"


def fetcher_for(hub: HubServer, time: FakeTime | None = None, **settings: object) -> Fetcher:
    settings = {"trust_env": False, **settings}
    config = FetchConfig(ca_file=hub.ca_file, hub_endpoint=hub.url, **settings)  # type: ignore[arg-type]
    return Fetcher(config, _clock=None if time is None else time.clock())


def filled(**options: object) -> HubServer:
    hub = HubServer(**options)  # type: ignore[arg-type]
    hub.push(REPOSITORY, {"big.bin": BIG, "small.txt": SMALL, "dir/a.bin": BIG[:1000], "dir/b.txt": b"b"})
    return hub


def paths(hub: HubServer) -> list[str]:
    return [request.path for request in hub.hub.requests]


async def test_hub_is_asked_once_per_revision_and_per_file() -> None:
    async with filled() as hub, fetcher_for(hub, max_span_bytes=0) as fetcher:

        async def read(start: int) -> None:
            assert await fetcher.fetch(URL_TEXT, start, start + 100) == BIG[start : start + 100]

        async with anyio.create_task_group() as group:
            for start in range(0, 5000, 100):
                group.start_soon(read, start)
        commit = hub.files(REPOSITORY, "main")
        assert commit is not None
        assert paths(hub) == [
            "/api/datasets/org/name/revision/main",
            f"/datasets/org/name/resolve/{commit[0]}/big.bin",
        ]
        assert len(hub.cdn.requests) == 50
        await fetcher.fetch("hf://datasets/org/name@main/dir/a.bin")
        assert len(paths(hub)) == 3


async def test_small_files_come_from_the_hub_itself() -> None:
    async with filled(token="t") as hub, fetcher_for(hub, tokens={"127.0.0.1": "t"}) as fetcher:
        assert await fetcher.fetch("hf://datasets/org/name/small.txt") == SMALL
        assert await fetcher.fetch("hf://datasets/org/name/small.txt", 1, 3) == SMALL[1:3]
        assert hub.cdn.requests == []


@pytest.mark.parametrize("kind", ["", "models/", "spaces/"])
async def test_models_and_spaces(kind: str) -> None:
    async with HubServer() as hub, fetcher_for(hub) as fetcher:
        hub.push(f"{kind or 'models/'}org/name", {"big.bin": BIG, "x": SMALL})
        assert await fetcher.fetch(f"hf://{kind}org/name/big.bin", 5, 50) == BIG[5:50]
        assert [info.size for info in await fetcher.listdir(f"hf://{kind}org/name")] == [len(BIG), 5]


async def test_a_revision_stays_what_it_was() -> None:
    async with filled() as hub, fetcher_for(hub) as fetcher:
        await fetcher.fetch(URL_TEXT, 0, 1)
        hub.push(REPOSITORY, {"big.bin": BIG[::-1], "dir/a.bin": b"new" * 100})
        assert await fetcher.fetch(URL_TEXT, 5, 50) == BIG[5:50]
        assert await fetcher.fetch("hf://datasets/org/name/dir/a.bin") == BIG[:1000]
        async with fetcher_for(hub) as another:
            assert await another.fetch(URL_TEXT, 5, 50) == BIG[::-1][5:50]


async def test_a_commit_needs_no_question() -> None:
    async with filled() as hub, fetcher_for(hub) as fetcher:
        commit = hub.push(REPOSITORY, {"big.bin": BIG}, "refs/pr/1")
        assert await fetcher.fetch(f"hf://datasets/org/name@{commit}/big.bin") == BIG
        assert len(paths(hub)) == 1
        assert await fetcher.fetch("hf://datasets/org/name@refs/pr/1/big.bin") == BIG
        assert await fetcher.fetch("hf://datasets/org/name@refs%2Fpr%2F1/big.bin") == BIG


async def test_an_expired_url_is_replaced_in_one_flight(time: FakeTime) -> None:
    async with filled() as hub, fetcher_for(hub, time) as fetcher:
        await fetcher.fetch(URL_TEXT, 0, 1)
        hub.revoke()
        time.now += 10
        before = len(paths(hub))

        async def read(start: int) -> None:
            assert await fetcher.fetch(URL_TEXT, start, start + 100) == BIG[start : start + 100]

        async with anyio.create_task_group() as group:
            for start in range(0, 3000, 100):
                group.start_soon(read, start)
        assert len(paths(hub)) == before + 1
        assert fetcher.statistics().retries == 0


async def test_a_file_that_left_its_cdn_is_asked_for_anew(time: FakeTime) -> None:
    async with filled() as hub, fetcher_for(hub, time) as fetcher:
        await fetcher.fetch(URL_TEXT, 0, 1)
        hub.cdn._fault = lambda _: Fault.status(404)
        time.now += 10
        before = len(paths(hub))
        with pytest.raises(NotFound):
            await fetcher.fetch(URL_TEXT, 5, 50)
        assert len(paths(hub)) == before + 1
        hub.cdn._fault = None
        assert await fetcher.fetch(URL_TEXT, 5, 50) == BIG[5:50]


async def test_a_url_is_not_used_to_its_end(time: FakeTime) -> None:
    async with filled(url_seconds=600) as hub, fetcher_for(hub, time) as fetcher:
        await fetcher.fetch(URL_TEXT, 0, 1)
        time.now += 500
        await fetcher.fetch(URL_TEXT, 0, 1)
        assert len(paths(hub)) == 2
        time.now += 50
        await fetcher.fetch(URL_TEXT, 0, 1)
        assert len(paths(hub)) == 3
        assert [request.status for request in hub.cdn.requests] == [206] * 3


async def test_a_refusal_that_is_meant_ends(time: FakeTime) -> None:
    async with filled(cdn_fault=lambda _: Fault.status(403)) as hub, fetcher_for(hub, time) as fetcher:
        for _ in range(3):
            time.now += 100
            with pytest.raises(AccessDenied) as caught:
                await fetcher.fetch(URL_TEXT, 0, 10)
            assert caught.value.url == URL_TEXT
        assert len(hub.cdn.requests) <= 5


async def test_the_token_is_the_hubs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", " hf_secret\n")
    async with filled(token="hf_secret") as hub, fetcher_for(hub, trust_env=True) as fetcher:
        assert await fetcher.fetch(URL_TEXT, 5, 50) == BIG[5:50]
        assert len(await fetcher.listdir("hf://datasets/org/name")) == 3
        assert {request.headers.get("Authorization") for request in hub.hub.requests} == {"Bearer hf_secret"}
        assert not [request for request in hub.cdn.requests if "Authorization" in request.headers]
        assert "hf_secret" not in repr(fetcher) + repr(fetcher.config) + repr(vars(fetcher))


@pytest.mark.parametrize("variable", ["HF_TOKEN_PATH", "HF_HOME", "XDG_CACHE_HOME"])
async def test_the_token_file(variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "huggingface").mkdir()
    for path in (tmp_path / "token", tmp_path / "huggingface" / "token"):
        path.write_text("hf_secret\n")
    monkeypatch.setenv(variable, str(tmp_path / "token" if variable == "HF_TOKEN_PATH" else tmp_path))
    monkeypatch.setenv("HF_TOKEN", "\n")  # which huggingface_hub takes for none, too
    async with filled(token="hf_secret") as hub:
        monkeypatch.setenv("HF_ENDPOINT", f"{hub.url}/")
        async with Fetcher(FetchConfig(ca_file=hub.ca_file)) as fetcher:
            assert await fetcher.fetch(URL_TEXT, 5, 50) == BIG[5:50]
        monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
        async with Fetcher(FetchConfig(ca_file=hub.ca_file)) as fetcher:
            with pytest.raises(AccessDenied, match=r"RepoNotFound.* set HF_TOKEN, or run `hf auth login`") as refused:
                await fetcher.fetch(URL_TEXT)
            assert "FetchConfig" not in str(refused.value)  # which a user of the Hub has never heard of


async def test_endpoint_is_the_hub_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for named, endpoint in (
        ("", ""),
        ("https://huggingface.co/", ""),
        ("https://hub.example.org/", "https://hub.example.org"),
        ("https://hub.bücher.example/ü/", "https://hub.xn--bcher-kva.example/%C3%BC"),
    ):
        monkeypatch.setenv("HF_ENDPOINT", named)
        async with Fetcher() as fetcher:
            assert await fetcher.endpoint(URL_TEXT) == endpoint
            assert fetcher.statistics().requests == 0


@pytest.mark.parametrize("endpoint", ["https://me:hidden@hub.example.org", "https://hub.example.org?token=hidden"])
async def test_an_endpoint_with_a_secret_is_refused_without_showing_it(
    monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    async with Fetcher() as fetcher:
        with pytest.raises(ConfigError, match="must not hold a password or a query: set HF_TOKEN") as caught:
            await fetcher.fetch(URL_TEXT)
    assert "hidden" not in "".join(traceback.format_exception(caught.value))


async def test_a_token_that_can_be_none_is_refused_without_showing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret hf_secret")
    async with filled(token="hf_secret") as hub, fetcher_for(hub, trust_env=True) as fetcher:
        with pytest.raises(ConfigError, match=r"HF_TOKEN, .* must be printable ASCII without spaces") as caught:
            await fetcher.fetch(URL_TEXT, 5, 50)
        assert "hf_secret" not in str(caught.value)
        assert not hub.hub.requests


async def test_a_token_of_the_configuration_beats_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "wrong")
    hub = filled(token="right")
    async with hub, fetcher_for(hub, trust_env=True, tokens={"127.0.0.1": "right"}) as fetcher:
        assert await fetcher.fetch(URL_TEXT, 0, 5) == BIG[:5]


async def test_the_quota_is_named_when_it_is_too_long_to_wait_for(time: FakeTime) -> None:
    async with filled(resolver_quota=1) as hub, fetcher_for(hub, time) as fetcher:
        assert await fetcher.fetch(URL_TEXT, 5, 50) == BIG[5:50]
        with pytest.raises(Throttled, match="301 s") as caught:
            await fetcher.fetch("hf://datasets/org/name/dir/a.bin")
        assert caught.value.url == "hf://datasets/org/name/dir/a.bin"
        assert await fetcher.fetch(URL_TEXT, 60, 70) == BIG[60:70]  # no question, no quota


async def test_a_short_quota_is_waited_for(time: FakeTime) -> None:
    async with filled() as hub, fetcher_for(hub, time) as fetcher:
        fault = Fault(answer_status=429, answer_headers={"RateLimit": '"api";r=12;t=9, "resolvers";r=0;t=20'})
        hub.hub._fault = FaultEvery(2, fault)
        assert await fetcher.fetch(URL_TEXT, 5, 50) == BIG[5:50]
        assert [int(seconds) for seconds in time.sleeps] == [21]


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"RateLimit": '"api";r=0;t=55'}, 56.0),
        ({"RateLimit": '"api"; r=0 ; t=5, "resolvers";r=0;t=7'}, 8.0),
        ({"RateLimit": '"api";r=3;t=55'}, None),
        ({"RateLimit": '"api";r=10;t=55'}, None),
        ({"RateLimit": "nonsense"}, None),
        ({"RateLimit": '"api";r=0;t=55', "Retry-After": "3"}, 3.0),
    ],
)
def test_pause_that_a_server_asks_for(headers: dict[str, str], seconds: float | None) -> None:
    assert pause_seconds(headers, wall_now=0.0) == seconds


@pytest.mark.parametrize(("budget", "attempts", "left"), [(0, 5, 0), (9, 2, 8)])
async def test_a_failed_question_is_paid_for_once(budget: int, attempts: int, left: int, time: FakeTime) -> None:
    errors: list[FetchError] = []
    retry = RetryConfig(budget=budget, attempts=attempts)
    hub = filled(fault=lambda _: Fault.status(500))
    async with hub, fetcher_for(hub, time, retry=retry, max_span_bytes=0) as fetcher:

        async def read(start: int) -> None:
            with pytest.raises(FetchError) as caught:
                await fetcher.fetch(URL_TEXT, start, start + 100)
            errors.append(caught.value)

        async with anyio.create_task_group() as group:
            for start in range(0, 500, 100):
                group.start_soon(read, start)
        assert [host.retry_budget for host in fetcher.statistics().hosts.values()] == [left]
    assert sorted(error.start or 0 for error in errors) == [0, 100, 200, 300, 400]
    assert [str(error).count("; not repeated") for error in errors] == [int(budget == 0)] * 5
    assert budget or len(paths(hub)) == 1


async def test_missing_things_are_named() -> None:
    async with filled() as hub, fetcher_for(hub) as fetcher:
        for url, code in [
            ("hf://datasets/org/name/none", "EntryNotFound"),
            ("hf://datasets/org/none/x", "RevisionNotFound"),
            ("hf://datasets/org/name@none/x", "RevisionNotFound"),
        ]:
            with pytest.raises(NotFound, match=code) as caught:
                await fetcher.fetch(url)
            assert caught.value.url == url
        with pytest.raises(NotFound):
            await fetcher.listdir("hf://datasets/org/name/none")


async def test_the_linked_tag_is_the_version_whichever_cdn_answers(time: FakeTime) -> None:
    async with filled() as hub, fetcher_for(hub, time) as fetcher:
        first = await fetcher.stat(URL_TEXT)
        assert first.etag is not None
        hub.cdn._fault = lambda _: Fault.headers({"ETag": '"another-cdn"'})
        assert await fetcher.fetch(URL_TEXT, 5, 50) == BIG[5:50]
        assert (await fetcher.stat(URL_TEXT)).etag == first.etag
        assert not [request for request in hub.cdn.requests if "If-Match" in request.headers]
        listed = {info.url: info.etag for info in await fetcher.listdir("hf://datasets/org/name")}
        assert listed[URL_TEXT] == first.etag


async def test_another_size_is_another_object() -> None:
    async with filled() as hub, fetcher_for(hub) as fetcher:
        await fetcher.stat(URL_TEXT)
        for path in list(hub._blobs):
            hub._blobs[path] += b"x"
        with pytest.raises(ObjectChanged):
            await fetcher.fetch(URL_TEXT, 5, 50)


async def test_a_url_that_signs_its_range_is_used_for_no_other() -> None:
    async with filled() as hub, fetcher_for(hub) as fetcher:
        signed = hub.hub._signed  # type: ignore[attr-defined]
        hub.hub._signed = lambda content: f"{signed(content)}&X-Xet-Signed-Range=bytes%3D0-9"  # type: ignore[attr-defined]
        await fetcher.fetch(URL_TEXT, 5, 50)
        await fetcher.fetch(URL_TEXT, 60, 70)
        asked = [request.method for request in hub.hub.requests if "/resolve/" in request.path]
        assert asked == ["HEAD", "GET", "GET"]


async def test_a_question_that_redirects_with_a_long_body_is_not_read(time: FakeTime) -> None:
    async with filled() as hub, fetcher_for(hub, time) as fetcher:
        path = "/api/datasets/org/name/revision/main"
        moved = {"Location": f"{path}?moved", "Content-Length": "999999999"}
        hub.hub._fault = FaultOnce(path, Fault(answer_status=302, answer_headers=moved, ending="stall", after_bytes=5))
        with anyio.fail_after(5):
            assert await fetcher.fetch(URL_TEXT, 5, 50) == BIG[5:50]


async def test_renamed_repositories_are_followed_on_the_hub(time: FakeTime) -> None:
    async with filled(token="t") as hub, fetcher_for(hub, time, tokens={"127.0.0.1": "t"}) as fetcher:
        found = hub.files(REPOSITORY, "main")
        assert found is not None
        old = f"/datasets/old/name/resolve/{found[0]}/big.bin"
        hub.hub._fault = FaultOnce(old, Fault.redirect(old.replace("/old/", "/org/"), 307))
        assert await fetcher.fetch(f"hf://datasets/old/name@{found[0]}/big.bin", 5, 50) == BIG[5:50]


async def test_listings_come_by_pages_of_the_hub_only() -> None:
    async with filled(page_entries=1) as hub, fetcher_for(hub) as fetcher:
        infos = await fetcher.listdir("hf://datasets/org/name")
        base = "hf://datasets/org/name/"
        assert [info.url.removeprefix(base) for info in infos] == ["big.bin", "dir/", "small.txt"]
        assert [info.url for info in await fetcher.listdir(f"{base}dir/")] == [f"{base}dir/a.bin", f"{base}dir/b.txt"]
        hub.hub._fault = lambda _: Fault.headers({"Link": '<https://evil.example.org/x>; rel="next"'})
        with pytest.raises(InvalidResponse, match="another host"):
            await fetcher.listdir(base)
        hub.hub._fault = lambda _: Fault.headers({"Link": '<ftp://h/x>; rel="next"'})
        with pytest.raises(InvalidResponse, match="no http url") as caught:
            await fetcher.listdir(base)
        error = caught.value
        assert (error.url, error.host, error.status) == (base, hub.url.removeprefix("https://"), 200)


@pytest.mark.parametrize("times", [1, 2])
async def test_an_answer_that_is_no_json_is_asked_for_once_more(
    times: int, time: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[FetchError] = []
    async with filled() as hub, fetcher_for(hub, time, max_span_bytes=0) as fetcher:
        api, asked = hub.hub._api, count(1)  # type: ignore[attr-defined]

        def answer(record: ServedRequest, *parts: str) -> ContentAnswer:
            sent = ContentAnswer(200, {"Content-Length": "6"}, text=b"<html>")
            return sent if next(asked) <= times or times > 1 else api(record, *parts)

        monkeypatch.setattr(hub.hub, "_api", answer)

        async def read(start: int) -> None:
            try:
                assert await fetcher.fetch(URL_TEXT, start, start + 100) == BIG[start : start + 100]
            except FetchError as error:
                errors.append(error)

        async with anyio.create_task_group() as group:
            for start in range(0, 300, 100):
                group.start_soon(read, start)
    host = hub.url.removeprefix("https://")
    assert len({id(error) for error in errors}) == len(errors) == (3 if times > 1 else 0)
    assert [(error.url, error.host, error.attempts) for error in errors] == [(URL_TEXT, host, 2)] * len(errors)
    assert sorted((error.start, error.stop) for error in errors) == [(0, 100), (100, 200), (200, 300)][: len(errors)]
    assert all("HF_ENDPOINT" in str(error) for error in errors)


FILE = {"type": "file", "path": "dir/x", "size": 5, "oid": "1"}


@pytest.mark.parametrize(
    "page",
    [
        "<html>",
        "{}",
        "null",
        "5",
        "[null]",
        *(
            json.dumps([FILE | wrong])
            for wrong in (
                {"size": math.inf},
                {"size": math.nan},
                {"size": -1},
                {"size": 10**18},
                {"size": 1.5},
                {"size": True},
                {"size": None},
                {"path": "../x"},
                {"path": "/dir/x"},
                {"path": "dir/../x"},
                {"path": "dir/.."},
                {"path": "dir/"},
                {"path": "dir"},
                {"path": "dir/x/y"},
                {"path": "other/x"},
                {"path": "../x", "type": "directory"},
                {"path": 5},
                {"oid": 5},
                {"lfs": None},
            )
        ),
        json.dumps([FILE]).replace("5", "1" * 5000),
        json.dumps([FILE]).replace('"dir/x"', "[" * 900 + "]" * 900),
    ],
)
async def test_a_page_that_is_no_listing(page: str, server: LyingServer, step: type[Step], time: FakeTime) -> None:
    server.every = lambda _: step(status=200, headers={"Content-Length": str(len(page))}, body=page.encode())
    config = FetchConfig(hub_endpoint=server.url(""), trust_env=False)
    url = f"hf://datasets/org/name@{'0' * 40}/dir"
    async with Fetcher(config, _clock=time.clock()) as fetcher:
        with pytest.raises(InvalidResponse, match="HF_ENDPOINT") as caught:
            await fetcher.listdir(url)
    assert (caught.value.url, caught.value.host) == (url, f"127.0.0.1:{server.port}")
    assert (caught.value.status, caught.value.attempts) == (200, 2)


@pytest.mark.parametrize("body", [b"<html>", b"{}", b'{"sha": "main"}', b"[]", b"[" * 10_000])
async def test_an_endpoint_that_is_no_hub(body: bytes, server: object) -> None:
    from tests.fetch.conftest import LyingServer, Step

    assert isinstance(server, LyingServer)
    server.every = lambda _: Step(status=200, headers={"Content-Length": str(len(body))}, body=body)
    config = FetchConfig(hub_endpoint=server.url(""), trust_env=False, retry=RetryConfig(attempts=1))
    async with Fetcher(config) as fetcher:
        with pytest.raises(InvalidResponse) as caught:
            await fetcher.fetch(URL_TEXT)
    assert str(caught.value)


async def test_errors_and_logs_show_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    shown: list[str] = []
    for fault in [Fault.status(403), Fault.reset(None), Fault.truncate(3), Fault.short(), Fault.redirect("http://h/")]:
        hub = filled(token="hf_secret", cdn_fault=lambda _, fault=fault: fault)
        async with hub, fetcher_for(hub, tokens={"127.0.0.1": "hf_secret"}, retry=RetryConfig(attempts=1)) as fetcher:
            with pytest.raises(FetchError) as caught:
                await fetcher.fetch(URL_TEXT, 0, 100)
            shown += ["".join(traceback.format_exception(caught.value)), repr(fetcher.statistics())]
            assert caught.value.url == URL_TEXT
    text = "\n".join([*shown, *(record.getMessage() for record in caplog.records)])
    assert "hf_secret" not in text
    assert "Signature=" not in text.replace("Signature=***", "")


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("hf://datasets/o/n/p/q.bin", ("datasets", "o/n", "main", "p/q.bin")),
        ("hf://o/n", ("models", "o/n", "main", "")),
        ("hf://models/o/n/", ("models", "o/n", "main", "")),
        ("hf://spaces/o/n@v1.0/x", ("spaces", "o/n", "v1.0", "x")),
        ("hf://datasets/o/n@a%2Fb/x", ("datasets", "o/n", "a/b", "x")),
        ("hf://datasets/o/n@refs/convert/parquet/x/y", ("datasets", "o/n", "refs/convert/parquet", "x/y")),
        ("hf://datasets/o/n@refs/pr/12", ("datasets", "o/n", "refs/pr/12", "")),
        ("hf://datasets/o/n/a@b", ("datasets", "o/n", "main", "a@b")),
    ],
)
def test_hub_url_names_repository_revision_and_path(url: str, parts: tuple[str, str, str, str]) -> None:
    assert HubFile.parse(url) == HubFile(*parts)


@pytest.mark.parametrize("url", ["hf://", "hf://o", "hf://datasets/o", "hf://o/n@/x", "hf://o/n/../x", "hf://../n/x"])
def test_urls_that_name_no_repository(url: str) -> None:
    with pytest.raises(ConfigError):
        HubFile.parse(url)


def _policy(end: float, text: str = "") -> str:
    text = text or json.dumps({"Statement": [{"Condition": {"DateLessThan": {"AWS:EpochTime": end}}}]})
    return base64.b64encode(text.encode()).decode().translate(str.maketrans("+=/", "-_~"))


@pytest.mark.parametrize(
    ("query", "seconds"),
    [
        ({"X-Amz-Date": "20260101T000000Z", "X-Amz-Expires": "3600"}, 3600.0),
        ({"X-Goog-Date": "20260101T000000Z", "X-Goog-Expires": "60"}, 60.0),
        ({"Expires": "1767225700"}, 100.0),
        ({"Expires": "1767225000"}, 0.0),
        ({"Policy": _policy(1767225610)}, 10.0),
        ({"Policy": _policy(1767225610), "Expires": "1767225605"}, 5.0),
        ({"Policy": "%%%"}, None),
        ({"Policy": _policy(10**400)}, None),
        ({"Policy": _policy(math.inf)}, None),
        ({"Policy": _policy(math.nan), "Expires": "1767225605"}, 5.0),
        ({"Policy": _policy(0, "[" * 4000)}, None),
        ({"X-Amz-Date": "yesterday", "X-Amz-Expires": "3600"}, None),
        ({"X-Amz-Date": "20260101T000000Z"}, None),
        ({"Expires": "soon"}, None),
        ({}, None),
    ],
)
def test_signature_expires_as_its_url_says(query: dict[str, str], seconds: float | None) -> None:
    url = URL("https://cdn/x").with_query(query)
    assert signed_seconds(url, served_at=1767225600.0) == seconds


BUCKET = "buckets/org/name"
IN_BUCKET = "hf://buckets/org/name/dir/a%20b ü.bin"
BUCKET_FILES = {
    "dir/a%20b ü.bin": BIG,
    "dir/c.bin": BIG[:3000],
    "dir/sub/d.bin": SMALL,
    "dir": SMALL,
    "directory/e.bin": SMALL,
    "f.bin": SMALL,
}


def bucket(**options: object) -> HubServer:
    hub = HubServer(**options)  # type: ignore[arg-type]
    hub.push(BUCKET, BUCKET_FILES)
    return hub


async def test_a_buckets_files_are_read_by_one_question_each() -> None:
    async with bucket(token="t") as hub, fetcher_for(hub, tokens={"127.0.0.1": "t"}, max_span_bytes=0) as fetcher:

        async def read(start: int) -> None:
            assert await fetcher.fetch(IN_BUCKET, start, start + 100) == BIG[start : start + 100]

        async with anyio.create_task_group() as group:
            for start in range(0, 5000, 100):
                group.start_soon(read, start)
        assert await fetcher.fetch("hf://buckets/org/name/f.bin") == SMALL
        assert [request.target for request in hub.hub.requests] == [
            "/buckets/org/name/resolve/dir/a%2520b%20%C3%BC.bin",
            "/buckets/org/name/resolve/f.bin",
        ]
        assert len(hub.cdn.requests) == 51
        with pytest.raises(NotFound, match="EntryNotFound"):
            await fetcher.fetch("hf://buckets/org/name/none")
        with pytest.raises(NotFound):
            await fetcher.fetch("hf://buckets/org/none/f.bin")


@pytest.mark.parametrize("page_entries", [1, 1000])
async def test_a_bucket_is_listed_by_directories(page_entries: int) -> None:
    base = "hf://buckets/org/name"
    async with bucket(page_entries=page_entries) as hub, fetcher_for(hub) as fetcher:
        for path, names in (
            ("", ["dir", "dir/", "directory/", "f.bin"]),
            ("/dir", ["dir/a%20b ü.bin", "dir/c.bin", "dir/sub/"]),
            ("/dir/sub/", ["dir/sub/d.bin"]),
        ):
            infos = await fetcher.listdir(f"{base}{path}")
            assert sorted(info.url for info in infos) == [f"{base}/{name}" for name in names]
            for info in infos:
                if not info.url.endswith("/"):
                    stat = await fetcher.stat(info.url)
                    assert (info.size, info.etag) == (stat.size, stat.etag)
        for missing in (f"{base}/di", f"{base}/f.bin", "hf://buckets/org/none"):
            with pytest.raises(NotFound):
                await fetcher.listdir(missing)


@pytest.mark.parametrize("signs_ranges", [False, True])
async def test_a_buckets_file_stays_the_version_first_seen(
    signs_ranges: bool, time: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bucket(url_seconds=600) as hub, fetcher_for(hub, time) as fetcher:
        if signs_ranges:
            signed = hub.hub._signed  # type: ignore[attr-defined]
            monkeypatch.setattr(hub.hub, "_signed", lambda content: f"{signed(content)}&X-Xet-Signed-Range=bytes%3D0-9")
        first = await fetcher.stat(IN_BUCKET)
        assert await fetcher.fetch(IN_BUCKET, 0, 10) == BIG[:10]
        hub.push(BUCKET, {"dir/a%20b ü.bin": BIG[::-1]})
        if not signs_ranges:
            assert await fetcher.fetch(IN_BUCKET, 10, 20) == BIG[10:20]  # the url is that version's until it expires
        time.now += 700
        with pytest.raises(ObjectChanged, match=r"was .* and is"):
            await fetcher.fetch(IN_BUCKET, 20, 30)
        assert await fetcher.fetch(IN_BUCKET, 20, 30) == BIG[::-1][20:30]
        assert (await fetcher.stat(IN_BUCKET)).etag != first.etag


def test_a_bucket_has_no_revisions() -> None:
    assert HubFile.parse(IN_BUCKET).path == "dir/a%20b ü.bin"
    with pytest.raises(ConfigError, match="names a revision, which buckets don't have"):
        HubFile.parse("hf://buckets/org/name@main/f.bin")


@pytest.mark.parametrize("entry", [{"type": "file", "path": "f", "size": 1}, {"type": "file", "path": 3}])
async def test_a_buckets_listing_without_hashes_is_none(entry: dict[str, object]) -> None:
    async with bucket() as hub, fetcher_for(hub, retry=RetryConfig(attempts=1)) as fetcher:
        body = json.dumps([entry]).encode()
        hub.hub._api = lambda *_: ContentAnswer(200, {"Content-Length": str(len(body))}, text=body)  # type: ignore[attr-defined]
        with pytest.raises(InvalidResponse, match="listing"):
            await fetcher.listdir("hf://buckets/org/name")


async def test_a_buckets_file_without_its_hash_is_not_read() -> None:
    async with bucket() as hub, fetcher_for(hub, retry=RetryConfig(attempts=1)) as fetcher:
        hub.hub._fault = lambda _: Fault(answer_status=302, answer_headers={"Location": hub.cdn.url})
        with pytest.raises(InvalidResponse, match="X-Xet-Hash"):
            await fetcher.fetch("hf://buckets/org/name/f.bin")
