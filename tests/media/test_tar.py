"""Headers of tar archives that real programs write, and of damaged ones."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import subprocess
import tarfile
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncfetch.errors import FormatError
from asyncfetch.media.tar import (
    BLOCK_BYTES,
    LOOK_BYTES,
    MAX_EXTENSION_BYTES,
    MAX_LOOK_BYTES,
    TarredFile,
    compression_of,
    walk_tar,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

FORMATS: list[Literal[0, 1, 2]] = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
URL = "https://host/shard.tar?sig=secret"


class Walked(NamedTuple):
    files: list[TarredFile]
    asked: list[tuple[int, int]]


def walk(data: bytes, *, size: int | None = None, start: int = 0, stop: int | None = None) -> Walked:
    """The files of an archive that is only given by the ranges that are asked for, and those."""
    steps = walk_tar(url=URL, size=len(data) if size is None else size, start=start, stop=stop)
    asked = []
    try:
        wanted = next(steps)
        while True:
            asked.append(wanted)
            wanted = steps.send(data[slice(*wanted)])
    except StopIteration as end:
        return Walked(end.value, asked)


def write(
    files: Iterable[tuple[str, bytes]],
    *,
    form: int = tarfile.PAX_FORMAT,
    **options: Any,  # noqa: ANN401
) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=form, **options) as archive:
        for name, body in files:
            info = tarfile.TarInfo(name)
            info.size = len(body)
            archive.addfile(info, io.BytesIO(body))
    return target.getvalue()


def by_tarfile(data: bytes) -> list[TarredFile]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return [TarredFile(info.name, info.offset_data, info.size, info.issparse()) for info in archive if info.isreg()]


def changed(data: bytes, position: int, field: bytes) -> bytes:
    """The archive with other bytes in the header that ``position`` lies in, whose checksum is right again."""
    block = position - position % BLOCK_BYTES
    whole = bytearray(data)
    whole[position : position + len(field)] = field
    whole[block + 148 : block + 156] = b" " * 8
    whole[block + 148 : block + 156] = b"%06o\0 " % sum(whole[block : block + BLOCK_BYTES])
    return bytes(whole)


# What is read.

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=300).filter(
    lambda name: name.rstrip("/") == name
)


@given(st.lists(st.tuples(NAMES, st.binary(max_size=1500)), max_size=6), st.sampled_from(FORMATS[1:]))
@example([("a" * 100 + ".mp4", b"1"), ("ä" * 60 + ".mp4", b"")], tarfile.GNU_FORMAT)
def test_files_are_read_as_tarfile_writes_them(files: list[tuple[str, bytes]], form: int) -> None:
    data = write(files, form=form)
    found = walk(data).files
    assert found == by_tarfile(data)
    assert [(file.name, data[file.offset : file.offset + file.size]) for file in found] == files


@pytest.mark.parametrize("form", FORMATS)
def test_names_are_as_long_as_the_format_allows(form: int) -> None:
    names = ["a.mp4", f"{'d' * 150}/{'f' * 90}.mp4", "x" * 100]
    if form != tarfile.USTAR_FORMAT:
        names += ["n" * 4000, "ü" * 120]
    data = write([(name, b"body") for name in names], form=form)
    assert [file.name for file in walk(data).files] == names
    assert walk(data).files == by_tarfile(data)


@pytest.mark.parametrize("form", FORMATS)
def test_member_that_is_no_file_is_passed_over(form: int) -> None:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=form) as archive:
        for name, kind in [("dir", tarfile.DIRTYPE), ("soft", tarfile.SYMTYPE), ("hard", tarfile.LNKTYPE)]:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "x" * (90 if form == tarfile.USTAR_FORMAT else 200)
            archive.addfile(info)
        info = tarfile.TarInfo("a.mp4")
        info.size = 3
        archive.addfile(info, io.BytesIO(b"abc"))
    data = target.getvalue()
    assert [file.name for file in walk(data).files] == ["a.mp4"]
    assert walk(data).files == by_tarfile(data)


def test_an_old_directory_is_a_name_with_a_slash() -> None:
    data = changed(write([("dir", b""), ("a.mp4", b"")], form=tarfile.USTAR_FORMAT), 0, b"dir/\0")
    data = changed(data, 156, b"\0")
    assert [file.name for file in walk(data).files] == ["a.mp4"]


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_file_may_be_longer_than_8_gib(form: Literal[1, 2]) -> None:
    size = 20 * 1024**3 + 7
    info = tarfile.TarInfo("long.mp4")
    info.size = size
    head = info.tobuf(form)
    body = len(head)
    total = body + size + 505 + 1024
    steps = walk_tar(url=URL, size=total)
    asked = [next(steps)]
    asked.append(steps.send(head + bytes(LOOK_BYTES - len(head))))
    with pytest.raises(StopIteration) as end:
        steps.send(bytes(1024))
    assert end.value.value == [TarredFile("long.mp4", body, size)]
    assert asked == [(0, LOOK_BYTES), (total - 1024, total)]


def test_pax_records_for_all_files_hold_until_others_come() -> None:
    one = write([("a.mp4", b"1")], pax_headers={"path": "all.mp4"})
    data = one[: -10240 % BLOCK_BYTES or None]
    assert [file.name for file in walk(data).files] == ["all.mp4"]


def test_names_that_are_not_utf8_are_escaped() -> None:
    data = write([("caf\udce9.mp4", b"1")], form=tarfile.GNU_FORMAT)
    assert [file.name for file in walk(data).files] == ["caf\\xe9.mp4"]


@pytest.mark.parametrize("form", ["gnu", "oldgnu", "pax", "posix", "ustar", "v7"])
def test_gnu_tar_writes_what_is_read(tmp_path: Path, form: str) -> None:
    names = ["dir/a.mp4", "dir/b.txt", "empty.txt"]
    (tmp_path / "dir").mkdir()
    for place, name in enumerate(names):
        (tmp_path / name).write_bytes(bytes([place]) * 700 * place)
    if form not in {"v7", "ustar"}:
        names.append(f"{'long' * 40}.mp4")
        (tmp_path / names[-1]).write_bytes(b"x" * 1000)
    subprocess.run(["tar", f"--format={form}", "-cf", "a.tar", *names], cwd=tmp_path, check=True)
    data = (tmp_path / "a.tar").read_bytes()
    assert walk(data).files == by_tarfile(data)
    assert [file.name for file in walk(data).files] == names


@pytest.mark.parametrize(
    "options", [["gnu"], ["pax", "--sparse-version=0.0"], ["pax", "--sparse-version=0.1"], ["pax"]]
)
def test_sparse_files_are_marked(tmp_path: Path, options: list[str]) -> None:
    with (tmp_path / "holes.mp4").open("wb") as file:
        for place in range(60):  # more than a header has room for, and than one block after it
            file.seek(place * 65536)
            file.write(os.urandom(4096))
    (tmp_path / "b.txt").write_bytes(b"text")
    arguments = [f"--format={options[0]}", *options[1:], "--sparse", "-cf", "a.tar", "holes.mp4", "b.txt"]
    subprocess.run(["tar", *arguments], cwd=tmp_path, check=True)
    data = (tmp_path / "a.tar").read_bytes()
    assert len(data) < 60 * 65536 / 2
    holes, text = walk(data).files
    assert (holes.name, holes.is_sparse, text.name, text.is_sparse) == ("holes.mp4", True, "b.txt", False)
    assert data[text.offset : text.offset + text.size] == b"text"


# What is asked for.


def test_a_sample_costs_one_request() -> None:
    """Its long file is hopped over; the short ones come with the header of the next."""
    parts = [("json", 600), ("mp4", 100_000), ("txt", 80)]
    data = write([(f"{place:03d}.{kind}", bytes(size)) for place in range(20) for kind, size in parts])
    walked = walk(data)
    assert walked.files == by_tarfile(data)
    assert len(walked.asked) == 21
    assert sum(stop - start for start, stop in walked.asked) <= 21 * LOOK_BYTES


def test_short_files_come_many_at_a_time() -> None:
    data = write([(f"{place:05d}.txt", bytes(600)) for place in range(2000)])
    walked = walk(data)
    assert len(walked.files) == 2000
    assert len(walked.asked) <= 5 + len(data) // MAX_LOOK_BYTES + 1


@given(st.lists(st.integers(0, 60_000), max_size=12), st.sampled_from(FORMATS[1:]))
def test_no_byte_is_asked_for_twice(sizes: list[int], form: int) -> None:
    data = write([(f"{'n' * 300}{place}", bytes(size)) for place, size in enumerate(sizes)], form=form)
    asked = walk(data).asked
    assert asked[0] == (0, min(LOOK_BYTES, len(data)))
    assert all(first[1] <= second[0] for first, second in pairwise(asked))
    assert all(start < stop <= len(data) for start, stop in asked)


def test_a_walk_may_begin_and_end_between_files() -> None:
    data = write([(f"{'n' * 200}{place}.mp4", bytes(1000)) for place in range(4)])
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        places = [info.offset for info in archive]
    whole = walk(data).files
    assert walk(data, start=places[1], stop=places[3]).files == whole[1:3]
    assert walk(data, start=places[2]).files == whole[2:]
    with pytest.raises(FormatError, match=f"a file ends, but should at byte {places[2] + 512}"):
        walk(data, start=places[1], stop=places[2] + 512)
    with pytest.raises(FormatError, match="the archive ends, but should have files up to"):
        walk(data, start=places[3], stop=len(data))


# What is refused.

DATA = write([("a.mp4", b"a" * 700), ("b.txt", b"b")], form=tarfile.USTAR_FORMAT)
END = 512 + 1024 + 512 + 512
"""The end of the last file."""


@pytest.mark.parametrize("stop", [END, END + 512, END + 1024])
def test_an_end_without_all_zeros_is_an_end(stop: int) -> None:
    assert [file.name for file in walk(DATA[:stop]).files] == ["a.mp4", "b.txt"]


def test_a_tar_of_no_files_has_none() -> None:
    assert walk(write([])).files == []


@pytest.mark.parametrize("stop", [1, 511, 513, 1100, 1536, 1537, 2048, 2049, END - 1])
def test_a_truncated_tar_is_refused(stop: int) -> None:
    if stop == 1536:  # between two files, which is no less an end than any other
        assert len(walk(DATA[:stop]).files) == 1
        return
    with pytest.raises(FormatError, match=r"truncated tar archive|no tar archive: its first") as error:
        walk(DATA[:stop])
    assert "secret" not in str(error.value)


def test_a_single_block_of_zeros_is_refused() -> None:
    with pytest.raises(FormatError, match="at byte 1536 there is a single block of zeros"):
        walk(DATA[:1536] + bytes(512) + DATA[1536:])


@pytest.mark.parametrize("data", [b"", b"x", b"no tar" * 1000])
def test_bytes_that_are_no_tar_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match="no tar archive"):
        walk(data)


@pytest.mark.parametrize(
    ("compress", "command"),
    [(gzip.compress, "gzip -d"), (bz2.compress, "bzip2 -d"), (lzma.compress, "xz -d")],
)
@pytest.mark.parametrize("data", [DATA, os.urandom(5000)])
def test_a_compressed_tar_is_named(compress: Callable[[bytes], bytes], command: str, data: bytes) -> None:
    with pytest.raises(FormatError, match=f"compressed by .*decompress it, with: {command}"):
        walk(compress(data))


def test_zstandard_is_named() -> None:
    with pytest.raises(FormatError, match="compressed by zstd"):
        walk(b"\x28\xb5\x2f\xfd" + bytes(1000))


def test_a_first_name_like_a_compressed_file_makes_none() -> None:
    data = write([("BZh9.mp4", b"a" * 700)])
    assert compression_of(data) is None
    assert [file.name for file in walk(data).files] == ["BZh9.mp4"]
    assert compression_of(bz2.compress(data)) == "bzip2"
    assert compression_of(b"") is None


@pytest.mark.parametrize(
    ("position", "field", "message"),
    [
        (1536 + 124, b"77777777777\0", r"'b\.txt' lies in bytes \[2048, 8589936639\)"),
        (1536 + 124, b"0000000000x\0", r"the header has the size b'0000000000x.x00', which is none"),
        (1536 + 124, b"\xff" * 12, r"the header has the size"),
        (1536 + 156, b"x", "no record of PAX"),
        (1536 + 156, b"L", "no header follows the extension"),
    ],
)
def test_a_header_with_a_wrong_field_is_refused(position: int, field: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        walk(changed(DATA, position, field))


def test_a_long_extension_is_refused() -> None:
    data = changed(changed(DATA, 156, b"L"), 124, b"%011o\0" % (MAX_EXTENSION_BYTES + 1))
    with pytest.raises(FormatError, match=f"an extension of {MAX_EXTENSION_BYTES + 1} bytes"):
        walk(data + bytes(MAX_EXTENSION_BYTES))


@pytest.mark.parametrize(
    "record", [b"11 path=x\n", b"8 path=x\n", b"8 pathx\n", b"0 a=b\n", b"x path=\n", b"11 size=-1\n", b"\xff"]
)
def test_a_wrong_record_of_pax_is_refused(record: bytes) -> None:
    data = changed(changed(write([("x", record), ("a.mp4", b"")], form=tarfile.USTAR_FORMAT), 156, b"x"), 0, b"x")
    with pytest.raises(FormatError, match="record of PAX"):
        walk(data)


def test_a_signed_checksum_is_one() -> None:
    data = bytearray(write([("caf\udce9.mp4", b"1")], form=tarfile.GNU_FORMAT))
    unsigned = int(bytes(data[148:154]), 8)
    data[148:154] = b"%06o" % (unsigned - 256)
    assert len(walk(bytes(data)).files) == 1


@given(st.data(), st.sampled_from(FORMATS))
def test_damage_is_an_error_or_changes_no_place(data: st.DataObject, form: int) -> None:
    """Any byte of a header that is another one: the checksum is wrong, so nothing but a FormatError comes of it."""
    names = ["a.mp4", "b" * (90 if form == tarfile.USTAR_FORMAT else 150)]
    whole = bytearray(write([(name, bytes(600)) for name in names], form=form))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= 1 << data.draw(st.integers(0, 7))
    intact = [(file.offset, file.size) for file in by_tarfile(write([(name, bytes(600)) for name in names], form=form))]
    try:
        found = walk(bytes(whole)).files
    except FormatError:
        return
    assert [(file.offset, file.size) for file in found] == intact


@given(st.lists(st.tuples(st.integers(0, 6000), st.binary(min_size=1, max_size=20)), min_size=1, max_size=5))
def test_any_bytes_end_in_files_or_a_format_error(patches: list[tuple[int, bytes]]) -> None:
    """Headers with right checksums, and any fields: what comes out lies in the archive, in its order."""
    data = write([("n" * 150, bytes(600)), ("b.mp4", bytes(600)), ("c.txt", b"")], form=tarfile.PAX_FORMAT)
    for position, field in patches:
        data = changed(data, position, field[: BLOCK_BYTES - position % BLOCK_BYTES])
    try:
        found = walk(data).files
    except FormatError:
        return
    stop = 0
    for file in found:
        assert stop + BLOCK_BYTES <= file.offset <= file.offset + file.size <= len(data)
        stop = file.offset + file.size
