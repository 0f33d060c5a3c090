"""The way from an episode in memory to samples: dicts of tensors. Runs in decode threads, never on the loop.

Windows say which frames around the asked one a key is read at, with LeRobot's meaning.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from asyncfetch.config.checks import check_keys
from asyncfetch.decode import decode_image, stack_frames
from asyncfetch.decode.backends import import_torch
from asyncfetch.errors import LEAVE_OUT_FEATURE, ConfigError, FormatError, redact_url
from asyncfetch.formats.samples import Field, by_reader, write_picture
from asyncfetch.formats.stretch import reach_of
from asyncfetch.lerobot.info import MILLIMETRES, stored_unit
from asyncfetch.runtime.fork import forks_wait

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from asyncfetch.decode import PictureSize
    from asyncfetch.formats.samples import ImageDtype, Row, Sample
    from asyncfetch.lerobot.episode_cache import HeldEpisode
    from asyncfetch.lerobot.episode_table import Episode
    from asyncfetch.lerobot.info import DepthUnit, Feature
    from asyncfetch.lerobot.metadata import Metadata

TOLERANCE_SECONDS = 1e-4
"""Seconds that a window may lie off the grid of frames: LeRobot's default ``tolerance_s``."""

MAX_OFFSET = 2**31
"""Frames; no episode is longer, and sums of such numbers stay within 64 bits."""


@dataclass(frozen=True, slots=True)
class FrameOffsets:
    """A window as whole frames relative to the asked one; made by ``frames``."""

    offsets: tuple[int, ...]


Window = Sequence[float] | FrameOffsets
"""Seconds relative to the asked frame, or ``frames(...)``; in the order in which they are delivered."""
Windows = Mapping[str, Window]
"""Window by feature key. A key without one is read at the asked frame alone, without a time axis."""


def frames(*offsets: int) -> FrameOffsets:
    """A window of frame offsets: ``frames(-1, 0)`` is the frame before the asked one, then the asked one."""
    for offset in offsets:
        if isinstance(offset, bool) or not isinstance(offset, (int, np.integer)):
            raise ConfigError(f"frames() takes whole numbers of frames, not {offset!r}; seconds go in a plain list")
    return FrameOffsets(tuple(int(offset) for offset in offsets))


def check_windows(windows: Any) -> None:  # noqa: ANN401 - what a user gave
    """Check what can be said without a dataset: ConfigError where they are no mapping, or one of them is no list."""
    if windows is not None and not isinstance(windows, Mapping):
        raise ConfigError(f"windows must be a mapping of a window to each key, or None, not {windows!r}")
    for key, window in (windows or {}).items():
        if isinstance(window, str | bytes | Iterator):  # an iterator would be empty at its second use
            raise ConfigError(f"windows: {key!r} needs a list of seconds or frames(...), not {window!r}")


def resolve_windows(windows: Windows | None, *, fps: float, keys: Collection[str]) -> dict[str, NDArray[np.int64]]:
    """The frame offsets of each window; ``keys`` may have one.

    ConfigError for an unknown key, one with a mask that is another feature's name, an empty window, or seconds that
    aren't on the grid of frames within 0.1 ms.
    """
    check_windows(windows)
    check_keys(windows or (), sorted(keys), "windows", "the dataset")
    resolved = {}
    for key, window in (windows or {}).items():
        if f"{key}_is_pad" in keys:
            message = f"windows: what tells the padding of {key!r} would take the place of the feature '{key}_is_pad'"
            raise ConfigError(f"{message}: leave that out by features=")
        offsets = window.offsets if isinstance(window, FrameOffsets) else _from_seconds(key, window, fps)
        if not len(offsets):
            raise ConfigError(f"windows: the one of {key!r} is empty; leave the key out for the asked frame alone")
        if max(map(abs, offsets)) > MAX_OFFSET:
            raise ConfigError(f"windows: {max(offsets, key=abs)} frames of {key!r} are no offset in any episode")
        resolved[key] = np.asarray(offsets, dtype=np.int64)
    return resolved


def _from_seconds(key: str, seconds: Sequence[float], fps: float) -> list[int]:
    try:
        grid = [float(second) for second in seconds]
    except (TypeError, ValueError) as error:
        message = f"windows: {key!r} needs a list of seconds or frames(...), not {seconds!r}"
        raise ConfigError(message) from error
    offsets = []
    for second in grid:
        if not math.isfinite(second * fps):
            raise ConfigError(f"windows: {second} of {key!r} isn't a time")
        offset = round(second * fps)
        if abs(second * fps - offset) / fps > TOLERANCE_SECONDS:
            message = f"windows: {second} s of {key!r} is no multiple of a frame at {fps} fps (nearest: "
            message += f"{offset / fps:.6f} s); give multiples of 1/{fps:g}, or frames({offset})"
            raise ConfigError(message)
        offsets.append(offset)
    return offsets


def clamp(frame: int, offsets: NDArray[np.int64], length: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """(frames to read, which of them are padding) of a window in an episode of ``length`` frames.

    A place before the first frame repeats the first one, one after the last repeats the last, as LeRobot's
    random-access reader does.
    """
    wanted = frame + offsets
    inside = np.clip(wanted, 0, length - 1)
    return inside, inside != wanted


Asked: TypeAlias = "tuple[HeldEpisode, int, int]"
"""An episode, one of its frames, and the number of the reader that goes through them: see HeldStretch.frames."""

_PICTURES = {"image", "video", "depth"}


class SampleBuilder:
    """Makes the samples of one choice of features and windows; ConfigError where they don't fit. Thread-safe.

    A camera is (C, H, W); with a window (T, C, H, W), also where T is 1. A value of shape (1,) is a 0-d tensor, one of
    shape (n,) a tensor of the feature's dtype, each with T in front under a window; then ``<key>_is_pad`` (T,) bool
    tells which places lie outside of the episode and repeat its first or last frame.
    """

    def __init__(
        self,
        metadata: Metadata,
        windows: Windows | None,
        *,
        image_dtype: ImageDtype,
        depth_unit: DepthUnit,
        size: PictureSize | None = None,
    ) -> None:
        """``size`` is that of all pictures; those of cameras come in it from their decoders."""
        self._features = features = metadata.sample_features
        if "task" in features:
            url = redact_url(metadata.url)
            message = f"{url}/meta/info.json calls a feature 'task', where samples have the words of theirs"
            raise FormatError(message, remedy=LEAVE_OUT_FEATURE)
        self._metadata, self._tasks = metadata, metadata.tasks
        self._windows: Mapping[str, NDArray[np.int64]] = {}
        if windows is not None:
            self._windows = resolve_windows(windows, fps=metadata.info.fps, keys=features)
        self._image_dtype, self._depth_unit, self._size = image_dtype, depth_unit, size
        self.reach = reach_of(self._windows, (key for key, feature in features.items() if feature.kind in _PICTURES))
        """Reach of its windows: stretches with it hold all that its samples of them need."""

    @property
    def sample_bytes(self) -> int:
        """About what one sample takes, from the features' shapes."""
        return 1024 + sum(field.nbytes for field in self.layout().values())

    def layout(self) -> dict[str, Field]:
        """Every value of a sample, by key."""
        fields = {}
        for key, feature in self._features.items():
            field = self._field(feature)
            window = self._windows.get(key)
            if window is not None:
                field = field._replace(shape=(len(window), *field.shape))
                fields[f"{key}_is_pad"] = Field("bool", (len(window),))
            fields[key] = field
        fields["task"] = Field("string")
        return fields

    @property
    def pictures(self) -> frozenset[str]:
        """The keys of pictures."""
        return frozenset(key for key, feature in self._features.items() if feature.kind in _PICTURES)

    def _field(self, feature: Feature) -> Field:
        if feature.kind in _PICTURES:
            is_float = feature.is_depth or self._image_dtype == "float32"
            return Field("float32" if is_float else "uint8", self._picture_shape(feature))
        if feature.kind == "value":
            return Field(feature.row_dtype, () if feature.shape == (1,) else feature.shape)
        return Field(feature.dtype)

    def _picture_shape(self, feature: Feature) -> tuple[int, ...]:
        shape = feature.picture_shape
        return shape if self._size is None else (*shape[:-2], self._size.height, self._size.width)

    def build(self, asked: Sequence[Asked]) -> list[Sample]:
        """The samples that are asked for, in order; the frames of one reader are decoded in one call."""
        samples: list[Sample] = [{} for _ in asked]
        with forks_wait():  # the first one imports torch
            for held, reader, places in by_reader(asked):
                self._fill(held, reader, [asked[place][1] for place in places], [samples[place] for place in places])
        return samples

    def write(self, asked: Sequence[Asked], rows: Sequence[Row]) -> None:
        """The samples that are asked for, each into its row; a picture as soon as it is decoded.

        DoesNotFit where one can't be written there, and is to be built. Rows may have been written to.
        """
        with forks_wait():
            for held, reader, places in by_reader(asked):
                self._write(held, reader, [asked[place][1] for place in places], [rows[place] for place in places])

    def _write(self, held: HeldEpisode, reader: int, frames: Sequence[int], rows: Sequence[Row]) -> None:
        for key, feature in self._features.items():
            wanted, pads = self._wanted(key, held, frames)
            for row, is_pad in zip(rows, pads, strict=False):
                row.put(f"{key}_is_pad", is_pad)
            if feature.kind in _PICTURES:
                self._write_pictures(held, reader, feature, wanted, [row.at(key) for row in rows])
            else:
                for row, value in zip(rows, self._values(key, held, wanted), strict=True):
                    row.put(key, value)
        for frame, row in zip(frames, rows, strict=True):
            row.put("task", self._tasks[int(held.rows["task_index"][frame])])

    def _write_pictures(
        self, held: HeldEpisode, reader: int, feature: Feature, wanted: Sequence[Any], rooms: list[NDArray[Any]]
    ) -> None:
        """``wanted`` has a frame for each room, or with a window a span of them."""
        if feature.key in self._windows:
            frames = np.concatenate(wanted).tolist()
            rooms = [room for window in rooms for room in window]
        else:
            frames = list(wanted)

        def take(place: int, picture: torch.Tensor) -> None:
            write_picture(picture, rooms[place])

        if feature.is_camera:
            held.give(feature.key, frames, take, reader=reader)
        else:
            for place, picture in enumerate(self._pictures(held, reader, feature, frames)):
                take(place, picture)

    def _fill(self, held: HeldEpisode, reader: int, frames: Sequence[int], samples: Sequence[Sample]) -> None:
        as_tensor = import_torch().from_numpy
        for key, feature in self._features.items():
            wanted, pads = self._wanted(key, held, frames)
            for sample, is_pad in zip(samples, pads, strict=False):
                sample[f"{key}_is_pad"] = as_tensor(is_pad)
            if feature.kind in _PICTURES:
                values = self._as_image_dtype(self._stacked(held, reader, feature, wanted), feature)
            else:
                values = self._values(key, held, wanted)
                if not isinstance(held.rows[key], list):  # spans are copies, single rows the cache's
                    values = [as_tensor(value if pads else np.array(value)) for value in values]
            for sample, value in zip(samples, values, strict=True):
                sample[key] = value
        for frame, sample in zip(frames, samples, strict=True):
            sample["task"] = self._tasks[int(held.rows["task_index"][frame])]

    def _wanted(
        self, key: str, held: HeldEpisode, frames: Sequence[int]
    ) -> tuple[Sequence[Any], Sequence[NDArray[np.bool_]]]:
        """The frames to read; with a window a span of them for each, and which of these are padding."""
        offsets = self._windows.get(key)
        if offsets is None:
            return frames, ()
        spans = [clamp(frame, offsets, held.episode.length) for frame in frames]
        return [inside for inside, _ in spans], [is_pad for _, is_pad in spans]

    def _values(self, key: str, held: HeldEpisode, wanted: Sequence[Any]) -> list[Any]:
        """What the table has for each of those wanted: parts of arrays, or objects that may be changed."""
        column = held.rows[key]
        if not isinstance(column, list):
            return [column[those] for those in wanted]
        if key not in self._windows:
            return [_own(column[frame]) for frame in wanted]
        return [[_own(column[frame]) for frame in span.tolist()] for span in wanted]

    def _stacked(self, held: HeldEpisode, reader: int, feature: Feature, wanted: Sequence[Any]) -> list[torch.Tensor]:
        """The picture, or those of the window, for each of those wanted."""
        if feature.key not in self._windows:
            return _unshared(self._pictures(held, reader, feature, wanted))
        if feature.is_camera and len(wanted) == 1 and len(wanted[0]) > 1:  # nothing to share: no copy to make one of it
            return [held.frames(feature.key, wanted[0].tolist(), reader=reader)]
        pictures = self._pictures(held, reader, feature, np.concatenate(wanted).tolist())
        parts = iter(pictures if len(wanted[0]) > 1 else _unshared(pictures))
        return [stack_frames(list(itertools.islice(parts, len(span)))) for span in wanted]

    def _pictures(self, held: HeldEpisode, reader: int, feature: Feature, frames: Sequence[int]) -> list[torch.Tensor]:
        """A (C, H, W) for each of the frames; duplicates are one tensor."""
        if feature.is_camera:
            return held.each(feature.key, frames, reader=reader)
        decoded = _decode_images(held.episode, feature, self._field(feature).dtype, held.rows[feature.key], frames)
        self._metadata.found_picture(feature.key, next(iter(decoded.values())).shape, held.episode.data_url)
        if self._size is not None:
            decoded = {frame: self._size.resize(image) for frame, image in decoded.items()}
        shapes = {tuple(image.shape) for image in decoded.values()}
        if len(shapes) > 1:
            where = _where(feature, held.episode)
            message = f"{where}: frames {list(decoded)} have images of different shapes: {sorted(shapes)}"
            raise FormatError(message, remedy=LEAVE_OUT_FEATURE)
        images = [decoded[frame] for frame in frames]
        stored = stored_unit(feature) if feature.is_depth else None
        if stored not in {self._depth_unit, None}:
            for image in {id(image): image for image in images}.values():
                _ = image.mul_(MILLIMETRES) if stored == "m" else image.div_(MILLIMETRES)
        return images

    def _as_image_dtype(self, images: list[torch.Tensor], feature: Feature) -> list[torch.Tensor]:
        if self._image_dtype == "uint8" or feature.is_depth:
            return images
        return [image.float().div_(np.iinfo(str(image.dtype).removeprefix("torch.")).max) for image in images]


def _unshared(pictures: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the pictures, copies in place of repeated ones."""
    firsts = {id(picture): place for place, picture in reversed(list(enumerate(pictures)))}
    return [picture if firsts[id(picture)] == place else picture.clone() for place, picture in enumerate(pictures)]


def _decode_images(
    episode: Episode, feature: Feature, dtype: str, column: Sequence[bytes], frames: Sequence[int]
) -> dict[int, torch.Tensor]:
    """Decode as stored, depth maps as float32. Windows repeat frames at an episode's ends: each is decoded once."""
    torch = import_torch()
    where = _where(feature, episode)
    images = {frame: decode_image(column[frame], name=f"{where}, frame {frame}") for frame in dict.fromkeys(frames)}
    for frame, image in images.items():
        if image.dtype == torch.float32 and not feature.is_depth:
            raise FormatError(
                f"{where}, frame {frame}: the picture is of floats, and info.json doesn't mark the feature as depth",
                remedy='mark it there: "info": {"is_depth_map": true}, or leave the feature out with features=',
            )
        if image.dtype != torch.uint8 and dtype == "uint8":
            raise FormatError(
                f"{where}, frame {frame}: the picture has 16 bits a sample, which uint8 can't hold, and info.json "
                "doesn't mark the feature as depth",
                remedy='ask for image_dtype="float32", in [0, 1], or mark it there: "info": {"is_depth_map": true}',
            )
        if feature.is_depth:
            images[frame] = image.to(torch.float32)
    if len({image.dtype for image in images.values()}) > 1:  # they can't be stacked
        # As bright: 255 becomes 65535, and so in [0, 1] every value stays the same to the last bit.
        for frame, image in images.items():
            if image.dtype != torch.uint16:
                images[frame] = image.to(torch.int32).mul_(257).to(torch.uint16)
    return images


def _where(feature: Feature, episode: Episode) -> str:
    return f"{feature.key} of episode {episode.index} in {redact_url(episode.data_url)}"


def _own(value: Any) -> Any:  # noqa: ANN401
    """Return a copy that may be changed: lists and dicts of a table's row are the cache's."""
    return value if isinstance(value, str) else deepcopy(value)
