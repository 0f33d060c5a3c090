"""The contract of readers of objects, as checks. Needs no test framework.

    @pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
    async def test_conformance(check: Check) -> None:
        async with my_store() as store:
            await check(store)

Each check stores objects with names of its own before it reads any (except the one that replaces an object), and raises
AssertionError if the contract is broken.
"""

from __future__ import annotations

import random
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Protocol, TypeAlias

import anyio
import anyio.lowlevel

from asyncfetch.errors import ConfigError, FetchError, NotFound, ObjectChanged, RangeNotSatisfiable
from asyncfetch.ranges import ByteRange

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncfetch.fetch import Fetcher

SIZE = 300_000
"""Bytes of most objects: more than one TCP segment, TLS record or chunk."""


class Store(Protocol):
    """A store of objects."""

    fetcher: Fetcher
    """An open fetcher that reaches the store."""
    can_list: bool
    """True if ``listdir`` works there."""
    can_replace: bool
    """True if an object can be replaced under its url."""

    async def put(self, name: str, content: bytes) -> str:
        """Store or replace the object; returns its url. ``name`` may have slashes."""
        ...


Check: TypeAlias = "Callable[[Store], Awaitable[None]]"


def _content(size: int = SIZE, seed: int = 0) -> bytes:
    return random.Random(f"{seed}-{size}").randbytes(size)


async def _raises(kind: type[Exception], work: Awaitable[object]) -> Exception:
    try:
        got = await work
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was to be raised, not {got!r} to be returned")


async def whole_objects(store: Store) -> None:
    """``fetch(url)`` is the object, read-only."""
    content = _content()
    view = await store.fetcher.fetch(await store.put("whole.bin", content))
    assert view == content
    assert view.readonly


async def ranges(store: Store) -> None:
    """Any range is exactly its bytes."""
    content = _content()
    url = await store.put("ranges.bin", content)
    rng = random.Random(1)
    spans = [(0, 1), (SIZE - 1, SIZE), (0, SIZE), *(sorted(rng.sample(range(SIZE + 1), 2)) for _ in range(12))]
    for start, stop in spans:
        assert await store.fetcher.fetch(url, start, stop) == content[start:stop], (start, stop)


async def open_ended_ranges(store: Store) -> None:
    """``stop=None`` reads to the end, a negative start the last bytes, or all if there are fewer."""
    content = _content()
    url = await store.put("open.bin", content)
    assert await store.fetcher.fetch(url, SIZE - 10) == content[-10:]
    assert await store.fetcher.fetch(url, -10) == content[-10:]
    assert await store.fetcher.fetch(url, -SIZE - 10) == content


async def empty_ranges(store: Store) -> None:
    """A range of no bytes is no bytes."""
    url = await store.put("empty-range.bin", _content(100))
    assert len(await store.fetcher.fetch(url, 7, 7)) == 0


async def empty_objects(store: Store) -> None:
    """An empty object can be read, and has a size."""
    url = await store.put("empty.bin", b"")
    assert len(await store.fetcher.fetch(url)) == 0
    assert (await store.fetcher.stat(url)).size == 0
    await _raises(RangeNotSatisfiable, store.fetcher.fetch(url, 0, 1))


async def past_the_end(store: Store) -> None:
    """Never fewer bytes than asked: RangeNotSatisfiable, with the size."""
    url = await store.put("end.bin", _content(1000))
    for start, stop in [(0, 1001), (999, 1001), (1000, 1001), (5000, 5001)]:
        error = await _raises(RangeNotSatisfiable, store.fetcher.fetch(url, start, stop))
        assert isinstance(error, RangeNotSatisfiable)
        assert error.size == 1000, (start, stop, error.size)
    assert len(await store.fetcher.fetch(url, 1000)) == 0


async def arguments_that_cannot_be_meant(store: Store) -> None:
    """Invalid arguments are ConfigErrors."""
    url = await store.put("arguments.bin", _content(100))
    await _raises(ConfigError, store.fetcher.fetch(url, 5, 4))
    await _raises(ConfigError, store.fetcher.fetch(url, -5, 4))
    await _raises(ConfigError, store.fetcher.fetch_into(url, 0, 4, bytearray(5)))


async def sizes(store: Store) -> None:
    """``stat`` knows the size, and names the object as the caller does."""
    url = await store.put("size.bin", _content(12_345))
    info = await store.fetcher.stat(url)
    assert (info.url, info.size) == (url, 12_345)


async def heads_and_tails(store: Store) -> None:
    """``fetch_head`` and ``fetch_tail`` give the first and last bytes, as many as there are."""
    content = _content(1000)
    url = await store.put("head.bin", content)
    for count in (1, 10, 1000, 2000):
        info, head = await store.fetcher.fetch_head(url, count)
        assert (info.size, bytes(head)) == (1000, content[:count])
        info, tail = await store.fetcher.fetch_tail(url, count)
        assert (info.size, bytes(tail)) == (1000, content[-count:])


async def own_buffers(store: Store) -> None:
    """``fetch_into`` fills exactly the caller's buffer."""
    content = _content()
    url = await store.put("into.bin", content)
    buffer = bytearray(100)
    await store.fetcher.fetch_into(url, 20, 60, memoryview(buffer)[10:50])
    assert buffer == bytes(10) + content[20:60] + bytes(50)


async def many_ranges(store: Store) -> None:
    """``fetch_many`` keeps the order, and accepts equal ranges."""
    objects = {f"many/{number}.bin": _content(5000, number) for number in range(4)}
    urls = {await store.put(name, content): content for name, content in objects.items()}
    wanted = [ByteRange(url, start, start + 700) for start in (3000, 0, 4300, 0) for url in urls]
    views = await store.fetcher.fetch_many(wanted)
    assert [bytes(view) for view in views] == [urls[one.url][one.start : one.stop] for one in wanted]
    assert await store.fetcher.fetch_many([]) == []


async def streamed_ranges(store: Store) -> None:
    """``fetch_stream`` gives each range once, whole, with its index."""
    content = _content()
    url = await store.put("stream.bin", content)
    wanted = [ByteRange(url, start, start + 1000) for start in range(0, 50_000, 1000)]
    async with store.fetcher.fetch_stream(wanted) as stream:
        got = {index: bytes(view) async for index, view in stream}
    assert got == {index: content[one.start : one.stop] for index, one in enumerate(wanted)}


async def odd_names(store: Store) -> None:
    """Names may have any characters."""
    names = ["sub dir/a b.bin", "ünïcode-é.bin", "plus+and&and=.bin", "100%25.bin", "deep/er/still/x.bin"]
    urls = [await store.put(name, _content(1000, number)) for number, name in enumerate(names)]
    for number, url in enumerate(urls):
        assert await store.fetcher.fetch(url, 10, 900) == _content(1000, number)[10:900], url


async def missing_objects(store: Store) -> None:
    """A missing object is NotFound, which is a FileNotFoundError, and names the url."""
    url = await store.put("there.bin", b"x")
    missing = url.replace("there.bin", "missing.bin")
    for work in (store.fetcher.fetch(missing), store.fetcher.fetch(missing, 0, 5), store.fetcher.stat(missing)):
        error = await _raises(NotFound, work)
        assert isinstance(error, FileNotFoundError)
        assert isinstance(error, FetchError)
        assert error.url is not None
        assert error.url.endswith("missing.bin")


async def replaced_objects(store: Store) -> None:
    """Bytes of two versions never meet: ObjectChanged, once, and then the new version."""
    if not store.can_replace:
        return
    url = await store.put("replaced.bin", _content(1000, 1))
    await store.fetcher.fetch(url, 0, 100)
    await store.put("replaced.bin", _content(1000, 2))
    await _raises(ObjectChanged, store.fetcher.fetch(url, 100, 200))
    assert await store.fetcher.fetch(url, 100, 200) == _content(1000, 2)[100:200]


async def cancelled_reads(store: Store) -> None:
    """A cancelled read leaves the fetcher usable, and nothing in flight."""
    content = _content()
    url = await store.put("cancelled.bin", content)
    for turns in range(6):
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(store.fetcher.fetch, url, 0, SIZE)
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
    assert store.fetcher.statistics().in_flight == 0
    assert store.fetcher.statistics().waiting == 0
    assert await store.fetcher.fetch(url, 5, 5000) == content[5:5000]


async def listings(store: Store) -> None:
    """``listdir`` gives the entries directly below, sorted by name, with sizes; directories end in a slash."""
    if not store.can_list:
        return
    url = await store.put("listed/b 1.bin", _content(11))
    await store.put("listed/a.bin", _content(12))
    await store.put("listed/sub/c.bin", _content(13))
    await store.put("listed/sub.bin", _content(14))
    base = url.removesuffix(url.rpartition("/")[2])
    for directory in (base, base.rstrip("/")):
        infos = await store.fetcher.listdir(directory)
        assert [(info.url.removeprefix(base), info.size) for info in infos] == [
            ("a.bin", 12),
            (url.removeprefix(base), 11),
            ("sub/", 0),
            ("sub.bin", 14),
        ]
    assert await store.fetcher.fetch(infos[0].url) == _content(12)
    await _raises(NotFound, store.fetcher.listdir(f"{base}nothing-here"))


CHECKS: tuple[Check, ...] = tuple(
    check for name, check in list(globals().items()) if iscoroutinefunction(check) and not name.startswith("_")
)
"""All checks."""
