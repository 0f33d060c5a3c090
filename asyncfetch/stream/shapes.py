"""The samples of a mixture's members, changed so that they go together, and marked with their member."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from asyncfetch.config.checks import check_keys
from asyncfetch.errors import ConfigError
from asyncfetch.formats import Field
from asyncfetch.stream.batch import BatchRow

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncfetch.formats import Sample

DATASET = "dataset"
"""Key of a sample's member number."""

Missing = Literal["keep", "drop", "pad", "raise"]
"""The choice of what becomes of keys that only some members have."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Changes to the samples of a member, so that they go with those of others."""

    rename: Mapping[str, str]
    """Key here by key there, where they differ."""
    drop: frozenset[str] = frozenset()
    """Keys here that other members lack."""
    fill: Mapping[str, Field] = field(default_factory=dict)
    """Fields that others have and this one lacks."""
    flags: Mapping[str, bool] = field(default_factory=dict)
    """``<key>_is_missing`` of keys that some lack."""

    def apply(self, member: int, sample: Sample) -> Sample:
        """The sample as the mixture gives it."""
        import torch

        if not isinstance(sample, dict):
            raise ConfigError(
                f"the transform of member {member} gave {type(sample).__name__}, and in a mixture a sample is a dict: "
                "return one, or give the transform to the mixture"
            )
        shaped = {self.rename.get(key, key): value for key, value in sample.items()}
        for key in self.drop:
            shaped.pop(key, None)
        for key, like in self.fill.items():
            shaped.setdefault(key, _nothing(like))
        shaped |= {key: torch.tensor(flag) for key, flag in self.flags.items()}
        shaped[DATASET] = torch.tensor(member)
        return shaped

    def fields(self, given: Mapping[str, Field]) -> dict[str, Field]:
        """Return the fields of what ``apply`` gives, by those of the member's own samples."""
        fields = {self.rename.get(key, key): like for key, like in given.items()}
        fields = {key: like for key, like in fields.items() if key not in self.drop}
        flags = dict.fromkeys(self.flags, Field("bool"))
        return fields | {**self.fill, **fields} | flags | {DATASET: Field("int64")}

    def row(self, row: BatchRow, given: Mapping[str, Field]) -> BatchRow:
        """Return the row by the member's own keys."""
        dropped = {key: like for key, like in given.items() if self.rename.get(key, key) in self.drop}
        return BatchRow(row.batch, row.number, self.rename, dropped)

    def complete(self, member: int, row: BatchRow) -> None:
        """Add what ``apply`` adds, for a sample that was written to the row."""
        for key, like in self.fill.items():
            row.put(key, 0 if like.is_tensor else _nothing(like))
        for key, flag in self.flags.items():
            row.put(key, flag)
        row.put(DATASET, member)


def _nothing(like: Field) -> Any:  # noqa: ANN401
    import torch

    if like.is_tensor:
        return torch.zeros(like.shape, dtype=getattr(torch, like.dtype))
    nothing = "" if like.dtype == "string" else None
    return [nothing] * like.shape[0] if like.shape else nothing


def shapes(
    given: Sequence[Mapping[str, Field] | None], renames: Sequence[Mapping[str, str]], missing: Missing
) -> tuple[list[Shape], bool]:
    """Return the changes to each member's samples, and whether they are then alike in keys, dtypes and shapes. Pure.

    Args:
        given: The layout of each member's samples; None where only samples show it.
        renames: New names of each member's keys.
        missing: What becomes of keys that only some have.

    Raises:
        ConfigError: Two keys of a member get one name, a key isn't there, or ``missing`` can't be done.
    """
    if None in given and (missing != "keep" or any(renames)):
        raise ConfigError(
            f"keys= and missing={missing!r} need to know the keys of all members, and only its samples show those of "
            f"member {given.index(None)}: write layout() in its format; or leave keys= out, take missing='keep', and "
            "rename in that stream's transform"
        )
    layouts = [layout or {} for layout in given]
    complete = [
        _with_masks(layout, rename, member)
        for member, (layout, rename) in enumerate(zip(layouts, renames, strict=True))
    ]
    renamed = [
        {rename.get(key, key): like for key, like in layout.items()}
        for layout, rename in zip(layouts, complete, strict=True)
    ]
    for member, (layout, new) in enumerate(zip(layouts, renamed, strict=True)):
        if len(new) < len(layout) or DATASET in new:
            raise ConfigError(
                f"keys of member {member}: every key needs a name of its own, which isn't {DATASET!r}, not {list(new)}"
            )
    somewhere = {key: like for layout in renamed for key, like in layout.items()}
    uncommon = {key for key in somewhere if any(key not in layout for layout in renamed)}
    if uncommon and missing == "raise":
        lacking = {
            key: [number for number, layout in enumerate(renamed) if key not in layout] for key in sorted(uncommon)
        }
        raise ConfigError(
            f'members lack keys, by key: {lacking}. Rename by keys=..., or choose missing="keep", "drop" or "pad"'
        )
    filled = sorted(uncommon) if missing == "pad" else []
    for key in filled:
        likes = {layout[key] for layout in renamed if key in layout}
        if len(likes) > 1 or any(like.varies for like in likes):
            raise ConfigError(
                f'missing="pad" can\'t tell the shape of {key!r}, in which members differ: rename it, leave it out by '
                'features=..., or choose missing="drop"'
            )
    found = []
    for layout, rename in zip(renamed, complete, strict=True):
        dropped = frozenset(uncommon & layout.keys()) if missing == "drop" else frozenset()
        lacks = {key: somewhere[key] for key in filled if key not in layout}
        found.append(Shape(rename, dropped, lacks, {f"{key}_is_missing": key in lacks for key in filled}))
    final = [
        {key: like for key, like in layout.items() if key not in shape.drop} | dict(shape.fill)
        for layout, shape in zip(renamed, found, strict=True)
    ]
    are_fixed = not any(like.varies for layout in final for like in layout.values())
    return found, None not in given and are_fixed and all(layout == final[0] for layout in final)


def _with_masks(layout: Mapping[str, Field], rename: Mapping[str, str], member: int) -> dict[str, str]:
    """The new names, those of the masks of windows with them."""
    check_keys(rename, sorted(layout), "keys", f"member {member}")
    masks = {f"{key}_is_pad": f"{new}_is_pad" for key, new in rename.items() if f"{key}_is_pad" in layout}
    return {**masks, **rename}
