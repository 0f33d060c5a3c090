"""Other libraries' commands, on this one's datasets."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["run"]

OPTIONS_ARE_THEIRS = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
"""All that comes after the command's name."""


def run(
    context: typer.Context,
    command: Annotated[str, typer.Argument(metavar="COMMAND", help="LeRobot's, such as lerobot-train")],
) -> None:
    """Run one of LeRobot's commands, its datasets read by asyncfetch: from the Hub, or any URL as --dataset.root."""
    from asyncfetch.compat.lerobot import run as run_command

    run_command(command, context.args)
