"""How long LeRobot's trainer waits for its data: its own streaming beside ours, by the ``data_s`` of its own log.

    .venv-peers/bin/python -m bench.trainer                             an ACT on states; twenty minutes
    .venv-peers/bin/python -m bench.trainer --pictures --width 96       one that sees the pictures: long steps on a CPU
    .venv-peers/bin/python -m bench.trainer --pictures --width 640 --device cuda
    .venv-peers/bin/python -m bench.trainer --policy.chunk_size=100     what else is given goes to the trainer

``.ci/peers`` makes that environment. Each way is ``lerobot-train --dataset.streaming=true`` in a process of its own, by
turns, from one Hub on loopback whose CDN speaks TLS and sends 4 MiB/s a stream after 50 ms. On a CPU an ACT's step
takes most of its time in the pictures, many times a GPU's. So by default the policy's inputs are the states alone,
which makes its step about as short as a GPU's. Every picture is fetched, decoded and handed over all the same, made
smaller by LeRobot's own ``image_transforms``. The first step's wait is shown apart: LeRobot fills its shuffle buffer in
it, we our pool, and a worker starts. Of the other steps, and of all, the share is ``data_s`` over ``data_s`` and
``updt_s``. The trainer's own conversion of pictures to float32 is in ``data_s``, whoever reads them. LeRobot's
streaming needs a worker, and gives all samples once more for every other one. It looks for a frame by its index in all
of the dataset, and so finds it in a camera's first file alone: there is one here.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import track

from asyncfetch.testing import Fault, HubServer, write_dataset
from bench.data import made_once
from bench.rows import Row, show

if TYPE_CHECKING:
    from collections.abc import Sequence

MIB = 1024 * 1024
RATE_BYTES, FIRST_BYTE_SECONDS = 4 * MIB, 0.05
EPISODES, LENGTH = 24, 100
TEXTURE = 10.0
"""Grey levels of grain: at a width of 320 a frame has 6 kB."""
ENVIRONMENT = "observation.environment_state"
"""A feature that ACT can take in place of pictures: here a copy of the robot's state."""
WAYS = {
    "LeRobot, 1 worker": ([str(Path(sys.executable).with_name("lerobot-train"))], 1),
    "asyncfetch, 1 worker": ([sys.executable, "-m", "asyncfetch", "run", "lerobot-train"], 1),
    "asyncfetch, no workers": ([sys.executable, "-m", "asyncfetch", "run", "lerobot-train"], 0),
}
"""Commands and loader workers."""
TINY_ACT = [
    *("--policy.type=act", "--policy.push_to_hub=false", "--policy.pretrained_backbone_weights=null"),
    *("--policy.dim_model=64", "--policy.n_heads=4", "--policy.dim_feedforward=256", "--policy.n_encoder_layers=2"),
    *("--policy.n_decoder_layers=1", "--policy.chunk_size=20", "--policy.n_action_steps=20"),
]
ON_STATES = [
    "--policy.input_features="
    + json.dumps({ENVIRONMENT: {"type": "ENV", "shape": [6]}, "observation.state": {"type": "STATE", "shape": [6]}}),
    *("--dataset.image_transforms.enable=true", "--dataset.image_transforms.max_num_transforms=1"),
    "--dataset.image_transforms.tfs="
    + json.dumps({"small": {"weight": 1.0, "type": "Resize", "kwargs": {"size": [64, 64]}}}),
]
"""The trainer makes floats of all pictures, which is no wait for data: of small ones that takes little."""
_STEP = re.compile(r"step:\d+ .*updt_s:([\d.]+) data_s:([\d.]+)")


@dataclass(frozen=True)
class Run:
    """What one run's log says."""

    first_seconds: float
    """The first step's wait for data."""
    step_seconds: float
    """Of the other steps, without the wait; the median."""
    share: float
    """Of the time of the other steps, waiting for data."""
    whole_share: float
    """Of the time of all steps."""

    @classmethod
    def of(cls, log: str) -> Run:
        """Of a log with a line for each step."""
        steps = [(float(update), float(data)) for update, data in _STEP.findall(log)]
        step_seconds = statistics.median(update for update, _ in steps[1:])
        return cls(steps[0][1], step_seconds, _share(steps[1:]), _share(steps))


def _share(steps: Sequence[tuple[float, float]]) -> float:
    waited = sum(data for _, data in steps)
    return waited / (waited + sum(update for update, _ in steps))


def rows_of(way: str, runs: Sequence[Run]) -> list[Row]:
    """The figures of one way over its repeats."""
    return [
        Row.of(f"{way}: the first step's data_s", "s", [run.first_seconds for run in runs]),
        Row.of(f"{way}: updt_s of the others", "s", [run.step_seconds for run in runs]),
        Row.of(f"{way}: data_s / step, after the first", "%", [100 * run.share for run in runs]),
        Row.of(f"{way}: data_s / step, of the whole run", "%", [100 * run.whole_share for run in runs]),
    ]


def trainer_dataset(width: int) -> Path:
    """Two cameras, H.264, in one file each; made at the first call."""

    def make(path: Path) -> None:
        write_dataset(
            path,
            episodes=EPISODES,
            length=LENGTH,
            width=width,
            height=width * 3 // 4,
            codec="h264",
            gop=2,
            episodes_per_video_file=EPISODES,
            texture=TEXTURE,
            distinct_videos=8,
        )
        _copy_state(path)

    return made_once(f"trainer-{width}", make)


def _copy_state(root: Path) -> None:
    for file in root.glob("data/*/*.parquet"):
        table = pq.read_table(file)
        pq.write_table(table.append_column(ENVIRONMENT, table["observation.state"]), file)
    info, stats = root / "meta/info.json", root / "meta/stats.json"
    described, known = json.loads(info.read_text()), json.loads(stats.read_text())
    for features in (described["features"], known):
        features[ENVIRONMENT] = features["observation.state"]
    info.write_text(json.dumps(described))
    stats.write_text(json.dumps(known))


def train(way: str, hub: HubServer, root: Path, *, arguments: Sequence[str]) -> Run:
    """One run, which finds the dataset's metadata on the disk and all else at the Hub."""
    command, workers = WAYS[way]
    with tempfile.TemporaryDirectory() as home:
        shutil.copytree(root / "meta", Path(home) / "lerobot/org/name/meta")
        variables = {"HF_HOME": home, "HF_LEROBOT_HOME": f"{home}/lerobot", "HF_ENDPOINT": hub.url}
        variables |= {"SSL_CERT_FILE": str(hub.ca_file), "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_XET": "1"}
        data = ["--dataset.repo_id=org/name", "--dataset.streaming=true", f"--num_workers={workers}"]
        output = ["--log_freq=1", "--save_checkpoint=false", f"--output_dir={home}/out"]
        ended = subprocess.run(
            [*command, *TINY_ACT, *data, *output, *arguments],
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    if ended.returncode:
        raise SystemExit(f"{way} ended with exit code {ended.returncode}:\n{ended.stdout[-3000:]}")
    return Run.of(ended.stdout)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--width", type=int, default=320, help="of pictures (default: 320)")
    parser.add_argument("--pictures", action="store_true", help="have the policy see them")
    parser.add_argument("--device", default="cpu", help="that trains (default: cpu)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    chosen, others = parser.parse_known_args(arguments)
    root = trainer_dataset(chosen.width)
    pace = Fault.slow(first_byte_seconds=FIRST_BYTE_SECONDS, bytes_per_second=RATE_BYTES)
    asked = [f"--policy.device={chosen.device}", f"--batch_size={chosen.batch_size}", f"--steps={chosen.steps}"]
    asked += [*([] if chosen.pictures else ON_STATES), *others]
    runs: dict[str, list[Run]] = {way: [] for way in WAYS}
    with HubServer(fault=lambda _: Fault.slow(first_byte_seconds=FIRST_BYTE_SECONDS), cdn_fault=lambda _: pace) as hub:
        files = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for revision in ("main", "v3.0"):
            hub.push("datasets/org/name", files, revision)
        turns = [way for _ in range(chosen.repeats) for way in random.sample(list(WAYS), len(WAYS))]
        for way in track(turns, "training", console=Console(stderr=True), transient=True):
            runs[way].append(train(way, hub, root, arguments=asked))
    show([row for way, those in runs.items() for row in rows_of(way, those)], as_json=chosen.json)


if __name__ == "__main__":
    main()
