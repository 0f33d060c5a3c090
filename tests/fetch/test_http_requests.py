"""What goes out on the wire: the same on connections of ours and by aiohttp's session."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import asyncfetch
from asyncfetch.config import RetryConfig
from asyncfetch.config.secrets import Secrets
from asyncfetch.errors import ConfigError, FetchError, ObjectChanged

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncfetch.fetch import Fetcher
    from tests.fetch.conftest import LyingServer, Request
    from tests.fetch.conftest import Step as StepType

CONTENT = bytes(range(256))


@pytest.fixture(params=["direct", "session"])
def way(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


@pytest.mark.parametrize("place", ["/x", "/", "", "/a%2Fb/c d?q=1&r=%20+é#top", "/x?X-Amz-Signature=a%2Bb"])
async def test_a_request_is_what_the_session_would_send(
    fetcher_with: Callable[..., Fetcher], any_server: LyingServer, ca_file: str, place: str
) -> None:
    def serve(request: Request) -> None:
        any_server.objects[request.path], any_server.etags[request.path] = CONTENT, '"a"'

    any_server.every = serve
    headers = {"user-agent": "another", "X-Own": "größer\tals"}
    for direct_bodies in (True, False):
        async with fetcher_with(
            ca_file=ca_file, direct_bodies=direct_bodies, headers={"127.0.0.1": headers}
        ) as fetcher:
            for start in (1, 2):  # without and with If-Match
                assert await fetcher.fetch(any_server.url(place), start, 3) == CONTENT[start:3]
    ours, theirs = any_server.requests[:2], any_server.requests[2:]
    assert [(one.method, one.path, one.headers) for one in ours] == [
        (one.method, one.path, one.headers) for one in theirs
    ]
    assert "if-match" in ours[1].headers


async def test_a_request_is_not_made_by_aiohttp_where_it_need_not_be(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.put("/x", CONTENT)
    async with fetcher_with(direct_bodies=True) as fetcher:
        monkeypatch.setattr("aiohttp.ClientSession._request", None)
        for start in range(20):
            assert await fetcher.fetch(url, start, start + 1) == CONTENT[start : start + 1]
    assert server.connections == 1


@pytest.mark.parametrize("header", ["a\r\nX-Smuggled: b", "a\nb", "a\0b", "a\x7f"])
@pytest.mark.parametrize("place", [0, 1])
async def test_no_header_smuggles_another_one(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, header: str, place: int
) -> None:
    own = {header: "a"} if place == 0 else {"X-Own": header}
    url = server.put("/x", CONTENT)
    async with fetcher_with(headers=Secrets("headers", {"127.0.0.1": own})) as fetcher:  # as if it weren't checked
        with pytest.raises(ConfigError, match=r"control character|headers"):
            await fetcher.fetch(url, 0, 1)
    assert server.requests == []


async def test_a_request_is_made_anew_for_another_version(
    fetcher_with: Callable[..., Fetcher], server: LyingServer
) -> None:
    url = server.put("/x", CONTENT)
    tags = []
    async with fetcher_with() as fetcher:
        for version in range(3):
            tags.append(server.etags["/x"])
            for start in range(3):
                assert await fetcher.fetch(url, start, start + 1) == CONTENT[start : start + 1]
            server.put("/x", CONTENT, etag=f'"{version}"')
            with pytest.raises(ObjectChanged):
                await fetcher.fetch(url, 0, 1)
    sent = [request.headers.get("if-match") for request in server.requests]
    assert sent == [tag for version in tags for tag in (None, version, version, version)]


async def test_request_is_not_repeated_by_aiohttp(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType]
) -> None:
    """aiohttp sends what is idempotent a second time; on a new connection that is an attempt of the retry layer's."""
    url = server.put("/x", CONTENT)
    async with fetcher_with(retry=RetryConfig(attempts=1)) as fetcher:
        for _ in range(2):  # on a new connection
            server.will(step(silent="reset"))
            with pytest.raises(FetchError) as caught:
                await fetcher.fetch(url, 0, 1)
            assert caught.value.attempts == 1
    assert len(server.requests) == 2


async def test_host_of_unplain_answers_is_asked_by_the_session(
    fetcher_with: Callable[..., Fetcher], any_server: LyingServer, ca_file: str, step: type[StepType]
) -> None:
    url = any_server.put("/x", CONTENT)
    chunked = step(headers={"Content-Length": None, "Transfer-Encoding": "chunked"}, body=_in_chunks)
    async with fetcher_with(ca_file=ca_file, direct_bodies=True) as fetcher:
        for answers, requests in ([chunked, chunked], 2), ([chunked], 1), ([], 1), ([], 1):
            any_server.will(*answers)
            before = len(any_server.requests)
            assert await fetcher.fetch(url, 5, 100) == CONTENT[5:100]
            assert len(any_server.requests) - before == requests
        now = fetcher.statistics()
        assert (now.retries, now.errors) == (0, 0)


def test_engine_uses_nothing_private_of_aiohttp() -> None:
    package = Path(asyncfetch.__file__).parent
    pattern = r"aiohttp\.(connector|client_proto|client_reqrep|_)|aiohttp import .*\b_"
    found = subprocess.run(
        ["grep", "-rnE", "--include=*.py", pattern, package], capture_output=True, text=True, check=False
    )
    assert found.stdout == ""


def _in_chunks(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
