"""The keys that a user chooses: by ``features=``, ``windows=``, ``columns()`` and a mixture's ``keys=``. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from asyncfetch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection


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
