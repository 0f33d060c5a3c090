"""``asyncfetch env``: what is installed, what decodes, and the line that mends what doesn't."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import warnings
from importlib import metadata
from typing import Annotated

import typer

from asyncfetch.errors import MissingDependency

__all__ = ["env"]

PACKAGES = ("asyncfetch", "aiohttp", "anyio", "numpy", "torch", "torchcodec", "av", "pyarrow", "lerobot", "aiobotocore")
PACKAGES_OF_EXTRAS = ("fsspec", "xxhash", "aiofastnet", "ray")


def env(as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False) -> None:
    """Say which versions are installed, what decodes video, and why not. Exits with 1 where nothing does."""
    versions = {name: _version(name) for name in (*PACKAGES, *PACKAGES_OF_EXTRAS)}
    decoders, remedies = {}, {}
    for name in ("torchcodec", "pyav"):
        decoders[name], remedies[name] = _decodes(name)
    told = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "ffmpeg": _ffmpeg(),
        "decoders": decoders,
        "remedies": {name: remedy for name, remedy in remedies.items() if remedy},
    }
    if as_json:
        typer.echo(json.dumps(told))
    else:
        typer.echo(f"Python {told['python']} on {told['platform']}")
        for package, version in versions.items():
            typer.echo(f"  {package:<12} {version or '-'}")
        typer.echo(f"  {'ffmpeg':<12} {told['ffmpeg'] or '-'}")
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
            warnings.simplefilter("ignore")  # of the libraries that are loaded
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
