"""The attempts for one range or one question: whether another one follows, and what the caller hears in the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from asyncfetch.fetch.retry import AttemptFailed, Retries, giving_up

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncfetch.config import RetryConfig
    from asyncfetch.fetch.responses import Wanted
    from asyncfetch.fetch.retry import Clock

__all__ = ["Attempts", "persist"]

T = TypeVar("T")


class Attempts:
    """Those that failed, of one range or question. Made at the first failure: most have none."""

    __slots__ = ("_asked", "_clock", "_config", "_count", "_retries", "_url")

    def __init__(
        self, config: RetryConfig, clock: Clock, url: str, asked: Wanted | None = None, *, started: float
    ) -> None:
        """What it is about.

        Args:
            config: How often and how long.
            clock: The retry layer's.
            url: As the caller wrote it, for errors.
            asked: The caller's range, for errors; None where no bytes of the object are asked for.
            started: When the first attempt began, by the clock.
        """
        self._config = config
        self._clock = clock
        self._url = url
        self._asked = asked
        self._retries = Retries(config, now=started, uniform=clock.uniform)
        self._count = 0

    def delay_after(self, failure: AttemptFailed, *, progressed: bool = False) -> float:
        """Seconds until the next attempt; the caller's FetchError is raised where there is none."""
        self._count += 1
        delay = self._retries.delay_after(failure, progressed=progressed, now=self._clock.monotonic())
        if delay is not None:
            return delay
        start, stop = (None, None) if self._asked is None else (self._asked.start, self._asked.stop)
        final = giving_up(failure, self._config)
        raise final.error(url=self._url, start=start, stop=stop, attempts=self._count) from failure.__cause__


async def persist(config: RetryConfig, clock: Clock, url: str, attempt: Callable[[bool], Awaitable[T]]) -> T:
    """What ``attempt(is_retry)`` returns, over as many attempts as the policy allows, else FetchError."""
    started = clock.monotonic()
    attempts: Attempts | None = None
    while True:
        try:
            return await attempt(attempts is not None)
        except AttemptFailed as failure:
            attempts = attempts or Attempts(config, clock, url, started=started)
            delay = attempts.delay_after(failure)
        await clock.sleep(delay)
