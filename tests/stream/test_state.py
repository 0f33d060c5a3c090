"""What states of several ranks tell together, and what they are refused for."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
from asyncfetch.stream.placement import found_placement
from asyncfetch.stream.state import beginning, merge_states

import asyncfetch as af
from asyncfetch.errors import StateMismatch
from asyncfetch.stream import Placement
from asyncfetch.stream.source import source_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncfetch.stream.state import State

    from asyncfetch.testing import DatasetTruth

CONFIG = af.StreamConfig(pool_segments=2, prefetch_segments=1, decode_threads=1)


def stream_of(truth: DatasetTruth, **options: Any) -> af.Stream:  # noqa: ANN401
    return af.Stream(str(truth.root), **{"config": CONFIG, "features": [], **options})


@pytest.fixture(scope="module")
def state_of(truth: DatasetTruth) -> Any:  # noqa: ANN401
    """The state of a rank that was given so many samples of epoch 0."""
    stream = stream_of(truth)

    def state_of(rank: int, world_size: int, given: int, *, workers: int = 1) -> State:
        samples = source_of(stream).iterate(Placement(rank, world_size, 0, workers), epoch=0)
        for _ in itertools.islice(samples, given):
            pass
        state = samples.state_dict()
        samples.close()
        return state

    yield state_of
    stream.close()


@pytest.mark.parametrize(
    ("states", "figures"),
    [
        (lambda of: [of(0, 2, 5), of(1, 3, 5)], "world_size, 2 and 3"),
        (lambda of: [of(0, 2, 5), of(1, 2, 5, workers=2)], "workers, 1 and 2"),
        (lambda of: [of(0, 4, 3), of(1, 4, 3), of(2, 4, 3)], r"4 ranks.*3 states 3 tell of ranks \[0, 1, 2\], 0 of an"),
        (lambda of: [of(0, 4, 3), beginning(0)], r"4 ranks.*2 states 1 tell of ranks \[0\], 1 of an"),
        (lambda of: [of(0, 4, 3), beginning(1)], r"4 ranks.*2 states 1 tell of ranks \[0\], 1 of an"),
        (lambda of: [of(0, 2, 3), of(1, 2, 3), beginning(0)], r"2 ranks.*3 states 2 tell of ranks \[0, 1\], 1 of an"),
        (lambda of: [of(0, 2, 3), of(0, 2, 4), of(1, 2, 3)], "rank 0 of 2 comes twice, with 3 samples and with 4"),
        (lambda of: [of(0, 1, 3, workers=2)], "don't tell of rank 0 of 1, worker 1 of 2"),
        (lambda of: [of(0, 3, 5), beginning(0), beginning(1)], "1 of the states .* epoch 1 and 1 of that of 0"),
        (lambda of: [beginning(0), beginning(5)], r"different epochs, \[0, 5\]"),
        (lambda of: [beginning(0), beginning(1)], r"different epochs, \[0, 1\]"),
        (lambda of: [of(0, 2, 3), None], "of these 2 1 hold no state"),
        (lambda of: [], "of these 0 0 hold no state"),
        (lambda of: None, "of these 0 0 hold no state"),
    ],
)
def test_states_that_are_not_one_of_each_rank_of_a_pass_are_refused_with_figures(
    state_of: Callable[..., State], states: Callable[[Any], list[Any]], figures: str
) -> None:
    with pytest.raises(StateMismatch, match=figures):
        merge_states(states(state_of))


def test_one_of_each_rank_is_enough_in_whatever_way_it_comes(state_of: Callable[..., State]) -> None:
    """Of ranks that were given nothing, nested as a loader's, merged before, and the same one twice."""
    given = [state_of(rank, 3, count) for rank, count in enumerate((4, 0, 2))]
    merged = merge_states(given)
    assert merged["shares"]["delivered"] == [[0, 0, 4], [1, 0, 0], [2, 0, 2]]
    assert merge_states([given[2], beginning(0), {"workers": [given[0], beginning(0)]}]) == merged
    assert merge_states([merged, merged]) == merge_states([*given, given[0]]) == merged


def of_version_1(state: State) -> State:
    """As 0.1 wrote it, whose ranks took samples in turns."""
    shares = {name: value for name, value in state["shares"].items() if name != "step_samples"}
    return {**state, "version": 1, "shares": shares}


def test_a_rank_goes_on_from_its_state_of_the_first_version_as_it_would_have(truth: DatasetTruth) -> None:
    stream = stream_of(truth)
    whole = [int(sample["index"]) for sample in source_of(stream).iterate(Placement(1, 3), epoch=0)]
    samples = source_of(stream).iterate(Placement(1, 3), epoch=0)
    for _ in itertools.islice(samples, 4):
        pass
    stream.load_state_dict(of_version_1(samples.state_dict()))
    samples.close()
    rest = source_of(stream).iterate(found_placement(1, 3), epoch=0)
    assert [int(next(rest)["index"])] == whole[4:5]
    stream.load_state_dict(rest.state_dict())  # what goes on so is told of so, too
    rest.close()
    assert [int(sample["index"]) for sample in source_of(stream).iterate(found_placement(1, 3), epoch=0)] == whole[5:]
    stream.close()


def test_others_go_on_from_states_of_the_first_version(truth: DatasetTruth, state_of: Callable[..., State]) -> None:
    stream = stream_of(truth)
    whole = [int(sample["index"]) for sample in source_of(stream).iterate(Placement(), epoch=0)]
    merged = merge_states([of_version_1(state_of(rank, 3, count)) for rank, count in enumerate((4, 0, 6))])
    given = whole[0:12:3] + whole[2:20:3]
    found = []
    for rank in range(2):
        stream.load_state_dict(merged)
        found += [int(sample["index"]) for sample in source_of(stream).iterate(found_placement(rank, 2), epoch=0)]
    assert sorted(found + given) == sorted(whole)
    stream.close()


@pytest.mark.parametrize(
    ("damage", "figures"),
    [
        ({"epoch": True}, "epoch .* not True"),
        ({"epoch": 10**30}, f"epoch .* not {10**30}"),
        ({"total": "45"}, "total .* not '45'"),
        ({"total": 44}, "an epoch of 44 samples, and this one has 45"),
        ({"shares": {"world_size": 10**9, "delivered": [[0, 0, 1]]}}, f"1 of the {10**9} consumers"),
        ({"shares": {"workers": 10**9}}, f"{10**9} workers"),
        ({"shares": {"delivered": [[0, 0, 10**18]]}}, f"{10**18} samples of rank 0 of 1, who takes 45"),
        ({"shares": {"delivered": [[0, 0, 1.5]]}}, "can't be read"),
        ({"shares": {"delivered": [[0, 0, 1], [0, 0, 2]]}}, "one twice"),
        ({"rest": {"position": 5, "missing": [[0, 10**12, 1]]}}, f"missing.*{10**12}"),
        ({"rest": {"position": 5, "missing": [[0, 10**30, 1]]}}, f"missing.*{10**30}"),
    ],
    ids=str,
)
def test_a_damaged_state_is_refused_at_once(
    truth: DatasetTruth, state_of: Callable[..., State], damage: dict[str, Any], figures: str
) -> None:
    state = state_of(0, 1, 5)
    for name, value in damage.items():
        state[name] = state[name] | value if isinstance(value, dict) else value
    stream = stream_of(truth)
    samples = iter(stream)
    with pytest.raises(StateMismatch, match=figures):  # noqa: PT012
        stream.load_state_dict(state)
        next(samples)
    stream.close()
