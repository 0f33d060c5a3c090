"""New connections where a process may open few files."""

from __future__ import annotations

import subprocess
import sys

import pytest

from asyncfetch.testing import RangeServer

CONTENT = bytes(range(256))
PROGRAM = """
import asyncio, resource, sys
from collections import Counter
import asyncfetch as af

port, is_direct = sys.argv[1], sys.argv[2] == "direct"
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))

async def main():
    once = af.RetryConfig(attempts=1)
    async with af.Fetcher(af.FetchConfig(trust_env=False, retry=once), _by_session=not is_direct) as fetcher:
        for _ in range(2):
            for number in range(1, 61):
                assert await fetcher.fetch(f"http://127.0.0.{number}:{port}/x", 0, 10) == bytes(range(10))
        print("one after another")
        urls = [f"http://127.0.0.{number}:{port}/x" for number in range(1, 100)]
        found = await asyncio.gather(*(fetcher.fetch(url, 0, 10) for url in urls), return_exceptions=True)
        print(next(str(one) for one in found if isinstance(one, af.FetchError)))
    many = af.RetryConfig(attempts=50)  # as many as it takes: how long a connection is in use depends on the machine
    async with af.Fetcher(af.FetchConfig(trust_env=False, retry=many), _by_session=not is_direct) as fetcher:
        found = await asyncio.gather(*(fetcher.fetch(url, 0, 10) for url in urls))
        assert found == [bytes(range(10))] * len(urls)
        print("at once, by repeats")

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="every address of 127.0.0.0/8 is a host on Linux alone")
@pytest.mark.parametrize("way", ["direct", "session"])
def test_idle_connections_give_way_to_other_hosts(way: str) -> None:
    with RangeServer({"x": CONTENT}, host="0.0.0.0", tls=False) as server:
        arguments = [sys.executable, "-c", PROGRAM, server.url.rpartition(":")[2], way]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    one_after_another, error, at_once = done.stdout.splitlines()
    assert one_after_another == "one after another"
    assert "there is no socket for a connection to 127.0.0." in error
    assert "Too many open files): as many files are open as may be; raise that limit (ulimit -n)" in error
    assert at_once == "at once, by repeats"
