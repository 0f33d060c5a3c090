"""Urls below a root. Pure."""

from __future__ import annotations

from urllib.parse import quote, urlsplit, urlunsplit

from asyncfetch.errors import ConfigError, redact_url

__all__ = ["join_url"]

_QUOTED_SCHEMES = frozenset({"http", "https", "file"})


def join_url(root: str, path: str) -> str:
    """The url of ``path`` below ``root``; a query of the root (a token, a signature) is kept.

    Args:
        root: http(s):// or file:// URL, an address of another scheme, or a plain path. With or without a slash behind.
        path: Relative, parts separated by slashes, never quoted. It is percent-quoted where the root is a URL; plain
            paths and the addresses of stores (s3://, hf://, fsspec's) take it as it is.
    """
    scheme, separator, place = root.partition("://")
    if not separator:
        return f"{root.rstrip('/')}/{path}" if root else path
    if scheme.lower() not in _QUOTED_SCHEMES:
        return f"{scheme}://{place.rstrip('/')}/{path}"
    try:
        parts = urlsplit(root)
    except ValueError as error:
        raise ConfigError(f"{redact_url(root)!r} isn't a url: {error}") from error
    return urlunsplit((parts.scheme, parts.netloc, f"{parts.path.rstrip('/')}/{quote(path)}", parts.query, ""))
