"""Whether the learned limit ends where the best fixed one is, on three shapes of server.

    python -m bench.limit                   some 23 minutes
    python -m bench.limit --quick           one repeat, within five minutes

The servers: *unlimited*, 50 ms to the first byte and 4 MiB/s a stream; *throttling*, which answers 503 with Retry-After
to what is above 50 requests of any second; *slowing*, whose first byte comes after 50 ms while 32 are in flight, and
with the square of their number later beyond. Limits fixed at 4 to 256, and the learned one up to 256, ask for all that
the server gives, one after the other in a new order each repeat. The learned limit begins anew each time, and is
measured once it has had time to settle. The table shows medians of requests per second.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections import deque
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from rich.console import Console
from rich.progress import track

import asyncfetch as af
from asyncfetch.testing import Fault, RangeServer, ServedRequest
from bench.nginx import NginxServer
from bench.rows import Row, show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

KIB, MIB = 1024, 1024**2
FIXED_LIMITS = (4, 8, 16, 32, 64, 128, 256)
HIGHEST_LIMIT = 256
ASKING_AT_ONCE = 2 * HIGHEST_LIMIT
OBJECT_BYTES, RANGE_BYTES = 16 * MIB, 64 * KIB
GOAL = 0.8
"""Of the best fixed limit's rate."""
REST_SECONDS = 1.2
"""Between two runs, so that the throttling server has forgotten the last one."""


@dataclass(frozen=True)
class Plan:
    """How long it is measured, and how often."""

    limits: Sequence[int]
    repeats: int
    measured_seconds: float
    fixed_settling_seconds: float
    """Connections are opened in this time."""
    learned_settling_seconds: float


@dataclass(frozen=True)
class Run:
    """One client in one repeat."""

    requests_per_second: float
    """Ranges that came."""
    limit: int
    """At the end."""


@contextmanager
def unlimited(directory: Path) -> Iterator[str]:
    """The url of an object that is as fast as its link, however many ask."""
    (directory / "object").write_bytes(bytes(OBJECT_BYTES))
    with NginxServer(directory, tls=False, first_byte_seconds=0.05, bytes_per_second=4 * MIB) as server:
        yield f"{server.url}/object"


@contextmanager
def throttling(_: Path, *, per_second: int = 50) -> Iterator[str]:
    """The url of an object that may be asked for so often in any second; each request takes 0.1 s."""
    served: deque[float] = deque()

    def rule(request: ServedRequest) -> Fault | None:
        while served and served[0] <= request.started - 1:
            served.popleft()
        if len(served) >= per_second:
            return Fault(answer_status=503, answer_headers={"Retry-After": "1"}, first_byte_seconds=0.0)
        served.append(request.started)
        return None

    with RangeServer({"/object": bytes(OBJECT_BYTES)}, tls=False, first_byte_seconds=0.1, fault=rule) as server:
        yield f"{server.url}/object"


@contextmanager
def slowing(_: Path, *, well: int = 32) -> Iterator[str]:
    """The url of an object whose server does so many at a time well, and more of them badly."""

    def rule(_: ServedRequest) -> Fault:
        in_flight = server.statistics().in_flight
        return Fault.slow(first_byte_seconds=0.05 * max(1.0, in_flight / well) ** 2)

    with RangeServer({"/object": bytes(OBJECT_BYTES)}, tls=False, fault=rule) as server:
        yield f"{server.url}/object"


SERVERS: dict[str, Callable[[Path], AbstractContextManager[str]]] = {
    "unlimited": unlimited,
    "throttling": throttling,
    "slowing": slowing,
}


async def ask(url: str, limit: int | None, plan: Plan) -> Run:
    """As many ranges as the server gives; ``limit`` None learns it."""
    config = af.FetchConfig(
        max_requests_per_host=HIGHEST_LIMIT if limit is None else limit,
        learn_limit=limit is None,
        max_span_bytes=0,
        trust_env=False,
    )
    starts = random.Random(0)
    came = 0
    measuring = False

    async def ask_on() -> None:
        nonlocal came
        while True:
            start = starts.randrange(OBJECT_BYTES - RANGE_BYTES)
            with suppress(af.FetchError):
                await fetcher.fetch(url, start, start + RANGE_BYTES)
                came += measuring

    async with af.Fetcher(config) as fetcher, anyio.create_task_group() as group:
        for _ in range(ASKING_AT_ONCE):
            group.start_soon(ask_on)
        await anyio.sleep(plan.learned_settling_seconds if limit is None else plan.fixed_settling_seconds)
        measuring, since = True, time.perf_counter()
        await anyio.sleep(plan.measured_seconds)
        measuring, seconds = False, time.perf_counter() - since
        [host] = fetcher.statistics().hosts.values()
        group.cancel_scope.cancel()
    return Run(came / seconds, host.limit)


def measure(server: str, plan: Plan) -> list[Row]:
    """The rows of one server: each client's, and the learned limit's rate over that of the best fixed one."""
    clients: dict[str, int | None] = {**{str(limit): limit for limit in plan.limits}, "learned": None}
    runs: dict[str, list[Run]] = {name: [] for name in clients}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="asyncfetch-bench-")))
        url = stack.enter_context(SERVERS[server](directory))
        order = [name for _ in range(plan.repeats) for name in random.sample(list(clients), len(clients))]
        for name in track(order, server, console=Console(stderr=True), transient=True):
            runs[name].append(anyio.run(ask, url, clients[name], plan))
            time.sleep(REST_SECONDS)
    rates = {name: [run.requests_per_second for run in of_client] for name, of_client in runs.items()}
    best = max(statistics.median(rates[str(limit)]) for limit in plan.limits)
    return [
        *(Row.of(f"{server}, limit {name}", "ranges/s", each) for name, each in rates.items()),
        Row.of(f"{server}, limit learned: at the end", "", [run.limit for run in runs["learned"]]),
        Row.of(f"{server}: learned / best fixed", "x", [rate / best for rate in rates["learned"]], f">= {GOAL}"),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="one repeat")
    parser.add_argument("--servers", default=",".join(SERVERS), help="with commas")
    parser.add_argument("--limits", default=",".join(map(str, FIXED_LIMITS)), help="fixed ones, with commas")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--seconds", type=float, default=6.0, help="measured in each run")
    parser.add_argument("--settling", type=float, default=20.0, help="seconds that the learned limit has before")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    asked = parser.parse_args(arguments)
    plan = Plan(
        limits=list(map(int, asked.limits.split(","))),
        repeats=asked.repeats or (1 if asked.quick else 5),
        measured_seconds=asked.seconds,
        fixed_settling_seconds=min(2.0, asked.settling),
        learned_settling_seconds=asked.settling,
    )
    rows = [row for server in asked.servers.split(",") for row in measure(server, plan)]
    show(rows, as_json=asked.json)


if __name__ == "__main__":
    main()
