"""A disk cache's directory and bounds, and the names and contents of its files. Nothing here touches the disk.

    CACHEDIR.TAG                       makes backups and archivers skip the directory
    v1/used                            the number of bytes, see `SharedCounter`
    v1/evicting                        locked by the process that evicts
    v1/new/*                           files that are being written, each locked by its writer
    v1/objects/<subdirectory>/<object>-<version>-<start>-<stop>

An object is a url without its signature, and its store if the url leaves that open; a version is an ETag and a size.
The names are hashes. A file holds bytes [start, stop) of the version, within one block of `BLOCK_BYTES`: all of it, or
just the bytes that were wanted and missing. So nothing is fetched that wasn't requested, and nothing twice: another
range is read from the parts that files hold of it.

Subdirectories have no meaning. There are so many that a million files make about a thousand in each, which is quickly
listed. With a folder for each object and version, a million small objects made two million folders of 4 KiB, and
looking at all of them took a quarter of an hour; and one folder with 50,000 pieces of a large object took 170 ms to
list, for each missing piece.
"""

from __future__ import annotations

import os
import re
import struct
from dataclasses import KW_ONLY, dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from asyncfetch.config.checks import absolute_directory, whole_number
from asyncfetch.errors import MissingDependency, install_command
from asyncfetch.fetch.urls import object_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from asyncfetch.ranges import ObjectInfo

DIRECTORY_VARIABLE = "ASYNCFETCH_DISK_CACHE_DIR"


def default_directory() -> Path:
    """The command line's default tier: the environment's, or one in the user's cache directory."""
    named = os.environ.get(DIRECTORY_VARIABLE)
    if named:
        return absolute_directory(named)
    return absolute_directory(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "asyncfetch" / "disk"


@dataclass(frozen=True, slots=True)
class DiskTier:
    """A directory that keeps fetched bytes for all processes and jobs of one machine, and after them.

    Only a description: it opens nothing, and pickles. All users of a directory should give it the same bounds;
    otherwise each keeps to its own.
    """

    directory: str | os.PathLike[str]
    """Directory on a local disk; made for this user alone if it doesn't exist. Everybody with write access is trusted:
    checks find accidental damage, not forgery."""
    max_bytes: int
    """Bound on the files in it, each rounded up to whole pages of 4 KiB."""
    _: KW_ONLY
    min_free_bytes: int = 1024**3
    """Bytes of the disk to leave free: with less, the tier deletes files instead of adding some. If deleting all of
    them wouldn't be enough, it adds none, but keeps and serves those it has. 1 GiB suffices for a log or a checkpoint
    when the disk is full."""

    def __post_init__(self) -> None:
        absolute_directory(self.directory)
        for name, least in (("max_bytes", 1), ("min_free_bytes", 0)):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least=least))

    @property
    def path(self) -> Path:
        """The directory, absolute."""
        return absolute_directory(self.directory)


BLOCK_BYTES: Final = 1024 * 1024
"""Longest file. Into warm memory, ranges of 1,300 KiB took 2.3 times a plain read of the page cache from files of up to
256 KiB, 1.9 from 1 MiB and 1.7 from 4 MiB; and a larger one must be read whole to know that a part of it is right. Part
of the format."""
SUBDIRECTORIES: Final = 1024
"""Part of the format."""
PAGE_BYTES: Final = 4096
"""Files take whole pages of a disk, so they count as such."""

_MAGIC: Final = b"AFetch1\n"
_HEADER: Final = struct.Struct("<8s24sQQQ")
HEADER_BYTES: Final = _HEADER.size
"""Length of the header before the content. With it after the content, copies took twice as long into memory that begins
16 bytes into a page, as all that malloc maps does: a copy is slow when its target is a few bytes behind its source
within a page."""

_OBJECT_DIGEST, _VERSION_DIGEST = 16, 8
_NUMBER: Final = "(?:0|[1-9a-f][0-9a-f]*)"
_FILE_NAME: Final = re.compile(
    f"[0-9a-f]{{{2 * _OBJECT_DIGEST}}}-[0-9a-f]{{{2 * _VERSION_DIGEST}}}-{_NUMBER}-{_NUMBER}", re.ASCII
)


def load_checksum() -> Callable[[Any], int]:
    """XXH3 of 64 bits: measured, 62 GB/s in the processor's caches; zlib's CRC-32 4, BLAKE2b 1.

    Raises:
        MissingDependency: xxhash isn't installed.
    """
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError as error:
        raise MissingDependency(f"a disk cache needs xxhash: {install_command('disk')}") from error
    return xxh3_64_intdigest


def object_id(url: str, endpoint: str = "") -> str:
    """The beginning of the names of all files of an object; ``endpoint`` is its store if the url leaves that open."""
    name = object_name(url)
    return _digest(f"{endpoint}\n{name}" if endpoint else name, _OBJECT_DIGEST)


@dataclass(frozen=True, slots=True)
class VersionFile:
    """One content of one object."""

    object: str
    """Hexadecimal hash of the url without its signature, and of the endpoint."""
    version: str
    """Hexadecimal hash of the ETag and the size."""

    @classmethod
    def of(cls, info: ObjectInfo, endpoint: str = "") -> VersionFile:
        """The version of an object with a strong ETag: nothing else promises equal bytes."""
        return cls(object_id(info.url, endpoint), _digest(f"{info.size}:{info.etag}", _VERSION_DIGEST))

    @property
    def name(self) -> str:
        """The part that the names of its files begin with."""
        return f"{self.object}-{self.version}"


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """Bytes [start, stop) of a version, within one block."""

    start: int
    stop: int

    @property
    def name(self) -> str:
        """The part that the name of its file ends with."""
        return f"{self.start:x}-{self.stop:x}"

    @property
    def size_bytes(self) -> int:
        """Length of the bytes alone."""
        return self.stop - self.start

    @property
    def file_bytes(self) -> int:
        """Length of its file."""
        return HEADER_BYTES + self.size_bytes

    def header(self, version: VersionFile, checksum: int) -> bytes:
        """The first bytes of its file; the content follows."""
        return _HEADER.pack(_MAGIC, bytes.fromhex(version.object + version.version), self.start, self.stop, checksum)


def subdirectories(object_id: str, start: int, stop: int) -> set[str]:
    """Names of the folders with the files of the object's blocks that bytes [start, stop) are in."""
    blocks = range(start // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES + 1)[:SUBDIRECTORIES]
    return {_subdirectory(object_id, block) for block in blocks}


def file_path(version: VersionFile, piece: BlockSpan) -> str:
    """The path of a piece's file, below ``objects``."""
    return f"{_subdirectory(version.object, piece.start // BLOCK_BYTES)}/{version.name}-{piece.name}"


def _subdirectory(object_id: str, block: int) -> str:
    """The folder of a block; neighbouring blocks have different ones."""
    return f"{(int(object_id[:8], 16) + block) % SUBDIRECTORIES:03x}"


def is_file_name(name: str) -> bool:
    """Return whether a file in a subdirectory is ours."""
    return _FILE_NAME.fullmatch(name) is not None


def parse_file_name(name: str) -> tuple[VersionFile, BlockSpan]:
    """The version and piece that a file of ours holds."""
    object_id, version, start, stop = name.split("-")
    return VersionFile(object_id, version), BlockSpan(int(start, 16), int(stop, 16))


def find_parts(names: Iterable[str], version: VersionFile, piece: BlockSpan) -> list[tuple[BlockSpan, BlockSpan]]:
    """Files among these names, of other ranges, that hold parts of a piece, each with its part; the parts ascend."""
    beginning = f"{version.name}-"
    found = {parse_file_name(name)[1] for name in names if name.startswith(beginning) and is_file_name(name)} - {piece}
    parts, at = [], piece.start
    for file in sorted(found, key=lambda file: (max(file.start, piece.start), -file.stop)):
        start, stop = max(file.start, at), min(file.stop, piece.stop)
        if start < stop:
            parts.append((file, BlockSpan(start, stop)))
            at = stop
    return parts


def split(start: int, stop: int) -> list[BlockSpan]:
    """A range, cut at the borders of blocks."""
    cuts = [start, *range(start - start % BLOCK_BYTES + BLOCK_BYTES, stop, BLOCK_BYTES), stop]
    return [BlockSpan(low, high) for low, high in pairwise(cuts) if low < high]


def cost_bytes(file_bytes: int) -> int:
    """The bytes that a file of this length takes on disk."""
    return -(-file_bytes // PAGE_BYTES) * PAGE_BYTES


def _digest(text: str, size: int) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).hexdigest()
