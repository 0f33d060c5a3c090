"""Frames and checksums: what is written is read, and nothing else ever is."""

from __future__ import annotations

import math
import random
import struct
import sys
import zlib
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfetch.errors import TensorError
from asyncfetch.tensors.wire import (
    DTYPES,
    MAX_HEADER_BYTES,
    MIN_HEADER_BYTES,
    Header,
    check_payload,
    checksum,
    describe,
    header_bytes,
    missing,
    parse_header,
    split_frames,
    to_native,
)

SHARD, OTHER = "0123456789abcdef" * 2, "f" * 32
LIMIT = 2**40

orders: st.SearchStrategy[Literal["little", "big"]] = st.sampled_from(["little", "big"])


@st.composite
def headers(draw: st.DrawFn) -> Header:
    dtype, size = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=9)))
    sum_ = draw(st.integers(0, 2**64 - 1))
    return Header(SHARD, dtype, shape, math.prod(shape) * size, sum_, draw(orders))


def sealed(head: bytes) -> bytes:
    """The header with a CRC that fits whatever it says."""
    blank = head[:24] + bytes(4) + head[28:]
    length = struct.unpack_from("<H", head, 4)[0]
    return head[:24] + zlib.crc32(blank[:length]).to_bytes(4, "little") + head[28:]


@given(headers())
def test_a_header_is_read_as_it_was_written(header: Header) -> None:
    encoded = header.encode()
    assert len(encoded) == header.header_bytes == header_bytes(len(header.shape))
    assert len(encoded) % 64 == 0
    assert parse_header(encoded + b"anything", max_bytes=LIMIT) == header


@given(st.binary(max_size=200), st.integers(0, 200))
def test_no_bytes_crash_the_parser(data: bytes, cut: int) -> None:
    for garbage in (data, (b"AFT1" + data)[:cut], sealed(b"AFT1" + data.ljust(200, b"\0"))):
        try:
            header = parse_header(garbage, max_bytes=1000)
        except TensorError:
            continue
        assert header.nbytes <= 1000


@given(headers(), st.integers(0, 63), st.integers(1, 255), st.booleans())
def test_a_changed_header_is_refused_or_still_makes_sense(header: Header, at: int, flip: int, seal: bool) -> None:
    """With its CRC as it was, every change is found; with one that fits, what is believed fits together."""
    changed = bytearray(header.encode())
    changed[at] ^= flip
    try:
        parsed = parse_header(sealed(bytes(changed)) if seal else bytes(changed), max_bytes=LIMIT)
    except TensorError:
        return
    assert seal
    assert parsed.missing or parsed.nbytes == math.prod(parsed.shape) * dict(DTYPES)[parsed.dtype] <= LIMIT


@given(st.lists(st.integers(0, 2**64 - 1), max_size=64))
def test_no_shape_is_believed_beyond_the_limit(shape: list[int]) -> None:
    """2**64 - 1 in each of 64 dimensions is a number like any other, and no memory is taken for it."""
    nbytes = math.prod(shape)
    head = struct.pack(
        "<4sHBBQQIBB2x16s",
        *(b"AFT1", header_bytes(len(shape)), 0, len(shape), nbytes % 2**64, 0, 0, 2, 0, bytes.fromhex(SHARD)),
    )
    head = sealed((head + struct.pack(f"<{len(shape)}Q", *shape)).ljust(header_bytes(len(shape)), b"\0"))
    if nbytes <= 1000:
        assert parse_header(head, max_bytes=1000).nbytes == nbytes
    else:
        with pytest.raises(TensorError, match="bytes"):
            parse_header(head, max_bytes=1000)


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (0, b"HTTP", "b'HTTP'"),
        (4, b"\xff\xff", "65535 bytes"),
        (7, b"\xff", "255 dimensions"),
        (28, b"\xee", "dtype 238"),
    ],
)
def test_header_error_names_the_wrong_value(at: int, value: bytes, said: str) -> None:
    head = bytearray(Header(SHARD, "uint8", (3,), 3, 0, "little").encode().ljust(MAX_HEADER_BYTES, b"\0"))
    head[at : at + len(value)] = value
    with pytest.raises(TensorError, match=said):
        parse_header(sealed(bytes(head)) if at == 28 else bytes(head), max_bytes=LIMIT)


def test_sixty_four_dimensions_are_the_most() -> None:
    assert describe(SHARD, "uint8", (1,) * 64, np.zeros(1, np.uint8)).header_bytes == MAX_HEADER_BYTES
    with pytest.raises(TensorError, match="65 dimensions"):
        describe(SHARD, "uint8", (1,) * 65, np.zeros(1, np.uint8))


def frame(shard_id: str, nbytes: int) -> bytes:
    data = np.arange(nbytes, dtype=np.uint8)
    return describe(shard_id, "uint8", (nbytes,), data).encode() + data.tobytes()


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (frame(SHARD, 3), "2 shards were asked for, the response holds 1"),
        (b"", "the response holds 0"),
        (frame(SHARD, 3) + frame(OTHER, 3) + frame(OTHER, 3), "67 bytes more"),
        (frame(OTHER, 3) + frame(SHARD, 3), "in the place of"),
        (frame(SHARD, 3) + frame(SHARD, 3), "in the place of"),
        (frame(SHARD, 3) + frame(OTHER, 3)[:-1], "ends within"),
        (frame(SHARD, 3) + frame(OTHER, 3)[:-30], "at least 64"),
    ],
)
def test_a_response_of_too_few_too_many_or_others_is_refused(response: bytes, said: str) -> None:
    with pytest.raises(TensorError, match=said):
        split_frames(memoryview(response), [SHARD, OTHER])


def test_a_response_says_what_is_missing() -> None:
    body = memoryview(missing(SHARD) + frame(OTHER, 5))
    [(first, nothing), (second, data)] = split_frames(body, [SHARD, OTHER])
    assert (first.missing, len(nothing), first.header_bytes) == (True, 0, MIN_HEADER_BYTES)
    assert (second.missing, data.tolist()) == (False, [0, 1, 2, 3, 4])


@given(st.lists(st.integers(0, 300), min_size=1, max_size=5), st.data())
def test_no_response_crashes_the_client(sizes: list[int], data: st.DataObject) -> None:
    ids = [f"{number:032x}" for number in range(len(sizes))]
    body = bytearray(b"".join(frame(shard_id, size) for shard_id, size in zip(ids, sizes, strict=True)))
    for _ in range(data.draw(st.integers(0, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(body)))
    try:
        for header, payload in split_frames(memoryview(bytes(body[:cut])), ids):
            check_payload(header, payload)
    except TensorError:
        pass
    else:
        assert cut == len(body)


def test_a_frame_is_these_bytes() -> None:
    """As every version writes and reads them."""
    said = """
        4146543140000001 0600000000000000 04e76a9a1d4d58a6 956beaa508000000
        0123456789abcdef 0123456789abcdef 0300000000000000 0000000000000000
        000102030405
    """
    data = np.arange(6, dtype=np.uint8)
    assert describe(SHARD, "bfloat16", (3,), data).encode() + data.tobytes() == bytes.fromhex(said)


def test_bytes_that_are_missing_doubled_zeroed_or_elsewhere_show() -> None:
    data = random.Random(1).randbytes(3_000_000)
    sums = {checksum(memoryview(data))}
    spoilt = 0
    for step in (1, 8, 64, 4096, 65536, 1_000_000):
        moved = data[step:] + data[:step]
        doubled = data[:step] + data[:step] + data[2 * step :]
        zeroed = data[:step] + bytes(step) + data[2 * step :]
        for other in (moved, doubled, zeroed, data[step:], data[:-step], data + bytes(step)):
            sums.add(checksum(memoryview(other)))
            spoilt += 1
    assert len(sums) == 1 + spoilt


@pytest.mark.parametrize(
    ("dtype", "width"),
    [("int32", 4), ("bfloat16", 2), ("complex64", 4), ("complex128", 8), ("uint8", 1), ("complex32", 2)],
)
def test_another_byte_order_is_turned_round(dtype: str, width: int) -> None:
    data = np.arange(32, dtype=np.uint8)
    foreign: Literal["little", "big"] = "big" if sys.byteorder == "little" else "little"
    size = dict(DTYPES)[dtype]
    header = Header(SHARD, dtype, (32 // size,), 32, checksum(data), foreign)
    turned = b"".join(bytes(data[at : at + width][::-1]) for at in range(0, 32, width))
    assert to_native(header, data).tobytes() == turned
