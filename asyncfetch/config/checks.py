"""Checks of arguments and of a configuration's fields, by their annotations and by further rules."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import lru_cache, wraps
from inspect import signature
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from asyncfetch.errors import ConfigError, UsageError

P = ParamSpec("P")
T = TypeVar("T")

_WORDS: Mapping[object, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a string",
    PathLike: "a path",
    NoneType: "None",
    Mapping: "a mapping by name",
    Callable: "a function",
}

_SIZE = re.compile(r"(?i)\s*(\d{1,18})\s*(?:([KMGT])(i?))?B?\s*")
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
HEADER_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
"""Characters that no line of a head may hold: all control characters but the tab."""


def require(condition: bool, message: str) -> None:
    """ConfigError with the message unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def require_least(config: object, least: int, *names: str) -> None:
    """ConfigError unless each of these fields is None or at least ``least``."""
    for name in names:
        value = getattr(config, name)
        require(value is None or value >= least, f"{name} must be at least {least}, not {value}")


def _text(where: str, value: object) -> str:
    """The value; ConfigError unless it is a string. It isn't shown."""
    if not isinstance(value, str):
        raise ConfigError(f"{where} must be a string, not of type {type(value).__name__}")
    return value


def require_token(where: str, value: object) -> None:
    """ConfigError unless the value can be a Bearer token. The value isn't shown."""
    token = _text(where, value)
    is_bare = not token.lower().startswith("bearer ")
    require(is_bare, f"{where} must be the token alone: without 'Bearer ' before it")
    fits = token != "" and token.isascii() and token.isprintable() and " " not in token
    require(fits, f"{where} must be printable ASCII without spaces, and not empty: a line of a file needs strip()")


def require_header(where: str, name: object, value: object) -> None:
    """ConfigError unless name and value fit a header: anything else would end it, or the request, early."""
    is_name = isinstance(name, str) and _HEADER.fullmatch(name) is not None
    require(is_name, f"{where} has a name that no header can have: letters, digits and dashes, without the colon")
    one_line = HEADER_CONTROL.search(_text(f"{where}[{name!r}]", value)) is None
    require(one_line, f"{where}[{name!r}] must hold no control character: a line of a file needs strip()")


def check_types(config: Any) -> None:  # noqa: ANN401 - a dataclass
    """ConfigError unless each field of a dataclass holds what its annotation says.

    A whole number is also a number; a boolean is neither. NumPy's numbers become Python's, which can't overflow. The
    contents of mappings aren't checked.
    """
    for name, kind in _kinds(config.__class__).items():
        value = getattr(config, name)
        if isinstance(value, Real):
            try:
                float(value)
            except OverflowError as error:
                raise ConfigError(f"{name} must be a number that a float can hold") from error
        if not _fits(value, kind):
            raise ConfigError(f"{name} must be {_words(kind)}, not {_shown(value, kind)}{size_hint(value)}")
        if isinstance(value, Real) and type(value) not in {bool, int, float}:
            object.__setattr__(config, name, int(value) if isinstance(value, Integral) else float(value))


_ELSEWHERE: Mapping[str, str] = {
    "batch_size": "give it to StreamDataset(stream, batch_size=...) or to the DataLoader",
    "buffer_size": "config=StreamConfig(pool_segments=...) says how many episodes frames are drawn from",
    "delta_timestamps": "LeRobot's delta_timestamps are windows={key: [seconds, ...]} here",
    "image_transforms": "transform= takes a function of a whole sample",
    "num_workers": "give it to the DataLoader",
    "repo_id": "the first argument is a URL, such as 'hf://datasets/org/name'",
    "return_uint8": 'image_dtype="uint8" is the default',
    "root": "the first argument is a URL or a path",
    "video_backend": 'config=StreamConfig(decoder="torchcodec") or "pyav"',
}
"""Arguments of other libraries and of other calls, with their counterparts here."""


def explains_keywords(call: Callable[P, T]) -> Callable[P, T]:
    """Decorate a call: an unknown keyword raises a UsageError that says what to write instead."""
    known = [name for name in signature(call).parameters if name != "self"]
    name = call.__qualname__.removesuffix(".__init__")

    @wraps(call)
    def checked(*args: P.args, **keywords: P.kwargs) -> T:
        for keyword in keywords:
            if keyword not in known:
                hint = _ELSEWHERE.get(keyword) or f"it has {', '.join(get_close_matches(keyword, known) or known)}"
                raise UsageError(f"{name}() has no argument {keyword}=: {hint}")
        return call(*args, **keywords)

    return checked


@lru_cache
def _kinds(config: type) -> dict[str, Any]:
    return get_type_hints(config)


def _fits(value: object, kind: Any) -> bool:  # noqa: ANN401 - an annotation
    origin = get_origin(kind) or kind
    if origin in (UnionType, Union):
        return any(_fits(value, one) for one in get_args(kind))
    if origin is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if isinstance(value, bool):
        return origin is bool
    return isinstance(value, {int: Integral, float: Real}.get(origin, origin))


def _words(kind: Any) -> str:  # noqa: ANN401 - an annotation
    origin = get_origin(kind) or kind
    if origin in (UnionType, Union):
        return " or ".join(_words(one) for one in get_args(kind))
    if origin is Literal:
        return " or ".join(map(repr, get_args(kind)))
    return _WORDS.get(origin) or f"a {kind.__name__}"


def _shown(value: object, kind: Any) -> str:  # noqa: ANN401 - an annotation
    """A refused value, for a message; only its type if it might be a secret."""
    is_plain = value is None or isinstance(value, Real) or bool(size_hint(value))
    is_choice = isinstance(value, str) and any(get_origin(one) is Literal for one in (kind, *get_args(kind)))
    return f"{value!r:.80}" if is_plain or is_choice else f"of type {type(value).__name__}"


def size_hint(value: object) -> str:
    """Return what to write in place of a size such as "4GiB"; empty for anything else."""
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return ""
    number, prefix, binary = match.groups()
    if not prefix:
        return f": write {number}"
    power = "KMGT".index(prefix.upper()) + 1
    return f": write {number} * {f'2**{10 * power}' if binary else f'10**{3 * power}'}"


def is_whole_number(value: object) -> bool:
    """Return whether the value is a whole number of Python or NumPy; a boolean isn't."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def index_of(value: Any) -> int:  # noqa: ANN401 - what a user gave
    """``operator.index``, which also takes a tensor; TypeError for a boolean: masks are no indices."""
    if isinstance(value, bool):
        raise TypeError(f"{value} is no index")
    return operator.index(value)


def whole_number(name: str, value: Any, *, least: int) -> int:  # noqa: ANN401 - what a user gave
    """The value as Python's int, which can't overflow; ConfigError if it isn't whole, or less than ``least``."""
    if not is_whole_number(value) or value < least:
        raise ConfigError(f"{name} must be a whole number, at least {least}, not {value!r}{size_hint(value)}")
    return int(value)


def chosen_features(features: Collection[str] | None) -> tuple[str, ...] | None:
    """Return a user's ``features`` as a tuple, since an iterator gives them only once.

    Raises:
        ConfigError: They aren't a collection of keys.
    """
    if features is None:
        return None
    if isinstance(features, str) or not isinstance(features, Iterable):
        raise ConfigError(f"features must be a collection of keys, or None for all, not {features!r}")
    return tuple(features)


def check_keys(chosen: Iterable[str], known: Collection[str], argument: str, owner: str) -> None:
    """Check that each chosen key is known.

    Args:
        chosen: Keys that a user gave.
        known: Keys that there are.
        argument: The user's argument, for the message.
        owner: The dataset, or the member of a mixture, for the message.

    Raises:
        ConfigError: A key isn't known.
    """
    unknown = [key for key in chosen if key not in known]
    if unknown:
        raise ConfigError(
            f"{argument}: {owner} has no feature {', '.join(map(repr, unknown))}; it has {', '.join(known) or 'none'}"
        )


def absolute_directory(directory: str | os.PathLike[str]) -> Path:
    """The absolute path, without access to the disk; ConfigError for a name that no directory can have."""
    try:
        path = Path(directory).expanduser().absolute()
    except TypeError:
        raise ConfigError(f"a directory must be a path, such as '/scratch/files', not {directory!r:.80}") from None
    except RuntimeError as error:
        raise ConfigError(f"the directory {os.fspath(directory)!r} begins with a user who has no home here") from error
    if not os.fspath(directory) or "\0" in str(path):
        raise ConfigError(f"{os.fspath(directory)!r} doesn't name a directory")
    return path
