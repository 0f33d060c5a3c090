"""Who reads what, with real processes: launched, killed, forked and spawned."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import asyncfetch as af

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.end_to_end.conftest import Served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("programs_are_warm"),
    pytest.mark.filterwarnings(
        "ignore:.*use of fork:DeprecationWarning",
        "ignore:This DataLoader will create",
        "ignore:'set_vital' is deprecated:UserWarning",  # torchdata's own call
    ),
]

START_SECONDS = 60
"""For processes that import torch, several a core on a busy machine."""

PRELUDE = """
import json, os, sys, time, warnings
warnings.filterwarnings("ignore")  # torch's and torchdata's about each other
import torch.distributed, asyncfetch as af
from torch.utils.data import DataLoader
url, ca_file, folder, *arguments = sys.argv[1:]
config = af.StreamConfig(fetch=af.FetchConfig(ca_file=ca_file), pool_segments=4)
dataset = af.torch.StreamDataset(af.Stream(url, features=[], config=config))
streams = [af.Stream(url, features=[], seed=seed) for seed in range(2)]
mixture = af.torch.StreamDataset(af.Mixture(streams, [2, 1], stop_on=97, config=config))

def write(name, value):
    with open(os.path.join(folder, name + ".part"), "w") as file:
        json.dump(value, file)
    os.replace(file.name, os.path.join(folder, name))
"""

TRAIN = """
from torchdata.stateful_dataloader import StatefulDataLoader

if __name__ == "__main__":
    workers, batches, *paths = arguments
    torch.distributed.init_process_group("gloo")
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    stop = int(batches) + rank  # not all as far as each other
    saved = [json.load(open(path)) for path in paths]
    report = {"pid": os.getpid()}
    for name, dataset in {"stream": dataset, "mixture": mixture}.items():
        if saved:
            dataset.load_state_dict(af.torch.merge_states([each[name]["state"] for each in saved]))
        loader = StatefulDataLoader(dataset, batch_size=3, num_workers=int(workers), collate_fn=af.torch.collate)
        given = []
        for number, batch in enumerate(loader, 1):
            if number > stop:
                break  # this one was given in vain
            given += zip(batch.get("dataset", 0 * batch["index"]).tolist(), batch["index"].tolist())
            state = loader.state_dict()
        report[name] = {"given": given, "state": state}
    write(f"{world_size}-{rank}.json", report)
    time.sleep(600)  # to be killed
"""


@contextmanager
def launched(
    served: Served, folder: Path, world_size: int, script: str, *arguments: str
) -> Iterator[subprocess.Popen[str]]:
    """Ranks of a script, by torchrun, that may write to the folder; none of their processes stays."""
    (folder / "script.py").write_text(PRELUDE + textwrap.dedent(script))
    environment = {key: value for key, value in os.environ.items() if key not in {"RANK", "WORLD_SIZE"}}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    with subprocess.Popen(
        [*torchrun, str(folder / "script.py"), served.url, str(served.server.ca_file), str(folder), *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                kill_families(process.pid)


def kill_families(*pids: int) -> None:
    """Kill -9 of processes and all that they have started."""
    found = [psutil.Process(pid) for pid in pids]
    for each in [*found, *(child for process in found for child in process.children(recursive=True))]:
        with suppress(psutil.NoSuchProcess):  # torchrun ends the others when it sees one end
            each.kill()


def wait_for(paths: list[Path], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not all(path.exists() for path in paths):
        if process.poll() is not None:
            pytest.fail(process.communicate()[1])
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ranks_whose_hashes_have_different_seeds_share_one_order(served: Served, tmp_path: Path) -> None:
    """As processes that are started one by one have them; those of other tests may be forks of one."""
    (tmp_path / "script.py").write_text(
        PRELUDE + "found = [[int(sample['index']) for sample in each.stream] for each in (dataset, mixture)]\n"
        "write(os.environ['RANK'], [hash('a'), *found])\n"
    )
    command = [sys.executable, str(tmp_path / "script.py"), served.url, str(served.server.ca_file), str(tmp_path)]
    environment = os.environ | {"WORLD_SIZE": "2"}
    environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    ranks = [
        subprocess.Popen(command, env=environment | {"RANK": rank, "PYTHONHASHSEED": seed}, stderr=subprocess.PIPE)
        for rank, seed in (("0", "1"), ("1", "2"))
    ]
    assert [rank.communicate()[1] for rank in ranks] == [b"", b""]
    (first, *ours), (other, *theirs) = (json.loads((tmp_path / rank).read_text()) for rank in "01")
    assert first != other
    streams = [af.Stream(served.url, features=[], seed=seed) for seed in range(2)]
    mixture = af.Mixture(streams, [2, 1], stop_on=97, config=served.config())
    sources: list[af.Stream | af.Mixture] = [served.stream(features=[]), mixture]
    for source, mine, yours in zip(sources, ours, theirs, strict=True):
        assert sorted(mine + yours) == sorted(int(sample["index"]) for sample in source)


@pytest.mark.usefixtures("nested_programs_are_warm")
def test_killed_ranks_are_resumed_by_one_and_by_four(served: Served, tmp_path: Path) -> None:
    """With each rank of torchrun's at another batch when its state is written, and killed behind a later one.

    They read a stream, and then a mixture.
    """
    by_two = train_and_kill(served, tmp_path, 2, 2, 3)
    by_four = train_and_kill(served, tmp_path, 4, 1, 1, *map(str, tmp_path.glob("2-*.json")))
    streams = [af.Stream(served.url, features=[], seed=seed) for seed in range(2)]
    mixture = af.Mixture(streams, [2, 1], stop_on=97, config=served.config())
    sources: dict[str, af.Stream | af.Mixture] = {"stream": served.stream(features=[]), "mixture": mixture}
    for name, source in sources.items():
        expected = sorted(member_and_index(sample) for sample in source)
        begun: list[tuple[int, int]] = []
        for reports in (by_two, by_four):
            begun += [(member, index) for report in reports for member, index in report[name]["given"]]
            source.load_state_dict(af.torch.merge_states([report[name]["state"] for report in reports]))
            dataset = af.torch.StreamDataset(source)
            loader = StatefulDataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork")
            assert sorted(begun + [member_and_index(sample) for sample in loader]) == expected
        source.close()


def member_and_index(sample: Any) -> tuple[int, int]:  # noqa: ANN401
    return int(sample.get("dataset", 0)), int(sample["index"])


def train_and_kill(
    served: Served, folder: Path, world_size: int, workers: int, batches: int, *states: str
) -> list[dict[str, Any]]:
    """What ranks were given until they wrote their states, and these."""
    saved = [folder / f"{world_size}-{rank}.json" for rank in range(world_size)]
    with launched(served, folder, world_size, TRAIN, str(workers), str(batches), *states) as process:
        wait_for(saved, process)
        reports = [json.loads(path.read_text()) for path in saved]
        kill_families(*(report["pid"] for report in reports))
        assert process.wait(START_SECONDS) != 0
    return reports


@pytest.mark.usefixtures("nested_programs_are_warm")
def test_unprepared_loader_under_accelerate_counts_frames_once(served: Served, tmp_path: Path) -> None:
    script = """
    from accelerate import Accelerator

    if __name__ == "__main__":
        accelerator = Accelerator(cpu=True)
        assert accelerator.num_processes == 2
        for workers in (0, 2):
            loader = DataLoader(dataset, batch_size=4, num_workers=workers)
            indices = [index for batch in loader for index in batch["index"].tolist()]
            write(f"{workers}-{accelerator.process_index}.json", indices)
    """
    with launched(served, tmp_path, 2, script) as process:
        errors = process.communicate(timeout=START_SECONDS)[1]
    assert process.returncode == 0, errors
    for workers in (0, 2):
        shares = [json.loads((tmp_path / f"{workers}-{rank}.json").read_text()) for rank in range(2)]
        assert sorted(shares[0] + shares[1]) == list(range(len(served.keys)))
        assert len(shares[0]) == len(shares[1])


def read_in_child(source: str, config: af.StreamConfig, inherited: af.Stream, results: Any) -> None:  # noqa: ANN401
    """Epoch 0 by a stream of the child's own, by a loader of its own, and by the parent's stream."""
    results.send(indices_of(af.Stream(source, features=[], config=config)))
    dataset = af.torch.StreamDataset(af.Stream(source, features=[], config=config))
    results.send(indices_of(DataLoader(dataset, batch_size=None, num_workers=1)))
    results.send(indices_of(inherited))


def indices_of(samples: Any) -> list[int]:  # noqa: ANN401
    return [int(sample["index"]) for sample in samples]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_of_a_process_with_a_live_loop_reads_for_itself(served: Served, method: str) -> None:
    """It begins in the middle of the parent's pass, which goes on behind it. Torch's own threads run in the parent."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # whatever tests before it have set
    torch.ones(2**20).add_(1)
    stream = served.stream(features=[])
    whole = indices_of(stream)
    stream.set_epoch(0)
    samples = iter(stream)
    given = indices_of(itertools.islice(samples, 20))
    context: Any = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=read_in_child, args=(served.url, served.config(), stream, sender))
    child.start()
    sender.close()  # then a child that ended is heard of at once
    try:
        given += indices_of(itertools.islice(samples, 20))
        for _ in range(3):
            assert receiver.poll(START_SECONDS)
            assert receiver.recv() == whole
        child.join(START_SECONDS)
        assert child.exitcode == 0
    finally:
        child.kill()
        torch.set_num_threads(threads)
    assert given + indices_of(samples) == whole
    stream.close()


def place(sample: Any) -> tuple[int, int]:  # noqa: ANN401
    worker = get_worker_info()
    assert worker is not None
    return worker.id, int(sample["index"])


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    episodes=st.lists(st.sampled_from(range(12)), min_size=1, max_size=4, unique=True),
    seed=st.integers(0, 2**32),
    shuffle=st.booleans(),
    world_size=st.integers(1, 3),
    workers=st.integers(1, 4),
)
def test_no_worker_starves_and_every_frame_comes_once(
    served: Served, episodes: list[int], seed: int, shuffle: bool, world_size: int, workers: int
) -> None:
    """All rows are in one file, and there are fewer episodes than workers in most examples."""
    expected = sorted(index for index, (episode, _) in enumerate(served.keys) if episode in episodes)
    indices: list[int] = []
    shares: list[int] = []
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("WORLD_SIZE", str(world_size))
        for rank in range(world_size):
            environment.setenv("RANK", str(rank))
            dataset = af.torch.StreamDataset(served.stream(features=[], episodes=episodes, seed=seed, shuffle=shuffle))
            loader = DataLoader(
                dataset, batch_size=None, num_workers=workers, multiprocessing_context="fork", collate_fn=place
            )
            given = list(loader)
            assert len(given) == len(dataset)
            indices += [index for _, index in given]
            shares += [sum(worker == number for worker, _ in given) for number in range(workers)]
            dataset.stream.close()
    assert sorted(indices) == expected
    assert max(shares) - min(shares) <= 1
