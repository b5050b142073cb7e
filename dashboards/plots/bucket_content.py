"""Bokeh columns of the two steps and the plan on the Buckets page."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from dashboards.plots.bucket_layout import BucketLayout
from overlapscope.analysis.density import index_spans
from overlapscope.analysis.lanes import CATEGORIES, bucket_categories, colors_and_patterns
from overlapscope.model.partition import Buckets, Float64Array, Gradients
from overlapscope.model.typical_step import DrawnStep
from overlapscope.units import format_bytes, format_ns

Columns = dict[str, Any]

SPAN_COLUMNS: Final = ("left", "right", "top", "bottom", "category", "pattern")
READY_COLUMNS: Final = ("x", "top", "bottom", "category")
LABEL_COLUMNS: Final = ("x", "y", "text", "category")
END_COLUMNS: Final = ("x", "top", "bottom", "y", "text")

_BEFORE_BACKWARD: Final = CATEGORIES.index("forward")
_BACKWARD: Final = CATEGORIES.index("backward")
_EXPOSED: Final = CATEGORIES.index("finalize")
_PX_PER_LETTER: Final = 6.4
_MIN_LABELLED_PX: Final = 11


def build_span_columns(step: DrawnStep, shown: list[int], layout: BucketLayout, index: int) -> Columns:
    """Return phases and all-reduces as rectangles; concurrent all-reduces share the height of their lane.

    Args:
        step: the step to draw.
        shown: indices of the ranks to draw.
        layout: layout of the lanes.
        place: 0 for the upper step, 1 for the lower one.
    """
    rows: list[tuple[Any, ...]] = []
    for row, rank in enumerate(shown):
        top, bottom = layout.lane_px(index, row, "backward")
        begin, end = float(step.backward_start_ns[rank]), float(step.backward_end_ns[rank])
        rows.append((0.0, begin, top + 1, bottom - 1, _BEFORE_BACKWARD, 0))
        rows.append((begin, end, top + 1, bottom - 1, _BACKWARD, 0))
        if step.exposed_ns[rank] > 0:
            rows.append((end, end + float(step.exposed_ns[rank]), top + 1, bottom - 1, _EXPOSED, 0))
        rows += [each[:6] for each in _lay_out_transfers(step, rank, row, layout, index)]
    return _to_columns(SPAN_COLUMNS, rows)


def build_ready_columns(step: DrawnStep, shown: list[int], layout: BucketLayout, index: int) -> Columns:
    """Return when the last gradient of each bucket was ready."""
    rows: list[tuple[Any, ...]] = []
    colours, _ = colors_and_patterns(bucket_categories(np.arange(len(step.plan))))
    categories = colours.tolist()
    for row, rank in enumerate(shown):
        top, bottom = layout.lane_px(index, row, "ready")
        moments = step.ready_ns[rank].tolist()
        rows += [(moment, top + 1, bottom - 1, each) for moment, each in zip(moments, categories, strict=True)]
    return _to_columns(READY_COLUMNS, rows)


def build_label_columns(
    step: DrawnStep, shown: list[int], layout: BucketLayout, index: int, ns_per_px: float
) -> Columns:
    """Return labels of the rectangles that are wide enough to hold them."""
    rows: list[tuple[Any, ...]] = []

    def add(category: int, left: float, right: float, middle: float, *texts: str) -> None:
        room_px = (right - left) / ns_per_px - 10
        fitting = next((text for text in texts if len(text) * _PX_PER_LETTER < room_px), None)
        if fitting:
            rows.append((left + 5 * ns_per_px, middle, fitting, category))

    for row, rank in enumerate(shown):
        middle = sum(layout.lane_px(index, row, "backward")) / 2
        begin, end = float(step.backward_start_ns[rank]), float(step.backward_end_ns[rank])
        exposed_ns = float(step.exposed_ns[rank])
        add(_BEFORE_BACKWARD, 0.0, begin, middle, "optimizer, data, forward", "before")
        add(_BACKWARD, begin, end, middle, "backward")
        add(_EXPOSED, end, end + exposed_ns, middle, f"exposed {format_ns(exposed_ns)}", "exposed")
        for left, right, top, bottom, category, _, bucket in _lay_out_transfers(step, rank, row, layout, index):
            if bottom - top >= _MIN_LABELLED_PX:
                texts = f"{bucket} · {format_bytes(int(step.bytes[bucket]))}", f"{bucket}"
                add(category, left, right, (top + bottom) / 2, f"bucket {texts[0]}", *texts)
    return _to_columns(LABEL_COLUMNS, rows)


def build_end_columns(step: DrawnStep, layout: BucketLayout, index: int) -> Columns:
    """Return the line and the label at the end of the step."""
    top, bottom = index * layout.step_px + 4, (index + 1) * layout.step_px - 6
    return _to_columns(END_COLUMNS, [(step.cycle_ns, top, bottom, top + 8, format_ns(step.cycle_ns))])


def build_strip_columns(gradients: Gradients, plan: Buckets) -> Columns:
    """Return a plan: each parameter in the order of gradients, as wide as its bytes, in the color of its bucket.

    Gradients of 4, 2 and 2 bytes lie at 0 to 4, 4 to 6 and 6 to 8 bytes.
    """
    bucket_of = np.zeros(len(gradients.bytes), dtype=np.int64)
    for number, bucket in enumerate(plan):
        bucket_of[list(bucket)] = number
    sizes = gradients.bytes[gradients.order]
    right: Float64Array = np.cumsum(sizes).astype(np.float64)
    colour, pattern = colors_and_patterns(bucket_categories(bucket_of[gradients.order]))
    return {
        "left": right - sizes,
        "right": right,
        "top": np.ones(len(right)),
        "bottom": np.zeros(len(right)),
        "category": colour,
        "pattern": pattern,
        "bucket": bucket_of[gradients.order],
    }


def build_strip_label_columns(gradients: Gradients, plan: Buckets, bytes_per_px: float) -> Columns:
    """Return number and size of each bucket, on each run of adjacent parameters that is wide enough for them."""
    strip = build_strip_columns(gradients, plan)
    begins = np.flatnonzero(np.diff(strip["bucket"], prepend=-1))
    ends = np.append(begins[1:], len(strip["bucket"])) - 1
    rows = []
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        bucket = int(strip["bucket"][begin])
        left, right = float(strip["left"][begin]), float(strip["right"][end])
        size = format_bytes(int(gradients.bytes[list(plan[bucket])].sum()))
        room_px = (right - left) / bytes_per_px - 6
        texts = (f"{bucket} · {size}", str(bucket))
        fitting = next((text for text in texts if len(text) * _PX_PER_LETTER < room_px), None)
        if fitting:
            rows.append(((left + right) / 2, 0.5, fitting, int(strip["category"][begin])))
    return _to_columns(LABEL_COLUMNS, rows)


def _lay_out_transfers(step: DrawnStep, rank: int, row: int, layout: BucketLayout, index: int) -> list[tuple[Any, ...]]:
    """Return left, right, top, bottom, color, pattern and number of each all-reduce."""
    top, bottom = layout.lane_px(index, row, "communication")
    starts, ends = (np.rint(moments[rank]).astype(np.int64) for moments in (step.start_ns, step.end_ns))
    numbers = np.arange(len(starts))
    spans = index_spans(starts, ends, bucket_categories(numbers), numbers)
    height = (bottom - top - 2) / spans.stack_heights
    tops = top + 1 + spans.stack * height
    colours, patterns = colors_and_patterns(spans.categories)
    columns = (spans.starts_ns, spans.ends_ns, tops, tops + height, colours, patterns, spans.rows)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _to_columns(names: tuple[str, ...], rows: list[tuple[Any, ...]]) -> Columns:
    return {name: [row[index] for row in rows] for index, name in enumerate(names)}
