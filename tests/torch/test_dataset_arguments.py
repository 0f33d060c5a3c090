"""What is given to the public face is looked at where it is given, and taken once."""

from __future__ import annotations

import itertools
import re
import sys
from typing import TYPE_CHECKING, Any

import pytest

import asyncfetch as af
from asyncfetch.decode.backends import import_torch
from asyncfetch.errors import install_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncfetch.testing import DatasetTruth

HERE = "/nowhere"  # nothing is opened
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a FetchConfig for a stream": (
        lambda: af.Stream(HERE, config=af.FetchConfig()),  # type: ignore[arg-type]
        r"a StreamConfig, not of type FetchConfig: StreamConfig\(fetch=\.\.\.\)",
    ),
    "a dict for a stream": (lambda: af.Stream(HERE, config={}), "a StreamConfig, not of type dict"),  # type: ignore[arg-type]
    "a dict for a dataset": (lambda: af.open_dataset(HERE, config={}), "a StreamConfig"),  # type: ignore[arg-type]
    "a dict for frames": (lambda: af.torch.FrameDataset(HERE, config={}), "a StreamConfig"),  # type: ignore[arg-type]
    "features=5": (lambda: af.Stream(HERE, features=5), "features must be a collection of keys"),  # type: ignore[arg-type]
    "features=str": (lambda: af.open_dataset(HERE, features="action"), "features must be a collection of keys"),
    "epoch=-1": (lambda: af.Stream(HERE).samples(epoch=-1), "epoch must be a whole number from 0, below"),
    "epoch=1.5": (lambda: af.Stream(HERE).samples(epoch=1.5), "not 1.5"),  # type: ignore[arg-type]
    "epoch='x'": (lambda: af.Stream(HERE).samples(epoch="x"), "not 'x'"),  # type: ignore[arg-type]
    "rank=0.0": (lambda: af.Stream(HERE).samples(rank=0.0, world_size=1), "whole numbers, not 0.0 of 1"),  # type: ignore[arg-type]
    "frames of videos": (
        lambda: af.torch.FrameDataset(af.Videos.from_folder(HERE)),  # type: ignore[arg-type]
        r"takes the url .*, not Videos.from_folder\('/nowhere'\): use StreamDataset\(Stream\(videos, clips=ClipSampler",
    ),
    "episodes twice": (lambda: af.torch.FrameDataset(HERE, episodes=[2, 2]), "must not name an episode twice"),
    "max_ahead=None": (lambda: af.torch.AsyncIterableDataset(iter, max_ahead=None), "max_ahead .* not None"),  # type: ignore[arg-type]
    "max_ahead='3'": (lambda: af.torch.AsyncIterableDataset(iter, max_ahead="3"), "max_ahead .* not '3'"),  # type: ignore[arg-type]
    "no factory": (lambda: af.torch.AsyncIterableDataset(3), "factory must be a function"),  # type: ignore[arg-type]
    "half a host": (lambda: list(af.Stream("http://[::1/x")), r"'http://\[::1/x' isn't a url"),
}


@pytest.mark.parametrize("case", WRONG)
def test_arguments_that_cannot_be_used_are_refused_in_words(case: str) -> None:
    call, message = WRONG[case]
    with pytest.raises(af.ConfigError, match=message):
        call()


@pytest.mark.parametrize("made", [3, (1, 2)], ids=repr)
def test_a_transform_whose_samples_make_no_batch_is_named(truth: DatasetTruth, made: object) -> None:
    stream = af.Stream(str(truth.root), transform=lambda _: made)  # type: ignore[arg-type, return-value]
    with pytest.raises(af.ConfigError, match=f"made of dicts, not of {type(made).__name__}: let the transform"):
        next(iter(af.torch.StreamDataset(stream, batch_size=4)))
    stream.close()


@pytest.mark.parametrize("nth", [0, 1, 3])
def test_empty_batch_is_refused_everywhere(truth: DatasetTruth, nth: int) -> None:
    stream = af.Stream(str(truth.root), features=["action"])
    bad = next(itertools.islice(stream, nth, None))["index"]
    nothing = af.Stream(
        str(truth.root),
        features=["action"],
        transform=lambda sample: None if sample["index"] == bad else sample,  # type: ignore[arg-type, return-value]
    )
    with pytest.raises(af.UsageError, match="gave None: end it by `return sample`"):
        next(iter(af.torch.StreamDataset(nothing, batch_size=4)))
    for each in (stream, nothing):
        each.close()


def once(*values: Any) -> Iterator[Any]:  # noqa: ANN401
    yield from values


def test_iterators_given_as_arguments_are_read_at_once(truth: DatasetTruth) -> None:
    stream = af.Stream(str(truth.root), features=once("action"), episodes=once(1, 2))  # type: ignore[arg-type]
    for _ in range(2):
        assert all("action" in sample for sample in stream)
        stream.close()  # it is opened anew
    frames = af.torch.FrameDataset(str(truth.root), features=once("action"), episodes=once(1, 2))  # type: ignore[arg-type]
    for _ in range(2):
        assert len(frames) == sum(truth.lengths[1:3])
        assert int(frames[len(frames) - 1]["episode_index"]) == 2
        assert "action" in frames[0]
        frames.close()


def test_missing_torch_error_names_the_install_command(truth: DatasetTruth, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = af.Stream(str(truth.root), features=["action"])
    import_torch.cache_clear()
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(af.MissingDependency, match=re.escape(install_command("lerobot"))):
        next(iter(stream))
    stream.close()
