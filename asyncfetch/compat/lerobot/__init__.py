"""LeRobot's dataset classes and its commands, reading by asyncfetch.

metadata.py   where a dataset is, and what LeRobot's object says of it
datasets.py   StreamingLeRobotDataset and LeRobotDataset: they take LeRobot's arguments and give its samples, bit by
              bit those of its map style
commands.py   run: LeRobot's own command in this process, with these classes in place of its own

``meta`` is an object of LeRobot's, so its trainer finds all that it looks for.
"""

from asyncfetch.compat.lerobot.commands import run
from asyncfetch.compat.lerobot.datasets import LeRobotDataset, StreamingLeRobotDataset

__all__ = ["LeRobotDataset", "StreamingLeRobotDataset", "run"]
