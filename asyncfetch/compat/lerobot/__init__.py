"""LeRobot's dataset classes and its commands, reading by asyncfetch.

metadata.py   a dataset's place, and LeRobot's own metadata object
datasets.py   StreamingLeRobotDataset and LeRobotDataset, with LeRobot's arguments and, bit by bit, its samples
commands.py   run: LeRobot's own command in this process, with these classes in place of its own

``meta`` is an object of LeRobot's, so its trainer finds everything in it.
"""

from asyncfetch.compat.lerobot.commands import run
from asyncfetch.compat.lerobot.datasets import LeRobotDataset, StreamingLeRobotDataset

__all__ = ["LeRobotDataset", "StreamingLeRobotDataset", "run"]
