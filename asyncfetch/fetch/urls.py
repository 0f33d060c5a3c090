"""Urls below a root, and what none may hold. Pure."""

from __future__ import annotations

import re
from urllib.parse import quote, urlsplit, urlunsplit

from asyncfetch.errors import ConfigError, redact_url

__all__ = ["check_characters", "hidden", "join_url"]

_QUOTED_SCHEMES = frozenset({"http", "https", "file"})
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def check_characters(url: str) -> None:
    """ConfigError where a quoted url holds a control character: parsers leave tabs and line ends out, without a word.

    What is left names another object.
    """
    if _CONTROL.search(url):
        message = "holds a control character: take strip() of a line of a file, or quote it, as %09 for a tab"
        raise ConfigError(f"{hidden(url)} {message}")


def hidden(url: str) -> str:
    """What can't be parsed, for a message: where a password in it ends is anybody's guess."""
    return repr(redact_url(re.sub(r"//.*@", "//***@", _CONTROL.sub("", url))))


def join_url(root: str, path: str) -> str:
    """The url of ``path`` below ``root``; a query of the root (a token, a signature) is kept.

    Args:
        root: http(s):// or file:// URL, an address of another scheme, or a plain path. With or without a slash behind.
        path: Relative, parts separated by slashes, never quoted. It is percent-quoted where the root is a URL; plain
            paths and the addresses of stores (s3://, hf://, fsspec's) take it as it is.

    Raises:
        ConfigError: The root is a URL that can't be parsed, or holds a control character.
    """
    scheme, separator, place = root.partition("://")
    if not separator:
        return f"{root.rstrip('/')}/{path}" if root else path
    if scheme.lower() not in _QUOTED_SCHEMES:
        return f"{scheme}://{place.rstrip('/')}/{path}"
    check_characters(root)
    try:
        parts = urlsplit(root)
    except ValueError as error:
        raise ConfigError(f"{redact_url(root)!r} isn't a url: {error}") from error
    return urlunsplit((parts.scheme, parts.netloc, f"{parts.path.rstrip('/')}/{quote(path)}", parts.query, ""))
