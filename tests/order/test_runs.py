"""What is left of a line: cut, parted, and left again."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfetch.order.runs import FIRST, Runs
from tests.order.test_line import lines

if TYPE_CHECKING:
    from asyncfetch.order.line import Line

Frame = tuple[int, int, int]


def frames_of(runs: Runs) -> list[Frame]:
    """(epoch, episode, frame) at each offset."""
    found: list[Frame] = []
    for piece, begin, end in runs.pieces():
        found += [(piece.epoch, piece.episode, frame) for frame in runs.line.frames(piece)[begin:end].tolist()]
    return found


@st.composite
def rests(draw: st.DrawFn, line: Line | None = None) -> Runs:
    """Of an epoch, or a part of two, of which something was given again and again."""
    line = line or draw(lines())
    first = draw(st.sampled_from([0, line.total, line.total // 3]))
    runs = Runs.whole(line, first, first + draw(st.integers(1, line.total)))
    for _ in range(draw(st.integers(0, 2))):
        if runs.total:
            starts, stops = draw(spans(runs.total))
            runs = runs.left(starts, stops)
    return runs if runs.total else Runs.whole(line, 0, line.total)


@st.composite
def spans(draw: st.DrawFn, total: int) -> tuple[np.ndarray, np.ndarray]:
    """Of offsets; they ascend and don't meet."""
    edges = sorted(draw(st.sets(st.integers(0, total), max_size=6)))
    edges = edges[: len(edges) // 2 * 2]
    return np.array(edges[::2], np.int64), np.array(edges[1::2], np.int64)


@given(line=lines(), data=st.data())
def test_the_whole_is_that_of_the_line(line: Line, data: st.DataObject) -> None:
    """Of one epoch all of its frames; from the middle of one to that of the next as many, of both."""
    runs = Runs.whole(line, 5 * line.total, 6 * line.total)
    whole = [(5, episode, frame) for episode, length in enumerate(line.lengths) for frame in range(length)]
    assert sorted(frames_of(runs)) == whole
    assert (runs.total, runs.count_pieces()) == (line.total, line.segments)
    place = data.draw(st.integers(0, line.total))
    both = Runs.whole(line, 4 * line.total + place, 5 * line.total + place)
    assert both.total == line.total
    assert [epoch for epoch, _, _ in frames_of(both)] == [4] * (line.total - place) + [5] * place
    assert not Runs.whole(line, 7, 7).total


@given(runs=rests(), data=st.data())
def test_a_cut_parts_a_piece_and_leaves_the_rest_as_it_was(runs: Runs, data: st.DataObject) -> None:
    offsets = data.draw(st.lists(st.integers(-1, runs.total + 1), max_size=5))
    cut = runs.cut(np.array(offsets, np.int64))
    assert cut.total == runs.total
    assert sorted(frames_of(cut)) == sorted(frames_of(runs))
    assert {offset for offset in offsets if 0 < offset < runs.total} <= set(cut.ends.tolist())
    assert frames_of(runs.cut(cut.ends)) == frames_of(cut)
    # Pieces without a cut inside are the same, frame by frame.
    at, parted = 0, sorted(offset for offset in offsets if 0 < offset < runs.total)
    before, after = frames_of(runs), frames_of(cut)
    for piece, begin, end in runs.pieces():
        upto = at + end - begin
        if not any(at < offset < upto for offset in parted) or (begin, end) != (0, piece.stop - piece.start):
            assert after[at:upto] == before[at:upto]
        at = upto


@given(runs=rests(), data=st.data())
def test_parts_together_are_the_whole(runs: Runs, data: st.DataObject) -> None:
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, runs.total), max_size=4))), runs.total]
    parts = [runs.between(start, stop) for start, stop in itertools.pairwise(cuts)]
    assert [part.total for part in parts] == [stop - start for start, stop in itertools.pairwise(cuts)]
    assert [frame for part in parts for frame in frames_of(part)] == frames_of(runs.cut(np.array(cuts)))


@settings(max_examples=200)
@given(runs=rests(), data=st.data())
def test_frames_left_by_spans_are_those_in_them(runs: Runs, data: st.DataObject) -> None:
    starts, stops = data.draw(spans(runs.total))
    whole = frames_of(runs)
    left = runs.left(starts, stops)
    assert frames_of(left) == [frame for start, stop in zip(starts, stops, strict=True) for frame in whole[start:stop]]


@given(runs=rests(), data=st.data())
def test_offsets_lie_in_pieces(runs: Runs, data: st.DataObject) -> None:
    offsets = data.draw(st.lists(st.integers(0, runs.total - 1), min_size=1, max_size=6))
    ends = np.cumsum([end - begin for _, begin, end in runs.pieces()]).tolist()
    assert runs.count_pieces() == len(ends)
    apart = runs.apart()
    assert apart.ends.tolist() == ends
    assert frames_of(apart) == frames_of(runs)
    episodes, firsts = runs.line.frames_at(apart.rows[:, FIRST])
    pieces = [(piece.episode, piece.start) for piece, _, _ in runs.pieces()]
    assert list(zip(episodes.tolist(), firsts.tolist(), strict=True)) == pieces
    starts, stops = runs.pieces_at(np.array(offsets))
    for offset, start, stop in zip(offsets, starts, stops, strict=True):
        place = next(place for place, end in enumerate(ends) if offset < end)
        assert (start, stop) == ([0, *ends][place], ends[place])
