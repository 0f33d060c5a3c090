"""Common input and output of all commands: options, sizes and progress."""

from __future__ import annotations

import math
import re
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from asyncfetch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CaFile = Annotated[
    str | None, typer.Option(help="PEM file of authorities to trust. [default: the system's]", show_default=False)
]
Recursive = Annotated[bool, typer.Option("--recursive", "-r", help="Include subdirectories.")]

_PREFIXES = "KMGTPE"
_SIZE = re.compile(r"(?i)\s*(\d{1,18}(?:\.\d{0,18})?|\.\d{1,18})\s*(?:([KMGTPE])(i?))?B?\s*")


def format_bytes(number: int) -> str:
    """The number as "0 B", "1.50 KiB" or "64.0 GiB", with three significant digits."""
    if number < 1024:
        return f"{number} B"
    power = min(int(math.log2(number)) // 10, len(_PREFIXES))
    value = number / 1024**power
    if value >= 1000 and power < len(_PREFIXES):
        value, power = value / 1024, power + 1
    written = (f"{value:.{decimals}f}" for decimals in (2, 1, 0))  # 9.996 is 10.0
    digits = next((each for each in written if len(each) <= len("1.00")), f"{value:.0f}")
    return f"{digits} {_PREFIXES[power - 1]}iB"


def parse_bytes(text: str) -> int:
    """The number of bytes in "1000", "10GiB", "1.5 TB" or "64k"; units without an i are powers of 1000.

    Raises:
        ConfigError: It isn't a size.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} is no size: write a number of bytes, or one with a unit, such as 500MB or 10GiB")
    number, prefix, binary = match.groups()
    power = _PREFIXES.index(prefix.upper()) + 1 if prefix else 0
    return int(float(number) * (1024 if binary else 1000) ** power) if power or "." in number else int(number)


class LineProgress:
    """Prints progress on stderr, a line for each tenth."""

    def __init__(self) -> None:
        self._said: tuple[str, int] = ("", -1)

    def say(self, doing: str, share: float, more: str = "") -> None:
        """Print the done share of an action, and more text, if the tenth or the action is new."""
        now = doing, int(10 * share)
        if now != self._said and sys.stderr is not None:
            print(f"{doing}: {10 * now[1]} %{more and f', {more}'}", file=sys.stderr, flush=True)
        self._said = now


@contextmanager
def progress(doing: str, *, hidden: bool = False) -> Iterator[Callable[..., None]]:
    """Show a command's progress on stderr, from its beginning, and 100 % if it succeeds.

    It is a bar on a terminal, else a line for each tenth. The block gets a function of the current action, its done
    share, and optional text after it.

    Args:
        doing: The first action, in a word or two.
        hidden: Show nothing.
    """
    console = Console(stderr=True)
    latest = [doing, ""]
    if hidden or not console.is_interactive:
        say = (lambda *_: None) if hidden else LineProgress().say

        def show(now: str, share: float, more: str = "") -> None:
            latest[:] = now, more
            say(now, share, more)

        show(doing, 0.0)
        yield show
        show(latest[0], 1.0, latest[1])
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        TextColumn("{task.fields[more]}"),
    )
    with Progress(*columns, console=console, refresh_per_second=4, expand=True) as bar:
        task = bar.add_task(doing, total=1.0, more="")

        def draw(now: str, share: float, more: str = "") -> None:
            bar.update(task, description=now, completed=share, more=more)

        yield draw
        bar.update(task, completed=1.0)
