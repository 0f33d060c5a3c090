"""The files below a directory: by a store's listing, or by the index pages of a web server.

nginx (autoindex), Apache, Caddy and others write such a page for a directory: HTML with a link to each of its entries.
"""

from __future__ import annotations

from functools import partial
from html.parser import HTMLParser
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urljoin, urlsplit

from asyncfetch.errors import AccessDenied, ConfigError, FetchError, NotFound, redact_url
from asyncfetch.fetch.urls import join_url
from asyncfetch.runtime.concurrently import gather
from asyncfetch.runtime.threads import run_sync

if TYPE_CHECKING:
    from asyncfetch.fetch import Fetcher

WEB_SCHEMES = ("http://", "https://")


class ListedFile(NamedTuple):
    """A file in a directory."""

    url: str
    size: int | None
    """Its length in bytes; None where an index page names it."""


async def list_files(fetcher: Fetcher, directory: str, *, recursive: bool) -> list[ListedFile]:
    """The files in a directory, by url; with ``recursive`` all below it.

    Raises:
        ConfigError: A web server has no index page for the directory.
        FetchError: It could not be listed, or there are more than ``max_listed_entries``.
    """
    if not directory.startswith(WEB_SCHEMES):
        entries = await fetcher.listdir(directory, recursive=recursive)
        return [ListedFile(entry.url, entry.size) for entry in entries if not _is_directory(entry.url)]
    files: list[str] = []
    level = [directory]
    while level:
        pages = await gather(*(partial(_read_page, fetcher, one) for one in level))
        urls = [url for page in pages for url in page]
        files += [url for url in urls if not _is_directory(url)]
        level = [url for url in urls if _is_directory(url)] if recursive else []
        most = fetcher.config.max_listed_entries
        if len(files) + len(level) > most:
            raise FetchError(f"there are more than max_listed_entries={most} files: raise that", url=directory)
    return [ListedFile(url, None) for url in sorted(files)]


def _is_directory(url: str) -> bool:
    return url.partition("?")[0].endswith("/")


async def _read_page(fetcher: Fetcher, directory: str) -> list[str]:
    """The entries of a directory by its index page; a directory's url ends in a slash."""
    path, mark, query = directory.partition("?")
    url = path.rstrip("/") + "/" + mark + query
    try:
        page = await fetcher.fetch(url)
    except (NotFound, AccessDenied) as error:
        raise _no_page(directory, f"its answer has the status {error.status}") from error
    return await run_sync(_parse_page, url, bytes(page))


def _parse_page(url: str, page: bytes) -> list[str]:
    parser = _Links()
    parser.feed(page.decode("utf-8", "replace"))
    if not parser.links:
        raise _no_page(url, "its answer has no links")
    base = url.partition("?")[0]
    names = set()
    for link in parser.links:
        try:
            target = urlsplit(urljoin(base, link))
        except ValueError:
            continue
        name = f"{target.scheme}://{target.netloc}{target.path}".removeprefix(base)
        if "://" not in name and name.strip("/") and "/" not in name[:-1] and not target.query:
            names.add(unquote(name))
    return sorted(join_url(url, name) for name in names)


class _Links(HTMLParser):
    """The targets of a page's links."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take the target of a link."""
        if tag == "a":
            self.links += [value for name, value in attrs if name == "href" and value]


def _no_page(directory: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{redact_url(directory)!r} can't be listed: the web server has no index page for it, {reason}: have it write "
        "some (autoindex of nginx), or name the files, by braces as {000..123}, or those of a folder in metadata.csv"
    )
