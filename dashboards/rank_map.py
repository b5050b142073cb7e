"""Heatmap of ranks by steps: compute time, lateness, and time spent waiting for stragglers.

A thousand ranks by ten thousand steps are more cells than a screen has pixels, so neighbors share a cell. It shows
their *maximum*: a mean would hide the one slow step of the one slow rank that the map is made for. Steps without a
cycle leave a gap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import pandas as pd

from overlapscope.breakdown.critical_path import JobBreakdown
from overlapscope.breakdown.spans import Int64Array
from overlapscope.stragglers.cycles import CAUSE_GROUPS, CAUSES, Cycles, find_median_ranks, get_cause_indices

HeatmapFigure = Literal["compute", "lateness", "wait"]
Grouping = Literal["ranks", "hosts"]

MAX_ROWS: Final = 512
MAX_COLUMNS: Final = 1_000

NO_VALUE: Final = int(np.iinfo(np.int64).min)
"""Value of a cell without a cycle."""

HIGH_QUANTILE: Final = 0.99
"""Quantile of cells at which the color scale saturates: a single pause would leave no contrast for everything else."""

MIN_RANGE_SHARE: Final = 0.1
"""Minimum range of a scale as a share of the step time: with less, noise of a healthy run would look like a problem."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Grid:
    """Assignment of ranks and steps to cells. A row holds as many ranks or hosts as needed to fit."""

    names: tuple[str, ...]
    """Names of ranks or hosts, from top to bottom."""
    each: int
    """Number of these that share a row."""
    order: Int64Array
    """(R,) Indices of ranks from top to bottom."""
    row_edges: Int64Array
    """(rows + 1,) A row holds the ranks ``order[row_edges[row] : row_edges[row + 1]]``."""
    first_step: int
    """Number of the first step."""
    steps_per_column: int
    """Number of step numbers that share a column."""
    column_edges: Int64Array
    """(columns + 1,) Indices of steps; a column without steps is a gap."""

    def maxima(self, values: Int64Array) -> Int64Array:
        """Return the maximum of the values (R, S) in each cell (rows, columns), or ``NO_VALUE``.

        Example: with the row edges [0, 2, 3], the order [0, 1, 2] and the column edges [0, 1, 2], the values [[1, 5],
        [4, 2], [3, 6]] give [[4, 5], [3, 6]].
        """
        pooled = np.full((len(self.row_edges) - 1, len(self.column_edges) - 1), NO_VALUE)
        begins, ends = self.column_edges[:-1], self.column_edges[1:]
        by_row = np.maximum.reduceat(values[self.order], self.row_edges[:-1], axis=0)
        pooled[:, ends > begins] = np.maximum.reduceat(by_row, begins[ends > begins], axis=1)
        return pooled

    def places(self, row: int, column: int) -> tuple[Int64Array, Int64Array]:
        """Return the indices of the ranks and of the steps that share a cell; no steps in a gap."""
        ranks = self.order[self.row_edges[row] : self.row_edges[row + 1]]
        return ranks, np.arange(self.column_edges[column], self.column_edges[column + 1])

    def peak(self, values: Int64Array, row: int, column: int) -> tuple[int, int] | None:
        """Return the indices of the rank and the step with the largest value of a cell; None in a gap."""
        ranks, steps = self.places(row, column)
        if not len(steps):
            return None
        rank, step = divmod(int(values[np.ix_(ranks, steps)].argmax()), len(steps))
        return int(ranks[rank]), int(steps[step])


class Heatmap:
    """Heatmap values of all ranks (R,) and steps (S,).

    Args:
        hosts: Host of each rank.
        figures: ``Summary.figures``, of at least these ranks and steps.
        step_time_ns: Mean step time.
        job: Critical path of each step, if it is known.
    """

    def __init__(
        self,
        cycles: Cycles,
        hosts: dict[int, str],
        figures: pd.DataFrame,
        step_time_ns: float,
        job: JobBreakdown | None,
    ) -> None:
        self.ranks, self.steps = cycles.ranks, cycles.steps
        self.hosts = tuple(hosts.get(rank, "unknown") for rank in cycles.ranks.tolist())
        self.figures_ns: dict[HeatmapFigure, Int64Array] = {
            "compute": self._cells_of(figures, "compute_ns"),
            "lateness": np.ascontiguousarray(cycles.lateness_ns.T),
            "wait": self._cells_of(figures, "exposed_straggler_ns"),
        }
        """(R, S) Values by figure. Lateness counts from the median rank: it is negative for ranks that arrive before
        it."""
        self.step_time_ns = step_time_ns
        self.groupings: tuple[Grouping, ...] = ("ranks", "hosts") if len(set(self.hosts)) > 1 else ("ranks",)
        """Available groupings; hosts only if there are several."""
        self._local_ns = cycles.local_ns
        self._job = job

    def _cells_of(self, figures: pd.DataFrame, column: str) -> Int64Array:
        """Return the values (R, S) of a column, with 0 for a step that a rank has not finished."""
        cells = np.zeros((len(self.ranks), len(self.steps)), dtype=np.int64)
        shown = figures[figures["rank"].isin(self.ranks) & figures["step"].isin(self.steps)]
        cells[np.searchsorted(self.ranks, shown["rank"]), np.searchsorted(self.steps, shown["step"])] = shown[column]
        return cells

    def path_of(self, step: int) -> tuple[dict[int, int], int] | None:
        """Return what a step, given by index, waited for.

        Returns:
            Nanoseconds of the critical path on each rank, the longest first, and nanoseconds on transfers; None if
            unknown.
        """
        number = self.steps[step]
        if self._job is None or number not in self._job.steps:
            return None
        row = int(np.searchsorted(self._job.steps, number))
        rank_ns = self._job.rank_ns[row]
        order = np.argsort(-rank_ns, kind="stable")
        by_rank = {int(self._job.ranks[index]): int(rank_ns[index]) for index in order if rank_ns[index]}
        return by_rank, int(self._job.end_ns[row] - self._job.start_ns[row] - rank_ns.sum())

    def excess_ns(self, rank: int, step: int) -> dict[str, int]:
        """Return by cause how much longer a rank takes than the median rank in a step, the longest first.

        Args:
            rank: Index of the rank.
            step: Index of the step.
        """
        local_ns = self._local_ns[:, [step]]
        excess_ns = local_ns[:, 0, rank].copy()
        for group in CAUSE_GROUPS:
            causes = get_cause_indices(group)
            excess_ns[causes] -= local_ns[causes, 0, find_median_ranks(local_ns, group)[0]]
        return {CAUSES[cause]: int(excess_ns[cause]) for cause in np.argsort(-excess_ns, kind="stable")}

    def grid(self, grouping: Grouping, max_columns: int = MAX_COLUMNS) -> Grid:
        """Assign ranks or hosts and steps to cells.

        Args:
            max_columns: What a screen has room for. An image that has to shrink loses whole columns.
        """
        order, names, edges = _order_ranks(self.ranks) if grouping == "ranks" else _order_hosts(self.hosts)
        each = -(-len(names) // MAX_ROWS)
        first_step, last_step = int(self.steps[0]), int(self.steps[-1])
        steps_per_column = -(-(last_step - first_step + 1) // min(max_columns, MAX_COLUMNS))
        begins = np.arange(first_step, last_step + 1, steps_per_column)
        return Grid(
            names=names,
            each=each,
            order=order,
            row_edges=np.append(edges[:-1:each], edges[-1]),
            first_step=first_step,
            steps_per_column=steps_per_column,
            column_edges=np.append(np.searchsorted(self.steps, begins), len(self.steps)),
        )

    def scale_ns(self, figure: HeatmapFigure, cells: Int64Array) -> tuple[int, int]:
        """Return the range of values over which a color scale distinguishes cells.

        It ends above nearly all cells or, if that is higher, at the median of the slowest row: of 1,024 ranks a slow
        one has few cells. Larger values look like the end of the scale. The scale of compute begins below nearly all
        cells, the others at 0.
        """
        known = cells[:, (cells != NO_VALUE).any(axis=0)]
        low_ns = int(np.quantile(known, 1 - HIGH_QUANTILE)) if figure == "compute" else 0
        usual_ns = int(np.median(known, axis=1).max())
        high_ns = max(int(np.quantile(known, HIGH_QUANTILE)), usual_ns)
        return low_ns, max(high_ns, low_ns + round(MIN_RANGE_SHARE * self.step_time_ns), low_ns + 1)


_Order = tuple[Int64Array, tuple[str, ...], Int64Array]
"""Indices of ranks from top to bottom, names of rows before any share one, and the edges of these rows."""


def _order_ranks(ranks: Int64Array) -> _Order:
    return np.arange(len(ranks)), tuple(map(str, ranks.tolist())), np.arange(len(ranks) + 1)


def _order_hosts(hosts: tuple[str, ...]) -> _Order:
    """Order hosts by their lowest ranks."""
    number_of = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    number = np.array([number_of[host] for host in hosts])
    order = np.argsort(number, kind="stable")
    return order, tuple(number_of), np.searchsorted(number[order], np.arange(len(number_of) + 1))
