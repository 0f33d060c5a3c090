"""Redirects: each hop gets what belongs to its origin, and nothing else."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from traceback import format_exception
from typing import TYPE_CHECKING, Any

import pytest

from asyncfetch.errors import AccessDenied, ConfigError, FetchError, InvalidResponse, NotFound, ObjectChanged
from asyncfetch.fetch import ask_server

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from asyncfetch.fetch import Fetcher
    from tests.fetch.conftest import LyingServer
    from tests.fetch.conftest import Step as StepType


def use_netrc(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    path = folder / "netrc"
    path.write_text(text)
    path.chmod(0o600)
    monkeypatch.setenv("NETRC", str(path))


def redirect(step: type[StepType], location: str, status: int = 302, **headers: str) -> StepType:
    return step(status=status, headers={"Location": location, "Content-Length": "0", **headers}, body=b"")


def paths(server: LyingServer) -> list[str]:
    """Those asked for since the last time."""
    asked = [request.path for request in server.requests]
    server.requests.clear()
    return asked


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_followed(fetcher: Fetcher, server: LyingServer, step: type[StepType], status: int) -> None:
    server.put("/target", b"0123456789")
    server.will(redirect(step, "target", status))
    assert bytes(await fetcher.fetch(server.url("/x"), 2, 5)) == b"234"
    assert [request.path for request in server.requests] == ["/x", "/target"]
    assert fetcher.statistics().redirects == 1
    assert server.connections == 1


async def test_secrets_stay_with_their_host(
    fetcher_with: Callable[..., Fetcher],
    server: LyingServer,
    lying_server: type[LyingServer],
    step: type[StepType],
) -> None:
    async with lying_server(host="127.0.0.2") as other:
        other.put("/y", b"0123456789")
        server.will(redirect(step, other.url("/y")))
        config = {
            "tokens": {"127.0.0.1": "secret"},
            "headers": {
                "127.0.0.1": {"X-Amz-Security-Token": "secret"},
                f"127.0.0.2:{other.port}": {"X-Other": "theirs"},
            },
        }
        async with fetcher_with(**config) as fetcher:
            assert bytes(await fetcher.fetch(server.url("/x"), 2, 5)) == b"234"
        assert server.requests[0].headers["authorization"] == "Bearer secret"
        assert server.requests[0].headers["x-amz-security-token"] == "secret"
        assert other.requests[0].headers["x-other"] == "theirs"
        assert "secret" not in str(other.requests[0].headers)


@pytest.mark.parametrize(
    "settings",
    [
        {"tokens": {"127.0.0.1": "secret"}},
        {"headers": {"127.0.0.1": {"Authorization": "secret"}}},
        {"headers": {"127.0.0.1": {"Cookie": "secret"}}},
        {"headers": {"127.0.0.1": {"X-Amz-Security-Token": "secret"}}},
    ],
    ids=["token", "authorization", "cookie", "header"],
)
async def test_bare_hosts_secrets_follow_no_redirect_to_another_port(
    fetcher_with: Callable[..., Fetcher],
    server: LyingServer,
    lying_server: type[LyingServer],
    step: type[StepType],
    settings: dict[str, object],
) -> None:
    async with lying_server() as other, fetcher_with(**settings) as fetcher:
        url = other.put("/y", b"0123456789")
        server.will(redirect(step, "/again"), redirect(step, url))
        assert bytes(await fetcher.fetch(server.url("/x"), 2, 5)) == b"234"
        assert bytes(await fetcher.fetch(url, 2, 5)) == b"234"
        assert all("secret" in str(request.headers) for request in server.requests)
        redirected, asked = other.requests
        assert "secret" not in str(redirected.headers)
        assert "secret" in str(asked.headers)


async def test_bare_hosts_secrets_follow_no_upgrade_to_another_port(
    fetcher_with: Callable[..., Fetcher],
    server: LyingServer,
    tls_server: LyingServer,
    step: type[StepType],
    ca_file: str,
) -> None:
    server.will(redirect(step, tls_server.put("/y", b"0123456789")))
    headers = {"127.0.0.1": {"X-Key": "secret"}}
    async with fetcher_with(ca_file=ca_file, headers=headers, tokens={"127.0.0.1": "secret"}) as fetcher:
        assert bytes(await fetcher.fetch(server.url("/x"), 2, 5)) == b"234"
    assert "secret" not in str(tls_server.requests[0].headers)


async def test_a_login_of_netrc_stays_with_the_origin_asked(
    fetcher_with: Callable[..., Fetcher],
    server: LyingServer,
    lying_server: type[LyingServer],
    step: type[StepType],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    use_netrc(monkeypatch, tmp_path, "machine 127.0.0.1 login u password p\n")
    async with lying_server() as other, fetcher_with(trust_env=True) as fetcher:
        server.will(redirect(step, other.put("/y", b"0123456789")))
        await fetcher.fetch(server.url("/x"), 2, 5)
        assert server.requests[0].headers["authorization"] == "Basic dTpw"
        assert "authorization" not in other.requests[0].headers


async def test_netrcs_default_goes_to_nobody(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_netrc(monkeypatch, tmp_path, "machine elsewhere.invalid login u password p\ndefault login u password p\n")
    async with fetcher_with(trust_env=True) as fetcher:
        await fetcher.fetch(server.put("/x", b"0123456789"), 2, 5)
    assert "authorization" not in server.requests[0].headers


async def test_a_netrc_that_cant_be_parsed_is_told_without_its_words(
    fetcher_with: Callable[..., Fetcher], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_netrc(monkeypatch, tmp_path, "machine h login u password correct hidden\n")
    with pytest.raises(ConfigError, match="/netrc near line 2 can't be parsed: mend it, or set ") as caught:
        await fetcher_with(trust_env=True).__aenter__()
    assert "hidden" not in "".join(format_exception(caught.value))


@pytest.mark.parametrize("blank", ["%20", " "])
async def test_userinfo_stays_with_its_origin_and_out_of_messages(
    fetcher: Fetcher, server: LyingServer, lying_server: type[LyingServer], step: type[StepType], blank: str
) -> None:
    async with lying_server(host="127.0.0.2") as other:
        server.will(redirect(step, "/again"), redirect(step, other.url("/y")))
        other.will(step(status=403))
        with pytest.raises(AccessDenied) as caught:
            await fetcher.fetch(server.url("/x").replace("://", f"://user:pass{blank}word@"), 2, 5)
        assert [request.headers["authorization"] for request in server.requests] == ["Basic dXNlcjpwYXNzIHdvcmQ="] * 2
        assert "authorization" not in other.requests[0].headers
        assert "pass" not in str(caught.value)
        assert caught.value.host == f"127.0.0.2:{other.port}"


async def test_hops_of_a_redirect_pass_the_limiters_of_their_hosts(
    fetcher: Fetcher, server: LyingServer, lying_server: type[LyingServer], step: type[StepType]
) -> None:
    async with lying_server(host="127.0.0.2") as other:
        other.put("/y", b"0123456789")
        server.every = lambda _: redirect(step, other.url("/y"))
        await fetcher.fetch(server.url("/x"), 2, 5)
        hosts = fetcher.statistics().hosts
        assert {origin: host.peak_in_flight for origin, host in hosts.items()} == {
            server.url(""): 1,
            other.url(""): 1,
        }


async def test_a_loop_ends(fetcher: Fetcher, server: LyingServer, step: type[StepType]) -> None:
    server.every = lambda _: redirect(step, "/x")
    with pytest.raises(InvalidResponse, match="max_redirects=10") as caught:
        await fetcher.fetch(server.url("/x"), 2, 5)
    assert len(server.requests) == 11
    assert caught.value.status == 302
    with pytest.raises(InvalidResponse, match="max_redirects=10") as caught:
        await ask_server(fetcher, "GET", server.url("/x"))
    assert caught.value.status == 302


@pytest.mark.parametrize("every", [True, False])
async def test_a_loop_that_may_want_its_cookie_says_so(
    fetcher: Fetcher, server: LyingServer, step: type[StepType], every: bool
) -> None:
    """As CDNs and logins have it: back to the same url, until the cookie comes with the request."""
    wall = redirect(step, "/wall")
    gate = redirect(step, "/x", 302, **{"Set-Cookie": "seen=secret; Path=/"})
    url = server.put("/x", b"0123456789")
    server.every = lambda request: (
        None if request.headers.get("cookie") == "seen=secret" else wall if request.path == "/x" and not every else gate
    )
    with pytest.raises(InvalidResponse, match=r"max_redirects=10 .*set a cookie.*headers=\{host: \{'Cookie'") as caught:
        await fetcher.fetch(url, 2, 5)
    assert "secret" not in str(caught.value)
    with pytest.raises(InvalidResponse, match="set a cookie"):
        await ask_server(fetcher, "GET", server.url("/wall"))


async def test_the_cookie_that_a_loop_wants_ends_it(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType]
) -> None:
    gate = redirect(step, "/x", 302, **{"Set-Cookie": "seen=1"})
    server.every = lambda request: None if request.headers.get("cookie") == "seen=1" else gate
    async with fetcher_with(headers={"127.0.0.1": {"Cookie": "seen=1"}}) as fetcher:
        assert bytes(await fetcher.fetch(server.put("/x", b"0123456789"), 2, 5)) == b"234"


LOCATIONS = {
    "/%7Eu/a%2Fb/%c3%a9?s=%7e%2b+&x": "/%7Eu/a%2Fb/%c3%a9?s=%7e%2b+&x",
    "/raw/\xc3\xa9%20%7e?\xff=\xfe": "/raw/%C3%A9%20%7e?%FF=%FE",
    "/a b/%zz/100%": "/a%20b/%zz/100%",
    "http://HOST/raw/../\xe9//%2e%2e/x": "/raw/../%E9//%2e%2e/x",
    "//HOST/a/./b": "/a/./b",
    "next": "/d%2F1/\x7e/e//next".replace("\x7e", "~"),
    "../up/./%41": "/d%2F1/~/e/up/%41",
    "?only=query": "/d%2F1/~/e//x?only=query",
    "..": "/d%2F1/~/e/",
    "/x#frag\xe9": "/x",
    "\r\n /folded": "/folded",
}
"""Bytes of Location, as latin-1 has them, and what is to be asked for."""


@pytest.mark.parametrize("line_end", ["\r\n", "\n"])
async def test_the_bytes_of_a_location_stay_as_they_are(fetcher_with: Callable[..., Fetcher], line_end: str) -> None:
    """Asked by sockets of its own, since the other server decodes what it is asked for."""
    asked: list[str] = []
    location = ""

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                asked.append((await reader.readuntil(b"\r\n\r\n")).split(b" ")[1].decode())
                lines = ["HTTP/1.1 206 x", "Content-Range: bytes 0-0/1", "Content-Length: 1", "", "x"]
                if asked[-1] == "/d%2F1/~/e//x?old=1":
                    lines = ["HTTP/1.1 302 x", f"Location: {location}", "Content-Length: 0", "", ""]
                writer.write(line_end.join(lines).encode("latin-1"))
        writer.close()

    async with await asyncio.start_server(converse, "127.0.0.1") as listening, fetcher_with() as fetcher:
        host = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        for given, expected in LOCATIONS.items():
            asked.clear()
            location = given.replace("HOST", host)
            assert bytes(await fetcher.fetch(f"http://{host}/d%2F1/~/e//x?old=1", 0, 1)) == b"x"
            assert list(dict.fromkeys(asked))[1:] == [expected], given


async def test_https_is_never_downgraded(
    fetcher_with: Callable[..., Fetcher],
    server: LyingServer,
    tls_server: LyingServer,
    step: type[StepType],
    ca_file: str,
) -> None:
    tls_server.will(redirect(step, server.url("/x")))
    async with fetcher_with(ca_file=ca_file) as fetcher:
        with pytest.raises(InvalidResponse, match="plain http"):
            await fetcher.fetch(tls_server.url("/x"), 2, 5)
    assert server.requests == []


async def test_a_redirect_with_a_long_body_is_not_read(
    fetcher: Fetcher, server: LyingServer, step: type[StepType]
) -> None:
    server.put("/y", b"0123456789")
    headers: dict[str, str | None] = {"Location": "/y", "Content-Length": "1000000000"}
    server.will(step(status=302, headers=headers, body=b"x" * 1000, end="stall"))
    assert bytes(await fetcher.fetch(server.url("/x"), 2, 5)) == b"234"


async def test_no_cookie_is_kept(fetcher: Fetcher, server: LyingServer, step: type[StepType]) -> None:
    url = server.put("/x", b"0123456789")
    server.will(step(headers={"Set-Cookie": "a=b"}))
    await fetcher.fetch(url, 0, 1)
    await fetcher.fetch(url, 1, 2)
    assert "cookie" not in server.requests[1].headers


async def test_headers_of_every_request(fetcher: Fetcher, server: LyingServer) -> None:
    await fetcher.fetch(server.put("/x", b"0123456789"), 2, 5)
    await fetcher.fetch(server.url("/x"), 3, 6)
    first, second = (request.headers for request in server.requests)
    assert (first["accept-encoding"], first["range"]) == ("identity", "bytes=2-4")
    assert "if-match" not in first
    assert second["if-match"] == server.etags["/x"]


async def test_proxy_and_netrc_come_from_the_environment(
    fetcher_with: Callable[..., Fetcher],
    server: LyingServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    use_netrc(monkeypatch, tmp_path, "machine data.invalid login u password p\n")
    monkeypatch.setenv("http_proxy", server.url("").replace("://", "://me:pw@"))
    monkeypatch.setenv("no_proxy", "direct.invalid")
    server.put("http://data.invalid/x", b"0123456789")
    async with fetcher_with(trust_env=True) as fetcher:
        assert bytes(await fetcher.fetch("http://data.invalid/x", 2, 5)) == b"234"
        with pytest.raises(FetchError, match=r"direct\.invalid"):
            await fetcher.fetch("http://direct.invalid/x", 2, 5)
    assert [request.path for request in server.requests] == ["http://data.invalid/x"]
    assert server.requests[0].headers["proxy-authorization"] == "Basic bWU6cHc="
    assert server.requests[0].headers["authorization"] == "Basic dTpw"


# --- permanent ones


@pytest.mark.parametrize("status", [301, 308])
async def test_a_permanent_redirect_is_followed_once(
    fetcher: Fetcher, server: LyingServer, step: type[StepType], status: int
) -> None:
    server.put("/y", b"0123456789")
    server.will(redirect(step, "/y", status))
    for start in range(3):
        assert bytes(await fetcher.fetch(server.url("/x"), start, start + 2)) == b"0123456789"[start : start + 2]
    assert paths(server) == ["/x", "/y", "/y", "/y"]


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (302, {}),
        (303, {}),
        (307, {}),
        (301, {"cache-control": "no-store"}),
        (301, {"Cache-Control": "max-age=3600"}),
        (308, {"Expires": "Thu, 01 Jan 1970 00:00:00 GMT"}),
        (308, {"Pragma": "no-cache"}),
        (301, {"Vary": "Range"}),
    ],
)
async def test_any_other_redirect_is_followed_anew(
    fetcher: Fetcher, server: LyingServer, step: type[StepType], status: int, headers: dict[str, str]
) -> None:
    server.put("/y", b"0123456789")
    server.every = lambda request: redirect(step, "/y", status, **headers) if request.path == "/x" else None
    for start in range(2):
        await fetcher.fetch(server.url("/x"), start, start + 2)
    assert paths(server) == ["/x", "/y"] * 2


@pytest.mark.parametrize(
    ("statuses", "again"),
    [((301, 308), ["/z"]), ((301, 302), ["/y", "/z"]), ((302, 301), ["/x", "/y", "/z"])],
)
async def test_permanent_redirect_behind_a_temporary_is_followed_anew(
    fetcher: Fetcher, server: LyingServer, step: type[StepType], statuses: tuple[int, int], again: list[str]
) -> None:
    server.put("/z", b"0123456789")
    hops = {"/x": redirect(step, "/y", statuses[0]), "/y": redirect(step, "/z", statuses[1])}
    server.every = lambda request: hops.get(request.path)
    await fetcher.fetch(server.url("/x"), 0, 2)
    assert paths(server) == ["/x", "/y", "/z"]
    for start in range(2):
        await fetcher.fetch(server.url("/x"), start, start + 2)
        assert paths(server) == again


@pytest.mark.parametrize("fault", [{"status": 404}, {"status": 403}, {"status": 500}, {"silent": "close"}, {"cut": 1}])
async def test_a_target_that_fails_is_forgotten(
    fetcher: Fetcher, server: LyingServer, step: type[StepType], fault: dict[str, Any]
) -> None:
    server.put("/y", b"0123456789")
    server.put("/z", b"0123456789")
    server.etags["/z"] = server.etags["/y"]
    hops = {"/x": redirect(step, "/y", 301)}
    server.every = lambda request: hops.get(request.path)
    await fetcher.fetch(server.url("/x"), 0, 2)
    hops |= {"/x": redirect(step, "/z", 301), "/y": step(**fault)}
    paths(server)
    assert bytes(await fetcher.fetch(server.url("/x"), 2, 5)) == b"234"
    asked = paths(server)
    assert set(asked[:-2]) == {"/y"}  # twice where the idle connection may have been closed meanwhile
    assert asked[-2:] == ["/x", "/z"]
    await fetcher.fetch(server.url("/x"), 3, 6)
    assert paths(server) == ["/z"]


async def test_object_gone_from_a_known_target_is_not_found(
    fetcher: Fetcher, server: LyingServer, step: type[StepType]
) -> None:
    server.put("/y", b"0123456789")
    server.every = lambda request: redirect(step, "/y", 301) if request.path == "/x" else None
    await fetcher.fetch(server.url("/x"), 0, 2)
    del server.objects["/y"]
    paths(server)
    with pytest.raises(NotFound):
        await fetcher.fetch(server.url("/x"), 0, 2)
    assert paths(server) == ["/y", "/x", "/y"]


async def test_target_of_another_version_is_noticed_and_forgotten(
    fetcher: Fetcher, server: LyingServer, step: type[StepType]
) -> None:
    server.put("/y", b"0123456789")
    server.every = lambda request: redirect(step, "/y", 301) if request.path == "/x" else None
    await fetcher.fetch(server.url("/x"), 0, 2)
    server.put("/y", b"9876543210")
    with pytest.raises(ObjectChanged):
        await fetcher.fetch(server.url("/x"), 0, 2)
    paths(server)
    assert bytes(await fetcher.fetch(server.url("/x"), 0, 2)) == b"98"
    assert paths(server) == ["/x", "/y"]


async def test_remembered_target_gets_its_own_origins_secrets_alone(
    fetcher_with: Callable[..., Fetcher],
    server: LyingServer,
    lying_server: type[LyingServer],
    step: type[StepType],
) -> None:
    async with lying_server() as other:
        hops = {"/here": redirect(step, "/y", 301), "/away": redirect(step, other.put("/y", b"0123456789"), 301)}
        server.put("/y", b"0123456789")
        server.every = lambda request: hops.get(request.path)
        here, away = (server.url(path).replace("://", "://user:secret@") for path in hops)
        async with fetcher_with(headers={"127.0.0.1": {"X-Key": "secret"}}) as fetcher:
            for start in range(2):
                await fetcher.fetch(here, start, start + 2)
                await fetcher.fetch(away, start, start + 2)
        assert len(other.requests) == 2
        assert not any("secret" in str(request.headers) for request in other.requests)
        assert all("authorization" in request.headers for request in server.requests)
        assert all(request.headers["x-key"] == "secret" for request in server.requests)
        assert paths(server) == ["/here", "/y", "/away", "/y"]


async def test_redirect_of_one_login_is_not_for_another(
    fetcher: Fetcher, server: LyingServer, step: type[StepType]
) -> None:
    server.put("/y", b"0123456789")
    server.every = lambda request: redirect(step, "/y", 301) if request.path == "/x" else None
    for login in ("", "me:pw@", "you:pw@"):
        await fetcher.fetch(server.url("/x").replace("://", f"://{login}"), 0, 2)
        assert paths(server) == ["/x", "/y"]


async def test_a_remembered_target_may_not_redirect_from_https_to_http(
    fetcher_with: Callable[..., Fetcher],
    server: LyingServer,
    tls_server: LyingServer,
    step: type[StepType],
    ca_file: str,
) -> None:
    server.will(redirect(step, tls_server.put("/y", b"0123456789"), 301))
    async with fetcher_with(ca_file=ca_file) as fetcher:
        await fetcher.fetch(server.url("/x"), 0, 2)
        tls_server.will(redirect(step, server.url("/z")))
        with pytest.raises(InvalidResponse, match="plain http"):
            await fetcher.fetch(server.url("/x"), 2, 5)
    assert paths(server) == ["/x"]


async def test_few_targets_are_remembered(
    fetcher: Fetcher, server: LyingServer, step: type[StepType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncfetch.fetch.transports.http.MAX_MOVED", 2)
    server.put("/y", b"0123456789")
    server.every = lambda request: None if request.path == "/y" else redirect(step, "/y", 301)
    for path in ("/1", "/2", "/3"):
        await fetcher.fetch(server.url(path), 0, 2)
    paths(server)
    for path in ("/3", "/2", "/1"):
        await fetcher.fetch(server.url(path), 2, 5)
    assert paths(server) == ["/y", "/y", "/1", "/y"]
