"""What info.json says of a depth camera's codes. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from asyncfetch.decode import DepthScale
from asyncfetch.errors import LEAVE_OUT_FEATURE, FormatError

if TYPE_CHECKING:
    from asyncfetch.lerobot.info import Feature

__all__ = ["DepthUnit", "depth_scale"]

DepthUnit = Literal["m", "mm"]
"""Unit of delivered depth; LeRobot's reader gives millimetres unless told otherwise."""


def depth_scale(feature: Feature, unit: DepthUnit) -> DepthScale | None:
    """How the codes of a depth video become distances, with LeRobot's defaults; None for other features.

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
