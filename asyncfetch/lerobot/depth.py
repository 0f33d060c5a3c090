"""Depth as info.json tells it: of a camera's codes, and of the unit of depth maps and statistics. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from asyncfetch.decode import DepthScale
from asyncfetch.errors import LEAVE_OUT_FEATURE, FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncfetch.lerobot.info import Feature

__all__ = ["MILLIMETRES", "DepthUnit", "depth_scale", "depth_stats", "stored_unit"]

DepthUnit = Literal["m", "mm"]
"""Unit of delivered depth; LeRobot's reader gives millimetres unless told otherwise."""
MILLIMETRES = 1000.0
"""A metre."""


def depth_scale(feature: Feature, unit: DepthUnit) -> DepthScale | None:
    """Return how the codes of a depth video become distances, with LeRobot's defaults; None for other features.

    Raises:
        FormatError: info.json has numbers that make no scale.
    """
    if feature.kind != "depth":
        return None
    defaults = DepthScale()
    given = {key: value for key, value in feature.info.items() if value is not None}
    try:
        return DepthScale(
            minimum=float(given.get("video.depth_min", defaults.minimum)),
            maximum=float(given.get("video.depth_max", defaults.maximum)),
            shift=float(given.get("video.shift", defaults.shift)),
            use_log=bool(given.get("video.use_log", defaults.use_log)),
            unit=unit,
        )
    except (TypeError, ValueError) as error:  # ConfigError is a ValueError
        raise FormatError(
            f"info.json describes depth camera {feature.key} by numbers that make no scale: {error}",
            remedy=LEAVE_OUT_FEATURE,
        ) from error


def stored_unit(feature: Feature) -> DepthUnit | None:
    """The unit in which depth was recorded, that of depth maps in the table and of all statistics; None where unknown.

    Raises:
        FormatError: It isn't one of a dataset's.
    """
    unit: Any = feature.info.get("depth_unit")
    if unit not in {"m", "mm", None}:
        message = f"info.json says that {feature.key} is in depth_unit {unit!r:.80}; it must be 'm' or 'mm'"
        raise FormatError(message, remedy=LEAVE_OUT_FEATURE)
    return unit  # type: ignore[no-any-return]


def depth_stats(stats: Mapping[str, Any], features: Mapping[str, Feature], unit: DepthUnit) -> dict[str, Any]:
    """The statistics, those of depth in the unit that samples have it in. An unknown unit is left as it is."""
    converted = dict(stats)
    for key, feature in features.items():
        own = converted.get(key)
        if feature.is_depth and isinstance(own, dict) and stored_unit(feature) not in {unit, None}:
            factor = MILLIMETRES if unit == "mm" else 1 / MILLIMETRES
            converted[key] = {name: value if name == "count" else _scaled(value, factor) for name, value in own.items()}
    return converted


def _scaled(value: Any, factor: float) -> Any:  # noqa: ANN401
    return [_scaled(one, factor) for one in value] if isinstance(value, list) else value * factor
