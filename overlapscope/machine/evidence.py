"""What the machine says about some ranks: conditions that they were under when it mattered, and the others were not.

A condition is evidence, never a proof. It is worth telling if it sets the ranks apart from others, or these steps from
others; what was on all ranks alike explains nothing about one of them, and is a note. Straggler findings and verdicts
go through the same comparison.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from overlapscope.machine.conditions import KIND_OF, Condition, measure_conditions
from overlapscope.machine.readings import MachineReadings, spans_of
from overlapscope.trace.machine_facts import source_kind
from overlapscope.trace.machine_log import MachineLog

_APART: Final = 2.0
"""How many times as much there has to be of a condition to set ranks or times apart."""
_RECENT_NS: Final = 30_000_000_000
_MOST_TOLD: Final = 3


@dataclass(frozen=True, kw_only=True)
class MachineEvidence:
    """A condition on sources of some ranks, compared with the rest."""

    ranks: tuple[int, ...]
    """Those of the ranks in question that use the source."""
    condition: Condition
    others: float | None
    """The most that there was on sources of this kind that only other ranks use; None if there are none."""
    shared_with: tuple[int, ...]
    """Other ranks that use the same source."""

    @property
    def sets_ranks_apart(self) -> bool:
        """Return True if there was much less of it on other ranks' sources."""
        return self.others is not None and self.condition.amount >= _APART * self.others

    @property
    def sets_times_apart(self) -> bool:
        """Return True if there was much less of it at other times."""
        elsewhere = self.condition.elsewhere
        return elsewhere is not None and self.condition.amount >= _APART * elsewhere

    @property
    def is_alike(self) -> bool:
        """Return True if it says nothing about these ranks: the others were under it as well."""
        return not self.sets_ranks_apart and not self.sets_times_apart


def contrast(
    conditions: Mapping[str, Iterable[Condition]], uses: Mapping[int, Iterable[str]], ranks: Collection[int]
) -> tuple[MachineEvidence, ...]:
    """Compare the conditions of some ranks with those of the others, the most telling first.

    Args:
        conditions: by source.
        uses: sources that each rank uses.
        ranks: the ranks in question.
    """
    found = list(_compare(conditions, uses, {*ranks}))
    order = {kind: number for number, kind in enumerate(KIND_OF)}
    return tuple(
        sorted(
            found,
            key=lambda one: (one.is_alike, not one.sets_ranks_apart, one.others is None, order[one.condition.kind]),
        )
    )


def _compare(
    conditions: Mapping[str, Iterable[Condition]], uses: Mapping[int, Iterable[str]], ranks: set[int]
) -> Iterator[MachineEvidence]:
    users: dict[str, list[int]] = {}
    for rank, sources in uses.items():
        for source in sources:
            users.setdefault(source, []).append(rank)
    elsewhere = [source for source, using in users.items() if not ranks & {*using}]
    for source, using in users.items():
        own = tuple(rank for rank in using if rank in ranks)
        like = [other for other in elsewhere if source_kind(other) == source_kind(source)]
        for condition in conditions.get(source, ()) if own else ():
            if condition.amount >= KIND_OF[condition.kind].least:
                yield MachineEvidence(
                    ranks=own,
                    condition=condition,
                    others=_find_most(conditions, like, condition.kind),
                    shared_with=tuple(rank for rank in using if rank not in ranks),
                )


def _find_most(conditions: Mapping[str, Iterable[Condition]], sources: Iterable[str], kind: str) -> float | None:
    """Return the largest amount of a condition on some sources; None if it is unknown on all of them."""
    amounts = (one.amount for source in sources for one in conditions.get(source, ()) if one.kind == kind)
    return max(amounts, default=None)


def select_telling(evidence: Iterable[MachineEvidence]) -> tuple[MachineEvidence, ...]:
    """Return the few that set ranks or times apart, one for each kind of source."""
    found: dict[str, MachineEvidence] = {}
    for one in evidence:
        if not one.is_alike:
            found.setdefault(source_kind(one.condition.source), one)
    return tuple(found.values())[:_MOST_TOLD]


@dataclass(frozen=True, kw_only=True)
class MachineState:
    """What one rank knows of the machine: by its own samples, live as well as from its file."""

    uses: tuple[str, ...] = ()
    """Sources that it uses, whoever samples them."""
    recent: tuple[Condition, ...] = ()
    """Conditions of the sources that it has sampled, in its last half minute; elsewhere: before."""
    grave: tuple[Condition, ...] = ()
    """Grave conditions at any time."""


def summarize_log(rank: int, log: MachineLog) -> MachineState:
    """Return what a rank's file says about the end of its recording, or about now."""
    readings = MachineReadings(log.readings, {rank: log.sources})
    last_ns = max((source.end_ns for source in readings.sources.values()), default=0)
    recent = measure_conditions(readings, spans_of((last_ns - _RECENT_NS, last_ns)))
    ever = measure_conditions(readings, spans_of((np.iinfo(np.int64).min // 2, last_ns)))
    return MachineState(
        uses=readings.uses.get(rank, ()),
        recent=tuple(_shorten(one) for found in recent.values() for one in found),
        grave=tuple(
            one
            for found in ever.values()
            for one in found
            if KIND_OF[one.kind].is_grave and one.amount >= KIND_OF[one.kind].least
        ),
    )


def _shorten(condition: Condition) -> Condition:
    """Leave out what nobody needs of a condition that only others are compared with."""
    is_worth_telling = condition.amount >= KIND_OF[condition.kind].least
    return condition if is_worth_telling else replace(condition, elsewhere=None, values={})
