"""Some of a dataset's episodes as a dataset of their own, the parts of a split, a v2 dataset as one of v3.

All are merges of one source, with the behaviour of ``merge_datasets``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

import numpy as np

from asyncfetch.config import FetchConfig
from asyncfetch.config.checks import whole_number
from asyncfetch.errors import ConfigError, MergeError, redact_url
from asyncfetch.fetch import Fetcher
from asyncfetch.fetch.urls import join_url
from asyncfetch.merge.apply import merge_datasets, merge_several
from asyncfetch.merge.destination import destination_path
from asyncfetch.merge.sources import Selection, read_indices, read_version

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from typing import Unpack

    from asyncfetch.merge.apply import MergeReport
    from asyncfetch.merge.executor import Executor
    from asyncfetch.merge.job import MergeProgress

Share: TypeAlias = float | int | Iterable[int]
"""A share of a split: a part of the episodes (0.9), a number of them (90), or which ones."""


class MergeOptions(TypedDict, total=False):
    """Keyword options of ``merge_datasets``."""

    workers: int | None
    overwrite: bool
    dry_run: bool
    data_file_max_bytes: int
    video_file_max_bytes: int
    files_per_chunk: int
    fetch: FetchConfig | None
    executor: Executor | None
    progress: Callable[[MergeProgress], object] | None


async def select_episodes(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    episodes: Iterable[int],
    **options: Unpack[MergeOptions],
) -> MergeReport:
    """Write some of a dataset's episodes as a dataset, in the source's order and renumbered.

    Of other episodes only metadata are read, and rows in the same row groups as chosen ones. All tasks keep their
    numbers, even those that no chosen episode has. Statistics of pictures are combined from the episodes' own.

    Args:
        source: A directory or url.
        destination: As of merge_datasets.
        episodes: Their indices, different ones, in any order.
        options: As of merge_datasets.

    Raises:
        ConfigError: There is no episode, or one twice.
        MergeError: As of merge_datasets; its cause is EpisodeNotFound if the source lacks an episode.
    """
    return await merge_datasets([Selection(source, episodes)], destination, **options)


async def split_dataset(
    source: str | os.PathLike[str],
    splits: Mapping[str, Share],
    destination: str | os.PathLike[str],
    *,
    seed: int | None = None,
    **options: Unpack[MergeOptions],
) -> dict[str, MergeReport]:
    """Write parts of a dataset as datasets, each in a directory of its name in the destination.

    They appear at the end, one right after the other, and none before that. The same call resumes an interrupted one,
    even between two datasets.

    Args:
        source: A directory or url.
        splits: By name: a share of the episodes (floats, in all at most 1.0), a number (ints), or indices. All are of
            one kind and don't overlap; remaining episodes are in no part.
        destination: The directory or prefix to put them in.
        seed: Draws the episodes of parts and numbers at random; None takes them in their order, the first part first.
        options: As of merge_datasets.

    Returns:
        The reports, by name; their seconds are those of all parts.

    Raises:
        ConfigError: The splits are invalid, or one gets no episode.
        FetchError: The source's metadata could not be read.
        DatasetError: It isn't one, or contradicts itself.
        MergeError: As of merge_datasets.
    """
    root, selection = destination_path(destination), Selection(source)
    async with Fetcher(options.get("fetch") or FetchConfig()) as fetcher:
        indices = await read_indices(fetcher, selection.url)
    assigned = split_episodes(indices, splits, seed=seed)
    parts = [([Selection(source, episodes)], join_url(root, name)) for name, episodes in assigned.items()]
    return dict(zip(assigned, await merge_several(parts, **options), strict=True))


async def convert_dataset(
    source: str | os.PathLike[str], destination: str | os.PathLike[str], **options: Unpack[MergeOptions]
) -> MergeReport:
    """Write a dataset of LeRobot v2.0 or v2.1 as one of v3, its videos copied as they are.

    Arguments and errors are those of merge_datasets; a dataset of v3 is a MergeError, too. merge_datasets of it alone
    rewrites it in regular form, without data that no episode refers to.
    """
    selection = Selection(source)
    async with Fetcher(options.get("fetch") or FetchConfig()) as fetcher:
        version = await read_version(fetcher, selection.url)
    if version.startswith("v3"):
        raise MergeError(
            f"{redact_url(selection.url)} is a LeRobot {version} dataset already, and needs no conversion; to write it "
            "anew, without what no episode names, merge it alone"
        )
    return await merge_datasets([selection], destination, **options)


def split_episodes(
    episodes: int | Sequence[int],
    splits: Any,  # noqa: ANN401 - what a user gave
    *,
    seed: int | None = None,
) -> dict[str, list[int]]:
    """The episodes of each part of a split, for ``Stream(episodes=...)``.

    Args:
        episodes: Their number, or their indices.
        splits: Shares by name, as of ``split_dataset``: ``{"train": 0.9, "val": 0.1}``, or numbers, or indices.
        seed: Draws the episodes at random; None takes them in their order, the first part first.

    Raises:
        ConfigError: The splits are invalid, or one gets no episode.
    """
    episodes = range(episodes) if isinstance(episodes, int) else episodes
    if not isinstance(splits, Mapping) or not splits:
        raise ConfigError(f"splits must be shares by name, at least one, not {splits!r:.80}")
    if seed is not None:
        seed = whole_number("seed, which may be None,", seed, least=0)
    for name in splits:
        if not isinstance(name, str) or not name or name in {".", ".."} or "/" in name or "\0" in name:
            raise ConfigError(f"{name!r} can't be a split's name: it becomes a directory's")
    if any(isinstance(share, bool | str) for share in splits.values()):
        raise ConfigError(f"a split is a fraction, a number or indices of episodes, not {[*splits.values()]!r:.80}")
    shares: dict[str, Any] = {name: _of_python(share) for name, share in splits.items()}
    if all(isinstance(share, float) for share in shares.values()):
        assigned = _by_fractions(shares, episodes, seed)
    elif all(isinstance(share, int) for share in shares.values()):
        assigned = _by_numbers(shares, episodes, seed)
    elif all(isinstance(share, Iterable) for share in shares.values()):
        assigned = {name: list(share) for name, share in shares.items()}
        if len({one for own in assigned.values() for one in own}) < sum(map(len, assigned.values())):
            raise ConfigError("the splits overlap: an episode is in one of them only")
    else:
        raise ConfigError(f"splits must all be fractions, numbers or indices of episodes, not {shares!r:.200}")
    empty = [name for name, own in assigned.items() if not own]
    if empty:
        raise ConfigError(
            f"of {len(episodes)} episodes none would be in {', '.join(empty)}: give it more, or leave it out"
        )
    return assigned


def _of_python(share: Share) -> Share:
    """The share with NumPy's numbers as Python's."""
    if isinstance(share, Integral):
        return int(share)
    return float(share) if isinstance(share, Real) else share


def _by_fractions(splits: Mapping[str, float], episodes: Sequence[int], seed: int | None) -> dict[str, list[int]]:
    fractions = list(splits.values())
    if not all(math.isfinite(one) and one > 0 for one in fractions) or math.fsum(fractions) > 1 + 1e-9:
        raise ConfigError(f"fractions must be above 0 and in all at most 1.0, not {fractions}")
    # Rounding the sums, not the parts, gives each episode to one part.
    edges = [0, *(round(len(episodes) * min(1.0, total)) for total in accumulate(fractions))]
    numbers = (stop - start for start, stop in pairwise(edges))
    return _by_numbers(dict(zip(splits, numbers, strict=True)), episodes, seed)


def _by_numbers(numbers: Mapping[str, int], episodes: Sequence[int], seed: int | None) -> dict[str, list[int]]:
    count = len(episodes)
    if min(numbers.values()) < 0 or sum(numbers.values()) > count:
        raise ConfigError(f"the dataset has {count} episodes, which can't be split into {dict(numbers)}")
    order = range(count) if seed is None else np.random.default_rng(seed).permutation(count).tolist()
    edges = [0, *accumulate(numbers.values())]
    parts = (sorted(episodes[position] for position in order[start:stop]) for start, stop in pairwise(edges))
    return dict(zip(numbers, parts, strict=True))
