"""The request for a range, and whether an answer is one to exactly that. Pure: headers in, decision out.

A server or a proxy in front of it may ignore the range, shift it, compress it, answer with another version, or say one
length and send another. A client that takes such an answer gets wrong bytes. So an answer either proves by its status,
Content-Range, length, encoding and version that it holds the asked bytes, or it is an AttemptFailed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncfetch.errors import (
    AccessDenied,
    FetchError,
    FetchTimeout,
    InvalidResponse,
    NotFound,
    ObjectChanged,
    RangeNotSatisfiable,
    Throttled,
)
from asyncfetch.fetch.objects import difference
from asyncfetch.fetch.refusals import (
    CERTIFICATE_REMEDY,
    CERTIFICATE_WANTED,
    PLAIN_TO_TLS,
    fields_of,
    is_page,
    may_be_page,
)
from asyncfetch.fetch.retry import AttemptFailed, RetryVerdict
from asyncfetch.ranges import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Mapping

SLICE_LIMIT_BYTES = 1024 * 1024
"""A server that ignores Range is read and sliced up to here: about what another round trip to a far host costs."""
TOKEN_CODES = frozenset({"ExpiredToken", "TokenRefreshRequired"})
"""Words by which S3 says with 400 what others say with 401."""
NO_REASON = "it came without a reason"
"""Our words in place of S3's: a 400 means so many things that one whose text was lost on the way may be no refusal."""
MISDIRECTED = 421
"""Status of a refusal that holds for the connection, and may be asked again on another one (RFC 9110, 15.5.20)."""

_CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18})", re.ASCII | re.IGNORECASE)
_LENGTH = re.compile(r"[0-9]{1,18}")
_NO_CODING = re.compile(
    r"|identity|none|null|raw|binary|[78]bit|(?:aws-)?chunked"
    r"|(?:charset=)?(?:x-)?(?:utf|ucs|unicode|(?:us-)?ascii|ansi|iso|latin|windows|cp|ibm|mac|koi8|gb|big5|euc|shift)"
    r"[\w.:-]*|(?:audio|image|text|video)/[\w.+-]+|application/octet-stream",
    re.ASCII,
)
"""What stores and their users put into Content-Encoding, in lower case, that encodes no byte of the content."""
_NOTHING = "bytes 0--1/0"
"""Content-Range with which Go's file server, and so Caddy and rclone, sends the last bytes of an empty object."""

_REFUSALS: Mapping[int, tuple[type[FetchError], RetryVerdict, str]] = {
    401: (AccessDenied, RetryVerdict.FATAL, "the server wants credentials"),
    403: (AccessDenied, RetryVerdict.FATAL, "the server refuses these credentials, or the signed url has expired"),
    404: (NotFound, RetryVerdict.FATAL, "the server has no such object: check the url"),
    407: (AccessDenied, RetryVerdict.FATAL, "the proxy wants credentials: put them into its url"),
    408: (FetchTimeout, RetryVerdict.AGAIN, "the server gave up waiting for our request"),
    410: (NotFound, RetryVerdict.FATAL, "the object was removed for good"),
    412: (
        ObjectChanged,
        RetryVerdict.FATAL,
        "the object was replaced since it was first read: read it again from its start",
    ),
    MISDIRECTED: (FetchError, RetryVerdict.ONCE, "the server behind this connection isn't the host's: check the url"),
    425: (FetchError, RetryVerdict.AGAIN, "a gateway passed the request on before its connection was established"),
    429: (Throttled, RetryVerdict.AGAIN, "too many requests: lower max_requests_per_host, or send a token"),
    500: (FetchError, RetryVerdict.AGAIN, "the server failed"),
    502: (FetchError, RetryVerdict.AGAIN, "a gateway got no good answer from the server behind it"),
    503: (Throttled, RetryVerdict.AGAIN, "the server is overloaded: lower max_requests_per_host"),
    504: (FetchError, RetryVerdict.AGAIN, "a gateway got no answer in time from the server behind it"),
    511: (AccessDenied, RetryVerdict.FATAL, "this network wants a login first: open a web page from this machine"),
}


@dataclass(slots=True)  # not frozen: that takes a call for each field, and a request makes one of these
class WantedRange:
    """A range as a request asks for it."""

    start: int
    """First byte; negative for the last ``-start`` bytes, with stop None."""
    stop: int | None
    """One past the last byte; None means to the end."""
    clamp: bool = False
    """True if a stop beyond the end means the end."""

    plain: bool = False
    """True if the whole object is asked for instead, since the server has failed at the range."""

    @property
    def is_suffix(self) -> bool:
        """True if the last bytes are asked for by their number."""
        return self.start < 0 and not self.plain

    @property
    def is_closed(self) -> bool:
        """True if it is the same range whatever the object's size is."""
        return self.stop is not None and not self.clamp

    def header(self) -> str | None:
        """The value of the Range header; None for none. The range must not be empty."""
        if self.plain:
            return None
        if self.start < 0:
            return f"bytes={self.start}"
        return f"bytes={self.start}-{'' if self.stop is None else self.stop - 1}"

    def span_in(self, size: int) -> tuple[int, int]:
        """The absolute half-open range within an object of ``size`` bytes; AttemptFailed where it isn't within."""
        if self.start < 0:
            return max(0, size + self.start), size
        stop = size if self.stop is None else min(self.stop, size) if self.clamp else self.stop
        if max(self.start, stop) > size:
            message = f"the object has {size} bytes: ask for a range within [0, {size})"
            raise AttemptFailed(RangeNotSatisfiable, message, RetryVerdict.FATAL, fields={"size": size})
        return self.start, stop


@dataclass(slots=True)  # not frozen: that takes a call for each field, and a request makes one of these
class AcceptedBody:
    """An answer that passed: which bytes of which object its body holds."""

    info: ObjectInfo
    start: int
    """Absolute position of the first byte to keep."""
    stop: int
    """One past the last byte to keep."""
    skip_bytes: int = 0
    """Bytes of the body in front of ``start``, to be thrown away."""
    cut: bool = False
    """True if the body goes on beyond ``stop``; then the connection is closed rather than read to the end."""
    is_counted: bool = False
    """True if the whole body must be there before it can be told what it holds: see ``counted``."""


def check_response(
    wanted: WantedRange, status: int, headers: Mapping[str, str], *, url: str, known: ObjectInfo | None
) -> AcceptedBody:
    """The delivery that an answer to ``wanted`` makes, or AttemptFailed.

    Names of ``headers`` have any case. ``url`` is the object as the caller wrote it, ``known`` what an earlier answer
    said of it.
    """
    if status == 206:
        return _partial(wanted, headers, url, known)
    if status == 200:
        return _whole(wanted, headers, url, known)
    if status == 416:
        return _unsatisfiable(wanted, headers, url, known)
    if status < 400:
        raise _lie(status, "expected 206 Partial Content")
    raise refusal(status, headers)


def refusal(status: int, headers: Mapping[str, str]) -> AttemptFailed:
    """Return what an answer of 400 or above to any request means."""
    word = headers.get("X-Error-Code") if status == 400 else None
    if word in TOKEN_CODES:
        message = "the session token has expired: get new credentials"
        return AttemptFailed(AccessDenied, message, RetryVerdict.FATAL, status)
    if word == PLAIN_TO_TLS:
        return AttemptFailed(FetchError, "the port speaks TLS: write https:// in the url", RetryVerdict.FATAL, status)
    if word == CERTIFICATE_WANTED:
        message = f"the server wants a client certificate, or another one: {CERTIFICATE_REMEDY}"
        return AttemptFailed(AccessDenied, message, RetryVerdict.FATAL, status)
    otherwise = (
        FetchError,
        RetryVerdict.ONCE if word == NO_REASON else RetryVerdict.FATAL,
        "the server refuses the request",
    )
    kind, verdict, message = _REFUSALS.get(status, otherwise)
    if status == 401 and "HF_TOKEN" not in headers.get("X-Error-Code", ""):  # else the Hub's transport says how
        message += ": set FetchConfig(tokens=...) or headers"
    return AttemptFailed(kind, message, verdict, status)


def _partial(wanted: WantedRange, headers: Mapping[str, str], url: str, known: ObjectInfo | None) -> AcceptedBody:
    _check_encoding(206, headers)
    if headers.get("Content-Type", "").lower().startswith("multipart/byteranges"):
        raise _lie(206, "one range was asked for, several were sent (multipart/byteranges)")
    first, last, size = _content_range(206, headers)
    if first is None or last is None:
        raise _lie(206, f"Content-Range {headers['Content-Range']!r} names no range")
    info = _info(url, size, headers)
    check_version(known, info, 206)
    start, stop = wanted.span_in(size)
    if (first, last + 1) != (start, stop):
        raise _lie(206, f"asked for {wanted.header()}, got Content-Range {headers['Content-Range']!r}")
    _check_length(206, headers, stop - start)
    return AcceptedBody(info, start, stop)


def _whole(wanted: WantedRange, headers: Mapping[str, str], url: str, known: ObjectInfo | None) -> AcceptedBody:
    """A server that ignores Range sends everything: fine where that was asked, or where the wanted part comes early."""
    _check_encoding(200, headers)
    size = _content_length(200, headers)
    if may_be_page(url, headers) and (size is None or size <= SLICE_LIMIT_BYTES):
        return AcceptedBody(_info(url, 0, headers), 0, 0, is_counted=True)
    if size is None:
        _check_countable(wanted, headers)
        return AcceptedBody(_info(url, 0, headers), 0, 0, is_counted=True)
    info = _info(url, size, headers)
    check_version(known, info, 200)
    start, stop = wanted.span_in(size)
    _check_refusal_was_right(wanted, start, stop)
    if (start, stop) != (0, size) and start < stop and stop > SLICE_LIMIT_BYTES:
        if not wanted.is_closed:
            message = "the server sends everything for this range, and may do so for this one only"
            raise AttemptFailed(
                InvalidResponse, message, RetryVerdict.ONCE, 200, fields={"ignores_range": True}, told=info
            )
        message = (
            f"the server ignores Range and sends all {size} bytes; only ranges that end within the first"
            f" {SLICE_LIMIT_BYTES} are cut out of that: use a server that supports ranges"
        )
        raise AttemptFailed(InvalidResponse, message, RetryVerdict.ONCE, 200, fields={"ignores_range": True})
    return AcceptedBody(info, start, stop, skip_bytes=start, cut=stop < size)


def _unsatisfiable(wanted: WantedRange, headers: Mapping[str, str], url: str, known: ObjectInfo | None) -> AcceptedBody:
    """416 is right where nothing of the range exists: an error, or the empty rest of an object read to its end."""
    if "Content-Range" not in headers:
        message = "the server says that the range isn't within the object, and not how long that is"
        raise AttemptFailed(RangeNotSatisfiable, message, RetryVerdict.FATAL, 416, told=known)
    _, _, size = _content_range(416, headers)
    # The tag of an error answer may be the error's own, so only the size counts.
    info = ObjectInfo(url, size)
    check_version(known, info, 416)
    start, stop = wanted.span_in(size)
    if start < stop:
        message = f"the server refuses {wanted.header()}, which is within the {size} bytes that it says there are"
        raise AttemptFailed(InvalidResponse, message, RetryVerdict.ONCE, 416, told=info)
    return AcceptedBody(info, start, stop)


def counted(
    wanted: WantedRange, headers: Mapping[str, str], body: bytes | bytearray, *, url: str, known: ObjectInfo | None
) -> AcceptedBody:
    """The delivery that an answer of 200 makes whose whole body is there, or AttemptFailed; as ``check_response``."""
    if may_be_page(url, headers) and is_page(body):
        message = (
            "a page of HTML came in place of the object, as a network, a proxy or a server sends that wants a login"
            " first: open the url in a browser on this machine"
        )
        raise _lie(200, message)
    if "Content-Length" not in headers:
        _check_countable(wanted, headers)
    info = _info(url, len(body), headers)
    check_version(known, info, 200)
    start, stop = wanted.span_in(len(body))
    _check_refusal_was_right(wanted, start, stop)
    return AcceptedBody(info, start, stop)


def _check_refusal_was_right(wanted: WantedRange, start: int, stop: int) -> None:
    if wanted.plain and start < stop:
        raise _lie(200, "the server refuses ranges of an object that isn't empty")


def _check_countable(wanted: WantedRange, headers: Mapping[str, str]) -> None:
    """Check that an object of unstated length is asked for whole, and that its end can be told from a break."""
    if wanted.is_closed or (wanted.start > 0 and not wanted.plain):
        raise _lie(200, "the server ignores Range and doesn't say how long the object is (no Content-Length)")
    if headers.get("Transfer-Encoding", "").strip().lower() != "chunked":
        message = (
            "the server doesn't say how long the object is (no Content-Length, no chunks), so that its end can't be"
            " told from a broken connection: use a server that does"
        )
        raise _lie(200, message)


def _content_range(status: int, headers: Mapping[str, str]) -> tuple[int | None, int | None, int]:
    value = headers.get("Content-Range")
    if value is None:
        raise _lie(status, "the answer lacks Content-Range")
    if value.strip().lower() == _NOTHING:
        return 0, -1, 0
    match = _CONTENT_RANGE.fullmatch(value.strip())
    if match is None:
        raise _lie(status, f"Content-Range {value[:80]!r} isn't 'bytes first-last/size'")
    first, last, size = match.groups()
    return (None, None, int(size)) if first is None else (int(first), int(last), int(size))


def stated_length(headers: Mapping[str, str]) -> int | None:
    """Return the body's length by Content-Length; None where there is none, ValueError where it isn't one number.

    The same number may come more than once, in one field or in several (RFC 9112, section 6.3).
    """
    values = [one.strip() for value in fields_of(headers, "content-length") for one in value.split(",")]
    if not values:
        return None
    lengths = {int(one) if _LENGTH.fullmatch(one) else None for one in values}
    length = lengths.pop()
    if length is None or lengths:
        raise ValueError(f"Content-Length {', '.join(values)[:80]!r} isn't one number of bytes")
    return length


def _content_length(status: int, headers: Mapping[str, str]) -> int | None:
    try:
        return stated_length(headers)
    except ValueError as error:
        raise _lie(status, str(error)) from None


def _check_length(status: int, headers: Mapping[str, str], expected: int) -> None:
    # Absent with chunked transfer: Content-Range has said it all, and the bytes are counted as they come.
    length = _content_length(status, headers)
    if length is not None and length != expected:
        raise _lie(status, f"Content-Range promises {expected} bytes, Content-Length {length}")


def _check_encoding(status: int, headers: Mapping[str, str]) -> None:
    # All of them: the header may come more than once, and each may name several.
    encoding = ",".join(fields_of(headers, "content-encoding")).lower()
    if not all(_NO_CODING.fullmatch(one.strip()) for one in encoding.split(",")):
        raise _lie(
            status, f"asked for the bytes as they are, got Content-Encoding {encoding[:80]!r}: switch it off there"
        )


def check_version(
    known: ObjectInfo | None, seen: ObjectInfo, status: int | None = None, what: str = "the object was replaced"
) -> None:
    """AttemptFailed, in words that begin with ``what``, where an object isn't what it was known as."""
    changed = difference(known, seen) if known is not None else None
    if changed is not None:
        message = f"{what} since it was first read, {changed}: read it again from its start"
        raise AttemptFailed(ObjectChanged, message, RetryVerdict.FATAL, status)


def _info(url: str, size: int, headers: Mapping[str, str]) -> ObjectInfo:
    return ObjectInfo(url, size, headers.get("ETag"), headers.get("Last-Modified"))


def _lie(status: int, message: str) -> AttemptFailed:
    return AttemptFailed(InvalidResponse, message, RetryVerdict.ONCE, status)
