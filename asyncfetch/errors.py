"""Every error a user of asyncfetch can meet, in one tree.

    AsyncFetchError
    ├── ConfigError (ValueError)                    fix the call or the configuration
    │   └── UsageError (TypeError)                  something is iterated, entered, awaited or pickled as it can't be
    ├── FetchError                                  one object could not be read or put; it says url, range, host
    │   ├── NotFound (FileNotFoundError)            the server says that it isn't there
    │   ├── AccessDenied (PermissionError)          credentials are missing, wrong or expired
    │   ├── RangeNotSatisfiable                     the asked range isn't within the object
    │   ├── ObjectChanged                           the object was replaced while it was being read
    │   ├── InvalidResponse                         the server broke the protocol; its bytes were thrown away
    │   ├── Throttled                               the server asked us to slow down for longer than we may wait
    │   ├── FetchTimeout (TimeoutError)             a phase (connect, first byte, stall) took too long
    │   └── ConnectionFailed (ConnectionError)      no connection, or it broke
    ├── DatasetError                                a dataset isn't what it says it is
    │   ├── FormatError                             a file can't be read as what it should be
    │   ├── EpisodeNotFound (KeyError)              no such episode
    │   └── FrameMissing                            the video has no such frame
    ├── DecodeError                                 the bytes came, but no decoder could read them
    ├── CacheError (RuntimeError)                   a cache can't do what was asked within its bounds
    ├── MergeError                                  the datasets can't be merged
    ├── TensorError                                 a remote tensor could not be stored or read
    │   └── ShardNotFound (KeyError)                no such shard
    ├── MissingDependency (ImportError)             an extra isn't installed; the message has the command
    ├── WorkerError (RuntimeError)                  a process that worked for this one has ended, hangs, or can't be had
    ├── ClosedError (RuntimeError)                  you closed it, then used it
    ├── WrongLoop (RuntimeError)                    bound to another event loop, thread or process
    └── StateMismatch (ValueError)                  a saved state belongs to something else

All of them pickle with every field. torch's loaders bring only type and text of what their workers raise.
"""

from __future__ import annotations

import json
import re
from copy import copy
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "AccessDenied",
    "AsyncFetchError",
    "CacheError",
    "ClosedError",
    "ConfigError",
    "ConnectionFailed",
    "DatasetError",
    "DecodeError",
    "EpisodeNotFound",
    "FetchError",
    "FetchTimeout",
    "FormatError",
    "FrameMissing",
    "InvalidResponse",
    "MergeError",
    "MissingDependency",
    "NotFound",
    "ObjectChanged",
    "RangeNotSatisfiable",
    "ShardNotFound",
    "StateMismatch",
    "TensorError",
    "Throttled",
    "UsageError",
    "WorkerError",
    "WrongLoop",
    "about_range",
    "anew",
    "install_command",
    "is_redacted",
    "redact_text",
    "redact_url",
]

_SECRET_NAME = re.compile(
    # Names that gateways, CDNs and signers use, with anything around them; then those that must match as a whole.
    r"token(?!s)|secret|signature|credential|passw|session|(?:api|access|auth|subscription)[-_]?key"
    r"|^(?:sig|key|key-pair-id|policy|(?:aws|oss|google)access(?:keyid|id)|x-xet-signed-range|auth|authorization|jwt"
    r"|hmac|md5|verify|hdn(?:ea|ts|tl))$"
)
_NAME = re.compile(r"(?<![^=?&#;/\s])([^=?&#;/\s]+)=")  # begun anywhere, it would take the square of a long text's time
_REDACTED = re.compile(r"://(?:\*\*\*@|.*[?&#;][^=?&#;]+=\*\*\*(?:[&#;]|$))")


def _secrets_without(characters: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """The patterns of userinfo and of parameters that hold none of the characters."""
    userinfo = rf"(?<=://)[^/?#{characters}]*@"  # to the last @: a password may hold one
    return re.compile(userinfo), re.compile(rf"([?&#;])([^=?&#;{characters}]+)=([^&#;{characters}]+)")


_IN_URL = _secrets_without("")
_IN_TEXT = _secrets_without(r"\s")


def redact_url(url: str) -> str:
    """The url without its password and without the values of its signature parameters, fit for logs and messages.

    A parameter that is itself a url with such a value goes as a whole. Blanks end neither, since not every url has them
    quoted.
    """
    return _redact(url, *_IN_URL)


def redact_text(text: str) -> str:
    """The text with each url in it redacted. Here, a blank ends a url."""
    return _redact(text, *_IN_TEXT)


def _redact(text: str, userinfo: re.Pattern[str], parameter: re.Pattern[str]) -> str:
    return parameter.sub(_redact_parameter, userinfo.sub("***@", text))


def _redact_parameter(match: re.Match[str]) -> str:
    before, name, value = match.groups()
    names = [unquote(name), *_NAME.findall(unquote(unquote(value)))]
    is_secret = any(_SECRET_NAME.search(name.lower()) for name in names)
    return f"{before}{name}={'***' if is_secret else value}"


def is_redacted(url: str) -> bool:
    """Return whether ``redact_url`` has taken a secret out of the url, so that it leads nowhere."""
    return "***" in url and _REDACTED.search(url) is not None


def _rebuild(cls: type[AsyncFetchError], message: str, fields: dict[str, Any]) -> AsyncFetchError:
    error = cls.__new__(cls, message)
    error.args = (message,)
    error.__dict__.update(fields)
    return error


class AsyncFetchError(Exception):
    """Root of every error that asyncfetch raises on purpose."""

    def __str__(self) -> str:
        # KeyError would show the repr of the message, OSError an errno.
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), dict(self.__dict__))


def anew(error: BaseException) -> BaseException:
    """A copy to raise in place of an error of ours that tasks on a loop hold, caused by it. Other errors as they are.

    Raised itself, it would gather its receiver's frames. Ended tasks often wait for the collector of cycles, and so
    would everything that those frames refer to, such as an abandoned stream with its threads and files.
    """
    if not isinstance(error, AsyncFetchError):
        return error
    again = copy(error)
    again.__cause__ = error
    return again


class ConfigError(AsyncFetchError, ValueError):
    """An argument, environment variable or configuration value can't be used; the message says what can."""


class UsageError(ConfigError, TypeError):
    """Something is used as what it isn't: iterated, entered, awaited, called or pickled; the message says how."""


class FetchError(AsyncFetchError):
    """One object could not be read, or put.

    Attributes:
        url: The object, without secrets.
        start: First byte asked for; None for the whole object.
        stop: One past the last byte asked for; None for "to the end".
        host: The host that answered last, after redirects.
        status: HTTP status of the last answer; None without an answer.
        attempts: Number of failed attempts. Redirects, expired signatures and second requests don't count.
    """

    url: str | None
    start: int | None
    stop: int | None
    host: str | None
    status: int | None
    attempts: int

    def __init__(
        self,
        message: str,
        *,
        url: str | None = None,
        start: int | None = None,
        stop: int | None = None,
        host: str | None = None,
        status: int | None = None,
        attempts: int = 0,
    ) -> None:
        self.url = redact_url(url) if url is not None else None
        self.start, self.stop, self.host, self.status, self.attempts = start, stop, host, status, attempts
        super().__init__(message + self._where())

    def _where(self) -> str:
        parts = [self.url] if self.url is not None else []
        if self.start is not None:
            parts.append(f"bytes [{self.start}, {'end' if self.stop is None else self.stop})")
        if self.host is not None:
            parts.append(f"host {self.host}")
        if self.status is not None:
            parts.append(f"status {self.status}")
        if self.attempts:
            parts.append(f"{self.attempts} attempt{'s' if self.attempts > 1 else ''}")
        return f" [{', '.join(parts)}]" if parts else ""


def about_range(error: FetchError, start: int | None, stop: int | None) -> FetchError:
    """The same error for a caller of another range of the object; without a traceback or a cause."""
    message = str(error).removesuffix(error._where())
    other = copy(error)
    other.start, other.stop = start, stop
    other.args = (message + other._where(),)
    return other


class NotFound(FetchError, FileNotFoundError):
    """The server says that the object isn't there. Not retried."""


class AccessDenied(FetchError, PermissionError):
    """The server refuses these credentials, or asks for some."""


class RangeNotSatisfiable(FetchError):
    """The asked range isn't within the object.

    Attributes:
        size: The object's size in bytes, if the server said it.
    """

    size: int | None

    def __init__(self, message: str, *, size: int | None = None, **fields: Any) -> None:  # noqa: ANN401
        self.size = size
        super().__init__(message, **fields)


class ObjectChanged(FetchError):
    """The object was replaced between two requests for it; read it again from the start."""


class InvalidResponse(FetchError):
    """The server's answer contradicts itself or the request. Its bytes were not delivered.

    Attributes:
        ignores_range: Whether the server sends all of a long object whatever the range.
    """

    ignores_range: bool

    def __init__(self, message: str, *, ignores_range: bool = False, **fields: Any) -> None:  # noqa: ANN401
        self.ignores_range = ignores_range
        super().__init__(message, **fields)


class Throttled(FetchError):
    """The server kept answering "slow down" for longer than the retry policy allows."""


class FetchTimeout(FetchError, TimeoutError):
    """Connecting, waiting for the first byte, or waiting for the next one took too long."""


class ConnectionFailed(FetchError, ConnectionError):
    """No connection to the host could be made or kept."""


COPY_ANEW = "copy the file anew, or write it again"
"""Remedy for a file that is damaged or cut off."""
WRITE_ANEW = "write the dataset anew with LeRobot, or take all of its files from one version of it"
"""Remedy for files that contradict each other."""
LEAVE_OUT_EPISODE = "leave the episode out with episodes="
LEAVE_OUT_FEATURE = "leave the feature out with features=, or write the dataset anew with LeRobot"


class DatasetError(AsyncFetchError):
    """The dataset contradicts itself, or isn't one that asyncfetch reads.

    Attributes:
        remedy: What to do about it, at the end of the message; empty if nothing helps, or the message says it.
    """

    remedy: str

    def __init__(self, message: str, *, remedy: str = "") -> None:
        self.remedy = remedy
        super().__init__(f"{message}; {remedy}" if remedy else message)


class FormatError(DatasetError):
    """A file can't be read as what it should be; the message names the file and the number that is off."""


class EpisodeNotFound(DatasetError, KeyError):
    """The dataset has no such episode."""


class FrameMissing(DatasetError):
    """The video holds no frame at the asked position; its neighbours are never given instead."""


class DecodeError(AsyncFetchError):
    """The bytes arrived whole, but no decoder could read them."""


class CacheError(AsyncFetchError, RuntimeError):
    """A cache can't do what was asked within its bounds, or was asked after it was closed."""


class MergeError(AsyncFetchError):
    """The datasets can't be merged, or the result can't be written there; the message lists every reason."""


class TensorError(AsyncFetchError):
    """A remote tensor could not be stored or read.

    Attributes:
        shard_ids: The shards that it is about; may be empty.
    """

    shard_ids: tuple[str, ...]

    def __init__(self, message: str, *, shard_ids: Iterable[str] = ()) -> None:
        self.shard_ids = tuple(shard_ids)
        super().__init__(message)


class ShardNotFound(TensorError, KeyError):
    """Servers hold no such shards: they were cleared, or have expired."""


class MissingDependency(AsyncFetchError, ImportError):
    """An optional dependency isn't installed; the message has the command that installs it."""


class WorkerError(AsyncFetchError, RuntimeError):
    """A process that worked for this one has ended, hangs or failed; the message says how.

    Or a process or thread can't be started; the message has the limit to raise.
    """


class ClosedError(AsyncFetchError, RuntimeError):
    """It was closed, by you, before this call."""


class WrongLoop(AsyncFetchError, RuntimeError):
    """It belongs to another event loop, or to the process before a fork."""


class StateMismatch(AsyncFetchError, ValueError):
    """The saved state belongs to another dataset, order or version; the message has both fingerprints."""


def install_command(extra: str) -> str:
    """The command that installs an extra of asyncfetch, in the checkout if it was installed from one."""
    directory, is_editable = _checkout()
    return f'pip install {"-e " if is_editable else ""}"{directory or "asyncfetch"}[{extra}]"'


@cache
def _checkout() -> tuple[str | None, bool]:
    """The directory that asyncfetch was installed from, and whether it is editable; None if it is no directory."""
    from importlib import metadata  # which loads much, for a message

    try:
        text = metadata.distribution("asyncfetch").read_text("direct_url.json")
    except metadata.PackageNotFoundError:  # imported out of a directory
        return None, False
    about = json.loads(text) if text else {}
    url = urlsplit(about.get("url", ""))
    return (unquote(url.path), about["dir_info"].get("editable", False)) if "dir_info" in about else (None, False)
