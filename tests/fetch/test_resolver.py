"""All addresses of a name are used, those that work before those that don't."""

from __future__ import annotations

import socket
from collections import Counter
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Literal

import anyio
import pytest
from aiohttp.abc import ResolveResult
from hypothesis import given
from hypothesis import strategies as st

from asyncfetch.config import RetryConfig, TimeoutConfig
from asyncfetch.errors import ConnectionFailed, FetchTimeout
from asyncfetch.fetch import resolver as resolver_module
from asyncfetch.fetch.resolver import ASIDE_SECONDS, NAME_SECONDS, Resolver
from asyncfetch.ranges import ByteRange

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from asyncfetch.fetch import Fetcher
    from tests.fetch.conftest import LyingServer
    from tests.fetch.conftest import Step as StepType

CONTENT = bytes(range(256)) * 256
ADDRESSES = tuple(f"127.0.0.{n}" for n in range(1, 9))
NAME = "many.test"


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


class Names:
    """Knows one name. Its addresses may be changed; look-ups are counted."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = list(addresses)
        self.asked = 0
        self.seconds = 0.0

    async def look_up(self, host: str, port: int, _: socket.AddressFamily) -> list[ResolveResult]:
        self.asked += 1
        await anyio.sleep(self.seconds)
        if host != NAME:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [
            ResolveResult(hostname=host, host=one, port=port, family=family_of(one), proto=0, flags=0)
            for one in self.addresses
        ]


@pytest.fixture
def way() -> str:
    """Whichever the other tests take: aiohttp's session goes round addresses, too, but sets none aside."""
    return "direct"


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    """What every fetcher of the test asks for addresses."""
    names = Names(ADDRESSES)
    monkeypatch.setattr(resolver_module, "system_addresses", names.look_up)
    return names


@asynccontextmanager
async def servers_at(
    lying_server: type[LyingServer], addresses: Sequence[str]
) -> AsyncIterator[tuple[str, dict[str, LyingServer]]]:
    """A server on each of the addresses and one port, and the url of the same object on all."""
    async with AsyncExitStack() as stack:
        servers: dict[str, LyingServer] = {}
        port = 0
        for address in addresses:
            servers[address] = await stack.enter_async_context(lying_server(host=address, port=port))
            servers[address].put("/x", CONTENT)
            port = servers[address].port
        yield f"http://{NAME}:{port}/x", servers


@contextmanager
def silent_at(address: str, port: int) -> Iterator[None]:
    """An address that drops whoever wants to connect: its queue is full and nobody takes from it."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind((address, port))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex((address, port))
        yield


async def test_connections_go_round_all_addresses(
    fetcher_with: Callable[..., Fetcher], lying_server: type[LyingServer], names: Names
) -> None:
    async with servers_at(lying_server, ADDRESSES) as (url, servers), fetcher_with(max_span_bytes=0) as fetcher:
        await fetcher.fetch_many(ByteRange(url, start, start + 1) for start in range(32))
        assert [server.connections for server in servers.values()] == [4] * 8
        assert names.asked == 1


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as one:
            one.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")


@needs_ipv6
async def test_connections_go_round_the_addresses_of_both_families(
    fetcher_with: Callable[..., Fetcher], lying_server: type[LyingServer], names: Names
) -> None:
    both = names.addresses = ["::1", "127.0.0.1"]
    async with servers_at(lying_server, both) as (url, servers), fetcher_with(max_span_bytes=0) as fetcher:
        await fetcher.fetch_many(ByteRange(url, start, start + 1) for start in range(32))
        assert [server.connections for server in servers.values()] == [16] * 2


@needs_ipv6
@pytest.mark.parametrize(("dead", "alive"), [("::1", "127.0.0.1"), ("127.0.0.1", "::1")])
async def test_a_family_that_leads_nowhere_is_tried_once(
    fetcher_with: Callable[..., Fetcher], lying_server: type[LyingServer], names: Names, dead: str, alive: str
) -> None:
    names.addresses = [dead, alive]
    async with (
        servers_at(lying_server, [alive]) as (url, servers),
        fetcher_with(retry=RetryConfig(attempts=1), keepalive_seconds=1e-3) as fetcher,
    ):
        for start in range(4):
            assert bytes(await fetcher.fetch(url, start, start + 4)) == CONTENT[start : start + 4]
            await anyio.sleep(2e-3)
        assert list(fetcher._transports.http._connector.resolver._aside) == [(dead, servers[alive].port)]


@needs_ipv6
async def test_an_address_of_ipv6_in_a_url(
    fetcher_with: Callable[..., Fetcher], lying_server: type[LyingServer], step: type[StepType]
) -> None:
    async with lying_server(host="::1") as server:
        server.put("/x", CONTENT)
        url, name = server.url("/x", "[::1]"), f"[::1]:{server.port}"
        for key in ("::1", name):
            async with fetcher_with(tokens={key: "token"}) as fetcher:
                server.will(step(status=302, headers={"Location": url}))
                assert bytes(await fetcher.fetch(url, 3, 9)) == CONTENT[3:9]
                assert server.requests[-1].headers["host"] == name
                assert server.requests[-1].headers["authorization"] == "Bearer token"
                assert list(fetcher.statistics().hosts) == [f"http://{name}"]
    async with fetcher_with(retry=RetryConfig(attempts=1)) as fetcher:
        with pytest.raises(ConnectionFailed) as caught:
            await fetcher.fetch(url, 3, 9)
    assert caught.value.host == name


async def test_an_address_where_nobody_listens_is_tried_once(
    fetcher_with: Callable[..., Fetcher], lying_server: type[LyingServer], names: Names
) -> None:
    async with (
        servers_at(lying_server, ADDRESSES[:3]) as (url, servers),
        fetcher_with(retry=RetryConfig(attempts=1), keepalive_seconds=1e-3) as fetcher,
    ):
        names.addresses = list(ADDRESSES[:4])
        for start in range(12):
            assert await fetcher.fetch(url, start, start + 1) == CONTENT[start : start + 1]
            await anyio.sleep(2e-3)
        assert sum(server.connections for server in servers.values()) == 12
        assert min(server.connections for server in servers.values()) >= 3
        assert set(fetcher._transports.http._connector.resolver._aside) == {
            (ADDRESSES[3], next(iter(servers.values())).port)
        }


async def test_address_that_drops_packets_costs_little_and_once(
    fetcher_with: Callable[..., Fetcher], lying_server: type[LyingServer], names: Names
) -> None:
    async with servers_at(lying_server, ADDRESSES[:2]) as (url, servers):
        port = servers[ADDRESSES[0]].port
        names.addresses = list(ADDRESSES[:3])
        with silent_at(ADDRESSES[2], port):
            async with fetcher_with(retry=RetryConfig(attempts=1), keepalive_seconds=1e-3) as fetcher:
                with anyio.fail_after(1.5):  # the system would try for two minutes
                    for start in range(9):
                        await fetcher.fetch(url, start, start + 1)
                        await anyio.sleep(2e-3)
                assert set(fetcher._transports.http._connector.resolver._aside) == {(ADDRESSES[2], port)}


async def test_a_retry_goes_elsewhere_with_a_fresh_answer(
    fetcher_with: Callable[..., Fetcher], lying_server: type[LyingServer], names: Names, step: type[StepType]
) -> None:
    retry = RetryConfig(outage_seconds=0)
    async with servers_at(lying_server, ADDRESSES[:2]) as (url, servers), fetcher_with(retry=retry) as fetcher:
        bad, good = ADDRESSES[:2]
        names.addresses = [bad]
        servers[bad].every = lambda _: step(silent="reset")
        with pytest.raises(ConnectionFailed):
            await fetcher.fetch(url, 0, 1)
        asked = names.asked
        assert asked == 5  # one for each attempt
        names.addresses = [bad, good, bad]
        assert await fetcher.fetch(url, 0, 1) == CONTENT[:1]
        assert servers[good].connections == 1


@pytest.mark.parametrize("kind", ["reset", "stall"])
async def test_an_address_that_breaks_what_it_accepts_is_set_aside(
    fetcher_with: Callable[..., Fetcher],
    lying_server: type[LyingServer],
    names: Names,
    step: type[StepType],
    kind: Literal["reset", "stall"],
) -> None:
    async with (
        servers_at(lying_server, ADDRESSES[:2]) as (url, servers),
        fetcher_with(max_requests_per_host=1, keepalive_seconds=1e-3) as fetcher,
    ):
        bad, good = ADDRESSES[:2]
        names.addresses = [bad, good]
        servers[bad].every = lambda _: step(silent=kind)
        for start in range(6):
            await fetcher.fetch(url, start, start + 1)
            await anyio.sleep(2e-3)
        assert servers[bad].connections <= 1


async def test_dead_addresses_are_one_clear_error(fetcher_with: Callable[..., Fetcher], names: Names) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        async with fetcher_with(retry=RetryConfig(attempts=2)) as fetcher:
            with anyio.fail_after(2), pytest.raises(ConnectionFailed, match=r"no connection to many\.test"):
                await fetcher.fetch(f"http://{NAME}:{port}/x", 0, 1)


async def test_a_name_that_is_unknown_is_asked_for_once_by_all(
    fetcher_with: Callable[..., Fetcher], names: Names
) -> None:
    names.seconds = 0.05
    errors: list[str] = []

    async with fetcher_with(retry=RetryConfig(attempts=1)) as fetcher:

        async def ask() -> None:
            with pytest.raises(ConnectionFailed, match="can't be resolved") as caught:
                await fetcher.fetch("http://none.test/x", 0, 1)
            errors.append(str(caught.value))

        async with anyio.create_task_group() as group:
            for _ in range(50):
                group.start_soon(ask)
    assert len(errors) == 50
    assert names.asked == 1


async def test_a_cancelled_look_up_is_taken_over(names: Names) -> None:
    resolver = Resolver()
    names.seconds = 0.05
    found: list[int] = []

    async def ask(seconds: float) -> None:
        with anyio.move_on_after(seconds):
            found.append(len(await resolver.resolve(NAME, 80)))

    async with anyio.create_task_group() as group:
        group.start_soon(ask, 0.01)
        group.start_soon(ask, 5)
        group.start_soon(ask, 5)
    assert found == [8, 8]
    assert names.asked == 2


class Ticking:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def order(resolver: Resolver) -> list[str]:
    return [one["host"] for one in await resolver.resolve(NAME, 80)]


async def test_names_are_asked_again_after_a_while(names: Names) -> None:
    clock = Ticking()
    resolver = Resolver(now=clock)
    await order(resolver)
    clock.now += NAME_SECONDS * 0.8
    await order(resolver)
    assert names.asked == 1
    clock.now += NAME_SECONDS * 0.2
    await order(resolver)
    assert names.asked == 2


async def test_address_that_is_set_aside_comes_back(names: Names) -> None:
    clock = Ticking()
    resolver = Resolver(now=clock)
    names.addresses = ["127.0.0.1", "127.0.0.2"]
    resolver.set_aside([("127.0.0.1", 80)])
    assert [(await order(resolver))[0] for _ in range(4)] == ["127.0.0.2"] * 4
    clock.now += ASIDE_SECONDS
    assert {(await order(resolver))[0] for _ in range(4)} == {"127.0.0.1", "127.0.0.2"}


async def test_address_that_works_again_is_no_longer_aside(names: Names) -> None:
    resolver = Resolver(names.look_up, now=Ticking())
    resolver.set_aside([("127.0.0.1", 80)])
    resolver.connected([("127.0.0.2", 80), ("127.0.0.1", 80)], ("127.0.0.1", 80))
    assert (await order(resolver))[-1] == "127.0.0.2"
    assert set(resolver._aside) == {("127.0.0.2", 80)}


@pytest.mark.parametrize(("seconds", "is_aside"), [(0.5, False), (2.0, True)])
async def test_giving_up_early_says_nothing_about_an_address(names: Names, seconds: float, is_aside: bool) -> None:
    clock = Ticking()
    resolver = Resolver(names.look_up, now=clock)
    began = clock.now
    clock.now += seconds
    resolver.given_up([("127.0.0.1", 80)], since=began)
    assert bool(resolver._aside) == is_aside


async def test_a_retry_asks_anew_and_only_once_for_all(names: Names) -> None:
    clock = Ticking()
    resolver = Resolver(names.look_up, now=clock)
    await order(resolver)
    clock.now += 1.0
    began = clock.now
    for _ in range(5):
        await resolver.resolve(NAME, 80, newer_than=began)
    assert names.asked == 2


@given(
    count=st.integers(1, 8),
    aside=st.sets(st.integers(0, 7)),
    turns=st.integers(1, 20),
)
async def test_order_of_addresses_has_the_working_ones_first_in_turn(count: int, aside: set[int], turns: int) -> None:
    names = Names(ADDRESSES[:count])
    resolver = Resolver(names.look_up, now=Ticking())
    resolver.set_aside((ADDRESSES[n], 80) for n in aside)
    good = {ADDRESSES[n] for n in range(count) if n not in aside}
    firsts = Counter[str]()
    for _ in range(turns):
        addresses = await order(resolver)
        assert sorted(addresses) == sorted(names.addresses)
        assert set(addresses[: len(good)]) == good
        firsts[addresses[0]] += 1
    evenly = [firsts[address] for address in good or names.addresses]
    assert sum(evenly) == turns
    assert max(evenly) - min(evenly) <= 1


async def test_address_silent_in_the_handshake_is_set_aside(
    fetcher_with: Callable[..., Fetcher], names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolver_module, "SLOW_SECONDS", 0.1)
    timeouts = TimeoutConfig(connect_seconds=0.2)
    with socket.create_server((ADDRESSES[0], 0)) as silent:  # the system accepts, nobody answers
        port = silent.getsockname()[1]
        names.addresses = [ADDRESSES[0]]
        async with fetcher_with(timeouts=timeouts, retry=RetryConfig(attempts=1)) as fetcher:
            with pytest.raises(FetchTimeout):
                await fetcher.fetch(f"https://{NAME}:{port}/x", 0, 1)
            assert set(fetcher._transports.http._connector.resolver._aside) == {(ADDRESSES[0], port)}
