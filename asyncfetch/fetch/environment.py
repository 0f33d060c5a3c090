"""Proxies and logins that the user's environment names. They are read once: variables and files aren't for the loop."""

from __future__ import annotations

import netrc
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import getproxies, proxy_bypass

from asyncfetch.errors import ConfigError
from asyncfetch.fetch.urls import address_in, read_url, userinfo

if TYPE_CHECKING:
    from collections.abc import Mapping

    from yarl import URL


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy, its credentials taken out of its url."""

    url: URL
    headers: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Environment:
    """All that HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY and ~/.netrc say."""

    proxies: Mapping[str, Proxy] = field(default_factory=dict)
    no_proxy: str = ""
    logins: netrc.netrc | None = field(default=None, repr=False)

    def proxy_for(self, url: URL) -> Proxy | None:
        """The proxy for requests to the url's host; None for none, ConfigError for one of another protocol."""
        proxy = self.proxies.get(url.scheme, self.proxies.get("all"))
        if proxy is None or url.host is None or is_exempt(url.host, url.port, self.no_proxy):
            return None
        if proxy_bypass(url.host):  # by macOS's own settings
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
    named = getproxies()
    proxies = {scheme: _proxy(text) for scheme, text in named.items() if scheme in {"http", "https", "all"}}
    return Environment(proxies, named.get("no", ""), _logins(variables))


def is_exempt(host: str, port: int | None, no_proxy: str) -> bool:
    """Return whether the host is asked without a proxy by NO_PROXY, as curl and requests read that.

    Commas or blanks divide its entries. A name is itself and all below it, with or without a dot in front; an address
    is itself; ``10.0.0.0/8`` is every address of that network; a port behind a name or an address holds for that port
    alone; ``*`` is every host.
    """
    address = address_in(host)
    below = f".{host.lower().rstrip('.')}"
    for entry in no_proxy.lower().replace(",", " ").split():
        if "/" in entry:
            with suppress(ValueError):
                if address is not None and address in ip_network(entry, strict=False):
                    return True
            continue
        name, entry_port = entry, ""
        if entry.startswith("["):
            name, _, entry_port = entry[1:].partition("]")
        elif entry.count(":") == 1:
            name, _, entry_port = entry.partition(":")
        if entry_port.strip(":") not in {"", str(port)}:
            continue
        name = name.strip(".")
        if name == "*" or (address is not None and address_in(name) == address):
            return True
        if name and address is None and below.endswith(f".{name}"):
            return True
    return False


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
