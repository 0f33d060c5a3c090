"""The border to aiohttp and to the system: their exceptions in, ours out, the most specific first."""

from __future__ import annotations

import socket
import ssl

import aiohttp

from asyncfetch.errors import AccessDenied, ConfigError, ConnectionFailed, FetchTimeout, InvalidResponse, redact_text
from asyncfetch.fetch.refusals import broken, challenges
from asyncfetch.fetch.retry import AttemptFailed, Verdict, cause_of

__all__ = ["SESSION_ERRORS", "connect_failure", "session_failure"]

SESSION_ERRORS = (aiohttp.ClientError, OSError, ValueError)
"""Everything that a request of aiohttp raises; its timeouts and TLS errors are OSErrors."""

_ALERT = r"b'\x15\x03"
"""Begins what a server of TLS sends to who doesn't speak it, as aiohttp quotes that."""
_UNKNOWN_NAME = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}


def connect_failure(
    error: OSError | None, host: str, *, proxy: str | None = None, is_name: bool = False
) -> AttemptFailed:
    """Return the failed attempt that an error in place of a connection stands for.

    Args:
        error: The system's; None where it says nothing.
        host: ``host:port`` of the url asked for.
        proxy: The same of the proxy that was to be connected to; None where there is none.
        is_name: Whether the name's look-up failed.
    """
    match error:
        case ssl.SSLCertVerificationError():
            message = (
                f"the certificate of {host} isn't trusted ({error}): if it is the right host, set"
                " FetchConfig(ca_file=...) to the PEM file of its authority"
            )
            return AttemptFailed(ConnectionFailed, message, Verdict.FATAL)
        case ssl.SSLError():
            message = f"no TLS session with {host} ({error}): does it speak https on this port?"
            message += " For plain http, write http:// in the url"
            return AttemptFailed(ConnectionFailed, message, Verdict.ONCE)
    if is_name:
        unknown = getattr(error, "errno", None) in _UNKNOWN_NAME
        # A proxy resolves the names of the hosts behind it.
        message = f"the name of {proxy or host} can't be resolved ({error}): check the url and the network"
        return AttemptFailed(ConnectionFailed, message, Verdict.ONCE if unknown else Verdict.AGAIN)
    # Nothing is said of a connection that the other end closed in the handshake.
    said = str(error or "") or "closed in the handshake of TLS"
    if proxy is not None:
        return AttemptFailed(ConnectionFailed, f"no connection to the proxy {proxy} for {host} ({said}): is it up?")
    return AttemptFailed(ConnectionFailed, f"no connection to {host} ({said}): is it up, and is the port right?")


def session_failure(error: Exception, host: str, proxy: str | None = None) -> AttemptFailed:
    """Return the failed attempt that an error of aiohttp's session stands for.

    Args:
        error: One of SESSION_ERRORS.
        host: ``host:port`` of the url asked for.
        proxy: The same of the proxy in between; None where there is none.

    Raises:
        ConfigError: The request itself can't be made.
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
            return AttemptFailed(AccessDenied, message, Verdict.FATAL, 407)
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
            return AttemptFailed(InvalidResponse, f"{host} answers in TLS: write https:// in the url", Verdict.ONCE)
        case aiohttp.ClientResponseError():
            message = f"{host} doesn't answer in HTTP ({' '.join(error.message.split())})"
            return AttemptFailed(InvalidResponse, message, Verdict.ONCE)
        case _:
            return AttemptFailed(ConnectionFailed, broken(host, str(error) or type(error).__name__))
