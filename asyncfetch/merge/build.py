"""Carrying out a plan: every file written once, what is known of the rows reduced.

What is reduced in a tree is what grows with the rows: statistics, and the tasks of each episode. Two passes aren't, the
plan and ``finish``: in which file an episode lies depends on all before it. They take 0.1 ms an episode (one camera).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from asyncfetch.merge.kernel import Schedule
from asyncfetch.merge.quantiles import Search
from asyncfetch.merge.statistics import quantile_ranks
from asyncfetch.merge.summaries import Summary, add, summarise, tally_again
from asyncfetch.merge.units import RowsUnit, write
from asyncfetch.runtime.concurrently import ungrouped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncfetch.merge.destination import Build, WrittenFile
    from asyncfetch.merge.kernel import Pending, Pool
    from asyncfetch.merge.progress import Progress
    from asyncfetch.merge.statistics import Statistics
    from asyncfetch.merge.summaries import PartUnit
    from asyncfetch.merge.units import FileUnit

__all__ = ["write_and_summarise", "write_files"]


async def write_files(pool: Pool, units: Sequence[FileUnit], build: Build) -> None:
    """Write some of a plan's files, and nothing else. What is finished stays.

    Raises:
        FetchError: A source could not be read, or the destination not be written.
        DatasetError: A source isn't what its metadata say.
    """
    with ungrouped():
        async with anyio.create_task_group() as tasks:
            schedule = Schedule(tasks, pool)
            for unit in units:
                schedule.submit(write, build, unit)


async def write_and_summarise(
    pool: Pool, units: Sequence[FileUnit], build: Build, progress: Progress
) -> tuple[list[WrittenFile], Summary, dict[str, Statistics]]:
    """Write all of a plan's files. What is finished stays.

    Few rows are read back once, many twice or more, since quantiles are searched for in rounds: see ``quantiles``.

    Args:
        pool: Does the work.
        units: The files; those of rows first, since more waits for them.
        build: Which nobody else writes to.
        progress: Told of each file.

    Returns:
        Which files they are, what is known of the rows, and the statistics of numeric features over all of them.

    Raises:
        FetchError, DatasetError: See ``write_files``.
    """
    files: list[WrittenFile] = []

    async def finished(file: WrittenFile) -> None:
        files.append(file)
        progress.finished(build.url(file.path), file.nbytes)

    with ungrouped():
        async with anyio.create_task_group() as tasks:
            schedule = Schedule(tasks, pool)
            parts: list[tuple[Pending, PartUnit]] = []
            for unit in units:
                written = schedule.submit(write, build, unit)
                schedule.then(written, finished)
                if isinstance(unit, RowsUnit):
                    parts += [(written, part) for part in unit.parts()]
            summary, numbers = await _summarise(schedule, build, parts)
    return files, summary, numbers


async def _summarise(
    schedule: Schedule, build: Build, parts: Sequence[tuple[Pending, PartUnit]]
) -> tuple[Summary, dict[str, Statistics]]:
    """What is known of the rows of all parts, and their statistics."""
    count = sum(sum(part.lengths) for _, part in parts)
    if not count:
        return Summary(), {}
    search = Search(count, quantile_ranks(count))
    leaves = [schedule.submit(summarise, build, written, part, search.shift) for written, part in parts]
    root = schedule.reduce(add, leaves)
    leaves.clear()  # who still needs one has it
    summary: Summary = await schedule.get(root)
    search.learn(summary.counted)
    while search.wanted:
        leaves += [
            schedule.submit(tally_again, build, written, part, search.wanted, search.shift) for written, part in parts
        ]
        root = schedule.reduce(add, leaves)
        leaves.clear()
        search.learn(await schedule.get(root))
    numbers = {}
    for key, moments in summary.moments.items():
        ordered = search.values(key).reshape(*moments.mean.shape, -1)
        numbers[key] = moments.statistics(ordered)
    return summary, numbers
