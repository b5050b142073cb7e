"""Busy time per pixel, spans in view and stacking, held against a slow and obvious oracle."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.breakdown.lanes import NO_CATEGORY, SpanIndex, index_spans, pixel_edges

spans = st.lists(
    st.tuples(st.integers(-50, 50), st.integers(0, 30), st.integers(0, 4)).map(lambda s: (s[0], s[0] + s[1], s[2])),
    max_size=25,
)
views = st.tuples(st.integers(-60, 90), st.integers(1, 60)).map(lambda view: (view[0], view[0] + view[1]))


def index(given_spans: list[tuple[int, int, int]]) -> SpanIndex:
    starts, ends, categories = (np.array([span[field] for span in given_spans], dtype=np.int64) for field in range(3))
    return index_spans(starts, ends, categories, np.arange(len(given_spans)))


@given(spans, st.lists(st.integers(-60, 90), min_size=2, max_size=12).map(sorted))
def test_busy_time_is_the_number_of_nanoseconds_in_which_any_span_runs(given_spans, edges):
    busy, _ = index(given_spans).pixels(np.array(edges))
    for pixel, (left, right) in enumerate(itertools.pairwise(edges)):
        assert busy[pixel] == sum(any(s <= t < e for s, e, _ in given_spans) for t in range(left, right))


@given(spans, views)
def test_spans_in_view_are_those_that_touch_it(given_spans, view):
    spans_index = index(given_spans)
    expected = [row for row, (s, e, _) in enumerate(given_spans) if s < view[1] and e >= view[0]]
    assert sorted(spans_index.rows[spans_index.in_view(*view)]) == expected
    assert spans_index.count(*view) == len(expected)


@given(spans)
def test_spans_on_one_row_of_the_stack_do_not_overlap_and_no_row_is_wasted(given_spans):
    spans_index = index(given_spans)
    for row in range(25):
        on_row = spans_index.stack == row
        assert np.all(spans_index.starts_ns[on_row][1:] >= spans_index.ends_ns[on_row][:-1])
    deepest = max((sum(s <= t < e for s, e, _ in given_spans) for t in range(-50, 81)), default=0)
    instants = any(s == e for s, e, _ in given_spans)
    height = spans_index.stack_heights.max(initial=1)
    assert max(1, deepest) <= height <= max(1, deepest) + instants
    assert np.all(spans_index.stack < spans_index.stack_heights)


def test_spans_share_the_height_of_a_lane_only_while_others_run():
    lane = index([(0, 10, 0), (5, 12, 1), (20, 30, 2), (30, 31, 3)])
    assert lane.stack_heights.tolist() == [2, 2, 1, 1]


@given(spans, views, st.integers(1, 20))
def test_the_color_of_a_pixel_is_that_of_a_span_in_it(given_spans, view, pixels):
    edges = pixel_edges(*view, pixels)
    spans_index = index(given_spans)
    _, sampled = spans_index.pixels(edges)
    for pixel, (left, right) in enumerate(itertools.pairwise(edges)):
        inside = [category for s, e, category in given_spans if s < right and (e > left or left <= s)]
        # With overlapping spans the sample may meet one that has just ended within the same busy stretch.
        if not inside:
            assert sampled[pixel] == NO_CATEGORY
        elif spans_index.stack_heights.max() == 1:
            assert sampled[pixel] in inside


@given(spans, views, st.integers(1, 20))
def test_every_instant_is_counted_in_exactly_one_pixel(given_spans, view, pixels):
    edges = pixel_edges(*view, pixels)
    begun = index(given_spans).begun(edges)
    assert begun.sum() == sum(edges[0] <= s < edges[-1] for s, _, _ in given_spans)


@given(views, st.integers(1, 40), st.integers(-30, 30))
def test_pixels_cover_the_view_and_stay_on_their_grid_while_it_is_dragged(view, pixels, moved):
    edges = pixel_edges(*view, pixels)
    assert edges[0] <= view[0]
    assert edges[-1] >= view[1]
    assert len(edges) - 1 >= min(pixels, view[1] - view[0])
    moved_edges = pixel_edges(view[0] + moved, view[1] + moved, pixels)
    both = range(max(edges[0], moved_edges[0]), min(edges[-1], moved_edges[-1]) + 1)
    assert [t for t in both if t in edges] == [t for t in both if t in moved_edges]


def test_times_far_from_zero_lose_no_nanosecond():
    begin = 2**62
    far = index_spans(np.array([begin]), np.array([begin + 3]), np.array([0]), np.array([0]))
    assert far.pixels(np.array([begin - 1, begin + 1, begin + 2, begin + 9]))[0].tolist() == [1, 1, 1]


def test_a_lane_without_overlaps_keeps_its_times_once():
    lane = index([(0, 2, 0), (2, 5, 1)])
    assert lane.busy_starts_ns is lane.starts_ns
    assert lane.reach_ns is lane.ends_ns
    assert lane.stack.strides == (0,)


def test_a_lane_without_spans_is_never_busy():
    edges = np.array([0, 5, 10])
    busy, sampled = index([]).pixels(edges)
    assert busy.tolist() == index([]).begun(edges).tolist() == [0, 0]
    assert sampled.tolist() == [NO_CATEGORY, NO_CATEGORY]
