"""One attempt at an object's address: what a request to it carries, and what its answer means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from multidict import CIMultiDict

from asyncfetch.fetch.objects import strong_etag
from asyncfetch.fetch.redirects import REDIRECTS, is_permanent, next_url, origin_of
from asyncfetch.fetch.responses import check_response

if TYPE_CHECKING:
    from collections.abc import Mapping

    from yarl import URL

    from asyncfetch.fetch.addresses import Address, AddressBook
    from asyncfetch.fetch.download import Download
    from asyncfetch.fetch.hosts import Host
    from asyncfetch.fetch.responses import Delivery

__all__ = ["Visit", "own_headers"]


@dataclass(slots=True)  # not frozen: that takes a call for each field, and a request makes one of these
class Visit:
    """One attempt at one address."""

    download: Download
    book: AddressBook
    address: Address
    moved_to: URL | None = None
    """Where the permanent redirects lead that came before any other; None where none did."""
    is_moving: bool = True
    """Whether all redirects so far were permanent."""
    redirect_status: int | None = None
    """Of the last redirect that was followed."""

    def headers(self, host: Host) -> dict[str, str]:
        """What a request to the host carries, on the way to the bytes; beside the range that it asks for."""
        headers = own_headers(host, self.address)
        # To every hop: a server that redirects must ignore preconditions (RFC 9110, section 13.2.1).
        etag = strong_etag(self.download.known) if self.address.etag is None else None
        if etag is not None:
            headers["If-Match"] = etag
        return headers

    def judge(self, url: URL, status: int, headers: Mapping[str, str]) -> Delivery | URL:
        """What an answer brings, or the url that it redirects to; AttemptFailed where it isn't to be taken."""
        if status in REDIRECTS:
            return next_url(url, headers.get("Location"))
        download, etag = self.download, self.address.etag
        if etag is not None and status < 400:
            headers = _with_etag(headers, etag)
        return check_response(download.next_request(), status, headers, url=download.url, known=download.known)

    def redirected(self, target: URL, status: int, headers: Mapping[str, str]) -> None:
        """Takes notice of a redirect that is followed."""
        self.redirect_status = status
        self.is_moving = self.is_moving and is_permanent(status, headers)
        if self.is_moving:
            self.moved_to = target


def own_headers(host: Host, address: Address) -> dict[str, str]:
    """What a request to the host carries whatever it asks for: secrets of its own origin, and no other's."""
    if host.origin != origin_of(address.url):
        return dict(host.route.redirected_headers)
    headers = dict(host.route.headers if address.is_named else host.route.redirected_headers)
    if address.headers:
        replaced = {name.lower() for name in address.headers}
        headers = {name: value for name, value in headers.items() if name.lower() not in replaced}
        headers |= {name: value for name, value in address.headers.items() if value is not None}
    return headers


def _with_etag(headers: Mapping[str, str], etag: str) -> Mapping[str, str]:
    changed = CIMultiDict(headers)
    changed["ETag"] = etag
    return changed
