"""What info.json says of a depth camera's codes. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from asyncfetch.decode import DepthScale

if TYPE_CHECKING:
    from asyncfetch.lerobot.info import Feature

__all__ = ["DepthUnit", "depth_scale"]

DepthUnit = Literal["m", "mm"]
"""Unit of delivered depth; LeRobot's reader gives millimetres unless told otherwise."""


def depth_scale(feature: Feature, unit: DepthUnit) -> DepthScale | None:
    """How the codes of a depth video become distances, with LeRobot's defaults; None for other features."""
    if feature.kind != "depth":
        return None
    info, defaults = feature.info, DepthScale()
    return DepthScale(
        minimum=float(info.get("video.depth_min", defaults.minimum)),
        maximum=float(info.get("video.depth_max", defaults.maximum)),
        shift=float(info.get("video.shift", defaults.shift)),
        use_log=bool(info.get("video.use_log", defaults.use_log)),
        unit=unit,
    )
