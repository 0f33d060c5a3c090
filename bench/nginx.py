"""nginx with TLS over a directory: the server for throughput figures, cheap enough not to be what is measured."""

from __future__ import annotations

import http.client
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

from asyncfetch.errors import ClosedError, ConfigError, MissingDependency
from asyncfetch.testing.server.certificates import certificate_for

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["NginxServer"]

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
        location = {ready} {{ return 204; }}
        location / {{
            root content;
            {rate}
            {delay}
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


class NginxServer:
    """nginx as a child process, over a directory: ``with NginxServer(root) as server: ... server.url``.

    It runs as root or not, and writes only into a temporary directory. Leaving the block ends it and its workers,
    with their connections.

    Args:
        root: The directory to serve.
        tls: Whether to speak TLS; needs the extra ``testing``.
        bytes_per_second: Rate of each response, from its first byte on, in whole bytes; None for no limit. nginx waits
            after each 64 KiB, so a busy machine makes it slower than that (RangeServer makes up for lost time).
        first_byte_seconds: From a request's arrival to its status line, to the millisecond; needs the lua module.
        workers: nginx processes. One fills one core, about 1 GB/s of TLS.

    Raises:
        ConfigError: On entering: an argument can't be used, or nginx doesn't start; the message has what it says.
        MissingDependency: On entering: nginx, its lua module or trustme isn't installed.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        tls: bool = True,
        bytes_per_second: float | None = None,
        first_byte_seconds: float = 0.0,
        workers: int = 1,
    ) -> None:
        self._root = Path(root)
        self._tls, self._workers = tls, workers
        self._bytes_per_second, self._first_byte_seconds = bytes_per_second, first_byte_seconds
        self._directory: Path | None = None
        self._port = 0
        self._child: psutil.Process | None = None
        self._running = ExitStack()

    @property
    def url(self) -> str:
        """``https://127.0.0.1:PORT``, without a slash at its end."""
        if not self._port:
            raise ClosedError(
                "this NginxServer has no url before it is entered: use `with NginxServer(...) as server:`"
            )
        return f"{'https' if self._tls else 'http'}://{HOST}:{self._port}"

    @property
    def ca_file(self) -> str | None:
        """PEM file of the authority to trust, there as long as the server runs; None without TLS and outside of it."""
        return os.fspath(self._directory / "ca.pem") if self._tls and self._directory else None

    @property
    def cpu_seconds(self) -> float:
        """What all of its processes have used of the cores since its start, to a hundredth of a second."""
        if self._child is None:
            raise ClosedError("this NginxServer has used nothing before it is entered")
        processes = [self._child, *self._child.children()]
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    def __enter__(self) -> Self:
        if self._directory is not None:
            raise ConfigError(f"the NginxServer at {self.url} runs already; make another one")
        executable = self._check()
        with ExitStack() as stack:
            self._directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="asyncfetch-nginx-")))
            stack.callback(setattr, self, "_directory", None)
            child = self._start(executable, self._directory)
            stack.callback(_stop, child)
            self._child = psutil.Process(child.pid)
            stack.callback(setattr, self, "_child", None)
            self._wait_until_ready(self._directory)
            self._running = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.close()

    def _check(self) -> str:
        # The directories of administrators aren't on everybody's PATH.
        executable = shutil.which("nginx", path=f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin")
        if executable is None:
            raise MissingDependency(f"nginx isn't installed: {INSTALL}")
        if self._first_byte_seconds and not all(map(os.path.exists, LUA_MODULES)):
            raise MissingDependency(f"nginx delays a first byte by its lua module, which isn't installed: {INSTALL}")
        if not self._root.is_dir():
            raise ConfigError(f"NginxServer serves a directory; {os.fspath(self._root)!r} isn't one")
        if self._bytes_per_second is not None and self._bytes_per_second < 1:
            raise ConfigError(f"bytes_per_second must be at least 1, or None, not {self._bytes_per_second}")
        if self._first_byte_seconds < 0:
            raise ConfigError(f"first_byte_seconds must not be negative, not {self._first_byte_seconds}")
        if self._workers < 1:
            raise ConfigError(f"workers must be at least 1, not {self._workers}")
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

    def _config(self) -> str:
        open_files = min(MAX_OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        delay = self._first_byte_seconds
        return CONFIG.format(
            modules="\n".join(f"load_module {module};" for module in LUA_MODULES) if delay else "",
            user="user root root;" if os.geteuid() == 0 else "",  # else root's workers are nobody, and may not read
            workers=self._workers,
            open_files=open_files,
            connections=open_files // 2,  # a connection and its file
            host=HOST,
            port=self._port,
            ssl=" ssl" if self._tls else "",
            certificate=CERTIFICATE if self._tls else "",
            ready=READY_PATH,
            rate=f"limit_rate {int(self._bytes_per_second)};" if self._bytes_per_second else "",
            delay=f"access_by_lua_block {{ ngx.sleep({delay:.3f}) }}" if delay else "",
        )

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
