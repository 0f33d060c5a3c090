"""Stores, the sources of files: the protocol, and the stores that need no network."""

from __future__ import annotations

import pickle
import stat
from abc import abstractmethod
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import index
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeGuard, TypeVar, runtime_checkable

from asyncfetch.errors import CacheError, ConfigError
from asyncfetch.fetch.transports.file import read_failure

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

Method = Literal["raw", "pickle"]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class StoredFile:
    """The raw bytes of a read, as they are staged."""

    data: bytes
    source: SourceInfo | None


class Binding:
    """A file of a store, as one handle sees it.

    Handles with equal keys share what is read: raw bytes those of stores of one identity, pickled values those of one
    store.
    """

    __slots__ = ("_raw", "key", "name", "store")

    def __init__(self, store: FileStore[Any], name: str, method: Method) -> None:
        self.store = store
        self.name = name
        self._raw = _PickledStore(store) if method == "pickle" else _split(store)
        self.key: Hashable = (id(store) if method == "pickle" else _origin(store), _resolved(store, name))

    def size(self) -> int | None:
        """Length of the raw bytes, if it is known without reading them. May do I/O."""
        return _size_of(self._raw, self.name)

    def read(self) -> StoredFile:
        """Read the file."""
        raw, source = self._raw.read_raw(self.name)
        return StoredFile(bytes(raw), source)

    def value(self, stored: StoredFile) -> Any:  # noqa: ANN401
        """The handle's own value, from bytes that any handle of this key read."""
        return self._raw.decode(stored.data, self.name)

    def read_value(self) -> tuple[Any, SourceInfo | None]:
        """The handle's own value, read now, and its source."""
        return self.store[self.name]


def _dumps(value: object, name: str) -> bytes:
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise CacheError(f"the value of {name!r}, a {type(value).__qualname__}, can't be pickled: {error}") from error


def _origin(store: FileStore[Any]) -> Hashable:
    """A key of the store's raw bytes. It may hold the store's id, since bindings keep the store alive."""
    while isinstance(store, _ForwardingStore):
        store = store.inner
    return getattr(store, "identity", store.path) if _splits(store) else (store.path, id(store))


_FIELD = "__sources__"


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """The place where one file was read."""

    dataset_path: str
    """The store's path, without secrets."""
    index: int | str | None = None
    """The name by which the file was read."""
    shard_name: str | None = None
    """The archive that holds it, if any."""
    file_names: tuple[str, ...] = ()


def add_source_info(sample: object, *infos: SourceInfo) -> None:
    """Append to the sample's ``__sources__``, a tuple: an entry of a dict, or an attribute if the sample has it.

    In a dict it is made if need be. Samples of other types stay unchanged.
    """
    if isinstance(sample, dict):
        sample[_FIELD] = (*(sample.get(_FIELD) or ()), *infos)
    elif hasattr(sample, _FIELD):
        setattr(sample, _FIELD, (*(getattr(sample, _FIELD) or ()), *infos))


def get_source_info(sample: object) -> tuple[SourceInfo, ...]:
    """The sources recorded on a sample, in order; for a list or tuple of samples, those of all."""
    if isinstance(sample, list | tuple):
        return tuple(info for one in sample for info in get_source_info(one))
    found = sample.get(_FIELD) if isinstance(sample, dict) else getattr(sample, _FIELD, None)
    return tuple(found or ())


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class FileStore(Protocol[T_co]):
    """Files by name: the minimum that a pool needs of a store. Read in many threads at a time.

    A store may also have ``size(name)``, the length of its raw bytes if it is known without reading them, or None;
    ``resolve(name)``, the full name of a short one, without I/O; and ``identity``, hashable and never shown, which
    takes the place of ``path`` if that, without secrets, doesn't distinguish two stores' files.
    """

    @property
    @abstractmethod
    def path(self) -> str:
        """The path that distinguishes this store's files from others', without secrets. Fit for messages."""

    @abstractmethod
    def __getitem__(self, name: str) -> tuple[T_co, SourceInfo]:
        """The file's value and its source."""


@runtime_checkable
class RawFileStore(FileStore[T_co], Protocol[T_co]):
    """A store that separates reading from decoding, so that bytes can be staged and shared.

    ``store[name]`` is ``decode(raw, name)`` of the bytes of ``read_raw(name)``. Stores of equal ``identity``, or of
    equal ``path`` without one, have the same raw bytes under the same name, however they decode them.
    """

    @abstractmethod
    def read_raw(self, name: str) -> tuple[bytes, SourceInfo]:
        """The file's bytes and their source."""

    @abstractmethod
    def decode(self, raw: bytes, name: str) -> T_co:
        """The value of the bytes."""


class SplitStore(RawFileStore[T_co]):
    """A base of RawFileStores; subclasses implement ``path``, ``read_raw`` and ``decode``."""

    def size(self, name: str) -> int | None:
        """Length of the raw bytes, if it is known without reading them."""
        return None

    def resolve(self, name: str) -> str:
        """The full name of ``name``."""
        return name

    def __getitem__(self, name: str) -> tuple[T_co, SourceInfo]:
        raw, source = self.read_raw(name)
        return self.decode(raw, name), source

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path}>"


class BytesStore(SplitStore[bytes]):
    """A SplitStore whose values are its files' bytes."""

    def decode(self, raw: bytes, name: str) -> bytes:
        """The bytes themselves."""
        return raw


class DirectoryStore(BytesStore):
    """The files of a directory, whole.

    Args:
        root: The directory; names are below it and can't leave it. None: names are paths of their own.

    Raises:
        ConfigError: A name that no file can have, or that would leave the directory.
        NotFound, AccessDenied, FetchError: From reading; the message has the path.
    """

    def __init__(self, root: str | Path | None = None) -> None:
        self._root = None if root is None else Path(root)

    @property
    def path(self) -> str:
        """The directory; "" without one."""
        return "" if self._root is None else str(self._root)

    def read_raw(self, name: str) -> tuple[bytes, SourceInfo]:
        """The file's content."""
        file = self._file(name)
        with _errors_of_ours(file):
            return file.read_bytes(), SourceInfo(self.path, name, None, (name,))

    def size(self, name: str) -> int | None:
        """The file's length; None if it isn't a regular file."""
        file = self._file(name)
        with _errors_of_ours(file):
            status = file.stat()
            return status.st_size if stat.S_ISREG(status.st_mode) else None

    def _file(self, name: str) -> Path:
        if self._root is None:
            return Path(name)
        check_name(name, self.path)
        return self._root / name


class _ForwardingStore(SplitStore[T]):
    """Another store's files, under the same names. Its raw bytes are the other's, so handles of both share one read."""

    def __init__(self, inner: FileStore[Any]) -> None:
        self.inner = inner

    @property
    def path(self) -> str:
        """The inner store's path."""
        return self.inner.path

    def read_raw(self, name: str) -> tuple[bytes, SourceInfo]:
        return _split(self.inner).read_raw(self._full(name))

    def decode(self, raw: bytes, name: str) -> T:
        value: T = _split(self.inner).decode(raw, self._full(name))
        return value

    def size(self, name: str) -> int | None:
        return _size_of(self.inner, self._full(name))

    def resolve(self, name: str) -> str:
        return _resolved(self.inner, self._full(name))

    def __getitem__(self, name: str) -> tuple[T, SourceInfo]:
        found: tuple[T, SourceInfo] = self.inner[self._full(name)]
        return found

    def _full(self, name: str) -> str:
        return name


class DecodingStore(_ForwardingStore[T]):
    """Another store's files, decoded. Its raw bytes are the other's, so handles of both share one read.

    Args:
        inner: The other store.
        decode: Called with a file's value in ``inner``, mostly bytes, and its name, in the thread that picks it up.
    """

    def __init__(self, inner: FileStore[Any], decode: Callable[[Any, str], T]) -> None:
        super().__init__(inner)
        self._decode = decode

    def decode(self, raw: bytes, name: str) -> T:
        """The value, decoded by the inner store, then by this one."""
        return self._decode(super().decode(raw, name), name)

    def __getitem__(self, name: str) -> tuple[T, SourceInfo]:
        value, source = self.inner[name]
        return self._decode(value, name), source


class KeyedStore(_ForwardingStore[T]):
    """Another store for one sample: names that begin with "." get the sample's key in front.

    Args:
        inner: The files of all samples.
        key: The sample's, e.g. "000123"; then ".jpg" is "000123.jpg".
    """

    def __init__(self, inner: FileStore[T], key: str) -> None:
        super().__init__(inner)
        self.key = key

    def _full(self, name: str) -> str:
        return self.key + name if name.startswith(".") else name


class _PickledStore(_ForwardingStore[Any]):
    """Any store as a RawFileStore: its pickled values are its raw bytes."""

    def read_raw(self, name: str) -> tuple[bytes, SourceInfo]:
        value, source = self.inner[name]
        return _dumps(value, name), source

    def decode(self, raw: bytes, name: str) -> Any:  # noqa: ANN401
        return pickle.loads(raw)

    def size(self, name: str) -> int | None:
        return None if _splits(self.inner) else super().size(name)  # a RawFileStore's raw bytes have another length


class ValueStore(SplitStore[Any]):
    """A value given to ``to_cache``. Its pickle is on disk, or here if the disk had no room."""

    path = ""

    def __init__(self, value: object, name: str) -> None:
        self.data: bytes | None = _dumps(value, name)
        """None once it is on disk."""
        self.identity: Hashable = id(self)

    def read_raw(self, name: str) -> tuple[bytes, Any]:
        """The pickle, if it is here; CacheError if it was on disk and is gone."""
        if self.data is None:
            raise CacheError(
                f"the value {name!r} given to to_cache is gone: its pool was closed, its file was deleted, or it was "
                "staged by the process that this one was forked from. Get it before that."
            )
        return self.data, None

    def decode(self, raw: bytes, name: str) -> Any:  # noqa: ANN401
        """A copy of the value."""
        return pickle.loads(raw)

    def size(self, name: str) -> int | None:
        """Length of the pickle, if it is here."""
        return None if self.data is None else len(self.data)


def _splits(store: FileStore[Any]) -> TypeGuard[RawFileStore[Any]]:
    """Return whether it is a RawFileStore, in 0.1 us; ``isinstance`` takes 12."""
    return hasattr(store, "read_raw") and hasattr(store, "decode")


def _split(store: FileStore[Any]) -> RawFileStore[Any]:
    """The store as a RawFileStore; if it isn't one, pickles of its values take the place of raw bytes."""
    return store if _splits(store) else _PickledStore(store)


def _size_of(store: FileStore[Any], name: str) -> int | None:
    size: Callable[[str], int | None] | None = getattr(store, "size", None)
    said = None if size is None else size(name)
    if said is None:
        return None
    with suppress(TypeError):
        if (size_bytes := index(said)) >= 0:
            return size_bytes
    raise CacheError(f"the store {store.path} says that {name!r} has {said!r} bytes: a length, or None, is meant")


def _resolved(store: FileStore[Any], name: str) -> str:
    resolve: Callable[[str], str] | None = getattr(store, "resolve", None)
    return name if resolve is None else resolve(name)


def check_name(name: str, root: str) -> None:
    """Raise ConfigError for a name that would leave the root; names come from datasets, so from anyone."""
    path = PurePosixPath(name)
    if not name or "\0" in name or path.is_absolute() or ".." in path.parts:
        raise ConfigError(f"{name!r} doesn't name a file below {root!r}: it must be a relative path without '..'")


@contextmanager
def _errors_of_ours(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise read_failure(error).error(url=str(file), start=None, stop=None, attempts=0) from error
    except ValueError as error:
        message = f"{str(file)!r} is no path: it holds a zero byte, or what no file's name can hold"
        raise ConfigError(message) from error
