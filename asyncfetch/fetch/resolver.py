"""The choice among a host's addresses for a new connection.

A large host has several addresses, and each is a server or a row of them. Connections that all go to the first one make
it slow and leave the others idle. So new ones go round all of a name's addresses, each client from a place of its own.

An address that fails is set aside for a while: it is tried last, after those that work. It fails when it refuses or
breaks a connection, when it doesn't answer, or when a neighbour answers sooner that aiohttp's happy eyeballs tried
later (RFC 8305; a quarter of a second is what they give each). One that is tried last is still tried: when all are set
aside, the order among them is as if none were.

aiohttp's own cache of names goes round the addresses too, but sets none aside, and gives a retry the same old answer.
"""

from __future__ import annotations

import random
import socket
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from aiohttp.abc import AbstractResolver, ResolveResult

from asyncfetch.errors import FetchError
from asyncfetch.fetch.retry import AttemptFailed
from asyncfetch.runtime.concurrently import copied, kept
from asyncfetch.runtime.single_flight import AsyncCache, CachedValue
from asyncfetch.runtime.threads import in_daemon, no_thread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from asyncfetch.fetch.connection import Peer

    LookUp = Callable[[str, int, socket.AddressFamily], Awaitable[list[ResolveResult]]]

NAME_SECONDS = 10.0
"""Seconds for which a name's answer is used. aiohttp's; S3's answers hold for less, and name new addresses each
time."""
ASIDE_SECONDS = 60.0
"""Seconds for which a failed address is tried last. Each time it then still fails costs one connection a quarter of a
second."""
SLOW_SECONDS = 1.0
"""An address that gave no connection within this has failed, even if none waited any longer."""
MAX_NAMES = 1024
MAX_ASIDE = 4096
"""Bounds of what is remembered; a crawler's list of hosts must not grow for ever."""


@dataclass(slots=True, eq=False)
class _Answer:
    addresses: list[ResolveResult]
    error: OSError | None
    found_at: float
    turn: int


class Resolver(AbstractResolver):
    """aiohttp's resolver behind a cache of names, giving addresses in the order in which they are to be tried.

    For one loop. Names are looked up once for all who ask at the same time, by ``look_up``: it takes a host, a port and
    a family, and raises OSError where there is no address; None for the system's way. ``now`` gives monotonic seconds.
    """

    def __init__(self, look_up: LookUp | None = None, *, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self._look_up = look_up or system_addresses
        self._names: AsyncCache[tuple[str, int, int], _Answer] = AsyncCache(now, MAX_NAMES)
        self._aside: dict[Peer, float] = {}

    async def resolve(
        self, host: str, port: int = 0, family: int = socket.AF_UNSPEC, *, newer_than: float | None = None
    ) -> list[ResolveResult]:
        """Return all addresses of a name, the one to try first in front; OSError where it has none.

        The answer isn't older than ``newer_than``, by ``now``.
        """
        key = host, port, int(family)

        async def find() -> CachedValue[_Answer]:
            return await self._found(host, port, family)

        answer = await self._names.get(key, find)
        if newer_than is not None and answer.found_at < newer_than:
            self._names.forget(key, answer)
            answer = await self._names.get(key, find)
        if answer.error is not None:
            raise copied(answer.error)
        answer.turn += 1
        now = self.now()
        aside = [one for one in answer.addresses if self._aside.get((one["host"], one["port"]), now) > now]
        usable = [one for one in answer.addresses if one not in aside]
        return _in_turn(usable, answer.turn) + _in_turn(aside, answer.turn)

    def connected(self, tried: list[Peer], peer: Peer | None) -> None:
        """Note that one of the addresses tried gave a connection; those tried before it had their chance."""
        if peer is not None:
            self._aside.pop(peer, None)
            if peer in tried:
                self.set_aside(tried[: tried.index(peer)])

    def given_up(self, tried: list[Peer], *, since: float) -> None:
        """Note that a connection isn't waited for any more: only where that took long is it an address's fault."""
        if self.now() - since >= SLOW_SECONDS:
            self.set_aside(tried)

    def set_aside(self, peers: Iterable[Peer]) -> None:
        """These failed just now: for a while they are tried after all others."""
        now = self.now()
        if len(self._aside) > MAX_ASIDE:
            self._aside = {peer: until for peer, until in self._aside.items() if until > now}
        if len(self._aside) <= MAX_ASIDE:
            self._aside.update(dict.fromkeys(peers, now + ASIDE_SECONDS))

    async def close(self) -> None:
        """Nothing is left to close: a thread that still waits for its answer ends by itself."""

    async def _found(self, host: str, port: int, family: int) -> CachedValue[_Answer]:
        began = self.now()
        try:
            addresses = await self._look_up(host, port, socket.AddressFamily(family))
        except OSError as error:  # found, so that all who wait for it get it, but no one after them
            return CachedValue(_Answer([], kept(error), began, 0), 0.0)
        if not addresses:
            return CachedValue(_Answer([], OSError(socket.EAI_NONAME, "it has no address"), began, 0), 0.0)
        return CachedValue(_Answer(addresses, None, began, random.randrange(len(addresses))), NAME_SECONDS)


async def system_addresses(host: str, port: int, family: socket.AddressFamily) -> list[ResolveResult]:
    """All addresses of a name, by the system; OSError where it has none, AttemptFailed where no thread can be started.

    In a thread of its own, and not in asyncio's executor, as aiohttp has it: that takes no call when the program's main
    thread is over, where a loop in another one goes on, and a program that ends waits for it, half a minute where a
    name server doesn't answer.
    """
    try:
        return await in_daemon(partial(_addresses, host, port, family), name="asyncfetch look-up")
    except RuntimeError as error:
        raise AttemptFailed(FetchError, str(no_thread(error) or error)) from error


def _addresses(host: str, port: int, family: int) -> list[ResolveResult]:
    numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    results = []
    for kind, _, protocol, _, address in socket.getaddrinfo(
        host, port, family, socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
    ):
        # A link-local address is none without its interface, which only the whole of it names.
        number = socket.getnameinfo(address, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]
        results.append(ResolveResult(hostname=host, host=number, port=port, family=kind, proto=protocol, flags=numeric))
    return results


def _in_turn(addresses: list[ResolveResult], turn: int) -> list[ResolveResult]:
    first = turn % max(len(addresses), 1)
    return addresses[first:] + addresses[:first]
