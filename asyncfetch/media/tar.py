"""The headers of a tar archive: where each of its files lies. Pure.

A header is a block of 512 bytes in front of a file, and says how long that is; so headers are found by hops from one to
the next. Read are the old format (V7), ustar, GNU's and PAX, and what these write in front of a header: long names, and
the records of PAX, for one file or for all that follow.

    walk = walk_tar(url=url, size=size)
    start, stop = next(walk)
    while True:
        start, stop = walk.send(...)  # bytes [start, stop) of the archive, until StopIteration brings the files
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from asyncfetch.errors import COPY_ANEW, FormatError, redact_url

if TYPE_CHECKING:
    from collections.abc import Generator

    from asyncfetch.media.boxes import Buffer

BLOCK_BYTES = 512
"""Length of a header. Files are padded to a multiple of it."""
MAX_NAME_BYTES = 100
"""Longest name in a header. A longer one stands in front of it."""
LOOK_BYTES = 16 * 1024
"""Bytes asked for at a header. Behind a video they bring the texts of its sample and the next header, so that a sample
costs one request. Samples of 1 MB with 4 kB of text took 60 ms each so, 110 ms with 8 KiB and 72 ms with 64 KiB, at 50
ms to the first byte and 4 MiB/s."""
MAX_GAP_BYTES = 64 * 1024
"""Longest hop after which more is asked for, twice as much each time, as ``FetchConfig.max_gap_bytes``: files of 30 kB
took 15 ms each so, and 57 ms with a request for each."""
MAX_LOOK_BYTES = 256 * 1024
"""Bytes asked for at a header after several short hops. The headers of 256 files are gone through in 3 ms."""
MAX_EXTENSION_BYTES = 1024 * 1024
"""Longest extension in front of a header. Long names have a few hundred bytes, extended attributes 64 KiB."""

_HEADER = struct.Struct("100s24x12s12x8sc100x6s82x155s12x")
"""Fields of a header: name, size, checksum, kind, magic, prefix of the name."""
_CHECKSUM = slice(148, 156)
_ZEROS = bytes(BLOCK_BYTES)
_REGULAR = frozenset({b"0", b"\0", b"7", b"S"})
_BODILESS = frozenset({b"1", b"2", b"3", b"4", b"5", b"6"})
"""Links, devices, directories and pipes: no bytes follow, whatever size the header has. All other kinds have some."""
_SPARSE_FLAG, _SPARSE_MORE_FLAG = 482, 504
"""Places in an old sparse header, and in each block after it, that say whether one more block of its map follows."""

_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}
"""First bytes of compressed files: the command that compresses so, and with ``-d`` undoes it."""


class TarredFile(NamedTuple):
    """A regular file in a tar archive: bytes [offset, offset + size) of that."""

    name: str
    """Path, as the archive has it. Bytes that aren't UTF-8 are written as ``\\xff``."""
    offset: int
    size: int
    is_sparse: bool = False
    """True where holes were left out: the bytes in the archive aren't the file's."""


def walk_tar(
    *, url: str, size: int, start: int = 0, stop: int | None = None, max_look_bytes: int = MAX_LOOK_BYTES
) -> Generator[tuple[int, int], Buffer, list[TarredFile]]:
    """Yields which bytes [start, stop) it needs, is sent them, and returns the files in the archive's order.

    Directories and links are passed over. The first bytes asked for are [start, start + LOOK_BYTES), or as many as
    there are; no byte is asked for twice.

    Args:
        url: Names the archive in errors.
        size: Length of the archive in bytes.
        start: The place of a header, or of the extensions in front of one.
        stop: The end of a file's last block: the walk ends there. None for the archive's end, which is two blocks of
            zeros or the last byte.
        max_look_bytes: Most bytes asked for at a header.

    Raises:
        FormatError: It is no tar, or a compressed one; a header is damaged, or the archive is cut short; no file ends
            at ``stop``.
    """
    window = _Window(redact_url(url), size, max_look_bytes)
    files: list[TarredFile] = []
    defaults: dict[bytes, bytes] = {}
    position, end = start, size if stop is None else stop
    if size < BLOCK_BYTES:
        raise _no_tar(window.where, (yield from window.read(0, size)), size)
    while position < end:
        entry = yield from _read_entry(window, position, defaults)
        if entry is None:
            if stop is not None:
                raise window.error(position, f"the archive ends, but should have files up to byte {stop}")
            break
        file, position = entry
        if file is not None:
            files.append(file)
    if stop is not None and position != stop:
        raise window.error(position, f"a file ends, but should at byte {stop}")
    return files


class _Window:
    """The part of the archive that was asked for last."""

    def __init__(self, where: str, size: int, max_look_bytes: int) -> None:
        self.where = where
        self.size = size
        self._max_look_bytes = max_look_bytes
        self._start = self._stop = 0
        self._data = memoryview(b"")
        self._look_bytes = LOOK_BYTES

    def error(self, position: int, problem: str) -> FormatError:
        """An error about the archive, to raise."""
        return FormatError(f"{self.where}: damaged tar archive: at byte {position} {problem}", remedy=COPY_ANEW)

    def read(self, position: int, length: int) -> Generator[tuple[int, int], Buffer, memoryview]:
        """Bytes from ``position`` on, which is never in front of an earlier one."""
        stop = position + length
        if stop > self.size:
            message = f"{self.where}: truncated tar archive: it ends at byte {self.size}, and bytes up to {stop} follow"
            raise FormatError(message, remedy=COPY_ANEW)
        if stop > self._stop:
            skipped = position - self._stop
            is_near = self._stop > 0 and skipped <= MAX_GAP_BYTES
            self._look_bytes = min(2 * self._look_bytes, self._max_look_bytes) if is_near else LOOK_BYTES
            rest = self._data[position - self._start :] if skipped < 0 else b""
            wanted = position + len(rest), min(max(stop, position + self._look_bytes), self.size)
            data = yield wanted
            self._data = memoryview(data if not rest else bytes(rest) + data).cast("B")
            self._start, self._stop = position, wanted[1]
        return self._data[position - self._start : stop - self._start]


def _read_entry(
    window: _Window, position: int, defaults: dict[bytes, bytes]
) -> Generator[tuple[int, int], Buffer, tuple[TarredFile | None, int] | None]:
    """The file whose header, or whose extensions, begin at ``position``, and where the next one's do.

    None for the file where it isn't a regular one, and None at the archive's end. ``defaults`` are the records of PAX
    for all files that follow; those found here are added.
    """
    own: dict[bytes, bytes] = {}
    long_name: bytes | None = None
    is_extended = False
    while True:
        block = bytes((yield from window.read(position, BLOCK_BYTES)))
        if block == _ZEROS:
            if is_extended:
                raise window.error(position, "no header follows the extension in front of it")
            if position + BLOCK_BYTES < window.size:
                following = yield from window.read(position + BLOCK_BYTES, BLOCK_BYTES)
                if following != _ZEROS:
                    raise window.error(position, "there is a single block of zeros, where an archive's end has two")
            return None
        name, size, kind = _parse_header(window, position, block)
        body = position + BLOCK_BYTES
        if kind not in b"LKxXg":
            break
        is_extended = True
        if size > MAX_EXTENSION_BYTES:
            raise window.error(position, f"there is an extension of {size} bytes, of at most {MAX_EXTENSION_BYTES}")
        if kind != b"K":  # the name that a link leads to
            data = bytes((yield from window.read(body, size)))
            if kind == b"L":
                long_name = data.partition(b"\0")[0]
            else:
                (defaults if kind == b"g" else own).update(_parse_records(window, body, data))
        position = body + _padded(size)

    records = {key: value for key, value in (defaults | own).items() if value}
    if b"size" in records:
        size = _decimal(window, position, records[b"size"])
    is_sparse = kind == b"S" or any(key.startswith(b"GNU.sparse.") for key in records)
    if kind == b"S":
        flag = block[_SPARSE_FLAG]
        while flag:
            flag = (yield from window.read(body, BLOCK_BYTES))[_SPARSE_MORE_FLAG]
            body += BLOCK_BYTES
    path = records.get(b"GNU.sparse.name") or records.get(b"path") or long_name or name
    following_header = body if kind in _BODILESS else body + _padded(size)
    if following_header > window.size:
        message = (
            f"{window.where}: truncated tar archive: it has {window.size} bytes, but {_text(path)!r} lies in bytes "
            f"[{body}, {body + size}), padded to {following_header}"
        )
        raise FormatError(message, remedy=COPY_ANEW)
    is_directory = kind == b"\0" and path.endswith(b"/")
    is_file = kind in _REGULAR and not is_directory
    return TarredFile(_text(path), body, size, is_sparse) if is_file else None, following_header


def _parse_header(window: _Window, position: int, block: bytes) -> tuple[bytes, int, bytes]:
    """Return a header's name, size and kind."""
    name, size, _, kind, magic, prefix = _HEADER.unpack(block)
    if not _is_header(block):
        if position == 0:
            raise _no_tar(window.where, block, window.size)
        raise window.error(position, "there is no header: the checksum is wrong")
    nbytes = _number(size)
    if nbytes is None:
        raise window.error(position, f"the header has the size {size!r}, which is none")
    name = name.partition(b"\0")[0]
    prefix = prefix.partition(b"\0")[0] if magic == b"ustar\0" else b""  # GNU's has times there
    return prefix + b"/" + name if prefix else name, nbytes, kind


def _is_header(block: bytes) -> bool:
    """Return whether the checksum is right; old writers took bytes for signed numbers."""
    return _octal(block[_CHECKSUM]) in {_sum(block), _sum(memoryview(block).cast("b"))}


def _sum(block: bytes | memoryview) -> int:
    return sum(block) - sum(block[_CHECKSUM]) + 8 * ord(" ")


def _no_tar(where: str, head: Buffer, size: int) -> FormatError:
    """An error about what the first bytes of are no header, to raise."""
    command = compression_of(head)
    if command is not None:
        return FormatError(
            f"{where}: compressed by {command}: files in it can't be read by range",
            remedy=f"decompress it, with: {command} -d",
        )
    problem = "empty" if not size else f"its first {min(size, BLOCK_BYTES)} bytes are no header"
    return FormatError(f"{where}: no tar archive: {problem}", remedy=COPY_ANEW)


def compression_of(head: Buffer) -> str | None:
    """How a file with such first bytes is compressed, as the command that does it is called; None for a tar."""
    block = bytes(head[:BLOCK_BYTES])
    if len(block) == BLOCK_BYTES and _is_header(block):
        return None  # of a file whose name begins like that
    return next((command for magic, command in _COMPRESSED.items() if block.startswith(magic)), None)


def _octal(field: bytes) -> int | None:
    digits = field.partition(b"\0")[0].strip(b" ")
    if digits.strip(b"01234567"):
        return None
    return int(digits or b"0", 8)


def _number(field: bytes) -> int | None:
    """A number of a header: octal, or with the first bit set in base 256. None for none, and for a negative one."""
    if field[0] < 0x80:
        return _octal(field)
    return None if field[0] & 0x40 else int.from_bytes(field) - (0x80 << 8 * (len(field) - 1))


def _parse_records(window: _Window, position: int, data: bytes) -> dict[bytes, bytes]:
    """Return the records of a PAX extension: each is its length, a space, a key, =, a value and a line's end."""
    records = {}
    start = 0
    while start < len(data) and data[start]:
        digits, space, _ = data[start : start + 20].partition(b" ")
        length = int(digits) if space and digits.isdigit() else 0
        key, equals, value = data[start + len(digits) + 1 : start + length].partition(b"=")
        if not key or not equals or value[-1:] != b"\n" or start + length > len(data):
            raise window.error(position + start, "there is no record of PAX")
        records[key] = value[:-1]
        start += length
    return records


def _decimal(window: _Window, position: int, digits: bytes) -> int:
    if not digits.isdigit() or len(digits) > 20:
        raise window.error(position, f"a record of PAX has the size {digits[:40]!r}, which is none")
    return int(digits)


def _padded(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")
