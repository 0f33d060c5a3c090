"""A server that speaks as much S3 as reading and putting need, and verifies every signature."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from email.utils import formatdate
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote_plus, unquote_plus
from xml.sax.saxutils import escape

from asyncfetch.testing.s3_signature import Keys, Refusal, check_presigned
from asyncfetch.testing.s3_writing import Writing, tag_of, xml
from asyncfetch.testing.server import RangeServer
from asyncfetch.testing.server.contents import InMemory

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from asyncfetch.testing.s3_writing import Upload
    from asyncfetch.testing.server import Fault, ServedRequest
    from asyncfetch.testing.server.answers import Answer
    from asyncfetch.testing.server.contents import Contents, StoredObject
    from asyncfetch.testing.server.server import Receive

__all__ = ["S3Quirks", "S3Server"]

PAGE_KEYS = 1000
"""Keys in one page of a listing; what S3 sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Quirks:
    """What stores that speak like S3 do otherwise."""

    refuses_checksums: bool = False
    """Whether a request that names a checksum, as newer SDKs do by themselves, is an error; so at Backblaze B2, Qumulo
    and older MinIO."""
    requests_per_second: float | None = None
    """Answered; what comes above that is 503 SlowDown. B2 allows new accounts 500."""
    retry_after_seconds: int | None = None
    """Sent with SlowDown; B2 may or may not."""
    encodes_keys: bool = True
    """Whether listings know ``encoding-type=url``; a store that doesn't sends keys as they are."""
    sends_tokens: bool = True
    """Whether a listing of several pages says how to ask for the next one, as ListObjectsV2 does."""
    tells_size: bool = True
    """Whether a 416 has the object's size."""
    takes_any_digest: bool = False
    """Whether Content-MD5 is ignored."""
    min_part_bytes: int = 0
    """Of all parts of an upload but the last; S3's are 5 MiB."""
    wrong_region_status: int = 400
    """Of a refusal of another region's signature: 400 with the region in the body, or a redirect, 301 or 307, that has
    it in a header and leads nowhere."""


class S3Server(RangeServer):
    """A RangeServer of buckets, addressed by path, for presigned requests: GET, ListObjectsV2, PUT, multipart uploads.

    What is put lands in ``content``. ``uploads`` has what wasn't
    completed or aborted.
    Signatures, their expiry, region and session token are verified. Errors are S3's, XML bodies included; as there, a
    416 has no Content-Range. Faults come before all of that:

        with S3Server({"bucket/a.bin": bytes(1000)}) as server:
            config = FetchConfig(ca_file=server.ca_file, s3=S3Config(endpoint_url=server.url))
            ...  # with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY from server.keys

    Args:
        content: Objects by "bucket/key". Any bucket can be put to.
        keys: Whose signature counts; None serves everybody.
        region: Of buckets that aren't in ``regions``.
        regions: By bucket.
        requester_pays: Whether requests must carry ``x-amz-request-payer: requester``.
        page_keys: Keys in one page of a listing.
        quirks: What it does otherwise than S3.
        options: As RangeServer's.
    """

    def __init__(
        self,
        content: MutableMapping[str, bytes],
        *,
        keys: Keys | None = Keys(),  # noqa: B008 - frozen
        region: str = "us-east-1",
        regions: Mapping[str, str] | None = None,
        requester_pays: bool = False,
        page_keys: int = PAGE_KEYS,
        quirks: S3Quirks = S3Quirks(),
        **options: Any,  # noqa: ANN401 - RangeServer's
    ) -> None:
        super().__init__(content, **options)
        self.objects = content
        self.keys = keys
        self.clock_seconds = 0.0
        """What its clock is ahead of the real one: lets signatures expire, and a pause of ``requests_per_second`` end,
        without waiting."""
        self._region, self._regions = region, regions or {}
        self._requester_pays = requester_pays
        self._page_keys = page_keys
        self._quirks = quirks
        self._writing = Writing(content, takes_any_digest=quirks.takes_any_digest, min_part_bytes=quirks.min_part_bytes)
        self._allowance, self._allowed_at = quirks.requests_per_second or 0.0, time.monotonic()

    @property
    def uploads(self) -> Mapping[str, Upload]:
        """Multipart uploads that were begun and neither completed nor aborted, by id."""
        return self._writing.uploads

    def _open_contents(self) -> Contents:
        return InMemory(self.objects, tag_of)

    async def _answer(
        self, record: ServedRequest, fault: Fault, receive: Receive
    ) -> tuple[Answer, StoredObject | None]:
        answer, stored = await self._answer_as_s3(record, fault, receive)
        date = formatdate(time.time() + self.clock_seconds, usegmt=True)
        return replace(answer, headers={**answer.headers, "Date": date}), stored

    async def _answer_as_s3(
        self, record: ServedRequest, fault: Fault, receive: Receive
    ) -> tuple[Answer, StoredObject | None]:
        if fault.answer_status is not None:
            return await super()._answer(record, fault, receive)
        if self._is_too_fast():
            pause = self._quirks.retry_after_seconds
            answer = _error(Refusal(503, "SlowDown", "Please reduce your request rate."))
            headers = {} if pause is None else {"Retry-After": str(pause)}
            return replace(answer, headers={**answer.headers, **headers}), None
        refusal = self._refusal(record)
        if refusal is not None and refusal.region and self._quirks.wrong_region_status in {301, 307}:
            moved = _error(Refusal(self._quirks.wrong_region_status, "PermanentRedirect", "Use the right endpoint"))
            return replace(moved, headers={**moved.headers, "x-amz-bucket-region": refusal.region}), None
        if refusal is not None:
            return _error(refusal), None
        bucket, _, key = record.path.lstrip("/").partition("/")
        query = record.target.partition("?")[2]
        if not key and record.method == "GET":
            return self._list(bucket, query), None
        if record.method in {"PUT", "POST", "DELETE"}:
            body = _damaged(await receive(), fault)
            written = self._writing.answer(record.method, record.path.lstrip("/"), query, record.headers, body)
            return _error(written) if isinstance(written, Refusal) else written, None
        answer, stored = await super()._answer(record, fault, receive)
        if answer.status == 404:
            return _error(Refusal(404, "NoSuchKey", "The specified key does not exist.")), None
        if answer.status == 412:
            return _error(Refusal(412, "PreconditionFailed", "A precondition does not hold")), None
        if answer.status == 416 and stored is not None:
            size = f"<ActualObjectSize>{stored.version.size}</ActualObjectSize>" if self._quirks.tells_size else ""
            return _error(Refusal(416, "InvalidRange", "The requested range is not satisfiable"), size), None
        return answer, stored

    def _is_too_fast(self) -> bool:
        rate, now = self._quirks.requests_per_second, time.monotonic() + self.clock_seconds
        if rate is None:
            return False
        self._allowance = min(rate, self._allowance + (now - self._allowed_at) * rate)
        self._allowed_at = now
        if self._allowance < 1:
            return True
        self._allowance -= 1
        return False

    def _refusal(self, record: ServedRequest) -> Refusal | None:
        query = record.target.partition("?")[2]
        named = "checksum" in f"{query} {' '.join(record.headers)}".lower()
        if named and self._quirks.refuses_checksums:
            return Refusal(400, "InvalidArgument", "Unsupported header 'x-amz-sdk-checksum-algorithm'")
        bucket = record.path.lstrip("/").partition("/")[0]
        if self._requester_pays and record.headers.get("x-amz-request-payer") != "requester":
            return Refusal(403, "AccessDenied", "The requester must pay")
        if self.keys is None:
            return None
        if "Authorization" in record.headers and "X-Amz-Signature" in record.target:
            return Refusal(400, "InvalidArgument", "Only one auth mechanism allowed")
        return check_presigned(
            record.method,
            record.target,
            record.headers,
            keys=self.keys,
            region=self._regions.get(bucket, self._region),
            now=time.time() + self.clock_seconds,
        )

    def _list(self, bucket: str, query: str) -> Answer:
        asked = {name: values[0] for name, values in parse_qs(query, keep_blank_values=True).items()}
        prefix, delimiter, after = (asked.get(name, "") for name in ("prefix", "delimiter", "continuation-token"))
        keys = [
            path.lstrip("/").partition("/")[2] for path in self.objects if path.lstrip("/").startswith(f"{bucket}/")
        ]
        is_prefix = dict(_rolled_up(key, prefix, delimiter) for key in keys if key.startswith(prefix))
        page = sorted(name for name in is_prefix if name > unquote_plus(after))
        text = "".join(self._entry(bucket, name, is_prefix=is_prefix[name]) for name in page[: self._page_keys])
        truncated = len(page) > self._page_keys
        token = quote_plus(page[self._page_keys - 1]) if truncated and self._quirks.sends_tokens else ""
        return xml(
            200,
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"{'<EncodingType>url</EncodingType>' if self._quirks.encodes_keys else ''}"
            f"<IsTruncated>{str(truncated).lower()}</IsTruncated>"
            f"{f'<NextContinuationToken>{token}</NextContinuationToken>' if token else ''}{text}</ListBucketResult>",
        )

    def _entry(self, bucket: str, name: str, *, is_prefix: bool) -> str:
        encoded = quote_plus(name, safe="/") if self._quirks.encodes_keys else escape(name)
        if is_prefix:
            return f"<CommonPrefixes><Prefix>{encoded}</Prefix></CommonPrefixes>"
        size = len(self.objects[f"{bucket}/{name}"])
        return f"<Contents><Key>{encoded}</Key><Size>{size}</Size></Contents>"


def _rolled_up(key: str, prefix: str, delimiter: str) -> tuple[str, bool]:
    """The key, or what stands for all keys that have the next delimiter, too; and whether it is that."""
    below, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
    return (f"{prefix}{below}{found}", True) if found else (key, False)


def _error(refusal: Refusal, more: str = "") -> Answer:
    region = f"<Region>{refusal.region}</Region>" if refusal.region else ""
    text = f"<Error><Code>{refusal.code}</Code><Message>{escape(refusal.message)}</Message>{region}{more}</Error>"
    return xml(refusal.status, text)


def _damaged(body: bytes, fault: Fault) -> bytes:
    if fault.corrupt_at is None or fault.corrupt_at >= len(body):
        return body
    damaged = bytearray(body)
    damaged[fault.corrupt_at] ^= 0xFF
    return bytes(damaged)
