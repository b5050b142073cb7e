"""Metrics of a fleet as OpenMetrics text: who stands out, how runs end, and the latest week of each model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from overlapscope.fleet.fleet import Fleet, ModelKey, ModelWeek
from overlapscope.interop.open_metrics import Sample, format_families

FAMILIES: Final = {
    "overlapscope_fleet_runs": "How many runs there are, by whether they could be read.",
    "overlapscope_fleet_verdicts": "How many runs ended with each kind of verdict.",
    "overlapscope_fleet_late_runs": "Runs in which a rank on this host was late.",
    "overlapscope_fleet_compared_runs": "Runs in which ranks on this host could have been found late.",
    "overlapscope_fleet_standout": "1 for what is late, slow or at fault in more runs than by chance.",
    "overlapscope_fleet_step_seconds": "Mean time of a step in the latest week of a model.",
    "overlapscope_fleet_exposed_seconds": "Mean exposed communication of a step in the latest week of a model.",
}
"""Help text of each gauge, by its name."""


def format_fleet_metrics(fleet: Fleet) -> str:
    """Format the metrics of a fleet as text."""
    return format_families(FAMILIES, [*_generate_samples(fleet)])


def _generate_samples(fleet: Fleet) -> Iterator[Sample]:
    for state in ("read", "running", "unreadable"):
        number = sum(run.state == state for run in fleet.runs)
        yield Sample("overlapscope_fleet_runs", number, (("state", state),))
    for verdict in fleet.verdicts:
        yield Sample("overlapscope_fleet_verdicts", verdict.runs, (("kind", verdict.kind),))
    for (kind, name), appearance in fleet.appearances.items():
        if kind == "host":
            yield Sample("overlapscope_fleet_late_runs", appearance.late, (("host", name),))
            yield Sample("overlapscope_fleet_compared_runs", appearance.runs, (("host", name),))
    for what, ranking in (("late", fleet.late), ("slow", fleet.links), ("fault", fleet.faults)):
        for each in ranking.standouts:
            yield Sample("overlapscope_fleet_standout", 1, (("what", what), ("kind", each.kind), ("name", each.name)))
    latest: dict[ModelKey, ModelWeek] = {each.key: each for each in fleet.models if each.week}  # weeks are in order
    for key, week in latest.items():
        labels = (("model", key.model), ("digest", key.digest), ("ranks", str(key.ranks)))
        yield Sample("overlapscope_fleet_step_seconds", week.step_ns / 1e9, labels)
        yield Sample("overlapscope_fleet_exposed_seconds", week.exposed_ns / 1e9, labels)
