"""How a pool reads one file of one store, and what it stages of it."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from asyncfetch.cache.staging.stores import DecodingStore, KeyedStore, resolved, size_of, split, splits
from asyncfetch.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Hashable

    from asyncfetch.cache.staging.sources import SourceInfo
    from asyncfetch.cache.staging.stores import FileStore

__all__ = ["Binding", "Method", "StoreBinding", "Stored", "ValueBinding", "dumps"]

Method = Literal["raw", "pickle"]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Stored:
    """What a read brought, in the form that is staged."""

    data: bytes
    source: SourceInfo | None
    pickled: bool
    """Whether ``data`` is a pickle of the value rather than the value's raw bytes."""


class Binding(Protocol):
    """One file, as one handle sees it. Handles with equal keys share what is read."""

    @property
    def key(self) -> Hashable:
        """What is shared: file and stored form."""
        ...

    def size(self) -> int | None:
        """Length of what ``read`` will bring, where it is known without reading. May do I/O."""
        ...

    def read(self) -> Stored:
        """Read the file."""
        ...

    def value(self, stored: Stored) -> Any:  # noqa: ANN401
        """The handle's own value of what any handle of this key read."""
        ...


class StoreBinding:
    """A file of a store. Raw bytes are shared by stores of one identity; decoded values by handles of one store."""

    __slots__ = ("_method", "key", "name", "store")

    def __init__(self, store: FileStore[Any], name: str, method: Method) -> None:
        self.store = store
        self.name = name
        self._method: Method = method
        full_name = resolved(store, name)
        self.key: Hashable = (_origin(store) if method == "raw" else id(store), full_name)

    def size(self) -> int | None:
        """The store's word for it; a pickle's size isn't known."""
        return size_of(self.store, self.name) if self._method == "raw" else None

    def read(self) -> Stored:
        """Read raw bytes, or the value and pickle it."""
        if self._method == "pickle":
            value, source = self.store[self.name]
            return Stored(dumps(value, self.name), source, pickled=True)
        raw: Any  # of a store that doesn't split, its values
        raw, source = split(self.store).read_raw(self.name)
        if isinstance(raw, bytes | bytearray | memoryview):
            return Stored(bytes(raw), source, pickled=False)
        return Stored(dumps(raw, self.name), source, pickled=True)

    def value(self, stored: Stored) -> Any:  # noqa: ANN401
        """Decoded by this binding's own store."""
        data = pickle.loads(stored.data) if stored.pickled else stored.data
        return data if self._method == "pickle" else split(self.store).decode(data, self.name)


class ValueBinding:
    """A value given to ``to_cache``. It is there once: on disk, or here where the disk had no room."""

    __slots__ = ("data", "name")

    def __init__(self, data: bytes, name: str) -> None:
        self.data: bytes | None = data
        self.name = name

    @property
    def key(self) -> Hashable:
        """Its own: nothing is shared."""
        return id(self)

    def size(self) -> int | None:
        """Length of the pickle, where it is here."""
        return None if self.data is None else len(self.data)

    def read(self) -> Stored:
        """The pickle, where it is here; CacheError where it was on disk alone and isn't any more."""
        if self.data is None:
            raise CacheError(
                f"the value {self.name!r} given to to_cache is gone: its pool was closed, its file was deleted, or it "
                "was staged by the process that this one was forked from. Get it before that."
            )
        return Stored(self.data, None, pickled=True)

    def value(self, stored: Stored) -> Any:  # noqa: ANN401
        """A copy of what was given."""
        return pickle.loads(stored.data)


def dumps(value: object, name: str) -> bytes:
    """The value's pickle; CacheError, which names it, where it has none."""
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise CacheError(f"the value of {name!r}, a {type(value).__qualname__}, can't be pickled: {error}") from error


def _origin(store: FileStore[Any]) -> Hashable:
    """What tells the raw bytes of a store from another's; its bindings keep it alive, so its id is its own."""
    while isinstance(store, DecodingStore | KeyedStore):
        store = store.inner
    return getattr(store, "identity", store.path) if splits(store) else (store.path, id(store))
