"""Contents of a dataset of `write_dataset`, computed by formulas, never read back from its files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncfetch.errors import ConfigError, EpisodeNotFound, FrameMissing
from asyncfetch.testing.identity import Identity, identity_cells, paint

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

DONE, NOTE, GRID = "next.done", "observation.note", "observation.grid"
SNAPSHOT, DEPTH = "observation.images.snapshot", "observation.images.depth"
EXTRAS = (DONE, NOTE, GRID, SNAPSHOT, DEPTH)
"""Optional features: a bool (1,), a string (1,), a float32 (3, 4), an image stored as PNG in the data files, and a
depth camera (lossless HEVC, 12-bit codes)."""

ROBOT_FEATURES = ("observation.state", "action", "next.reward")
"""Features of every dataset written here: float32 vectors of 6, and a reward of 1 at the last frame."""

DEFAULT_FEATURES = ("timestamp", "frame_index", "episode_index", "index", "task_index")
"""Features of every LeRobot dataset, besides its own."""

SNAPSHOT_CAMERA = 15
"""The camera number painted into the image feature."""

GRID_SHAPE = (3, 4)
DEPTH_MIN_METRES, DEPTH_MAX_METRES, DEPTH_SHIFT_METRES, MAX_DEPTH_CODE = 0.01, 10.0, 3.5, 4095


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetTruth:
    """The ground truth of one written dataset. Usable as a path: `os.fspath` gives its root.

    Frames are numbered from 0 in their episode. Beyond the end is EpisodeNotFound or FrameMissing.
    """

    root: Path
    fps: int
    lengths: tuple[int, ...]
    """Frames of each episode, by the metadata."""
    cameras: tuple[str, ...]
    """Video features with colour pictures; the number painted into them is the position here."""
    extras: tuple[str, ...]
    """Its names of `EXTRAS`."""
    tasks: tuple[str, ...]
    """Tasks by their index."""
    width: int
    height: int
    texture: float
    seed: int
    distinct_videos: int | None
    """Videos repeat with this period; None if each episode has its own."""

    def __fspath__(self) -> str:
        return str(self.root)

    @property
    def num_episodes(self) -> int:
        """Episodes in the metadata."""
        return len(self.lengths)

    @property
    def num_frames(self) -> int:
        """Frames in the metadata."""
        return sum(self.lengths)

    @property
    def video_features(self) -> tuple[str, ...]:
        """All features stored as videos: the cameras, then the depth camera, if any."""
        return (*self.cameras, *(name for name in self.extras if name == DEPTH))

    def first_index(self, episode: int) -> int:
        """The global ``index`` of its frame 0; that of the next episode if it has no frames."""
        self._check(episode)
        return sum(self.lengths[:episode])

    def task_index(self, episode: int) -> int:
        """The number of its task: the episodes take them in turn."""
        self._check(episode)
        return episode % len(self.tasks)

    def task(self, episode: int) -> str:
        """The task of all its frames."""
        return self.tasks[self.task_index(episode)]

    def painted_episode(self, episode: int) -> int:
        """The episode number in its pictures: ``episode``, or that of the repeated videos."""
        self._check(episode)
        return episode if self.distinct_videos is None else episode % self.distinct_videos

    def identity(self, episode: int, frame: int, camera: str) -> Identity:
        """The right result of `read_identity` for this frame of a camera or of the image feature."""
        self._check(episode, frame)
        return Identity(self.painted_episode(episode), frame, self._camera_number(camera))

    def picture(self, episode: int, frame: int, camera: str) -> NDArray[np.uint8]:
        """The picture (H, W, 3) before coding. A video approximates it, the image feature is equal."""
        number = self.identity(episode, frame, camera)
        if camera == SNAPSHOT:
            number = number._replace(episode=episode)
        return paint(*number, width=self.width, height=self.height, texture=self.texture, seed=self.seed)

    def depth_codes(self, episode: int, frame: int) -> NDArray[np.uint16]:
        """The depth camera's stored 12-bit codes (H, W), exactly, since its coding is lossless."""
        self._check(episode, frame)
        cells = identity_cells(self.painted_episode(episode), frame, 0, width=self.width, height=self.height)
        ramp = np.add.outer(2 * np.arange(self.height), np.arange(self.width) + 3 * frame) % 256
        codes: NDArray[np.uint16] = (np.where(cells, 3200, 600) + ramp).astype(np.uint16)
        return codes

    def depth_metres(self, episode: int, frame: int) -> NDArray[np.float64]:
        """The depth (H, W) of the codes, on LeRobot's default logarithmic scale."""
        near, far = np.log(DEPTH_MIN_METRES + DEPTH_SHIFT_METRES), np.log(DEPTH_MAX_METRES + DEPTH_SHIFT_METRES)
        codes = self.depth_codes(episode, frame).astype(np.float64)
        metres: NDArray[np.float64] = np.exp(near + codes * (far - near) / MAX_DEPTH_CODE) - DEPTH_SHIFT_METRES
        return metres.clip(DEPTH_MIN_METRES, DEPTH_MAX_METRES)

    def state(self, episode: int, frame: int) -> NDArray[np.float32]:
        """``observation.state`` (6,)."""
        self._check(episode, frame)
        row: NDArray[np.float32] = self.column("observation.state", episode)[frame]
        return row

    def action(self, episode: int, frame: int) -> NDArray[np.float32]:
        """``action`` (6,)."""
        self._check(episode, frame)
        row: NDArray[np.float32] = self.column("action", episode)[frame]
        return row

    def column(self, name: str, episode: int) -> NDArray[Any]:
        """All values of a stored feature in an episode, one a row: scalars for shape (1,), str for strings.

        Raises:
            ConfigError: The dataset has no such column; cameras have none.
        """
        self._check(episode)
        frames: NDArray[Any] = np.arange(self.lengths[episode])
        match name:
            case "observation.state":
                return _joints(episode, frames, episode + frames / 1000, 1.0)
            case "action":
                return _joints(episode, frames + 1, np.zeros(len(frames)), -1.0)
            case "next.reward":
                return _is_last(frames).astype(np.float32)
            case "timestamp":
                return (frames / self.fps).astype(np.float32)
            case "frame_index":
                return frames
            case "episode_index":
                return np.full_like(frames, episode)
            case "index":
                return frames + self.first_index(episode)
            case "task_index":
                return np.full_like(frames, self.task_index(episode))
            case "next.done" if name in self.extras:
                return _is_last(frames)
            case "observation.note" if name in self.extras:
                return np.array([f"episode {episode}, frame {frame}" for frame in frames], object)
            case "observation.grid" if name in self.extras:
                cells = np.arange(np.prod(GRID_SHAPE)).reshape(GRID_SHAPE)
                return (frames[:, None, None] + cells / 100).astype(np.float32)
        raise ConfigError(f"the dataset stores no plain column {name!r}; its extras are {list(self.extras)}")

    def _camera_number(self, camera: str) -> int:
        if camera == SNAPSHOT and camera in self.extras:
            return SNAPSHOT_CAMERA
        if camera not in self.cameras:
            raise ConfigError(f"no colour camera {camera!r}; there are {list(self.cameras)}")
        return self.cameras.index(camera)

    def _check(self, episode: int, frame: int | None = None) -> None:
        if not 0 <= episode < len(self.lengths):
            raise EpisodeNotFound(f"{self.root} has no episode {episode}, only {len(self.lengths)}")
        if frame is not None and not 0 <= frame < self.lengths[episode]:
            raise FrameMissing(f"episode {episode} of {self.root} has no frame {frame}, only {self.lengths[episode]}")


def _is_last(frames: NDArray[Any]) -> NDArray[np.bool_]:
    last: NDArray[np.bool_] = frames == len(frames) - 1
    return last


def _joints(episode: int, frames: NDArray[Any], fifth: NDArray[Any], sixth: float) -> NDArray[np.float32]:
    """(episode, frame, sine, cosine, fifth, sixth) a row."""
    fixed = np.ones(len(frames))
    columns = [episode * fixed, frames, np.sin(frames / 10), np.cos(frames / 10), fifth, sixth * fixed]
    return np.stack(columns, axis=1).astype(np.float32)
