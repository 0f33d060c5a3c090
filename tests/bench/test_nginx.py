"""bench/nginx.py against a real nginx."""

from __future__ import annotations

import http.client
import os
import select
import shutil
import signal
import socket
import ssl
import time
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from asyncfetch import FetchConfig, Fetcher
from asyncfetch.errors import ConfigError, MissingDependency
from bench import nginx
from bench.nginx import NginxServer

pytestmark = pytest.mark.usefixtures("needs_nginx")

CONTENT = bytes(range(256)) * 2048


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / 'a "$root'
    root.mkdir()
    (root / "a.bin").write_bytes(CONTENT)
    return root


def ask(server: NginxServer, asked: str) -> tuple[int, bytes]:
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
    if parts.scheme == "https":
        context = ssl.create_default_context(cafile=server.ca_file)
        connection = http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=10, context=context)
    try:
        connection.request("GET", "/a.bin", headers={"Range": asked})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@pytest.mark.parametrize("tls", [True, False])
def test_ranges_are_served(root: Path, tls: bool) -> None:
    with NginxServer(root, tls=tls) as server:
        assert ask(server, "bytes=1000-300999") == (206, CONTENT[1000:301_000])
        assert ask(server, "bytes=-5") == (206, CONTENT[-5:])


def test_no_worker_waits_for_a_connection_that_another_one_took(root: Path) -> None:
    with NginxServer(root, workers=2) as server:
        (listener,) = psutil.Process(server.process_group).net_connections("tcp")
        told = Path(f"/proc/{server.process_group}/fdinfo/{listener.fd}").read_text()
        assert int(told.split("flags:")[1].split()[0], 8) & os.O_NONBLOCK


def test_two_servers_with_two_workers_each(root: Path) -> None:
    with NginxServer(root, workers=2) as one, NginxServer(root, workers=2) as other:
        assert one.url != other.url
        assert ask(one, "bytes=0-9") == ask(other, "bytes=0-9") == (206, CONTENT[:10])


@pytest.mark.parametrize("tls", [True, False])
@pytest.mark.usefixtures("needs_lua")
def test_the_rate_of_a_stream(root: Path, tls: bool) -> None:
    with NginxServer(root, tls=tls, bytes_per_second=1_000_000, first_byte_seconds=0.1, piece_bytes=32_768) as server:
        started = time.monotonic()
        assert ask(server, "bytes=0-299999") == (206, CONTENT[:300_000])
        assert time.monotonic() - started > 0.1 + 0.297 - 0.002  # nine pieces of 33 ms before the last one; two clocks
        assert ask(server, "bytes=1000-1009") == (206, CONTENT[1000:1010])


@pytest.mark.usefixtures("needs_lua")
def test_a_stream_makes_up_for_what_its_server_was_late(root: Path) -> None:
    """The worker is held up within a body, which ends when it would have without."""

    def seconds(*, held_up: bool) -> float:
        started = time.monotonic()
        with socket.create_connection((parts.hostname or "", parts.port or 0)) as connection:
            connection.sendall(b"GET /a.bin HTTP/1.1\r\nHost: a\r\nRange: bytes=0-399999\r\nConnection: close\r\n\r\n")
            assert connection.recv(1) == b"H"
            if held_up:
                os.killpg(group, signal.SIGSTOP)
                select.select([], [], [], 0.12)
                os.killpg(group, signal.SIGCONT)
            while connection.recv(65_536):
                pass
        return time.monotonic() - started

    with NginxServer(root, tls=False, bytes_per_second=1_000_000) as server:
        parts, group = urlsplit(server.url), server.process_group
        assert min(seconds(held_up=True) for _ in range(5)) < min(seconds(held_up=False) for _ in range(3)) + 0.04


@pytest.mark.usefixtures("needs_lua")
def test_the_first_byte_waits(root: Path) -> None:
    with NginxServer(root, first_byte_seconds=0.2) as server:
        started = time.monotonic()
        assert ask(server, "bytes=0-0") == (206, CONTENT[:1])
        assert time.monotonic() - started >= 0.2


@pytest.mark.usefixtures("needs_lua")
def test_leaving_ends_it_and_its_workers_and_removes_its_files(root: Path) -> None:
    server = NginxServer(root, bytes_per_second=1000, workers=2)
    with server:
        ca_file = server.ca_file
        assert ca_file is not None
        parts = urlsplit(server.url)
        context = ssl.create_default_context(cafile=ca_file)
        slow = http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=10, context=context)
        slow.request("GET", "/a.bin")
        response = slow.getresponse()
    with closing(slow), pytest.raises((OSError, http.client.IncompleteRead)):
        response.read()
    assert not os.path.exists(os.path.dirname(ca_file))
    assert server.ca_file is None
    with pytest.raises(ConnectionRefusedError):
        http.client.HTTPConnection(parts.hostname or "", parts.port).connect()


def test_a_broken_configuration_says_what_nginx_says(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nginx, "CONFIG", nginx.CONFIG.replace("sendfile on", "sendfile sometimes"))
    server = NginxServer(root)
    with pytest.raises(ConfigError, match=r"(?s)it says: .*sendfile"):
        server.__enter__()
    assert server.ca_file is None


def test_missing_nginx_or_module_is_named_with_its_remedy(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nginx, "LUA_MODULES", ("/nowhere.so",))
    with pytest.raises(MissingDependency, match="libnginx-mod-http-lua"):
        NginxServer(root, first_byte_seconds=0.1).__enter__()
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(MissingDependency, match="apt-get install nginx"):
        NginxServer(root).__enter__()


async def test_plain_answers_are_not_held_back(root: Path) -> None:
    """64 KiB are one segment of the loopback and a bit, which used to wait 40 ms for an acknowledgement."""
    with NginxServer(root, tls=False) as server:
        async with Fetcher(FetchConfig(trust_env=False)) as fetcher:
            seconds = []
            for start in range(400):
                started = time.perf_counter()
                await fetcher.fetch(f"{server.url}/a.bin", start, start + 65_536)
                seconds.append(time.perf_counter() - started)
    # At first the system acknowledges at once. On a busy machine some take long, but not each of the last.
    assert min(seconds[-50:]) < 0.02


def test_nginx_cpu_seconds_are_known_while_it_runs(root: Path) -> None:
    with NginxServer(root) as server:
        before = server.cpu_seconds
        for _ in range(1000):
            ask(server, "/a.bin")
            if server.cpu_seconds > before:
                break
        assert server.cpu_seconds > before
