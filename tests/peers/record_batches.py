"""LeRobot's trainer by ``asyncfetch run``, as one rank of torchrun's; each batch's frames are written down.

torchrun --nproc-per-node 2 tests/peers/record_batches.py DIRECTORY --policy.type=act ...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from lerobot.scripts import lerobot_train

from asyncfetch.compat.lerobot import run

if __name__ == "__main__":
    directory, *arguments = sys.argv[1:]
    update = lerobot_train.update_policy

    def update_policy(metrics: Any, policy: Any, batch: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        """Write down, and update."""
        with (Path(directory) / os.environ["RANK"]).open("a") as file:
            print(*batch["index"].tolist(), file=file)
        return update(metrics, policy, batch, *args, **options)

    lerobot_train.update_policy = update_policy
    run("lerobot-train", arguments)
