"""Saved progress: what was given of an epoch, as small JSON, and how a later pass goes on from it.

A state names the dataset and the order by what they depend on, the epoch, and its *legs*: each is a way in which ranks
shared what was left, and what each rank was given of its numbers (see ``deal``), as spans. Of the last leg it tells
what was given when the pass began, and how many samples the rank's workers were given since, as far as the process that
wrote it knows; then, as spans, those that they were given before their turn, while others wait for a batch. That of an
epoch's beginning ends after the epoch; before the first pass it doesn't name the dataset either. What several know is
put together by ``merge_states``.

The order of a mixture says besides where an epoch lies in the run: the state's epoch or, at an epoch's beginning, the
one read before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, get_args

import numpy as np

from asyncfetch.config.checks import is_whole_number
from asyncfetch.errors import StateMismatch
from asyncfetch.order.deal import Ends, Leg
from asyncfetch.order.mixing import EpochPlace
from asyncfetch.order.placement import Placement

FORMAT = "asyncfetch stream state"
VERSION = 3
"""1 and 2, of 0.1, were of one order for all ranks, which is no more."""
MIXTURE_VERSION = 3
"""The version of a mixture's order. 1 didn't say where an epoch lies in the run; 2 had one order for all ranks."""
MAX_EPOCH = 2**63 - 2
"""They are counted in 64 bits, and so is the one after the last."""
MAX_WORKERS = 1024
"""Loader workers of one rank that are counted."""
_MAX_RANKS = 2**20
_MAX_BLOCK = 2**24
"""Far above real numbers: more in a state is damage, and would be counted through."""

IDENTITY = ("dataset", "order")
"""Keys of a state that say what its order depends on."""
_PLACE = ("epoch", "block_samples", "taken")
"""Keys of the place in a mixture's order: see EpochPlace."""
_LEG = tuple(Leg.__dataclass_fields__)
_ONE_STREAM = "source, episodes, features, shuffle, seed, segment_seconds, group_frames and version of the order"
"""Words for what makes a stream's identity."""
_SEVERAL = f"weights, stop_on, seed, the streams and, of each of them, {_ONE_STREAM}"

State = dict[str, Any]
"""JSON: only dicts with string keys, lists, strings, whole numbers, booleans and None."""
Spans = tuple[tuple[int, int], ...]
"""Half-open spans of numbers, which ascend and don't meet."""


@dataclass(frozen=True, slots=True)
class RankProgress:
    """The progress of one rank in a leg."""

    before: Spans = ()
    """Its numbers, before the pass."""
    counts: tuple[tuple[int, ...], ...] = ()
    """(worker, samples that it was given since, samples that it is given of all that was left then), then where spans
    of the numbers that it was given before their turn begin and end."""


@dataclass(frozen=True)
class Sharing:
    """A leg as far as it is known: the ranks that shared it, and what they were given."""

    leg: Leg
    workers: int
    turn_samples: int
    given: Mapping[int, RankProgress]
    """By rank."""

    @property
    def is_known(self) -> bool:
        """True if it is known of all consumers."""
        each = self.given.values()
        return len(self.given) == self.leg.world_size and all(len(one.counts) == self.workers for one in each)

    @property
    def is_closed(self) -> bool:
        """True if all that it gave is known, as spans."""
        return len(self.given) == self.leg.world_size and not any(one.counts for one in self.given.values())

    @property
    def is_even(self) -> bool:
        """True if it is known of all ranks, and what each was given begins and ends where blocks do."""
        edges = (edge for rank in self.given for span in self.taken(rank) for edge in span)
        return self.is_known and not any(edge % self.leg.block_samples for edge in edges)

    def taken(self, rank: int) -> Spans:
        """Return all numbers that a rank was given."""
        one = self.given[rank]
        numbers = {worker: _numbers(count, edges) for worker, count, _, *edges in one.counts}
        return _taken(one.before, Placement(0, 1, 0, self.workers, self.turn_samples), numbers)

    @cached_property
    def json(self) -> dict[str, Any]:
        """The leg in a state: neighbouring ranks that were given the same, as mostly, take no more room than one."""
        known = [(rank, self.given[rank]) for rank in sorted(self.given)]
        rows = []
        for (_, one), alike in groupby(enumerate(known), key=lambda each: (each[1][0] - each[0], each[1][1])):
            ranks = [rank for _, (rank, _) in alike]
            rows.append([ranks[0], len(ranks), [edge for span in one.before for edge in span], *map(list, one.counts)])
        layout = {"workers": self.workers, "turn_samples": self.turn_samples}
        return {**asdict(self.leg), "pools": list(self.leg.pools), **layout, "given": rows}

    def closed(self) -> Sharing:
        """Return the leg without its workers."""
        given = {rank: RankProgress(self.taken(rank)) for rank in self.given}
        return Sharing(self.leg, 1, 1, given)


def spans_left(before: Spans, number: int) -> int:
    """Return which number is the ``number``-th that isn't in the spans."""
    left = number
    for start, stop in before:
        if left < start:
            break
        left += stop - start
    return left


def _numbers(count: int, edges: Sequence[int]) -> Spans:
    """A worker's numbers that it was given: the first so many, and those in spans behind them."""
    return _joined([(0, count), *zip(edges[::2], edges[1::2], strict=True)])


def _taken(before: Spans, layout: Placement, workers_spans: Mapping[int, Spans]) -> Spans:
    """Add to the spans what workers were given of the numbers outside of them, by their own numbers."""
    size, workers = layout.turn_samples, layout.workers
    if not workers_spans:
        return before
    each = [workers_spans.get(worker, ()) for worker in range(workers)]
    rounds = min(own[0][1] if own and own[0][0] == 0 else 0 for own in each) // size
    found = [np.arange(0)]
    for worker, spans_of_it in enumerate(each):
        for start, stop in spans_of_it:
            own = np.arange(max(start, rounds * size), stop)
            found.append((own // size * workers + worker) * size + own % size)
    behind = np.sort(np.concatenate(found))
    runs = np.split(behind, np.flatnonzero(np.diff(behind) > 1) + 1)
    spans = [(0, rounds * size * workers), *((int(run[0]), int(run[-1]) + 1) for run in runs if len(run))]
    given: list[tuple[int, int]] = list(before)
    for start, stop in spans:
        while start < stop:  # a span of what was left lies around those given before
            first = spans_left(before, start)
            following = next((begin for begin, _ in before if begin > first), None)
            until = stop if following is None else min(stop, start + following - first)
            given.append((first, first + until - start))
            start = until
    return _joined(given)


def _joined(spans: Iterable[tuple[int, int]]) -> Spans:
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        elif start < stop:
            joined.append((start, stop))
    return tuple(joined)


@dataclass(slots=True)
class EpochProgress:
    """The progress of one consumer in a pass."""

    identity: Mapping[str, Any]
    """All that the order depends on: ``dataset``, a fingerprint, and ``order``, the numbers it was made with."""
    epoch: int
    total: int
    """Samples of the epoch."""
    leg: Leg
    placement: Placement
    nodes: int = 1
    """Number of nodes that shared the segments when the epoch began."""
    legs: tuple[Sharing, ...] = ()
    """The legs before, of which all is known."""
    before: Spans = ()
    """Numbers that the rank was given of this leg before the pass began."""
    share: int = 0
    """Samples that the consumer takes of what was left then."""
    delivered: int = 0
    """Samples that the consumer was given since, padding included."""
    ahead: Spans = ()
    """Further numbers of the consumer's that it was given, while samples before them wait for a batch."""

    def deliver(self, number: int, waiting: Iterable[int]) -> None:
        """Note that the consumer was given all before this number, but for those that wait and that it hadn't been."""
        holes = sorted(each for each in waiting if not any(start <= each < stop for start, stop in self.ahead))
        self.delivered = min([number, *holes])
        edges = zip([self.delivered, *(hole + 1 for hole in holes)], [*holes, number], strict=True)
        self.ahead = _joined([*edges, *((max(start, number), max(stop, number)) for start, stop in self.ahead)])

    def state(self) -> State:
        """Return the state as it is now."""
        one = self.placement
        count, spans = self.delivered, [span for span in self.ahead if span[1] > self.delivered]
        if spans and spans[0][0] <= count:
            count, spans = spans[0][1], spans[1:]
        counts = ((one.worker, count, self.share, *(edge for span in spans for edge in span)),)
        here = Sharing(self.leg, one.workers, one.turn_samples, {one.rank: RankProgress(self.before, counts)})
        return {
            "format": FORMAT,
            "version": VERSION,
            **self.identity,
            "epoch": self.epoch,
            "total": self.total,
            "nodes": self.nodes,
            "legs": [each.json for each in (*self.legs, here)],
        }

    @property
    def is_resumed(self) -> bool:
        """True if something of the epoch was given before the pass."""
        return bool(self.legs or self.before or self.delivered)

    def resumed(self, state: Mapping[str, Any]) -> EpochProgress:
        """This pass, yet to begin, from where the state was taken; its ``share`` isn't known yet.

        Raises:
            StateMismatch: It is of another dataset or order, or doesn't know enough.
        """
        self.check(state)
        total = state.get("total", self.total)
        if total != self.total:
            raise StateMismatch(f"the state is of an epoch of {total} samples, and this one has {self.total}")
        if is_beginning(state):
            return self
        *legs, last = _legs_in(state)
        members = {len(each.leg.pools) for each in (*legs, last)}
        if members != {len(self.leg.pools)}:
            raise StateMismatch(f"the state's legs are of {members} datasets, and this reads {len(self.leg.pools)}")
        here = replace(self, nodes=state["nodes"], legs=tuple(legs))
        own, one = last.given.get(self.placement.rank), self.placement
        if last.leg == self.leg:
            counts = {} if own is None else {worker: (count, edges) for worker, count, _, *edges in own.counts}
            if (last.workers, last.turn_samples) == (one.workers, one.turn_samples) and one.worker in counts:
                assert own is not None
                count, edges = counts[one.worker]
                return replace(here, before=own.before, delivered=count, ahead=_numbers(0, edges))
            if own is not None and len(counts) == last.workers and (self.leg.batches == "any" or last.is_even):
                return replace(here, before=last.taken(one.rank))
        if not last.is_known:
            known = sum(len(each.counts) for each in last.given.values())
            raise StateMismatch(
                f"the state tells of {known} of the {last.leg.world_size * last.workers} consumers "
                f"({last.leg.world_size} ranks, {last.workers} workers each) that shared the epoch, which isn't enough "
                f"for {one}: load asyncfetch.torch.merge_states([one state of each rank])"
            )
        return replace(here, legs=(*legs, last.closed()))

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises StateMismatch where it is of another dataset or order."""
        given, own = run_of(identity_of(state)), run_of(self.identity)
        if given and _kind(given) != _kind(own):
            raise StateMismatch(
                f"this is the state of {_kind(given)}, {given}, and can't be loaded into {_kind(own)}, {own}"
            )
        # A mixture's order goes into what it says of its members, so what is named is what was changed.
        for name in ("order", "dataset"):
            if name in given and given[name] != own[name]:
                without = f"; or make this anew, without the state, and set_epoch({self.epoch})"
                instead = without if is_beginning(state) else ""
                raise StateMismatch(
                    f"the state's {name} is {given[name]}, and that of this is {own[name]}: load it where "
                    f"{_SEVERAL if _is_of_mixture(own) else _ONE_STREAM} are the same{instead}"
                )


def _legs_in(state: Mapping[str, Any]) -> list[Sharing]:
    """Return the legs that a state tells of; StateMismatch where they can't be read."""
    try:
        found = [_sharing_in(leg, state["total"]) for leg in state["legs"]]
    except StateMismatch:  # a ValueError, too
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise StateMismatch(f"the state's legs can't be read: {str(state.get('legs'))[:400]}") from error
    if not found or not all(each.is_closed for each in found[:-1]):
        raise StateMismatch("the state's legs must be known of all ranks but for the last one's")
    return found


def _sharing_in(leg: Mapping[str, Any], total: int) -> Sharing:
    numbers = [leg["world_size"], leg["block_samples"], leg["workers"], leg["turn_samples"], *leg["pools"]]
    if not all(_whole(each) >= 1 for each in numbers) or leg["workers"] > MAX_WORKERS:
        raise ValueError(numbers)
    if leg["world_size"] > _MAX_RANKS or leg["block_samples"] > max(total, _MAX_BLOCK):
        raise ValueError(numbers)
    if leg["ends"] not in get_args(Ends) or leg["batches"] not in {"any", "one", "whole"} or not leg["given"]:
        raise ValueError(leg["ends"])
    given: dict[int, RankProgress] = {}
    for first, ranks, edges, *counts in leg["given"]:
        before = tuple(zip(map(_whole, edges[::2]), map(_whole, edges[1::2]), strict=True))
        progress = tuple(sorted(tuple(map(_whole, each)) for each in counts))
        is_ascending = list(edges) == sorted(set(edges)) and (not edges or edges[0] >= 0)
        workers = [worker for worker, *_ in progress]
        are_counts = all(0 <= worker < leg["workers"] and count >= 0 for worker, count, _, *_ in progress)
        are_counts = are_counts and all(map(_are_ahead, progress))
        if not is_ascending or not are_counts or len(set(workers)) < len(workers):
            raise ValueError(edges, counts)
        if not 0 <= _whole(first) < _whole(first) + _whole(ranks) <= leg["world_size"]:
            raise ValueError(first, ranks)
        most = total + len(leg["pools"]) * leg["block_samples"]  # empty numbers may follow a member's last samples
        if before and before[-1][1] > most:
            raise StateMismatch(
                f"the state's legs can't be: rank {first} was given {before} of an epoch of {total} samples"
            )
        for worker, count, share, *edges in progress:
            last = max(count, *edges, 0)
            if not last <= share <= most:
                raise StateMismatch(
                    f"the state's legs can't be: {last} samples of rank {first}, worker {worker}, which takes {share}"
                )
        alike = dict.fromkeys(range(first, first + ranks), RankProgress(before, progress))
        if not given.keys().isdisjoint(alike):
            raise ValueError(first, ranks)
        given |= alike
    values = {name: leg[name] for name in _LEG} | {"pools": tuple(leg["pools"])}
    return Sharing(Leg(**values), leg["workers"], leg["turn_samples"], given)


def _are_ahead(progress: Sequence[int]) -> bool:
    """Return whether spans ascend, and lie behind the numbers that were given in turn."""
    _, count, _, *edges = progress
    return len(edges) % 2 == 0 and all(one < other for one, other in pairwise([count, *edges]))


def _whole(value: Any) -> int:  # noqa: ANN401
    if not is_whole_number(value):
        raise TypeError(f"{value!r} is no whole number")
    return int(value)


def _is_of_mixture(identity: Mapping[str, Any]) -> bool:
    order = identity.get("order")
    return isinstance(order, Mapping) and "stop_on" in order


def _kind(identity: Mapping[str, Any]) -> str:
    return f"a mixture of {identity['order']['members']} members" if _is_of_mixture(identity) else "a stream"


def beginning(epoch: int, identity: Mapping[str, Any] | None = None) -> State:
    """The state of an epoch of which nothing was delivered; without an identity of whatever dataset."""
    return {"format": FORMAT, "version": VERSION, **(identity or {}), "epoch": epoch}


def identity_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what its order depends on: see EpochProgress. Empty where it doesn't say."""
    return {name: state[name] for name in IDENTITY if name in state}


def run_of(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The identity without the place in the run: that of all epochs of a mixture."""
    if not _is_of_mixture(identity):
        return dict(identity)
    return {**identity, "order": {name: value for name, value in identity["order"].items() if name not in _PLACE}}


def place_of(identity: Mapping[str, Any]) -> EpochPlace:
    """Return where the epoch lies in the run that a mixture's identity speaks of."""
    epoch, block_samples, taken = (identity["order"][name] for name in _PLACE)
    return EpochPlace(epoch, block_samples, tuple(taken))


def is_beginning(state: Mapping[str, Any]) -> bool:
    """Return whether it is what ``beginning`` gave."""
    return "legs" not in state


def has_given_all(state: Mapping[str, Any], least_samples: int) -> bool:
    """Return whether its known consumers are given nothing more of its epoch."""
    last = _legs_in(state)[-1]
    left = (share - count - sum(edges[1::2]) + sum(edges[::2]) for _, count, share, *edges in _counts_in(last))
    return all(each < least_samples for each in left)


def _counts_in(sharing: Sharing) -> Iterable[tuple[int, ...]]:
    return (each for one in sharing.given.values() for each in one.counts)


def is_finished(state: Mapping[str, Any], least_samples: int = 1) -> bool:
    """Return whether none of its consumers is given anything more of its epoch, as far as the state tells of them all.

    One rank's own state tells it of the others where all are given equally many. Fewer than ``least_samples`` aren't
    given.
    """
    if is_beginning(state):
        return False
    last = _legs_in(state)[-1]
    if not last.is_known:
        left = state["total"] - sum(
            stop - start for leg in _legs_in(state)[:-1] for each in leg.given.values() for start, stop in each.before
        )
        is_even = last.leg.batches == "any" and (last.leg.ends != "uneven" or left % last.leg.world_size == 0)
        ranks = last.leg.world_size
        has_equal_batches = left // ranks // least_samples == -(-left // ranks) // least_samples
        is_even = is_even or (last.leg.batches == "any" and has_equal_batches)
        if not is_even or last.workers > 1:
            return False
    return has_given_all(state, least_samples)


def check_state(state: object) -> State:
    """The state, if this version can read it."""
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        raise StateMismatch(f"this isn't a state of a stream: {str(state)[:200]}")
    epoch: Any = state.get("epoch")
    if state.get("version") != VERSION:
        following = f", set_epoch({epoch + 1})" if is_whole_number(epoch) else ""
        raise StateMismatch(
            f"the state is of version {state.get('version')}, and this asyncfetch reads version {VERSION}: the rest of "
            f"its epoch {epoch} can be resumed by the asyncfetch that wrote it; to go on with the next epoch here "
            f"don't load the state{following}"
        )
    if not is_whole_number(epoch) or not 0 <= epoch <= MAX_EPOCH:
        raise StateMismatch(f"the state's epoch must be a whole number from 0, below 2**63 - 1, not {epoch!r}")
    if _is_of_mixture(state):
        _check_place(state)
    if not is_beginning(state):
        lacking = {*IDENTITY, "total", "nodes", "legs"} - state.keys()
        if lacking:
            raise StateMismatch(f"the state lacks {', '.join(sorted(lacking))}")
        for name in ("total", "nodes"):
            if not is_whole_number(state[name]) or state[name] < 0:
                raise StateMismatch(f"the state's {name} must be a whole number, not {state[name]!r}")
        ranks = _legs_in(state)[0].leg.world_size
        if not 1 <= state["nodes"] <= ranks:
            raise StateMismatch(f"the state's nodes must be from 1 to its {ranks} ranks, not {state['nodes']!r}")
    return dict(state)


def _check_place(state: Mapping[str, Any]) -> None:
    order: Mapping[str, Any] = state["order"]
    version = order.get("version", 1)
    if version != MIXTURE_VERSION:
        raise StateMismatch(
            f"the state is of version {version} of a mixture's order, and this asyncfetch reads {MIXTURE_VERSION}: go "
            "on with the asyncfetch that wrote it, or begin an epoch anew, by set_epoch and without the state"
        )
    taken: Any = order.get("taken")
    numbers: list[Any] = [order.get(name) for name in ("members", "epoch", "block_samples")]
    is_place = isinstance(taken, list) and all(is_whole_number(each) and each >= 0 for each in (*numbers, *taken))
    if not is_place or max(numbers + taken) > MAX_EPOCH or len(taken) != order["members"] or not order["block_samples"]:
        raise StateMismatch(f"the state's order must say of its members what was taken before an epoch, not {order}")
    if not is_beginning(state) and order["epoch"] != state["epoch"]:
        raise StateMismatch(f"the state is of epoch {state['epoch']}, and its order of epoch {order['epoch']}")


def merge_states(states: Sequence[Any]) -> State:
    """One state of the whole epoch, of one state from each rank, to go on with however many ranks and workers.

    Args:
        states: What ``state_dict`` gave on each rank: of a stream, a StreamDataset, or of a StatefulDataLoader, in
            which those of its workers are looked for.

    Returns:
        A state that every rank can load. What follows is just what was left; with as many ranks, and pools as large,
        the order of the samples is that of an uninterrupted epoch.

    Raises:
        StateMismatch: There is none, they are of different passes or numbers of ranks and workers, or a rank's is
            missing, which can't be known where all are of an epoch's beginning. With uneven ends ranks that keep step
            may be in two epochs for a moment: one has begun the next when another still has a sample left of this. What
            they share then is no one epoch's rest, so take the states a step earlier or later, or have all ranks end
            together by ``uneven_ends="drop"`` or ``"pad"``.
    """
    given = states if isinstance(states, Iterable) else ()  # type: ignore[redundant-expr]
    ranks = [_states_of_rank(each) for each in given]
    without = sum(not states for states in ranks)
    if without or not ranks:
        raise StateMismatch(f"give one state of each rank in a list: of these {len(ranks)} {without} hold no state")
    found = [state for states in ranks for state in states]
    begun = [state for state in found if not is_beginning(state)]
    epochs = sorted({state["epoch"] for state in found})
    # A rank whose part of an epoch has ended is at the next one's beginning, others may have a sample left.
    ended = [state for state in found if state["epoch"] > epochs[0]]
    if ended and (epochs[-1] > epochs[0] + 1 or not begun or not all(map(is_beginning, ended))):
        raise StateMismatch(
            f"the states are of different epochs, {epochs}, and tell of no rest that all ranks share: take them where "
            'all are in one epoch; with uneven_ends="drop" or "pad" they begin each together'
        )
    known = [identity_of(state) for state in found if identity_of(state)]
    # Those that have begun an epoch know another place in the run than those that haven't.
    compared = [run_of(identity) for identity in known] if begun else known
    for identity in compared:
        for name in IDENTITY:
            _check_same(name, compared[0].get(name), identity.get(name))
    if not begun:
        return beginning(epochs[0], known[0] if known else None)
    merged, last = _merged(begun)
    known_ranks = sorted(last.given)
    unnamed = sum(is_beginning(states[0]) for states in ranks)
    if len(known_ranks) + unnamed != last.leg.world_size:
        raise StateMismatch(
            f"{last.leg.world_size} ranks shared the epoch, and of these {len(ranks)} states {len(ranks) - unnamed} "
            f"tell of ranks {known_ranks}, {unnamed} of an epoch's beginning: give one state of each rank"
        )
    others = sorted(set(range(last.leg.world_size)) - set(known_ranks))
    if ended and sum(is_beginning(state) for state in found) > len(ended):
        raise StateMismatch(
            f"{len(ended)} of the states are of the beginning of epoch {epochs[1]} and others of that of {epochs[0]}, "
            f"and which ranks' they are isn't known: take them where each was given something"
        )
    # A rank that was given nothing, or all, doesn't say which it is. Spans that are longer than a share are cut to it.
    whole: Spans = ((0, merged["total"]),) if ended else ()
    lacking = [
        f"rank {rank}, worker {worker} of {last.workers}"
        for rank, one in sorted(last.given.items())
        for worker in sorted(set(range(last.workers)) - {each for each, *_ in one.counts})
    ]
    if lacking:
        raise StateMismatch(f"the states don't tell of {', '.join(lacking)}: give those of all workers of a rank")
    nothing = tuple((worker, 0, 0) for worker in range(last.workers))
    everyone = {**last.given, **{rank: RankProgress(whole, nothing) for rank in others}}
    return merged | {"legs": [*merged["legs"][:-1], replace(last, given=everyone).json]}


def merge_shares(states: Sequence[State]) -> State:
    """One state of several consumers of one pass, not of all."""
    merged, last = _merged(states)
    return merged | {"legs": [*merged["legs"][:-1], last.json]}


def _merged(states: Sequence[State]) -> tuple[State, Sharing]:
    first = states[0]
    last = _sharing_in(first["legs"][-1], first["total"])
    given: dict[int, RankProgress] = {}
    for state in states:
        here = _sharing_in(state["legs"][-1], state["total"])
        for name in ("dataset", "order", "total", "nodes"):
            _check_same(name, first[name], state[name])
        _check_same("legs before", first["legs"][:-1], state["legs"][:-1])
        _check_same("how ranks share", last.leg, here.leg)
        _check_same("workers", (last.workers, last.turn_samples), (here.workers, here.turn_samples))
        for rank, one in here.given.items():
            known = given.setdefault(rank, one)
            _check_same(f"what rank {rank} was given before", known.before, one.before)
            counts = dict.fromkeys(known.counts) | dict.fromkeys(one.counts)
            if len({worker for worker, *_ in counts}) < len(counts):
                raise StateMismatch(
                    f"rank {rank} comes twice, with {known.counts} and with {one.counts}: give one state of each rank "
                    "of one pass"
                )
            given[rank] = replace(known, counts=tuple(sorted(counts)))
    return first, replace(last, given=given)


def _states_of_rank(value: Any) -> list[State]:  # noqa: ANN401
    """Return a rank's states: of its consumers that had a share in an epoch, or else of the beginning."""
    found = [check_state(state) for state in _states_in(value)]
    return [state for state in found if not is_beginning(state)] or found


def _check_same(name: str, one: object, other: object) -> None:
    if one != other:
        raise StateMismatch(f"the states differ in {name}, {one} and {other}: give one of each rank of one pass")


def _states_in(value: Any) -> list[Mapping[str, Any]]:  # noqa: ANN401
    """Return those anywhere inside of nested dicts and lists."""
    if isinstance(value, Mapping):
        if value.get("format") == FORMAT:
            return [value]
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [state for each in value for state in _states_in(each)]
    return []
