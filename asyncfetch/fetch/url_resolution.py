"""The meaning of the url that a user names on the wire: the request's own url, what goes with it, and for how long.

``s3://bucket/key`` becomes a signed https url, ``hf://datasets/org/name/path`` the signed url of a CDN. Finding
it costs a signature or a request, so that is done once per object, for all its ranges. Everything else (retries,
limits, redirects, versions, checks) is the engine's and the same for all schemes; errors and statistics keep the
user's url, and nothing but the request sees the signed one.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import anyio

from asyncfetch.errors import AsyncFetchError
from asyncfetch.fetch.refusals import explained
from asyncfetch.fetch.retry import AttemptFailed
from asyncfetch.fetch.urls import Address, parse_url, userinfo

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Mapping

MAX_ADDRESSES = 8192
"""Addresses that are remembered, about 2 KiB each. Finding a forgotten one again costs one signature or request."""
MARGIN_SECONDS = 60.0
"""An address isn't used this shortly before its end, or a tenth of its life: clocks differ, requests wait."""
MEANT_SECONDS = 1.0
"""An address that is refused this soon after it was found isn't worn out: the refusal is meant."""


class AddressBook(Protocol):
    """Finds addresses for the urls of one scheme."""

    async def resolve(self, url: str) -> Address:
        """The address of ``url``, remembered or found now; AttemptFailed or ConfigError where there is none."""
        ...

    def reject(self, url: str, address: Address, failure: AttemptFailed) -> bool:
        """Told that ``address`` was refused; whether ``resolve`` may find a better one now."""
        ...

    def explain(self, status: int, headers: Mapping[str, str], body: bytes) -> Mapping[str, str]:
        """The headers of an error answer, with those added that the server put into the body in words of its own.

        ``Content-Range`` as RFC 9110 has it for 416, and ``X-Error-Code``, a word or two that the message quotes.
        """
        ...


class WebUrls:
    """http and https urls: addresses already."""

    async def resolve(self, url: str) -> Address:
        """The url itself, its user and password taken out of it and into a header."""
        return web_address(url)

    def reject(self, url: str, address: Address, failure: AttemptFailed) -> bool:
        """There is no other."""
        return False

    def explain(self, status: int, headers: Mapping[str, str], body: bytes) -> Mapping[str, str]:
        """Return what any server may say."""
        return explained(status, headers, body)


@lru_cache(maxsize=1024)
def web_address(text: str) -> Address:
    """Return the address that an http or https url is, its user and password taken out of it and into a header."""
    url = parse_url(text)
    login = userinfo(url)
    if login is None:
        return Address(url, is_named=True)
    return Address(url.with_user(None), {"Authorization": login}, is_named=True)


K = TypeVar("K", bound="Hashable")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Found(Generic[V]):
    """A value and how long it holds."""

    value: V
    seconds: float = math.inf
    """Seconds that it holds, from when it was found."""


@dataclass(slots=True)
class _KeptAddress(Generic[V]):
    value: V
    found_at: float
    use_until: float


class _Lookup(Generic[V]):
    """A search under way. No SharedCall: who searches gets the error as it was raised, see ``_shared``."""

    __slots__ = ("error", "found", "landed")

    def __init__(self) -> None:
        self.landed = anyio.Event()
        self.found: Found[V] | None = None
        self.error: AttemptFailed | AsyncFetchError | None = None


class AsyncCache(Generic[K, V]):
    """Values by key, each found once for all who ask, and again when it is about to expire or was rejected.

    Who asks first searches, in its own task, so this needs no owner. An error reaches all who wait for that search,
    each as one of its own, and the next call tries again; where the searching task is cancelled, one of those who wait
    starts over. Bounded: the least recently used is forgotten. For one loop. SharedLRU's values weigh and don't expire.

    Args:
        now: Monotonic seconds.
        maximum: Values remembered.
    """

    def __init__(self, now: Callable[[], float], maximum: int = MAX_ADDRESSES) -> None:
        self._now = now
        self._maximum = maximum
        self._kept: OrderedDict[K, _KeptAddress[V]] = OrderedDict()
        self._searches: dict[K, _Lookup[V]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    async def get(self, key: K, find: Callable[[], Awaitable[Found[V]]]) -> V:
        """The value of ``key``: remembered, being searched for, or what ``find()`` finds now."""
        while True:
            kept = self._kept.get(key)
            if kept is not None and self._now() < kept.use_until:
                self._kept.move_to_end(key)
                return kept.value
            search = self._searches.get(key)
            if search is None:
                return await self._search(key, find)
            await search.landed.wait()
            try:
                if search.error is not None:
                    raise _shared(search.error)
                if search.found is not None:
                    return search.found.value
            finally:
                del search  # else error -> traceback -> this frame -> search -> error is a cycle

    def peek(self, key: K) -> V | None:
        """Return what is remembered of ``key``, if anything."""
        kept = self._kept.get(key)
        return None if kept is None else kept.value

    def reject(self, key: K, value: V) -> bool:
        """Forgets ``value`` unless it is brand-new; whether the next ``get`` gives another one."""
        kept = self._kept.get(key)
        if kept is None or kept.value is not value:
            return True  # somebody else noticed first
        if self._now() - kept.found_at < MEANT_SECONDS:
            return False
        del self._kept[key]
        return True

    def forget(self, key: K, value: V) -> None:
        """Forgets ``value``, brand-new or not, unless there is another one already."""
        kept = self._kept.get(key)
        if kept is not None and kept.value is value:
            del self._kept[key]

    async def _search(self, key: K, find: Callable[[], Awaitable[Found[V]]]) -> V:
        search = self._searches[key] = _Lookup()
        try:
            found = search.found = await find()
            self._keep(key, found)
        except (AttemptFailed, AsyncFetchError) as error:
            search.error = error
            raise
        else:
            return found.value
        finally:
            del self._searches[key]
            search.landed.set()
            del search  # as above

    def _keep(self, key: K, found: Found[V]) -> None:
        now = self._now()
        life = found.seconds - min(MARGIN_SECONDS, found.seconds / 10) if math.isfinite(found.seconds) else math.inf
        self._kept[key] = _KeptAddress(found.value, now, now + life)
        self._kept.move_to_end(key)
        if len(self._kept) > self._maximum:
            self._kept.popitem(last=False)


def _shared(error: AttemptFailed | AsyncFetchError) -> AttemptFailed | AsyncFetchError:
    """The same for one who only waited, without a traceback: the host's budget pays for who sent the request."""
    other = replace(error, budget=None) if isinstance(error, AttemptFailed) else copy(error)
    other.__cause__ = error.__cause__
    return other
