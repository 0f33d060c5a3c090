"""The reasons for an answer that isn't the object's, in words: a login, a proxy, the wrong port, a page. Pure.

A status alone says little: 403 is a token's that wasn't sent as well as a proxy's. Nothing here shows a secret: of
credentials the kind is told, of a server's challenge the scheme and the realm.
"""

from __future__ import annotations

import errno
import re
import socket
import ssl
from html import unescape
from typing import TYPE_CHECKING

import aiohttp
from multidict import CIMultiDict

from asyncfetch.errors import (
    AccessDenied,
    ConfigError,
    ConnectionFailed,
    FetchError,
    FetchTimeout,
    InvalidResponse,
    redact_text,
    redact_url,
)
from asyncfetch.fetch.retry import AttemptFailed, RetryVerdict, cause_of
from asyncfetch.runtime.sockets import SocketsClosed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from yarl import URL

MAX_VALUE_BYTES = 64 * 1024 - 1
"""Longest value of a header field that the session reads: a field has 64 KiB, its name included. curl reads 100 KB."""
MAX_FIELDS = 512
"""Most header fields that the session reads, which all are held."""
PLAIN_TO_TLS = "plain http on a port of https"
CERTIFICATE_WANTED = "a client certificate is wanted"
"""Our words in place of what servers say of it, each in its own."""
CERTIFICATE_REMEDY = "name its PEM file by FetchConfig(client_cert_file=...)"

_TOLD_PLAIN = re.compile(
    rb"plain HTTP request was sent to HTTPS|HTTP request to an HTTPS server|speaking plain HTTP to an SSL-enabled",
    re.IGNORECASE,
)
_TOLD_UNCERTIFIED = re.compile(
    rb"No required SSL certificate was sent|The SSL certificate error|client certificate (?:is )?required",
    re.IGNORECASE,
)
_CERTIFICATE_ALERT = re.compile("ALERT_(?:[A-Z_]*CERTIFICATE|UNKNOWN_CA|ACCESS_DENIED)")
"""Alerts by which a server refuses the certificate that it was shown, or that it wasn't, in OpenSSL's words."""
_TITLE = re.compile(rb"<title[^>]*>([^<]{1,200})", re.IGNORECASE)
_PAGE = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*(?:<\?xml[^>]*>\s*|<!--.*?-->\s*)*(?:<!doctype\s+html|<html[\s>])", re.IGNORECASE | re.DOTALL
)
_OF_PAGES = frozenset({"html", "htm", "xhtml", "shtml", "php", "asp", "aspx", "jsp", "cgi", "pl", "do"})
_EXTENSION = re.compile(r"[^/]\.([A-Za-z0-9]{1,8})$")
_GATEWAYS = frozenset({400, 403, 404, 407, 451, 502, 503, 504, 511})
"""Statuses by which proxies answer for themselves."""
_OWN_WORDS = ("X-Squid-Error", "Proxy-Status")
_CHALLENGE = re.compile(r"([A-Za-z][A-Za-z0-9_-]{0,40})(?:\s+(.*))?$", re.DOTALL)
_SPOKEN = frozenset({"basic", "bearer"})
_KINDS = {"bearer": "a bearer token", "basic": "a Basic login"}
_MAX_CHARACTERS = 80
_NEVER_ANSWERED = re.compile(
    r"the connection to |no connection to \S+ \(closed in the handshake|no TLS session with \S+ \(.*ALERT_HANDSHAKE"
)
"""Begins the messages of connections that ended in place of an answer, which may have any reason."""


def broken(host: str, cause: object) -> AttemptFailed:
    """Return the failed attempt that a connection is which ended in place of an answer."""
    if _CERTIFICATE_ALERT.search(str(cause)):
        message = f"{host} wants a client certificate, or another one ({cause}): {CERTIFICATE_REMEDY}"
        return AttemptFailed(AccessDenied, message, RetryVerdict.FATAL)
    return AttemptFailed(ConnectionFailed, f"the connection to {host} broke ({cause})")


def too_slow(
    phase: str, limit_seconds: float, host: str, *, came_bytes: int = 0, step_bytes: float = 0.0
) -> AttemptFailed:
    """Return the failed attempt that a phase is which took too long; a body's brought too little of each step."""
    message = f"{phase} took longer than {limit_seconds:g} s: is {host} up? Or raise the timeout"
    if came_bytes:
        message += f", or lower min_bytes_per_second: {came_bytes} of {step_bytes:.0f} came"
    # A host that drops what we send keeps dropping it, and each try costs the whole limit.
    return AttemptFailed(FetchTimeout, message, RetryVerdict.ONCE if phase == "connecting" else RetryVerdict.AGAIN)


def fields_of(headers: Mapping[str, str], name: str) -> list[str]:
    """Return the values of all fields of this name."""
    return [value for other, value in headers.items() if other.lower() == name.lower()]


def explained(status: int, headers: Mapping[str, str], body: bytes) -> Mapping[str, str]:
    """The headers of an error answer, with what its text says: see AddressBook.explain."""
    word = None
    if status == 400 and _TOLD_PLAIN.search(body):
        word = PLAIN_TO_TLS
    elif status in {400, 403} and _TOLD_UNCERTIFIED.search(body):
        word = CERTIFICATE_WANTED
    elif status in _GATEWAYS and "html" in headers.get("Content-Type", "").lower():
        title = _TITLE.search(body)
        word = _shown(unescape(title[1].decode("utf-8", "replace"))) if title is not None else None
    if not word or "X-Error-Code" in headers:
        return headers
    changed = CIMultiDict(headers)
    changed["X-Error-Code"] = word
    return changed


def may_be_page(url: str, headers: Mapping[str, str]) -> bool:
    """Return whether an answer calls itself a page of HTML where the object's name says that it is something else."""
    if not headers.get("Content-Type", "").lower().startswith(("text/html", "application/xhtml")):
        return False
    extension = _EXTENSION.search(re.split("[?#]", url, maxsplit=1)[0])
    return extension is not None and extension[1].lower() not in _OF_PAGES


def is_page(body: bytes | bytearray) -> bool:
    """Return whether it begins as one."""
    return _PAGE.match(body[:4096]) is not None


def circumstances(
    failure: AttemptFailed, url: URL, sent: Mapping[str, str], *, proxy: str | None, withheld: bool
) -> str:
    """Return what is to be added to the message of a failed request; empty where nothing is known.

    ``sent`` are the request's headers, ``proxy`` is the ``host:port`` of the one that was asked, and ``withheld`` says
    whether a token is configured for the host that may not go there.
    """
    status, headers = failure.status, failure.headers
    if status is None:
        if _NEVER_ANSWERED.match(failure.message) is None:
            return ""
        if url.scheme == "http":
            return "; if this port speaks TLS, write https:// in the url"
        return f"; if the server wants a client certificate, or another one, {CERTIFICATE_REMEDY}"
    text = ""
    if failure.kind is AccessDenied:
        text = _login("Proxy-" if status == 407 else "", "WWW-" if status != 407 else "", url, sent, headers)
        if withheld:
            text += "; a token that is configured for this host goes over https only"
    if status in _GATEWAYS:
        text += _speaker(headers, proxy)
    return text


def challenges(headers: Mapping[str, str], name: str) -> list[str]:
    """Return what each challenge in the headers of this name asks for: the scheme, realm and error where they say."""
    found: list[str] = []
    for value in fields_of(headers, name):
        for part in re.findall(r'(?:"(?:[^"\\]|\\.)*"|[^",])+', value[:4096]):
            parameter = part.strip()
            match = _CHALLENGE.match(parameter)
            if match is not None:
                found.append(match[1])
                parameter = match[2] or ""
            shown = re.match(r'(realm|error)\s*=\s*("(?:[^"\\]|\\.)*"|[^\s",]+)', parameter, re.IGNORECASE)
            if shown is not None and found:
                found[-1] += f" {shown[1].lower()}={_shown(shown[2])}"
    return found


def _login(to: str, asker: str, url: URL, sent: Mapping[str, str], headers: Mapping[str, str]) -> str:
    kinds = _credentials(url, sent, f"{to}Authorization", is_proxys=bool(to))
    text = f"; sent: {', '.join(kinds)}" if kinds else "; no credentials were sent"
    asked = challenges(headers, f"{asker or to}Authenticate")
    if not asked:
        return text
    text += f"; asked for: {', '.join(asked)}"
    if any(one.split()[0].lower() in _SPOKEN for one in asked):
        return text
    names = " and ".join(dict.fromkeys(one.split()[0] for one in asked))
    ways = (
        "Basic logins are, in the proxy's url"
        if to
        else ("bearer tokens are, by FetchConfig(tokens=...), Basic logins, in the url or in ~/.netrc, and headers")
    )
    return f"{text}, of which none is spoken here ({names}): {ways}"


def _credentials(url: URL, sent: Mapping[str, str], name: str, *, is_proxys: bool) -> list[str]:
    kinds = []
    for header, value in sent.items():
        if header.lower() == name.lower():
            scheme, separator, _ = value.partition(" ")
            kinds.append(_KINDS.get(scheme.lower() if separator else "", f"an {name} header of another kind"))
        elif header.lower() == "cookie" and not is_proxys:
            kinds.append("a cookie")
    text = str(url)
    if not is_proxys and redact_url(text) != text:
        kinds.append("a signed url")
    return kinds


def _speaker(headers: Mapping[str, str], proxy: str | None) -> str:
    """Return who answers, where that may not be the server."""
    own = [f"{name}: {_shown(headers[name])}" for name in _OWN_WORDS if name in headers]
    said = own + [f"{name}: {_shown(headers[name])}" for name in ("Via", "Server") if name in headers]
    if own:
        return f"; that is a proxy's own answer ({', '.join(said)})"
    words = f" ({', '.join(said)})" if said else ""
    if proxy is not None:
        return f"; asked through the proxy {proxy}, whose own answer it may be{words}"
    return f"; it came through a proxy or cache, whose own answer it may be{words}" if "Via" in headers else ""


def _shown(text: str) -> str:
    """A server's words, fit for a message."""
    printable = "".join(one if one.isprintable() else " " for one in redact_text(text))
    return " ".join(printable.split())[:_MAX_CHARACTERS]


SESSION_ERRORS = (aiohttp.ClientError, OSError, ValueError)
"""Everything that a request of aiohttp raises; its timeouts and TLS errors are OSErrors."""

_ALERT = r"b'\x15\x03"
"""Begins what a server of TLS sends to who doesn't speak it, as aiohttp quotes that."""
_TOO_LONG = ("Got more than", "Too many headers")
"""Begins what aiohttp says of a head with a field beyond MAX_VALUE_BYTES, which it quotes, or with too many."""
UNKNOWN_NAME = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}
"""Numbers of errors that say that there is no such name."""


class LengthUnread(AttemptFailed):
    """aiohttp reads no head whose Content-Length comes twice, though it may be the same; our own connections do."""


def connect_failure(
    error: OSError | None, host: str, *, proxy: str | None = None, is_name: bool = False
) -> AttemptFailed:
    """Return the failed attempt that an error of the system in place of a connection stands for.

    ``host`` and ``proxy`` are ``host:port``, of the url asked for and of the proxy that was to be connected to.
    ``is_name`` says whether the name's look-up failed.
    """
    match error:
        case ssl.SSLCertVerificationError():
            message = (
                f"the certificate of {host} isn't trusted ({error}): if it is the right host, name the PEM file of"
                " its authority by FetchConfig(ca_file=...), --ca-file or SSL_CERT_FILE"
            )
            return AttemptFailed(ConnectionFailed, message, RetryVerdict.FATAL)
        case ssl.SSLError() if _CERTIFICATE_ALERT.search(str(error)):
            return broken(host, error)
        case ssl.SSLError():
            message = f"no TLS session with {host} ({error}): does it speak https on this port?"
            message += " For plain http, write http:// in the url"
            return AttemptFailed(ConnectionFailed, message, RetryVerdict.ONCE)
        case SocketsClosed():
            message = f"no connection to {host}: its Fetcher was closed meanwhile"
            return AttemptFailed(ConnectionFailed, message, RetryVerdict.FATAL)
        case OSError(errno=errno.EMFILE | errno.ENFILE):
            message = f"there is no socket for a connection to {host} ({error}): as many files are open as may be;"
            message += " raise that limit (ulimit -n), or hold fewer connections (max_requests_per_host) and files"
            return AttemptFailed(FetchError, message)
    if is_name:
        unknown = getattr(error, "errno", None) in UNKNOWN_NAME
        # A proxy resolves the names of the hosts behind it.
        message = f"the name of {proxy or host} can't be resolved ({error}): check the url and the network"
        return AttemptFailed(ConnectionFailed, message, RetryVerdict.ONCE if unknown else RetryVerdict.AGAIN)
    # Nothing is said of a connection that the other end closed in the handshake.
    said = str(error or "") or "closed in the handshake of TLS"
    if proxy is not None:
        return AttemptFailed(ConnectionFailed, f"no connection to the proxy {proxy} for {host} ({said}): is it up?")
    verdict = RetryVerdict.AGAIN if str(error or "") else RetryVerdict.ONCE
    return AttemptFailed(
        ConnectionFailed, f"no connection to {host} ({said}): is it up, and is the port right?", verdict
    )


def session_failure(error: Exception, host: str, proxy: str | None = None) -> AttemptFailed:
    """Return the failed attempt that one of SESSION_ERRORS stands for; see ``connect_failure``.

    ConfigError where the request itself can't be made.
    """
    match error:
        case aiohttp.ClientConnectorCertificateError(certificate_error=ssl.SSLError() as cause):
            return connect_failure(cause, host)
        case aiohttp.ClientConnectorDNSError():
            return connect_failure(error.os_error, host, proxy=proxy, is_name=True)
        case aiohttp.ClientConnectorSSLError():
            return connect_failure(
                error.os_error if isinstance(error.os_error, ssl.SSLError) else ssl.SSLError(str(error)), host
            )
        case aiohttp.ClientProxyConnectionError():
            return connect_failure(error.os_error, host, proxy=proxy)
        case aiohttp.ClientConnectorError():
            return connect_failure(error.os_error, host)
        case aiohttp.ClientHttpProxyError(status=407):
            asked = ", ".join(challenges(error.headers or {}, "Proxy-Authenticate"))
            message = f"the proxy {proxy} wants credentials, or others: put them into its url in the environment"
            message += f"; asked for: {asked}, and Basic is all that is spoken with proxies" if asked else ""
            return AttemptFailed(AccessDenied, message, RetryVerdict.FATAL, 407)
        case aiohttp.ClientHttpProxyError():
            message = f"the proxy {proxy} gives no tunnel to {host} ({error.status} {error.message})"
            return AttemptFailed(ConnectionFailed, message, status=error.status)
        case TimeoutError():
            return AttemptFailed(FetchTimeout, f"{host} took too long ({error})")
        case aiohttp.InvalidURL() | ValueError():
            raise ConfigError(
                f"a request to {host} can't be made from this url or these headers: {redact_text(str(error))}"
            ) from cause_of(error)
        case aiohttp.ClientPayloadError():
            return AttemptFailed(ConnectionFailed, f"the body from {host} broke off ({error})")
        case aiohttp.ClientResponseError() if _ALERT in error.message:
            return AttemptFailed(
                InvalidResponse, f"{host} answers in TLS: write https:// in the url", RetryVerdict.ONCE
            )
        case aiohttp.ClientResponseError() if error.message.startswith(_TOO_LONG):
            message = (
                f"the head of the answer from {host} is too long: no field may have more than 64 KiB, and there may"
                f" be no more than {MAX_FIELDS}"
            )
            return AttemptFailed(InvalidResponse, message, RetryVerdict.ONCE)
        case aiohttp.ClientResponseError() if "Content-Length" in error.message:
            message = f"{host} states Content-Length twice, or not as a number ({' '.join(error.message.split())})"
            return LengthUnread(InvalidResponse, message, RetryVerdict.ONCE)
        case aiohttp.ClientResponseError():
            message = f"{host} doesn't answer in HTTP ({' '.join(error.message.split())})"
            return AttemptFailed(InvalidResponse, message, RetryVerdict.ONCE)
        case _:
            return broken(host, str(error) or type(error).__name__)
