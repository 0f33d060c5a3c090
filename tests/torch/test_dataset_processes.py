"""Batches out of other processes: those that this one makes, whatever is asked of them, and as safe to hold."""

from __future__ import annotations

import gc
import itertools
import os
import signal
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader

import asyncfetch as af
from asyncfetch.stream import handing_over
from asyncfetch.testing import write_dataset
from tests.torch.test_dataset_batches import STEPS, TOP, WRIST, assert_alike, mapped_slots

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from asyncfetch.stream.epoch_stream import EpochStream
    from asyncfetch.testing import DatasetTruth

pytestmark = [
    pytest.mark.usefixtures("programs_are_warm"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning", "ignore:This DataLoader will create"),
]
SIZE = 4
MIB = 2**20
WAYS = ("worker", "workers", "served")


@dataclass
class Case:
    """What is read, and how."""

    sources: tuple[str, ...] = ("good",)
    stream: dict[str, Any] = field(default_factory=dict)
    mixture: dict[str, Any] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    dataset: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1

    def source(self, roots: dict[str, Path]) -> EpochStream:
        config = af.StreamConfig(pool_segments=4, **self.config)
        if self.mixture is None:
            return af.Stream(str(roots[self.sources[0]]), config=config, **self.stream)
        streams = [af.Stream(str(roots[name]), **self.stream) for name in self.sources]
        return af.Mixture(streams, [1] * len(streams), config=config, **self.mixture)


def brighter(sample: dict[str, Any]) -> dict[str, Any]:
    return {"mean": sample[TOP].float().mean(), "index": sample["index"], "task": sample["task"]}


def only_indices(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"index": torch.stack([sample["index"] for sample in samples]), "number": len(samples)}


def indices(batches: list[Any]) -> tuple[int, set[int]]:
    """How many samples there are, and of which frames."""
    found = [index for batch in batches for index in batch["index"].tolist()]
    return len(found), set(found)


CASES = {
    "windows": Case(stream={"windows": {TOP: af.frames(-1, 0), "action": af.frames(0, 1)}}),
    "drop_last": Case(dataset={"drop_last": True}),
    "drop": Case(ranks=2, config={"uneven_ends": "drop"}),
    "pad": Case(ranks=2, config={"uneven_ends": "pad"}),
    "skip": Case(("broken",), config={"on_error": "skip"}),
    "replace": Case(("broken",), config={"on_error": "replace"}),
    "transform": Case(stream={"transform": brighter}),
    "collate": Case(dataset={"collate_fn": only_indices}),
    "of one member": Case(("good", "wide"), {"features": [TOP]}, {}),
    "of several members": Case(("good", "wide"), {"features": ["action", "observation.state"]}, {}),
    "of a bad member": Case(("broken", "wide"), {"features": [TOP]}, {}, {"on_error": "skip"}),
}


@pytest.fixture(scope="module")
def roots(truth: DatasetTruth, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("ways")
    write_dataset(folder / "broken", episodes=(5, 9, 1, 12, 7, 3), width=64, height=64, episodes_per_video_file=1)
    next((folder / f"broken/videos/{TOP}").glob("*/file-003.mp4")).unlink()
    write_dataset(folder / "wide", episodes=(6, 5, 9), width=96, height=64)
    return {"good": truth.root, "broken": folder / "broken", "wide": folder / "wide"}


@contextmanager
def batches_of(source: EpochStream, way: str, size: int = SIZE, **options: Any) -> Iterator[Any]:  # noqa: ANN401
    """Batches as a trainer gets them."""
    if way == "served":
        with af.serve_samples(source, size, **options) as batches:
            yield batches
    else:
        workers = ("here", "worker", "workers").index(way)
        dataset = af.torch.StreamDataset(source, size, **options)
        context = "fork" if workers else None
        yield DataLoader(
            dataset, None, num_workers=workers, persistent_workers=workers > 0, multiprocessing_context=context
        )


@pytest.mark.parametrize(
    ("name", "way"),
    [
        (name, way)
        for name, case in CASES.items()
        for way in WAYS
        if way != "served" or "collate_fn" not in case.dataset
    ],
)
def test_batches_are_those_of_one_process(
    roots: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str, way: str
) -> None:
    case = CASES[name]
    monkeypatch.setenv("RANK", str(case.ranks - 1))
    monkeypatch.setenv("WORLD_SIZE", str(case.ranks))
    here = case.source(roots)
    expected = list(af.torch.StreamDataset(here, SIZE, **case.dataset))
    there = case.source(roots)
    with batches_of(there, way, **case.dataset) as batches:
        given = list(batches)
        assert there.quarantine.samples == here.quarantine.samples
        assert bool(here.quarantine.episodes()) == ("broken" in case.sources)
    if way == "workers" and name in {"skip", "replace"}:  # each has samples of its own before a bad one
        assert indices(given) == indices(expected)
    else:
        assert len(given) == len(expected)
        for batch, like in zip(given, expected, strict=True):
            assert_alike(batch, like)
    here.close()
    there.close()


@pytest.mark.parametrize("way", ["here", *WAYS])
def test_a_bad_sample_is_raised_at_its_batch(roots: dict[str, Path], way: str) -> None:
    source = Case(("broken",), {"shuffle": False}).source(roots)
    given = []
    with batches_of(source, way) as batches, pytest.raises(af.NotFound, match="file-003"):  # noqa: PT012
        for batch in batches:
            given += batch["index"].tolist()
    assert given == list(range(12))  # of fifteen good ones before it
    source.close()


@pytest.mark.parametrize("way", ["here", *WAYS])
@pytest.mark.parametrize("name", ["windows", "transform", "of one member"])
def test_a_state_goes_on_in_the_middle(roots: dict[str, Path], name: str, way: str) -> None:
    case, taken = CASES[name], 3
    whole = case.source(roots)
    expected = list(af.torch.StreamDataset(whole, SIZE))
    before, after = case.source(roots), case.source(roots)
    with batches_of(before, way) as batches:
        list(itertools.islice(batches, taken))
        if way == "served":
            state = batches.state_dict()
        else:
            state = batches.dataset.state_after(taken, num_workers=batches.num_workers)
    after.load_state_dict(state)
    with batches_of(after, way) as batches:
        for batch, like in zip(batches, expected[taken:], strict=True):
            assert_alike(batch, like)
    for source in (whole, before, after):
        source.close()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["worker", "served"])
def test_memory_is_flat_on_both_sides_if_batches_are_kept(
    truth: DatasetTruth, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(handing_over, "MAX_COPIED_BYTES", 1000)  # these pictures come as large ones do
    stream = af.Stream(str(truth.root), features=[TOP], config=af.StreamConfig(pool_segments=4))
    kept: deque[Any] = deque(maxlen=4)
    slots, taken = set(), []
    with batches_of(stream, way, 2) as batches:
        passes = itertools.chain.from_iterable(itertools.repeat(batches))
        for step, batch in enumerate(itertools.islice(passes, STEPS)):
            if step % 10 == 0:
                kept.append((batch, batch[TOP].clone()))
            if step % 100 == 0:
                assert all(torch.equal(held[TOP], like) for held, like in kept)
                slots.add(mapped_slots())
            if step in {STEPS // 2, STEPS - 1}:
                gc.collect()
                me = psutil.Process()
                taken.append(sum(each.memory_info().rss for each in (me, *me.children())))
        assert max(slots) < 24
        assert taken[1] - taken[0] < 16 * MIB
    stream.close()


def test_killed_process_of_serve_samples_leaves_held_memory(
    truth: DatasetTruth, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handing_over, "MAX_COPIED_BYTES", 1000)
    stream = af.Stream(str(truth.root), config=af.StreamConfig(pool_segments=4))
    with af.serve_samples(stream, SIZE) as batches:
        passes = itertools.chain.from_iterable(itertools.repeat(batches))
        held = next(passes)
        like = held[WRIST].clone()
        os.kill(batches.pid, signal.SIGKILL)
        with pytest.raises(af.WorkerError, match="SIGKILL"):
            list(passes)
        assert torch.equal(held[WRIST], like)
        assert mapped_slots()
    del held, passes, batches
    gc.collect()
    assert not mapped_slots()
    stream.close()
