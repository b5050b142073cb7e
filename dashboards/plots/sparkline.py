"""Sparkline of step times in a table."""

from __future__ import annotations

from typing import Final

import numpy as np

from overlapscope.analysis.run_facts import StepTimes

WIDTH_PX: Final = 120
HEIGHT_PX: Final = 22
_MAX_MEDIANS: Final = 2.0
"""The upper edge, in median step times: a first step of a hundred times as long must not flatten the rest."""


def build_sparkline_path(times: StepTimes) -> str:
    """Return the line as an SVG path; zero is at the lower edge. Larger values are clipped to the upper edge."""
    shares = np.asarray(times.times_ns) / max(1.0, _MAX_MEDIANS * float(np.median(times.times_ns)))
    y = HEIGHT_PX - 1 - (HEIGHT_PX - 2) * np.clip(shares, 0, 1)
    x = np.linspace(1, WIDTH_PX - 1, len(y)) if len(y) > 1 else np.array([1.0])
    points = [f"{left:.1f},{top:.1f}" for left, top in zip(x, y, strict=True)]
    return f"M{' L'.join(points)}" + (f" H{WIDTH_PX - 1}" if len(points) == 1 else "")
