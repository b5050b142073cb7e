"""Tabulate the recommended changes: what each one alone would save."""

from __future__ import annotations

from collections.abc import Sequence

from overlapscope.advice.worth_doing import Improvement
from overlapscope.report.report import Column, Table


def tabulate_improvements(improvements: Sequence[Improvement]) -> Table:
    """Tabulate changes in the order given."""
    return Table(
        name="improvements",
        title="Recommended changes",
        columns=(
            Column("what", "", "text"),
            Column("saves", "saves", "ns"),
            Column("share", "share", "share"),
            Column("step_ns", "of a step of", "ns"),
            Column("saves", "90 % interval", "ns range"),
        ),
        rows=tuple(
            {
                "what": each.what,
                "saves": each.saves,
                "share": each.saves.value / each.step_ns,
                "step_ns": each.step_ns,
                "link": each.link,
                "evidence": each.evidence,
            }
            for each in improvements
        ),
        notes=(
            "Savings are of each change alone, per mean step; of delays in some steps, per step of all, outliers "
            "included.",
        ),
    )
