"""All commands."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

from asyncfetch.errors import MissingDependency, install_command

try:
    import typer

    from asyncfetch.cli.bench import bench
    from asyncfetch.cli.cache import commands as cache_commands
    from asyncfetch.cli.dataset import check, frames, info
    from asyncfetch.cli.env import env
    from asyncfetch.cli.files import cp, ls
    from asyncfetch.cli.merge import merge
    from asyncfetch.cli.run import OPTIONS_ARE_THEIRS, run
    from asyncfetch.cli.subsets import convert, select, split
except ModuleNotFoundError as missing:
    raise MissingDependency(f"the command asyncfetch needs typer and rich: {install_command('cli')}") from missing

__all__ = ["app"]

app = typer.Typer(
    name="asyncfetch",
    help="Training data by byte ranges: what belongs to a shell.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.add_typer(cache_commands, name="cache")
for command in (info, check, frames, bench, ls, cp, merge, select, split, convert, env):
    app.command()(command)
app.command(context_settings=OPTIONS_ARE_THEIRS)(run)


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"asyncfetch {metadata.version('asyncfetch')}")
        raise typer.Exit


@app.callback()
def _(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Say the version.")
    ] = False,
) -> None:
    """Keep a group of commands a group, however many there are."""
