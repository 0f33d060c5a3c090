"""All commands; ``env`` and ``run`` are here."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import warnings
from importlib import metadata
from typing import Annotated

from asyncfetch.errors import MissingDependency, install_command

try:
    import typer

    from asyncfetch.cli.bench import bench
    from asyncfetch.cli.cache import commands as cache_commands
    from asyncfetch.cli.dataset import check, frames, info
    from asyncfetch.cli.files import cp, ls
    from asyncfetch.cli.merge import convert, merge, select, split
    from asyncfetch.cli.videos import index
except ModuleNotFoundError as missing:
    raise MissingDependency(f"the command asyncfetch needs typer and rich: {install_command('cli')}") from missing

PACKAGES = ("asyncfetch", "aiohttp", "anyio", "numpy", "torch", "torchcodec", "av", "pyarrow", "lerobot", "aiobotocore")
PACKAGES_OF_EXTRAS = ("fsspec", "xxhash", "ray")
OPTIONS_ARE_THEIRS = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
"""Everything after the command's name."""


def env(as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False) -> None:
    """Show which versions are installed, and what decodes video or why it doesn't. Exits with 1 if nothing does."""
    versions = {name: _version(name) for name in (*PACKAGES, *PACKAGES_OF_EXTRAS)}
    decoders, remedies = {}, {}
    for name in ("torchcodec", "pyav"):
        decoders[name], remedies[name] = _decodes(name)
    found = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "ffmpeg": _ffmpeg(),
        "decoders": decoders,
        "remedies": {name: remedy for name, remedy in remedies.items() if remedy},
    }
    if as_json:
        typer.echo(json.dumps(found))
    else:
        typer.echo(f"Python {found['python']} on {found['platform']}")
        for package, version in versions.items():
            typer.echo(f"  {package:<12} {version or '-'}")
        typer.echo(f"  {'ffmpeg':<12} {found['ffmpeg'] or '-'}")
        for name, works in decoders.items():
            typer.echo(f"{name} {'decodes' if works else 'does not decode: ' + remedies[name]}")
    if not any(decoders.values()):
        raise typer.Exit(1)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _decodes(backend: str) -> tuple[bool, str]:
    from asyncfetch.decode.backends import choose_backend

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of the libraries
            choose_backend("torchcodec" if backend == "torchcodec" else "pyav")
    except MissingDependency as error:
        return False, str(error)
    return True, ""


def _ffmpeg() -> str | None:
    path = shutil.which("ffmpeg")
    if path is None:
        return None
    first = subprocess.run([path, "-version"], capture_output=True, text=True, check=False).stdout.split("\n")[0]
    return first.removeprefix("ffmpeg version ").split(" ")[0] or None


def run(
    context: typer.Context,
    command: Annotated[str, typer.Argument(metavar="COMMAND", help="LeRobot's command, such as lerobot-train.")],
) -> None:
    """Run one of LeRobot's commands on datasets of the Hub, or at any URL given as --dataset.root."""
    from asyncfetch.compat.lerobot import run as run_command

    run_command(command, context.args)


app = typer.Typer(
    name="asyncfetch",
    help="Inspect, check, measure, copy and merge LeRobot datasets and videos, at any URL.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its panels cut names of options in a narrow terminal
)
# Each fits on a line of 60 columns in the list of commands.
app.command(short_help="Show what is in a dataset.")(info)
app.command(short_help="Find what is wrong with a dataset.")(check)
app.command(short_help="Draw an episode's pictures.")(frames)
app.command(short_help="Write the index of a collection of videos.")(index)
app.command(short_help="Measure how fast a dataset streams.")(bench)
app.command(short_help="List a directory.")(ls)
app.command(short_help="Copy files.")(cp)
app.command(short_help="Merge datasets into one.")(merge)
app.command(short_help="Write some episodes as a dataset.")(select)
app.command(short_help="Split a dataset into several.")(split)
app.command(short_help="Convert a dataset of v2.0 or v2.1 to v3.")(convert)
app.command(short_help="Show what is installed, and what decodes.")(env)
app.command(short_help="Run one of LeRobot's commands.", context_settings=OPTIONS_ARE_THEIRS)(run)
app.add_typer(cache_commands, name="cache", short_help="Manage a disk cache.")


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"asyncfetch {metadata.version('asyncfetch')}")
        raise typer.Exit


@app.callback()
def _(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Keep a group of commands a group, however many there are."""
