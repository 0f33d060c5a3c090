"""From an episode in memory to samples: dicts of tensors. Runs in decode threads, never on the loop."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from asyncfetch.decode import decode_image
from asyncfetch.errors import FormatError, redact_url
from asyncfetch.lerobot.windows import clamp

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from numpy.typing import NDArray

    from asyncfetch.lerobot.episode_cache import HeldEpisode
    from asyncfetch.lerobot.episode_table import Episode
    from asyncfetch.lerobot.info import Feature

__all__ = ["ImageDtype", "Sample", "SampleBuilder"]

ImageDtype = Literal["uint8", "float32"]
"""uint8 in [0, 255], or float32 in [0, 1]. Depth cameras are float32 in their unit either way; depth maps in a table
stay as they are stored."""

Sample = dict[str, Any]
"""Feature key to tensor (or str), beside ``<key>_is_pad`` for windows and ``task``."""


class SampleBuilder:
    """Makes the samples of one choice of features and windows. Immutable and thread-safe.

    A camera is (C, H, W); with a window (T, C, H, W), also where T is 1. A value of shape (1,) is a 0-d tensor, one of
    shape (n,) a tensor of the stored dtype, each with T in front under a window; then ``<key>_is_pad`` (T,) bool tells
    which places lie outside of the episode and repeat its first or last frame.
    """

    def __init__(
        self,
        *,
        features: Mapping[str, Feature],
        tasks: Mapping[int, str],
        windows: Mapping[str, NDArray[np.int64]],
        image_dtype: ImageDtype,
    ) -> None:
        self._features = features
        self._tasks = tasks
        self._windows = windows
        self._image_dtype = image_dtype

    @property
    def sample_bytes(self) -> int:
        """About what one sample takes, from the features' shapes."""
        return 1024 + sum(self._feature_bytes(feature) for feature in self._features.values())

    def _feature_bytes(self, feature: Feature) -> int:
        if feature.kind in {"image", "video", "depth"}:
            item_bytes = 4 if feature.kind == "depth" or self._image_dtype == "float32" else 1
        else:
            item_bytes = 8
        frames = len(self._windows.get(feature.key, (0,)))
        return frames * item_bytes * math.prod(feature.shape)

    def build(self, asked: Sequence[tuple[HeldEpisode, int]]) -> list[Sample]:
        """The samples of (episode, frame) pairs, in order; the frames of one episode are decoded in one call."""
        by_episode: dict[int, list[int]] = {}
        for place, (held, _) in enumerate(asked):
            by_episode.setdefault(held.episode.index, []).append(place)
        samples: list[Sample] = [{} for _ in asked]
        for places in by_episode.values():
            held = asked[places[0]][0]
            self._fill(held, [asked[place][1] for place in places], [samples[place] for place in places])
        return samples

    def _fill(self, held: HeldEpisode, frames: Sequence[int], samples: Sequence[Sample]) -> None:
        length = held.episode.length
        for key, feature in self._features.items():
            offsets = self._windows.get(key)
            if offsets is None:
                chosen = np.asarray(frames, dtype=np.int64)
            else:
                places = [clamp(frame, offsets, length) for frame in frames]
                chosen = np.concatenate([inside for inside, _ in places])
            values = self._read(held, feature, chosen)
            for number, sample in enumerate(samples):
                if offsets is None:
                    sample[key] = values[number]
                    continue
                span = len(offsets)
                sample[key] = values[number * span : (number + 1) * span]
                sample[f"{key}_is_pad"] = _tensor(places[number][1])
        for frame, sample in zip(frames, samples, strict=True):
            sample["task"] = self._tasks[int(held.rows["task_index"][frame])]

    def _read(self, held: HeldEpisode, feature: Feature, frames: NDArray[np.int64]) -> Any:  # noqa: ANN401
        """Tensor (len(frames), ...) of its own memory, or a list of str."""
        if feature.kind in {"video", "depth"}:
            images = held.frames(feature.key, frames.tolist())
            return self._as_image_dtype(images, feature)
        column = held.rows[feature.key]
        if feature.kind == "image":
            return self._as_image_dtype(_decode_images(held.episode, feature.key, column, frames), feature)
        if isinstance(column, list):
            return [column[frame] for frame in frames.tolist()]
        return _tensor(column[frames])

    def _as_image_dtype(self, images: torch.Tensor, feature: Feature) -> torch.Tensor:
        if feature.is_depth or self._image_dtype == "uint8":
            return images
        return images.float().div_(np.iinfo(str(images.dtype).removeprefix("torch.")).max)


def _decode_images(episode: Episode, key: str, column: Sequence[bytes], frames: NDArray[np.int64]) -> torch.Tensor:
    """(len(frames), C, H, W). Windows repeat frames at the ends of an episode: each is decoded once."""
    import torch

    where = f"{key} of episode {episode.index} in {redact_url(episode.data_url)}"
    unique, places = np.unique(frames, return_inverse=True)
    images = [decode_image(column[frame], name=f"{where}, frame {frame}") for frame in unique.tolist()]
    shapes = {tuple(image.shape) for image in images}
    if len(shapes) > 1:
        raise FormatError(f"{where}: frames {frames.tolist()} have images of different shapes: {sorted(shapes)}")
    return torch.stack([images[place] for place in places.tolist()])


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    import torch

    return torch.from_numpy(array)
