"""Whom a connection is for, and how the making of it goes."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import asyncio

    from asyncfetch.fetch.transports.hedging import Race

__all__ = ["Connecting", "ConnectionUser", "Peer", "current_user", "peer_of"]

Peer = tuple[str, int]
"""Address and port."""


@dataclass(slots=True)
class Connecting:
    """One connection while it is being made."""

    began: float
    """Seconds, by the resolver's clock."""
    is_retry: bool = False
    """Whether an earlier one has failed, so that an old answer to its name won't do."""
    tried: list[Peer] = field(default_factory=list)
    """In the order in which they were begun."""


class ConnectionUser(Protocol):
    """A request that wants to know on which connection it goes out."""

    needs_new_connection: bool
    """Whether a pooled connection won't do, since one of the host's has failed."""
    is_second: bool
    """Whether it is made beside another request, on a connection of its own; the pooled ones stay for others."""
    race: Race[Any] | None
    """Of which it is the first request; None where there can be no second one."""
    connecting: Connecting | None
    """How its own is made; None where none is, since there is a pooled one. Whoever is asked first for it sets it."""
    transport: asyncio.BaseTransport | None
    """Its connection's; None until there is one."""

    def connected(self, transport: asyncio.Transport | None, *, reused: bool) -> None:
        """The connection is there and the request goes out on it now."""
        ...


current_user: ContextVar[ConnectionUser] = ContextVar("current_user")
"""The request that runs in this task, and in those that aiohttp starts for it; it has no other way to be told."""


def peer_of(transport: asyncio.BaseTransport) -> Peer | None:
    """Where a connection leads to; None where that can't be told any more."""
    # A TLS transport that was closed twice has none left to ask, which CPython before 3.11.5 stumbles over.
    if getattr(transport, "_ssl_protocol", transport) is None:
        return None
    name = transport.get_extra_info("peername")
    return (str(name[0]), int(name[1])) if name else None
