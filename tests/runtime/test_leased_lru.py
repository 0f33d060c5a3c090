from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from asyncfetch.runtime.leased_lru import EntryLease, LeasedLRU, RoomReservation

MAX_BYTES = 10
KEYS = st.sampled_from("abcde")


def put(lru: LeasedLRU[str, int], key: str, size_bytes: int, value: int = 0) -> None:
    reservation = lru.reserve(size_bytes)
    assert reservation is not None
    reservation.commit(key, value).release()


def test_eviction_goes_from_the_least_recently_used() -> None:
    evicted: list[str] = []
    lru: LeasedLRU[str, int] = LeasedLRU(3, on_evict=lambda key, _value: evicted.append(key))
    for key in "abc":
        put(lru, key, 1)
    used_again = lru.lease("a")
    assert used_again is not None
    used_again.release()
    put(lru, "d", 2)
    assert evicted == ["b", "c"]


def test_a_refused_reservation_evicts_nothing() -> None:
    lru: LeasedLRU[str, int] = LeasedLRU(3)
    put(lru, "a", 1)
    put(lru, "b", 2)
    lease = lru.lease("b")
    assert lru.reserve(2) is None
    assert len(lru) == 2
    assert lease is not None


def test_an_old_lease_does_not_touch_the_newer_entry() -> None:
    lru: LeasedLRU[str, int] = LeasedLRU(4)
    put(lru, "a", 2, value=1)
    old = lru.lease("a")
    assert old is not None
    put(lru, "a", 2, value=2)
    new = lru.lease("a")
    assert new is not None
    old.release()
    assert lru.reserve(3) is None  # the newer entry is still leased
    assert (old.value, new.value) == (1, 2)


def test_a_callback_may_call_back() -> None:
    def evicted(_key: str, _value: int) -> None:
        if held:
            held.pop().release()

    lru: LeasedLRU[str, int] = LeasedLRU(2, on_evict=evicted)
    put(lru, "a", 1)
    put(lru, "b", 1)
    lease = lru.lease("b")
    assert lease is not None
    held = [lease]
    assert lru.reserve(1) is not None
    assert lru.reserve(1) is not None
    assert lru.evictions == 2


def test_a_callback_that_raises_takes_no_room_with_it() -> None:
    def evicted(key: str, _value: int) -> None:
        raise LookupError(key)

    lru: LeasedLRU[str, int] = LeasedLRU(2, on_evict=evicted)
    put(lru, "a", 2)
    with pytest.raises(LookupError):
        lru.reserve(1)
    assert (lru.used_bytes, lru.reserved_bytes, len(lru)) == (0, 0, 0)


class Machine(RuleBasedStateMachine):
    """A LeasedLRU against a list in order of use."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[int] = []
        self.lru: LeasedLRU[str, int] = LeasedLRU(MAX_BYTES, on_evict=lambda _key, value: self.told.append(value))
        self.serial = 0
        self.listed: dict[str, int] = {}  # key -> value
        self.sizes: dict[int, int] = {}  # value -> bytes
        self.order: list[int] = []  # of listed, idle values; least recently used first
        self.gone: list[int] = []
        self.leases: list[tuple[EntryLease[str, int], int]] = []
        self.reservations: list[RoomReservation[str, int]] = []

    def leased(self) -> set[int]:
        return {value for _, value in self.leases}

    def free(self) -> int:
        held = self.leased() | set(self.listed.values())
        return MAX_BYTES - sum(self.sizes[value] for value in held) - sum(r.size_bytes for r in self.reservations)

    def unlist(self, value: int) -> None:
        self.listed = {key: other for key, other in self.listed.items() if other != value}
        if value in self.order:
            self.order.remove(value)
        self.gone.append(value)

    @rule(size_bytes=st.integers(0, MAX_BYTES + 1))
    def reserve(self, size_bytes: int) -> None:
        reservation = self.lru.reserve(size_bytes)
        fits = self.free() + sum(self.sizes[value] for value in self.order) >= size_bytes
        assert (reservation is not None) == fits
        if reservation is not None:
            while self.free() < size_bytes:
                self.unlist(self.order[0])
            self.reservations.append(reservation)

    @rule(key=KEYS, index=st.integers(0, 9))
    def commit(self, key: str, index: int) -> None:
        if self.reservations:
            reservation = self.reservations.pop(index % len(self.reservations))
            self.serial += 1
            lease = reservation.commit(key, self.serial)
            reservation.release()
            if key in self.listed:
                self.unlist(self.listed[key])
            self.listed[key] = self.serial
            self.sizes[self.serial] = reservation.size_bytes
            self.leases.append((lease, self.serial))
            with pytest.raises(RuntimeError):
                reservation.commit(key, 0)

    @rule(index=st.integers(0, 9))
    def cancel_reservation(self, index: int) -> None:
        if self.reservations:
            reservation = self.reservations.pop(index % len(self.reservations))
            reservation.release()
            reservation.release()

    @rule(key=KEYS)
    def lease(self, key: str) -> None:
        lease = self.lru.lease(key)
        assert (lease.value if lease else None) == self.listed.get(key)
        if lease is not None:
            self.leases.append((lease, lease.value))
            if lease.value in self.order:
                self.order.remove(lease.value)

    @rule(index=st.integers(0, 9))
    def share(self, index: int) -> None:
        if self.leases:
            lease, value = self.leases[index % len(self.leases)]
            self.leases.append((lease.share(), value))

    @rule(index=st.integers(0, 9))
    def give_back(self, index: int) -> None:
        if self.leases:
            lease, value = self.leases.pop(index % len(self.leases))
            lease.release()
            lease.release()
            with pytest.raises(RuntimeError):
                lease.share()
            if value in self.listed.values() and value not in self.leased():
                self.order.append(value)

    @rule(key=KEYS, by_name=st.booleans())
    def drop(self, key: str, by_name: bool) -> None:
        value = self.listed.get(key)
        dropped = self.lru.drop_keys([key, key]) if by_name else self.lru.drop(lambda other: other == key)
        assert dropped == (value is not None)
        if value is not None:
            self.unlist(value)

    @invariant()
    def agrees(self) -> None:
        assert self.told == self.gone
        assert len(self.lru) == len(self.listed)
        assert self.lru.leased_bytes == sum(self.sizes[value] for value in self.leased())
        assert self.lru.reserved_bytes == sum(r.size_bytes for r in self.reservations)
        assert MAX_BYTES - self.lru.used_bytes - self.lru.reserved_bytes == self.free() >= 0


TestAgainstModel = Machine.TestCase
TestAgainstModel.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
