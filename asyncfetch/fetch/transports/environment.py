"""Proxies and logins that the user's environment names. Read once: files and variables don't belong on the loop."""

from __future__ import annotations

import netrc
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import getproxies, proxy_bypass

from asyncfetch.errors import ConfigError
from asyncfetch.fetch.urls import read_url, userinfo

if TYPE_CHECKING:
    from collections.abc import Mapping

    from yarl import URL

__all__ = ["Environment", "Proxy", "read_environment"]


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy, its credentials taken out of its url."""

    url: URL
    headers: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Environment:
    """All that HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY and ~/.netrc say."""

    proxies: Mapping[str, Proxy] = field(default_factory=dict)
    logins: netrc.netrc | None = field(default=None, repr=False)

    def proxy_for(self, url: URL) -> Proxy | None:
        """The proxy for requests to the url's host; None for none, ConfigError for one of another protocol."""
        proxy = self.proxies.get(url.scheme, self.proxies.get("all"))
        if proxy is None or url.host is None or proxy_bypass(f"{url.host}:{url.port}"):
            return None
        if proxy.url.scheme not in {"http", "https"}:
            message = (
                f"the environment's proxy for {url.scheme}://{url.host} speaks {proxy.url.scheme}, not http or https:"
                " set another one, name the host in NO_PROXY, or set FetchConfig(trust_env=False)"
            )
            raise ConfigError(message)
        return proxy

    def login_for(self, url: URL) -> tuple[str, str] | None:
        """User and password for the url's host; None for none.

        netrc's ``default`` doesn't count: it would go to whatever host a server redirects to.
        """
        entry = self.logins.hosts.get(url.host) if self.logins is not None and url.host is not None else None
        return None if entry is None else (entry[0] or entry[1] or "", entry[2] or "")


def read_environment(variables: Mapping[str, str]) -> Environment:
    """Reads variables and files; blocks. A netrc that can't be parsed is a ConfigError, an absent one is none."""
    proxies = {scheme: _proxy(text) for scheme, text in getproxies().items() if scheme in {"http", "https", "all"}}
    return Environment(proxies, _logins(variables))


def _proxy(text: str) -> Proxy:
    try:
        url = read_url(text if "://" in text else f"http://{text}")
        credentials = userinfo(url)
        return Proxy(url.with_user(None), {} if credentials is None else {"Proxy-Authorization": credentials})
    except ValueError as error:
        reason = "" if "@" in text else f" ({error})"  # whose words may quote a password
        raise ConfigError(
            f"a proxy variable of the environment holds no url{reason}: set it to http://host:port"
        ) from None


def _logins(variables: Mapping[str, str]) -> netrc.netrc | None:
    path = Path(variables.get("NETRC") or "~/.netrc").expanduser()
    try:
        return netrc.netrc(path)
    except OSError:
        return None
    except (netrc.NetrcParseError, UnicodeDecodeError) as error:  # whose words may quote a password
        where = f"{path} near line {error.lineno}" if isinstance(error, netrc.NetrcParseError) else path
        raise ConfigError(f"{where} can't be parsed: mend it, or set FetchConfig(trust_env=False)") from None
