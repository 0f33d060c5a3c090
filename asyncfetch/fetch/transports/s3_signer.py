"""What aiobotocore knows: credentials, regions, endpoints, and how to sign.

It reads files (profiles, tokens) and takes 0.3 s of pure Python to make a client, on whatever loop it runs, and it
refreshes credentials there when it likes. So it runs on a loop of its own, in a thread, and hands over signed urls. It
moves no object's byte: its ``get_object`` costs ten times what our own request does, and it follows redirects with the
session token in its hand.
"""

from __future__ import annotations

import logging
import math
import re
import time
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import anyio
from anyio import to_thread

from asyncfetch.errors import AccessDenied, ConfigError, MissingDependency
from asyncfetch.fetch.addresses import Found, FoundOnce
from asyncfetch.fetch.retry import AttemptFailed, Verdict
from asyncfetch.runtime.exits import in_thread
from asyncfetch.runtime.fork import forks_wait
from asyncfetch.runtime.loop_thread import LoopThread

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from asyncfetch.config import S3Config

__all__ = ["S3Signer", "Signed"]

MAX_REGIONS = 64
"""Clients that are kept; AWS has fewer regions."""
AWS_HOSTS = (".amazonaws.com", ".amazonaws.com.cn")
REGION_IN_HOST = re.compile(r"https?://s3\.([a-z0-9-]+)\.backblazeb2\.com(?::\d+)?/?")
"""Backblaze B2 has an endpoint for each region, named after it; a signature has to name the same."""
USUAL_ENDPOINT = re.compile(r"https?://s3(?:-fips)?(?:\.dualstack)?(?:\.(?!us-gov-)[a-z0-9-]+)?\.amazonaws\.com/?")
"""In all of these a bucket's name means the same one. Others of AWS's (China, the government's, Outposts) have buckets
of their own."""
THREAD_NAME = "asyncfetch s3"


@dataclass(frozen=True, slots=True)
class Signed:
    """A request that its signature makes good for a while."""

    url: str = field(repr=False)
    headers: Mapping[str, str]
    """Must be sent with it: the signature covers them."""
    seconds: float
    """How long it is good for, from now; infinite where nothing is signed."""


class S3Signer:
    """Signs requests to S3. Its verbs are for one loop; ``aclose`` ends its thread."""

    def __init__(self, config: S3Config, thread: LoopThread) -> None:
        """Takes over ``thread``; use ``open``."""
        self._thread = thread
        self._clients = _Clients(config)
        self._holding = thread.start(self._clients.hold)

    @classmethod
    async def open(cls, config: S3Config) -> S3Signer:
        """A signer with a thread of its own; MissingDependency without aiobotocore."""
        return await to_thread.run_sync(lambda: cls(config, _start()), limiter=anyio.CapacityLimiter(1))

    async def aclose(self) -> None:
        """Ends the thread and what runs on it."""
        await in_thread(self._close)

    def _close(self) -> None:
        self._holding.end()
        self._thread.close()

    async def sign(self, operation: str, parameters: Mapping[str, str | int], region: str | None) -> Signed:
        """A url for ``operation``, good for the method of HTTP that this has.

        Args:
            operation: As boto3 names it: "get_object", "list_objects_v2", "upload_part".
            parameters: As boto3 names them.
            region: The bucket's; None means the configured one.

        Raises:
            AttemptFailed: No credentials, or the service that gives them out didn't answer.
            ConfigError: The profile, region, endpoint or bucket can't be used.
        """
        return await self._thread.acall(self._clients.sign, operation, parameters, region)

    async def endpoint(self) -> str:
        """The url of the store that requests are signed for; empty for AWS. Errors are those of ``sign``."""
        return await self._thread.acall(self._clients.endpoint)


def _start() -> LoopThread:
    try:
        with forks_wait():
            import aiobotocore.session  # noqa: F401 - takes half a second, so not on anybody's loop
    except ImportError as error:
        raise MissingDependency('s3:// urls need aiobotocore: pip install "asyncfetch[s3]"') from error
    logging.getLogger("botocore.auth").addFilter(_says_nothing_of_ours)
    return LoopThread(name=THREAD_NAME)


def _says_nothing_of_ours(record: logging.LogRecord) -> bool:
    """Whether to log a record: at DEBUG, botocore writes down what it signs, the token and the signature with it."""
    return record.threadName != THREAD_NAME


class _Clients:
    """A client per region. All of it runs on the signer's thread."""

    def __init__(self, config: S3Config) -> None:
        self._config = config
        self._clients: FoundOnce[str | None, Any] = FoundOnce(time.monotonic, MAX_REGIONS)
        self._open = AsyncExitStack()
        self._session: Any = None

    async def hold(self) -> None:
        """Runs as long as the loop, whatever ends that, and then closes the clients."""
        async with self._open:
            await anyio.sleep_forever()

    async def sign(self, operation: str, parameters: Mapping[str, str | int], region: str | None) -> Signed:
        with _errors_of_ours():
            client = await self._client(region)
            url: str = await client.generate_presigned_url(
                operation, Params=self._parameters(parameters), ExpiresIn=self._config.presign_seconds
            )
            return Signed(url, self._headers(url), await self._life())

    async def endpoint(self) -> str:
        with _errors_of_ours():
            url: str = (await self._client(self._config.region)).meta.endpoint_url
            return "" if USUAL_ENDPOINT.fullmatch(url) else url.rstrip("/")

    async def _client(self, region: str | None) -> Any:  # noqa: ANN401 - untyped
        return await self._clients.get(region, lambda: self._make(region))

    async def _make(self, region: str | None) -> Found[Any]:
        from aiobotocore.session import AioSession

        if self._session is None:
            self._session = AioSession(profile=self._config.profile)
        client = await self._enter(region, self._style())
        named = REGION_IN_HOST.fullmatch(client.meta.endpoint_url)
        if named is not None and region is None and self._session.get_config_variable("region") is None:
            client = await self._enter(named[1], self._style())
        if self._style() == "auto" and client.meta.endpoint_url.endswith(AWS_HOSTS):
            # "auto" signs for the global endpoint, which redirects to the region for a day after a bucket was made.
            client = await self._enter(region, "virtual")
        return Found(client)

    def _style(self) -> str:
        if self._config.path_style is None:
            return "auto"  # path where an endpoint is configured, here or in the environment
        return "path" if self._config.path_style else "virtual"

    async def _enter(self, region: str | None, addressing_style: str) -> Any:  # noqa: ANN401 - untyped
        from aiobotocore.config import AioConfig
        from botocore import UNSIGNED

        config = AioConfig(
            signature_version=UNSIGNED if self._config.anonymous else "s3v4",
            s3={"addressing_style": addressing_style},
            # B2, older MinIO, GCS and others refuse what newer SDKs add by themselves.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        made = self._session.create_client(
            "s3", region_name=region or self._config.region, endpoint_url=self._config.endpoint_url, config=config
        )
        return await self._open.enter_async_context(made)

    def _parameters(self, parameters: Mapping[str, str | int]) -> dict[str, str | int]:
        payer = {"RequestPayer": "requester"} if self._config.requester_pays else {}
        return {**parameters, **payer}

    def _headers(self, url: str) -> dict[str, str]:
        signed = parse_qs(urlsplit(url).query).get("X-Amz-SignedHeaders", [""])[0].split(";")
        # Without a signature nothing says that the header belongs to the request; the bucket's owner wants it still.
        payer = self._config.requester_pays and (self._config.anonymous or "x-amz-request-payer" in signed)
        return {"x-amz-request-payer": "requester"} if payer else {}

    async def _life(self) -> float:
        if self._config.anonymous:
            return math.inf
        # A url signed with temporary credentials dies with them. Only refreshable ones know when that is.
        expiry = getattr(await self._session.get_credentials(), "_expiry_time", None)
        left = math.inf if expiry is None else expiry.timestamp() - time.time()
        return max(0.0, min(float(self._config.presign_seconds), left))


@contextmanager
def _errors_of_ours() -> Iterator[None]:
    """What botocore raises of credentials and configurations, as what callers can do about it."""
    from botocore import exceptions

    try:
        yield
    except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError) as error:
        message = (
            f"{error}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, log in, or read a public"
            " bucket with FetchConfig(s3=S3Config(anonymous=True))"
        )
        raise AttemptFailed(AccessDenied, message, Verdict.FATAL) from error
    except (exceptions.CredentialRetrievalError, exceptions.HTTPClientError) as error:
        raise AttemptFailed(AccessDenied, f"the credentials for S3 can't be had: {error}") from error
    except (exceptions.SSOError, exceptions.ClientError) as error:
        message = f"the credentials for S3 can't be had, log in again: {error}"
        raise AttemptFailed(AccessDenied, message, Verdict.FATAL) from error
    except (exceptions.BotoCoreError, ValueError) as error:
        raise ConfigError(f"a request to S3 can't be made from this url or configuration: {error}") from error
