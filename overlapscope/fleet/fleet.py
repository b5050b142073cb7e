"""A fleet: many runs, who stands out in them, step time by model and week, and how runs end by week."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from typing import NamedTuple

import numpy as np

from overlapscope.fleet.fleet_run import FleetRun
from overlapscope.fleet.run_figures import NO_VERDICT
from overlapscope.fleet.standouts import (
    PLACES,
    Kind,
    LinkOccasion,
    Occasion,
    Place,
    Ranking,
    name_place,
    rank_links,
    rank_occasions,
)


class ModelKey(NamedTuple):
    """Runs of one model on equally many ranks, whose step times can be compared."""

    model: str
    digest: str
    ranks: int


@dataclass(frozen=True, kw_only=True)
class ModelWeek:
    """Mean steps of the runs of one model in one week, each run counting once. Times are nanoseconds."""

    key: ModelKey
    week: date | None
    """Monday of the week; None if it is unknown when the runs started."""
    runs: int
    step_ns: float
    lowest_ns: float
    highest_ns: float
    exposed_ns: float

    @property
    def exposed_share(self) -> float:
        """Return exposed communication as a share of the step."""
        return self.exposed_ns / self.step_ns if self.step_ns else float("nan")


@dataclass(frozen=True, kw_only=True)
class VerdictWeeks:
    """How many runs ended with one kind of verdict."""

    kind: str
    code: str
    """Code of the verdict; empty if there is none."""
    is_fault: bool
    runs: int
    by_week: Mapping[date | None, int]


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """How many runs there are, and of how many something is missing, so that they don't count everywhere."""

    found: int
    copies: int
    read: int
    running: int
    unreadable: int
    damaged: int
    """Read, and a part of them is missing or unreadable."""
    not_judged: int
    """Read, and there is no verdict, as collectives were not recorded."""
    undecided: int
    """Read and judged, and the evidence is not enough for a verdict."""
    without_steps: int
    """Read, and no mean step can be taken."""
    not_compared: int
    """Read, and ranks can't be compared with each other, so that nobody could be found late."""
    without_hosts: int
    """Compared, and hosts of some ranks are unknown."""
    without_date: int
    """Read, and it is unknown when they started."""


@dataclass(frozen=True, kw_only=True)
class Appearance:
    """Runs in which a host, device or rank took part and could have been found late."""

    runs: int
    late: int
    saving_ns: float
    """What fixing the findings that name it would save per step, as a mean of the runs in which it is late."""
    hosts: int
    """Number of hosts that it was on when it was late, as far as they are known."""
    first: date | None
    """Week of the first run in which it is late."""
    last: date | None


class Fleet:
    """Many runs together; each result is computed on first access.

    Args:
        runs: each run once.
        copies: how many further copies of them there are.
    """

    def __init__(self, runs: Sequence[FleetRun], copies: int = 0) -> None:
        self.runs = tuple(runs)
        self.copies = copies
        self.read = tuple(run for run in self.runs if run.state == "read")

    @cached_property
    def coverage(self) -> Coverage:
        """Count the runs of which something is missing."""
        compared = [run for run in self.read if run.compared]
        figures = [run.figures for run in self.read if run.figures is not None]
        return Coverage(
            found=len(self.runs) + self.copies,
            copies=self.copies,
            read=len(self.read),
            running=sum(run.state == "running" for run in self.runs),
            unreadable=sum(run.state == "unreadable" for run in self.runs),
            damaged=sum(run.errors > 0 for run in self.read),
            not_judged=sum(each.kind == NO_VERDICT for each in figures),
            undecided=sum(each.kind != NO_VERDICT and not each.has_enough_evidence for each in figures),
            without_steps=sum(each.step_ns is None for each in figures),
            not_compared=len(self.read) - len(compared),
            without_hosts=sum(not _to_occasion(run).has_hosts for run in compared),
            without_date=sum(run.week is None for run in self.read),
        )

    @cached_property
    def weeks(self) -> tuple[date, ...]:
        """Return the Mondays of all weeks in which a run started, in order."""
        return tuple(sorted({run.week for run in self.read if run.week is not None}))

    @cached_property
    def late(self) -> Ranking:
        """Find who is late in more runs than by chance."""
        return rank_occasions([_to_occasion(run) for run in self.read if run.compared])

    @cached_property
    def faults(self) -> Ranking:
        """Find who is named by more faults than by chance, of those that a host may cause."""
        return rank_occasions(
            [Occasion(places=run.places, named=frozenset(run.at_fault) & {*run.ranks}) for run in self.read]
        )

    @cached_property
    def links(self) -> Ranking:
        """Find the links between hosts that are slow in more runs than by chance."""
        return rank_links([_to_link_occasion(run) for run in self.read if run.host_links])

    @cached_property
    def appearances(self) -> Mapping[tuple[Kind, str], Appearance]:
        """Return in how many runs each host, device and rank could have been late, and was."""
        seen: Counter[tuple[Kind, str]] = Counter()
        late: dict[tuple[Kind, str], list[tuple[FleetRun, float]]] = defaultdict(list)
        hosts: dict[tuple[Kind, str], set[str]] = defaultdict(set)
        for run in self.read:
            places = run.places
            keys = {rank: _list_keys(places[rank], rank) for rank in run.compared}
            seen.update({key for of_rank in keys.values() for key in of_rank})
            savings: dict[tuple[Kind, str], float] = defaultdict(float)
            for finding in run.late:
                for key in {key for rank in finding.ranks for key in keys.get(rank, ())}:
                    savings[key] += finding.saving_ns
            for rank in run.late_ranks & keys.keys():
                for key in keys[rank]:
                    hosts[key].add(places[rank].host)
            for key, saving_ns in savings.items():
                late[key].append((run, saving_ns))
        return {key: _summarize_appearances(number, late[key], hosts[key] - {""}) for key, number in seen.items()}

    @property
    def with_late_ranks(self) -> int:
        """Return the number of runs in which a rank is late."""
        return sum(bool(run.late_ranks) for run in self.read if run.compared)

    @cached_property
    def models(self) -> tuple[ModelWeek, ...]:
        """Return the mean step of each model by week, models with most runs first."""
        groups: dict[ModelKey, dict[date | None, list[FleetRun]]] = defaultdict(lambda: defaultdict(list))
        for run in self.read:
            if run.figures is not None and run.figures.step_ns is not None:
                key = ModelKey(run.model or "unknown model", run.model_digest, run.world_size or len(run.ranks))
                groups[key][run.week].append(run)
        ordered = sorted(groups.items(), key=lambda item: (-sum(map(len, item[1].values())), item[0]))
        return tuple(
            _summarize_week(key, week, runs)
            for key, weeks in ordered
            for week, runs in sorted(weeks.items(), key=lambda item: (item[0] is None, item[0] or date.min))
        )

    @cached_property
    def verdicts(self) -> tuple[VerdictWeeks, ...]:
        """Return how many runs ended with each kind of verdict by week, the most frequent first."""
        groups: dict[str, list[FleetRun]] = defaultdict(list)
        for run in self.read:
            if run.figures is not None:
                groups[run.figures.kind].append(run)
        found = [
            VerdictWeeks(
                kind=kind,
                code=runs[0].code,
                is_fault=any(run.figures is not None and run.figures.is_fault for run in runs),
                runs=len(runs),
                by_week=Counter(run.week for run in runs),
            )
            for kind, runs in groups.items()
        ]
        return tuple(sorted(found, key=lambda each: (-each.runs, each.kind)))


def _to_occasion(run: FleetRun) -> Occasion:
    places = run.places
    compared = {rank: places[rank] for rank in run.compared if rank in places}
    return Occasion(places=compared, named=run.late_ranks & compared.keys())


def _to_link_occasion(run: FleetRun) -> LinkOccasion:
    pairs = {(each.sender, each.receiver): each for each in run.host_links}
    return LinkOccasion(
        links={pair: each.links for pair, each in pairs.items()},
        slow={pair: each.slow for pair, each in pairs.items() if each.slow},
    )


def _list_keys(place: Place, rank: int) -> list[tuple[Kind, str]]:
    return [(kind, name) for kind in PLACES if (name := name_place(kind, rank, place))]


def _summarize_appearances(runs: int, late: Sequence[tuple[FleetRun, float]], hosts: Collection[str]) -> Appearance:
    weeks = sorted(week for run, _ in late if (week := run.week) is not None)
    return Appearance(
        runs=runs,
        late=len(late),
        hosts=len(hosts),
        saving_ns=float(np.mean([saving_ns for _, saving_ns in late])) if late else float("nan"),
        first=weeks[0] if weeks else None,
        last=weeks[-1] if weeks else None,
    )


def _summarize_week(key: ModelKey, week: date | None, runs: Iterable[FleetRun]) -> ModelWeek:
    figures = [run.figures for run in runs if run.figures is not None]
    steps_ns = [each.step_ns for each in figures if each.step_ns is not None]
    return ModelWeek(
        key=key,
        week=week,
        runs=len(steps_ns),
        step_ns=float(np.mean(steps_ns)),
        lowest_ns=min(steps_ns),
        highest_ns=max(steps_ns),
        exposed_ns=float(np.mean([each.exposed_ns or 0.0 for each in figures])),
    )


def select_since(runs: Iterable[FleetRun], first_day: date | None) -> list[FleetRun]:
    """Return the runs that started on a day or later, and those of which that is unknown."""
    if first_day is None:
        return [*runs]
    return [run for run in runs if run.day is None or run.day >= first_day]
