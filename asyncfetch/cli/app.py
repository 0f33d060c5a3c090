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
    rich_markup_mode=None,  # its panels cut the names of options where a terminal is narrow
)
# In the list of commands each has a line, also of 60 columns.
app.command(short_help="What is in a dataset.")(info)
app.command(short_help="What is broken or odd in a dataset.")(check)
app.command(short_help="Draw an episode's pictures.")(frames)
app.command(short_help="How fast a dataset streams here, and why.")(bench)
app.command(short_help="List a directory.")(ls)
app.command(short_help="Copy files.")(cp)
app.command(short_help="Join datasets to one.")(merge)
app.command(short_help="Write some episodes as a dataset.")(select)
app.command(short_help="Write parts of a dataset as datasets.")(split)
app.command(short_help="Make a dataset of v2.0 or v2.1 one of v3.")(convert)
app.command(short_help="What is installed, and what decodes.")(env)
app.command(short_help="Run a command of LeRobot's.", context_settings=OPTIONS_ARE_THEIRS)(run)
app.add_typer(cache_commands, name="cache", short_help="Look after a disk cache.")


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
