"""The samples of a mixture's members, changed so that they go together, and say whose they are."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from asyncfetch.errors import ConfigError
from asyncfetch.lerobot import Field
from asyncfetch.observe.waits import Cause
from asyncfetch.runtime.concurrently import kept
from asyncfetch.stream.batch import BatchRow, Layout
from asyncfetch.stream.job_builder import PADDING, FailedSample, TransformTime, divided, mark_padding, transformed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from asyncfetch.lerobot import HeldEpisode, Sample
    from asyncfetch.order.line import Piece
    from asyncfetch.order.plan import Step
    from asyncfetch.stream.job_builder import JobBuilder, Transform

__all__ = ["DATASET", "Missing", "MixedBuilder", "Shape", "shapes"]

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
        """The same by the member's own keys."""
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
    layouts: Sequence[Mapping[str, Field]], renames: Sequence[Mapping[str, str]], missing: Missing
) -> tuple[list[Shape], bool]:
    """Return what is done to each member's samples, and whether they are then alike in keys, dtypes and shapes. Pure.

    Raises:
        ConfigError: Two keys of a member get one name, a key isn't there, or ``missing`` can't be done.
    """
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
        if len({layout[key] for layout in renamed if key in layout}) > 1:
            raise ConfigError(
                f'missing="pad" can\'t tell the shape of {key!r}, in which members differ: rename it, leave it out by '
                'features=..., or choose missing="drop"'
            )
    found = []
    for layout, rename in zip(renamed, complete, strict=True):
        lacks = {key: somewhere[key] for key in filled if key not in layout}
        found.append(
            Shape(
                rename,
                frozenset(uncommon & layout.keys()) if missing == "drop" else frozenset(),
                lacks,
                {f"{key}_is_missing": key in lacks for key in filled},
            )
        )
    final = [
        {key: like for key, like in layout.items() if key not in shape.drop} | dict(shape.fill)
        for layout, shape in zip(renamed, found, strict=True)
    ]
    return found, all(layout == final[0] for layout in final)


def _with_masks(layout: Mapping[str, Field], rename: Mapping[str, str], member: int) -> dict[str, str]:
    """The new names, those of the masks of windows with them."""
    unknown = rename.keys() - layout.keys()
    if unknown:
        raise ConfigError(f"keys of member {member}: it has no {sorted(unknown)}; there are {sorted(layout)}")
    masks = {f"{key}_is_pad": f"{new}_is_pad" for key, new in rename.items() if f"{key}_is_pad" in layout}
    return {**masks, **rename}


class MixedBuilder:
    """Makes the samples of a mixture, in decode threads.

    Args:
        builders, shapes: Of each member.
        transform: The mixture's own.
        marks_padding: Whether samples say if they are padding.
    """

    def __init__(
        self,
        builders: Sequence[JobBuilder],
        shapes: Sequence[Shape],
        transform: Transform | None,
        *,
        marks_padding: bool,
    ) -> None:
        self._builders = builders
        self._shapes = shapes
        self._transform = transform
        self._marks_padding = marks_padding
        self._weights: Mapping[Cause, float] = {}
        self._transform_time = TransformTime(transform)
        self._given = [builder.layout() for builder in builders]
        self._pictures = {
            shape.rename.get(key, key)
            for shape, given in zip(shapes, self._given, strict=True)
            if given is not None
            for key in given.pictures
        }
        layouts = [self._laid_out(member) for member in range(len(builders))]
        # Only pictures lie channels-last, and what is one here may be a column of numbers there.
        told = [each for each in layouts if each is not None]
        are_one_way = len({each.pictures for each in told if each.fields == told[0].fields}) <= 1
        self._layouts = layouts if are_one_way else [None] * len(builders)

    @property
    def sample_bytes(self) -> int:
        """See Builder."""
        each = zip(self._builders, self._shapes, strict=True)
        return max(builder.sample_bytes + sum(like.nbytes for like in shape.fill.values()) for builder, shape in each)

    @property
    def weights(self) -> Mapping[Cause, float]:
        """See Builder."""
        each = [self._weights, *(builder.weights for builder in self._builders)]
        return {cause: sum(weights.get(cause, 0.0) for weights in each) for cause in (Cause.DECODING, Cause.TRANSFORM)}

    @property
    def transform_seconds(self) -> tuple[float, float]:
        """See Builder."""
        each = [builder.transform_seconds for builder in self._builders]
        own = self._transform_time
        return own.worked_seconds + sum(worked for worked, _ in each), own.ran_seconds + sum(ran for _, ran in each)

    def layout(self, step: Step) -> Layout | None:
        """See Builder."""
        return self._layouts[step.piece.member]

    def _laid_out(self, member: int) -> Layout | None:
        given, shape = self._given[member], self._shapes[member]
        if given is None or self._transform is not None:
            return None
        fields = shape.fields(given.fields)
        if self._marks_padding:
            if PADDING in fields:
                return None
            fields[PADDING] = Field("bool")
        pictures = {shape.rename.get(key, key) for key in given.pictures}
        pictures |= {key for key in shape.fill if key in self._pictures}
        return Layout(fields, frozenset(pictures & fields.keys()))

    def build(
        self,
        steps: Sequence[Step],
        episodes: Mapping[Piece, HeldEpisode | Exception],
        is_given_up: Callable[[], bool],
        rows: Sequence[BatchRow] | None = None,
    ) -> list[Any]:
        """See JobBuilder."""
        places: dict[int, list[int]] = {}
        for place, step in enumerate(steps):
            places.setdefault(step.piece.member, []).append(place)
        results: list[Any] = [{} for _ in steps]
        for member, those in places.items():
            given = self._given[member]
            into = None
            if rows is not None and given is not None:
                into = [self._shapes[member].row(rows[place], given.fields) for place in those]
            built = self._builders[member].build([steps[place] for place in those], episodes, is_given_up, into)
            built_at = time.perf_counter()
            with self._transform_time.counted():
                for place, result in zip(those, built, strict=True):
                    if is_given_up():
                        return results
                    if rows is not None and isinstance(result, BatchRow):
                        result = rows[place]
                    results[place] = self._finish(member, steps[place], result)
            if self._transform is not None:
                self._weights = divided(self._weights, 0.0, time.perf_counter() - built_at)
        return results

    def _finish(self, member: int, step: Step, result: Any) -> Any:  # noqa: ANN401
        if isinstance(result, FailedSample):
            return result
        if isinstance(result, BatchRow):
            self._shapes[member].complete(member, result)
            if self._marks_padding:
                result.put(PADDING, step.is_padding)
            return result
        try:
            sample = self._shapes[member].apply(member, result)
            if self._marks_padding:
                mark_padding(sample, step)
        except ConfigError as error:
            return FailedSample(kept(error))
        return sample if self._transform is None else transformed(self._transform, sample)
