"""Settings whose values no repr shows and no pickle carries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from asyncfetch.config.checks import require
from asyncfetch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Secrets"]

V = TypeVar("V")


class Secrets(Mapping[str, V]):
    """A setting by host or scheme whose values no repr shows and no pickle carries.

    Its pickle has the names alone: it may end in a log, a checkpoint or on another machine. The one exception is the
    pickle that multiprocessing sends down a pipe to a process that it is starting, such as a loader's worker by spawn.
    Copies share the values.

    Args:
        setting: The field that it stands in, for messages.
        values: By name.

    Raises:
        ConfigError: Of a value that a pickle left behind, when it is asked for; its name may be. And of ``values`` that
            are no mapping.
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

    def __repr__(self) -> str:
        return f"<{self._setting} for {', '.join(self._names) or 'nobody'}>"

    def __copy__(self) -> Secrets[V]:
        return self

    def __deepcopy__(self, _: object) -> Secrets[V]:
        return self

    def __reduce__(self) -> tuple[Callable[..., Secrets[V]], tuple[object, ...]]:
        from multiprocessing.context import get_spawning_popen  # not needed by who never pickles

        if self._values is not None and get_spawning_popen() is not None:
            return Secrets, (self._setting, self._values)
        return _left_behind, (self._setting, self._names)


def _left_behind(setting: str, names: tuple[str, ...]) -> Secrets[V]:
    secrets: Secrets[V] = Secrets(setting, {})
    secrets._names, secrets._values = names, None if names else {}
    return secrets
