from __future__ import annotations

import subprocess
import sys
import warnings
from typing import TYPE_CHECKING

import pytest

from asyncfetch.decode import backends, open_decoder
from asyncfetch.decode.pyav_decoder import PyAVDecoder
from asyncfetch.errors import MissingDependency

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from tests.decode.conftest import Video

NO_LIBRARIES = RuntimeError(
    "Could not load libtorchcodec.\n\nLikely causes: FFmpeg is not properly installed. " + "x" * 999
)


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


def test_a_chosen_pyav_doesnt_warn_or_ask_for_torchcodec(h264: Video, broken: Callable[..., None]) -> None:
    broken(torchcodec_decoders=NO_LIBRARIES)
    with warnings.catch_warnings(action="error"):
        open_decoder(h264.clip(), backend="pyav")


def test_a_chosen_torchcodec_doesnt_fall_back(h264: Video, broken: Callable[..., None]) -> None:
    broken(torchcodec_decoders=NO_LIBRARIES)
    with pytest.raises(MissingDependency, match=r"RuntimeError: Could not load.*apt-get install ffmpeg") as caught:
        open_decoder(h264.clip(), backend="torchcodec")
    assert caught.value.__cause__ is NO_LIBRARIES


def test_with_neither_the_error_has_the_commands(h264: Video, broken: Callable[..., None]) -> None:
    broken(torchcodec_decoders=NO_LIBRARIES, av=ModuleNotFoundError("No module named 'av'"))
    with pytest.raises(MissingDependency) as caught:
        open_decoder(h264.clip(), backend="auto")
    for command in ("apt-get install ffmpeg", 'pip install "asyncfetch[lerobot]"', 'pip install "asyncfetch[pyav]"'):
        assert command in str(caught.value)
    with pytest.raises(MissingDependency, match=r'pip install "asyncfetch\[pyav\]"'):
        open_decoder(h264.clip(), backend="pyav")


def test_importing_the_room_loads_no_vendor() -> None:
    code = "import sys, asyncfetch.decode; sys.exit(', '.join({'torch', 'torchcodec', 'av'} & set(sys.modules)) or 0)"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=15)
