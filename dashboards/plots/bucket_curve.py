"""Bokeh columns of predicted step times over bucket sizes."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from overlapscope.model.curve import Curve, Options
from overlapscope.model.partition import MB
from overlapscope.model.plan import DEFAULT_CAP_BYTES

CURVE_COLUMNS: Final = ("x", "predicted", "low", "high")
MARK_COLUMNS: Final = ("x", "y", "text", "align", "x_offset", "y_offset")
FREE_COLUMNS: Final = ("x", "align", "x_offset", "y", "text")
MEASURED_COLUMNS: Final = ("x", "y", "low", "high")

Range = tuple[float, float]

_DEFAULT_MB: Final = DEFAULT_CAP_BYTES / MB
_MOST_TIMES: Final = 2000
"""Ratio of the largest cap shown to the smallest one, at most."""
_LEAST_SPREAD: Final = 0.12
"""Minimum share of the step time that the height of the plot covers: less would exaggerate differences."""
_MOST_SPREAD: Final = 1.5
"""Step times above the fastest by more than this multiple of it are outside the plot."""


def size_range_mb(curve: Curve) -> Range:
    """Return the smallest and the largest cap worth trying, in MB."""
    highest_mb = 2 * max(curve.sizes[-1].low_bytes / MB, _DEFAULT_MB)
    return min(max(curve.sizes[0].high_bytes / MB / 4, highest_mb / _MOST_TIMES), 0.5), highest_mb


def time_range_ns(curve: Curve) -> Range:
    """Return the step times to show: all except those of far too small or too large buckets."""
    fastest = float(curve.predicted_ns.min())
    low, high = float(curve.interval_ns[0].min()), float(curve.interval_ns[1].max())
    high = min(high, fastest * (1 + _MOST_SPREAD))
    missing = max(0.0, _LEAST_SPREAD * fastest - (high - low)) / 2
    margin = 0.08 * (high - low + 2 * missing)
    return max(0.0, low - missing - margin), high + missing + 2 * margin


def curve_columns(curve: Curve, sizes_mb: Range) -> dict[str, Any]:
    """Return one horizontal line for each partition, over all the caps that give it.

    With a range from 1 to 10 MB and partitions that change at 4 MB, x is 1, 4, 4, 10.
    """
    highs_mb = [size.high_bytes / MB for size in curve.sizes[:-1]]
    edges = np.clip([sizes_mb[0], *highs_mb, sizes_mb[1]], *sizes_mb)
    places = np.repeat(np.flatnonzero(np.diff(edges) > 0), 2)
    return {
        "x": edges[places + np.tile([0, 1], len(places) // 2)],
        "predicted": curve.predicted_ns[places],
        "low": curve.interval_ns[0][places],
        "high": curve.interval_ns[1][places],
    }


def mark_columns(curve: Curve, sizes_mb: Range) -> dict[str, Any]:
    """Return the best size, the current setting and DDP's default; those with the same plan share a mark.

    The current setting is only on the curve of the job as it is.
    """
    names: dict[tuple[float, int], list[str]] = {}

    def add(x_mb: float | None, place: int, name: str) -> None:
        if x_mb is not None:
            names.setdefault((x_mb, place), []).append(name)

    add(_x_mb(curve, curve.fastest), curve.fastest, "best size")
    present, default = curve.special["present"], curve.special["default"]
    if curve.options == Options():
        add(_DEFAULT_MB if present == default else _x_mb(curve, present), present, "now")
    add(_DEFAULT_MB, default, "DDP's default")
    is_right = [np.log(x / sizes_mb[0]) > 0.7 * np.log(sizes_mb[1] / sizes_mb[0]) for x, _ in names]
    return {
        "x": [x for x, _ in names],
        "y": [float(curve.predicted_ns[place]) for _, place in names],
        "text": [", ".join(each) for each in names.values()],
        "align": ["right" if right else "left" for right in is_right],
        "x_offset": [-9 if right else 9 for right in is_right],
        # Below the best there is no line that the label could hide.
        "y_offset": [12 if place == curve.fastest else -11 for _, place in names],
    }


def free_columns(curve: Curve, sizes_mb: Range) -> dict[str, Any]:
    """Return the best plan if no single size gives it, labeled at the side where the best size is not."""
    place = curve.special["best"]
    if place < len(curve.sizes) or place == curve.special["default"]:
        return {name: [] for name in FREE_COLUMNS}
    best_mb = _x_mb(curve, curve.fastest)
    is_left = best_mb is None or best_mb > np.sqrt(sizes_mb[0] * sizes_mb[1])
    at = (sizes_mb[0], "left", 6) if is_left else (sizes_mb[1], "right", -6)
    row = (*at, float(curve.predicted_ns[place]), "best plan, unequal buckets")
    return {name: [value] for name, value in zip(FREE_COLUMNS, row, strict=True)}


def measured_columns(curve: Curve) -> dict[str, Any]:
    """Return the recorded plans that a size gives, as recorded: without compression."""
    rows = [
        (x_mb, step.value, step.low, step.high)
        for place, step in curve.steps_measured_ns().items()
        if (x_mb := x_of(curve, place)) is not None
    ]
    return {name: [row[at] for row in rows] for at, name in enumerate(MEASURED_COLUMNS)}


def x_of(curve: Curve, place: int) -> float | None:
    """Return the position of a plan on the size axis in MB: of the default its cap, None if no size gives it."""
    return _DEFAULT_MB if place == curve.special["default"] else _x_mb(curve, place)


def _x_mb(curve: Curve, place: int) -> float | None:
    """Return a round cap that gives a plan; None if none does."""
    return curve.sizes[place].cap_mb if place < len(curve.sizes) else None
