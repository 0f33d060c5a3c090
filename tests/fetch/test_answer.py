"""An answer from its bytes, without a loop: in any pieces the same, and right or told apart."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfetch.fetch.answer import MAX_HEAD_BYTES, Answer, ExpectedAnswer, Phase
from asyncfetch.fetch.buffers import ChainedBuffer

if TYPE_CHECKING:
    from collections.abc import Iterator

CONTENT = random.Random(5).randbytes(300)
SCRATCH = bytearray(4096)
PIECES = st.lists(st.integers(1, 400), max_size=30)
SURPLUS = st.sampled_from([b"", b"\n", b"HTTP/1.1 404 x\r\nContent-Length: 0\r\n\r\n", bytes(5000)])


def head(
    start: int, stop: int, *, length: str = "Content-Length: {}", etag: str = '"a"', line_end: str = "\r\n"
) -> bytes:
    place = f"Content-Range: bytes {start}-{stop - 1}/{len(CONTENT)}"
    lines = ["HTTP/1.1 206 x", place, f"ETag: {etag}", length.replace("{}", str(stop - start)), "", ""]
    return line_end.join(lines).encode()


def feed(answer: Answer, stream: bytes, sizes: list[int]) -> Iterator[None]:
    """Write the stream to the answer's room in pieces of these sizes, then the rest; stop where there is news."""
    at, number = 0, 0
    while at < len(stream):
        room = answer.room()
        assert len(room)
        size = sizes[number] if number < len(sizes) else len(stream)
        piece = stream[at : at + min(size, len(room))]
        room[: len(piece)] = piece
        at, number = at + len(piece), number + 1
        is_news = answer.came(len(piece))
        SCRATCH[:] = b"?" * len(SCRATCH)  # which others use meanwhile
        if is_news:
            yield


def drain(news: Iterator[None]) -> int:
    """How often there is more news."""
    return sum(1 for _ in news)


@st.composite
def memory(draw: st.DrawFn, length: int) -> tuple[bytearray, memoryview | ChainedBuffer]:
    """Memory of the length, in one view or several."""
    whole = bytearray(length)
    marks = sorted(draw(st.sets(st.integers(1, length - 1), max_size=3))) if length > 1 else []
    views = [memoryview(whole)[a:b] for a, b in zip([0, *marks], [*marks, length], strict=True)]
    return whole, views[0] if len(views) == 1 else ChainedBuffer(views)


@given(st.data(), st.integers(0, 299), st.integers(1, 300), PIECES, SURPLUS)
def test_the_expected_answer_lands_where_it_belongs(
    data: st.DataObject, start: int, length: int, sizes: list[int], surplus: bytes
) -> None:
    stop = min(start + length, len(CONTENT))
    whole, view = data.draw(memory(stop - start))
    answer = Answer(SCRATCH, ExpectedAnswer(start, stop, len(CONTENT), '"a"'), lambda: view)
    assert drain(feed(answer, head(start, stop) + CONTENT[start:stop] + surplus, sizes)) == 1
    assert (answer.phase, answer.is_whole, answer.received_bytes) == (Phase.ENDED, True, stop - start)
    assert whole == CONTENT[start:stop]
    assert answer.has_surplus == bool(surplus)
    assert answer.head is not None
    assert (answer.head.status, answer.head.length_bytes) == (206, stop - start)


def spans(length: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.integers(0, len(CONTENT) - length).map(lambda start: (start, start + length))


SECOND_HEADS: list[tuple[tuple[bytes, bytes], bool]] = [
    ((b"", b""), True),
    ((b"206 x", b"206 y"), True),  # as a new Date
    ((b'"a"', b'"b"'), False),
    ((b"/300\r", b"/301\r"), False),
    ((b"206 x\r\n", b"206 x\r\nContent-Encoding: gzip\r\n"), False),
    ((b"206 x\r\n", b"200 x\r\n"), False),
]


@given(spans(9), spans(9), PIECES, st.sampled_from(SECOND_HEADS))
def test_the_next_answer_on_a_connection_is_looked_at_no_less(
    first: tuple[int, int],
    second: tuple[int, int],
    sizes: list[int],
    change: tuple[tuple[bytes, bytes], bool],
) -> None:
    """By the first one's head, of which a field says the same as its range does."""
    (old, new), is_met = change
    lead = b"206 x\r\nX-Range: bytes %d-%d/300" % (first[0], first[1] - 1)
    text = [head(*one).replace(b"206 x", lead) for one in (first, second)]
    pattern = None
    for (start, stop), sent in zip((first, second), (text[0], text[1].replace(old, new)), strict=True):
        whole = bytearray(9)
        expected = ExpectedAnswer(start, stop, len(CONTENT), '"a"')
        answer = Answer(SCRATCH, expected, iter([memoryview(whole)]).__next__, pattern)
        next(feed(answer, sent + CONTENT[start:stop], sizes))
        pattern = answer.pattern
    assert answer.is_whole == is_met
    assert answer.phase is (Phase.ENDED if is_met else Phase.HELD)
    assert whole == (CONTENT[second[0] : second[1]] if is_met else bytes(9))


def test_another_range_in_place_of_the_expected_one_is_not_met() -> None:
    first, stale = ExpectedAnswer(0, 9, len(CONTENT), '"a"'), ExpectedAnswer(9, 18, len(CONTENT), '"a"')
    answer = Answer(SCRATCH, first, lambda: memoryview(bytearray(9)))
    assert drain(feed(answer, head(0, 9) + CONTENT[:9], [])) == 1
    again = Answer(SCRATCH, stale, lambda: memoryview(bytearray(9)), answer.pattern)
    next(feed(again, head(0, 9) + CONTENT[:9], []))
    assert again.phase is Phase.HELD


@given(st.data(), st.integers(0, 299), st.integers(1, 300), PIECES, SURPLUS, st.booleans(), st.integers(0, 300))
def test_another_answer_waits_until_its_place_is_known(
    data: st.DataObject,
    start: int,
    length: int,
    sizes: list[int],
    surplus: bytes,
    is_other: bool,
    wanted: int,
) -> None:
    """Its body may come on meanwhile. Not all of it need be wanted."""
    stop = min(start + length, len(CONTENT))
    untouched = bytearray(b"x" * (stop - start))
    expected = ExpectedAnswer(start, stop, len(CONTENT), '"a"') if is_other else None
    answer = Answer(SCRATCH, expected, lambda: memoryview(untouched))
    text = head(start, stop, etag='"b"' if is_other else '"a"') + CONTENT[start:stop] + surplus
    news = feed(answer, text, sizes)
    next(news)
    assert answer.phase is Phase.HELD
    assert answer.head is not None
    assert answer.head.length_bytes == stop - start
    wanted = max(1, min(wanted, stop - start))
    whole, view = data.draw(memory(wanted))
    answer.take(view)
    drain(news)
    assert (answer.phase, answer.received_bytes) == (Phase.ENDED, wanted)
    assert answer.is_whole == (wanted == stop - start)
    assert whole == CONTENT[start : start + wanted]
    assert answer.has_surplus or not surplus
    assert untouched == b"x" * len(untouched)


@given(st.integers(1, 300), PIECES)
def test_held_answer_takes_no_more_than_its_body(length: int, sizes: list[int]) -> None:
    answer = Answer(SCRATCH)
    drain(feed(answer, head(0, length) + CONTENT[:length] + bytes(9000), sizes))
    assert (answer.phase, answer.has_surplus, len(answer._held)) == (Phase.HELD, True, length)


ODD = {
    "line feeds": head(0, 9, line_end="\n"),
    "one line feed": head(0, 9).replace(b"\r\n", b"\n", 1),
    "a last line feed": head(0, 9)[:-2] + b"\n",
    "folded": head(0, 9)[:-2] + b"X: a\r\n b\r\n\r\n",
    "of 1.0": head(0, 9).replace(b"1.1", b"1.0"),
    "informational": b"HTTP/1.1 103 x\r\nLink: x\r\n\r\n" + head(0, 9),
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "too long": head(0, 9)[:-2] + b"X: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n",
    "beyond ASCII": head(0, 9)[:-2] + b"X: \xff\r\n\r\n",
}


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
@given(sizes=PIECES)
def test_an_odd_head_ends_it_at_once(text: bytes, sizes: list[int]) -> None:
    answer = Answer(SCRATCH, ExpectedAnswer(0, 9, len(CONTENT), '"a"'), lambda: memoryview(bytearray(9)))
    next(feed(answer, text + CONTENT[:9], sizes))
    assert (answer.phase, answer.head, answer.received_bytes, answer.is_whole) == (Phase.ENDED, None, 0, False)


NOT_PLAIN = [
    "Transfer-Encoding: chunked",
    "Content-Length: {}, 7{}",
    "Content-Length: x",
    "Connection: close, x\r\nA: b",
]


@pytest.mark.parametrize("length", NOT_PLAIN)
def test_a_head_without_one_length_is_all_that_is_told(length: str) -> None:
    answer = Answer(SCRATCH)
    next(feed(answer, head(0, 9, length=length), []))
    assert answer.phase is Phase.ENDED
    assert answer.head is not None
    assert (answer.head.status, answer.head.length_bytes) == (206, None)
    assert answer.head.is_ambiguous == ("Length" in length)


@given(st.integers(0, len(head(0, 300)) + 299), PIECES, st.booleans())
def test_stopped_answer_lets_go_of_its_memory(cut: int, sizes: list[int], is_expected: bool) -> None:
    whole = bytearray(300)
    answer = Answer(SCRATCH, ExpectedAnswer(0, 300, 300, None) if is_expected else None, lambda: memoryview(whole))
    text = head(0, 300) + CONTENT
    drain(feed(answer, text[:cut], sizes))
    answer.stop()
    landed = bytes(whole)
    drain(feed(answer, text[cut:], sizes))
    assert (answer.phase, bytes(whole)) == (Phase.ENDED, landed)
    assert not answer.is_whole


@given(st.binary(max_size=300), PIECES, st.booleans())
def test_rubbish_is_read_without_an_exception(rubbish: bytes, sizes: list[int], is_http: bool) -> None:
    answer = Answer(SCRATCH, ExpectedAnswer(0, 9, len(CONTENT), None), lambda: memoryview(bytearray(9)))
    drain(feed(answer, (b"HTTP/1.1 206 x\r\n" if is_http else b"") + rubbish, sizes))
    assert answer.received_bytes == 0
    assert answer.has_begun or not rubbish
