"""Statistics as people read them, and the sum of several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, Self

__all__ = ["Figures"]


class Figures:
    """A dataclass of statistics. Its ``repr`` is a line of the figures that matter, its ``str`` a table of all."""

    __slots__ = ()

    telling: ClassVar[tuple[str, ...]] = ()
    """The fields that matter."""
    is_line: ClassVar[bool] = False
    """True if a table has it in one line."""

    def __repr__(self) -> str:
        told = ", ".join(f"{name}={_short(getattr(self, name))}" for name in self.telling)
        return f"{type(self).__name__}({told})"

    def __str__(self) -> str:
        rows = list(_rows(self, ""))
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join(f"{name:{width}}  {value}".rstrip() for name, value in rows)

    def plus(self, other: Self) -> Self:
        """Return the sum, as if what both counted had been counted by one."""
        together = {item.name: _sum(getattr(self, item.name), getattr(other, item.name)) for item in fields(self)}  # type: ignore[arg-type]
        return type(self)(**together)


def _short(value: Any) -> str:  # noqa: ANN401
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, Mapping):
        return str(len(value))
    return repr(value)


def _rows(of: Any, indent: str) -> list[tuple[str, str]]:  # noqa: ANN401
    rows: list[tuple[str, str]] = []
    values = of.items() if isinstance(of, Mapping) else [(each.name, getattr(of, each.name)) for each in fields(of)]
    for key, value in values:
        name = f"{indent}{key}"
        if isinstance(value, Mapping) or (isinstance(value, Figures) and not value.is_line):
            rows += [(name, ""), *_rows(value, f"{indent}  ")]
        elif value is not None:
            rows.append((name, f"{value:,}" if isinstance(value, int) else _short(value)))
    return rows


def _sum(one: Any, other: Any) -> Any:  # noqa: ANN401
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, Figures):
        return one.plus(other)
    if isinstance(one, Mapping):
        return {key: _sum(one.get(key), other.get(key)) for key in {**one, **other}}
    return one + other
