"""Files below a directory of a web server, by the index pages that real ones write."""

from __future__ import annotations

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

from asyncfetch.config import FetchConfig
from asyncfetch.errors import ConfigError, FetchError, NotFound
from asyncfetch.fetch import Fetcher
from asyncfetch.testing import RangeServer
from asyncfetch.videos.listing import find_files, list_files
from tests.fetch.real_servers import Absent, nginx_with_index_pages
from tests.videos.test_folders import FILES, NAMES, entries_of, laid

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SHOWN = sorted(name for name in FILES if not name.startswith((".git", "a/._")))


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(name="url", params=["python", "nginx"])
def url_fixture(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A server of FILES, whose directories have index pages."""
    root, scratch = laid(tmp_path / "root", FILES), tmp_path / "scratch"
    scratch.mkdir()
    if request.param == "nginx":
        try:
            running = nginx_with_index_pages(root, scratch)
        except Absent as absent:
            pytest.skip(str(absent))
        with running as url:
            yield url
        return
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(root))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def quoted(name: str) -> str:
    return name.replace("%", "%25").replace(" ", "%20")


async def urls_in(fetcher: Fetcher, directory: str, *, recursive: bool) -> list[str]:
    return [file.url for file in await list_files(fetcher, directory, recursive=recursive)]


async def test_index_pages_are_read(url: str) -> None:
    async with Fetcher() as fetcher:
        below = await urls_in(fetcher, url, recursive=True)
        here = await urls_in(fetcher, f"{url}/a/", recursive=False)
    names = [name for name in FILES if "/." not in name and not name.startswith(".")]
    assert [one for one in below if "/." not in one] == sorted(f"{url}/{quoted(name)}" for name in names)
    assert {one for one in here if "/." not in one} == {f"{url}/{name}" for name in names if name.startswith("a/")}


async def test_a_folder_of_a_web_server_is_read(url: str) -> None:
    table = await entries_of(url)
    assert table["file_name"].to_pylist() == NAMES
    assert table["video"].to_pylist() == [f"{url}/{quoted(name)}" for name in NAMES]
    assert table.to_pylist()[-1]["txt"]["url"] == f"{url}/c/sub%20dir/3%25.txt"


async def test_wildcards_are_looked_for_in_index_pages(url: str) -> None:
    async with Fetcher() as fetcher:
        found = await find_files([f"{url}/**/*.mov", f"{url}/a/2*.json"], fetcher)
    assert found.urls == [f"{url}/c/sub%20dir/3%25.mov", f"{url}/a/2.b.json", f"{url}/a/2.json"]


async def test_a_listing_is_bounded(url: str) -> None:
    async with Fetcher(FetchConfig(max_listed_entries=5)) as fetcher:
        with pytest.raises(FetchError, match="more than max_listed_entries=5 files"):
            await list_files(fetcher, url, recursive=True)


APACHE = b"""<!DOCTYPE HTML PUBLIC "-//W3C//DTD HTML 3.2 Final//EN">
<html><head><title>Index of /set</title></head><body><h1>Index of /set</h1><table>
<tr><th><a href="?C=N;O=D">Name</a></th><th><a href="?C=S;O=A">Size</a></th></tr>
<tr><td><a href="/">Parent Directory</a></td></tr><tr><td><a href="b%20c/">b c/</a></td></tr>
<tr><td><A HREF="a&amp;b.mp4">a&amp;b.mp4</A></td></tr><tr><td><a href="https://elsewhere/set/x.mp4">x</a></td></tr>
<tr><td><a href="b%20c/deep.mp4">deep</a></td></tr><tr><td><a href="http://[bad">bad</a></td></tr>
<tr><td><a name="anchor">none</a></td></tr><tr><td><a href="/set/c.mp4#top">c</a></td></tr></table></body></html>"""


async def test_only_entries_of_the_directory_are_taken() -> None:
    content = {"set/": APACHE, "set/b c/": b'<a href="../">..</a><a href="d.mp4">d</a>', "none/": b"<p>no"}
    async with RangeServer(content) as server, Fetcher(FetchConfig(ca_file=server.ca_file)) as fetcher:
        url = f"{server.url}/set"
        files = [f"{url}/a%26b.mp4", f"{url}/b%20c/d.mp4", f"{url}/c.mp4"]
        assert await urls_in(fetcher, url, recursive=True) == files
        assert await urls_in(fetcher, f"{url}/?token=1", recursive=True) == [f"{file}?token=1" for file in files]
        with pytest.raises(ConfigError, match="has no index page for it, its answer has no links: have it"):
            await list_files(fetcher, f"{server.url}/none", recursive=False)
        with pytest.raises(ConfigError, match=r"nowhere' can't be listed.* has the status 404:") as error:
            await list_files(fetcher, f"{server.url}/nowhere", recursive=False)
        assert isinstance(error.value.__cause__, NotFound)
