"""Right and wrong answers in any pieces, to several at a time: the asked bytes or an error of ours."""

from __future__ import annotations

import asyncio
import random
import termios
from array import array
from fcntl import ioctl
from typing import TYPE_CHECKING

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncfetch.config import FetchConfig, RetryConfig
from asyncfetch.errors import AsyncFetchError
from asyncfetch.fetch import Fetcher
from tests.conftest import LOOPS, all_others_wait
from tests.fetch.conftest import PATIENT

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

CONTENT = random.Random(3).randbytes(300_000)
RIGHT = ["honest", "no-etag", "informed", "chunked", "whole", "close"]
WRONG = ["surplus", "second", "early", "short", "reset", "rubbish", "refused", "longer", "silent"]


class Fuzzer:
    """Answers each request in one of these ways, cut into pieces, as its own generator has it."""

    def __init__(self, seed: int, ways: list[str]) -> None:
        self.rng = random.Random(seed)
        self.ways = ways
        self.tasks: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self.answers = 0
        """How many are being written."""

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks[task] = writer
        try:
            goes_on = True
            while goes_on:
                request = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.answers += 1
                try:
                    goes_on = await self._answer(request, writer)
                finally:
                    self.answers -= 1
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client is gone, or the test is over
        finally:
            del self.tasks[task]
            writer.transport.abort()

    async def all_arrived(self) -> None:
        """Wait until all that was answered lies where the client's next look finds it.

        The last bytes of an answer may wait in the system, for up to 40 ms, for the client's to say that it has those
        before them.
        """
        # The system tells nobody when the last of it is there.
        while self.answers or any(map(_is_under_way, self.tasks.values())):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await all_others_wait()

    async def _answer(self, request: str, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection goes on."""
        first, last = map(int, request.partition("bytes=")[2].partition("\r\n")[0].split("-"))
        body = CONTENT[first : last + 1]
        way = self.rng.choice(self.ways)
        place = f"Content-Range: bytes {first}-{last}/{len(CONTENT)}\r\n"
        head = f'HTTP/1.1 206 x\r\n{place}ETag: "a"\r\nContent-Length: {len(body)}\r\n\r\n'.encode()
        other = head + bytes(len(body))
        match way:
            case "no-etag":
                text = head.replace(b'ETag: "a"\r\n', b"") + body
            case "informed":
                text = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + head + body
            case "chunked":
                text = head.replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked")
                text += b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
            case "whole":
                text = f'HTTP/1.1 200 x\r\nETag: "a"\r\nContent-Length: {len(CONTENT)}\r\n\r\n'.encode() + CONTENT
            case "surplus":
                text = head + body + self.rng.choice([b"\n", b"HTTP/1.1 404 x\r\nContent-Length: 0\r\n\r\n"])
            case "second" | "early":
                text = head + body + other
            case "short" | "reset":
                text = head + body[: self.rng.randrange(len(body))]
            case "rubbish":
                text = self.rng.randbytes(50)
            case "refused":
                text = b"HTTP/1.1 503 x\r\nContent-Length: 4\r\n\r\nnone"
            case "longer":
                text = head.replace(b"Content-Length: ", b"Content-Length: 1") + body
            case "silent":
                text = head[: self.rng.randrange(len(head))]
            case _:
                text = head + body
        await self._send(text, writer)
        if way == "early":
            await asyncio.sleep(self.rng.choice([0, 0.001]))
            await self._send(other, writer)
        if way == "reset":
            writer.transport.abort()
        return way not in {"reset", "short", "close", "silent", "rubbish"}

    async def _send(self, text: bytes, writer: asyncio.StreamWriter) -> None:
        sizes = self.rng.choice([[1, 7, 40], [100, 5_000], [70_000], [10**9]])
        at = 0
        while at < len(text):
            size = self.rng.choice(sizes)
            # A few odd pieces, then the rest.
            size = size if at < 400 or size > 5_000 else len(text)
            if writer.transport.is_closing():
                raise ConnectionResetError
            writer.write(text[at : at + size])
            at += size
            await writer.drain()
            for _ in range(self.rng.randrange(3)):
                await asyncio.sleep(0)


def _is_under_way(writer: asyncio.StreamWriter) -> bool:
    if writer.transport.is_closing():
        return False
    unread_bytes = array("i", [0])
    ioctl(writer.get_extra_info("socket").fileno(), termios.TIOCOUTQ, unread_bytes)
    return unread_bytes[0] > 0 or writer.transport.get_write_buffer_size() > 0


async def _read(fetcher: Fetcher, url: str, rng: random.Random, errors: list[Exception]) -> None:
    start = rng.randrange(len(CONTENT) - 1)
    stop = rng.randrange(start + 1, min(len(CONTENT), start + rng.choice([100, 50_000, 300_000])) + 1)
    with anyio.move_on_after(rng.choice([0, 0.002, 5, 5])):
        try:
            assert await fetcher.fetch(url, start, stop) == CONTENT[start:stop]
        except AsyncFetchError as error:
            errors.append(error)


async def _attack(
    seed: int, ways: list[str], tls: ssl.SSLContext | None, ca_file: str, bytes_per_second: int | None
) -> None:
    fuzzer, rng = Fuzzer(seed, ways), random.Random(seed)
    errors: list[Exception] = []
    config = FetchConfig(
        ca_file=ca_file,
        trust_env=False,
        hedge=None,
        max_bytes_per_second=bytes_per_second,
        retry=RetryConfig(attempts=3, initial_seconds=0.0001, maximum_seconds=0.001, budget=10**6),
        timeouts=PATIENT,
    )
    with anyio.fail_after(50):
        async with await asyncio.start_server(fuzzer.converse, "127.0.0.1", ssl=tls) as server:
            url = f"{'http' if tls is None else 'https'}://127.0.0.1:{server.sockets[0].getsockname()[1]}/x"
            async with Fetcher(config) as fetcher:
                for _ in range(3):
                    async with anyio.create_task_group() as group:
                        for _ in range(6):
                            group.start_soon(_read, fetcher, url, rng, errors)
                assert ways is not RIGHT or (errors, fetcher.statistics().retries) == ([], 0)
                await fuzzer.all_arrived()  # else a surplus 404 may answer what is asked next
                fuzzer.ways = ["honest"]
                for _ in range(2):
                    assert await fetcher.fetch(url, 0, 100_000) == CONTENT[:100_000]
            for task in fuzzer.tasks:
                task.cancel()
            if fuzzer.tasks:
                await asyncio.wait(fuzzer.tasks)


@pytest.mark.parametrize("new_loop", [pytest.param(LOOPS[name], id=name) for name in LOOPS])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), is_right=st.booleans(), is_tls=st.booleans(), is_capped=st.booleans())
def test_any_answers_in_any_pieces(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
    server_tls: ssl.SSLContext,
    ca_file: str,
    seed: int,
    is_right: bool,
    is_tls: bool,
    is_capped: bool,
) -> None:
    ways, tls = RIGHT if is_right else RIGHT + WRONG, server_tls if is_tls else None
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_attack(seed, ways, tls, ca_file, 50_000_000 if is_capped else None))
