"""Requests by aiohttp's session: all that its documentation promises, and nothing else."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
import anyio

from asyncfetch.fetch.transports.connecting import current_user
from asyncfetch.runtime.cancellation import was_cancelled
from asyncfetch.runtime.deadlines import Deadlines

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from yarl import URL

    from asyncfetch.fetch.transports.direct import Answer
    from asyncfetch.fetch.transports.hedging import Race

__all__ = ["SessionRequests"]


class SessionRequests:
    """Sends requests by a session, which it doesn't own. Belongs to the session's loop."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self.deadlines = Deadlines(asyncio.get_running_loop())
        """For what waits for these requests' answers."""

    def send(
        self,
        method: str,
        url: URL,
        headers: Mapping[str, str],
        *,
        byte_range: str | None = None,
        data: AsyncIterator[bytes | memoryview] | None = None,
        proxy: URL | None = None,
        proxy_headers: Mapping[str, str] | None = None,
    ) -> Awaitable[Answer | aiohttp.ClientResponse]:
        """The answer, when its head is there, whatever its status.

        ``byte_range`` is the value of a Range header that isn't in ``headers``; with one the answer may be an Answer.

        Raises:
            aiohttp.ClientError, OSError, ValueError: There is none, or the request can't be made.
        """

        async def ask() -> aiohttp.ClientResponse:
            return await self._session.request(
                method,
                url,
                headers=headers if byte_range is None else {**headers, "Range": byte_range},
                data=data,
                allow_redirects=False,
                proxy=proxy,
                proxy_headers=proxy_headers,
            )

        race = current_user.get().race
        return ask() if race is None else _ask_in_race(race, ask)

    def close(self) -> None:
        """Nothing may be under way. The session stays open."""
        self.deadlines.close()


class _Asked:
    """A request in a task of its own: the wait for its answer's head may be cancelled and taken up again."""

    def __init__(self, ask: Callable[[], Awaitable[aiohttp.ClientResponse]]) -> None:
        self._ask = ask
        self._ended = anyio.Event()
        self._response: aiohttp.ClientResponse | None = None
        self._failure: Exception | None = None

    async def run(self) -> None:
        """Sends it; the task's function."""
        try:
            self._response = await self._ask()
        except asyncio.CancelledError:
            if was_cancelled():  # and so is who waits
                raise
            self._failure = aiohttp.ClientConnectionError("the session has given it up")
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            self._failure = error
        self._ended.set()

    async def answer(self) -> aiohttp.ClientResponse:
        """It has a head now. Cancelled, this may be called again."""
        await self._ended.wait()
        if self._failure is not None:
            raise self._failure
        assert self._response is not None
        return self._response

    def close(self) -> None:
        """Without an answer."""
        self._failure = None  # else failure -> traceback -> a frame with this -> failure is a cycle
        if self._response is not None:
            self._response.close()


async def _ask_in_race(
    race: Race[Any], ask: Callable[[], Awaitable[aiohttp.ClientResponse]]
) -> Answer | aiohttp.ClientResponse:
    asked = _Asked(ask)
    answer: Answer | aiohttp.ClientResponse | None = None
    failure: Exception | None = None
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(asked.run, name="request by a session")
            try:
                answer = await race.head(asked.answer)
            except Exception as error:  # noqa: BLE001 - raised below, by itself
                failure = error
                group.cancel_scope.cancel()
    except BaseException:
        asked.close()
        raise
    if answer is not None:
        return answer
    asked.close()
    try:
        assert failure is not None
        raise failure
    finally:
        failure = None  # as above
