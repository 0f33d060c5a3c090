"""The decoding libraries that load in this process.

torchcodec finds its FFmpeg libraries when it is imported, and raises RuntimeError, OSError or ImportError where there
are none it can use. That is asked once a process: a failed import is slow, and is tried for every supported FFmpeg.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import re
import warnings
from typing import TYPE_CHECKING, Any, Literal

from asyncfetch.errors import MissingDependency, install_command
from asyncfetch.runtime.fork import forks_wait

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from asyncfetch.config import DecoderBackend

INSTALL_FFMPEG = "apt-get install ffmpeg"
CAUSE_CHARACTERS = 300  # torchcodec's message goes on with a traceback for each FFmpeg version
CUDA_LIBRARY = re.compile(r"(lib(?:nv|cu|npp|c10_cuda|torch_cuda)\w*\.so[.\d]*): cannot open shared object file")
"""One of those that torchcodec's wheels of CUDA builds, which are all from 0.14 on, load from what torch brings."""
INSTALL_CPU_BUILD = 'pip install "torchcodec>=0.8,<0.14"'


@functools.cache
def import_torch() -> Any:  # noqa: ANN401 - a module
    """The torch module, at first use."""
    try:
        return _import("torch")
    except ImportError as error:
        raise MissingDependency(f"decoding needs torch: {install_command('lerobot')}") from error


def choose_backend(backend: DecoderBackend) -> Literal["torchcodec", "pyav"]:
    """The back end that serves ``backend``, loaded; "auto" falls back to PyAV with one RuntimeWarning a process.

    Raises:
        MissingDependency: It can't be loaded, or, for "auto", neither can.
    """
    if backend in {"pyav", "pyav-unturned"}:
        if (problem := _problem("av")) is not None:
            raise MissingDependency(f"PyAV can't be loaded ({_cause(problem)}): {install_command('pyav')}") from problem
        return "pyav"
    problem = _problem("torchcodec.decoders")
    if problem is None:
        return "torchcodec"
    if backend == "torchcodec":
        raise MissingDependency(
            f"torchcodec can't be loaded ({_cause(problem)}). {_remedy(problem)}; or use decoder='pyav', which brings "
            f"its own libraries: {install_command('pyav')}"
        ) from problem
    if _problem("av") is not None:
        raise MissingDependency(
            f"no video decoder can be loaded. torchcodec: {_cause(problem)}. {_remedy(problem)}. PyAV: not installed; "
            f"without root, {install_command('pyav')}"
        ) from problem
    _warn_of_fallback(_cause(problem), _remedy(problem))
    return "pyav"


@functools.cache
def on_this_thread() -> Mapping[str, Any]:
    """Arguments for PyAV, which from 17 on would start threads to convert a picture in, and again for the next."""
    import av

    return {"threads": 1} if int(av.__version__.partition(".")[0]) >= 17 else {}


@functools.cache
def _problem(module: str) -> Exception | None:
    """Why a module can't be imported; None if it can. Without a lock, which could cross a fork: Python has its own."""
    try:
        _import(module)
    except (ImportError, OSError, RuntimeError) as error:
        link: BaseException | None = error
        while link is not None:  # their frames would live as long as the process
            link.__traceback__, link = None, link.__cause__ or link.__context__
        return error
    return None


def _import(module: str) -> ModuleType:
    with forks_wait():  # in the child it would be half imported for ever
        return importlib.import_module(module)


@functools.cache
def _warn_of_fallback(cause: str, remedy: str) -> None:
    warnings.warn(
        f"torchcodec can't be loaded, so PyAV decodes, more slowly. The cause: {cause}. {remedy}; to silence this: "
        "decoder='pyav'",
        RuntimeWarning,
        stacklevel=4,
    )


def _missing_cuda_library(error: BaseException | None) -> str | None:
    while error is not None:
        if (found := CUDA_LIBRARY.search(str(error))) is not None:
            return found[1]
        error = error.__cause__ or error.__context__
    return None


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return package


def _remedy(error: Exception) -> str:
    if _missing_cuda_library(error) is not None:
        return (
            f"torchcodec's wheels from 0.14 on are CUDA builds, which need a CUDA build of torch; beside a CPU build "
            f"take an earlier one, as torchcodec 0.13 with torch 2.13: {INSTALL_CPU_BUILD}"
        )
    return f"torchcodec needs its package and FFmpeg's libraries: {install_command('lerobot')} and {INSTALL_FFMPEG}"


def _cause(error: Exception) -> str:
    library = _missing_cuda_library(error)
    if library is not None:
        return f"{_version('torchcodec')} doesn't load beside {_version('torch')}, which comes without {library}"
    words = " ".join(str(error).split())
    shown = words if len(words) <= CAUSE_CHARACTERS else words[:CAUSE_CHARACTERS] + "..."
    return f"{type(error).__name__}: {shown}"
