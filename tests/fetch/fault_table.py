"""What a server, a network or a store can do wrong, and what comes of it.

    python -m tests.fetch.fault_table

prints it as asyncfetch/fetch/README.md has it. ``WIRE`` are faults of one answer, each run by
test_http_fault_table.py, once and for ever, over both ways a body can take, and over TLS. ``ELSEWHERE`` are those that
take more than one answer to tell; each names the test that shows it.
"""

from __future__ import annotations

import gzip
import random
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final

from asyncfetch.errors import (
    AccessDenied,
    ConnectionFailed,
    FetchError,
    FetchTimeout,
    InvalidResponse,
    NotFound,
    ObjectChanged,
    RangeNotSatisfiable,
    Throttled,
)
from tests.fetch.conftest import Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fetch.conftest import End

CONTENT: Final = random.Random(1).randbytes(2_000_000)
START, STOP = 1_500_000, 1_600_000
"""The range that every wire fault is asked for."""
ASKED: Final = CONTENT[START:STOP]
SMUGGLED = b"HTTP/1.1 404 x\r\nContent-Length: 0\r\n\r\n"
ATTEMPTS = 3
"""That the policy is to allow, none of which brings a byte."""


@dataclass(frozen=True, slots=True)
class Wire:
    """A fault of one answer."""

    group: str
    name: str
    step: Step
    once: type[FetchError] | None = None
    """The error where the first answer has it; None where the right bytes come."""
    always: type[FetchError] | None = InvalidResponse
    """The same where every answer has it."""
    requests: int | None = 2
    """Sent in all where every answer has it; None where that depends on how the packets fall."""

    @property
    def waits(self) -> bool:
        """Whether it takes a timeout to notice: not where the status has said it."""
        stalls = "stall" in {self.step.end, self.step.silent} and self.step.status is None
        return stalls or self.step.drip_seconds is not None

    @property
    def outcome(self) -> str:
        if self.once is not None:
            return f"`{self.once.__name__}` at once"
        if self.always is None:
            return "right bytes"
        if self.requests == 2:
            return f"asked once more; `{self.always.__name__}` if that is no better"
        return f"asked again; `{self.always.__name__}` if it stays so"


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A fault with a test of its own."""

    group: str
    name: str
    outcome: str
    shown_by: str
    """File below tests/fetch, and function."""


def _final(status: int, kind: type[FetchError], **step: object) -> Wire:
    return Wire("statuses", str(status), Step(status=status, **step), kind, kind, 1)  # type: ignore[arg-type]


def _passing(status: int, kind: type[FetchError]) -> Wire:
    return Wire("statuses", str(status), Step(status=status), None, kind, ATTEMPTS)


def _statuses() -> Iterator[Wire]:
    for status in (408,):
        yield _passing(status, FetchTimeout)
    for status in (429, 503):
        yield _passing(status, Throttled)
    for status in (425, 500, 502, 504):
        yield _passing(status, FetchError)
    yield Wire("statuses", "421", Step(status=421), None, FetchError)  # on another connection
    for status in (400, 402, 405, 501, 505):
        yield _final(status, FetchError)
    for status in (401, 403):
        yield _final(status, AccessDenied)
    for status in (404, 410):
        yield _final(status, NotFound)
    yield Wire(
        "statuses",
        "404 whose text never comes",
        Step(status=404, cut=0, headers={"Content-Length": "9"}, end="stall"),
        NotFound,
        NotFound,
        1,
    )
    yield _final(412, ObjectChanged)
    yield _final(416, RangeNotSatisfiable, headers={"Content-Range": None})
    present = {"Content-Range": f"bytes */{len(CONTENT)}"}
    yield Wire("statuses", "416 for a range that is there", Step(status=416, headers=present))
    yield Wire("statuses", "204", Step(status=204, cut=0, headers={"Content-Length": None}))
    yield Wire("statuses", "304", Step(status=304, cut=0))
    yield Wire("statuses", "redirect without Location", Step(status=302, headers={"Content-Length": "0"}, cut=0))


def _heads() -> Iterator[Wire]:
    def claims(name: str, content_range: str | None, **step: object) -> Wire:
        headers = {"Content-Range": content_range, **step.pop("headers", {})}  # type: ignore[dict-item]
        return Wire("heads", name, Step(headers=headers, **step))  # type: ignore[arg-type]

    yield claims("206 without Content-Range", None)
    yield claims("Content-Range of another range", f"bytes {START + 1}-{STOP}/{len(CONTENT)}")
    yield claims("Content-Range without size", f"bytes {START}-{STOP - 1}/*")
    yield claims("Content-Range that is none", "bytes many")
    short = {"Content-Length": "10"}
    yield claims("a shorter range, told right", f"bytes {START}-{START + 9}/{len(CONTENT)}", headers=short, cut=10)
    yield Wire("heads", "Content-Length of another length", Step(headers={"Content-Length": "99999"}))
    yield Wire("heads", "200 with everything", Step(ignore_range=True))
    body = gzip.compress(ASKED)
    zipped = {"Content-Encoding": "gzip", "Content-Length": str(len(body))}
    yield Wire("heads", "gzip in spite of identity", Step(headers=zipped, body=body))
    parts = {"Content-Type": "multipart/byteranges; boundary=b"}
    yield Wire("heads", "multipart/byteranges", Step(headers=parts))
    yield Wire("heads", "no HTTP", Step(raw=b"SSH-2.0-OpenSSH_9.6\r\n\r\n", end="close"))
    yield Wire("heads", "a field of more than 64 KiB", Step(headers={"X-Long": "x" * 64 * 1024}))
    yield Wire("heads", "a head byte by byte (slow loris)", Step(drip_seconds=0.02), None, FetchTimeout, ATTEMPTS)


_ENDS: dict[End, tuple[str, type[FetchError]]] = {
    "close": ("closed", ConnectionFailed),
    "half-close": ("half-closed", ConnectionFailed),
    "reset": ("reset", ConnectionFailed),
    "stall": ("silent", FetchTimeout),
}


def _ends() -> Iterator[Wire]:
    """A connection that ends, or falls silent, at each class of place in an answer."""
    length = len(ASKED)
    for end, (word, kind) in _ENDS.items():

        def ends(where: str, step: Step, *, requests: int | None, kind: type[FetchError] | None = kind) -> Wire:
            return Wire(f"connection {word}", where, step, None, kind, requests)  # noqa: B023 - made at once

        yield ends("before the head", Step(silent=end), requests=ATTEMPTS)
        for name, cut in (
            ("after the head's first byte", 1),
            ("within the head", 40),
            ("before the head's last byte", -1),
        ):
            yield ends(name, Step(head_cut=cut, end=end), requests=ATTEMPTS)
        yield ends("at byte 0 of the body", Step(cut=0, end=end), requests=ATTEMPTS)
        yield ends("at byte 1 of the body", Step(cut=1, end=end), requests=None)
        # The rest is asked for, which is shorter than that.
        yield ends("in the middle of the body", Step(cut=length // 2, end=end), requests=2, kind=None)
        yield ends("before the body's last byte", Step(cut=length - 1, end=end), requests=2, kind=None)
        if end != "reset":  # which may overtake the last bytes
            yield ends("behind the body's last byte", Step(cut=length, end=end), requests=1, kind=None)


def _chunked(*pieces: bytes, end: End = "keep") -> Step:
    return Step(headers={"Content-Length": None, "Transfer-Encoding": "chunked"}, body=b"".join(pieces), end=end)


def _chunks() -> Iterator[Wire]:
    first, second = b"c350\r\n" + ASKED[:50_000] + b"\r\n", b"c350\r\n" + ASKED[50_000:] + b"\r\n"
    last = b"0\r\n\r\n"
    yield Wire("chunks", "honest ones", _chunked(first, second, last), None, None, 1)
    for name, pieces in {
        "cut in a size": (first, second[:2]),
        "cut behind a size": (first, second[:6]),
        "cut in a chunk": (first, second[:1000]),
        "cut between two chunks": (first,),
        "cut before the last chunk": (first, second),
        "cut in the last chunk": (first, second, last[:1]),
    }.items():
        # For ever, the rest of the range is answered with the same bytes, which may be too many.
        yield Wire("chunks", name, _chunked(*pieces, end="close"), None, FetchError, None)
    more = b"186a1\r\n" + ASKED + b"x\r\n"
    yield Wire("chunks", "a byte too many", _chunked(more, last))
    yield Wire("chunks", "a size that is none", _chunked(first, b"zz\r\nrubbish\r\n"), None, FetchError, None)
    yield Wire("chunks", "rubbish at once", _chunked(b"rubbish\r\n"), None, FetchError, None)


def _lengths() -> Iterator[Wire]:
    declared = {"Content-Length": str(len(ASKED))}
    yield Wire("lengths", "longer than declared", Step(headers=declared, body=ASKED + SMUGGLED), None, None, 1)
    yield Wire(
        "lengths",
        "no length, closed behind the last byte",
        Step(headers={"Content-Length": None}, end="close"),
        None,
        None,
        1,
    )
    yield Wire(
        "lengths",
        "no length, closed early",
        Step(headers={"Content-Length": None}, cut=0, end="close"),
        None,
        ConnectionFailed,
        ATTEMPTS,
    )


WIRE: Final = (*_statuses(), *_heads(), *_ends(), *_chunks(), *_lengths())

ELSEWHERE: Final = (
    Elsewhere(
        "pace",
        "`Retry-After`, in seconds or as a date",
        "waited out, with jitter on top",
        "test_http_faults.py::test_retry_after_is_honoured",
    ),
    Elsewhere(
        "pace",
        "`Retry-After` beyond `retry_after_maximum_seconds`",
        "`Throttled` at once",
        "test_http_faults.py::test_a_long_retry_after_is_throttled_at_once",
    ),
    Elsewhere(
        "pace",
        "429 with a `RateLimit` of which nothing remains, of the Hub or any host",
        "waited out as `Retry-After`, or `Throttled` at once",
        "test_http_faults.py::test_a_rate_limit_is_waited_out",
    ),
    Elsewhere(
        "pace",
        "a host that fails most of what it is asked: its budget of repeats is spent",
        "the error of each failure at once, which says so, until answers come again",
        "test_hosts_throttling.py::test_a_host_that_is_gone_is_given_up_for_all",
    ),
    Elsewhere(
        "pace",
        "a body that is slow, but moves",
        "right bytes, however long it takes",
        "test_http_faults.py::test_a_slow_but_moving_body_is_left_alone",
    ),
    Elsewhere(
        "pace",
        "a body byte by byte",
        "`FetchTimeout`: less than `min_bytes_per_second` is none",
        "test_http_faults.py::test_a_body_that_drips_has_stalled",
    ),
    Elsewhere(
        "outages",
        "a server that is stopped and started again: connections are refused or reset, or a gateway says 502, 503, 504",
        "waited out, up to `outage_seconds`, with one request at a time as its probe; then its error",
        "test_outage.py::test_a_server_that_is_started_anew",
    ),
    Elsewhere(
        "outages",
        "a server that hangs",
        "the same, after the time that it may be silent",
        "test_outage.py::test_a_server_that_hangs",
    ),
    Elsewhere(
        "outages",
        "a body that breaks off when the server is killed",
        "goes on at the first byte that is missing, of the same version",
        "test_outage.py::test_a_body_goes_on_where_the_server_was_killed",
    ),
    Elsewhere(
        "outages",
        "a resolver that fails, and one that no longer knows a name which it knew",
        "the same as for a server",
        "test_outage.py::test_a_resolver_that_is_away",
    ),
    Elsewhere(
        "outages",
        "a url of the Hub or S3 that expires meanwhile",
        "a new one",
        "test_outage.py::test_a_hub_that_is_away_and_a_url_that_expires",
    ),
    Elsewhere(
        "outages",
        "no open file to be had for a connection",
        "idle connections are closed; `FetchError` that says so if that isn't enough",
        "test_connector_files.py::test_idle_connections_give_way_to_other_hosts",
    ),
    Elsewhere(
        "late answers",
        "one that is later than nearly all of its host's",
        "asked for a second time, and the first answer that fits is taken",
        "test_hedge.py::test_a_late_answer_is_overtaken",
    ),
    Elsewhere(
        "late answers",
        "the request that lost",
        "cancelled and awaited, its connection closed",
        "test_hedge.py::test_the_losers_connection_is_closed",
    ),
    Elsewhere(
        "late answers",
        "a second answer that is refused, broken or doesn't fit",
        "the first one is waited for",
        "test_hedge.py::test_a_second_answer_that_does_not_fit_changes_nothing",
    ),
    Elsewhere(
        "late answers",
        "a host that is slow as a whole",
        "no second requests until that is usual",
        "test_hedge.py::test_host_slow_as_a_whole_gets_no_hedges_until_that_is_usual",
    ),
    Elsewhere(
        "late answers",
        "a host that falls silent",
        "at most 4 second requests in a row, then hardly any",
        "test_hedge.py::test_a_host_that_falls_silent_gets_few_second_requests",
    ),
    Elsewhere(
        "versions",
        "another ETag within a range",
        "`ObjectChanged`",
        "test_http_faults.py::test_no_object_is_joined_from_two_versions",
    ),
    Elsewhere(
        "versions",
        "another ETag between two parts",
        "`ObjectChanged`",
        "test_range_reader.py::test_parts_of_two_versions_are_never_put_together",
    ),
    Elsewhere(
        "versions",
        "a broken body without a strong ETag",
        "begun again, never joined",
        "test_http_faults.py::test_broken_body_without_a_strong_etag_starts_over",
    ),
    Elsewhere(
        "versions",
        "200 for a range within the first MiB, or for all",
        "cut out of it",
        "test_http_faults.py::test_a_server_without_ranges_serves_all_or_what_comes_early",
    ),
    Elsewhere(
        "objects",
        "one whose length nobody tells, in chunks",
        "read whole, up to `max_unsized_bytes`",
        "test_http_faults.py::test_an_object_of_unknown_length_is_read_whole",
    ),
    Elsewhere(
        "objects",
        "the same that ends with its connection",
        "`InvalidResponse`",
        "test_http_faults.py::test_an_end_that_is_the_connections_is_refused",
    ),
    Elsewhere(
        "objects",
        "the last bytes of one, or an empty one, that its server has ways of its own with",
        "asked for in another way",
        "test_http_real_servers.py::test_every_verb_is_right_of_servers_that_are_imitated",
    ),
    Elsewhere(
        "objects",
        "a page of HTML in place of one, at once or behind a redirect",
        "asked once more; `InvalidResponse` that says so if that is no better",
        "test_refusals.py::test_a_page_in_place_of_bytes_is_told",
    ),
    Elsewhere(
        "objects",
        "a range that ends beyond one, refused without a word on its size",
        "asked for by the size, or `RangeNotSatisfiable`",
        "test_responses.py::test_a_head_of_a_short_object_is_read_though_refused",
    ),
    Elsewhere(
        "oddities",
        "a Content-Encoding that encodes nothing (`aws-chunked`, a charset, `none`); `Bytes`; one Content-Length twice",
        "right bytes",
        "test_responses.py::test_an_encoding_that_encodes_nothing_is_taken",
    ),
    Elsewhere(
        "oddities",
        "bare line feeds, folded lines, bytes beyond ASCII in a head; fields of up to 64 KiB",
        "right bytes",
        "test_responses.py::test_odd_heads_are_read",
    ),
    Elsewhere(
        "memory",
        "there is too little for what a server says that is coming",
        "`FetchError` at once",
        "test_http_faults.py::test_an_object_that_memory_cannot_hold_is_refused",
    ),
    Elsewhere(
        "connections",
        "a pooled one that the server has closed",
        "asked on a new one, which is no attempt",
        "test_engine_lifetime.py::test_a_dead_pooled_connection_costs_no_attempt",
    ),
    Elsewhere(
        "connections",
        "bytes that nobody asked for behind an answer, at once or later",
        "not used again",
        "test_http_faults.py::test_a_late_surplus_does_not_reach_the_next_request_either",
    ),
    Elsewhere(
        "connections",
        "nobody listens",
        "`ConnectionFailed`",
        "test_http_faults.py::test_port_without_a_listener_is_tried_for_outage_seconds",
    ),
    Elsewhere(
        "connections",
        "a handshake that never ends",
        "`FetchTimeout`",
        "test_http_faults.py::test_a_host_that_never_completes_the_handshake",
    ),
    Elsewhere(
        "connections",
        "a name that can't be resolved",
        "`ConnectionFailed`",
        "test_http_faults.py::test_an_unknown_name_is_asked_twice",
    ),
    Elsewhere(
        "connections",
        "a resolver that fails",
        "asked again; `ConnectionFailed` if it stays so",
        "test_http_fault_table.py::test_a_resolver_that_fails_is_asked_again",
    ),
    Elsewhere(
        "connections",
        "a certificate that has expired, is another host's, self-signed or of an unknown authority",
        "`ConnectionFailed` at once",
        "test_http_fault_table.py::test_a_certificate_that_is_not_good_is_fatal",
    ),
    Elsewhere(
        "connections",
        "a server that wants a client certificate, or another one",
        "`AccessDenied` or `ConnectionFailed` that says so",
        "test_connector.py::test_a_client_certificate_that_is_wanted_is_named",
    ),
    Elsewhere(
        "connections",
        "https to a port of plain http",
        "`ConnectionFailed`",
        "test_http_faults.py::test_https_to_a_plain_port_is_told",
    ),
    Elsewhere(
        "connections",
        "plain http to a port of TLS",
        "an error that says so",
        "test_refusals.py::test_plain_http_to_other_servers_of_tls_is_explained",
    ),
    Elsewhere(
        "redirects",
        "to another host or port",
        "followed without token, cookie, `x-amz-*`, netrc login or password",
        "test_http_redirects.py::test_bare_hosts_secrets_follow_no_redirect_to_another_port",
    ),
    Elsewhere(
        "redirects",
        "from https to http",
        "`InvalidResponse`, nothing sent",
        "test_http_redirects.py::test_https_is_never_downgraded",
    ),
    Elsewhere(
        "redirects",
        "in a loop, or more than 10",
        "`InvalidResponse`",
        "test_http_redirects.py::test_a_loop_ends",
    ),
    Elsewhere(
        "redirects",
        "in a loop until its cookie comes back",
        "`InvalidResponse` that says so",
        "test_http_redirects.py::test_a_loop_that_may_want_its_cookie_says_so",
    ),
    Elsewhere(
        "redirects",
        "to a url with raw bytes, or quoted in its own way",
        "asked for byte by byte as it is",
        "test_http_redirects.py::test_the_bytes_of_a_location_stay_as_they_are",
    ),
    Elsewhere(
        "redirects",
        "with a long body",
        "followed, the body not read",
        "test_http_redirects.py::test_a_redirect_with_a_long_body_is_not_read",
    ),
    Elsewhere(
        "redirects",
        "the target of a permanent one, which all ranges share, fails",
        "followed anew",
        "test_http_redirects.py::test_a_target_that_fails_is_forgotten",
    ),
    Elsewhere(
        "Hub",
        "403 of the CDN: the signed target has expired",
        "a new one, in a single flight",
        "test_hub.py::test_an_expired_url_is_replaced_in_one_flight",
    ),
    Elsewhere(
        "Hub", "403 of the CDN that is meant", "`AccessDenied`", "test_hub.py::test_a_refusal_that_is_meant_ends"
    ),
    Elsewhere(
        "Hub",
        "a push between two reads",
        "the commit of the first one stays",
        "test_hub.py::test_a_revision_stays_what_it_was",
    ),
    Elsewhere("Hub", "an endpoint that is none", "`InvalidResponse`", "test_hub.py::test_an_endpoint_that_is_no_hub"),
    Elsewhere(
        "S3",
        "a signature or a session token that has expired",
        "signed anew",
        "test_s3.py::test_temporary_credentials_that_expired_are_had_anew",
    ),
    Elsewhere(
        "S3",
        "the wrong region: 400, 301 or 307",
        "signed for the right one, once a bucket",
        "test_s3.py::test_a_bucket_of_another_region_is_followed_once",
    ),
    Elsewhere(
        "S3",
        "400 whose text was lost on the way",
        "asked once more",
        "test_s3.py::test_a_refusal_whose_words_are_lost_is_asked_for_again",
    ),
    Elsewhere(
        "S3",
        "503 SlowDown, with and without `Retry-After`",
        "asked again; `Throttled` if it stays so",
        "test_s3_quirks.py::test_slow_down_is_throttling",
    ),
    Elsewhere(
        "S3",
        "a clock that is wrong",
        "`AccessDenied` that says by how much",
        "test_s3_quirks.py::test_a_wrong_clock_is_named",
    ),
    Elsewhere(
        "listings",
        "pages that lead to themselves, or to nowhere",
        "`InvalidResponse`, never half a listing",
        "test_s3_quirks.py::test_a_listing_that_can_not_go_on_is_an_error",
    ),
    Elsewhere(
        "listings",
        "pages without an end",
        "an error at `max_listed_entries`, or after 1,000 pages without entries",
        "test_s3_quirks.py::test_a_listing_without_an_end_is_an_error",
    ),
    Elsewhere(
        "fsspec",
        "an error of a back end",
        "ours of the same kind",
        "test_fsspec.py::test_errors_of_back_ends_are_ours",
    ),
    Elsewhere(
        "fsspec",
        "too few bytes, too many, or the whole file",
        "`InvalidResponse`",
        "test_fsspec.py::test_a_wrong_number_of_bytes_is_an_error",
    ),
    Elsewhere(
        "fsspec",
        "a back end that hangs",
        "a cancelled read returns at once",
        "test_fsspec.py::test_a_hanging_back_end_holds_up_nobody",
    ),
    Elsewhere(
        "secrets",
        "in a url, a header or a token, whatever goes wrong",
        "in no message, traceback, log, repr or statistic",
        "test_http_fault_table.py::test_no_fault_shows_a_secret",
    ),
    Elsewhere(
        "secrets",
        "in a configuration that is pickled",
        "stay behind, and are named where one is needed",
        "../config/test_secrets.py::test_secret_missing_from_a_pickle_is_an_error_at_once",
    ),
    Elsewhere(
        "callers",
        "cancelled at any of their waits",
        "nothing of it stays, its buffer is not written to again",
        "test_engine_cancellation.py::test_cancellation_at_every_wait_of_a_read",
    ),
    Elsewhere(
        "callers",
        "closing while a server hangs",
        "waits for none",
        "test_engine_cancellation.py::test_closing_waits_for_no_server",
    ),
    Elsewhere(
        "everything",
        "30 % of the answers faulty, 20,000 ranges: alone, in batches and in parts, by redirects and of a Hub",
        "right bytes; `InvalidResponse` where one range is lied about twice, `AccessDenied` where a target expires",
        "test_http_fault_storm.py::test_right_bytes_through_a_storm",
    ),
    Elsewhere(
        "everything",
        "30 % of the answers of S3 faulty, 8,000 ranges: the same, while signatures expire or are refused",
        "right bytes; as above, or `ObjectChanged` where the store tells of another version",
        "test_s3_fault_storm.py::test_right_bytes_through_a_storm",
    ),
    Elsewhere(
        "everything",
        "30 % of the calls into a back end of fsspec going wrong, 6,000 ranges: the same, while objects are replaced",
        "right bytes of one version; its error where that stays, `ObjectChanged` where the object was replaced",
        "test_fsspec_fault_storm.py::test_right_bytes_through_a_storm",
    ),
)


def render() -> str:
    """The table for the page: faults of a group with one outcome share a line."""
    lines = ["| | fault | what comes of it |", "|---|---|---|"]
    rows: tuple[Wire | Elsewhere, ...] = (*WIRE, *ELSEWHERE)
    for group, of_group in groupby(rows, key=lambda row: row.group):
        names: dict[str, list[str]] = {}
        for row in of_group:
            names.setdefault(row.outcome, []).append(row.name)
        shown = group
        for outcome, together in names.items():
            lines.append(f"| {shown} | {'; '.join(together)} | {outcome} |")
            shown = ""
    return "\n".join(lines)


if __name__ == "__main__":
    print(render())  # noqa: T201 - that is what it is for
