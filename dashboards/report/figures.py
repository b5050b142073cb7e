"""Plots in files: those of the pages, so that they need no server, in one fixed view except for steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from bokeh.document import Document
from bokeh.embed import components
from bokeh.models import CustomJS
from bokeh.resources import Resources
from markupsafe import Markup

from dashboards.pages import order
from dashboards.pages.stragglers import FIGURE_DESCRIPTIONS
from dashboards.plots.buckets import draw_fixed_curve
from dashboards.plots.heatmap import FIGURES, HeatmapPlot
from dashboards.plots.order import AXIS_HEIGHT_PX, OrderPlot
from dashboards.plots.step_drawing import StepDrawing, StepPlots
from dashboards.plots.trend import list_trends
from dashboards.rank_map import Heatmap
from dashboards.recording import Snapshot
from overlapscope.breakdown.summary import Summary
from overlapscope.bucket_model.prediction import Curve
from overlapscope.diagnosis.diagnosis import Diagnosis
from overlapscope.machine.of_steps import MachineSummary

_MAX_MAP_COLUMNS: Final = 400
_ORDER_WIDTH_PX: Final = 1200
"""Width of the lanes of collectives: the texts in them are cut to this width."""


@dataclass(eq=False)
class ReportFigures:
    """The Bokeh models of a file, collected while its sections are built, and embedded together."""

    models: dict[str, Any] = field(default_factory=dict)

    def add_trends(self, summary: Summary, machine: MachineSummary) -> dict[str, Any]:
        """Add all trends of the overview; return their template variables."""
        plots = list_trends(machine, summary)
        for plot in plots:
            self._add(plot.root, plot.shown.column, plot.start_script)
        return {"trends": plots}

    def add_curve(self, curve: Curve) -> None:
        """Add step time by bucket size."""
        self._add(draw_fixed_curve(curve), "curve")

    def add_heatmaps(self, heatmap: Heatmap | None) -> dict[str, Any]:
        """Add a heatmap of ranks and steps for each figure; return their template variables."""
        if heatmap is None:
            return {"maps": []}
        maps = []
        for name in FIGURES:
            plot = HeatmapPlot(heatmap, name)
            plot.update(name, plot.grouping, _MAX_MAP_COLUMNS)
            self._add(plot.root, f"map_{name}")
            title, hint = FIGURE_DESCRIPTIONS[name]
            low, high = plot.scale.data["low"][0], plot.scale.data["high"][0]
            maps.append({"root": f"map_{name}", "title": title, "hint": hint, "low": low, "high": high})
        return {"maps": maps}

    def add_order(self, snapshot: Snapshot, diagnosis: Diagnosis) -> dict[str, Any]:
        """Add the collectives around the fault or the last one, as the Order page first shows them."""
        if not diagnosis.groups:
            return {"lane_labels": None}
        group = order.parse_group(diagnosis, {})
        lanes = diagnosis.lanes(group)
        shown, note = order.choose_lanes(lanes, {})
        selected = order.parse_selected_cell(diagnosis, lanes, shown, {})
        plot = OrderPlot(lanes, shown, highlight=order.find_highlight(diagnosis, lanes), selected=selected)
        for root, name in ((plot.axis, "numbers"), (plot.root, "order")):
            root.update(sizing_mode="fixed", width=_ORDER_WIDTH_PX)
            self._add(root, name)
        return {
            "group": order.format_group(group),
            "lanes_note": note,
            "lane_labels": [order.build_lane_label(lane, lanes, diagnosis.evidence) for lane in shown],
            "lane_px": plot.layout.lane_px,
            "axis_px": AXIS_HEIGHT_PX,
            "has_two_lines": plot.layout.has_two_lines,
            "details": order.render_number_details(snapshot.trace, diagnosis, lanes, selected[1]),
        }

    def add_steps(self, drawings: Sequence[StepDrawing]) -> None:
        """Add steps, which can be zoomed and panned."""
        plots = StepPlots(drawings)
        self.models |= {root.name: root for root in plots.roots}
        self._scripts.append(plots.start_script)

    def embed(self) -> tuple[Mapping[str, Markup], Markup]:
        """Return the element of each model by its name, and the script by which BokehJS fills them."""
        if not self.models:
            return {}, Markup()
        document = Document()
        for model in self.models.values():
            document.add_root(model)
        document.js_on_event("document_ready", *self._scripts, CustomJS(code="window.overlapscope.paintPlots()"))
        script, elements = components(self.models)
        # Bokeh escapes what is in its elements and its script.
        return {name: Markup(element) for name, element in elements.items()}, Markup(script)  # noqa: S704

    _scripts: list[CustomJS] = field(default_factory=list)

    def _add(self, root: Any, name: str, script: CustomJS | None = None) -> None:
        root.tags = [tag for tag in root.tags if "rpc" not in tag]  # messages to a server
        root.toolbar.tools = []  # the wheel scrolls the report
        self.models[name] = root
        self._scripts += [] if script is None else [script]


@cache
def load_bokeh_js() -> str:
    """Return the element with BokehJS itself, without parts that the plots don't use; it loads nothing."""
    resources = Resources(mode="inline", minified=True, components=["bokeh"])
    code = "\n".join(resources.js_raw).replace("</script", "<\\/script")
    return f'<script id="bokeh">{code}</script>\n'
