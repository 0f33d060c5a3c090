"""The choice whether a failed attempt is made again, and how soon. Pure: the clock and the dice are passed in."""

from __future__ import annotations

import logging
import random
import re
import time
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from datetime import UTC
from email.utils import parsedate_to_datetime
from enum import Enum
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from asyncfetch.config import RetryDetails
from asyncfetch.errors import ConnectionFailed, FetchError, FetchTimeout, Throttled, redact_url
from asyncfetch.observe.waits import Cause, running_meter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from asyncfetch.config import RetryConfig
    from asyncfetch.ranges import ObjectInfo

    _Cause = tuple[type[FetchError], int | None]

MAX_FIELD_CHARACTERS = 4096
"""Longest header that is read: a longer one is no quota."""

# Structured fields (RFC 9651), with blanks around every sign. What matches possessively (*+, ?+) is never tried anew,
# so that no field takes more than linear time.
_VALUE = r'(?:"(?:[^"\\]|\\["\\])*+"|[^\s",;=]++)'
_PARAMETER = re.compile(rf"\s*+;\s*+([a-z*][a-z0-9_.*-]*+)(?:\s*+=\s*+({_VALUE}))?+")
_MEMBER = re.compile(rf"\s*+{_VALUE}((?:{_PARAMETER.pattern})*+)\s*+(?:,(?!\s*\Z)|\Z)")
_COUNT = re.compile(r"[0-9]{1,15}")


def spent_quota_seconds(headers: Mapping[str, str]) -> float | None:
    """Seconds until every quota that is spent is open again, by RateLimit; None where none is.

    The field is of draft-ietf-httpapi-ratelimit-headers, from the eighth on: a list of quotas, by name, each with what
    remains of it (r) and the seconds until there is more (t). The Hugging Face Hub sends ``"resolvers";r=2999;t=255``
    with its answers. RateLimit-Policy isn't read: it tells how large the quotas are, not what is left of them, and the
    Hub's doesn't keep to the grammar. Nor are the fields of earlier drafts (RateLimit-Reset), seconds here and dates
    there.

    Only a quota with nothing left makes us wait. Of one with less than is in flight it isn't known how much of that the
    server has counted already; what is refused then is repeated for nothing, when there is more.

    As the Hub's own client does, one second is added, because t is rounded down.
    """
    if "RateLimit" not in headers:  # of nearly all servers
        return None
    field = ",".join(value for name, value in headers.items() if name.lower() == "ratelimit")
    spent = [seconds for remaining, seconds in quotas(field) if remaining == 0]
    return max(spent) + 1.0 if spent else None


def quotas(field: str) -> list[tuple[int, float]]:
    """Return what remains of each quota, and the seconds until there is more; without those that don't say both.

    Empty where the field is malformed: then it says nothing.
    """
    found, at = [], 0
    while at < len(field) <= MAX_FIELD_CHARACTERS:
        member = _MEMBER.match(field, at)
        if member is None:
            return []
        parameters = dict(_PARAMETER.findall(member[1]))  # of two of one name the last one counts
        if all(_COUNT.fullmatch(parameters.get(key, "")) for key in "rt"):
            found.append((int(parameters["r"]), float(parameters["t"])))
        at = member.end()
    return found


log = logging.getLogger("asyncfetch")

WATCH_SECONDS = 60.0
"""Failures that are older say nothing of a host, and a warning of it isn't said again sooner."""
LEAST_FAILURES, MOST_FAILURES = 10, 1000
"""Failures in that time that may be chance; and that are remembered, about 200 bytes each."""

AWAY_STATUSES = frozenset({502, 503, 504})
"""Statuses that say that the server isn't there, or not for now."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Clock:
    """Time and dice of the retry layer; a test passes its own and never waits."""

    monotonic: Callable[[], float] = time.monotonic
    """Seconds since some point, never backwards."""
    wall: Callable[[], float] = time.time
    """Seconds since the epoch, for a Retry-After that is a date."""
    sleep: Callable[[float], Awaitable[object]] = anyio.sleep
    """Waits for so many seconds; can be cancelled."""
    uniform: Callable[[], float] = random.random
    """A number in [0, 1)."""


class RetryVerdict(Enum):
    """The meaning of a failed attempt for the next one."""

    FATAL = "fatal"
    """The same question gets the same answer."""
    ONCE = "once"
    """Probably final, but one answer of a broken proxy or resolver looks the same: ask once more."""
    AGAIN = "again"
    """The world was busy or broken; it passes."""


@dataclass(slots=True, eq=False)
class AttemptFailed(Exception):
    """One attempt did not bring its bytes. Stays within this room; ``error`` makes what the user sees."""

    kind: type[FetchError]
    message: str
    """The cause and the remedy, without url and range, which ``error`` adds."""
    verdict: RetryVerdict = RetryVerdict.AGAIN
    status: int | None = None
    retry_after: float | None = None
    """Seconds that the server asked us to wait; None where it didn't."""
    host: str | None = None
    """``host:port`` that the attempt ended at, after redirects."""
    budget: RetryBudget | RetryToken | None = None
    """Budget of the host that it ended at; None where it got to none."""
    is_over_budget: bool = False
    """True if that was empty when it should have been repeated."""
    has_answered: bool = False
    """True if that host has answered before, whatever it was."""
    is_host_away: bool = False
    """True if that host is away, so that it is the host who says when the next attempt may begin."""
    is_probe: bool = False
    """True if that host was away when it was asked: this saw whether it still is."""
    is_given_up: bool = False
    """True if that host was away for longer than it is waited for."""
    waited_seconds: float = 0.0
    """Seconds that it waited for its turn at that host."""
    address: tuple[str, int] | None = None
    """Address of the connection that failed; None where the server's answer, or our wish, was the reason."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Headers of the answer that refused, found by names of any case."""
    fields: Mapping[str, object] = field(default_factory=dict)
    """Further fields of ``kind``, such as the size of RangeNotSatisfiable."""
    told: ObjectInfo | None = None
    """All that the answer says of the object without bringing what was asked for; None where it says nothing."""

    def __str__(self) -> str:
        return f"{self.kind.__name__}: {self.message}"

    @property
    def cause(self) -> Cause:
        """What the wait for the next attempt is a wait for."""
        if self.is_host_away:
            return Cause.OUTAGE
        return Cause.LIMIT if self.status == 429 else Cause.RETRIES

    @property
    def looks_away(self) -> bool:
        """True if a host that is away fails so: no connection, none that lasts, silence, or a gateway that says so."""
        if self.verdict is RetryVerdict.FATAL or self.status in AWAY_STATUSES:
            return self.verdict is not RetryVerdict.FATAL
        if self.kind is not ConnectionFailed:
            return self.kind is FetchTimeout
        # No such name, and a connection that is closed in place of an answer: a wrong url, where none was right yet.
        return self.has_answered or (self.verdict is RetryVerdict.AGAIN and self.address is None)

    @property
    def is_outage(self) -> bool:
        """True if nothing was wrong with an answer, for there was none, or one that says that the host is away."""
        return self.looks_away and (self.status is None or self.status in AWAY_STATUSES)

    def error(self, *, url: str, start: int | None, stop: int | None, attempts: int) -> FetchError:
        """The error for the caller of a verb."""
        fields: dict[str, Any] = {"status": self.status, "host": self.host, **self.fields}
        return self.kind(self.message, url=url, start=start, stop=stop, attempts=attempts, **fields)


def cause_of(error: BaseException) -> BaseException | None:
    """Return what may be shown as the cause of an error of ours: ``error``, unless its words hold a secret.

    aiohttp and back ends of fsspec quote urls in theirs, signatures included, and a traceback shows them all.
    """
    link: BaseException | None = error
    for _ in range(16):  # a chain that is longer has a loop
        if link is None:
            return error
        if redact_url(str(link)) != str(link):  # as if it were one url: it may quote a password that holds a blank
            break
        link = link.__cause__ or link.__context__
    return None


class RetryBudget:
    """The number of requests to one host that may still be repeats. All ranges of that host share it.

    Repeats help where failures are few and far between. A host that fails most of what it is asked is only kept from
    recovering by them, and its errors from those who should hear of them. So a repeat takes a token and an answer that
    brought what was asked gives one back: as long as half of all requests succeed it lasts for ever, and a host that
    has gone is given up after ``size`` repeats altogether rather than after some for each range.

    A repeat at the time that the server named (Retry-After, RateLimit) takes none: it is what was asked for.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.left = size
        self.is_drawn = False
        """True if there are fewer than at first."""

    def take(self) -> bool:
        """Return whether there was a token to take."""
        if not self.left:
            return False
        self.left -= 1
        self.is_drawn = True
        return True

    def give_back(self) -> None:
        """A request brought what was asked."""
        self.left = min(self.left + 1, self._size)
        self.is_drawn = self.left < self._size


class RetryToken:
    """The token for one failed attempt, taken once from its host's budget, however many tasks share the failure."""

    def __init__(self, budget: RetryBudget) -> None:
        self._budget = budget
        self._was_there: bool | None = None

    def take(self) -> bool:
        """Return whether there was a token to take."""
        if self._was_there is None:
            self._was_there = self._budget.take()
        return self._was_there


class FailureWatch:
    """Decides when users should hear that a host fails most of what it is asked. What succeeds costs nothing by it.

    A refusal for good, like that of an object that isn't there, is an answer: its caller gets it at once.
    """

    def __init__(self) -> None:
        self._failures: deque[tuple[float, int, _Cause, str]] = deque(maxlen=MOST_FAILURES)
        self._warned_at = -inf

    def failed(self, failure: AttemptFailed, *, now: float, ended: int) -> str | None:
        """Return what to warn of, after the host's name; None where it isn't time for that.

        ``ended`` are the attempts at this host that were over before, well or not.
        """
        if failure.verdict is RetryVerdict.FATAL:
            return None
        failures = self._failures
        failures.append((now, ended, (failure.kind, failure.status), failure.message))
        while failures[0][0] <= now - WATCH_SECONDS:
            failures.popleft()
        since, ended_before, *_ = failures[0]
        after_first, failed = ended - ended_before, len(failures)
        is_most = failed >= LEAST_FAILURES and 2 * (failed - 1) > after_first  # the first one was sure to be a failure
        if not is_most or now < self._warned_at + WATCH_SECONDS:
            return None
        self._warned_at = now
        [(commonest, count)] = Counter(cause for _, _, cause, _ in failures).most_common(1)
        message = next(message for _, _, cause, message in reversed(failures) if cause == commonest)
        kind, status = commonest
        advice = (
            "ask less of it at a time, in all processes together (max_requests_per_host, max_bytes_per_second)"
            if kind is Throttled
            else "find out whether it, or the way to it, is broken; what fails after all repeats is raised"
        )
        return (
            f"failed {failed} of {after_first + 1} attempts in the last {now - since:.0f} s, {count} of them by"
            f" {kind.__name__}"
            f"{'' if status is None else f' (status {status})'}: {message}; {advice}"
        )


def waits_out_outages(config: RetryConfig) -> bool:
    """Return whether a host that is away is waited for."""
    return config.outage_seconds > 0 and config.attempts > 1


def backoff(config: RetryConfig, failures: int, luck: float) -> float:
    """Seconds to wait after so many failures in a row; ``luck`` is in [0, 1)."""
    # The exponent is capped because 2.0**1024 overflows; no wait grows beyond the maximum anyway.
    return luck * min(config.initial_seconds * 2.0 ** min(failures - 1, 60), config.maximum_seconds)


class Retries:
    """The retry policy over the attempts for one range.

    Not shared between ranges, but for the budget of each host. ``delay_after`` is the only decision; it never sleeps.
    """

    def __init__(self, config: RetryConfig, *, now: float, uniform: Callable[[], float]) -> None:
        self._config = config
        self._started = now
        self._uniform = uniform
        self._failures = 0
        self._lies = 0
        self._outages = 0  # failures in a row that are one
        self._away_since = self._spent_seconds = 0.0
        self._waited_seconds = 0.0  # since then, for what isn't over

    def delay_after(self, failure: AttemptFailed, *, progressed: bool, now: float) -> float | None:
        """Seconds to wait before the next attempt, or None to give up.

        Progress (bytes that need not be fetched again) starts the count of attempts afresh, never the total time, in
        which the wait for a turn at the host doesn't count. A server's Retry-After is waited out in full, plus the
        jitter that any retry has, so that those who were turned away together don't come back together.

        An outage has a time of its own, and counts neither as attempts nor in the total time. What was waited for one
        that is over counts no more, but the attempts do: where just this range fails so, that has an end, too. Its
        failures don't draw on the host's budget: where many fail, the host lets one at a time ask.

        Its host's budget is asked last, and only for a repeat that will be made; an empty one is noted in ``failure``.
        """
        config = self._config
        if failure.is_given_up:
            return None
        if failure.is_outage and waits_out_outages(config):
            return self._delay_of_outage(failure, progressed=progressed, now=now)
        self._started += failure.waited_seconds
        if self._outages:
            self._outages, self._started = 0, now - self._spent_seconds
        if progressed:
            self._failures = 0
        self._failures += 1
        self._lies += failure.verdict is RetryVerdict.ONCE
        if failure.verdict is RetryVerdict.FATAL or self._lies > 1 or self._failures >= config.attempts:
            return None
        if failure.retry_after is not None and failure.retry_after > config.retry_after_maximum_seconds:
            return None
        delay = (failure.retry_after or 0.0) + backoff(config, self._failures, self._uniform())
        if now + delay > self._started + config.total_seconds:
            return None
        if failure.budget is not None and not failure.retry_after and not failure.budget.take():
            failure.is_over_budget = True
        return None if failure.is_over_budget else delay

    def _delay_of_outage(self, failure: AttemptFailed, *, progressed: bool, now: float) -> float | None:
        config = self._config
        if progressed or not self._outages:
            self._outages, self._away_since, self._waited_seconds = 0, now, 0.0
            self._spent_seconds = now - self._started - failure.waited_seconds
        else:
            self._waited_seconds += failure.waited_seconds
            if not failure.is_probe:  # the host was there: over are the outage, and the wait for a turn after it
                self._away_since += self._waited_seconds
                self._waited_seconds = 0.0
        self._outages += 1
        retry_after = failure.retry_after or 0.0
        if retry_after > config.retry_after_maximum_seconds:
            return None
        delay = 0.0 if failure.is_host_away else retry_after + backoff(config, self._outages, self._uniform())
        if now + delay > self._away_since + config.outage_seconds:
            failure.is_given_up = True
        return None if failure.is_given_up else delay


def giving_up(failure: AttemptFailed, config: RetryConfig) -> AttemptFailed:
    """The failure as it is told to the user: with the reason where it isn't in the failure itself.

    A Retry-After that is too long to wait for is throttling, whatever the status, where another attempt might help.
    """
    if failure.is_over_budget:
        reason = (
            f"; not repeated, for the budget of {config.budget} repeats that this host may be ahead of its answers is"
            " spent: it fails most of what it is asked, so find out why, or raise RetryConfig(budget=...)"
        )
        return replace(failure, message=failure.message + reason)
    if failure.is_given_up:
        reason = f"; it was waited for as long as RetryConfig(outage_seconds={config.outage_seconds:g}) says"
        return replace(failure, message=failure.message + reason)
    if failure.verdict is RetryVerdict.FATAL or (failure.retry_after or 0.0) <= config.retry_after_maximum_seconds:
        return failure
    message = (
        f"the server asks to wait {failure.retry_after:.0f} s, more than"
        f" retry_after_maximum_seconds={config.retry_after_maximum_seconds:g}: come back later, ask less, or raise it"
    )
    return AttemptFailed(Throttled, message, RetryVerdict.FATAL, failure.status, failure.retry_after, failure.host)


def retry_after_seconds(value: str | None, *, wall_now: float) -> float | None:
    """Seconds that a Retry-After header asks for, digits or a date; None where it is absent or unreadable.

    ``wall_now`` is in seconds since the epoch. A date in the past gives 0.
    """
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit():
        return float(text[:18])
    date = date_seconds(text)
    return None if date is None else max(0.0, date - wall_now)


def date_seconds(value: str | None) -> float | None:
    """Seconds since the epoch of a date in a header; None where it is absent or unreadable."""
    try:
        date = parsedate_to_datetime(value or "")
        return (date if date.tzinfo is not None else date.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def pause_seconds(headers: Mapping[str, str], *, wall_now: float) -> float | None:
    """Return how long the headers of a refusal ask us to wait, else None: Retry-After, or else RateLimit."""
    asked = retry_after_seconds(headers.get("Retry-After"), wall_now=wall_now)
    return spent_quota_seconds(headers) if asked is None else asked


async def retried(
    config: RetryConfig,
    clock: Clock,
    url: str,
    attempt: Callable[[AttemptFailed | None], Awaitable[T]],
    keep_landed: Callable[[AttemptFailed], int] = lambda _: 0,
    *,
    span: tuple[int | None, int | None] = (None, None),
    first: tuple[float, AttemptFailed] | None = None,
) -> T:
    """Return what ``attempt`` returns, over as many attempts as the policy allows. This is the one retry loop.

    Args:
        config: The policy.
        clock: Time and dice.
        url: The object as the caller wrote it, for errors and logs.
        attempt: Given the failure of the attempt before it; None for the first one.
        keep_landed: Gives the bytes that need not be fetched again after an attempt that failed.
        span: First byte of the caller's range and one past its last, for errors and logs.
        first: When the caller began the first attempt itself, by ``clock``, and how that failed; None where it didn't.

    Raises:
        FetchError: The last attempt failed.
        Exception: What ``on_retry`` raised, as it is; there is no further attempt.
    """
    started, failure = (clock.monotonic(), None) if first is None else first
    del first  # else failure -> traceback -> this frame -> first is a cycle
    count, landed_bytes = 0, 0
    retries: Retries | None = None
    start, stop = span
    while True:
        if failure is None or count:
            try:
                return await attempt(failure)
            except AttemptFailed as error:
                failure = error
        count += 1
        before, landed_bytes = landed_bytes, keep_landed(failure)
        retries = retries or Retries(config, now=started, uniform=clock.uniform)
        delay = retries.delay_after(failure, progressed=landed_bytes > before, now=clock.monotonic())
        if delay is None:
            final = giving_up(failure, config).error(url=url, start=start, stop=stop, attempts=count)
            cause = failure.__cause__
            failure = None  # else failure -> traceback -> this frame -> failure is a cycle
            try:
                raise final from cause
            finally:
                del final, cause  # likewise
        failure = failure.with_traceback(None)
        if config.on_retry is not None or log.isEnabledFor(logging.DEBUG):
            details = RetryDetails(
                url=redact_url(url), start=start, stop=stop, host=failure.host, status=failure.status,
                cause=f"{failure.kind.__name__}: {failure.message}", attempt=count, wait_seconds=delay,
            )  # fmt: skip
            log.debug(
                "attempt %d at %s failed (host %s, status %s): %s; again in %.3g s",
                count, details.url, failure.host, failure.status, details.cause, delay,
            )  # fmt: skip
            if config.on_retry is not None:
                config.on_retry(details)
        meter = running_meter()
        if meter is not None:
            meter.begin(failure.cause, clock.monotonic())
        await clock.sleep(delay)
        if meter is not None:
            meter.add(failure.cause, delay)
