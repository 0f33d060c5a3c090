"""States with junk in them: refused in words, or gone on with within the epoch, and never with work without bound."""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, Any

import pytest
from asyncfetch.stream.state import beginning, merge_states
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import asyncfetch as af
from asyncfetch.errors import ConfigError, StateMismatch
from asyncfetch.stream import Placement
from asyncfetch.stream.source import source_of
from tests.stream.test_mixture import saved
from tests.stream.test_mixture_layouts import parted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncfetch.stream.order import Step
    from asyncfetch.stream.state import State

    from asyncfetch.testing import DatasetTruth

HUGE = 2**60
NUMBERS = [-1, 0, 1, 2, 7, 2**24, 2**31, HUGE, 2**63 - 1, 2**63, 10**30, 1.5, 4.0, 1e300, float("nan"), float("inf")]
JUNK = st.one_of(
    st.sampled_from([*NUMBERS, -HUGE, None, True, False, "", "5", "uneven", "asyncfetch", [], {}]),
    st.lists(st.sampled_from(NUMBERS), max_size=4),
    st.lists(st.lists(st.sampled_from(NUMBERS), max_size=4), max_size=4),
    st.recursive(
        st.sampled_from(NUMBERS),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["members", "missing"]), inner),
        max_leaves=6,
    ),
)


@pytest.fixture(scope="module")
def sources(truth: DatasetTruth, truths: list[DatasetTruth]) -> Iterator[list[tuple[Any, State]]]:
    """A stream or a mixture, and a state of it, of each kind that there is."""
    config = af.StreamConfig(pool_segments=2, prefetch_segments=1, decode_threads=1)
    stream = af.Stream(str(truth.root), features=[], config=config)
    mixed = parted(truths)

    def state_of(source: Any, given: list[int], **layout: Any) -> State:  # noqa: ANN401
        """Of all its ranks, each of which was given so many samples of the epoch that comes next."""
        states = []
        for rank, count in enumerate(given):
            samples = source_of(source).iterate(Placement(rank, len(given), **layout))
            assert len(list(itertools.islice(samples, count))) == count
            states.append(samples.state_dict())
            samples.close()
        return saved(merge_states(states))

    slow = state_of(stream, [9, 1, 4])
    stream.load_state_dict(slow)
    kinds: list[tuple[Any, State]] = [
        (stream, state_of(stream, [12])),
        (stream, slow),
        (stream, state_of(stream, [3, 0])),
    ]
    stream.set_epoch(4)
    kinds.append((stream, saved(stream.state_dict())))
    mixed.set_epoch(1)
    kinds.append((mixed, state_of(mixed, [9, 3], batch_size=4)))
    mixed.load_state_dict(kinds[-1][1])
    kinds.append((mixed, state_of(mixed, [4, 7, 1], batch_size=3)))
    assert "dealt_anew" in kinds[-1][1]["order"]
    mixed.set_epoch(2)
    kinds.append((mixed, saved(mixed.state_dict())))
    yield kinds
    stream.close()
    mixed.close()


def paths_in(value: Any, *path: Any) -> Iterator[tuple[Any, ...]]:  # noqa: ANN401
    """The way to everything in nested dicts and lists."""
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from paths_in(each, *path, key)


def put(state: State, path: tuple[Any, ...], value: Any) -> State:  # noqa: ANN401
    """The state with this in that place."""
    damaged = place = copy.deepcopy(state)
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return damaged


def steps_behind(source: Any, state: Any, placement: Placement) -> list[Step]:  # noqa: ANN401
    """What the next pass gives, of its samples' order alone: a few hundred at most."""
    source.load_state_dict(state)
    plan = source_of(source).planned(placement, source.epoch)
    repr(plan.progress.state())
    return list(itertools.islice(plan.steps(), 500))


@pytest.mark.timeout(120)
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_state_with_junk_in_it_is_refused_or_gives_at_most_the_epoch(
    sources: list[tuple[Any, State]], data: st.DataObject
) -> None:
    source, state = data.draw(st.sampled_from(sources))
    damaged = put(state, data.draw(st.sampled_from(list(paths_in(state)))), data.draw(JUNK))
    size, workers = data.draw(st.sampled_from([(None, 1), (3, 1), (None, 2)]))
    placement = Placement(data.draw(st.integers(0, 1)), 2, workers - 1, workers, batch_size=size)
    load: Callable[[Any], Any] = data.draw(st.sampled_from([lambda one: one, lambda one: merge_states([one])]))
    try:
        given = steps_behind(source, load(damaged), placement)
    except (StateMismatch, ConfigError):
        return
    finally:
        source.load_state_dict(beginning(0))
    # A block of any size is one that a run can have been begun with, and its epoch is as long.
    if damaged.get("order", {}).get("block_samples") == state.get("order", {}).get("block_samples"):
        assert len({(step.episode, step.frame) for step in given}) == len(given) < 200


@pytest.mark.parametrize("size", [5, 1000, 2**24, HUGE])
@pytest.mark.parametrize("drop_last", [False, True])
def test_what_is_left_in_batches_of_any_size_takes_no_more_work_than_it_has_samples(
    sources: list[tuple[Any, State]], size: int, drop_last: bool
) -> None:
    """Of each member one batch, or none, and the rest of its positions are empty."""
    mixed, state = sources[4]
    left = {(step.episode, step.frame) for rank in (0, 1) for step in steps_behind(mixed, state, Placement(rank, 2))}
    given = []
    for rank in (0, 1):
        placement = Placement(rank, 2, batch_size=size, drop_last=drop_last)
        mixed.load_state_dict(state)
        plan = source_of(mixed).planned(placement, mixed.epoch)
        taken = 0
        for step in plan.steps():
            given.append((step.episode, step.frame))
            taken += 1 + step.empty
        assert taken == plan.end or not given
        assert len(plan) <= 3 * size + len(left)
    assert len(given) == len(set(given))
    assert {*given} == left if not drop_last else {*given} < left
    mixed.load_state_dict(beginning(0))


@pytest.mark.parametrize("far", [HUGE, 2**63 - 1])
def test_consumers_that_are_too_far_apart_are_refused_before_what_one_lacks_takes_room(
    sources: list[tuple[Any, State]], far: int
) -> None:
    """A damaged state of huge batches may say so, and its numbers fit one another."""
    mixed, state = sources[5]
    anew = state["order"]["dealt_anew"] | {"batch_size": far // 4, "world_size": 1}
    damaged = state | {
        "order": state["order"] | {"dealt_anew": anew},
        "total": len(anew["members"]) * (far // 4),
        "rest": {"position": 0, "missing": []},
        "shares": state["shares"] | {"world_size": 2, "delivered": [[0, 0, far // 8], [1, 0, 0]]},
    }
    with pytest.raises(StateMismatch, match=f"have come .* further than others|an epoch of {damaged['total']} samples"):
        steps_behind(mixed, damaged, Placement(batch_size=4))
    mixed.load_state_dict(beginning(0))


def test_a_member_does_not_go_back_behind_the_epochs_beginning(sources: list[tuple[Any, State]]) -> None:
    mixed, state = sources[5]
    earlier = {"position": 0, "missing": []}
    with pytest.raises(StateMismatch, match="is left of samples of a member that come from"):
        steps_behind(mixed, put(state, ("order", "dealt_anew", "members", 0), earlier), Placement(batch_size=3))
    mixed.load_state_dict(beginning(0))
