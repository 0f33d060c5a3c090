"""States of real streams and mixtures: what they are refused for, and that junk in them gives at most the epoch."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import asyncfetch as af
from asyncfetch.errors import ConfigError, StateMismatch
from asyncfetch.order.state import beginning
from asyncfetch.stream import Placement
from asyncfetch.stream.epoch_stream import source_of
from asyncfetch.torch import merge_states
from tests.order.test_state import JUNK, paths_in, put
from tests.stream.test_mixture_layouts import parted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncfetch.order.plan import Step
    from asyncfetch.order.state import State
    from asyncfetch.testing import DatasetTruth

CONFIG = af.StreamConfig(pool_segments=2, prefetch_segments=1, decode_threads=1)
Stream = af.Stream | af.Mixture


def stream_of(truth: DatasetTruth, **options: Any) -> af.Stream:  # noqa: ANN401
    return af.Stream(str(truth.root), **{"config": CONFIG, "features": [], **options})


def saved(state: State) -> State:
    found: State = json.loads(json.dumps(state))
    return found


def state_of(stream: Stream, rank: int, world_size: int, given: int, **layout: Any) -> State:  # noqa: ANN401
    """The state of a rank that was given so many samples of the epoch that comes next."""
    samples = source_of(stream).iterate(Placement(rank, world_size, **layout))
    assert len(list(itertools.islice(samples, given))) == given
    state = samples.state_dict()
    samples.close()
    return saved(state)


def states_of(stream: Stream, given: list[int], **layout: Any) -> State:  # noqa: ANN401
    """One state of all ranks, each of which was given so many samples."""
    return saved(
        merge_states([state_of(stream, rank, len(given), count, **layout) for rank, count in enumerate(given)])
    )


def steps_after(stream: Stream, state: State, placement: Placement) -> list[Step]:
    """What the next pass gives, of its samples' order alone: a few hundred at most."""
    stream.load_state_dict(state)
    plan = source_of(stream).planned(placement, stream.epoch)
    saved(plan.progress.state())
    return list(itertools.islice(plan.steps(), 500))


def keys_of(steps: list[Step]) -> list[tuple[int, int, int, int]]:
    return [(step.piece.member, step.piece.epoch, step.piece.episode, step.frame) for step in steps]


@pytest.fixture(scope="module")
def sources(truth: DatasetTruth, truths: list[DatasetTruth]) -> Iterator[list[tuple[Stream, State]]]:
    """A stream or a mixture, and a state of it, of each kind that there is."""
    stream, mixed = stream_of(truth), parted(truths)
    slow = states_of(stream, [9, 1, 4])
    stream.load_state_dict(slow)
    kinds: list[tuple[Stream, State]] = [(stream, states_of(stream, [12])), (stream, slow)]
    stream.load_state_dict(slow)
    kinds.append((stream, states_of(stream, [0, 3])))
    stream.set_epoch(4)
    kinds.append((stream, saved(stream.state_dict())))
    mixed.set_epoch(1)
    kinds.append((mixed, states_of(mixed, [9, 3], batch_size=4)))
    mixed.load_state_dict(kinds[-1][1])
    kinds.append((mixed, states_of(mixed, [4, 7, 1], batch_size=3)))
    assert [len(state.get("legs", [])) for _, state in kinds] == [2, 1, 2, 0, 1, 2]
    mixed.set_epoch(2)
    kinds.append((mixed, saved(mixed.state_dict())))
    yield kinds
    stream.close()
    mixed.close()


@pytest.mark.parametrize("kind", [2, 5], ids=["stream", "mixture"])
def test_a_state_of_any_ranks_is_gone_on_with_by_others(sources: list[tuple[Stream, State]], kind: int) -> None:
    """As two ranks or as five: just what was left, each sample once."""
    stream, state = sources[kind]
    rests = []
    for world_size in (2, 5):
        steps = [
            steps_after(stream, state, Placement(rank, world_size, batch_size=3 * (kind == 5) or None))
            for rank in range(world_size)
        ]
        rests.append(sorted(keys_of(list(itertools.chain(*steps)))))
        assert len(set(rests[-1])) == len(rests[-1])
    assert rests[0] == rests[1]
    given = sum(count for leg in state["legs"] for row in leg["given"] for count in told_in(row))
    assert len(rests[0]) == state["total"] - given
    stream.load_state_dict(beginning(0))


def told_in(row: list[Any]) -> list[int]:
    """How many samples these ranks were given, by a row of a state: spans before the pass, and counts since."""
    _, ranks, edges, *counts = row
    spans = [stop - start for start, stop in zip(edges[::2], edges[1::2], strict=True)]
    return [ranks * each for each in (*spans, *(count for _, count, _ in counts))]


@pytest.mark.parametrize("kind", [0, 4], ids=["stream", "mixture"])
@pytest.mark.parametrize("version", [1, 2])
def test_an_old_state_is_refused_with_the_way_on(sources: list[tuple[Stream, State]], kind: int, version: int) -> None:
    """0.1 wrote them, of one order for all ranks; what the error advises works."""
    stream, state = sources[kind]
    shares = {"world_size": 2, "workers": 1, "block_samples": 1, "delivered": [[0, 0, 5], [1, 0, 4]]}
    kept = {name: value for name, value in state.items() if name not in ("legs", "nodes")}
    old = kept | {"version": version, "rest": {"position": 0, "missing": []}, "shares": shares}
    following = state["epoch"] + 1
    advice = (
        rf"version {version}, .* epoch {state['epoch']} .*by the asyncfetch that wrote it.*set_epoch\({following}\)"
    )
    loads: list[Callable[[], object]] = [lambda: stream.load_state_dict(old), lambda: merge_states([old, old])]
    for load in loads:
        with pytest.raises(StateMismatch, match=advice):
            load()
    stream.set_epoch(following)
    assert next(iter(stream)) is not None
    assert stream.state_dict()["epoch"] == following
    stream.load_state_dict(beginning(0))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seed": 1}, "order"),
        ({"shuffle": False}, "order"),
        ({"episodes": [0, 1]}, "order"),
        ({"features": None}, "order"),
        ({"segment_seconds": 0.1}, "order"),
        ({"group_frames": 3}, "order"),
        ({"dataset": 1}, "dataset"),
    ],
    ids=str,
)
def test_a_state_of_another_order_is_refused(
    truths: list[DatasetTruth], sources: list[tuple[Stream, State]], change: dict[str, Any], name: str
) -> None:
    """With both values, and all that must be the same; at an epoch's beginning, too."""
    whole = sources[0][1]
    changed = {key: value for key, value in change.items() if hasattr(CONFIG, key)}
    options = {key: value for key, value in change.items() if key != "dataset" and key not in changed}
    for state in (whole, beginning(4, {key: whole[key] for key in ("dataset", "order")})):
        other = stream_of(truths[change.get("dataset", 0)], config=replace(CONFIG, **changed), **options)
        other.load_state_dict(state)
        with pytest.raises(StateMismatch, match=f"state's {name} is .*source, episodes, features, .*seed") as refused:
            next(iter(other))
        assert str(state[name]) in str(refused.value)
        other.close()


@pytest.mark.parametrize(
    ("states", "figures"),
    [
        (lambda of: [of(0, 2, 5), of(1, 3, 5)], "how ranks share, .*world_size=2.* and .*world_size=3"),
        (lambda of: [of(0, 4, 3), of(1, 4, 3)], r"4 ranks.*2 states 2 tell of ranks \[0, 1\]"),
        (lambda of: [of(0, 2, 3), of(0, 2, 4), of(1, 2, 3)], "rank 0 comes twice, with .*3.* and with .*4"),
        (lambda of: [of(0, 1, 3, workers=2)], "don't tell of rank 0, worker 1 of 2"),
        (lambda of: [of(0, 2, 3), None], "of these 2 1 hold no state"),
    ],
)
def test_states_that_are_not_one_of_each_rank_are_refused(
    sources: list[tuple[Stream, State]], states: Callable[[Any], list[Any]], figures: str
) -> None:
    stream = sources[0][0]
    stream.load_state_dict(beginning(0))

    def of(rank: int, world_size: int, given: int, **layout: int) -> State:
        return state_of(stream, rank, world_size, given, **layout)

    with pytest.raises(StateMismatch, match=figures):
        merge_states(states(of))


@pytest.mark.parametrize(
    ("damage", "figures"),
    [
        ({"epoch": 10**30}, f"epoch .* not {10**30}"),
        ({"total": 44}, "an epoch of 44 samples, and this one has 45"),
        ({"nodes": "2"}, "nodes .* not '2'"),
        ({"nodes": 0}, "nodes must be from 1 to its 1 ranks, not 0"),
        ({"nodes": 2**63 - 1}, "nodes must be from 1 to its 1 ranks"),
        ({"leg": {"world_size": 3}}, "1 of the 3 consumers"),
        ({"leg": {"pools": []}}, "legs"),
        ({"leg": {"pools": [2, 2]}}, "legs are of .* datasets"),
        ({"leg": {"given": [[0, 1, [], [0, 10**18, 45]]]}}, f"{10**18} samples of rank 0, worker 0, which takes 45"),
        ({"leg": {"given": [[0, 1, [0, 10**12], [0, 1, 45]]]}}, f"rank 0 was given .*{10**12}.* of 45 samples"),
    ],
    ids=str,
)
def test_a_damaged_state_is_refused_at_once(
    sources: list[tuple[Stream, State]], damage: dict[str, Any], figures: str
) -> None:
    stream = sources[0][0]
    stream.load_state_dict(beginning(0))
    state = states_of(stream, [5])
    changed = {name: value for name, value in damage.items() if name != "leg"}
    state["legs"][-1] |= damage.get("leg", {})
    samples = iter(stream)
    with pytest.raises(StateMismatch, match=figures):  # noqa: PT012
        stream.load_state_dict(state | changed)
        next(samples)
    stream.load_state_dict(beginning(0))


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_junk_in_a_state_is_refused_or_gives_at_most_the_epoch(
    sources: list[tuple[Stream, State]], data: st.DataObject
) -> None:
    stream, state = data.draw(st.sampled_from(sources))
    damaged = put(state, data.draw(st.sampled_from(list(paths_in(state)))), data.draw(JUNK))
    size, workers = data.draw(st.sampled_from([(None, 1), (3, 1), (None, 2)]))
    placement = Placement(data.draw(st.integers(0, 1)), 2, workers - 1, workers, batch_size=size)
    load: Callable[[State], State] = data.draw(st.sampled_from([lambda one: one, lambda one: merge_states([one])]))
    try:
        given = keys_of(steps_after(stream, load(damaged), placement))
    except (StateMismatch, ConfigError):
        return
    finally:
        stream.load_state_dict(beginning(0))
    # A block of any size is one that a run can have been begun with, and its epoch is as long.
    if damaged.get("order", {}).get("block_samples") == state.get("order", {}).get("block_samples"):
        assert len(set(given)) == len(given) < 200


@pytest.mark.parametrize(
    ("size", "drop_last"),
    [
        (5, False),
        (1000, False),
        (5, True),
        (1000, True),
        (2**24, True),
        (2**60, True),
    ],
)
def test_a_rest_in_batches_of_any_size_takes_no_more_work(
    sources: list[tuple[Stream, State]], size: int, *, drop_last: bool
) -> None:
    """Of each member one batch, or none, and the rest of its numbers are empty."""
    mixed, state = sources[4]
    left = {key for rank in (0, 1) for key in keys_of(steps_after(mixed, state, Placement(rank, 2)))}
    given = []
    for rank in (0, 1):
        placement = Placement(rank, 2, batch_size=size, drop_last=drop_last)
        mixed.load_state_dict(state)
        plan = source_of(mixed).planned(placement, mixed.epoch)
        steps = list(plan.steps())
        given += keys_of(steps)
        assert not steps or steps[-1].stop == plan.end
        assert len(plan) <= 3 * size + len(left)
    assert len(given) == len(set(given))
    assert {*given} == left if not drop_last else {*given} < left
    mixed.load_state_dict(beginning(0))
