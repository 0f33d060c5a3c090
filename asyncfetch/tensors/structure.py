"""Walking what people put tensors into: dicts, lists, tuples and dataclasses, nested."""

from __future__ import annotations

import copy
import dataclasses
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from asyncfetch.errors import TensorError
from asyncfetch.tensors.remote import RemoteTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

__all__ = ["remotes_in", "replace_leaves", "unpadded"]

MASK = "attention_mask"


def replace_leaves(obj: Any, replace: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - any structure
    """``obj`` with every leaf replaced by what ``replace`` returns for it.

    Leaves are all that is no dict, list, tuple or dataclass instance; a RemoteTensor is one. Containers of which a leaf
    was replaced are made anew, of the same type; the others, and leaves that ``replace`` returns, are the same objects.

    Raises:
        TensorError: The structure holds itself, is nested too deeply for Python's stack, or has a container of a type
            that can't be made anew with other items.
    """
    with _bounded():
        return _replaced(obj, replace)


def remotes_in(obj: Any) -> list[RemoteTensor]:  # noqa: ANN401 - any structure
    """Every remote tensor in ``obj``, in the order in which it is walked, as often as it is there."""
    found: list[RemoteTensor] = []
    with _bounded():
        _collect(obj, found)
    return found


def unpadded(obj: Any) -> Any:  # noqa: ANN401 - any structure
    """``obj`` without the columns at the end of batches that no row attends to.

    In each dict with a tensor or array "attention_mask" (rows, columns, ...) those of as many rows and columns are cut
    behind the last column where the mask isn't zero, as views. Columns in front stay, so positions keep their numbers.
    """
    with _bounded():
        return _unpadded(obj)


@contextmanager
def _bounded() -> Iterator[None]:
    try:
        yield
    except RecursionError as error:
        raise TensorError("the structure holds itself, or is nested too deeply: flatten it") from error


def _parts(obj: Any) -> list[Any] | None:  # noqa: ANN401
    """What a container holds; None where it is none."""
    if isinstance(obj, RemoteTensor):
        return None
    if isinstance(obj, dict):
        return list(obj.values())
    if isinstance(obj, list | tuple):
        return list(obj)
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return [getattr(obj, name) for name in _names(obj)]
    return None


def _names(obj: Any) -> list[str]:  # noqa: ANN401
    return [field.name for field in dataclasses.fields(obj) if hasattr(obj, field.name)]


def _with_parts(obj: Any, parts: list[Any]) -> Any:  # noqa: ANN401
    """A container like ``obj`` that holds these."""
    try:
        return _made_anew(obj, parts)
    except RecursionError:
        raise
    except Exception as error:  # a type with a constructor or setters of its own raises what it likes
        what = f"a {type(obj).__name__} can't be made anew with other items"
        raise TensorError(f"{what}: put them into a plain dict, list, tuple or dataclass ({error})") from error


def _made_anew(obj: Any, parts: list[Any]) -> Any:  # noqa: ANN401
    if isinstance(obj, tuple):
        return obj._make(parts) if hasattr(obj, "_make") else type(obj)(parts)
    if type(obj) is list:
        return parts
    new = copy.copy(obj)  # for whatever a subclass keeps beside its items
    if isinstance(new, dict):
        for key, part in zip(obj, parts, strict=True):
            new[key] = part
    elif isinstance(new, list):
        new[:] = parts
    else:
        for name, part in zip(_names(obj), parts, strict=True):
            object.__setattr__(new, name, part)  # frozen ones, too
    return new


def _replaced(obj: Any, replace: Callable[[Any], Any]) -> Any:  # noqa: ANN401
    parts = _parts(obj)
    if parts is None:
        return replace(obj)
    new = [_replaced(part, replace) for part in parts]
    if all(one is other for one, other in zip(parts, new, strict=True)):
        return obj
    return _with_parts(obj, new)


def _collect(obj: Any, found: list[RemoteTensor]) -> None:  # noqa: ANN401
    if isinstance(obj, RemoteTensor):
        found.append(obj)
    for part in _parts(obj) or ():
        _collect(part, found)


def _unpadded(obj: Any) -> Any:  # noqa: ANN401
    parts = _parts(obj)
    if parts is None:
        return obj
    mask: Any = obj.get(MASK) if isinstance(obj, dict) else None
    if _is_batch(mask):
        columns = _columns_used(mask)
        parts = [_cut(part, mask, columns) for part in parts]
    new = [_unpadded(part) for part in parts]
    if all(one is other for one, other in zip(_parts(obj) or (), new, strict=True)):
        return obj
    return _with_parts(obj, new)


def _is_batch(value: Any) -> bool:  # noqa: ANN401
    return hasattr(value, "nonzero") and getattr(value, "ndim", 0) >= 2


def _columns_used(mask: torch.Tensor) -> int:
    """One more than the last column where some row's mask isn't zero; in words that NumPy's arrays know, too."""
    used: Any = mask != 0
    while used.ndim > 2:
        used = used.any(-1)
    return max((column + 1 for column, is_used in enumerate(used.any(0).tolist()) if is_used), default=0)


def _cut(part: Any, mask: torch.Tensor, columns: int) -> Any:  # noqa: ANN401
    if _is_batch(part) and part.shape[:2] == mask.shape[:2] and columns < part.shape[1]:
        return part[:, :columns]
    return part
