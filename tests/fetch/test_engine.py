"""Every verb against an honest server and against local files: the same ranges, the same errors."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio
import numpy as np
import pytest
import pytest_asyncio

from asyncfetch.errors import AccessDenied, ConfigError, FetchError, NotFound, ObjectChanged, RangeNotSatisfiable
from asyncfetch.fetch import Fetcher, insist_on
from asyncfetch.fetch.transports.file import READ_STEP_BYTES
from asyncfetch.ranges import ByteRange
from tests.conftest import all_others_wait

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.fetch.conftest import LyingServer
    from tests.fetch.odd_files import OddFileSystem

CONTENT = random.Random(0).randbytes(100_000)


@pytest_asyncio.fixture(params=["http", "file", "path"])
async def put(request: pytest.FixtureRequest, server: LyingServer, tmp_path: Path) -> Callable[[str, bytes], str]:
    """Stores an object and gives its url."""

    def store(name: str, content: bytes) -> str:
        if request.param == "http":
            return server.put(f"/{name}", content)
        path = tmp_path / name
        path.write_bytes(content)
        return path.as_uri() if request.param == "file" else str(path)

    return store


@pytest.mark.parametrize(
    ("start", "stop"),
    [(0, None), (0, 1), (5, 5), (7, 70_001), (99_999, None), (100_000, None), (-1, None), (-200_000, None)],
)
async def test_fetch(fetcher: Fetcher, put: Callable[[str, bytes], str], start: int, stop: int | None) -> None:
    view = await fetcher.fetch(put("x y", CONTENT), start, stop)
    assert view == CONTENT[start:stop]
    assert view.readonly


async def test_whole_range_at_the_end_is_empty_without_a_request(
    fetcher: Fetcher, put: Callable[[str, bytes], str]
) -> None:
    assert bytes(await fetcher.fetch(put("x", CONTENT), 100_000, 100_000)) == b""
    assert fetcher.statistics().requests == 0


async def test_empty_object(fetcher: Fetcher, put: Callable[[str, bytes], str]) -> None:
    url = put("x", b"")
    assert (await fetcher.stat(url)).size == 0
    assert bytes(await fetcher.fetch(url)) == b""
    assert bytes(await fetcher.fetch(url, -5)) == b""
    info, head = await fetcher.fetch_head(url, 10)
    assert (info.size, bytes(head)) == (0, b"")


@pytest.mark.parametrize(("start", "stop"), [(0, 100_001), (100_001, None), (99_999, 100_001), (10**15, 10**15 + 1)])
async def test_range_past_the_end_is_not_satisfiable(
    fetcher: Fetcher, put: Callable[[str, bytes], str], start: int, stop: int | None
) -> None:
    with pytest.raises(RangeNotSatisfiable) as caught:
        await fetcher.fetch(put("x", CONTENT), start, stop)
    assert caught.value.size == 100_000
    assert (caught.value.start, caught.value.stop) == (start, stop)


@pytest.mark.parametrize(("start", "stop"), [(3, 2), (-1, 5)])
async def test_backward_range(fetcher: Fetcher, put: Callable[[str, bytes], str], start: int, stop: int) -> None:
    with pytest.raises(ConfigError):
        await fetcher.fetch(put("x", CONTENT), start, stop)


async def test_stat(fetcher: Fetcher, put: Callable[[str, bytes], str]) -> None:
    url = put("x", CONTENT)
    info = await fetcher.stat(url)
    assert (info.url, info.size) == (url, 100_000)
    assert info.etag is not None


@pytest.mark.parametrize("max_bytes", [0, 1, 100_000, 100_001])
async def test_fetch_head(fetcher: Fetcher, put: Callable[[str, bytes], str], max_bytes: int) -> None:
    info, head = await fetcher.fetch_head(put("x", CONTENT), max_bytes)
    assert info.size == 100_000
    assert head == CONTENT[:max_bytes]
    assert fetcher.statistics().requests == 1


@pytest.mark.parametrize("max_bytes", [0, 1, 100_000, 100_001])
async def test_fetch_tail(fetcher: Fetcher, put: Callable[[str, bytes], str], max_bytes: int) -> None:
    info, tail = await fetcher.fetch_tail(put("x", CONTENT), max_bytes)
    assert info.size == 100_000
    assert tail == CONTENT[max(0, 100_000 - max_bytes) :]
    assert fetcher.statistics().requests == 1


async def test_fetch_into(fetcher: Fetcher, put: Callable[[str, bytes], str]) -> None:
    array = np.zeros(100, np.float32)
    await fetcher.fetch_into(put("x", CONTENT), 10, 410, array.data)
    assert array.tobytes() == CONTENT[10:410]


@pytest.mark.parametrize(
    "buffer",
    [b"12345678", bytearray(7), bytearray(9), memoryview(bytearray(16))[::2], "12345678", np.empty(1, object).data],
    ids=["read-only", "short", "long", "with gaps", "text", "objects"],
)
async def test_fetch_into_needs_a_writable_buffer_of_the_right_length(
    fetcher: Fetcher, put: Callable[[str, bytes], str], buffer: bytearray
) -> None:
    with pytest.raises(ConfigError, match="buffer"):
        await fetcher.fetch_into(put("x", CONTENT), 0, 8, buffer)
    assert fetcher.statistics().requests == 0


async def test_fetch_many_keeps_order_and_fetches_equal_ranges_once(
    fetcher: Fetcher, put: Callable[[str, bytes], str]
) -> None:
    url = put("x", CONTENT)
    ranges = [ByteRange(url, start % 5 * 20_000, start % 5 * 20_000 + 500) for start in range(200)]
    views = await fetcher.fetch_many(iter(ranges))
    assert [bytes(view) for view in views] == [CONTENT[one.start : one.stop] for one in ranges]
    assert fetcher.statistics().requests == 5


async def test_fetch_many_raises_the_first_error_alone(fetcher: Fetcher, put: Callable[[str, bytes], str]) -> None:
    url = put("x", CONTENT)
    with pytest.raises(NotFound):
        await fetcher.fetch_many([ByteRange(url, 0, 10), ByteRange(url + "missing", 0, 10), ByteRange(url, 10, 20)])
    assert fetcher.statistics().in_flight == 0


async def test_fetch_many_of_nothing(fetcher: Fetcher) -> None:
    assert await fetcher.fetch_many([]) == []


async def test_fetch_stream_gives_every_range_with_its_index(
    fetcher: Fetcher, put: Callable[[str, bytes], str]
) -> None:
    url = put("x", CONTENT)
    ranges = [ByteRange(url, start, start + 100) for start in range(300)]
    async with fetcher.fetch_stream(ranges) as stream:
        found = {index: bytes(view) async for index, view in stream}
    assert found == {index: CONTENT[index : index + 100] for index in range(300)}


async def test_fetch_stream_fetches_no_more_than_it_can_hold(
    fetcher_with: Callable[..., Fetcher], put: Callable[[str, bytes], str]
) -> None:
    url = put("x", CONTENT)
    async with fetcher_with(max_span_bytes=0) as fetcher:
        async with fetcher.fetch_stream(ByteRange(url, start, start + 10) for start in range(1000)) as stream:
            for _ in range(100):
                await anext(stream)
            await all_others_wait()
        told = fetcher.statistics()
        # On a busy machine first bytes come later than these tests wait for; what is asked for again isn't further.
        assert 100 <= told.requests - told.retries <= 100 + 2 * fetcher.config.max_requests_per_host


async def test_fetch_stream_raises_where_the_consumer_asks(fetcher: Fetcher, put: Callable[[str, bytes], str]) -> None:
    url = put("x", CONTENT)
    async with fetcher.fetch_stream([ByteRange(url + "missing", 0, 10)]) as stream:
        with pytest.raises(NotFound):
            await anext(stream)


async def test_fetch_stream_leaves_the_consumers_own_error_alone(
    fetcher: Fetcher, put: Callable[[str, bytes], str]
) -> None:
    url = put("x", CONTENT)

    async def consume() -> None:
        async with fetcher.fetch_stream([ByteRange(url, 0, 10)] * 100) as stream:
            async for _ in stream:
                raise LookupError

    with pytest.raises(LookupError):
        await consume()
    assert fetcher.statistics().in_flight == 0


async def test_missing(fetcher: Fetcher, put: Callable[[str, bytes], str]) -> None:
    with pytest.raises(NotFound) as caught:
        await fetcher.fetch(put("x", CONTENT) + "missing", 0, 10)
    assert isinstance(caught.value, FileNotFoundError)


async def test_a_replaced_object_is_one_error_and_then_a_fresh_start(
    fetcher: Fetcher, put: Callable[[str, bytes], str]
) -> None:
    url = put("x", CONTENT)
    await fetcher.fetch(url, 0, 10)
    put("x", b"new content")
    with pytest.raises(ObjectChanged):
        await fetcher.fetch(url, 5, 10)
    assert bytes(await fetcher.fetch(url)) == b"new content"


async def test_version_another_fetcher_has_seen_is_insisted_on(
    fetcher: Fetcher, put: Callable[[str, bytes], str]
) -> None:
    """In any range, also one that the new object hasn't; and against what this one has seen itself."""
    url = put("x", CONTENT)
    seen = await fetcher.stat(url)
    async with Fetcher(fetcher.config) as other:
        insist_on(other, seen)
        assert bytes(await other.fetch(url, 5, 10)) == CONTENT[5:10]
        put("x", b"new content")
        for start, stop in ((0, 5), (90_000, 90_001), (-8, None)):
            insist_on(other, seen)
            with pytest.raises(ObjectChanged):
                await other.fetch(url, start, stop)
        assert bytes(await other.fetch(url)) == b"new content"
        with pytest.raises(ObjectChanged, match="its size was 100000 bytes and is 11 now"):
            insist_on(other, seen)


@pytest.mark.parametrize(
    "url", ["nope://h/x", "s3://b", "hf://o", "://x", "http://", "https://h:99999/", "file://other/x", "", "a\0b"]
)
async def test_unusable_urls(fetcher: Fetcher, url: str) -> None:
    with pytest.raises(ConfigError):
        await fetcher.fetch(url, 0, 1)


async def test_an_unknown_scheme_names_the_known_ones(fetcher: Fetcher) -> None:
    with pytest.raises(ConfigError, match=r"nope://.*http, https, s3, hf, file") as caught:
        await fetcher.fetch("nope://user:secret@b/k", 5, 6)
    assert "secret" not in str(caught.value)


# --- local files only


async def test_a_directory_is_no_object(fetcher: Fetcher, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        await fetcher.fetch(str(tmp_path), 0, 1)


async def test_a_pipe_is_no_object_and_does_not_block(fetcher: Fetcher, tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotFound):
        await fetcher.stat(str(tmp_path / "pipe"))


async def test_other_os_errors_are_ours(fetcher: Fetcher) -> None:
    with pytest.raises(FetchError, match="too long"):
        await fetcher.fetch("x" * 5000, 0, 1)


async def test_a_rewritten_file_of_equal_size_is_a_change(fetcher: Fetcher, tmp_path: Path) -> None:
    import os

    path = tmp_path / "x"
    path.write_bytes(b"old")
    await fetcher.fetch(str(path))
    path.write_bytes(b"new")
    os.utime(path, ns=(1, 1))
    with pytest.raises(ObjectChanged):
        await fetcher.fetch(str(path))


async def test_listdir(fetcher: Fetcher, tmp_path: Path) -> None:
    (tmp_path / "b#").write_bytes(b"12")
    (tmp_path / "a").mkdir()
    infos = await fetcher.listdir(tmp_path.as_uri())
    assert [(info.url, info.size) for info in infos] == [
        (f"{tmp_path.as_uri()}/a/", 0),
        (f"{tmp_path.as_uri()}/b%23", 2),
    ]
    assert bytes(await fetcher.fetch(infos[1].url)) == b"12"
    assert [info.url for info in await fetcher.listdir(f"{tmp_path}/")] == [f"{tmp_path}/a/", f"{tmp_path}/b#"]


async def test_listing_has_as_many_entries_as_allowed(
    fetcher_with: Callable[..., Fetcher], tmp_path: Path, odd: type[OddFileSystem]
) -> None:
    """Also of what has no pages: a local directory, and one of a back end of fsspec."""
    for name in "abc":
        (tmp_path / name).write_bytes(b"1")
        odd().pipe_file(f"/d/{name}", b"1")
    urls = [str(tmp_path), tmp_path.as_uri(), "odd://d"]
    async with fetcher_with(max_listed_entries=3) as fetcher:
        assert [len(await fetcher.listdir(url)) for url in urls] == [3] * 3
    async with fetcher_with(max_listed_entries=2) as fetcher:
        for url in urls:
            with pytest.raises(FetchError, match="max_listed_entries=2: raise") as caught:
                await fetcher.listdir(url)
            assert (caught.value.url, caught.value.attempts) == (url, 1)
        assert (fetcher.statistics().in_flight, fetcher.statistics().waiting) == (0, 0)


async def test_a_listing_leaves_out_what_is_neither_file_nor_directory(
    fetcher: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links to themselves, to nothing, through a file and too long; a file that goes while the directory is read."""
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "gone").write_bytes(b"1")
    for name, target in [("loop", "loop"), ("nowhere", "none"), ("through", "a/b"), ("long", "x" * 300)]:
        (tmp_path / name).symlink_to(target)
    scan = os.scandir

    class Going:
        """Its entries, of which one goes as they come."""

        def __init__(self, path: Path) -> None:
            self._scan = scan(path)

        def __enter__(self) -> Iterator[os.DirEntry[str]]:
            entries = [*self._scan]
            (tmp_path / "gone").unlink()
            return iter(entries)

        def __exit__(self, *exc_info: object) -> None:
            self._scan.close()

    monkeypatch.setattr(os, "scandir", Going)
    assert [info.url for info in await fetcher.listdir(str(tmp_path))] == [f"{tmp_path}/a"]


async def test_names_that_are_no_text_can_be_listed_and_read(fetcher: Fetcher, tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/\xff#", "wb") as file:  # noqa: ASYNC230
        file.write(b"123")
    for directory in (str(tmp_path), tmp_path.as_uri()):
        (info,) = await fetcher.listdir(directory)
        assert bytes(await fetcher.fetch(info.url)) == b"123"


@pytest.mark.parametrize("url", ["file://[x/y", "file://\u2100/x", "file:///a\ud800", "\ud800"])
async def test_a_local_url_that_is_none(fetcher: Fetcher, url: str) -> None:
    for verb in (fetcher.fetch, fetcher.listdir, fetcher.delete):
        with pytest.raises(ConfigError, match="is no path"):
            await verb(url)


async def test_a_file_url_has_nothing_behind_its_path(fetcher: Fetcher, tmp_path: Path) -> None:
    """A name that wasn't quoted would be another file's: the one to read, to write over or to remove."""
    (tmp_path / "x").write_bytes(b"another")
    for name in ("x#1", "x?1", "x?", "x#"):
        for verb in (fetcher.fetch, fetcher.stat, fetcher.delete, lambda url: fetcher.put(url, b"1")):
            with pytest.raises(ConfigError, match="%3F for a"):
                await verb(f"file://{tmp_path}/{name}")
    (tmp_path / "x#1").write_bytes(b"this one")
    assert bytes(await fetcher.fetch((tmp_path / "x#1").as_uri())) == b"this one"
    assert (tmp_path / "x").read_bytes() == b"another"


@pytest.mark.parametrize("how", ["task", "scope"])
async def test_a_cancelled_listing_ends_after_an_entry(
    fetcher: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """As that of a large directory on a slow network disk."""
    began, go_on, seen = threading.Event(), threading.Event(), 0
    (tmp_path / "a").write_bytes(b"1")
    (entry,) = os.scandir(tmp_path)

    @contextmanager
    def slow(_: Path) -> Iterator[Iterator[os.DirEntry[str]]]:
        def entries() -> Iterator[os.DirEntry[str]]:
            nonlocal seen
            for _ in range(1000):
                seen += 1
                began.set()
                go_on.wait(5)
                yield entry

        yield entries()

    monkeypatch.setattr(os, "scandir", slow)
    scope = anyio.CancelScope()

    async def listing() -> None:
        with scope:
            await fetcher.listdir(str(tmp_path))

    task = asyncio.ensure_future(listing())
    await anyio.to_thread.run_sync(began.wait)
    scope.cancel() if how == "scope" else task.cancel()
    await anyio.sleep(0.05)
    go_on.set()
    await asyncio.wait([task])
    assert seen == 1


async def test_listdir_errors(fetcher: Fetcher, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        await fetcher.listdir(str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="web servers"):
        await fetcher.listdir("https://h/x")


async def test_access_denied(fetcher: Fetcher, server: LyingServer, step: type) -> None:
    server.will(step(status=403))
    with pytest.raises(AccessDenied):
        await fetcher.fetch(server.put("/x", CONTENT), 0, 1)


async def test_cancelled_local_read_writes_nothing_afterwards(fetcher: Fetcher, tmp_path: Path) -> None:
    """``Task.cancel()``, as ``asyncio.wait_for`` sends it, isn't held back by anyio's shield."""
    size = 400 * 1024 * 1024
    path = tmp_path / "zeros"
    with path.open("wb") as file:
        file.truncate(size)
    buffer = np.full(size, 1, np.uint8)
    task = asyncio.ensure_future(fetcher.fetch_into(str(path), 0, size, buffer.data))
    while buffer[0]:  # noqa: ASYNC110  the thread that writes tells nobody
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    left = int(buffer.sum(dtype=np.int64))
    await asyncio.sleep(0.2)
    assert int(buffer.sum(dtype=np.int64)) == left


@pytest.mark.parametrize("how", ["task", "scope"])
async def test_a_cancelled_local_read_ends_after_its_step(
    fetcher: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    size = 3 * READ_STEP_BYTES
    path = tmp_path / "zeros"
    path.write_bytes(bytes(size))
    began, go_on = threading.Event(), threading.Event()
    preadv = os.preadv

    def held_up(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        began.set()
        go_on.wait(5)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", held_up)
    buffer, scope = np.full(size, 1, np.uint8), anyio.CancelScope()

    async def read() -> None:
        with scope:
            await fetcher.fetch_into(str(path), 0, size, buffer.data)

    task = asyncio.ensure_future(read())
    await anyio.to_thread.run_sync(began.wait)
    scope.cancel() if how == "scope" else task.cancel()
    await anyio.sleep(0.05)
    assert not task.done()  # the step may still write
    go_on.set()
    await asyncio.wait([task])
    assert buffer.sum(dtype=np.int64) == size - READ_STEP_BYTES


async def test_memory_of_a_range_is_used_again_once_nobody_holds_it(
    fetcher: Fetcher, put: Callable[[str, bytes], str]
) -> None:
    url, rng, kept = put("x", CONTENT), random.Random(1), []
    for _ in range(40):
        start = rng.randrange(20_000)
        stop = rng.randrange(start + 65_536, len(CONTENT) + 1)
        view = await fetcher.fetch(url, start, stop)
        if rng.random() < 0.3:
            kept.append((view, start, stop))
        assert view == CONTENT[start:stop]
    assert fetcher.statistics().reused_buffers > 20
    for view, start, stop in kept:
        assert view == CONTENT[start:stop]


async def test_object_is_downloaded_whole_and_directory_listed_deep(
    fetcher: Fetcher, server: LyingServer, tmp_path: Path
) -> None:
    data = bytes(range(256)) * 4096
    info = await fetcher.download(server.put("/big.bin", data), tmp_path / "a" / "b" / "big.bin")
    await fetcher.download(server.put("/empty", b""), tmp_path / "a" / "empty")
    with pytest.raises(NotFound):
        await fetcher.download(server.url("/none"), tmp_path / "none")
    assert info.size == len(data)
    assert (tmp_path / "a" / "b" / "big.bin").read_bytes() == data
    assert [(file.url, file.size) for file in await fetcher.listdir(str(tmp_path), recursive=True)] == [
        (f"{tmp_path}/a/b/big.bin", len(data)),
        (f"{tmp_path}/a/empty", 0),
    ]
