"""Every other scheme, through fsspec: its bytes, checked."""

from __future__ import annotations

import asyncio
import errno
import pickle
import re
import socket
import ssl
import subprocess
import sys
import threading
import traceback
from typing import TYPE_CHECKING, cast

import aiohttp
import anyio
import pytest
from anyio import to_thread

from asyncfetch.config import FetchConfig, RetryConfig
from asyncfetch.errors import (
    AccessDenied,
    ClosedError,
    ConfigError,
    ConnectionFailed,
    FetchError,
    FetchTimeout,
    InvalidResponse,
    MissingDependency,
    NotFound,
    ObjectChanged,
    install_command,
)
from asyncfetch.fetch import Fetcher
from asyncfetch.ranges import ObjectInfo
from tests.fetch.odd_files import CONTENT, hanging

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fetch.conftest import FakeTime
    from tests.fetch.odd_files import OddFileSystem


async def test_a_directory_is_no_entry_of_its_own(odd: type[OddFileSystem], monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a bucket of GCS in which a console made the folder."""
    odd().pipe_file("/d/y", CONTENT)
    ls = odd.ls

    def ls_with_itself(files: OddFileSystem, path: str, **options: object) -> list[dict[str, object]]:
        return [{"name": "/d/", "size": 0, "type": "file"}, *ls(files, path, **options)]

    monkeypatch.setattr(odd, "ls", ls_with_itself)
    async with Fetcher() as fetcher:
        for url in ("odd://d", "odd://d/"):
            assert [info.url for info in await fetcher.listdir(url)] == ["odd://d/y"]


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x", lambda _: CONTENT, lambda _: b""])
async def test_a_wrong_number_of_bytes_is_an_error(odd: type[OddFileSystem], change: Callable[[bytes], bytes]) -> None:
    odd.read = change
    async with Fetcher() as fetcher:
        with pytest.raises(InvalidResponse, match=r"for \[10, 20\)") as caught:
            await fetcher.fetch("odd://x", 10, 20)
    assert (caught.value.url, caught.value.start, caught.value.stop) == ("odd://x", 10, 20)


async def test_back_end_that_gives_no_bytes_is_an_error(odd: type[OddFileSystem]) -> None:
    odd.read = lambda _: cast("bytes", None)
    async with Fetcher() as fetcher:
        with pytest.raises(FetchError, match="can't do it"):
            await fetcher.fetch("odd://x", 10, 20)


async def test_a_file_that_shrinks_while_it_is_read_has_changed(odd: type[OddFileSystem]) -> None:
    def shrink(data: bytes) -> bytes:
        odd().pipe_file("/x", CONTENT[:15])
        return data[:5]

    odd.read = shrink
    async with Fetcher() as fetcher:
        with pytest.raises(ObjectChanged, match="size") as caught:
            await fetcher.fetch("odd://x", 10, 20)
    assert caught.value.attempts == 1


async def test_file_replaced_by_one_as_long_during_a_read_has_changed(odd: type[OddFileSystem]) -> None:
    def replace(data: bytes) -> bytes:
        odd.info_of = lambda info: {**info, "etag": "new"}
        return data

    odd.info_of = lambda info: {**info, "etag": "old"}
    odd.read = replace
    async with Fetcher() as fetcher:
        with pytest.raises(ObjectChanged, match="ETag"):
            await fetcher.fetch("odd://x", 10, 20)
        now = fetcher.statistics()
    assert (now.bytes, now.first_byte.count, now.body.count) == (10, 1, 0)


NO_NAME, RESOLVER_DOWN = socket.gaierror(socket.EAI_NONAME, "x"), socket.gaierror(socket.EAI_AGAIN, "x")


@pytest.mark.parametrize(
    ("error", "kind", "attempts"),
    [
        pytest.param(error, kind, attempts, id=f"{type(error).__name__}-{attempts}")
        for error, kind, attempts in [
            (FileNotFoundError("x"), NotFound, 1),
            (FileNotFoundError("https://me:secret word@h/"), NotFound, 1),
            (PermissionError("x"), AccessDenied, 1),
            (ValueError("x"), FetchError, 1),
            (KeyError("x"), FetchError, 1),
            (ssl.SSLCertVerificationError("x"), ConnectionFailed, 1),
            (RuntimeError("https://h/?X-Amz-Signature=secret"), FetchError, 2),
            (NO_NAME, ConnectionFailed, 2),
            (RESOLVER_DOWN, ConnectionFailed, 5),
            (TimeoutError("x"), FetchTimeout, 5),
            (ConnectionResetError("x"), ConnectionFailed, 5),
            (aiohttp.ServerDisconnectedError("x"), ConnectionFailed, 5),
            (EOFError("x"), ConnectionFailed, 5),
            (OSError(errno.EBUSY, "x"), FetchError, 5),
            (asyncio.CancelledError("of a task of its own"), FetchError, 2),
        ]
    ],
)
async def test_errors_of_back_ends_are_ours(
    odd: type[OddFileSystem], time: FakeTime, error: BaseException, kind: type[Exception], attempts: int
) -> None:
    odd.fail(error)
    config = FetchConfig(retry=RetryConfig(outage_seconds=0))
    async with Fetcher(config, _clock=time.clock()) as fetcher:
        with pytest.raises(kind) as caught:
            await fetcher.fetch("odd://x", 10, 20)
        host = fetcher.statistics().hosts["odd://x"]
    assert type(caught.value) is kind
    ours = cast("FetchError", pickle.loads(pickle.dumps(caught.value)))
    assert (ours.url, ours.start, ours.stop, ours.host, ours.attempts) == ("odd://x", 10, 20, "x", attempts)
    assert (host.requests, host.errors, host.retries) == (attempts, attempts, attempts - 1)
    shown = "".join(traceback.format_exception(caught.value))
    assert "secret" not in shown
    assert (caught.value.__cause__ is error) is ("secret" not in str(error))


@pytest.mark.parametrize("size", [None, -1, 1.0, float("nan"), True, "", "-1", "1e3", "12 KiB", b"1", 10**18, [1]])
async def test_a_size_that_no_object_has_is_an_error(
    odd: type[OddFileSystem], size: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd.info_of = lambda info: {**info, "size": size}
    entries = [{"name": "/d/y", "size": size, "type": "file"}]
    monkeypatch.setattr(odd, "isdir", lambda _, path: path.endswith("d"))
    monkeypatch.setattr(odd, "ls", lambda *_, **__: entries)
    async with Fetcher() as fetcher:
        with pytest.raises(InvalidResponse, match=f"how long the object is, but {re.escape(repr(size))}:"):
            await fetcher.fetch("odd://x", 10, 20)
        with pytest.raises(InvalidResponse, match=r"how long odd://d/y is"):
            await fetcher.listdir("odd://d")
        entries[0]["type"] = "directory"  # those have none
        assert await fetcher.listdir("odd://d") == [ObjectInfo("odd://d/y/", 0)]


async def test_a_size_in_digits_is_one(odd: type[OddFileSystem]) -> None:
    odd.info_of = lambda info: {**info, "size": str(info["size"])}
    async with Fetcher() as fetcher:
        assert await fetcher.fetch("odd://x", 10, 20) == CONTENT[10:20]


async def test_a_version_that_changes_without_the_size(odd: type[OddFileSystem]) -> None:
    async with Fetcher() as fetcher:
        for key in ("ETag", "md5Hash", "mtime"):
            odd.info_of = lambda info, key=key: {"size": info["size"], "type": "file", key: "1"}  # type: ignore[misc]
            await fetcher.fetch("odd://x", 0, 1)
            odd.info_of = lambda info, key=key: {"size": info["size"], "type": "file", key: "2"}  # type: ignore[misc]
            with pytest.raises(ObjectChanged):
                await fetcher.fetch("odd://x", 0, 1)


async def test_a_hanging_back_end_holds_up_nobody(odd: type[OddFileSystem]) -> None:
    buffer = bytearray(10)

    async def read() -> None:
        with pytest.raises(ClosedError):
            await fetcher.fetch_into("odd://x", 0, 10, buffer)

    with hanging(odd) as hang, anyio.fail_after(5):
        async with anyio.create_task_group() as group, Fetcher() as fetcher:
            group.start_soon(read)
            await to_thread.run_sync(hang.began.wait)
            with anyio.move_on_after(0.05):
                await fetcher.fetch("odd://x", 0, 10)
            assert fetcher.statistics().in_flight == 1
    assert buffer == bytes(10)


async def test_late_bytes_of_a_cancelled_read_are_thrown_away(odd: type[OddFileSystem]) -> None:
    began, release, ended = threading.Event(), threading.Event(), threading.Event()
    buffer = bytearray(3000)

    def slow(data: bytes) -> bytes:
        began.set()
        release.wait(10)
        ended.set()
        return data

    odd.read = slow
    async with Fetcher() as fetcher:
        async with anyio.create_task_group() as group:
            group.start_soon(fetcher.fetch_into, "odd://x", 0, 3000, buffer)
            await to_thread.run_sync(began.wait)
            group.cancel_scope.cancel()
        release.set()
        await to_thread.run_sync(ended.wait)
        odd.read = lambda data: data
        await fetcher.fetch("odd://x", 0, 10)
    assert buffer == bytes(3000)


async def test_threads_left_behind_still_count(odd: type[OddFileSystem], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncfetch.fetch.transports.fsspec.THREADS", 2)
    with hanging(odd):
        async with Fetcher() as fetcher:
            for _ in range(4):
                with anyio.move_on_after(0.1):
                    await fetcher.fetch("odd://x", 0, 10)
    assert odd.looks == 2


async def test_large_reads_are_made_in_steps(odd: type[OddFileSystem], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncfetch.fetch.transports.fsspec.READ_STEP_BYTES", 1000)
    lengths = []

    def note(data: bytes) -> bytes:
        lengths.append(len(data))
        return data

    odd.read = note
    async with Fetcher() as fetcher:
        assert await fetcher.fetch("odd://x", 100, 2600) == CONTENT[100:2600]
    assert lengths == [1000, 1000, 500]


async def test_options_reach_the_file_system(tmp_path: object) -> None:
    with open(f"{tmp_path}/x", "wb") as file:  # noqa: ASYNC230
        file.write(CONTENT)
    config = FetchConfig(fsspec={"dir": {"path": str(tmp_path), "target_protocol": "file"}})
    async with Fetcher(config) as fetcher:
        assert await fetcher.fetch("dir://x", 5, 50) == CONTENT[5:50]
    assert str(tmp_path) not in repr(config)


@pytest.mark.parametrize(
    ("url", "kind", "said"),
    [
        ("htps://h/x", ConfigError, "no such scheme as htps:// is known"),
        ("blockcache://x", ConfigError, "back end for blockcache:// can't be made"),
        ("abfs://c/x", MissingDependency, "abfs:// urls are fsspec's, .* adlfs"),
        ("ftp://no-such-host.invalid/x", ConnectionFailed, "the name of the host can't be resolved.*for ftp://"),
        ("odd://none", NotFound, "no such object"),
    ],
)
async def test_url_that_can_not_be_opened_is_an_error(
    odd: type[OddFileSystem], url: str, kind: type[Exception], said: str
) -> None:
    async with Fetcher() as fetcher:
        with pytest.raises(kind, match=said):
            await fetcher.fetch(url)


async def test_a_directory_is_no_object(odd: type[OddFileSystem]) -> None:
    odd().pipe_file("/d/y", CONTENT)
    async with Fetcher() as fetcher:
        with pytest.raises(NotFound):
            await fetcher.fetch("odd://d")


def test_a_missing_extra_is_an_error_with_the_command() -> None:
    program = """
import sys; sys.modules["fsspec"] = None
import anyio, asyncfetch as af
async def main():
    async with af.Fetcher() as fetcher:
        try: await fetcher.fetch("memory://x")
        except af.MissingDependency as error: print(error)
anyio.run(main)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert install_command("fsspec") in ended.stdout


async def test_statistics_name_the_server_without_the_login() -> None:
    async with Fetcher(FetchConfig(trust_env=False)) as fetcher:
        with pytest.raises(ConfigError):
            await fetcher.fetch("nosuch://me:hunter2@host/x", 0, 9)
        assert list(fetcher.statistics().hosts) == ["nosuch://***@host"]
