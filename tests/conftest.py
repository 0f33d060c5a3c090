"""Fixtures for every room: small datasets, servers, and a detector of calls that block the loop."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from types import CoroutineType
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import uvloop
from blockbuster import BlockBuster
from hypothesis import settings

from asyncfetch.testing import DatasetTruth, RangeServer, write_dataset
from tests.warm import WarmInterpreter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping
    from pathlib import Path

    from asyncfetch.testing.clips import Codec


os.environ.setdefault("OMP_WAIT_POLICY", "passive")
"""Torch, which isn't imported yet, has threads that spin while they wait for one another, on cores that others need."""

settings.register_profile("asyncfetch", deadline=None)  # of milliseconds for one example, which other tests use up
settings.register_profile("fast", deadline=None, max_examples=10)
settings.load_profile("asyncfetch")

MAY_BLOCK = {
    "tests/local_reader.py": {"stat", "fetch", "_path"},
    "tests/warm.py": {"_execute_child"},
    "asyncfetch/testing/datasets.py": {"write_dataset"},
    "asyncfetch/runtime/fork.py": {"_stop_loops", "_stand"},
    "asyncfetch/fetch/transports/s3.py": {"_presign", "_endpoint_url", "_hold"},
}
"""Functions, by file, that may block: they stand in for something that wouldn't, build what a test reads, or run on a
loop that is there to be blocked."""


LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
ON_UVLOOP = {"test_a_fault_in_the_middle_of_a_body_is_read_over"}
"""Tests besides the engine's own that run on uvloop, too."""

QUIET_TURNS = 10
"""In each of them what was sent arrives; no task sees that of a handshake of TLS, which is four messages."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """What the engine's tests can be run over as a whole: tests/fetch --loop uvloop."""
    parser.addoption("--loop", choices=LOOPS, help="the loop that all async tests run on, instead of their own choice")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loops that an async test runs on, by name; tests/fetch/conftest.py says more of the engine's."""
    names = [config.getoption("loop") or "asyncio"]
    if not config.getoption("loop") and item.name in ON_UVLOOP:
        names.append("uvloop")
    return {name: LOOPS[name] for name in names}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark as slow what starts programs, or has a longer time limit than others.

    On uvloop, which swallows what a signal handler raises, a test's time limit has to cancel it from inside.
    """
    starts_programs = "programs_are_warm" in getattr(item, "fixturenames", ())
    if starts_programs or _limit_seconds(item) > float(item.config.getini("timeout")):
        item.add_marker("slow")
    is_on_uvloop = "uvloop" in item.name or item.config.getoption("loop") == "uvloop"
    if isinstance(item, pytest.Function) and is_on_uvloop and inspect.iscoroutinefunction(item.obj):
        item.obj = _within(item.obj, _limit_seconds(item))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that at the end no worker is left with one."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def _limit_seconds(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0] if marker else item.config.getini("timeout"))


def _within(test: Callable[..., Awaitable[None]], seconds: float) -> Callable[..., Awaitable[None]]:
    @functools.wraps(test)
    async def limited(*args: Any, **fixtures: Any) -> None:  # noqa: ANN401 - any test's
        with anyio.fail_after(seconds):
            await test(*args, **fixtures)

    return limited


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where only the tests to run alone are asked for, the files that have none aren't imported: that takes longer."""
    if config.option.markexpr != "alone" or collection_path.suffix != ".py":
        return None
    return "mark.alone" not in collection_path.read_text() or None


@pytest.fixture(autouse=True, scope="module")
def _collections_are_short() -> None:
    """Half a million objects, of libraries and of pytest, stay to the end. The hundreds of tests that collect garbage
    to see what it tells needn't look through them: that was half the time of some files.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _priority_stays() -> Iterator[None]:
    """A process that something has raised to a realtime priority starves the others, and all that it starts does."""
    yield
    if sys.platform == "linux":
        assert os.sched_getscheduler(0) == os.SCHED_OTHER


@pytest.fixture(autouse=True, scope="session")
def _models_of_aws_are_read_once() -> Iterator[None]:
    """Each client of botocore's reads the model of S3 anew, and looks through 400 others: 45 of its 55 ms of a core."""
    if find_spec("botocore") is None:
        yield
        return
    loaders = import_module("botocore.loaders")
    with pytest.MonkeyPatch.context() as patch:
        read, list_services = loaders.JSONFileLoader.load_file, loaders.Loader.list_available_services
        read_once = functools.cache(lambda path: read(loaders.JSONFileLoader(), path))
        list_once = functools.cache(lambda paths, kind: list_services(loaders.Loader(list(paths)), kind))
        patch.setattr(loaders.JSONFileLoader, "load_file", lambda _, path: read_once(path))
        patch.setattr(
            loaders.Loader,
            "list_available_services",
            lambda self, type_name: list_once(tuple(self.search_paths), type_name),
        )
        yield


@pytest.fixture(autouse=True)
def _loop_is_never_blocked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail an async test where asyncfetch calls, on the loop, what blocks: files, sleeps, locks, plain sockets.

    What the test itself calls is its own business. ``@pytest.mark.may_block`` lifts it.
    """
    function = getattr(request.node, "function", None)
    if not inspect.iscoroutinefunction(function) or request.node.get_closest_marker("may_block"):
        yield
        return
    detector = _detector()
    detector.activate()
    try:
        yield
    finally:
        detector.deactivate()


@functools.cache
def _detector() -> BlockBuster:
    """One for all tests: to make it takes as long as everything else that each test pays for."""
    detector = BlockBuster("asyncfetch")
    for call in detector.functions.values():
        for file, names in MAY_BLOCK.items():
            call.can_block_in(file, names)
    return detector


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[Any]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say in the report what each task waited for when a time limit ended its test."""
    report = yield
    if call.excinfo is not None and "pytest-timeout" in str(call.excinfo.value):
        callers = [entry.frame.f_locals.get("self") for entry in call.excinfo.traceback]
        loop = next((each for each in callers if isinstance(each, asyncio.BaseEventLoop)), None)
        tasks = asyncio.all_tasks(loop) if loop is not None else ()
        report.sections += [(f"waiting: {task.get_name()}", _where(task)) for task in tasks]
    return report


def _where(task: asyncio.Task[Any]) -> str:
    awaited: object = task.get_coro()
    lines = list[str]()
    while isinstance(awaited, CoroutineType):
        if (frame := awaited.cr_frame) is not None:
            lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {awaited.__qualname__}")
        awaited = awaited.cr_await
    return "\n".join(lines)


async def all_others_wait(quiet_turns: int = QUIET_TURNS) -> None:
    """Turn the loop until every other task waits, and goes on waiting for so many turns.

    As anyio.wait_all_tasks_blocked, which looks again after 0.1 s only, and not at all for what another socket of this
    loop has sent. What threads and other loops do is waited for by neither. One task at a time may wait for this.
    """
    this, quiet = asyncio.current_task(), 0
    while quiet < quiet_turns:
        await asyncio.sleep(0)
        others = (task for task in asyncio.all_tasks() if task is not this)
        quiet = quiet + 1 if all(map(_waits, others)) else 0


def _waits(task: asyncio.Task[Any]) -> bool:
    awaited: asyncio.Future[Any] | None = task._fut_waiter  # type: ignore[attr-defined]
    return awaited is not None and not awaited.done()


@pytest.fixture
def failed_loaders_end_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that failed joins its workers, which don't end then, for 5 s each before it terminates them."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5)


@pytest.fixture(scope="session")
def warm_python() -> Iterator[WarmInterpreter]:
    with WarmInterpreter() as interpreter:
        yield interpreter


@pytest.fixture(scope="module")
def programs_are_warm(warm_python: WarmInterpreter) -> Iterator[None]:
    """Those that the module's tests start needn't import torch; see tests/warm.py."""
    with pytest.MonkeyPatch.context() as patch:
        warm_python.stands_in(patch.setattr)
        yield


@pytest.fixture
def nested_programs_are_warm(
    programs_are_warm: None, warm_python: WarmInterpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor need those that they start in their turn. Each has one child more, for that."""
    warm_python.stands_in(monkeypatch.setattr, starts_others=True)


@pytest.fixture(scope="session")
def small_dataset(tmp_path_factory: pytest.TempPathFactory) -> DatasetTruth:
    """Four AV1 episodes of different lengths and two cameras, in files of one and of two episodes."""
    return write_dataset(tmp_path_factory.mktemp("small") / "dataset", episodes=(20, 31, 17, 24))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A real Ray with two workers. It stays once it is there: its start takes seconds, and a process has but one."""
    pytest.importorskip("ray")
    from tests.clusters import local_ray

    with local_ray(num_cpus=2):
        yield


@pytest.fixture(scope="session", params=["av1", "h264", "hevc"])
def dataset_of_each_codec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DatasetTruth:
    """Three episodes in one codec; a test that takes it runs for each."""
    codec: Codec = request.param
    return write_dataset(tmp_path_factory.mktemp(codec) / "dataset", episodes=(9, 12, 7), codec=codec)


@pytest.fixture
def https_server(small_dataset: DatasetTruth) -> Iterator[RangeServer]:
    """``small_dataset`` over HTTPS, served from a thread."""
    with RangeServer(small_dataset) as server:
        yield server
