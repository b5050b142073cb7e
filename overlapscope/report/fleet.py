"""Build the report of ``overlapscope fleet``: who stands out, step time by model and week, and how runs end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from typing import Any, Final

from overlapscope.diagnosis.text import format_kind
from overlapscope.fleet.chance import Count
from overlapscope.fleet.fleet import Fleet
from overlapscope.fleet.run_figures import NO_VERDICT
from overlapscope.fleet.standouts import LEVEL, Kind, Ranking, Standout
from overlapscope.fleet.text import (
    KIND_LABELS,
    describe_coverage,
    describe_standouts,
    describe_tests,
    format_chance,
    format_week,
    name_models,
    order_counts,
)
from overlapscope.report.report import Column, Report, Row, Section, Table
from overlapscope.text import Value, count_of

_MAX_LATE: Final = 8
_MAX_WEEKS: Final = 8
_MAX_MODEL_ROWS: Final = 24


def build_fleet_report(fleet: Fleet, places: Sequence[str]) -> Report:
    """Build the report.

    Args:
        places: folders and URLs that the runs are in.
    """
    return Report(
        facts=(_describe_fleet(fleet, places), *describe_coverage(fleet.coverage)),
        sections=(build_standouts_section(fleet), build_models_section(fleet), build_verdicts_section(fleet)),
        content=_collect_content(fleet, places),
    )


def _describe_fleet(fleet: Fleet, places: Sequence[str]) -> str:
    hosts = {host for run in fleet.read for host in run.hosts if host}
    facts = [f"{', '.join(places)}: {count_of(fleet.coverage.found, 'run')}, {fleet.coverage.read:,} of them read"]
    facts += [count_of(len(hosts), "host")] if hosts else []
    if fleet.weeks:
        facts.append(
            f"weeks of {fleet.weeks[0]} to {fleet.weeks[-1]}" if len(fleet.weeks) > 1 else f"week of {fleet.weeks[0]}"
        )
    return ", ".join(facts)


def build_standouts_section(fleet: Fleet) -> Section:
    """Build the section on who stands out: hosts, devices and ranks that are late, slow links, and faults."""
    tables = [_tabulate_late(fleet, kind) for kind in ("host", "device", "rank")]
    tables += [_tabulate_named(fleet.links, kind, f"{_TITLES[kind]}: slow") for kind in ("link", "end")]
    tables += [
        _tabulate_named(fleet.faults, kind, f"{_TITLES[kind]}: named by faults that a host may cause")
        for kind in ("host", "device", "rank")
    ]
    return Section(
        name="standouts",
        title="Beyond chance",
        headline=" ".join(describe_standouts(fleet)),
        basis=describe_tests(fleet),
        tables=tuple(table for table in tables if table.rows),
    )


_TITLES: Final[dict[Kind, str]] = {
    "host": "Hosts",
    "device": "Devices",
    "rank": "Ranks",
    "link": "Links between hosts",
    "end": "Hosts at ends of links",
}


def _tabulate_late(fleet: Fleet, kind: Kind) -> Table:
    seen = {name: each for (of, name), each in fleet.appearances.items() if of == kind}
    return Table(
        name=f"late_{kind}s",
        title=f"{_TITLES[kind]} that are late",
        columns=(
            *_count_columns(kind, "runs", "late in"),
            Column("saving", "costs a step, ms", "ms"),
            Column("first", "first week", "text"),
            Column("last", "last week", "text"),
        ),
        rows=tuple(
            _count_row(fleet.late, kind, count)
            | {
                "runs": seen[count.name].runs,
                "named": seen[count.name].late,
                "saving": seen[count.name].saving_ns,
                "first": format_week(seen[count.name].first),
                "last": format_week(seen[count.name].last),
            }
            for count in order_counts(fleet.late, kind)
        ),
        shown=_MAX_LATE,
    )


def _tabulate_named(ranking: Ranking, kind: Kind, title: str) -> Table:
    return Table(
        name=f"named_{kind}s",
        title=title,
        columns=_count_columns(kind, "runs with one", "named in"),
        rows=tuple(_count_row(ranking, kind, count) for count in order_counts(ranking, kind)),
        shown=_MAX_LATE,
    )


def _count_columns(kind: Kind, runs: str, named: str) -> tuple[Column, ...]:
    return (
        Column("name", KIND_LABELS[kind], "text"),
        Column("runs", runs, "count"),
        Column("named", named, "count"),
        Column("expected", "by chance", "ratio"),
        Column("chance", "odds of chance", "text"),
    )


def _count_row(ranking: Ranking, kind: Kind, count: Count) -> dict[str, Value]:
    return {
        "name": f"rank {count.name}" if kind == "rank" else count.name,
        "runs": count.draws,
        "named": count.named,
        "expected": count.expected,
        "chance": format_chance(count),
        "is_standout": int(_is_named(ranking, kind, count.name)),
    }


def _is_named(ranking: Ranking, kind: Kind, name: str) -> bool:
    return any(
        (each.kind, each.name) == (kind, name) or (kind == "rank" and name in map(str, each.or_ranks))
        for each in ranking.standouts
    )


def build_models_section(fleet: Fleet) -> Section:
    """Build the section on step time and exposed communication by model and week."""
    names = name_models(each.key for each in fleet.models)
    weeks = {None, *fleet.weeks[-_MAX_WEEKS:]}
    shown = [each for each in fleet.models if each.week in weeks]
    rows: list[Row] = []
    groups = []
    for index, each in enumerate(shown):
        if index and each.key != shown[index - 1].key:
            groups.append(index - 1)
        rows.append(
            {
                "model": names[each.key],
                "ranks": each.key.ranks,
                "week": format_week(each.week),
                "runs": each.runs,
                "step": each.step_ns,
                "lowest": each.lowest_ns,
                "highest": each.highest_ns,
                "exposed": each.exposed_ns,
                "share": each.exposed_share,
            }
        )
    models = len({each.key for each in fleet.models})
    return Section(
        name="models",
        title="Step time by model and week",
        headline=f"Step time of {count_of(models, 'model')}, by week." if models else "No run has a mean step.",
        basis="Means of the mean steps of runs, each run counting once; weeks begin on Monday, in UTC."
        if models
        else "",
        tables=(
            Table(
                name="models",
                title="Mean step by model, number of ranks and week, in milliseconds",
                columns=(
                    Column("model", "model", "text"),
                    Column("ranks", "ranks", "count"),
                    Column("week", "week of", "text"),
                    Column("runs", "runs", "count"),
                    Column("step", "step", "ms"),
                    Column("lowest", "lowest", "ms"),
                    Column("highest", "highest", "ms"),
                    Column("exposed", "exposed", "ms"),
                    Column("share", "of the step", "share"),
                ),
                rows=tuple(rows),
                groups=tuple(groups),
                shown=_MAX_MODEL_ROWS,
                notes=_note_earlier_weeks(fleet),
            ),
        )
        if models
        else (),
    )


def _note_earlier_weeks(fleet: Fleet) -> tuple[str, ...]:
    earlier = len(fleet.weeks) - _MAX_WEEKS
    left_out = f"{count_of(earlier, 'earlier week')} left out: 'overlapscope fleet --json' has them."
    return (left_out,) if earlier > 0 else ()


def build_verdicts_section(fleet: Fleet) -> Section:
    """Build the section on how many runs ended with each kind of verdict, by week."""
    judged = [each for each in fleet.verdicts if each.kind != NO_VERDICT]
    runs, faults = sum(each.runs for each in judged), sum(each.runs for each in judged if each.is_fault)
    weeks: list[date | None] = [*fleet.weeks[-_MAX_WEEKS:]]
    return Section(
        name="verdicts",
        title="Verdicts by kind and week",
        headline=f"{faults:,} of {count_of(runs, 'judged run')} ended with a fault."
        if runs
        else "No run has a verdict: collectives were not recorded.",
        tables=(
            Table(
                name="verdicts",
                title="Runs by verdict and week of their start",
                columns=(
                    Column("kind", "verdict", "text"),
                    Column("runs", "runs", "count"),
                    *(Column(format_week(week), f"{week:%d %b}" if week else "", "count") for week in weeks),
                ),
                rows=tuple(
                    {
                        "kind": format_kind(each.kind),
                        "runs": each.runs,
                        **{format_week(week): each.by_week.get(week, 0) for week in weeks},
                        "is_fault": int(each.is_fault),
                        "is_healthy": int(each.kind == "healthy"),
                    }
                    for each in fleet.verdicts
                ),
                notes=_note_earlier_weeks(fleet),
            ),
        )
        if fleet.verdicts
        else (),
    )


def _collect_content(fleet: Fleet, places: Sequence[str]) -> dict[str, Any]:
    return {
        "schema": 1,
        "places": list(places),
        "sentences": describe_standouts(fleet),
        "coverage": fleet.coverage,
        "level": LEVEL,
        "late": _collect_ranking(fleet.late) | {"runs": fleet.with_late_ranks},
        "links": _collect_ranking(fleet.links),
        "faults": _collect_ranking(fleet.faults),
        "models": [
            {
                "model": each.key.model,
                "digest": each.key.digest,
                "ranks": each.key.ranks,
                "week": _iso(each.week),
                "runs": each.runs,
                "step_ns": each.step_ns,
                "lowest_ns": each.lowest_ns,
                "highest_ns": each.highest_ns,
                "exposed_ns": each.exposed_ns,
            }
            for each in fleet.models
        ],
        "verdicts": [
            {
                "kind": each.kind,
                "code": each.code or None,
                "is_fault": each.is_fault,
                "runs": each.runs,
                "by_week": dict(sorted((format_week(week), number) for week, number in each.by_week.items())),
            }
            for each in fleet.verdicts
        ],
        "runs": [asdict(run) | {"week": _iso(run.week)} for run in fleet.runs],
    }


def _collect_ranking(ranking: Ranking) -> dict[str, Any]:
    return {
        "standouts": [_collect_standout(each) for each in ranking.standouts],
        "explained": [{"kind": kind, "name": name} for kind, name in ranking.explained],
        "counts": {
            kind: [
                {
                    "name": count.name,
                    "runs": count.draws,
                    "named": count.named,
                    "expected": count.expected,
                    "p_value": count.p_value,
                    "chance": count.chance,
                    "has_enough_draws": count.has_enough_draws,
                }
                for count in counts
                if count.named
            ]
            for kind, counts in ranking.counts.items()
        },
    }


def _collect_standout(standout: Standout) -> dict[str, Any]:
    count = standout.count
    return {
        "kind": standout.kind,
        "name": standout.name,
        "or_ranks": list(standout.or_ranks),
        "named": count.named,
        "expected": count.expected,
        "chance": count.chance,
    }


def _iso(week: date | None) -> str | None:
    return None if week is None else week.isoformat()
