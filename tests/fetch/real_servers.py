"""Web servers that others have written, each as a process of its own over a directory.

``SERVERS`` says how each of them starts: what must be installed, and how its process is had. They are given a socket
that listens already, so whoever asks first waits in its queue; those that can't take one say when they listen.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bench.nginx import NginxServer, find_nginx

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

__all__ = ["SERVERS", "Absent", "caching_proxy"]

PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin"
STOP_SECONDS = 10.0

HTTP_SERVER = """
import http.server, socket, sys
class Server(http.server.ThreadingHTTPServer):
    def server_bind(self):
        self.socket.close()
        self.socket = socket.socket(fileno=3)
        self.server_name, self.server_port = self.socket.getsockname()[:2]
Server(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler).serve_forever()
"""
AIOHTTP = """
import asyncio, socket
from aiohttp import web
application = web.Application()
application.router.add_static("/", ".")
web.run_app(application, sock=socket.socket(fileno=3))
"""
STARLETTE = """
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles
uvicorn.run(Starlette(routes=[Mount("/", StaticFiles(directory="."))]), fd=3)
"""
TWISTED = """
import socket
from twisted.internet import reactor
from twisted.web import server, static
reactor.adoptStreamPort(3, socket.AF_INET, server.Site(static.File(".")))
reactor.run()
"""
EXPRESS = """
const express = require("express"), application = express();
application.use(express.static("."));
application.listen(0);
"""
LISTEN_ON_FD_3 = """
const net = require("net"), listen = net.Server.prototype.listen;
net.Server.prototype.listen = function (...given) {
  return listen.call(this, { fd: 3 }, given.filter((one) => typeof one === "function").pop());
};
"""
"""What node runs first, so that each of its servers takes the socket."""
APACHE = """
ServerRoot "{scratch}"
PidFile "{scratch}/pid"
ServerName localhost
Listen {address}
ErrorLog /dev/stderr
{user}
LoadModule mpm_event_module {modules}/mod_mpm_event.so
LoadModule authz_core_module {modules}/mod_authz_core.so
DocumentRoot "{root}"
"""
APACHE_MODULES = "/usr/lib/apache2/modules"
LIGHTTPD = """
server.document-root = "{root}"
server.systemd-socket-activation = "enable"
server.bind = "127.0.0.1"
server.port = {port}
"""

GUIDE = Path(__file__).parents[2] / "examples" / "guides" / "disk-cache.md"
"""Says how nginx caches slices, in a block that is run here."""
CACHING_NGINX = """
daemon off;
pid nginx.pid;
{user}
events {{ }}
http {{
    access_log off;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    {block}
}}
"""


class Absent(Exception):
    """The server isn't installed; the text says how it is."""


def _executable(name: str, install: str) -> str:
    found = shutil.which(name, path=PATH)
    if found is None:
        raise Absent(f"{name} isn't installed: {install}")
    return found


@functools.cache
def _node_modules() -> str:
    npm = _executable("npm", "apt-get install npm")
    return subprocess.run([npm, "root", "--global"], check=True, capture_output=True, text=True).stdout.strip()


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


@contextmanager
def _with_socket(root: Path, command: list[str], **variables: str) -> Iterator[str]:
    """The url of a command that serves on its descriptor 3."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)  # as most of them count on
        port = listener.getsockname()[1]
        child = subprocess.Popen(
            [
                "bash",  # sh need not know descriptors of two digits
                "-c",
                f'exec 3<&{listener.fileno()}; exec "$@"',
                "sh",
                *(part.format(port=port) for part in command),
            ],
            pass_fds=[listener.fileno()],
            cwd=root,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        _end(child)


@contextmanager
def _that_says(root: Path, command: list[str], address: str, ready: bytes) -> Iterator[str]:
    """The url of a command that listens on the address when it says ``ready``."""
    child = subprocess.Popen(
        command, cwd=root, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert child.stdout is not None
    with child.stdout as said:
        try:
            heard = b""
            for line in said:
                heard += line
                if ready in line:
                    break
            else:
                raise AssertionError(f"{command[0]} doesn't start: {heard.decode(errors='replace')}")
            yield f"http://{address}"
        finally:
            _end(child)


def _own_address() -> str:
    """Where nobody else of this machine listens: ports are chosen from those of 127.0.0.1."""
    number = os.getpid() % 65_000
    return f"127.{100 + number // 250 // 250}.{number // 250 % 250}.{number % 250 + 1}:8080"


def _python(script: str, *modules: str) -> Callable[[Path, Path], AbstractContextManager[str]]:
    def start(root: Path, _: Path) -> AbstractContextManager[str]:
        for module in modules:
            if importlib.util.find_spec(module) is None:
                raise Absent(f"{module} isn't installed: pip install {module}")
        return _with_socket(root, [sys.executable, "-c", script])

    return start


def _node(package: str, *script: str) -> Callable[[Path, Path], AbstractContextManager[str]]:
    def start(root: Path, scratch: Path) -> AbstractContextManager[str]:
        node = _executable("node", "apt-get install nodejs")
        modules = _node_modules()
        if not os.path.isdir(os.path.join(modules, package)):
            raise Absent(f"{package} isn't installed: npm install --global {package}")
        first = scratch / "first.js"
        first.write_text(LISTEN_ON_FD_3)
        command = [node, "-r", os.fspath(first), *(part.replace("MODULES", modules) for part in script)]
        return _with_socket(root, command, NODE_PATH=modules)

    return start


def _nginx(root: Path, _: Path) -> AbstractContextManager[str]:
    if find_nginx() is None:
        raise Absent("nginx isn't installed: apt-get install nginx-light")

    @contextmanager
    def run() -> Iterator[str]:
        with NginxServer(root, tls=False) as server:
            yield server.url

    return run()


def caching_proxy(origin: str, scratch: Path) -> AbstractContextManager[str]:
    """The url of an nginx that keeps slices of what it fetched of an origin, as the guide sets it up."""
    [block] = re.findall(r"^```nginx\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    here = {"8080": "127.0.0.1:PORT", "/scratch/nginx": f"{scratch}/slices", "https://data.example.org": origin}
    for shown, own in here.items():
        assert shown in block
        block = block.replace(shown, own)
    return _nginx_with(block, scratch)


def nginx_with_index_pages(root: Path, scratch: Path) -> AbstractContextManager[str]:
    """The url of an nginx that lists a directory."""
    return _nginx_with(f"server {{ listen 127.0.0.1:PORT; root {root}; autoindex on; }}", scratch)


def _nginx_with(block: str, scratch: Path) -> AbstractContextManager[str]:
    """The url of an nginx with this block in its configuration; PORT stands for the port."""
    executable = find_nginx()
    if executable is None:
        raise Absent("nginx isn't installed: apt-get install nginx-light")
    user = "user root root;" if os.geteuid() == 0 else ""
    config = CACHING_NGINX.format(user=user, block=block)
    config = config.replace("{", "{{").replace("}", "}}").replace("PORT", "{port}")
    script = 'printf "%s" "$3" > "$2/nginx.conf"; exec "$1" -p "$2" -c nginx.conf -e stderr'
    return _with_socket(scratch, ["sh", "-c", script, "sh", executable, os.fspath(scratch), config], NGINX="3;")


def _nginx_cache(root: Path, scratch: Path) -> AbstractContextManager[str]:
    @contextmanager
    def run() -> Iterator[str]:
        with _nginx(root, scratch) as origin, caching_proxy(origin, scratch) as url:
            yield url

    return run()


def _apache(root: Path, scratch: Path) -> AbstractContextManager[str]:
    executable = _executable("apache2", "apt-get install apache2")
    address = _own_address()
    user = "User www-data\nGroup www-data" if os.geteuid() == 0 else ""
    config = APACHE.format(scratch=scratch, address=address, user=user, modules=APACHE_MODULES, root=root)
    (scratch / "apache.conf").write_text(config)
    command = [executable, "-f", os.fspath(scratch / "apache.conf"), "-DFOREGROUND"]
    return _that_says(root, command, address, b"resuming normal operations")


def _lighttpd(root: Path, scratch: Path) -> AbstractContextManager[str]:
    executable = _executable("lighttpd", "apt-get install lighttpd")
    config = scratch / "lighttpd.conf"
    script = f'printf "%s" "$2" > "{config}"; export LISTEN_FDS=1 LISTEN_PID=$$; exec "$1" -D -f "{config}"'
    text = LIGHTTPD.replace("{root}", os.fspath(root))
    return _with_socket(root, ["sh", "-c", script, "sh", executable, text])


def _caddy(root: Path, _: Path) -> AbstractContextManager[str]:
    address = _own_address()
    command = [_executable("caddy", "apt-get install caddy"), "file-server", "--listen", address]
    return _that_says(root, command, address, b"serving static files")


def _rclone(root: Path, _: Path) -> AbstractContextManager[str]:
    address = _own_address()
    command = [_executable("rclone", "apt-get install rclone"), "-v", "serve", "http", "--addr", address, "."]
    return _that_says(root, command, address, b"poll-interval")


SERVERS: dict[str, Callable[[Path, Path], AbstractContextManager[str]]] = {
    "nginx": _nginx,
    "nginx's cache": _nginx_cache,
    "apache": _apache,
    "lighttpd": _lighttpd,
    "caddy": _caddy,
    "rclone": _rclone,
    "express": _node("express", "-e", EXPRESS),
    "serve": _node("serve", "MODULES/serve/build/main.js", "-l", "{port}", "."),
    "http-server": _node("http-server", "MODULES/http-server/bin/http-server", "-p", "{port}", "."),
    "http.server": _python(HTTP_SERVER),
    "aiohttp": _python(AIOHTTP, "aiohttp"),
    "starlette": _python(STARLETTE, "starlette", "uvicorn"),
    "twisted": _python(TWISTED, "twisted"),
}
"""By name; called with the directory to serve and one to write to, each gives a block that yields the server's url, or
raises Absent."""
