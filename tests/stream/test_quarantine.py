"""Bad data: left out or replaced, the same each time, and listed."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import shutil
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from torch.utils.data import DataLoader

import asyncfetch as af
import asyncfetch.torch
from asyncfetch.stream import Placement
from asyncfetch.stream.epoch_stream import source_of
from asyncfetch.stream.quarantine import BOARD_BYTES, BOARD_EPISODES, Board, Quarantine, Quarantined, Substitutes
from asyncfetch.testing import RangeServer
from tests.lerobot.serving import renumbered

if TYPE_CHECKING:
    from pathlib import Path

    from asyncfetch.formats import Stretch
    from asyncfetch.testing import DatasetTruth

TOP = "observation.images.top"
BAD = range(15, 27)
"""Frames of the episode whose video is gone."""


@pytest.fixture
def broken(truth: DatasetTruth, tmp_path: Path) -> str:
    """The dataset without the video of episode 3."""
    root = tmp_path / "broken"
    shutil.copytree(truth.root, root)
    next((root / f"videos/{TOP}").glob("*/file-003.mp4")).unlink()
    return str(root)


def make(source: str, on_error: str, **options: Any) -> af.Stream:  # noqa: ANN401
    # PyAV, because torchcodec takes seconds to import, and each spawned process imports it.
    config = af.StreamConfig(
        pool_segments=2,
        decode_threads=2,
        decoder="pyav",
        on_error=on_error,  # type: ignore[arg-type]
    )
    return af.Stream(source, config=config, features=[TOP], **options)


def indices(samples: Any) -> list[int]:  # noqa: ANN401
    return [int(sample["index"]) for sample in samples]


def test_raised_by_default(broken: str) -> None:
    stream = make(broken, "raise")
    with pytest.raises(af.NotFound):
        list(stream)
    assert stream.quarantine.episodes() == ()
    stream.close()


def test_left_out_and_listed(broken: str, truth: DatasetTruth, caplog: pytest.LogCaptureFixture) -> None:
    stream, whole = make(broken, "skip"), make(str(truth.root), "raise")
    with caplog.at_level(logging.WARNING, logger="asyncfetch.stream"):
        assert indices(stream) == [index for index in indices(whole) if index not in BAD]
    (bad,) = stream.quarantine.episodes()
    assert (bad.episode, bad.samples, stream.quarantine.samples) == (3, len(BAD), len(BAD))
    assert bad.file.endswith("file-003.mp4")
    assert bad.cause.startswith("NotFound: ")
    assert len(caplog.records) == 1  # an episode, not a sample
    assert stream.epoch == 1
    for each in (stream, whole):
        each.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_data_that_is_mended_comes_in_the_next_epoch(broken: str, truth: DatasetTruth, workers: int) -> None:
    """Also where the pass before had fetched the episode ahead for it, in vain."""
    stream = make(broken, "skip")
    loader = DataLoader(
        af.torch.StreamDataset(stream, batch_size=4),
        batch_size=None,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    assert len([index for batch in loader for index in batch["index"]]) == truth.num_frames - len(BAD)
    name = f"videos/{TOP}/chunk-000/file-003.mp4"
    shutil.copy(truth.root / name, f"{broken}/{name}")
    assert sorted(int(index) for batch in loader for index in batch["index"]) == [*range(truth.num_frames)]
    assert stream.quarantine.samples == len(BAD)
    stream.close()


def test_a_pass_after_one_that_raised_asks_anew(broken: str, truth: DatasetTruth) -> None:
    stream = make(broken, "raise")
    seen: list[int] = []
    with pytest.raises(af.NotFound):
        seen.extend(int(sample["index"]) for sample in stream)
    state = stream.state_dict()
    name = f"videos/{TOP}/chunk-000/file-003.mp4"
    shutil.copy(truth.root / name, f"{broken}/{name}")
    stream.load_state_dict(state)
    seen.extend(indices(stream))
    assert sorted(seen) == [*range(truth.num_frames)]
    stream.close()


def test_a_dataset_that_was_not_there_is_opened_anew(truth: DatasetTruth, tmp_path: Path) -> None:
    root = tmp_path / "late"
    stream, frames = make(str(root), "raise"), af.torch.FrameDataset(str(root))
    for _ in range(2):
        with pytest.raises(af.NotFound):
            next(iter(stream))
        with pytest.raises(af.NotFound):
            len(frames)
    shutil.copytree(truth.root, root)
    assert sorted(indices(stream)) == [*range(truth.num_frames)]
    assert len(frames) == truth.num_frames
    stream.close()
    frames.close()


def test_listed_by_its_own_number(truth: DatasetTruth, tmp_path: Path) -> None:
    """Which is one of Python's, as a report of it in JSON needs it."""
    root = renumbered(truth, tmp_path / "gaps", (None, 1, None, 10**6, None, 5, None, None))
    next((root / f"videos/{TOP}").glob("*/file-003.mp4")).unlink()
    stream = make(str(root), "skip")
    assert sorted(indices(stream)) == [*range(5, 14), *range(34, 37)]
    (bad,) = stream.quarantine.episodes()
    assert json.loads(json.dumps([bad.episode, bad.samples])) == [10**6, len(BAD)]
    stream.close()
    for unknown in (0, 3, 7):  # one that was taken out, and those between
        stream = make(str(root), "skip", episodes=[5, unknown, 10**6])
        with pytest.raises(af.EpisodeNotFound, match=f"no episode {unknown}; it has 1 to 1000000, but only 3 of"):
            next(iter(stream))
        stream.close()


def test_replaced_by_the_good_sample_before_it(broken: str, truth: DatasetTruth) -> None:
    stream, whole = make(broken, "replace"), make(str(truth.root), "raise")
    samples = list(stream)
    expected: list[int] = []
    waiting = 0
    for index in indices(whole):
        if index not in BAD:
            expected += [index] * (waiting + 1)
            waiting = 0
        elif expected:
            expected.append(expected[-1])
        else:
            waiting += 1
    assert indices(samples) == expected
    assert len({sample[TOP].data_ptr() for sample in samples}) == len(expected)  # each is the consumer's own
    assert stream.quarantine.samples == len(BAD)
    for each in (stream, whole):
        each.close()


def test_bad_first_samples_are_replaced_by_the_first_good_one(broken: str) -> None:
    stream = make(broken, "replace", shuffle=False, episodes=[3, 1])
    assert indices(stream) == [5] * len(BAD) + list(range(5, 14))
    stream.close()


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_error_is_raised_if_all_samples_are_bad(broken: str, on_error: str) -> None:
    stream = make(broken, on_error, episodes=[3])
    with pytest.raises(af.NotFound, match="file-003"):
        list(stream)
    assert stream.epoch == 0
    stream.close()


SHARES = [Placement(worker=worker, workers=2, block_samples=len(BAD)) for worker in range(2)]
"""Of episodes 3 and 1, without shuffling: to the first one only what is bad."""


def test_member_without_good_samples_has_nothing(broken: str) -> None:
    stream = make(broken, "skip", shuffle=False, episodes=[3, 1])
    assert [indices(source_of(stream).iterate(share, epoch=0)) for share in SHARES] == [[], list(range(5, 14))]
    (bad,) = stream.quarantine.episodes()
    assert (bad.episode, bad.samples) == (3, len(BAD))
    stream.close()


def test_worker_without_good_samples_raises_an_error(broken: str) -> None:
    stream = make(broken, "replace", shuffle=False, episodes=[3, 1])
    message = 'rank 0 of 1, worker 0 of 2 got no good sample .* NotFound: .*file-003.* on_error="skip"'
    with pytest.raises(af.DatasetError, match=message) as caught:
        list(source_of(stream).iterate(SHARES[0], epoch=0))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert indices(source_of(stream).iterate(SHARES[1], epoch=0)) == list(range(5, 14))
    stream.close()


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning", "ignore:This DataLoader will create")
def test_loader_goes_on_though_a_worker_finds_no_good_sample(broken: str) -> None:
    stream = make(broken, "skip", shuffle=False, episodes=[3, 1])
    dataset = af.torch.StreamDataset(stream, batch_size=len(BAD))
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert [batch["index"].tolist() for batch in loader] == [list(range(5, 14))]
    assert (stream.epoch, stream.quarantine.samples) == (1, len(BAD))
    stream.close()


class Uncopied:
    """What a transform may put into a sample, and nobody can copy."""

    def __deepcopy__(self, memo: object) -> Uncopied:
        raise ValueError("there is one of me")


def test_good_samples_need_no_copies(truth: DatasetTruth) -> None:
    stream = make(str(truth.root), "replace", transform=lambda sample: {**sample, "resource": Uncopied()})
    assert sorted(indices(stream)) == list(range(truth.num_frames))
    assert stream.epoch == 1
    stream.close()


@pytest.mark.parametrize(("episodes", "good"), [([1, 3], 9), ([3, 1], 0)], ids=["bad ones behind", "bad ones in front"])
def test_replacement_that_can_not_be_copied_is_an_error(broken: str, episodes: list[int], good: int) -> None:
    options: dict[str, Any] = {"shuffle": False, "episodes": episodes}
    stream = make(broken, "replace", transform=lambda sample: {**sample, "resource": Uncopied()}, **options)
    samples = iter(stream)
    assert indices(next(samples) for _ in range(good)) == list(range(5, 5 + good))
    with pytest.raises(af.ConfigError, match=r'ValueError: there is one of me\. Let the transform .* on_error="skip"'):
        next(samples)
    assert samples.state_dict()["legs"][-1]["given"] == [[0, 1, [], [0, good, 9 + len(BAD)]]]
    stream.close()


@pytest.mark.parametrize("on_error", ["skip", "replace"])
@pytest.mark.parametrize("taken", [3, 11, 17])
def test_resumed_epoch_goes_on_as_if_it_had_not_been_stopped(broken: str, on_error: str, taken: int) -> None:
    stream = make(broken, on_error, shuffle=False, episodes=[1, 3, 5, 0])
    whole = indices(stream)
    samples = source_of(stream).iterate(Placement(), epoch=0)
    first = [int(next(samples)["index"]) for _ in range(taken)]
    stream.load_state_dict(samples.state_dict())
    rest = indices(source_of(stream).iterate(Placement(), epoch=0))
    assert len(first + rest) == len(whole)
    if on_error == "skip":
        assert first + rest == whole
    stream.close()


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_ranks_agree_on_what_is_bad(broken: str, on_error: str) -> None:
    streams = [make(broken, on_error) for _ in range(2)]
    ranks = [indices(source_of(stream).iterate(Placement(rank, 2), epoch=0)) for rank, stream in enumerate(streams)]
    assert not set(BAD) & {index for rank in ranks for index in rank}
    assert sum(stream.quarantine.samples for stream in streams) == len(BAD)
    for stream in streams:
        stream.close()


@pytest.mark.parametrize("error", [ValueError("mine"), af.NotFound("mine", url="https://host/of-the-transforms-own")])
def test_a_transforms_own_error_is_never_left_out(broken: str, error: Exception) -> None:
    def refuse(_: dict[str, Any]) -> dict[str, Any]:
        raise error

    stream = make(broken, "skip", transform=refuse, episodes=[0])
    with pytest.raises(type(error), match="mine"):
        next(iter(stream))
    assert stream.quarantine.samples == 0
    stream.close()


def test_a_host_that_goes_down_is_no_bad_data(truth: DatasetTruth) -> None:
    with RangeServer(truth.root) as server:
        fetch = af.FetchConfig(ca_file=server.ca_file, retry=af.RetryConfig(attempts=1))
        config = af.StreamConfig(
            pool_segments=1, prefetch_segments=0, decoded_max_bytes=1, on_error="skip", fetch=fetch
        )
        stream = af.Stream(server.url, config=config, shuffle=False)
        samples = iter(stream)
        next(samples)
    with pytest.raises(af.ConnectionFailed):
        list(samples)
    assert stream.quarantine.samples == 0
    stream.close()


def test_the_list_stays_in_its_process(broken: str) -> None:
    stream = make(broken, "skip")
    list(stream)
    assert pickle.loads(pickle.dumps(stream)).quarantine.episodes() == ()
    stream.close()


@pytest.mark.usefixtures("programs_are_warm")
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning", "ignore:This DataLoader will create")
def test_bad_data_found_by_loader_workers_is_listed(broken: str, truth: DatasetTruth, method: str) -> None:
    """A stream's that are forked, a mixture's that are spawned."""
    whole = list(range(truth.num_frames))
    members = [make(broken, "skip"), make(str(truth.root), "skip")]
    stream: af.Stream | af.Mixture = members[0]
    good = [(0, index) for index in whole if index not in BAD]
    if method == "spawn":
        stream = af.Mixture(members, [1, 1], stop_on=2 * len(whole))
        good += [(1, index) for index in whole]
    dataset = af.torch.StreamDataset(stream, batch_size=4)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=method)
    for times in (1, 2) if method == "fork" else (1,):
        seen = [place for batch in loader for place in places(batch)]
        assert sorted(seen) == good
        (bad,) = stream.quarantine.episodes()
        assert (bad.episode, bad.samples, stream.quarantine.samples) == (3, times * len(BAD), times * len(BAD))
        assert bad.file.endswith("file-003.mp4")
        assert bad.cause.startswith("NotFound: ")
    stream.close()


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_bad_data_found_by_workers_of_any_dataset_is_listed(broken: str) -> None:
    stream = make(broken, "skip")
    dataset, _ = af.torch.StreamDataset(stream), af.torch.StreamDataset(stream)
    list(DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="fork"))
    assert stream.quarantine.samples == len(BAD)
    stream.close()


def places(batch: Any) -> list[tuple[int, int]]:  # noqa: ANN401
    """(member, index) of its samples."""
    members = batch.get("dataset", [0] * len(batch["index"]))
    return [(int(member), int(index)) for member, index in zip(members, batch["index"], strict=True)]


@pytest.mark.usefixtures("programs_are_warm")
@pytest.mark.slow
def test_bad_data_found_by_serve_samples_is_listed(broken: str) -> None:
    stream = make(broken, "skip")
    with af.serve_samples(stream, 4) as batches:
        for times in (1, 2):
            assert not set(BAD) & {int(index) for batch in batches for index in batch["index"]}
            (bad,) = stream.quarantine.episodes()
            assert (bad.episode, bad.samples, stream.quarantine.samples) == (3, times * len(BAD), times * len(BAD))
    assert bad.file.endswith("file-003.mp4")


def test_board_lists_workers_episodes_and_counts_the_rest() -> None:
    memory = np.zeros(BOARD_BYTES, dtype=np.uint8)
    for episode in range(BOARD_EPISODES + 2):
        Board(memory).write(1, Quarantined(episode, "x/" * 200 + "file-003.mp4", "NotFound: " + "y" * 1000))
    Board(memory).write(63, Quarantined(0, "file", "cause", samples=2))
    Board(memory).write(64, Quarantined(0, "file", "cause"))
    listed, unnamed = Board(memory).read()
    assert [found.episode for found in listed] == [*range(BOARD_EPISODES), 0]
    assert unnamed == 2
    assert listed[0].file.endswith("/file-003.mp4")
    quarantine = Quarantine()
    quarantine.share(Board(memory))
    assert quarantine.episodes()[0].samples == 3
    assert quarantine.samples == BOARD_EPISODES + 2 + 2


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(af.ConfigError, match="on_error"):
        make("x", "ignore")


async def test_the_next_epoch_finds_its_first_episodes(truth: DatasetTruth) -> None:
    config = af.StreamConfig(pool_segments=1, prefetch_segments=1)  # of one lane: no epoch cuts an episode
    async with af.open_dataset(str(truth.root), config=config) as dataset:
        source = af.Stream(dataset, episodes=[0, 1, 3, 5])
        async with source.samples() as samples:
            assert len([sample async for sample in samples]) == 29
        before = dataset.statistics().episodes
        async with source.samples() as samples:
            await anext(samples)
            after = dataset.statistics().episodes
    assert after.misses == before.misses
    assert after.hits > before.hits


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_a_rest_of_which_nothing_is_good_is_no_reason_to_stop(broken: str, on_error: str) -> None:
    stream = make(broken, on_error, shuffle=False, episodes=[1, 3])
    samples = iter(stream)
    assert indices(next(samples) for _ in range(9)) == list(range(5, 14))
    state = samples.state_dict()
    samples.close()
    stream.load_state_dict(state)
    assert set(indices(stream)) <= {13}
    assert stream.epoch == 1
    stream.close()


async def test_error_of_the_next_epoch_does_not_end_this_one(
    truth: DatasetTruth, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object, stretch: Stretch) -> None:
        raise af.DatasetError(f"nobody knows where {stretch} lies")

    async with af.open_dataset(str(truth.root)) as dataset, af.Stream(dataset).samples() as samples:
        monkeypatch.setattr(af.lerobot.EpisodeReader, "prefetch", refuse)
        assert len([sample async for sample in samples]) == sum(truth.lengths)


async def test_episodes_that_end_leave_their_room_to_the_next_epoch(
    truth: DatasetTruth, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(af.lerobot.EpisodeReader, "prefetch", lambda _, stretch: asked.append(stretch.episode))
    config = af.StreamConfig(pool_segments=4, prefetch_segments=0)
    async with (
        af.open_dataset(str(truth.root), config=config) as dataset,
        af.Stream(dataset, episodes=[0, 1, 3, 4]).samples() as samples,
    ):
        assert len([sample async for sample in samples]) == 33
        with anyio.fail_after(10):
            while any(task.get_name() == "prefetch the next epoch" for task in asyncio.all_tasks()):
                await anyio.lowlevel.checkpoint()
        assert samples.statistics().open_segments == 0
    assert asked  # the others were in memory yet, and aren't asked for
    assert set(asked) <= {0, 1, 3, 4}


def test_bad_samples_are_replaced_by_their_own_members() -> None:
    substitutes = Substitutes()
    assert substitutes.bad(0) == []
    assert substitutes.good({"member": 0}, 0) == [{"member": 0}] * 2  # and the one that waited
    given = substitutes.good({"member": 1}, 1)
    substitutes.keep()
    given[0]["member"] = "changed by the consumer"
    assert [substitutes.bad(member) for member in (0, 1, 2)] == [[{"member": 0}], [{"member": 1}], [{"member": 1}]]
