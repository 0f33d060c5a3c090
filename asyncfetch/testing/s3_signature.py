"""Checking the signature of a presigned url (AWS Signature Version 4). Pure, and written from AWS's description.

https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-query-string-auth.html. Servers for tests accept forged and
expired signatures; this one doesn't.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Keys", "Refusal", "check_presigned"]

ALGORITHM = "AWS4-HMAC-SHA256"
MAX_SECONDS = 604_800
"""7 days, the longest that S3 signs for."""
SKEW_SECONDS = 900
"""How far in the future a date may lie."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Who may ask."""

    access_key: str = "AKIDTEST"
    secret_key: str = field(default="secret-of-the-test", repr=False)
    session_token: str | None = field(default=None, repr=False)
    """Of temporary credentials; any other one has expired."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request isn't served, in S3's words."""

    status: int
    code: str
    message: str
    region: str | None = None
    """The right one, where the wrong one was signed for."""


def check_presigned(
    method: str, target: str, headers: Mapping[str, str], *, keys: Keys, region: str, now: float
) -> Refusal | None:
    """None where the request is signed as it should be.

    Args:
        method: GET, ...
        target: Path and query as sent.
        headers: As sent, found by names of any case.
        keys: Whose signature counts.
        region: The bucket's.
        now: Seconds since the epoch.
    """
    path, _, query = target.partition("?")
    # Not parse_qs: what was signed are the bytes as sent.
    pairs = [(name, value) for name, _, value in (part.partition("=") for part in query.split("&") if part)]
    given = {unquote(name): unquote(value) for name, value in pairs}
    if "X-Amz-Signature" not in given:
        return Refusal(403, "AccessDenied", "Access Denied")
    access_key, _, scope = given.get("X-Amz-Credential", "").partition("/")
    day, _, rest = scope.partition("/")
    signed_region = rest.partition("/")[0]
    if given.get("X-Amz-Algorithm") != ALGORITHM or rest != f"{signed_region}/s3/aws4_request":
        return Refusal(400, "AuthorizationQueryParametersError", "the credential's scope is malformed")
    if access_key != keys.access_key:
        return Refusal(403, "InvalidAccessKeyId", "The access key doesn't exist")
    if signed_region != region:
        message = f"the region '{signed_region}' is wrong; expecting '{region}'"
        return Refusal(400, "AuthorizationQueryParametersError", message, region)
    if given.get("X-Amz-Security-Token") != keys.session_token:
        return Refusal(400, "ExpiredToken", "The provided token has expired.")
    date = given.get("X-Amz-Date", "")
    refusal = _check_time(date, given.get("X-Amz-Expires", ""), day, now)
    if refusal is not None:
        return refusal
    names = given.get("X-Amz-SignedHeaders", "").split(";")
    sent = {name.lower() for name in headers}
    unsigned = sorted(name for name in sent if name.startswith("x-amz-") and name not in names)
    if "host" not in names or unsigned:
        return Refusal(403, "AccessDenied", f"There were headers present which were not signed: {unsigned}")
    canonical = "\n".join([
        method,
        quote(unquote(path), safe="/~"),
        "&".join(
            sorted(
                f"{quote(name, safe='~')}={quote(value, safe='~')}"
                for name, value in given.items()
                if name != "X-Amz-Signature"
            )
        ),
        *(f"{name}:{' '.join(headers.get(name, '').split())}" for name in names),
        "",
        ";".join(names),
        "UNSIGNED-PAYLOAD",
    ])
    text = "\n".join([ALGORITHM, date, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    expected = hmac.new(_signing_key(keys.secret_key, day, region), text.encode(), hashlib.sha256).hexdigest()
    if not hmac.compare_digest(expected, given["X-Amz-Signature"]):
        return Refusal(403, "SignatureDoesNotMatch", "The signature isn't that of this request")
    return None


def _check_time(date: str, expires: str, day: str, now: float) -> Refusal | None:
    try:
        signed_at = datetime.strptime(date, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
        seconds = int(expires)
    except ValueError:
        return Refusal(400, "AuthorizationQueryParametersError", "X-Amz-Date or X-Amz-Expires is malformed")
    if not 0 < seconds <= MAX_SECONDS or not date.startswith(day) or not day:
        return Refusal(400, "AuthorizationQueryParametersError", "X-Amz-Expires or the scope's date is out of range")
    if now < signed_at - SKEW_SECONDS:
        return Refusal(403, "AccessDenied", "Request is not valid yet")
    if now > signed_at + seconds:
        return Refusal(403, "AccessDenied", "Request has expired")
    return None


def _signing_key(secret_key: str, day: str, region: str) -> bytes:
    key = f"AWS4{secret_key}".encode()
    for part in (day, region, "s3", "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key
