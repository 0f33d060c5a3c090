"""Settings and urls that keep their secrets out of every repr and pickle.

A pickle may end in a log, a checkpoint or on another machine. There are two exceptions: the pickle that multiprocessing
sends down a pipe to a process that it is starting, such as a spawned loader worker, and the messages between a merge
and its processes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Self, TypeVar

from asyncfetch.config.checks import require
from asyncfetch.errors import ConfigError, redact_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

V = TypeVar("V")

_LOST_SLASH = re.compile(r"(https?|s3|hf|gs|gcs|az|abfs|sftp|file):/(?!/)")
_HUB_PAGE = re.compile(
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/datasets/([^/?#]+/[^/?#]+)(?:/(?:tree|blob)/([^/?#]+)[^?#]*)?/?(?:[?#].*)?$"
)
"""A dataset's page in a browser; its files are below ``/resolve/``."""
_PASSWORD = re.compile(r"(?<=://)[^/?#]*:[^/?#]*@")


class Secrets(Mapping[str, V]):
    """A setting by host or scheme. Reprs and pickles have its names, but not its values; copies share the values.

    Args:
        setting: Name of the field, for messages.
        values: By name.

    Raises:
        ConfigError: ``values`` isn't a mapping, or a value is read that a pickle left behind.
    """

    __slots__ = ("_names", "_setting", "_values")

    def __init__(self, setting: str, values: Mapping[str, V]) -> None:
        require(isinstance(values, Mapping), f"{setting} must be a mapping by name, not {type(values).__name__}")
        self._setting = setting
        self._names = tuple(values)
        self._values: Mapping[str, V] | None = dict(values)

    def __getitem__(self, name: str) -> V:
        if self._values is not None:
            return self._values[name]
        if name not in self._names:
            raise KeyError(name)
        raise ConfigError(
            f"{self._setting}[{name!r}] stayed behind when this configuration was pickled: set it again where it is"
            f" used, by dataclasses.replace(config, {self._setting}={{{name!r}: ...}}). Only a process that"
            " multiprocessing starts with it, such as a loader's worker, gets it by pickle"
        )

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Secrets):
            return (self._names, self._values) == (other._names, other._values)
        return self._values == other

    def __hash__(self) -> int:
        return hash(self._names)

    def __repr__(self) -> str:
        return f"<{self._setting} for {', '.join(self._names) or 'nobody'}>"

    def __copy__(self) -> Secrets[V]:
        return self

    def __deepcopy__(self, _: object) -> Secrets[V]:
        return self

    def __reduce__(self) -> tuple[Callable[..., Secrets[V]], tuple[object, ...]]:
        if self._values is not None and goes_to_own_child():
            return Secrets, (self._setting, self._values)
        return _left_behind, (self._setting, self._names)


class PrivateUrl(str):
    """A url or path; reprs and pickles leave out its password and signature. Otherwise a string.

    The fetcher refuses an unpickled url that lost its secrets, by ConfigError. Copies are whole.
    """

    __slots__ = ()

    def __new__(cls, url: str | os.PathLike[str]) -> Self:
        """ConfigError if it is empty, or neither a string nor a path."""
        is_one = isinstance(url, str | os.PathLike)
        require(is_one and url != "", f"a url or a path is needed, not {url!r}")
        text = os.fspath(url)
        mistake = None if isinstance(url, str) else _LOST_SLASH.match(text)
        if mistake is not None:
            whole = f"{mistake[1]}://{text[mistake.end() :]}"
            raise ConfigError(f"{url!r} has lost a slash of its url: give the string {redact_url(whole)!r}")
        if text.startswith("~"):
            raise ConfigError(f"{text!r} is a home directory to a shell alone: give Path({text!r}).expanduser()")
        page = _HUB_PAGE.match(text)
        if page is not None:
            repository, revision = page.groups()
            address = f"hf://datasets/{repository}{(revision and '@' + revision) or ''}"
            raise ConfigError(f"{text!r} is a page of the Hub: give {address!r} for the dataset")
        return super().__new__(cls, text)

    @property
    def has_secrets(self) -> bool:
        """True if a pickle leaves a part of it out."""
        return _without_secrets(self) != self

    def __repr__(self) -> str:
        return repr(redact_url(self))

    def __copy__(self) -> PrivateUrl:
        return self

    def __deepcopy__(self, _: object) -> PrivateUrl:
        return self

    def __reduce__(self) -> tuple[Callable[..., PrivateUrl], tuple[str]]:
        return PrivateUrl, (str(self) if goes_to_own_child() else _without_secrets(self),)


def _without_secrets(url: str) -> str:
    """The url without secrets. A web url's user name may be a token, its query a signature; else "?" is in a name."""
    if url.lower().startswith(("http://", "https://")):
        return redact_url(url)
    return _PASSWORD.sub("***@", url)


_is_among_own = ContextVar("asyncfetch_among_own_processes", default=False)


@contextmanager
def among_own_processes() -> Iterator[None]:
    """Let pickles made in this block keep secrets: they go through a pipe to or from a process that we started."""
    token = _is_among_own.set(True)
    try:
        yield
    finally:
        _is_among_own.reset(token)


def goes_to_own_child() -> bool:
    """Return whether the pickle being made goes to a process of ours, or to one that multiprocessing is starting."""
    from multiprocessing.context import get_spawning_popen  # needed only to pickle

    return _is_among_own.get() or get_spawning_popen() is not None


def _left_behind(setting: str, names: tuple[str, ...]) -> Secrets[V]:
    secrets: Secrets[V] = Secrets(setting, {})
    secrets._names, secrets._values = names, None if names else {}
    return secrets
