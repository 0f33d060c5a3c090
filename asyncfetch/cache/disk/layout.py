"""What lies where in a disk tier, and what a block's file holds. Nothing here touches the disk.

    CACHEDIR.TAG                       backups and archivers leave such a directory out
    v1/used                            how many bytes there are, see `account`
    v1/evicting                        locked by the process that evicts
    v1/new/*                           files that are being written, each locked by its writer
    v1/objects/<object>/<version>/<start>-<stop>

An object is a url without its signature, a version an ETag and a size; the names are hashes. A file holds bytes
[start, stop) of the version, within one block of `BLOCK_BYTES`: a whole one, or just what was asked of it. So nothing
is fetched that nobody asked for, and whoever asks for the same range again finds the same files.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from asyncfetch.cache.names import object_name
from asyncfetch.errors import MissingDependency

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from asyncfetch.ranges import ObjectInfo

__all__ = [
    "BLOCK_BYTES",
    "HEADER_BYTES",
    "PAGE_BYTES",
    "Piece",
    "Version",
    "cost_bytes",
    "join",
    "load_checksum",
    "object_folder",
    "split",
]

BLOCK_BYTES: Final = 1024 * 1024
"""Longest file. Into warm memory, ranges of 1,300 KiB took 2.3 times a plain read of the page cache from files of up to
256 KiB, 1.9 from 1 MiB and 1.7 from 4 MiB; and a larger one must be read whole to know that a part of it is right. Part
of the format."""
PAGE_BYTES: Final = 4096
"""Files take whole pages of a disk, so they count as such."""

_MAGIC: Final = b"AFetch1\n"
_HEADER: Final = struct.Struct("<8s24sQQQ")
HEADER_BYTES: Final = _HEADER.size
"""In front of the content: were it behind, the system would take twice as long to copy into memory that begins 16 bytes
into a page, as all that malloc maps does. A copy is slow whose target lies a few bytes behind its source in a page."""

_OBJECT_DIGEST, _VERSION_DIGEST = 16, 8


def load_checksum() -> Callable[[Any], int]:
    """XXH3 of 64 bits: 62 GB/s in the processor's caches where this was measured, zlib's CRC-32 4, BLAKE2b 1.

    Raises:
        MissingDependency: xxhash isn't installed.
    """
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError as error:
        raise MissingDependency('a disk tier needs xxhash: pip install "asyncfetch[disk]"') from error
    return xxh3_64_intdigest


def object_folder(url: str) -> str:
    """Name of the folder with all versions of an object."""
    return _digest(object_name(url), _OBJECT_DIGEST)


@dataclass(frozen=True, slots=True)
class Version:
    """One content of one object."""

    object: str
    """Hexadecimal hash of the url without its signature."""
    version: str
    """Hexadecimal hash of the ETag and the size."""

    @classmethod
    def of(cls, info: ObjectInfo) -> Version:
        """The version that a server told, with its strong ETag: nothing else promises equal bytes."""
        return cls(object_folder(info.url), _digest(f"{info.size}:{info.etag}", _VERSION_DIGEST))

    @classmethod
    def parse(cls, object_name: str, version_name: str) -> Version | None:
        """The version whose folder this is; None for names that aren't ours."""
        parsed = cls(object_name, version_name)
        try:
            is_ours = parsed.digest.hex() == object_name + version_name
        except ValueError:
            return None
        return parsed if is_ours and len(object_name) == 2 * _OBJECT_DIGEST else None

    @property
    def folder(self) -> str:
        """Its path below the objects."""
        return f"{self.object}/{self.version}"

    @property
    def digest(self) -> bytes:
        """What each of its files' headers begins with."""
        return bytes.fromhex(self.object + self.version)


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, stop) of a version, within one block."""

    start: int
    stop: int

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.start:x}-{self.stop:x}"

    @classmethod
    def parse(cls, name: str) -> Piece | None:
        """The piece whose file has this name; None for names that aren't ours."""
        start, _, stop = name.partition("-")
        try:
            piece = cls(int(start, 16), int(stop, 16))
        except ValueError:
            return None
        return piece if piece.name == name and piece.start < piece.stop else None

    @property
    def size_bytes(self) -> int:
        """Length of the bytes alone."""
        return self.stop - self.start

    @property
    def file_bytes(self) -> int:
        """Length of its file."""
        return HEADER_BYTES + self.stop - self.start

    def holds(self, other: Piece) -> bool:
        """Whether the other one's bytes are among its own."""
        return self.start <= other.start and other.stop <= self.stop

    def header(self, version: Version, checksum: int) -> bytes:
        """The first bytes of its file; the content follows."""
        return _HEADER.pack(_MAGIC, version.digest, self.start, self.stop, checksum)


def split(start: int, stop: int) -> list[Piece]:
    """A range cut where blocks meet."""
    cuts = [start, *range(start - start % BLOCK_BYTES + BLOCK_BYTES, stop, BLOCK_BYTES), stop]
    return [Piece(low, high) for low, high in pairwise(cuts) if low < high]


def join(pieces: Iterable[Piece]) -> list[tuple[int, int]]:
    """The half-open ranges that ascending pieces make up, as few as possible."""
    spans: list[tuple[int, int]] = []
    for piece in pieces:
        if spans and spans[-1][1] == piece.start:
            spans[-1] = spans[-1][0], piece.stop
        else:
            spans.append((piece.start, piece.stop))
    return spans


def cost_bytes(file_bytes: int) -> int:
    """What a file of this length takes of a disk."""
    return -(-file_bytes // PAGE_BYTES) * PAGE_BYTES


def _digest(text: str, size: int) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).hexdigest()
