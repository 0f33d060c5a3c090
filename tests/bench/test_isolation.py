"""bench/isolation.py measures what it says."""

from __future__ import annotations

from dataclasses import replace

import anyio
import pytest

import asyncfetch as af
from bench import isolation
from bench.isolation import Hosts, ranges_of

pytestmark = pytest.mark.usefixtures("programs_are_warm")


def test_isolation_has_ratios_for_each_kind_of_bad_host() -> None:
    with Hosts(4) as hosts:
        ratios = isolation.measure_isolation(hosts, 8, 2)
    assert list(ratios) == list(isolation.BAD)
    # A good host that waited for the bad one would wait for its time-out, 30 s and more.
    assert all(len(values) == 2 and min(values) > 0 and max(values) < 60 for values in ratios.values())


def test_last_host_alone_is_bad_while_it_is_switched_on() -> None:
    async def ask(host: int) -> bool:
        async with af.Fetcher(replace(hosts.config, retry=af.RetryConfig(attempts=1))) as fetcher:
            try:
                return len(await fetcher.fetch_many(ranges_of([hosts.urls[host]], 2))) == 2
            except af.FetchError:
                return False

    with Hosts(1) as hosts:
        hosts.let_last("says 503")
        assert [anyio.run(ask, host) for host in (0, 3)] == [True, False]
        hosts.let_last(None)
        assert anyio.run(ask, 3)
