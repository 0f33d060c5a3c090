"""A throw-away certificate authority for servers on loopback."""

from __future__ import annotations

import functools
import os
import ssl
import tempfile
import weakref
from dataclasses import dataclass

from asyncfetch.errors import ConfigError, MissingDependency

__all__ = ["Certificate", "TemporaryPem", "certificate_for"]

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4", "::1")


@dataclass(frozen=True, slots=True)
class Certificate:
    """A server's certificate and who signed it."""

    context: ssl.SSLContext
    """For the server's side; it may serve many servers at once."""
    authority_pem: bytes
    """The authority that clients must trust."""
    key_and_chain_pem: bytes
    """The private key and the certificate, for a server that isn't Python's."""


@functools.lru_cache(maxsize=16)
def certificate_for(host: str) -> Certificate:
    """The certificate for ``host`` and the loopback names, made once a process. Blocks for some 50 ms.

    Raises:
        ConfigError: No host can have this name.
        MissingDependency: trustme isn't installed.
    """
    try:
        import trustme
    except ImportError as exc:
        message = 'a test server with TLS needs trustme: pip install "asyncfetch[testing]", or pass tls=False'
        raise MissingDependency(message) from exc
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        issued = authority.issue_cert(*dict.fromkeys((host, *LOOPBACK_NAMES)))
    except UnicodeError as exc:
        raise ConfigError(f"no certificate can be made for the host {host!r}: {exc}") from exc
    issued.configure_cert(context)
    return Certificate(context, authority.cert_pem.bytes(), issued.private_key_and_cert_chain_pem.bytes())


class TemporaryPem:
    """A temporary file with ``content``, gone with ``remove()``, with the last reference, or at exit."""

    def __init__(self, content: bytes) -> None:
        descriptor, self.path = tempfile.mkstemp(prefix="asyncfetch-ca-", suffix=".pem")
        self.remove = weakref.finalize(self, _unlink, self.path, os.getpid())
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)


def _unlink(path: str, owner_pid: int) -> None:
    if os.getpid() == owner_pid and os.path.exists(path):  # a forked child that exits leaves its parent's file
        os.unlink(path)
