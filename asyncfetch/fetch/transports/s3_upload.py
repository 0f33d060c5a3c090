"""Objects put into S3 and into compatible stores: whole, or in parts of a multipart upload.

S3 shows an object whole or not at all. But it doesn't clean up: the parts of an unfinished upload stay, and cost money.
So an upload that was begun is always completed or aborted.
"""

from __future__ import annotations

import hashlib
import logging
import re
from base64 import b64encode
from functools import partial
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import anyio

from asyncfetch.errors import AccessDenied, AsyncFetchError, FetchError, FetchTimeout, InvalidResponse, NotFound
from asyncfetch.fetch.limiter import one_caller
from asyncfetch.fetch.retry import AttemptFailed, RetryVerdict
from asyncfetch.ranges import ObjectInfo
from asyncfetch.runtime.cancellation import outlast
from asyncfetch.runtime.concurrently import ungrouped
from asyncfetch.runtime.threads import run_sync

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

    from asyncfetch.config import S3Config
    from asyncfetch.fetch.transports.http import HttpTransport, Response
    from asyncfetch.fetch.upload_sources import UploadSource

MAX_PARTS = 10_000
"""Bound on the parts of one upload; S3's limit."""
PARTS_IN_FLIGHT = 4
"""Parts of one object in flight at a time, while the next is read."""
MAX_ANSWER_BYTES = 16 * 1024
"""Bound on an answer that is parsed on the loop, which takes 1 ms. Answers to writes have less than 1 KiB."""
PIECE_BYTES = 128 * 1024
"""Bytes given to the connection at once: each piece restarts the store's time to answer."""
UNDO_SECONDS = 5.0
"""Longest wait of a cancelled caller for the abort of its upload, and before that for the upload's id. S3 answers
within 0.2 s."""
_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')
_OWN_KEYS = re.compile(r"aws:kms(:dsse)?")

_REFUSALS: Mapping[str, tuple[type[FetchError], RetryVerdict, str]] = {
    "AccessDenied": (
        AccessDenied,
        RetryVerdict.FATAL,
        "these credentials may not write there: they need s3:PutObject and s3:AbortMultipartUpload",
    ),
    "BadDigest": (InvalidResponse, RetryVerdict.AGAIN, "other bytes arrived than were sent"),
    "EntityTooLarge": (FetchError, RetryVerdict.FATAL, "too long for the store: set S3Config(upload_part_bytes=...)"),
    "EntityTooSmall": (
        FetchError,
        RetryVerdict.FATAL,
        "the store wants longer parts: raise S3Config(upload_part_bytes=...)",
    ),
    "NoSuchBucket": (NotFound, RetryVerdict.FATAL, "there is no such bucket: make it, or check the url"),
    "NoSuchUpload": (NotFound, RetryVerdict.FATAL, "the multipart upload is gone: a client or a rule aborted it"),
    "OperationAborted": (FetchError, RetryVerdict.AGAIN, "another client writes the same object"),
    "RequestTimeout": (FetchTimeout, RetryVerdict.AGAIN, "the store gave up waiting for our bytes"),
}
"""Meanings of refused writes, by their code, if the status doesn't say enough."""

_log = logging.getLogger(__name__)


class S3Upload:
    """An upload of one object, whose url the user wrote so.

    ``ask`` sends a signed request: of a method, an operation and its parameters, perhaps with headers and a body.
    ``http`` repeats it.
    """

    def __init__(
        self,
        url: str,
        bucket: str,
        key: str,
        config: S3Config,
        ask: Callable[..., Awaitable[Response]],
        http: HttpTransport,
    ) -> None:
        self._url = url
        self._place = {"Bucket": bucket, "Key": key}
        self._config = config
        self._ask = ask
        self._persist = http.persist
        self._id: str | None = None
        self._tags: dict[int, str] = {}
        self._size = 0

    async def put(self, source: UploadSource) -> ObjectInfo:
        """Put the source. Errors and cancellations leave the former object, and no unfinished upload.

        But where the error is that other bytes were stored, these may be the object now, if it took one request.
        """
        part_bytes = self._config.upload_part_bytes
        if source.size is not None:
            part_bytes = max(part_bytes, -(-source.size // MAX_PARTS))
        parts = [await source.read(part_bytes)]
        if source.at_end:
            return ObjectInfo(self._url, len(parts[0]), await self._send("put_object", {}, parts[0]))
        try:
            await self._persist(self._url, self._begin)
            await self._send_parts(source, parts, part_bytes)
            return ObjectInfo(self._url, self._size, await self._complete())
        except BaseException:
            await outlast(self._abort, seconds=UNDO_SECONDS)
            raise

    async def _send(self, operation: str, parameters: Mapping[str, str | int], content: memoryview) -> str:
        """Send the bytes; returns the store's tag of them."""
        digest = await run_sync(_md5, content)
        headers = {"Content-Length": str(len(content)), "Content-MD5": b64encode(digest).decode()}

        def body() -> Iterator[memoryview]:
            return (content[start : start + PIECE_BYTES] for start in range(0, len(content), PIECE_BYTES))

        take = partial(_checked_tag, digest)
        return await self._persist(
            self._url, partial(self._attempt, "PUT", operation, parameters, take, headers=headers, body=body)
        )

    async def _begin(self) -> None:
        """Begin the upload. A cancelled caller waits for its id, by which it is aborted."""

        async def attempt() -> None:
            self._id = await self._attempt("POST", "create_multipart_upload", {}, partial(_text_of, "UploadId"))

        await outlast(attempt, seconds=UNDO_SECONDS)

    async def _send_parts(self, source: UploadSource, parts: list[memoryview], part_bytes: int) -> None:
        """Send all of the source, PARTS_IN_FLIGHT at a time while the next is read.

        ``parts`` has the first part, and is emptied, so that no part is kept in memory.
        """
        permits = anyio.Semaphore(PARTS_IN_FLIGHT)

        async def send(number: int, part: memoryview) -> None:
            parameters: dict[str, str | int] = {"PartNumber": number, "UploadId": self._id or ""}
            try:
                self._tags[number] = await self._send("upload_part", parameters, part)
            finally:
                permits.release()

        number = 0
        failure: Exception | None = None
        with one_caller(), ungrouped():
            async with anyio.create_task_group() as tasks:
                while parts:
                    number += 1
                    if number > MAX_PARTS:
                        raise self._too_long(part_bytes)
                    await permits.acquire()
                    part = parts.pop()
                    self._size += len(part)
                    tasks.start_soon(send, number, part)
                    del part
                    if source.at_end:
                        break
                    try:
                        parts.append(await source.read(part_bytes))
                    except Exception as error:  # noqa: BLE001 - raised below, since it may be a group itself
                        failure = error
                        tasks.cancel_scope.cancel()
        if failure is not None:
            try:
                raise failure
            finally:
                failure = None  # else failure -> traceback -> this frame -> failure is a cycle

    async def _complete(self) -> str:
        """Join the parts to the object; returns its tag."""
        tags = [self._tags[number] for number in range(1, len(self._tags) + 1)]
        text = await run_sync(_completion, tags)
        headers = {"Content-Length": str(len(text)), "Content-Type": "application/xml"}
        take = partial(_text_of, "ETag")

        async def attempt() -> str:
            try:
                return await self._attempt(
                    "POST", "complete_multipart_upload", self._upload, take, headers=headers, body=lambda: [text]
                )
            except AttemptFailed as failure:
                if failure.kind is not NotFound:
                    raise
                return await self._completed_before(failure, _tag_of_parts(tags))

        return await self._persist(self._url, attempt)

    async def _completed_before(self, failure: AttemptFailed, tag: str | None) -> str:
        """``tag``, if the upload is gone because it was completed, and the answer was lost; else the failure."""
        try:
            reply = await self._ask("GET", "get_object", self._place, headers={"Range": "bytes=0-0"})
        except AttemptFailed:
            raise failure from None
        if tag is None or reply.headers.get("ETag") != tag:
            raise failure
        return tag

    @property
    def _upload(self) -> dict[str, str]:
        return {**self._place, "UploadId": self._id or ""}

    async def _abort(self) -> None:
        """Abort the upload, if there is one; logs an error of that."""
        if self._id is None:
            return
        reason: AsyncFetchError | str = f"no answer within {UNDO_SECONDS:g} s"
        with anyio.move_on_after(UNDO_SECONDS):
            try:
                await self._persist(self._url, partial(self._ask, "DELETE", "abort_multipart_upload", self._upload))
            except NotFound:
                return  # it was aborted already
            except AsyncFetchError as error:
                reason = error
            else:
                return
        _log.warning("a multipart upload to %s is left, and paid for: abort it by hand (%s)", self._url, reason)

    async def _attempt(
        self,
        method: str,
        operation: str,
        parameters: Mapping[str, str | int],
        take: Callable[[Response], str],
        **options: Any,  # noqa: ANN401 - ``ask``'s
    ) -> str:
        """``take(answer)`` of a request that writes; AttemptFailed with the refusal's meaning."""
        try:
            reply = await self._ask(method, operation, {**self._place, **parameters}, **options)
        except AttemptFailed as failure:
            code = failure.headers.get("X-Error-Code", "")
            if code in _REFUSALS:
                failure.kind, failure.verdict, message = _REFUSALS[code]
                failure.message = f"{message} ({code})"
            raise
        with reply.is_judged():
            return take(reply)

    def _too_long(self, part_bytes: int) -> FetchError:
        message = (
            f"the source is longer than {MAX_PARTS} parts of {part_bytes} bytes, the most that S3 takes: raise"
            " S3Config(upload_part_bytes=...)"
        )
        return FetchError(message, url=self._url)


def _md5(content: memoryview) -> bytes:
    return hashlib.md5(content, usedforsecurity=False).digest()


def _checked_tag(digest: bytes, reply: Response) -> str:
    """The tag of the stored bytes; AttemptFailed if the store has other bytes than were sent.

    It is their MD5, unless they are encrypted with special keys, or the store has other tags; then the digest in the
    request, which the store checks, has to suffice.
    """
    headers = reply.headers
    tag = headers.get("ETag")
    if tag is None:
        message = "the store doesn't say what it has stored (no ETag): is the endpoint right?"
        raise AttemptFailed(InvalidResponse, message, RetryVerdict.ONCE)
    if "x-amz-server-side-encryption-customer-algorithm" in headers:
        return tag
    if _OWN_KEYS.fullmatch(headers.get("x-amz-server-side-encryption", "")):
        return tag
    match = _MD5.fullmatch(tag)
    if match is not None and match[1] != digest.hex():
        message = f"the store has stored other bytes than were sent: its ETag is {tag}, their MD5 {digest.hex()}"
        raise AttemptFailed(InvalidResponse, message, RetryVerdict.ONCE)
    return tag


def _tag_of_parts(tags: list[str]) -> str | None:
    """S3's tag of an object of these parts; None if the store's tags aren't S3's."""
    digests = [match[1] for tag in tags if (match := _MD5.fullmatch(tag)) is not None]
    if len(digests) < len(tags):
        return None
    return f'"{_md5(memoryview(bytes.fromhex("".join(digests)))).hex()}-{len(tags)}"'


def _completion(tags: list[str]) -> bytes:
    """The request's body. Runs in a thread: there may be 10,000 tags."""
    root = ET.Element("CompleteMultipartUpload", xmlns=_NAMESPACE)
    for number, tag in enumerate(tags, 1):
        part = ET.SubElement(root, "Part")
        ET.SubElement(part, "PartNumber").text = str(number)
        ET.SubElement(part, "ETag").text = tag
    text: bytes = ET.tostring(root, encoding="utf-8")
    return text


def _text_of(name: str, reply: Response) -> str:
    """The text of ``name`` in an answer of XML; AttemptFailed without one.

    An answer of 200 may contain an error: S3 begins some answers before it knows the outcome.
    """
    try:
        root = ET.fromstring(reply.body[:MAX_ANSWER_BYTES])  # a truncated answer can't be parsed
    except (ET.ParseError, LookupError, ValueError) as error:  # LookupError: of an encoding
        message = f"the store's answer is none of S3 ({error}): is the endpoint right?"
        raise AttemptFailed(InvalidResponse, message, RetryVerdict.ONCE) from error
    if root.tag == "Error":
        code = root.findtext("Code", "")[:80]
        kind, verdict, message = _REFUSALS.get(code, (FetchError, RetryVerdict.AGAIN, "the store couldn't do it"))
        raise AttemptFailed(kind, f"{message} ({code})", verdict)
    text = root.findtext(f"{{*}}{name}", "")
    if not text:
        message = f"the store's answer has no {name}: is the endpoint right?"
        raise AttemptFailed(InvalidResponse, message, RetryVerdict.ONCE)
    return text
