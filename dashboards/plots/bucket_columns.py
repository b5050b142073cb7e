"""Bokeh columns of the two steps and the plan on the Buckets page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dashboards.plots.wide_figure import LETTER_PX, MIN_LABELED_PX, Columns
from overlapscope.breakdown.lanes import CATEGORIES, bucket_categories, colors_and_patterns, index_spans
from overlapscope.bucket_model.partition import MB, NO_LIMIT, Buckets, Float64Array, Gradients
from overlapscope.bucket_model.plans import DEFAULT_CAP_BYTES, UniformPlan
from overlapscope.bucket_model.prediction import Curve, Options
from overlapscope.bucket_model.schedule import DrawnStep
from overlapscope.text import format_bytes, format_ns, format_timestamp_ns

# Bokeh columns of predicted step times over bucket sizes.

CURVE_COLUMNS: Final = ("x", "predicted", "low", "high")
MARK_COLUMNS: Final = ("x", "y", "text", "align", "x_offset", "y_offset")
BEST_PLAN_COLUMNS: Final = ("x", "align", "x_offset", "y", "text")
MEASURED_COLUMNS: Final = ("x", "y", "low", "high")

Range = tuple[float, float]

_DEFAULT_MB: Final = DEFAULT_CAP_BYTES / MB
_MAX_SIZE_RATIO: Final = 2000
"""Ratio of the largest cap shown to the smallest one, at most."""
_MIN_SPREAD: Final = 0.12
"""Minimum share of the step time that the height of the plot covers: less would exaggerate differences."""
_MAX_SPREAD: Final = 1.5
"""Step times above the fastest by more than this multiple of it are outside the plot."""
_ENOUGH_ROOM: Final = 0.45
"""Share of the axis that a label needs to the left of its mark, on a phone."""


def compute_size_range_mb(curve: Curve) -> Range:
    """Return the smallest and the largest cap worth trying, in MB."""
    highest_mb = 2 * max(curve.sizes[-1].low_bytes / MB, _DEFAULT_MB)
    return min(max(curve.sizes[0].high_bytes / MB / 4, highest_mb / _MAX_SIZE_RATIO), 0.5), highest_mb


def compute_time_range_ns(curve: Curve) -> Range:
    """Return the step times to show: all except those of far too small or too large buckets."""
    fastest = float(curve.predicted_ns.min())
    low, high = float(curve.interval_ns[0].min()), float(curve.interval_ns[1].max())
    high = min(high, fastest * (1 + _MAX_SPREAD))
    missing = max(0.0, _MIN_SPREAD * fastest - (high - low)) / 2
    margin = 0.08 * (high - low + 2 * missing)
    return max(0.0, low - missing - margin), high + missing + 2 * margin


def build_curve_columns(curve: Curve, sizes_mb: Range) -> dict[str, Any]:
    """Return one horizontal line for each partition, over all the caps that give it.

    With a range from 1 to 10 MB and partitions that change at 4 MB, x is 1, 4, 4, 10.
    """
    highs_mb = [size.high_bytes / MB for size in curve.sizes[:-1]]
    edges = np.clip([sizes_mb[0], *highs_mb, sizes_mb[1]], *sizes_mb)
    indices = np.repeat(np.flatnonzero(np.diff(edges) > 0), 2)
    return {
        "x": edges[indices + np.tile([0, 1], len(indices) // 2)],
        "predicted": curve.predicted_ns[indices],
        "low": curve.interval_ns[0][indices],
        "high": curve.interval_ns[1][indices],
    }


def build_mark_columns(curve: Curve, sizes_mb: Range) -> dict[str, Any]:
    """Return the best size, the current setting and DDP's default; those with the same plan share a mark.

    The current setting is only on the curve of the job as it is.
    """
    best = _find_best(curve)
    names: dict[tuple[float, int], list[str]] = {}
    for x_mb, index, name in _list_marks(curve, best):
        if x_mb is not None:
            names.setdefault((x_mb, index), []).append(name)
    is_right = [_compute_position(x, sizes_mb) > _ENOUGH_ROOM for x, _ in names]
    return {
        "x": [x for x, _ in names],
        "y": [float(curve.predicted_ns[index]) for _, index in names],
        "text": [", ".join(each) for each in names.values()],
        "align": ["right" if right else "left" for right in is_right],
        "x_offset": [-9 if right else 9 for right in is_right],
        # Below the best there is no line that the label could hide.
        "y_offset": [12 if index == best else -11 for _, index in names],
    }


def _list_marks(curve: Curve, best: int) -> Iterator[tuple[float | None, int, str]]:
    """Yield the size of each mark, None if it is on no axis, with its plan and its name."""
    present, default = curve.special["present"], curve.special["default"]
    yield find_axis_mb(curve, best), best, "best size"
    if curve.options == Options():
        yield _DEFAULT_MB if present == default else _find_cap_mb(curve, present), present, "now"
    # Above the curve or below it, as a cap of 25 without that first bucket gives another plan.
    is_named = best == default or curve.index_of_cap(_DEFAULT_MB) == default
    yield _DEFAULT_MB, default, "default" if is_named else "default (1, then 25)"


def build_best_plan_columns(curve: Curve, sizes_mb: Range) -> dict[str, Any]:
    """Return the best plan if no single size gives it, labeled at the side that the best size leaves free."""
    index = curve.special["best"]
    if index < len(curve.sizes) or index == curve.special["default"]:
        return {name: [] for name in BEST_PLAN_COLUMNS}
    best_mb = find_axis_mb(curve, _find_best(curve))
    is_left = best_mb is None or _compute_position(best_mb, sizes_mb) > 1 - _ENOUGH_ROOM / 2
    at = (sizes_mb[0], "left", 6) if is_left else (sizes_mb[1], "right", -6)
    row = (*at, float(curve.predicted_ns[index]), "best plan")
    return {name: [value] for name, value in zip(BEST_PLAN_COLUMNS, row, strict=True)}


def build_measured_columns(curve: Curve) -> dict[str, Any]:
    """Return the recorded plans that a size gives, as recorded: without compression."""
    rows = [
        (x_mb, step.value, step.low, step.high)
        for index, step in curve.measured_steps_ns().items()
        if (x_mb := find_axis_mb(curve, index)) is not None
    ]
    return {name: [row[at] for row in rows] for at, name in enumerate(MEASURED_COLUMNS)}


def find_axis_mb(curve: Curve, index: int) -> float | None:
    """Return the position of a plan on the size axis in MB: of the default its cap, None if no size gives it."""
    return _DEFAULT_MB if index == curve.special["default"] else _find_cap_mb(curve, index)


def _compute_position(size_mb: float, sizes_mb: Range) -> float:
    """Return where a size is on the axis, from 0 to 1."""
    return float(np.log(size_mb / sizes_mb[0]) / np.log(sizes_mb[1] / sizes_mb[0]))


def _find_best(curve: Curve) -> int:
    """Return the index of the best size: DDP's default if none is better by enough, as the advice has it."""
    return curve.special["default"] if curve.is_default_best else curve.fastest


def _find_cap_mb(curve: Curve, index: int) -> float | None:
    """Return a round cap that gives a plan; None if none does."""
    return curve.sizes[index].cap_mb if index < len(curve.sizes) else None


# Vertical layout of the lanes of two steps on the Buckets page, in pixels from the top.

LANE_PX: Final = {"backward": 16, "ready": 8, "communication": 26}
"""Heights of the lanes of a rank, from top to bottom."""
RANK_PX: Final = sum(LANE_PX.values()) + 6
HEAD_PX: Final = 22
"""Height of the heading above the ranks of a step."""


@dataclass(frozen=True, kw_only=True)
class BucketLayout:
    """Layout of two steps, one below the other, of the same number of ranks."""

    ranks: int

    @property
    def step_px(self) -> int:
        """Return the height of one step."""
        return HEAD_PX + self.ranks * RANK_PX

    @property
    def height_px(self) -> int:
        """Return the height of both steps."""
        return 2 * self.step_px

    def lane_px(self, step: int, rank: int, lane: str) -> tuple[int, int]:
        """Return top and bottom of a lane.

        Args:
            step: 0 for the recorded step, 1 for the one below it.
            rank: index among the ranks shown.
            lane: name of the lane, a key of ``LANE_PX``.
        """
        names = list(LANE_PX)
        above = sum(LANE_PX[name] for name in names[: names.index(lane)])
        top = step * self.step_px + HEAD_PX + rank * RANK_PX + above
        return top, top + LANE_PX[lane]


# Tooltips of the Buckets page: of a size, of a bucket in a step, and of a parameter.

Rows = list[tuple[str, str]]
Tooltip = tuple[str, Rows]

_NEAR_PX = 4


def build_size_tooltip(curve: Curve, x_mb: float) -> Tooltip:
    """Return the tooltip of a size on the curve."""
    index = curve.index_of_cap(x_mb)
    low, high = curve.interval_ns[:, index]
    rows = [
        ("predicted", format_ns(curve.predicted_ns[index])),
        ("90 % interval", f"{format_ns(low)} to {format_ns(high)}"),
        ("exposed", format_ns(curve.predicted.exposed_ns[index])),
        ("buckets", f"{len(curve.plans[index]):,}"),
    ]
    return format_caps(curve.sizes[index]), rows


def format_caps(size: UniformPlan) -> str:
    """Return the caps that give the same buckets, as text."""
    low, high = size.low_bytes / MB, size.high_bytes / MB
    if size.high_bytes == NO_LIMIT:
        return f"Any size above {low:.3g} MB"
    if low <= 0:
        return f"Any size up to {high:.3g} MB"
    digits = next(digits for digits in range(3, 18) if f"{low:.{digits}g}" != f"{high:.{digits}g}")
    return f"Sizes above {low:.{digits}g} MB, up to {high:.{digits}g} MB"


def build_step_tooltip(
    step: DrawnStep, shown: list[int], layout: BucketLayout, x: float, y: float, ns_per_px: float
) -> Tooltip:
    """Return the tooltip of a point on one of the two steps; without a title if there is nothing."""
    found = _find_bucket(step, shown, layout, x, y, ns_per_px)
    if found is None:
        return "", []
    rank, bucket = found
    last = float(step.launch_ns[:, bucket].max())
    waits = last - float(step.launch_ns[rank, bucket])
    return f"Bucket {bucket} · {format_bytes(int(step.bytes[bucket]))}", [
        ("rank", str(int(step.ranks[rank]))),
        ("parameters", f"{len(step.plan[bucket]):,}"),
        ("ready", format_timestamp_ns(round(step.ready_ns[rank, bucket]))),
        ("launched", format_timestamp_ns(round(step.launch_ns[rank, bucket]))),
        ("waits for ranks", format_ns(waits)),
        ("waits for the link", format_ns(max(0.0, float(step.start_ns[rank, bucket]) - last))),
        ("start", format_timestamp_ns(round(step.start_ns[rank, bucket]))),
        ("end", format_timestamp_ns(round(step.end_ns[rank, bucket]))),
        ("duration", format_ns(float(step.end_ns[rank, bucket] - step.start_ns[rank, bucket]))),
    ]


def build_parameter_tooltip(gradients: Gradients, plan: Buckets, at_bytes: float) -> Tooltip:
    """Return the tooltip of the parameter at a position on the strip."""
    right = np.cumsum(gradients.bytes[gradients.order])
    index = min(int(np.searchsorted(right, at_bytes, side="right")), len(right) - 1)
    number = int(gradients.order[index])
    bucket = next(at for at, members in enumerate(plan) if number in members)
    members = plan[bucket]
    return gradients.names[number], [
        ("size", format_bytes(int(gradients.bytes[number]))),
        ("gradient", f"{index + 1:,} of {len(right):,}"),
        ("bucket", f"{bucket} of {len(plan):,}, {format_bytes(int(gradients.bytes[list(members)].sum()))}"),
        ("its parameters", f"{len(members):,}"),
    ]


def _find_bucket(
    step: DrawnStep, shown: list[int], layout: BucketLayout, x: float, y: float, ns_per_px: float
) -> tuple[int, int] | None:
    """Return the index of the rank and the number of the bucket: the shortest one near the pointer."""
    y -= layout.step_px * (y >= layout.step_px)
    for row, rank in enumerate(shown):
        near = _NEAR_PX * ns_per_px
        top, bottom = layout.lane_px(0, row, "ready")
        if top <= y < bottom:
            away = np.abs(step.ready_ns[rank] - x)
            return (rank, int(np.argmin(away))) if away.min() <= near else None
        top, bottom = layout.lane_px(0, row, "communication")
        if top <= y < bottom:
            starts, ends = step.start_ns[rank], step.end_ns[rank]
            hit = np.flatnonzero((starts - near <= x) & (x <= ends + near))
            return (rank, int(hit[np.argmin((ends - starts)[hit])])) if len(hit) else None
    return None


SPAN_COLUMNS: Final = ("left", "right", "top", "bottom", "category", "pattern")
READY_COLUMNS: Final = ("x", "top", "bottom", "category")
LABEL_COLUMNS: Final = ("x", "y", "text", "category")
END_COLUMNS: Final = ("x", "top", "bottom", "y", "text")

_BEFORE_BACKWARD: Final = CATEGORIES.index("forward")
_BACKWARD: Final = CATEGORIES.index("backward")
_EXPOSED: Final = CATEGORIES.index("exposed")


def build_span_columns(step: DrawnStep, shown: list[int], layout: BucketLayout, index: int) -> Columns:
    """Return phases and all-reduces as rectangles; concurrent all-reduces share the height of their lane.

    Args:
        step: the step to draw.
        shown: indices of the ranks to draw.
        layout: layout of the lanes.
        index: 0 for the upper step, 1 for the lower one.
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
    colors, _ = colors_and_patterns(bucket_categories(np.arange(len(step.plan))))
    categories = colors.tolist()
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
        fitting = next((text for text in texts if len(text) * LETTER_PX < room_px), None)
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
            if bottom - top >= MIN_LABELED_PX:
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
    color, pattern = colors_and_patterns(bucket_categories(bucket_of[gradients.order]))
    return {
        "left": right - sizes,
        "right": right,
        "top": np.ones(len(right)),
        "bottom": np.zeros(len(right)),
        "category": color,
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
        fitting = next((text for text in texts if len(text) * LETTER_PX < room_px), None)
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
    colors, patterns = colors_and_patterns(spans.categories)
    columns = (spans.starts_ns, spans.ends_ns, tops, tops + height, colors, patterns, spans.rows)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _to_columns(names: tuple[str, ...], rows: list[tuple[Any, ...]]) -> Columns:
    return {name: [row[index] for row in rows] for index, name in enumerate(names)}
