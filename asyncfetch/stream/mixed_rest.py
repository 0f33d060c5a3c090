"""What is left of a mixture's epoch, dealt out anew for those who go on with it. Pure arithmetic.

An epoch whose members disagree comes in blocks of one member, each a batch for every rank. Where other ranks go on, or
with other batches, or it was left inside of a batch, those blocks don't suit any more. Then each member's share of the
rest, which is what it is, is dealt out in blocks of the new size: evenly, by what each has left, and where the schedule
changes the weights, so does that. What a member has left beyond whole blocks comes behind all of those, in a block with
empty positions at its end. So each rank's positions make whole batches, which are the same for any number of workers.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncfetch.stream.cursor import Rest
from asyncfetch.stream.mixing import Given, MixedEpoch, Stage, Turns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncfetch.stream.cursor import Ends
    from asyncfetch.stream.mixing import Walk

__all__ = ["Batching", "MixedRest", "left_of_members"]


@dataclass(frozen=True, slots=True)
class Batching:
    """How those who share an order make batches of one member each."""

    batch_size: int
    world_size: int
    drop_last: bool
    ends: Ends

    @property
    def round_samples(self) -> int:
        """What all ranks take for a batch each."""
        return self.batch_size * self.world_size


class MixedRest:
    """What is left of an epoch, dealt out anew, each member's in blocks of one batch for each rank.

    What a member has left beyond whole blocks comes behind all of those, the longest first, in a block with empty
    positions at its end; by ``drop`` the ranks have equally many of it, by ``pad`` too, ``drop_last`` leaves it out.

    Args:
        epoch: What it is left of.
        rests: What is left of each member's run: up to the epoch's end.
        batching: Of who goes on.
        seed: As that of the epoch.
    """

    def __init__(self, epoch: MixedEpoch, rests: Sequence[Rest], batching: Batching, seed: int) -> None:
        self._rests = tuple(rests)
        self._batching = batching
        size = self.block_samples = batching.round_samples
        ends = epoch.ends()
        stages: list[Stage] = []
        given = [0] * len(rests)
        for stops in ends:  # the schedule changes the weights where it did, to the block
            until = [_count(rest, stop) // size for rest, stop in zip(rests, stops, strict=True)]
            blocks = [after - before for after, before in zip(until, given, strict=True)]
            if any(blocks):
                stages.append(Stage(sum(given), Turns(blocks, seed), given))
            given = until
        self._whole = MixedEpoch(size, (0,) * len(rests), tuple(stages), sum(given) * size)
        self._given = given
        over = {member: _count(rests[member], stop) % size for member, stop in enumerate(ends[-1])}
        if batching.drop_last:
            over = {}
        elif batching.ends == "drop":
            over = {member: samples - samples % batching.world_size for member, samples in over.items()}
        # Where some ranks have none of a block, they have none of those behind it: their batches come without a gap.
        self._short = sorted(((member, left) for member, left in over.items() if left), key=lambda each: -each[1])
        self.total = self._whole.total + len(self._short) * size

    @property
    def slotted(self) -> int:
        """See MixedEpoch."""
        return self._whole.total

    def left(self, position: int) -> list[Rest]:
        """See MixedEpoch."""
        whole = min(position, self._whole.total)
        given = [rest.position for rest in self._whole.left(whole)] if self._whole.stages else [0] * len(self._rests)
        blocks, inside = divmod(position - whole, self.block_samples)
        for number, (member, left) in enumerate(self._short[: blocks + 1]):
            given[member] += left if number < blocks else min(inside, left)
        return [
            Rest(rest.position + max(0, count - len(rest.missing)), rest.missing[count:], rest.stride)
            for rest, count in zip(self._rests, given, strict=True)
        ]

    def empty_at(self, position: int) -> range:
        """The positions around this one that hold nothing; none where this one does hold something."""
        if position >= self._whole.total:
            block, inside = divmod(position - self._whole.total, self.block_samples)
            _, left = self._short[block]
            full = left + (-left % self._batching.world_size if self._batching.ends == "pad" else 0)
            if inside >= full:
                start = position - inside
                return range(start + full, start + self.block_samples)
        return range(0)

    def suits(self, batching: Batching) -> bool:
        """Whether it was dealt out for these."""
        return batching == self._batching

    def walk(self, position: int = 0) -> Walk:
        """The way through it from this position on."""
        return _RestWalk(self, position)

    def _number(self, member: int, index: int) -> int:
        return self._rests[member].position_of(index)


class _RestWalk:
    """See Walk."""

    def __init__(self, rest: MixedRest, position: int) -> None:
        self._rest = rest
        self._walk = rest._whole.walk(position) if position < rest._whole.total else None
        self.members = {member for member, blocks in enumerate(rest._given) if blocks} | {
            member for member, _ in rest._short
        }

    def at(self, position: int) -> Given | None:
        """See Walk."""
        rest = self._rest
        if self._walk is not None and position < rest._whole.total:
            found = self._walk.at(position)
            assert found is not None
            return Given(found.member, rest._number(found.member, found.number))
        if rest.empty_at(position):
            return None
        block, inside = divmod(position - rest._whole.total, rest.block_samples)
        member, left = rest._short[block]
        index = rest._given[member] * rest.block_samples + min(inside, left - 1)
        return Given(member, rest._number(member, index), is_padding=inside >= left)


def left_of_members(order: MixedEpoch | MixedRest, rest: Rest) -> list[Rest]:
    """What each member has left where ``rest`` is left of the order's positions."""
    behind = order.left(rest.position)
    missing: list[list[int]] = [[] for _ in behind]
    walk = order.walk(rest.missing[0]) if rest.missing else None
    for position in rest.missing:
        assert walk is not None
        given = walk.at(position)
        if given is not None and not given.is_padding:
            missing[given.member].append(given.number)
    each = zip(missing, behind, strict=True)
    return [Rest(left.position, (*numbers, *left.missing), rest.stride) for numbers, left in each]


def _count(rest: Rest, stop: int) -> int:
    """How many of what is left are in front of ``stop``."""
    return bisect_left(rest.missing, stop) + max(0, stop - rest.position)
