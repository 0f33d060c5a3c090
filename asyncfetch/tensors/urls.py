"""Addresses of servers and shards: every one is made here, so that all are spelt alike. Pure."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from asyncfetch.errors import ConfigError, redact_url
from asyncfetch.fetch.urls import check_characters, read_url, userinfo

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["is_loopback", "is_wildcard", "normal_server", "server_url", "shards_url"]


def server_url(host: str, port: int, *, tls: bool) -> str:
    """``https://host:port``, an IPv6 address in brackets."""
    name = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{name}:{port}"


def normal_server(url: str) -> str:
    """A server's url as ``server_url`` spells it; ConfigError where it is no http(s) url of a host alone."""
    if not isinstance(url, str):
        raise ConfigError(f"the url of a tensor server must be a string, not of type {type(url).__name__}")
    check_characters(url)
    try:
        parsed = read_url(url)
        is_server = parsed.scheme in {"http", "https"} and parsed.path in {"", "/"} and not parsed.query_string
        if is_server and parsed.host and parsed.port and userinfo(parsed) is None:
            return server_url(parsed.host, parsed.port, tls=parsed.scheme == "https")
    except ValueError as error:
        raise ConfigError(f"{redact_url(url)!r} is no url of a tensor server: {error}") from error
    raise ConfigError(f"{redact_url(url)!r} is no url of a tensor server, which is http://host:port and nothing more")


def shards_url(server: str, shard_ids: Iterable[str]) -> str:
    """Return where these shards are, as one object."""
    return f"{server}/shards/{','.join(shard_ids)}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_wildcard(host: str) -> bool:
    """Return whether it means all addresses of this machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
