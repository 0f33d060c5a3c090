"""Arguments that can't be meant: refused by an error of ours that says what can, before anything is asked for."""

from __future__ import annotations

import math
import pickle
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from asyncfetch.config import FetchConfig
from asyncfetch.errors import ConfigError
from asyncfetch.fetch import Fetcher
from asyncfetch.ranges import ByteRange

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

NO_URLS = (None, 1, b"/x", ["/x"], Path("/x"), "", "\ud800", "file:///\ud800", "a\0b", "://x")
NO_NUMBERS = (None, "0", 1.5, math.nan, True)


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "x").write_bytes(b"0123456789")
    return str(tmp_path / "x")


async def refused(ask: Callable[[], Awaitable[object]]) -> str:
    with pytest.raises(ConfigError) as caught:
        await ask()
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("url", NO_URLS, ids=repr)
async def test_value_that_is_no_url_is_refused(fetcher: Fetcher, url: Any) -> None:  # noqa: ANN401
    for verb in (fetcher.stat, fetcher.fetch, fetcher.listdir):
        await refused(partial(verb, url))
    await refused(lambda: fetcher.fetch_head(url, 1))
    await refused(lambda: fetcher.fetch_tail(url, 1))
    await refused(lambda: fetcher.fetch_into(url, 0, 1, bytearray(1)))


@pytest.mark.parametrize("number", NO_NUMBERS, ids=repr)
async def test_value_that_is_no_whole_number_is_refused(fetcher: Fetcher, path: str, number: Any) -> None:  # noqa: ANN401
    for start, stop in ((number, 4), (number, None), *([(0, number)] if number is not None else [])):
        assert f"[{start!r}, {stop!r}) of {path}" in await refused(partial(fetcher.fetch, path, start, stop))
    assert "whole number" in await refused(partial(fetcher.fetch_into, path, number, 4, bytearray(4)))
    assert "whole number" in await refused(partial(fetcher.fetch_into, path, 0, number, bytearray(4)))
    assert repr(number) in await refused(lambda: fetcher.fetch_head(path, number))
    assert repr(number) in await refused(lambda: fetcher.fetch_tail(path, number))


@pytest.mark.parametrize("ranges", [None, 5, "abc", [None], [("/x", 0, 1)]], ids=repr)
async def test_values_that_are_no_ranges_are_refused(fetcher: Fetcher, ranges: Any) -> None:  # noqa: ANN401
    assert "ByteRange" in await refused(lambda: fetcher.fetch_many(ranges))
    with pytest.raises(ConfigError, match="ByteRange"):
        fetcher.fetch_stream(ranges)


async def test_numbers_of_numpy_are_as_good(fetcher: Fetcher, path: str) -> None:
    start, stop = np.asarray([2, 5])
    assert bytes(await fetcher.fetch(path, start, stop)) == b"234"
    assert [bytes(one) for one in await fetcher.fetch_many([ByteRange(path, start, stop)])] == [b"234"]


async def test_numbers_of_numpy_do_not_overflow(tmp_path: Path) -> None:
    """Narrow ones in products, as those that cut a range into parts; unsigned ones in differences."""
    content = np.random.default_rng(0).bytes(250)
    (tmp_path / "x").write_bytes(content)
    path = str(tmp_path / "x")
    byte: Any = np.uint8
    config = FetchConfig(part_bytes=50, min_part_bytes=50, max_span_bytes=100)
    async with Fetcher(config) as fetcher:
        for _ in range(2):  # the second time its size is known
            assert await fetcher.fetch(path, byte(0), byte(250)) == content
        info, tail = await fetcher.fetch_tail(path, byte(3))
        assert (info.size, bytes(tail)) == (250, content[-3:])
        assert (await fetcher.fetch_head(path, byte(3)))[1] == content[:3]
        buffer = bytearray(50)
        await fetcher.fetch_into(path, byte(200), 250, buffer)
        assert buffer == content[200:]
        nested = [ByteRange(path, byte(0), byte(99)), ByteRange(path, byte(10), byte(20))]
        assert await fetcher.fetch_many(nested) == [content[:99], content[10:20]]


async def test_empty_buffers_need_no_room(fetcher: Fetcher, path: str, tmp_path: Path) -> None:
    for nothing in (np.empty(0), np.empty((0, 3), np.float32), bytearray()):
        await fetcher.fetch_into(path, 5, 5, nothing)  # type: ignore[arg-type]
        assert (await fetcher.put(str(tmp_path / "y"), nothing)).size == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [5, {}, "x"], ids=repr)
def test_value_that_is_no_configuration_is_refused(config: Any) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError, match="config must be a FetchConfig or None, not of type"):
        Fetcher(config)


@pytest.mark.parametrize("host", ["elsewhere", "localhost"])
async def test_a_file_urls_login_is_not_shown(fetcher: Fetcher, host: str) -> None:
    message = await refused(lambda: fetcher.stat(f"file://me:hidden@{host}/x"))
    assert "hidden" not in message
    assert f"the host {host!r}" in message
