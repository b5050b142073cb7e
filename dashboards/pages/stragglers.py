"""Stragglers page: findings with their costs, the heatmap of ranks and steps, and what fixing them would gain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from bokeh.document import Document

from dashboards.pages.account import account_variables, counted_text
from dashboards.pages.headline import Headline
from dashboards.pages.shell import Arguments, render
from dashboards.pages.what_if import SHOWN_ROWS, what_if_tables
from dashboards.plots.heatmap import FIGURES, HeatmapPlot
from dashboards.recording import Snapshot
from overlapscope.analysis import sentences
from overlapscope.analysis.cycles import Cycles
from overlapscope.analysis.finding import Finding
from overlapscope.analysis.heatmap import Figure, Grouping, Heatmap
from overlapscope.analysis.stragglers import Stragglers
from overlapscope.analysis.summary import Summary
from overlapscope.trace.reader import Trace
from overlapscope.units import format_interval_ns, format_ns, format_share

FIGURE_TEXTS: Final[dict[Figure, tuple[str, str]]] = {
    "compute": ("Compute", "Forward, backward, optimizer and evaluation"),
    "lateness": ("Lateness", "How long after the median rank a rank arrives at the step's last all-reduce"),
    "wait": ("Wait", "How long a rank waits for later ones, with nothing else to do"),
}
"""Name and definition of each figure of the heatmap."""


@dataclass(frozen=True, kw_only=True)
class BlameRow:
    """A finding in the table."""

    who: str
    blame: str
    """Cause of the delay, and when it occurs."""
    evidence: str
    delay: str
    cost: str
    percent: float
    """Cost as a percentage of the step time, for the bar."""
    saving: str
    saving_interval: str
    step: int
    link: str


def build(document: Document, snapshot: Snapshot, arguments: Arguments) -> None:
    """Fill a document with the page."""
    found, heatmap = snapshot.stragglers, snapshot.heatmap
    if found is None or heatmap is None:
        _build_reason(document, snapshot.trace)
        return
    plot = _plot_of_address(heatmap, arguments)
    document.js_on_event("document_ready", plot.start_script)
    render(
        document,
        "stragglers.html",
        title="Stragglers",
        trace=snapshot.trace,
        roots=[plot.root],
        **stragglers_variables(snapshot.summary, found),
        **_map_variables(heatmap, plot),
    )


def stragglers_variables(summary: Summary, found: Stragglers) -> dict[str, Any]:
    """Return the findings, tables and headline figures of the page, as template variables."""
    return {
        "verdict": sentences.verdict(found),
        "basis": basis_of(summary, found.cycles),
        "headlines": headlines(found),
        "blame": [blame_row(finding) for finding in found.findings],
        "tables": what_if_tables(found),
        "shown_rows": SHOWN_ROWS,
        **account_variables(
            summary,
            (sentences.capital(sentences.all_alike(found.cycles)), summary.mean.minus(found.saved_if_alike)),
            ("Transfers at their best", summary.mean.minus(found.saved_by_best_transfers)),
        ),
    }


def build_heatmap(document: Document, snapshot: Snapshot, arguments: Arguments) -> None:
    """Fill a document with the heatmap and nothing else."""
    heatmap = snapshot.heatmap
    if heatmap is None:
        _build_reason(document, snapshot.trace)
        return
    plot = _plot_of_address(heatmap, arguments)
    document.js_on_event("document_ready", plot.start_script)
    render(
        document,
        "heatmap.html",
        title="Ranks by step",
        trace=snapshot.trace,
        roots=[plot.root],
        is_plain=True,
        **_map_variables(heatmap, plot),
    )


def basis_of(summary: Summary, cycles: Cycles) -> str:
    """Return sentences on the steps that findings are based on, and on how well clocks agree."""
    count, left_out = len(cycles.steps), cycles.left_out
    compared = f"Findings compare {count:,} step{'s' * (count > 1)}, {cycles.steps[0]} to {cycles.steps[-1]}"
    left = f"; {left_out:,} left out, as warm-up or because all-reduces differ" if left_out else ""
    error_ns = cycles.clock_error_ns
    clock = (
        "All ranks share a clock."
        if not error_ns
        else f"Times of different ranks may be off by up to {format_ns(error_ns)}."
    )
    missing = sentences.missing(cycles)
    return f"{counted_text(summary)} {compared}{left}. {clock} {missing}".rstrip()


def headlines(found: Stragglers) -> list[Headline]:
    """Return the step time as recorded, and as it could be."""
    step_ns = found.step_time_ns

    def what_if(label: str, gain_ns: float, colour: str) -> Headline:
        note = f"saves {format_ns(gain_ns)} ({format_share(gain_ns / step_ns)})" if gain_ns >= 1 else "saves nothing"
        return Headline(label=sentences.capital(label), value=format_ns(step_ns - gain_ns), note=note, colour=colour)

    best = found.by_rank.iloc[int(found.by_rank["saving_ns"].to_numpy().argmax())]
    fixed = what_if(sentences.one_like_others(int(best["rank"]), found.cycles), best["saving_ns"], "exposed")
    if found.findings and found.findings[0].link:
        worst = found.findings[0]
        fixed = what_if(f"{_name(worst)} like the others", worst.saving.step.value, "exposed")
    return [
        Headline(label="Step time", value=format_ns(step_ns), note="as recorded", colour="accent"),
        fixed,
        what_if(sentences.all_alike(found.cycles), found.saved_if_alike.step.value, "hidden"),
        what_if("Transfers at their best", found.saved_by_best_transfers.step.value, "span-bucket-0"),
    ]


def blame_row(finding: Finding) -> BlameRow:
    """Return the row of a finding in the table."""
    of_rank = f"&rank={finding.ranks[0]}" if finding.ranks else ""
    return BlameRow(
        who=_name(finding),
        blame=f"{sentences.CAUSE_LABELS[finding.cause]} {sentences.when(finding)}",
        evidence=finding.pattern.statistic,
        delay=format_ns(finding.delay_ns),
        cost=sentences.cost(finding),
        percent=100 * min(1.0, finding.cost_share),
        saving=format_ns(finding.saving.step.value),
        saving_interval=format_interval_ns(finding.saving.step),
        step=finding.worst_step,
        link=f"timeline?step={finding.worst_step}{of_rank}",
    )


def _name(finding: Finding) -> str:
    """Return the late ranks or the slow link of a finding, short enough for a table."""
    if finding.link is not None:
        return f"Link {finding.link.rank} → {finding.link.peer_rank}"
    who = sentences.who(finding)
    return f"{who[:1].upper()}{who[1:]}"


def _build_reason(document: Document, trace: Trace) -> None:
    reason = sentences.why_none(trace)
    render(
        document,
        "problem.html",
        title="Stragglers",
        trace=trace,
        headline=reason.headline,
        message=reason.message,
        advice=reason.advice,
    )


def _plot_of_address(heatmap: Heatmap, arguments: Arguments) -> HeatmapPlot:
    """Build the heatmap of ``?figure=…&grouping=…``; invalid values are ignored."""

    def given(name: str) -> str:
        return arguments.get(name, [b""])[0].decode("utf-8", "replace")

    figure: Figure = next((known for known in FIGURES if known == given("figure")), "lateness")
    grouping: Grouping | None = next((known for known in heatmap.groupings if known == given("grouping")), None)
    return HeatmapPlot(heatmap, figure, grouping)


def _map_variables(heatmap: Heatmap, plot: HeatmapPlot) -> dict[str, Any]:
    return {
        "map_figures": [(name, *FIGURE_TEXTS[name]) for name in FIGURES],
        "map_figure": plot.figure,
        "map_groupings": heatmap.groupings,
        "map_grouping": plot.grouping,
    }
