"""How the url that a user names becomes a ranged GET: what that carries, and what its answer is. Pure.

``s3://bucket/key`` becomes a signed https url, ``hf://datasets/org/name/path`` the signed url of a CDN. Finding
it costs a signature or a request, so that is done once per object, for all its ranges. Everything else (retries,
limits, redirects, versions, checks) is the engine's and the same for all schemes; errors and statistics keep the
user's url, and nothing but the request sees the signed one. It is sent by ``transports.http``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

from multidict import CIMultiDict

from asyncfetch.errors import ObjectChanged
from asyncfetch.fetch.refusals import explained
from asyncfetch.fetch.responses import check_response, counted
from asyncfetch.fetch.retry import AttemptFailed, RetryVerdict
from asyncfetch.fetch.urls import REDIRECTS, Address, is_permanent, next_url, parse_url, userinfo

if TYPE_CHECKING:
    from collections.abc import Mapping

    from yarl import URL

    from asyncfetch.fetch.answer import Head
    from asyncfetch.fetch.download import Download
    from asyncfetch.fetch.hosts import Host
    from asyncfetch.fetch.responses import AcceptedBody


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


class Redirect(NamedTuple):
    """An answer that names another url."""

    target: URL
    status: int
    is_permanent: bool
    sets_cookie: bool


@dataclass(slots=True)  # not frozen: that takes a call for each field, and a request makes one of these
class HttpRequest:
    """A ranged GET on its way to the bytes of a download: where to, what it carries, what a good answer is."""

    url: URL
    host: Host
    address: Address
    book: AddressBook
    download: Download

    def headers(self, etag: str | None) -> dict[str, str]:
        """Return what it carries beside what every request does, and the range; ``etag`` is the version insisted on."""
        headers = self.host.route.headers_for(self.host.origin, self.address)
        # To every hop: a server that redirects must ignore preconditions (RFC 9110, section 13.2.1).
        if etag is not None:
            headers["If-Match"] = etag
        return headers

    def judge(self, status: int, headers: Mapping[str, str]) -> AcceptedBody | Redirect:
        """Return what an answer brings, or the url that it redirects to; AttemptFailed where it isn't to be taken."""
        if status in REDIRECTS:
            self._check_version(headers)
            target = next_url(self.url, headers.get("Location"))
            return Redirect(target, status, is_permanent(status, headers), "Set-Cookie" in headers)
        download = self.download
        if status < 400:
            headers = self._with_version(headers)
        return check_response(download.next_request(), status, headers, url=download.url, known=download.known)

    def count(self, headers: Mapping[str, str], body: bytes | bytearray) -> AcceptedBody:
        """Return what a whole body brings, of which the answer's head doesn't tell enough; else AttemptFailed."""
        download, headers = self.download, self._with_version(headers)
        return counted(download.next_request(), headers, body, url=download.url, known=download.known)

    def _check_version(self, headers: Mapping[str, str]) -> None:
        """AttemptFailed where the address's origin has another version by now than when the address was found."""
        name = self.address.version_header
        if name is not None and (version := headers.get(name)) is not None and f'"{version}"' != self.address.etag:
            message = f'its version was {self.address.etag} and is "{version}" now'
            raise AttemptFailed(ObjectChanged, message, RetryVerdict.FATAL)

    def _with_version(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        if self.address.etag is None:
            return headers
        self._check_version(headers)
        changed = CIMultiDict(headers)
        changed["ETag"] = self.address.etag
        return changed

    def fits(self, head: Head | None) -> bool:
        """Return whether an answer brings the bytes, by its head alone."""
        if head is None or head.length_bytes is None:
            return False
        try:
            self.judge(head.status, head.headers)
        except AttemptFailed:
            return False
        return True
