"""The first page: how long a step takes, how much of it waits for communication, and whether ranks differ."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

import pandas as pd
from bokeh.document import Document

from dashboards.pages.headline import Headline
from dashboards.pages.shell import Arguments, BuildPage, is_order_alone, render
from dashboards.plots.trend import FIGURES, Figure, TrendPlot
from dashboards.recording import Snapshot
from overlapscope.analysis import sentences
from overlapscope.analysis.summary import OverlapSummary
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.trace.reader import Trace
from overlapscope.trace.tables import PHASE_NAMES
from overlapscope.units import format_ns, format_share


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """One row of the table of ranks."""

    rank: int
    place: str
    cells: tuple[str, ...]
    parts: tuple[tuple[str, str, float], ...]
    """Phase, its time and its share of the longest step time, for the bar."""


COLUMNS: Final = (
    ("step_time_ns", "Step time"),
    ("compute_ns", "Compute"),
    ("communication_ns", "Communication"),
    ("overlap_ns", "Hidden"),
    ("exposed_ns", "Exposed"),
    ("overlap_ratio", "Overlap"),
)


SHOWN_ROWS: Final = 16
"""Number of ranks shown; further ones are folded."""


def build(document: Document, snapshot: Snapshot, _arguments: Arguments) -> None:
    """Fill a document with the overview."""
    summary, per_step = snapshot.summary, snapshot.per_step
    findings = snapshot.stragglers.findings if snapshot.stragglers else ()
    plots = [TrendPlot(shown, per_step) for shown in FIGURES] if len(per_step) else []
    for plot in plots:
        document.js_on_event("document_ready", plot.start_script)
    render(
        document,
        "overview.html",
        title="Overview",
        trace=snapshot.trace,
        roots=[plot.root for plot in plots],
        sentence=summary.sentence,
        basis=basis_of(summary),
        headlines=headlines(summary),
        figures=FIGURES,
        columns=[label for _, label in COLUMNS],
        rank_rows=rank_rows(snapshot.trace, snapshot.rank_medians) if len(per_step) else [],
        shown_rows=SHOWN_ROWS,
        incident=incident_of(snapshot),
        has_order=snapshot.diagnosis is not None,
        has_events=snapshot.diagnosis is None or not is_order_alone(snapshot.trace),
        straggler=sentences.describe(findings[0]) if findings else "",
        phases=[(name, name.replace("_", " "), name.replace("_", "-")) for name in PHASE_NAMES],
    )


def incident_of(snapshot: Snapshot) -> Verdict | None:
    """The fault of the job; None if there is none."""
    diagnosis = snapshot.diagnosis
    return diagnosis.verdict if diagnosis is not None and diagnosis.is_incident else None


def build_trend(document: Document, snapshot: Snapshot, _arguments: Arguments, *, shown: Figure) -> None:
    """Fill a document with one trend alone."""
    plot = TrendPlot(shown, snapshot.per_step)
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


TREND_ROUTES: Final[dict[str, BuildPage]] = {
    f"/plots/{shown.column.removesuffix('_ns')}": partial(build_trend, shown=shown) for shown in FIGURES
}
"""An address for each trend."""


def basis_of(summary: OverlapSummary) -> str:
    """What the medians are taken over."""
    ranks = f"{summary.ranks} rank{'s' * (summary.ranks != 1)}"
    steps = f"{summary.steps_counted} step{'s' * (summary.steps_counted != 1)}"
    left_out = summary.warm_up_steps_left_out
    warm_up = f", excluding the first {left_out} (warm-up, grey below)" if left_out else ""
    return f"Medians over {steps} of {ranks}{warm_up}."


def headlines(summary: OverlapSummary) -> list[Headline]:
    """The big numbers."""
    step_ns = summary.step_time_ns

    def of_step(part_ns: int) -> str:
        return f"{format_share(part_ns / step_ns)} of the step" if step_ns else ""

    hidden = "no communication was recorded"
    if summary.communication_ns:
        hidden = f"of {format_ns(summary.communication_ns)} hides under compute"
    return [
        Headline(label="Step time", value=format_ns(step_ns), note="", colour="accent"),
        Headline(
            label="Compute",
            value=format_ns(summary.compute_ns),
            note=of_step(summary.compute_ns),
            colour="span-backward",
        ),
        Headline(
            label="Exposed communication",
            value=format_ns(summary.exposed_ns),
            note=of_step(summary.exposed_ns),
            colour="exposed",
        ),
        Headline(label="Overlap ratio", value=format_share(summary.overlap_ratio), note=hidden, colour="hidden"),
    ]


def rank_rows(trace: Trace, medians: pd.DataFrame) -> list[RankRow]:
    """The table of ranks: in order, or if there are many, those whose compute differs most first.

    Args:
        medians: from ``trend.medians_by_rank``.
    """
    if len(medians) > SHOWN_ROWS:
        apart_ns = (medians["compute_ns"] - medians["compute_ns"].median()).abs()
        medians = medians.loc[apart_ns.sort_values(ascending=False, kind="stable").index]
    places = {int(rank): f"{host} · {device}" for rank, host, device in _columns(trace.ranks, "rank", "host", "device")}
    longest_ns = medians["step_time_ns"].max()
    rows = []
    for row in medians.to_dict("records"):
        cells = tuple(_cell(name, row[name]) for name, _ in COLUMNS)
        parts = tuple(
            (name, format_ns(row[f"{name}_ns"]), 100 * row[f"{name}_ns"] / longest_ns)
            for name in PHASE_NAMES
            if row[f"{name}_ns"]
        )
        rank = int(row["rank"])
        rows.append(RankRow(rank=rank, place=places.get(rank, ""), cells=cells, parts=parts))
    return rows


def _cell(name: str, value: float) -> str:
    return format_share(value) if name == "overlap_ratio" else format_ns(value)


def _columns(table: pd.DataFrame, *names: str) -> list[tuple[str, ...]]:
    return list(table[list(names)].itertuples(index=False, name=None))
