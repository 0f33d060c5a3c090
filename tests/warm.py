"""Programs of Python's that needn't import torch, which is most of what a short one takes.

    with WarmInterpreter() as python:
        python.stands_in(monkeypatch.setattr)
        subprocess.run([sys.executable, "-c", "import asyncfetch as af; ..."])

Each is a fork of an interpreter that has PRELOADED, of which nothing is asyncfetch's. It is a child of this process as
any other. It ends as any interpreter does, but that the modules which it found are still whole then, and torch's
destructors don't run; with ``ends_in_full`` they do, for 0.2 s. With ``starts_others`` the programs that it starts in
its turn are such forks, too, of another child that it has for that. What is about an interpreter's start, or about who
imports what, needs one of its own.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

PRELOADED: Final = (
    *("aiohttp", "rich.progress", "rich.table", "typer"),
    *("numpy", "pyarrow.parquet", "torch.utils.data", "torchcodec.decoders"),
    *("pandas", "pyarrow.compute"),  # which pyarrow imports at its first array
)
SET_HERE: Final = {"PYTHONPATH", "PYTHONWARNINGS"}
"""Variables of Python's that a program may have otherwise than this process: the others say how it starts."""
MESSAGE_BYTES: Final = 200_000
MAX_FILES: Final = 100
OPTIONS: Final = {"-X": 2, "-B": 1, "-u": 1}
"""Words of each of those that change nothing that a program is tested for."""
PR_SET_CHILD_SUBREAPER: Final = 36


class WarmInterpreter:
    """Starts programs."""

    def __init__(self, requests: socket.socket | None = None) -> None:
        """``requests`` leads to an interpreter that is there already, a child of this process."""
        self._lock = threading.Lock()
        self._parent = os.getpid()
        self._started_by = _variables_of_start(os.environ)
        if requests is not None:
            self._socket = requests

    def __enter__(self) -> Self:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._process = subprocess.Popen([sys.executable, __file__], stdin=other.fileno())
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # forks of this process may have it open, too
        self._socket.close()
        self._process.wait()

    def can_start(self, command: Any, environment: Mapping[str, str]) -> bool:  # noqa: ANN401 - as subprocess takes it
        """Whether it is a program that starts as this process did, and this the process whose child it would be."""
        python, first = [*map(os.fsdecode, command[:2]), "", ""][:2]
        is_program = first in {"-c", "-m", *OPTIONS} or first.startswith("-W") or not first.startswith("-")
        starts_alike = _variables_of_start(environment) == self._started_by
        return python == sys.executable and is_program and starts_alike and os.getpid() == self._parent

    def start(self, words: Sequence[str], files: Mapping[int, int], **how: object) -> int:
        """Start what ``python *words`` is, with open files of ours by its own numbers; return its process id."""
        blocked = [*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))]
        message = json.dumps({"words": words, "files": [*files], "blocked": blocked, **how}).encode()
        prctl = ctypes.CDLL(None).prctl
        with self._lock:
            prctl(PR_SET_CHILD_SUBREAPER, 1)  # to whom those go whom their parent leaves
            try:
                socket.send_fds(self._socket, [message], [*files.values()])
                answer = self._socket.recv(MESSAGE_BYTES)
            finally:
                prctl(PR_SET_CHILD_SUBREAPER, 0)
        if not answer:
            raise RuntimeError("the warm interpreter has ended")
        return int(answer)

    def stands_in(
        self, replace: Callable[[object, str, object], None], *, ends_in_full: bool = False, starts_others: bool = False
    ) -> None:
        """Start what subprocess, and multiprocessing where it spawns, would start with this Python.

        ``replace`` is setattr, or a MonkeyPatch's.
        """
        how = {"ends_in_full": ends_in_full, "starts_others": starts_others}
        python, spawn = self, multiprocessing.util.spawnv_passfds

        class Popen(subprocess.Popen[Any]):
            def _execute_child(self, args: Any, *rest: Any) -> None:  # noqa: ANN401 - as subprocess calls it
                executable, preexec_fn, _, passed, cwd, env, _, _, shell, *pipes = rest[:15]
                *_, umask, session, process_group = rest[15:]
                environment = dict(os.environ if env is None else env)
                is_plain = not (shell or preexec_fn or executable) and umask == process_group == -1
                if not is_plain or not python.can_start(args, environment):
                    super()._execute_child(args, *rest)  # type: ignore[misc]
                    return
                own = {number: number if pipe == -1 else pipe for number, pipe in enumerate((pipes[0], *pipes[3::2]))}
                self.pid = python.start(
                    [os.fspath(word) for word in args[1:]],
                    own | {number: number for number in passed},
                    cwd=os.path.abspath(cwd or "."),
                    env=environment,
                    session=session,
                    **how,
                )
                self._child_created = True
                self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

        def spawn_warm(path: bytes, words: Sequence[Any], files: Sequence[int]) -> int:
            is_tracker = any("resource_tracker" in os.fsdecode(word) for word in words)  # which imports next to nothing
            if is_tracker or not python.can_start(words, os.environ):
                return spawn(path, words, files)
            own = {number: number for number in (0, 1, 2, *files)}
            return python.start(words[1:], own, cwd=os.getcwd(), env=dict(os.environ), session=False, **how)

        replace(subprocess, "Popen", Popen)
        replace(multiprocessing.util, "spawnv_passfds", spawn_warm)


def _variables_of_start(environment: Mapping[Any, Any]) -> dict[str, str]:
    """Those that an interpreter reads when it starts: seeds of hashes, modes, where its library is."""
    named = {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}
    return {name: value for name, value in named.items() if name.startswith("PYTHON") and name not in SET_HERE}


def _leave_whole(modules: Mapping[str, ModuleType]) -> None:
    """Let the end of the interpreter pass over these modules: to take them apart is to copy their pages."""
    for name, module in modules.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))


def _next_program() -> dict[str, Any]:
    """Return in a fork for each request that stdin has, with stdin, stdout and stderr that are the program's own."""
    requests = socket.socket(fileno=os.dup(0))
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        message, files, _, _ = socket.recv_fds(requests, MESSAGE_BYTES, MAX_FILES)
        if not message:
            os._exit(0)
        told, tells = os.pipe()
        if os.fork() == 0:
            if os.fork() != 0:
                os._exit(0)  # which leaves the program to who asked for it
            os.close(tells)
            os.read(told, 1)
            os.close(told)
            program: dict[str, Any] = json.loads(message)
            if program["session"]:
                os.setsid()
            if program["starts_others"]:
                ours, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                if os.fork() == 0:  # the program's own child, which stays as it is and starts those of the program
                    os.dup2(others.fileno(), 0)
                    ours.close()
                    requests.close()
                    for file in files:
                        os.close(file)
                    requests = others
                    continue
                program["requests"] = fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, 500)  # above the program's files
                ours.close()
                others.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, program["blocked"])
            signal.signal(signal.SIGINT, interrupt)
            requests.send(b"%d" % os.getpid())
            requests.close()
            above = [fcntl.fcntl(file, fcntl.F_DUPFD, 500) for file in files]
            for file in files:
                os.close(file)
            for file, number in zip(above, program["files"], strict=True):
                os.dup2(file, number)
                os.close(file)
            return program
        os.wait()
        for file in (told, tells, *files):
            os.close(file)


def _run(program: dict[str, Any]) -> None:
    os.chdir(program["cwd"])
    trusted = os.environ.get("SSL_CERT_FILE")
    os.environ.clear()
    os.environ.update(program["env"])
    if os.environ.get("SSL_CERT_FILE") != trusted:  # which aiohttp reads when it is imported
        connector: Any = sys.modules["aiohttp.connector"]
        connector._SSL_CONTEXT_VERIFIED = connector._make_ssl_context(True)
    tempfile.tempdir = None  # which the environment says
    words, options = program["words"], os.environ.get("PYTHONWARNINGS", "").split(",")
    while words[0] in OPTIONS or words[0].startswith("-W"):
        if words[0].startswith("-W"):
            options.append(words.pop(0).removeprefix("-W") or words.pop(0))
        else:
            del words[: OPTIONS[words[0]]]
    sys.warnoptions[:] = filter(None, options)
    for option in sys.warnoptions:
        warnings._setoption(option)  # type: ignore[attr-defined]
    sys.path[1:1] = [
        path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path
    ]
    if "requests" in program:
        others = WarmInterpreter(socket.socket(fileno=program["requests"]))
        others.stands_in(setattr, ends_in_full=program["ends_in_full"], starts_others=True)
    sys.excepthook = _tell
    main = sys.modules["__main__"] = ModuleType("__main__")
    first, *rest = words
    if first == "-m":
        sys.argv, sys.path[0] = ["-m", *rest[1:]], os.getcwd()
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        path = Path(first).absolute()
        sys.argv, sys.path[0], main.__file__ = words, str(path.parent), str(path)
        exec(compile(path.read_text(), str(path), "exec"), vars(main))


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Without the frames of this file."""
    for _ in range(2):
        trace = trace and trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    preloaded: dict[str, ModuleType] = {}
    atexit.register(_leave_whole, preloaded)  # before any other, so that it comes after all of them
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of what asyncfetch brings along, too
        for name in PRELOADED:
            importlib.import_module(name)
    assert not {"asyncfetch", "anyio"} & set(sys.modules)  # which ask where they run when they are imported
    preloaded.update(sys.modules)
    for name in ("__main__", "builtins", "sys"):
        del preloaded[name]
    gc.collect()
    gc.freeze()  # a fork shares it, and needn't look through it at its end
    program = _next_program()
    if program["ends_in_full"]:
        preloaded.clear()
    else:
        libc = ctypes.CDLL(None)
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)  # before torch's destructors, which are in C++
    _run(program)
