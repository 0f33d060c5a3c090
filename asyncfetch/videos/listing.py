"""The files that a url means: all below a directory, or those that match a pattern.

A directory is known by a store's listing, or by the index pages of a web server: nginx (autoindex), Apache, Caddy and
others write HTML with a link to each of its entries. Of patterns, braces are written out, as shells and WebDataset do,
and wildcards are looked for in a listing.
"""

from __future__ import annotations

import os
import re
from functools import partial
from html.parser import HTMLParser
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urljoin, urlsplit

from asyncfetch.errors import AccessDenied, ConfigError, FetchError, NotFound, redact_url
from asyncfetch.fetch.urls import join_url
from asyncfetch.runtime.concurrently import gather
from asyncfetch.runtime.threads import run_sync

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from asyncfetch.fetch import Fetcher

WEB_SCHEMES = ("http://", "https://")
QUOTED_SCHEMES = ("file://", *WEB_SCHEMES)
"""Schemes of urls whose paths are quoted."""


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


MAX_URLS = 1_000_000
"""Most urls that braces are written out to; as many as a listing may have by default."""

_NUMBERS = re.compile(r"(-?\d{1,18})\.\.(-?\d{1,18})(?:\.\.(-?\d{1,18}))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.(-?\d{1,18}))?")


def expand_braces(text: str) -> list[str]:
    """All texts that the braces stand for: ``{a,b}``, ``{000..123}``, ``{0..9..3}`` and ``{a..e}``, also nested.

    Numbers are as wide as the wider end. Braces without a comma or a range mean themselves, as in a shell.

    Raises:
        ConfigError: There are more than MAX_URLS of them.
    """
    opened = text.find("{")
    while opened >= 0:
        parts, closed = _split_group(text, opened)
        choices = [each for part in parts for each in expand_braces(part)] if len(parts) > 1 else []
        if len(parts) == 1:
            choices = _expand_range(parts[0], text)
        if choices:
            tails = expand_braces(text[closed + 1 :])
            if len(choices) * len(tails) > MAX_URLS:
                raise _too_many(text)
            return [f"{text[:opened]}{choice}{tail}" for choice in choices for tail in tails]
        opened = text.find("{", opened + 1)
    return [text]


def _split_group(text: str, opened: int) -> tuple[list[str], int]:
    """The parts between the commas of the group that begins here, and its closing brace; no parts where it has none."""
    parts: list[str] = []
    depth, start = 0, opened + 1
    for place in range(opened, len(text)):
        match text[place]:
            case "{":
                depth += 1
            case "}":
                depth -= 1
                if not depth:
                    return [*parts, text[start:place]], place
            case "," if depth == 1:
                parts.append(text[start:place])
                start = place + 1
    return [], -1


def _expand_range(inner: str, text: str) -> list[str]:
    """The numbers or letters of a range; none where it is no range."""
    numbers, letters = _NUMBERS.fullmatch(inner), _LETTERS.fullmatch(inner)
    match = numbers or letters
    if match is None:
        return []
    first, last, step_text = match.groups()
    low, high = (int(first), int(last)) if numbers else (ord(first), ord(last))
    step = abs(int(step_text or 1)) or 1
    if abs(high - low) // step >= MAX_URLS:
        raise _too_many(text)
    values = range(low, high + 1, step) if low <= high else range(low, high - 1, -step)
    if letters:
        return [chr(value) for value in values]
    is_padded = any(end.lstrip("-").startswith("0") and len(end.lstrip("-")) > 1 for end in (first, last))
    width = max(len(first), len(last)) if is_padded else 0
    return [f"{value:0{width}d}" for value in values]


def _too_many(text: str) -> ConfigError:
    return ConfigError(f"the braces of {redact_url(text)!r} stand for more than {MAX_URLS} urls: write smaller ranges")


class FoundFiles(NamedTuple):
    """The files that patterns stand for."""

    urls: list[str]
    """The files in the order of the patterns, those of one wildcard by name."""
    listed: frozenset[str]
    """All files in the directories that were listed, whether they match or not."""


async def find_files(
    patterns: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], fetcher: Fetcher
) -> FoundFiles:
    """The files that urls with braces and wildcards stand for.

    ``*`` and ``?`` stand for characters of one name, ``[abc]`` for one of them, ``**`` for any number of directories;
    in urls of the web a ``?`` begins a query. Plain paths become absolute. A url without wildcards isn't looked for.

    Raises:
        ConfigError: Nothing matches a pattern, or a web server has no index pages to look for wildcards in.
        FetchError: A directory could not be listed.
    """
    given = [patterns] if isinstance(patterns, str | os.PathLike) else list(patterns)
    written = await run_sync(
        lambda: [split_wildcards(url) for one in given for url in expand_braces(absolute_url(one))]
    )
    depths: dict[str, bool] = {}
    for base, wildcards in written:
        if wildcards:
            depths[base] = depths.get(base, False) or "/" in wildcards or "**" in wildcards
    listings = await gather(*(partial(list_files, fetcher, base, recursive=deep) for base, deep in depths.items()))
    listed = {base: [file.url for file in files] for base, files in zip(depths, listings, strict=True)}
    urls: list[str] = []
    for base, wildcards in written:
        urls += _matching(base, wildcards, listed[base]) if wildcards else [base]
    return FoundFiles(urls, frozenset(url for found in listed.values() for url in found))


def absolute_url(url: str | os.PathLike[str]) -> str:
    """The url as it is, a plain path as an absolute one; a slash behind stays. Blocks.

    Raises:
        ConfigError: It is neither a string nor a path.
    """
    if not isinstance(url, str | os.PathLike):
        raise ConfigError(f"a url or path must be a string, not of type {type(url).__name__}")
    text = os.fspath(url)
    if "://" in text or not text:
        return text
    return os.path.abspath(text) + ("/" if text.endswith("/") and text.strip("/") else "")


def split_wildcards(url: str) -> tuple[str, str]:
    """Return the directory in front of the first wildcard, with its slash, and what follows; "" where there is none."""
    wildcard = re.search(r"[*\[]" if url.startswith(WEB_SCHEMES) else r"[*?\[]", url)
    if wildcard is None:
        return url, ""
    cut = url.rfind("/", 0, wildcard.start()) + 1
    return url[:cut], url[cut:]


def _matching(base: str, wildcards: str, listed: Sequence[str]) -> list[str]:
    pattern = _wildcard_pattern(wildcards)
    is_quoted = base.startswith(QUOTED_SCHEMES)
    names = [(url, url[len(base) :]) for url in listed]
    found = [url for url, name in names if pattern.fullmatch(unquote(name) if is_quoted else name)]
    if not found:
        shown = redact_url(base + wildcards)
        raise ConfigError(f"no file matches {shown!r}, of {len(listed)} below {redact_url(base)!r}: check the pattern")
    return found


def _wildcard_pattern(wildcards: str) -> re.Pattern[str]:
    pieces = []
    for piece in re.findall(r"\*\*/|\*+|\?|\[!?\]?[^]]*\]|.", wildcards, re.DOTALL):
        match piece[0]:
            case "*" if piece == "**/":
                pieces.append("(?:.*/)?")
            case "*":
                pieces.append(".*" if len(piece) > 1 else "[^/]*")
            case "?":
                pieces.append("[^/]")
            case "[" if len(piece) > 1:
                inner = re.sub(r"[\\\[&~|]", r"\\\g<0>", piece[1:-1])
                pieces.append(f"[{'^' + inner[1:] if inner.startswith('!') else inner}]")
            case _:
                pieces.append(re.escape(piece))
    try:
        return re.compile("".join(pieces), re.DOTALL)
    except re.error as error:  # of a range that runs backwards
        raise ConfigError(f"{wildcards!r} is no pattern: {error}") from error
