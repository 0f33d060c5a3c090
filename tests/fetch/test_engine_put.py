"""put: local files that are there whole or not at all, objects of S3, multipart uploads that leave nothing behind."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest
from anyio import to_thread
from moto.server import ThreadedMotoServer
from multidict import CIMultiDict
from yarl import URL

from asyncfetch.config import FetchConfig, RetryConfig, S3Config
from asyncfetch.errors import (
    AccessDenied,
    AsyncFetchError,
    ClosedError,
    ConfigError,
    ConnectionFailed,
    FetchError,
    InvalidResponse,
    NotFound,
    ObjectChanged,
    Throttled,
)
from asyncfetch.fetch import Fetcher
from asyncfetch.fetch.retry import AttemptFailed, RetryVerdict
from asyncfetch.fetch.transports import s3_upload
from asyncfetch.fetch.transports.http import Response
from asyncfetch.fetch.transports.s3_upload import MAX_ANSWER_BYTES, _checked_tag, _text_of
from asyncfetch.fetch.upload_sources import open_source
from asyncfetch.runtime.memory_pool import MemoryPool
from asyncfetch.testing import Fault, FaultOnce, Keys, S3Quirks, S3Server
from tests.conftest import all_others_wait
from tests.fetch.conftest import s3_fetcher
from tests.fetch.test_engine_cancellation import EveryWait

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from asyncfetch.testing import ServedRequest
    from tests.fetch.conftest import FakeTime

PART = 1000
CONTENT = os.urandom(4 * PART + 300)

pytestmark = pytest.mark.usefixtures("aws_keys")

fetcher_for = partial(s3_fetcher, first_byte_seconds=15, upload_part_bytes=PART)


@pytest.fixture(autouse=True)
def _two_parts_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_upload, "PARTS_IN_FLIGHT", 2)


async def pieces(content: bytes, *lengths: int) -> AsyncIterator[memoryview]:
    """The content in pieces of these lengths, in turns; the memory of each is used again."""
    buffer, start, turn = bytearray(max(lengths)), 0, 0
    while start < len(content):
        piece = content[start : start + lengths[turn % len(lengths)]]
        buffer[: len(piece)] = piece
        yield memoryview(buffer)[: len(piece)]
        buffer[:] = bytes(len(buffer))
        start, turn = start + len(piece), turn + 1


SIZES = [0, 1, PART - 1, PART, PART + 1, 2 * PART, 5 * PART, 5 * PART + 7]


@pytest.mark.parametrize("kind", ["bytes", "path", "iterator"])
async def test_object_is_read_as_it_was_put(kind: str, tmp_path: Path) -> None:
    """Sizes around those of parts, of which there are as many as needed."""
    content: dict[str, bytes] = {}
    async with S3Server(content) as server, fetcher_for(server) as fetcher:
        for size in SIZES:
            wanted = os.urandom(size)
            for url in (f"s3://b/ü d/{size}%20", str(tmp_path / "new" / "directories" / str(size))):
                server.reset()
                (tmp_path / "source").write_bytes(wanted)
                sources: dict[str, Any] = {
                    "bytes": bytearray(wanted),
                    "path": tmp_path / "source",
                    "iterator": pieces(wanted, 1, 0, 700, 3000),
                }
                if kind == "iterator" and size == 0:
                    sources["iterator"] = pieces(b"", 1)
                info = await fetcher.put(url, sources[kind])
                parts = -(-size // PART)
                if url.startswith("s3"):
                    assert len(server.requests) == (1 if parts < 2 else parts + 2)
                assert (info.url, info.size) == (url, size)
                assert await fetcher.fetch(url) == wanted
                found = await fetcher.stat(url)
                assert found.etag == info.etag or size == 0  # of nothing, S3 has no byte to tell it with
        assert server.uploads == {}
        assert sorted(os.listdir(tmp_path / "new" / "directories")) == sorted(map(str, SIZES))


async def test_any_size_in_any_pieces(tmp_path: Path) -> None:
    random = Random(0)
    async with S3Server({}, tls=False) as server, fetcher_for(server) as fetcher:
        for _ in range(25):
            wanted = random.randbytes(random.randrange(5 * PART))
            lengths = [random.randrange(2 * PART) for _ in range(random.randrange(4))] + [1 + random.randrange(PART)]
            for url in ("s3://b/x", f"file://{tmp_path}/x"):
                assert (await fetcher.put(url, pieces(wanted, *lengths))).size == len(wanted)
                assert await fetcher.fetch(url) == wanted
        assert server.uploads == {}


async def test_a_new_version_is_the_first_one_seen(tmp_path: Path) -> None:
    async with S3Server({}) as server, fetcher_for(server) as fetcher:
        for url in ("s3://b/x", str(tmp_path / "x")):
            for size in (10, 20, 3000, 10):
                info = await fetcher.put(url, bytes(size))
                assert (await fetcher.stat(url)).etag == info.etag
                assert await fetcher.fetch(url) == bytes(size)


async def test_longer_object_gets_longer_parts_and_endless_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncfetch.fetch.transports.s3_upload.MAX_PARTS", 3)
    content: dict[str, bytes] = {}
    async with S3Server(content) as server, fetcher_for(server) as fetcher:
        await fetcher.put("s3://b/x", CONTENT)
        assert [request.method for request in server.requests] == ["POST", "PUT", "PUT", "PUT", "POST"]
        with pytest.raises(FetchError, match=r"longer than 3 parts of 1000 bytes.*upload_part_bytes"):
            await fetcher.put("s3://b/y", pieces(CONTENT, 100))
        assert (list(content), server.uploads) == (["b/x"], {})


async def test_parts_in_flight_and_read_are_bounded() -> None:
    read = 0

    async def source() -> AsyncIterator[bytes]:
        nonlocal read
        for start in range(0, len(CONTENT), PART):
            read = start // PART + 1
            yield CONTENT[start : start + PART]

    in_flight: list[int] = []
    asked = anyio.Event()
    release = anyio.Event()

    def stuck(request: ServedRequest) -> Fault | None:
        if request.method == "PUT":
            in_flight.append(server.statistics().in_flight)
            if len(in_flight) == 2:
                asked.set()
            return None if release.is_set() else Fault.stall(None)
        return None

    async with S3Server({}, fault=stuck) as server, fetcher_for(server) as fetcher:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fetcher.put, "s3://b/x", source())
            await asked.wait()
            await all_others_wait()
            assert (server.statistics().in_flight, read) == (2, 4)  # one more is read, and whether it is the last one
            release.set()
            tasks.cancel_scope.cancel()
        await fetcher.put("s3://b/x", source())
        assert max(in_flight) <= 2


@pytest.mark.parametrize(
    ("fault", "times"),
    [
        (Fault.status(503), 2),
        (Fault.status(500), 2),
        (Fault.reset(None), 2),
        (Fault.hang_up(0), 2),
        (Fault.hang_up(500), 2),
        (Fault(corrupt_at=7), 2),
        (Fault.slow(first_byte_seconds=0.1), 1),
    ],
    ids=["overloaded", "failed", "lost answer", "lost at once", "lost midway", "damaged", "slow"],
)
async def test_faults_are_made_good(fault: Fault, times: int, time: FakeTime) -> None:
    """Of every request of an upload, and of a short object's one; also where the answer alone is lost."""
    content: dict[str, bytes] = {}
    async with S3Server(content) as server, fetcher_for(server, time) as fetcher:
        for size in (500, len(CONTENT)):
            for method in ("POST", "PUT", "complete"):
                left = times

                def once(request: ServedRequest, method: str = method) -> Fault | None:
                    nonlocal left
                    kind = "complete" if request.method == "POST" and "uploadId" in request.target else request.method
                    if kind == method and left:
                        left -= 1
                        return fault
                    return None

                server._fault = once
                content.clear()
                info = await fetcher.put("s3://b/x", CONTENT[:size])
                assert (content["b/x"], info.size) == (CONTENT[:size], size)
                server._fault = None
                assert (await fetcher.stat("s3://b/x")).etag == info.etag
                if fault.ending != "reset" or method != "POST":  # of an upload that nobody knows there is no trace
                    assert server.uploads == {}
                server._uploads.clear()


REFUSALS: dict[str, tuple[Fault | S3Quirks | Keys, type[AsyncFetchError], str]] = {
    "overloaded": (Fault.status(503), Throttled, "max_requests_per_host"),
    "lost": (Fault.hang_up(100), ConnectionFailed, "127.0.0.1"),
    "denied": (Fault.status(403), AccessDenied, "credentials"),
    "wrong key": (Keys(secret_key="another"), AccessDenied, "SignatureDoesNotMatch"),
    "damaged": (Fault(corrupt_at=0), InvalidResponse, "other bytes arrived"),
    "damaged unseen": (S3Quirks(takes_any_digest=True), InvalidResponse, "stored other bytes than were sent"),
    "elsewhere": (Fault.redirect("https://127.0.0.1:1/x?X-Amz-Signature=SECRET", 307), InvalidResponse, "region"),
}


@pytest.mark.parametrize("size", [500, len(CONTENT)])
@pytest.mark.parametrize("name", REFUSALS)
async def test_failed_put_is_an_error_that_helps(name: str, size: int, time: FakeTime) -> None:
    """With url, host and attempts; no secret; and nothing is left of it."""
    what, kind, words = REFUSALS[name]
    content: dict[str, bytes] = {}
    fault = what if isinstance(what, Fault) else Fault(corrupt_at=0) if isinstance(what, S3Quirks) else None
    async with (
        S3Server(
            content,
            keys=what if isinstance(what, Keys) else Keys(),
            quirks=what if isinstance(what, S3Quirks) else S3Quirks(),
            fault=lambda request: fault if request.method == "PUT" else None,
        ) as server,
        fetcher_for(server, time, attempts=2, outage_seconds=0) as fetcher,
    ):
        with pytest.raises(kind, match=words) as caught:
            await fetcher.put("s3://b/x", CONTENT[:size])
        error = caught.value
        assert isinstance(error, FetchError)
        assert (error.url, error.host) == ("s3://b/x", server.url.removeprefix("https://"))
        assert error.attempts == (1 if name in {"denied", "wrong key", "elsewhere"} else 2)
        assert not [word for word in ("Signature=", "AKIDTEST", "SECRET") if word in str(error).replace("=***", "")]
        assert server.uploads == {}
        assert name == "damaged unseen" or content == {}


async def test_a_store_s_own_refusals() -> None:
    async with (
        S3Server({}, quirks=S3Quirks(min_part_bytes=PART + 1)) as server,
        fetcher_for(server) as fetcher,
    ):
        with pytest.raises(FetchError, match=r"longer parts: raise S3Config\(upload_part_bytes.*EntityTooSmall"):
            await fetcher.put("s3://b/x", CONTENT)
        assert server.uploads == {}


async def test_a_bucket_elsewhere_that_wants_the_requester_to_pay() -> None:
    content: dict[str, bytes] = {}
    async with (
        S3Server(content, regions={"far": "eu-west-1"}, requester_pays=True) as server,
        fetcher_for(server, requester_pays=True) as fetcher,
    ):
        await fetcher.put("s3://far/x", CONTENT)
        await fetcher.put("s3://far/y", CONTENT[:10])
        assert content == {"far/x": CONTENT, "far/y": CONTENT[:10]}
        assert [request.status for request in server.requests].count(400) == 1
    async with S3Server({}, requester_pays=True) as server, fetcher_for(server) as fetcher:
        with pytest.raises(AccessDenied, match="s3:PutObject"):
            await fetcher.put("s3://far/x", CONTENT)


@pytest.mark.parametrize("kind", ["parts", "one"])
async def test_cancellation_at_every_wait_of_a_put_to_s3(kind: str) -> None:
    """No upload stays, nothing is half there, and the next one works; also where a request is answered late."""
    content: dict[str, bytes] = {"b/x": b"before"}
    wanted = CONTENT[:2500] if kind == "parts" else CONTENT[:500]
    async with S3Server(content) as server, fetcher_for(server) as fetcher:
        waits = EveryWait()
        for cancelled in waits:
            server._fault = FaultOnce("/b/x", Fault.status(503))
            content["b/x"] = b"before"

            async def put() -> None:
                await fetcher.put("s3://b/x", pieces(wanted, 400))

            await cancelled(put())
            assert (fetcher.statistics().in_flight, server.uploads) == (0, {})
            assert content["b/x"] in {b"before", wanted}
        await fetcher.put("s3://b/x", wanted)
        assert content["b/x"] == wanted
    assert waits.count > 5


async def test_cancellation_at_every_wait_of_a_put_to_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncfetch.fetch.transports.file.WRITE_STEP_BYTES", 1000)
    path, descriptors = tmp_path / "d" / "x", len(os.listdir("/proc/self/fd"))
    async with Fetcher() as fetcher:
        await fetcher.put(str(path), b"before")
        (tmp_path / "source").write_bytes(CONTENT)
        waits = EveryWait()
        for cancelled in waits:
            path.write_bytes(b"before")

            async def put() -> None:
                await fetcher.put(str(path), tmp_path / "source")

            await cancelled(put())
            assert os.listdir(tmp_path / "d") == ["x"]
            assert path.read_bytes() in {b"before", CONTENT}
            assert len(os.listdir("/proc/self/fd")) <= descriptors + 4  # the loop's own
    assert waits.count > 5


async def test_closing_ends_a_put_and_aborts_its_upload() -> None:
    stuck = anyio.Event()

    def stall(request: ServedRequest) -> Fault | None:
        if request.method != "PUT":
            return None
        stuck.set()
        return Fault.stall(None)

    async with S3Server({}, fault=stall) as server:
        async with anyio.create_task_group() as tasks:

            async def put() -> None:
                with pytest.raises(ClosedError, match="closed while it wrote s3://b/x"):
                    await fetcher.put("s3://b/x", CONTENT)

            async with fetcher_for(server) as fetcher:
                tasks.start_soon(put)
                await stuck.wait()
        assert [request.method for request in server.requests][-1] == "DELETE"
        assert server.uploads == {}


async def test_an_upload_that_can_not_be_aborted_is_told_of(caplog: pytest.LogCaptureFixture, time: FakeTime) -> None:
    faults = {"PUT": Fault.status(403), "DELETE": Fault.status(500)}
    async with (
        S3Server({}, fault=lambda request: faults.get(request.method)) as server,
        fetcher_for(server, time) as fetcher,
    ):
        with pytest.raises(AccessDenied):
            await fetcher.put("s3://b/x", CONTENT)
        assert len(server.uploads) == 1
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "a multipart upload to s3://b/x is left" in record.getMessage()


@pytest.mark.parametrize(
    "error", [LookupError("of the source"), ExceptionGroup("of the source", [LookupError(1), ValueError(2)])]
)
async def test_a_source_s_own_error_comes_out_as_it_is(error: Exception, tmp_path: Path) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield CONTENT[:2500]
        raise error

    content: dict[str, bytes] = {}
    async with S3Server(content) as server, fetcher_for(server) as fetcher:
        for url in ("s3://b/x", str(tmp_path / "x")):
            with pytest.raises(type(error)) as caught:
                await fetcher.put(url, broken())
            assert caught.value is error
        assert (content, server.uploads, os.listdir(tmp_path)) == ({}, {}, [])


class PathOfBytes:
    """Of a file that isn't there, and whose name is no text."""

    def __fspath__(self) -> bytes:
        return b"/none/\xff"


SOURCES = {
    "number": 3,
    "none": None,
    "text": "text",
    "list": [b"x"],
    "path of bytes": PathOfBytes(),
    "with gaps": memoryview(CONTENT)[::2],
    "objects": np.array(["a", 1], object),
    "objects as fields": np.zeros(2, [("a", "i4"), ("b", [("c", "O")], 2)]),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
async def test_value_that_is_no_source_is_refused(source: object, tmp_path: Path) -> None:
    async with Fetcher() as fetcher:
        with pytest.raises((ConfigError, NotFound), match=r"must be|path of the source|holds Python objects"):
            await fetcher.put(str(tmp_path / "x"), source)  # type: ignore[arg-type]
        assert os.listdir(tmp_path) == []


async def test_a_source_that_grows_at_its_end_was_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source").write_bytes(bytes(5000))
    pread = os.pread

    def grown(descriptor: int, length: int, offset: int) -> bytes:
        with (tmp_path / "source").open("ab") as source:
            source.write(b"more")
        return pread(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", grown)
    async with Fetcher() as fetcher:
        with pytest.raises(ObjectChanged, match="written to while it was being read"):
            await fetcher.put(str(tmp_path / "x"), tmp_path / "source")


async def test_a_source_that_is_longer_than_the_system_says(tmp_path: Path) -> None:
    content: dict[str, bytes] = {}
    async with S3Server(content) as server, fetcher_for(server) as fetcher:
        for url in ("s3://b/x", str(tmp_path / "x")):
            with pytest.raises(FetchError, match=r"longer than the system says.*\[/proc/self/status"):
                await fetcher.put(url, "/proc/self/status")
        assert (content, os.listdir(tmp_path)) == ({}, [])


async def test_a_field_s_name_makes_no_object_of_it(tmp_path: Path) -> None:
    source = np.ones(2, [("O", "i4"), ("P", "f8", (2, 3))])
    async with Fetcher() as fetcher:
        await fetcher.put(str(tmp_path / "x"), source)  # type: ignore[arg-type]
    assert (tmp_path / "x").read_bytes() == source.tobytes()


class NoMemory(MemoryPool):
    """Of a machine that has none left."""

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        raise MemoryError(nbytes)


async def test_a_source_that_memory_can_not_hold(tmp_path: Path) -> None:
    async def bring() -> AsyncIterator[bytes]:
        yield CONTENT

    (tmp_path / "source").write_bytes(CONTENT)
    for content in (tmp_path / "source", bring()):
        async with open_source(content, NoMemory(0), anyio.CapacityLimiter(1)) as source:
            with pytest.raises(
                FetchError, match=f"no memory for the next {PART} bytes of the source: .* lower S3Config"
            ):
                await source.read(PART)


async def test_a_source_that_is_written_to_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(CONTENT)

    async with open_source(tmp_path / "source", MemoryPool(0), anyio.CapacityLimiter(1)) as source:
        assert await source.read(PART) == CONTENT[:PART]
        await to_thread.run_sync((tmp_path / "source").write_bytes, CONTENT[:PART])
        with pytest.raises(ObjectChanged, match="put it again"):
            await source.read(PART)


async def test_deleted_object_is_gone(tmp_path: Path) -> None:
    content = {"b/x": b"1", "b/y": b"2"}
    async with S3Server(content) as server, fetcher_for(server) as fetcher:
        assert bytes(await fetcher.fetch("s3://b/x")) == b"1"
        await fetcher.delete("s3://b/x")
        await fetcher.delete("s3://b/x")
        assert content == {"b/y": b"2"}
        (tmp_path / "file").write_bytes(b"")
        await fetcher.delete(f"file://{tmp_path}/file")
        for url in (str(tmp_path / "file"), str(tmp_path), "https://h/x"):
            with pytest.raises((FetchError, ConfigError), match=r"check the path|can't be removed|delete takes"):
                await fetcher.delete(url)


@pytest.mark.parametrize("url", ["https://h/x", "hf://datasets/a/b/c", "memory://x", "s3://b", "s3://b/", "", "a\0b"])
async def test_url_where_nothing_can_be_put_is_refused(url: str) -> None:
    async with Fetcher() as fetcher:
        with pytest.raises(ConfigError) as caught:
            await fetcher.put(url, b"x")
    if url[:2] in {"ht", "hf", "me"}:
        assert "put takes s3:// and file:// urls and plain paths" in str(caught.value)


async def test_local_places_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"as it was")
    (tmp_path / "directory").mkdir()
    async with Fetcher() as fetcher:
        for path, words in [
            ("file/x", "a part of its path is a file"),
            ("directory", "a directory in its place"),
            ("x" * 300, "name too long"),
        ]:
            with pytest.raises(FetchError, match=rf"(?i){words}") as caught:
                await fetcher.put(str(tmp_path / path), b"x")
            assert caught.value.url == str(tmp_path / path)
        with pytest.raises(ConfigError, match="names a directory"):
            await fetcher.put(f"{tmp_path}/directory/", b"x")
    assert sorted(os.listdir(tmp_path)) == ["directory", "file"]
    assert (tmp_path / "file").read_bytes() == b"as it was"


@pytest.mark.parametrize(
    "name", ["a" * 255, "\u3042" * 85, "\xe9" * 127, "\udce9" * 255], ids=["ascii", "three bytes", "two", "no text"]
)
async def test_a_file_s_name_may_be_as_long_as_the_system_takes(tmp_path: Path, name: str) -> None:
    async with Fetcher() as fetcher:
        await fetcher.put(str(tmp_path / name), CONTENT)
    assert os.listdir(tmp_path) == [name]
    assert (tmp_path / name).read_bytes() == CONTENT


async def test_a_reader_sees_the_old_file_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncfetch.fetch.transports.file.WRITE_STEP_BYTES", 1000)
    path = tmp_path / "x"
    path.write_bytes(b"before")
    seen = []

    async def source() -> AsyncIterator[bytes]:
        for start in range(0, len(CONTENT), 100):
            seen.append(await to_thread.run_sync(path.read_bytes))
            yield CONTENT[start : start + 100]

    async with Fetcher() as fetcher:
        await fetcher.put(f"file://{path}", source())
    assert set(seen) == {b"before"}
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("value", [0, -1])
def test_configurations_that_can_not_work(value: int) -> None:
    with pytest.raises(ConfigError, match="upload_part_bytes"):
        S3Config(upload_part_bytes=value)


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


async def test_objects_are_put_to_motos_server(moto: str, tmp_path: Path) -> None:
    """What we put there is what aiobotocore itself reads, with the metadata that S3 gives it."""
    from aiobotocore.session import get_session

    part_bytes = 5 * 2**20
    wanted = os.urandom(2 * part_bytes + 5)
    (tmp_path / "source").write_bytes(wanted)
    config = FetchConfig(s3=S3Config(endpoint_url=moto, upload_part_bytes=part_bytes), retry=RetryConfig(attempts=1))
    async with (
        get_session().create_client("s3", region_name="us-east-1", endpoint_url=moto) as client,
        Fetcher(config) as fetcher,
    ):
        await client.create_bucket(Bucket="written")
        for key, size in [("ü d/whole+ %20", 1000), ("parts", len(wanted)), ("empty", 0)]:
            info = await fetcher.put(f"s3://written/{key}", wanted[:size])
            found = await client.get_object(Bucket="written", Key=key)
            assert await found["Body"].read() == wanted[:size]
            assert found["ETag"] == info.etag
        info = await fetcher.put("s3://written/file", tmp_path / "source")
        assert (info.etag or "").endswith('-3"')
        with pytest.raises(NotFound, match="no such bucket"):
            await fetcher.put("s3://none/x", wanted)
        with suppress(TimeoutError), anyio.fail_after(0.02):
            await fetcher.put("s3://written/cancelled", wanted)
        assert "Uploads" not in await client.list_multipart_uploads(Bucket="written")


def reply(headers: dict[str, str], body: bytes = b"") -> Response:
    return Response(URL("https://h"), 200, CIMultiDict(headers), body)


def test_tags_that_are_no_md5_are_taken_as_they_are() -> None:
    digest, other = b"\0" * 16, f'"{"1" * 32}"'
    assert _checked_tag(digest, reply({"etag": f'"{"0" * 32}"'})) == f'"{"0" * 32}"'
    for headers in (
        {"x-amz-server-side-encryption": "aws:kms"},
        {"x-amz-server-side-encryption-customer-algorithm": "AES256"},
    ):
        assert _checked_tag(digest, reply({"etag": other, **headers})) == other
    assert _checked_tag(digest, reply({"etag": '"of-another-kind"'})) == '"of-another-kind"'
    for wrong in (reply({}), reply({"etag": other}), reply({"etag": other, "x-amz-server-side-encryption": "AES256"})):
        with pytest.raises(AttemptFailed):
            _checked_tag(digest, wrong)


@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        (b"<Error><Code>InternalError</Code></Error>", RetryVerdict.AGAIN),
        (b"<Error><Code>NoSuchUpload</Code></Error>", RetryVerdict.FATAL),
        (b"  ", RetryVerdict.ONCE),
        (b"<Result><ETag>x</ETag>%s</Result>" % (b" " * MAX_ANSWER_BYTES), RetryVerdict.ONCE),
        (b'<?xml version="1.0" encoding="none"?><x/>', RetryVerdict.ONCE),
        (b'<?xml version="1.0" encoding="utf-7"?><x/>', RetryVerdict.ONCE),
        (b"<Result/>", RetryVerdict.ONCE),
    ],
)
def test_an_answer_of_200_may_be_an_error(body: bytes, verdict: RetryVerdict) -> None:
    with pytest.raises(AttemptFailed) as caught:
        _text_of("ETag", reply({}, body))
    assert caught.value.verdict is verdict
