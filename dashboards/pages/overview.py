"""Overview page: how long a step takes, how much of it is exposed communication, and whether ranks differ."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import pandas as pd
from bokeh.document import Document

from dashboards.forecast import soon
from dashboards.pages.breakdown import Headline, build_breakdown_context, build_breakdown_table_context, describe_sample
from dashboards.pages.shell import PageBuilder, QueryArguments, has_only_collectives, render
from dashboards.plots.trend import FIGURES, TrendFigure, TrendPlot
from dashboards.recording import Snapshot
from overlapscope.advice.advice import Advice
from overlapscope.advice.worth_doing import find_improvements
from overlapscope.breakdown.summary import Summary
from overlapscope.breakdown.text import BLOCK_LABELS, describe_summary
from overlapscope.diagnosis.attempts import format_other_attempts
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.stragglers import text
from overlapscope.text import format_interval_ns, format_ns, format_share
from overlapscope.trace.recording import Trace

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """One row of the table of ranks."""

    rank: int
    place: str
    cells: tuple[str, ...]
    parts: tuple[tuple[str, str, float], ...]
    """Block, its label and time, and its percentage of the longest step time, for the bar."""


@dataclass(frozen=True, kw_only=True)
class ImprovementRow:
    """A change that would save time."""

    what: str
    saves: str
    interval: str
    share: str
    link: str
    evidence: str


COLUMNS: Final = (
    ("step_time_ns", "Step time"),
    ("compute_ns", "Compute"),
    ("communication_ns", "Communication"),
    ("hidden_ns", "Hidden"),
    ("exposed_ns", "Exposed"),
    ("overlap_ratio", "Overlap"),
)


MAX_SHOWN_RANKS: Final = 16
"""Number of ranks shown; further ones are folded."""


def build(document: Document, snapshot: Snapshot, _arguments: QueryArguments) -> None:
    """Fill a document with the overview."""
    summary, has_steps = snapshot.summary, bool(len(snapshot.trace.steps))
    plots = [TrendPlot(shown, summary) for shown in FIGURES] if has_steps else []
    for plot in plots:
        document.js_on_event("document_ready", plot.start_script)
    render(
        document,
        "overview.html",
        title="Overview",
        trace=snapshot.trace,
        roots=[plot.root for plot in plots],
        figures=FIGURES,
        has_order=snapshot.diagnosis is not None,
        has_events=snapshot.diagnosis is None or not has_only_collectives(snapshot.trace),
        incident=get_incident(snapshot),
        attempts=format_other_attempts(snapshot.attempts, snapshot.trace.path),
        **build_overview_context(snapshot),
        **_build_known_improvements(snapshot),
    )


def build_overview_context(snapshot: Snapshot) -> dict[str, Any]:
    """Return the figures of steps and ranks, as template variables."""
    summary = snapshot.summary
    return {
        "sentence": describe_summary(summary),
        "basis": describe_sample(summary),
        "headlines": build_headlines(summary),
        "columns": [label for _, label in COLUMNS],
        "rank_rows": build_rank_rows(snapshot.trace, snapshot.rank_means) if len(snapshot.trace.steps) else [],
        "shown_rows": MAX_SHOWN_RANKS,
        **build_breakdown_context(summary, *([("Critical path", summary.job)] if summary.job is not None else [])),
        **build_breakdown_table_context(summary),
    }


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
    """Return the changes worth making, as template variables of ``find_improvements.html``.

    Args:
        snapshot: the recording.
        advice: advice on bucket sizes, if there is any.
    """
    nothing = {"worth_doing": [], "is_worth_known": True, "is_live": False, "why_unknown": ""}
    if not snapshot.summary.steps:
        return nothing | {"has_mean": False}
    if snapshot.stragglers is None:
        return nothing | {"has_mean": True, "why_unknown": text.explain_missing_stragglers(snapshot.trace).message}
    step_ns = snapshot.summary.mean.step.value
    rows = [
        ImprovementRow(
            what=each.what,
            saves=format_ns(each.saves.value),
            interval=format_interval_ns(each.saves),
            share=format_share(each.saves.value / step_ns),
            link=each.link,
            evidence=each.evidence,
        )
        for each in find_improvements(snapshot, advice)
    ]
    return nothing | {"worth_doing": rows, "has_mean": True}


def get_incident(snapshot: Snapshot) -> Verdict | None:
    """Return the fault of the job; None if there is none."""
    diagnosis = snapshot.diagnosis
    return diagnosis.verdict if diagnosis is not None and diagnosis.is_incident else None


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
        figures=[shown],
    )


TREND_ROUTES: Final[dict[str, PageBuilder]] = {
    f"/plots/{shown.column.removesuffix('_ns')}": partial(build_trend, shown=shown) for shown in FIGURES
}
"""Route of each trend on a page without anything else."""


def build_headlines(summary: Summary) -> list[Headline]:
    """Return the headline figures."""

    def of_step(part_ns: float) -> str:
        return f"{format_share(part_ns / summary.mean.step.value)} of the step" if summary.steps else ""

    exposed = summary.mean.blocks["exposed"]
    hidden = "no communication was recorded"
    if summary.communication_ns:
        hidden = f"{format_ns(summary.hidden.value)} of {format_ns(summary.communication_ns)} is hidden"
    return [
        Headline(
            label="Step time",
            value=format_ns(summary.mean.step.value),
            note=f"90 %: {format_interval_ns(summary.mean.step)}" if summary.steps else "",
            color="accent",
        ),
        Headline(
            label="Compute",
            value=format_ns(summary.compute_ns),
            note=of_step(summary.compute_ns),
            color="span-backward",
        ),
        Headline(
            label="Exposed communication",
            value=format_ns(exposed.value),
            note=of_step(exposed.value),
            color="exposed",
        ),
        Headline(label="Overlap ratio", value=format_share(summary.overlap_ratio), note=hidden, color="hidden"),
    ]


def build_rank_rows(trace: Trace, means: pd.DataFrame) -> list[RankRow]:
    """Return the table of ranks in order, or of many ranks those first whose compute differs most from the median.

    Args:
        trace: the recording.
        means: means by rank, from ``Summary.means_by_rank``.
    """
    if len(means) > MAX_SHOWN_RANKS:
        deviation_ns = (means["compute_ns"] - means["compute_ns"].median()).abs()
        means = means.loc[deviation_ns.sort_values(ascending=False, kind="stable").index]
    places = {
        int(rank): f"{host} · {device}" for rank, host, device in _list_rows(trace.ranks, "rank", "host", "device")
    }
    longest_ns = means["step_time_ns"].max()
    rows = []
    for row in means.to_dict("records"):
        cells = tuple(_format_cell(name, row[name]) for name, _ in COLUMNS)
        parts = tuple(
            (name, f"{label}: {format_ns(row[f'{name}_ns'])}", 100 * row[f"{name}_ns"] / longest_ns)
            for name, label in BLOCK_LABELS.items()
            if row[f"{name}_ns"]
        )
        rank = int(row["rank"])
        rows.append(RankRow(rank=rank, place=places.get(rank, ""), cells=cells, parts=parts))
    return rows


def _format_cell(name: str, value: float) -> str:
    return format_share(value) if name == "overlap_ratio" else format_ns(value)


def _list_rows(table: pd.DataFrame, *names: str) -> list[tuple[str, ...]]:
    return list(table[list(names)].itertuples(index=False, name=None))
