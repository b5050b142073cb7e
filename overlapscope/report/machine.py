"""Build the section on the machine: what held ranks back or failed while they trained, and what could not be read."""

from __future__ import annotations

from typing import Any, Final

from overlapscope.machine.of_steps import MachineSummary
from overlapscope.machine.text import CONDITION_LABELS, describe_amount, describe_levels, describe_machine, unreadable
from overlapscope.report.report import Column, Section, Table
from overlapscope.text import rank_list

_SHOWN: Final = 12
"""Number of conditions that a terminal shows."""


def build_machine_sections(machine: MachineSummary) -> tuple[Section, ...]:
    """Build the section, if the machine has said anything that is worth a word."""
    notes = tuple(unreadable(*what, ranks) for what, ranks in machine.readings.unreadable.items())
    if not machine.conditions and not notes:
        return ()
    return (
        Section(
            name="machine",
            title="Machine",
            headline=describe_machine(one.condition for one in machine.conditions),
            tables=(_tabulate_conditions(machine),) if machine.conditions else (),
            notes=notes,
        ),
    )


def _tabulate_conditions(machine: MachineSummary) -> Table:
    return Table(
        name="machine",
        title="What the machine said",
        columns=(
            Column("what", "", "text"),
            Column("where", "where", "text"),
            Column("amount_text", "how much", "text"),
            Column("levels", "meanwhile", "text"),
        ),
        rows=tuple(
            {
                "what": CONDITION_LABELS[one.condition.kind],
                "where": f"{rank_list(one.ranks)}: {one.condition.label}" if one.ranks else one.condition.label,
                "amount": one.condition.amount,
                "amount_text": describe_amount(one.condition),
                "levels": describe_levels(one.condition),
            }
            for one in machine.conditions
        ),
        shown=_SHOWN,
        notes=("It may be the cause of a slow step, or beside the point: 'overlapscope stragglers' compares ranks.",),
    )


def collect_machine(machine: MachineSummary) -> dict[str, Any]:
    """Return what the JSON says of the machine."""
    return {
        "conditions": [
            {
                "kind": one.condition.kind,
                "ranks": one.ranks,
                "source": one.condition.source,
                "label": one.condition.label,
                "amount": one.condition.amount,
                "values": one.condition.values,
            }
            for one in machine.conditions
        ],
        "unreadable": [
            {"source": source, "facts": facts, "why": why, "ranks": ranks}
            for (source, facts, why), ranks in machine.readings.unreadable.items()
        ],
    }
