"""Urls: what none may hold, where a request goes, hop by hop, which secrets may go with it; an object's name. Pure.

Every hop gets the headers that belong to its own origin, and nothing that was meant for another one. Following
redirects inside the HTTP library would keep custom headers (``X-Amz-Security-Token``, a private gateway's key) across
hosts. A host's other ports are other origins, which may be another's: a secret configured for the bare host
goes to the one that the caller asks, but no redirect takes it further than https on its default port.
"""

from __future__ import annotations

import base64
import ipaddress
import re
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, urlsplit, urlunsplit

from multidict import CIMultiDict
from yarl import URL

from asyncfetch.errors import ConfigError, InvalidResponse, redact_text, redact_url
from asyncfetch.fetch.retry import AttemptFailed, RetryVerdict, cause_of

if TYPE_CHECKING:
    from collections.abc import Mapping

_QUOTED_SCHEMES = frozenset({"http", "https", "file"})
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def check_characters(url: str) -> None:
    """ConfigError where a quoted url holds a control character: parsers leave tabs and line ends out, without a word.

    What is left names another object.
    """
    if _CONTROL.search(url):
        message = "holds a control character: take strip() of a line of a file, or quote it, as %09 for a tab"
        raise ConfigError(f"{hidden(url)} {message}")


def hidden(url: str) -> str:
    """Return what can't be parsed, for a message: where a password in it ends is anybody's guess."""
    return repr(redact_url(re.sub(r"//.*@", "//***@", _CONTROL.sub("", url))))


def join_url(root: str, path: str) -> str:
    """The url of ``path`` below ``root``; a query of the root (a token, a signature) is kept.

    Args:
        root: http(s):// or file:// URL, an address of another scheme, or a plain path. With or without a slash behind.
        path: Relative, parts separated by slashes, never quoted. It is percent-quoted where the root is a URL; plain
            paths and the addresses of stores (s3://, hf://, fsspec's) take it as it is.

    Raises:
        ConfigError: The root is a URL that can't be parsed, or holds a control character.
    """
    scheme, separator, place = root.partition("://")
    if not separator:
        return f"{root.rstrip('/')}/{path}" if root else path
    if scheme.lower() not in _QUOTED_SCHEMES:
        return f"{scheme}://{place.rstrip('/')}/{path}"
    check_characters(root)
    try:
        parts = urlsplit(root)
    except ValueError as error:
        raise ConfigError(f"{redact_url(root)!r} isn't a url: {error}") from error
    return urlunsplit((parts.scheme, parts.netloc, f"{parts.path.rstrip('/')}/{quote(path)}", parts.query, ""))


REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PERMANENT = frozenset({301, 308})
_CACHING = ("Cache-Control", "Expires", "Pragma", "Vary")
_RESERVED = frozenset({"accept-encoding", "content-length", "host", "if-match", "range", "transfer-encoding"})

_REFERENCE = re.compile(r"(?:([A-Za-z][A-Za-z0-9+.-]*):)?(//[^/?#]*)?([^?#]*)(\?[^#]*)?(?:#.*)?", re.DOTALL)
_FOLD = re.compile(r"[ \t]*\r?\n[ \t]+")
_UNSENDABLE = re.compile("[^!-~]")

# Printable ASCII whose percent signs all begin an escape: sent byte for byte, because a signature may cover it.
_EXACT = re.compile(r"(?:[!-$&-~]|%[0-9A-Fa-f]{2})*")


@dataclass(frozen=True, slots=True)
class Address:
    """A place where an object can be had now. Compared by identity: equal ones may come from different answers."""

    url: URL = field(repr=False)
    """The url to send as it is; it may hold a signature."""
    headers: Mapping[str, str | None] = field(default_factory=dict, repr=False)
    """Headers for the url's own origin alone, over what the configuration has for it; None leaves a header out."""
    is_named: bool = False
    """True if the user named the url's origin; only then do secrets configured for its bare host go there."""
    etag: str | None = None
    """The object's version where it is known better than by the answers' own tags, which then don't count: two CDNs
    have two tags for the same bytes."""
    version_header: str | None = None
    """The header in which the url's own origin says the version, without quotes, also where it redirects; None where
    the url can only ever lead to one version."""


@dataclass(frozen=True, slots=True)
class Route:
    """The parts that all requests to one origin have in common."""

    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent where the user named the origin, credentials included."""
    redirected_headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent where something else led here: a redirect, or a store's answer."""
    proxy: URL | None = None
    """The proxy to go through, without its credentials."""
    proxy_headers: Mapping[str, str] | None = field(default=None, repr=False)
    """Sent to the proxy alone."""

    def headers_for(self, origin: str, address: Address) -> dict[str, str]:
        """Return what a request to ``origin`` on behalf of ``address`` carries whatever it asks for.

        Whether credentials follow a redirect is decided here: those of the address stay at its own origin, and those
        that are configured go where ``static_headers`` lets them.
        """
        is_own = origin == origin_of(address.url)
        headers = dict(self.headers if is_own and address.is_named else self.redirected_headers)
        if is_own and address.headers:
            replaced = {name.lower() for name in address.headers}
            headers = {name: value for name, value in headers.items() if name.lower() not in replaced}
            headers |= {name: value for name, value in address.headers.items() if value is not None}
        return headers


# Cached, since a dataset's ranges share few urls: parsing one costs as much as half a request of 64 KiB.
@lru_cache(maxsize=1024)
def parse_url(text: str) -> URL:
    """The http(s) url, requoted only where it can't be sent as it is; ConfigError where it is none or names no host."""
    check_characters(text)
    try:
        url = read_url(text, encoded=_EXACT.fullmatch(text) is not None)
        if url.scheme in {"http", "https"} and url.host and url.port:
            return url
    except ValueError as error:
        if "@" in text:  # whose words may quote a password
            raise ConfigError(f"{hidden(text)} is no http url: quote what stands in front of the @") from None
        raise ConfigError(f"{hidden(text)} is no http url: {redact_text(str(error))}") from cause_of(error)
    raise ConfigError(f"{hidden(text)} is no http url: it needs a scheme, a host and a port below 65536")


def next_url(url: URL, location: str | None) -> URL:
    """The target of a redirect, without any userinfo: a server has no say in which credentials we send."""
    if not location:
        raise AttemptFailed(
            InvalidResponse, "the server redirects without saying where (no Location)", RetryVerdict.ONCE
        )
    try:
        target = _referred(url, location)
        valid = target.scheme in {"http", "https"} and bool(target.host) and bool(target.port)
    except ValueError as error:
        message = f"Location can't be parsed: {redact_text(str(error))}"
        raise AttemptFailed(InvalidResponse, message, RetryVerdict.ONCE) from cause_of(error)
    if not valid:
        message = f"the server redirects to {redact_url(location)[:200]!r}, which is no http url"
        raise AttemptFailed(InvalidResponse, message, RetryVerdict.FATAL)
    if url.scheme == "https" and target.scheme == "http":
        message = f"the server redirects from https to plain http at {host_name(target)}: not followed"
        raise AttemptFailed(InvalidResponse, message, RetryVerdict.FATAL)
    return target if userinfo(target) is None else target.with_user(None)


def _referred(url: URL, location: str) -> URL:
    """Return the url that a Location in an answer to ``url`` means, without its fragment (RFC 3986, section 5.2).

    Its bytes go into the next request as they came, because a signature may cover them; only those that no request may
    hold are quoted. (yarl's ``join`` takes the quotes off its base, and normalizes what has bytes to be quoted.)
    """
    match = _REFERENCE.fullmatch(_FOLD.sub(" ", location).strip())
    assert match is not None
    scheme, authority, path, query = match.groups()
    if scheme is None and authority is None:
        query = query if path or query is not None else f"?{url.raw_query_string}" if url.raw_query_string else ""
        above = "" if path.startswith("/") else url.raw_path.rpartition("/")[0] + "/"
        path = _without_dots(above + path) if path else url.raw_path
    if authority is None:
        authority = "" if scheme is not None else f"//{url.raw_authority}"
    elif not authority.isascii():
        authority = f"//{read_url(f'http:{authority}').raw_authority}"
    rest = _UNSENDABLE.sub(lambda one: quote(one[0].encode("utf-8", "surrogateescape")), path + (query or ""))
    return read_url(f"{scheme or url.scheme}:{authority}{rest}", encoded=True)


def _without_dots(path: str) -> str:
    """Return an absolute path without its segments of one dot or two."""
    kept: list[str] = []
    for segment in path.split("/")[1:]:
        if segment == "..":
            kept[-1:] = []
        elif segment != ".":
            kept.append(segment)
    return "/" + "/".join([*kept, ""] if path.endswith(("/.", "/..")) else kept)


def is_permanent(status: int, headers: Mapping[str, str]) -> bool:
    """Return whether a redirect holds until it fails: a client may keep it (RFC 9110, 15.4.2 and 15.4.9).

    One that says more of how it may be kept is followed anew each time, which is always right.
    """
    return status in _PERMANENT and not any(name in headers for name in _CACHING)


@lru_cache(maxsize=1024)
def origin_of(url: URL) -> str:
    """``scheme://host:port``, what a connection, a limit and a secret belong to."""
    return f"{url.scheme}://{host_name(url)}"


@lru_cache(maxsize=1024)
def host_name(url: URL) -> str:
    """``host:port``, in lower case, with the default port spelt out."""
    host = (url.host or "").lower()
    return f"[{host}]:{url.port}" if ":" in host else f"{host}:{url.port}"


def userinfo(url: URL) -> str | None:
    """The Authorization header for the url's own user and password."""
    if url.raw_user is None and url.raw_password is None:
        return None
    return basic_auth(url.user or "", url.password or "")


def basic_auth(user: str, password: str) -> str:
    """The value of a Basic Authorization header."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode("ascii")


def static_headers(
    url: URL,
    *,
    is_named: bool,
    headers: Mapping[str, Mapping[str, str]],
    tokens: Mapping[str, str],
    login: tuple[str, str] | None,
) -> dict[str, str]:
    """Return what every request to the url's origin carries.

    Args:
        url: Any url of the origin.
        is_named: Whether the user named the origin; False where something else leads to it.
        headers: Extra headers by "host" or "host:port"; the latter wins.
        tokens: Bearer tokens by the same, sent over https or to loopback only.
        login: User and password of the host from ~/.netrc; the weakest, after a header and a token.
    """
    means_bare_host = is_named or (url.scheme == "https" and url.is_default_port())
    names = [_bare_host(url), host_name(url)] if means_bare_host else [host_name(url)]
    own: CIMultiDict[str] = CIMultiDict()
    for name in names:
        for header, value in headers.get(name, {}).items():
            own[header] = value  # in place of one whose name differs by case alone
    reserved = sorted(name for name in own if name.lower() in _RESERVED)
    if reserved:
        raise ConfigError(f"headers for {host_name(url)} must not set {', '.join(reserved)}: the engine does")
    if "Authorization" in own:
        return dict(own)
    token = next((tokens[name] for name in reversed(names) if name in tokens), None)
    if token is not None and (url.scheme == "https" or is_loopback(_bare_host(url))):
        own["Authorization"] = f"Bearer {token}"
    elif login is not None and means_bare_host:
        own["Authorization"] = basic_auth(*login)
    return dict(own)


def read_url(text: str, *, encoded: bool = False) -> URL:
    """The url as yarl reads it; ValueError where it is none."""
    try:
        return URL(text, encoded=encoded)
    except IndexError as error:  # of "//[]@"
        raise ValueError("Invalid URL") from error


def _bare_host(url: URL) -> str:
    return (url.host or "").lower()


def address_in(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that the host of a url is; None where it is a name."""
    with suppress(ValueError):
        return ipaddress.ip_address(host)
    return None


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the host."""
    address = address_in(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


_AMAZON: Final = "algorithm credential date expires security-token signature signedheaders"
_OLDER: Final = "signature awsaccesskeyid googleaccessid expires policy key-pair-id x-amz-security-token"
_AZURE: Final = "sig sv ss srt st se sr sp spr sip si sdd scid skoid sktid skt ske sks skv saoid suoid"
_SIGNED_BY: Final[Mapping[str, frozenset[str]]] = {
    "x-amz-signature": frozenset(f"x-amz-{name}" for name in _AMAZON.split()),
    "x-goog-signature": frozenset(f"x-goog-{name}" for name in _AMAZON.split()),
    "signature": frozenset(_OLDER.split()),  # S3's and Google's first form, and CloudFront's
    "sig": frozenset(_AZURE.split()),
}
"""All that a url's signature consists of, by the parameter that makes it a signed one. Without that parameter the
others mean something else: a plain ``?expires=`` or ``?st=`` may choose the content."""


def object_name(url: str) -> str:
    """The url without the parameters of its signature: the same for every signature that one object is asked by.

    Everything else stays as it is, in its order: a ``versionId`` names another content, and so may a user or a token.
    """
    base, mark, rest = url.partition("?")
    if not mark:
        return url
    query, hash_mark, fragment = rest.partition("#")
    parameters = [(part.partition("=")[0].lower(), part) for part in query.split("&")]
    names = {name for name, _ in parameters}
    signature = frozenset[str]().union(*(parts for sign, parts in _SIGNED_BY.items() if sign in names))
    if not signature:
        return url
    kept = "&".join(part for name, part in parameters if name not in signature)
    return base + (mark + kept if kept else "") + hash_mark + fragment
