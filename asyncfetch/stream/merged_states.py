"""One state of what the ranks and workers of a pass tell, each of itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from asyncfetch.errors import StateMismatch
from asyncfetch.stream.cursor import Rest
from asyncfetch.stream.state import (
    FORMAT,
    IDENTITY,
    LAYOUT,
    beginning,
    check_state,
    delivered_in,
    identity_of,
    is_beginning,
    run_of,
    shares_of,
)

if TYPE_CHECKING:
    from asyncfetch.stream.placement import Placement
    from asyncfetch.stream.state import State

__all__ = ["merge_shares", "merge_states"]


def merge_states(states: Sequence[Any]) -> State:
    """One state of the whole epoch, of one state from each rank, to go on with however many ranks and workers.

    Args:
        states: What ``state_dict`` gave on each rank: of a stream, a StreamDataset, or of a StatefulDataLoader, in
            which those of its workers are looked for.

    Returns:
        A state that every rank can load. What follows is just what was left; the order of the samples is that of an
        uninterrupted epoch where all ranks had been given equally many batches, or, where something else makes those,
        equally many times 32 samples.

    Raises:
        StateMismatch: There is none, they are of different passes or numbers of ranks and workers, or a rank's is
            missing, which can't be known where all are of an epoch's beginning. With uneven ends ranks that keep step
            may be in two epochs for a moment: one has begun the next when another still has a sample left of this. What
            they share then is no one epoch's rest, so take the states a step earlier or later, or have all ranks end
            together by ``uneven_ends="drop"`` or ``"pad"``.
    """
    given = states if isinstance(states, Iterable) else ()  # type: ignore[redundant-expr]
    ranks = [_told_by(each) for each in given]
    without = sum(not told for told in ranks)
    if without or not ranks:
        raise StateMismatch(f"give one state of each rank in a list: of these {len(ranks)} {without} hold no state")
    found = [state for told in ranks for state in told]
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
    merged = merge_shares(begun)
    delivered = delivered_in(merged["shares"])
    _check_told_once(ranks, delivered)
    everyone = _everyone_of(delivered, ranks)
    others = [placement for placement in everyone if placement.rank not in {one.rank for one in delivered}]
    if ended:
        unbegun = sum(is_beginning(state) for state in found) - len(ended)
        if unbegun:
            raise StateMismatch(
                f"{len(ended)} of the states are of the beginning of epoch {epochs[1]} and {unbegun} of that of "
                f"{epochs[0]}, and which ranks' they are isn't known: take them where each was given something"
            )
        total, rest = merged["total"], Rest.of_json(merged["rest"], merged["total"])
        delivered |= {placement: rest.shared(total, placement, "uneven")[0] for placement in others}
    else:
        delivered |= dict.fromkeys(others, 0)
    lacking = [str(placement) for placement in everyone if placement not in delivered]
    if lacking:
        raise StateMismatch(f"the states don't tell of {', '.join(lacking)}: give those of all workers of a rank")
    return merged | {"shares": shares_of(delivered)}


def _told_by(value: Any) -> list[State]:  # noqa: ANN401
    """The states that a rank gave: of those of its consumers that had a share in an epoch, or of where they begin."""
    found = [check_state(state) for state in _states_in(value)]
    return [state for state in found if not is_beginning(state)] or found


def _check_told_once(ranks: Sequence[Sequence[State]], delivered: Mapping[Placement, int]) -> None:
    """Several may tell of all ranks, as what was merged before does, but not each another thing."""
    for told in ranks:
        if is_beginning(told[0]):
            continue
        for placement, count in delivered_in(merge_shares(told)["shares"]).items():
            if count != delivered[placement]:
                raise StateMismatch(
                    f"{placement} comes twice, with {count} samples and with {delivered[placement]}: give one state of "
                    "each rank of one pass"
                )


def _everyone_of(delivered: Mapping[Placement, int], ranks: Sequence[Sequence[State]]) -> list[Placement]:
    """All consumers of the pass, if there is a state of each rank: who was given nothing doesn't say which it is."""
    one = next(iter(delivered))
    told = sorted({placement.rank for placement in delivered})
    unnamed = sum(is_beginning(states[0]) for states in ranks)
    if len(told) + unnamed != one.world_size:
        raise StateMismatch(
            f"{one.world_size} ranks shared the epoch, and of these {len(ranks)} states {len(ranks) - unnamed} tell of "
            f"ranks {told}, {unnamed} of an epoch's beginning: give one state of each rank"
        )
    return [replace(one, rank=rank, worker=worker) for rank in range(one.world_size) for worker in range(one.workers)]


def merge_shares(states: Sequence[State]) -> State:
    """One state of several consumers of one pass, not of all."""
    first = states[0]
    delivered: dict[Placement, int] = {}
    for state in states:
        for name in ("dataset", "order", "rest"):
            _check_same(name, first[name], state[name])
        for name in LAYOUT:
            _check_same(name, first["shares"][name], state["shares"][name])
        for placement, count in delivered_in(state["shares"]).items():
            delivered[placement] = max(count, delivered.get(placement, 0))
    return first | {"shares": shares_of(delivered)}


def _check_same(name: str, one: object, other: object) -> None:
    if one != other:
        raise StateMismatch(f"the states differ in {name}, {one} and {other}: give one of each rank of one pass")


def _states_in(value: Any) -> list[Mapping[str, Any]]:  # noqa: ANN401
    """Those anywhere inside of nested dicts and lists."""
    if isinstance(value, Mapping):
        if value.get("format") == FORMAT:
            return [value]
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [state for each in value for state in _states_in(each)]
    return []
