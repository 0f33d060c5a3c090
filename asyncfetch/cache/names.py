"""The name of an object, however its url is signed today."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["object_name"]

_AMAZON: Final = "algorithm credential date expires security-token signature signedheaders"
_OLDER: Final = "signature awsaccesskeyid googleaccessid expires policy key-pair-id x-amz-security-token"
_AZURE: Final = "sig sv ss srt st se sr sp spr sip si sdd scid skoid sktid skt ske sks skv saoid suoid"
_SIGNED_BY: Final[Mapping[str, frozenset[str]]] = {
    "x-amz-signature": frozenset(f"x-amz-{name}" for name in _AMAZON.split()),
    "x-goog-signature": frozenset(f"x-goog-{name}" for name in _AMAZON.split()),
    "signature": frozenset(_OLDER.split()),  # S3's and Google's first form, and CloudFront's
    "sig": frozenset(_AZURE.split()),
}
"""All that a url's signature consists of, by the parameter that makes it a signed one. Without that parameter the
others mean something else: a plain ``?expires=`` or ``?st=`` may choose the content."""


def object_name(url: str) -> str:
    """The url without the parameters of its signature: the same for every signature that one object is asked by.

    Everything else stays as it is, in its order: a ``versionId`` names another content, and so may a user or a token.
    """
    base, mark, rest = url.partition("?")
    if not mark:
        return url
    query, hash_mark, fragment = rest.partition("#")
    parameters = [(part.partition("=")[0].lower(), part) for part in query.split("&")]
    names = {name for name, _ in parameters}
    signature = frozenset[str]().union(*(parts for sign, parts in _SIGNED_BY.items() if sign in names))
    if not signature:
        return url
    kept = "&".join(part for name, part in parameters if name not in signature)
    return base + (mark + kept if kept else "") + hash_mark + fragment
