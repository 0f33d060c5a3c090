from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from asyncfetch.errors import MissingDependency, install_command
from asyncfetch.lerobot.metadata import load_metadata

if TYPE_CHECKING:
    from pathlib import Path

    from tests.lerobot.conftest import Tables
    from tests.local_reader import LocalReader

COMMAND = install_command("lerobot")  # off the loop: it looks for what is installed


def test_importing_the_room_does_not_import_pyarrow() -> None:
    code = "import sys, asyncfetch.lerobot.metadata, asyncfetch.lerobot.rows; sys.exit('pyarrow' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


async def test_missing_pyarrow_error_names_the_install_command(
    reader: LocalReader, tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tables.write(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDependency, match=re.escape(COMMAND)):
        await load_metadata(reader, root)
