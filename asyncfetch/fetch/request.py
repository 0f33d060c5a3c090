"""A ranged GET: what it carries, and what its answer is. Pure: who sends it is ``transports.http``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from multidict import CIMultiDict

from asyncfetch.errors import ObjectChanged
from asyncfetch.fetch.responses import check_response, counted
from asyncfetch.fetch.retry import AttemptFailed, RetryVerdict
from asyncfetch.fetch.urls import REDIRECTS, is_permanent, next_url

if TYPE_CHECKING:
    from collections.abc import Mapping

    from yarl import URL

    from asyncfetch.fetch.answer import Head
    from asyncfetch.fetch.download import Download
    from asyncfetch.fetch.hosts import Host
    from asyncfetch.fetch.responses import AcceptedBody
    from asyncfetch.fetch.url_resolution import AddressBook
    from asyncfetch.fetch.urls import Address


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
