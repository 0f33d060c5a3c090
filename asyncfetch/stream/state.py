"""Saved progress: what a pass has delivered, as small JSON, and how a later one goes on from it.

A state names the dataset and the order by what they depend on, the epoch, what was left of it when the pass began, who
shared that, and how many samples each of them was given, as far as the process that wrote it knows. ``merge_states``
puts together what several know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asyncfetch.errors import StateMismatch
from asyncfetch.stream.cursor import Ends, Rest
from asyncfetch.stream.placement import Placement

__all__ = [
    "Progress",
    "State",
    "beginning",
    "check_state",
    "is_beginning",
    "is_finished",
    "merge_shares",
    "merge_states",
]

FORMAT = "asyncfetch stream state"
VERSION = 1

State = dict[str, Any]
"""JSON: only dicts with string keys, lists, strings, whole numbers, booleans and None."""


@dataclass(slots=True)
class Progress:
    """How far one consumer has come in a pass."""

    identity: Mapping[str, Any]
    """What the order depends on: ``dataset``, a fingerprint, and ``order``, the numbers it was made with."""
    epoch: int
    total: int
    """Samples of the epoch."""
    rest: Rest
    """What was left of it when this pass began."""
    placement: Placement
    ends: Ends
    delivered: int = 0
    """Samples that the consumer was given, padding included."""

    def state(self) -> State:
        """As it is now."""
        return {
            "format": FORMAT,
            "version": VERSION,
            **self.identity,
            "epoch": self.epoch,
            "total": self.total,
            "rest": self.rest.as_json(),
            "shares": _shares({self.placement: self.delivered}),
        }

    def resumed(self, state: Mapping[str, Any]) -> Progress:
        """This pass, yet to begin, from where the state was taken.

        Raises:
            StateMismatch: It is of another dataset or order, or doesn't know enough.
        """
        for name in ("dataset", "order"):
            if state[name] != self.identity[name]:
                raise StateMismatch(
                    f"the state's {name} is {state[name]}, and this stream's is {self.identity[name]}: load it where "
                    "source, episodes, features, shuffle, seed, lanes, pool_episodes, group_frames and the version of "
                    "asyncfetch's order are the same"
                )
        rest = Rest.of_json(state["rest"], self.total)
        delivered = _delivered(state["shares"])
        if self.placement in delivered:
            return replace(self, rest=rest, delivered=delivered[self.placement])
        known = next(iter(delivered))
        if len(delivered) < known.consumers:
            raise StateMismatch(
                f"the state tells of {len(delivered)} of the {known.consumers} consumers ({known.world_size} ranks, "
                f"{known.workers} workers each) that shared the epoch, and not of rank {self.placement.rank} of "
                f"{self.placement.world_size}, worker {self.placement.worker} of {self.placement.workers}: load "
                "asyncfetch.torch.merge_states([one state of each rank])"
            )
        return replace(self, rest=rest.after(delivered, self.total))


def beginning(epoch: int) -> State:
    """The state of an epoch of which nothing was delivered, of whatever dataset."""
    return {"format": FORMAT, "version": VERSION, "epoch": epoch}


def is_beginning(state: Mapping[str, Any]) -> bool:
    """Whether it is what ``beginning`` gave."""
    return "shares" not in state


def is_finished(state: Mapping[str, Any], ends: Ends) -> bool:
    """Whether nothing of its epoch is left, for any of its consumers, as far as the state tells of them all.

    One rank's own state tells it of the others where all have equally many samples.
    """
    if is_beginning(state) or "total" not in state:
        return False
    total, rest, delivered = state["total"], Rest.of_json(state["rest"], state["total"]), _delivered(state["shares"])
    one = next(iter(delivered))
    everyone = _everyone(one)
    if len(delivered) < len(everyone):
        parts = {rest.shared(total, placement, ends)[0] for placement in everyone}
        if len(parts) > 1 or one.workers > 1:
            return False
    return all(count >= rest.shared(total, placement, ends)[0] for placement, count in delivered.items())


def check_state(state: object) -> State:
    """The state, if this version can read it."""
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        raise StateMismatch(f"this isn't a state of a stream: {str(state)[:200]}")
    if state.get("version") != VERSION:
        raise StateMismatch(f"the state is of version {state.get('version')}, and this asyncfetch reads {VERSION}")
    if not isinstance(state.get("epoch"), int) or state["epoch"] < 0:
        raise StateMismatch(f"the state's epoch must be a whole number from 0, not {state.get('epoch')!r}")
    if not is_beginning(state):
        lacking = {"dataset", "order", "rest"} - state.keys()
        if lacking:
            raise StateMismatch(f"the state lacks {', '.join(sorted(lacking))}")
        _delivered(state["shares"])
    return dict(state)


def merge_states(states: Sequence[Any]) -> State:
    """One state of the whole epoch, of one state from each rank, to go on with however many ranks and workers.

    Args:
        states: What ``state_dict`` gave on each rank: of a stream, a StreamDataset, or of a StatefulDataLoader, in
            which those of its workers are looked for.

    Returns:
        A state that every rank can load. What follows is just what was left; the order of the samples is that of an
        uninterrupted epoch where all consumers had been given equally many.

    Raises:
        StateMismatch: There is none, they are of different passes, or a rank's is missing. With uneven ends ranks that
            keep step may be in two epochs for a moment: one has begun the next when another still has a sample left of
            this. What they share then is no one epoch's rest, so take the states a step earlier or later, or have all
            ranks end together by ``uneven_ends="drop"`` or ``"pad"``.
    """
    found = [check_state(state) for each in states for state in _states_in(each)]
    if not found:
        raise StateMismatch("none of these holds a state of a stream")
    epochs = sorted({state["epoch"] for state in found})
    # A rank whose part of an epoch has ended is at the next one's beginning, others may have a sample left.
    ahead = [state for state in found if state["epoch"] == epochs[0] + 1 and is_beginning(state)]
    if len(epochs) > 1 and len(ahead) < sum(state["epoch"] > epochs[0] for state in found):
        raise StateMismatch(
            f"the states are of different epochs, {epochs}, and of the later ones something was delivered: take them "
            'where all ranks are in one epoch; with uneven_ends="drop" or "pad" they begin each together'
        )
    begun = [state for state in found if not is_beginning(state)]
    if not begun:
        return found[0]
    merged = merge_shares(begun)
    delivered = _delivered(merged["shares"])
    everyone = _everyone(next(iter(delivered)))
    if len(epochs) > 1:
        delivered = _with_finished(merged, delivered, everyone, len(ahead))
    elif len(begun) < len(found):  # who was given nothing yet doesn't know of how many it is one
        delivered = dict.fromkeys(everyone, 0) | delivered
    if delivered.keys() != set(everyone):
        different = sorted(map(str, delivered.keys() ^ set(everyone)))
        raise StateMismatch(f"give one state of each rank of one pass: {', '.join(different)} don't fit or are missing")
    return merged | {"shares": _shares(delivered)}


def _with_finished(
    state: Mapping[str, Any], delivered: Mapping[Placement, int], everyone: Sequence[Placement], finished: int
) -> dict[Placement, int]:
    """What everyone was given, where so many ranks that the state doesn't tell of have come to their end."""
    told = {placement.rank for placement in delivered}
    others = [placement for placement in everyone if placement.rank not in told]
    if "total" not in state or finished not in {len(others), len({placement.rank for placement in others})}:
        raise StateMismatch(
            f"{finished} of the states are at the next epoch's beginning, and those of this one tell of "
            f"{len(told)} of {everyone[0].world_size} ranks: give one state of each rank"
        )
    total, rest = state["total"], Rest.of_json(state["rest"], state["total"])
    return dict(delivered) | {placement: rest.shared(total, placement, "uneven")[0] for placement in others}


def merge_shares(states: Sequence[State]) -> State:
    """One state of several consumers of one pass, not of all."""
    first = states[0]
    delivered: dict[Placement, int] = {}
    for state in states:
        for name in ("dataset", "order", "rest"):
            if state[name] != first[name]:
                raise StateMismatch(f"the states differ in {name}: {first[name]} and {state[name]}")
        for placement, count in _delivered(state["shares"]).items():
            delivered[placement] = max(count, delivered.get(placement, 0))
    return first | {"shares": _shares(delivered)}


def _states_in(value: Any) -> list[Mapping[str, Any]]:  # noqa: ANN401
    """Those anywhere inside of nested dicts and lists."""
    if isinstance(value, Mapping):
        if value.get("format") == FORMAT:
            return [value]
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [state for each in value for state in _states_in(each)]
    return []


def _everyone(one: Placement) -> list[Placement]:
    return [replace(one, rank=rank, worker=worker) for rank in range(one.world_size) for worker in range(one.workers)]


def _shares(delivered: Mapping[Placement, int]) -> State:
    one = next(iter(delivered))
    given = sorted([placement.rank, placement.worker, count] for placement, count in delivered.items())
    return {
        "world_size": one.world_size,
        "workers": one.workers,
        "block_samples": one.block_samples,
        "delivered": given,
    }


def _delivered(shares: Mapping[str, Any]) -> dict[Placement, int]:
    try:
        world_size, workers = shares["world_size"], shares["workers"]
        delivered = {
            Placement(rank, world_size, worker, workers, shares["block_samples"]): int(count)
            for rank, worker, count in shares["delivered"]
        }
    except (KeyError, TypeError, ValueError) as error:
        raise StateMismatch(f"the state's shares can't be read: {shares!r}") from error
    if not delivered or min(delivered.values()) < 0:
        raise StateMismatch(f"the state's shares tell of nobody, or less than nothing: {shares!r}")
    return delivered
