"""nginx with TLS over a directory: the server for throughput figures, cheap enough not to be what is measured."""

from __future__ import annotations

import http.client
import math
import os
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil

from asyncfetch.errors import ConfigError, MissingDependency
from asyncfetch.testing.server import certificate_for

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["INSTALL", "NginxServer", "find_nginx", "has_lua"]

INSTALL = "apt-get install nginx libnginx-mod-http-lua"
LUA_MODULES = ("/usr/lib/nginx/modules/ndk_http_module.so", "/usr/lib/nginx/modules/ngx_http_lua_module.so")
"""Where Debian and Ubuntu put them; the first must be loaded first."""
START_SECONDS = 10.0
"""Longest wait for the first answer; it comes within 0.1 s on an idle machine."""
STOP_SECONDS = 2.0
"""From the polite signal to the rude one."""
MAX_OPEN_FILES = 16_384
HOST = "127.0.0.1"
READY_PATH = "/.asyncfetch-ready"

# All paths are relative to the temporary directory, which is nginx's prefix. No tcp_nopush: together with sendfile it
# holds the last segment of many a plain answer back until the client's delayed acknowledgement, 40 ms later.
CONFIG = """
{modules}
{user}
daemon off;
pid nginx.pid;
worker_processes {workers};
worker_rlimit_nofile {open_files};
events {{ worker_connections {connections}; }}
http {{
    access_log off;
    default_type application/octet-stream;
    sendfile on;
    keepalive_requests 1000000;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    server {{
        listen {host}:{port}{ssl};
        {certificate}
        {records}
        location = {ready} {{ return 204; }}
        location / {{
            root content;
            {delay}
            {pace}
        }}
    }}
}}
"""
CERTIFICATE = """
        ssl_certificate server.pem;
        ssl_certificate_key server.pem;
        ssl_session_cache shared:tls:10m;
        ssl_session_timeout 1h;
"""
# limit_rate alone counts each wait from when a piece was sent, so that whatever delays one delays all behind it. This
# sets it anew for each piece, to the wait that brings the next one when it is due: when it should come at the earliest
# by the request's arrival and the rate. nginx asks for a piece as soon as the one before it is on its way, hence
# "going". No wait is longer than a step, so that the rate never falls below what nginx holds a whole answer to. The
# time is that which nginx took when it woke up, as it counts its waits from there: by a later one, of a worker that was
# held up in between, the next piece would be taken for late, and sent early.
PACE = """
            sendfile off;
            output_buffers 1 {piece_bytes};
            body_filter_by_lua_block {{
                local now, pace = ngx.now(), ngx.ctx
                pace.due = math.max(pace.due or ngx.req.start_time() + {delay}, now - {catch_up}) + {step_ms} / 1000
                local going = now + (pace.wait_ms or 0) / 1000
                pace.wait_ms = math.max(0, math.min({step_ms}, math.floor(1000 * (pace.due - going) + 0.5)))
                ngx.var.limit_rate = pace.wait_ms > 0 and math.floor({piece_bytes} * 1000 / pace.wait_ms) or 0
            }}
"""
PIECE_BYTES = 64 * 1024
"""Sent at once at a rate, or as much more as it takes for whole milliseconds, which are what nginx can wait."""
CATCH_UP_SECONDS = 0.1
"""What a stream may make up for. A link doesn't save what it didn't carry."""


def find_nginx() -> str | None:
    """Its executable; None where it isn't installed."""
    # The directories of administrators aren't on everybody's PATH.
    return shutil.which("nginx", path=f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin")


def has_lua() -> bool:
    """Whether its lua module is installed, by which it delays a first byte and holds a rate."""
    return all(map(os.path.exists, LUA_MODULES))


class NginxServer:
    """nginx as a child process, over a directory: ``with NginxServer(root) as server: ... server.url``.

    It runs as root or not, and writes only into a temporary directory. Leaving the block ends it and its workers,
    with their connections.

    Args:
        root: The directory to serve.
        tls: Whether to speak TLS; needs the extra ``testing``.
        bytes_per_second: Rate of each response from when its first byte is due, in whole bytes; None for no limit. It
            comes in pieces, the first one at once, and what a busy machine delays by up to 0.1 s
            is made up for, so that a piece that is late makes no later one late. Needs the lua module.
        first_byte_seconds: From a request's arrival to its status line, to the millisecond; needs the lua module.
        piece_bytes: Sent at a time where there is a rate. Smaller ones are more even, and cost either side more CPU.
        workers: nginx processes. One fills one core, about 1 GB/s of TLS.

    Raises:
        ConfigError: On entering: nginx doesn't start; the message has what it says.
        MissingDependency: On entering: nginx, its lua module or trustme isn't installed.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        tls: bool = True,
        bytes_per_second: float | None = None,
        first_byte_seconds: float = 0.0,
        piece_bytes: int = PIECE_BYTES,
        workers: int = 1,
    ) -> None:
        self._root = Path(root)
        self._tls, self._workers = tls, workers
        self._bytes_per_second, self._first_byte_seconds = bytes_per_second, first_byte_seconds
        self._piece_bytes = piece_bytes
        self._directory: Path | None = None
        self._child: subprocess.Popen[bytes]
        self._port = 0
        self._running = ExitStack()

    @property
    def url(self) -> str:
        """``https://127.0.0.1:PORT``, without a slash at its end."""
        return f"{'https' if self._tls else 'http'}://{HOST}:{self._port}"

    @property
    def process_group(self) -> int:
        """Of nginx and its workers."""
        return self._child.pid

    @property
    def ca_file(self) -> str | None:
        """PEM file of the authority to trust, there as long as the server runs; None without TLS and outside of it."""
        return os.fspath(self._directory / "ca.pem") if self._tls and self._directory else None

    @property
    def cpu_seconds(self) -> float:
        """What all of its processes have used of the cores since its start, to a hundredth of a second."""
        main = psutil.Process(self._child.pid)
        processes = [main, *main.children()]
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    def __enter__(self) -> Self:
        executable = self._check()
        with ExitStack() as stack:
            self._directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="asyncfetch-nginx-")))
            stack.callback(setattr, self, "_directory", None)
            self._child = self._start(executable, self._directory)
            stack.callback(_stop, self._child)
            self._wait_until_ready(self._directory)
            self._running = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.close()

    def _check(self) -> str:
        executable = find_nginx()
        if executable is None:
            raise MissingDependency(f"nginx isn't installed: {INSTALL}")
        if self._needs_lua and not has_lua():
            raise MissingDependency(
                f"nginx delays a first byte, and holds a rate, by its lua module, which isn't installed: {INSTALL}"
            )
        return executable

    def _start(self, executable: str, directory: Path) -> subprocess.Popen[bytes]:
        (directory / "content").symlink_to(self._root.resolve())  # in the configuration "$" would be a variable
        if self._tls:
            certificate = certificate_for(HOST)
            (directory / "ca.pem").write_bytes(certificate.authority_pem)
            (directory / "server.pem").write_bytes(certificate.key_and_chain_pem)
        # nginx takes over a listening socket named in NGINX, as it does when it replaces its own binary. So nobody
        # can take the free port in between, and who connects early waits in the queue instead of being refused.
        with socket.create_server((HOST, 0), backlog=1024) as listener, open(directory / "log", "wb") as log:
            listener.setblocking(False)  # nginx counts on it, else a worker waits in accept() for what another one took
            self._port = listener.getsockname()[1]
            (directory / "nginx.conf").write_text(self._config())
            return subprocess.Popen(
                [executable, "-p", directory, "-c", "nginx.conf", "-e", "stderr"],
                env={**os.environ, "NGINX": f"{listener.fileno()};"},
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a group of its own, to be ended with its workers
            )

    @property
    def _needs_lua(self) -> bool:
        return bool(self._first_byte_seconds or self._bytes_per_second)

    def _config(self) -> str:
        open_files = min(MAX_OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        delay = self._first_byte_seconds
        return CONFIG.format(
            modules="\n".join(f"load_module {module};" for module in LUA_MODULES) if self._needs_lua else "",
            user="user root root;" if os.geteuid() == 0 else "",  # else root's workers are nobody, and may not read
            workers=self._workers,
            open_files=open_files,
            connections=open_files // 2,  # a connection and its file
            host=HOST,
            port=self._port,
            ssl=" ssl" if self._tls else "",
            certificate=CERTIFICATE if self._tls else "",
            ready=READY_PATH,
            delay=f"access_by_lua_block {{ ngx.sleep({delay:.3f}) }}" if delay else "",
            **self._pace(),
        )

    def _pace(self) -> dict[str, str]:
        if self._bytes_per_second is None:
            return {"records": "", "pace": ""}
        step_ms = math.ceil(1000 * self._piece_bytes / self._bytes_per_second)
        piece_bytes = math.ceil(self._bytes_per_second * step_ms / 1000)
        delay = f"{self._first_byte_seconds:.3f}"
        return {
            # Else nginx keeps what a piece has beyond full records of 16 KiB for the next one, which waits less then.
            "records": f"ssl_buffer_size {piece_bytes};" if self._tls else "",
            "pace": PACE.format(step_ms=step_ms, piece_bytes=piece_bytes, delay=delay, catch_up=CATCH_UP_SECONDS),
        }

    def _wait_until_ready(self, directory: Path) -> None:
        # One request, which waits in the socket's queue. Where nginx dies, so does the queue, and the request fails.
        connection = http.client.HTTPConnection(HOST, self._port, timeout=START_SECONDS)
        if self._tls:
            context = ssl.create_default_context(cafile=self.ca_file)
            connection = http.client.HTTPSConnection(HOST, self._port, timeout=START_SECONDS, context=context)
        try:
            connection.request("GET", READY_PATH)
            connection.getresponse().read()
        except (OSError, http.client.HTTPException) as exc:
            said = (directory / "log").read_text(errors="replace").strip()
            raise ConfigError(f"nginx doesn't start on port {self._port}: {exc}; it says: {said or 'nothing'}") from exc
        finally:
            connection.close()


def _stop(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # the child isn't reaped yet, so the number is still its own
        child.wait()
