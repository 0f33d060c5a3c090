"""Objects put into S3 and into stores that speak like it: whole, or in parts of a multipart upload.

An object is there whole or not at all, that much S3 promises. What it doesn't do is to clean up: the parts of an upload
that nobody completes stay, and are paid for. So whatever happens once an upload was begun, it is completed or aborted.

The signer's client could upload, too, but past all that other requests have: the host's limit, its counters, the
retries, the connections. So it only signs.
"""

from __future__ import annotations

import hashlib
import logging
import re
from base64 import b64encode
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar
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
    from asyncfetch.fetch.transports.http import Body, Response
    from asyncfetch.fetch.upload_sources import UploadSource

MAX_PARTS = 10_000
"""Bound on the parts of one upload; S3's limit."""
PARTS_IN_FLIGHT = 4
"""Parts of one object on their way at a time; the next one is read meanwhile."""
MAX_ANSWER_BYTES = 16 * 1024
"""Bound on what is parsed on the loop, which takes 1 ms. An answer to something written has less than 1 KiB."""
PIECE_BYTES = 128 * 1024
"""Handed to the connection at once: with each of them, the time that the store has to answer starts anew."""
UNDO_SECONDS = 5.0
"""Seconds that a cancelled caller waits at most until its upload is aborted, and before that for the answer that says
which one it is. S3 answers within 0.2 s."""
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
    "NoSuchUpload": (NotFound, RetryVerdict.FATAL, "the multipart upload is gone: somebody, or a rule, has aborted it"),
    "OperationAborted": (FetchError, RetryVerdict.AGAIN, "somebody else writes the same object"),
    "RequestTimeout": (FetchTimeout, RetryVerdict.AGAIN, "the store gave up waiting for our bytes"),
}
"""The meaning that refusals of something written mean, where that is more than their status says."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


class SignedRequest(Protocol):
    """One request for an operation on an object, signed."""

    async def __call__(
        self,
        method: str,
        operation: str,
        parameters: Mapping[str, str | int],
        *,
        headers: Mapping[str, str] | None = None,
        body: Body | None = None,
    ) -> Response:
        """Its answer; AttemptFailed where there is none, or one of 400 or above."""
        ...


class Persist(Protocol):
    """A call that repeats an attempt and returns what it brings in the end."""

    async def __call__(self, url: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Make as many attempts as the policy allows, else FetchError."""
        ...


class S3Upload:
    """One object's way into its bucket.

    Args:
        url: As the user wrote it.
        bucket: Of the object.
        key: Of the object.
        config: Says how long parts are, and how many are under way.
        ask: Sends a request.
        persist: Repeats it.
    """

    def __init__(self, url: str, bucket: str, key: str, config: S3Config, ask: SignedRequest, persist: Persist) -> None:
        self._url = url
        self._place = {"Bucket": bucket, "Key": key}
        self._config = config
        self._ask = ask
        self._persist = persist
        self._id: str | None = None
        self._tags: dict[int, str] = {}
        self._size = 0

    async def put(self, source: UploadSource) -> ObjectInfo:
        """The object that the source is now. Errors and cancellations leave the one before, and no upload behind.

        Raises:
            FetchError: The store refuses it, can't be reached, or has stored other bytes; the latter may be the object
                then, if it was short enough for one request.
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
        """Sends the bytes; the tag that the store has for them."""
        digest = await run_sync(_md5, content)
        headers = {"Content-Length": str(len(content)), "Content-MD5": b64encode(digest).decode()}

        def body() -> Iterator[memoryview]:
            return (content[start : start + PIECE_BYTES] for start in range(0, len(content), PIECE_BYTES))

        take = partial(_checked_tag, digest)
        return await self._persist(
            self._url, partial(self._attempt, "PUT", operation, parameters, take, headers=headers, body=body)
        )

    async def _begin(self) -> None:
        """One attempt, whose answer a cancelled caller waits for: it says which upload is to be aborted."""

        async def attempt() -> None:
            self._id = await self._attempt("POST", "create_multipart_upload", {}, partial(_text_of, "UploadId"))

        await outlast(attempt, seconds=UNDO_SECONDS)

    async def _send_parts(self, source: UploadSource, parts: list[memoryview], part_bytes: int) -> None:
        """All of the source, so many parts at a time and one more that is read.

        ``parts`` has what was read of it already, and is emptied: nobody else may keep a part in memory.
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
                    except Exception as error:  # noqa: BLE001 - raised below, as it is: it may be a group of its own
                        failure = error
                        tasks.cancel_scope.cancel()
        if failure is not None:
            try:
                raise failure
            finally:
                failure = None  # else failure -> traceback -> this frame -> failure is a cycle

    async def _complete(self) -> str:
        """Makes the object of the parts; its tag."""
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
        """``tag``, where the upload is gone because an answer that it was completed was lost; else the failure."""
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
        """Removes the upload, if there is one; an error of that is nobody's but the log's."""
        if self._id is None:
            return
        reason: AsyncFetchError | str = f"no answer within {UNDO_SECONDS:g} s"
        with anyio.move_on_after(UNDO_SECONDS):
            try:
                await self._persist(self._url, partial(self._ask, "DELETE", "abort_multipart_upload", self._upload))
            except NotFound:
                return  # it is gone already
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
        *,
        headers: Mapping[str, str] | None = None,
        body: Body | None = None,
    ) -> str:
        """Return what ``take`` makes of the answer to a request that writes; AttemptFailed says what it means."""
        try:
            reply = await self._ask(method, operation, {**self._place, **parameters}, headers=headers, body=body)
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
    """The tag of what is stored; AttemptFailed where the answer says that other bytes are than were sent.

    It is the MD5 of what is stored, unless that is encrypted with keys of its own, or the store has tags of another
    kind; then the digest that was sent along has to do, which the store has checked.
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
    """Return what S3 calls an object of these parts; None where their own tags aren't S3's."""
    digests = [match[1] for tag in tags if (match := _MD5.fullmatch(tag)) is not None]
    if len(digests) < len(tags):
        return None
    return f'"{_md5(memoryview(bytes.fromhex("".join(digests)))).hex()}-{len(tags)}"'


def _completion(tags: list[str]) -> bytes:
    """Runs in a thread: there may be 10,000 of them."""
    root = ET.Element("CompleteMultipartUpload", xmlns=_NAMESPACE)
    for number, tag in enumerate(tags, 1):
        part = ET.SubElement(root, "Part")
        ET.SubElement(part, "PartNumber").text = str(number)
        ET.SubElement(part, "ETag").text = tag
    text: bytes = ET.tostring(root, encoding="utf-8")
    return text


def _text_of(name: str, reply: Response) -> str:
    """Return what the answer, a few lines of XML, says under ``name``; AttemptFailed where it doesn't.

    An answer of 200 may turn out to be an error: S3 begins some before it knows how they end.
    """
    try:
        root = ET.fromstring(reply.body[:MAX_ANSWER_BYTES])  # what is cut off can't be parsed
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
