"""The decisions: what an answer holds, what is tried again, where a redirect leads."""

from __future__ import annotations

import random
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict
from yarl import URL

from asyncfetch.config import RetryConfig
from asyncfetch.errors import (
    ConfigError,
    ConnectionFailed,
    FetchError,
    FetchTimeout,
    InvalidResponse,
    NotFound,
    ObjectChanged,
    RangeNotSatisfiable,
    Throttled,
)
from asyncfetch.fetch.objects import ObjectMemory, difference, strong_etag
from asyncfetch.fetch.responses import SLICE_LIMIT_BYTES, AcceptedBody, WantedRange, check_response
from asyncfetch.fetch.retry import AttemptFailed, Retries, RetryBudget, RetryVerdict, giving_up, retry_after_seconds
from asyncfetch.fetch.transports.file import local_path
from asyncfetch.fetch.urls import join_url, next_url, origin_of, parse_url, static_headers
from asyncfetch.ranges import ObjectInfo
from asyncfetch.tensors.server import normal_server

if TYPE_CHECKING:
    from collections.abc import Callable

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


# --- retry


def failed(verdict: RetryVerdict = RetryVerdict.AGAIN, retry_after: float | None = None) -> AttemptFailed:
    return AttemptFailed(FetchError, "broke", verdict, 500, retry_after=retry_after)


def no_answer() -> AttemptFailed:
    return AttemptFailed(ConnectionFailed, "refused")


def delays(config: RetryConfig, *failures: AttemptFailed, progressed: bool = False) -> list[float | None]:
    """The waits of an unlucky range, up to the end."""
    retries, now, found = Retries(config, now=0.0, uniform=lambda: 1.0), 0.0, list[float | None]()
    for failure in failures:
        found.append(retries.delay_after(failure, progressed=progressed, now=now))
        now += found[-1] or 0.0
    return found


def test_waits_double_up_to_the_maximum() -> None:
    config = RetryConfig(attempts=6, initial_seconds=1.0, maximum_seconds=3.0)
    assert delays(config, *[failed()] * 6) == [1.0, 2.0, 3.0, 3.0, 3.0, None]


def test_wrong_answers_surface_within_two_seconds() -> None:
    waits = delays(RetryConfig(), *[failed()] * 5)
    assert waits[-1] is None
    assert sum(wait or 0.0 for wait in waits) < 2.0


def test_progress_starts_the_count_afresh_but_not_the_total() -> None:
    config = RetryConfig(attempts=2, initial_seconds=1.0, total_seconds=10.0)
    assert delays(config, *[failed()] * 12, progressed=True) == [1.0] * 10 + [None, None]


def test_no_attempt_after_a_fatal_failure_and_one_after_a_lie() -> None:
    config = RetryConfig(initial_seconds=1.0)
    assert delays(config, failed(RetryVerdict.FATAL)) == [None]
    assert delays(config, failed(RetryVerdict.ONCE), failed(RetryVerdict.ONCE)) == [1.0, None]


def test_retry_after_is_waited_out_in_full_with_jitter_on_top() -> None:
    assert delays(RetryConfig(initial_seconds=0.5), failed(retry_after=20.0)) == [20.5]


def test_retry_after_beyond_the_maximum_is_throttling() -> None:
    config = RetryConfig(retry_after_maximum_seconds=30.0)
    assert delays(config, failed(retry_after=31.0)) == [None]
    final = giving_up(failed(retry_after=31.0), config)
    assert final.kind is Throttled
    assert "31 s" in final.message


def test_what_no_wait_would_change_stays_what_it_is() -> None:
    missing = AttemptFailed(NotFound, "no", RetryVerdict.FATAL, 404, retry_after=3600.0)
    assert giving_up(missing, RetryConfig()) is missing


def test_the_wait_for_a_turn_is_not_in_the_total_time() -> None:
    retries = Retries(RetryConfig(total_seconds=10.0), now=0.0, uniform=lambda: 0.0)
    waited = AttemptFailed(FetchError, "no", status=500, waited_seconds=100.0)
    assert retries.delay_after(waited, progressed=False, now=105.0) == 0.0
    assert retries.delay_after(failed(), progressed=False, now=111.0) is None


@pytest.mark.parametrize(
    ("failure", "is_outage"),
    [
        (AttemptFailed(ConnectionFailed, "refused, reset, no route, a resolver that fails"), True),
        (AttemptFailed(FetchTimeout, "no connection in time", RetryVerdict.ONCE), True),
        (AttemptFailed(FetchTimeout, "no first byte in time"), True),
        (AttemptFailed(FetchError, "a gateway's", status=502), True),
        (AttemptFailed(Throttled, "a gateway's", status=503), True),
        (AttemptFailed(FetchError, "a gateway's", status=504), True),
        (AttemptFailed(ConnectionFailed, "no such name", RetryVerdict.ONCE), False),
        (AttemptFailed(ConnectionFailed, "no such name", RetryVerdict.ONCE, has_answered=True), True),
        (AttemptFailed(ConnectionFailed, "closed at once", address=("127.0.0.1", 1)), False),
        (AttemptFailed(ConnectionFailed, "closed at once", address=("127.0.0.1", 1), has_answered=True), True),
        (AttemptFailed(ConnectionFailed, "a certificate that isn't trusted", RetryVerdict.FATAL), False),
        (AttemptFailed(ConnectionFailed, "a body that broke off", status=206), False),
        (AttemptFailed(FetchTimeout, "a body that stalls", status=206), False),
        (AttemptFailed(FetchTimeout, "the server's words", status=408), False),
        (AttemptFailed(Throttled, "a quota", status=429), False),
        (failed(), False),
    ],
    ids=str,
)
def test_an_outage_is_no_answer_or_a_gateways(failure: AttemptFailed, is_outage: bool) -> None:
    assert failure.is_outage == is_outage


def test_an_outage_is_bounded_by_its_time_not_attempts() -> None:
    config = RetryConfig(attempts=2, initial_seconds=1.0, maximum_seconds=8.0, total_seconds=0, outage_seconds=30.0)
    assert delays(config, *[no_answer()] * 8) == [1.0, 2.0, 4.0, 8.0, 8.0, None, None, None]


def test_an_outage_counts_neither_as_attempts_nor_total() -> None:
    retries = Retries(RetryConfig(attempts=3, total_seconds=10.0), now=0.0, uniform=lambda: 0.0)
    for now, failure in ((4.0, failed()), (5.0, no_answer()), (200.0, no_answer())):
        assert retries.delay_after(failure, progressed=False, now=now) == 0.0
    assert retries.delay_after(failed(), progressed=False, now=203.0) == 0.0  # 5 s of 10, the second of 3
    assert retries.delay_after(no_answer(), progressed=False, now=203.0) == 0.0  # an outage of its own
    assert retries.delay_after(failed(), progressed=False, now=503.0) is None  # the third


def test_the_total_time_goes_on_after_an_outage() -> None:
    retries = Retries(RetryConfig(total_seconds=10.0), now=0.0, uniform=lambda: 0.0)
    assert retries.delay_after(no_answer(), progressed=False, now=5.0) == 0.0
    assert retries.delay_after(failed(), progressed=False, now=300.0) == 0.0
    assert retries.delay_after(failed(), progressed=False, now=304.0) == 0.0
    assert retries.delay_after(failed(), progressed=False, now=306.0) is None


def test_an_outage_that_is_over_counts_no_more() -> None:
    """Neither what was waited for its end, nor what was waited for a turn after that."""
    retries = Retries(RetryConfig(outage_seconds=300), now=0.0, uniform=lambda: 0.0)
    away, probe = replace(no_answer(), is_host_away=True), replace(no_answer(), is_host_away=True, is_probe=True)
    for now, failure in (
        (1.0, away),
        (250.0, replace(probe, waited_seconds=248.0)),
        (851.0, replace(away, waited_seconds=600.0)),  # the next one
        (1140.0, replace(probe, waited_seconds=289.0)),
    ):
        assert retries.delay_after(failure, progressed=False, now=now) == 0.0
    assert retries.delay_after(replace(probe, waited_seconds=11.0), progressed=False, now=1151.0) is None


def test_a_range_that_fails_alone_is_given_up() -> None:
    """Its host answers others, whom it waits for; its own attempts take the time of an outage in all."""
    retries, now, own_seconds = Retries(RetryConfig(outage_seconds=30), now=0.0, uniform=lambda: 1.0), 0.0, 0.0
    while True:
        delay = retries.delay_after(replace(no_answer(), waited_seconds=100.0), progressed=False, now=now)
        if delay is None:
            break
        own_seconds += delay
        now += delay + 100.0
    assert 20.0 < own_seconds <= 30.0


@pytest.mark.parametrize("config", [RetryConfig(attempts=3, outage_seconds=0), RetryConfig(attempts=1)])
def test_an_outage_may_count_as_any_failure(config: RetryConfig) -> None:
    assert delays(config, *[no_answer()] * config.attempts)[-2:] == [0.2, None][-config.attempts :]


def test_an_outage_costs_no_budget_and_says_its_bound() -> None:
    failure = replace(no_answer(), budget=RetryBudget(0), is_given_up=True)
    assert delays(RetryConfig(), failure) == [None]
    assert not failure.is_over_budget
    message = giving_up(failure, RetryConfig(outage_seconds=60)).message
    assert message == "refused; it was waited for as long as RetryConfig(outage_seconds=60) says"


def over(budget: RetryBudget, retry_after: float | None = None) -> bool:
    """Whether a first failure isn't repeated for want of budget."""
    failure = AttemptFailed(FetchError, "no", status=500, budget=budget, retry_after=retry_after)
    delay = Retries(RetryConfig(), now=0.0, uniform=lambda: 0.0).delay_after(failure, progressed=False, now=0.0)
    assert failure.is_over_budget == (delay is None)
    return failure.is_over_budget


def test_a_budget_is_all_repeats_of_a_host() -> None:
    budget = RetryBudget(3)
    assert [over(budget) for _ in range(5)] == [False, False, False, True, True]


def test_an_answer_gives_a_repeat_back_and_no_more_than_there_were() -> None:
    budget = RetryBudget(1)
    budget.give_back()
    assert [over(budget), over(budget)] == [False, True]
    budget.give_back()
    assert [over(budget), over(budget)] == [False, True]


def test_a_repeat_that_the_server_gave_a_time_for_is_free() -> None:
    budget = RetryBudget(1)
    assert not over(budget, retry_after=1.0)
    assert budget.left == 1
    assert not over(budget, retry_after=0.0)
    assert budget.left == 0


def test_a_failure_that_is_final_anyway_costs_nothing() -> None:
    budget = RetryBudget(1)
    failure = AttemptFailed(ConnectionFailed, "reset", RetryVerdict.FATAL, budget=budget)
    assert Retries(RetryConfig(), now=0.0, uniform=lambda: 0.0).delay_after(failure, progressed=False, now=0.0) is None
    assert not failure.is_over_budget
    assert budget.left == 1


def test_an_empty_budget_says_so() -> None:
    failure = AttemptFailed(FetchError, "no", status=500, budget=RetryBudget(0))
    Retries(RetryConfig(budget=0), now=0.0, uniform=lambda: 0.0).delay_after(failure, progressed=False, now=0.0)
    final = giving_up(failure, RetryConfig(budget=7))
    assert final.kind is FetchError
    assert final.message.startswith("no; not repeated")
    assert "budget of 7 repeats" in final.message
    assert failure.message == "no"


@pytest.mark.parametrize(("share", "lasts"), [(0.3, True), (0.45, True), (0.6, False)])
def test_it_lasts_where_most_requests_succeed(share: float, lasts: bool) -> None:
    budget, dice = RetryBudget(RetryConfig().budget), random.Random(0)
    failures = 0
    for _ in range(20_000):
        if dice.random() >= share:
            budget.give_back()
        elif not budget.take():
            failures += 1
    assert (failures == 0) == lasts


@given(st.integers(1, 50), st.floats(0, 20), st.floats(0, 20), st.floats(0, 0.999))
def test_no_wait_leaves_its_bounds(attempts: int, initial: float, maximum: float, luck: float) -> None:
    config = RetryConfig(attempts=attempts, initial_seconds=initial, maximum_seconds=maximum, total_seconds=1e9)
    retries = Retries(config, now=0.0, uniform=lambda: luck)
    found = [retries.delay_after(failed(), progressed=False, now=0.0) for _ in range(attempts)]
    assert found.count(None) == 1
    assert all(0.0 <= wait <= maximum for wait in found if wait is not None)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("", None),
        ("7", 7.0),
        (" 7 ", 7.0),
        ("-7", None),
        ("soon", None),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 90.0),
        ("Thu, 01 Jan 1970 00:00:01 GMT", 0.0),
        ("9" * 5000, 999_999_999_999_999_999.0),
        ("1" + "0" * 30, 1e17),
        ("1e400", None),
        ("inf", None),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 253_402_300_789.0),
        ("Fri, 31 Dec 9999 23:59:59 -2359", 253_402_387_129.0),
        ("Fri, 31 Dec 99999 23:59:59 GMT", None),
    ],
)
def test_retry_after_in_both_forms(header: str | None, seconds: float | None) -> None:
    assert retry_after_seconds(header, wall_now=10.0) == seconds


@given(st.text())
def test_no_retry_after_is_too_odd_to_read(header: str) -> None:
    seconds = retry_after_seconds(header, wall_now=0.0)
    assert seconds is None or seconds >= 0.0


# --- redirects


@pytest.mark.parametrize(
    ("location", "target"),
    [
        ("/y?z=1#frag", "https://a.org/y?z=1"),
        ("y", "https://a.org/p/y"),
        ("//b.org/y", "https://b.org/y"),
        ("https://u:p@b.org/y", "https://b.org/y"),
        ("https://:p@b.org/y", "https://b.org/y"),
        ("https://b.org/a%2Fb?s=%7e%2b", "https://b.org/a%2Fb?s=%7e%2b"),
    ],
)
def test_redirect_target(location: str, target: str) -> None:
    assert str(next_url(URL("https://a.org/p/x"), location)) == target


@pytest.mark.parametrize("location", [None, "", "http://a.org/x", "ftp://a.org/x", "https://a:99999/", "//[]@/x"])
def test_bad_redirects_are_refused(location: str | None) -> None:
    with pytest.raises(AttemptFailed) as caught:
        next_url(URL("https://a.org/p/x"), location)
    assert caught.value.kind is InvalidResponse


@pytest.mark.parametrize("text", ["http://", "http:///x", "http://a:99999/", "https://a:b/", "http://[]@/x"])
def test_bad_urls_are_config_errors(text: str) -> None:
    with pytest.raises(ConfigError, match="no http url"):
        parse_url(text)


@pytest.mark.parametrize(
    "text", ["https://me:hunter/two@h/x", "https://me:hunter@", "https://me:hunter@two@h:99999/?sig=hunter"]
)
def test_a_bad_url_is_told_without_what_may_be_its_password(text: str) -> None:
    with pytest.raises(ConfigError, match="no http url") as caught:
        parse_url(text)
    shown = "".join(traceback.format_exception(caught.value))
    assert "hunter" not in shown
    assert "two" not in shown


@pytest.mark.parametrize(
    "text",
    ["h/a\tb", "h/a\nb", "h/a\r\n", "h\n/a", "h/a?b=\0", "h/\x7f", "me:hunter\ntwo@h/x", "h/a?sig=hunter\ntwo\t"],
)
@pytest.mark.parametrize("names", [parse_url, lambda url: join_url(url, "x"), local_path, normal_server])
def test_a_url_with_a_control_character_is_refused(names: Callable[[str], object], text: str) -> None:
    """Where it were left out, the url would name another object."""
    scheme = "file" if names is local_path else "https"
    with pytest.raises(ConfigError, match=r"holds a control character: .* strip\(\)") as caught:
        names(f"{scheme}://{text}")
    shown = "".join(traceback.format_exception(caught.value))
    assert "hunter" not in shown
    assert "two" not in shown


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("http://h/a b", "/a%20b"),
        ("http://h/100%.bin", "/100%25.bin"),
        ("http://h/%7e?x=a+b&y=%2F", "/%7e?x=a+b&y=%2F"),
    ],
)
def test_urls_are_requoted_only_where_they_must_be(text: str, sent: str) -> None:
    assert parse_url(text).raw_path_qs == sent


def test_an_origin_is_scheme_host_and_port() -> None:
    assert origin_of(parse_url("HTTPS://Example.ORG/x")) == "https://example.org:443"
    assert origin_of(parse_url("http://[::1]:81/")) == "http://[::1]:81"


def headers_for(text: str, **kinds: object) -> dict[str, str]:
    settings: dict[str, Any] = {"is_named": True, "headers": {}, "tokens": {}, "login": None} | kinds
    return static_headers(parse_url(text), **settings)


def test_headers_belong_to_their_host_and_port() -> None:
    config = {"a.org": {"X-Key": "all"}, "a.org:8443": {"X-Key": "one"}}
    assert headers_for("https://a.org/", headers=config) == {"X-Key": "all"}
    assert headers_for("https://a.org:8443/", headers=config) == {"X-Key": "one"}
    assert headers_for("https://b.org/", headers=config) == {}


def test_a_header_of_host_and_port_wins_whatever_the_case_of_its_name() -> None:
    config = {"a.org": {"authorization": "all", "X-Key": "all"}, "a.org:443": {"Authorization": "one", "x-key": "one"}}
    assert headers_for("https://a.org/", headers=config) == {"Authorization": "one", "x-key": "one"}


@pytest.mark.parametrize(
    ("url", "reached"),
    [
        ("https://a.org/", {"X-Key": "bare", "Authorization": "Bearer bare"}),
        ("https://a.org:8443/", {"X-Key": "one", "Authorization": "Bearer one"}),
        ("https://a.org:9443/", {}),
        ("http://a.org/", {}),
        ("http://a.org:443/", {}),
        ("https://sub.a.org/", {}),
    ],
)
def test_where_a_redirect_may_take_secrets(url: str, reached: dict[str, str]) -> None:
    headers = {"a.org": {"X-Key": "bare"}, "a.org:8443": {"X-Key": "one"}}
    tokens = {"a.org": "bare", "a.org:8443": "one"}
    assert headers_for(url, is_named=False, headers=headers, tokens=tokens) == reached


def test_a_login_goes_with_a_redirect_to_its_hosts_https_only() -> None:
    login = ("u", "p")
    assert headers_for("https://a.org/", is_named=False, login=login) == {"Authorization": "Basic dTpw"}
    assert headers_for("https://a.org:8443/", is_named=False, login=login) == {}
    assert headers_for("http://a.org/", is_named=False, login=login) == {}


def test_tokens_go_over_https_and_to_loopback_only() -> None:
    tokens = {"a.org": "t", "127.0.0.1": "t"}
    assert headers_for("https://a.org/", tokens=tokens) == {"Authorization": "Bearer t"}
    assert headers_for("http://127.0.0.1/", tokens=tokens) == {"Authorization": "Bearer t"}
    assert headers_for("http://a.org/", tokens=tokens) == {}


def test_a_header_beats_a_token_beats_a_login() -> None:
    login, tokens = ("u", "p"), {"a.org": "t"}
    own = {"a.org": {"authorization": "mine"}}
    assert headers_for("https://a.org/", headers=own, tokens=tokens, login=login) == {"authorization": "mine"}
    assert headers_for("https://a.org/", tokens=tokens, login=login) == {"Authorization": "Bearer t"}
    assert headers_for("https://a.org/", login=login) == {"Authorization": "Basic dTpw"}


def test_headers_that_the_engine_sets_are_refused() -> None:
    with pytest.raises(ConfigError, match="range"):
        headers_for("https://a.org/", headers={"a.org": {"range": "bytes=0-1"}})


def test_an_error_names_its_attempts_and_keeps_its_kind() -> None:
    error = AttemptFailed(FetchError, "no", status=500, host="h:80").error(url="u", start=1, stop=2, attempts=3)
    assert type(error) is FetchError
    assert str(error) == "no [u, bytes [1, 2), host h:80, status 500, 3 attempts]"
