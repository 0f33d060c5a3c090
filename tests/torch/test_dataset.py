"""A stream handed to a loader: pickling, shares, forks."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import pickle
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

import asyncfetch as af
from asyncfetch.config import config_share
from asyncfetch.prometheus import Collector
from asyncfetch.stream.epoch_stream import source_of
from asyncfetch.stream.ranks import found_placement
from asyncfetch.testing import write_dataset

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncfetch.formats import OpenFormat
    from asyncfetch.testing import DatasetTruth

pytestmark = [
    pytest.mark.usefixtures("programs_are_warm"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning", "ignore:This DataLoader will create"),
]


def indices(samples: Any) -> list[int]:  # noqa: ANN401
    return sorted(int(sample["index"]) for sample in samples)


def test_a_stream_pickles_as_what_to_read(truth: DatasetTruth) -> None:
    stream = af.Stream(str(truth.root), seed=7, windows={"action": af.frames(0, 1)}, episodes=[1, 3])
    stream.set_epoch(4)
    expected = [int(sample["index"]) for sample in stream]
    other = pickle.loads(pickle.dumps(stream))
    other.set_epoch(4)
    assert [int(sample["index"]) for sample in other] == expected
    assert repr(other) == f"Stream({str(truth.root)!r}, shuffle=True, seed=7, epoch=5)"
    stream.close()
    other.close()


@pytest.mark.parametrize(("size", "drop_last"), [(None, False), (4, False), (4, True)])
def test_loader_read_by_its_length_goes_on_to_the_next_epoch(
    truth: DatasetTruth, size: int | None, drop_last: bool
) -> None:
    """As Lightning does: it never asks whether there is more."""
    stream = af.Stream(str(truth.root), seed=3)
    loader = DataLoader(af.torch.StreamDataset(stream, size, drop_last=drop_last), batch_size=None)
    passes = [source_of(stream).iterate(found_placement(), epoch=epoch) for epoch in range(3)]
    expected = [[int(sample["index"]) for sample in samples] for samples in passes]
    assert truth.num_frames % 4
    for epoch in range(3):
        for batches in (1, len(loader)):  # left before its last batch, an epoch begins again
            indices = [
                index for batch in itertools.islice(loader, batches) for index in batch["index"].view(-1).tolist()
            ]
            assert indices == expected[epoch][: len(indices)]
    stream.close()


def test_a_repr_hides_secrets() -> None:
    stream = af.Stream("https://me:secret@example.org/data?token=secret")
    assert "secret" not in repr(stream) + repr(af.torch.StreamDataset(stream))


@pytest.mark.filterwarnings("ignore:Got pickle error:UserWarning")  # torch's own word on it, beside the error
def test_unpicklable_transform_is_named_and_leaves_no_process(truth: DatasetTruth) -> None:
    stream = af.Stream(str(truth.root), transform=lambda sample: sample)
    loader = DataLoader(af.torch.StreamDataset(stream), num_workers=2, multiprocessing_context="spawn")
    with pytest.raises(af.UsageError, match="lambda"):
        iter(loader)
    assert not multiprocessing.active_children()


def test_a_transform_need_not_pickle_for_forked_workers(truth: DatasetTruth) -> None:
    stream = af.Stream(str(truth.root), transform=lambda sample: {"index": sample["index"]})
    loader = DataLoader(af.torch.StreamDataset(stream), num_workers=1, multiprocessing_context="fork")
    assert indices(loader) == list(range(truth.num_frames))


async def test_an_open_dataset_can_not_follow_a_stream_into_workers(truth: DatasetTruth) -> None:
    async with af.open_dataset(str(truth.root)) as dataset:
        stream = af.Stream(dataset)
        with pytest.raises(af.ConfigError, match="URL"):
            af.torch.StreamDataset(stream)
        with pytest.raises(TypeError, match="URL"):
            pickle.dumps(stream)


def test_stream_is_read_in_parent_forked_workers_and_again(truth: DatasetTruth) -> None:
    stream = af.Stream(str(truth.root))
    loader = DataLoader(af.torch.StreamDataset(stream), batch_size=None, num_workers=2, multiprocessing_context="fork")
    unfinished = iter(stream)
    first = next(unfinished)
    for _ in range(2):
        assert indices(loader) == list(range(truth.num_frames))
    assert indices([first, *unfinished]) == list(range(truth.num_frames))
    assert indices(stream) == list(range(truth.num_frames))
    stream.close()


def test_a_forked_child_can_not_go_on_with_the_parents_iterator(truth: DatasetTruth) -> None:
    stream = af.Stream(str(truth.root))
    iterator = iter(stream)
    next(iterator)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def child() -> None:
        try:
            list(iterator)
        except af.WrongLoop as error:
            sender.send(str(error))

    process = context.Process(target=child)
    process.start()
    assert receiver.poll(10)
    assert "forked" in receiver.recv()
    process.join(10)
    stream.close()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda dataset: pickle.loads(pickle.dumps(dataset))])
def test_copy_older_than_its_rank_reads_that_ranks_part(
    truth: DatasetTruth,
    copied: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As launchers make it that pickle the dataset into the ranks."""
    stream = af.Stream(str(truth.root), features=[])
    expected = indices(source_of(stream).iterate(found_placement(1, 2), epoch=0))
    dataset = copied(af.torch.StreamDataset(stream))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="fork")
    for samples in (dataset, loader):
        dataset.set_epoch(0)
        assert indices(samples) == expected
    assert len(dataset) == len(expected)
    assert dataset.state_after(len(expected), num_workers=1)["legs"][-1]["world_size"] == 2
    dataset.stream.close()
    stream.close()


def test_workers_share_the_ranks_bounds_and_say_so(truth: DatasetTruth) -> None:
    config = af.StreamConfig(max_bytes=64 << 20, fetch=af.FetchConfig(max_requests_per_host=10), decode_threads=2)
    dataset = af.torch.StreamDataset(af.Stream(str(truth.root), config=config))
    loader = DataLoader(_WithStatistics(dataset), batch_size=None, num_workers=2, multiprocessing_context="fork")
    figures = [item for item in loader if "limit" in item]
    assert {figure["worker"] for figure in figures} == {0, 1}
    assert sorted(figure["limit"] for figure in figures) == [0, 10]  # one of them reads for both
    assert {figure["decoders"] for figure in figures} == {8 << 20}
    # Of what is for clips, three quarters are for those that both have; the rest and an eighth for tables are divided.
    assert sorted(figure["clips"] for figure in figures) == [5 << 20, 30 << 20]
    assert {figure["threads"] for figure in figures} == {1}
    together = dataset.statistics()  # of workers that have ended, who weren't asked
    assert together is not None
    (host,) = together.fetch.hosts.values()
    assert (host.limit, together.decode.threads) == (10, 2)
    assert host.bytes == together.fetch.bytes > 0
    report = dataset.report()
    assert report.waits.consumers == 2
    assert report.waits.samples == sum("limit" not in item for item in loader) == truth.num_frames
    shown = {sample.name: sample.value for metric in Collector(dataset.report).collect() for sample in metric.samples}
    assert shown["asyncfetch_consumer_samples_total"] == 2 * truth.num_frames  # of both passes


@pytest.mark.parametrize(("num_workers", "is_the_loaders"), [(0, False), (1, False), (1, True)])
def test_a_slow_collate_is_named_whoever_calls_it(truth: DatasetTruth, num_workers: int, is_the_loaders: bool) -> None:
    stream = af.Stream(truth.root, config=af.StreamConfig(fetch=af.FetchConfig(trust_env=False)))
    if is_the_loaders:
        dataset = af.torch.StreamDataset(stream)
        loader = DataLoader(dataset, batch_size=10, num_workers=num_workers, collate_fn=slowly)
    else:
        dataset = af.torch.StreamDataset(stream, batch_size=10, collate_fn=slowly)
        loader = DataLoader(dataset, batch_size=None, num_workers=num_workers)
    assert sum(loader) == truth.num_frames
    report = dataset.report()
    stream.close()
    assert report.waits.samples == truth.num_frames
    assert report.verdict.binds == "hand_over"


def slowly(samples: list[Any]) -> int:
    """Compute for a while, and tell how many there are."""
    until = time.thread_time() + 0.5
    while time.thread_time() < until:
        pass
    return len(samples)


def test_a_collate_needs_a_batch_size() -> None:
    with pytest.raises(af.ConfigError, match="give batch_size too"):
        af.torch.StreamDataset(af.Stream("/nowhere"), collate_fn=slowly)
    with pytest.raises(af.ConfigError, match="must be a function of a list of samples, or None, not 3"):
        af.torch.StreamDataset(af.Stream("/nowhere"), batch_size=2, collate_fn=3)  # type: ignore[arg-type]


class _WithStatistics(af.torch.StreamDataset):
    """The samples of a dataset, and behind them a worker's figures."""

    def __init__(self, dataset: af.torch.StreamDataset) -> None:
        super().__init__(dataset.stream)

    def __iter__(self) -> Any:  # noqa: ANN401
        yield from super().__iter__()
        figures = self.statistics()
        worker = get_worker_info()
        assert figures is not None
        assert worker is not None
        yield {
            "worker": worker.id,
            "limit": sum(host.limit for host in figures.fetch.hosts.values()),
            "clips": figures.clips.max_bytes,
            "decoders": figures.decoders.max_bytes,
            "threads": figures.decode.threads,
            "used": figures.clips.used_bytes + figures.clips.reserved_bytes,
        }


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> DatasetTruth:
    """Its clips are most of it."""
    root = tmp_path_factory.mktemp("clips") / "data"
    lengths = (10, 14, 12, 8, 16, 10, 9, 12, 14, 11)
    return write_dataset(root, episodes=lengths, width=192, height=192, texture=4.4, episodes_per_video_file=2)


@pytest.mark.slow  # spawned workers import torch, all at a time
@pytest.mark.parametrize(
    ("workers", "start", "batch_size"),
    [(2, "fork", 4), (3, "fork", None), (5, "fork", 4), (2, "spawn", 4), (3, "spawn", None)],
)
def test_workers_of_a_rank_fetch_each_byte_once(
    clips: DatasetTruth, workers: int, start: str, batch_size: int | None
) -> None:
    from asyncfetch.testing import RangeServer

    options: dict[str, Any] = {"pool_segments": 4, "decode_threads": 5}
    with RangeServer(clips.root, tls=False) as server:
        fetch = af.FetchConfig(hedge=None)
        stream = af.Stream(server.url, config=af.StreamConfig(fetch=fetch, **options))
        assert indices(source_of(stream).iterate(found_placement(), epoch=0)) == list(range(clips.num_frames))
        stream.close()
        needed_bytes = server.statistics().bytes_sent
        server.reset()
        loader = DataLoader(
            af.torch.StreamDataset(stream, batch_size),
            batch_size=None if batch_size else 4,
            num_workers=workers,
            multiprocessing_context=start,
            persistent_workers=True,
        )
        for _ in range(2):  # the second epoch finds it all in memory
            assert sorted(index for batch in loader for index in batch["index"].tolist()) == list(
                range(clips.num_frames)
            )
            assert server.statistics().bytes_sent == needed_bytes


@pytest.mark.parametrize("held", [10, 6, 2])
def test_workers_need_room_for_one_pool_and_for_overflow_each(clips: DatasetTruth, held: int) -> None:
    stream = af.Stream(str(clips.root))
    sizes = sorted(source_of(stream).session().thread.run(_sizes_of, source_of(stream).session().opened().datasets[0]))
    stream.close()
    # A quarter is for what finds no room in common.
    clips_bytes = sum(sizes[-held:]) * 4 // 3 + 4
    config = af.StreamConfig(max_bytes=clips_bytes * 8 // 5 + 8, pool_segments=4, prefetch_segments=0)
    loader = DataLoader(
        _WithStatistics(af.torch.StreamDataset(af.Stream(str(clips.root), config=config))),
        batch_size=None,
        num_workers=2,
        multiprocessing_context="fork",
    )
    if held == 2:
        with pytest.raises(af.CacheError, match="max_bytes"):
            list(loader)
        return
    items = list(loader)
    assert sorted(item["index"].item() for item in items if "index" in item) == list(range(clips.num_frames))
    assert sum(item["used"] for item in items if "used" in item) <= clips_bytes


async def _sizes_of(dataset: OpenFormat) -> list[int]:
    return [await dataset.reader.clip_bytes(episode) for episode in dataset.episodes(None)]


@pytest.mark.parametrize("limit", [2, 6])
def test_two_workers_never_exceed_the_ranks_limit_at_the_server(truth: DatasetTruth, limit: int) -> None:
    from asyncfetch.testing import RangeServer

    with RangeServer(truth.root, first_byte_seconds=0.1) as server:
        fetch = af.FetchConfig(ca_file=server.ca_file, max_requests_per_host=limit)
        stream = af.Stream(server.url, config=af.StreamConfig(fetch=fetch))
        loader = DataLoader(
            af.torch.StreamDataset(stream), batch_size=None, num_workers=2, multiprocessing_context="fork"
        )
        assert indices(loader) == list(range(truth.num_frames))
        assert server.statistics().peak_in_flight == limit


@pytest.mark.parametrize("name", ["max_requests_per_host", "decode_threads", "decoder_cache_size"])
def test_workers_beyond_a_limit_are_refused_with_both_numbers(name: str) -> None:
    fetch = {name: 1} if name == "max_requests_per_host" else {}
    config = af.StreamConfig(fetch=af.FetchConfig(**fetch), **({} if fetch else {name: 1}))  # type: ignore[arg-type]
    with pytest.raises(af.ConfigError, match=rf"{name}=1 .* 2 loader workers .* at least 2, or num_workers"):
        config_share(config, 2)


@pytest.mark.usefixtures("failed_loaders_end_soon")
@pytest.mark.parametrize("map_style", [False, True], ids=["stream", "frames"])
def test_a_loader_of_too_many_workers_is_refused(truth: DatasetTruth, map_style: bool) -> None:
    root, config = str(truth.root), af.StreamConfig(decode_threads=1)
    dataset: Any = (
        af.torch.FrameDataset(root, config=config)
        if map_style
        else af.torch.StreamDataset(af.Stream(root, config=config))
    )
    loader = DataLoader(dataset, num_workers=2, batch_size=1, multiprocessing_context="fork")
    with pytest.raises(af.ConfigError, match=r"decode_threads=1 .* 2 loader workers"):
        next(iter(loader))


@pytest.fixture
def other_device() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("other_device")
def test_workers_share_memory_whatever_the_default_device_is(truth: DatasetTruth) -> None:
    stream = af.Stream(str(truth.root), features=["action"])
    dataset = af.torch.StreamDataset(stream)
    dataset.set_epoch(3)
    assert pickle.loads(pickle.dumps(stream)).epoch == stream.epoch == 3
    assert indices(dataset) == list(range(truth.num_frames))
    stream.close()


def test_a_share_is_never_more_than_its_part() -> None:
    config = af.StreamConfig(fetch=af.FetchConfig(max_requests_per_host=7), decode_threads=5, decoder_cache_size=9)
    for workers in range(1, 6):
        share = config_share(config, workers)
        assert share.fetch.max_requests_per_host * workers <= 7
        assert share.decode_threads is not None
        assert share.decode_threads * workers <= 5
        assert share.decoder_cache_size is not None
        assert share.decoder_cache_size * workers <= 9
        assert share.max_bytes * workers <= config.max_bytes
    assert config_share(af.StreamConfig(), 64).decode_threads == 1  # as many as cores, but one each


@pytest.mark.parametrize("batch_size", [0, 2.5, "4", True])
def test_a_batch_size_that_is_none_is_refused(truth: DatasetTruth, batch_size: Any) -> None:  # noqa: ANN401
    with pytest.raises(af.ConfigError, match=f"batch_size must be .* not {batch_size!r}"):
        af.torch.StreamDataset(af.Stream(str(truth.root)), batch_size=batch_size)


@pytest.mark.parametrize("episodes", [[99], [-1], [0, -1, 2], [10**30]])
def test_an_episode_that_is_not_there_is_not_counted(truth: DatasetTruth, episodes: list[int]) -> None:
    stream = af.Stream(str(truth.root), episodes=episodes)
    with pytest.raises(af.EpisodeNotFound, match="has no episode"):
        len(af.torch.StreamDataset(stream))
    with pytest.raises(af.EpisodeNotFound, match="has no episode"):
        next(iter(stream))
    stream.close()


def test_a_stream_says_what_its_dataset_is(truth: DatasetTruth) -> None:
    stream = af.Stream(str(truth.root), features=["action"], episodes=[0, 2])
    assert (stream.fps, stream.num_episodes) == (truth.fps, 2)
    assert "action" in stream.features
    assert stream.stats is not None
    assert len(stream.stats["action"]["mean"]) == 6
    stream.close()
