"""Answers that HTTP allows though few servers give them: the right bytes, or an error that names the cause."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from asyncfetch.config import RetryConfig
from asyncfetch.errors import InvalidResponse, RangeNotSatisfiable
from tests.fetch.conftest import Step

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncfetch.fetch import Fetcher
    from tests.fetch.conftest import LyingServer, Request

CONTENT = bytes(range(256)) * 1000
RANGES = ((1000, 2000), (200_000, 201_000), (0, None))


@pytest.fixture(params=["direct", "session"])
def way(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


def answer(request: Request, *fields: str, length: str = "Content-Length: {}", unit: str = "bytes") -> bytes:
    """An honest answer to a range of CONTENT, with these fields in it."""
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers["range"])
    assert match is not None
    start, stop = int(match[1]), int(match[2]) + 1 if match[2] else len(CONTENT)
    place = f"Content-Range: {unit} {start}-{stop - 1}/{len(CONTENT)}"
    lines = ["HTTP/1.1 206 x", place, 'ETag: "a"', *fields, length.replace("{}", str(stop - start)), "", ""]
    return "\r\n".join(lines).encode() + CONTENT[start:stop]


async def check_reads(fetcher: Fetcher, url: str) -> None:
    for start, stop in RANGES:
        assert await fetcher.fetch(url, start, stop) == CONTENT[start:stop]
    assert fetcher.statistics().retries == 0


async def refused(fetcher: Fetcher, url: str, why: str) -> None:
    for start, stop in RANGES:
        with pytest.raises(InvalidResponse, match=why):
            await fetcher.fetch(url, start, stop)


@pytest.mark.parametrize(
    "encoding",
    [
        *(
            "aws-chunked",
            "AWS-Chunked, UTF-8",
            "none",
            "identity",
            "",
            "utf8",
            "us-ascii",
            "ISO-8859-1",
            "windows-1252",
        ),
        *("binary", "8bit", "null", "charset=UTF-8", "video/mp4", "application/octet-stream"),
    ],
)
async def test_an_encoding_that_encodes_nothing_is_taken(fetcher: Fetcher, server: LyingServer, encoding: str) -> None:
    server.every = lambda request: Step(raw=answer(request, f"Content-Encoding: {encoding}"))
    await check_reads(fetcher, server.url("/x"))
    assert len(server.requests) == len(RANGES)


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "x-gzip", "br", "zstd", "deflate", "aws-chunked,gzip", "unknown"])
async def test_an_encoding_that_may_encode_is_refused(fetcher: Fetcher, server: LyingServer, encoding: str) -> None:
    server.every = lambda request: Step(raw=answer(request, f"Content-Encoding: {encoding}"))
    await refused(fetcher, server.url("/x"), rf"Content-Encoding '{encoding.lower()}'")


@pytest.mark.parametrize("unit", ["Bytes", "BYTES"])
async def test_a_units_name_has_no_case(fetcher: Fetcher, server: LyingServer, unit: str) -> None:
    server.every = lambda request: Step(raw=answer(request, f"Accept-Ranges: {unit}", unit=unit))
    await check_reads(fetcher, server.url("/x"))
    present: dict[str, str | None] = {"Content-Range": f"{unit} */{len(CONTENT)}", "Content-Length": "0"}
    server.every = lambda _: Step(status=416, headers=present, body=b"")
    with pytest.raises(RangeNotSatisfiable) as caught:
        await fetcher.fetch(server.url("/y"), len(CONTENT) + 1)
    assert caught.value.size == len(CONTENT)


TWICE = ["Content-Length: {}, {}", "Content-Length: {},{},0{}", "Content-Length: {}\r\ncontent-length: {}"]


@pytest.mark.parametrize("length", TWICE)
async def test_a_length_said_twice_is_taken(fetcher: Fetcher, server: LyingServer, length: str) -> None:
    server.every = lambda request: Step(raw=answer(request, length=length))
    await check_reads(fetcher, server.url("/x"))


@pytest.mark.parametrize("length", [*(one.replace("{}", "7{}", 1) for one in TWICE), "Content-Length: {},"])
async def test_lengths_that_differ_are_refused(fetcher: Fetcher, server: LyingServer, length: str) -> None:
    server.every = lambda request: Step(raw=answer(request, length=length))
    await refused(fetcher, server.url("/x"), r"Content-Length '.*' isn't one number of bytes")


FIELDS = {
    "one": ["X-Long: " + "x" * (64 * 1024 - len("X-Long: "))],
    "several": [f"X-Long-{number}: " + "x" * 60_000 for number in range(3)],
    "many": [f"X-{number}: " + "x" * 100 for number in range(300)],
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
async def test_fields_of_64_kib_are_read(fetcher: Fetcher, server: LyingServer, fields: list[str]) -> None:
    server.every = lambda request: Step(raw=answer(request, *fields))
    await check_reads(fetcher, server.url("/x"))


@pytest.mark.parametrize("fields", [[FIELDS["one"][0] + "x" * len("X-Long: ")], [f"X-{n}: x" * 30 for n in range(600)]])
async def test_fields_beyond_that_are_told(fetcher: Fetcher, server: LyingServer, fields: list[str]) -> None:
    server.every = lambda request: Step(raw=answer(request, *fields))
    if not fetcher._by_session and len(fields) > 1:
        fields += FIELDS["one"]  # else it is short enough for a connection of ours, which minds no number
    await refused(fetcher, server.url("/x"), "head of the answer .* too long: no field may have more than 64 KiB")


HEADS: dict[str, Callable[[bytes], bytes]] = {
    "bare line feeds": lambda head: head.replace(b"\r", b""),
    "one of them": lambda head: head.replace(b"\r", b"", 1),
    "the last of them": lambda head: head[:-2] + b"\n",
    "all but the last": lambda head: head[:-2].replace(b"\r", b"") + b"\r\n",
    "a folded line": lambda head: head[:-2] + b"X-Folded: a\r\n  b\r\n\r\n",
    "a folded range": lambda head: head.replace(b"Content-Range: bytes ", b"Content-Range:\r\n\tbytes\r\n "),
    "a folded length": lambda head: head.replace(b"Content-Length: ", b"Content-Length:\r\n "),
    "folds of bare line feeds": lambda head: head[:-2].replace(b"\r", b"") + b"X-Folded: a\n  b\n\n",
    "bytes beyond ASCII": lambda head: head[:-2] + b"X-Name: \xe9\xff\r\n\r\n",
    "blanks behind": lambda head: head.replace(b"\r\n", b" \t\r\n").removesuffix(b" \t\r\n") + b"\r\n",
}


@pytest.mark.parametrize("changed", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("pieces", [False, True])
async def test_odd_heads_are_read(
    fetcher: Fetcher, server: LyingServer, changed: Callable[[bytes], bytes], pieces: bool
) -> None:
    def step(request: Request) -> Step:
        head, end, body = answer(request).partition(b"\r\n\r\n")
        odd = changed(head + end)
        if not pieces:
            return Step(raw=odd + body)
        return Step(raw=odd + body, raw_cut=len(odd) - 1)

    server.every = step
    await check_reads(fetcher, server.url("/x"))


# --- a range that ends beyond the object, of which a 416 doesn't say how long it is


def refuse_beyond(request: Request) -> Step | None:
    """lakeFS's gateway, and Ceph's: no word of the size."""
    last = int(re.fullmatch(r"bytes=-?\d+-?(\d*)", request.headers.get("range", "bytes=0-0"))[1] or -1)  # type: ignore[index]
    bare = {"Content-Range": None, "Content-Length": "0"}
    return Step(status=416, headers=bare, body=b"") if last >= SMALL or (not SMALL and last >= 0) else None


SMALL = 3000


@pytest.mark.parametrize("count", [2, SMALL, SMALL + 1, 65_536])
async def test_a_head_of_a_short_object_is_read_though_refused(
    fetcher: Fetcher, server: LyingServer, count: int
) -> None:
    server.every = refuse_beyond
    for _ in range(2):
        url = server.put("/x", CONTENT[:SMALL])
        info, head = await fetcher.fetch_head(url, count)
        assert (info.size, bytes(head)) == (SMALL, CONTENT[: min(count, SMALL)])
    asked = [request.headers["range"] for request in server.requests]
    whole = f"bytes=0-{SMALL - 1}"
    beyond = [f"bytes=0-{count - 1}", "bytes=0-0", whole, f"bytes=0-{count - 1}", whole]
    assert asked == (beyond if count > SMALL else [f"bytes=0-{count - 1}"] * 2)


@pytest.mark.parametrize("count", [1, 2, 65_536])
async def test_a_head_of_an_empty_object_is_read_though_refused(
    fetcher: Fetcher, server: LyingServer, count: int
) -> None:
    bare: dict[str, str | None] = {"Content-Range": None, "Content-Length": "0"}
    server.every = lambda request: Step(status=416, headers=bare, body=b"") if "range" in request.headers else None
    info, head = await fetcher.fetch_head(server.put("/x", b""), count)
    assert (info.size, bytes(head)) == (0, b"")


async def test_a_range_beyond_the_end_stays_an_error(fetcher: Fetcher, server: LyingServer) -> None:
    server.every = refuse_beyond
    url = server.put("/x", CONTENT[:SMALL])
    for start, stop in ((0, SMALL + 1), (SMALL, SMALL + 9), (SMALL + 1, None)):
        with pytest.raises(RangeNotSatisfiable):
            await fetcher.fetch(url, start, stop)


async def test_a_server_that_refuses_all_of_it_is_told(
    fetcher_with: Callable[..., Fetcher], server: LyingServer
) -> None:
    """Its bare 416 holds for every range, of an object that isn't empty."""
    bare: dict[str, str | None] = {"Content-Range": None, "Content-Length": "0"}
    server.every = lambda request: Step(status=416, headers=bare, body=b"") if "range" in request.headers else None
    async with fetcher_with(retry=RetryConfig(attempts=2)) as fetcher:
        with pytest.raises(InvalidResponse, match="refuses ranges of an object that isn't empty"):
            await fetcher.fetch_head(server.put("/x", CONTENT), 65_536)
