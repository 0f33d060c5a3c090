"""Carrying out a plan: every file written once, what is known of the rows reduced, the metadata last."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from asyncfetch.merge.finish import write_metadata
from asyncfetch.merge.kernel import Schedule
from asyncfetch.merge.units import RowsUnit, Summary, add, summarise, write
from asyncfetch.runtime.concurrently import ungrouped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncfetch.merge.folder import BuildFolder
    from asyncfetch.merge.kernel import Pool
    from asyncfetch.merge.plan import MergePlan
    from asyncfetch.merge.progress import Progress
    from asyncfetch.merge.units import FileUnit

__all__ = ["build_dataset", "write_files"]


async def write_files(pool: Pool, units: Sequence[FileUnit], folder: BuildFolder) -> None:
    """Write some of a plan's files, and nothing else. What is finished stays. Errors are those of ``build_dataset``."""
    with ungrouped():
        async with anyio.create_task_group() as tasks:
            schedule = Schedule(tasks, pool)
            for unit in units:
                schedule.submit(write, folder, unit)


async def build_dataset(
    pool: Pool, plan: MergePlan, units: Sequence[FileUnit], folder: BuildFolder, progress: Progress
) -> None:
    """Write the planned dataset into the folder, info.json last. What is finished there stays.

    The numbers in the rows stay in memory until their statistics are taken: for a state and an action of 7 float32
    each, 56 bytes a frame.

    Args:
        pool: Does the work.
        plan: What to write.
        units: Its files; those of rows first, since more waits for them.
        folder: Which nobody else writes to.
        progress: Told of each file.

    Raises:
        FetchError: A source could not be read.
        DatasetError: A source isn't what its metadata say.
    """
    summary = Summary()
    with ungrouped():
        async with anyio.create_task_group() as tasks:
            schedule = Schedule(tasks, pool)
            leaves = []
            for unit in units:
                written = schedule.submit(write, folder, unit)
                schedule.then(written, progress.finished)
                if isinstance(unit, RowsUnit):
                    leaves += [schedule.submit(summarise, folder, written, part) for part in unit.parts()]
            if leaves:
                root = schedule.reduce(add, leaves)
                leaves.clear()  # who still needs one has it
                summary = await schedule.get(root)
    await anyio.to_thread.run_sync(partial(write_metadata, plan, summary, folder.dataset))
