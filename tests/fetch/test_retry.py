"""When a failure is tried again, how often, and for how long that is waited for."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfetch.config import RetryConfig
from asyncfetch.errors import ConnectionFailed, FetchError, FetchTimeout, NotFound, Throttled
from asyncfetch.fetch.retry import AttemptFailed, Retries, RetryBudget, RetryVerdict, giving_up, retry_after_seconds


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


def test_failure_that_no_wait_would_change_stays_as_it_is() -> None:
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


def test_answer_gives_one_repeat_back_up_to_the_full_budget() -> None:
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
def test_budget_lasts_where_most_requests_succeed(share: float, lasts: bool) -> None:
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


def test_an_error_names_its_attempts_and_keeps_its_kind() -> None:
    error = AttemptFailed(FetchError, "no", status=500, host="h:80").error(url="u", start=1, stop=2, attempts=3)
    assert type(error) is FetchError
    assert str(error) == "no [u, bytes [1, 2), host h:80, status 500, 3 attempts]"
