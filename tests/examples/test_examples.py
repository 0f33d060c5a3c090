"""Every example as its user runs it: a program of its own, warnings being errors."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import numpy as np
import pytest

from asyncfetch.testing import Fault, RangeServer, write_dataset
from asyncfetch.testing.clips import ENCODINGS, encode_clip
from tests.videos.shards import shard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncfetch.testing import DatasetTruth, ServedRequest

pytestmark = pytest.mark.usefixtures("programs_are_warm")

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(
    name: str, *arguments: str | os.PathLike[str], launcher: Sequence[str] = (sys.executable,), warnings: str = "error"
) -> str:
    """What the example prints."""
    # The working copy is importable where it isn't installed.
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "PYTHONWARNINGS": warnings, "COLUMNS": "120"}
    ended = subprocess.run(
        [*launcher, EXAMPLES / name, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture
def served(https_server: RangeServer) -> tuple[str, ...]:
    """The arguments that name the small dataset on its server."""
    assert https_server.ca_file is not None
    return https_server.url, "--ca-file", https_server.ca_file


@pytest.mark.slow
def test_quickstart_writes_serves_and_streams_a_dataset(tmp_path: Path) -> None:
    printed = run("quickstart.py", "--cache-directory", tmp_path)
    assert "each of 4,800 frames exactly once" in printed
    for figure in ("samples/s", "camera frames/s", "time to the first batch", "bytes fetched", "requests"):
        assert re.search(rf"{figure} +│ +[1-9\d.]", printed), (figure, printed)
    # No byte is read twice, though parts of segments of this epoch and of the next one are asked for.
    fetched = re.search(r"bytes fetched +│ +([\d.]+) MiB", printed)
    assert fetched is not None
    dataset_bytes = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert 0.9 < float(fetched[1]) * 2**20 / dataset_bytes < 1.1  # with what comes beside indexes
    assert [path.name.split("-")[0] for path in tmp_path.iterdir()] == ["quickstart"]  # kept for the next time, whole


def test_quickstart_beside_another_takes_the_first_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_dataset = runpy.run_path(str(EXAMPLES / "quickstart.py"))["small_dataset"]

    def write(root: Path, **_: object) -> DatasetTruth:
        write_dataset(tmp_path / root.name, episodes=0)
        return write_dataset(root, episodes=0)

    monkeypatch.setattr("asyncfetch.testing.write_dataset", write)
    root = small_dataset(tmp_path)
    assert list(tmp_path.iterdir()) == [root]


def test_quickstart_shows_any_name_as_it_is_but_no_secret(small_dataset: DatasetTruth, tmp_path: Path) -> None:
    name = "[red]/o[/b]"  # rich's markup
    shutil.copytree(small_dataset.root, tmp_path / name)
    with RangeServer(tmp_path, tls=False) as server:
        printed = run("quickstart.py", f"{server.url}/{name}".replace("//", "//bob:hunter2@", 1))
        shown = f"{server.url}/{name}".replace("//", "//***@", 1)
    assert printed.startswith(f"{shown}: {small_dataset.num_episodes} episodes, ")
    assert "hunter2" not in printed


def test_an_interrupted_quickstart_ends_in_silence(small_dataset: DatasetTruth) -> None:
    asked = Event()

    def stall(_: ServedRequest) -> Fault:
        asked.set()
        return Fault.stall(None)

    hears = "signal.signal(signal.SIGINT, signal.default_int_handler)"  # a shell's background jobs are born deaf to it
    program = f"import runpy, signal, sys; {hears}; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    with RangeServer(small_dataset, tls=False, fault=stall) as server:
        command = [sys.executable, "-c", program, str(EXAMPLES / "quickstart.py"), server.url]
        environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
            asked.wait()
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate()
    assert (process.returncode, errors) == (130, "")


@pytest.mark.parametrize(
    ("name", "arguments", "code", "message"),
    [
        ("quickstart.py", ["nowhere"], 1, "^quickstart: .*nowhere"),
        (
            "quickstart.py",
            ["--cache-directory", "file/cache"],
            1,
            r"^quickstart: .* written to file/cache \(.*directory.*\); name another --cache-directory",
        ),
        ("own_ranges.py", ["--record-bytes", "0"], 2, "--record-bytes must be at least 1, not 0$"),
        ("train_policy.py", ["dataset", "--batch-size", "1000"], 1, "no 1000 frames, .*: take a smaller --batch-size$"),
    ],
    ids=["dataset", "cache", "record", "batch"],
)
def test_examples_say_in_a_line_what_is_wrong(
    small_dataset: DatasetTruth, tmp_path: Path, name: str, arguments: list[str], code: int, message: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dataset").symlink_to(small_dataset.root)
    ended = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == code
    *usage, line = ended.stderr.splitlines()
    assert all("[-h]" in shown or shown.startswith(" ") for shown in usage)
    assert re.search(message, line), line


def test_quickstart_sums_up_what_its_workers_did(served: tuple[str, ...], small_dataset: DatasetTruth) -> None:
    printed = run("quickstart.py", *served, "--num-workers", "2")
    assert f"each of {small_dataset.num_frames} frames exactly once" in printed
    # Frames are dealt to the workers one by one, so both may read an episode, which lanes may part.
    misses = re.search(r"0 hits, (\d+) misses", printed)
    assert misses is not None
    lanes = 3  # of 4 segments
    assert small_dataset.num_episodes <= int(misses[1]) <= 2 * (small_dataset.num_episodes + lanes - 1)


def test_async_pipeline_reads_every_frame(served: tuple[str, ...], small_dataset: DatasetTruth) -> None:
    printed = run("async_pipeline.py", *served)
    even, odd = sum(small_dataset.lengths[::2]), sum(small_dataset.lengths[1::2])
    assert re.search(rf"^samples +{small_dataset.num_frames}$", printed, re.MULTILINE)
    assert f"pick: {even} samples\nplace: {odd} samples" in printed


def test_dataloader_trains_for_all_epochs(served: tuple[str, ...], small_dataset: DatasetTruth) -> None:
    printed = run("dataloader.py", *served, "--epochs", "2", "--num-workers", "1")
    losses = re.findall(rf"epoch \d: {small_dataset.num_frames} samples, mean loss ([\d.]+)", printed)
    assert len(losses) == 2
    assert float(losses[1]) < float(losses[0])


def test_own_ranges_come_once_and_then_from_the_cache() -> None:
    record_bytes = 400_000  # too long for two of them to share a request, and too short to be cut
    first, second = run("own_ranges.py", "--record-bytes", str(record_bytes)).splitlines()
    assert "84 records" in first
    assert "85 requests, 32.0 MiB, 0 hits, 84 misses" in first  # one for the file's size
    assert "85 requests, 32.0 MiB, 84 hits, 84 misses" in second
    assert first.split("so far")[0].removeprefix("pass 1") == second.split("so far")[0].removeprefix("pass 2")


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_training_on_tars_learns_and_names_what_it_left_out(workers: str) -> None:
    brighter = [np.full((32, 48, 3), 8 * frame, np.uint8) for frame in range(30)]
    clip = encode_clip(brighter, encoding=ENCODINGS["h264"], fps=10, gop=10)
    videos = [{"__key__": f"{number:03d}", "mp4": clip, "txt": "it gets brighter"} for number in range(12)]
    files = {"/000.tar": shard(videos[:6]), "/001.tar": shard([*videos[6:], {"__key__": "bad", "mp4": bytes(9999)}])}
    with RangeServer(files) as server:
        assert server.ca_file is not None
        options = ("--ca-file", server.ca_file, "--num-workers", workers, "--epochs", "3")
        printed = run("train_on_tars.py", f"{server.url}/{{000..001}}.tar", *options)
    losses = re.findall(r"epoch \d: 24 clips, mean loss ([\d.]+)", printed)
    assert len(losses) == 3
    assert float(losses[2]) < 0.8 * float(losses[0]), losses
    assert "left out: https://" in printed
    assert "/001.tar: " in printed
    assert "samples/s" in printed


def test_every_example_is_tested() -> None:
    tested = {
        *("quickstart.py", "async_pipeline.py", "dataloader.py", "own_ranges.py", "train_policy.py"),
        "train_on_tars.py",
        *("lightning_checkpoints.py", "transformers_trainer.py"),
    }
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


@pytest.mark.slow
def test_a_policy_that_was_stopped_goes_on_with_the_same_losses(served: tuple[str, ...], tmp_path: Path) -> None:
    def train(*arguments: str | os.PathLike[str]) -> list[str]:
        return run("train_policy.py", *served, *arguments).splitlines()

    whole = train("--steps", "100")
    assert len(whole) == 5
    first, last = (float(line.split()[-1]) for line in (whole[0], whole[-1]))
    assert last < first / 2
    checkpoint = tmp_path / "policy.pt"
    stopped = train("--steps", "100", "--stop-after", "73", "--checkpoint", checkpoint)  # within an epoch
    resumed = train("--steps", "100", "--checkpoint", checkpoint, "--num-workers", "2", "--plot", tmp_path / "loss.png")
    assert stopped + resumed == whole
    assert (tmp_path / "loss.png").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_lightning_goes_on_in_the_middle_of_an_epoch(
    served: tuple[str, ...], small_dataset: DatasetTruth, tmp_path: Path, workers: str
) -> None:
    pytest.importorskip("pytorch_lightning")

    def train(*arguments: str | os.PathLike[str]) -> list[str]:
        options = ("--num-workers", workers, "--checkpoint", tmp_path / "policy.ckpt", *arguments)
        printed = run("lightning_checkpoints.py", *served, *options, warnings="ignore")  # Lightning's and torchdata's
        steps, frames = printed.splitlines()[-1].split(", frames ")
        return [steps, *frames.split()]

    first, *before = train("--stop-after", "7")
    last, *after = train()
    assert (first, last) == ("to step 7", f"to step {small_dataset.num_frames // 8}")
    assert before[40:] == after[:16]  # the checkpoint is of step 5
    assert len(before) == 56
    frames = before[:40] + after
    assert len(set(frames)) == len(frames) == small_dataset.num_frames // 8 * 8


@pytest.mark.slow
@pytest.mark.usefixtures("nested_programs_are_warm")
@pytest.mark.parametrize("workers", ["0", "2"])
def test_transformers_trainer_has_frames_once_in_two_processes(
    served: tuple[str, ...], small_dataset: DatasetTruth, workers: str
) -> None:
    pytest.importorskip("transformers", reason="it takes 140 MB; `pip install transformers` for this test")
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    printed = run("transformers_trainer.py", *served, "--num-workers", workers, launcher=launcher, warnings="ignore")
    shares = re.findall(r"^process \d of 2: .*, frames (.*)$", printed, re.MULTILINE)
    assert [len(share.split()) for share in shares] == [small_dataset.num_frames // 2] * 2
    assert len(set(" ".join(shares).split())) == small_dataset.num_frames
