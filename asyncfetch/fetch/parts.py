"""How fast a host's streams have been, and so into how many parts a large range is best cut."""

from __future__ import annotations

from collections import OrderedDict, deque
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from asyncfetch.fetch.batch import server_of
from asyncfetch.fetch.gate import current_caller
from asyncfetch.ranges import choose_part_bytes

if TYPE_CHECKING:
    from asyncfetch.config import FetchConfig
    from asyncfetch.fetch.hosts import Host

__all__ = ["ALONE", "Company", "PartSizes", "StreamRate"]

MIN_TELLING_BYTES = 256 * 1024
"""Shorter bodies say nothing of a rate: they come with the head, or at the pace of a connection that warms up."""
REMEMBERED_BODIES = 16
"""Enough that a stalled one and one that had come while the loop was busy don't matter; few enough to see a change."""
UNKNOWN_RATE_PARTS = 2
"""Where a far host had no telling body yet: half of what a slow stream would take, for one request more. Of what is
asked for in one turn those that come first are cut, about as many as can be in flight at once: what is needed first
then comes early, and what is needed last hardly later."""
FAR_SECONDS = 0.02
"""To the first byte. So far away TCP takes several rounds until a stream has its rate, which a cold start waits for."""
SOON_FACTOR = 1.1
"""What somebody waits for may take so many times as long as the fastest way, if that saves requests."""
AHEAD_FACTOR = 4.0
"""What is read ahead likewise: it has the time that the episodes in front of it take, and a request costs CPU."""
MAX_SERVERS = 256
"""Servers whose hosts are remembered, about 200 bytes each."""


class Company(NamedTuple):
    """The requests that are about to be made in one turn of the loop, as one of them sees them."""

    requests: int = 1
    """All of them, this one included: they share what is free."""
    ahead: int = 0
    """Those that were asked for before this one, or are more urgent."""


ALONE = Company()


class StreamRate:
    """How fast the latest bodies came, each in a stream of its own."""

    __slots__ = ("_rates",)

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=REMEMBERED_BODIES)

    def record(self, nbytes: int, seconds: float) -> None:
        """Takes notice of a whole body and of what it took from its head on."""
        if nbytes >= MIN_TELLING_BYTES and seconds > 0:
            self._rates.append(nbytes / seconds)

    @property
    def bytes_per_second(self) -> float | None:
        """The median; None where there was no telling body yet."""
        return median(self._rates) if self._rates else None


class PartSizes:
    """Chooses how long the parts of ranges are.

    What is asked of a server may come from another host (a redirect, a signed url), so that one has to be told.
    Bounded: the server used least recently is forgotten.
    """

    __slots__ = ("_config", "_hosts")

    def __init__(self, config: FetchConfig) -> None:
        self._config = config
        self._hosts: OrderedDict[str, Host] = OrderedDict()

    def came_from(self, url: str, host: Host, length: int) -> None:
        """Takes notice of the host that had so many bytes of ``url``; of the first short body, too."""
        server = server_of(url)
        if length < MIN_TELLING_BYTES and server in self._hosts:
            return  # what is short may come from elsewhere, as on the Hub
        self._hosts[server] = host
        self._hosts.move_to_end(server)
        if len(self._hosts) > MAX_SERVERS:
            self._hosts.popitem(last=False)

    def choose(self, url: str, length: int, company: Company) -> int:
        """The longest part that a range of ``length`` bytes, at least 1, is fetched in: at most ``part_bytes``."""
        config = self._config
        host = self._hosts.get(server_of(url)) if length >= 2 * config.min_part_bytes else None
        if host is None:
            return config.part_bytes
        rate = host.rate.bytes_per_second
        first_byte_seconds = host.times.first_byte.median_seconds
        if rate is None:
            in_front = host.waiting + company.ahead
            is_cut = first_byte_seconds >= FAR_SECONDS and in_front + UNKNOWN_RATE_PARTS <= host.limit
            return min(config.part_bytes, -(-length // UNKNOWN_RATE_PARTS) if is_cut else length)
        return choose_part_bytes(
            length,
            bytes_per_second=rate,
            first_byte_seconds=first_byte_seconds,
            free=host.free // company.requests,
            in_flight=host.in_flight,
            part_bytes=config.part_bytes,
            min_part_bytes=min(config.min_part_bytes, config.part_bytes),
            soon_factor=SOON_FACTOR if current_caller().urgent else AHEAD_FACTOR,
        )
