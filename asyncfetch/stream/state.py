"""Saved progress: what a pass has delivered, as small JSON, and how a later one goes on from it.

A state names the dataset and the order by what they depend on, the epoch, what was left of it when the pass began, who
shared that, and how many samples each of them was given, as far as the process that wrote it knows. That of an epoch's
beginning ends after the epoch; before the first pass it doesn't name the dataset either. What several know is put
together by ``merge_states``.

The order of a mixture says besides where an epoch lies in the run, which is of no layout's making alone: the state's
epoch or, at an epoch's beginning, the one read before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, get_args

from asyncfetch.errors import StateMismatch
from asyncfetch.ranges import is_whole_number
from asyncfetch.stream.epochs import MAX_EPOCH, MAX_WORKERS
from asyncfetch.stream.mixing import Batching, EpochPlace
from asyncfetch.stream.placement import Placement
from asyncfetch.stream.remaining import Ends, Remaining, SharedOrder, rest_in

__all__ = [
    "FORMAT",
    "IDENTITY",
    "LAYOUT",
    "MIXTURE_VERSION",
    "EpochProgress",
    "State",
    "beginning",
    "check_state",
    "delivered_in",
    "has_given_all",
    "identity_of",
    "is_beginning",
    "is_finished",
    "merge_shares",
    "merge_states",
    "place_of",
    "resharded",
    "resharded_in",
    "run_of",
    "shares_of",
]

FORMAT = "asyncfetch stream state"
VERSION = 2
"""1, of 0.1, has no ``step_samples``: ranks took samples in turns, and go on so to the end of what it shares."""
MIXTURE_VERSION = 2
"""The version of a mixture's order. 1 didn't say where an epoch lies in the run."""

IDENTITY = ("dataset", "order")
"""Keys of a state that say what its order depends on."""
_PLACE = ("epoch", "block_samples", "taken")
"""Keys of the place in a mixture's order: see EpochPlace."""
_RESHARDED = "dealt_anew"
"""There, too, where the order is a MixedRest: for whose batches, and of what."""
_BATCHING = tuple(field.name for field in fields(Batching))
LAYOUT = ("world_size", "workers", "block_samples", "step_samples")
"""Fields of a Placement that all who share something have in common."""
_ONE_STREAM = "source, episodes, features, shuffle, seed, lanes, pool_episodes, group_frames and version of the order"
"""Words for what makes a stream's identity."""
_SEVERAL = f"weights, stop_on, seed, the streams and, of each of them, {_ONE_STREAM}"

State = dict[str, Any]
"""JSON: only dicts with string keys, lists, strings, whole numbers, booleans and None."""


@dataclass(slots=True)
class EpochProgress:
    """The progress of one consumer in a pass."""

    identity: Mapping[str, Any]
    """All that the order depends on: ``dataset``, a fingerprint, and ``order``, the numbers it was made with."""
    epoch: int
    total: int
    """Samples of the epoch."""
    rest: Remaining
    """The rest of it when this pass began."""
    placement: Placement
    ends: Ends
    delivered: int = 0
    """Samples that the consumer was given, padding included."""

    def state(self) -> State:
        """Return the state as it is now."""
        return {
            "format": FORMAT,
            "version": VERSION,
            **self.identity,
            "epoch": self.epoch,
            "total": self.total,
            "rest": self.rest.as_json(),
            "shares": shares_of({self.placement: self.delivered}),
        }

    def resumed(self, state: Mapping[str, Any], order: SharedOrder) -> EpochProgress:
        """This pass, yet to begin, from where the state was taken.

        Raises:
            StateMismatch: It is of another dataset or order, or doesn't know enough.
        """
        self.check(state)
        total = state.get("total", self.total)
        if total != self.total:
            raise StateMismatch(f"the state is of an epoch of {total} samples, and this one has {self.total}")
        if is_beginning(state):
            return self
        delivered = delivered_in(state["shares"])
        # Who makes batches of another size, too, takes what it would have taken.
        same = replace(self.placement, step_samples=next(iter(delivered)).step_samples)
        if same in delivered:
            rest = Remaining.of_json(state["rest"], self.total)
            return replace(self, rest=rest, placement=same, delivered=delivered[same])
        return replace(self, rest=self.left_of(state, order))

    def left_of(self, state: Mapping[str, Any], order: SharedOrder) -> Remaining:
        """Return what is left for all together of the order.

        Raises:
            StateMismatch: It doesn't know enough.
        """
        delivered = delivered_in(state["shares"])
        known = next(iter(delivered))
        if len(delivered) < known.consumers:
            others = "" if self.placement in delivered else f", and not of {self.placement}"
            raise StateMismatch(
                f"the state tells of {len(delivered)} of the {known.consumers} consumers ({known.world_size} ranks, "
                f"{known.workers} workers each) that shared the epoch{others}: load "
                "asyncfetch.torch.merge_states([one state of each rank])"
            )
        return Remaining.of_json(state["rest"], self.total).after(delivered, self.total, order)

    @staticmethod
    def is_known_of_all(state: Mapping[str, Any]) -> bool:
        """Return whether the state tells of everybody who shared what was left."""
        delivered = delivered_in(state["shares"])
        return len(delivered) == next(iter(delivered)).consumers

    def goes_on_between_batches(self, state: Mapping[str, Any]) -> bool:
        """Return whether batches that follow begin where they would had all been read in those: the same for each rank.

        This was ``resumed`` from the state.
        """
        size, left = self.placement.batch_size or 1, self.rest
        delivered = delivered_in(state["shares"])
        if self.placement in delivered and any(
            count % size and count < left.shared(self.total, one, self.ends)[0] for one, count in delivered.items()
        ):
            return False
        world_size, step_samples = self.placement.world_size, self.placement.step_samples
        if world_size > 1 and step_samples and size % step_samples:
            return False  # it began in steps that batches of this size don't
        return not left.missing and left.position % (size * world_size) == 0

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


def _is_of_mixture(identity: Mapping[str, Any]) -> bool:
    order = identity.get("order")
    return isinstance(order, Mapping) and "stop_on" in order


def _kind(identity: Mapping[str, Any]) -> str:
    return f"a mixture of {identity['order']['members']} members" if _is_of_mixture(identity) else "a stream"


def beginning(epoch: int, identity: Mapping[str, Any] | None = None) -> State:
    """The state of an epoch of which nothing was delivered; without an identity of whatever dataset."""
    return {"format": FORMAT, "version": VERSION, **_without(identity or {}, _RESHARDED), "epoch": epoch}


def identity_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what its order depends on: see EpochProgress. Empty where it doesn't say."""
    return {name: state[name] for name in IDENTITY if name in state}


def run_of(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The identity without the place in the run: that of all epochs of a mixture, at any layout."""
    return _without(identity, *_PLACE, _RESHARDED)


def _without(identity: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The identity without these in a mixture's order."""
    if not _is_of_mixture(identity):
        return dict(identity)
    return {**identity, "order": {name: value for name, value in identity["order"].items() if name not in names}}


def place_of(identity: Mapping[str, Any]) -> EpochPlace:
    """Return where the epoch lies in the run that a mixture's identity speaks of."""
    epoch, block_samples, taken = (identity["order"][name] for name in _PLACE)
    return EpochPlace(epoch, block_samples, tuple(taken))


def resharded(rests: Sequence[Remaining], batching: Batching) -> dict[str, Any]:
    """Return what a mixture's order says besides where it is a MixedRest."""
    return {_RESHARDED: asdict(batching) | {"members": [rest.as_json() for rest in rests]}}


def resharded_in(
    identity: Mapping[str, Any], starts: Sequence[int], stops: Sequence[int]
) -> tuple[list[Remaining], Batching] | None:
    """Return what ``resharded`` told, if it did. Each member's run goes from its start up to its stop.

    Raises:
        StateMismatch: It tells of something else.
    """
    given = identity.get("order", {}).get(_RESHARDED)
    if given is None:
        return None
    rests = [Remaining.of_json(rest, stop) for rest, stop in zip(given["members"], stops, strict=True)]
    for start, rest in zip(starts, rests, strict=True):
        if min((rest.position, *rest.missing)) < start:
            raise StateMismatch(f"{rest.as_json()} is left of samples of a member that come from {start} on")
    return rests, Batching(**{name: given[name] for name in _BATCHING})


def _is_resharded(state: Mapping[str, Any]) -> bool:
    """Return whether some of its positions may be empty, so that ranks of equally many have unequally many samples."""
    return _is_of_mixture(state) and _RESHARDED in state["order"]


def is_beginning(state: Mapping[str, Any]) -> bool:
    """Return whether it is what ``beginning`` gave."""
    return "rest" not in state and "shares" not in state


def is_finished(state: Mapping[str, Any], ends: Ends, least_samples: int = 1) -> bool:
    """Return whether none of its consumers is given anything more of its epoch, as far as the state tells of them all.

    One rank's own state tells it of the others where all are given equally many batches. Fewer than ``least_samples``
    are given to nobody.
    """
    if is_beginning(state):
        return False
    total, rest, delivered = (
        state["total"],
        Remaining.of_json(state["rest"], state["total"]),
        delivered_in(state["shares"]),
    )
    one = next(iter(delivered))
    if len(delivered) < one.consumers:
        most, least = (rest.shared(total, replace(one, rank=rank), ends)[0] for rank in (0, one.world_size - 1))
        is_even = most // least_samples == least // least_samples and (ends != "uneven" or not _is_resharded(state))
        if not is_even or one.workers > 1:
            return False
    return has_given_all(state, ends, least_samples)


def has_given_all(state: Mapping[str, Any], ends: Ends, least_samples: int) -> bool:
    """Return whether those consumers that it tells of are given nothing more of its epoch: see ``is_finished``."""
    total, rest = state["total"], Remaining.of_json(state["rest"], state["total"])
    return all(
        rest.shared(total, placement, ends)[0] - count < least_samples
        for placement, count in delivered_in(state["shares"]).items()
    )


def check_state(state: object) -> State:
    """The state, if this version can read it."""
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        raise StateMismatch(f"this isn't a state of a stream: {str(state)[:200]}")
    if state.get("version") == 1:
        shares = state.get("shares")
        in_turns = {"shares": shares | {"step_samples": 0}} if isinstance(shares, dict) else {}
        state = {**state, "version": VERSION, **in_turns}
    if state.get("version") != VERSION:
        raise StateMismatch(f"the state is of version {state.get('version')}, and this asyncfetch reads 1 to {VERSION}")
    epoch: Any = state.get("epoch")
    if not is_whole_number(epoch) or not 0 <= epoch <= MAX_EPOCH:
        raise StateMismatch(f"the state's epoch must be a whole number from 0, below 2**63 - 1, not {epoch!r}")
    if _is_of_mixture(state):
        _check_place(state)
    if not is_beginning(state):
        lacking = {*IDENTITY, "total", "rest", "shares"} - state.keys()
        if lacking:
            raise StateMismatch(f"the state lacks {', '.join(sorted(lacking))}")
        total = state["total"]
        if not is_whole_number(total):
            raise StateMismatch(f"the state's total must be a whole number, not {total!r}")
        rest = Remaining.of_json(state["rest"], total)
        for placement, count in delivered_in(state["shares"]).items():
            share = rest.shared(total, placement, "pad")[0]
            if count > share:
                raise StateMismatch(f"the state's shares can't be: {count} samples of {placement}, who takes {share}")
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
    _check_resharded(order)
    if not is_beginning(state) and order["epoch"] != state["epoch"]:
        raise StateMismatch(f"the state is of epoch {state['epoch']}, and its order of epoch {order['epoch']}")


def _check_resharded(order: Mapping[str, Any]) -> None:
    given = order.get(_RESHARDED)
    if given is None:
        return
    is_whole = isinstance(given, Mapping) and {*_BATCHING, "members"} <= given.keys()
    if is_whole:
        sizes, members = (given["batch_size"], given["world_size"]), given["members"]
        is_whole = all(is_whole_number(size) and 1 <= size <= MAX_EPOCH for size in sizes)
        is_whole = is_whole and given["ends"] in get_args(Ends) and isinstance(given["drop_last"], bool)
        is_whole = is_whole and isinstance(members, list) and len(members) == order["members"]
    if not is_whole:
        raise StateMismatch(f"the state's order must say what was dealt out anew of each member, not {given}")
    for member in members:
        rest_in(member, MAX_EPOCH)


def shares_of(delivered: Mapping[Placement, int]) -> State:
    """Return who shares what is left, and how many samples each of those that are known was given."""
    one = next(iter(delivered))
    given = sorted([placement.rank, placement.worker, count] for placement, count in delivered.items())
    return {
        "world_size": one.world_size,
        "workers": one.workers,
        "block_samples": one.block_samples,
        "step_samples": one.step_samples,
        "delivered": given,
    }


def delivered_in(shares: Mapping[str, Any]) -> dict[Placement, int]:
    """Return what ``shares_of`` was made of; StateMismatch where that can't be read."""
    try:
        world_size, workers, block_samples, step_samples = (_whole(shares[name]) for name in LAYOUT)
        delivered = {
            Placement(_whole(rank), world_size, _whole(worker), workers, block_samples, step_samples): _whole(count)
            for rank, worker, count in shares["delivered"]
        }
    except (KeyError, TypeError, ValueError) as error:
        raise StateMismatch(f"the state's shares can't be read: {shares!r}") from error
    if not delivered or min(delivered.values()) < 0 or len(delivered) < len(shares["delivered"]):
        raise StateMismatch(f"the state's shares tell of nobody, of less than nothing, or of one twice: {shares!r}")
    if workers > MAX_WORKERS:
        raise StateMismatch(f"the state's shares are of {workers} workers, and a rank can have {MAX_WORKERS}")
    return delivered


def _whole(value: Any) -> int:  # noqa: ANN401
    if not is_whole_number(value):
        raise TypeError(f"{value!r} is no whole number")
    return int(value)


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
        total, rest = merged["total"], Remaining.of_json(merged["rest"], merged["total"])
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
    """Return those anywhere inside of nested dicts and lists."""
    if isinstance(value, Mapping):
        if value.get("format") == FORMAT:
            return [value]
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [state for each in value for state in _states_in(each)]
    return []
