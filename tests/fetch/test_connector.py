"""Servers that want a certificate of the client."""

from __future__ import annotations

import socket
import ssl
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from asyncfetch.config import FetchConfig, RetryConfig
from asyncfetch.errors import AccessDenied, ConfigError, ConnectionFailed, FetchError
from asyncfetch.fetch import Fetcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.fetch.conftest import LyingServer, Step

CONTENT = bytes(range(256)) * 40
VERSIONS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]


@pytest.fixture(params=["direct", "session"])
def way(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


@pytest.fixture
def files(ca: trustme.CA, tmp_path: Path) -> dict[str, dict[str, str]]:
    """Settings by what they have: both in one file, in two, and a certificate of an authority that isn't trusted."""
    own, foreign = ca.issue_cert("client@example.org"), trustme.CA().issue_cert("client@example.org")
    own.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "own.pem"))
    own.cert_chain_pems[0].write_to_path(str(tmp_path / "own.crt"))
    own.private_key_pem.write_to_path(str(tmp_path / "own.key"))
    foreign.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "foreign.pem"))
    names = {
        "one file": {"client_cert_file": "own.pem"},
        "two files": {"client_cert_file": "own.crt", "client_key_file": "own.key"},
        "foreign": {"client_cert_file": "foreign.pem"},
        "none": {},
    }
    return {kind: {name: str(tmp_path / file) for name, file in one.items()} for kind, one in names.items()}


@pytest.fixture(params=VERSIONS, ids=lambda version: version.name)
def strict_tls(request: pytest.FixtureRequest, server_tls: ssl.SSLContext, ca: trustme.CA) -> ssl.SSLContext:
    """A server's context that wants a certificate of the same authority as its own."""
    server_tls.minimum_version = server_tls.maximum_version = request.param
    server_tls.verify_mode = ssl.CERT_REQUIRED
    ca.configure_trust(server_tls)
    return server_tls


@pytest.mark.parametrize("kind", ["one file", "two files"])
async def test_a_client_certificate_is_shown(
    fetcher_with: Callable[..., Fetcher],
    lying_server: type[LyingServer],
    strict_tls: ssl.SSLContext,
    ca_file: str,
    files: dict[str, dict[str, str]],
    kind: str,
) -> None:
    async with lying_server(strict_tls) as server, fetcher_with(ca_file=ca_file, **files[kind]) as fetcher:
        url = server.put("/x", CONTENT)
        assert await fetcher.fetch(url, 100, 300) == CONTENT[100:300]
        assert await fetcher.fetch(url) == CONTENT
        assert fetcher.statistics().retries == 0


@pytest.mark.parametrize("kind", ["none", "foreign"])
async def test_a_client_certificate_that_is_wanted_is_named(
    fetcher_with: Callable[..., Fetcher],
    lying_server: type[LyingServer],
    strict_tls: ssl.SSLContext,
    ca_file: str,
    files: dict[str, dict[str, str]],
    kind: str,
) -> None:
    """asyncio's servers close the connection without a word."""
    once = RetryConfig(attempts=1)
    async with lying_server(strict_tls) as server, fetcher_with(ca_file=ca_file, retry=once, **files[kind]) as fetcher:
        with pytest.raises(FetchError, match=r"client certificate, or another one.*client_cert_file=") as caught:
            await fetcher.fetch(server.put("/x", CONTENT), 100, 300)
        assert isinstance(caught.value, (AccessDenied, ConnectionFailed))
        assert server.requests == []


@contextmanager
def alerting_server(context: ssl.SSLContext) -> Iterator[str]:
    """One that says in an alert why it ends a handshake, and leaves the connection open for that to be read."""
    held: list[socket.socket] = []

    def serve() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                held.append(client)
                with suppress(OSError), context.wrap_socket(client.dup(), server_side=True) as tls:
                    tls.recv(1)
                client.shutdown(socket.SHUT_WR)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"https://127.0.0.1:{listener.getsockname()[1]}/x"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for client in held:
                client.close()


@pytest.mark.may_block
@pytest.mark.parametrize("kind", ["none", "foreign"])
async def test_an_alert_about_the_certificate_is_final(
    strict_tls: ssl.SSLContext, ca_file: str, files: dict[str, dict[str, str]], kind: str
) -> None:
    if strict_tls.maximum_version is ssl.TLSVersion.TLSv1_2 and kind == "none":
        pytest.skip("it has no alert for that")
    with alerting_server(strict_tls) as url:
        async with Fetcher(FetchConfig(trust_env=False, ca_file=ca_file, **files[kind])) as fetcher:  # type: ignore[arg-type]
            with pytest.raises(AccessDenied, match=r"wants a client certificate.*client_cert_file=") as caught:
                await fetcher.fetch(url, 100, 300)
    assert caught.value.attempts == 1


@pytest.mark.parametrize("text", ["400 No required SSL certificate was sent", "400 The SSL certificate error"])
async def test_nginx_says_it_in_a_page(fetcher: Fetcher, server: LyingServer, step: type[Step], text: str) -> None:
    body = f"<html><head><title>{text}</title></head></html>".encode()
    server.will(step(status=400, headers={"Content-Type": "text/html", "Content-Length": str(len(body))}, body=body))
    with pytest.raises(AccessDenied, match=r"wants a client certificate.*client_cert_file=") as caught:
        await fetcher.fetch(server.put("/x", CONTENT), 100, 300)
    assert (caught.value.status, caught.value.attempts) == (400, 1)


async def test_files_that_hold_no_certificate_are_config_errors(
    fetcher_with: Callable[..., Fetcher], files: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    key = serialization.load_pem_private_key((tmp_path / "own.key").read_bytes(), None)
    locked = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"hidden")
    )
    (tmp_path / "locked.key").write_bytes(locked)
    certificate = files["two files"]["client_cert_file"]
    for wrong in (
        {"client_cert_file": str(tmp_path / "absent.pem")},
        {"client_cert_file": certificate},  # without a key
        {"client_cert_file": certificate, "client_key_file": files["foreign"]["client_cert_file"]},
        {"client_cert_file": certificate, "client_key_file": str(tmp_path / "locked.key")},
    ):
        with pytest.raises(ConfigError, match=r"client_cert_file='.*must hold a certificate and its key") as caught:
            await fetcher_with(**wrong).__aenter__()
        assert "hidden" not in str(caught.value)


def test_a_key_needs_its_certificate() -> None:
    with pytest.raises(ConfigError, match="client_key_file needs client_cert_file"):
        FetchConfig(client_key_file="key.pem")
