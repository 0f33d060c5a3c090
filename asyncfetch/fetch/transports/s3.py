"""Objects of S3 and of compatible stores: each is signed once, and its ranges are plain https."""

from __future__ import annotations

import logging
import math
import re
import time
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote_plus, urlsplit
from xml.etree import ElementTree as ET

import anyio
from multidict import CIMultiDict
from yarl import URL

from asyncfetch.errors import (
    AccessDenied,
    ConfigError,
    ConnectionFailed,
    InvalidResponse,
    MissingDependency,
    NotFound,
    install_command,
    redact_url,
)
from asyncfetch.fetch import refusals
from asyncfetch.fetch.listing import Listing, listed_size
from asyncfetch.fetch.responses import NO_REASON, TOKEN_CODES
from asyncfetch.fetch.retry import AttemptFailed, RetryVerdict, date_seconds
from asyncfetch.fetch.transports.s3_upload import S3Upload
from asyncfetch.fetch.urls import REDIRECTS, Address, host_name
from asyncfetch.ranges import ObjectInfo
from asyncfetch.runtime.fork import forks_wait
from asyncfetch.runtime.loop_thread import LoopThread
from asyncfetch.runtime.single_flight import AsyncCache, CachedValue
from asyncfetch.runtime.threads import in_thread, run_sync

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator, Mapping

    from asyncfetch.config import FetchConfig, S3Config
    from asyncfetch.fetch.download import Download
    from asyncfetch.fetch.retry import Clock
    from asyncfetch.fetch.transports.http import Body, HttpTransport, Response
    from asyncfetch.fetch.upload_sources import UploadSource

MAX_REGIONS = 64
"""Bound on clients; AWS has fewer regions."""
AWS_HOSTS = (".amazonaws.com", ".amazonaws.com.cn")
REGION_IN_HOST = re.compile(r"https?://s3\.([a-z0-9-]+)\.backblazeb2\.com(?::\d+)?/?")
"""Endpoints of Backblaze B2, one for each region, which signatures must name."""
USUAL_ENDPOINT = re.compile(r"https?://s3(?:-fips)?(?:\.dualstack)?(?:\.(?!us-gov-)[a-z0-9-]+)?\.amazonaws\.com/?")
"""AWS's endpoints that share their buckets. Others (China, the government's, Outposts) have their own."""
THREAD_NAME = "asyncfetch s3"


@dataclass(frozen=True, slots=True)
class SignedAddress(Address):
    """A presigned request, with the headers that are signed."""

    region: str | None = None
    """The region it is signed for; None means aiobotocore's own choice."""
    seconds: float = math.inf
    """Seconds for which it is valid, from when it was signed; infinite if nothing is signed."""


class S3Signer:
    """Signs requests to S3 with aiobotocore, which knows credentials, regions, endpoints, and how to sign.

    Making a client reads files (profiles, tokens) and takes 0.3 s of Python on its loop, and credentials are refreshed
    there at any time. So aiobotocore has a loop of its own, in a thread, and only signs urls. It sends no requests
    because those would bypass the host's limit, its outages and retries, bandwidth and statistics, and because its
    ``get_object`` costs ten times as much as our own request, its parser takes 51 ms for a page of 1,000 keys (ours 12)
    and reads a page of HTML as an empty listing, and it follows redirects with the session token.

    Its verbs are for one loop; ``aclose`` ends its thread. What begins with an underscore runs there.
    """

    def __init__(self, config: S3Config, thread: LoopThread) -> None:
        """Takes over ``thread``; use ``open``."""
        self._config = config
        self._thread = thread
        self._clients: AsyncCache[str | None, Any] = AsyncCache(time.monotonic, MAX_REGIONS)
        self._open = AsyncExitStack()
        self._session: Any = None
        thread.start(self._hold)

    @classmethod
    async def open(cls, config: S3Config) -> S3Signer:
        """A signer with a thread of its own; MissingDependency without aiobotocore."""
        return await run_sync(lambda: cls(config, _start()), limiter=anyio.CapacityLimiter(1))

    async def aclose(self) -> None:
        """End the thread and its calls."""
        await in_thread(self._thread.close)

    async def sign(self, operation: str, parameters: Mapping[str, str | int], region: str | None) -> SignedAddress:
        """A url for ``operation`` with ``parameters``, named as in boto3, to be requested by its HTTP method.

        ``region`` is the bucket's; None means the configured one.

        Raises:
            AttemptFailed: No credentials, or their service didn't answer.
            ConfigError: The profile, region, endpoint or bucket can't be used.
        """
        return await self._thread.acall(self._presign, operation, parameters, region)

    async def endpoint(self) -> str:
        """The url of the store that requests are signed for; empty for AWS. Errors are those of ``sign``."""
        return await self._thread.acall(self._endpoint_url)

    async def _hold(self) -> None:
        """Run until the loop ends, and then close the clients."""
        async with self._open:
            await anyio.sleep_forever()

    async def _presign(self, operation: str, parameters: Mapping[str, str | int], region: str | None) -> SignedAddress:
        config = self._config
        payer = {"RequestPayer": "requester"} if config.requester_pays else {}
        with _errors_of_ours():
            client = await self._clients.get(region, partial(self._make, region))
            url: str = await client.generate_presigned_url(
                operation, Params={**parameters, **payer}, ExpiresIn=config.presign_seconds
            )
            seconds = await self._life()
        # S3 refuses a login for the store's host as a second signature.
        headers: dict[str, str | None] = {"Authorization": None}
        signed = parse_qs(urlsplit(url).query).get("X-Amz-SignedHeaders", [""])[0].split(";")
        if payer and (config.anonymous or "x-amz-request-payer" in signed):  # an anonymous request needs it, too
            headers["x-amz-request-payer"] = "requester"
        return SignedAddress(URL(url, encoded=True), headers, region=region, seconds=seconds)

    async def _endpoint_url(self) -> str:
        region = self._config.region
        with _errors_of_ours():
            url: str = (await self._clients.get(region, partial(self._make, region))).meta.endpoint_url
            return "" if USUAL_ENDPOINT.fullmatch(url) else url.rstrip("/")

    async def _make(self, region: str | None) -> CachedValue[Any]:
        from aiobotocore.session import AioSession
        from botocore.exceptions import NoCredentialsError

        if self._session is None:
            self._session = AioSession(profile=self._config.profile)
        if not self._config.anonymous and await self._session.get_credentials() is None:
            self._session = None  # the session, and clients of it, would never look for credentials again
            raise NoCredentialsError
        # "auto" means path where an endpoint is configured, here or in the environment.
        style = {None: "auto", True: "path", False: "virtual"}[self._config.path_style]
        client = await self._enter(region, style)
        named = REGION_IN_HOST.fullmatch(client.meta.endpoint_url)
        if named is not None and region is None and self._session.get_config_variable("region") is None:
            client = await self._enter(named[1], style)
        if style == "auto" and client.meta.endpoint_url.endswith(AWS_HOSTS):
            # "auto" signs for the global endpoint, which redirects new buckets to their region for a day.
            client = await self._enter(region, "virtual")
        return CachedValue(client)

    async def _enter(self, region: str | None, addressing_style: str) -> Any:  # noqa: ANN401 - untyped
        from aiobotocore.config import AioConfig
        from botocore import UNSIGNED

        config = AioConfig(
            signature_version=UNSIGNED if self._config.anonymous else "s3v4",
            s3={"addressing_style": addressing_style},
            # B2, older MinIO, GCS and others refuse the checksums of newer SDKs.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        made = self._session.create_client(
            "s3", region_name=region or self._config.region, endpoint_url=self._config.endpoint_url, config=config
        )
        return await self._open.enter_async_context(made)

    async def _life(self) -> float:
        if self._config.anonymous:
            return math.inf
        # A url signed with temporary credentials expires with them. Only refreshable ones have a known end.
        expiry = getattr(await self._session.get_credentials(), "_expiry_time", None)
        left = math.inf if expiry is None else expiry.timestamp() - time.time()
        return max(0.0, min(float(self._config.presign_seconds), left))


def _start() -> LoopThread:
    try:
        with forks_wait():
            import aiobotocore.session  # noqa: F401 - takes half a second, so in a thread
    except ImportError as error:
        raise MissingDependency(f"s3:// urls need aiobotocore: {install_command('s3')}") from error
    logging.getLogger("botocore.auth").addFilter(_is_foreign)
    return LoopThread(name=THREAD_NAME)


def _is_foreign(record: logging.LogRecord) -> bool:
    """Return False for records of signers: at DEBUG, botocore logs requests with token and signature."""
    return record.threadName != THREAD_NAME


@contextmanager
def _errors_of_ours() -> Iterator[None]:
    """Raise botocore's errors about credentials and configurations as ours."""
    from botocore import exceptions

    try:
        yield
    except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError) as error:
        message = (
            f"{error}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, log in, or read a public"
            " bucket with FetchConfig(s3=S3Config(anonymous=True))"
        )
        raise AttemptFailed(AccessDenied, message, RetryVerdict.FATAL) from error
    except (exceptions.CredentialRetrievalError, exceptions.HTTPClientError, *_unanswered()) as error:
        kind = ConnectionFailed if _is_unanswered(error) else AccessDenied
        raise AttemptFailed(kind, f"the credentials for S3 can't be had: {error}") from error
    except (exceptions.SSOError, exceptions.ClientError) as error:
        message = f"the credentials for S3 can't be had, log in again: {error}"
        raise AttemptFailed(AccessDenied, message, RetryVerdict.FATAL) from error
    except (exceptions.BotoCoreError, ValueError) as error:
        raise ConfigError(f"a request to S3 can't be made from this url or configuration: {error}") from error


def _unanswered() -> tuple[type[Exception], ...]:
    """Errors of botocore for a missing service of credentials: STS, or a container's."""
    from botocore import exceptions

    return (
        exceptions.ConnectTimeoutError, exceptions.ConnectionClosedError, exceptions.EndpointConnectionError,
        exceptions.ProxyConnectionError, exceptions.ReadTimeoutError,
    )  # fmt: skip


def _is_unanswered(error: BaseException) -> bool:
    """Return whether a service of credentials didn't answer, rather than refuse them."""
    link: BaseException | None = error
    while link is not None and not isinstance(link, _unanswered()):
        link = link.__context__
    return link is not None


MAX_BUCKETS = 1024
"""Bound on buckets with a remembered region."""
CLOCK_ERROR_SECONDS = 300.0
"""A clock error above this is mentioned when a signature is refused; S3 tolerates 15 minutes."""
_REFUSALS = REDIRECTS | {400, 401, 403}
_WORN_OUT = frozenset({401, 403})
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_REGION = re.compile(r"[a-z0-9-]{1,32}")  # becomes a part of a host's name
_CODE = re.compile(rb"<Code>([A-Za-z0-9.]{1,80})</Code>")
_REGION_TAG = re.compile(rb"<Region>([a-z0-9-]{1,32})</Region>")
_SIZE_TAG = re.compile(rb"<ActualObjectSize>([0-9]{1,18})</ActualObjectSize>")


class S3Transport:
    """``s3://bucket/key``: fills downloads, lists prefixes, puts objects, and is the address book for these.

    The key is never unquoted. Bound to the loop of its HttpTransport.
    """

    def __init__(self, config: FetchConfig, http: HttpTransport, clock: Clock) -> None:
        self._config = config.s3
        self._max_entries = config.max_listed_entries
        self._http = http
        self._addresses: AsyncCache[str, Address] = AsyncCache(clock.monotonic)
        self._regions: dict[str, str] = {}
        self._wall = clock.wall
        self._signers: AsyncCache[None, S3Signer] = AsyncCache(clock.monotonic, 1)
        self._endpoints: AsyncCache[None, str] = AsyncCache(clock.monotonic, 1)

    async def aclose(self) -> None:
        """End the thread that signs, if there is one."""
        signer = self._signers.peek(None)
        if signer is not None:
            await signer.aclose()

    def attempt(self, download: Download, failure: AttemptFailed | None) -> Awaitable[None]:
        """One attempt at the bytes that a download lacks."""
        return self._http.attempt(download, failure, self)

    async def endpoint(self, url: str) -> str:
        """The store's url; empty for AWS."""
        return await self._endpoints.get(None, partial(self._http.persist, url, self._find_endpoint))

    async def put(self, url: str, source: UploadSource) -> ObjectInfo:
        """Put the source; see S3Upload."""
        bucket, key = bucket_and_key(url)
        return await S3Upload(url, bucket, key, self._config, self._ask, self._http).put(source)

    async def delete(self, url: str) -> None:
        """Remove the object; S3 doesn't say whether there was one."""
        bucket, key = bucket_and_key(url)
        parameters = {"Bucket": bucket, "Key": key}
        await self._http.persist(url, partial(self._ask, "DELETE", "delete_object", parameters))

    async def resolve(self, url: str) -> Address:
        """A presigned url: one signature for all ranges of the object."""
        return await self._addresses.get(url, partial(self._find, url))

    def reject(self, url: str, address: Address, failure: AttemptFailed) -> bool:
        """Forget an address signed for a wrong region, or expired; returns whether a new one may do."""
        if self._learns_region(bucket_and_key(url)[0], address, failure):
            self._addresses.forget(url, address)
            return True
        worn_out = failure.status in _WORN_OUT or failure.headers.get("X-Error-Code") in TOKEN_CODES
        return worn_out and not self._config.anonymous and self._addresses.reject(url, address)

    def explain(self, status: int, headers: Mapping[str, str], body: bytes) -> Mapping[str, str]:
        """The headers with the error's code, the bucket's region and, for 416, the object's size from S3's XML body."""
        explained = CIMultiDict(refusals.explained(status, headers, body))
        for name, tag in (("X-Error-Code", _CODE), ("x-amz-bucket-region", _REGION_TAG)):
            if (match := tag.search(body)) is not None:
                explained[name] = match[1].decode()
        if status == 416 and "Content-Range" not in headers and (match := _SIZE_TAG.search(body)) is not None:
            explained["Content-Range"] = f"bytes */{match[1].decode()}"
        if status == 400:
            explained.setdefault("X-Error-Code", NO_REASON)
        wrong = _clock_error(headers, self._wall()) if status in _WORN_OUT and not self._config.anonymous else ""
        if wrong:
            explained["X-Error-Code"] = f"{explained.get('X-Error-Code', 'refused')}: {wrong}"
        return explained

    async def listdir(self, url: str) -> list[ObjectInfo]:
        """The objects directly below a prefix, and the prefixes below it, sorted by name.

        A prefix has size 0 and a url that ends in "/".

        Raises:
            NotFound: Nothing is below it, and it isn't a whole bucket or a console's empty folder.
            FetchError: The pages don't end within ``max_listed_entries``.
        """
        bucket, key = _split(url)
        prefix = key if not key or key.endswith("/") else f"{key}/"
        listing: Listing[str] = Listing(self._max_entries)
        token: str | None = ""
        while token is not None:
            token = await self._http.persist(url, partial(self._page, listing, bucket, prefix, token))
        return await run_sync(listing.sorted)

    async def _page(self, listing: Listing[str], bucket: str, prefix: str, token: str) -> str | None:
        """Add the page of the token; returns the next token, None after the last page."""
        parameters = {"Bucket": bucket, "Prefix": prefix, "Delimiter": "/", "EncodingType": "url"}
        if token:
            parameters["ContinuationToken"] = token
        reply = await self._ask("GET", "list_objects_v2", parameters)
        with reply.is_judged():
            infos, has_marker, following = await run_sync(_parse_page, reply.body, bucket, prefix)
            listing.add(infos, asked=token, following=following)
            listing.has_marker |= has_marker
            if following is None and prefix and not listing.infos and not listing.has_marker:
                raise AttemptFailed(NotFound, "nothing is below this prefix: check the url", RetryVerdict.FATAL)
        return following

    async def _ask(
        self,
        method: str,
        operation: str,
        parameters: Mapping[str, str | int],
        *,
        headers: Mapping[str, str] | None = None,
        body: Body | None = None,
    ) -> Response:
        """One signed request, and a second one if the first has found the bucket's region."""
        for signatures_left in (1, 0):
            address = await self._sign(operation, parameters)
            asked = replace(address, headers={**address.headers, **(headers or {})})
            try:
                reply = await self._http.ask(method, asked, self, body=body)
                if reply.target is None:
                    return reply
                raise _sent_elsewhere(reply)
            except AttemptFailed as failure:
                if not self._learns_region(str(parameters["Bucket"]), address, failure) or not signatures_left:
                    raise
        raise AssertionError("the last one returns or raises")

    async def _find(self, url: str) -> CachedValue[Address]:
        bucket, key = bucket_and_key(url)
        address = await self._sign("get_object", {"Bucket": bucket, "Key": key})
        return CachedValue(address, address.seconds)

    async def _find_endpoint(self) -> CachedValue[str]:
        signer = await self._signers.get(None, self._open_signer)
        return CachedValue(await signer.endpoint())

    async def _sign(self, operation: str, parameters: Mapping[str, str | int]) -> SignedAddress:
        signer = await self._signers.get(None, self._open_signer)
        region = self._regions.get(str(parameters["Bucket"]), self._config.region)
        return await signer.sign(operation, parameters, region)

    async def _open_signer(self) -> CachedValue[S3Signer]:
        return CachedValue(await S3Signer.open(self._config))

    def _learns_region(self, bucket: str, address: Address, failure: AttemptFailed) -> bool:
        """Note the region that a refusal names; returns whether ``address`` was signed for another one."""
        region = failure.headers.get("x-amz-bucket-region", "")
        signed_for = address.region if isinstance(address, SignedAddress) else None
        if failure.status not in _REFUSALS or region == signed_for or not _REGION.fullmatch(region):
            return False
        if len(self._regions) >= MAX_BUCKETS:
            self._regions.clear()
        self._regions[bucket] = region
        return True


def bucket_and_key(url: str) -> tuple[str, str]:
    """The bucket and the key of an object's url; ConfigError if it names none."""
    bucket, key = _split(url)
    if not key:
        raise ConfigError(f"{redact_url(url)!r} names a bucket and no object: write s3://bucket/key")
    return bucket, key


def _split(url: str) -> tuple[str, str]:
    bucket, _, key = url.partition("://")[2].partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError(f"{redact_url(url)!r} names no bucket: write s3://bucket/key")
    return bucket, key


def _sent_elsewhere(reply: Response) -> AttemptFailed:
    """The error for a redirect to another host, which a signature isn't valid for."""
    assert reply.target is not None
    message = f"the store sends us on to {host_name(reply.target)}: set S3Config(region=...) or endpoint_url"
    return AttemptFailed(
        InvalidResponse, message, RetryVerdict.FATAL, reply.status, host=host_name(reply.url), headers=reply.headers
    )


def _clock_error(headers: Mapping[str, str], wall_now: float) -> str:
    """Our clock's error by the Date of an answer, in words; empty if it is small or unknown."""
    date = date_seconds(headers.get("Date"))
    behind = 0.0 if date is None else date - wall_now
    if abs(behind) <= CLOCK_ERROR_SECONDS:
        return ""
    return f"this machine's clock is {abs(behind):.0f} s {'behind' if behind > 0 else 'ahead of'} the store's"


def _parse_page(body: bytes, bucket: str, prefix: str) -> tuple[list[ObjectInfo], bool, str | None]:
    """A ListObjectsV2 answer: entries, whether the prefix itself is an object, and the next token, None after the last.

    Consoles put such an object there to show an empty folder.
    """
    has_marker = False
    try:
        page = _listing_in(body)
        # A store that ignores the parameter doesn't repeat it.
        plain = unquote_plus if page.findtext("{*}EncodingType", "") == "url" else str
        infos = [
            ObjectInfo(f"s3://{bucket}/{_below(prefix, plain(entry.findtext('{*}Prefix', '')))}", 0)
            for entry in page.iterfind("{*}CommonPrefixes")
        ]
        for entry in page.iterfind("{*}Contents"):
            key = plain(entry.findtext("{*}Key", ""))
            if key == prefix and prefix:
                has_marker = True
            else:
                size, etag = listed_size(entry.findtext("{*}Size", "")), entry.findtext("{*}ETag")
                infos.append(ObjectInfo(f"s3://{bucket}/{_below(prefix, key)}", size, etag))
    except (ET.ParseError, LookupError, ValueError) as error:  # LookupError: of an encoding
        message = f"the listing is no answer of S3 ({error}): is the endpoint right?"
        raise AttemptFailed(InvalidResponse, message, RetryVerdict.ONCE) from error
    if page.findtext("{*}IsTruncated", "") != "true":
        return infos, has_marker, None
    token = page.findtext("{*}NextContinuationToken", "")
    if not token:
        message = "the listing has more pages and no token to ask for them: the store doesn't speak ListObjectsV2"
        raise AttemptFailed(InvalidResponse, message, RetryVerdict.ONCE)
    return infos, has_marker, token


def _listing_in(body: bytes) -> ET.Element:
    page = ET.fromstring(body)  # expat refuses entity bombs since 2.4.1
    if page.tag.rpartition("}")[2] != "ListBucketResult":
        raise ValueError(f"it is a {page.tag[:40]}")
    return page


def _below(prefix: str, name: str) -> str:
    """The name; ValueError if it isn't below the prefix."""
    if not name.startswith(prefix) or name == prefix:
        raise ValueError("an entry that isn't below the prefix")
    return name
