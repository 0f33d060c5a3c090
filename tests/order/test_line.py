"""Segments, and the line in which an epoch lays them end to end."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfetch.errors import ConfigError
from asyncfetch.order.line import Line, Piece, count_segments, draw_key, mixed, segment_of, shares


@st.composite
def lines(draw: st.DrawFn, most: int = 40) -> Line:
    """Of a few episodes, some of them empty; at least one frame."""
    lengths = draw(st.lists(st.integers(0, most), min_size=1, max_size=12).filter(any))
    group = draw(st.integers(1, 4))
    return Line(
        np.array(lengths),
        segment_frames=draw(st.sampled_from([1, 7, 20, 100, 10**9])),
        group_frames=group,
        coded_frames=group * draw(st.integers(1, 3)),
        shuffle=draw(st.sampled_from([True, True, False])),
        seed=draw(st.integers(0, 3)),
        nodes=draw(st.sampled_from([1, 1, 2, 3])),
    )


def pieces_of(line: Line, epoch: int) -> list[Piece]:
    """The segments of an epoch, as they lie on the line."""
    found, place = [], epoch * line.total
    while place < (epoch + 1) * line.total:
        stop = int(line.segment_at(np.array([place]))[1][0])
        found.append(line.piece(place, stop))
        place = stop
    return found


@given(start=st.integers(0, 2**40), key=st.integers(0, 2**64 - 1))
def test_mixed_numbers_are_distinct(start: int, key: int) -> None:
    assert len(set(mixed(np.arange(start, start + 300), key).tolist())) == 300


def test_a_key_is_of_one_purpose_and_its_numbers() -> None:
    keys = [draw_key("a", 1, 23), draw_key("a", 12, 3), draw_key("b", 1, 23), draw_key("a", 1, 2**80)]
    assert len(set(keys)) == 4


@given(line=lines(), epoch=st.integers(0, 2))
def test_an_epoch_has_each_frame_once(line: Line, epoch: int) -> None:
    pieces = pieces_of(line, epoch)
    frames = [(piece.episode, frame) for piece in pieces for frame in line.frames(piece).tolist()]
    whole = [(episode, frame) for episode, length in enumerate(line.lengths) for frame in range(length)]
    assert sorted(frames) == whole
    assert {piece.epoch for piece in pieces} == {epoch}
    assert len(pieces) == line.segments
    if not line.shuffle:
        assert frames == whole


@given(line=lines())
def test_segments_are_equal_parts_of_whole_groups(line: Line) -> None:
    by_episode: dict[int, list[Piece]] = {}
    for piece in sorted(pieces_of(line, 0)):
        by_episode.setdefault(piece.episode, []).append(piece)
    for episode, parts in by_episode.items():
        sizes = [part.stop - part.start for part in parts]
        groups = [-(-size // line.coded_frames) for size in sizes]
        assert all(part.start % line.coded_frames == 0 for part in parts)
        assert max(groups) - min(groups) <= 1
        assert all(size <= line.segment_frames or count == 1 for size, count in zip(sizes, groups, strict=True))
        assert len(parts) == 1 or line.lengths[episode] > line.segment_frames
        assert max(sizes) <= line.largest
        assert len(parts) == count_segments(line.lengths, line.segment_frames, line.coded_frames)[episode]
    largest = max(piece.stop - piece.start for parts in by_episode.values() for piece in parts)
    assert largest <= line.largest < largest + line.coded_frames


@given(line=lines(), data=st.data())
def test_a_place_is_found_in_its_segment(line: Line, data: st.DataObject) -> None:
    places = np.array(data.draw(st.lists(st.integers(0, 3 * line.total - 1), min_size=1, max_size=8)))
    starts, stops = line.segment_at(places)
    for place, start, stop, index in zip(places.tolist(), starts, stops, line.index_of(places), strict=True):
        epoch, number = divmod(int(index), line.segments)
        pieces = pieces_of(line, epoch)
        assert start <= place < stop
        assert pieces[number] == line.piece(int(start), int(stop))
        assert line.piece(place, int(stop)) == pieces[number]._replace(start=pieces[number].start + place - int(start))


@given(line=lines(), epoch=st.integers(0, 3), more=st.integers(0, 2))
def test_places_are_counted_from_any_epoch(line: Line, epoch: int, more: int) -> None:
    assert pieces_of(line.since(epoch), more) == pieces_of(line, epoch + more)
    assert {piece.epoch for piece in pieces_of(line.since(2**90).since(1), more)} == {2**90 + 1 + more}


@given(line=lines(), data=st.data())
def test_the_frames_of_a_group_come_in_a_row(line: Line, data: st.DataObject) -> None:
    piece = data.draw(st.sampled_from(pieces_of(line, 0)))
    cut = data.draw(st.integers(piece.start, piece.stop - 1))
    frames, size = line.frames(piece).tolist(), line.group_frames
    groups = [list(run) for _, run in itertools.groupby(frames, lambda frame: frame // size)]
    assert all(run == list(range(run[0], run[0] + len(run))) for run in groups)
    assert len({run[0] // size for run in groups}) == len(groups)
    # Both sides of a cut are in the order in which the whole was.
    for part in (piece._replace(stop=cut), piece._replace(start=cut)):
        assert line.frames(part).tolist() == [frame for frame in frames if part.start <= frame < part.stop]


def test_groups_and_segments_are_drawn() -> None:
    line = Line(np.full(40, 40), segment_frames=40, group_frames=2)
    frames = line.frames(Piece(3, 0, 40))[::2].tolist()
    assert frames != sorted(frames)
    assert line.frames(Piece(4, 0, 40))[::2].tolist() != frames
    assert line.frames(Piece(3, 0, 40, epoch=1))[::2].tolist() != frames
    orders = [
        [piece.episode for piece in pieces_of(each, epoch)]
        for each in (line, Line(line.lengths, segment_frames=40, group_frames=2, seed=1))
        for epoch in (0, 1)
    ]
    assert len({tuple(order) for order in [*orders, range(40)]}) == 5


def test_the_line_is_frozen_across_releases() -> None:
    """A saved state means the same after an upgrade only while these values stay as they are."""
    line = Line(np.array([5, 3, 40, 6, 2]), segment_frames=15, group_frames=2, coded_frames=4, seed=3)
    assert [piece[:3] for piece in pieces_of(line, 1)] == [
        (3, 0, 6),
        (4, 0, 2),
        (2, 8, 20),
        (2, 28, 40),
        (1, 0, 3),
        (2, 20, 28),
        (0, 0, 5),
        (2, 0, 8),
    ]
    assert line.frames(Piece(2, 12, 24, epoch=1)).tolist() == [20, 21, 18, 19, 16, 17, 12, 13, 14, 15, 22, 23]
    assert shares(np.array([5, 3, 10, 6, 2, 9]), 2, seed=3).tolist() == [2, 2, 0, 2, 2, 1]


@pytest.mark.parametrize("settings", [{"segment_frames": 0}, {"segment_frames": 5, "group_frames": 0}])
def test_segments_of_nothing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="1 frame or more"):
        Line(np.array([5]), **settings)


def test_line_that_takes_long_to_draw_is_known() -> None:
    assert Line(np.full(101, 1000), segment_frames=1).is_large
    assert not Line(np.full(99, 1000), segment_frames=1).is_large


def of_nodes(line: Line, epoch: int) -> list[dict[int, int]]:
    """Of each node's equal part of the line, the frames of each episode."""
    found: list[dict[int, int]] = [{} for _ in range(line.nodes)]
    first = 0
    for piece in pieces_of(line, epoch):
        stop = first + piece.stop - piece.start
        for node, of_node in enumerate(found):
            begin, end = node * line.total // line.nodes, (node + 1) * line.total // line.nodes
            if max(first, begin) < min(stop, end):
                of_node[piece.episode] = min(stop, end) - max(first, begin)
        first = stop
    return found


@given(line=lines(), epoch=st.integers(1, 3))
def test_a_node_has_the_same_segments_in_every_epoch(line: Line, epoch: int) -> None:
    """Its share, an equal part to the frame; a segment that a border divides may be divided elsewhere."""
    line = Line(line.lengths, segment_frames=100, group_frames=line.group_frames, seed=line.seed, nodes=line.nodes)
    assert [set(each) for each in of_nodes(line, 0)] == [set(each) for each in of_nodes(line, epoch)]


@pytest.mark.parametrize("nodes", [2, 8, 30])
def test_few_segments_move_when_a_node_is_lost(nodes: int) -> None:
    lengths = np.random.default_rng(nodes).integers(90, 211, 4000)
    before, after = (of_nodes(Line(lengths, segment_frames=600, nodes=count), 0) for count in (nodes, nodes - 1))
    anew = sum(
        frames for old, new in zip(before, after, strict=False) for episode, frames in new.items() if episode not in old
    )
    assert anew / lengths.sum() <= 1 / nodes + 0.05


@given(st.integers(1, 400), st.integers(1, 90), st.integers(1, 60))
def test_an_episodes_segments_are_those_of_the_line(length: int, segment_frames: int, group_frames: int) -> None:
    line = Line(np.array([length]), segment_frames=segment_frames, group_frames=group_frames, shuffle=False)
    starts, stops = line.segment_at(np.arange(length))
    found = [segment_of(frame, length, segment_frames, group_frames) for frame in range(length)]
    assert found == list(zip(starts.tolist(), stops.tolist(), strict=True))


def test_an_episode_of_up_to_the_length_of_a_segment_is_one() -> None:
    assert [segment_of(7, length, 600, 2) for length in (600, 601)] == [(0, 600), (0, 300)]
