"""Bokeh columns of predicted step times over bucket sizes."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from overlapscope.model.curve import Curve, Options
from overlapscope.model.partition import MB
from overlapscope.model.plan import DEFAULT_CAP_BYTES

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
    names: dict[tuple[float, int], list[str]] = {}

    def add(x_mb: float | None, index: int, name: str) -> None:
        if x_mb is not None:
            names.setdefault((x_mb, index), []).append(name)

    add(_find_cap_mb(curve, curve.fastest), curve.fastest, "best size")
    present, default = curve.special["present"], curve.special["default"]
    if curve.options == Options():
        add(_DEFAULT_MB if present == default else _find_cap_mb(curve, present), present, "now")
    add(_DEFAULT_MB, default, "DDP's default")
    is_right = [np.log(x / sizes_mb[0]) > 0.7 * np.log(sizes_mb[1] / sizes_mb[0]) for x, _ in names]
    return {
        "x": [x for x, _ in names],
        "y": [float(curve.predicted_ns[index]) for _, index in names],
        "text": [", ".join(each) for each in names.values()],
        "align": ["right" if right else "left" for right in is_right],
        "x_offset": [-9 if right else 9 for right in is_right],
        # Below the best there is no line that the label could hide.
        "y_offset": [12 if index == curve.fastest else -11 for _, index in names],
    }


def build_best_plan_columns(curve: Curve, sizes_mb: Range) -> dict[str, Any]:
    """Return the best plan if no single size gives it, labeled at the side where the best size is not."""
    index = curve.special["best"]
    if index < len(curve.sizes) or index == curve.special["default"]:
        return {name: [] for name in BEST_PLAN_COLUMNS}
    best_mb = _find_cap_mb(curve, curve.fastest)
    is_left = best_mb is None or best_mb > np.sqrt(sizes_mb[0] * sizes_mb[1])
    at = (sizes_mb[0], "left", 6) if is_left else (sizes_mb[1], "right", -6)
    row = (*at, float(curve.predicted_ns[index]), "best plan, unequal buckets")
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


def _find_cap_mb(curve: Curve, index: int) -> float | None:
    """Return a round cap that gives a plan; None if none does."""
    return curve.sizes[index].cap_mb if index < len(curve.sizes) else None
