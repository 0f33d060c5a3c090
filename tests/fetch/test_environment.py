"""Which hosts are asked without the proxy that the environment names, as curl and requests have it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from asyncfetch.errors import FetchError
from asyncfetch.fetch.environment import is_exempt

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncfetch.fetch import Fetcher
    from tests.fetch.conftest import LyingServer

CASES = [
    ("", "a.org", False),
    ("*", "a.org", True),
    ("a.org", "a.org", True),
    ("a.org", "A.ORG", True),
    ("A.Org", "x.y.a.org", True),
    ("a.org", "ba.org", False),
    (".a.org", "a.org", True),
    (".a.org", "x.a.org", True),
    (".a.org", "ba.org", False),
    ("a.org.", "x.a.org", True),
    ("a.org", "x.a.org.", True),
    ("b.org, a.org", "a.org", True),
    ("b.org a.org", "a.org", True),
    (",,.,b.org,", "a.org", False),
    ("a.org:8080", "a.org", True),
    (".a.org:8080", "x.a.org", True),
    ("a.org:80", "a.org", False),
    ("a.org:http", "a.org", False),
    ("org", "a.org", True),
    ("10.1.2.3", "10.1.2.3", True),
    ("10.1.2.3:8080", "10.1.2.3", True),
    ("10.1.2.3:80", "10.1.2.3", False),
    ("10.0.0.0/8", "10.1.2.3", True),
    ("10.1.2.3/8", "10.9.9.9", True),
    ("10.0.0.0/8", "11.1.2.3", False),
    ("10.0.0.0/40", "10.1.2.3", False),
    ("10.0.0.0/8", "10.0.0.0.org", False),
    ("1.2.3", "0.1.2.3", False),
    ("127.0.0.0/8,::1/128", "::1", True),
    ("::1", "::1", True),
    ("[::1]", "::1", True),
    ("[::1]:8080", "::1", True),
    ("[::1]:80", "::1", False),
    ("0:0:0:0:0:0:0:1", "::1", True),
    ("fd00::/8", "fd12::3", True),
    ("fd00::/8", "fe80::1", False),
    ("fd00::/8", "10.1.2.3", False),
]


@pytest.mark.parametrize(("no_proxy", "host", "expected"), CASES)
def test_entries_of_no_proxy(no_proxy: str, host: str, expected: bool) -> None:
    assert is_exempt(host, 8080, no_proxy) is expected


@pytest.mark.parametrize("variable", ["no_proxy", "NO_PROXY"])
@pytest.mark.parametrize(
    ("entry", "is_direct"),
    [("127.0.0.0/8", True), ("10.0.0.0/8", False), ("127.0.0.1:{port}", True), ("127.0.0.1:1", False)],
)
async def test_no_proxy_takes_networks_and_ports(
    fetcher_with: Callable[..., Fetcher],
    server: LyingServer,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    entry: str,
    is_direct: bool,
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # where nobody listens
    monkeypatch.setenv(variable, f"b.org,{entry.format(port=server.port)}")
    url = server.put("/x", b"0123456789")
    async with fetcher_with(trust_env=True) as fetcher:
        if is_direct:
            assert bytes(await fetcher.fetch(url, 2, 5)) == b"234"
        else:
            with pytest.raises(FetchError, match=r"no connection to the proxy 127\.0\.0\.1:1"):
                await fetcher.fetch(url, 2, 5)
    assert len(server.requests) == is_direct
