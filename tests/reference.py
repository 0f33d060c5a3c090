"""Writes asyncfetch/REFERENCE.md out of the docstrings of every public name.

python -m tests.reference
"""

from __future__ import annotations

import inspect
import re
import textwrap
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import asyncfetch as af

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE: Final = Path(__file__).parents[1] / "asyncfetch" / "REFERENCE.md"
ROOMS: Final = ("torch", "tensors", "distributed", "testing", "compat.lerobot", "prometheus")
"""Modules with public names of their own, beside those of the root."""
LONGEST_HEADING: Final = 300
HEAD: Final = """# Reference

Every public name, by module, with its docstring. What each setting of a configuration does is in
[bounds and defaults](config/README.md). `python -m tests.reference` writes this page.
"""
_SECTION: Final = re.compile(r"(Args|Returns|Raises|Yields|Attributes|Notes?):")
_ENTRY: Final = re.compile(r"    (\*{0,2}\w+(?:, \*{0,2}\w+)*):( |$)")


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    for module, names in modules():
        parts.append(f"## {module.__name__}\n")
        for name in sorted(names, key=str.casefold):
            parts += entry(f"{module.__name__}.{name}".replace("asyncfetch.", "af.", 1), getattr(module, name))
    return "\n".join(parts).rstrip() + "\n"


def modules() -> Iterator[tuple[Any, list[str]]]:
    """Each module, and the names that it is the home of for a user."""
    yield af, [name for name in af.__all__ if not inspect.ismodule(getattr(af, name))]
    for room in ROOMS:
        module = import_module(f"asyncfetch.{room}")
        yield module, list(module.__all__)


def entry(shown: str, thing: Any) -> Iterator[str]:  # noqa: ANN401 - whatever a module exports
    """A name with its signature and its docstring; of a class also what it can do."""
    if not (inspect.isclass(thing) or inspect.isroutine(thing)):
        yield f"### {shown}\n\n`{thing!r}`\n" if isinstance(thing, (str, int, tuple)) else f"### {shown}\n"
        return
    call = signature(thing)
    if len(call) <= LONGEST_HEADING:
        yield f"### {shown}{call}\n"
    else:
        yield f"### {shown}(...)\n\n```text\n{textwrap.fill(shown + call, 120, subsequent_indent='    ')}\n```\n"
    yield docstring(thing)
    if inspect.isclass(thing):
        for name, member in members(thing):
            call = "" if isinstance(member, property) else signature(getattr(thing, name))
            what = member.fget if isinstance(member, property) else getattr(thing, name)
            first = docstring(what).split("\n\n")[0].replace("\n", " ").strip()
            yield f"- **`{name}{call}`** {first}".rstrip()
        yield ""


def members(kind: type[Any]) -> list[tuple[str, Any]]:
    """Public methods and properties that a class of ours, or one that it derives from, has and documents."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("asyncfetch"):
            found |= {name: member for name, member in vars(base).items() if name[0] != "_"}
    return [
        (name, member)
        for name, member in sorted(found.items())
        if isinstance(member, (property, staticmethod, classmethod)) or inspect.isroutine(member)
    ]


def attributes(kind: type) -> set[str]:
    """Names that the docstrings of a class, and of those that it derives from, list as its attributes."""
    listed = [
        (inspect.getdoc(base) or "").partition("\nAttributes:\n")[2].partition("\n\n")[0] for base in kind.__mro__
    ]
    return {found[1] for text in listed for line in text.splitlines() if (found := _ENTRY.match(line))}


def signature(thing: Any) -> str:  # noqa: ANN401
    """Names and defaults, without types, which the docstring tells in words."""
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return ""
    parameters = [
        each.replace(annotation=inspect.Parameter.empty, default=shown_default(thing, each))
        for name, each in found.parameters.items()
        if name != "self"
    ]
    return str(found.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


@dataclass(frozen=True)
class Shown:
    """A default as the page shows it."""

    text: str

    def __repr__(self) -> str:
        return self.text


def shown_default(thing: Any, parameter: inspect.Parameter) -> Any:  # noqa: ANN401
    """The default itself, unless its repr is long or an address."""
    default = parameter.default
    if repr(default) == "<factory>":
        [factory] = [field.default_factory for field in fields(thing) if field.name == parameter.name]
        return Shown(f"{getattr(factory, '__name__', factory)}()")
    if is_dataclass(default) and not isinstance(default, type) and default == type(default)():
        return Shown(f"{type(default).__name__}()")
    return Shown(default.__name__) if inspect.isfunction(default) else default


def docstring(thing: Any) -> str:  # noqa: ANN401
    """As Markdown: sections in bold, their entries as a list."""
    lines: list[str] = []
    in_section = False
    for line in (inspect.getdoc(thing) or "").splitlines():
        section, found = _SECTION.fullmatch(line), _ENTRY.match(line)
        if section:
            lines += [f"**{section[1]}**", ""]
        elif in_section and found:
            lines.append(f"- `{found[1]}`: {line[found.end() :]}".rstrip())
        elif in_section and line.startswith("    "):
            lines.append("  " + line.strip() if lines[-1].startswith(("-", "  ")) else line.strip())
        else:
            lines.append(line)
        in_section = bool(section) or (in_section and (not line or line.startswith("    ")))
    return "\n".join(lines).replace("``", "`") + "\n"


if __name__ == "__main__":
    PAGE.write_text(render())
