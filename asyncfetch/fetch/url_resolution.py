"""The meaning of the url that a user names on the wire: the request's own url, what goes with it, and for how long.

``s3://bucket/key`` becomes a signed https url, ``hf://datasets/org/name/path`` the signed url of a CDN. Finding
it costs a signature or a request, so that is done once per object, for all its ranges. Everything else (retries,
limits, redirects, versions, checks) is the engine's and the same for all schemes; errors and statistics keep the
user's url, and nothing but the request sees the signed one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from asyncfetch.fetch.refusals import explained
from asyncfetch.fetch.urls import Address, parse_url, userinfo

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncfetch.fetch.retry import AttemptFailed


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
