"""A file system of fsspec's that does to reads what the test wants."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from fsspec.implementations.memory import MemoryFileSystem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CONTENT = bytes(range(256)) * 100


class OddFileSystem(MemoryFileSystem):  # type: ignore[misc]  # untyped
    """``odd://x`` holds CONTENT."""

    protocol = "odd"
    cachable = False
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    read: ClassVar[Callable[[bytes], bytes]]
    """What becomes of the bytes of a range."""
    info_of: ClassVar[Callable[[dict[str, Any]], dict[str, Any]]]
    """What becomes of what is told of an object."""
    looks: ClassVar[int]
    """How often that was asked."""
    asked: ClassVar[list[tuple[int | None, int | None]]]
    """The ranges that were asked for."""

    @classmethod
    def reset(cls) -> None:
        """As if new."""
        cls.store.clear()
        cls.read, cls.info_of, cls.looks, cls.asked = (lambda data: data), (lambda info: info), 0, []
        cls().pipe_file("/x", CONTENT)

    @classmethod
    def fail(cls, error: BaseException) -> None:
        """Every read of a range raises it from now on."""

        def fail(_: bytes) -> bytes:
            raise error

        cls.read = fail

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("odd://", "memory://")))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:  # noqa: ANN401
        type(self).asked.append((start, end))
        return type(self).read(super().cat_file(path, start, end, **options))

    def info(self, path: str, **options: Any) -> dict[str, Any]:  # noqa: ANN401
        type(self).looks += 1
        return type(self).info_of(super().info(path, **options))


@dataclass
class Hang:
    """A back end that gives no answer."""

    began: threading.Event = field(default_factory=threading.Event)
    """Set when one waits for it."""
    release: threading.Event = field(default_factory=threading.Event)
    """To be set for it to go on."""


@contextmanager
def hanging(odd: type[OddFileSystem], hangs: Callable[[bytes], bool] = lambda _: True) -> Iterator[Hang]:
    """Reads of such bytes hang, at most until the end."""
    hang = Hang()

    def read(data: bytes) -> bytes:
        if hangs(data):
            hang.began.set()
            hang.release.wait()
        return data

    odd.read = read
    try:
        yield hang
    finally:
        hang.release.set()
