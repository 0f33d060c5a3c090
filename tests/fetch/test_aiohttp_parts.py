"""What is relied on of aiohttp beyond its documentation is in one file; here it is looked for in all others."""

from __future__ import annotations

import ast
import asyncio
import importlib
import pkgutil
from pathlib import Path

import aiohttp
import pytest
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection

import asyncfetch
import asyncfetch.fetch
from asyncfetch.fetch.transports import aiohttp_parts

OURS = Path(asyncfetch.__file__).parent
HOME = Path(aiohttp_parts.__file__)
FILES = sorted(path for path in (OURS / "fetch").rglob("*.py") if path != HOME and "aiohttp" in path.read_text())

MODULES = {"aiohttp", "aiohttp.abc"}
NAMES = {
    "AddrInfoType", "BaseConnector", "ClientConnectionError", "ClientConnectionResetError",
    "ClientConnectorCertificateError", "ClientConnectorDNSError", "ClientConnectorError",
    "ClientConnectorSSLError", "ClientError",
    "ClientHttpProxyError", "ClientOSError", "ClientPayloadError", "ClientProxyConnectionError", "ClientResponse",
    "ClientResponseError", "ClientSession", "ClientTimeout", "DefaultResolver", "DummyCookieJar", "InvalidURL",
    "ServerDisconnectedError", "TCPConnector", "__version__",
}  # fmt: skip
"""In its reference, or among the exceptions there."""
NEVER_MADE = {"ClientRequest", "ClientResponse"}
"""By users, it says."""
ATTRIBUTES = {"close", "connect", "connection", "connector", "content", "content_length", "detach", "headers", "method",
              "raise_for_status", "readany", "release", "request", "status", "transport", "url"}  # fmt: skip
"""Of sessions, connectors, connections and answers, as the reference has them."""
OVERRIDDEN = {"__init__", "close", "connect", "resolve"}
INNER = [ResponseHandler, Connection, aiohttp.ClientRequest, aiohttp.ClientResponse, aiohttp.TCPConnector]
NOT_AIOHTTPS = {"_ssl_protocol"}
"""Of asyncio's transports."""
READERS = {"attrgetter", "delattr", "getattr", "hasattr", "methodcaller", "setattr"}


def own_names(tree: ast.AST) -> set[str]:
    """Attributes that a file defines: methods, fields, and what is set in ``self``."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef():
                names |= {one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
                fields = [one.target for one in node.body if isinstance(one, ast.AnnAssign)]
                names |= {one.id for one in fields if isinstance(one, ast.Name)}
            case ast.Attribute(ast.Name("self" | "cls"), name, ast.Store()):
                names.add(name)
    return names


OWN = set().union(*(own_names(ast.parse(path.read_text())) for path in FILES))
THEIRS = {name for kind in INNER for name in dir(kind)}
UNDOCUMENTED = (
    {name for name in THEIRS if not name.startswith("_")} - ATTRIBUTES - OWN - {*dir(asyncio.Protocol), *dir(range)}
)


def findings(source: str) -> list[str]:
    """What a file knows of aiohttp that isn't documented."""
    found = []
    tree = ast.parse(source)
    own = own_names(tree) | (OWN - THEIRS) | NOT_AIOHTTPS

    def is_undocumented(name: str) -> bool:
        is_private = name.startswith("_") and not name.startswith("__") and name not in own
        return is_private or name in UNDOCUMENTED

    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                found += [one.name for one in names if one.name.split(".")[0] == "aiohttp" and one.name not in MODULES]
            case ast.ImportFrom("aiohttp", names):
                found += [one.name for one in names if one.name not in NAMES]
            case ast.ImportFrom(str(module)) if module.startswith("aiohttp.") and module not in MODULES:
                found.append(module)
            case ast.Call(ast.Attribute(ast.Name("aiohttp"), name)) if name in NEVER_MADE:
                found.append(f"{name}()")
            case ast.Attribute(ast.Name("aiohttp"), name):
                found += [name] if name not in NAMES else []
            case ast.Attribute(_, name) if is_undocumented(name):
                found.append(name)
            case ast.Call(ast.Name(reader), arguments) if reader in READERS:
                strings = [one.value for one in arguments if isinstance(one, ast.Constant)]
                found += [name for name in strings if isinstance(name, str) and is_undocumented(name)]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(OURS / "fetch").as_posix())
def test_no_other_file_knows_what_isnt_documented(path: Path) -> None:
    assert findings(path.read_text()) == []


def test_no_other_class_overrides_what_isnt_documented() -> None:
    overridden: dict[str, set[str]] = {}
    for module in pkgutil.walk_packages(asyncfetch.fetch.__path__, "asyncfetch.fetch."):
        for kind in vars(importlib.import_module(module.name)).values():
            if isinstance(kind, type) and kind.__module__ == module.name != aiohttp_parts.__name__:
                bases = [base for base in kind.__mro__ if base.__module__.split(".")[0] == "aiohttp"]
                theirs = {name for base in bases for name in vars(base) if callable(getattr(base, name))}
                overridden[kind.__name__] = theirs & set(vars(kind))
    assert overridden["Connector"] == {"__init__", "close", "connect"}
    assert overridden["Resolver"] == {"close", "resolve"}
    assert set().union(*overridden.values()) <= OVERRIDDEN


@pytest.mark.parametrize(
    "line",
    [
        "from aiohttp.client_proto import ResponseHandler",
        "import aiohttp.connector",
        "from aiohttp import helpers",
        "aiohttp.helpers.TimerNoop()",
        'aiohttp.ClientRequest("GET", url)',
        "aiohttp.ClientResponse()",
        "connection.protocol",
        "session._retry_connection = False",
        "handler.should_close",
        "self._session._response_class",
        "connector._conns",
        "super()._release(key)",
        'getattr(response, "_closed", None)',
        'methodcaller("set_response_params")',
        "request.connection_key",
    ],
)
def test_what_would_be_found(line: str) -> None:
    assert findings(line) != []


def test_the_one_file_is_where_it_is() -> None:
    assert len(findings(HOME.read_text())) >= 5
    assert len(HOME.read_text().splitlines()) < 150
