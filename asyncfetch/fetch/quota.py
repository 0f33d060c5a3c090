"""What a server says of our quotas with it, by RateLimit. Pure: headers in, seconds out.

The field is of draft-ietf-httpapi-ratelimit-headers, from the eighth on: a list of quotas, by name, each with what
remains of it (r) and the seconds until there is more (t). The Hugging Face Hub sends ``"resolvers";r=2999;t=255`` with
its answers. RateLimit-Policy isn't read: it tells how large the quotas are, not what is left of them, and the Hub's
doesn't keep to the grammar. Nor are the fields of earlier drafts (RateLimit-Reset), seconds here and dates there.

Only a quota with nothing left makes us wait. Of one with less than is in flight nobody knows how much of that the
server has counted already; what is refused then is repeated for nothing, when there is more.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["quotas", "spent_quota_seconds"]

MAX_FIELD_CHARACTERS = 4096
"""What is longer is nobody's quota."""

# Structured fields (RFC 9651), with blanks around every sign. What matches possessively (*+, ?+) is never tried anew,
# so that no field takes more than linear time.
_STRING = r'"(?:[^"\\]|\\["\\])*+"'
_VALUE = rf'(?:{_STRING}|[^\s",;=]++)'
_PARAMETER = re.compile(rf"\s*+;\s*+([a-z*][a-z0-9_.*-]*+)(?:\s*+=\s*+({_VALUE}))?+")
_NAME = re.compile(rf"\s*+({_STRING}|[^\s\",;=]++)")
_COMMA = re.compile(r"\s*+(,|\Z)")
_COUNT = re.compile(r"[0-9]{1,15}")


def spent_quota_seconds(headers: Mapping[str, str]) -> float | None:
    """Seconds until every quota that is spent is open again; None where none is.

    As the Hub's own client does, one second is added, because t is rounded down.
    """
    if "RateLimit" not in headers:  # of nearly all servers
        return None
    field = ",".join(value for name, value in headers.items() if name.lower() == "ratelimit")
    spent = [seconds for remaining, seconds in quotas(field) if remaining == 0]
    return max(spent) + 1.0 if spent else None


def quotas(field: str) -> list[tuple[int, float]]:
    """What remains of each quota, and the seconds until there is more; without those that don't say both.

    Empty where the field is malformed: then it says nothing.
    """
    try:
        members = list(_members(field))
    except ValueError:
        return []
    return [
        (int(parameters["r"]), float(parameters["t"]))
        for parameters in members
        if all(_COUNT.fullmatch(parameters.get(key, "")) for key in "rt")
    ]


def _members(field: str) -> Iterator[dict[str, str]]:
    """The parameters of each member of a list; ValueError where it is none. Of two of one name the last one counts."""
    if len(field) > MAX_FIELD_CHARACTERS:
        raise ValueError("too long")
    at = 0
    while True:
        name = _NAME.match(field, at)
        if name is None:
            raise ValueError(f"no name at {at}")
        at = name.end()
        parameters: dict[str, str] = {}
        while (parameter := _PARAMETER.match(field, at)) is not None:
            parameters[parameter[1]] = parameter[2] or ""
            at = parameter.end()
        comma = _COMMA.match(field, at)
        if comma is None:
            raise ValueError(f"neither a comma nor the end at {at}")
        yield parameters
        if not comma[1]:
            return
        at = comma.end()
