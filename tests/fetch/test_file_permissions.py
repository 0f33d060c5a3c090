"""Local files and directories that a user may use in part: in a process of its own, for root may do everything."""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest

from asyncfetch.errors import AccessDenied
from asyncfetch.fetch import Fetcher

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Steps = Callable[[Fetcher, Path], Awaitable[None]]

NOBODY = 65534


async def _take(steps: Steps) -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest keeps its own directories to one user
        async with Fetcher() as fetcher:
            await fetcher.put(f"{name}/read before", b"1")
            await fetcher.listdir(name)  # now all is imported that another user may not be allowed to read
            os.remove(f"{name}/read before")
            if os.geteuid() == 0:
                os.chown(name, NOBODY, NOBODY)
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
            await steps(fetcher, Path(name))


def _run(steps: Steps) -> None:
    anyio.run(_take, steps)


def as_a_user(steps: Steps) -> None:
    """Takes the steps, with a Fetcher and a directory of that user's; their error is raised here."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(_run, steps).result()


async def _list_what_leads_elsewhere(fetcher: Fetcher, directory: Path) -> None:
    (directory / "closed").mkdir()
    (directory / "link").symlink_to("closed/x")
    (directory / "x").write_bytes(b"1")
    (directory / "closed").chmod(0)
    assert [info.url for info in await fetcher.listdir(str(directory))] == [f"{directory}/closed/", f"{directory}/x"]


async def _put_into_a_drop_box(fetcher: Fetcher, directory: Path) -> None:
    (directory / "box").mkdir(mode=0o300)
    info = await fetcher.put(f"{directory}/box/x", b"12")
    assert (info.size, (directory / "box" / "x").read_bytes()) == (2, b"12")


async def _put_where_nothing_may_be_written_any_more(fetcher: Fetcher, directory: Path) -> None:
    async def source() -> AsyncIterator[bytes]:
        yield b"1"
        os.chmod(directory, 0o500)
        yield b"2"

    with pytest.raises(AccessDenied, match="may not write there") as caught:
        await fetcher.put(f"{directory}/x", source())
    assert caught.value.url == f"{directory}/x"
    os.chmod(directory, 0o700)


@pytest.mark.parametrize(
    "steps", [_list_what_leads_elsewhere, _put_into_a_drop_box, _put_where_nothing_may_be_written_any_more]
)
def test_files_that_a_user_may_use_in_part(steps: Steps) -> None:
    as_a_user(steps)
