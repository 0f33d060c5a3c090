"""RateLimit: what a server says is left of our quotas, and who waits for more."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncfetch.config import FetchConfig, RetryConfig
from asyncfetch.fetch.hosts import PAUSE_SPREAD, Hosts
from asyncfetch.fetch.retry import quotas, spent_quota_seconds
from asyncfetch.fetch.urls import Route

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncfetch.fetch import Fetcher
    from tests.fetch.conftest import FakeTime, LyingServer
    from tests.fetch.conftest import Step as StepType

CONTENT = bytes(range(256)) * 4
BLANKS = st.sampled_from(["", " ", "\t", "  "])
COUNTS = st.integers(0, 10**15 - 1)


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ('"api";r=0;t=55', [(0, 55.0)]),
        ('"api";t=55;r=0', [(0, 55.0)]),
        ('"burst";r=50;t=1, "daily";pk=:c2VjcmV0:;r=7;t=3600', [(50, 1.0), (7, 3600.0)]),
        ("default;r=0;t=5", [(0, 5.0)]),
        ('"a, \\"b\\";r=9";r=0;t=5', [(0, 5.0)]),
        ('"api";r=3;r=0;t=5', [(0, 5.0)]),
        ('"api";r=0', []),
        ('"api";t=5', []),
        ('"api";r=0.5;t=5', []),
        ('"api";r=-1;t=5', []),
        ('"api";r=0;t=1e9', []),
        ('"api";r;t', []),
        ('"api";qu="r=0;t=5";r=1;t=5', [(1, 5.0)]),
        ("limit=100, remaining=0, reset=5", []),  # the seventh draft's
        ('"api";r=0;t=5,', []),
        ('"api";r=0;t=5, "web"x;r=0;t=6', []),
        ('"api";r=0;t=5 "web";r=0;t=6', []),
        ('"api;r=0;t=5', []),
        ("", []),
        ('"api";r=0;t=5' + " " * 5000, []),
    ],
)
def test_quotas_say_what_is_left(field: str, expected: list[tuple[int, float]]) -> None:
    assert quotas(field) == expected


@st.composite
def members(draw: st.DrawFn) -> tuple[str, tuple[int, float]]:
    """A quota as some server may write it, and what it says."""
    quoted = st.text(string.printable.replace("\\", "").replace('"', "")[:90]).map('"{}"'.format)
    name = draw(quoted | st.from_regex(r"[A-Za-z*][A-Za-z0-9*/:._-]*", fullmatch=True))
    remaining, seconds = draw(COUNTS), draw(COUNTS)
    others = draw(st.lists(st.sampled_from(['qu="requests"', "pk=:c2Vj:", "x", "q=9", "w=0", "rr=0", 'n=";r=0;t=1"'])))
    parameters = draw(st.permutations([f"r={remaining}", f"t={seconds}", *others]))
    return "".join([name, *(f"{draw(BLANKS)};{draw(BLANKS)}{one}" for one in parameters)]), (remaining, float(seconds))


@given(st.lists(members(), min_size=1, max_size=5), BLANKS)
def test_quotas_are_found_in_any_order(several: list[tuple[str, tuple[int, float]]], blank: str) -> None:
    field = f"{blank},{blank}".join(text for text, _ in several)
    assert quotas(field) == [said for _, said in several]
    spent = [seconds for _, (remaining, seconds) in several if remaining == 0]
    expected = max(spent) + 1 if spent else None
    assert spent_quota_seconds({"RateLimit": field}) == expected


@given(st.text(st.sampled_from('"\\;,= \trt019:é-') | st.characters(), max_size=60))
@example('"api";r=\u0660;t=\u0665')  # digits, but not of ours
def test_no_field_is_an_error(field: str) -> None:
    for remaining, seconds in quotas(field):
        assert remaining >= 0 <= seconds


async def test_answer_with_the_last_of_a_quota_pauses_the_next(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType], time: FakeTime
) -> None:
    url = server.put("/x", CONTENT)
    time.luck = 0.5
    async with fetcher_with(time) as fetcher:
        server.will(step(headers={"RateLimit": '"resolvers";r=1;t=20'}), step(headers={"RateLimit": '"r";t=20;r=0'}))
        for start in (0, 10):
            await fetcher.fetch(url, start, start + 10)
        assert time.sleeps == []
        assert bytes(await fetcher.fetch(url, 20, 30)) == CONTENT[20:30]
        [host] = fetcher.statistics().hosts.values()
    assert time.sleeps == pytest.approx([21 * (1 + PAUSE_SPREAD / 2)])
    assert (host.requests, host.errors, host.throttled, host.limit) == (3, 0, 0, 64)  # nothing was refused


async def test_a_redirect_pauses_the_host_that_redirects(
    fetcher_with: Callable[..., Fetcher],
    server: LyingServer,
    lying_server: type[LyingServer],
    step: type[StepType],
    time: FakeTime,
) -> None:
    async with lying_server() as other, fetcher_with(time) as fetcher:
        theirs = other.put("/x", CONTENT)
        headers = {"RateLimit": '"resolvers";r=0;t=20', "Location": theirs, "Content-Length": "0"}
        server.every = lambda _: step(status=302, headers=headers, body=b"")
        await fetcher.fetch(server.url("/x"), 0, 10)
        await fetcher.fetch(theirs, 10, 20)
        assert time.sleeps == []
        await fetcher.fetch(server.url("/x"), 20, 30)
    assert len(time.sleeps) == 1


async def test_quota_spent_beyond_every_wait_pauses_no_request(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType], time: FakeTime
) -> None:
    url = server.put("/x", CONTENT)
    seconds = int(RetryConfig().retry_after_maximum_seconds)
    async with fetcher_with(time) as fetcher:
        server.will(step(headers={"RateLimit": f'"resolvers";r=0;t={seconds}'}))
        for start in (0, 10):
            await fetcher.fetch(url, start, start + 10)
    assert time.sleeps == []


async def test_the_pause_is_counted_from_the_head_of_the_answer(time: FakeTime) -> None:
    time.luck = 0.0
    host = Hosts(FetchConfig(), time.clock(), lambda: time.now).get("https://h:443", Route)
    async with host.permit():
        host.pause(20.0)
        time.now += 5.0
        async with host.permit():
            assert time.sleeps == [15.0]
    async with host.permit():
        assert time.sleeps == [15.0]
