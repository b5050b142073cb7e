"""Page of a fleet as one HTML file: who stands out, step time by model and week, and how runs end."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime

from dashboards.pages.shell import build_shell_context, render_fragment
from overlapscope.fleet.fleet import Fleet, ModelKey, ModelWeek
from overlapscope.fleet.text import describe_standouts, format_week, name_models
from overlapscope.report.report import Report, Section, Table
from overlapscope.text import format_ns, format_share

_MAX_WEEKS = 26
"""Number of weeks that charts show, the last ones."""


@dataclass(frozen=True, kw_only=True)
class WeekBar:
    """A week in the chart of a model; heights are percentages of the highest one."""

    label: str
    hint: str
    step_height: float = 0.0
    """Of the step without exposed communication."""
    exposed_height: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ModelChart:
    """The mean steps of one model by week, with gaps for weeks without a run."""

    name: str
    ranks: int
    latest: str
    bars: tuple[WeekBar, ...]


def render_fleet_file(fleet: Fleet, report: Report, made: datetime) -> str:
    """Return the page of a fleet; ``made`` is when it is made."""
    sections = {section.name: section for section in report.sections}
    context = build_shell_context("Fleet", None)
    return render_fragment(
        "fleet.html",
        **context,
        roots=[],
        is_plain=False,
        navigation=[(f"#{section.name}", section.title) for section in report.sections],
        facts_of_runs=report.facts,
        made=f"{made:%d %b %Y, %H:%M}",
        sections=sections,
        sentences=describe_standouts(fleet),
        standouts_count=sum(len(each.standouts) for each in (fleet.late, fleet.links, fleet.faults)),
        charts=_build_charts(fleet),
        heat=_compute_heat(sections["verdicts"]),
    )


def _build_charts(fleet: Fleet) -> list[ModelChart]:
    names = name_models(each.key for each in fleet.models)
    weeks = fleet.weeks[-_MAX_WEEKS:]
    by_model: dict[ModelKey, list[ModelWeek]] = {}
    for each in fleet.models:
        if each.week in weeks:
            by_model.setdefault(each.key, []).append(each)
    return [_build_chart(names[key], key.ranks, known, weeks) for key, known in by_model.items()]


def _build_chart(name: str, ranks: int, known: list[ModelWeek], weeks: tuple[date, ...]) -> ModelChart:
    of_week = {each.week: each for each in known}
    highest_ns = max((each.step_ns for each in known), default=0.0) or 1.0
    return ModelChart(
        name=name,
        ranks=ranks,
        latest=f"{format_ns(known[-1].step_ns)}, {format_share(known[-1].exposed_share)} exposed",
        bars=tuple(_build_bar(week, of_week.get(week), highest_ns) for week in weeks),
    )


def _build_bar(week: date, known: ModelWeek | None, highest_ns: float) -> WeekBar:
    label = f"{week:%d %b}"
    if known is None:
        return WeekBar(label=label, hint=f"Week of {format_week(week)}: no run")
    exposed = 100 * known.exposed_ns / highest_ns
    hint = (
        f"Week of {format_week(week)}: {format_ns(known.step_ns)}, {format_ns(known.exposed_ns)} of it exposed, "
        f"{known.runs:,} runs from {format_ns(known.lowest_ns)} to {format_ns(known.highest_ns)}"
    )
    return WeekBar(
        label=label, hint=hint, step_height=100 * known.step_ns / highest_ns - exposed, exposed_height=exposed
    )


def _compute_heat(section: Section) -> list[list[float]]:
    """Return how dark each cell of the table of verdicts is, from 0 to 1, as a share of all runs of its week."""
    return [heat for table in section.tables for heat in _heat_of(table)]


def _heat_of(table: Table) -> list[list[float]]:
    columns = [column.key for column in table.columns[2:]]
    numbers = [[_to_number(row.get(key)) for key in columns] for row in table.rows]
    totals = [sum(column) or 1.0 for column in zip(*numbers, strict=True)]
    return [[number / total for number, total in zip(row, totals, strict=True)] for row in numbers]


def _to_number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
