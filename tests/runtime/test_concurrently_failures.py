"""Errors that are kept for others: the same to whoever gets them, and without anybody's frames."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import anyio
import pytest

from asyncfetch.cache import ByteCache
from asyncfetch.config import FetchConfig
from asyncfetch.errors import AsyncFetchError, FetchTimeout, NotFound, RangeNotSatisfiable
from asyncfetch.fetch import Fetcher
from asyncfetch.fetch.batch import each_on_its_own
from asyncfetch.ranges import ByteRange
from asyncfetch.runtime import LoopThread
from asyncfetch.runtime.concurrently import copied, gather, kept
from asyncfetch.runtime.loop_thread import BackgroundContext
from asyncfetch.runtime.single_flight import SharedLRU, SingleFlight
from asyncfetch.testing import RangeServer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from typing import Self


class OtherWords(Exception):
    """Its constructor makes other arguments of what it gets."""

    def __init__(self, code: int) -> None:
        super().__init__(f"failed with {code}")
        self.code = code


class Slots(Exception):
    __slots__ = ("code",)

    def __init__(self, code: int | None) -> None:
        super().__init__("failed")
        self.code = code


class OwnNew(Exception):
    def __new__(cls, text: str, *, code: int) -> Self:
        return super().__new__(cls, text)

    def __init__(self, text: str, *, code: int) -> None:
        self.code = code


class Strange(KeyError, OSError):
    """Of two built-in kinds."""


class OwnOSError(OSError):
    def __init__(self, number: int, name: str, more: object) -> None:
        super().__init__(number, "strange", name)
        self.more = more


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()  # what is in a cycle stays
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "error",
    [
        OtherWords(3),
        Slots(None),
        OwnNew("failed", code=3),
        Strange("x"),
        OwnOSError(2, "file", object()),
        OSError("no such video"),
        FileNotFoundError(2, "no", "file"),
        UnicodeDecodeError("utf-8", b"abc", 0, 1, "bad"),
        ImportError("no", name="module"),
        KeyboardInterrupt(),
        SystemExit(3),
        RangeNotSatisfiable("no such range", size=3, url="https://host/a", start=1, stop=9),
        FetchTimeout("late", url="https://host/a"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_copy_says_the_same_and_has_no_frames(error: BaseException) -> None:
    cause = ValueError("why")
    with suppress(ValueError):
        fail(cause)
    with suppress(type(error)):
        fail(error, cause)
    attributes = dict(vars(error))
    for copy in copied(error), kept(error):
        assert (type(copy), str(copy), repr(copy)) == (type(error), str(error), repr(error))
        assert copy is not error
        assert (copy.__traceback__, copy.__context__) == (None, None)
        assert {name: value for name, value in vars(copy).items() if name != "__notes__"} == attributes
        for name in ("errno", "filename", "code", "name", "start"):
            assert getattr(copy, name, None) == getattr(error, name, None)
        assert str(copy.__cause__) == "why"
    kept_cause = kept(error).__cause__
    assert kept_cause is not None
    assert kept_cause is not cause
    assert kept_cause.__traceback__ is None
    assert cause.__traceback__ is not None


def test_origin_of_an_error_that_is_not_ours_is_noted() -> None:
    for error, notes in ((OSError("fire"), 1), (NotFound("not there"), 0)):
        with suppress(OSError, AsyncFetchError):
            fail(error)
        told = getattr(kept(kept(error)), "__notes__", [])
        assert len(told) == notes
        assert all("in fail\n" in note for note in told)


def test_members_of_a_group_have_no_frames() -> None:
    try:
        fail(OSError("fire"))
    except OSError as error:
        group = ExceptionGroup("some", [error, ExceptionGroup("others", [error])])
    (one, others) = kept(group).exceptions
    assert isinstance(others, ExceptionGroup)
    assert (one.__traceback__, others.exceptions[0].__traceback__) == (None, None)
    assert group.exceptions[0].__traceback__ is not None


def fail(error: BaseException, cause: BaseException | None = None) -> NoReturn:
    try:
        raise error from cause
    finally:
        del error, cause  # else a cycle of its own


class Block:
    """What lies in a frame."""


class Frames:
    """Calls that fail with something in their frame, and askers that have something in theirs."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.blocks: list[weakref.ref[Block]] = []

    async def fail(self, *_: object) -> Any:  # noqa: ANN401
        block = self.block()
        await anyio.lowlevel.checkpoint()
        raise copied(self.error) from self.cause(block)

    async def ask(self, call: Callable[[], Awaitable[object]]) -> None:
        block = self.block()
        try:
            await call()
        except type(self.error):
            del block
        else:
            pytest.fail("no error")

    def block(self) -> Block:
        block = Block()
        self.blocks.append(weakref.ref(block))
        return block

    def cause(self, block: Block) -> Exception:
        try:
            fail(ValueError())
        except ValueError as error:
            assert block is not None
            return error

    def left(self) -> int:
        return sum(each() is not None for each in self.blocks)


@pytest.mark.parametrize("error", [NotFound("not there"), OtherWords(3)])
async def test_a_flight_leaves_no_frames(without_collector: None, error: Exception) -> None:
    frames = Frames(error)
    async with anyio.create_task_group() as owner:
        flights: SingleFlight[str, None] = SingleFlight(owner)
        await gather(*[lambda: frames.ask(lambda: flights.run("a", frames.fail))] * 3)
        await anyio.lowlevel.checkpoint()
        assert frames.left() == 0


async def test_a_load_leaves_no_frames(without_collector: None) -> None:
    frames = Frames(NotFound("not there"))
    shared: SharedLRU[str, Any] = SharedLRU(100)
    await gather(*[lambda: frames.ask(lambda: shared.get("a", frames.fail))] * 3)
    await anyio.lowlevel.checkpoint()
    assert frames.left() == 0


async def test_callers_of_a_shared_load_keep_only_their_own_frames() -> None:
    shared: SharedLRU[str, Any] = SharedLRU(100)
    frames = Frames(NotFound("not there"))
    held: list[BaseException] = []

    async def ask() -> None:
        block = frames.block()
        with suppress(NotFound):
            try:
                await shared.get("a", frames.fail)
            except NotFound as error:
                held.append(error)
                raise
        del block

    await gather(*[ask] * 3)
    leader, *others = held
    for error in others:
        names, traceback = [], error.__traceback__
        while traceback is not None:
            names.append(traceback.tb_frame.f_code.co_name)
            traceback = traceback.tb_next
        assert names == ["ask", "get", "load", "get"]
        assert error.__cause__ is not None
        assert error.__cause__.__traceback__ is None
    assert leader.__cause__ is not None


@pytest.mark.parametrize("error", [NotFound("not there"), OtherWords(3)])
def test_context_that_could_not_be_opened_keeps_no_frames(without_collector: None, error: Exception) -> None:
    frames = Frames(error)

    class Opening:
        __aenter__ = staticmethod(frames.fail)

        async def __aexit__(self, *_: object) -> None: ...

    def ask(kept_open: BackgroundContext[None]) -> None:
        block = frames.block()
        with pytest.raises(type(error), match=str(error)):
            kept_open.value()
        del block

    with LoopThread() as thread:
        kept_open: BackgroundContext[None] = BackgroundContext(thread, Opening, name="this")
        for _ in range(3):
            ask(kept_open)
        assert kept_open.has_failed
    assert frames.left() == 0


async def test_a_stream_of_ranges_leaves_no_frames(without_collector: None) -> None:
    frames = Frames(NotFound("not there"))

    async def read() -> None:
        async with each_on_its_own([ByteRange("https://host/a", 0, 9)], frames.fail) as stream:
            await frames.ask(lambda: anext(stream))

    await read()
    await anyio.lowlevel.checkpoint()
    assert frames.left() == 0


async def test_callers_of_a_shared_request_keep_no_frames(without_collector: None) -> None:
    frames = Frames(NotFound("not there"))
    async with (
        RangeServer({}) as server,
        Fetcher(FetchConfig(ca_file=server.ca_file)) as fetcher,
        ByteCache(fetcher, max_bytes=100) as cache,
    ):
        await gather(*[lambda: frames.ask(lambda: cache.fetch(f"{server.url}/a", 0, 9))] * 3)
        await anyio.lowlevel.checkpoint()
        assert frames.left() == 0


@dataclass(frozen=True)
class FrozenError(Exception):
    """A type whose instances can't be copied: nothing can be set on them."""

    message: str


def test_an_error_that_cannot_be_copied_is_given_as_it_is() -> None:
    error = FrozenError("x")
    assert kept(error) is error
    assert copied(error) is error
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert kept(one) is one
