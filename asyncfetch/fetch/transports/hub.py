"""Files of the Hugging Face Hub: one request to the Hub for each file, then ranges from its CDN.

The Hub has a quota (3,000 to 20,000 answers in five minutes), so it is asked once for the commit of a repository's
revision, and once for the place of a file. It answers with a signed url of a CDN, which is used for every range until
it expires. The token goes only to the Hub's own origin.

Buckets have no commits: a file keeps its first seen version, by the hash of its content.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import os
import re
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from multidict import CIMultiDict
from yarl import URL

from asyncfetch.config.checks import require_token
from asyncfetch.errors import ConfigError, InvalidResponse, NotFound, ObjectChanged, redact_url
from asyncfetch.fetch.listing import Listing, listed_size
from asyncfetch.fetch.refusals import explained
from asyncfetch.fetch.retry import AttemptFailed, RetryVerdict, date_seconds
from asyncfetch.fetch.urls import Address, next_url, origin_of, parse_url, static_headers, userinfo
from asyncfetch.ranges import ObjectInfo
from asyncfetch.runtime.single_flight import AsyncCache, CachedValue
from asyncfetch.runtime.threads import run_sync

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping

    from asyncfetch.config import FetchConfig
    from asyncfetch.fetch.download import Download
    from asyncfetch.fetch.retry import Clock
    from asyncfetch.fetch.transports.http import HttpTransport

ENDPOINT = "https://huggingface.co"
UNSIGNED_SECONDS = 300.0
"""Seconds for which a redirect without an expiry is used."""
_KINDS = {"datasets", "spaces", "models", "buckets"}
_CONTENT_HASH = "X-Xet-Hash"
"""The header with the hash of a bucket's file; listings call it xetHash."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SPECIAL_REVISION = re.compile(r"(refs/(?:convert/[^/]+|pr/[0-9]+))(?:/|$)")
_NEXT = re.compile(r'<([^<>]*)>\s*;[^,<]*\brel="?next\b')


@dataclass(frozen=True, slots=True)
class HubFile:
    """The file that an ``hf://`` url names."""

    kind: str
    """"datasets", "models", "spaces" or "buckets"."""
    repository: str
    """"organisation/name"."""
    revision: str
    """Branch, tag, ``refs/pr/1`` or commit. Buckets have none."""
    path: str
    """Within the repository, without slashes at its ends; empty for its root."""

    @classmethod
    def parse(cls, url: str) -> HubFile:
        """The parts of ``hf://[datasets/|spaces/|buckets/]org/name[@revision]/path``, nothing of it quoted.

        A slash within a revision is written %2F, except in ``refs/pr/1`` and ``refs/convert/parquet``.
        """
        rest = url.partition("://")[2]
        first, _, below = rest.partition("/")
        kind, rest = (first, below) if first in _KINDS else ("models", rest)
        organisation, _, rest = rest.partition("/")
        name, separator, path = rest.partition("/")
        name, at, revision = name.partition("@")
        if at and (special := _SPECIAL_REVISION.match(f"{revision}{separator}{path}")) is not None:
            revision, path = special[1], f"{revision}{separator}{path}"[special.end() :]
        if not organisation or not name or (at and not revision):
            message = f"{redact_url(url)!r} names no repository: write hf://datasets/org/name@revision/path"
            raise ConfigError(message)
        if kind == "buckets" and at:
            raise ConfigError(f"{redact_url(url)!r} names a revision, which buckets don't have: leave out '@...'")
        parts = path.strip("/")
        if any(part in {".", ".."} for part in (organisation, name, *parts.split("/"))):
            raise ConfigError(f"{redact_url(url)!r}: '.' and '..' lead out of a repository")
        return cls(kind, f"{organisation}/{name}", unquote(revision) if at else "main", parts)

    @property
    def is_in_bucket(self) -> bool:
        """True if it has no commit, and can be replaced."""
        return self.kind == "buckets"

    def file_path(self, commit: str) -> str:
        """The file's path below the endpoint."""
        if self.is_in_bucket:
            return f"/buckets/{quote(self.repository)}/resolve/{quote(self.path)}"
        kind = "" if self.kind == "models" else f"{self.kind}/"
        return f"/{kind}{quote(self.repository)}/resolve/{commit}/{quote(self.path)}"

    def api_path(self, verb: str, revision: str, path: str = "") -> str:
        """The path of an API request about the repository, below the endpoint."""
        return f"/api/{self.kind}/{quote(self.repository)}/{verb}/{quote(revision, safe='')}{path}"


_MEANT: Mapping[tuple[int, str], str] = {
    (401, "RepoNotFound"): "RepoNotFound: it isn't there, or it is private: set HF_TOKEN, or run `hf auth login`",
    (401, "GatedRepo"): "GatedRepo: accept its terms on its page, then set HF_TOKEN, or run `hf auth login`",
    (403, "GatedRepo"): "GatedRepo: accept its terms on its page",
    (
        404,
        "RepoNotFound",
    ): "RepoNotFound: no such repository, or this token may not see it; a dataset's url begins with hf://datasets/",
    (404, "RevisionNotFound"): "RevisionNotFound: no such repository, or no such branch, tag or commit after the @; a "
    "dataset's url begins with hf://datasets/",
    (404, "EntryNotFound"): "EntryNotFound: the repository has no such file",
}
"""The Hub's error codes in words, with remedies."""
_MEANT_WITH_TOKEN = {
    **_MEANT,
    (401, "RepoNotFound"): "RepoNotFound: the Hub doesn't take this token, which may have expired: make a new one, for "
    "HF_TOKEN or `hf auth login`",
}


@dataclass(frozen=True, slots=True)
class _Hub:
    """The Hub's url, and the headers of requests to it."""

    endpoint: str
    headers: Mapping[str, str] = field(repr=False)

    def address(self, path: str) -> Address:
        return Address(URL(self.endpoint + path, encoded=True), self.headers, is_named=True)


class HubTransport:
    """``hf://``: fills downloads, lists directories, and is the address book for both.

    A revision keeps its first seen commit until the fetcher is closed. Bound to the loop of its HttpTransport.
    """

    def __init__(self, config: FetchConfig, http: HttpTransport, clock: Clock) -> None:
        self._config = config
        self._http = http
        self._addresses: AsyncCache[str, Address] = AsyncCache(clock.monotonic)
        self._commits: AsyncCache[tuple[str, str, str], str] = AsyncCache(clock.monotonic)
        self._hubs: AsyncCache[None, _Hub] = AsyncCache(clock.monotonic, 1)
        self._wall = clock.wall
        self._has_token = False

    def attempt(self, download: Download, failure: AttemptFailed | None) -> Awaitable[None]:
        """One attempt at the bytes that a download lacks."""
        return self._http.attempt(download, failure, self)

    async def resolve(self, url: str) -> Address:
        """The file's address: a signed one of a CDN, or the Hub's own for a small file."""
        return await self._addresses.get(url, partial(self._find, url))

    def reject(self, url: str, address: Address, failure: AttemptFailed) -> bool:
        """Forget an address if its signature has expired, the CDN lacks the file, or the Hub has a new version."""
        has_changed = failure.kind is ObjectChanged and address.version_header is not None
        has_left = failure.kind is NotFound and not address.is_named
        return (has_changed or has_left or failure.status in {401, 403}) and self._addresses.reject(url, address)

    def explain(self, status: int, headers: Mapping[str, str], body: bytes) -> Mapping[str, str]:
        """The headers with the Hub's X-Error-Code in words."""
        meant = (_MEANT_WITH_TOKEN if self._has_token else _MEANT).get((status, headers.get("X-Error-Code", "")))
        if meant is not None:
            headers = CIMultiDict(headers)
            headers["X-Error-Code"] = meant
        return explained(status, headers, body)

    async def endpoint(self, url: str) -> str:
        """The Hub's url; empty for huggingface.co."""
        endpoint = (await self._hub()).endpoint
        return "" if endpoint == ENDPOINT else endpoint

    async def listdir(self, url: str) -> list[ObjectInfo]:
        """The entries of a directory of a repository, sorted by name; a directory has size 0 and a url ending in "/".

        FetchError if the pages don't end within ``max_listed_entries``.
        """
        listing: Listing[URL] = Listing(self._config.max_listed_entries)
        directory = HubFile.parse(url)
        first = await self._http.persist(url, partial(self._tree, directory))
        page: URL | None = first.url
        while page is not None:
            address = replace(first, url=page)
            page = await self._http.persist(url, partial(self._page, listing, address, url.rstrip("/"), directory))
        if directory.is_in_bucket and directory.path and not listing.infos:
            raise NotFound("the bucket has nothing below this path", url=url)
        return await run_sync(listing.sorted)

    async def _page(self, listing: Listing[URL], address: Address, base: str, directory: HubFile) -> URL | None:
        """Add the page at ``address``; returns the next page's url, None after the last."""
        reply = await self._http.ask("GET", address, self)
        with reply.is_judged():
            infos = await run_sync(_parse_tree, reply.body, base, directory)
            following = _next_page(reply.headers, address.url)
            listing.add(infos, asked=address.url, following=following)
        return following

    async def _tree(self, directory: HubFile) -> Address:
        hub = await self._hub()
        if directory.is_in_bucket:
            prefix = f"/{quote(directory.path, safe='')}" if directory.path else ""
            return hub.address(f"/api/buckets/{quote(directory.repository)}/tree{prefix}")
        path = f"/{quote(directory.path)}" if directory.path else ""
        return hub.address(directory.api_path("tree", await self._commit(directory), path))

    async def _find(self, url: str) -> CachedValue[Address]:
        file = HubFile.parse(url)
        if not file.path:
            raise ConfigError(f"{redact_url(url)!r} names a repository and no file: add its path")
        hub = await self._hub()
        asked = hub.address(file.file_path("" if file.is_in_bucket else await self._commit(file)))
        reply = await self._http.ask("HEAD", asked, self)
        etag = reply.headers.get("X-Linked-Etag") or reply.headers.get("ETag")
        version_header = None
        if file.is_in_bucket:
            version_header = _CONTENT_HASH
            with reply.is_judged():
                if version_header not in reply.headers:
                    raise _no_hub(f"the Hub's answer for a bucket's file has no {version_header}")
            etag = f'"{reply.headers[version_header]}"'
        at_hub = Address(reply.url, hub.headers, is_named=True, etag=etag, version_header=version_header)
        if reply.target is None:
            return CachedValue(at_hub)
        served_at = date_seconds(reply.headers.get("Date"))  # by the Hub's clock, since ours may be wrong
        seconds = signed_seconds(reply.target, served_at=self._wall() if served_at is None else served_at)
        if "X-Xet-Signed-Range" in reply.target.query:
            return CachedValue(at_hub)  # valid for one range only, so every range asks the Hub
        return CachedValue(Address(reply.target, etag=etag), UNSIGNED_SECONDS if seconds is None else seconds)

    async def _commit(self, file: HubFile) -> str:
        if _COMMIT.fullmatch(file.revision):
            return file.revision
        return await self._commits.get((file.kind, file.repository, file.revision), partial(self._find_commit, file))

    async def _find_commit(self, file: HubFile) -> CachedValue[str]:
        hub = await self._hub()
        reply = await self._http.ask("GET", hub.address(file.api_path("revision", file.revision)), self)
        with reply.is_judged():
            answer = await run_sync(_parse_json, reply.body)
            commit = answer.get("sha") if isinstance(answer, dict) else None
            if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
                raise _no_hub("the Hub doesn't say which commit the revision is")
        return CachedValue(commit)

    async def _hub(self) -> _Hub:
        return await self._hubs.get(None, self._find_hub)

    async def _find_hub(self) -> CachedValue[_Hub]:
        variables = dict(os.environ) if self._config.trust_env else {}
        url = parse_url(self._config.hub_endpoint or variables.get("HF_ENDPOINT") or ENDPOINT)
        if userinfo(url) is not None or url.query_string:
            raise ConfigError("the Hub's endpoint must not hold a password or a query: set HF_TOKEN")
        token = await run_sync(_token, variables) if self._config.trust_env else None
        if token is not None:
            require_token("HF_TOKEN, or what `hf auth login` has written down,", token)
        tokens = {} if token is None else {f"{url.host}:{url.port}": token}
        # The configuration's own login for the host has precedence over the environment's.
        own = static_headers(url, is_named=True, headers=self._config.headers, tokens=self._config.tokens, login=None)
        named = any(name.lower() == "authorization" for name in own)
        self._has_token = token is not None and not named
        headers = {} if named else static_headers(url, is_named=True, headers={}, tokens=tokens, login=None)
        return CachedValue(_Hub(str(url).rstrip("/"), headers))


def _token(variables: Mapping[str, str]) -> str | None:
    """HF_TOKEN, or the token of ``hf auth login``. Blocks."""
    if variables.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return None
    token = _stripped(variables.get("HF_TOKEN") or variables.get("HUGGING_FACE_HUB_TOKEN") or "")
    if token:
        return token
    cache = variables.get("XDG_CACHE_HOME") or "~/.cache"
    home = variables.get("HF_HOME") or f"{cache}/huggingface"
    try:
        text = Path(variables.get("HF_TOKEN_PATH") or f"{home}/token").expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError, RuntimeError):  # RuntimeError: there is no home
        return None
    return _stripped(text) or None


def _stripped(token: str) -> str:
    """The token without whitespace around it, as in huggingface_hub."""
    return token.replace("\r", "").replace("\n", "").strip()


def signed_seconds(url: URL, *, served_at: float) -> float | None:
    """Seconds after ``served_at`` at which the signature in the url's query expires; None without an expiry.

    That is in seconds since the epoch, by the signer's clock. Known are S3 and GCS (date and lifetime) and CloudFront
    (``Expires``, or ``DateLessThan`` in a ``Policy``).
    """
    query = url.query
    ends: list[float] = []
    for vendor in ("Amz", "Goog"):
        date, life = query.get(f"X-{vendor}-Date"), query.get(f"X-{vendor}-Expires", "")
        if date is not None and life.isascii() and life.isdigit():
            try:
                signed_at = datetime.strptime(date, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
                ends.append(signed_at.timestamp() + float(life[:9]))
            except ValueError:
                pass
    expires = query.get("Expires", "")
    if expires.isascii() and expires.isdigit():
        ends.append(float(expires[:12]))
    if "Policy" in query:
        ends += _policy_ends(query["Policy"])
    return max(0.0, min(ends) - served_at) if ends else None


def _policy_ends(policy: str) -> list[float]:
    text = policy.translate(str.maketrans("-_~", "+=/"))  # CloudFront's own base64
    try:
        statements = json.loads(base64.b64decode(text, validate=True))["Statement"]
        ends = [float(one["Condition"]["DateLessThan"]["AWS:EpochTime"]) for one in statements]
    except (binascii.Error, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return []
    return [end for end in ends if math.isfinite(end)]


def _no_hub(message: str) -> AttemptFailed:
    return AttemptFailed(InvalidResponse, f"{message}: does HF_ENDPOINT lead to a Hub?", RetryVerdict.ONCE)


def _parse_json(body: bytes) -> Any:  # noqa: ANN401 - anything can stand there
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _no_hub(f"the Hub's answer is no JSON ({type(error).__name__})") from error


def _parse_tree(body: bytes, base: str, directory: HubFile) -> list[ObjectInfo]:
    """The entries of a page, with urls below ``base``."""
    entries = _parse_json(body)
    message = "the Hub's listing isn't one of the directory's files and directories"
    if not isinstance(entries, list):
        raise _no_hub(message)
    above = f"{directory.path}/" if directory.path else ""
    try:
        if directory.is_in_bucket:  # its listing has all names with this prefix, such as "pathological" for "path"
            entries = [entry for entry in entries if entry["path"].startswith(above)]
        return [_entry(entry, base, above) for entry in entries]
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise _no_hub(message) from error


def _entry(entry: Any, base: str, above: str) -> ObjectInfo:  # noqa: ANN401 - what the server says
    path = entry["path"]
    name = path.removeprefix(above)
    if not path.startswith(above) or "/" in name or name in {"", ".", ".."}:
        raise ValueError("an entry that isn't directly below the directory")
    if entry["type"] == "directory":
        return ObjectInfo(f"{base}/{name}/", 0)
    version = entry["xetHash"] if "xetHash" in entry and "oid" not in entry else entry.get("lfs", entry)["oid"]
    if not isinstance(version, str):
        raise TypeError("an oid is text")
    return ObjectInfo(f"{base}/{name}", listed_size(entry["size"]), f'"{version}"')


def _next_page(headers: Mapping[str, str], asked: URL) -> URL | None:
    link = _NEXT.search(headers.get("Link", ""))
    if link is None:
        return None
    target = next_url(asked, link[1])
    if origin_of(target) != origin_of(asked):
        raise _no_hub("the next page of the listing lies on another host, and is not followed")
    return target
