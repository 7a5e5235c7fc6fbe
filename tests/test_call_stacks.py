"""Nesting and cuts of many threads at once, against each thread taken alone in plain Python."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lumos_nb import call_stacks

Span = tuple[int, int]

spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=6)
lanes = st.lists(st.tuples(spans, spans, st.sets(st.integers(0, 45), max_size=3)), min_size=1, max_size=4)


def apart(drawn: list[Span]) -> list[Span]:
    """(start, length) drawn at random -> spans in order, each cut off where the next one begins."""
    found = sorted((start, start + length) for start, length in drawn)
    return [(start, min([end, *(later for later, _ in found[n + 1 :])])) for n, (start, end) in enumerate(found)]


def cut_alone(tops: list[Span], calls: list[Span], marks: list[int]) -> list[tuple[int, int, int, int]]:
    """Start, end, call and mark of every row of one lane."""
    edges = sorted({edge for span in tops + calls for edge in span})
    if not edges:
        return []
    edges = sorted({*edges, *(mark for mark in marks if edges[0] <= mark <= edges[-1])})
    rows = [(start, end, number) for number, (start, end) in enumerate(calls)]
    for start, end in itertools.pairwise(edges):
        begun = [call for call in calls if call[0] <= start]
        if not begun or begun[-1][1] <= start:
            rows.append((start, end, -1))
    rows.sort(key=lambda row: row[:2])
    return [(*row, sum(mark <= row[0] for mark in marks) - 1) for row in rows]


@given(lanes)
def test_every_lane_is_cut_as_if_it_were_alone(drawn: list[tuple[list[Span], list[Span], set[int]]]) -> None:
    parts = [(apart(tops), apart(calls), sorted(marks)) for tops, calls, marks in drawn]
    offsets = [np.cumsum([0, *(len(part[kind]) for part in parts)]) for kind in range(3)]
    edges = [np.array([e for part in parts for span in part[k] for e in span], np.int64) for k in range(2)]
    marks = np.array([mark for part in parts for mark in part[2]], np.int64)
    ranges = np.stack([offsets[2][:-1], offsets[2][1:]], axis=1)
    found = call_stacks.cut(offsets[0], edges[0], offsets[1], edges[1], ranges, marks)
    expected = []
    for lane, part in enumerate(parts):
        for start, end, call, mark in cut_alone(*part):
            first_call, first_mark = int(offsets[1][lane]), int(offsets[2][lane])
            row = (lane, start, end, call + first_call if call >= 0 else -1, mark + first_mark if mark >= 0 else -1)
            expected.append(row)
    assert [tuple(row) for row in found.T.tolist()] == expected


@given(st.lists(spans, min_size=1, max_size=4), st.lists(st.integers(0, 45), max_size=8), st.booleans())
def test_spans_of_one_lane_say_nothing_of_another(drawn: list[list[Span]], times: list[int], strictly: bool) -> None:
    rows = [sorted(((s, s + n) for s, n in part), key=lambda span: (span[0], -span[1])) for part in drawn]
    lane = np.repeat(np.arange(len(rows)), [len(part) for part in rows])
    start, end = (np.array([span[k] for part in rows for span in part], np.int64) for k in range(2))
    at = np.array(sorted(times), np.int64)
    at_lane, everywhere = np.repeat(np.arange(len(rows)), at.size), np.tile(at, len(rows))
    strict = np.full(everywhere.size, strictly)
    parent = call_stacks.nearest_encloser(lane, start, end)
    inner = call_stacks.innermost_at(lane, start, end, at_lane, everywhere, strict)
    first = np.append(0, np.cumsum([len(part) for part in rows]))
    for number in range(len(rows)):
        own, here = lane == number, at_lane == number
        zeros = np.zeros(own.sum(), np.int64)
        alone = call_stacks.nearest_encloser(zeros, start[own], end[own])
        assert parent[own].tolist() == np.where(alone >= 0, alone + first[number], -1).tolist()
        alone = call_stacks.innermost_at(zeros, start[own], end[own], np.zeros(at.size, np.int64), at, strict[here])
        assert inner[here].tolist() == np.where(alone >= 0, alone + first[number], -1).tolist()
