"""Tooltip of a collective on the Order page."""

from __future__ import annotations

from typing import Final

from dashboards.plots.tooltip import Rows
from overlapscope.diagnosis.evidence import UNKNOWN_STEP, Divergence
from overlapscope.diagnosis.order_lanes import OrderLane, OrderLanes
from overlapscope.diagnosis.wording import capitalize, collective_text, rank_list
from overlapscope.trace.signature import NO_BUCKET
from overlapscope.units import format_bytes, format_ns

_DIFFERENCES: Final[dict[Divergence, str]] = {
    "signature": "a different collective",
    "step": "of a different step",
    "batch": "of a different batch of data",
    "names": "of different tensors",
}


def build_collective_tooltip(lanes: OrderLanes, lane: OrderLane, number: int) -> tuple[str, Rows]:
    """Return title and lines for what a lane has at a number."""
    cell = lanes.window([lane], number, number).cells[0]
    title = f"{capitalize(rank_list(lane.ranks))} · #{number:,}"
    entry = cell.entry
    if entry is None:
        what = f"nothing: its log ends at #{lane.latest:,}" if lane.latest else "left no log of this group"
        return title, [("", what)]
    signature = entry.signature
    rows: Rows = [("what", collective_text(entry))]
    if cell.difference is not None:
        rows.append(("differs", f"{_DIFFERENCES[cell.difference]} than on most or some other ranks"))
    if entry.step != UNKNOWN_STEP:
        rows.append(("step", str(entry.loop_step)))
    if entry.phase:
        rows.append(("phase", entry.phase.replace("_", " ")))
    if signature.bytes:
        rows.append(("size", format_bytes(signature.bytes)))
    rows.append(("state", entry.state))
    if entry.launched_ns is not None:
        rows.append(("launched", f"{format_ns(entry.launched_ns - entry.announced_ns)} after it was announced"))
    if entry.launched_ns is not None and entry.completed_ns is not None:
        took = format_ns(entry.completed_ns - entry.launched_ns)
        is_seen_late = signature.bucket == NO_BUCKET
        rows.append(("took", f"at most {took}" if is_seen_late else took))
    if entry.call_site is not None:
        rows.append(("called at", str(entry.call_site)))
    return title, rows
