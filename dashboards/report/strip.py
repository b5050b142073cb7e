"""Lanes of collectives around the fault or the last collective, as a drawing that needs no server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from dashboards.pages import order
from dashboards.pages.order_details import render_number_details
from dashboards.plots.order import OrderPlot
from dashboards.plots.order_columns import HOLLOW_INK
from dashboards.recording import Snapshot
from overlapscope.diagnosis.diagnosis import Diagnosis
from overlapscope.diagnosis.order_view import CATEGORIES

_WIDTH_PX: Final = 1200

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class CollectiveStrip:
    """Lanes of a process group, in pixels."""

    group: str
    note: str
    """Note on ranks that share a lane."""
    labels: tuple[order.LaneLabel, ...]
    lane_px: int
    height_px: int
    has_two_lines: bool
    cells: tuple[Row, ...]
    """x, width, top, bottom, category, alpha, hatch."""
    missing: tuple[Row, ...]
    differing: tuple[Row, ...]
    names: tuple[Row, ...]
    """x, y, text, ink."""
    subjects: tuple[Row, ...]
    steps: tuple[Row, ...]
    """x, label."""
    numbers: tuple[tuple[float, int], ...]
    band: tuple[Row, ...]
    """x, width and label of the number where the fault began."""
    details: str
    """Markup of what ranks have at the selected number."""


def build_collective_strip(snapshot: Snapshot, diagnosis: Diagnosis) -> CollectiveStrip:
    """Draw the initial view of the Order page."""
    group = order.parse_group(diagnosis, {})
    lanes = diagnosis.lanes(group)
    shown, note = order.choose_lanes(lanes, {})
    selected = order.parse_selected_cell(diagnosis, lanes, shown, {})
    plot = OrderPlot(
        lanes,
        shown,
        highlight=diagnosis.highlight(group),
        selected=selected,
        describe=lambda number: render_number_details(snapshot.trace, diagnosis, lanes, number),
    )
    view: Any = plot.number_range
    start, end = float(view.start), float(view.end)
    column_px = _WIDTH_PX / (end - start)

    def rows(source: Any) -> Iterator[Row]:
        for values in zip(*source.data.values(), strict=True):
            row = dict(zip(source.data, values, strict=True))
            if "left" in row:
                left, right = (min(max(row[name], start), end) for name in ("left", "right"))
                row |= {"x": (left - start) * column_px, "width": (right - left) * column_px}
                if right <= left:
                    continue
            else:
                row["x"] = (row["x"] - start) * column_px
                if not 0 <= row["x"] < _WIDTH_PX:
                    continue
            yield row

    return CollectiveStrip(
        group=order.format_group(group),
        note=note,
        labels=tuple(order.build_lane_label(lane, lanes, diagnosis.evidence) for lane in shown),
        lane_px=plot.layout.lane_px,
        height_px=plot.layout.height_px,
        has_two_lines=plot.layout.has_two_lines,
        cells=tuple(row | {"category": CATEGORIES[row["category"]].replace("_", "-")} for row in rows(plot.cells)),
        missing=tuple(rows(plot.missing)),
        differing=tuple(rows(plot.differing)),
        names=tuple(row | {"ink": _get_ink_variable(row["ink"])} for row in rows(plot.names)),
        subjects=tuple(row | {"ink": _get_ink_variable(row["ink"])} for row in rows(plot.subjects)),
        steps=tuple(rows(plot.steps)),
        numbers=tuple(
            ((number - start) * column_px, number)
            for number in range(round(start + 0.5), round(end))
            if lanes.oldest <= number <= lanes.latest
        ),
        band=tuple(rows(plot.band)),
        details=plot.details.data["markup"][0],
    )


def _get_ink_variable(category: int) -> str:
    """Return the CSS variable of the color that is readable on a cell."""
    return "ink" if category == HOLLOW_INK else f"on-collective-{CATEGORIES[category].replace('_', '-')}"
