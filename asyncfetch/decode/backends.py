"""Which decoding libraries load in this process.

torchcodec finds its FFmpeg libraries when it is imported, and raises RuntimeError, OSError or ImportError where there
are none it can use. That is asked once a process: a failed import is slow, and is tried for every supported FFmpeg.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import TYPE_CHECKING, Any, Literal

from asyncfetch.errors import MissingDependency
from asyncfetch.runtime.fork import forks_wait

if TYPE_CHECKING:
    from types import ModuleType

    from asyncfetch.config import DecoderBackend

__all__ = ["choose_backend", "import_torch"]

INSTALL_TORCHCODEC = 'pip install "asyncfetch[lerobot]"'
INSTALL_FFMPEG = "apt-get install ffmpeg"
INSTALL_PYAV = 'pip install "asyncfetch[pyav]"'
CAUSE_CHARACTERS = 300  # torchcodec's message goes on with a traceback for each FFmpeg version


@functools.cache
def import_torch() -> Any:  # noqa: ANN401 - a module
    """The torch module, at first use."""
    try:
        return _import("torch")
    except ImportError as error:
        raise MissingDependency(f"decoding needs torch: {INSTALL_TORCHCODEC}") from error


def choose_backend(backend: DecoderBackend) -> Literal["torchcodec", "pyav"]:
    """The back end that serves ``backend``, loaded; "auto" falls back to PyAV with one RuntimeWarning a process.

    Raises:
        MissingDependency: It can't be loaded, or, for "auto", neither can.
    """
    if backend == "pyav":
        if (problem := _problem("av")) is not None:
            raise MissingDependency(f"PyAV can't be loaded ({_cause(problem)}): {INSTALL_PYAV}") from problem
        return "pyav"
    problem = _problem("torchcodec.decoders")
    if problem is None:
        return "torchcodec"
    if backend == "torchcodec":
        raise MissingDependency(
            f"torchcodec can't be loaded ({_cause(problem)}). It needs its package and FFmpeg's libraries: "
            f"{INSTALL_TORCHCODEC} and {INSTALL_FFMPEG}; or use decoder='pyav', which brings its own: {INSTALL_PYAV}"
        ) from problem
    if _problem("av") is not None:
        raise MissingDependency(
            f"no video decoder can be loaded. torchcodec: {_cause(problem)}. PyAV: not installed. Either "
            f"{INSTALL_FFMPEG} (and {INSTALL_TORCHCODEC}), or, without root, {INSTALL_PYAV}"
        ) from problem
    _warn_of_fallback(_cause(problem))
    return "pyav"


@functools.cache
def _problem(module: str) -> Exception | None:
    """Why a module can't be imported; None where it can.

    Held without a lock, so that none crosses a fork: threads that come at the same time wait for Python's own import
    lock, and find the same.
    """
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
def _warn_of_fallback(cause: str) -> None:
    warnings.warn(
        f"torchcodec can't be loaded, so PyAV decodes, more slowly. The cause: {cause}. To use "
        f"torchcodec: {INSTALL_FFMPEG} and {INSTALL_TORCHCODEC}; to silence this: decoder='pyav'",
        RuntimeWarning,
        stacklevel=4,
    )


def _cause(error: Exception) -> str:
    words = " ".join(str(error).split())
    if len(words) > CAUSE_CHARACTERS:
        words = words[:CAUSE_CHARACTERS] + "..."
    return f"{type(error).__name__}: {words}"
