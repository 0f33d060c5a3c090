"""Slots of shared memory: one that was given up is never handed over again, and none stays mapped without a view."""

from __future__ import annotations

import os

from asyncfetch.runtime.shared_memory import ABANDONED, MemorySlots, give_back_slots, slot_reader, view_of


def test_a_slot_that_was_given_up_is_not_handed_over_again() -> None:
    """Its descriptor is another slot's by then, and its name would lead to that one's bytes."""
    slots = MemorySlots()
    slot, view = slots.take(100)
    assert slots.hand_over(slot) is not None
    del view
    slot.memory[0] = ABANDONED  # as its reader does after a fork
    other, view = slots.take(100)
    assert other is not slot
    assert slots.hand_over(slot) is None
    assert slots.hand_over(other) is not None
    del view
    slots.take(100)


def test_what_has_no_view_is_given_back_without_a_next_one() -> None:
    slots = MemorySlots()
    reader = slot_reader()
    slot, own = slots.take(100)
    name = slots.hand_over(slot)
    del own
    assert name is not None
    view = view_of(name)
    give_back_slots()
    assert slot.memory[0] != 0 or view.size  # it is held still
    del view
    give_back_slots()
    again, _ = slots.take(100)
    assert again is slot
    assert reader.pid == os.getpid()


def test_a_fork_takes_no_slot_away_that_has_no_view() -> None:
    slots = MemorySlots()
    reader = slot_reader()
    slot, own = slots.take(100)
    name = slots.hand_over(slot)
    del own
    assert name is not None
    view_of(name)
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    again, _ = slots.take(100)
    assert again is slot
    assert reader.pid == os.getpid()
