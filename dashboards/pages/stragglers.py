"""Stragglers page: findings with their costs, the heatmap of ranks and steps, and what fixing them would gain."""

from __future__ import annotations

from typing import Any, Final

from bokeh.document import Document

from dashboards.pages.breakdown import build_breakdown_context
from dashboards.pages.shell import QueryArguments, find_incident, get_argument, render
from dashboards.plots.heatmap import FIGURES, HeatmapPlot
from dashboards.rank_map import Grouping, Heatmap, HeatmapFigure
from dashboards.recording import Snapshot
from overlapscope.report.stragglers import build_stragglers_section, describe_basis, tabulate_findings
from overlapscope.stragglers import text
from overlapscope.stragglers.stragglers import Stragglers
from overlapscope.trace.recording import Trace

FIGURE_DESCRIPTIONS: Final[dict[HeatmapFigure, tuple[str, str]]] = {
    "compute": ("Compute", "Forward, backward, optimizer and evaluation"),
    "lateness": ("Lateness", "How long after the median rank a rank arrives at the step's last all-reduce"),
    "wait": ("Wait", "How long a rank waits for later ones, with nothing else to do"),
}
"""Name and definition of each figure of the heatmap."""


def build(document: Document, snapshot: Snapshot, arguments: QueryArguments) -> None:
    """Fill a document with the page."""
    found, heatmap = snapshot.stragglers, snapshot.heatmap
    if found is None or heatmap is None:
        _build_unavailable(document, snapshot.trace)
        return
    plot = _parse_heatmap_plot(heatmap, arguments)
    document.js_on_event("document_ready", plot.start_script)
    render(
        document,
        "stragglers.html",
        title="Stragglers",
        trace=snapshot.trace,
        incident=find_incident(snapshot),
        roots=[plot.root],
        **build_stragglers_context(snapshot, found),
        **_build_heatmap_context(heatmap, plot),
    )


def build_stragglers_context(snapshot: Snapshot, found: Stragglers) -> dict[str, Any]:
    """Return the section on stragglers with what its page adds, as template variables."""
    summary, section = snapshot.summary, build_stragglers_section(found)
    basis = (snapshot.breakdown_section.basis, f"Findings compare {describe_basis(snapshot, found)}.", section.basis)
    *_, equal_ranks, best_transfers = section.numbers
    return {
        "section": section,
        "basis": " ".join(filter(None, basis)),
        "findings": tabulate_findings(found),
        **build_breakdown_context(
            summary,
            (equal_ranks.label, summary.mean.minus(found.saved_if_ranks_equal)),
            (best_transfers.label, summary.mean.minus(found.saved_by_best_transfers)),
        ),
    }


def build_heatmap(document: Document, snapshot: Snapshot, arguments: QueryArguments) -> None:
    """Fill a document with the heatmap and nothing else."""
    heatmap = snapshot.heatmap
    if heatmap is None:
        _build_unavailable(document, snapshot.trace)
        return
    plot = _parse_heatmap_plot(heatmap, arguments)
    document.js_on_event("document_ready", plot.start_script)
    render(
        document,
        "heatmap.html",
        title="Ranks by step",
        trace=snapshot.trace,
        roots=[plot.root],
        is_plain=True,
        **_build_heatmap_context(heatmap, plot),
    )


def _build_unavailable(document: Document, trace: Trace) -> None:
    reason = text.explain_missing_stragglers(trace)
    render(
        document,
        "problem.html",
        title="Stragglers",
        trace=trace,
        headline=reason.headline,
        message=reason.message,
        advice=reason.advice,
    )


def _parse_heatmap_plot(heatmap: Heatmap, arguments: QueryArguments) -> HeatmapPlot:
    """Build the heatmap of ``?figure=…&grouping=…``; invalid values are ignored."""
    given, wanted = get_argument(arguments, "figure"), get_argument(arguments, "grouping")
    figure: HeatmapFigure = next((known for known in FIGURES if known == given), "lateness")
    grouping: Grouping | None = next((known for known in heatmap.groupings if known == wanted), None)
    return HeatmapPlot(heatmap, figure, grouping)


def _build_heatmap_context(heatmap: Heatmap, plot: HeatmapPlot) -> dict[str, Any]:
    return {
        "map_figures": [(name, *FIGURE_DESCRIPTIONS[name]) for name in FIGURES],
        "map_figure": plot.figure,
        "map_groupings": heatmap.groupings,
        "map_grouping": plot.grouping,
    }
