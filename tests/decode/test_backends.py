from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import warnings
from typing import TYPE_CHECKING

import pytest

from asyncfetch.decode import backends, open_decoder
from asyncfetch.decode.decoder import PyAVDecoder
from asyncfetch.errors import MissingDependency, install_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from tests.decode.conftest import Video

NO_LIBRARIES = RuntimeError(
    "Could not load libtorchcodec.\n\nLikely causes: FFmpeg is not properly installed. " + "x" * 999
)


def of_a_cuda_build(version: str, library: str) -> Exception:
    """What torchcodec's wheels raise beside a CPU build of torch."""
    missing = OSError(f"{library}: cannot open shared object file: No such file or directory")
    if version == "0.14":
        return RuntimeError(
            "Could not load libtorchcodec. Likely causes:\n 1. FFmpeg is not properly installed ... [start of "
            f"libtorchcodec loading traceback]\nOSError: {missing}\nOSError: Could not load this library: "
            "libtorchcodec_core8.so\n"
        )
    error = OSError("Could not load this library: site-packages/torchcodec/libtorchcodec_image.so")
    error.__cause__ = missing
    return error


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes modules fail to import, as in a process where nothing was asked yet."""
    problems: dict[str, Exception] = {}
    load = backends._import

    def fail(module: str) -> ModuleType:
        if module in problems:
            raise problems[module]
        return load(module)

    def forget() -> None:
        backends._problem.cache_clear()
        backends._warn_of_fallback.cache_clear()

    monkeypatch.setattr(backends, "_import", fail)
    forget()
    yield lambda **errors: problems.update({name.replace("_", "."): error for name, error in errors.items()})
    forget()


@pytest.mark.parametrize("problem", [NO_LIBRARIES, OSError("libavutil.so.60"), ModuleNotFoundError("no torchcodec")])
def test_auto_falls_back_with_one_warning_that_names_the_cause(
    h264: Video, broken: Callable[..., None], problem: Exception
) -> None:
    broken(torchcodec_decoders=problem)
    with pytest.warns(RuntimeWarning, match=type(problem).__name__) as caught:
        assert isinstance(open_decoder(h264.clip(), backend="auto"), PyAVDecoder)
    assert str(problem).split("\n", maxsplit=1)[0] in str(caught[0].message)
    assert len(str(caught[0].message)) < 700
    with warnings.catch_warnings(action="error"):
        open_decoder(h264.clip(), backend="auto")


@pytest.mark.parametrize("library", ["libnvrtc.so.13", "libc10_cuda.so"])  # the latter where CUDA's are installed
@pytest.mark.parametrize("version", ["0.14", "0.16 and 0.17"])
def test_cuda_build_beside_a_cpu_torch_is_named_with_the_remedy(
    h264: Video, broken: Callable[..., None], version: str, library: str
) -> None:
    torch, torchcodec = importlib.metadata.version("torch"), importlib.metadata.version("torchcodec")
    cause = f"torchcodec {torchcodec} doesn't load beside torch {torch}, which comes without {library}"
    broken(torchcodec_decoders=of_a_cuda_build(version, library))
    with pytest.warns(RuntimeWarning, match=re.escape(cause)) as warned:
        open_decoder(h264.clip(), backend="auto")
    broken(av=ModuleNotFoundError("No module named 'av'"))
    backends._problem.cache_clear()
    for backend in ("torchcodec", "auto"):
        with pytest.raises(MissingDependency, match=re.escape(cause)) as caught:
            open_decoder(h264.clip(), backend=backend)
    for message in (str(warned[0].message), str(caught.value)):
        assert 'torchcodec 0.13 with torch 2.13: pip install "torchcodec>=0.8,<0.14"' in message
        assert "apt-get install ffmpeg" not in message


def test_a_chosen_pyav_doesnt_warn_or_ask_for_torchcodec(h264: Video, broken: Callable[..., None]) -> None:
    broken(torchcodec_decoders=NO_LIBRARIES)
    with warnings.catch_warnings(action="error"):
        open_decoder(h264.clip(), backend="pyav")


def test_a_chosen_torchcodec_doesnt_fall_back(h264: Video, broken: Callable[..., None]) -> None:
    broken(torchcodec_decoders=NO_LIBRARIES)
    with pytest.raises(MissingDependency, match=r"RuntimeError: Could not load.*apt-get install ffmpeg") as caught:
        open_decoder(h264.clip(), backend="torchcodec")
    assert caught.value.__cause__ is NO_LIBRARIES


def test_missing_backends_are_an_error_with_the_commands(h264: Video, broken: Callable[..., None]) -> None:
    broken(torchcodec_decoders=NO_LIBRARIES, av=ModuleNotFoundError("No module named 'av'"))
    with pytest.raises(MissingDependency) as caught:
        open_decoder(h264.clip(), backend="auto")
    for command in ("apt-get install ffmpeg", install_command("lerobot"), install_command("pyav")):
        assert command in str(caught.value)
    with pytest.raises(MissingDependency, match=re.escape(install_command("pyav"))):
        open_decoder(h264.clip(), backend="pyav")


def test_importing_the_room_loads_no_vendor() -> None:
    code = "import sys, asyncfetch.decode; sys.exit(', '.join({'torch', 'torchcodec', 'av'} & set(sys.modules)) or 0)"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=15)
