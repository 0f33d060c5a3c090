"""Writes a LeRobot v2.1 dataset by the LeRobot 0.3.3 of another environment: ``python write_v21.py ROOT LENGTH...``."""

from __future__ import annotations

import functools
import sys

import numpy as np
from lerobot.datasets import lerobot_dataset

CAMERA = "observation.images.top"

if __name__ == "__main__":
    # AV1 is what it encodes by default: where root does that, SVT-AV1 raises the process to a realtime priority.
    lerobot_dataset.encode_video_frames = functools.partial(lerobot_dataset.encode_video_frames, vcodec="h264")
    features = {
        CAMERA: {"dtype": "video", "shape": (64, 96, 3), "names": ["height", "width", "channels"]},
        "observation.images.snapshot": {
            "dtype": "image",
            "shape": (32, 48, 3),
            "names": ["height", "width", "channels"],
        },
        "observation.state": {"dtype": "float32", "shape": (6,), "names": None},
        "action": {"dtype": "float32", "shape": (6,), "names": None},
    }
    dataset = lerobot_dataset.LeRobotDataset.create("a/b", fps=30, features=features, root=sys.argv[1])
    random = np.random.default_rng(0)
    for episode, length in enumerate(map(int, sys.argv[2:])):
        for _ in range(length):
            frame = {
                CAMERA: random.integers(0, 255, (64, 96, 3), np.uint8),
                "observation.images.snapshot": random.integers(0, 255, (32, 48, 3), np.uint8),
                "observation.state": random.random(6, np.float32),
                "action": random.random(6, np.float32),
            }
            dataset.add_frame(frame, task=("nimm die Tür", "拿起杯子 ☕")[episode % 2])
        dataset.save_episode()
