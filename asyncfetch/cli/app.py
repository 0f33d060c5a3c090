"""All commands."""

from __future__ import annotations

from asyncfetch.errors import MissingDependency, install_command

try:
    import typer

    from asyncfetch.cli.cache import commands as cache_commands
    from asyncfetch.cli.info import info
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
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(cache_commands, name="cache")
for command in (info, merge, select, split, convert):
    app.command()(command)
app.command(context_settings=OPTIONS_ARE_THEIRS)(run)


@app.callback()
def _() -> None:
    """So that a group of commands stays a group, however many there are."""
