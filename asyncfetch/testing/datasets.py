"""Writes small, real LeRobot v3.0 datasets in which every frame carries its identity.

    truth = write_dataset("/tmp/pick-place", episodes=(20, 31, 17))
    assert read_identity(picture) == truth.identity(episode, frame, camera)

Scenes are painted and numbers are formulas, and `DatasetTruth` knows them all. The layout is that of LeRobot's recorder
(0.6), down to the column order, the row groups and the place of each MP4's moov; `Quirks` add deviations of other
writers. Needs the extra ``testing``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncfetch.config.checks import is_whole_number, require, whole_number
from asyncfetch.errors import ConfigError, MissingDependency, install_command
from asyncfetch.testing.clips import DEPTH_ENCODING, ENCODINGS, require_encoder
from asyncfetch.testing.identity import paint
from asyncfetch.testing.recorder import Quirks, Recorder
from asyncfetch.testing.truth import DEFAULT_FEATURES, DEPTH, EXTRAS, ROBOT_FEATURES, SNAPSHOT_CAMERA, DatasetTruth

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Sequence

    from asyncfetch.testing.clips import Codec, Encoding

DEFAULT_CAMERAS = ("observation.images.top", "observation.images.wrist")

MIN_SIDE_PX = 64
"""Shortest side for SVT-AV1, and for an identity."""
MAX_FPS = 240
"""Highest rate for SVT-AV1."""


def write_dataset(
    root: str | os.PathLike[str],
    *,
    episodes: int | Sequence[int] = 4,
    length: int = 20,
    cameras: Sequence[str] = DEFAULT_CAMERAS,
    fps: int = 30,
    width: int = 160,
    height: int = 128,
    codec: Codec = "av1",
    gop: int = 2,
    crf: int | None = None,
    episodes_per_video_file: int | Mapping[str, int] = 2,
    episodes_per_data_file: int = 100,
    chunks_size: int = 1000,
    tasks: Sequence[str] = ("pick", "place"),
    texture: float = 0.0,
    seed: int = 0,
    distinct_videos: int | None = None,
    extras: Collection[str] = (),
    quirks: Quirks | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> DatasetTruth:
    """Write a dataset; returns its contents.

    It encodes, so it takes a while and blocks; from a coroutine call it in a thread. Equal arguments give equal bytes
    with equal versions of PyAV and pyarrow. If it fails, the files written so far stay, without info.json.

    Args:
        root: A directory that is empty or doesn't exist yet.
        episodes: Frames of each episode (0 is allowed), or the number of episodes of ``length`` frames.
        length: Frames of each episode, if ``episodes`` is a number.
        cameras: Names of the colour video features, at most 15.
        fps: Frames per second, up to 240.
        width: Pixels, even, at least 64.
        height: Pixels, even, at least 64.
        codec: Of the colour videos: av1, h264 or hevc.
        gop: Most frames from one key frame to the next.
        crf: Quality of the videos; None: 30 for av1, 23 for h264, 28 for hevc. From 40 on, small pictures become
            unreadable.
        episodes_per_video_file: For all cameras, or for each. A file of one episode has its moov at the tail.
        episodes_per_data_file: Likewise for the rows.
        chunks_size: Most files in a chunk directory.
        tasks: The episodes take them in turn.
        texture: Strength of the pictures' grain, see `paint`.
        seed: Chooses the grain.
        distinct_videos: Encode the videos of only this many episodes and repeat them for the rest by stream copy, which
            makes large datasets cheap. The pictures of episode e then carry the identity of e modulo this number; the
            rows keep their own. Episodes that share a video must have one length.
        extras: Names of `EXTRAS` to add.
        quirks: Irregularities; None for none.
        progress: Called with the numbers of finished and of all videos, one for each camera and episode with frames.

    Raises:
        ConfigError: An argument is invalid, or the directory isn't empty.
        MissingDependency: PyAV, an encoder or pyarrow isn't installed.
    """
    truth = DatasetTruth(
        root=Path(root),
        fps=whole_number("fps", fps, least=1),
        lengths=_lengths(episodes, length),
        cameras=_names("cameras", cameras),
        extras=tuple(name for name in EXTRAS if name in extras),
        tasks=_names("tasks", tasks),
        width=whole_number("width", width, least=MIN_SIDE_PX),
        height=whole_number("height", height, least=MIN_SIDE_PX),
        texture=texture,
        seed=whole_number("seed", seed, least=0),
        distinct_videos=None if distinct_videos is None else whole_number("distinct_videos", distinct_videos, least=1),
    )
    recorder = Recorder(
        truth=truth,
        encoding=_encoding(codec),
        gop=whole_number("gop", gop, least=1),
        crf=None if crf is None else whole_number("crf", crf, least=0),
        episodes_per_video_file=_per_video_file(truth, episodes_per_video_file),
        episodes_per_data_file=whole_number("episodes_per_data_file", episodes_per_data_file, least=1),
        chunks_size=whole_number("chunks_size", chunks_size, least=1),
        quirks=quirks or Quirks(),
        progress=progress,
    )
    _check_truth(truth, extras)
    _check_quirks(recorder)
    _require_dependencies(recorder)
    recorder.write()
    return truth


def _lengths(episodes: Any, length: Any) -> tuple[int, ...]:  # noqa: ANN401 - what a user gave
    if is_whole_number(episodes):
        return (whole_number("length", length, least=0),) * whole_number("episodes", episodes, least=0)
    return tuple(whole_number("each of episodes", frames, least=0) for frames in episodes)


def _names(what: str, names: Any) -> tuple[str, ...]:  # noqa: ANN401 - what a user gave
    named = tuple(names)
    if isinstance(names, str) or not all(isinstance(name, str) for name in named):
        raise ConfigError(f"{what} must be several strings, not {names!r:.80}")
    return named


def _encoding(codec: Codec) -> Encoding:
    if codec not in ENCODINGS:
        raise ConfigError(f"codec must be one of {list(ENCODINGS)}, not {codec!r}")
    return ENCODINGS[codec]


def _per_video_file(truth: DatasetTruth, wanted: int | Mapping[str, int]) -> dict[str, int]:
    if not isinstance(wanted, Mapping):
        wanted = dict.fromkeys(truth.video_features, wanted)
    if set(wanted) != set(truth.video_features):
        raise ConfigError(
            f"episodes_per_video_file names {sorted(wanted)}, the videos are {sorted(truth.video_features)}"
        )
    return {name: whole_number(f"episodes_per_video_file of {name}", wanted[name], least=1) for name in wanted}


def _check_truth(truth: DatasetTruth, extras: Collection[str]) -> None:
    cameras, size = truth.cameras, f"{truth.width}x{truth.height}"
    unknown = set(extras) - set(EXTRAS)
    require(not unknown, f"unknown extras {sorted(unknown)}; there are {list(EXTRAS)}")
    require(len(truth.tasks) > 0, "a dataset needs at least one task")
    require(truth.fps <= MAX_FPS, f"fps={truth.fps} must be within 1 and {MAX_FPS}")
    odd = [name for name in cameras if name in {"", ".", ".."} or {"/", "\0"} & set(name)]
    require(not odd, f"cameras can't be called {odd}: a name becomes a directory's")
    taken = set(cameras) & {*ROBOT_FEATURES, *EXTRAS, *DEFAULT_FEATURES}
    require(not taken, f"cameras can't be called {sorted(taken)}, other features are")
    is_possible = len(set(cameras)) == len(cameras) <= SNAPSHOT_CAMERA
    require(is_possible, f"cameras must be at most {SNAPSHOT_CAMERA} different names, not {cameras}")
    require(truth.width % 2 == truth.height % 2 == 0, f"{size} must be even numbers of pixels")
    for episode, length in enumerate(truth.lengths):
        model = truth.painted_episode(episode)
        require(
            length == truth.lengths[model],
            f"episode {episode} of {length} frames can't repeat the video of episode {model} with "
            f"{truth.lengths[model]}: distinct_videos={truth.distinct_videos} takes equal lengths",
        )
    # Raises before anything is written if a picture can't be painted.
    last = (max(truth.num_episodes - 1, 0), max((*truth.lengths, 1)) - 1, SNAPSHOT_CAMERA)
    paint(*last, width=truth.width, height=truth.height, texture=truth.texture, seed=truth.seed)
    is_new = not truth.root.exists() or (truth.root.is_dir() and not any(truth.root.iterdir()))
    require(is_new, f"{truth.root} exists and isn't an empty directory; remove it or choose another")


def _check_quirks(recorder: Recorder) -> None:
    quirks, truth = recorder.quirks, recorder.truth
    if quirks.episodes_per_meta_file is not None:
        whole_number("episodes_per_meta_file", quirks.episodes_per_meta_file, least=1)
    without, short, empty = quirks.null_index_episodes, quirks.short_video_frames, quirks.empty_video_file
    are_there = set(without) <= set(range(truth.num_episodes))
    require(are_there, f"null_index_episodes {without} must be within {truth.num_episodes} episodes")
    shortest = min((length for length in truth.lengths if length), default=1)
    require(0 <= short < shortest, f"short_video_frames={short} must leave of {shortest} frames at least one")
    missing = quirks.without_default_feature
    is_default = missing in {None, *DEFAULT_FEATURES}
    require(is_default, f"{missing!r} isn't one of the default features {DEFAULT_FEATURES}")
    per_file = next(iter(recorder.episodes_per_video_file.values()), 1)
    files = -(-truth.num_episodes // per_file) if truth.video_features else 0
    is_there = empty is None or 0 <= empty < files
    require(is_there, f"empty_video_file={empty} must be one of the first camera's {files} files")
    require(quirks.orphan_rows >= 0, f"orphan_rows={quirks.orphan_rows} must not be negative")


def _require_dependencies(recorder: Recorder) -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise MissingDependency(f"writing datasets needs pyarrow: {install_command('testing')}") from error
    require_encoder(recorder.encoding)
    if DEPTH in recorder.truth.extras:
        require_encoder(DEPTH_ENCODING)
