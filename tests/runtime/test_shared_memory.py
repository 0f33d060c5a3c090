"""Slots of shared memory: one that was given up is never handed over again, and none stays taken without a view."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from asyncfetch.runtime.shared_memory import ABANDONED, HELD, MemorySlots, give_back_slots, slot_reader, view_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncfetch.runtime.shared_memory import MemorySlot, SlotName


@pytest.fixture
def slots() -> Iterator[MemorySlots]:
    reader = slot_reader()  # which stays as long as somebody has it
    yield MemorySlots()
    assert reader.pid == os.getpid()


def handed_over(slots: MemorySlots) -> tuple[MemorySlot, SlotName]:
    slot, view = slots.take(100)
    name = slots.hand_over(slot)
    assert name is not None
    del view
    return slot, name


def test_a_slot_that_was_given_up_is_not_handed_over_again(slots: MemorySlots) -> None:
    """Its descriptor is another slot's by then, and its name would lead to that one's bytes."""
    slot, _ = handed_over(slots)
    slot.memory[0] = ABANDONED  # as its reader does after a fork
    other, _ = handed_over(slots)
    assert other is not slot
    assert slots.hand_over(slot) is None


def test_slot_without_a_view_is_given_back_without_a_next_one(slots: MemorySlots) -> None:
    slot, name = handed_over(slots)
    view = view_of(name)
    give_back_slots()
    assert slot.memory[0] == HELD
    assert view.nbytes >= 100
    del view
    give_back_slots()
    assert slots.take(100)[0] is slot


def test_a_fork_gives_up_no_slot_that_has_no_view(slots: MemorySlots) -> None:
    slot, name = handed_over(slots)
    view_of(name)
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    assert slots.take(100)[0] is slot


def test_a_fork_gives_up_a_slot_that_the_child_may_see(slots: MemorySlots) -> None:
    slot, name = handed_over(slots)
    view = view_of(name)
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    assert view.nbytes >= 100
    del view
    give_back_slots()
    assert slots.take(100)[0] is not slot
