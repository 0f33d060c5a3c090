"""A Hugging Face Hub on loopback: revisions, redirects to a CDN that checks signatures, and a quota."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote

from asyncfetch.testing.contents import ContentAnswer, answer_status
from asyncfetch.testing.server import RangeServer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncfetch.testing.faults import Fault, FaultRule, ServedRequest
    from asyncfetch.testing.server import Receive

WINDOW_SECONDS = 300
"""The Hub's quotas are for windows of this length."""
_PREFIXED = {"datasets", "spaces", "buckets"}
"""Kinds of repositories with a prefix in their urls."""
_UPLOADED_AT = "2026-01-02T03:04:05.000Z"


class HubServer(RangeServer):
    """Repositories, on the Hub's own server, which this is, and on a CDN at another origin.

        with HubServer() as hub:
            hub.push("datasets/org/name", {"data.bin": bytes(1000)})
            config = FetchConfig(ca_file=hub.ca_file, hub_endpoint=hub.url)
            ...  # hf://datasets/org/name/data.bin

    The Hub resolves revisions to commits, lists branches, lists trees by pages, serves small files itself and redirects
    to the CDN for others; urls of the CDN are signed and expire. Buckets ("buckets/org/name") have no revisions, and
    all their files are at the CDN.

    Args:
        token: The Hub's bearer token; None for no token. The CDN refuses requests that carry one.
        lfs_bytes: Files from this size on are at the CDN.
        url_seconds: Seconds for which a url of the CDN is valid.
        resolver_quota: ``/resolve/`` requests in five minutes; above it, 429 and RateLimit.
        page_entries: Entries in one page of a tree.
        tls: Whether to speak TLS.
        fault: Chooses faults of the Hub.
        cdn_fault: Chooses faults of the CDN.
    """

    def __init__(
        self,
        *,
        token: str | None = None,
        lfs_bytes: int = 100,
        url_seconds: float = 3600.0,
        resolver_quota: int | None = None,
        page_entries: int = 1000,
        tls: bool = True,
        fault: FaultRule | None = None,
        cdn_fault: FaultRule | None = None,
    ) -> None:
        self._served: dict[str, bytes] = {}
        super().__init__(self._served, tls=tls, fault=fault)
        self.token = token
        self.lfs_bytes = lfs_bytes
        self.url_seconds = url_seconds
        self.quota_left = resolver_quota
        self.page_entries = page_entries
        self.clock_seconds = 0.0
        """Seconds that the servers' clocks are ahead of the real one: lets urls expire without waiting."""
        self._commits: dict[str, Mapping[str, bytes]] = {}
        self._branches: dict[tuple[str, str], str] = {}
        self._blobs: dict[str, bytes] = {}
        self._secret = secrets.token_bytes(16)
        self.cdn: RangeServer = _Cdn(self, tls=tls, fault=cdn_fault)

    @property
    def hub(self) -> RangeServer:
        """The Hub's own server."""
        return self

    @property
    def now(self) -> float:
        """Seconds since the epoch, by the servers' clocks."""
        return time.time() + self.clock_seconds

    def push(self, repository: str, files: Mapping[str, bytes], revision: str = "main") -> str:
        """Make ``files`` the content of a branch of "datasets/org/name", or of a bucket; returns the commit."""
        text = json.dumps([repository, sorted((path, _sha(content)) for path, content in files.items())])
        commit = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        self._commits[f"{repository}@{commit}"] = dict(files)
        self._branches[repository, revision] = commit
        self._blobs |= {f"blobs/{_sha(content)}": content for content in files.values()}
        return commit

    def revoke(self) -> None:
        """Invalidate all urls of the CDN signed so far."""
        self._secret = secrets.token_bytes(16)

    def files(self, repository: str, revision: str) -> tuple[str, Mapping[str, bytes]] | None:
        """The commit of the revision and its files; None for an unknown revision."""
        commit = self._branches.get((repository, revision), revision)
        files = self._commits.get(f"{repository}@{commit}")
        return None if files is None else (commit, files)

    def branches(self, repository: str) -> dict[str, str]:
        """The commit of each branch."""
        return {branch: commit for (of, branch), commit in self._branches.items() if of == repository}

    def signature(self, path: str, expires: int) -> str:
        """The signature of a url of the CDN."""
        return hmac.new(self._secret, f"{path} {expires}".encode(), hashlib.sha256).hexdigest()

    async def _open(self) -> None:
        await self.cdn._open()
        await super()._open()

    async def _close(self) -> None:
        await super()._close()
        await self.cdn._close()

    async def _answer(self, record: ServedRequest, fault: Fault, receive: Receive) -> ContentAnswer:
        if fault.answer_status is not None:
            return await super()._answer(record, fault, receive)
        wanted = None if self.token is None else f"Bearer {self.token}"
        if wanted is not None and record.headers.get("Authorization") != wanted:
            return answer_status(401, record.method, {"X-Error-Code": "RepoNotFound"})
        parts = [unquote(part) for part in record.target.partition("?")[0].strip("/").split("/")]
        if parts[0] == "api":
            return self._api(record, *parts[1:])
        if parts[0] == "buckets":
            parts.insert(4, "main")
        repository = "/".join(parts[:3]) if parts[0] in _PREFIXED else f"models/{'/'.join(parts[:2])}"
        parts = parts[3:] if parts[0] in _PREFIXED else parts[2:]
        if len(parts) < 3 or parts[0] != "resolve":
            return answer_status(404, record.method)
        return await self._resolve(record, fault, receive, repository, parts[1], "/".join(parts[2:]))

    async def _resolve(
        self, record: ServedRequest, fault: Fault, receive: Receive, repository: str, revision: str, path: str
    ) -> ContentAnswer:
        found = self.files(repository, revision)
        if found is None:
            return answer_status(404, record.method, {"X-Error-Code": "RevisionNotFound"})
        if self.quota_left is not None:
            if self.quota_left <= 0:
                return answer_status(429, record.method, {"RateLimit": f'"resolvers";r=0;t={WINDOW_SECONDS}'})
            self.quota_left -= 1
        commit, files = found
        if path not in files:
            return answer_status(404, record.method, {"X-Error-Code": "EntryNotFound"})
        described = {"X-Repo-Commit": commit, "X-Linked-Etag": f'"{_sha(files[path])}"'}
        if repository.startswith("buckets/"):
            described["X-Xet-Hash"] = _content_hash(files[path])
        if len(files[path]) >= self.lfs_bytes or "X-Xet-Hash" in described:
            described["X-Linked-Size"] = str(len(files[path]))
            return ContentAnswer(302, {**described, "Location": self._signed(files[path]), "Content-Length": "0"})
        self._served[record.path] = files[path]
        answer = await super()._answer(record, fault, receive)
        return replace(answer, headers={**answer.headers, **described})

    def _signed(self, content: bytes) -> str:
        path, expires = f"/blobs/{_sha(content)}", int(self.now + self.url_seconds)
        signature = self.signature(path, expires)
        return f"{self.cdn.url}{path}?Expires={expires}&Signature={signature}&Key-Pair-Id=K1"

    def _api(self, record: ServedRequest, *parts: str) -> ContentAnswer:
        """``KIND/org/name/revision/REVISION``, ``.../tree/REVISION[/path]``, ``.../refs``; of a bucket ``.../tree``."""
        if parts[3:] == ("refs",):
            branches = self.branches("/".join(parts[:3]))
            named = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": sha} for name, sha in branches.items()]
            return _json({"branches": named, "converts": [], "tags": []})
        if parts[0] == "buckets":
            parts = (*parts[:4], "main", *parts[4:])
        found = self.files("/".join(parts[:3]), parts[4]) if len(parts) >= 5 else None
        if found is None:
            return answer_status(404, record.method, {"X-Error-Code": "RevisionNotFound"})
        commit, files = found
        if parts[3] == "revision":
            return _json({"id": "/".join(parts[1:3]), "sha": commit})
        path, _, text = record.target.partition("?")
        query = parse_qs(text)
        directory = "".join(f"{part}/" for part in parts[5:])
        if parts[0] == "buckets":
            directory, entries = "", _bucket_entries(files, directory.removesuffix("/"))
        else:
            is_recursive = query.get("recursive", [""])[0].lower() == "true"
            entries = _entries(files, directory, self.lfs_bytes, is_recursive=is_recursive)
        if directory and not entries:
            return answer_status(404, record.method, {"X-Error-Code": "EntryNotFound"})
        start = int(query.get("cursor", ["0"])[0])
        stop = start + self.page_entries
        again = "&recursive=true" if "recursive" in query else ""
        following = f'<{self.url}{path}?cursor={stop}{again}>; rel="next"'
        return _json(entries[start:stop], {"Link": following} if stop < len(entries) else {})


class _Cdn(RangeServer):
    def __init__(self, owner: HubServer, **options: Any) -> None:  # noqa: ANN401 - RangeServer's
        super().__init__(owner._blobs, **options)
        self._owner = owner

    async def _answer(self, record: ServedRequest, fault: Fault, receive: Receive) -> ContentAnswer:
        query = {name: values[0] for name, values in parse_qs(record.target.partition("?")[2]).items()}
        expires = int(query.get("Expires", "0"))
        signed = hmac.compare_digest(query.get("Signature", ""), self._owner.signature(record.path, expires))
        if fault.answer_status is None and ("Authorization" in record.headers or not signed):
            return answer_status(403, record.method)
        if fault.answer_status is None and self._owner.now > expires:
            return answer_status(403, record.method)
        return await super()._answer(record, fault, receive)


def _entries(files: Mapping[str, bytes], directory: str, lfs_bytes: int, *, is_recursive: bool) -> list[dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {}
    for path, content in sorted(files.items()):
        if not path.startswith(directory):
            continue
        names = path[len(directory) :].split("/")
        for depth in range(1, len(names) if is_recursive else min(len(names), 2)):
            below = directory + "/".join(names[:depth])
            entries[below] = {"type": "directory", "path": below, "size": 0, "oid": _sha(below.encode())[:40]}
        if len(names) > 1 and not is_recursive:
            continue
        entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": _sha(content)}
        if len(content) >= lfs_bytes:
            lfs = {"oid": _sha(content), "size": len(content), "pointerSize": 130}
            entry |= {"oid": _sha(content)[:40], "lfs": lfs}
        entries[path] = entry
    return list(entries.values())


def _bucket_entries(files: Mapping[str, bytes], prefix: str) -> list[dict[str, Any]]:
    """All entries that begin with the prefix, which is text rather than a directory's name, to the next slash."""
    entries: dict[str, dict[str, Any]] = {}
    for path, content in sorted(files.items()):
        below = path[len(prefix) :]
        if not path.startswith(prefix):
            continue
        stop = path.find("/", len(prefix) + below.startswith("/"))
        if stop >= 0:
            entries[path[: stop + 1]] = {"type": "directory", "path": path[:stop], "uploadedAt": _UPLOADED_AT}
        else:
            entry = {"type": "file", "path": path, "size": len(content), "xetHash": _content_hash(content)}
            entries[path] = {**entry, "mtime": _UPLOADED_AT, "uploadedAt": _UPLOADED_AT}
    return list(entries.values())


def _json(value: object, headers: Mapping[str, str] | None = None) -> ContentAnswer:
    body = json.dumps(value).encode()
    return ContentAnswer(
        200, {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}, text=body
    )


def _content_hash(content: bytes) -> str:
    """A hash other than the tag's, as in Xet."""
    return hashlib.sha256(b"xet" + content).hexdigest()


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
