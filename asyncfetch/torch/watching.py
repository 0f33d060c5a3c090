"""A loader's workers as the process that has them sees them: one that is lost is an error of ours.

torch's loader waits for ever for a worker that is stopped or hangs. One that was killed it tells by several errors,
whichever comes first: its own, from a handler of signals or from its queue, or a connection that was reset. So whoever
iterates a loader over one of our datasets gets an iterator that looks after the workers while it waits, and raises a
WorkerError with the worker's id and what to do.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import selectors
import signal
import threading
import time
import weakref
from functools import wraps
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from torch.utils.data import DataLoader

from asyncfetch.errors import WorkerError
from asyncfetch.runtime.concurrently import copied, kept
from asyncfetch.runtime.liveness import LOOK_SECONDS, Watch, how_it_ended
from asyncfetch.runtime.shared_memory import give_back_slots
from asyncfetch.runtime.threads import no_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.process import BaseProcess
    from types import FrameType

    from asyncfetch.stream.figures import FiguresPage

T = TypeVar("T")

END_SECONDS = 1.0
"""Seconds in which a process with a reset connection has ended."""
_BLOCKING = {selectors.__file__, threading.__file__, multiprocessing.connection.__file__}
"""Files of the functions in which a consumer waits for a queue."""
_REMEDY = "Iterate the loader anew; state_after() or a saved state tells where it stopped"


class Care(NamedTuple):
    """The way to look after the workers that read a dataset."""

    silent_seconds: float
    """The bound ``TimeoutConfig.silent_process_seconds``."""
    pages: Callable[[], Sequence[FiguresPage]]
    """Gives the pages of the workers, as far as they have some."""


class _Workers:
    """The processes of one loader."""

    def __init__(self, care: Care, processes: Sequence[BaseProcess]) -> None:
        self._care = care
        self._processes = processes
        self.waiting_since: float | None = None
        """Time at which the consumer began to wait; None where it doesn't."""
        self.waits_in_main = False
        """True while it waits in the main thread, where handlers of signals run."""
        self.lost: WorkerError | None = None
        """The error that a handler of signals found; None before."""
        self._silent: dict[int, str] = {}

    def watch(self, ended: threading.Event) -> None:
        """Look after them until the end; in a thread of its own."""
        watches: dict[int, Watch] = {}
        since = None
        while not ended.wait(LOOK_SECONDS):
            if since != self.waiting_since:
                since, watches = self.waiting_since, {}
            if since is not None:
                self._look(watches)

    def _look(self, watches: dict[int, Watch]) -> None:
        now, pages = time.monotonic(), {page.process: page for page in self._care.pages()}
        for pid in (process.pid for process in self._processes):
            if pid is None or pid in self._silent:
                continue
            watch = watches.setdefault(pid, Watch(pid, self._care.silent_seconds, _REMEDY, now))
            page = pages.get(pid)
            if why := watch.look(now, None if page is None else page.beat_at):
                self._silent[pid] = why
                os.kill(pid, signal.SIGKILL)

    def are_named_in(self, error: RuntimeError) -> bool:
        """Return whether it is about one of them."""
        return any(re.search(rf"\b{process.pid}\b", str(error)) for process in self._processes)

    def why(self, error: BaseException) -> WorkerError | None:
        """Return the error of a worker that is lost; None where none is, and ``error`` has another reason."""
        if not isinstance(error, RuntimeError) or isinstance(error, WorkerError):  # by a process that is about to end
            ending = wait([process.sentinel for process in self._processes], END_SECONDS)
            for process in self._processes:
                if process.sentinel in ending:
                    process.join(END_SECONDS)
        for process in self._processes:
            code = process.exitcode
            if code is None or code == 0 or process.pid is None:
                continue
            how = self._silent.get(process.pid)
            if how is None:
                less = ": lower max_bytes, decoded_max_bytes or num_workers" if code == -signal.SIGKILL else ""
                how = f"{how_it_ended(code)}{less}. What it printed may say why. {_REMEDY}"
            lost = WorkerError(f"a worker of the loader (pid {process.pid}) {how}")
            for page in self._care.pages():
                if page.process == process.pid:
                    page.lose(lost)
            return lost
        return None


class _WatchedIterator:
    """A loader's iterator that watches its workers while it waits."""

    def __init__(self, iterator: Iterator[Any], workers: _Workers) -> None:
        self._iterator = iterator
        self._looked_after = workers  # ``_workers`` are torch's own
        self._is_watched = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:  # noqa: ANN401
        workers = self._looked_after
        if not self._is_watched:
            ended = threading.Event()
            thread = threading.Thread(target=workers.watch, args=[ended], name="asyncfetch workers", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise no_thread(error) or error from error
            weakref.finalize(self, ended.set)
            self._is_watched = True
        if workers.lost is not None:
            raise copied(workers.lost)
        workers.waiting_since = time.monotonic()
        try:
            workers.waits_in_main = threading.current_thread() is threading.main_thread()
            return next(self._iterator)
        except StopIteration:
            give_back_slots()
            raise
        except (RuntimeError, OSError, EOFError) as error:
            why = workers.why(error)
            if why is None:
                raise
            raise why from error
        finally:
            workers.waits_in_main, workers.waiting_since = False, None

    def __len__(self) -> int:
        return len(self._iterator)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._iterator, name)


_workers_of: WeakKeyDictionary[DataLoader[Any], _Workers] = WeakKeyDictionary()
"""The latest workers of each loader; one with persistent ones goes on with those it has."""
_all_workers: WeakSet[_Workers] = WeakSet()


def watch_loaders(care_of: Callable[[Any], Care | None]) -> None:
    """Have the iterators of all loaders look after their workers, where ``care_of`` tells how for their dataset."""
    _watch(DataLoader, care_of)
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        return
    _watch(StatefulDataLoader, care_of)  # which has an __iter__ of its own
    make_state = StatefulDataLoader.state_dict

    @wraps(make_state)
    def state_dict(self: StatefulDataLoader[Any]) -> dict[str, Any]:
        care = care_of(self.dataset) if self.num_workers else None
        state: dict[str, Any] = make_state(self) if care is None else _note_workers(care, self, make_state)
        return state

    StatefulDataLoader.state_dict = state_dict  # which starts the workers of the first pass, where none are


def _watch(kind: type[DataLoader[Any]], care_of: Callable[[Any], Care | None]) -> None:
    make_iterator = kind.__iter__

    def make_again(self: DataLoader[Any]) -> Iterator[Any]:
        """Make one of workers that are there, and are waited for until they are ready."""
        return next(_WatchedIterator(map(make_iterator, [self]), _workers_of[self]))

    @wraps(make_iterator)
    def iterate(self: DataLoader[Any]) -> Iterator[Any]:
        care = care_of(self.dataset) if self.num_workers else None
        if care is None:
            return (  # by itself a call has no carets in a traceback, which is to fit a screen
                make_iterator(self)
            )
        make = make_again if self.persistent_workers and self in _workers_of else make_iterator
        iterator = _note_workers(care, self, make)
        _speak_for_torch()
        return _WatchedIterator(iterator, _workers_of[self])

    kind.__iter__ = iterate  # type: ignore[method-assign, assignment]


def _note_workers(care: Care, loader: DataLoader[Any], call: Callable[[DataLoader[Any]], T]) -> T:
    """Return what the call does, and note the workers that it starts."""
    before = multiprocessing.active_children()
    result = call(loader)
    started = [each for each in multiprocessing.active_children() if each not in before]
    if started or loader not in _workers_of:
        _workers_of[loader] = _Workers(care, started)
        _all_workers.add(_workers_of[loader])
    return result


def _speak_for_torch() -> None:
    """Have what torch raises about a worker in its handler of SIGCHLD said by us, where the consumer asks for a batch.

    torch raises it wherever the main thread is, in a step of the optimizer or in a destructor too, and again for each
    child that ends. Here it is raised where the consumer is blocked, or else as soon as it asks; where it was about to
    be blocked, after torch's own look at its workers, 5 s later.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    below = signal.getsignal(signal.SIGCHLD)
    if not callable(below) or getattr(below, "speaks_for", None) is not None:
        return

    def handler(number: int, frame: FrameType | None) -> None:
        try:
            below(number, frame)
        except RuntimeError as error:
            workers = next((each for each in list(_all_workers) if each.are_named_in(error)), None)
            why = None if workers is None else workers.why(error)
            if workers is None or why is None:
                raise
            workers.lost = kept(why)  # its frames would keep the iterator, and so the other workers
            if workers.waits_in_main and frame is not None and frame.f_code.co_filename in _BLOCKING:
                workers.waits_in_main = False
                raise why from error

    handler.speaks_for = below  # type: ignore[attr-defined]
    signal.signal(signal.SIGCHLD, handler)
