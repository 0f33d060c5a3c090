"""The border to aiohttp: its exceptions in, ours out, the most specific first."""

from __future__ import annotations

import socket

import aiohttp

from asyncfetch.errors import AccessDenied, ConfigError, ConnectionFailed, FetchTimeout, InvalidResponse, redact_text
from asyncfetch.fetch.retry import AttemptFailed, Verdict, cause_of

__all__ = ["FOREIGN", "as_failure"]

FOREIGN = (aiohttp.ClientError, OSError, ValueError)
"""Everything that a request of aiohttp raises; its timeouts and TLS errors are OSErrors."""

_UNKNOWN_NAME = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}


def as_failure(error: Exception, host: str, proxy: str | None = None) -> AttemptFailed:
    """The failed attempt that ``error`` stands for; ConfigError is raised where the request itself can't be made.

    Args:
        error: One of FOREIGN.
        host: ``host:port`` of the url asked for.
        proxy: The same of the proxy in between; None where there is none.
    """
    match error:
        case aiohttp.ClientConnectorCertificateError():
            message = (
                f"the certificate of {host} isn't trusted ({error.certificate_error}): if it is the right host, set"
                " FetchConfig(ca_file=...) to the PEM file of its authority"
            )
            return AttemptFailed(ConnectionFailed, message, Verdict.FATAL)
        case aiohttp.ClientConnectorSSLError():
            message = f"no TLS session with {host} ({error.os_error}): does it speak https on this port?"
            return AttemptFailed(ConnectionFailed, message, Verdict.ONCE)
        case aiohttp.ClientConnectorDNSError():
            unknown = getattr(error.os_error, "errno", None) in _UNKNOWN_NAME
            # A proxy resolves the names of the hosts behind it.
            message = f"the name of {proxy or host} can't be resolved ({error.os_error}): check the url and the network"
            return AttemptFailed(ConnectionFailed, message, Verdict.ONCE if unknown else Verdict.AGAIN)
        case aiohttp.ClientProxyConnectionError():
            message = f"no connection to the proxy {proxy} for {host} ({_said(error.os_error)}): is it up?"
            return AttemptFailed(ConnectionFailed, message)
        case aiohttp.ClientConnectorError():
            message = f"no connection to {host} ({_said(error.os_error)}): is it up, and is the port right?"
            return AttemptFailed(ConnectionFailed, message)
        case aiohttp.ClientHttpProxyError(status=407):
            message = f"the proxy {proxy} wants credentials, or others: put them into its url in the environment"
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
        case aiohttp.ClientResponseError():
            message = f"{host} doesn't answer in HTTP ({' '.join(error.message.split())})"
            return AttemptFailed(InvalidResponse, message, Verdict.ONCE)
        case _:
            return AttemptFailed(
                ConnectionFailed, f"the connection to {host} broke ({str(error) or type(error).__name__})"
            )


def _said(error: OSError) -> str:
    """Nothing is said of a connection that the other end closed in the handshake."""
    return str(error) or "closed in the handshake of TLS"
