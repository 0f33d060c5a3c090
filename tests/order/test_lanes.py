"""A rank's order of its share: each frame once, from any number on, and well mixed from the first batch to the last."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfetch.order.lanes import Lanes
from asyncfetch.order.line import Line
from asyncfetch.order.runs import Runs
from tests.order.test_line import lines
from tests.order.test_runs import frames_of, rests, spans

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from asyncfetch.order.line import Piece

BATCH = 32


@st.composite
def shares_of(draw: st.DrawFn) -> Lanes:
    """A rank's part of what is left."""
    runs = draw(rests())
    start, stop = sorted(draw(st.tuples(st.integers(0, runs.total), st.integers(0, runs.total))))
    return Lanes(runs, start, stop, draw(st.sampled_from([1, 2, 5, 64])), member=2)


def given_by(lanes: Lanes, numbers: range) -> list[tuple[Piece, int]]:
    cursor = lanes.cursor()
    return [cursor.at(number)[1:] for number in numbers]


@given(runs=rests(), ranks=st.integers(1, 5), pool=st.sampled_from([1, 2, 5, 64]))
def test_ranks_give_each_frame_once(runs: Runs, ranks: int, pool: int) -> None:
    found = []
    for rank in range(ranks):
        start, stop = rank * runs.total // ranks, (rank + 1) * runs.total // ranks
        lanes = Lanes(runs, start, stop, pool)
        assert len(lanes) <= pool
        found += [(piece.epoch, piece.episode, frame) for piece, frame in given_by(lanes, range(lanes.total))]
    assert len(found) == runs.total
    assert sorted(found) == sorted(frames_of(runs))


@given(lanes=shares_of(), start=st.integers(0, 50), step=st.integers(1, 9))
def test_any_part_is_found_without_what_is_before_it(lanes: Lanes, start: int, step: int) -> None:
    whole = given_by(lanes, range(lanes.total))
    assert given_by(lanes, range(start, lanes.total, step)) == whole[start::step]
    assert {piece.member for piece, _ in whole} <= {2}
    assert all(piece.start <= frame < piece.stop for piece, frame in whole)


@given(lanes=shares_of(), start=st.integers(0, 50), step=st.integers(1, 9))
def test_a_piece_is_left_once_and_not_used_afterwards(lanes: Lanes, start: int, step: int) -> None:
    cursor = lanes.cursor()
    open_now: set[Piece] = set()
    gone: set[Piece] = set()
    for number in range(start, lanes.total, step):
        left, piece, _ = cursor.at(number)
        assert open_now.issuperset(left)
        gone.update(left)
        open_now = open_now - {*left} | {piece}
        assert piece not in gone
        assert len(open_now) <= len(lanes)
    assert open_now == set(cursor.used())


@given(lanes=shares_of(), data=st.data())
def test_frames_left_are_those_not_given(lanes: Lanes, data: st.DataObject) -> None:
    starts, stops = data.draw(spans(lanes.total))
    taken = np.stack([starts, stops], axis=1)
    numbers = np.concatenate([np.arange(0), *(np.arange(start, stop) for start, stop in taken)])
    of_lane, cycles = lanes.visits(np.setdiff1d(np.arange(lanes.total), numbers))
    left = np.concatenate([np.arange(0), *(np.arange(*span) for span in zip(*lanes.left(taken), strict=True))])
    assert sorted(left.tolist()) == sorted((lanes.starts[of_lane] + cycles).tolist())
    count = data.draw(st.integers(0, lanes.total))
    given = Counter(lanes.visits(np.arange(count))[0].tolist())
    assert lanes.given(count).tolist() == [given[lane] for lane in range(len(lanes))]


@given(line=lines(), pool=st.integers(1, 9))
def test_an_order_without_shuffle_is_that_of_the_dataset(line: Line, pool: int) -> None:
    line = Line(line.lengths, segment_frames=7, group_frames=2, shuffle=False)
    lanes = Lanes(Runs.whole(line, 0, line.total), line.total // 3, line.total, pool)
    frames = [(episode, frame) for episode, length in enumerate(line.lengths) for frame in range(length)]
    found = [(piece.episode, frame) for piece, frame in given_by(lanes, range(lanes.total))]
    assert found == frames[line.total // 3 :]


@given(line=lines(), pool=st.integers(2, 9))
def test_lanes_end_together(line: Line, pool: int) -> None:
    """But for the groups of pictures between which they are cut, and the last one where all lengths are one."""
    lanes = Lanes(Runs.whole(line, 0, line.total), 0, line.total, pool)
    ends = (lanes.begins + lanes.stops - lanes.starts).tolist()
    last = int(np.argmax(lanes.stops))
    inner = [end for lane, end in enumerate(ends) if lane != last]
    if inner:
        assert max(inner) - min(inner) <= 2 * line.coded_frames + 1
        assert ends[last] <= max(inner) + 2 * line.coded_frames


def share(ranks: int, rank: int, lengths: np.ndarray, *, group: int = 2, pool: int = 64) -> tuple[Line, Lanes]:
    line = Line(lengths, segment_frames=600, group_frames=group)
    runs = Runs.whole(line, 0, line.total)
    return line, Lanes(runs, rank * line.total // ranks, (rank + 1) * line.total // ranks, pool)


def distinct(lanes: Lanes, first: int) -> int:
    """Segments that a batch of 32 comes of."""
    numbers = range(first, min(lanes.total, first + BATCH))
    return len({piece.episode for piece, _ in given_by(lanes, numbers)})


@pytest.mark.parametrize("ranks", [1, 3, 8, 24, 64, 100])
@pytest.mark.parametrize("varied", [True, False])
def test_a_batch_comes_of_many_segments_at_any_number_of_ranks(ranks: int, *, varied: bool) -> None:
    """4,000 episodes, of 90 to 210 frames or all of 150."""
    lengths = np.random.default_rng(4000).integers(90, 211, 4000) if varied else np.full(4000, 150)
    first, middle, last = [], [], []
    for rank in range(0, ranks, max(1, ranks // 10)):
        _, lanes = share(ranks, rank, lengths)
        first.append(distinct(lanes, 0))
        middle += [distinct(lanes, int(lanes.total * part)) for part in (0.2, 0.4, 0.5, 0.6, 0.8)]
        begin = lanes.total * 19 // 20
        batches = (lanes.total - begin) // BATCH
        last += [distinct(lanes, begin + batch * BATCH) for batch in range(0, batches, max(1, batches // 5))]
        last.append(distinct(lanes, lanes.total - BATCH))
    assert min(first) >= 12
    assert np.mean(middle) >= 31
    assert np.mean(last) >= 24


@pytest.mark.parametrize(
    "lengths", [np.full(400, 150), np.random.default_rng(0).integers(20, 400, 400)], ids=["equal", "varied"]
)
@pytest.mark.parametrize("ranks", [1, 2, 7, 64, 200])
@pytest.mark.parametrize("group", [1, 2, 12])
def test_a_cut_between_ranks_costs_one_group_of_pictures(lengths: np.ndarray, ranks: int, group: int) -> None:
    """What is fetched over all ranks for what is needed: at a cut one group of pictures comes twice."""
    fetched = 0
    for rank in range(ranks):
        _, lanes = share(ranks, rank, lengths, group=group)
        pieces = {piece for lane in range(len(lanes)) for piece, _, _ in lanes.pieces(lane).pieces()}
        for piece in pieces:
            stop = min(-(-piece.stop // group) * group, int(lengths[piece.episode]))
            fetched += stop - piece.start // group * group
    assert fetched / lengths.sum() <= 1 + (ranks - 1) * group / lengths.sum()
    assert fetched / lengths.sum() <= 1 + ranks / len(lengths)


def begun_by(lanes: Lanes) -> NDArray[np.int64]:
    """The number of the first sample of each piece in the first half, in ascending order."""
    cursor, begun, seen = lanes.cursor(), [], set[object]()
    for number in range(lanes.total // 2):
        _, piece, _ = cursor.at(number)
        if piece not in seen:
            begun.append(number)
            seen.add(piece)
    return np.array(begun)


def test_segments_begin_one_after_another() -> None:
    """What comes next is fetched at an even rate once all lanes have begun, also where all lengths are one."""
    _, lanes = share(4, 1, np.full(2000, 150))
    begun = begun_by(lanes)
    all_begun = int(lanes.begins.max()) * len(lanes)
    behind = begun[begun >= all_begun] - all_begun
    counts = np.bincount(behind // (50 * len(lanes)))[:-1]
    assert counts.max() <= 1.3 * counts.mean()


@pytest.mark.parametrize("varied", [True, False])
def test_lanes_join_as_their_pieces_can_be_fetched(*, varied: bool) -> None:
    """Beyond what the first lanes need, no sample needs more than three times the frames that were given before it."""
    lengths = np.random.default_rng(4000).integers(90, 211, 400) if varied else np.full(400, 150)
    _, lanes = share(1, 0, lengths)
    cursor, seen, needed = lanes.cursor(), set[object](), list[int]()
    for number in range(lanes.total // 4):
        _, piece, _ = cursor.at(number)
        new = piece not in seen
        seen.add(piece)
        needed.append((needed[-1] if needed else 0) + new * (piece.stop - piece.start))
    first = needed[31]
    assert first <= 16 * 150
    assert all(frames <= first + 3 * (number + 100) for number, frames in enumerate(needed))
    assert len({piece for piece, _ in given_by(lanes, range(16))}) == 16
    assert np.diff(np.sort(lanes.begins)[15:]).max() <= 2


def test_the_order_is_frozen_across_releases() -> None:
    """A saved state means the same after an upgrade only while these values stay as they are."""
    line = Line(np.array([5, 3, 14, 6, 2, 9]), segment_frames=5, group_frames=2, seed=3)
    lanes = Lanes(Runs.whole(line, line.total, 2 * line.total), 5, 30, 3)
    assert [(piece.episode, frame) for piece, frame in given_by(lanes, range(12))] == [
        (4, 1),
        (1, 0),
        (2, 4),
        (3, 0),
        (1, 1),
        (2, 5),
        (3, 1),
        (1, 2),
        (2, 2),
        (3, 2),
        (2, 6),
        (2, 3),
    ]
