"""Whether datasets can be one. Pure: it looks at what was read of all of them, and lists everything that disagrees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncfetch.errors import MergeError, redact_url
from asyncfetch.fetch.objects import difference
from asyncfetch.merge.arrow_types import common_type
from asyncfetch.merge.tables import column_type

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from asyncfetch.lerobot.info import Feature
    from asyncfetch.merge.sources import Source
    from asyncfetch.ranges import ObjectInfo

__all__ = ["disagreements", "refuse"]

_DEPTH_KEYS = ("depth_unit", "video.depth_min", "video.depth_max", "video.shift", "video.use_log")
"""What of a depth feature's ``info`` changes the meaning of its pixels. The rest describes the encoder, or one file."""


def disagreements(sources: Sequence[Source]) -> list[str]:
    """What sources, at least one, disagree in that one dataset has only one of, each against the first that has it.

    Encoder settings, per-feature ``fps`` and the probed numbers of ``info`` may differ: the files themselves are
    compared.
    """
    first = sources[0]
    problems = [problem for other in sources[1:] for problem in _differences(first, other)]
    problems += _different_columns(sources)
    problems += [problem for camera in first.metadata.cameras for problem in _different_pictures(sources, camera)]
    problems += _different_statistics(sources)
    problems += _different_versions(sources)
    return problems


def refuse(problems: Sequence[str], cause: BaseException | None = None) -> None:
    """Raise a MergeError that lists the problems, if there are any."""
    if problems:
        count = f"{len(problems)} reason{'s' if len(problems) > 1 else ''}"
        raise MergeError(f"can't merge, for {count}:\n" + "\n".join(f"- {problem}" for problem in problems)) from cause


def _differences(first: Source, other: Source) -> Iterator[str]:
    def compare(what: str, one: object, another: object) -> Iterator[str]:
        if one != another:
            yield (
                f"{what} is {one!r:.200} in {redact_url(first.url)}, but {another!r:.200} in {redact_url(other.url)}"
            )

    one, another = first.metadata, other.metadata
    yield from compare("fps", one.info.fps, another.info.fps)
    yield from compare("robot_type", one.info.robot_type, another.info.robot_type)
    yield from compare("the set of features", sorted(one.features), sorted(another.features))
    for key, feature in one.features.items():
        if key in another.features:
            for name, value in _meaning(feature).items():
                yield from compare(f"{name} of feature {key}", value, _meaning(another.features[key])[name])


def _meaning(feature: Feature) -> dict[str, Any]:
    settings = {key: feature.info.get(key) if feature.is_depth else None for key in _DEPTH_KEYS}
    own = {"dtype": feature.dtype, "shape": feature.shape, "names": feature.names, "is_depth_map": feature.is_depth}
    return own | settings


def _different_columns(sources: Sequence[Source]) -> Iterator[str]:
    """Of every file of rows: what it lacks, and what it stores otherwise, but for what may be null."""
    types: dict[str, tuple[Any, str]] = {}
    for source in sources:
        columns = [feature for feature in source.metadata.features.values() if feature.has_column]
        for url, file in source.data_files.items():
            schema, where = file.schema, redact_url(url)
            if missing := [feature.key for feature in columns if feature.key not in schema.names]:
                yield f"{where} has no column {', '.join(missing)}"
            for feature in columns:
                if feature.key in schema.names:
                    stored = column_type(feature, schema.field(feature.key).type)
                    first, first_where = types.get(feature.key, (stored, where))
                    common = common_type(first, stored)
                    if common is None:
                        yield (
                            f"the stored type of feature {feature.key} is {first} in {first_where}, but {stored} in "
                            f"{where}"
                        )
                    types[feature.key] = (first if common is None else common, first_where)


def _different_pictures(sources: Sequence[Source], camera: str) -> Iterator[str]:
    files = [file for source in sources for file in source.pictures.get(camera, {}).items()]
    for url, pictures in files[1:]:
        first_url, first = files[0]
        for name, one, another in zip(first._fields, first, pictures, strict=True):
            if one != another:
                yield f"{name} of {camera} is {one!r} in {redact_url(first_url)}, but {another!r} in {redact_url(url)}"


def _different_statistics(sources: Sequence[Source]) -> Iterator[str]:
    """Of pictures: they become a column. Those of numbers are taken anew."""
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    for source in sources:
        for key, columns in source.picture_statistics.items():
            for name, column in columns.items():
                shape, where = column.values.shape[1:], redact_url(source.url)
                first_shape, first_where = shapes.setdefault(f"stats/{key}/{name}", (shape, where))
                if shape != first_shape:
                    yield (f"the shape of stats/{key}/{name} is {first_shape} in {first_where}, but {shape} in {where}")


def _different_versions(sources: Sequence[Source]) -> Iterator[str]:
    """Of a file that several have, read at different times."""
    objects: dict[str, ObjectInfo] = {}
    for source in sources:
        for url, info in source.objects.items():
            if (changed := difference(objects.setdefault(url, info), info)) is not None:
                yield f"{redact_url(url)} was changed while the sources were read, {changed}: merge again"
