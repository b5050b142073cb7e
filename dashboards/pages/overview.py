"""Overview page: how long a step takes, how much of it is exposed communication, and whether ranks differ."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, Final, cast

from bokeh.document import Document

from dashboards.forecast import soon
from dashboards.pages.breakdown import build_breakdown_context, find_longest_occurrences
from dashboards.pages.shell import PageBuilder, QueryArguments, find_incident, has_only_collectives, render
from dashboards.plots.trend import FIGURES, TrendFigure, TrendPlot, has_trend, list_trends
from dashboards.recording import Snapshot
from overlapscope.advice.advice import Advice
from overlapscope.advice.worth_doing import find_improvements
from overlapscope.breakdown.text import BLOCK_LABELS
from overlapscope.diagnosis.attempts import format_other_attempts
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.report.communication import build_communication_sections
from overlapscope.report.improvements import tabulate_improvements
from overlapscope.report.machine import build_machine_sections
from overlapscope.report.report import Column, Section, Table
from overlapscope.stragglers import text
from overlapscope.text import format_ns
from overlapscope.trace.recording import Trace

_log = logging.getLogger(__name__)


_UNFOLDED_RANKS: Final = 16
"""Number of ranks that the page doesn't fold."""


def build(document: Document, snapshot: Snapshot, _arguments: QueryArguments) -> None:
    """Fill a document with the overview."""
    summary, has_steps = snapshot.summary, bool(len(snapshot.trace.steps))
    plots = list_trends(snapshot.machine, summary) if has_steps and has_trend(summary) else []
    for plot in plots:
        document.js_on_event("document_ready", plot.start_script)
    context = build_overview_context(snapshot)
    render(
        document,
        "overview.html",
        title="Overview",
        trace=snapshot.trace,
        incident=None if context["fault"] else find_incident(snapshot),
        roots=[plot.root for plot in plots],
        plots=plots,
        has_order=snapshot.diagnosis is not None and bool(snapshot.diagnosis.groups),
        has_events=snapshot.diagnosis is None or not has_only_collectives(snapshot.trace),
        remarks=() if snapshot.diagnosis is None else snapshot.diagnosis.verdict.remarks,
        attempts=format_other_attempts(snapshot.attempts, snapshot.trace.path),
        **context,
        **_build_known_improvements(snapshot),
    )


def build_overview_context(snapshot: Snapshot) -> dict[str, Any]:
    """Return the breakdown section with what its page adds, as template variables."""
    summary, fault = snapshot.summary, find_fault(snapshot)
    return {
        "section": snapshot.breakdown_section,
        "fault": fault,
        **_build_straggler_context(snapshot, has_fault=fault is not None),
        "has_steps": bool(len(snapshot.trace.steps)),
        "communication": next(iter(build_communication_sections(summary)), None),
        "machine": next(iter(build_machine_sections(snapshot.machine)), None),
        "longest": find_longest_occurrences(summary),
        **build_breakdown_context(summary, *([("Critical path", summary.job)] if summary.job is not None else [])),
        **(_build_ranks_context(snapshot) if len(snapshot.trace.steps) else {}),
    }


def find_fault(snapshot: Snapshot) -> Verdict | None:
    """Return the verdict on a job that hung, failed or whose replicas differ, which comes before all else."""
    incident = find_incident(snapshot)
    return incident if incident is not None and incident.is_fault else None


def _build_straggler_context(snapshot: Snapshot, *, has_fault: bool) -> dict[str, str]:
    """Return what is said of stragglers: in the headline if there is one, else below it."""
    found = snapshot.stragglers
    if found is None or has_fault or not snapshot.summary.steps:
        return {"straggler": "", "no_straggler": ""}
    headline = text.describe_headline(found)
    return {"straggler": headline, "no_straggler": "" if headline else text.describe_verdict(found)}


def _build_ranks_context(snapshot: Snapshot) -> dict[str, Any]:
    table = build_ranks_table(snapshot.trace, snapshot.breakdown_section)
    rows: list[Any] = [*table.rows]
    longest_ns = max((row["step_time_ns"] for row in rows), default=0.0)
    return {"ranks": table, "rank_bars": {row["rank"]: build_rank_bar(row, longest_ns) for row in rows}}


def build_ranks_table(trace: Trace, breakdown: Section) -> Table:
    """Return the table of ranks of a breakdown, with where each is.

    Of many ranks, those come first whose compute differs most from the median.
    """
    table = breakdown.table("ranks")
    ranks = trace.ranks
    where = {
        int(rank): f"{host} · {device}"
        for rank, host, device in zip(ranks["rank"], ranks["host"], ranks["device"], strict=True)
    }
    rows: list[Any] = [{**row, "where": where[int(row["rank"])]} for row in cast("list[Any]", table.rows)]
    notes = table.notes
    if len(rows) > _UNFOLDED_RANKS:
        median_ns = median(row["compute_ns"] for row in rows)
        rows.sort(key=lambda row: -abs(row["compute_ns"] - median_ns))
        notes = ("The ranks come first whose compute differs most from the median.",)
    columns = (table.columns[0], Column("where", "where", "text"), *table.columns[1:])
    return replace(table, columns=columns, rows=tuple(rows), notes=notes)


def build_rank_bar(row: Any, longest_ns: float) -> list[tuple[str, str, float]]:
    """Return the blocks of a rank's mean step: name, label with the time, and percentage of the longest step."""
    return [
        (name, f"{label}: {format_ns(row[f'{name}_ns'])}", 100 * row[f"{name}_ns"] / longest_ns)
        for name, label in BLOCK_LABELS.items()
        if row[f"{name}_ns"]
    ]


def _build_known_improvements(snapshot: Snapshot) -> dict[str, Any]:
    """Return the changes worth making, as far as they are known by now, without waiting for a forecast."""
    if not snapshot.summary.steps or snapshot.stragglers is None:
        return build_improvements_context(snapshot, None)
    # While the job is running, every refresh reads another recording and would fit another model.
    is_live = snapshot.is_live and not snapshot.trace.ranks["closed"].all()
    advice, is_known = None, True
    if not is_live:
        try:
            forecast = soon(snapshot.forecast)
            advice, is_known = (None, False) if forecast is None else (forecast.advice, True)
        except Exception as error:  # the Buckets page shows the error; this page is useful without the advice
            _log.debug("no advice on buckets: %r", error)
    return build_improvements_context(snapshot, advice) | {"is_worth_known": is_known, "is_live": is_live}


def build_improvements_context(snapshot: Snapshot, advice: Advice | None) -> dict[str, Any]:
    """Return the changes worth making, as template variables of ``worth_doing.html``.

    Args:
        snapshot: the recording.
        advice: advice on bucket sizes, if there is any.
    """
    nothing = {"worth_doing": None, "is_worth_known": True, "is_live": False, "why_unknown": ""}
    if not snapshot.summary.steps:
        return nothing | {"has_mean": False}
    if snapshot.stragglers is None:
        return nothing | {"has_mean": True, "why_unknown": text.explain_missing_stragglers(snapshot.trace).message}
    improvements = find_improvements(snapshot, advice)
    return nothing | {
        "worth_doing": tabulate_improvements(improvements) if improvements else None,
        "has_mean": True,
    }


def build_trend(document: Document, snapshot: Snapshot, _arguments: QueryArguments, *, shown: TrendFigure) -> None:
    """Fill a document with one trend and nothing else."""
    plot = TrendPlot(shown, snapshot.summary)
    document.js_on_event("document_ready", plot.start_script)
    render(
        document,
        "trend.html",
        title=shown.title,
        trace=snapshot.trace,
        roots=[plot.root],
        is_plain=True,
        plots=[plot],
    )


TREND_ROUTES: Final[dict[str, PageBuilder]] = {
    f"/plots/{shown.column.removesuffix('_ns')}": partial(build_trend, shown=shown) for shown in FIGURES
}
"""Route of each trend on a page without anything else."""
