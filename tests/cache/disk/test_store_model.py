"""Two stores on one directory, in any order of use, damage, deletion and failure, against a dumb model."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncfetch.cache.disk import verify
from asyncfetch.cache.disk.layout import BlockSpan, VersionFile, parse_file_name, split
from asyncfetch.ranges import ObjectInfo
from tests.cache.disk.conftest import CONTENT, DAMAGES, MEMORY, MIB, VERSION, Tier, get, put

OTHER = VersionFile.of(ObjectInfo("https://data.example.org/b", len(CONTENT), '"one"'))
RANGES = st.tuples(
    st.sampled_from([0, 5, MIB - 3, MIB, 2 * MIB]), st.sampled_from([1, 10, MIB // 2, MIB, 2 * MIB + 1])
).map(lambda one: (one[0], one[0] + one[1]))
WHICH = st.integers(0, 1)
VERSIONS = st.sampled_from([VERSION, OTHER])
AMPLE = 64 * MIB


def lacking(held: list[BlockSpan], one: tuple[int, int]) -> list[BlockSpan]:
    """What none of these pieces holds of a range, block by block."""
    found = []
    for piece in split(*one):
        at = piece.start
        for other in sorted(held, key=lambda other: other.start):
            if at < min(other.start, piece.stop):
                found.append(BlockSpan(at, min(other.start, piece.stop)))
            at = max(at, other.stop)
        if at < piece.stop:
            found.append(BlockSpan(at, piece.stop))
    return found


class DiskTierMachine(RuleBasedStateMachine):
    """The model is the set of pieces that were written and not spoiled since; with a small bound, those at most."""

    @initialize(max_bytes=st.sampled_from([AMPLE, 3 * MIB, 8192]))
    def start(self, max_bytes: int) -> None:
        self.temporary = tempfile.TemporaryDirectory(dir=MEMORY)
        self.tier = Tier(Path(self.temporary.name), [])
        self.max_bytes = max_bytes
        self.stores = [self.tier.open(max_bytes) for _ in range(2)]
        self.held: set[tuple[VersionFile, BlockSpan]] = set()

    @rule(which=WHICH, version=VERSIONS, one=RANGES)
    def write(self, which: int, version: VersionFile, one: tuple[int, int]) -> None:
        self.tier.now += 100
        put(self.stores[which], *one, version)
        self.held |= {(version, piece) for piece in split(*one)}

    @rule(which=WHICH, version=VERSIONS, one=RANGES, code=st.sampled_from([errno.ENOSPC, errno.EIO]))
    def fail_to_write(self, which: int, version: VersionFile, one: tuple[int, int], code: int) -> None:
        self.tier.now += 100
        with mock.patch("os.rename", side_effect=OSError(code, "broken")):
            put(self.stores[which], *one, version)

    @rule(which=WHICH, version=VERSIONS, one=RANGES)
    def read(self, which: int, version: VersionFile, one: tuple[int, int]) -> None:
        missing = get(self.stores[which], *one, version)
        never_there = lacking([piece for of, piece in self.held if of == version], one)
        if self.max_bytes == AMPLE:
            assert missing == never_there
        for span in never_there:
            assert any(other.start <= span.start and span.stop <= other.stop for other in missing)

    @precondition(lambda self: self.tier.files())
    @rule(data=st.data(), damage=st.sampled_from([*DAMAGES, "deleted"]))
    def spoil(self, data: st.DataObject, damage: str) -> None:
        path = data.draw(st.sampled_from(self.tier.files()))
        if damage == "deleted":
            path.unlink()
        else:
            DAMAGES[damage](path, data.draw(st.integers(0, path.stat().st_size - 1)))
            for store in self.stores:  # so that no later write finds the place taken
                list(verify(store.folder))
        self.held.discard(parse_file_name(path.name))

    @rule(which=WHICH)
    def restart(self, which: int) -> None:
        self.stores[which] = self.tier.open(self.max_bytes)

    @rule(which=WHICH)
    def clear(self, which: int) -> None:
        self.stores[which].folder.prune(0)
        self.held.clear()
        assert self.tier.files() == []

    @rule(which=WHICH)
    def count(self, which: int) -> None:
        assert self.stores[which].folder.count() == self.tier.on_disk_bytes()

    @invariant()
    def the_bound_holds_and_nothing_is_left_over(self) -> None:
        assert self.tier.on_disk_bytes() <= self.stores[0].folder.used_bytes() <= self.max_bytes
        assert self.tier.unfinished() == []

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            for store in self.tier.stores:
                store.close()
            self.temporary.cleanup()


@pytest.mark.slow
def test_disk_tier_behaves_as_its_model() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    calm = settings(max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(DiskTierMachine, settings=calm)


def test_the_tests_damages_do_damage(tmp_path: Path) -> None:
    for damage in DAMAGES.values():
        path = tmp_path / "file"
        path.write_bytes(b"0123456789")
        damage(path, 5)
        assert path.read_bytes() != b"0123456789"
        os.unlink(path)
