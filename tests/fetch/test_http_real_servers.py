"""Every verb, on objects of every length, of servers that others have written: see ``real_servers``."""

from __future__ import annotations

import os
import random
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from asyncfetch.cache import ByteCache
from asyncfetch.config import FetchConfig, RetryConfig
from asyncfetch.errors import RangeNotSatisfiable
from asyncfetch.fetch import Fetcher
from asyncfetch.ranges import ByteRange
from asyncfetch.runtime.concurrently import gather
from tests.fetch.conftest import Step
from tests.fetch.real_servers import SERVERS, Absent, caching_proxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from asyncfetch.fetch import RangeReader
    from tests.fetch.conftest import LyingServer, Request

OBJECTS = {f"{size}.bin": random.Random(size).randbytes(size) for size in (0, 1, 2082, 2_500_000)}
"""Empty, one byte, shorter than what is asked for below, and longer than what is cut out of a whole object."""
COUNT = 65_536
LONGER_THAN_A_SLICE = 1_500_000


@pytest.fixture(scope="module", params=SERVERS)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with (
        TemporaryDirectory() as directory
    ):  # not one of pytest's, which another user, as whom Apache serves, can't read
        os.chmod(directory, 0o755)
        yield from run(request.param, Path(directory))


def run(server: str, directory: Path) -> Iterator[str]:
    root, scratch = directory / "root", directory / "scratch"
    root.mkdir()
    scratch.mkdir()
    for name, content in OBJECTS.items():
        (root / name).write_bytes(content)
    try:
        block = SERVERS[server](root, scratch)
    except Absent as error:
        pytest.skip(str(error))
    with block as url:
        yield url


@pytest_asyncio.fixture
async def patient() -> AsyncIterator[Fetcher]:
    """Waits for a server that doesn't say when it listens."""
    retry = RetryConfig(attempts=200, initial_seconds=0.01, maximum_seconds=0.1)
    async with Fetcher(FetchConfig(trust_env=False, retry=retry)) as fetcher:
        yield fetcher


async def read_by_every_verb(reader: RangeReader, url: str, content: bytes, *, ranges: bool) -> None:
    size = len(content)
    for count in (1, COUNT, LONGER_THAN_A_SLICE):
        if ranges or size < 1_000_000:
            info, tail = await reader.fetch_tail(url, count)
            assert (info.size, bytes(tail)) == (size, content[-count:]), count
            assert await reader.fetch(url, -count) == content[-count:], count
            info, head = await reader.fetch_head(url, count)
            assert (info.size, bytes(head)) == (size, content[:count]), count
    assert (await reader.stat(url)).size == size
    assert await reader.fetch(url) == content
    assert await reader.fetch(url, 0, size) == content
    middle = size // 2 if ranges else min(size // 2, COUNT)
    if ranges or size < 1_000_000:
        assert await reader.fetch(url, middle) == content[middle:]
        assert len(await reader.fetch(url, size)) == 0
    assert await reader.fetch(url, middle // 2, middle) == content[middle // 2 : middle]
    buffer = bytearray(middle)
    await reader.fetch_into(url, 0, middle, buffer)
    assert buffer == content[:middle]
    several = [ByteRange(url, 0, middle), ByteRange(url, 0, None), ByteRange(url, 0, middle // 2)]
    assert await reader.fetch_many(several) == [content[:middle], content, content[: middle // 2]]
    for start, stop in [(0, size + 1), (size, size + 10), (size + 5, None)]:
        with pytest.raises(RangeNotSatisfiable):
            await reader.fetch(url, start, stop)


def knows_ranges(request: pytest.FixtureRequest) -> bool:
    return "http.server" not in request.node.name


@pytest.mark.parametrize("cached", [False, True])
async def test_every_verb_is_right(url: str, patient: Fetcher, request: pytest.FixtureRequest, cached: bool) -> None:
    async with ByteCache(patient, max_bytes=16 * 2**20) as cache:
        for name, content in OBJECTS.items():
            reader: RangeReader = cache if cached else patient
            await read_by_every_verb(reader, f"{url}/{name}", content, ranges=knows_ranges(request))


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize(
    "ask",
    [
        lambda fetcher, url: fetcher.fetch_tail(url, COUNT),
        lambda fetcher, url: fetcher.fetch_tail(url, LONGER_THAN_A_SLICE),
        lambda fetcher, url: fetcher.fetch_head(url, COUNT),
        lambda fetcher, url: fetcher.fetch_head(url, 0),
    ],
    ids=["tail", "long tail", "head", "stat"],
)
async def test_answer_to_the_first_question_is_right(
    url: str,
    patient: Fetcher,
    request: pytest.FixtureRequest,
    name: str,
    ask: Callable[[Fetcher, str], object],
) -> None:
    """Nothing is known of the object, or of the server."""
    if not knows_ranges(request) and len(OBJECTS[name]) > LONGER_THAN_A_SLICE and "tail" in request.node.name:
        pytest.skip("without ranges, the end of a long object is refused")
    info, view = await ask(patient, f"{url}/{name}")  # type: ignore[misc]
    content = OBJECTS[name]
    assert info.size == len(content)
    assert bytes(view) in {content[-COUNT:], content[-LONGER_THAN_A_SLICE:], content[:COUNT], b""}
    assert len(view) > 0 or "stat" in request.node.name or not content


async def test_a_caching_proxy_fetches_each_slice_once(server: LyingServer, tmp_path: Path) -> None:
    """Of several machines, each with a fetcher: at the same time, and later."""
    content = OBJECTS["2500000.bin"]
    server.put("/a/b.bin", content)
    ranges = [(start, min(start + 300_000, len(content))) for start in range(0, len(content), 170_000)]
    try:
        proxy = caching_proxy(server.url("").removesuffix("/"), tmp_path)
    except Absent as error:
        pytest.skip(str(error))
    config = FetchConfig(trust_env=False)

    async def read(url: str) -> None:
        async with Fetcher(config) as fetcher:
            wanted = [ByteRange(f"{url}/a/b.bin", start, stop) for start, stop in ranges]
            assert await fetcher.fetch_many(wanted) == [content[start:stop] for start, stop in ranges]

    with proxy as url:
        await gather(*(partial(read, url) for _ in range(3)))
        asked = sorted(request.headers["range"] for request in server.requests)
        assert asked == ["bytes=0-1048575", "bytes=1048576-2097151", "bytes=2097152-3145727"]
        await read(url)
        assert len(server.requests) == len(asked)


# --- answers of servers that can't be had here, and what is remembered of a server


def refuse_without_size(request: Request) -> Step | None:
    """npm's http-server: no suffix range."""
    bare = {"Content-Range": None}
    return Step(status=416, headers=bare, body=b"") if request.headers.get("range", "").startswith("bytes=-") else None


def refuse_empty(request: Request) -> Step | None:
    """Ceph's gateway: no range of an empty object."""
    if request.path != "/0.bin" or "range" not in request.headers:
        return None
    return Step(status=416, headers={"Content-Range": None, "Content-Length": "0"}, body=b"")


def refuse_suffixes(status: int) -> Callable[[Request], Step | None]:
    """Azure's store: 400; one that knows no suffix: all of it."""

    def answer(request: Request) -> Step | None:
        if not request.headers.get("range", "").startswith("bytes=-"):
            return None
        return Step(ignore_range=True) if status == 200 else Step(status=status, body=b"")

    return answer


@pytest.mark.parametrize(
    "answer",
    [refuse_without_size, refuse_empty, refuse_suffixes(400), refuse_suffixes(501), refuse_suffixes(200)],
    ids=["http-server", "Ceph", "400", "501", "200"],
)
async def test_every_verb_is_right_of_servers_that_are_imitated(
    server: LyingServer, fetcher: Fetcher, answer: Callable[[Request], Step | None]
) -> None:
    server.every = answer
    for name, content in OBJECTS.items():
        await read_by_every_verb(fetcher, server.put(f"/{name}", content), content, ranges=True)


async def test_refusal_of_suffix_ranges_is_found_out_once(server: LyingServer, fetcher: Fetcher) -> None:
    server.every = refuse_without_size
    for number in range(3):
        await fetcher.fetch_tail(server.put(f"/{number}", OBJECTS["2500000.bin"]), COUNT)
    asked = [request.headers.get("range") for request in server.requests]
    assert asked == ["bytes=-65536", *["bytes=0-0", "bytes=2434464-2499999"] * 3]
    await fetcher.fetch_tail(server.url("/2"), 10)
    assert len(server.requests) == len(asked) + 1  # its size is known


async def test_an_empty_object_says_nothing_of_the_server(server: LyingServer, fetcher: Fetcher) -> None:
    server.every = refuse_empty
    await fetcher.fetch_tail(server.put("/0.bin", b""), COUNT)
    server.requests.clear()
    await fetcher.fetch_tail(server.put("/x", OBJECTS["2082.bin"]), COUNT)
    assert [request.headers["range"] for request in server.requests] == ["bytes=-65536"]
