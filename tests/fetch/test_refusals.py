"""What a refusal says: what was sent, what was asked for, and who may have answered."""

from __future__ import annotations

import pickle
import shutil
import socket
import subprocess
from typing import TYPE_CHECKING

import pytest
from multidict import CIMultiDict

from asyncfetch.config import RetryConfig
from asyncfetch.errors import AccessDenied, ConnectionFailed, FetchError, InvalidResponse
from asyncfetch.fetch.refusals import challenges, connect_failure
from asyncfetch.fetch.retry import RetryVerdict
from asyncfetch.runtime.sockets import Sockets, SocketsClosed
from asyncfetch.testing import RangeServer
from bench.nginx import NginxServer, find_nginx
from tests.fetch.conftest import Step
from tests.fetch.fault_table import CONTENT
from tests.fetch.test_http_faults import chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from asyncfetch.fetch import Fetcher
    from tests.fetch.conftest import LyingServer

DIGEST = 'Digest realm="the lab", qop="auth, auth-int", nonce="hunter2", opaque="hunter2", algorithm=SHA-256'
PAGE = b"<!DOCTYPE html>\n<html><head><title>Log in to Airport &amp; Free WiFi</title></head><body>...</body></html>"
TEXT_HTML = {"Content-Type": "text/html; charset=utf-8"}


def page(body: bytes = PAGE, **headers: str | None) -> Step:
    length = {"Content-Length": str(len(body)), "ETag": None}
    return Step(status=200, ignore_range=True, body=body, headers={**TEXT_HTML, **length, **headers})


async def test_connection_of_a_closed_fetcher_is_no_fault_of_the_host() -> None:
    sockets = Sockets()
    await sockets.aclose()
    with pytest.raises(SocketsClosed) as refused:
        sockets.for_connecting(socket.AF_INET, socket.SOCK_STREAM, 0)
    failure = connect_failure(refused.value, "host:443")
    assert failure.verdict is RetryVerdict.FATAL
    assert "its Fetcher was closed meanwhile" in failure.message


# --- logins


@pytest.mark.parametrize(
    ("header", "asked"),
    [
        (DIGEST, ['Digest realm="the lab"']),
        (f'Basic realm="a, b", {DIGEST}', ['Basic realm="a, b"', 'Digest realm="the lab"']),
        ("Negotiate, NTLM", ["Negotiate", "NTLM"]),
        ("Negotiate aHVudGVyMg==", ["Negotiate"]),
        ('Bearer realm="x", error="invalid_token", error_uri="hunter2"', ['Bearer realm="x" error="invalid_token"']),
        ('realm="x"', []),
        ('Basic realm="see http://h/?token=hunter2"', ['Basic realm="see http://h/?token=***']),
        ("", []),
    ],
)  # fmt: skip
def test_challenges_name_the_logins_a_server_asks_for(header: str, asked: list[str]) -> None:
    found = challenges(CIMultiDict([("WWW-Authenticate", header)]), "WWW-Authenticate")
    assert found == asked
    assert "hunter2" not in str(found)


def test_several_headers_ask_for_several_logins() -> None:
    headers = CIMultiDict([("WWW-Authenticate", "Negotiate"), ("www-authenticate", DIGEST)])
    assert challenges(headers, "WWW-Authenticate") == ["Negotiate", 'Digest realm="the lab"']


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize(
    ("settings", "login", "query", "sent"),
    [
        ({}, "", "", "no credentials were sent"),
        ({"tokens": {"127.0.0.1": "hunter2"}}, "", "", "sent: a bearer token"),
        ({}, "me:hunter2@", "", "sent: a Basic login"),
        ({"headers": {"127.0.0.1": {"Authorization": "hunter2"}}}, "", "", "an Authorization header of another kind"),
        ({"headers": {"127.0.0.1": {"Authorization": "hunter2 x"}}}, "", "", "an Authorization header of another kind"),
        ({"headers": {"127.0.0.1": {"Cookie": "hunter2"}}}, "", "", "sent: a cookie"),
        ({}, "", "?X-Amz-Signature=hunter2", "sent: a signed url"),
    ],
)
async def test_a_refusal_says_what_was_sent_and_what_was_asked_for(
    fetcher_with: Callable[..., Fetcher],
    server: LyingServer,
    settings: Mapping[str, object],
    login: str,
    query: str,
    sent: str,
    status: int,
) -> None:
    server.every = lambda _: Step(status=status, headers={"WWW-Authenticate": DIGEST})
    url = server.put(f"/x{query}", CONTENT).replace("://", f"://{login}")
    async with fetcher_with(**settings) as fetcher:
        with pytest.raises(AccessDenied) as caught:
            await fetcher.fetch(url, 0, 10)
    message = str(pickle.loads(pickle.dumps(caught.value)))
    assert sent in message
    assert 'asked for: Digest realm="the lab", of which none is spoken here (Digest): bearer tokens are' in message
    assert "hunter2" not in message


async def test_a_login_that_is_spoken_needs_no_more_words(fetcher: Fetcher, server: LyingServer) -> None:
    server.every = lambda _: Step(status=401, headers={"WWW-Authenticate": f"Basic, {DIGEST}"})
    with pytest.raises(AccessDenied, match="no credentials were sent; asked for: Basic, Digest") as caught:
        await fetcher.stat(server.put("/x", CONTENT))
    assert "spoken" not in str(caught.value)


@pytest.mark.parametrize("status", [403, 502])
async def test_a_proxys_own_answer_is_told(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", f"http://me:hunter2@127.0.0.1:{server.port}")
    body = b"<HTML><TITLE>ERROR: The requested URL could not be retrieved</TITLE>"
    squid = {"Server": "squid/5.7", "X-Squid-Error": "ERR_DNS_FAIL 0", "Via": "1.1 cache (squid/5.7)", **TEXT_HTML}
    async with fetcher_with(trust_env=True, retry=RetryConfig(attempts=1)) as fetcher:
        server.will(Step(status=status, body=body, headers={**squid, "Content-Length": str(len(body))}))
        with pytest.raises(FetchError) as caught:
            await fetcher.fetch("http://data.invalid/x", 0, 10)
        assert "that is a proxy's own answer (X-Squid-Error: ERR_DNS_FAIL 0, Via: 1.1 cache" in str(caught.value)
        assert "(ERROR: The requested URL could not be retrieved)" in str(caught.value)
        server.will(Step(status=status))
        with pytest.raises(FetchError, match=f"through the proxy 127.0.0.1:{server.port}, whose own answer it may be"):
            await fetcher.fetch("http://data.invalid/x", 0, 10)
        server.will(Step(status=407, headers={"Proxy-Authenticate": "NTLM"}))
        with pytest.raises(
            AccessDenied, match="sent: a Basic login; asked for: NTLM, of which none is spoken"
        ) as caught:
            await fetcher.fetch("http://data.invalid/x", 0, 10)
    assert "hunter2" not in str(caught.value)


async def test_a_gateway_in_front_of_a_server_is_named(hasty: Fetcher, server: LyingServer) -> None:
    server.will(Step(status=504, headers={"Via": "1.1 varnish (Varnish/7.1)"}))
    with pytest.raises(FetchError, match=r"proxy or cache, whose own answer it may be \(Via: 1\.1 varnish"):
        await hasty.fetch(server.put("/x", CONTENT), 0, 10)


# --- the wrong port


@pytest.fixture
def tls_only(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A server of TLS, asked in plain http."""
    (tmp_path / "x").write_bytes(CONTENT)
    if request.param == "nginx":
        if find_nginx() is None:
            pytest.skip("nginx isn't installed")
        with NginxServer(tmp_path) as nginx:
            yield nginx.url
    elif request.param == "openssl":
        yield from _of_openssl(tmp_path)
    else:
        with RangeServer({"x": CONTENT}) as server:
            yield server.url


def _of_openssl(directory: Path) -> Iterator[str]:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl isn't installed")
    make = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x", "-keyout", "key", "-out", "pem"]
    subprocess.run(make, cwd=directory, check=True, capture_output=True)
    serve = [openssl, "s_server", "-accept", "127.0.0.1:0", "-cert", "pem", "-key", "key", "-www"]
    with subprocess.Popen(serve, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        try:
            assert child.stdout is not None
            said = next(line for line in child.stdout if line.startswith(b"ACCEPT"))
            yield f"https://{said.split()[1].decode()}"
        finally:
            child.kill()


@pytest.mark.parametrize("tls_only", ["nginx", "openssl", "python"], indirect=True)
async def test_plain_http_to_a_port_of_tls_is_told(hasty: Fetcher, tls_only: str) -> None:
    with pytest.raises(FetchError, match=r"speaks TLS.*write https:// in the url"):
        await hasty.fetch(tls_only.replace("https", "http") + "/x", 0, 10)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\nReason: You're speaking plain HTTP to an SSL-enabled server port.<br />",
        b"\x15\x03\x01\x00\x02\x02\x46",
        b"\x15\x03\x03\x00\x02\x02\x0a",
        b"",
    ],
    ids=["Go", "Apache", "an alert of TLS 1.0", "an alert of TLS 1.2", "nothing"],
)
async def test_plain_http_to_other_servers_of_tls_is_explained(
    hasty: Fetcher, server: LyingServer, answer: bytes
) -> None:
    server.every = lambda _: Step(raw=answer, end="close")
    with pytest.raises(FetchError, match=r"TLS.*write https:// in the url"):
        await hasty.fetch(server.url("/x"), 0, 10)


async def test_https_to_a_port_of_plain_http_is_told(hasty: Fetcher) -> None:
    async with RangeServer({"x": CONTENT}, tls=False) as server:
        url = server.url.replace("http", "https")
        with pytest.raises(ConnectionFailed, match=r"https on this port.*For plain http, write http://"):
            await hasty.fetch(f"{url}/x", 0, 10)


# --- pages in place of bytes


@pytest.mark.parametrize("span", [(0, None), (0, 10), (20, 50), (-10, None)])
@pytest.mark.parametrize(
    "step",
    [page(), page(b"\xef\xbb\xbf \n<!-- hi --><HTML lang=en>"), Step(**{**chunks(PAGE), "status": 200})],
    ids=["a page", "another", "chunks"],
)
async def test_a_page_in_place_of_bytes_is_told(
    fetcher: Fetcher, server: LyingServer, span: tuple[int, int | None], step: Step
) -> None:
    headers = {**step.headers, **TEXT_HTML}
    server.every = lambda _: Step(status=200, ignore_range=True, headers=headers, body=step.body)
    with pytest.raises(InvalidResponse, match="a page of HTML came in place of the object") as caught:
        await fetcher.fetch(server.put("/data/file-000.parquet?v=1", CONTENT), *span)
    assert caught.value.attempts == 2


async def test_a_page_is_told_of_an_object_that_is_known_too(fetcher: Fetcher, server: LyingServer) -> None:
    url = server.put("/x.mp4", CONTENT)
    assert await fetcher.fetch(url, 0, 10) == CONTENT[:10]
    server.every = lambda _: page()
    for read in (fetcher.fetch(url, 0, 10), fetcher.stat(url), fetcher.fetch_tail(url, 5)):
        with pytest.raises(InvalidResponse, match="a page of HTML"):
            await read
    server.every = lambda _: None
    assert await fetcher.fetch(url, 10, 20) == CONTENT[10:20]


async def test_a_redirect_to_a_page_is_told(
    fetcher: Fetcher, server: LyingServer, lying_server: type[LyingServer]
) -> None:
    async with lying_server() as portal:
        portal.every = lambda _: page()
        target = portal.put("/login?next=x", PAGE)
        server.every = lambda _: Step(status=302, headers={"Location": target, "Content-Length": "0"}, body=b"")
        with pytest.raises(InvalidResponse, match="a page of HTML") as caught:
            await fetcher.fetch(server.put("/x.json", CONTENT), 0, 10)
    assert caught.value.host == f"127.0.0.1:{portal.port}"


async def test_a_network_that_says_it_wants_a_login(fetcher: Fetcher, server: LyingServer) -> None:
    server.every = lambda _: Step(status=511, body=PAGE, headers={**TEXT_HTML, "Content-Length": str(len(PAGE))})
    with pytest.raises(AccessDenied, match=r"wants a login first.*\(Log in to Airport & Free WiFi\)"):
        await fetcher.fetch(server.put("/x", CONTENT), 0, 10)


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("/", page()),
        ("/index.html", page()),
        ("/list.php?x=1.bin", page()),
        ("/x.bin", page(b"PAR1 is no page")),
        ("/x.bin", page(PAGE, **{"Content-Type": "application/octet-stream"})),
        ("/x.bin", page(CONTENT)),
    ],
    ids=["a directory", "html", "a program", "bytes", "bytes that look so", "a long object"],
)
async def test_object_is_not_taken_for_a_page_in_its_place(
    fetcher: Fetcher, server: LyingServer, path: str, step: Step
) -> None:
    server.every = lambda _: step
    url = server.put(path, CONTENT)
    assert isinstance(step.body, bytes)
    assert await fetcher.fetch(url, 5, 10) == step.body[5:10]
    assert await fetcher.fetch(url) == step.body
