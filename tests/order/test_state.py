"""Saved progress: what states of several ranks tell together, what they are refused for, and going on from them."""

from __future__ import annotations

import copy
import itertools
import json
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfetch.errors import ConfigError, StateMismatch
from asyncfetch.order.deal import Left, Leg
from asyncfetch.order.line import Line
from asyncfetch.order.placement import Placement
from asyncfetch.order.plan import PassPlan
from asyncfetch.order.runs import Runs
from asyncfetch.order.state import (
    EpochProgress,
    State,
    beginning,
    check_state,
    has_given_all,
    is_finished,
    merge_shares,
    merge_states,
    spans_left,
)
from tests.order.test_deal import everything, legs, wholes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncfetch.order.plan import Step

IDENTITY = {"dataset": "data", "order": {"seed": 0}}
LINE = Line(np.array([5, 9, 1, 12, 7, 3, 0, 8]), segment_frames=10, group_frames=2)
WHOLE = Left((Runs.whole(LINE, 0, 45),), np.array([[45]]))


def progress_of(whole: Left, leg: Leg, placement: Placement) -> EpochProgress:
    return EpochProgress(IDENTITY, 0, whole.total, leg, replace(placement, world_size=leg.world_size))


def plan_of(whole: Left, leg: Leg, placement: Placement, state: State | None) -> PassPlan:
    progress = progress_of(whole, leg, placement)
    return PassPlan(whole, progress if state is None else progress.resumed(check_state(state)), 0)


def saved(state: State) -> State:
    found: State = json.loads(json.dumps(state))
    return found


def state_of(rank: int, world_size: int, given: int, *, workers: int = 1, worker: int = 0, **leg: Any) -> State:  # noqa: ANN401
    """The state of a rank that was given so many samples of epoch 0."""
    plan = plan_of(WHOLE, Leg(world_size, (4,), **leg), Placement(rank, world_size, worker, workers), None)
    plan.progress.delivered = given
    return saved(plan.progress.state())


def samples_of(steps: list[Step]) -> Counter[tuple[int, int, int, int]]:
    return Counter(
        (step.piece.member, step.piece.epoch, step.piece.episode, step.frame) for step in steps if not step.is_padding
    )


@st.composite
def layouts(draw: st.DrawFn, leg: Leg) -> list[Placement]:
    """All consumers: each rank's workers."""
    workers = draw(st.sampled_from([1, 1, 2, 3]))
    block = leg.block_samples if leg.batches != "any" else draw(st.sampled_from([1, 3]))
    return [
        Placement(rank, leg.world_size, worker, workers, block)
        for rank in range(leg.world_size)
        for worker in range(workers)
    ]


@settings(max_examples=60)
@given(whole=wholes(), data=st.data())
def test_ranks_on_from_states_give_just_what_was_left(whole: Left, data: st.DataObject) -> None:
    """Any ranks, workers, batches and ends, each stopped anywhere, saved as JSON, in up to six moves.

    Often the ranks are as before and only their workers are others. Some samples wait: those behind them were given.
    """
    state: State | None = None
    found: Counter[tuple[int, int, int, int]] = Counter()
    last = Leg(2, (5,) * len(whole.members))
    chain: list[Leg] = []
    for leg in data.draw(st.lists(legs(len(whole.members)), max_size=6)):
        is_as_before: bool = data.draw(st.booleans())
        chain.append(chain[-1] if chain and is_as_before else leg)
    for leg in [*chain, last]:
        states = []
        for placement in data.draw(layouts(leg)):
            plan = plan_of(whole, leg, placement, state)
            steps = list(plan.steps())
            stop = len(steps) if leg is last else data.draw(st.integers(0, len(steps)))
            numbers = [plan.begun, *(step.stop for step in steps[:stop])]
            waiting: set[int] = set()
            if leg is not last and stop:
                waiting = data.draw(st.sets(st.integers(0, stop - 1), max_size=3))
            found += samples_of([step for place, step in enumerate(steps[:stop]) if place not in waiting])
            spans = [range(*numbers[place : place + 2]) for place in waiting]
            plan.progress.deliver(numbers[-1], itertools.chain(*spans))
            states.append(saved(plan.progress.state()))
        state = merge_states(data.draw(st.permutations(states)))
    assert found == everything(whole)


@given(whole=wholes(), data=st.data())
def test_the_same_ranks_go_on_in_their_order_with_any_workers(whole: Left, data: st.DataObject) -> None:
    leg = data.draw(legs(len(whole.members)).filter(lambda leg: leg.batches == "any"))
    rank = data.draw(st.integers(0, leg.world_size - 1))
    order = [(step.piece, step.frame) for step in plan_of(whole, leg, Placement(rank, leg.world_size), None).steps()]
    states = []
    left = list(range(len(order)))
    workers = data.draw(st.integers(1, 3))
    for worker in range(workers):
        placement = Placement(rank, leg.world_size, worker, workers, data.draw(st.just(2)))
        plan = plan_of(whole, leg, placement, None)
        plan.progress.delivered = data.draw(st.integers(0, plan.end))
        left = [number for number in left if number not in {*map(placement.of_rank, range(plan.progress.delivered))}]
        states.append(plan.progress.state())
    told = states[0] if workers == 1 else merge_workers(states)
    rest = plan_of(whole, leg, Placement(rank, leg.world_size), saved(told))
    assert [(step.piece, step.frame) for step in rest.steps()] == [order[number] for number in left]


def merge_workers(states: list[State]) -> State:
    from asyncfetch.order.state import merge_shares

    return merge_shares(states)


@given(edges=st.sets(st.integers(0, 40), max_size=8), number=st.integers(0, 30))
def test_numbers_outside_of_spans_are_counted(edges: set[int], number: int) -> None:
    ascending = sorted(edges)[: len(edges) // 2 * 2]
    spans = tuple(zip(ascending[::2], ascending[1::2], strict=True))
    outside = [each for each in range(200) if not any(start <= each < stop for start, stop in spans)]
    assert spans_left(spans, number) == outside[number]


@pytest.mark.parametrize("workers", [1, 4])
def test_a_state_of_many_ranks_and_moves_is_small(workers: int) -> None:
    """Of 1,024 ranks in step, after ten moves: a few kB, whichever numbers of ranks they were."""
    line = Line(np.full(2000, 150), segment_frames=600, group_frames=2)
    whole = Left((Runs.whole(line, 0, line.total),), np.array([[line.total]]))
    state: State | None = None
    worlds = [1024, 12, 8, 96, 100, 64, 8, 64, 96, 1000, 1024]
    for ranks in worlds:
        progress = progress_of(whole, Leg(ranks, (64,)), Placement(0, ranks, 0, workers, 4))
        if state is not None:
            progress = progress.resumed(state)
        states = []
        for rank in range(ranks):
            each = [replace(progress.placement, rank=rank, worker=worker) for worker in range(workers)]
            shares = [replace(progress, placement=one, share=1000, delivered=24 // workers).state() for one in each]
            states.append(merge_shares(shares))
        state = saved(merge_states(states))
    assert state is not None
    assert len(state["legs"]) == 11
    assert len(json.dumps(state)) < 4000
    assert PassPlan(whole, progress.resumed(state), 0).deal.left.total == line.total - 24 * sum(worlds[:-1])


@pytest.mark.parametrize(
    ("states", "figures"),
    [
        (lambda of: [of(0, 2, 5), of(1, 3, 5)], "how ranks share, .*world_size=2.* and .*world_size=3"),
        (lambda of: [of(0, 2, 5), of(1, 2, 5, workers=2)], r"workers, \(1, 1\) and \(2, 1\)"),
        (lambda of: [of(0, 2, 5), of(1, 2, 5, ends="pad")], "how ranks share, .*'uneven'.* and .*'pad'"),
        (lambda of: [of(0, 4, 3), of(1, 4, 3), of(2, 4, 3)], r"4 ranks.*3 states 3 tell of ranks \[0, 1, 2\], 0 of an"),
        (lambda of: [of(0, 4, 3), beginning(0)], r"4 ranks.*2 states 1 tell of ranks \[0\], 1 of an"),
        (lambda of: [of(0, 4, 3), beginning(1)], r"4 ranks.*2 states 1 tell of ranks \[0\], 1 of an"),
        (lambda of: [of(0, 2, 3), of(1, 2, 3), beginning(0)], r"2 ranks.*3 states 2 tell of ranks \[0, 1\], 1 of an"),
        (lambda of: [of(0, 2, 3), of(0, 2, 4), of(1, 2, 3)], "rank 0 comes twice, with .*3.* and with .*4"),
        (lambda of: [of(0, 1, 3, workers=2)], "don't tell of rank 0, worker 1 of 2"),
        (lambda of: [of(0, 3, 5), beginning(0), beginning(1)], "1 of the states .* epoch 1 and others of that of 0"),
        (lambda of: [beginning(0), beginning(5)], r"different epochs, \[0, 5\]"),
        (lambda of: [beginning(0), beginning(1)], r"different epochs, \[0, 1\]"),
        (lambda of: [of(0, 2, 3), None], "of these 2 1 hold no state"),
        (lambda _: [], "of these 0 0 hold no state"),
        (lambda _: None, "of these 0 0 hold no state"),
    ],
)
def test_states_that_are_not_one_of_each_rank_are_refused(states: Callable[[Any], Any], figures: str) -> None:
    with pytest.raises(StateMismatch, match=figures):
        merge_states(states(state_of))


def test_states_of_all_ranks_are_enough_in_any_form() -> None:
    """Of ranks that were given nothing, nested as a loader's, merged before, and the same one twice."""
    given = [state_of(rank, 3, count) for rank, count in enumerate((4, 0, 2))]
    merged = merge_states(given)
    assert merged["legs"][-1]["given"] == [[0, 1, [], [0, 4, 15]], [1, 1, [], [0, 0, 15]], [2, 1, [], [0, 2, 15]]]
    assert merge_states([merged, merged]) == merge_states([*given, given[0]]) == merged
    found = merge_states([given[2], beginning(0), {"workers": [given[0], beginning(0)]}])
    rests = [
        [sample_of(step) for step in plan_of(WHOLE, Leg(2, (3,)), Placement(rank, 2), state).steps()]
        for state in (merged, found)
        for rank in range(2)
    ]
    assert rests[:2] == rests[2:]


def sample_of(step: Step) -> tuple[int, int]:
    return step.piece.episode, step.frame


def test_a_state_of_one_rank_is_enough_for_it_and_for_no_other() -> None:
    state = state_of(1, 3, 4)
    leg = Leg(3, (4,))
    whole = [sample_of(step) for step in plan_of(WHOLE, leg, Placement(1, 3), None).steps()]
    assert [sample_of(step) for step in plan_of(WHOLE, leg, Placement(1, 3), state).steps()] == whole[4:]
    for other, rank in ((leg, 0), (Leg(2, (4,)), 1), (Leg(3, (5,)), 1)):
        with pytest.raises(StateMismatch, match=r"tells of 1 of the 3 consumers \(3 ranks, .*merge_states"):
            plan_of(WHOLE, other, Placement(rank, other.world_size), state)


@pytest.mark.parametrize(
    ("given", "leg", "least", "is_over"),
    [
        ([45], Leg(1, (4,)), 1, True),
        ([44], Leg(1, (4,)), 1, False),
        ([44], Leg(1, (4,)), 2, True),
        ([15], Leg(3, (4,)), 1, True),
        ([11], Leg(4, (4,), "drop"), 1, True),
        ([12], Leg(4, (4,)), 1, False),  # whether the others have one sample more isn't known
        ([12, 11, 11, 11], Leg(4, (4,)), 1, True),
        ([12, 11, 11, 10], Leg(4, (4,)), 1, False),
    ],
)
def test_an_epoch_is_over_where_nobody_is_given_more(given: list[int], leg: Leg, least: int, *, is_over: bool) -> None:
    states = [state_of(rank, leg.world_size, count, ends=leg.ends) for rank, count in enumerate(given)]
    state = merge_states(states) if len(states) == leg.world_size else states[0]
    assert is_finished(state, least) is is_over
    assert has_given_all(states[0], least) is (given[0] + least > -(-45 // leg.world_size) or leg.ends == "drop")
    assert not is_finished(beginning(3))


def test_samples_that_wait_are_left_of_an_epoch() -> None:
    progress = progress_of(WHOLE, Leg(1, (4,)), Placement())
    plan = PassPlan(WHOLE, progress, 0)
    plan.progress.deliver(45, [3, 4, 40])
    state = saved(plan.progress.state())
    assert state["legs"][-1]["given"] == [[0, 1, [], [0, 3, 45, 5, 40, 41, 45]]]
    for least, is_over in ((1, False), (3, False), (4, True)):
        assert has_given_all(state, least) is is_over
        assert is_finished(state, least) is is_over
    plan.progress.deliver(45, [])
    assert plan.progress.state()["legs"][-1]["given"] == [[0, 1, [], [0, 45, 45]]]


@pytest.mark.parametrize("version", [1, 2, 4, None])
def test_a_state_of_another_version_is_refused_with_the_way_on(version: int | None) -> None:
    """0.1 wrote 1 and 2, of one order for all ranks, in which an epoch can't be gone on with."""
    state: State = {"format": "asyncfetch stream state", "version": version, "epoch": 6, "rest": {}, "shares": {}}
    for load in (check_state, lambda one: merge_states([one])):
        with pytest.raises(
            StateMismatch, match=f"version {version}, and .* reads version 3: .* epoch 6 .*set_epoch.7."
        ):
            load(state)


@pytest.mark.parametrize("state", [None, 5, {}, {"format": "x"}, [1]])
def test_value_that_is_no_state_is_refused(state: object) -> None:
    with pytest.raises(StateMismatch, match="isn't a state of a stream"):
        check_state(state)


def test_a_state_of_another_dataset_or_order_is_refused() -> None:
    state = state_of(0, 1, 5)
    for name, value in {"dataset": "other", "order": {"seed": 1}}.items():
        with pytest.raises(StateMismatch, match=f"the state's {name} is {value}"):
            plan_of(WHOLE, Leg(1, (4,)), Placement(), state | {name: value})


@pytest.mark.parametrize(
    ("damage", "figures"),
    [
        ({"epoch": True}, "epoch .* not True"),
        ({"epoch": 10**30}, f"epoch .* not {10**30}"),
        ({"total": "45"}, "total .* not '45'"),
        ({"total": 44}, "an epoch of 44 samples, and this one has 45"),
        ({"nodes": -1}, "nodes .* not -1"),
        ({"legs": []}, "legs"),
        ({"leg": {"world_size": 3}}, "1 of the 3 consumers"),
        ({"leg": {"world_size": 10**9}}, "can't be read"),
        ({"leg": {"workers": 10**9}}, "can't be read"),
        ({"leg": {"ends": "somewhere"}}, "can't be read"),
        ({"leg": {"given": [[0, 1, [], [0, 10**18, 45]]]}}, f"{10**18} samples of rank 0, worker 0, which takes 45"),
        ({"leg": {"given": [[0, 1, [], [0, 1.5, 45]]]}}, "can't be read"),
        ({"leg": {"given": [[0, 1, [], [0, 1, 45]], [0, 1, [], [0, 2, 45]]]}}, "can't be read"),
        ({"leg": {"given": [[0, 10**12, [], [0, 1, 45]]]}}, "can't be read"),
        ({"leg": {"given": [[0, 1, [0, 10**12], [0, 1, 45]]]}}, f"rank 0 was given .*{10**12}.* of 45 samples"),
        ({"leg": {"given": [[0, 1, [5, 5], [0, 1, 45]]]}}, "can't be read"),
        ({"leg": {"given": [[0, 1, [], [0, 5, 45, 7, 60]]]}}, "60 samples of rank 0, worker 0, which takes 45"),
        ({"leg": {"given": [[0, 1, [], [0, 5, 45, 7]]]}}, "can't be read"),
        ({"leg": {"given": [[0, 1, [], [0, 5, 45, 3, 9]]]}}, "can't be read"),
        ({"leg": {"given": [[0, 1, [], [0, 5, 45, 9, 7]]]}}, "can't be read"),
    ],
    ids=str,
)
def test_a_damaged_state_is_refused_at_once(damage: dict[str, Any], figures: str) -> None:
    state = state_of(0, 1, 5)
    state["legs"][-1] |= damage.pop("leg", {})
    with pytest.raises(StateMismatch, match=figures):
        plan_of(WHOLE, Leg(1, (4,)), Placement(), state | damage)


HUGE = 2**60
NUMBERS = [-1, 0, 1, 2, 7, 2**24, 2**31, HUGE, 2**63 - 1, 2**63, 10**30, 1.5, 4.0, 1e300, float("nan"), float("inf")]
JUNK = st.one_of(
    st.sampled_from([*NUMBERS, -HUGE, None, True, False, "", "5", "uneven", "asyncfetch", [], {}]),
    st.lists(st.sampled_from(NUMBERS), max_size=4),
    st.lists(st.lists(st.sampled_from(NUMBERS), max_size=4), max_size=4),
    st.recursive(
        st.sampled_from(NUMBERS),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["given", "pools"]), inner),
        max_leaves=6,
    ),
)


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


LINES = [Line(np.array(lengths), segment_frames=10) for lengths in ((9, 12, 3), (20, 7))]
MIXED = Left(tuple(Runs.whole(line, 5, 30) for line in LINES), np.array([[10, 15], [15, 10]]))


def moved(whole: Left, leg: Leg) -> State:
    """Of three ranks that were stopped in a second leg."""
    state = None
    for world_size, each in ((2, replace(leg, world_size=2)), (3, replace(leg, world_size=3))):
        states = []
        for rank in range(world_size):
            plan = plan_of(whole, each, Placement(rank, world_size), state)
            plan.progress.delivered = 4 * rank
            states.append(plan.progress.state())
        state = saved(merge_states(states))
    assert state is not None
    return state


KINDS = [
    (WHOLE, Leg(1, (4,)), state_of(0, 1, 12)),
    (WHOLE, Leg(3, (4,)), moved(WHOLE, Leg(3, (4,)))),
    (MIXED, Leg(3, (4, 2), "pad"), moved(MIXED, Leg(3, (4, 2), "pad"))),
    (MIXED, Leg(3, (4, 2), "drop", 4, "one"), moved(MIXED, Leg(3, (4, 2), "drop", 4, "one"))),
]


@settings(max_examples=400)
@given(data=st.data())
def test_junk_in_a_state_is_refused_or_gives_at_most_the_epoch(data: st.DataObject) -> None:
    whole, leg, state = data.draw(st.sampled_from(KINDS))
    damaged = put(state, data.draw(st.sampled_from(list(paths_in(state)))), data.draw(JUNK))
    leg = replace(leg, world_size=data.draw(st.sampled_from([1, 2, 3])))
    workers = data.draw(st.integers(1, 2))
    try:
        damaged = merge_states([damaged]) if data.draw(st.booleans()) else damaged
        is_finished(check_state(damaged))
        plan = plan_of(whole, leg, Placement(leg.world_size - 1, leg.world_size, workers - 1, workers), damaged)
    except (StateMismatch, ConfigError):
        return
    saved(plan.progress.state())
    found = samples_of(list(itertools.islice(plan.steps(), 500)))
    assert max(found.values(), default=1) == 1
    assert found.total() <= whole.total
