"""The part of a rank's samples that each of its workers takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfetch.errors import ConfigError
from asyncfetch.order.placement import Placement


@given(workers=st.integers(1, 5), block=st.integers(1, 7), total=st.integers(0, 100))
def test_workers_take_blocks_in_turns(workers: int, block: int, total: int) -> None:
    each = [Placement(0, 1, worker, workers, block) for worker in range(workers)]
    taken = [[one.of_rank(number) for number in range(one.count_of(total))] for one in each]
    assert sorted(number for own in taken for number in own) == list(range(total))
    for one, own in zip(each, taken, strict=True):
        assert own == sorted(own)
        assert one.of_rank(len(own)) >= total
        assert all(workers == 1 or number // block % workers == one.worker for number in own)


def test_far_numbers_are_found_at_once() -> None:
    one = Placement(0, 1, 2, 3, 32)
    assert one.of_rank(10**15 * 32 + 5) == (3 * 10**15 + 2) * 32 + 5
    assert one.count_of(3 * 32 * 10**15 + 70) == 32 * 10**15 + 6


@pytest.mark.parametrize(("batch_size", "drop_last", "least"), [(None, True, 1), (8, False, 1), (8, True, 8)])
def test_fewer_samples_than_a_whole_batch_may_be_left_out(
    batch_size: int | None, least: int, *, drop_last: bool
) -> None:
    assert Placement(batch_size=batch_size, drop_last=drop_last).least_samples == least


@pytest.mark.parametrize(
    ("one", "words"),
    [(Placement(1, 4), "rank 1 of 4"), (Placement(1, 4, 2, 3), "rank 1 of 4, worker 2 of 3")],
)
def test_a_placement_says_who_it_is(one: Placement, words: str) -> None:
    assert str(one) == words


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rank": 2, "world_size": 2}, "rank must be in .*, not 2 of 2"),
        ({"rank": -1, "world_size": 2}, "rank must be in .*, not -1 of 2"),
        ({"world_size": 0}, "rank must be in .*, not 0 of 0"),
        ({"worker": 3, "workers": 3}, "worker must be in .*, not 3 of 3"),
        ({"worker": -1}, "worker must be in .*, not -1 of 1"),
        ({"block_samples": 0}, "at least 1 sample at its turn, not 0"),
    ],
)
def test_a_placement_that_can_not_be_is_refused(values: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Placement(**values)  # type: ignore[arg-type]
