"""A server of the parts of S3 that reading and putting need, which verifies every signature."""

from __future__ import annotations

import functools
import hashlib
import hmac
import itertools
import time
from base64 import b64encode
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import formatdate
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, quote_plus, unquote, unquote_plus
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

from asyncfetch.testing.contents import ContentAnswer, InMemory
from asyncfetch.testing.server import RangeServer, inverted

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from asyncfetch.testing.contents import Contents
    from asyncfetch.testing.faults import Fault, ServedRequest
    from asyncfetch.testing.server import Receive


@dataclass(slots=True)
class MultipartUpload:
    """A multipart upload that was neither completed nor aborted."""

    path: str
    """Bucket and key."""
    parts: dict[int, bytes] = field(default_factory=dict)
    """Parts by their number."""


class _MultipartObject(bytes):
    """An object made of parts, which shows in its tag."""

    tag: str


def tag_of(content: bytes) -> str:
    """The ETag of an object, quotes included."""
    return content.tag if isinstance(content, _MultipartObject) else f'"{_md5(content).hex()}"'


def xml(status: int, text: str) -> ContentAnswer:
    """An answer with a body of XML."""
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'.encode()
    return ContentAnswer(status, {"Content-Type": "application/xml", "Content-Length": str(len(body))}, text=body)


@functools.lru_cache(maxsize=1024)
def _md5(content: bytes) -> bytes:
    return hashlib.md5(content, usedforsecurity=False).digest()


ALGORITHM = "AWS4-HMAC-SHA256"
MAX_SECONDS = 604_800
"""7 days, the longest that S3 signs for."""
SKEW_SECONDS = 900
"""Seconds that a date may be in the future."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys that requests are signed with."""

    access_key: str = "AKIDTEST"
    secret_key: str = field(default="secret-of-the-test", repr=False)
    session_token: str | None = field(default=None, repr=False)
    """Token of temporary credentials; any other one has expired."""


class Refusal(Exception):
    """The reason why a request isn't served, in S3's words: for another region's signature with the bucket's region."""

    def __init__(self, status: int, code: str, message: str, *, region: str = "", more: str = "") -> None:
        super().__init__(message)
        self.status, self.region = status, region
        region = f"<Region>{region}</Region>" if region else ""
        self.xml = f"<Error><Code>{code}</Code><Message>{escape(message)}</Message>{region}{more}</Error>"


def check_presigned(request: ServedRequest, *, keys: Keys, region: str, now: float) -> None:
    """Check that a presigned request is signed with these keys, by AWS's description of Signature Version 4.

    https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-query-string-auth.html. Servers for tests accept forged and
    expired signatures; this one doesn't. ``now`` are seconds since the epoch. Refusal where it isn't.
    """
    path, _, query = request.target.partition("?")
    # Not parse_qs: what was signed are the bytes as sent.
    pairs = [(name, value) for name, _, value in (part.partition("=") for part in query.split("&") if part)]
    given = {unquote(name): unquote(value) for name, value in pairs}
    if "X-Amz-Signature" not in given:
        raise Refusal(403, "AccessDenied", "Access Denied")
    access_key, _, scope = given.get("X-Amz-Credential", "").partition("/")
    day, _, rest = scope.partition("/")
    signed_region = rest.partition("/")[0]
    if given.get("X-Amz-Algorithm") != ALGORITHM or rest != f"{signed_region}/s3/aws4_request":
        raise Refusal(400, "AuthorizationQueryParametersError", "the credential's scope is malformed")
    if access_key != keys.access_key:
        raise Refusal(403, "InvalidAccessKeyId", "The access key doesn't exist")
    if signed_region != region:
        message = f"the region '{signed_region}' is wrong; expecting '{region}'"
        raise Refusal(400, "AuthorizationQueryParametersError", message, region=region)
    if given.get("X-Amz-Security-Token") != keys.session_token:
        raise Refusal(400, "ExpiredToken", "The provided token has expired.")
    date = given.get("X-Amz-Date", "")
    _check_time(date, given.get("X-Amz-Expires", ""), day, now)
    names = given.get("X-Amz-SignedHeaders", "").split(";")
    sent = {name.lower() for name in request.headers}
    unsigned = sorted(name for name in sent if name.startswith("x-amz-") and name not in names)
    if "host" not in names or unsigned:
        raise Refusal(403, "AccessDenied", f"There were headers present which were not signed: {unsigned}")
    canonical = "\n".join([
        request.method,
        quote(unquote(path), safe="/~"),
        "&".join(
            sorted(
                f"{quote(name, safe='~')}={quote(value, safe='~')}"
                for name, value in given.items()
                if name != "X-Amz-Signature"
            )
        ),
        *(f"{name}:{' '.join(request.headers.get(name, '').split())}" for name in names),
        "",
        ";".join(names),
        "UNSIGNED-PAYLOAD",
    ])
    text = "\n".join([ALGORITHM, date, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = f"AWS4{keys.secret_key}".encode()
    for part in (day, region, "s3", "aws4_request", text):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    expected = key.hex()
    if not hmac.compare_digest(expected, given["X-Amz-Signature"]):
        raise Refusal(403, "SignatureDoesNotMatch", "The signature isn't that of this request")


def _check_time(date: str, expires: str, day: str, now: float) -> None:
    try:
        signed_at = datetime.strptime(date, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
        seconds = int(expires)
    except ValueError:
        message = "X-Amz-Date or X-Amz-Expires is malformed"
        raise Refusal(400, "AuthorizationQueryParametersError", message) from None
    if not 0 < seconds <= MAX_SECONDS or not date.startswith(day) or not day:
        raise Refusal(400, "AuthorizationQueryParametersError", "X-Amz-Expires or the scope's date is out of range")
    if now < signed_at - SKEW_SECONDS:
        raise Refusal(403, "AccessDenied", "Request is not valid yet")
    if now > signed_at + seconds:
        raise Refusal(403, "AccessDenied", "Request has expired")


PAGE_KEYS = 1000
"""Keys in one page of a listing; what S3 sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Quirks:
    """Deviations of compatible stores from S3."""

    refuses_checksums: bool = False
    """True refuses requests with a checksum, which newer SDKs add, as Backblaze B2, Qumulo and older MinIO do."""
    requests_per_second: float | None = None
    """Requests answered in a second; others get 503 SlowDown. B2 allows new accounts 500."""
    retry_after_seconds: int | None = None
    """Sent with SlowDown; B2 may or may not."""
    encodes_keys: bool = True
    """True if listings support ``encoding-type=url``; other stores send plain keys."""
    sends_tokens: bool = True
    """True if a listing of several pages has tokens for the next one, as ListObjectsV2."""
    tells_size: bool = True
    """True if a 416 has the object's size."""
    takes_any_digest: bool = False
    """True if Content-MD5 is ignored."""
    min_part_bytes: int = 0
    """Least length of all parts of an upload but the last; S3's are 5 MiB."""
    wrong_region_status: int = 400
    """Status for another region's signature: 400 with the region in the body, or a redirect, 301 or 307, that has it in
    a header and no target."""


class S3Server(RangeServer):
    """A RangeServer of buckets, addressed by path, for presigned requests: GET, ListObjectsV2, PUT, multipart uploads.

    Uploads change ``content``. Signatures, their expiry, region and session token are verified. Errors are S3's, XML
    bodies included; as in S3, a 416 has no Content-Range. Faults come before all of that:

        with S3Server({"bucket/a.bin": bytes(1000)}) as server:
            config = FetchConfig(ca_file=server.ca_file, s3=S3Config(endpoint_url=server.url))
            ...  # with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY from server.keys

    Args:
        content: Objects by "bucket/key". Any bucket can be put to.
        keys: Requests must be signed with these; None: they need no signature.
        region: Of buckets that aren't in ``regions``.
        regions: By bucket.
        requester_pays: Whether requests must carry ``x-amz-request-payer: requester``.
        page_keys: Keys in one page of a listing.
        quirks: Deviations from S3.
        options: As RangeServer's.
    """

    def __init__(
        self,
        content: MutableMapping[str, bytes],
        *,
        keys: Keys | None = Keys(),
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
        """Seconds that its clock is ahead of the real one: lets signatures expire, and a pause of
        ``requests_per_second`` end, without waiting."""
        self._region, self._regions = region, regions or {}
        self._requester_pays = requester_pays
        self._page_keys = page_keys
        self._quirks = quirks
        self._uploads: dict[str, MultipartUpload] = {}
        self._numbers = itertools.count(1)
        self._allowance, self._allowed_at = quirks.requests_per_second or 0.0, time.monotonic()

    @property
    def uploads(self) -> Mapping[str, MultipartUpload]:
        """Multipart uploads that were begun and neither completed nor aborted, by id."""
        return self._uploads

    def _open_contents(self) -> Contents:
        return InMemory(self.objects, tag_of)

    async def _answer(self, record: ServedRequest, fault: Fault, receive: Receive) -> ContentAnswer:
        try:
            answer = await self._answer_as_s3(record, fault, receive)
        except Refusal as refusal:
            answer = xml(refusal.status, refusal.xml)
        date = formatdate(time.time() + self.clock_seconds, usegmt=True)
        return replace(answer, headers={**answer.headers, "Date": date})

    async def _answer_as_s3(self, record: ServedRequest, fault: Fault, receive: Receive) -> ContentAnswer:
        if fault.answer_status is not None:
            return await super()._answer(record, fault, receive)
        if self._is_too_fast():
            pause = self._quirks.retry_after_seconds
            answer = xml(503, Refusal(503, "SlowDown", "Please reduce your request rate.").xml)
            headers = {} if pause is None else {"Retry-After": str(pause)}
            return replace(answer, headers={**answer.headers, **headers})
        try:
            self._check(record)
        except Refusal as refusal:
            if not refusal.region or self._quirks.wrong_region_status not in {301, 307}:
                raise
            moved = Refusal(self._quirks.wrong_region_status, "PermanentRedirect", "Use the right endpoint")
            answer = xml(moved.status, moved.xml)
            return replace(answer, headers={**answer.headers, "x-amz-bucket-region": refusal.region})
        bucket, _, key = record.path.lstrip("/").partition("/")
        query = record.target.partition("?")[2]
        if not key and record.method == "GET":
            return self._list(bucket, query)
        if record.method in {"PUT", "POST", "DELETE"}:
            body = await receive()
            body = body if fault.corrupt_at is None else bytes(inverted(body, fault.corrupt_at))
            return self._write(record, _asked(query), body)
        answer = await super()._answer(record, fault, receive)
        if answer.status == 404:
            raise Refusal(404, "NoSuchKey", "The specified key does not exist.")
        if answer.status == 412:
            raise Refusal(412, "PreconditionFailed", "A precondition does not hold")
        if answer.status == 416 and answer.stored is not None:
            size = f"<ActualObjectSize>{answer.stored.version.size}</ActualObjectSize>"
            more = size if self._quirks.tells_size else ""
            raise Refusal(416, "InvalidRange", "The requested range is not satisfiable", more=more)
        return answer

    def _write(self, record: ServedRequest, asked: Mapping[str, str], body: bytes) -> ContentAnswer:
        method, path, digest = record.method, record.path.lstrip("/"), record.headers.get("Content-MD5", "")
        if digest and not self._quirks.takes_any_digest and digest != b64encode(_md5(body)).decode():
            raise Refusal(400, "BadDigest", "The Content-MD5 you specified did not match what we received.")
        if method == "POST" and "uploads" in asked:
            upload_id = f"upload/{next(self._numbers)}+"
            self._uploads[upload_id] = MultipartUpload(path)
            return xml(
                200, f"<InitiateMultipartUploadResult><UploadId>{upload_id}</UploadId></InitiateMultipartUploadResult>"
            )
        if "uploadId" in asked:
            upload = self._uploads.get(asked["uploadId"])
            if upload is None or upload.path != path:
                raise Refusal(404, "NoSuchUpload", "The specified multipart upload does not exist.")
            if method == "PUT":
                upload.parts[int(asked["partNumber"])] = body
                return ContentAnswer(200, {"ETag": tag_of(body), "Content-Length": "0"})
            answer = self._complete(upload, body) if method == "POST" else ContentAnswer(204)
            del self._uploads[asked["uploadId"]]
            return answer
        if method == "PUT":
            self.objects[path] = body
            return ContentAnswer(200, {"ETag": tag_of(body), "Content-Length": "0"})
        if method == "DELETE":
            self.objects.pop(path, None)
            return ContentAnswer(204)
        raise Refusal(405, "MethodNotAllowed", "The specified method is not allowed against this resource.")

    def _complete(self, upload: MultipartUpload, body: bytes) -> ContentAnswer:
        named = {
            int(part.findtext("{*}PartNumber", "")): part.findtext("{*}ETag", "")
            for part in ET.fromstring(body).iterfind("{*}Part")
        }
        if list(named) != sorted(named) or not named:
            raise Refusal(400, "InvalidPartOrder", "The list of parts was not in ascending order.")
        if any(number not in upload.parts or tag_of(upload.parts[number]) != tag for number, tag in named.items()):
            raise Refusal(400, "InvalidPart", "One or more of the specified parts could not be found.")
        parts = [upload.parts[number] for number in named]
        if any(len(part) < self._quirks.min_part_bytes for part in parts[:-1]):
            raise Refusal(400, "EntityTooSmall", "Your proposed upload is smaller than the minimum allowed size")
        joined = _MultipartObject(b"".join(parts))
        joined.tag = f'"{_md5(b"".join(map(_md5, parts))).hex()}-{len(parts)}"'
        self.objects[upload.path] = joined
        return xml(
            200, f"<CompleteMultipartUploadResult><ETag>{escape(joined.tag)}</ETag></CompleteMultipartUploadResult>"
        )

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

    def _check(self, record: ServedRequest) -> None:
        query = record.target.partition("?")[2]
        named = "checksum" in f"{query} {' '.join(record.headers)}".lower()
        if named and self._quirks.refuses_checksums:
            raise Refusal(400, "InvalidArgument", "Unsupported header 'x-amz-sdk-checksum-algorithm'")
        if self._requester_pays and record.headers.get("x-amz-request-payer") != "requester":
            raise Refusal(403, "AccessDenied", "The requester must pay")
        if self.keys is None:
            return
        if "Authorization" in record.headers and "X-Amz-Signature" in record.target:
            raise Refusal(400, "InvalidArgument", "Only one auth mechanism allowed")
        region = self._regions.get(record.path.lstrip("/").partition("/")[0], self._region)
        check_presigned(record, keys=self.keys, region=region, now=time.time() + self.clock_seconds)

    def _list(self, bucket: str, query: str) -> ContentAnswer:
        asked = _asked(query)
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


def _asked(query: str) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(query, keep_blank_values=True).items()}


def _rolled_up(key: str, prefix: str, delimiter: str) -> tuple[str, bool]:
    """The key, or what stands for all keys that have the next delimiter, too; and whether it is that."""
    below, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
    return (f"{prefix}{below}{found}", True) if found else (key, False)
