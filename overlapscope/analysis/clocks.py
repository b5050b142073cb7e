"""Precision with which times of different ranks can be compared, in a few words."""

from __future__ import annotations

from math import ceil

from overlapscope.trace.reader import Trace


def describe_clocks(trace: Trace) -> str:
    """Say whether the ranks are on one clock, and with what error."""
    unaligned = len(trace.ranks) - len(trace.aligned_ranks)
    if unaligned:
        return f"{unaligned} of {len(trace.ranks)} ranks not aligned"
    if trace.clock_error_ns:
        return f"aligned to ±{ceil(trace.clock_error_ns / 1000)} µs"
    return "one clock (same boot)"


def clock_offsets(trace: Trace) -> dict[int, float]:
    """Return the nanoseconds to add to the times of each rank to compare them, for ranks whose clocks are known."""
    known = trace.ranks[trace.ranks["clock"] != "none"]
    return dict(zip(known["rank"].tolist(), known["offset_ns"].astype(float).tolist(), strict=True))
