"""Which way the scheme of a url leads to its object."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, Self

from asyncfetch.errors import ConfigError, is_redacted, redact_url
from asyncfetch.fetch.transports.file import FileTransport
from asyncfetch.fetch.transports.http import HttpTransport
from asyncfetch.fetch.transports.hub import HubTransport
from asyncfetch.fetch.transports.other import OtherTransport
from asyncfetch.fetch.transports.s3 import S3Transport

if TYPE_CHECKING:
    from asyncfetch.config import FetchConfig
    from asyncfetch.fetch.download import Download
    from asyncfetch.fetch.hosts import Hosts
    from asyncfetch.fetch.retry import Attempt, Clock
    from asyncfetch.ranges import ObjectInfo

__all__ = ["Transport", "Transports", "WritableTransport"]

MAX_URLS = 1024
"""Urls whose transport is remembered."""
FILE_THREADS = 16
"""Threads that read local files; NVMe disks are saturated by fewer."""

WritableTransport = FileTransport | S3Transport
"""One way to reach objects that can be put and deleted."""


class Transport(Protocol):
    """One way to reach objects."""

    def attempts(self, download: Download) -> Attempt:
        """Return what makes an attempt at what the download lacks, with the failure of the one before."""
        ...

    async def listdir(self, url: str) -> list[ObjectInfo]:
        """The entries of a directory, as Fetcher.listdir gives them."""
        ...


class Transports:
    """All ways. Belongs to the loop that opened it."""

    def __init__(self, config: FetchConfig, hosts: Hosts, clock: Clock, http: HttpTransport) -> None:
        """Takes over ``http``; use ``open``."""
        self.http = http
        self.files = FileTransport(hosts, FILE_THREADS, max_entries=config.max_listed_entries)
        self._s3 = S3Transport(config, http, clock)
        self._hub = HubTransport(config, http, clock)
        self._others = OtherTransport(config, hosts, clock)
        self.of_string = lru_cache(MAX_URLS)(self._find)
        """The same as ``of`` for what is known to be a string."""

    @classmethod
    async def open(cls, config: FetchConfig, hosts: Hosts, clock: Clock) -> Self:
        """All ways on the running loop; ConfigError where ``ca_file`` or the environment can't be read."""
        return cls(config, hosts, clock, await HttpTransport.open(config, hosts, clock))

    async def aclose(self) -> None:
        """Closes every connection, without waiting for any server. Nothing may be under way."""
        self._others.close()
        await self._s3.aclose()
        await self.http.aclose()

    def of(self, url: str) -> Transport:
        """The way to ``url``; ConfigError where there is none."""
        if not isinstance(url, str):
            raise ConfigError(f"a url or path must be a string, not of type {type(url).__name__}: str(path) makes one")
        return self.of_string(url)

    def _find(self, url: str) -> Transport:
        scheme, separator, _ = url.partition("://")
        if not separator:
            return self.files
        if is_redacted(url):
            raise ConfigError(
                f"{url!r} has lost its password or signature, as a url does in a message and when it is pickled: use it"
                " as it was. Only a process that multiprocessing starts gets it whole, such as a loader's worker"
            )
        match scheme.lower():
            case "file":
                return self.files
            case "http" | "https":
                return self.http
            case "s3":
                return self._s3
            case "hf":
                return self._hub
            case "":
                raise ConfigError(f"{redact_url(url)!r} has no scheme in front of its ://")
            case _:
                return self._others

    async def endpoint(self, url: str) -> str:
        """See EndpointReader."""
        transport = self.of(url)
        return await transport.endpoint(url) if isinstance(transport, S3Transport | HubTransport) else ""

    def writable(self, url: str, verb: str) -> WritableTransport:
        """The way to ``url`` for ``verb``, which writes; ConfigError where there is none."""
        transport = self.of(url)
        if not isinstance(transport, WritableTransport):
            message = f"{redact_url(url)!r} can't be written: {verb} takes s3:// and file:// urls and plain paths"
            raise ConfigError(message)
        return transport
