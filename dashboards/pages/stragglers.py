"""Stragglers page: findings with their costs, the heatmap of ranks and steps, and what fixing them would gain."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import pandas as pd
from bokeh.document import Document

from dashboards.pages.breakdown import Headline, build_breakdown_context, describe_sample
from dashboards.pages.shell import QueryArguments, render
from dashboards.plots.heatmap import FIGURES, HeatmapPlot
from dashboards.rank_map import Grouping, Heatmap, HeatmapFigure
from dashboards.recording import Snapshot
from overlapscope.breakdown.summary import Summary
from overlapscope.stragglers import text
from overlapscope.stragglers.cycles import Cycles
from overlapscope.stragglers.finding import Finding
from overlapscope.stragglers.stragglers import Stragglers
from overlapscope.stragglers.text import PART_LABELS, describe_equal_ranks
from overlapscope.text import (
    capitalize,
    count_of,
    format_bytes,
    format_interval_ns,
    format_ns,
    format_ns_change,
    format_share,
)
from overlapscope.trace.recording import Trace

# What-if tables: what each rank, host, phase and bucket costs, and what a step would take without that.

MAX_SHOWN_ROWS: Final = 16
"""Number of rows shown; further ones are folded."""

Cells = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class WhatIfTable:
    """A table of the page; the first column names the row."""

    title: str
    note: str
    columns: Cells
    rows: tuple[Cells, ...]


def build_what_if_tables(found: Stragglers) -> list[WhatIfTable]:
    """Return all what-if tables; that of hosts only if there are several."""
    tables = [_build_rank_table(found)]
    if len(found.by_host) > 1:
        tables.append(_build_host_table(found))
    return [*tables, _build_phase_table(found), _build_bucket_table(found)]


def _build_rank_table(found: Stragglers) -> WhatIfTable:
    rows = tuple(
        (
            str(row["rank"]),
            str(row["host"]),
            format_ns_change(row["lateness_ns"]),
            format_share(row["critical_share"]),
            format_ns(row["cost_ns"]),
            format_share(row["slowdown"]),
            format_ns(found.step_time_ns - row["saving_ns"]),
        )
        for row in _sort_by_cost(found.by_rank)
    )
    return WhatIfTable(
        title="By rank",
        note=f"cost: this rank as it is, otherwise {describe_equal_ranks(found.cycles)}",
        columns=("Rank", "Host", "Lateness", "On the critical path", "Cost", "Slowdown", "Step time if fixed"),
        rows=rows,
    )


def _build_host_table(found: Stragglers) -> WhatIfTable:
    rows = tuple(
        (str(row["host"]), str(row["ranks"]), format_ns(row["cost_ns"]), format_share(row["slowdown"]))
        for row in _sort_by_cost(found.by_host)
    )
    return WhatIfTable(
        title="By host",
        note=f"this host as it is, otherwise {describe_equal_ranks(found.cycles)}",
        columns=("Host", "Ranks", "Cost", "Slowdown"),
        rows=rows,
    )


def _build_phase_table(found: Stragglers) -> WhatIfTable:
    rows = tuple(
        (PART_LABELS[row["cause"]].capitalize(), format_ns(row["cost_ns"]), format_share(row["slowdown"]))
        for row in _sort_by_cost(found.by_cause)
    )
    return WhatIfTable(
        title="By phase",
        note="cost: only the differences between ranks in this phase",
        columns=("Phase", "Cost", "Slowdown"),
        rows=rows,
    )


def _build_bucket_table(found: Stragglers) -> WhatIfTable:
    rows = tuple(
        (
            str(row["bucket"]) if row["bucket"] >= 0 else "no bucket",
            format_bytes(row["bytes"]),
            format_ns(row["transfer_ns"]),
            format_ns(row["best_ns"]),
            "–" if math.isnan(row["busbw_bytes_per_s"]) else f"{row['busbw_bytes_per_s'] / 1e9:.3g} GB/s",
            format_ns(row["cost_ns"]),
            format_share(row["slowdown"]),
        )
        for row in _sort_by_cost(found.by_bucket)
    )
    return WhatIfTable(
        title="By bucket",
        note="cost: transfer time above the best, as far as it is not hidden",
        columns=("Bucket", "Size", "Transfer", "Best", "Busbw", "Cost", "Slowdown"),
        rows=rows,
    )


def _sort_by_cost(table: pd.DataFrame) -> list[Any]:
    return table.sort_values("cost_ns", ascending=False, kind="stable").to_dict("records")


FIGURE_DESCRIPTIONS: Final[dict[HeatmapFigure, tuple[str, str]]] = {
    "compute": ("Compute", "Forward, backward, optimizer and evaluation"),
    "lateness": ("Lateness", "How long after the median rank a rank arrives at the step's last all-reduce"),
    "wait": ("Wait", "How long a rank waits for later ones, with nothing else to do"),
}
"""Name and definition of each figure of the heatmap."""


@dataclass(frozen=True, kw_only=True)
class FindingRow:
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
        roots=[plot.root],
        **build_stragglers_context(snapshot.summary, found),
        **_build_heatmap_context(heatmap, plot),
    )


def build_stragglers_context(summary: Summary, found: Stragglers) -> dict[str, Any]:
    """Return the findings, tables and headline figures of the page, as template variables."""
    return {
        "verdict": text.describe_verdict(found),
        "basis": describe_basis(summary, found.cycles),
        "headlines": build_headlines(found),
        "blame": [build_finding_row(finding) for finding in found.findings],
        "tables": build_what_if_tables(found),
        "shown_rows": MAX_SHOWN_ROWS,
        **build_breakdown_context(
            summary,
            (
                capitalize(text.describe_equal_ranks(found.cycles)),
                summary.mean.minus(found.saved_if_ranks_equal),
            ),
            ("Transfers at their best", summary.mean.minus(found.saved_by_best_transfers)),
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


def describe_basis(summary: Summary, cycles: Cycles) -> str:
    """Return sentences on the steps that findings are based on, and on how well clocks agree."""
    count, left_out = len(cycles.steps), cycles.left_out
    compared = f"Findings compare {count_of(count, 'step')}, {cycles.steps[0]} to {cycles.steps[-1]}"
    left = f"; {left_out:,} left out, as warm-up or because all-reduces differ" if left_out else ""
    error_ns = cycles.clock_error_ns
    clock = (
        "All ranks share a clock."
        if not error_ns
        else f"Times of different ranks may be off by up to {format_ns(error_ns)}."
    )
    missing = text.describe_missing_ranks(cycles)
    return f"{describe_sample(summary)} {compared}{left}. {clock} {missing}".rstrip()


def build_headlines(found: Stragglers) -> list[Headline]:
    """Return the step time as recorded, and as it could be."""
    step_ns = found.step_time_ns

    def what_if(label: str, gain_ns: float, color: str) -> Headline:
        note = f"saves {format_ns(gain_ns)} ({format_share(gain_ns / step_ns)})" if gain_ns >= 1 else "saves nothing"
        return Headline(label=capitalize(label), value=format_ns(step_ns - gain_ns), note=note, color=color)

    best = found.by_rank.iloc[int(found.by_rank["saving_ns"].to_numpy().argmax())]
    fixed = what_if(text.describe_equalized_rank(int(best["rank"]), found.cycles), best["saving_ns"], "exposed")
    if found.findings and found.findings[0].link:
        worst = found.findings[0]
        fixed = what_if(f"{_format_culprit(worst)} like the others", worst.saving.step.value, "exposed")
    return [
        Headline(label="Step time", value=format_ns(step_ns), note="as recorded", color="accent"),
        fixed,
        what_if(text.describe_equal_ranks(found.cycles), found.saved_if_ranks_equal.step.value, "hidden"),
        what_if("Transfers at their best", found.saved_by_best_transfers.step.value, "span-bucket-0"),
    ]


def build_finding_row(finding: Finding) -> FindingRow:
    """Return the row of a finding in the table."""
    of_rank = f"&rank={finding.ranks[0]}" if finding.ranks else ""
    return FindingRow(
        who=_format_culprit(finding),
        blame=f"{text.CAUSE_LABELS[finding.cause]} {text.describe_when(finding)}",
        evidence=finding.pattern.statistic,
        delay=format_ns(finding.delay_ns),
        cost=text.describe_cost(finding),
        percent=100 * min(1.0, finding.cost_share),
        saving=format_ns(finding.saving.step.value),
        saving_interval=format_interval_ns(finding.saving.step),
        step=finding.worst_step,
        link=f"timeline?step={finding.worst_step}{of_rank}",
    )


def _format_culprit(finding: Finding) -> str:
    """Return the late ranks or the slow link of a finding, short enough for a table."""
    if finding.link is not None:
        return f"Link {finding.link.rank} → {finding.link.peer_rank}"
    who = text.name_culprit(finding)
    return f"{who[:1].upper()}{who[1:]}"


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

    def given(name: str) -> str:
        return arguments.get(name, [b""])[0].decode("utf-8", "replace")

    figure: HeatmapFigure = next((known for known in FIGURES if known == given("figure")), "lateness")
    grouping: Grouping | None = next((known for known in heatmap.groupings if known == given("grouping")), None)
    return HeatmapPlot(heatmap, figure, grouping)


def _build_heatmap_context(heatmap: Heatmap, plot: HeatmapPlot) -> dict[str, Any]:
    return {
        "map_figures": [(name, *FIGURE_DESCRIPTIONS[name]) for name in FIGURES],
        "map_figure": plot.figure,
        "map_groupings": heatmap.groupings,
        "map_grouping": plot.grouping,
    }
