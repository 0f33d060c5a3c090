"""Other libraries' commands. What they do is in tests/peers, beside the libraries themselves."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

without_lerobot = pytest.mark.skipif(importlib.util.find_spec("lerobot") is not None, reason="LeRobot is here")


@without_lerobot
@pytest.mark.usefixtures("programs_are_warm")
def test_error_without_lerobot_has_the_command_to_install_it() -> None:
    command = [sys.executable, "-m", "asyncfetch", "run", "lerobot-train", "--dataset.repo_id=a/b", "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=35, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "needs LeRobot (No module named 'lerobot'): pip install \"lerobot[training]==0.6.1\"" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@without_lerobot
def test_dataset_class_without_lerobot_is_the_same_error() -> None:
    from asyncfetch.compat.lerobot import LeRobotDataset, StreamingLeRobotDataset
    from asyncfetch.errors import MissingDependency

    for kind in (LeRobotDataset, StreamingLeRobotDataset):
        with pytest.raises(MissingDependency, match=r'pip install "lerobot\[training\]==0.6.1"'):
            kind("lerobot/pusht", root="/nowhere")


def test_lerobot_is_not_imported_before_it_is_used() -> None:
    code = (
        "import sys, asyncfetch, asyncfetch.torch, asyncfetch.cli.app; assert 'asyncfetch.compat' not in sys.modules; "
        "import asyncfetch.compat.lerobot; assert 'lerobot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=35)
