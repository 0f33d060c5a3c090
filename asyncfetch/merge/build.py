"""Carrying out a plan: every file written once, what is known of the rows reduced."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from asyncfetch.merge.kernel import Schedule
from asyncfetch.merge.units import RowsUnit, Summary, add, summarise, write
from asyncfetch.runtime.concurrently import ungrouped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncfetch.merge.destination import Build, WrittenFile
    from asyncfetch.merge.kernel import Pool
    from asyncfetch.merge.progress import Progress
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
) -> tuple[list[WrittenFile], Summary]:
    """Write all of a plan's files: which they are, and what is known of the rows. What is finished stays.

    The numbers in the rows stay in memory until their statistics are taken: for a state and an action of 7 float32
    each, 56 bytes a frame.

    Args:
        pool: Does the work.
        units: The files; those of rows first, since more waits for them.
        build: Which nobody else writes to.
        progress: Told of each file.

    Raises:
        FetchError, DatasetError: See ``write_files``.
    """
    files: list[WrittenFile] = []
    summary = Summary()

    async def finished(file: WrittenFile) -> None:
        files.append(file)
        progress.finished(file)

    with ungrouped():
        async with anyio.create_task_group() as tasks:
            schedule = Schedule(tasks, pool)
            leaves = []
            for unit in units:
                written = schedule.submit(write, build, unit)
                schedule.then(written, finished)
                if isinstance(unit, RowsUnit):
                    leaves += [schedule.submit(summarise, build, written, part) for part in unit.parts()]
            if leaves:
                root = schedule.reduce(add, leaves)
                leaves.clear()  # who still needs one has it
                summary = await schedule.get(root)
    return files, summary
