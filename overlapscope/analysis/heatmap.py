"""Every rank in every step as a map: how long it computes, how late it arrives, how long it waits for later ranks.

A thousand ranks by ten thousand steps are more cells than a screen has pixels, so neighbours share a cell. It shows
their *maximum*: a mean would hide the one slow step of the one slow rank that the map is there for. Steps that have
no cycle leave a gap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import pandas as pd

from overlapscope.account.critical_path import JobAccount
from overlapscope.account.intervals import Int64Array
from overlapscope.analysis.cycles import CAUSES, GROUPS, Cycles, causes_of, middle_ranks

Figure = Literal["compute", "lateness", "wait"]
Grouping = Literal["ranks", "hosts"]

MAX_ROWS: Final = 512
MAX_COLUMNS: Final = 1_000

NOTHING: Final = int(np.iinfo(np.int64).min)
"""The value of a cell without a cycle."""

HIGH_QUANTILE: Final = 0.99
"""Cells above this quantile need not be told apart: a single pause would leave everything else without contrast."""

LEAST_RANGE_SHARE: Final = 0.1
"""A scale covers at least this share of the step time; else the noise of a healthy run would look like trouble."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Grid:
    """Which ranks and steps share a cell. Rows hold as many ranks or hosts as it takes to fit."""

    names: tuple[str, ...]
    """Names of ranks or hosts, from top to bottom."""
    each: int
    """How many of these share a row."""
    order: Int64Array
    """(R,) places of ranks from top to bottom."""
    row_edges: Int64Array
    """(rows + 1,) a row holds the ranks ``order[row_edges[row] : row_edges[row + 1]]``."""
    first_step: int
    steps_each: int
    """How many step numbers share a column."""
    column_edges: Int64Array
    """(columns + 1,) places of steps; a column without any is a gap."""

    def maxima(self, values: Int64Array) -> Int64Array:
        """The largest of the values (R, S) of each cell (rows, columns), or ``NOTHING``."""
        pooled = np.full((len(self.row_edges) - 1, len(self.column_edges) - 1), NOTHING)
        begins, ends = self.column_edges[:-1], self.column_edges[1:]
        by_row = np.maximum.reduceat(values[self.order], self.row_edges[:-1], axis=0)
        pooled[:, ends > begins] = np.maximum.reduceat(by_row, begins[ends > begins], axis=1)
        return pooled

    def places(self, row: int, column: int) -> tuple[Int64Array, Int64Array]:
        """Which ranks and steps share a cell, by place; no steps in a gap."""
        ranks = self.order[self.row_edges[row] : self.row_edges[row + 1]]
        return ranks, np.arange(self.column_edges[column], self.column_edges[column + 1])

    def peak(self, values: Int64Array, row: int, column: int) -> tuple[int, int] | None:
        """Place of the rank and of the step with the largest value of a cell; None in a gap."""
        ranks, steps = self.places(row, column)
        if not len(steps):
            return None
        rank, step = divmod(int(values[np.ix_(ranks, steps)].argmax()), len(steps))
        return int(ranks[rank]), int(steps[step])


class Heatmap:
    """The figures of all ranks (R,) and steps (S,).

    Args:
        hosts: by rank.
        figures: of each of these ranks and steps, from ``figures_of``; of others as well.
        step_time_ns: of the mean step.
        job: what each step waited for, if that is known.
    """

    def __init__(
        self, cycles: Cycles, hosts: dict[int, str], figures: pd.DataFrame, step_time_ns: float, job: JobAccount | None
    ) -> None:
        self.ranks, self.steps = cycles.ranks, cycles.steps
        self.hosts = tuple(hosts.get(rank, "unknown") for rank in cycles.ranks.tolist())
        self.figures_ns: dict[Figure, Int64Array] = {
            "compute": self._cells_of(figures, "compute_ns"),
            "lateness": np.ascontiguousarray(cycles.lateness_ns.T),
            "wait": self._cells_of(figures, "exposed_later_rank_ns"),
        }
        """(R, S). Lateness counts from the median rank: it is negative for those that arrive before it."""
        self.step_time_ns = step_time_ns
        self.groupings: tuple[Grouping, ...] = ("ranks", "hosts") if len(set(self.hosts)) > 1 else ("ranks",)
        """Hosts only if there are several."""
        self._own_ns = cycles.own_ns
        self._job = job

    def _cells_of(self, figures: pd.DataFrame, column: str) -> Int64Array:
        """(R, S) of a column, with 0 for a step that a rank has not finished."""
        cells = np.zeros((len(self.ranks), len(self.steps)), dtype=np.int64)
        shown = figures[figures["rank"].isin(self.ranks) & figures["step"].isin(self.steps)]
        cells[np.searchsorted(self.ranks, shown["rank"]), np.searchsorted(self.steps, shown["step"])] = shown[column]
        return cells

    def path_of(self, step: int) -> tuple[dict[int, int], int] | None:
        """What a step, by place, waited for.

        Returns:
            For how long the critical path is on which rank, the longest first, and for how long it is on transfers, in
            nanoseconds; None if that is not known.
        """
        number = self.steps[step]
        if self._job is None or number not in self._job.steps:
            return None
        row = int(np.searchsorted(self._job.steps, number))
        rank_ns = self._job.rank_ns[row]
        order = np.argsort(-rank_ns, kind="stable")
        by_rank = {int(self._job.ranks[place]): int(rank_ns[place]) for place in order if rank_ns[place]}
        return by_rank, int(self._job.end_ns[row] - self._job.start_ns[row] - rank_ns.sum())

    def excess_ns(self, rank: int, step: int) -> dict[str, int]:
        """By cause, how much longer a rank takes than the median rank in a step, both by place; the longest first."""
        own_ns = self._own_ns[:, [step]]
        excess_ns = own_ns[:, 0, rank].copy()
        for group in GROUPS:
            causes = causes_of(group)
            excess_ns[causes] -= own_ns[causes, 0, middle_ranks(own_ns, group)[0]]
        return {CAUSES[cause]: int(excess_ns[cause]) for cause in np.argsort(-excess_ns, kind="stable")}

    def grid(self, grouping: Grouping, max_columns: int = MAX_COLUMNS) -> Grid:
        """How ranks or hosts and steps are put in cells.

        Args:
            max_columns: what a screen has room for. A picture that has to shrink loses whole columns.
        """
        order, names, edges = _ranks_in_order(self.ranks) if grouping == "ranks" else _hosts_in_order(self.hosts)
        each = -(-len(names) // MAX_ROWS)
        first_step, last_step = int(self.steps[0]), int(self.steps[-1])
        steps_each = -(-(last_step - first_step + 1) // min(max_columns, MAX_COLUMNS))
        begins = np.arange(first_step, last_step + 1, steps_each)
        return Grid(
            names=names,
            each=each,
            order=order,
            row_edges=np.append(edges[:-1:each], edges[-1]),
            first_step=first_step,
            steps_each=steps_each,
            column_edges=np.append(np.searchsorted(self.steps, begins), len(self.steps)),
        )

    def scale_ns(self, figure: Figure, cells: Int64Array) -> tuple[int, int]:
        """The range of values over which a scale distinguishes cells.

        It ends where nearly all cells lie below, or, if that is higher, at the usual value of the slowest row: of
        1,024 ranks a slow one has few cells. Larger values look like the end of the scale. The scale of compute begins
        where nearly all cells lie above, the others at 0.
        """
        known = cells[:, (cells != NOTHING).any(axis=0)]
        low_ns = int(np.quantile(known, 1 - HIGH_QUANTILE)) if figure == "compute" else 0
        usual_ns = int(np.median(known, axis=1).max())
        high_ns = max(int(np.quantile(known, HIGH_QUANTILE)), usual_ns)
        return low_ns, max(high_ns, low_ns + round(LEAST_RANGE_SHARE * self.step_time_ns), low_ns + 1)


_Order = tuple[Int64Array, tuple[str, ...], Int64Array]
"""Places of ranks from top to bottom, names of rows before any share one, and where each of these begins and ends."""


def _ranks_in_order(ranks: Int64Array) -> _Order:
    return np.arange(len(ranks)), tuple(map(str, ranks.tolist())), np.arange(len(ranks) + 1)


def _hosts_in_order(hosts: tuple[str, ...]) -> _Order:
    """Hosts in the order of their lowest ranks."""
    number_of = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    number = np.array([number_of[host] for host in hosts])
    order = np.argsort(number, kind="stable")
    return order, tuple(number_of), np.searchsorted(number[order], np.arange(len(number_of) + 1))
