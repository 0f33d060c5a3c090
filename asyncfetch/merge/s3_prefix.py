"""A prefix of S3 as a merge's destination.

    PREFIX/data/ videos/ meta/              each file is put when it is complete, and replaces an older one
    PREFIX/.merging-FINGERPRINT/begun       put before anything else: a merge is under way
    PREFIX/.merging-FINGERPRINT/finished    a description of the dataset, put right before info.json, removed last
    PREFIX/.merging-FINGERPRINT/PATH        a note that the dataset's file PATH is finished, with its size and tag

``meta/info.json`` is removed first and put last, so no mixture looks like a dataset; the notes go after it. They are on
S3, so any machine can resume a killed merge, and machines that share nothing else can work together. Two merges of
different plans for one prefix aren't noticed: S3 has no locks.
"""

from __future__ import annotations

import json
import logging
import tempfile
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from asyncfetch.errors import DatasetError, FetchError, MergeError, NotFound
from asyncfetch.fetch.batch import for_each
from asyncfetch.fetch.urls import join_url
from asyncfetch.lerobot.info import INFO_PATH
from asyncfetch.merge.local_folder import WrittenFile, check_space, is_taken, sweep_rooms, temporary_room
from asyncfetch.runtime.concurrently import gather
from asyncfetch.runtime.threads import run_sync

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from asyncfetch.fetch import Fetcher
    from asyncfetch.ranges import ObjectInfo

_DELETED_AT_ONCE = 16
_MARK = ".merging-"
_FINISHED = "finished"
_SCHEMES = frozenset({"s3", "s3a"})
"""Schemes of sources on S3; the second one is fsspec's."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class S3Prefix:
    """A Destination: its files go from a temporary folder to their places. The methods are those of ``LocalFolder``."""

    name: str
    """The url, its scheme in lower case, without a slash at its end."""
    fingerprint: str = ""

    def build(self, fingerprint: str) -> S3Prefix:
        """The build, with its notes below the prefix."""
        return replace(self, fingerprint=fingerprint)

    async def check(self, fetcher: Fetcher, sources: Sequence[str], *, overwrite: bool) -> None:
        """MergeError for a prefix that isn't empty, except for the files of a killed merge."""
        for source in sources:
            scheme, _, place = source.partition("://")
            own, target = f"s3://{place.rstrip('/')}/", f"{self.name}/"
            if scheme.lower() in _SCHEMES and (own.startswith(target) or target.startswith(own)):
                raise MergeError(f"{self.name} is, holds or lies in the source {source}: sources are never changed")
        if not overwrite:
            await self._check_free(fetcher, or_finished=True)

    async def _check_free(self, fetcher: Fetcher, *, or_finished: bool = False) -> None:
        """MergeError unless the prefix is empty, except for the files of a killed merge, perhaps a finished one."""
        entries = await _list(fetcher, self.name)
        if not entries:
            return
        left_over = [entry for entry in entries if entry.startswith(join_url(self.name, _MARK))]
        if left_over and join_url(self.name, INFO_PATH) not in await _list(fetcher, join_url(self.name, "meta")):
            return
        if or_finished:
            for entry in left_over:
                if join_url(entry, _FINISHED) in await _list(fetcher, entry):
                    return
        raise is_taken(self.name)

    @asynccontextmanager
    async def open(
        self, fetcher: Fetcher, needed_bytes: int, bytes_at_once: int, *, overwrite: bool, shared: bool = False
    ) -> AsyncIterator[None]:
        """Hold the prefix: what was there is no dataset any more."""
        await run_sync(sweep_rooms)
        await run_sync(check_space, Path(tempfile.gettempdir()), bytes_at_once)
        if not overwrite:
            await self._check_free(fetcher)
        await fetcher.delete(self.url(INFO_PATH))
        await fetcher.put(self._note("begun"), b"")
        try:
            yield
        except BaseException as error:
            if not shared:
                await self._leave(fetcher, error)
            raise

    async def finished(self, fetcher: Fetcher) -> list[WrittenFile] | None:
        """The files, if their tags are those of the description."""
        try:
            noted = json.loads(bytes(await fetcher.fetch(self._note(_FINISHED))))
            *files, info = [WrittenFile(**one) for one in noted]
            content = bytes(await fetcher.fetch(self.url(info.path)))
            states = await gather(*(partial(fetcher.stat, self.url(file.path)) for file in files))
        except NotFound:
            return None
        now = [_stored(file.path, state) for file, state in zip(files, states, strict=True)]
        return [*files, info] if [*now, _described(info.path, content)] == [*files, info] else None

    async def forget(self, fetcher: Fetcher) -> None:
        """Remove the notes, the description last."""
        notes = await self._notes(fetcher)
        await _delete(fetcher, set(notes) - {self._note(_FINISHED)})
        await fetcher.delete(self._note(_FINISHED))

    async def find(self, fetcher: Fetcher, path: str) -> WrittenFile | None:
        """The file, if its size and tag are those in its note."""
        try:
            note = await fetcher.fetch(self._note(path))
            info = await fetcher.stat(self.url(path))
        except NotFound:
            return None
        written = _stored(path, info)
        with suppress(ValueError, TypeError):
            if WrittenFile(**json.loads(bytes(note))) == written:
                return written
        return None

    @asynccontextmanager
    async def room(self) -> AsyncIterator[Path]:
        """A temporary folder, gone when the block is left."""
        with ExitStack() as stack:
            with anyio.CancelScope(shield=True):
                folder = await run_sync(stack.enter_context, temporary_room())
            try:
                yield folder
            finally:
                with anyio.CancelScope(shield=True):
                    await run_sync(stack.close)

    async def finish(self, fetcher: Fetcher, room: Path, path: str) -> WrittenFile:
        """Put the file, and note it."""
        written = _stored(path, await fetcher.put(self.url(path), room / path))
        await fetcher.put(self._note(path), json.dumps(asdict(written)).encode())
        return written

    def url(self, path: str) -> str:
        """The url of a dataset's file."""
        return join_url(self.name, path)

    async def publish(
        self, fetcher: Fetcher, room: Path, files: Sequence[WrittenFile], metadata: Sequence[str], *, overwrite: bool
    ) -> None:
        """Put the files of metadata, and remove all others."""
        *others, info = metadata
        put = [_stored(path, await fetcher.put(self.url(path), room / path)) for path in others]
        whole = [*files, *put]
        wanted = {self.url(file.path) for file in whole}
        there = await _list(fetcher, self.name, recursive=True)
        await _delete(fetcher, {url for url in there if not url.startswith(self._note(""))} - wanted)
        content = await run_sync((room / info).read_bytes)
        noted = [asdict(file) for file in (*whole, _described(info, content))]
        await fetcher.put(self._note(_FINISHED), json.dumps(noted).encode())
        await fetcher.put(self.url(info), content)

    async def _leave(self, fetcher: Fetcher, error: BaseException) -> None:
        """Keep the files for the next attempt, unless that would fail, too: then remove them, and then their notes."""
        if not isinstance(error, DatasetError):
            logger.warning("what is finished stays at %s: the same merge goes on from there", self.name)
            return
        with anyio.CancelScope(shield=True), suppress(FetchError):
            notes = await self._notes(fetcher)
            await _delete(fetcher, [self.url(note.removeprefix(self._note(""))) for note in notes])
            await _delete(fetcher, notes)

    async def _notes(self, fetcher: Fetcher) -> list[str]:
        return await _list(fetcher, self.url(f"{_MARK}{self.fingerprint}"), recursive=True)

    def _note(self, path: str) -> str:
        return f"{self.url(f'{_MARK}{self.fingerprint}')}/{path}"


def _stored(path: str, info: ObjectInfo) -> WrittenFile:
    return WrittenFile(path, info.size, str(info.etag))


def _described(path: str, content: bytes) -> WrittenFile:
    """A file with a checksum of our own, since its entity tag isn't known before it is put."""
    return WrittenFile(path, len(content), blake2b(content, digest_size=16).hexdigest())


async def _list(fetcher: Fetcher, url: str, *, recursive: bool = False) -> list[str]:
    """Urls of the entries there, all if ``recursive``; else prefixes below end in "/"."""
    try:
        return [info.url for info in await fetcher.listdir(url, recursive=recursive)]
    except NotFound:
        return []


async def _delete(fetcher: Fetcher, urls: Iterable[str]) -> None:
    await for_each(urls, fetcher.delete, workers=_DELETED_AT_ONCE)
