"""Where a sample's parts came from, recorded on the sample that consumed them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SourceInfo", "add_source_info", "get_source_info"]

_FIELD = "__sources__"


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """Where one file was read."""

    dataset_path: str
    """The store's path, without secrets."""
    index: int | str | None = None
    """What the file was asked by."""
    shard_name: str | None = None
    """The archive that holds it, where there is one."""
    file_names: tuple[str, ...] = ()


def add_source_info(sample: object, *infos: SourceInfo) -> None:
    """Append to the sample's ``__sources__``: an entry of a dict, or an attribute where the sample has one.

    It is a tuple, made where it is missing in a dict or None. Samples of any other type are left alone.
    """
    if isinstance(sample, dict):
        sample[_FIELD] = (*(sample.get(_FIELD) or ()), *infos)
    elif hasattr(sample, _FIELD):
        setattr(sample, _FIELD, (*(getattr(sample, _FIELD) or ()), *infos))


def get_source_info(sample: object) -> tuple[SourceInfo, ...]:
    """What was recorded on a sample, in order; of a list or tuple of samples, all of it one after another."""
    if isinstance(sample, list | tuple):
        return tuple(info for one in sample for info in get_source_info(one))
    found = sample.get(_FIELD) if isinstance(sample, dict) else getattr(sample, _FIELD, None)
    return tuple(found or ())
