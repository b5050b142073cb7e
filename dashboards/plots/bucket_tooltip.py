"""Tooltips of the Buckets page: of a size, of a bucket in a step, and of a parameter."""

from __future__ import annotations

import numpy as np

from dashboards.plots.bucket_layout import BucketLayout
from overlapscope.model.curve import Curve
from overlapscope.model.partition import MB, NO_LIMIT, Buckets, Gradients
from overlapscope.model.plan import UniformPlan
from overlapscope.model.typical_step import DrawnStep
from overlapscope.units import format_bytes, format_ns, format_timestamp_ns

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
