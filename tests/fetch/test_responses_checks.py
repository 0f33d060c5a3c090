"""What an answer holds, by its head, and of which version."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict

from asyncfetch.errors import InvalidResponse, ObjectChanged, RangeNotSatisfiable
from asyncfetch.fetch.objects import ObjectMemory, difference, strong_etag
from asyncfetch.fetch.responses import SLICE_LIMIT_BYTES, AcceptedBody, WantedRange, check_response
from asyncfetch.fetch.retry import AttemptFailed, RetryVerdict
from asyncfetch.ranges import ObjectInfo

URL_TEXT = "http://h/x"


def check(wanted: WantedRange, status: int, known: ObjectInfo | None = None, /, **headers: str) -> AcceptedBody:
    named = CIMultiDict({name.replace("_", "-"): value for name, value in headers.items()})
    return check_response(wanted, status, named, url=URL_TEXT, known=known)


@pytest.mark.parametrize(
    ("wanted", "header"),
    [(WantedRange(0, None), "bytes=0-"), (WantedRange(3, 10), "bytes=3-9"), (WantedRange(-5, None), "bytes=-5")],
)
def test_range_header(wanted: WantedRange, header: str) -> None:
    assert wanted.header() == header


@pytest.mark.parametrize(
    ("wanted", "content_range", "span"),
    [
        (WantedRange(3, 10), "bytes 3-9/100", (3, 10)),
        (WantedRange(3, None), "bytes 3-99/100", (3, 100)),
        (WantedRange(-5, None), "bytes 95-99/100", (95, 100)),
        (WantedRange(-500, None), "bytes 0-99/100", (0, 100)),
        (WantedRange(0, 500, clamp=True), "bytes 0-99/100", (0, 100)),
    ],
)
def test_right_206_is_taken(wanted: WantedRange, content_range: str, span: tuple[int, int]) -> None:
    delivery = check(wanted, 206, Content_Range=content_range, etag='"a"')
    assert (delivery.start, delivery.stop) == span
    assert delivery.info == ObjectInfo(URL_TEXT, 100, '"a"')


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content_Range": "bytes 3-8/100"},
        {"Content_Range": "bytes 4-9/100"},
        {"Content_Range": "bytes 3-10/100"},
        {"Content_Range": "bytes 3-9/*"},
        {"Content_Range": "bytes */100"},
        {"Content_Range": "3-9/100"},
        {"Content_Range": "bytes 9-3/100"},
        {"Content_Range": "bytes 3-9/99999999999999999999999"},
        {"Content_Range": "bytes 3-9/100", "Content_Length": "8"},
        {"Content_Range": "bytes 3-9/100", "Content_Length": "-7"},
        {"Content_Range": "bytes 3-9/100", "Content_Encoding": "gzip"},
        {"Content_Range": "bytes 3-9/100", "Content_Type": "multipart/byteranges; boundary=x"},
    ],
)
def test_wrong_206_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(AttemptFailed) as caught:
        check(WantedRange(3, 10), 206, None, **headers)
    assert caught.value.kind is InvalidResponse
    assert caught.value.verdict is RetryVerdict.ONCE


@pytest.mark.parametrize("known", [None, ObjectInfo(URL_TEXT, 100, '"a"')])
@pytest.mark.parametrize("encodings", [["identity", "gzip"], ["gzip", "identity"], ["identity, gzip"]])
def test_an_encoding_beside_identity_is_refused(known: ObjectInfo | None, encodings: list[str]) -> None:
    told = [("Content-Range", "bytes 3-9/100"), ("Content-Length", "7"), ("ETag", '"a"')]
    headers = CIMultiDict([*told, *(("Content-Encoding", one) for one in encodings)])
    with pytest.raises(AttemptFailed, match="gzip"):
        check_response(WantedRange(3, 10), 206, headers, url=URL_TEXT, known=known)
    told.append(("Content-Encoding", " Identity"))
    assert check_response(WantedRange(3, 10), 206, CIMultiDict(told), url=URL_TEXT, known=known).start == 3


def test_200_with_the_whole_object_is_taken() -> None:
    assert check(WantedRange(0, None), 200, Content_Length="9") == AcceptedBody(ObjectInfo(URL_TEXT, 9), 0, 9)


def test_200_with_an_early_range_is_cut() -> None:
    size = 100 * SLICE_LIMIT_BYTES
    delivery = check(WantedRange(10, SLICE_LIMIT_BYTES), 200, Content_Length=str(size))
    assert (delivery.start, delivery.stop, delivery.skip_bytes, delivery.cut) == (10, SLICE_LIMIT_BYTES, 10, True)


def test_200_with_a_late_range_is_refused() -> None:
    with pytest.raises(AttemptFailed, match="ignores Range"):
        check(WantedRange(10, SLICE_LIMIT_BYTES + 1), 200, Content_Length=str(SLICE_LIMIT_BYTES * 9))


def test_200_of_unknown_length_is_refused() -> None:
    with pytest.raises(AttemptFailed, match="Content-Length"):
        check(WantedRange(0, None), 200)


@pytest.mark.parametrize("status", [206, 416])
def test_stop_past_the_end_tells_the_size(status: int) -> None:
    content_range = "bytes 3-9/10" if status == 206 else "bytes */10"
    with pytest.raises(AttemptFailed) as caught:
        check(WantedRange(3, 20), status, Content_Range=content_range)
    assert caught.value.kind is RangeNotSatisfiable
    assert caught.value.fields == {"size": 10}


@pytest.mark.parametrize("wanted", [WantedRange(0, None), WantedRange(-7, None), WantedRange(0, 1, clamp=True)])
def test_416_of_an_empty_object_is_empty(wanted: WantedRange) -> None:
    delivery = check(wanted, 416, Content_Range="bytes */0")
    assert (delivery.start, delivery.stop, delivery.info.size) == (0, 0, 0)


def test_416_for_a_range_that_exists_is_a_lie() -> None:
    with pytest.raises(AttemptFailed) as caught:
        check(WantedRange(3, 10), 416, Content_Range="bytes */10")
    assert caught.value.kind is InvalidResponse


@pytest.mark.parametrize("change", [{"etag": '"b"'}, {"Content_Range": "bytes 3-9/101"}])
def test_another_version_is_a_change(change: dict[str, str]) -> None:
    known = ObjectInfo(URL_TEXT, 100, '"a"')
    with pytest.raises(AttemptFailed) as caught:
        check(WantedRange(3, 10), 206, known, **({"Content_Range": "bytes 3-9/100", "etag": '"a"'} | change))
    assert caught.value.kind is ObjectChanged


def test_dates_tell_versions_apart_only_without_tags() -> None:
    assert difference(ObjectInfo("u", 1, None, "Mon"), ObjectInfo("u", 1, None, "Tue")) is not None
    assert difference(ObjectInfo("u", 1, '"a"', "Mon"), ObjectInfo("u", 1, 'W/"a"', "Tue")) is None
    assert difference(ObjectInfo("u", 1, '"a"', "Mon"), ObjectInfo("u", 1)) is None


def test_weak_tags_promise_nothing() -> None:
    assert strong_etag(ObjectInfo("u", 1, 'W/"a"')) is None
    assert strong_etag(ObjectInfo("u", 1, '"\udce9"')) is None, "it can't be sent back"
    assert strong_etag(ObjectInfo("u", 1, '"é"')) == '"é"'
    assert strong_etag(ObjectInfo("u", 1, '"a"')) == '"a"'


def test_memory_forgets_the_least_recently_used() -> None:
    memory = ObjectMemory(2)
    for url in ("a", "b"):
        memory.remember(ObjectInfo(url, 1))
    memory.get("a")
    memory.remember(ObjectInfo("c", 1))
    assert memory.get("b") is None
    assert memory.get("a") == ObjectInfo("a", 1)
    assert len(memory) == 2


def test_memory_keeps_the_first_version() -> None:
    memory = ObjectMemory(2)
    memory.remember(ObjectInfo("a", 1))
    memory.remember(ObjectInfo("a", 1, '"1"'))
    memory.remember(ObjectInfo("a", 1, '"2"'))
    assert strong_etag(memory.get("a")) == '"1"'
