"""The irregularities that public LeRobot datasets show, on demand."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Quirks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quirks:
    """What `write_dataset` does otherwise than LeRobot's recorder. By default nothing.

    Episodes of no frames are no quirk of their own: give a length of 0. Such an episode has a row of metadata and
    nothing else.
    """

    collapsed_row_groups: bool = False
    """One row group for all episodes of a data file, as conversion and push_to_hub write, instead of one an episode."""
    plain_lists: bool = False
    """``list`` in place of ``fixed_size_list``, as merged and edited files have."""
    no_huggingface_metadata: bool = False
    """No ``huggingface`` key in the schema metadata of the data files."""
    sorted_episode_columns: bool = False
    """Columns of meta/episodes in alphabetic order."""
    float_index_columns: bool = False
    """Every integer column of meta/episodes as double, as a trip through pandas leaves it."""
    null_index_episodes: tuple[int, ...] = ()
    """Episodes whose chunk and file indices, of data, videos and metadata, are null."""
    episodes_per_meta_file: int | None = None
    """Split meta/episodes into files of this many rows; None writes one file."""
    stale_self_references: bool = False
    """``meta/episodes/file_index`` names a file that doesn't exist."""
    unnamed_tasks_index: bool = False
    """The tasks' column is called ``__index_level_0__``, as LeRobot 0.4 left it."""
    permuted_tasks: bool = False
    """The rows of tasks.parquet in reverse order: row position is no longer task index."""
    orphan_rows: int = 0
    """This many rows at the start of every data file belong to an episode beyond the last and carry indices beyond the
    last, so that the position of a row isn't its ``index``."""
    orphan_files: bool = False
    """One more data file, with the rows of episode 0 again, and one more video a camera, that no metadata mention."""
    no_stats: bool = False
    """Neither meta/stats.json nor ``stats/*`` columns."""
    short_video_frames: int = 0
    """The last episode in every video file lacks this many frames at its end; the metadata don't know."""
    empty_video_file: int | None = None
    """This file of the first camera has no bytes."""
    without_default_feature: str | None = None
    """This one of `DEFAULT_FEATURES` is missing from info.json, the data files and the statistics."""
    unknown_info_keys: bool = False
    """info.json has keys of older versions, ``total_videos`` and ``total_chunks``."""
    legacy_video_info: bool = False
    """``video_info`` in place of ``info`` in the features of info.json."""
    codebase_version: str = "v3.0"
    """What info.json declares; the layout stays that of v3.0."""
